"""Contractions: shapes, FLOPs and touched operand elements, counted position by position."""

from itertools import combinations

import numpy as np
import opt_einsum
import pytest
import torch
from budget import drawing
from each import each
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import graph_of, index_points, pairs, touched

import costgraph as cg
from costgraph import GraphError, PatternError, ShapeError

B, S, D, F, H, W, C, R, O, N = cg.dims("B S D F H W C R O N")
SIZES = {"b": 2, "s": 3, "d": 5, "f": 7, "h": 11, "k": 13, "t": 3}


def made(pattern, *shapes, **options):
    with cg.Graph("g") as g:
        g.output(cg.einsum(*(g.input(f"x{i}", s) for i, s in enumerate(shapes)), pattern, **options))
    return g


@each(
    "pattern",
    [
        "b d, d f -> b f",
        "b s d, d f -> b s f",
        "b s d, b t d -> b s t",
        "b d, b d -> b",
        "b d, b d -> ",
        "b, d -> b d",
        "b d, b d -> b d",
        "b d, f -> b d f",
        "b s, s -> s",
        "b d, d -> ",
    ],
)
def test_einsum_flops_per_index_point(pattern):
    left = pattern.split("->")[0].split(",")
    g = made(pattern, *(tuple(SIZES[a] for a in part.split()) for part in left))
    assert cg.flops(g) == index_points(pattern, SIZES)
    summed = set(left[0].split() + left[1].split()) - set(pattern.split("->")[1].split())
    # a contraction is a matmul, a product without summed axes is pointwise
    assert cg.matmul_flops(g) == (cg.flops(g) if summed else 0)


@each(
    ("pattern", "shapes", "options", "equation", "result"),
    [
        ("b s (h k), (h k) d -> b s d", ((2, 3, 10), (10, 7)), {"h": 2}, "abc,cd->abd", (2, 3, 7)),
        ("b s d, d (h k) -> b h s k", ((2, 3, 5), (5, 6)), {"h": 2}, None, (2, 2, 3, 3)),
        ("... d, d f -> ... f", ((2, 3, 5), (5, 7)), {}, "abc,cd->abd", (2, 3, 7)),
        ("... i k, ... k j -> ... i j", ((2, 3, 5), (3, 5, 7))[::1], {}, None, None),
        ("b 1 d, d f -> b f 1", ((2, 1, 5), (5, 7)), {}, None, (2, 7, 1)),
    ],
)
def test_einsum_with_merged_axes_ellipsis_and_ones(pattern, shapes, options, equation, result):
    if result is None:  # batch axes align from the right, as in NumPy
        shapes = ((2, 3, 5, 7), (3, 7, 11))
        result = np.matmul(np.ones(shapes[0]), np.ones(shapes[1])).shape
    g = made(pattern, *shapes, **options)
    assert g.outputs[0].shape == result
    if equation is not None:
        assert np.einsum(equation, *(np.ones(s) for s in shapes)).shape == result
        assert cg.flops(g) == 2 * np.prod([*shapes[0], shapes[1][1]])


def test_repeated_operand_is_read_once():
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        g.output(cg.einsum(x, x, "b d, c d -> b c"))
    assert cg.flops(g) == 2 * 3 * 3 * 5  # (b, c, d)
    assert cg.bytes_moved(g) == 4 * (3 * 5) + 4 * (3 * 3)  # x once, the result


def test_operand_and_its_transpose_are_read_once():
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        g.output(x @ x.T)
    assert cg.bytes_moved(g) == 4 * 15 + 4 * 9


def test_broadcast_operand_is_read_at_its_own_size():
    with cg.Graph("g") as g:
        w = cg.ops.expand(g.param("w", (5, 7)), "d f -> b d f", b=11)
        g.output(cg.einsum(g.input("x", (11, 3, 5)), w, "b s d, b d f -> b s f"))
    assert cg.bytes_moved(g) == 4 * (11 * 3 * 5 + 5 * 7 + 11 * 3 * 7)


def test_diagonal_reads_only_the_diagonal():
    g = made("i i, i -> i", (5, 5), (5,))
    assert cg.flops(g) == 5
    assert cg.bytes_moved(g) == 4 * (5 + 5 + 5)  # diagonal, vector, result


