import pytest
import torch
from each import each
from sympy import expand

import costgraph as cg
from costgraph import GraphError, ShapeError

B, S, T, M, D, E, H, G, K, R, N = cg.dims("B S T M D E H G K R N")


def inputs(graph, **shapes):
    return [graph.input(n, s) for n, s in shapes.items()]


# -- attention biases ----------------------------------------------------------------------------------------------


@each(
    ("shape", "read"),
    [
        # a causal kernel with S queries and keys reads the S*(S + 1)/2 pairs that it computes
        ((1, H, S, S), H * S * (S + 1) / 2),
        ((B, H, S, S), B * H * S * (S + 1) / 2),
        ((1, 1, S, S), S * (S + 1) / 2),
        ((1, H, 1, S), H * S),
        ((1, H, S, 1), H * S),
        ((1, 1, 1, 1), 1),
    ],
)
def test_flash_reads_bias_at_visible_pairs(shape, read):
    with cg.Graph("g", dtype="bf16") as plain:
        plain.output(cg.attention(*inputs(plain, q=(B, H, S, K), k=(B, H, S, K), v=(B, H, S, K))))
    with cg.Graph("g", dtype="bf16") as g:
        q, k, v, bias = inputs(g, q=(B, H, S, K), k=(B, H, S, K), v=(B, H, S, K), bias=shape)
        g.output(cg.attention(q, k, v, bias=bias))
    assert expand(cg.bytes_moved(g) - cg.bytes_moved(plain)) == expand(2 * read)
    assert cg.matmul_flops(g) == cg.matmul_flops(plain)
    assert expand(cg.flops(g) - cg.flops(plain)) == expand(B * H * S * (S + 1) / 2)  # one addition per pair


def test_eager_adds_bias_to_full_square():
    with cg.Graph("g") as g:
        q, k, v, bias = inputs(g, q=(B, H, S, K), k=(B, G, T, K), v=(B, G, T, K), bias=(1, H, S, T))
        g.output(cg.attention(q, k, v, kernel="eager", bias=bias))
    amounts = {r.direction: r.amount.expr for r in cg.costs(g) if r.op == "attention/bias"}
    square = B * H * S * T
    assert amounts == {"compute": square, "read": 4 * square + 4 * H * S * T, "write": 4 * square}


@each("shape", [(S, S), (2, H, S, S), (1, G, S, S), (1, H, S, T)])
def test_bias_with_wrong_shape_raises(shape):
    with cg.Graph("g") as g:
        q, k, v, bias = inputs(g, q=(B, H, S, K), k=(B, H, S, K), v=(B, H, S, K), bias=shape)
        with pytest.raises(ShapeError, match=r"bias bias\(.*expected \(B, H, S, S\), any of which may be 1"):
            cg.attention(q, k, v, bias=bias)
        with pytest.raises(GraphError, match="attention: bias is 3, expected a tensor"):
            cg.attention(q, k, v, bias=3)


def test_causal_bias_gradient_is_written_whole():
    with cg.Graph("g") as g:
        q, k, v = inputs(g, q=(B, H, S, K), k=(B, H, S, K), v=(B, H, S, K))
        y = cg.attention(q, k, v, bias=g.param("bias", (1, H, S, S)))
        g.output(cg.reduce(y, "b h s k -> ", "sum"))
    back = cg.backward(g)
    (made,) = back.gradients.values()
    assert made.shape == (1, H, S, S)
    assert made.domain is None


# -- cross-attention -----------------------------------------------------------------------------------------------


def crossed(**options):
    with cg.Graph("g", dtype="bf16") as g:
        x, memory = inputs(g, x=(B, S, D), memory=(B, M, E))
        g.output(cg.nn.cross_attention(x, memory, H, K, **options))
    return g


def test_cross_attention_flops_and_params():
    g = crossed()
    assert g.outputs[0].shape == (B, S, D)
    assert cg.param_count(g) == 2 * D * H * K + 2 * E * H * K
    # queries and output projection have S positions, keys and values M; two products over all pairs
    expected = 4 * B * S * D * H * K + 4 * B * M * E * H * K + 4 * B * H * S * M * K
    assert cg.matmul_flops(g) == expand(expected)
    assert cg.param_count(crossed(groups=G)) == expand(2 * D * H * K + 2 * E * G * K)
    assert cg.param_count(crossed(bias=True, key_bias=False, out_bias=True)) == expand(
        cg.param_count(g) + 2 * H * K + D
    )


