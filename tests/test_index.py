"""Indexing and element-moving ops, compared with NumPy and torch."""

import numpy as np
import pytest
import torch
from each import each
from oracles import graph_of, strides

import costgraph as cg
from costgraph import GraphError, ShapeError

B, S, V, D = cg.dims("B S V D")


def test_gather_reads_only_indexed_rows():
    with cg.Graph("g") as g:
        y = cg.ops.gather(g.param("table", (1000, 7)), g.input("ids", (2, 3), dtype="int64"))
        g.output(y)
    assert y.shape == tuple(torch.empty(1000, 7)[torch.zeros(2, 3, dtype=torch.int64)].shape)
    assert cg.flops(g) == 0
    total = cg.costs(g).total()
    assert total.read == 4 * (2 * 3 * 7) + 8 * (2 * 3)  # six rows and six indices
    assert total.written == 4 * (2 * 3 * 7)


def test_embedding_has_no_matmul_flops():
    with cg.Graph("g") as g:
        g.output(cg.embedding(g.input("ids", (B, S), dtype="int32"), g.param("table", (V, D), dtype="bf16")))
    assert cg.matmul_flops(g) == 0
    assert cg.bytes_moved(g) == 2 * (2 * B * S * D) + 4 * B * S


def test_fused_traffic_of_a_lookup_never_exceeds_the_table():
    with cg.Graph("g") as g:
        g.output(cg.ops.gather(g.param("table", (V, D)), g.input("ids", (S,), dtype="int64")))
    few, many = {"V": 1000, "D": 7, "S": 3}, {"V": 2, "D": 7, "S": 1000}
    assert cg.bytes_moved(g, fused=True, **few) == 4 * 3 * 7 + 8 * 3 + 4 * 3 * 7
    assert cg.bytes_moved(g, fused=True, **many) == 4 * 2 * 7 + 8 * 1000 + 4 * 1000 * 7


def test_take_along_reads_one_element_per_index():
    with cg.Graph("g") as g:
        y = cg.ops.take_along(g.input("x", (5, 11)), g.input("ids", (5, 1), dtype="int64"))
        g.output(y)
    assert y.shape == np.take_along_axis(np.ones((5, 11)), np.zeros((5, 1), dtype=int), -1).shape
    assert cg.bytes_moved(g) == 4 * 5 + 8 * 5 + 4 * 5


@each("mode", ["add", "set"])
@each("inplace", [True, False])
def test_scatter_touches_rows_in_place_and_target_out_of_place(mode, inplace):
    with cg.Graph("g") as g:
        target = cg.relu(g.input("x", (100, 7)))
        ids, updates = g.input("ids", (3,), dtype="int64"), g.input("u", (3, 7))
        g.output(cg.ops.scatter(target, ids, updates, mode, inplace=inplace))
    rows = 3 * 7
    total = cg.costs(g).filter(op="scatter").total()
    assert total.flops == (rows if mode == "add" else 0)  # one addition per update element
    read = 100 * 7 if not inplace else rows if mode == "add" else 0
    assert total.read == 4 * (read + rows) + 8 * 3
    assert total.written == 4 * (rows if inplace else 100 * 7)
    assert g.outputs[0].is_view is inplace


def test_arange_writes_its_elements_and_needs_an_open_graph():
    with cg.Graph("g") as g:
        g.output(cg.ops.arange(S))
    assert cg.bytes_moved(g) == 8 * S
    assert cg.flops(g) == 0
    with pytest.raises(GraphError, match="no graph is open; build the model inside 'with"):
        cg.ops.arange(3)


