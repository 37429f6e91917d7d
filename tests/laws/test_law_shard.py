"""Sharded graphs compute the same values as on one device, simulating all ranks of drawn graphs and placements.

The oracle interprets the unsharded graph index point by index point; shardings are drawn.
"""

from collections import Counter

from budget import drawing, examples
from hypothesis import given
from hypothesis import strategies as st

import costgraph as cg
from costgraph import testing
from costgraph.errors import BindingError
from costgraph.ops.collectives import Meshed

REFUSED = ("is in rank-local order", "rows are sent to the ranks of their experts")


def of_all_devices(case):
    return not any(isinstance(op.kind, Meshed) and op.kind.axis for op in case.graph.walk())


def held(case, spread, seen):
    try:
        sharded = cg.shard(case.graph, spread.mesh, spread.placements, gather=spread.gather)
    except (cg.GraphError, cg.UnsupportedError) as error:  # a rank has its own op order
        if not any(text in str(error) for text in REFUSED):
            raise
        seen["refused"] += 1
        return
    try:
        testing.check_sharded(case.graph, sharded, spread.degrees, **case.point, **spread.sizes)
    except BindingError as error:  # some intermediate size is not divisible by the ranks
        if "expected a positive whole number" not in str(error):
            raise
        seen["uneven"] += 1
        return
    except AssertionError as error:  # the drawn routing sends more rows to some ranks than to others
        if "the routing is not balanced" not in str(error):
            raise
        seen["unbalanced"] += 1
        return
    seen["held"] += 1
    seen["collectives"] += bool(cg.communication(sharded).rows)


def test_drawn_graphs_compute_on_a_mesh_what_they_do_on_one_device():
    seen, count = Counter(), examples(800)

    @drawing(800)
    @given(testing.graphs().filter(of_all_devices), st.data())
    def drawn(case, data):
        held(case, data.draw(testing.spreads(case.graph, case.point)), seen)

    drawn()
    assert seen["held"] >= 0.85 * count, seen
    assert seen["collectives"] >= 0.4 * count, seen
