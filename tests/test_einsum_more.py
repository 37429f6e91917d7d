"""What contractions and other ops touch of their operands, against counts of positions one by one."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import graph_of, pairs

import costgraph as cg

N, W = cg.dims("N W")


def read(g, **sizes):
    """Elements of four bytes that the ops of a graph read."""
    return cg.costs(g, **sizes).total().read // 4


# -- indices whose outputs are stated ----------------------------------------------------------------------------


@st.composite
def windows(draw):
    out, stride, window = draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    dilation, offset = draw(st.integers(1, 3)), draw(st.integers(-4, 2))
    last = (out - 1) * stride + (window - 1) * dilation + offset
    size = draw(st.integers(max(2, last + 1 - min(offset, 0)), max(2, last + 1) + 12))  # padding on both sides
    return size, out, stride, window, dilation, offset


@given(windows(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_fewer_windows_than_fit_read_the_positions_that_they_reach(case, symbolic_size, symbolic_count):
    size, out, stride, window, dilation, offset = case
    classes = {}  # positions of the windows by what they leave when divided by the stride
    for r in range(window):
        classes.setdefault(r * dilation % stride, set()).update(h * stride + r * dilation + offset for h in range(out))
    inside = [{p for p in positions if 0 <= p < size} for positions in classes.values()]
    assume(all(inside))  # not all of them in the padding
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
def test_an_index_of_one_axis_reads_every_stride_th_position(stride, offset, out):
    size = 17
    if (stride, offset) == (1, 0):
        out = None  # a plain axis, whose size is that of the operand
    index = f"h*{stride}" + (f"{offset:+d}" if offset else "")
    with cg.Graph("g") as g:
        x, w = g.input("x", (size,)), g.input("w", (5,))
        y = cg.einsum(x, w, f"{index}, d -> h d", **({} if out is None else {"h": out}))
        g.output(y)
    # as many as fit, with as much padding at the end as at the start
    span = size + (-2 * offset if offset < 0 else -offset)
    count = out or (span - 1) // stride + 1
    assert y.shape == (count, 5)
    at = {h * stride + offset for h in range(count)}
    assert read(g) == len([p for p in at if 0 <= p < size]) + 5


def test_windows_that_cover_an_axis_read_it_whole_in_the_formula_too():
    with cg.Graph("g") as g:
        x, w = g.input("x", (W,)), g.input("w", (5,))
        g.output(cg.einsum(x, w, "h*3+r-2, r -> h"))
    assert cg.costs(g).filter(direction="read").total().read == 4 * (W + 5)


# -- operands under a domain -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, 2)])
def test_an_operand_with_both_axes_of_a_domain_is_read_where_pairs_are_seen(causal, window):
    seen = len(pairs(7, 7, causal, window))
    domain = {"domain": cg.Domain(causal, window), "over": ("s", "t")}
    g, _ = graph_of(lambda p, v: cg.einsum(p, v, "s t, t d -> s d", **domain), (7, 7), (7, 5))
    assert read(g) == seen + 7 * 5
    assert cg.matmul_flops(g) == 2 * 5 * seen


def test_an_operand_without_the_axes_of_a_domain_is_read_whole():
    domain = {"domain": cg.Domain(True), "over": ("s", "t")}
    g, _ = graph_of(lambda p, w: cg.einsum(p, w, "s t, d -> s t d", **domain), (3, 11), (5,))
    seen = len(pairs(3, 11, True, None))
    assert read(g) == seen + 5
    assert cg.flops(g) == 5 * seen


def sum_of(a, b):
    return a + b


# -- what operands have in common ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pick", "elements"),
    [
        (lambda x: (x, x[:1]), 5 * 7),  # the row is part of the whole
        (lambda x: (x[:1], x), 5 * 7),
        (lambda x: (x, x), 5 * 7),
        (lambda x: (x[:1], x[:1]), 7),
        (lambda x: (x[:1], x[1:2]), 2 * 7),  # two rows
        (lambda x: (x[:2], x[:2, :1]), 2 * 7 + 2),  # neither is the whole: both count
    ],
)
def test_elements_that_two_operands_share_are_read_once_where_one_is_the_whole(pick, elements):
    g, _ = graph_of(lambda x: sum_of(*pick(x)), (5, 7))
    assert read(g) == elements


def test_three_operands_of_one_storage_are_read_as_the_whole():
    g, _ = graph_of(lambda x: cg.ops.pointwise("lerp", x[:1], x, x[2:3]), (5, 7))
    assert read(g) == 5 * 7


def test_every_repeated_element_of_an_expanded_tensor_is_reduced_and_each_is_read_once():
    g, _ = graph_of(lambda x: cg.reduce(cg.ops.expand(x, "d -> b d", b=3), "b d -> b", "sum"), (7,))
    assert cg.flops(g) == 3 * 7
    assert read(g) == 7


def test_every_repeated_element_of_expanded_updates_is_added():
    with cg.Graph("g") as g:
        target, ids = cg.relu(g.input("x", (11, 5))), g.input("ids", (3,), dtype="int32")
        g.output(cg.ops.scatter(target, ids, cg.ops.expand(g.input("u", (5,)), "d -> n d", n=3)))
    total = cg.costs(g).filter(op="scatter").total()
    assert total.pointwise == 3 * 5
    assert total.read == 4 * (3 * 5 + 5) + 4 * 3  # the rows that it changes, the update once, and the indices
