"""The laws that every graph keeps, whatever its ops: each is a function of a trial that raises AssertionError.

Oracles are outside the code under test: the interpreter's counts, NumPy's layouts, a replay of
buffers, an unrolled graph, Python's fractions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from ..analysis.costs import bytes_moved, costs, flops, matmul_flops
from ..analysis.memory import peak_memory, timeline
from ..analysis.params import param_bytes, param_count
from ..analysis.storages import lifetimes
from ..errors import BindingError, UnsupportedError
from ..graph.graph import Graph
from ..graph.sizes import bindings, known_names
from ..ops.stacks import Empty
from ..transforms.rewrite import Rewriter
from .arithmetic import value
from .files import saved
from .interpreter import Run, run
from .meanings import MEANINGS

__all__ = ["LAWS", "Law", "Trial", "check", "law"]

Law = Callable[["Trial"], None]

#: Every law by its name.
LAWS: dict[str, Law] = {}

#: What a graph is asked: each gives a number once all sizes are bound.
QUESTIONS: dict[str, Callable[..., Any]] = {
    "flops": flops,
    "matmul_flops": matmul_flops,
    "full": lambda g, **dims: matmul_flops(g, count="full", **dims),
    "bytes_moved": bytes_moved,
    "fused": lambda g, **dims: bytes_moved(g, fused=True, **dims),
    "param_count": param_count,
    "param_bytes": param_bytes,
    "peak_memory": peak_memory,
}


def law(function: Law) -> Law:
    """Add a law."""
    LAWS[function.__name__] = function
    return function


class Trial:
    """A graph at one point, and what the interpreter counted there.

    Parameters
    ----------
    graph : Graph
        What is held to the laws.
    point : mapping of str to int
        A size for every dimension.
    """

    def __init__(self, graph: Graph, point: Mapping[str, int]) -> None:
        self.graph = graph
        self.point = dict(point)

    @cached_property
    def run(self) -> Run:
        """What the interpreter counted."""
        return run(self.graph, None, meanings=MEANINGS, **self.point)

    @cached_property
    def data(self) -> dict[str, Any]:
        """What a file of the graph holds."""
        return saved(self.graph)

    def takes(self, **dims: int) -> bool:
        """Whether the graph takes these sizes for those of the point: they divide and are assumed as it says."""
        try:
            bindings(self.graph, {**self.point, **dims})
        except BindingError:
            return False
        return True

    @cached_property
    def answers(self) -> dict[str, Any]:
        """What the library says with all sizes bound."""
        return {name: ask(self.graph, **self.point) for name, ask in QUESTIONS.items()}

    @cached_property
    def counts(self) -> list[str]:
        """Symbols that only count iterations: they may be 1, and change no layout."""
        counts = [op.loop.count for op in self.graph.walk() if op.loop is not None]
        names = {n for p in counts for n in p.names() if len(p.names()) == 1 and p.terms == {((n, 1),): 1}}
        sizes = {n for g in self.graph.bodies() for t in g.tensors for p in t.sizes for n in p.names()}
        return sorted(names - sizes)


def check(graph: Graph, laws: Iterable[str] | None = None, **point: int) -> None:
    """Hold a graph to the laws.

    Parameters
    ----------
    graph : Graph
        What is held to them.
    laws : iterable of str, optional
        Names of laws, all by default.
    **point : int
        A size above 1 for every dimension: a size of 1 makes some copies free, as `docs/concepts/limits.md` says.

    Raises
    ------
    AssertionError
        If one is broken: the text says which, where, and both figures.
    UnsupportedError, BindingError
        If a law is unknown, an op kind has no meaning, or a dimension has no size.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph import testing
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.softmax(cg.linear(g.input("x", (B, D)), "b d -> b f", f=D)))
    >>> testing.check(g, B=3, D=5)
    """
    chosen = list(LAWS if laws is None else laws)
    unknown = sorted(set(chosen) - LAWS.keys())
    if unknown:
        raise UnsupportedError(f"check: law {unknown[0]!r}, expected one of {', '.join(LAWS)}")
    defaults = {k: v for k, v in graph.defaults.items() if k in known_names(graph)}
    point = defaults | point
    if not defaults.items() <= point.items():  # its formulas have other sizes in them already
        graph = Rewriter().run(graph)
        with graph:
            graph.defaults = {}
    trial = Trial(graph, point)
    for name in chosen:
        try:
            LAWS[name](trial)
        except AssertionError as error:
            text = " ".join(str(error).split())
            raise AssertionError(f"law {name!r} at {trial.point}: {text}") from None


def same(found: Any, expected: Any, what: str, how: str = "expected") -> None:
    """Compare two figures: exactly, or where the library has to round to a float, to its nearest one."""
    exact = float(expected) if isinstance(found, float) else Fraction(expected)
    assert found == exact, f"{what}: {found} derived, {expected} {how}"


# -- against the interpreter -------------------------------------------------------------------------------------


def _as_counted(found: Any, counted: Any, what: str) -> None:
    same(found, counted, what, "counted")


def _amounts(trial: Trial, count: str = "executed") -> dict[str, dict[str, Any]]:
    """Return what the table of costs says of each op, by kind and direction."""
    out: dict[str, dict[str, Any]] = {}
    for row in costs(trial.graph, count=count, **trial.point):
        key = row.kind if row.direction == "compute" else row.direction
        of = out.setdefault(row.op, {})
        of[key] = of.get(key, 0) + (row.amount.constant if row.amount.constant is not None else 0)
    return out


@law
def flops_of_each_kind_are_what_the_interpreter_counts(trial: Trial) -> None:
    """A multiply and an add for each index point of a contraction, one by one for everything else."""
    executed, full = _amounts(trial), _amounts(trial, "full")
    for name, counted in trial.run.ops.items():
        mine = executed.get(name, {})
        for kind in ("matmul", "pointwise", "transcendental"):
            _as_counted(mine.get(kind, 0), getattr(counted.tally, kind), f"{kind} FLOPs of {name!r}")
        whole = full.get(name, {}).get("matmul", 0)
        assert whole >= mine.get("matmul", 0), f"matmul FLOPs of {name!r}, domains ignored, are {whole}: fewer than run"
        _as_counted(whole, counted.tally.full, f"matmul FLOPs of {name!r}, domains ignored")
    _as_counted(trial.answers["flops"], trial.run.flops, "FLOPs")
    _as_counted(trial.answers["matmul_flops"], trial.run.matmul, "matmul FLOPs")
    _as_counted(trial.answers["full"], trial.run.full, "matmul FLOPs, domains ignored")


@law
def bytes_moved_are_the_elements_that_are_touched(trial: Trial) -> None:
    """Every different element once an op; of different parts of one storage the widest at least, all at most."""
    executed = _amounts(trial)
    for name, counted in trial.run.ops.items():
        mine = executed.get(name, {})
        read, written = mine.get("read", 0), mine.get("write", 0)
        if counted.repeats:
            assert read >= counted.read, f"bytes read by {name!r}: {read} derived, {counted.read} counted"
            assert written >= counted.written, (
                f"bytes written by {name!r}: {written} derived, {counted.written} counted"
            )
            continue
        _as_counted(written, counted.written, f"bytes written by {name!r}")
        if counted.widest == counted.read:
            _as_counted(read, counted.read, f"bytes read by {name!r}")
        else:
            least, most = counted.widest, counted.most
            assert least <= read <= most, f"bytes read by {name!r}: {read} derived, {least} to {most} counted"


@law
def the_fused_bound_is_below_everything(trial: Trial) -> None:
    """Never above the bytes as declared, nor above what is touched of inputs and made as outputs."""
    bound = float(trial.answers["fused"])  # fractions of bytes come as the nearest float
    assert bound <= float(trial.answers["bytes_moved"]), f"fused bytes {bound} above the declared ones"
    if trial.run.repeats:
        return  # of lookups the formulas know less
    touched = sum(len(found) * b.element for b, found in trial.run.touched.items())
    written = {(b, a) for t, b, found in _made(trial) for a in found}
    most = touched + sum(b.element for b, _ in written)
    assert bound <= float(most), f"fused bytes: {bound} derived, {most} counted at most, inputs touched and outputs"


@law
def bytes_through_a_cache_are_no_fewer_than_declared(trial: Trial) -> None:
    """Bytes through a cache are no fewer than declared, and as many where everything fits."""
    declared = float(trial.answers["bytes_moved"])
    small, large = (float(bytes_moved(trial.graph, False, cache=size, **trial.point)) for size in (64, "1 EB"))
    assert large == declared, f"bytes through a cache that holds all: {large}, expected {declared} as declared"
    assert small >= declared, f"bytes through a cache of 64 bytes: {small}, below {declared} as declared"


def _made(trial: Trial) -> Iterable[tuple[int, Any, list[int]]]:
    """Yield the addresses of outputs that are no inputs."""
    by_tensor = dict(trial.run.values)
    for i, t in enumerate(trial.graph.outputs):
        v = by_tensor.get(t)
        if v is not None and not v.buffer.throughout:
            yield i, v.buffer, [v.address(index) for index in v.points()]
        elif v is None:  # the result of a loop
            found = trial.run.outputs[i]
            buffer = trial.run._kept[i]
            if not buffer.throughout:
                yield i, buffer, list(range(found.size))


@law
def peak_memory_is_that_of_a_replay(trial: Trial) -> None:
    """Buffers taken when an op makes them, given back after the last op that touches them."""
    _as_counted(trial.answers["peak_memory"], trial.run.peak, "peak memory")
    line = timeline(trial.graph, **dict[str, Any](trial.point))
    _as_counted(line.peak, trial.run.peak, "peak of the timeline")
    _as_counted(sum(map(Fraction, line.by_role.values())), trial.run.peak, "bytes by role at the peak")
    fixed = sum(b.bytes for b in trial.run.buffers)
    kept = sum(b.bytes for b in set(trial.run._kept) if not b.throughout)
    assert trial.run.peak >= fixed + kept, f"peak {trial.run.peak} below parameters, inputs and outputs"
    rows = lifetimes(trial.graph, **dict[str, Any](trial.point))
    _as_counted(sum(Fraction(r.bytes) for r in rows if r.born is None), fixed, "bytes of what lives throughout")


@law
def parameters_are_those_of_all_iterations(trial: Trial) -> None:
    """Elements and bytes of every parameter that the interpreter made."""
    _as_counted(trial.answers["param_count"], trial.run.params, "parameters")
    _as_counted(trial.answers["param_bytes"], trial.run.param_bytes, "bytes of parameters")


@law
def layouts_are_those_of_numpy(trial: Trial) -> None:
    """Shape, strides and view or copy, as NumPy decides them for sizes above 1."""
    inner = {t for g in trial.graph.bodies() if g.parent is not None for t in g.tensors}
    by_tensor = dict(trial.run.values)
    for t, v in trial.run.values:
        alone = t.storage.pieces  # leading axes of which each position is an array of its own
        shape = tuple(value(p.expr, trial.point) for p in t.sizes[alone:])
        assert v.array.shape == shape, f"shape of {t.name!r} is {shape}, expected {v.array.shape}"
        for n, mine, bytes_ in zip(shape, t.strides[alone:], v.array.strides, strict=True):
            assert n == 1 or value(mine.expr, trial.point) * 8 == bytes_, (
                f"strides of {t.name!r} are {t.strides}, expected {[s // 8 for s in v.array.strides]}"
            )
        base = None if t.producer is None or t in inner else next(iter(t.producer.operands), None)
        if base is not None and t.producer is not None and t.producer.body is None and base in by_tensor:
            shared = v.buffer is by_tensor[base].buffer
            assert shared == (t.storage is base.storage), f"{t.name!r} is {'a view' if shared else 'a copy'} in NumPy"


@law
def tensors_hold_what_has_been_written(trial: Trial) -> None:
    """Something at each index point of its domain and nowhere else, at every one of a tensor without a domain."""
    for t, v in trial.run.values:
        if (t.domain is None and v.whole) or (t.producer is not None and isinstance(t.producer.kind, Empty)):
            continue
        held = np.zeros(v.array.shape, dtype=bool)
        for index in v.points():
            held[index] = True
        odd = np.argwhere(held != trial.run.sizes.held(t)[(0,) * t.storage.pieces])
        assert not odd.size, f"{t.name!r} holds {'some' if held[tuple(odd[0])] else 'no'}thing at {odd[0].tolist()}"
