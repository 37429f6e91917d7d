import pytest
import torch
from each import each
from oracles import counted, pairs
from sympy import expand

import costgraph as cg
from costgraph import GraphError, ShapeError

B, H, G, S, T, K, V, W = cg.dims("B H G S T K V W")


def attention_graph(b, h, g, s, t, k, v, **options):
    with cg.Graph("g", dtype="bf16") as graph:
        q = graph.input("q", (b, h, s, k))
        y = cg.attention(q, graph.input("k", (b, g, t, k)), graph.input("v", (b, g, t, v)), **options)
        graph.output(y)
    return graph


def eager(q, k, v):
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    return torch.softmax(q @ k.mT, -1) @ v


SHAPES = [(2, 4, 4, 5, 5, 3, 3), (2, 6, 2, 5, 5, 3, 7), (1, 4, 1, 1, 11, 5, 5), (2, 6, 3, 3, 11, 5, 2)]


@each("shape", SHAPES)
@each("kernel", ["flash", "eager"])
def test_full_count_matches_torch_flop_counter(shape, kernel):
    b, h, g, s, t, k, v = shape
    graph = attention_graph(*shape, kernel=kernel)
    program = counted(eager, (b, h, s, k), (b, g, t, k), (b, g, t, v))
    assert cg.matmul_flops(graph, "full") == program
    assert graph.outputs[0].shape == (b, h, s, v)
    if h == g and k == v and s == t:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        assert counted(sdpa, (b, h, s, k), (b, g, t, k), (b, g, t, v)) == program


@each("shape", SHAPES)
@each("window", [None, 1, 3, 100])
@each("causal", [True, False])
def test_flash_computes_visible_pairs_and_moves_qkv_and_output(shape, window, causal):
    b, h, g, s, t, k, v = shape
    if window is not None and not causal and s != t:
        with pytest.raises(ShapeError, match="window without causal"):
            attention_graph(*shape, causal=False, window=window)
        return
    graph = attention_graph(*shape, causal=causal, window=window)
    seen = pairs(s, t, causal, window)
    assert cg.matmul_flops(graph) == 2 * (k + v) * b * h * len(seen)
    total = cg.costs(graph).total()
    # scale, maximum, subtraction, sum and division; one exp
    assert (total.pointwise, total.transcendental) == (5 * b * h * len(seen), b * h * len(seen))
    keys = len({j for _, j in seen})
    assert total.read == 2 * (b * h * s * k + b * g * keys * (k + v))
    assert total.written == 2 * b * h * s * v


def test_flash_moves_four_tensors_and_allocates_one():
    graph = attention_graph(B, H, H, S, S, K, K)
    assert cg.bytes_moved(graph) == 2 * 4 * (B * H * S * K)
    assert cg.peak_memory(graph) == 2 * 4 * (B * H * S * K)
    assert cg.matmul_flops(graph) == expand(4 * K * (B * H) * S * (S + 1) / 2)


def test_flash_window_flops_match_closed_form():
    graph = attention_graph(B, H, H, S, S, K, K, window=W)
    for s, w in ((5, 3), (5, 5), (5, 9), (11, 1)):
        bound = {"B": 2, "H": 3, "K": 7, "S": s, "W": w}
        assert cg.matmul_flops(graph, **bound) == 4 * 7 * 2 * 3 * len(pairs(s, s, True, w))


def test_grouped_query_attention_reads_keys_once():
    graph = attention_graph(B, H, G, S, S, K, K)
    bound = {"B": 2, "H": 8, "G": 2, "S": 5, "K": 3}
    assert cg.bytes_moved(graph, **bound) == 2 * (2 * 2 * 8 * 5 * 3 + 2 * 2 * 2 * 5 * 3)
    assert cg.matmul_flops(graph, **bound) == 4 * 3 * 2 * 8 * 15  # 15 pairs in a causal 5 x 5 square


def test_head_merge_is_view_after_flash_and_copy_after_eager():
    for kernel, view in (("flash", True), ("eager", False)):
        with cg.Graph("g") as g:
            q = g.input("q", (B, H, S, K))
            y = cg.rearrange(cg.attention(q, q, q, kernel=kernel), "b h s k -> b s (h k)")
        assert y.is_view is view


