"""Attention with an additive bias, such as T5's: results and gradients against torch's."""

import pytest

torch = pytest.importorskip("torch")
from lowered import exact  # noqa: E402  # it imports torch

import costgraph as cg  # noqa: E402
from costgraph.torch.lowering import lower  # noqa: E402

torch.set_num_threads(1)

B, H, G, S, T, K = cg.dims("B H G S T K")
POINT = {"B": 2, "H": 6, "G": 3, "S": 5, "T": 7, "K": 3}
NAMES = ("q", "k", "v", "bias")


def declared(shape, kernel, causal):
    with cg.Graph("g", dtype="fp64") as g:
        q = g.input("q", (B, H, S, K), grad=True)
        k, v = (g.input(n, (B, G, T, K), grad=True) for n in "kv")
        bias = g.input("bias", shape, grad=True)
        y = cg.attention(q, k, v, causal=causal, kernel=kernel, bias=bias)
        g.output(cg.reduce(y * y, "b h s k -> ", "sum"))
    return g


SHAPES = [(1, H, S, T), (B, H, S, T), (1, 1, S, T), (1, H, 1, T), (B, 1, 1, T), (1, H, S, 1)]


@pytest.mark.parametrize("kernel", ["flash", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_bias_and_gradient_equal_torchs(shape, kernel):
    """Each shape with a causal and a non-causal kernel."""
    causal = (SHAPES.index(shape) % 2 == 0) == (kernel == "flash")
    g = declared(shape, kernel, causal)
    back = cg.backward(g)
    with back:
        back.outputs.extend(back.gradients.values())
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, 6, 5, 3), (2, 3, 7, 3), (2, 3, 7, 3), tuple(1 if n == 1 else POINT[str(n)] for n in shape)]
    given = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    names = {s.name for t in g.tensors for size in t.shape for s in size.free_symbols}
    point = {n: size for n, size in POINT.items() if n in names}
    with exact():
        loss, *gradients = lower(back, **point)(*(x.clone() for x in given))
    q, k, v, bias = (x.requires_grad_() for x in given)
    scores = q @ k.repeat_interleave(2, 1).mT + bias
    if causal:  # aligned at the last positions: query s sees keys up to s + T - S
        scores = scores.masked_fill(torch.ones(5, 7).tril(2) == 0, -torch.inf)
    expected_output = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    expected = (expected_output**2).sum()
    expected.backward()
    assert torch.allclose(loss, expected)
    for name, found, x in zip([t.name for t in back.gradients], gradients, given, strict=True):
        assert torch.allclose(found, x.grad), name


def test_relative_bias_buckets_match_t5():
    """Nearby keys have a bucket per distance, separate by direction; distant ones share a bucket."""
    with cg.Graph("g", dtype="fp64") as g:
        g.output(cg.nn.relative_bias(cg.ops.arange(S), cg.ops.arange(S), H, buckets=8))
    with exact():
        module = lower(g, S=9, H=1)
    (table,) = module.state_dict().values()
    table.copy_(torch.arange(8.0).reshape(8, 1))
    bucket = module()[0, 0].int()
    assert bucket.diagonal().tolist() == [0] * 9
    # a key just before its query: the bucket after that of the query itself
    assert bucket.diagonal(-1).tolist() == [1] * 8
    assert bucket.diagonal(1).tolist() == [5] * 8  # just after it: 4 buckets belong to earlier keys
    assert bucket.max() <= 7
    assert bucket.min() >= 0
