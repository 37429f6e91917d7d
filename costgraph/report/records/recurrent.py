"""Family of recurrent layers, whose input is added to each gate as it is: one product of the state a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated

import costgraph as cg

from ...notation.records import Size, one_of
from .case import Case, Run, family
from .kernels import DIRECTIONS, format_of
from .record import Record, facts

#: Products of the state with matrices of its own size, of which one a gate.
_GATES = {"vanilla": 1, "gru": 3, "lstm": 4}


@dataclass(frozen=True)
class _Layer:
    op: Annotated[str, one_of(_GATES)]
    hidden: Size
    N: Size
    timesteps: Size
    dtype: str
    direction: Annotated[str, one_of(DIRECTIONS)]


@cache
def _layer(gates: int, elements: cg.DType, direction: str) -> cg.Graph:
    """Return a pass over all steps; of a step the product, and a kernel that makes a state of its gates."""
    N, H, T = cg.dims("N H T")
    with cg.Graph("recurrent", dtype=elements.name) as g:
        if direction == "backward-weights":  # of all steps at once
            states, grads = g.input("states", (T, N, H)), g.input("grads", (T, N, gates, H))
            g.output(cg.einsum(states, grads, "t n h, t n g k -> g h k"))
            return g
        weight = g.param("weight", (gates, H, H))

        def forward(state: cg.Tensor, x: cg.Tensor) -> tuple[cg.Tensor, cg.Tensor]:
            made = cg.einsum(state, weight, "n h, g h k -> n g k")
            with cg.kernel("cell"):
                new = cg.reduce(cg.tanh(made + x[:, None]), "n g k -> n k", "sum")
            return new, new

        def backward(grad: cg.Tensor, saved: cg.Tensor) -> tuple[cg.Tensor, cg.Tensor]:
            with cg.kernel("cell"):
                gates_grad = grad[:, None] * saved
            new = cg.einsum(gates_grad, weight, "n g k, g h k -> n h")
            return new, new

        state = g.input("state", (N, H))
        if direction == "forward":
            made = cg.scan(T, forward, state, g.input("x", (T, N, H)))
        else:
            made = cg.scan(T, backward, state, g.input("saved", (T, N, gates, H)))
        _, outputs = made
        assert isinstance(outputs, cg.Tensor)
        g.output(outputs)
    return g


@family("deepbench-rnn", subject="recurrent layers")
def recurrent(record: Record) -> Case:
    """Predict a recurrent layer, or its gradient by its states or its weights."""
    given = facts(record, _Layer)
    g = _layer(_GATES[given.op], format_of(given.dtype), given.direction)
    return Case((Run(g, {"N": given.N, "H": given.hidden, "T": given.timesteps}),), repeated=True)
