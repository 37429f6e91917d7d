"""The laws on a few random graphs: mutants meet these instead of the long runs in `tests/laws`.

The file name keeps it out of plain pytest runs.
"""

import pytest
from hypothesis import HealthCheck, given, settings

import costgraph as cg
from costgraph import testing
from costgraph.ops.registry import KINDS

FEW = settings(
    max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)  # no `phases`: the runner's profile, which does not shrink, sets them


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_op_kind_keeps_the_laws(kind):
    testing.check_op(kind, 20)


@pytest.mark.parametrize("law", testing.LAWS)
@FEW
@given(case=testing.graphs(most=5))
def test_a_graph_keeps(law, case):
    testing.check(case.graph, [law], **case.point)


@FEW
@given(case=testing.graphs(most=3, kinds=("repeat", "kernel", "pointwise", "einsum")))
def test_loops_keep_the_laws(case):
    testing.check(case.graph, **case.point)


@FEW
@given(case=testing.graphs(most=7, kinds=("pointwise", "reduce", "dropout", "kernel", "expand", "repeat")))
def test_a_fused_graph_keeps_the_laws(case):
    fused = cg.fuse(case.graph)
    testing.check(fused, **case.point)
    assert cg.flops(fused, **case.point) == cg.flops(case.graph, **case.point)
    assert cg.bytes_moved(fused, **case.point) <= cg.bytes_moved(case.graph, **case.point)
