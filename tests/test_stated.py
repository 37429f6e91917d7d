import pytest
from each import each
from oracles import graph_of

import costgraph as cg
from costgraph import GraphError, ShapeError

B, D, N = cg.dims("B D N")


def test_opaque_costs_match_statement():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        y, index = cg.opaque(
            "sort",
            [x],
            [((B, D), "fp32"), ((B, D), "int64")],
            flops={"pointwise": 3 * B * D, "transcendental": B, "matmul": 2 * D},
            reads=[8 * B * D],
            writes=[4 * B * D, 40],
            workspace=7 * B,
        )
        g.output(y, index)
    total = cg.costs(g).total()
    assert (total.pointwise, total.transcendental, total.matmul) == (3 * B * D, B, 2 * D)
    assert (total.read, total.written) == (8 * B * D, 4 * B * D + 40)  # bytes, as stated
    assert cg.peak_memory(g) == 4 * B * D + 4 * B * D + 8 * B * D + 7 * B
    assert (y.shape, index.dtype.name) == ((B, D), "int64")


def test_opaque_reads_and_writes_everything_unless_stated():
    g, _ = graph_of(lambda x: cg.opaque("fft", [x], [((7,), "bf16")], flops=5)[0], (3,))
    assert cg.flops(g) == 5
    assert cg.bytes_moved(g) == 4 * 3 + 2 * 7


def test_opaque_total_bytes_may_be_stated():
    with cg.Graph("g", dtype="bf16") as g:
        a, b = g.input("a", (B, D)), g.input("b", (D,), dtype="int64")
        y = cg.opaque("scan", [a, b], (B, D), flops=B, reads=6 * B * D, writes=2 * B * D)
        g.output(y)
    total = cg.costs(g).total()
    assert (total.read, total.written) == (6 * B * D, 2 * B * D)
    assert (y.shape, y.dtype.name) == ((B, D), "bf16")


def test_opaque_returns_tensor_or_tuple():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        one = cg.opaque("one", [x], ((B, D), "int8"), flops=0)
        pair = cg.opaque("pair", [x], [(B,), ((D,), "bool")], flops=0)
    assert (one.shape, one.dtype.name) == ((B, D), "int8")
    assert [(t.shape, t.dtype.name) for t in pair] == [((B,), "fp32"), ((D,), "bool")]


def test_transfer_moves_each_byte_once():
    g, y = graph_of(lambda x: cg.ops.transfer(x, "pcie"), (3, 5))
    assert not y.is_view
    assert cg.flops(g) == 0
    assert cg.bytes_moved(g) == 4 * 15 + 4 * 15


@each(
    ("kind", "first", "flops"),
    [
        # ring reductions: ranks - 1 additions per element, spread over the ranks
        ("all_reduce", 12, 12 * 5 * 3 // 4),
        ("all_gather", 48, 0),
        ("reduce_scatter", 3, 12 * 5 * 3 // 4),
        ("all_to_all", 12, 0),
        ("send", 12, 0),
    ],
)
def test_collectives_resize_first_axis_and_count_reduction_flops(kind, first, flops):
    g, y = graph_of(lambda x: cg.ops.collective(x, kind, 4), (12, 5))
    assert y.shape == (first, 5)
    assert cg.flops(g) == flops
    assert cg.bytes_moved(g) == 4 * 12 * 5 + 4 * first * 5


@each(
    ("call", "error", "text"),
    [
        (lambda x: cg.opaque("op", [x], [((3,), "fp32")], flops={"macs": 3}), GraphError,
         "FLOPs of kind 'macs', expected one of matmul, pointwise, transcendental"),
        (lambda x: cg.opaque("op", [x], [((3,), "fp32")], flops={}), GraphError, "no FLOPs stated, pass 0"),
        (lambda x: cg.opaque("op", [x], [((3,), "fp32")], flops=-1), ShapeError,
         "pointwise FLOPs: -1, expected an amount"),
        (lambda x: cg.opaque("op", [x], [((3,), "fp32")], flops=1.5), ShapeError, "1.5"),
        (lambda x: cg.opaque("op", [x], [((3,), "fp32")], flops=None), ShapeError, "pointwise FLOPs: size"),
        (lambda x: cg.opaque("op", [x], [((3,), "fp32")], flops=0, workspace=-1), ShapeError, "workspace: -1"),
        (lambda x: cg.opaque("op", [x], [((3,), "fp32")], flops=0, reads=[1, 2]), GraphError,
         "reads: 2 amounts, expected one"),
        (lambda x: cg.opaque("op", [x], [((3,), "fp32")], flops=0, writes=[]), GraphError,
         "writes: 0 amounts, expected one"),
        (lambda x: cg.opaque("op", [x], [3], flops=0), GraphError, "output 1 is 3, expected a shape or a pair"),
        (lambda x: cg.opaque("op", [x], [((0,), "fp32")], flops=0), ShapeError,
         "output 1: axis 0: 0, expected a positive"),
        (lambda x: cg.opaque("op", [x], [((3,), "fp33")], flops=0), cg.FormatError, "fp33"),
        (lambda x: cg.opaque("op", x, [((3,), "fp32")], flops=0), GraphError, "inputs is .*, expected a list"),
        (lambda x: cg.opaque("op", [x], x, flops=0), GraphError, "expected a shape or a pair"),
        (lambda x: cg.opaque("op", [3], [((3,), "fp32")], flops=0), GraphError, "inputs is .*, expected a list"),
        (lambda x: cg.opaque("a b", [x], [((3,), "fp32")], flops=0), GraphError, "name 'a b'"),
        (lambda x: cg.ops.transfer(x, 3), GraphError, "link is 3, expected text"),
        (lambda x: cg.ops.transfer(3), GraphError, "transfer: x is 3, expected a tensor"),
        (lambda x: cg.ops.collective(x, "broadcast", 4), GraphError,
         "collective 'broadcast', expected one of all_reduce"),
        (lambda x: cg.ops.collective(x, "send", 0), ShapeError, "ranks: 0, expected a positive integer"),
        (lambda x: cg.ops.collective(x, "reduce_scatter", 2), ShapeError,
         "result 1: axis 0: 3/2, expected a positive integer"),
        (lambda x: cg.ops.collective(None, "send", 2), GraphError, "collective: x is None, expected a tensor"),
    ],
)  # fmt: skip
def test_refusals_name_place_value_and_expectation(call, error, text):
    with cg.Graph("g") as g:
        x = g.input("x", (3,))
        with pytest.raises(error, match=text):
            call(x)
