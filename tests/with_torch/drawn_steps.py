"""Random graphs on random meshes of up to four ranks."""

from math import prod

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharded_steps import Case

import costgraph as cg
from costgraph import testing
from costgraph.errors import CostGraphError
from costgraph.ir.graph import known_names

#: Ops that are random, or have no torch equivalent.
UNLIKE = {"dropout", "opaque", "custom_call", "empty", "pool_backward"}


def drawn(count):
    """Yield random graphs on random meshes of up to four ranks, numbered."""
    cases = {}

    @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(testing.graphs(), st.data())
    def collect(case, data):
        spread = data.draw(testing.spreads(case.graph, case.point))
        odd = {op.kind.name for op in case.graph.walk()} & UNLIKE
        if odd or prod(spread.degrees.values()) > 4 or any(t.domain for t in case.graph.outputs):
            return
        try:
            sharded = cg.shard(case.graph, spread.mesh, spread.placements, gather=spread.gather)
            symbols = {n: ranks for n, ranks in spread.sizes.items() if n in known_names(sharded)}
            cg.peak_memory(sharded, **case.point, **symbols)
        except CostGraphError:
            return  # `tests/laws/test_law_shard.py` covers those
        if cg.communication(sharded).rows:
            cases[f"drawn {len(cases)}"] = Case(case.graph, sharded, spread.degrees, case.point, symbols)

    collect()
    return cases
