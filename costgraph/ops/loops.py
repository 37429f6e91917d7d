"""Fused kernels and loops: op kinds with a body, loop accumulators and stacks, and the loop executor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce as fold
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, overload

from ..algebra.polynomial import ONE, ZERO, Poly
from ..algebra.symbols import is_name, shorten
from ..dtypes import DType
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Amount,
    BodyKind,
    Flag,
    Graph,
    Index,
    Loop,
    Op,
    OpKind,
    Repeat,
    Result,
    Shape,
    Storage,
    Tensor,
    WorkspaceKind,
    all_of,
    amount,
    apply,
    building,
    current_graph,
    here,
    is_amount,
    is_count,
    itself,
    modify,
    module,
    need,
    need_call,
    need_fit,
    need_formals,
    scope,
    sizes_of,
)
from ..ir.strides import contiguous, numel
from ..notation.validation import Rule
from . import rules
from . import sharding_rule as splits
from .access_footprint import alike, larger
from .elementwise import Pointwise, pointwise
from .fill import DenseFactory
from .functions import FUNCTIONS
from .layout import DomainAxes, contiguous_copy, need_places
from .registry import register
from .uses import elements_read

if TYPE_CHECKING:
    from ..algebra.dominance import Relations

__all__ = [
    "Undef",
    "Accumulate",
    "undef",
    "accumulate",
    "slice_of",
    "taken",
    "Empty",
    "Stacked",
    "Env",
    "LoopExecutor",
    "PlayedIteration",
    "Carry",
    "Kernel",
    "Repeat",
    "each",
    "fused",
    "kernel",
    "repeat",
    "save",
    "scan",
    "written_slices",
]


# -- accumulators and slices -------------------------------------------------------------------------------------------
# Initial values for accumulators that a loop carries or stacks, and operand slices.


@register
@dataclass(frozen=True, kw_only=True)
class Undef(DenseFactory):
    """Uninitialized loop accumulator: it takes no memory, and the first term becomes the sum."""

    name = "undef"
    pieces: Index = 0
    """Number of leading axes with separate allocations, one per iteration."""
    domain: DomainAxes = None
    writes = rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the accumulator."""
        return [
            replace(result, pieces=self.pieces, domain=self.domain) for result in DenseFactory.infer(self, operands)
        ]

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check the domain against the shape."""
        need_places(self.domain, self.sizes)


@register
@dataclass(frozen=True, kw_only=True)
class Accumulate(OpKind):
    """In-place addition to an accumulator; onto an uninitialized one, the term becomes the sum at no cost.

    An `aliased` term is also used elsewhere, so it is copied instead.
    """

    name = "accumulate"
    restricted = takes_complex = True
    aliased: Flag = False
    flops, reads, writes = rules.per_result, rules.whole, rules.all_results
    placed = splits.summed

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the sum, in the accumulator's storage."""
        rules.need_operands(self, operands, 2)
        so_far, term = operands
        if so_far.sizes != term.sizes or so_far.dtype != term.dtype:
            raise ShapeError(f"accumulate {term!r} into {so_far!r}: expected one shape and format")
        alike(operands)
        return [itself(so_far)]

    def overwrites(self) -> tuple[int, ...]:
        """Return the accumulator."""
        return (0,)


def undef(sizes: Shape, dtype: DType, pieces: int = 0, *, name: str = "undef") -> Tensor:
    """Return an uninitialized accumulator, a carry for `accumulate`; it takes no memory."""
    return apply(Undef(sizes=sizes, dtype=dtype, pieces=pieces), [], name)[0]


def accumulate(so_far: Tensor, term: Tensor, *, aliased: bool = False, name: str = "accumulate") -> Tensor:
    """Add a term in place: one FLOP per element. Onto an uninitialized accumulator, the term becomes the sum for free.

    An `aliased` term is also used elsewhere, so it is copied instead.
    """
    dense = contiguous_copy(term)
    return apply(Accumulate(aliased=aliased and dense is term), [so_far, dense], name)[0]


def taken(op: Op) -> Op:
    """Return the copy that replaces accumulating an aliased term onto an uninitialized accumulator."""
    copy = Op(op.graph, Pointwise(function=FUNCTIONS["copy"]), op.name, op.operands[1:], op.scope, op.phase)
    copy.results = op.results
    return copy