def test_cross_attention_keeps_keys_and_values_for_decode():
    g = crossed()
    kinds = [op.kind.name for op in g.walk()]
    assert kinds.count("cache") == 2
    assert all(op.kind.axis is None for op in g.walk() if op.kind.name == "cache")
    assert "cache" not in [op.kind.name for op in crossed(cached=False).walk()]
    with pytest.raises(GraphError, match="cross_attention: cached is 1, expected True or False"):
        crossed(cached=1)


def test_self_attention_without_key_bias():
    with cg.Graph("g") as g:
        cg.nn.self_attention(*inputs(g, x=(B, S, D)), H, K, causal=False, bias=True, key_bias=False, out_bias=True)
    assert cg.param_count(g) == expand(4 * D * H * K + 2 * H * K + D)


# -- positions, times, patches -------------------------------------------------------------------------------------


def test_relative_bias_costs():
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.nn.relative_bias(cg.ops.arange(S), cg.ops.arange(T), H, buckets=N))
    assert g.outputs[0].shape == (1, H, S, T)
    assert cg.param_count(g) == N * H
    total = cg.costs(g).total()
    # - < abs | / log / * + min | < where | * + : 12 and one logarithm; three casts cost nothing
    assert (total.pointwise, total.transcendental) == (12 * S * T, S * T)
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.nn.relative_bias(cg.ops.arange(S), cg.ops.arange(T), H, buckets=N, bidirectional=False))
    total = cg.costs(g).total()
    assert (total.pointwise, total.transcendental) == (10 * S * T, S * T)


def test_invalid_positions_raise():
    with cg.Graph("g") as g:
        x = g.input("x", (S,))
        with pytest.raises(ShapeError, match=r"positions x\(S; fp32\), expected integers with one axis"):
            cg.nn.relative_bias(cg.ops.arange(S), x, H)
        with pytest.raises(ShapeError, match="expected one axis"):
            cg.nn.timestep_embedding(g.input("t", (B, S)), 8)
        with pytest.raises(ShapeError, match="expected four axes"):
            cg.nn.patch_embedding(x, 4, D)
        with pytest.raises(GraphError, match="relative_bias: bidirectional is 1, expected True or False"):
            cg.nn.relative_bias(cg.ops.arange(S), cg.ops.arange(S), H, bidirectional=1)


def test_timestep_embedding_costs():
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.nn.timestep_embedding(g.input("t", (B,), "int64"), 2 * K))
    total = cg.costs(g).total()
    assert (total.pointwise, total.transcendental) == (B * K, 2 * B * K)
    assert g.outputs[0].dtype.name == "bf16"
    assert cg.param_count(g) == 0  # the frequencies are a buffer


@each(("side", "patch"), [(23, 5), (224, 16), (7, 7), (11, 1)])
def test_patch_embedding_counts_whole_patches(side, patch):
    with cg.Graph("g") as g:
        g.output(cg.nn.patch_embedding(g.input("x", (B, 3, R, R)), patch, D))
    count = (side // patch) ** 2  # remaining pixels belong to no patch
    assert cg.evaluate(g.outputs[0].shape[1], R=side) == count
    assert cg.matmul_flops(g, R=side, B=2, D=13) == 2 * 2 * count * 13 * 3 * patch**2
    assert cg.param_count(g) == D * (3 * patch**2 + 1)


def test_adding_positions_keeps_patch_layout():
    """Convolution outputs are channel-strided, and adding dense positions keeps that layout in torch."""
    images = torch.zeros(2, 3, 23, 23)
    patches = torch.nn.Conv2d(3, 7, 5, 5)(images).flatten(2).transpose(1, 2) + torch.zeros(1, 16, 7)
    with cg.Graph("g") as g:
        x = cg.nn.patch_embedding(g.input("x", (B, 3, R, R)), 5, D)
        y = x + g.param("positions", (1, *x.shape[1:]))
    assert patches.stride() == (7 * 16, 1, 16)
    assert y.strides == (y.sizes[1] * y.sizes[2], 1, y.sizes[1])
