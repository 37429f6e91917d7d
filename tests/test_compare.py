"""Comparing the costs of two graphs by op class."""

import re

import pytest
from shared import load

import costgraph as cg

B, D, F = cg.dims("B D F")


def net(function=cg.relu, scale=False):
    with cg.Graph("net") as g:
        y = function(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F))
        g.output(cg.softmax(y * 2 if scale else y))
    return g


def test_equal_graphs_have_no_difference():
    comparison = cg.compare(net(), net())
    assert comparison.differing() == ()
    assert comparison.rows
    assert all(comparison.total(kind) == 0 for kind in ("matmul", "pointwise", "transcendental", "read", "written"))


def test_differences_are_formulas_by_op_class():
    comparison = cg.compare(net(), net(cg.silu, scale=True))
    # silu has 3 + 1 FLOPs per element, relu 1; the product by 2 adds one, with its own traffic
    assert {(r.ops, r.kind): r.difference for r in comparison.differing()} == {
        ("pointwise", "pointwise"): 3 * B * F,
        ("pointwise", "transcendental"): B * F,
        ("pointwise", "read"): 4 * B * F,
        ("pointwise", "written"): 4 * B * F,
    }
    assert comparison.total("pointwise") == 3 * B * F


SIZES = {"B": 3, "S": 5, "D": 8, "H": 2, "F": 7, "L": 3, "V": 11, "P": 13}


def test_comparison_rows_sum_to_graph_costs():
    one = load("gpt2", symbolic=True)
    two = cg.training_step(one, optimizer=cg.AdamW())
    comparison = cg.compare(one, two, **SIZES)
    for g, side in ((one, "first"), (two, "second")):
        total = cg.costs(g, **SIZES).total()
        for kind in ("matmul", "pointwise", "transcendental", "read", "written"):
            assert sum(getattr(r, side) for r in comparison.rows if r.kind == kind) == getattr(total, kind)


def test_sizes_are_bound_in_the_graphs_that_have_them():
    with cg.Graph("other") as other:
        other.output(cg.relu(other.input("x", (B,))))
    comparison = cg.compare(net(), other, B=2, D=3, F=5)
    assert {r.difference for r in comparison.rows if r.ops == "matmul" and r.kind == "matmul"} == {-2 * 2 * 3 * 5}
    with pytest.raises(cg.BindingError, match="Q"):
        cg.compare(net(), other, Q=2)


def test_count_option_matches_matmul_flops():
    causal = load("gpt2", symbolic=True)
    for count in ("executed", "full"):
        comparison = cg.compare(causal, causal, count=count, **SIZES)
        assert sum(r.first for r in comparison.rows if r.kind == "matmul") == cg.matmul_flops(
            causal, count=count, **SIZES
        )


def test_comparison_table_is_printed():
    lines = str(cg.compare(net(), net())).splitlines()
    heads = ["phase", "ops", "kind", "first [FLOP, B]", "second [FLOP, B]", "difference"]
    assert re.split(r"  +", lines[0]) == heads
    assert lines[1].split() == ["forward", "matmul", "matmul", "2*B*D*F", "2*B*D*F", "0"]


@pytest.mark.parametrize("graphs", [(1, net()), (net(), None)])
def test_comparing_non_graphs_raises(graphs):
    with pytest.raises(cg.GraphError, match=r"compare: (first|second) is .*, expected a graph"):
        cg.compare(*graphs)
