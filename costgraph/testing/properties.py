"""Properties that every op kind, graph and backward pass must satisfy."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import sympy
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from ..algebra.polynomial import Poly, poly
from ..algebra.symbols import dims
from ..analysis.costs import bytes_moved, costs, flops, intensity, matmul_flops
from ..analysis.liveness import Program, copies_needed, live_bytes, play
from ..analysis.memory import lifetimes, peak_memory, timeline
from ..analysis.params import param_bytes, param_count
from ..analysis.regimes import regimes
from ..analysis.roofline import roofline
from ..analysis.step_time import seconds
from ..bind.evaluate import compile, evaluate
from ..errors import BindingError, CostGraphError, GraphError, StandInWarning, UnsupportedError
from ..files.graphs import graph_of, text_of
from ..hardware.specs import Hardware, load_hardware
from ..hardware.units import Quantity
from ..ir.graph import BodyKind, Graph, Loop, Op, OpKind, Tensor, base_name, bindings, known_names, loops
from ..notation.grammar import parse_formula
from ..ops.einsum import Einsum
from ..ops.elementwise import Dropout, Pointwise
from ..ops.fill import Assign, Fill, Pad, SliceUpdate
from ..ops.index import Gather
from ..ops.layout import Concat, Expand, Rearrange, Slice
from ..ops.loops import Accumulate, Empty, Stacked
from ..ops.opaque import Transfer
from ..ops.reduce import Pool, Reduce
from ..report import report
from ..transforms.backward import backward
from ..transforms.checkpoint import Checkpoint, every, every_block, selective
from ..transforms.reverse_mode import hoist, peel
from ..transforms.rewrite import Rewriter
from ..transforms.unroll import unroll
from ..transforms.vjp.table import RULES
from .arithmetic import value
from .interpreter import REFERENCE_SEMANTICS, Array, Run, run
from .strategies import STRATEGIES, Case, Named, kind_of, ops

__all__ = [
    "loaded",
    "saved",
    "LAWS",
    "Law",
    "Trial",
    "check",
    "law",
    "played",
    "renamed",
    "around",
    "through",
    "TRAINING",
    "Lesson",
    "TrainingLaw",
    "check_training",
    "check_op",
    "missing",
    "search",
]


# -- graphs ------------------------------------------------------------------------------------------------------------


# -- serialization -----------------------------------------------------------------------------------------------------


def saved(graph: Graph) -> Data:
    """Return the data of the graph's file."""
    data: Data = json.loads(text_of(graph, "saved"))
    return data


def loaded(data: Data) -> Graph:
    """Return the graph stored in such data."""
    return graph_of(json.loads(json.dumps(data)), "loaded")


# -- properties --------------------------------------------------------------------------------------------------------

Law = Callable[["Trial"], None]

#: Properties by name.
LAWS: dict[str, Law] = {}

#: Scalar analyses that the properties compare.
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
    """Register a property."""
    LAWS[function.__name__] = function
    return function


class Trial:
    """A graph at concrete sizes, with the interpreter's counts.

    Parameters
    ----------
    graph : Graph
        The graph under test.
    point : mapping of str to int
        A size for every dimension.
    """

    def __init__(self, graph: Graph, point: Mapping[str, int]) -> None:
        self.graph = graph
        self.point = dict(point)

    @cached_property
    def run(self) -> Run:
        """The interpreter's run."""
        return run(self.graph, None, meanings=REFERENCE_SEMANTICS, **self.point)

    @cached_property
    def data(self) -> dict[str, Any]:
        """The graph's file data."""
        return saved(self.graph)

    def takes(self, **dims: int) -> bool:
        """Whether the graph accepts these sizes: they satisfy its divisibility and other assumptions."""
        try:
            bindings(self.graph, {**self.point, **dims})
        except BindingError:
            return False
        return True

    @cached_property
    def answers(self) -> dict[str, Any]:
        """Results of the analyses with all sizes bound."""
        return {name: analyze(self.graph, **self.point) for name, analyze in QUESTIONS.items()}

    @cached_property
    def counts(self) -> list[str]:
        """Symbols that occur only as loop counts: they may be 1 and affect no layout."""
        counts = [op.loop.count for op in self.graph.walk() if op.loop is not None]
        names = {n for p in counts for n in p.names() if len(p.names()) == 1 and p.terms == {((n, 1),): 1}}
        sizes = {n for g in self.graph.bodies() for t in g.tensors for p in t.sizes for n in p.names()}
        return sorted(names - sizes)


def check(graph: Graph, laws: Iterable[str] | None = None, **point: int) -> None:
    """Check that a graph satisfies the properties.

    Parameters
    ----------
    graph : Graph
        The graph to check.
    laws : iterable of str, optional
        Names of properties, by default all of `LAWS`.
    **point : int
        A size above 1 for every dimension. A size of 1 makes some copies free, see `docs/concepts/limits.md`.

    Raises
    ------
    AssertionError
        If a property fails. The message names it with the op or tensor and both values.
    UnsupportedError, BindingError
        If a property is unknown, an op kind has no semantics, or a dimension has no size.

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
    if not defaults.items() <= point.items():  # the graph's formulas contain the defaults already
        graph = Rewriter().run(graph)
        with graph:
            graph.defaults = {}
    trial = Trial(graph, point)
    for name in chosen:
        try:
            LAWS[name](trial)
        except AssertionError as error:
            message = " ".join(str(error).split())
            raise AssertionError(f"law {name!r} at {trial.point}: {message}") from None


def same(actual: Any, expected: Any, quantity: str, origin: str = "expected") -> None:
    """Compare two values exactly, or up to rounding if the library returns a float."""
    exact = float(expected) if isinstance(actual, float) else Fraction(expected)
    assert actual == exact, f"{quantity}: {actual} derived, {expected} {origin}"


# -- against the interpreter -------------------------------------------------------------------------------------------


def _check_counted(derived: Any, counted: Any, quantity: str) -> None:
    same(derived, counted, quantity, "counted")


def _amounts(trial: Trial, count: str = "executed") -> dict[str, dict[str, Any]]:
    """Return each op's amounts from the cost table, by kind and direction."""
    amounts: dict[str, dict[str, Any]] = {}
    for row in costs(trial.graph, count=count, **trial.point):
        key = row.kind if row.direction == "compute" else row.direction
        op_amounts = amounts.setdefault(row.op, {})
        op_amounts[key] = op_amounts.get(key, 0) + (row.amount.constant if row.amount.constant is not None else 0)
    return amounts


