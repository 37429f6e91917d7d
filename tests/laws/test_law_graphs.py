"""Whole drawn graphs are held to every law."""

import pytest
from budget import drawing, examples
from hypothesis import given, settings

from costgraph import testing

drawn = drawing(100)


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