def test_single_operand_is_a_sum_or_a_view():
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        summed, turned = cg.einsum(x, "b d -> d"), cg.einsum(x, "b d -> d b")
        g.output(summed)
    assert cg.flops(g) == 15  # one FLOP per reduced element
    assert turned.is_view


# -- contraction orders ------------------------------------------------------------------------------------------


def test_explicit_contraction_order_determines_flops():
    shapes = (2, 3), (3, 5), (5, 7)
    left = made("a b, b c, c d -> a d", *shapes, order=((0, 1), (0, 1)))
    right = made("a b, b c, c d -> a d", *shapes, order=((1, 2), (0, 1)))
    assert cg.flops(left) == 2 * 2 * 3 * 5 + 2 * 2 * 5 * 7  # (ab,bc) then (ac,cd)
    assert cg.flops(right) == 2 * 3 * 5 * 7 + 2 * 2 * 3 * 7  # (bc,cd) then (ab,bd)
    assert len(left.ops) == 2


_NAMES = "abcdef"


@st.composite
def networks(draw):
    operands = draw(
        st.lists(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3, unique=True), min_size=3, max_size=4)
    )
    used = sorted({n for o in operands for n in o})
    result = draw(st.lists(st.sampled_from(used), max_size=3, unique=True))
    sizes = {n: draw(st.integers(2, 9)) for n in used}
    return operands, result, sizes


def paths(n):
    if n == 1:
        yield ()
    for pair in combinations(range(n), 2):
        for rest in paths(n - 1):
            yield (pair, *rest)


def best(operands, result, sizes):
    """Return the minimum cost over all paths, charged as in opt_einsum, whose own search is incomplete."""
    equation = ",".join("".join(o) for o in operands) + "->" + "".join(result)
    shapes = [tuple(sizes[n] for n in o) for o in operands]
    charged = (opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=p)[1] for p in paths(len(shapes)))
    return min(int(info.opt_cost) for info in charged)


@given(networks())
@settings(max_examples=120, deadline=None)
def test_chosen_order_costs_what_opt_einsum_finds_optimal(network):
    operands, result, sizes = network
    pattern = f"{', '.join(' '.join(o) for o in operands)} -> {' '.join(result)}"
    g = made(pattern, *(tuple(sizes[n] for n in o) for o in operands))
    assert cg.flops(g) == best(operands, result, sizes)


@given(networks(), st.data())
@settings(max_examples=60, deadline=None)
def test_min_over_orders_is_optimal_at_every_size(network, data):
    operands, result, sizes = network
    symbols = {n: cg.dims(f"N{n}") for n in sizes}
    pattern = f"{', '.join(' '.join(o) for o in operands)} -> {' '.join(result)}"
    g = made(pattern, *(tuple(symbols[n] for n in o) for o in operands))
    for _ in range(3):
        point = {n: data.draw(st.integers(1, 60), label=n) for n in sizes}
        assert cg.flops(g, **{f"N{n}": v for n, v in point.items()}) == best(operands, result, point)


def test_best_order_changes_with_the_batch():
    g = made("b s, s h, h d -> b d", (B, 512), (512, 512), (512, 512))
    # left to right: bs,sh then bh,hd; right first: sh,hd then bs,sd
    assert cg.flops(g, B=64) == 2 * (2 * 64 * 512 * 512)
    assert cg.flops(g, B=4096) == 2 * 512**3 + 2 * 4096 * 512**2
    assert len(cg.regimes(cg.flops(g))) == 2


def test_undecided_order_workspace_is_its_intermediate():
    g = made("b s, s h, h d -> b d", (B, S), (S, H), (H, D))
    b, s, h, d = 3, 5, 7, 11
    inside = max(4 * b * h, 4 * s * d)  # the intermediate in either order, in fp32
    live = 4 * (b * s + s * h + h * d) + 4 * b * d
    assert cg.peak_memory(g, B=b, S=s, H=h, D=d) == live + inside


def test_assumptions_can_decide_contraction_order():
    with cg.Graph("g") as g:
        g.assume("B >= 2*S")
        x, y, z = g.input("x", (B, S)), g.input("y", (S, S)), g.input("z", (S, S))
        g.output(cg.einsum(x, y, z, "b s, s h, h d -> b d"))
    assert len(g.ops) == 2
    assert cg.flops(g, B=10, S=3) == 2 * 3**3 + 2 * 10 * 3**2  # right first: S**3 <= B*S**2/2


