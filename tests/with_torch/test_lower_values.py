"""Values of a lowered graph: the NumPy interpreter executes the same graph independently."""

import numpy as np
import pytest
from budget import drawing, is_plain
from hypothesis import assume, given

torch = pytest.importorskip("torch")
from lowered import both, defined, held  # noqa: E402  # it imports torch

from costgraph import testing  # noqa: E402  # after torch is known to be there
from costgraph.testing import STRATEGIES  # noqa: E402

torch.set_num_threads(1)
quick = drawing(100 if is_plain() else 200)


def has(graph, *kinds):
    return any(op.kind.name in kinds for op in graph.walk())


def truncates(graph):
    """Whether a float becomes an integer, or bools enter arithmetic: the interpreter does not round."""
    return any(op.kind.name == "pointwise" and op.kind.function.result == "same" and t.dtype.kind != "float"
               and any(o.dtype.kind == "float" or t.dtype.kind == "bool" for o in op.operands)
               for op in graph.walk() for t in op.results)  # fmt: skip


def opaque(graph, point):
    """The interpreter's result of an opaque op: zeros."""

    def zeros(sizes):
        return lambda *operands: tuple(torch.zeros(n, dtype=torch.float64) for n in sizes)

    def value(p):
        return int(testing.value(p.expr, point))

    ops = [op for op in graph.walk() if op.kind.name == "opaque"]
    return {op.name: zeros([tuple(map(value, t.sizes)) for t in op.results]) for op in ops}


def invents_places(graph):
    """Whether the gradient of a max pooling reads synthetic indices, which may lie outside its windows."""
    pool_gradients = [op for op in graph.walk() if op.kind.name == "pool_backward" and len(op.operands) == 3]
    return any(op.operands[2].producer is None for op in pool_gradients)


def agree(case):
    graph, point = case
    assume(not has(graph, "custom_call"))  # custom calls are drawn without meaning
    assume(not invents_places(graph))
    made, run = both(graph, point, opaque(graph, point))
    assume(defined(run) and not has(graph, "dropout") and not truncates(graph))
    for a, b, where in zip(made, run.outputs, held(graph, run), strict=True):
        assert tuple(a.shape) == b.shape
        np.testing.assert_allclose(a.numpy().astype(float)[where], b[where], rtol=1e-7, atol=1e-9)


# a max-pooling index outside its window is invalid: `test_lower.py` has real ones
@pytest.mark.parametrize(
    "kind", sorted({k.name for k in STRATEGIES} - {"pool_backward", "dropout", "empty", "custom_call"})
)
def test_ops_of_each_kind_compute_what_the_interpreter_does(kind):
    quick(given(testing.ops(kind))(agree))()


@pytest.mark.parametrize("kind", ["pool_backward", "dropout", "empty"])
def test_ops_with_other_numbers_run(kind):
    @quick
    @given(testing.ops(kind))
    def runs(case):
        assume(not has(case[0], "custom_call"))
        both(*case, opaque(*case))

    runs()


@drawing(600)
@given(testing.graphs())
def test_drawn_graphs_compute_what_the_interpreter_does(case):
    agree(case)


@drawing(400)
@given(testing.losses())
def test_drawn_losses_compute_what_the_interpreter_does(case):
    agree(case)
