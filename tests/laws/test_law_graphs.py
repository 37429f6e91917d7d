"""Whole drawn graphs are held to every law."""

import pytest
from budget import SHARES, drawing, examples, seed
from hypothesis import given

from costgraph import testing


@pytest.mark.parametrize("law", testing.LAWS)
@drawing(100)
@given(case=testing.graphs())
def test_every_graph_keeps(law, case):
    testing.check(case.graph, [law], **case.point)


def holds(case):
    testing.check(case.graph, **case.point)


@pytest.mark.parametrize("share", SHARES)
def test_large_graphs_keep_all_laws(share):
    testing.search(testing.graphs(most=14), holds, examples(60) // share, seed=seed())


@pytest.mark.parametrize("share", SHARES)
def test_nested_loops_and_kernels_keep_all_laws(share):
    nested = testing.graphs(most=3, kinds=("repeat", "kernel", "pointwise", "einsum"))
    testing.search(nested, holds, examples(100) // share, seed=seed())