def slice_of(body: Graph, t: Tensor, name: str) -> Tensor:
    """Add a formal to a loop body for one position along a tensor's first axis."""
    inner = body.formal(t, name, t.sizes[1:], t.strides[1:], max(t.storage.pieces - 1, 0))
    inner.domain = None if t.domain is None else (t.domain[0], t.domain[1] - 1, t.domain[2] - 1)
    return inner


# -- stacks of unrolled loops ------------------------------------------------------------------------------------------
# A stack outside a loop is allocated empty, and complete once all slices are written.


@register
@dataclass(frozen=True, kw_only=True)
class Empty(DenseFactory):
    """Uninitialized stack, before any slice is written."""

    name = "empty"
    writes = rules.nothing


@register
@dataclass(frozen=True, kw_only=True)
class Stacked(OpKind):
    """Stack after all its slices are written: a rename that depends on the writes."""

    name = "stacked"
    flops, reads, writes = rules.free, rules.nothing, rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the stack; the slices move into its storage."""
        stack, offset = operands[0], ZERO
        for t in operands[1:]:
            if t.sizes[t.ndim - stack.ndim + 1 :] != stack.sizes[1:] or t.dtype != stack.dtype:
                raise ShapeError(
                    f"stack {stack!r} of {operands[1:]!r}, expected each to be one or several of its slices"
                )
            if t.storage is not stack.storage:
                # results that go into a stack are written there directly, so they live in its storage
                t.strides = contiguous(t.sizes)
                _move(t, t.storage, stack.storage, offset)
            offset = offset + numel(t.sizes)
        if not stack.graph.same(offset, stack.numel):
            raise ShapeError(f"stack {stack!r} of {operands[1:]!r}, expected all of its slices")
        return [itself(stack)]


def _move(t: Tensor, old: Storage, new: Storage, offset: Poly) -> None:
    """Move a tensor and its views to another storage."""
    pending = [t]
    while pending:
        tensor = pending.pop()
        tensor.storage, tensor.offset = new, tensor.offset + offset
        pending += [
            r for op in tensor.graph.successors(tensor) for r in op.results if r.storage is old and r not in pending
        ]


# -- loop executor -----------------------------------------------------------------------------------------------------
# Iterates loops for all interpreters: carries, slices, stacks and stacked residuals are handled here once.

P = TypeVar("P")


@dataclass(frozen=True)
class PlayedIteration:
    """One executed iteration."""

    at: int
    """index among the executed iterations"""
    times: int
    """number of executed iterations"""
    count: Poly = ONE
    """number of iterations in the loop"""


Env = dict[Any, Any]


class LoopExecutor(Generic[P]):
    """Base of interpreters: runs a graph's ops in program order, and loop bodies once per executed iteration.

    Subclasses define values and how ops compute them; values are stored by `key`. An uninitialized accumulator is None,
    and stacked residuals are the result of `collected`. `P` is a subclass's own context, passed down to each op and
    iteration.
    """

    def __init__(self) -> None:
        self.around: list[PlayedIteration] = [PlayedIteration(0, 1)]
        """Enclosing iterations; the first entry stands for none."""

    # -- hooks -----------------------------------------------------------------------------------------------------

    def key(self, t: Tensor) -> Hashable:
        """Return the key under which a tensor's value is stored."""
        return t

    def step(self, op: Op, env: Env, place: P) -> None:
        """Run an op that is not a loop."""
        raise NotImplementedError

    def turns(self, loop: Loop, xs: Sequence[Any]) -> Iterable[PlayedIteration]:
        """Yield the iterations in execution order."""
        raise NotImplementedError

    def stack(self, loop: Loop, t: Tensor, env: Env, place: P) -> Any:
        """Return a result's stack before any slice is written."""
        raise NotImplementedError

    def slice(self, loop: Loop, value: Any, turn: PlayedIteration, place: P) -> Any:
        """Return an operand's slice for one iteration."""
        raise NotImplementedError

    def inside(self, env: Env) -> Env:
        """Return the environment for one iteration."""
        return {}

    def iteration(self, loop: Loop, env: Env, turn: PlayedIteration, stacks: Sequence[Any], place: P) -> None:
        """Run the body once."""
        raise NotImplementedError

    def filled(self, loop: Loop, i: int, stack: Any, rows: Sequence[Any], place: P) -> Any:
        """Return a stack after all slices are written; `rows` are in iteration order."""
        return stack

    def collected(self, loop: Loop, rows: Sequence[Any]) -> Any:
        """Return the value for stacked residuals; `rows` are in iteration order."""
        return list(rows)

    def slice_updated(self, whole: Tensor, env: Env, rows: Sequence[Any], place: P) -> Any:
        """Return an operand after each iteration has written its slice; `rows` are in iteration order."""
        return env[self.key(whole)]

    # -- execution -----------------------------------------------------------------------------------------------------

    def play(self, ops: Iterable[Op], env: Env, place: P) -> None:
        """Run ops in order."""
        for op in ops:
            self.one(op, env, place)

    def one(self, op: Op, env: Env, place: P) -> None:
        """Run one op; accumulation onto an uninitialized accumulator makes the term the sum."""
        if op.loop is not None:
            self.loop(op.loop, env, place)
        elif isinstance(op.kind, Undef):
            env[self.key(op.results[0])] = None
        elif isinstance(op.kind, Accumulate) and env[self.key(op.operands[0])] is None:
            if op.kind.aliased:
                del env[self.key(op.operands[0])]
                self.step(taken(op), env, place)
            else:
                env[self.key(op.results[0])] = env[self.key(op.operands[1])]
        else:
            self.step(op, env, place)

    def loop(self, loop: Loop, env: Env, place: P) -> None:
        """Run a loop, passing each iteration's carries to the next."""
        stacks = [self.stack(loop, t, env, place) for t in loop.stacks]
        state, xs, shared = (self._values(ts, env) for ts in (loop.starts, loop.xs, loop.shared))
        ys: list[list[Any]] = []
        residuals: list[list[Any]] = []
        for turn in self.turns(loop, xs):
            body_env = self.inside(env)
            self._put(body_env, loop.captured, shared)
            self._put(body_env, loop.slices, [self.slice(loop, v, turn, place) for v in xs])
            self._put(body_env, loop.carries, state)
            self.around.append(turn)
            self.iteration(loop, body_env, turn, stacks, place)
            self.around.pop()
            state = self._values(loop.nexts, body_env)
            ys.append(self._values(loop.ys, body_env))
            residuals.append(self._values(loop.saved, body_env))
        if loop.reverse:
            ys, residuals = ys[::-1], residuals[::-1]
        self._put(env, loop.lasts, state)
        filled = [self.filled(loop, i, s, [row[i] for row in ys], place) for i, s in enumerate(stacks)]
        self._put(env, loop.stacks, filled)
        for i, t in enumerate(loop.pieces):
            rows, base = [row[i] for row in residuals], loop.updated_operand(i)
            self._put(
                env, [t], [self.collected(loop, rows) if base is None else self.slice_updated(base, env, rows, place)]
            )

    def _values(self, tensors: Iterable[Tensor], env: Env) -> list[Any]:
        return [env[self.key(t)] for t in tensors]

    def _put(self, env: Env, tensors: Sequence[Tensor], values: Sequence[Any]) -> None:
        for t, value in zip(tensors, values, strict=True):
            env[self.key(t)] = value