def test_eager_computes_full_square_and_writes_scores():
    b, h, s, t, k, v = 2, 3, 5, 11, 7, 13
    graph = attention_graph(b, h, h, s, t, k, v, kernel="eager")
    square = b * h * s * t
    assert cg.matmul_flops(graph) == 2 * (k + v) * square
    total = cg.costs(graph).total()
    # scale, mask, maximum, subtraction, sum and division; one exp
    assert (total.pointwise, total.transcendental) == (6 * square, square)
    inputs = b * h * (s * k + t * k + t * v)
    # scores are written once; scale, mask and softmax read and write them; the last product reads them
    assert cg.bytes_moved(graph) == 2 * (inputs + b * h * s * v + square * 8)
    # peak: two squares, the input and output of scale, mask or softmax; or one square and the result
    assert cg.peak_memory(graph) == 2 * (inputs + max(2 * square, square + b * h * s * v))


def test_eager_without_a_mask_has_no_mask_op():
    names = [op.name for op in attention_graph(2, 3, 3, 5, 5, 7, 7, kernel="eager", causal=False).walk()]
    assert not any("mask" in n for n in names)


@each("kernel", ["flash", "eager"])
def test_softcap_and_dropout_cost_flops_per_score(kernel):
    plain, more = (
        attention_graph(2, 3, 3, 5, 5, 7, 7, kernel=kernel, causal=False, **o)
        for o in ({}, {"softcap": 30.0, "p": 0.1})
    )
    # cap: divide, multiply and one tanh; dropout: mask and scale
    assert cg.flops(more) - cg.flops(plain) == (3 + 2) * 2 * 3 * 5 * 5
    assert cg.matmul_flops(more) == cg.matmul_flops(plain)


@each(
    ("options", "error", "text"),
    [
        ({"kernel": "paged"}, GraphError, "kernel 'paged', expected one of flash, eager"),
        ({"kernel": None}, GraphError, "kernel is None, expected text"),
        ({"causal": None}, GraphError, "causal is None, expected True or False"),
        ({"window": 0}, ShapeError, "window: 0, expected a positive integer"),
        ({"window": 2.5}, ShapeError, "window: size '?2.5"),
        ({"softcap": 0}, GraphError, "softcap 0, expected a positive number"),
        ({"softcap": "30"}, GraphError, "attention: softcap is '30', expected a number"),
        ({"p": 1}, GraphError, "p=1, expected a number from 0 to below 1"),
        ({"name": "a b"}, GraphError, "'a b': expected (an identifier|identifiers)"),
    ],
)
@each("kernel", ["flash", "eager"])
def test_invalid_options_raise(options, error, text, kernel):
    with pytest.raises(error, match=text):
        attention_graph(2, 3, 3, 5, 5, 7, 7, **{"kernel": kernel, **options})


@each(
    ("shapes", "error", "text"),
    [
        ([(2, 3, 5), (2, 3, 5, 7), (2, 3, 5, 7)], ShapeError, "q is q.*, expected four axes"),
        (
            [(2, 3, 5, 7), (2, 2, 5, 7), (2, 2, 5, 7)],
            ShapeError,
            "3 query heads over 2 key heads, expected a multiple of the key heads",
        ),
        ([(2, 3, 5, 7), (2, 3, 5, 11), (2, 3, 5, 7)], ShapeError, "axis 'k' has size 7 .* and 11"),
        ([(2, 3, 5, 7), (2, 3, 5, 7), (2, 3, 11, 7)], ShapeError, "axis 't' has size 5 .* and 11"),
        ([(2, 4, 5, 7), (2, 2, 5, 7), (2, 4, 5, 7)], ShapeError, "axis 'g' has size 2 .* and 4"),
    ],
)
def test_invalid_shapes_raise(shapes, error, text):
    with cg.Graph("g") as g:
        tensors = [g.input(n, s) for n, s in zip("qkv", shapes, strict=True)]
        with pytest.raises(error, match=text):
            cg.attention(*tensors)


def test_non_tensor_operands_raise():
    with pytest.raises(GraphError, match="attention: q is None, expected a tensor"):
        cg.attention(None, None, None)


def test_error_inside_kernel_leaves_graph_usable():
    g = cg.Graph("g")
    q, k = g.input("q", (2, 3, 5, 7)), g.input("k", (2, 3, 5, 11))
    with pytest.raises(ShapeError):
        cg.attention(q, k, k)
    g.output(cg.attention(q, q, q))
    g.validate()
    assert cg.matmul_flops(g, "full") == 4 * 7 * 2 * 3 * 25
