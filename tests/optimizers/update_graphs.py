"""Update graphs with values, and torch optimizers on the same values."""

import numpy as np

import costgraph as cg
from costgraph.optimizers import Slot
from costgraph.testing import run

# distinct primes: a vector, a wide and a tall matrix
SHAPES = ((7,), (3, 5), (11, 2))


def draw(shapes=SHAPES, seed=0):
    """Draw parameters and gradients of both signs."""
    random = np.random.default_rng(seed)
    return {f"{kind}{i}": random.normal(size=shape) for i, shape in enumerate(shapes) for kind in ("w", "g")}


def updated(optimizer, shapes=SHAPES, dtype="fp32", grads=None, masters=None):
    """Return the graph of one update."""
    with cg.Graph("update", dtype) as g:
        slots = [Slot(g.param(f"w{i}", s), g.input(f"g{i}", s, grads)) for i, s in enumerate(shapes)]
        if masters is not None:
            slots = [
                Slot(s.param, s.grad, s.param.graph.buffer(f"m{i}", s.param.sizes, masters, role="state"))
                for i, s in enumerate(slots)
            ]
        optimizer.update(slots)
    return g


def values(graph, inputs, **dims):
    """Return parameters, gradients and states after a run, which in-place ops update."""
    counted = run(graph, inputs, **dims)
    return counted, {b.name: b.array for b in counted.buffers}


def states(graph):
    return [t for t in graph.tensors if t.role == "state" and t.producer is None]


def stacked(optimizer, layers, shapes, before=lambda slots: slots, family=True):
    """Return the update of a stack of layers, with one storage per layer or with separately declared parameters."""
    with cg.Graph("stack") as g:
        slots = []
        if family:
            for i, shape in enumerate(shapes):
                slot = Slot(g.param(f"w{i}", (layers, *shape)), g.input(f"g{i}", (layers, *shape)))
                slot.param.storage.pieces = slot.grad.storage.pieces = 1
                slots.append(slot)
        else:
            for k in range(layers):
                for i, shape in enumerate(shapes):
                    slots.append(Slot(g.param(f"w{i}_{k}", shape), g.input(f"g{i}_{k}", shape)))
        optimizer.update(before(slots))
    return g
