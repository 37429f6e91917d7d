"""Activation checkpointing: the interval with the lowest memory, and the cheapest policy within a memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy

from ..algebra.polynomial import Poly, poly
from ..algebra.symbols import dims as make_dims
from ..algebra.symbols import is_name, shown
from ..analysis.costs import costs
from ..analysis.liveness import live_bytes, play
from ..analysis.memory import peak_memory
from ..bind.evaluate import Formula, bound_answer, need_bound
from ..errors import BindingError, GraphError
from ..hardware.specs import Hardware
from ..ir.graph import (
    Graph,
    bindings,
    known_names,
    need_graph,
)
from ..transforms.backward import backward
from ..transforms.checkpoint import Checkpoint, every, every_block, from_start, selective
from ..transforms.loss import with_loss
from ..transforms.training import training_step
from .capacity import (
    Bytes,
    memory_limit,
)

__all__ = ["best_interval", "checkpoint_for"]

_MOST_LAYERS = 10_000  # a step is derived for each divisor


def best_interval(graph: Graph, /, loss: Any = None, **dims: int) -> Formula:
    """Return the number of layers to recompute together for the lowest memory, as `costgraph.every` does.

    Parameters
    ----------
    graph : Graph
        A model with a stack of layers.
    loss : str or callable, optional
        As in `training_step`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    float or sympy.Expr
        The k that minimizes the saved activations a*L/k + b*k, with a*L/k for the inputs of groups and b*k for the
        activations of the group that is recomputed: sqrt(a*L/b) (Chen et al. 2016, arXiv 1604.06174, section 4). a and
        b are read from the derived backward pass. k is seldom a divisor of L, as `every` requires.

    Raises
    ------
    GraphError
        If no loop of the graph can be split into groups.
    BindingError
        If a size cannot be bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("gpt2", symbolic=True)
    >>> round(cg.plan.best_interval(g, B=1, S=1024, D=768, H=12, F=3072, L=48, V=50257, P=1024), 1)
    1.7
    """
    need_graph("best_interval", graph)
    values = bindings(graph, dims)
    name = next(n for n in ("k", "interval", "interval_of_layers") if n not in known_names(graph))
    if not any(op.loop is not None for op in graph.walk()):
        raise GraphError(f"best_interval: graph {graph.name!r} has no stack of layers that can be split into groups")
    step_graph = backward(with_loss(graph, loss), checkpoint=every(make_dims(name)))
    program = play(step_graph)
    recomputed = [i for i, step in enumerate(program.steps) if step.op.phase == "recompute"]
    begin = next((i for i in recomputed if i + 1 not in recomputed), None)
    live = next((p for index, p in live_bytes(program) if begin is not None and index > begin), None)
    groups, per_layer = (
        (Poly({}), Poly({})) if live is None else (_coefficient(live, name, -1), _coefficient(live, name, 1))
    )
    if not groups or not per_layer:
        raise GraphError(f"best_interval: graph {graph.name!r} has no stack of layers that can be split into groups")
    interval = sympy.sqrt(
        sympy.cancel((groups / per_layer).expr) if len(per_layer.terms) > 1 else (groups / per_layer).expr
    )
    return bound_answer(poly(interval), values)


def _coefficient(p: Poly, name: str, exponent: int) -> Poly:
    """Return the coefficient of a symbol's power."""
    matching = {m: c for m, c in p.terms.items() if dict(m).get(name) == exponent}
    return Poly({tuple((k, e) for k, e in m if k != name): c for m, c in matching.items()})


def _policies(graph: Graph, layers: int) -> Iterator[Checkpoint | None]:
    """Yield candidate policies: none, parts of a layer, each layer, groups of layers, and the whole model."""
    yield None
    for names in _parts(graph):
        yield selective(*names)
    yield every_block()
    for k in range(2, layers):
        if layers % k == 0:
            yield every(k)
            yield every(k, inside=every_block())
    yield from_start()


def _parts(graph: Graph) -> list[tuple[str, ...]]:
    """List the scopes and kernels inside the layers, each alone and all together."""
    names: dict[str, None] = {}
    for op in graph.ops:
        if op.loop is not None and op.body is not None:
            for inner in op.body.ops:
                first, *deeper = inner.name.removeprefix(f"{op.name}/").split("/")
                if (deeper or inner.body is not None) and is_name(first):
                    names[first] = None
    return [(name,) for name in names] + ([tuple(names)] if len(names) > 1 else [])


def checkpoint_for(
    graph: Graph,
    /,
    *,
    memory: Bytes | None = None,
    hardware: str | Hardware | None = None,
    options: dict[str, Any] | None = None,
    **dims: int,
) -> Checkpoint | None:
    """Return the activation checkpointing policy that fits and recomputes the least.

    Parameters
    ----------
    graph : Graph
        A model, as in `training_step`.
    memory : int or float, optional
        Memory limit in bytes.
    hardware : str or Hardware, optional
        Device whose usable memory is the limit; give either `memory` or `hardware`.
    options : dict, optional
        Further arguments of `training_step`: optimizer, precision, ...
    **dims : int
        A size for every dimension without a default.

    Returns
    -------
    Checkpoint or None
        None if the step fits without checkpointing. Candidates are parts of a layer by name, each layer, every k-th
        layer for every divisor of the layer count, alone and nested, and the whole model.

    Raises
    ------
    BindingError
        If a dimension is unbound, no limit or two are given, or nothing fits; the message states the least memory.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("gpt2", attention="eager")
    >>> cg.plan.checkpoint_for(g, memory=6e9, B=8, S=1024).names
    ('attention',)
    """
    need_graph("checkpoint_for", graph)
    limit = memory_limit("checkpoint_for", hardware, memory)
    chosen, sizes = dict(options or {}), dict[str, Any](dims)
    if "checkpoint" in chosen:
        raise GraphError(
            "checkpoint_for: options already include checkpoint; expected the other arguments of training_step"
        )
    fitting: list[tuple[Any, Any, Checkpoint | None]] = []
    smallest: Any = None
    layers = _layers(graph, dims)
    if layers > _MOST_LAYERS:
        raise BindingError(f"checkpoint_for: {shown(layers)} layers, expected at most {_MOST_LAYERS}")
    for policy in _policies(graph, layers):
        if policy is not None and not policy.recomputes(graph):
            continue
        step = training_step(graph, checkpoint=policy, **chosen)
        peak = peak_memory(step, **sizes)
        need_bound([peak], "checkpoint_for")
        smallest = peak if smallest is None else min(smallest, peak)
        if peak <= limit:
            recomputed = costs(step, **sizes).filter(phase="recompute").total().flops
            fitting.append((recomputed, peak, policy))
            if policy is None:
                return None
    if not fitting:
        raise BindingError(f"checkpoint_for: the smallest peak is {smallest} bytes, expected at most {limit}")
    return min(fitting, key=lambda candidate: candidate[:2])[2]


def _layers(graph: Graph, dims: dict[str, int]) -> int:
    """Return the depth of the deepest stack of layers."""
    values = bindings(graph, dims)
    counts = [op.loop.count.bind(values).constant for op in graph.ops if op.loop is not None]
    return max((int(n) for n in counts if n is not None), default=1)
