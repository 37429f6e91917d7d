"""A graph on a mesh computes what it does on one device: all ranks at once on NumPy, graphs and placements drawn.

The oracle is the graph of all devices, run by NumPy's own functions; what is split, and along which axes, is drawn.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import costgraph as cg
from costgraph import testing
from costgraph.errors import BindingError

SETTINGS = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


def held(case, spread, seen):
    try:
        sharded = cg.shard(case.graph, spread.mesh, spread.placements)
    except (cg.GraphError, cg.UnsupportedError) as error:  # a rank is not split again, nor is its own order
        if "is that of one rank already" not in str(error) and "is in the order of each rank" not in str(error):
            raise
        seen["refused"] += 1
        return
    try:
        testing.check_sharded(case.graph, sharded, spread.degrees, **case.point, **spread.sizes)
    except BindingError as error:  # a size somewhere on the way that the ranks do not divide
        if "expected a positive whole number" not in str(error):
            raise
        seen["uneven"] += 1
        return
    seen["held"] += 1
    seen["collectives"] += bool(cg.communication(sharded).rows)


@pytest.mark.parametrize("examples", [40, pytest.param(500, marks=pytest.mark.long)])
def test_drawn_graphs_compute_on_a_mesh_what_they_do_on_one_device(examples):
    seen = Counter()

    @settings(max_examples=examples, **SETTINGS)
    @given(testing.graphs(), st.data())
    def drawn(case, data):
        held(case, data.draw(testing.spreads(case.graph, case.point)), seen)

    drawn()
    assert seen["held"] + seen["refused"] >= 0.85 * examples, seen
    assert seen["collectives"] >= 0.3 * examples, seen
