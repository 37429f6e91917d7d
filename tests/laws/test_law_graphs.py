"""Whole drawn graphs are held to every law."""

import pytest
from budget import examples, multiplier
from hypothesis import HealthCheck, given, settings

from costgraph import testing

drawn = settings(
    max_examples=examples(100),
    deadline=None,  # an interpreter is slow, and a machine may be busy
    derandomize=multiplier() == 1,  # the fixed budget draws the same graphs each time, a larger one new ones
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("law", testing.LAWS)
@drawn
@given(case=testing.graphs())
def test_every_graph_keeps(law, case):
    testing.check(case.graph, [law], **case.point)


@settings(drawn, max_examples=examples(60))
@given(case=testing.graphs(most=14))
def test_large_graphs_keep_all_laws(case):
    testing.check(case.graph, **case.point)


@settings(drawn, max_examples=examples(100))
@given(case=testing.graphs(most=3, kinds=("repeat", "kernel", "pointwise", "einsum")))
def test_nested_loops_and_kernels_keep_all_laws(case):
    testing.check(case.graph, **case.point)
