"""Multi-head latent attention in both forms, and attention with sinks: FLOPs, bytes, caches, laws."""

import pytest
from each import each

import costgraph as cg
from costgraph import testing

B, S, D, H, G, K = cg.dims("B S D H G K")
SIZES = {"latent": 5, "nope": 3, "rotated": 2, "value": 4}


def latent(kernel="flash", **options):
    with cg.Graph("g", dtype="bf16") as g:
        x = g.input("x", (B, S, D), grad=True)
        rope = cg.nn.rotary_tables(cg.ops.arange(S), 2)
        g.output(cg.nn.latent_attention(x, H, rope=rope, kernel=kernel, **{**SIZES, **options}))
    return g


# -- latent attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absorbed", [False, True])
def test_latent_attention_param_count(absorbed):
    C, R, N, V = 5, 2, 3, 4
    # queries, the latent vector and the shared key, per-head keys and values, the output projection; and a norm
    plain = D * H * (N + R) + D * (C + R) + C * H * (N + V) + H * V * D + C
    assert (cg.param_count(latent(absorbed=absorbed)) - plain).expand() == 0
    short = cg.param_count(latent(absorbed=absorbed, query_latent=6, bias=True))
    rank = D * 6 + 6 + 6 + 6 * H * (N + R)  # down with a bias, a norm, up
    assert (short - (plain - D * H * (N + R) + rank + (C + R) + D)).expand() == 0


def test_latent_attention_flops_in_both_forms():
    C, R, N, V = 5, 2, 3, 4
    around = 2 * B * S * (D * H * (N + R) + D * (C + R) + H * V * D)
    naive = 2 * B * S * C * H * (N + V) + 2 * B * H * S * S * (N + R + V)
    absorbed = 2 * B * S * H * C * (N + V) + 2 * B * H * S * S * (C + R + C)
    assert (cg.matmul_flops(latent(), count="full") - around - naive).expand() == 0
    assert (cg.matmul_flops(latent(absorbed=True), count="full") - around - absorbed).expand() == 0


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("kernel", ["flash", "eager"])
def test_latent_cache_is_independent_of_heads(absorbed, kernel):
    g = latent(kernel, absorbed=absorbed)
    for step in (cg.prefill(g), cg.decode(g), cg.decode(g, 3)):
        assert cg.cache_bytes(step) == 2 * (5 + 2) * B * S
    assert not any(op.kind.name == "cache" for op in latent(kernel, absorbed=absorbed, cached=False).walk())


@pytest.mark.parametrize(("absorbed", "kernel"), [(False, "flash"), (True, "eager")])
def test_latent_attention_keeps_the_laws(absorbed, kernel):
    testing.check(latent(kernel, absorbed=absorbed, query_latent=2), B=2, S=3, D=2, H=2)


def test_contiguous_values_free_the_joint_projection():
    def saved_bytes_of(**options):
        g = latent(**options)
        with g:
            g.output(cg.reduce(g.outputs.pop(), "b s d -> ", "mean"))
        return sum(cg.saved_bytes(cg.backward(g)).values())

    # one product yields nope + value elements per head; the copy keeps value only, at 2 bytes
    assert (saved_bytes_of() - saved_bytes_of(contiguous=True) - 2 * B * S * H * SIZES["nope"]).expand() == 0
    testing.check(latent(contiguous=True), B=2, S=5, D=3, H=2)


@pytest.mark.parametrize("absorbed", [False, True])
def test_latent_attention_gradients(absorbed):
    g = latent("eager", absorbed=absorbed)
    with g:
        g.output(cg.reduce(g.outputs.pop(), "b s d -> ", "mean"))
    step = cg.backward(g)
    assert {t.name for t in step.gradients} == {"x", *(t.name for t in g.params)}
    assert (cg.matmul_flops(step) - 3 * cg.matmul_flops(g)).expand() == 0


@each(
    ("options", "text"),
    [
        ({"absorbed": 1}, "latent_attention: absorbed is 1, expected True or False"),
        ({"latent": 0}, "latent: 0, expected a positive integer"),
        ({"kernel": "fast"}, "kernel 'fast', expected one of flash, eager"),
        ({"query_latent": 1.5}, "1.5"),
    ],
)
def test_invalid_latent_attention_raises(options, text):
    with pytest.raises(cg.CostGraphError) as error:
        latent(**options)
    assert text in str(error.value)


def test_latent_attention_requires_three_axes():
    with cg.Graph("g") as g:
        rope = cg.nn.rotary_tables(cg.ops.arange(S), 2)
        with pytest.raises(cg.ShapeError, match=r"expected three axes \(batch, positions, width\)"):
            cg.nn.latent_attention(g.input("x", (S, D)), H, rope=rope, **SIZES)


# -- sinks -----------------------------------------------------------------------------------------------------------


def sunk(kernel, sinks=True):
    with cg.Graph("g") as g:
        q = g.input("q", (B, H, S, K), grad=True)
        k, v = (g.input(n, (B, G, S, K), grad=True) for n in "kv")
        g.output(cg.attention(q, k, v, sinks=g.param("sinks", (H,)) if sinks else None, kernel=kernel))
        g.assume("H >= G")
    return g


@pytest.mark.parametrize("kernel", ["flash", "eager"])
def test_sink_costs_three_ops_and_one_exp_per_row(kernel):
    with_one, without = sunk(kernel), sunk(kernel, sinks=False)
    assert cg.matmul_flops(with_one) == cg.matmul_flops(without)
    # the maximum with the row's maximum, the difference, its exp, and its term in the sum
    assert (cg.flops(with_one) - cg.flops(without) - 4 * B * H * S).expand() == 0
    assert cg.bytes_moved(with_one, fused=True) - cg.bytes_moved(without, fused=True) == 4 * H


@pytest.mark.parametrize("kernel", ["flash", "eager"])
def test_attention_with_sinks_keeps_the_laws(kernel):
    testing.check(sunk(kernel), B=2, H=4, G=2, S=3, K=2)


def test_sinks_are_layer_parameters():
    with cg.Graph("g") as g:
        g.output(cg.nn.self_attention(g.input("x", (B, S, D)), H, K, groups=G, sinks=True))
    assert (cg.param_count(g) - (2 * D * H * K + 2 * D * G * K + H)).expand() == 0


def test_sinks_require_one_value_per_head():
    with cg.Graph("g") as g:
        q, k = g.input("q", (B, 6, S, K)), g.input("k", (B, 3, S, K))
        with pytest.raises(cg.ShapeError, match="expected one for each of 6 heads"):
            cg.attention(q, k, k, sinks=g.input("s", (3,)))
        with pytest.raises(cg.GraphError, match="attention: sinks is 1, expected a tensor"):
            cg.attention(q, k, k, sinks=1)