# -- affine indices ----------------------------------------------------------------------------------------------


@each("stride", [1, 2, 3, 5])
@each("dilation", [1, 2, 3])
@each("padding", [0, 1, 2, 4])
@each(("size", "window"), [(11, 3), (11, 1), (11, 2), (7, 3), (13, 4)])
def test_affine_index_reads_same_elements_as_convolution(size, window, stride, dilation, padding):
    assert size + 2 * padding >= dilation * (window - 1) + 1  # it fits
    index = f"h*{stride}+r*{dilation}" + (f"-{padding}" if padding else "")
    pattern = f"b c {index}, o c r -> b o h"
    theirs = torch.nn.functional.conv1d(
        torch.empty(2, 3, size), torch.empty(5, 3, window), stride=stride, dilation=dilation, padding=padding
    )
    out = theirs.shape[-1]
    read = 4 * (2 * 3 * touched(size, out, window, stride, dilation, padding) + 5 * 3 * window)
    for length, bound in ((size, {}), (W, {"W": size})):
        g = made(pattern, (2, 3, length), (5, 3, window))
        if not bound:
            assert g.outputs[0].shape == tuple(theirs.shape)
        assert cg.flops(g, **bound) == 2 * 2 * 5 * out * 3 * window
        assert cg.costs(g, **bound).filter(direction="read").total().read == read


def test_index_term_order_does_not_matter():
    for text in ("h*3+r", "r+h*3"):
        g = made(f"{text}, r -> h", (11,), (2,))
        assert cg.costs(g).total().read == 4 * (touched(11, 4, 2, 3, 1, 0) + 2)


def test_positive_index_offset_skips_leading_positions():
    g = made("h+2, d -> h d", (7,), (3,))
    assert g.outputs[0].shape == (5, 3)  # x[2] ... x[6]
    assert cg.costs(g).total().read == 4 * (5 + 3)