@law
def flops_of_each_kind_are_what_the_interpreter_counts(trial: Trial) -> None:
    """Check FLOPs: a multiply-add per index point of a contraction, single operations elsewhere."""
    executed, full = _amounts(trial), _amounts(trial, "full")
    for name, counted in trial.run.ops.items():
        derived = executed.get(name, {})
        for kind in ("matmul", "pointwise", "transcendental"):
            _check_counted(derived.get(kind, 0), getattr(counted.tally, kind), f"{kind} FLOPs of {name!r}")
        full_matmul = full.get(name, {}).get("matmul", 0)
        assert full_matmul >= derived.get("matmul", 0), (
            f"matmul FLOPs of {name!r}, domains ignored, are {full_matmul}: fewer than run"
        )
        _check_counted(full_matmul, counted.tally.full, f"matmul FLOPs of {name!r}, domains ignored")
    _check_counted(trial.answers["flops"], trial.run.flops, "FLOPs")
    _check_counted(trial.answers["matmul_flops"], trial.run.matmul, "matmul FLOPs")
    _check_counted(trial.answers["full"], trial.run.full, "matmul FLOPs, domains ignored")


@law
def bytes_moved_are_the_elements_that_are_touched(trial: Trial) -> None:
    """Check bytes: each element once per op; overlapping views of a storage count between the widest view and all."""
    executed = _amounts(trial)
    for name, counted in trial.run.ops.items():
        derived = executed.get(name, {})
        read, written = derived.get("read", 0), derived.get("write", 0)
        if counted.repeats:
            assert read >= counted.read, f"bytes read by {name!r}: {read} derived, {counted.read} counted"
            assert written >= counted.written, (
                f"bytes written by {name!r}: {written} derived, {counted.written} counted"
            )
            continue
        _check_counted(written, counted.written, f"bytes written by {name!r}")
        if counted.widest == counted.read:
            _check_counted(read, counted.read, f"bytes read by {name!r}")
        else:
            lower, upper = counted.widest, counted.most
            assert lower <= read <= upper, f"bytes read by {name!r}: {read} derived, {lower} to {upper} counted"


@law
def the_fused_bound_is_below_everything(trial: Trial) -> None:
    """Check that the fused bound exceeds neither the unfused bytes nor inputs read plus outputs written."""
    bound = float(trial.answers["fused"])  # fractional bytes are rounded to floats
    assert bound <= float(trial.answers["bytes_moved"]), f"fused bytes {bound} above the declared ones"
    if trial.run.repeats:
        return  # formulas do not know repeated lookups
    touched = sum(len(addresses) * b.element for b, addresses in trial.run.touched.items())
    written = {(b, a) for t, b, addresses in _output_addresses(trial) for a in addresses}
    limit = touched + sum(b.element for b, _ in written)
    assert bound <= float(limit), f"fused bytes: {bound} derived, {limit} counted at most, inputs touched and outputs"


@law
def bytes_through_a_cache_are_no_fewer_than_declared(trial: Trial) -> None:
    """Check that a cache model moves at least the declared bytes, with equality if everything fits."""
    declared = float(trial.answers["bytes_moved"])
    small, large = (float(bytes_moved(trial.graph, False, cache=size, **trial.point)) for size in (64, "1 EB"))
    assert large == declared, f"bytes through a cache that holds all: {large}, expected {declared} as declared"
    assert small >= declared, f"bytes through a cache of 64 bytes: {small}, below {declared} as declared"


def _output_addresses(trial: Trial) -> Iterable[tuple[int, Any, list[int]]]:
    """Yield the addresses of outputs that are not inputs."""
    by_tensor = dict(trial.run.values)
    for i, t in enumerate(trial.graph.outputs):
        v = by_tensor.get(t)
        if v is not None and not v.buffer.throughout:
            yield i, v.buffer, [v.address(index) for index in v.points()]
        elif v is None:  # a loop result
            output = trial.run.outputs[i]
            buffer = trial.run._kept[i]
            if not buffer.throughout:
                yield i, buffer, list(range(output.size))


@law
def peak_memory_is_that_of_a_replay(trial: Trial) -> None:
    """Check the peak against a replay: buffers are allocated at their op and freed after their last use."""
    _check_counted(trial.answers["peak_memory"], trial.run.peak, "peak memory")
    profile = timeline(trial.graph, **dict[str, Any](trial.point))
    _check_counted(profile.peak, trial.run.peak, "peak of the timeline")
    _check_counted(sum(map(Fraction, profile.by_role.values())), trial.run.peak, "bytes by role at the peak")
    fixed = sum(b.bytes for b in trial.run.buffers)
    output_bytes = sum(b.bytes for b in set(trial.run._kept) if not b.throughout)
    assert trial.run.peak >= fixed + output_bytes, f"peak {trial.run.peak} below parameters, inputs and outputs"
    rows = lifetimes(trial.graph, **dict[str, Any](trial.point))
    _check_counted(sum(Fraction(r.bytes) for r in rows if r.born is None), fixed, "bytes of what lives throughout")


@law
def parameters_are_those_of_all_iterations(trial: Trial) -> None:
    """Check parameter count and bytes."""
    _check_counted(trial.answers["param_count"], trial.run.params, "parameters")
    _check_counted(trial.answers["param_bytes"], trial.run.param_bytes, "bytes of parameters")


@law
def layouts_are_those_of_numpy(trial: Trial) -> None:
    """Check shape, strides and view or copy against NumPy, for sizes above 1."""
    body_tensors = {t for g in trial.graph.bodies() if g.parent is not None for t in g.tensors}
    by_tensor = dict(trial.run.values)
    for t, v in trial.run.values:
        pieces = t.storage.pieces  # leading axes with one array per position
        shape = tuple(value(p.expr, trial.point) for p in t.sizes[pieces:])
        assert v.array.shape == shape, f"shape of {t.name!r} is {shape}, expected {v.array.shape}"
        for n, stride, bytes_ in zip(shape, t.strides[pieces:], v.array.strides, strict=True):
            assert n == 1 or value(stride.expr, trial.point) * 8 == bytes_, (
                f"strides of {t.name!r} are {t.strides}, expected {[s // 8 for s in v.array.strides]}"
            )
        base = None if t.producer is None or t in body_tensors else next(iter(t.producer.operands), None)
        if base is not None and t.producer is not None and t.producer.body is None and base in by_tensor:
            shared = v.buffer is by_tensor[base].buffer
            assert shared == (t.storage is base.storage), f"{t.name!r} is {'a view' if shared else 'a copy'} in NumPy"