# -- kernels and loops -------------------------------------------------------------------------------------------------

Carry = Tensor | tuple[Tensor, ...]


def _are_strides(value: object) -> bool:
    return value is None or all_of(is_amount)(value)


@register
@dataclass(frozen=True, kw_only=True)
class Kernel(WorkspaceKind, BodyKind):
    """Fused kernel: its body's intermediates never reach memory."""

    name = "kernel"
    restricted = True
    changed: Annotated[tuple[int, ...], Rule("a tuple of operand numbers", all_of(is_count))] = ()
    """Operands that it mutates, such as recurrent state that persists between steps."""
    backward: str = ""
    """Backward implementation: empty for one fused kernel, `ops` for one op each, or a rule name."""
    statistics: Annotated[str, Rule("auto, or nothing", lambda v: v == "auto")] = ""
    """Whether the backward pass decides if the kernel's statistics are saved."""
    strides: Annotated[
        tuple[tuple[Poly, ...] | None, ...], Rule("strides, or None, of results", all_of(_are_strides))
    ] = ()
    """Strides of its leading results, None for contiguous ones."""
    spare: Amount = ZERO
    """Bytes of the first result's storage beyond its elements: the kernel wrote a larger tensor there first."""
    gradient_workspace: Amount = ZERO
    """Backward kernel workspace in bytes, if the incoming gradient is contiguous."""
    flops, writes = rules.in_the_body, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the body's outputs."""
        body = self.body
        if any(i >= min(len(operands), len(body.formals)) for i in self.changed):
            raise ShapeError(
                f"kernel: mutates operand {max(self.changed)} of {len(operands)}, expected an existing operand"
            )
        places = {body.formals[i].storage: i for i in self.changed}
        results: list[Result] = []
        for t, strides in zip_longest(body.outputs, self.strides[: len(body.outputs)]):
            i = places.get(t.storage)
            need(strides is None or len(strides) == t.ndim, f"{len(strides or ())} strides of {t!r}")
            result = Result(t.sizes, t.dtype, strides, domain=t.domain, spare=ZERO if results else self.spare)
            if i is not None:
                result = replace(result, strides=operands[i].strides, of=i, offset=operands[i].offset, spare=ZERO)
            results.append(result)
        return results

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the elements that the body reads from each operand, also through views."""
        amounts = []
        for i, f in enumerate(self.body.formals):
            # an exported view is copied out, unless it is the mutated operand itself
            unchanged = i not in self.changed
            exported = [rules.elements(t) for t in self.body.outputs if unchanged and t.storage is f.storage]
            amounts.append(fold(larger, exported, elements_read(self.body, f)))
        return rules.once(op, amounts)

    def overwrites(self) -> tuple[int, ...]:
        """Return the mutated operands."""
        return self.changed

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check the body's inputs against the operands."""
        need_formals(operands, self.body)
        sources = [t for t in self.body.tensors if t.producer is None and t.role != "formal"]
        need(not sources, f"{sources[:1]!r} declared inside a kernel")
        for outer, inner in zip(operands, self.body.formals, strict=True):
            need_fit(outer, inner)
            need(inner.offset == outer.offset, f"offset of {inner!r}")


