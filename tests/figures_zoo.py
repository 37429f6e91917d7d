"""Figures for a zoo model: its forward pass, a training step, one decoding step and prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from figures_text import Questions, answer, asked, digest, shortened, text

import costgraph as cg

#: Skip evaluating the peak formula above this many regimes. Its guards query the graph once per regime, so hundreds of
#: regimes take minutes.
MOST_REGIMES = 50

#: Sizes at the small point. They differ from each other and from every model size.
SMALL = {"B": 3, "S": 17, "M": 13}
#: Candidates for the large point. The first is longer than every attention window; the last fits every position table.
#: The first one that the model accepts is used.
LARGE = tuple({"B": 5, "S": s, "M": 101} for s in (8209, 1021, 397, 61))

COSTS: Questions = {
    "flops": cg.flops,
    "matmul flops": cg.matmul_flops,
    "matmul flops full": partial(cg.matmul_flops, count="full"),
    "bytes": cg.bytes_moved,
    "bytes fused": partial(cg.bytes_moved, fused=True),
    "peak": cg.peak_memory,
}
FORWARD: Questions = {
    **COSTS,
    "params": cg.param_count,
    "params active": partial(cg.param_count, active=True),
    "param bytes": cg.param_bytes,
}
STEP: Questions = {
    **COSTS,
    "saved bytes": cg.saved_bytes,
    "state bytes": cg.state_bytes,
    "activation memory": cg.activation_memory,
}
CACHED: Questions = {**COSTS, "cache bytes": cg.cache_bytes}


def regimes(graph: cg.Graph, *columns: str, **dims: int) -> str:
    """Return a digest of the peak regimes: formulas and the given columns."""
    found = cg.regimes(cg.peak_memory(graph, **dims))
    return f"{len(found)} regimes {digest(sorted(' '.join([text(r.formula), *_columns(r, columns)]) for r in found))}"


def ops(graph: cg.Graph, *columns: str, **dims: int) -> str:
    """Return a digest of the cost table: amounts and the given columns."""
    rows = cg.costs(graph, **dims)
    return f"{len(rows)} rows {digest(sorted(' '.join([*_columns(r, columns), str(r.value)]) for r in rows))}"


def _columns(row: object, columns: tuple[str, ...]) -> list[str]:
    return [str(getattr(row, c)) for c in columns]


def evaluated_peak(graph: cg.Graph, dims: Mapping[str, int] | None = None) -> int | float:
    """Evaluate the peak formula at the given sizes, or at 1 for each, which its guards may refuse."""
    peak = cg.peak_memory(graph)
    names = {s.name for s in getattr(peak, "free_symbols", ())}
    return cg.evaluate(peak, **{name: 1 if dims is None else dims[name] for name in sorted(names)})


def points(graph: cg.Graph, defaults: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the small and the large point for a graph, published sizes included."""
    known = cg.costs(graph).names

    def at(given: Mapping[str, int]) -> dict[str, int]:
        return {k: v for k, v in {**given, **defaults}.items() if k in known}

    def accepted(dims: Mapping[str, int]) -> bool:
        try:
            return bool(cg.flops(graph, **dims))
        except cg.CostGraphError:
            return False

    large = next((d for d in map(at, LARGE) if accepted(d)), at(LARGE[-1]))
    return {"small": at(SMALL), "large": large}


def figures_of(graph: cg.Graph, questions: Questions, defaults: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Ask a graph each question with open sizes and at both points, and yield the answers and table digests."""
    columns = ("phase", "dtype", "direction")
    yield "peak regimes", answer(regimes, graph, "phase")
    yield "peak owners", answer(regimes, graph, "op", "phase")
    at = points(graph, defaults)
    if len(cg.regimes(cg.peak_memory(graph))) <= MOST_REGIMES:
        yield "peak formula at ones", answer(evaluated_peak, graph)
        yield "peak formula at small", answer(evaluated_peak, graph, at["small"])
    for place, dims in {"": {}, **at}.items():
        for key, question in questions.items():
            yield f"{key} {place}".strip(), answer(question, graph, **dims)
    for place, dims in at.items():
        yield f"at {place}", text(dims)
        yield f"ops {place}", answer(ops, graph, *columns, **dims)
        yield f"named ops {place}", answer(ops, graph, "op", "scope", "kind", *columns, **dims)


def mean_loss(*outputs: cg.Tensor) -> cg.Tensor:
    """Average the first output, as a loss for models that name none."""
    names = " ".join(f"a{i}" for i in range(outputs[0].ndim))
    return cg.reduce(cg.ops.cast(outputs[0], "fp32"), f"{names} -> ", "mean")


def training_step(graph: cg.Graph, **options: object) -> cg.Graph:
    """Return a training step with the loss that the model names, or else `mean_loss`."""
    return cg.training_step(graph, **{"loss": None if graph.loss else mean_loss, "optimizer": cg.AdamW(), **options})


#: Graphs derived from a model, and the questions for each.
GRAPHS: Mapping[str, tuple[Callable[[cg.Graph], cg.Graph], Questions]] = {
    "forward": (lambda graph: graph, FORWARD),
    "step": (training_step, STEP),
    "decode": (cg.decode, CACHED),
    "prefill": (cg.prefill, CACHED),
}


def figures(name: str, seconds: float) -> dict[str, str]:
    """Return all figures for a model by key."""
    graph, defaults = cg.models.load(name, symbolic=True), cg.models.load(name).defaults
    found = {"defaults": shortened(text(defaults))}
    for part, (derive, questions) in GRAPHS.items():
        found |= asked(part, seconds, lambda f=derive, q=questions: figures_of(f(graph), q, defaults))
    return found