@law
def tensors_hold_what_has_been_written(trial: Trial) -> None:
    """Check that exactly the index points in the tensor's domain hold values."""
    for t, v in trial.run.values:
        if (t.domain is None and v.whole) or (t.producer is not None and isinstance(t.producer.kind, Empty)):
            continue
        written = np.zeros(v.array.shape, dtype=bool)
        for index in v.points():
            written[index] = True
        mismatches = np.argwhere(written != trial.run.sizes.held(t)[(0,) * t.storage.pieces])
        assert not mismatches.size, (
            f"{t.name!r} holds {'some' if written[tuple(mismatches[0])] else 'no'}thing at {mismatches[0].tolist()}"
        )


# -- formulas ----------------------------------------------------------------------------------------------------------


@law
def a_formula_at_a_point_is_the_answer_there(trial: Trial) -> None:
    """Check formulas with exact fractions and `evaluate`, in one step and two; the peak from its least loop counts."""
    min_counts = timeline(trial.graph).holds_from
    # 3 iterations, more if a body permutes its carries
    unrolled = max(map(copies_needed, loops(trial.graph)), default=3)
    assert all(n <= unrolled for n in min_counts.values()), (
        f"the peak holds from {min_counts}, expected {unrolled} at the most"
    )
    names = sorted(trial.point)
    for question, analyze in QUESTIONS.items():
        expected = trial.answers[question]
        formula = analyze(trial.graph)
        holds = question != "peak_memory" or all(trial.point[n] >= k for n, k in min_counts.items())
        if holds:
            same(expected, value(formula, trial.point), f"{question}: bound, against the formula at the point")
            same(expected, Fraction(evaluate(formula, **_used(formula, trial.point))), f"{question}: evaluate")
        for bound_first in (names[: len(names) // 2], names[1::2]):
            if question == "peak_memory" and not all(
                trial.point[n] >= k for n, k in min_counts.items() if n not in bound_first
            ):
                continue
            partly = analyze(trial.graph, **{n: trial.point[n] for n in bound_first})
            same(expected, value(partly, trial.point), f"{question}: bound in two steps, {bound_first} first")


def _used(formula: Any, point: Mapping[str, int]) -> dict[str, int]:
    symbols = {s.name for s in getattr(formula, "free_symbols", ())}
    return {k: v for k, v in point.items() if k in symbols}


def played(graph: Graph, point: Mapping[str, int]) -> Program:
    """Return all op executions and storage live ranges, with loops unrolled."""
    values = bindings(graph, point)

    def copies(loop: Loop) -> int:
        return int(value(loop.count.expr, point))

    return play(graph, copies, values)


@law
def pruning_changes_no_value(trial: Trial) -> None:
    """Check that the largest live set, without pruning, is the peak."""
    live = [value(p.expr, trial.point) for _, p in live_bytes(played(trial.graph, trial.point))]
    same(trial.answers["peak_memory"], Fraction(max(live)), "peak memory")


@law
def a_peak_in_a_box_is_the_peak(trial: Trial) -> None:
    """Check that the peak at a point is among the cases kept for its neighbourhood, and that bytes by role add up."""
    if not all(trial.point[n] >= k for n, k in timeline(trial.graph).holds_from.items()):
        return
    formula = peak_memory(trial.graph)
    names = sorted(_used(formula, trial.point))
    neighbourhood = {n: (max(trial.point[n] - 1, 1), trial.point[n] + 1) for n in names[:2]}
    cases = regimes(formula, within={n: (trial.point[n], trial.point[n]) for n in names} | neighbourhood)
    peak = max(value(case.formula, trial.point) for case in cases)
    same(trial.answers["peak_memory"], peak, f"peak memory in a box around {names}")
    for case in regimes(formula):
        if case.by_role:
            role_total = sum(value(part, trial.point) for part in case.by_role.values())
            same(value(case.formula, trial.point), role_total, f"bytes of the roles at {case.op!r}")


@law
def a_repeat_is_its_iterations(trial: Trial) -> None:
    """Check FLOPs, bytes, parameters and peak against the unrolled graph, for 1 to 4 iterations."""
    min_counts = timeline(trial.graph).holds_from
    candidates = [{name: n} for name in trial.counts for n in (1, 2, 3, 4)]
    points = [{**trial.point, **dims} for dims in candidates if trial.takes(**dims)] or [trial.point]
    for point in points:
        unrolled = unroll(trial.graph, **point)
        for question, analyze in QUESTIONS.items():
            if question == "fused":
                continue  # the fused bound is tighter for an unrolled loop
            same(
                analyze(trial.graph, **point),
                Fraction(analyze(unrolled)),
                f"{question} at {point}, of the loop and unrolled",
            )
            if question == "peak_memory" and all(point[n] >= k for n, k in min_counts.items()):
                same(analyze(unrolled), value(analyze(trial.graph), point), f"{question} at {point}, the closed form")


@law
def costs_grow_with_every_size(trial: Trial) -> None:
    """Check that no cost decreases with a size, except sizes used as divisors and block scales."""
    if any(t.dtype.block is not None for g in trial.graph.bodies() for t in g.tensors):
        return  # with more elements, each moves a smaller share of its block scale
    for name in sorted(known_names(trial.graph) - _divisors(trial.graph)):
        size = trial.point[name]
        next_size = next((n for n in range(size + 1, size + _FURTHEST) if trial.takes(**{name: n})), None)
        if next_size is None:
            continue  # another size must grow with it
        larger = {**trial.point, name: next_size}
        for question, analyze in QUESTIONS.items():
            before, after = trial.answers[question], analyze(trial.graph, **larger)
            assert after >= before, f"{question} falls from {before} to {after} with {name}={larger[name]}"


#: Candidates to try for the next valid size.
_FURTHEST = 24


def _divisors(graph: Graph) -> set[str]:
    """Return the symbols that some size is divided by, such as ranks, groups or heads."""
    sizes = [p for g in graph.bodies() for t in g.tensors for p in t.sizes]
    facts = [v for op in graph.walk() for v in op.kind.facts().values()]
    sizes += [p for v in facts for p in (v.values() if isinstance(v, Mapping) else [v])]
    return {k for p in sizes if isinstance(p, Poly) for m in p.terms for k, e in m if e < 0}


@law
def intensity_is_flops_over_bytes(trial: Trial) -> None:
    """Check intensity = FLOPs / bytes moved, also as a formula."""
    moved = trial.answers["bytes_moved"]
    if moved:
        expected = Fraction(trial.answers["flops"]) / Fraction(moved)
        assert abs(float(intensity(trial.graph, False, **trial.point)) - float(expected)) <= 1e-12 * float(expected)


# -- invariance --------------------------------------------------------------------------------------------------------

Data = dict[str, Any]


def _names(data: Data) -> list[str]:
    """Return the names of all tensors and ops, including nested bodies."""
    names = []
    for node in data["nodes"]:
        names.append(node["id"])
        body = node.get("attrs", {}).get("body")
        names += _names(body["graph"]) if body else []
    return names


def renamed(data: Data, names: Mapping[str, str], symbols: Mapping[str, str]) -> Data:
    """Return the same graph's data with tensors, ops and symbols renamed."""
    swapped = {dims(old): dims(new) for old, new in symbols.items()}

    @cache
    def size(text: str) -> str:
        return str(poly(parse_formula(text, "size").expr.xreplace(swapped))) if swapped else text

    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: walk(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, key) for v in value]
        if not isinstance(value, str):
            return value
        if key in ("shape", "strides", "offset", "size"):
            return size(value)
        if key == "assumptions":
            return _WORD.sub(lambda m: symbols.get(m.group(), m.group()), value)
        return names.get(value, value) if key in _NAMED else value

    result: Data = walk(data)
    return result


_WORD = re.compile(r"[A-Za-z_]\w*")
_NAMED = ("id", "operands", "results", "source", "target", "formals", "outputs", "gradients")


@law
def no_cost_depends_on_names(trial: Trial) -> None:
    """Check that renaming tensors, ops and scopes changes no cost."""
    data = trial.data
    names = {old: f"n{i}" + ("()" if old.endswith("()") else "") for i, old in enumerate(reversed(_names(data)))}
    _same_answers(trial, loaded(renamed(data, names, {})), "under other names")


@law
def renaming_symbols_renames_formulas(trial: Trial) -> None:
    """Check that renaming symbols renames them in formulas, even if their order changes."""
    names = sorted(trial.point)
    new_names = dict(zip(names, [*names[1:], "A_longer_name"], strict=False))
    graph = loaded(renamed(trial.data, {}, new_names))
    for question, analyze in QUESTIONS.items():
        expected, new_formula = analyze(trial.graph), analyze(graph)
        if isinstance(expected, sympy.Expr):
            new_point = {new_names[n]: trial.point[n] for n in names}
            same(value(new_formula, new_point), value(expected, trial.point), f"{question} in other symbols")
            swapped = {dims(n): dims(new_names[n]) for n in names}
            if expected.is_polynomial():  # equal functions may have different forms
                assert sympy.expand(expected.xreplace(swapped) - new_formula) == 0, (
                    f"{question} is {new_formula}, was {expected}"
                )
        else:
            same(new_formula, expected, f"{question} in other symbols")


@law
def no_cost_depends_on_the_order_of_sources(trial: Trial) -> None:
    """Check that inputs, parameters and buffers may be declared in any order."""

    def reordered(data: Data) -> Data:
        sources = [n for n in data["nodes"] if n["type"] == "tensor" and n["role"] not in ("result",)]
        nodes = [{**n, "attrs": _reordered_body(n["attrs"])} if n["type"] == "op" else n for n in data["nodes"]]
        others = [n for n in nodes if n["type"] == "op" or n["role"] == "result"]
        return {**data, "nodes": [*reversed(sources), *others]}

    def _reordered_body(attrs: Data) -> Data:
        return {**attrs, "body": {"graph": reordered(attrs["body"]["graph"])}} if "body" in attrs else attrs

    _same_answers(trial, loaded(reordered(trial.data)), "with sources in another order")


@law
def saving_and_loading_is_the_identity(trial: Trial) -> None:
    """Check that a loaded graph saves to the same file and has the same costs."""
    data = trial.data
    reloaded = loaded(data)
    assert saved(reloaded) == data, "the file of the loaded graph differs"
    _same_answers(trial, reloaded, "after saving and loading")
    for question, analyze in QUESTIONS.items():
        assert analyze(reloaded) == analyze(trial.graph), f"the formula of {question} differs after saving and loading"


def _same_answers(trial: Trial, graph: Graph, context: str) -> None:
    for question, analyze in QUESTIONS.items():
        assert analyze(graph, **trial.point) == trial.answers[question], f"{question} differs {context}"


@law
def what_validates_can_be_reported(trial: Trial) -> None:
    """Check that the graph and its reports, symbolic and bound, print as text."""
    trial.graph.validate()
    bound_report = report(trial.graph, None, **trial.point)  # type: ignore[arg-type]  # sizes alone
    for shown in (report(trial.graph), bound_report):
        assert shown.figures
        assert find_spec("rich") is None or str(shown)  # rich is optional
    assert all(repr(node) for node in trial.graph)


# -- validity conditions -----------------------------------------------------------------------------------------------

Point = Mapping[str, int]


def around(point: Point) -> Iterator[dict[str, int]]:
    """Yield a point and its neighbours, which differ in one size n: 1, n - 1, n + 1 or 2 n + 1."""
    yield dict(point)
    for name, size in point.items():
        for neighbour in sorted({1, max(size - 1, 1), size + 1, 2 * size + 1} - {size}):
            yield {**point, name: neighbour}


def _answer_or_none(analyze: Callable[..., Any], /, *args: Any, **sizes: Any) -> Any:
    """Return an answer, or None if the library raises."""
    try:
        return analyze(*args, **sizes)
    except CostGraphError:
        return None


@law
def what_the_graph_refuses_its_formulas_refuse(trial: Trial) -> None:
    """Check that formulas refuse the same sizes as the graph: evaluated, bound in two steps, as arrays, in tables."""
    min_counts = getattr(_answer_or_none(timeline, trial.graph), "holds_from", {})
    fixed = {k: v for k, v in trial.graph.defaults.items() if k in trial.point}  # already substituted into the formulas
    places = [p for p in around(trial.point) if fixed.items() <= p.items()]
    for question, analyze in QUESTIONS.items():
        formula = _answer_or_none(analyze, trial.graph)
        points = places if hasattr(formula, "free_symbols") else []
        singles, steps = [], {}
        for point in points:
            may_refuse = question == "peak_memory" and any(point[n] < k for n, k in min_counts.items())
            expected = _answer_or_none(analyze, trial.graph, **point)
            singles.append(_agree(formula, point, expected, f"{question} at {point}", may_refuse))
            bound_first = tuple(list(point.items())[::2])
            if bound_first not in steps:  # neighbours that differ in another size share it
                steps[bound_first] = _answer_or_none(analyze, trial.graph, **dict(bound_first))
            if hasattr(steps[bound_first], "free_symbols"):  # a number holds for all sizes
                _agree(
                    steps[bound_first], point, expected, f"{question} at {point}, {dict(bound_first)} first", may_refuse
                )
        if points and formula.free_symbols:
            _arrays_agree(formula, points, singles, question)
    table = _answer_or_none(costs, trial.graph)
    for point in places if table is not None else ():
        expected = _answer_or_none(flops, trial.graph, **point)
        bound = _answer_or_none(table.bind, **point)
        # FLOPs are rounded per kind, so their sum may differ in the last bit
        total_flops = (
            None if bound is None else evaluate(sum(r.amount.expr for r in bound.filter(direction="compute").rows))
        )
        assert total_flops == expected, f"costs at {point}: {_shown(total_flops)}, where the graph: {_shown(expected)}"


def _shown(answer: Any) -> str:
    return "refused" if answer is None else f"answers {answer}"


def _agree(formula: Any, point: Point, expected: Any, quantity: str, may_refuse: bool) -> Any:
    """Check a formula at a point against the graph, and return its value. Below its least loop counts it may refuse."""
    actual = _answer_or_none(evaluate, formula, **_sizes_for(formula, point))
    assert actual == expected or (may_refuse and actual is None), (
        f"{quantity}: the formula {_shown(actual)}, the graph {_shown(expected)}"
    )
    return actual


def _sizes_for(formula: Any, point: Point) -> dict[str, int]:
    """Return the sizes of the symbols in a formula and its conditions."""
    names = {s.name for s in getattr(formula, "free_symbols", ())}
    return {k: v for k, v in point.items() if k in names.union(*(v.names for v in getattr(formula, "held", ())))}


def _arrays_agree(formula: Any, points: list[dict[str, int]], single: list[Any], question: str) -> None:
    """Check array evaluation against single points, with NaN at refused ones."""
    columns = {n: np.array([p[n] for p in points]) for n in _sizes_for(formula, points[0])}
    array_values = np.broadcast_to(compile(formula, outside="nan")(**columns), len(points))
    for point, single_value, array_value in zip(points, single, array_values, strict=True):
        assert np.isnan(array_value) if single_value is None else np.isclose(array_value, single_value, rtol=1e-9), (
            f"{question} at {point}: {array_value} in an array, the point alone {_shown(single_value)}"
        )
    assert (_answer_or_none(compile(formula), **columns) is None) == (None in single), (
        f"{question}: {points} in an array"
    )


# -- time --------------------------------------------------------------------------------------------------------------


@cache
def through(size: int) -> Hardware:
    """Return a device with two cache levels of this size in bytes."""
    device = load_hardware("a100-80-sxm")
    cache = {key: Quantity(size, "B") for key in ("l2", "l1_and_shared_per_core", "registers_per_core")}
    cache["l2_bandwidth"] = Quantity(10**13, "B/s")
    tables = {**device.tables, "cache": cache, "cores": {"count": Quantity(1, "1")}}
    return replace(device, tables=tables)


@law
def levels_of_memory_take_no_less_time(trial: Trial) -> None:
    """Check that cache levels never reduce the time, that the bound stays below the estimate, and formulas agree."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StandInWarning)  # formats without a rate on this device
        _check_levels(trial, through(32))


def _check_levels(trial: Trial, device: Hardware) -> None:
    try:
        flat = roofline(trial.graph, device, **trial.point)  # type: ignore[arg-type]  # sizes are no switches
    except UnsupportedError:  # collectives over a mesh axis without a size
        return
    devices, switches = (device, through(10**18)), {"fallback": None, "hierarchical": True, "overlap": "none"}
    deep, wide = (roofline(trial.graph, d, **switches, **trial.point) for d in devices)  # type: ignore[arg-type]
    assert wide.estimate == flat.estimate, f"estimate where all fits {wide.estimate}, expected {flat.estimate}"
    tolerance = 1 + 1e-9
    assert flat.estimate <= deep.estimate * tolerance, f"estimate of levels {deep.estimate}, below {flat.estimate}"
    assert flat.lower_bound <= deep.lower_bound * tolerance, (
        f"bound of levels {deep.lower_bound}, below {flat.lower_bound}"
    )
    assert deep.lower_bound <= deep.estimate * tolerance, (
        f"bound {deep.lower_bound}, above the estimate {deep.estimate}"
    )
    for bound_kind, expected in (("estimate", deep.estimate), ("lower", deep.lower_bound)):
        formula = seconds(trial.graph, device, bound_kind, hierarchical=True)
        names = {s.name for s in getattr(formula, "free_symbols", ())}
        actual = evaluate(formula, **{k: v for k, v in trial.point.items() if k in names})
        assert abs(actual - expected) <= 1e-9 * expected, f"{bound_kind}: {actual} of the formula, expected {expected}"


# -- training ----------------------------------------------------------------------------------------------------------

TrainingLaw = Callable[["Lesson"], None]

#: Training properties by name.
TRAINING: dict[str, TrainingLaw] = {}

#: Costs that loop transforms must preserve.
_QUESTIONS: dict[str, Callable[..., Any]] = {"flops": flops, "bytes_moved": bytes_moved, "peak_memory": peak_memory}
_STEP = 2.0**-13
#: Ops that are linear in one operand, and functions that are linear in all operands jointly.
_LINEAR = {Einsum, Rearrange, Slice, Expand, Pad, Gather, Dropout, Transfer, Assign}
_LINEAR_FUNCTIONS = {"copy", "cast", "add", "sub", "neg"}


def _law(function: TrainingLaw) -> TrainingLaw:
    TRAINING[function.__name__] = function
    return function


class Lesson:
    """A graph with a scalar loss at concrete sizes, with its backward pass and the interpreter's counts.

    Parameters
    ----------
    graph : Graph
        A graph whose only output is the loss.
    point : mapping of str to int
        A size for every dimension.
    checkpoint : Checkpoint, optional
        Activation checkpointing policy.
    """

    def __init__(self, graph: Graph, point: Mapping[str, int], checkpoint: Checkpoint | None = None) -> None:
        self.graph = graph
        self.point = dict(point)
        self.checkpoint = checkpoint

    @cached_property
    def trained(self) -> Graph:
        """The graph with its backward pass."""
        return backward(self.graph, checkpoint=self.checkpoint)

    @cached_property
    def trial(self) -> Trial:
        """A trial of the training graph."""
        return Trial(self.trained, self.point)

    @cached_property
    def forward(self) -> Graph:
        """The forward graph, with sources named as in the training graph."""
        policy = self.checkpoint or Checkpoint()
        return hoist(peel(policy.prepared(self.graph), policy.stops_early_in))

    @cached_property
    def values(self) -> dict[str, Array]:
        """Values of all floating-point sources, by name, the same under any checkpointing policy."""
        arrays = {}
        for t in self.trained.tensors:
            if t.producer is None and t.dtype.kind == "float":
                shape = tuple(int(value(n.expr, self.point)) for n in t.sizes)
                arrays[t.name] = np.random.default_rng(list(t.name.encode())).uniform(0.5, 1.5, shape)
        return arrays

    @cached_property
    def run(self) -> Run:
        """The interpreter's run with these values."""
        return run(self.trained, self.values, seed=0, meanings=None, **self.point)

    def loss(self, name: str, array: Any) -> float:
        """Return the loss with other values for one source."""
        return float(run(self.forward, {**self.values, name: array}, seed=0, meanings=None, **self.point).outputs[0])


def check_training(graph: Graph, laws: Iterable[str] | None = None, **point: int) -> None:
    """Check that a graph's backward pass satisfies the training properties.

    Parameters
    ----------
    graph : Graph
        A graph with one scalar output and at least one source that requires a gradient.
    laws : iterable of str, optional
        Names of properties, by default all of `TRAINING`.
    **point : int
        A size above 1 for every dimension.

    Raises
    ------
    AssertionError
        If a property fails. The message names it with the op or tensor and both values.
    UnsupportedError, BindingError
        If a property is unknown, an op kind has no semantics or no VJP rule, or a dimension has no size.
    GraphError
        If there is no scalar output, nothing requires a gradient, or an op in place overwrites a residual.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph import testing
    >>> B, D, L = cg.dims("B D L")
    >>> with cg.Graph("g") as g:
    ...     layer = lambda x: x + cg.tanh(cg.linear(x, "b d -> b e", e=D))
    ...     g.output(cg.reduce(cg.repeat(L, layer, g.input("x", (B, D))), "b d -> ", "mean"))
    >>> testing.check_training(g, B=2, D=3, L=5)
    """
    chosen = list(TRAINING if laws is None else laws)
    unknown = sorted(set(chosen) - TRAINING.keys())
    if unknown:
        raise UnsupportedError(f"check_training: law {unknown[0]!r}, expected one of {', '.join(TRAINING)}")
    lesson = Lesson(graph, {**{k: v for k, v in graph.defaults.items() if k in known_names(graph)}, **point})
    try:
        bindings(lesson.trained, lesson.point)
    except BindingError:  # peeled first and last iterations leave fewer to unroll
        bindings(graph, lesson.point)
        flat = _flat(graph, lesson.point)
        lesson = Lesson(flat, {k: v for k, v in lesson.point.items() if k in known_names(flat)})
    for name in chosen:
        try:
            TRAINING[name](lesson)
        except AssertionError as error:
            raise AssertionError(f"law {name!r} at {lesson.point}: {error}") from None


# -- gradients ---------------------------------------------------------------------------------------------------


@_law
def gradients_are_finite_differences(lesson: Lesson) -> None:
    """Check gradients against finite differences along one random direction per source."""
    for name, gradient in lesson.run.gradients.items():
        x = lesson.values[name]
        if not x.size:
            continue  # parameters of a loop without iterations
        direction = np.random.default_rng(len(name)).uniform(-1, 1, x.shape)
        expected = float((gradient * direction).sum())
        estimates = [_slope(lesson, name, direction, _STEP / n) for n in (1, 2)]
        size = abs(float(lesson.run.outputs[0]))
        if not np.isfinite([expected, size, *estimates]).all():
            continue  # no derivative there
        # the estimates differ by the curvature, and by more near a kink
        slack = 8 * abs(estimates[0] - estimates[1]) + 1e-6 * abs(expected) + 1e-9 * max(size, 1) / _STEP
        assert abs(estimates[1] - expected) <= slack, (
            f"gradient of {name!r} along a direction is {expected}, expected {estimates[1]}: finite differences"
        )


def _slope(lesson: Lesson, name: str, direction: Any, step: float) -> float:
    x = lesson.values[name]
    return (lesson.loss(name, x + step * direction) - lesson.loss(name, x - step * direction)) / (2 * step)


@_law
def the_gradient_of_a_linear_loss_is_its_transpose(lesson: Lesson) -> None:
    """Check <J v, g> = <v, J^T g> for linear losses, with steps of any length."""
    for t in lesson.forward.tensors:
        if t.name not in lesson.run.gradients or not _is_linear_in(lesson.forward, {t}):
            continue
        v = np.random.default_rng(len(t.name)).uniform(-100, 100, lesson.values[t.name].shape)
        change = lesson.loss(t.name, v) - lesson.loss(t.name, 0 * v)
        expected = float((lesson.run.gradients[t.name] * v).sum())
        scale = abs(float(lesson.run.outputs[0])) + np.abs(lesson.run.gradients[t.name] * v).sum()
        assert abs(change - expected) <= 1e-9 * scale + 1e-12 or not np.isfinite(change), (
            f"the loss is linear in {t.name!r} and changes by {change}, expected {expected}: its gradient transposed"
        )


def _is_linear_in(graph: Graph, dependent: set[Tensor]) -> bool:
    """Whether all ops that depend on a source are linear in it."""
    for op in graph.ops:
        depends = [t in dependent for t in op.operands]
        if not any(depends):
            continue
        if op.kind.overwrites() or not _is_linear(op.kind, together=depends.count(True) > 1):
            return False
        dependent.update(op.results)
    return True


def _is_linear(kind: OpKind, *, together: bool) -> bool:
    """Whether an op is linear in one operand, or in all operands jointly."""
    match kind:
        case Pointwise():
            return kind.function.name in _LINEAR_FUNCTIONS or (kind.function.name == "mul" and not together)
        case Reduce():
            return kind.operation in ("sum", "mean") and not together
        case Pool():
            return kind.operation == "mean" and not together
        case _:
            return isinstance(kind, Concat | SliceUpdate | Stacked) or (type(kind) in _LINEAR and not together)


# -- costs -------------------------------------------------------------------------------------------------------


@_law
def a_backward_pass_keeps_the_laws_of_graphs(lesson: Lesson) -> None:
    """Check all graph properties on the training graph."""
    for name, law in LAWS.items():
        try:
            law(lesson.trial)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@_law
def a_loop_goes_back_as_its_iterations_do(lesson: Lesson) -> None:
    """Check FLOPs, bytes and peak against the backward pass of the unrolled graph.

    Only FLOPs must agree if a loop reads or writes slices, forwards its inputs, or copies a gradient that unrolled
    iterations pass on without a copy. If a loop permutes its carries, it also computes with zero gradients.
    """
    if not _loops(lesson.graph):
        return
    gradient_ops = [op for loop in _loops(lesson.trained) for op in _gradient_producers(loop)]
    copied = any(isinstance(op.kind, Rearrange) and op.kind.copy for op in gradient_ops)
    copied |= any(op.name.rpartition("/")[2].startswith("own") for op in gradient_ops)
    copied |= any(isinstance(op.kind, Accumulate) and op.kind.aliased for op in lesson.trained.walk())
    comparable = all(map(_computes_all_carries, _loops(lesson.graph))) and not copied
    try:
        flat = backward(_flat(lesson.graph, lesson.point))
    except GraphError as error:
        if "has overwritten in place" not in str(error):
            raise
        return  # unrolled iterations that forward a tensor keep no copy for an op in place
    zeros = any(isinstance(op.kind, Fill) and not op.kind.value for op in gradient_ops)
    if zeros and any(len(loop.carries) > 1 for loop in _loops(lesson.graph)):
        return
    for question, analyze in (_QUESTIONS if comparable else {"flops": flops}).items():
        sizes = {k: v for k, v in lesson.point.items() if k in known_names(flat)}
        same(lesson.trial.answers[question], analyze(flat, **sizes), f"{question}, of the loop and unrolled first")


def _flat(graph: Graph, point: Mapping[str, int]) -> Graph:
    """Return a graph with its loops unrolled, other sizes left symbolic."""
    return unroll(graph, **{n: point[n] for n in {n for loop in _loops(graph) for n in loop.count.names()}})


def _computes_all_carries(loop: Loop) -> bool:
    """Whether a loop has no slices and every iteration computes its carries."""
    forwarded = {t.storage for t in loop.body.outputs} & {f.storage for f in loop.body.formals}
    return not (loop.xs or loop.stacks or loop.pieces or forwarded)


def _gradient_producers(loop: Loop) -> list[Op]:
    """Return the backward ops that produce a loop's initial values, carries and accumulated terms."""
    tensors = [*loop.starts, *loop.nexts]
    tensors += [op.operands[1] for op in loop.body.ops if isinstance(op.kind, Accumulate)]
    return [t.producer for t in tensors if t.producer is not None and t.producer.phase == "backward"]


def _loops(graph: Graph) -> list[Loop]:
    return [loop for op in graph.walk() if (loop := op.loop) is not None]


# -- checkpointing -----------------------------------------------------------------------------------------------------


def _policies(lesson: Lesson) -> Iterator[Checkpoint]:
    """Yield checkpointing policies that apply to the graph."""
    loops = _loops(lesson.graph)
    ops = [op.name for op in lesson.graph.walk() if not op.graph.fused]  # kernels are recomputed as a whole
    if loops:
        yield every_block()
        single = [op for op in lesson.graph.walk() if len(op.results) == 1]
        yield every_block(keep=[op.name.rpartition("/")[2].partition(".")[0] for op in single[-1:]])
        yield every_block(inside=selective(ops[-1]))
        if all(value(loop.count.expr, lesson.point) % 2 == 0 for loop in loops):
            yield every(2)
            yield every(2, inside=every_block())
    yield selective(ops[len(ops) // 2])
    yield selective(*ops[: len(ops) // 2 + 1])


@_law
def checkpoints_change_no_gradient_and_save_no_flops(lesson: Lesson) -> None:
    """Check equal gradients, no fewer FLOPs, and saved tensors: only former residuals, segment inputs and named ops."""
    baseline = lesson.trial.answers["flops"]
    for policy in _policies(lesson):
        checkpointed = Lesson(lesson.graph, lesson.point, policy)
        try:
            checkpointed.trained  # noqa: B018  # derived when it is asked for
        except GraphError as error:
            if "has overwritten in place" not in str(error):
                raise
            continue  # an op in place has overwritten an input of a recomputed segment
        assert checkpointed.trial.answers["flops"] >= baseline, (
            f"{policy}: {checkpointed.trial.answers['flops']} FLOPs, not {baseline}"
        )
        # another peeled layer has its own parameters, so that the values differ
        alike = {n: v.size for n, v in checkpointed.values.items()} == {n: v.size for n, v in lesson.values.items()}
        for name, gradient in lesson.run.gradients.items() if alike else ():
            actual = checkpointed.run.gradients[name].reshape(gradient.shape)
            close = np.allclose(actual, gradient, rtol=1e-9, atol=1e-12, equal_nan=True)
            assert close, f"{policy}: the gradient of {name!r} differs"
        same(checkpointed.trial.answers["flops"], checkpointed.trial.run.flops, f"{policy}: FLOPs")
        same(checkpointed.trial.answers["peak_memory"], checkpointed.trial.run.peak, f"{policy}: peak memory")
        newly_saved = (
            _saved_names(checkpointed)
            - _saved_names(lesson)
            - {base_name(name) for name in _segment_inputs(checkpointed)}
        )
        assert not newly_saved, (
            f"{policy}: keeps {', '.join(sorted(newly_saved))}, which was not saved before and is no segment input"
        )


def _saved_names(lesson: Lesson) -> set[str]:
    """Return the names of saved tensors, without iterations."""
    program = played(lesson.trained, lesson.point)
    backward_start = next(i for i, step in enumerate(program.steps) if step.op.phase != "forward")
    return {
        base_name(life.name.split("[")[0])
        for life in program.lives
        if life.born is not None and life.born < backward_start <= (life.dies or backward_start)
    }


def _segment_inputs(lesson: Lesson) -> set[str]:
    """Return the forward tensors that recomputed segments read."""
    assert lesson.checkpoint is not None
    names: set[str] = set()
    for graph in lesson.trained.bodies():
        for run_ in lesson.checkpoint.runs([op for op in graph.ops if op.phase == "forward"]):
            produced = {t for op in run_ for t in op.results}
            names |= {name for op in run_ for t in op.operands if t not in produced for name in _storage_names(t)}
            names |= {
                name for op in run_ if lesson.checkpoint.keeps(op) for t in op.results for name in _storage_names(t)
            }
            if graph.owner is not None:
                owner = graph.owner
                names |= {t.storage.name for t in (*owner.operands, *owner.results, *graph.outputs)}
    return names


def _storage_names(t: Tensor) -> Iterator[str]:
    """Yield a tensor's storage name, and for loop results those in the last iteration."""
    yield t.storage.name
    op = t.producer
    if op is not None and op.loop is not None:
        yield from _storage_names(op.loop.body.outputs[op.results.index(t)])


# -- op kinds ----------------------------------------------------------------------------------------------------------


def missing(kind: Named, **tables: Container[type[OpKind]]) -> tuple[str, ...]:
    """Return the rules and registrations that an op kind lacks.

    Parameters
    ----------
    kind : subclass of OpKind or str
        A registered op kind, or its name.
    **tables : container of subclasses of OpKind
        Further registries to check, such as `lowering=costgraph.torch.lowering.LOWERINGS`.

    Returns
    -------
    tuple of str
        The missing ones among `infer`, `flops`, `reads`, `writes`, `reference_semantics`, `strategy`, `vjp` and the
        keys of `tables`. Not all are required: without `vjp` a kind is not differentiable, and one with a body needs no
        `reference_semantics`.

    Raises
    ------
    UnsupportedError
        If the kind is not registered.

    Examples
    --------
    >>> from costgraph import testing
    >>> testing.missing("einsum"), testing.missing("unscale")
    ((), ('vjp',))
    """
    kind = kind_of("missing", kind)
    registered = {
        "infer": kind.infer is not OpKind.infer,
        "flops": kind.flops is not OpKind.flops,
        "reads": kind.reads is not OpKind.reads,
        "writes": kind.writes is not OpKind.writes,
        "reference_semantics": kind in REFERENCE_SEMANTICS or issubclass(kind, BodyKind),
        "strategy": kind in STRATEGIES,
        "vjp": kind in RULES,
    }
    return tuple(
        rule for rule, present in (registered | {k: kind in t for k, t in tables.items()}).items() if not present
    )


def check_op(kind: Named, examples: int = 100, *, laws: Iterable[str] | None = None, seed: int | None = None) -> None:
    """Check an op kind on random graphs: its cost rules must match its reference semantics.

    Parameters
    ----------
    kind : subclass of OpKind or str
        A registered op kind, or its name. It needs a `strategy` and, unless it has a body, `reference_semantics`.
    examples : int
        Number of graphs to draw. After a failure, smaller graphs are tried and the smallest failure is reported.
    laws : iterable of str, optional
        Names of the properties to check, by default all of `LAWS`.
    seed : int, optional
        Seed of the random graphs. By default every run draws the same graphs.

    Raises
    ------
    UnsupportedError
        If the kind is not registered, or lacks reference semantics or a strategy.
    AssertionError
        If a property does not hold.

    Examples
    --------
    >>> from costgraph import testing
    >>> testing.check_op("einsum", examples=5)
    """
    kind = kind_of("check_op", kind)
    for registration in ("reference_semantics", "strategy"):
        if registration in missing(kind):
            raise UnsupportedError(
                f"check_op: op kind {kind.name!r} has no {registration.replace('_', ' ')}, expected one from "
                f"costgraph.testing.{registration}"
            )
    chosen = None if laws is None else tuple(laws)

    search(ops(kind), lambda case: check(case.graph, chosen, **case.point), examples, seed=seed)


#: Number of smaller graphs to try after the first failure.
TRIES = 60


class _Enough(BaseException):
    """Stop hypothesis, which catches every Exception but no BaseException."""


def search(
    strategy: st.SearchStrategy[Case], holds: Callable[[Case], None], examples: int, *, seed: int | None = None
) -> None:
    """Run a check on random graphs and raise the failure of the smallest one.

    Parameters
    ----------
    strategy : strategy of Case
        Strategy for the graphs.
    holds : callable
        Check to call on each case. It raises an exception on failure.
    examples : int
        Number of graphs to draw.
    seed : int, optional
        Seed of the random graphs. By default every run draws the same graphs.

    Raises
    ------
    Exception
        The exception raised for the smallest failing graph.
    """
    worst: tuple[int, Exception] | None = None
    tries_left = TRIES

    @settings(
        max_examples=examples,
        deadline=None,  # the interpreter is slow, and the machine may be busy
        derandomize=seed is None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def drawn(data: st.DataObject) -> None:
        nonlocal worst, tries_left
        tries_left -= worst is not None
        if tries_left < 0:
            raise _Enough
        case = data.draw(strategy)
        try:
            holds(case)
        except Exception as error:
            size = sum(1 for _ in case.graph.walk())
            if worst is None or size <= worst[0]:
                worst = size, error
            raise

    if seed is not None:
        seeded(seed)(drawn)
    try:
        drawn()
    except (Exception, _Enough):
        if worst is None:  # the strategy itself failed
            raise
        vars(worst[1]).pop("__notes__", None)  # drop hypothesis' multi-line report
        raise worst[1] from None