@contextmanager
def kernel(name: str, *, workspace: object = 0, backward: str = "") -> Iterator[Graph]:
    """Fuse the ops built inside into one kernel: their intermediates never reach memory.

    Parameters
    ----------
    name : str
        Kernel name, also the scope of the ops inside.
    workspace : sympy.Expr or int
        Workspace in bytes, besides operands and results.
    backward : str
        Backward implementation: by default one kernel, which recomputes from the operands all tensors that `save` does
        not mark; `ops` for one op each; or a rule name in `costgraph.transforms.vjp.kernels`.

    Yields
    ------
    Graph
        The body.

    Raises
    ------
    GraphError
        If no graph is open. A kernel without used results is reported when the graph is validated.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, D))
    ...     with cg.kernel("scaled_relu"):
    ...         y = cg.relu(2 * x)
    ...     g.output(y)
    >>> cg.flops(g), cg.bytes_moved(g)
    (2*B*D, 8*B*D)
    """
    graph = current_graph()
    if not is_name(name):
        raise GraphError(f"kernel {shorten(str(name))}: expected an identifier")
    space = amount(f"kernel {name!r}: workspace", workspace)
    if not isinstance(backward, str):
        raise GraphError(f"kernel {name!r}: backward {backward!r}, expected 'ops' or the name of a rule")
    body = graph.start_body(name, fused=True)
    with graph.transaction():
        with scope(name), building(body):
            yield body
        body.owner = graph.add_op(Kernel(body=body, workspace=space, backward=backward), body.captured, name)
    # cost tables list its bytes next to its body's FLOPs
    body.owner.scope = "/".join((*here().levels, name))


def save(t: Tensor) -> Tensor:
    """Mark a tensor inside a kernel as saved: the kernel also writes it if the backward pass reads it."""
    maker = t.producer
    if maker is None or not t.graph.fused:
        raise GraphError(f"save {t!r}: expected the result of an op inside a kernel")
    modify(t.graph, "save")
    maker.state(save=True)
    return t


