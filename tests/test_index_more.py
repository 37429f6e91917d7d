"""Defaults, edges and refusals of the ops that move elements, against NumPy and torch."""

import numpy as np
import pytest
import torch
from oracles import graph_of, strides

import costgraph as cg
from costgraph import GraphError, ShapeError

S = cg.dims("S")


def test_axes_are_the_last_ones_unless_they_are_given():
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5, 7))
        assert [t.shape for t in cg.ops.split(x, (2, 5))] == [(3, 5, 2), (3, 5, 5)]
        assert [t.shape for t in cg.ops.split(x, (2, 3), 1)] == [(3, 2, 7), (3, 3, 7)]
        assert [t.shape for t in cg.ops.split(x, (1, 2), -3)] == [(1, 5, 7), (2, 5, 7)]
        assert cg.ops.concat([x, x]).shape == (3, 5, 14)
        assert cg.ops.concat([x, x], -3).shape == (6, 5, 7)
        assert cg.ops.concat([x, x], 2).shape == (3, 5, 14)
        for axis in (3, -4, True, 1.0, None):
            with pytest.raises(cg.CostGraphError, match="expected"):
                cg.ops.concat([x, x], axis)


def test_ops_are_named_by_what_they_are_unless_a_name_is_given():
    with cg.Graph("g") as g:
        x, ids = g.input("x", (3, 5)), g.input("ids", (3,), dtype="int64")
        cg.ops.reshape(x, (15,))
        cg.ops.concat([x, x])
        cg.rearrange(x, "a b -> b a")
        cg.ops.expand(x, "a b -> n a b", n=2)
        cg.ops.split(x, (2, 3))
        cg.einsum(x, x, "a b, a b -> ")
        cg.ops.gather(x, ids)
        cg.ops.contiguous_copy(x.T)
        x[:2]
        cg.ops.reshape(x, (5, 3), name="flat")
    names = [op.name for op in g.ops]
    for name in ("reshape", "concat", "rearrange", "expand", "einsum", "gather", "flat"):
        assert name in names
    assert {op.kind.name for op in g.ops} >= {"expand", "concat", "slice", "einsum", "gather"}


@pytest.mark.parametrize(
    "key",
    [
        np.s_[2], np.s_[-1], np.s_[-5], np.s_[1:4], np.s_[::2], np.s_[1::3], np.s_[:, -2], np.s_[..., 0],
        np.s_[None, 1:], np.s_[1:2], np.s_[-3:-1, 2:], np.s_[4:], np.s_[:-4], np.s_[0:5:4, 0:7:6], np.s_[...],
    ],
)  # fmt: skip
def test_indexing_is_torchs(key):
    base = torch.empty(5, 7)
    theirs = base[key]
    with cg.Graph("g") as g:
        mine = g.input("x", (5, 7))[key]
    assert mine.shape == tuple(theirs.shape)
    assert mine.offset == theirs.storage_offset()
    for n, a, b in zip(theirs.shape, strides(mine), theirs.stride(), strict=True):
        assert n == 1 or a == b
    assert cg.bytes_moved(g) == 0 if g.ops else True


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (np.s_[::0], "expected a positive integer"),
        (np.s_[::-1], "expected a positive integer"),
        (np.s_[::True], "expected a positive integer"),
        (np.s_[::1.0], "expected a positive integer"),
        (np.s_[5], "expected"),
        (np.s_[-6], "expected"),
        (np.s_[:, :, 0], "expected"),
        (np.s_["a"], "expected"),
        (np.s_[True], "expected"),
        (np.s_[1.5], "expected"),
    ],
)
def test_what_is_no_index_is_refused(key, text):
    with cg.Graph("g") as g:
        x = g.input("x", (5, 7))
        with pytest.raises(cg.CostGraphError, match=text):
            x[key]


def test_a_slice_of_a_symbolic_axis_has_as_many_positions_as_pythons_range():
    with cg.Graph("g") as g:
        y = g.input("x", (S, 3))[1:S:3]
    for s in (2, 3, 4, 5, 6, 7, 11):
        assert y.shape[0].subs(S, s) == len(range(1, s, 3))


@pytest.mark.parametrize(
    ("pattern", "shape", "sizes", "theirs"),
    [
        ("a -> a 1", (3,), {}, (3, 1)),
        ("a 1 -> a b", (3, 1), {"b": 5}, (3, 5)),
        ("1 a -> b a", (1, 3), {"b": 5}, (5, 3)),
        ("a -> b a c", (3,), {"b": 2, "c": 5}, (2, 3, 5)),
    ],
)
def test_expanding_repeats_along_new_axes_and_those_of_size_one(pattern, shape, sizes, theirs):
    g, y = graph_of(lambda x: cg.ops.expand(x, pattern, **sizes), shape)
    assert y.shape == theirs
    left = iter(shape)
    names = pattern.split("->")[1].split()
    if "1" not in pattern.split("->")[0]:
        kept = [next(left) if n == "a" else None for n in names]
        assert [bool(s) or n == 1 for s, n in zip(strides(y), theirs, strict=True)] == [
            k is not None or n == 1 for k, n in zip(kept, theirs, strict=True)
        ]
    assert cg.bytes_moved(g) == 0


@pytest.mark.parametrize("pattern", ["(a b) -> a b", "a b -> (a b)", "a b -> a (b c)", "a b -> b"])
def test_expanding_neither_merges_nor_splits_nor_drops(pattern):
    with cg.Graph("g") as g:
        x = g.input("x", (5, 7)[: 1 if pattern.startswith("(") else 2])
        with pytest.raises(cg.CostGraphError, match="expected"):
            cg.ops.expand(x, pattern, c=3)


@pytest.mark.parametrize("ids", [(2, 7, 1), (3, 3, 1), (2, 1), (2, 3, 1, 1)])
def test_elements_are_picked_along_the_last_axis_of_equal_shapes_alone(ids):
    with cg.Graph("g") as g:
        x = g.input("x", (2, 3, 5))
        assert cg.ops.take_along(x, g.input("ok", (2, 3, 11), dtype="int32")).shape == (2, 3, 11)
        with pytest.raises(ShapeError, match="expected the same axes except the last"):
            cg.ops.take_along(x, g.input("ids", ids, dtype="int32"))


@pytest.mark.parametrize("mode", ["add", "set"])
def test_a_scatter_into_a_view_writes_where_the_view_lies(mode):
    with cg.Graph("g") as g:
        target = cg.relu(g.input("x", (11, 5)))[2:9]
        ids, updates = g.input("ids", (3,), dtype="int64"), g.input("u", (3, 5))
        y = cg.ops.scatter(target, ids, updates, mode)
        assert y.storage is target.storage
        assert (y.offset, strides(y), y.shape) == (10, (5, 1), (7, 5))
        copied = cg.ops.scatter(y, ids, updates, mode, inplace=False)
        assert copied.storage is not y.storage
        assert (copied.offset, strides(copied)) == (0, (5, 1))


@pytest.mark.parametrize("call", [cg.ops.reshape, cg.ops.split, cg.ops.expand, cg.rearrange, cg.ops.gather, cg.reduce])
@pytest.mark.parametrize("wrong", [3, None, "x"])
def test_what_is_no_tensor_is_refused(call, wrong):
    rest = {cg.ops.reshape: ((3,),), cg.ops.split: ((3,),), cg.ops.gather: (wrong,), cg.reduce: ("a -> ", "sum")}
    with pytest.raises(GraphError, match="expected a tensor"):
        call(wrong, *rest.get(call, ("a -> a",)))
