import gc

import pytest

import costgraph as cg
from costgraph.analysis.costs import collection_paused

B = cg.dims("B")


@pytest.fixture
def collector():
    running = gc.isenabled()
    yield
    (gc.enable if running else gc.disable)()


@pytest.mark.parametrize("running", [True, False])
def test_gc_state_is_restored(collector, running):
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B,))))
    (gc.enable if running else gc.disable)()
    cg.flops(g)
    cg.peak_memory(g)
    assert gc.isenabled() is running


def test_gc_resumes_after_an_error(collector):
    gc.enable()

    @collection_paused()
    def fail():
        assert not gc.isenabled()
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert gc.isenabled()