@each(
    ("call", "error", "text"),
    [
        (lambda x, i: cg.ops.gather(x, x), ShapeError, "indices x.*: expected an integer format"),
        (lambda x, i: cg.ops.gather(cg.reduce(x, "a b -> ", "sum"), i), ShapeError, "expected at least one axis"),
        (lambda x, i: cg.ops.gather(x, None), GraphError, "gather: ids is None, expected a tensor"),
        (lambda x, i: cg.ops.take_along(x, i), ShapeError, "expected the same axes except the last"),
        (lambda x, i: cg.ops.scatter(x, i, x), ShapeError, r"updates x.*: expected \(3, 7\) for ids"),
        (lambda x, i: cg.ops.scatter(x, i, cg.ops.cast(x[:3], "bf16")), ShapeError, "expected the same number format"),
        (lambda x, i: cg.ops.scatter(x, i, x[:3], "min"), GraphError, "mode 'min', expected one of add, set, max"),
        (lambda x, i: cg.ops.scatter(x, i, x[:3], inplace=None), GraphError, "inplace is None, expected True or False"),
        (lambda x, i: cg.ops.scatter(x, x, x[:3]), ShapeError, "expected an integer format"),
        (lambda x, i: cg.ops.arange(0), ShapeError, "arange: size: 0, expected a positive integer"),
        (lambda x, i: cg.ops.arange(3, "int65"), cg.FormatError, "int65"),
    ],
)
def test_errors_name_place_value_and_expectation(call, error, text):
    with cg.Graph("g") as g:
        x, i = g.input("x", (5, 7)), g.input("ids", (3,), dtype="int64")
        with pytest.raises(error, match=text):
            call(x, i)


def test_expanded_indices_are_read_once():
    def build(x):
        ids = cg.ops.expand(cg.ops.arange(3), "s -> b s", b=5)
        return cg.ops.gather(x, ids)

    g, y = graph_of(build, (11, 2))
    assert y.shape == (5, 3, 2)
    assert cg.costs(g).filter(op="gather").total().read == 4 * (3 * 2) + 8 * 3  # one row per distinct index


def test_axes_default_to_the_last_ones():
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


def test_op_names_default_to_their_kind():
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
def test_indexing_matches_torch(key):
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
def test_invalid_indices_raise(key, text):
    with cg.Graph("g") as g:
        x = g.input("x", (5, 7))
        with pytest.raises(cg.CostGraphError, match=text):
            x[key]


def test_symbolic_slice_length_matches_python_range():
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
def test_expand_repeats_new_and_singleton_axes(pattern, shape, sizes, theirs):
    g, y = graph_of(lambda x: cg.ops.expand(x, pattern, **sizes), shape)
    assert y.shape == theirs
    left = iter(shape)
    names = pattern.split("->")[1].split()
    if "1" not in pattern.split("->")[0]:
        shape_args = [next(left) if n == "a" else None for n in names]
        assert [bool(s) or n == 1 for s, n in zip(strides(y), theirs, strict=True)] == [
            k is not None or n == 1 for k, n in zip(shape_args, theirs, strict=True)
        ]
    assert cg.bytes_moved(g) == 0


@pytest.mark.parametrize("pattern", ["(a b) -> a b", "a b -> (a b)", "a b -> a (b c)", "a b -> b"])
def test_expand_rejects_merged_split_or_dropped_axes(pattern):
    with cg.Graph("g") as g:
        x = g.input("x", (5, 7)[: 1 if pattern.startswith("(") else 2])
        with pytest.raises(cg.CostGraphError, match="expected"):
            cg.ops.expand(x, pattern, c=3)


@pytest.mark.parametrize("ids", [(2, 7, 1), (3, 3, 1), (2, 1), (2, 3, 1, 1)])
def test_take_along_requires_equal_leading_shapes(ids):
    with cg.Graph("g") as g:
        x = g.input("x", (2, 3, 5))
        assert cg.ops.take_along(x, g.input("ok", (2, 3, 11), dtype="int32")).shape == (2, 3, 11)
        with pytest.raises(ShapeError, match="expected the same axes except the last"):
            cg.ops.take_along(x, g.input("ids", ids, dtype="int32"))


@pytest.mark.parametrize("mode", ["add", "set"])
def test_scatter_into_view_writes_to_its_base(mode):
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
def test_non_tensor_operands_raise(call, wrong):
    rest = {cg.ops.reshape: ((3,),), cg.ops.split: ((3,),), cg.ops.gather: (wrong,), cg.reduce: ("a -> ", "sum")}
    with pytest.raises(GraphError, match="expected a tensor"):
        call(wrong, *rest.get(call, ("a -> a",)))
