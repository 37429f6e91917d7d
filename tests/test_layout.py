"""Symbolic layouts, compared with torch at concrete sizes."""

from itertools import product
from random import Random

import einops
import numpy as np
import pytest
import torch
from budget import drawing
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import graph_of, same_layout

import costgraph as cg
from costgraph import GraphError, PatternError, ShapeError
from costgraph.algebra.polynomial import ONE, ZERO, poly
from costgraph.ir.strides import apart

B, S, D, H, K = cg.dims("B S D H K")
LETTERS = "abcdefgh"


def factor_pairs(n):
    return [(i, n // i) for i in range(1, n + 1) if n % i == 0]


def permuted(draw, mine, theirs):
    order = draw(st.permutations(range(theirs.ndim)))
    left, right = (" ".join(LETTERS[i] for i in axes) for axes in (range(theirs.ndim), order))
    return cg.rearrange(mine, f"{left} -> {right}"), theirs.permute(order)


def reshaped(draw, mine, theirs):
    sizes = list(theirs.shape)
    if len(sizes) > 1 and draw(st.booleans()):
        at = draw(st.integers(0, len(sizes) - 2))
        sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
    else:
        at = draw(st.integers(0, len(sizes) - 1))
        sizes[at : at + 1] = draw(st.sampled_from(factor_pairs(sizes[at])))
    return cg.ops.reshape(mine, tuple(sizes)), theirs.reshape(sizes)


def sliced(draw, mine, theirs):
    axis = draw(st.integers(0, theirs.ndim - 1))
    start = draw(st.integers(0, theirs.shape[axis] - 1))
    stop = draw(st.integers(start + 1, theirs.shape[axis]))
    step = draw(st.integers(1, 3))
    key = (*[slice(None)] * axis, slice(start, stop, step))
    return mine[key], theirs[key]


def picked(draw, mine, theirs):
    if theirs.ndim < 2:
        return mine, theirs
    at = draw(st.integers(-theirs.shape[0], theirs.shape[0] - 1))
    return mine[at], theirs[at]


def widened(draw, mine, theirs):
    at = draw(st.integers(0, theirs.ndim))
    key = (*[slice(None)] * at, None)
    return mine[key], theirs[key]


def expanded(draw, mine, theirs):
    size = draw(st.integers(2, 3))
    names = " ".join(LETTERS[: theirs.ndim])
    return cg.ops.expand(mine, f"{names} -> n {names}", n=size), theirs.expand(size, *theirs.shape)


def dense(draw, mine, theirs):
    return cg.ops.contiguous_copy(mine), theirs.contiguous()


MOVES = (permuted, reshaped, reshaped, sliced, picked, widened, expanded, dense)


@given(st.data())
@drawing(1500)
def test_views_copies_shapes_strides_and_offsets_are_those_of_torch(data):
    shape = data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    base = theirs = torch.empty(shape)
    with cg.Graph("g") as g:
        mine = g.input("x", tuple(shape))
        for _ in range(data.draw(st.integers(1, 5))):
            if theirs.ndim > 6 or theirs.numel() > 5000:
                break
            mine, theirs = data.draw(st.sampled_from(MOVES))(data.draw, mine, theirs)
            same_layout(mine, theirs, base)


@each(
    ("pattern", "shape", "sizes"),
    [
        ("b s (h k) -> b h s k", (2, 3, 10), {"h": 5}),
        ("b h s k -> b s (h k)", (2, 3, 5, 7), {}),
        ("b h s k -> (b h) s k", (2, 3, 5, 7), {}),
        ("b c (h p) (w q) -> b (h w) (c p q)", (2, 3, 4, 6), {"p": 2, "q": 3}),
        ("... d -> d ...", (2, 3, 5), {}),
        ("a b -> a 1 b", (2, 3), {}),
        ("a 1 b -> (a b)", (2, 1, 3), {}),
        ("(a b c) -> c b a", (30,), {"a": 2, "b": 3}),
        ("a -> a", (3,), {}),
    ],
)
def test_rearrange_matches_einops(pattern, shape, sizes):
    base = torch.empty(shape)
    theirs = einops.rearrange(base, pattern, **sizes)
    g, mine = graph_of(lambda x: cg.rearrange(x, pattern, **sizes), shape)
    same_layout(mine, theirs, base)
    moved = 0 if mine.is_view else 2 * 4 * theirs.numel()  # a copy reads and writes once, in fp32
    assert cg.bytes_moved(g) == moved
    assert cg.flops(g) == 0


def test_reshape_of_a_transposed_tensor_copies():
    with cg.Graph("g") as g:
        x = g.input("x", (B, S, D))
        turned = cg.rearrange(x, "b s d -> b d s")
        flat = cg.ops.reshape(turned, (B, D * S))
        g.output(flat)
    assert turned.is_view
    assert not flat.is_view
    assert cg.bytes_moved(g, B=2, S=3, D=5) == 2 * 4 * 2 * 3 * 5
    assert [r.role for r in cg.lifetimes(g)] == ["input", "output"]


def test_head_split_is_view_and_transposed_merge_is_copy():
    with cg.Graph("g") as g:
        heads = cg.rearrange(g.input("x", (B, S, H * K)), "b s (h k) -> b h s k", h=H)
        back = cg.rearrange(heads, "b h s k -> b s (h k)")
        joined = cg.rearrange(heads, "b h s k -> b h (s k)")
    assert heads.is_view
    assert tuple(s.expr for s in heads.strides) == (S * H * K, K, H * K, 1)
    assert back.is_view  # the same memory as the input
    assert not joined.is_view


def test_symbolic_axes_constrain_layout_but_singletons_do_not():
    with cg.Graph("g") as g:
        x, y = g.input("x", (B, S, D)), g.input("y", (1, S, D))
        assert not cg.rearrange(x, "b s d -> (s b) d").is_view
        assert cg.rearrange(y, "b s d -> (s b) d").is_view


def test_assumed_equality_allows_reshape():
    with cg.Graph("g") as g:
        g.assume("D == H*K")
        y = cg.ops.reshape(g.input("x", (B, D)), (B, H, K))
    assert y.shape == (B, H, K)


def test_expanded_tensor_stores_and_moves_its_own_elements():
    with cg.Graph("g") as g:
        y = cg.ops.expand(g.input("x", (S, D)), "s d -> b s d", b=B)
        g.output(cg.relu(y))
    assert y.is_view
    assert cg.flops(g, B=7, S=3, D=5) == 7 * 3 * 5
    assert cg.bytes_moved(g, B=7, S=3, D=5) == 4 * 3 * 5 + 4 * 7 * 3 * 5


@each("axis", [0, 1, -1])
def test_concat_and_split_match_numpy_shapes_and_concat_copies(axis):
    parts = [torch.empty(2, 3), torch.empty(2, 3)]
    g, mine = graph_of(lambda a, b: cg.ops.concat([a, b], axis), (2, 3), (2, 3))
    assert mine.shape == tuple(torch.cat(parts, axis).shape)
    assert cg.bytes_moved(g) == 4 * 2 * (2 * 6)
    whole = torch.empty(5, 7)
    sizes = [2, 3] if axis == 0 else [1, 6]
    _, pieces = graph_of(lambda x: cg.ops.split(x, sizes, axis), (5, 7), output=False)
    for piece, expected in zip(pieces, torch.split(whole, sizes, axis), strict=True):
        same_layout(piece, expected, whole)


def test_concat_with_itself_reads_once():
    g, _ = graph_of(lambda a: cg.ops.concat([a, a], 0), (2, 3))
    assert cg.bytes_moved(g) == 4 * 6 + 4 * 12


def test_stack_adds_a_leading_axis():
    g, mine = graph_of(lambda a, b: cg.ops.stack([a, b]), (2, 3), (2, 3))
    assert mine.shape == tuple(torch.stack([torch.empty(2, 3)] * 2).shape)
    assert cg.bytes_moved(g) == 4 * 12 + 4 * 12


def test_slices_of_symbolic_axes():
    with cg.Graph("g") as g:
        x = g.input("x", (B, S))
        assert x[:, 1:].shape == (B, S - 1)
        assert x[:, :-1].shape == (B, S - 1)
        assert x[-1].shape == (S,)
        assert x[..., ::2].shape[1].subs(S, 7) == 4  # positions 0, 2, 4, 6
        g.output(cg.relu(x[:, :512]))
    assert cg.flops(g, B=1, S=512) == 512
    with pytest.raises(cg.BindingError, match=r"S=511: .* 'slice_3' has size S - 512 = -1"):
        cg.flops(g, B=1, S=511)


def test_views_of_a_restricted_tensor_keep_the_domain():
    with cg.Graph("g") as g:
        q = g.input("q", (2, 5, 3))
        scores = cg.einsum(q, q, "b s d, b t d -> b s t", domain=cg.Domain(True), over=("s", "t"))
        g.output(cg.relu(cg.rearrange(scores, "b s t -> s b t")[:, :1]))
        with pytest.raises(ShapeError, match="restricted to a domain, expected its axes 1 and 2 unchanged"):
            scores[:, 1:]
    assert cg.costs(g).filter(op="relu").total().pointwise == 5 * 6 // 2  # one batch element, a causal square


@each(
    ("call", "error", "text"),
    [
        (lambda x: cg.rearrange(x, "a b -> b"), PatternError, "expected the same axes on both sides, each once"),
        (lambda x: cg.rearrange(x, "a b -> b a c"), PatternError, "expected the same axes on both sides"),
        (lambda x: cg.rearrange(x, "a b -> b a", c=2), PatternError,
         "size given for 'c', which is not one of its axes"),
        (lambda x: cg.rearrange(x, "a b"), PatternError, "expected exactly one '->'"),
        (lambda x: cg.rearrange(x, "a+1 b -> a b"), PatternError, "affine index such as h"),
        (lambda x: cg.rearrange(x, 3), PatternError, "pattern 3: expected text"),
        (lambda x: cg.rearrange(3, "a -> a"), GraphError, "rearrange: x is 3, expected a tensor"),
        (lambda x: cg.rearrange(x, "a (b c) -> a b c", b=2), ShapeError,
         r"an axis of size 5 does not split into \(b c\)"),
        (lambda x: cg.rearrange(x, "a b -> b a", b=0), ShapeError, "size of 'b': 0, expected a positive integer"),
        (lambda x: cg.ops.reshape(x, (4, 4)), ShapeError, r"has 15 elements, \(4, 4\) has 16"),
        (lambda x: cg.ops.reshape(x, {3, 5}), GraphError, "expected a tuple of sizes"),
        (lambda x: cg.ops.reshape(x, (-1,)), ShapeError, "axis 0: -1, expected a positive integer"),
        (lambda x: cg.ops.reshape(None, (15,)), GraphError, "reshape: x is None, expected a tensor"),
        (lambda x: cg.ops.slice_axis(x, 1, 3, 3), ShapeError, "room is -1 on axis 1"),
        (lambda x: cg.ops.slice_axis(x, 1, -1, 3), ShapeError, "start is -1 on axis 1"),
        (lambda x: cg.ops.slice_axis(x, 1, 0, 0), ShapeError, "size is -1 on axis 1"),
        (lambda x: cg.ops.slice_axis(x, 2, 0, 1), ShapeError, "axis 2 of .*: expected an integer from -2 to 1"),
        (lambda x: cg.ops.slice_axis(x, 1, 0, 1, 0), ShapeError, "step 0, expected a positive integer"),
        (lambda x: x[3], ShapeError, "room is -1 on axis 0"),
        (lambda x: x[1, 2, 3], ShapeError, "3 axes, expected at most 2"),
        (lambda x: x[..., ...], ShapeError, "'...' once"),
        (lambda x: x[::-1], ShapeError, "step -1, expected a positive integer"),
        (lambda x: x[1.5], ShapeError, "1.5"),
        (lambda x: x[x], ShapeError, "costgraph.ops.gather for a tensor"),
        (lambda x: cg.ops.split(x, [2, 2], 1), ShapeError, r"parts \[2, 2\] add up to 4, expected 5"),
        (lambda x: cg.ops.split(x, {2, 3}, 1), GraphError, "expected a tuple of sizes"),
        (lambda x: cg.ops.expand(x, "a b -> a (b c)", c=2), PatternError,
         "expected unmerged axes, each once, with all operand axes kept"),
        (lambda x: cg.ops.expand(x, "a b -> a"), PatternError, "all operand axes kept"),
        (lambda x: cg.ops.expand(x, "a b -> c a b"), PatternError, "size of new axis 'c' is not given"),
        (lambda x: cg.ops.expand(x, "a b -> a b", c=3), PatternError,
         r"sizes for \['c'\], expected axes of the result"),
        (lambda x: cg.ops.expand(x, "a b -> a b", b=7), ShapeError,
         "axis 1 to 7, expected its own size or an axis of size 1"),
        (lambda x: cg.ops.concat([]), GraphError, "got no tensor, expected at least one"),
        (lambda x: cg.ops.concat([x, x[:, :2]], 0), ShapeError, "expected equal sizes on all axes but 0"),
        (lambda x: cg.ops.concat([x, cg.ops.cast(x, "bf16")], 0), ShapeError, "expected the same number format"),
        (lambda x: cg.ops.concat(x), GraphError, r"concat: tensors is x\(3, 5; fp32\), expected a list, each a tensor"),
        (lambda x: cg.ops.stack([x, 3]), GraphError, "stack: tensors is .*, expected a list, each a tensor"),
        (lambda x: cg.ops.transpose(x[0]), ShapeError, "expected at least two axes"),
        (lambda x: iter(x), TypeError, "not iterable"),
    ],
)  # fmt: skip
def test_errors_name_place_value_and_expectation(call, error, text):
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        with pytest.raises(error, match=text):
            call(x)


def test_negative_symbol_indexes_from_the_end():
    A, S, T = cg.dims("A S T")
    with cg.Graph("g") as g:
        x = g.input("x", (A, S))
        y = x[:, -T:]
        g.output(cg.relu(y))
    assert y.shape == (A, T)
    assert cg.bytes_moved(g, A=2, S=5, T=3) == 4 * 2 * (2 * 3)  # read and written
    with pytest.raises(cg.BindingError, match="start of 'slice' has size S - T = -2, expected a whole number"):
        cg.bytes_moved(g, A=2, S=3, T=5)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("s d -> t s d", "has 3 axes, the pattern 's d -> t s d' has 2"), ("b s 1 -> b s 1 t", "has 1")],
)
def test_invalid_expand_raises(pattern, text):
    B, S, D = cg.dims("B S D")
    with cg.Graph("g") as g:
        x = g.input("x", (B, S, D))
        with pytest.raises(cg.ShapeError, match=text):
            cg.ops.expand(x, pattern, t=3)
        with pytest.raises(cg.PatternError, match="each once"):
            cg.ops.expand(x, "b b d -> b d")


