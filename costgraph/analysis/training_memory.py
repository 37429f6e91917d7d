"""Training memory: weights, gradients, optimizer state and activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import sympy

from ..algebra.dominance import prune
from ..algebra.extremum import extremum
from ..algebra.polynomial import ZERO, Poly, total
from ..bind.evaluate import Formula, answer, bound_answer
from ..errors import GraphError
from ..ir.graph import (
    Graph,
    Storage,
    Tensor,
    bindings,
    need_graph,
)
from ..notation.validation import guarded
from .costs import repeated_bodies
from .liveness import (
    Program,
    closed,
    live_cases,
)

__all__ = ["StateBytes", "activation_memory", "bytes_per_param", "is_step", "saved_state_bytes", "state_bytes"]


@guarded()
@dataclass(frozen=True)
class StateBytes:
    """Bytes of weights, gradients and optimizer state."""

    params: Formula
    """parameters"""
    gradients: Formula
    """parameter gradients, as read by the optimizer"""
    state: Formula
    """optimizer state: moments, master copies, step counters"""

    @property
    def total(self) -> Formula:
        """Sum of all three."""
        return self.params + self.gradients + self.state


def _sources(graph: Graph, role: str) -> Iterator[Poly]:
    for g, times in repeated_bodies(graph):
        for t in g.tensors:
            if t.role == role and t.producer is None:
                yield t.storage.bytes * times


def _gradients(graph: Graph) -> Iterable[Poly]:
    """Return the bytes of parameter gradients, counting each storage once."""
    by_storage: dict[object, Tensor] = {g.storage: g for t, g in graph.gradients.items() if t.role == "param"}
    return [t.storage.bytes for t in by_storage.values()]


def is_step(graph: Graph) -> bool:
    """Whether a graph has gradients, or had them before a parameter update."""
    return bool(graph.gradients) or any(op.phase == "optimizer" for op in graph.walk())


def _parts(graph: Graph, question: str) -> tuple[Poly, Poly, Poly]:
    need_graph(question, graph)
    if not is_step(graph):
        raise GraphError(f"{question}: graph {graph.name!r} has no gradients; expected the result of training_step")
    if "state bytes" not in graph.cache:
        computed = total(_sources(graph, "param")), total(_gradients(graph)), total(_sources(graph, "state"))
        graph.cache["state bytes"] = computed
    parts: tuple[Poly, Poly, Poly] = graph.cache["state bytes"]
    return parts


def state_bytes(step: Graph, /, **dims: int) -> StateBytes:
    """Return the bytes of weights, gradients and optimizer state in a training step.

    Parameters
    ----------
    step : Graph
        Graph from `training_step` or `backward`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    StateBytes
        `.params`, `.gradients`, `.state` and `.total`, each an int or a formula. Gradients count at their total size
        before the update, even if they are freed afterwards. They are zero if the optimizer runs in the backward pass
        and frees them one by one.

    Raises
    ------
    GraphError
        If the graph has no gradients.
    BindingError
        If a size cannot be bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> cg.state_bytes(cg.training_step(cg.models.load("gpt2"), precision="bf16"))
    StateBytes(params=248879616, gradients=248879616, state=995518464)
    """
    values = bindings(step, dims)
    return StateBytes(*(bound_answer(p, values) for p in _parts(step, "state_bytes")))


def saved_state_bytes(step: Graph, /, **dims: int) -> Formula:
    """Return the bytes of a training checkpoint: weights and optimizer state, without gradients.

    Parameters
    ----------
    step : Graph
        Graph from `training_step`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Bytes.

    Raises
    ------
    GraphError, BindingError
        As in `state_bytes`.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("gpt2"), precision="fp32")
    >>> cg.saved_state_bytes(step) == (4 + 8) * cg.param_count(step)
    True
    """
    params, _, state = _parts(step, "saved_state_bytes")
    return bound_answer(params + state, bindings(step, dims))


def bytes_per_param(step: Graph, /, **dims: int) -> Formula:
    """Return the bytes of weights, gradients and optimizer state per parameter.

    Parameters
    ----------
    step : Graph
        Graph from `training_step` or `backward`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int, float or sympy.Expr
        Bytes per parameter: a number if it is the same for all sizes, as with Adam, otherwise a formula. Single
        tensors, such as a loss scale, are spread over the parameters.

    Raises
    ------
    GraphError, BindingError
        As in `state_bytes`.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("llama-3-8b", symbolic=True)
    >>> [cg.bytes_per_param(cg.training_step(g, precision=p)) for p in ("fp32", "bf16", "megatron-bf16")]
    [16, 12, 18]
    """
    state_total = total(_parts(step, "bytes_per_param"))
    count = total(
        t.storage.elements * times
        for g, times in repeated_bodies(step)
        for t in g.tensors
        if t.role == "param" and t.producer is None
    )
    if not count:
        raise GraphError(f"bytes_per_param: graph {step.name!r} has no parameter, expected one")
    values = bindings(step, dims)
    return answer(_ratio(state_total.bind(values), count.bind(values)), values.held)


def _ratio(amount: Poly, count: Poly) -> Poly | sympy.Expr:
    """Return bytes per count, as a number plus a remainder if every term has a common ratio."""
    ratios = {Fraction(amount.terms.get(m, 0)) / c for m, c in count.terms.items()}
    ratio = next(iter(ratios)) if len(ratios) == 1 else Fraction(0)
    remainder = amount - count * ratio
    if not remainder or amount.names() | count.names() == set():
        return amount / count
    return sympy.Rational(ratio.numerator, ratio.denominator) + remainder.expr / count.expr


# -- activations ---------------------------------------------------------------------------------------------------


def _holding_gradients(graph: Graph) -> set[Storage]:
    """Return the storages of gradients, including accumulators inside loops."""
    holders: set[Tensor] = set()
    pending = list(graph.gradients.values())
    while pending:
        t = pending.pop()
        if t in holders:
            continue
        holders.add(t)
        op = t.producer
        if op is not None:
            pending += [o for o in op.operands if o.storage is t.storage]
            if op.body is not None and op.loop is not None:
                pending.append(op.body.outputs[op.results.index(t)])
    return {t.storage for t in holders}


def _activations(graph: Graph, program: Program) -> Program:
    """Reduce a program to storages that the forward and backward pass allocate and free."""
    grad_storages = _holding_gradients(graph)
    late = {i for i, s in enumerate(program.steps) if s.op.phase == "optimizer"}
    steps = [replace(s, workspace=ZERO) if i in late else s for i, s in enumerate(program.steps)]
    lives = [
        e
        for e in program.lives
        if e.role in ("activation", "temporary") and not (e.made and e.made[0] in grad_storages)
    ]
    return Program(steps, [life for life in lives if life.born is not None and life.born not in late])


def activation_memory(graph: Graph, /, **dims: int) -> Formula:
    """Return the peak bytes of activations and temporaries in the backward pass.

    Parameters
    ----------
    graph : Graph
        Training step, or a forward graph.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Bytes, including workspace, but without parameters, gradients, optimizer state and temporaries, inputs, buffers
        and outputs. A `costgraph.Max` while a size is open, as in `peak_memory`.

    Raises
    ------
    BindingError
        If a size cannot be bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("gpt2")
    >>> kept, again = cg.training_step(g), cg.training_step(g, checkpoint=cg.every_block())
    >>> [round(cg.activation_memory(step, B=8, S=1024) / 1e9, 2) for step in (kept, again)]
    [4.92, 2.65]
    """
    need_graph("activation_memory", graph)
    values = bindings(graph, dims)
    cases = [(p.bind(values), owner) for p, owner in live_cases(graph, values, _activations)]
    if all(p.constant is not None for p, _ in cases):
        return answer(max((p for p, _ in cases), key=lambda p: p.constant or 0))
    return answer(
        extremum(prune(cases, values.validity.known) if values else cases), closed(graph, values, _activations)
    )
