"""Offloading to the host changes no value in a drawn step; the peak matches simulated buffers."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import costgraph as cg
from costgraph import testing
from costgraph.errors import CostGraphError, GraphError

SETTINGS = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
SETS = st.sets(st.sampled_from(["optimizer", "parameters", "activations"]), min_size=1)
POLICIES = st.sampled_from([None, cg.every_block()])
OPTIMIZERS = st.sampled_from([cg.SGD(momentum=0.9), cg.AdamW(implementation="fused")])


def held(case, what, options, seen):
    try:
        whole = cg.training_step(case.graph, **options)
    except CostGraphError:  # autograd rejects some graphs, and some have no layers
        whole = case.graph
    updates = any(op.phase == "optimizer" for op in whole.walk())
    saved = whole is not case.graph and any(cg.saved_bytes(whole).values())
    there = {"optimizer": updates, "parameters": whole.params, "activations": saved}
    for name in what:
        if not there[name]:
            with pytest.raises(GraphError, match=r"has no \w+ to offload; expected a"):
                cg.offload(whole, what)
            seen["nothing"] += 1
    away = cg.offload(whole, {name for name in what if there[name]})
    one, other = (testing.run(g, seed=1, **case.point) for g in (whole, away))
    for a, b in zip(one.outputs, other.outputs, strict=True):
        np.testing.assert_array_equal(a, b)
    for name, a in one.gradients.items():
        np.testing.assert_array_equal(a, other.gradients[name])
    left = [{b.name: b.array for b in run.buffers} for run in (one, other)]
    assert left[0].keys() == left[1].keys()
    for name, a in left[0].items():
        np.testing.assert_array_equal(a, left[1][name])
    assert cg.peak_memory(away, **case.point) == other.peak
    seen["steps"] += whole is not case.graph
    seen["moved"] += any(op.kind.name == "transfer" for op in away.walk())


@pytest.mark.parametrize("examples", [30, pytest.param(600, marks=pytest.mark.long)])
def test_drawn_steps_compute_the_same_wherever_their_tensors_lie(examples):
    seen = Counter()

    @settings(max_examples=examples, **SETTINGS)
    @given(testing.losses(most=6), SETS, POLICIES, OPTIMIZERS)
    def drawn(case, what, checkpoint, optimizer):
        held(case, what, {"optimizer": optimizer, "checkpoint": checkpoint}, seen)

    drawn()
    assert seen["steps"] >= 0.4 * examples, seen
    assert seen["nothing"], seen
    assert seen["moved"] >= 0.6 * examples, seen
