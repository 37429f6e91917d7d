import numpy as np
import pytest
import torch
from oracles import graph_of

import costgraph as cg
from costgraph import GraphError, ShapeError

B, S, V, D = cg.dims("B S V D")


def test_gather_reads_the_rows_that_are_looked_up_not_the_table():
    with cg.Graph("g") as g:
        y = cg.ops.gather(g.param("table", (1000, 7)), g.input("ids", (2, 3), dtype="int64"))
        g.output(y)
    assert y.shape == tuple(torch.empty(1000, 7)[torch.zeros(2, 3, dtype=torch.int64)].shape)
    assert cg.flops(g) == 0
    total = cg.costs(g).total()
    assert total.read == 4 * (2 * 3 * 7) + 8 * (2 * 3)  # six rows and six indices
    assert total.written == 4 * (2 * 3 * 7)


def test_embedding_is_no_matmul():
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


def test_take_along_picks_one_element_for_each_index():
    with cg.Graph("g") as g:
        y = cg.ops.take_along(g.input("x", (5, 11)), g.input("ids", (5, 1), dtype="int64"))
        g.output(y)
    assert y.shape == np.take_along_axis(np.ones((5, 11)), np.zeros((5, 1), dtype=int), -1).shape
    assert cg.bytes_moved(g) == 4 * 5 + 8 * 5 + 4 * 5


@pytest.mark.parametrize("mode", ["add", "set"])
@pytest.mark.parametrize("inplace", [True, False])
def test_scatter_touches_its_rows_and_a_result_of_its_own_the_whole_target(mode, inplace):
    with cg.Graph("g") as g:
        target = cg.relu(g.input("x", (100, 7)))
        ids, updates = g.input("ids", (3,), dtype="int64"), g.input("u", (3, 7))
        g.output(cg.ops.scatter(target, ids, updates, mode, inplace=inplace))
    rows = 3 * 7
    total = cg.costs(g).filter(op="scatter").total()
    assert total.flops == (rows if mode == "add" else 0)  # one addition an element of the updates
    read = 100 * 7 if not inplace else rows if mode == "add" else 0
    assert total.read == 4 * (read + rows) + 8 * 3
    assert total.written == 4 * (rows if inplace else 100 * 7)
    assert g.outputs[0].is_view is inplace


def test_arange_writes_its_numbers_and_needs_an_open_graph():
    with cg.Graph("g") as g:
        g.output(cg.ops.arange(S))
    assert cg.bytes_moved(g) == 8 * S
    assert cg.flops(g) == 0
    with pytest.raises(GraphError, match="no graph is open, expected 'with"):
        cg.ops.arange(3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, i: cg.ops.gather(x, x), ShapeError, "indices x.*: expected an integer format"),
        (lambda x, i: cg.ops.gather(cg.reduce(x, "a b -> ", "sum"), i), ShapeError, "expected at least one axis"),
        (lambda x, i: cg.ops.gather(x, None), GraphError, "gather: ids is None, expected a tensor"),
        (lambda x, i: cg.ops.take_along(x, i), ShapeError, "expected the same axes except the last"),
        (lambda x, i: cg.ops.scatter(x, i, x), ShapeError, r"updates x.*: expected \(3, 7\) for ids"),
        (lambda x, i: cg.ops.scatter(x, i, cg.ops.cast(x[:3], "bf16")), ShapeError, "expected one number format"),
        (lambda x, i: cg.ops.scatter(x, i, x[:3], "min"), GraphError, "mode 'min', expected one of add, set, max"),
        (lambda x, i: cg.ops.scatter(x, i, x[:3], inplace=None), GraphError, "inplace is None, expected True or False"),
        (lambda x, i: cg.ops.scatter(x, x, x[:3]), ShapeError, "expected an integer format"),
        (lambda x, i: cg.ops.arange(0), ShapeError, "arange: size: 0, expected a positive integer"),
        (lambda x, i: cg.ops.arange(3, "int65"), cg.FormatError, "int65"),
    ],
)
def test_refusals_name_the_place_the_value_and_what_was_expected(call, error, text):
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
    assert cg.costs(g).filter(op="gather").total().read == 4 * (3 * 2) + 8 * 3  # as many rows as different indices
