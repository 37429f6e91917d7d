"""The laws of training: each is a function of a lesson, a graph with a scalar loss, that raises AssertionError.

Oracles are outside the code under test: finite differences of the loss that the interpreter computes, what it counts of
the backward pass, the backward pass of the unrolled graph, and the same without checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ..analysis.costs import bytes_moved, flops
from ..analysis.memory import peak_memory
from ..errors import BindingError, GraphError, UnsupportedError
from ..graph.graph import Graph
from ..graph.loop import Loop
from ..graph.op import Op, OpKind
from ..graph.scopes import base_name
from ..graph.sizes import bindings, known_names
from ..graph.tensor import Tensor
from ..ops.contraction import Einsum
from ..ops.fill import Assign, Fill, Pad, Revised
from ..ops.index import Gather
from ..ops.moves import Concat, Expand, Rearrange, Slice
from ..ops.pieces import Accumulate
from ..ops.pointwise import Pointwise
from ..ops.pooling import Pool
from ..ops.reduce import Reduce
from ..ops.stacks import Stacked
from ..ops.stated import Transfer
from ..ops.stochastic import Dropout
from ..transforms.backward.backward import backward
from ..transforms.backward.hoist import hoist
from ..transforms.backward.peel import peel
from ..transforms.checkpoint import Checkpoint, every, every_block, selective
from ..transforms.unroll import unroll
from .arithmetic import value
from .formulas import played
from .interpreter import Run, run
from .laws import LAWS, Trial, same
from .values import Array

__all__ = ["TRAINING", "Lesson", "TrainingLaw", "check_training"]

TrainingLaw = Callable[["Lesson"], None]

#: Every law of training by its name.
TRAINING: dict[str, TrainingLaw] = {}

#: What loops and ops cost that a transform must not change.
_QUESTIONS: dict[str, Callable[..., Any]] = {"flops": flops, "bytes_moved": bytes_moved, "peak_memory": peak_memory}
_STEP = 2.0**-13
#: Ops that compute a linear function of one operand, and functions of all of them together.
_LINEAR = {Einsum, Rearrange, Slice, Expand, Pad, Gather, Dropout, Transfer, Assign}
_LINEAR_FUNCTIONS = {"copy", "cast", "add", "sub", "neg"}


def _law(function: TrainingLaw) -> TrainingLaw:
    TRAINING[function.__name__] = function
    return function


class Lesson:
    """A graph with a scalar loss at one point, its backward pass, and what the interpreter counts of that.

    Parameters
    ----------
    graph : Graph
        Its only output is the loss.
    point : mapping of str to int
        A size for every dimension.
    checkpoint : Checkpoint, optional
        What is computed again.
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
        """What laws of graphs are asked of."""
        return Trial(self.trained, self.point)

    @cached_property
    def forward(self) -> Graph:
        """The graph alone, its sources named as those of the backward pass are."""
        policy = self.checkpoint or Checkpoint()
        return hoist(peel(policy.prepared(self.graph), policy.stops_early_in))

    @cached_property
    def values(self) -> dict[str, Array]:
        """Numbers for all floating sources, those of one name equal whatever is computed again."""
        out = {}
        for t in self.trained.tensors:
            if t.producer is None and t.dtype.kind == "float":
                shape = tuple(int(value(n.expr, self.point)) for n in t.sizes)
                out[t.name] = np.random.default_rng(list(t.name.encode())).uniform(0.5, 1.5, shape)
        return out

    @cached_property
    def run(self) -> Run:
        """What the interpreter computes with these numbers."""
        return run(self.trained, self.values, seed=0, meanings=None, **self.point)

    def loss(self, name: str, array: Any) -> float:
        """Return the loss with other numbers in one source."""
        return float(run(self.forward, {**self.values, name: array}, seed=0, meanings=None, **self.point).outputs[0])


