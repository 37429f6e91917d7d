"""Size formulas as lowered scalars: torch computes the value of the formula."""

import pytest

torch = pytest.importorskip("torch")

import costgraph as cg  # noqa: E402
from costgraph.torch.lowering import lower  # noqa: E402

torch.set_num_threads(1)

B, S, D, H, K = cg.dims("B S D H K")


def test_composed_attention_equals_torchs():
    with cg.Graph("attention") as g:
        q, k, v = (g.input(n, (B, H, S, K)) for n in "qkv")
        scores = cg.einsum(q, k, "b h s k, b h t k -> b h s t") * K**-0.5
        g.output(cg.einsum(cg.softmax(scores), v, "b h s t, b h t k -> b h s k"))
    tensors = [torch.randn(2, 3, 5, 7, dtype=torch.float32) for _ in "qkv"]
    result = lower(g, B=2, H=3, S=5, K=7)(*tensors)
    torch.testing.assert_close(result, torch.nn.functional.scaled_dot_product_attention(*tensors))


@pytest.mark.parametrize("dtype", ["fp32", "int64"])
@pytest.mark.parametrize(
    ("number", "plain"),
    [(S, 4), (S - 9, -5), (D / S, 3.0), (D / H, 2.4), (S**0.5, 2.0), (D**-0.5, 12**-0.5), (cg.Max(S, D), 12)],
)
def test_size_formulas_lower_to_python_scalars(number, plain, dtype):
    sizes = {"S": 4, "D": 12, "H": 5}
    with cg.Graph("g") as g:
        g.input("sizes", (S, D, H))
        x = g.input("x", (S, D), dtype)
        g.output(x * number, number - x, x / number)
    x = torch.arange(48, dtype=getattr(torch, {"fp32": "float32"}.get(dtype, dtype))).reshape(4, 12)
    results = lower(g, **sizes)(torch.empty(4, 12, 5), x)
    for found, expected in zip(results, (x * plain, plain - x, x / plain), strict=True):
        torch.testing.assert_close(found, expected)