SIZES = {"A": 2, "B": 3, "C": 5, "D": 7}
SYMBOLS = dict(zip(SIZES, cg.dims("A B C D"), strict=True))
VALUES = {SYMBOLS[a]: n for a, n in SIZES.items()}


def at_sizes(tensor):
    return tuple(int(s.expr.subs(VALUES)) for s in tensor.strides)


@st.composite
def operands(draw):
    """Symbolic axes, and each operand's memory order over its axes; 1 marks a broadcast axis."""
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
def test_reshape_of_permuted_tensor_is_view_iff_in_torch(shape, order, new):
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
def test_scalar_reshapes_to_singleton_axes_and_back(rank):
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
    """Views of a dense (3, 5, 7) tensor: contiguous or every-second positions along two axes."""
    cuts = [(start, stop, step) for start, stop in ((0, 2), (1, 3), (0, 1), (2, 3)) for step in (1, 2)]
    whole = np.arange(105).reshape(3, 5, 7)
    for axes in (0, 1), (1, 2), (2, 0):
        for pair in product(cuts, cuts):
            key = [slice(None)] * 3
            for axis, cut in zip(axes, pair, strict=True):
                key[axis] = slice(*cut)
            part = whole[tuple(key)]
            yield part.shape, tuple(s // 8 for s in part.strides), int(part.flat[0])


def test_disjoint_view_analysis_is_sound_and_complete_on_one_axis():
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