@each("size", [5, 6, 7, 9])
def test_2d_window_touches_product_of_its_axes(size):
    g = made("b c h*2+r-1 w*3+q, o c r q -> b o h w", (2, 3, size, W), (5, 3, 3, 2))
    out = [(size + 2 - 3) // 2 + 1, (8 - 2) // 3 + 1]
    assert tuple(n.subs(W, 8) for n in g.outputs[0].shape) == (2, 5, *out)
    rows, columns = touched(size, out[0], 3, 2, 1, 1), touched(8, out[1], 2, 3, 1, 0)
    assert cg.costs(g, W=8).total().read == 4 * (2 * 3 * rows * columns + 5 * 3 * 3 * 2)


def test_symbolic_window_is_exact_or_raises():
    g = made("h+r, r -> h", (W,), (R,))
    assert cg.costs(g, W=11, R=3).total().read == 4 * (11 + 3)
    with pytest.raises(cg.UnsupportedError, match="expected a window of constant size, to count the elements"):
        cg.bytes_moved(made("h*2+r, r -> h", (W,), (R,)))


# -- domains -----------------------------------------------------------------------------------------------------

_SHAPES = [(1, 1), (5, 5), (7, 7), (3, 7), (1, 7), (7, 3), (6, 11)]
_WINDOWS = [(True, None), (True, 1), (True, 3), (True, 7), (True, 20), (False, 1), (False, 3), (False, 20)]


@each(
    ("queries", "keys", "causal", "window"),
    # a two-sided window needs equally many queries and keys
    [(*shape, *domain) for shape in _SHAPES for domain in _WINDOWS if domain[0] or shape[0] == shape[1]],
)
def test_domain_counts_exactly_the_visible_pairs(queries, keys, causal, window):
    seen = pairs(queries, keys, causal, window)
    rows, columns = len({s for s, _ in seen}), len({t for _, t in seen})
    n, m, w = cg.dims("S T W")
    numeric = (queries, keys, window, {})
    bound = {"S": queries, "T": keys, "W": window}
    symbolic = (n, n if not causal or queries == keys else m, None if window is None else w, bound)
    for q, k, span, values in (numeric, symbolic):
        g = made("b s d, b t d -> b s t", (2, q, 5), (2, k, 5), domain=cg.Domain(causal, span), over=("s", "t"))
        known = {name for t in g.tensors for size in t.shape for name in map(str, size.free_symbols)}
        if span is w:
            known.add("W")
        values = {name: v for name, v in values.items() if name in known}
        assert cg.matmul_flops(g, **values) == 2 * 2 * 5 * len(seen)
        assert cg.matmul_flops(g, "full", **values) == 2 * 2 * 5 * queries * keys
        total = cg.costs(g, **values).total()
        assert total.read == 4 * 2 * 5 * (rows + columns)
        assert total.written == 4 * 2 * len(seen)


def test_score_consumers_inherit_the_domain():
    with cg.Graph("g") as g:
        scores = cg.einsum(
            g.input("q", (5, 3)), g.input("k", (7, 3)), "s d, t d -> s t", domain=cg.Domain(True), over=("s", "t")
        )
        g.output(cg.einsum(cg.relu(scores), g.input("v", (7, 2)), "s t, t v -> s v"))
    seen = len(pairs(5, 7, True, None))
    assert cg.matmul_flops(g) == 2 * 3 * seen + 2 * 2 * seen
    assert cg.costs(g).filter(op="relu").total().pointwise == seen


# -- errors ------------------------------------------------------------------------------------------------------


@each(
    ("pattern", "shapes", "options", "error", "text"),
    [
        ("b d, d f -> b f", [(2, 3), (5, 7)], {}, ShapeError, "axis 'd' has size 3 in operand 1 .* and 5 in operand 2"),
        ("b d, d f -> b f", [(2, 3)], {}, PatternError, "describes 2 operands, got 1"),
        ("b d -> b x", [(2, 3)], {}, PatternError, "axis 'x' of the result is in no operand"),
        ("b d, d f -> b f", [(2, 3), (3, 5)], {"q": 3}, PatternError,
         "size given for 'q', which is not one of its axes"),
        ("b d, d f -> b f", [(2, 3), (3, 5)], {"order": [(0, 1)]}, GraphError, "order= of fewer than three operands"),
        ("b d, d (f g) -> b f", [(2, 3), (3, 5)], {}, ShapeError, r"sizes of f and g in \(f g\) are unknown"),
        ("b d, d (f g) -> b f", [(2, 3), (3, 5)], {"f": 2}, ShapeError, r"does not split into \(f g\)"),
        ("b d, d (f g) -> b f", [(2, 3), (3, 5)], {"f": 2, "g": 2}, ShapeError, r"\(f g\) multiply to 4"),
        ("b d, d -> b", [(2, 3), (3, 5)], {}, ShapeError, "has 2 axes, the pattern 'd' has 1"),
        ("b 1, d -> b", [(2, 3), (3,)], {}, ShapeError, "an axis of size 3 where the pattern has 1"),
        ("h*2+r -> h r", [(7,)], {"r": 3}, PatternError, "needs a second operand"),
        ("i i -> i", [(3, 3)], {}, PatternError, "the diagonal of a single operand"),
        ("h+r, d -> h d", [(7,), (3,)], {}, ShapeError, "sizes of h and r are unknown"),
        ("h+r, r -> h", [(3,), (5,)], {}, ShapeError, "reaches beyond an axis of size 3"),
        ("h+r, r, h -> h", [(7,), (3,), (5,)], {}, GraphError,
         "three or more operands with an affine index or a domain"),
        ("a b, b c, c d -> a d", [(2, 3)] + [(3, 3)] * 2, {"order": [(0, 5)]}, GraphError,
         "step 1: expected two positions"),
        ("a b, b c, c d -> a d", [(2, 3)] + [(3, 3)] * 2, {"order": [(0, 0)]}, GraphError,
         "step 1: expected two positions"),
        ("a b, b c, c d -> a d", [(2, 3)] + [(3, 3)] * 2, {"order": [(0, -1)]}, GraphError,
         "step 1: expected two positions"),
        ("a b, b c, c d -> a d", [(2, 3)] + [(3, 3)] * 2, {"order": [(0, 1)]}, GraphError, "leaves 2 tensors"),
        ("a b, b c, c d -> a d", [(2, 3)] + [(3, 3)] * 2, {"order": 3}, GraphError, "order is 3, expected a list"),
        ("s d, t d -> s t", [(2, 3), (2, 3)], {"domain": cg.Domain(True)}, PatternError,
         "expected a Domain and two axes"),
        ("s d, t d -> s t", [(2, 3), (2, 3)], {"domain": cg.Domain(True), "over": ("s", "q")}, PatternError,
         "two axes"),
        ("s d, t d -> s t", [(2, 3), (2, 3)], {"domain": cg.Domain(True), "over": ("s", "s")}, PatternError,
         "two axes"),
        ("s d, t d -> s t", [(2, 3), (5, 3)], {"domain": cg.Domain(False, 2), "over": ("s", "t")}, ShapeError,
         "window without causal: 2 queries and 5 keys"),
        ("b d, d f -> b f", [(2, 3), (3, 5)], {"dtype": "fp33"}, cg.FormatError, "fp33"),
        (" -> ", [(2,)], {}, ShapeError, "has 1 axes, the pattern '' has 0"),
    ],
)  # fmt: skip
def test_errors_name_place_value_and_expectation(pattern, shapes, options, error, text):
    with pytest.raises(error, match=text):
        made(pattern, *shapes, **options)


def test_nine_operand_einsum_needs_an_order():
    with pytest.raises(GraphError, match="einsum of 9 operands: pass order="):
        made(f"{', '.join(['a a'.replace(' a', '')] * 9)} -> a", *[(2,)] * 9)


def test_invalid_einsum_arguments_raise():
    with pytest.raises(GraphError, match=r"got \(\), expected tensors first and the pattern last"):
        cg.einsum()
    with pytest.raises(GraphError, match=r"got \(str, int\), expected tensors first"):
        cg.einsum("a -> a", 3)


def test_operands_with_different_domains_raise():
    with cg.Graph("g") as g:
        q, k = g.input("q", (5, 3)), g.input("k", (5, 3))
        one, two = (
            cg.einsum(q, k, "s d, t d -> s t", domain=d, over=("s", "t")) for d in (cg.Domain(True), cg.Domain(True, 2))
        )
        with pytest.raises(ShapeError, match="two different domains"):
            cg.einsum(one, two, "s t, s t -> s")


@each(
    ("options", "text"),
    [
        ({"causal": False}, "neither causal nor a window"),
        ({"causal": 1}, "Domain: causal is 1, expected True or False"),
        ({"causal": True, "window": 0}, "window: 0, expected a positive integer"),
        ({"causal": True, "window": 2.5}, "window: size '?2.5'?: expected an integer"),
    ],
)
def test_invalid_domain_options_raise(options, text):
    with pytest.raises(cg.CostGraphError, match=text):
        cg.Domain(**options)


def read(g, **sizes):
    """Return the number of four-byte elements that a graph's ops read."""
    return cg.costs(g, **sizes).total().read // 4


# -- indices with explicit output sizes --------------------------------------------------------------------------


@st.composite
def windows(draw):
    out, stride, window = draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    dilation, offset = draw(st.integers(1, 3)), draw(st.integers(-4, 2))
    last = (out - 1) * stride + (window - 1) * dilation + offset
    size = draw(st.integers(max(2, last + 1 - min(offset, 0)), max(2, last + 1) + 12))  # padding on both sides
    return size, out, stride, window, dilation, offset


@given(windows(), st.booleans(), st.booleans())
@drawing(1500)
def test_fewer_windows_than_fit_read_the_positions_that_they_reach(case, symbolic_size, symbolic_count):
    size, out, stride, window, dilation, offset = case
    classes = {}  # window positions modulo the stride
    for r in range(window):
        classes.setdefault(r * dilation % stride, set()).update(h * stride + r * dilation + offset for h in range(out))
    inside = [{p for p in positions if 0 <= p < size} for positions in classes.values()]
    assume(all(inside))  # some windows touch the operand, not only padding
    index = f"h*{stride}+r*{dilation}" + (f"{offset:+d}" if offset else "")
    with cg.Graph("g") as g:
        x, w = g.input("x", (W if symbolic_size else size,)), g.input("w", (window,))
        g.output(cg.einsum(x, w, f"{index}, r -> h", h=N if symbolic_count else out))
    bound = {**({"W": size} if symbolic_size else {}), **({"N": out} if symbolic_count else {})}
    assert cg.matmul_flops(g, **bound) == 2 * out * window
    assert read(g, **bound) == sum(map(len, inside)) + window


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("offset", [-3, -2, -1, 0, 1, 2])
@pytest.mark.parametrize("out", [None, 3])
def test_single_axis_index_reads_every_stride_th_position(stride, offset, out):
    size = 17
    if (stride, offset) == (1, 0):
        out = None  # a plain axis has the operand's size
    index = f"h*{stride}" + (f"{offset:+d}" if offset else "")
    with cg.Graph("g") as g:
        x, w = g.input("x", (size,)), g.input("w", (5,))
        y = cg.einsum(x, w, f"{index}, d -> h d", **({} if out is None else {"h": out}))
        g.output(y)
    # the maximum count, with symmetric padding
    span = size + (-2 * offset if offset < 0 else -offset)
    count = out or (span - 1) // stride + 1
    assert y.shape == (count, 5)
    at = {h * stride + offset for h in range(count)}
    assert read(g) == len([p for p in at if 0 <= p < size]) + 5


def test_covering_windows_read_the_whole_axis():
    with cg.Graph("g") as g:
        x, w = g.input("x", (W,)), g.input("w", (5,))
        g.output(cg.einsum(x, w, "h*3+r-2, r -> h"))
    assert cg.costs(g).filter(direction="read").total().read == 4 * (W + 5)


# -- operands under a domain -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, 2)])
def test_operand_with_both_domain_axes_is_read_at_visible_pairs(causal, window):
    seen = len(pairs(7, 7, causal, window))
    domain = {"domain": cg.Domain(causal, window), "over": ("s", "t")}
    g, _ = graph_of(lambda p, v: cg.einsum(p, v, "s t, t d -> s d", **domain), (7, 7), (7, 5))
    assert read(g) == seen + 7 * 5
    assert cg.matmul_flops(g) == 2 * 5 * seen


def test_operand_without_domain_axes_is_read_whole():
    domain = {"domain": cg.Domain(True), "over": ("s", "t")}
    g, _ = graph_of(lambda p, w: cg.einsum(p, w, "s t, d -> s t d", **domain), (3, 11), (5,))
    seen = len(pairs(3, 11, True, None))
    assert read(g) == seen + 5
    assert cg.flops(g) == 5 * seen


def sum_of(a, b):
    return a + b


# -- shared operand storage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pick", "elements"),
    [
        (lambda x: (x, x[:1]), 5 * 7),  # the row is part of the whole
        (lambda x: (x[:1], x), 5 * 7),
        (lambda x: (x, x), 5 * 7),
        (lambda x: (x[:1], x[:1]), 7),
        (lambda x: (x[:1], x[1:2]), 2 * 7),  # two rows
        (lambda x: (x[:2], x[:2, :1]), 2 * 7 + 2),  # neither contains the other: both count
    ],
)
def test_elements_shared_with_containing_operand_are_read_once(pick, elements):
    g, _ = graph_of(lambda x: sum_of(*pick(x)), (5, 7))
    assert read(g) == elements


def test_three_views_of_one_storage_are_read_as_the_whole():
    g, _ = graph_of(lambda x: cg.ops.pointwise("lerp", x[:1], x, x[2:3]), (5, 7))
    assert read(g) == 5 * 7


def test_reducing_expanded_tensor_reads_each_element_once():
    g, _ = graph_of(lambda x: cg.reduce(cg.ops.expand(x, "d -> b d", b=3), "b d -> b", "sum"), (7,))
    assert cg.flops(g) == 3 * 7
    assert read(g) == 7


def test_scatter_adds_every_expanded_update():
    with cg.Graph("g") as g:
        target, ids = cg.relu(g.input("x", (11, 5))), g.input("ids", (3,), dtype="int32")
        g.output(cg.ops.scatter(target, ids, cg.ops.expand(g.input("u", (5,)), "d -> n d", n=3)))
    total = cg.costs(g).filter(op="scatter").total()
    assert total.pointwise == 3 * 5
    assert total.read == 4 * (3 * 5 + 5) + 4 * 3  # the updated rows, the update once, and the indices