def check_training(graph: Graph, laws: Iterable[str] | None = None, **point: int) -> None:
    """Hold the backward pass of a graph to the laws.

    Parameters
    ----------
    graph : Graph
        With one output, a scalar, and something that wants a gradient.
    laws : iterable of str, optional
        Names of laws of `TRAINING`, all by default.
    **point : int
        A size above 1 for every dimension.

    Raises
    ------
    AssertionError
        If one is broken: the text says which, where, and both figures.
    UnsupportedError, BindingError
        If a law is unknown, an op kind has no meaning or no vector-Jacobian rule, or a dimension has no size.
    GraphError
        If there is no scalar output, nothing wants a gradient, or an op in place overwrites what a gradient reads.

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
    except BindingError:  # loops whose iterations differ at both ends have some: fewer of them are unrolled
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
    """Of the loss that the interpreter computes, along one random direction for each source."""
    for name, gradient in lesson.run.gradients.items():
        x = lesson.values[name]
        if not x.size:
            continue  # parameters of a loop that has no iteration left
        direction = np.random.default_rng(len(name)).uniform(-1, 1, x.shape)
        expected = float((gradient * direction).sum())
        estimates = [_slope(lesson, name, direction, _STEP / n) for n in (1, 2)]
        size = abs(float(lesson.run.outputs[0]))
        if not np.isfinite([expected, size, *estimates]).all():
            continue  # out of the range in which there is a derivative
        # the two estimates differ by the curvature; near a kink by more than that
        slack = 8 * abs(estimates[0] - estimates[1]) + 1e-6 * abs(expected) + 1e-9 * max(size, 1) / _STEP
        assert abs(estimates[1] - expected) <= slack, (
            f"gradient of {name!r} along a direction is {expected}, expected {estimates[1]}: finite differences"
        )


def _slope(lesson: Lesson, name: str, direction: Any, step: float) -> float:
    x = lesson.values[name]
    return (lesson.loss(name, x + step * direction) - lesson.loss(name, x - step * direction)) / (2 * step)


@_law
def the_gradient_of_a_linear_loss_is_its_transpose(lesson: Lesson) -> None:
    """<J v, g> is <v, J^T g>: the loss changes by the product of gradient and change, however large."""
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
    """Whether all ops that read what depends on a source are linear in that."""
    for op in graph.ops:
        reads = [t in dependent for t in op.operands]
        if not any(reads):
            continue
        if op.kind.overwrites() or not _is_linear(op.kind, together=reads.count(True) > 1):
            return False
        dependent.update(op.results)
    return True


def _is_linear(kind: OpKind, *, together: bool) -> bool:
    """Whether an op is linear in one operand, or in all of them together."""
    match kind:
        case Pointwise():
            return kind.function.name in _LINEAR_FUNCTIONS or (kind.function.name == "mul" and not together)
        case Reduce():
            return kind.operation in ("sum", "mean") and not together
        case Pool():
            return kind.operation == "mean" and not together
        case _:
            return isinstance(kind, Concat | Revised | Stacked) or (type(kind) in _LINEAR and not together)


# -- costs -------------------------------------------------------------------------------------------------------


@_law
def a_backward_pass_keeps_the_laws_of_graphs(lesson: Lesson) -> None:
    """FLOPs, bytes and peak as counted, closed forms, unrolled, monotone, whatever the names, through a file."""
    for name, law in LAWS.items():
        try:
            law(lesson.trial)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@_law
def a_loop_goes_back_as_its_iterations_do(lesson: Lesson) -> None:
    """FLOPs, bytes and peak of the backward pass of the unrolled graph.

    Where loops read or write slices, hand on what they were given, or have to copy a gradient, which their iterations
    hand on dense and each in one place, only FLOPs are equal. Where several carries change places, so that gradients
    are zero in some iterations between others, those of the loop calculate with zeros.
    """
    if not _loops(lesson.graph):
        return
    handed = [op for loop in _loops(lesson.trained) for op in _makers(loop)]
    copied = any(isinstance(op.kind, Rearrange) and op.kind.copy for op in handed)
    copied |= any(op.name.rpartition("/")[2].startswith("own") for op in handed)
    copied |= any(isinstance(op.kind, Accumulate) and op.kind.lent for op in lesson.trained.walk())
    plain = all(map(_is_plain, _loops(lesson.graph))) and not copied
    try:
        flat = backward(_flat(lesson.graph, lesson.point))
    except GraphError as error:
        if "has overwritten in place" not in str(error):
            raise
        return  # of what an op in place changes, iterations that hand it on have no copy
    zeros = any(isinstance(op.kind, Fill) and not op.kind.value for op in handed)
    if zeros and any(len(loop.carries) > 1 for loop in _loops(lesson.graph)):
        return
    for question, ask in (_QUESTIONS if plain else {"flops": flops}).items():
        used = {k: v for k, v in lesson.point.items() if k in known_names(flat)}
        same(lesson.trial.answers[question], ask(flat, **used), f"{question}, of the loop and unrolled first")


def _flat(graph: Graph, point: Mapping[str, int]) -> Graph:
    """Return a graph with its loops played out, other sizes left open."""
    return unroll(graph, **{n: point[n] for n in {n for loop in _loops(graph) for n in loop.count.names()}})


def _is_plain(loop: Loop) -> bool:
    """Whether a loop neither reads nor writes slices, and each iteration makes what it hands on."""
    handed = {t.storage for t in loop.body.outputs} & {f.storage for f in loop.body.formals}
    return not (loop.xs or loop.stacks or loop.pieces or handed)


def _makers(loop: Loop) -> list[Op]:
    """Return the ops of the backward pass that make what a loop starts from, what an iteration hands on and adds up."""
    handed = [*loop.starts, *loop.nexts]
    handed += [op.operands[1] for op in loop.body.ops if isinstance(op.kind, Accumulate)]
    return [t.producer for t in handed if t.producer is not None and t.producer.phase == "backward"]


def _loops(graph: Graph) -> list[Loop]:
    return [loop for op in graph.walk() if (loop := op.loop) is not None]


# -- checkpoints -------------------------------------------------------------------------------------------------


def _policies(lesson: Lesson) -> Iterator[Checkpoint]:
    """Yield policies that fit a graph."""
    loops = _loops(lesson.graph)
    ops = [op.name for op in lesson.graph.walk() if not op.graph.fused]  # a kernel is recomputed whole
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
    """The same numbers, at least as many FLOPs; kept is what was before, what a run starts from, and what is named."""
    before = lesson.trial.answers["flops"]
    for policy in _policies(lesson):
        again = Lesson(lesson.graph, lesson.point, policy)
        try:
            again.trained  # noqa: B018  # derived when it is asked for
        except GraphError as error:
            if "has overwritten in place" not in str(error):
                raise
            continue  # what would run again reads what an op in place has changed
        assert again.trial.answers["flops"] >= before, f"{policy}: {again.trial.answers['flops']} FLOPs, not {before}"
        # groups of layers have another first layer, whose parameters are apart: its numbers are others
        alike = {n: v.size for n, v in again.values.items()} == {n: v.size for n, v in lesson.values.items()}
        for name, gradient in lesson.run.gradients.items() if alike else ():
            found = again.run.gradients[name].reshape(gradient.shape)
            close = np.allclose(found, gradient, rtol=1e-9, atol=1e-12, equal_nan=True)
            assert close, f"{policy}: the gradient of {name!r} differs"
        same(again.trial.answers["flops"], again.trial.run.flops, f"{policy}: FLOPs")
        same(again.trial.answers["peak_memory"], again.trial.run.peak, f"{policy}: peak memory")
        more = _kept(again) - _kept(lesson) - {base_name(name) for name in _started_from(again)}
        assert not more, f"{policy}: keeps {', '.join(sorted(more))}, which was not kept and no run starts from"


def _kept(lesson: Lesson) -> set[str]:
    """Return what the forward pass leaves to the backward pass, iterations aside."""
    program = played(lesson.trained, lesson.point)
    first = next(i for i, step in enumerate(program.steps) if step.op.phase != "forward")
    return {
        base_name(life.name.split("[")[0])
        for life in program.lives
        if life.born is not None and life.born < first <= (life.dies or first)
    }


def _started_from(lesson: Lesson) -> set[str]:
    """Return what runs that are computed again read of the forward pass."""
    assert lesson.checkpoint is not None
    found: set[str] = set()
    for graph in lesson.trained.bodies():
        for run_ in lesson.checkpoint.runs([op for op in graph.ops if op.phase == "forward"]):
            made = {t for op in run_ for t in op.results}
            found |= {name for op in run_ for t in op.operands if t not in made for name in _names(t)}
            found |= {name for op in run_ if lesson.checkpoint.keeps(op) for t in op.results for name in _names(t)}
            if graph.owner is not None:
                outer = graph.owner
                found |= {t.storage.name for t in (*outer.operands, *outer.results, *graph.outputs)}
    return found


def _names(t: Tensor) -> Iterator[str]:
    """Yield the name of a tensor's storage, and in bodies of loops of what the last iteration has made."""
    yield t.storage.name
    op = t.producer
    if op is not None and op.loop is not None:
        yield from _names(op.loop.body.outputs[op.results.index(t)])