def fused(name: str, function: Callable[..., Carry], *operands: Tensor, backward: str = "", **options: object) -> Carry:
    """Run a function of tensors inside one kernel and return its results."""
    if not operands or not all(isinstance(t, Tensor) for t in operands):
        raise GraphError(f"{name}: operands {operands!r}, expected tensors")
    graph = current_graph(operands[0].graph)
    with building(graph), kernel(name, backward=backward) as body:
        results = function(*operands, **options)
    return tuple(body.export(t) for t in results) if isinstance(results, tuple) else body.export(results)


@overload
def repeat(count: object, body: Callable[..., Tensor], x: Tensor, *, name: str = ...) -> Tensor: ...


@overload
def repeat(
    count: object, body: Callable[..., tuple[Tensor, ...]], x: tuple[Tensor, ...], *, name: str = ...
) -> tuple[Tensor, ...]: ...


def repeat(count: object, body: Callable[..., Carry], x: Carry, *, name: str = "repeat") -> Carry:
    """Apply a body `count` times, as a stack of layers; the count may be a symbol.

    Parameters
    ----------
    count : sympy.Expr or int
        Number of iterations, at least 1.
    body : callable
        `body(x) -> x`, called once with the tensors of one iteration. Parameters declared inside belong to each
        iteration; tensors from outside are shared.
    x : Tensor or tuple of Tensor
        Initial carry; a tuple is passed as several arguments.
    name : str
        Op name, and the body's scope.

    Returns
    -------
    Tensor or tuple of Tensor
        Final carry.

    Raises
    ------
    GraphError, ShapeError
        If the body's results do not match its arguments.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, L = cg.dims("B D L")
    >>> with cg.Graph("g") as g:
    ...     layer = lambda x: cg.relu(cg.linear(x, "b d -> b e", e=D))
    ...     g.output(cg.repeat(L, layer, g.input("x", (B, D)), name="layers"))
    >>> cg.matmul_flops(g), cg.param_count(g)
    (2*B*D**2*L, D**2*L)
    """
    need_call("repeat: body", body)
    carries = x if isinstance(x, tuple) else (x,)

    def step(*args: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        returned = body(*args)
        return (returned if isinstance(returned, tuple) else (returned,)), ()

    finals, _ = _loop(count, step, carries, (), name)
    return finals if isinstance(x, tuple) else finals[0]


def scan(
    count: object,
    body: Callable[..., tuple[Carry, Carry]],
    carry: Carry,
    xs: Carry = (),
    *,
    name: str = "scan",
) -> tuple[Carry, Carry]:
    """Apply a body along the first axis of tensors, as `jax.lax.scan`: a recurrence over time.

    Parameters
    ----------
    count : sympy.Expr or int
        Number of iterations, the size of the first axis of every `xs`.
    body : callable
        `body(carry, x) -> (carry, y)`: `x` is one slice of `xs`, a view; `y` is written into one slice of a stack.
        Both may be tuples of tensors.
    carry : Tensor or tuple of Tensor
        Initial carry.
    xs : Tensor or tuple of Tensor
        Tensors to slice; `()` for none, and then the body gets `()`.
    name : str
        Op name, and the body's scope.

    Returns
    -------
    carry, ys
        The final carry, and the stacked outputs: a tensor (or tuple of tensors) with a first axis of size `count`,
        whose storage lives from the first iteration on.

    Raises
    ------
    GraphError, ShapeError
        If the body does not return such a pair, or the first axes differ.
    """
    need_call("scan: body", body)
    single = not isinstance(carry, tuple)
    shapes: list[bool] = []

    def step(*args: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        state, slices = args[: len(carries)], args[len(carries) :]
        returned = body(state[0] if single else state, slices[0] if isinstance(xs, Tensor) else slices)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise GraphError(f"scan {name!r}: the body returned {returned!r}, expected a pair (carry, y)")
        next_carry, y = returned
        if not isinstance(y, Tensor | tuple | None):
            raise GraphError(f"scan {name!r}: the body returned y = {y!r}, expected a tensor, a tuple or None")
        shapes.append(isinstance(y, Tensor))
        return (next_carry if isinstance(next_carry, tuple) else (next_carry,)), (
            (y,) if isinstance(y, Tensor) else tuple(y or ())
        )

    carries = carry if isinstance(carry, tuple) else (carry,)
    finals, ys = _loop(count, step, carries, xs if isinstance(xs, tuple) else (xs,), name)
    return (finals[0] if single else finals), (ys[0] if shapes[0] else ys)


def _loop(
    count: object,
    step: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]],
    carries: tuple[Tensor, ...],
    xs: tuple[Tensor, ...],
    name: str,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    (times,) = sizes_of((count,), f"repeat {name!r}: count")
    if not carries or not all(isinstance(t, Tensor) for t in (*carries, *xs)):
        raise GraphError(f"repeat {name!r}: got {carries + xs!r}, expected tensors as initial carries")
    if not is_name(name):
        raise GraphError(f"repeat {shorten(str(name))}: expected an identifier as its name")
    graph = current_graph(carries[0].graph)
    # carries are contiguous, so that all iterations share one layout
    carries = tuple(contiguous_copy(graph.adopt(t)) for t in carries)
    xs = tuple(graph.adopt(t) for t in xs)
    limited = next((t for t in (*carries, *xs) if t.domain is not None), None)
    if limited is not None:
        raise ShapeError(f"repeat {name!r}: {limited!r} is restricted to a domain, expected an unrestricted tensor")
    for t in xs:
        if t.ndim == 0 or not graph.same(t.sizes[0], times):
            raise ShapeError(f"repeat {name!r}: {t!r} is read slice by slice, expected a first axis of size {times}")
    body = graph.start_body(name, fused=False)
    with module(graph, name) as scope_name, building(body):
        formals = [body.formal(t, f"{name}.carry{i}", t.sizes, contiguous(t.sizes)) for i, t in enumerate(carries)]
        formals += [slice_of(body, t, f"{name}.x{i}") for i, t in enumerate(xs)]
        nexts, ys = step(*formals)
        if len(nexts) != len(carries) or not all(isinstance(t, Tensor) for t in (*nexts, *ys)):
            raise GraphError(
                f"repeat {name!r}: the body returned {nexts + ys!r}, expected {len(carries)} tensors as next carries"
            )
        nexts = tuple(contiguous_copy(body.adopt(t)) for t in nexts)
        body.outputs += [*nexts, *written_slices(body, nexts, ys)]
    kind = Repeat(body=body, count=times, carries=len(carries), xs=len(xs))
    op = body.owner = graph.add_op(kind, (*carries, *xs, *body.captured), scope_name)
    return op.results[: len(carries)], op.results[len(carries) :]


def each(
    count: Poly,
    step: Callable[..., tuple[Tensor, ...]],
    xs: Sequence[Tensor],
    *,
    reverse: bool = False,
    name: str = "each",
) -> tuple[Tensor, ...]:
    """Map a body over slices; each result is stacked as one storage per iteration.

    The first axis of every `xs`, and of every result, has size `count`; `reverse` starts at the last slice. If
    `step(*slices) -> tensors` returns a slice mutated in place, the result is the whole operand.
    """
    graph = current_graph(xs[0].graph)
    xs = [graph.adopt(t) for t in xs]
    body = graph.start_body(name, fused=False)
    with module(graph, name) as scope_name, building(body):
        formals = [slice_of(body, t, f"{name}.x{i}") for i, t in enumerate(xs)]
        body.outputs += map(body.adopt, step(*formals))
    # the count may be 0 if an existing loop with the same count may be empty
    same_count = (op.loop.kind for op in graph.ops if op.loop is not None and op.loop.count == count)
    min_count = 0 if count.constant is None and any(k.min_count == 0 for k in same_count) else 1
    kind = Repeat(
        body=body, count=count, carries=0, xs=len(xs), saved=len(body.outputs), reverse=reverse, min_count=min_count
    )
    op = body.owner = graph.add_op(kind, (*xs, *body.captured), scope_name)
    return op.results


def written_slices(body: Graph, nexts: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    """Return the slices for stacked outputs, copied unless they own their storage."""
    owned = {t.storage for t in (*body.formals, *nexts)}
    slices = []
    for y in map(body.adopt, ys):
        owns_storage = y.storage.role == "activation" and y.storage not in owned and y.is_contiguous and not y.is_view
        looped = y.producer is not None and y.producer.loop is not None  # an inner loop allocated it
        y = y if owns_storage and not looped else pointwise("copy", y, name="stack")
        owned.add(y.storage)
        slices.append(contiguous_copy(y))
    return slices
