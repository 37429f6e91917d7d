"""Layout with symbols as sizes, against torch at numbers."""

from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import graph_of

import costgraph as cg
from costgraph.algebra.polynomial import ONE, ZERO, poly
from costgraph.graph.strides import apart

SIZES = {"A": 2, "B": 3, "C": 5, "D": 7}
SYMBOLS = dict(zip(SIZES, cg.dims("A B C D"), strict=True))
VALUES = {SYMBOLS[a]: n for a, n in SIZES.items()}


def at_sizes(tensor):
    return tuple(int(s.expr.subs(VALUES)) for s in tensor.strides)


@st.composite
def operands(draw):
    """Symbolic axes, and for each operand the order in memory of those that it has; 1 where it is broadcast."""
    shape = draw(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4))
    out = []
    for n in range(draw(st.integers(1, 3))):
        kept = shape[draw(st.integers(0, len(shape) - 1)) if n else 0 :]
        sizes = [1 if n and draw(st.booleans()) else size for size in kept]
        out.append((sizes, draw(st.permutations(range(len(sizes))))))
    return out


@given(operands())
@settings(max_examples=200, deadline=None)
def test_order_of_a_results_axes_in_memory_is_torchs_with_symbols_as_sizes(case):
    with cg.Graph("g") as g:
        mine, theirs = [], []
        for n, (sizes, order) in enumerate(case):
            x = g.input(f"x{n}", tuple(SYMBOLS.get(sizes[i], 1) for i in order))
            t = torch.empty([SIZES.get(sizes[i], 1) for i in order])
            back = sorted(range(len(order)), key=order.__getitem__)
            names = "abcd"[: len(order)]
            mine.append(cg.rearrange(x, f"{' '.join(names)} -> {' '.join(names[i] for i in back)}"))
            theirs.append(t.permute(back))
        if len(mine) == 1:
            y, expected = cg.relu(mine[0]), torch.relu(theirs[0])
        elif len(mine) == 2:
            y, expected = mine[0] + mine[1], theirs[0] + theirs[1]
        else:
            y, expected = cg.ops.pointwise("lerp", *mine), torch.lerp(*theirs)
    assert at_sizes(y) == expected.stride()


@pytest.mark.parametrize(
    ("shape", "order", "new"),
    [
        ("AB", (0, 1), [("A", "B")]),  # merged
        ("AB", (1, 0), [("A", "B")]),  # merged across a transpose: a copy
        ("ABC", (1, 0, 2), [("A",), ("B", "C")]),
        ("ABC", (0, 2, 1), [("A", "B"), ("C",)]),
        ("ABC", (2, 0, 1), [("C",), ("A", "B")]),
        ("ABCD", (2, 3, 0, 1), [("C", "D"), (), ("A", "B")]),
        ("ABCD", (0, 1, 3, 2), [(), ("A", "B"), ("D",), ("C",), ()]),
    ],
)
def test_a_reshape_of_a_permuted_tensor_is_a_view_where_it_is_one_in_torch(shape, order, new):
    base = torch.empty([SIZES[a] for a in shape])
    turned = base.permute(order)
    product = {"": 1}
    for group in new:
        product[group] = 1
        for a in group:
            product[group] = product[group] * SYMBOLS[a]
    theirs = turned.reshape([int(n.subs(VALUES)) if hasattr(n, "subs") else n for n in map(product.get, new)])

    def build(x):
        axes = [shape[i] for i in order]
        return cg.ops.reshape(
            cg.rearrange(x, f"{' '.join(shape)} -> {' '.join(axes)}"), tuple(product[group] for group in new)
        )

    _, mine = graph_of(build, tuple(SYMBOLS[a] for a in shape))
    assert mine.is_view == (theirs.untyped_storage().data_ptr() == base.untyped_storage().data_ptr())
    for n, a, b in zip(theirs.shape, at_sizes(mine), theirs.stride(), strict=True):
        assert n == 1 or a == b


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_scalar_becomes_axes_of_size_one_and_back(rank):
    with cg.Graph("g") as g:
        wide = cg.ops.reshape(g.input("x", ()), (1,) * rank)
        back = cg.ops.reshape(wide, ())
    theirs = torch.empty(()).reshape((1,) * rank)
    assert (wide.shape, at_sizes(wide)) == (tuple(theirs.shape), theirs.stride())
    assert (back.shape, back.strides) == ((), ())
    assert back.is_view


def elements(view):
    sizes, strides, offset = view
    return {offset + sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*map(range, sizes))}


def views():
    """Parts of a dense tensor of (3, 5, 7): some positions of two axes, one after another or every second one."""
    cuts = [(start, stop, step) for start, stop in ((0, 2), (1, 3), (0, 1), (2, 3)) for step in (1, 2)]
    whole = np.arange(105).reshape(3, 5, 7)
    for axes in (0, 1), (1, 2), (2, 0):
        for pair in product(cuts, cuts):
            key = [slice(None)] * 3
            for axis, cut in zip(axes, pair, strict=True):
                key[axis] = slice(*cut)
            part = whole[tuple(key)]
            yield part.shape, tuple(s // 8 for s in part.strides), int(part.flat[0])


def test_views_that_are_known_to_lie_apart_share_no_element_and_parts_of_one_axis_are_known_to():
    every, random = list(dict.fromkeys(views())), Random(7)
    for one, other in (random.sample(every, 2) for _ in range(2000)):
        known = apart(*((tuple(map(poly, n)), tuple(map(poly, s)), poly(at)) for n, s, at in (one, other)))
        assert not known or not elements(one) & elements(other)
    S = poly(cg.dims("S"))
    whole = (S, poly(12)), (poly(12), ONE)
    for first, second in ((0, 5), (5, 0)):
        assert apart(((S, poly(5)), whole[1], poly(first)), ((S, poly(5)), whole[1], poly(second)))
    assert not apart(((S, poly(5)), whole[1], ZERO), ((S, poly(5)), whole[1], poly(4)))
    assert apart(((S, poly(6)), (poly(12), poly(2)), ZERO), ((S, poly(6)), (poly(12), poly(2)), ONE))
    windows = (S, poly(3)), (ONE, ONE)
    assert not apart((*windows, ZERO), (*windows, S))
    assert apart((*windows, ZERO), (*windows, S + 2))
