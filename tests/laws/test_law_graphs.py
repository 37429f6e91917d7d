"""Whole random graphs keep every law."""

import pytest
from budget import examples, seed

from costgraph import testing

DRAWN = {
    "graphs": (testing.graphs(), 100),
    "large graphs": (testing.graphs(most=14), 60),
    "nested loops and kernels": (testing.graphs(most=3, kinds=("repeat", "kernel", "pointwise", "einsum")), 100),
}


@pytest.mark.parametrize("what", DRAWN)
def test_drawn_graphs_keep_all_laws(what):
    strategy, count = DRAWN[what]
    testing.search(strategy, lambda case: testing.check(case.graph, **case.point), examples(count), seed=seed())
