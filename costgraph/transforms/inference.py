"""Inference: turn a forward pass into a prefill, or into a decode step that reads a KV cache.

Each op is replayed with the sizes it has once the tensors of earlier positions come from caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import sympy

from ..algebra.dominance import Relations
from ..algebra.extremum import smaller
from ..algebra.polynomial import ONE, Poly, poly
from ..algebra.symbols import shown, symbol
from ..errors import BindingError, GraphError, ShapeError, UnsupportedError
from ..ir.graph import BodyKind, Graph, Loop, Op, OpKind, Tensor, _polys, known_names, need_choice, positive
from ..ir.strides import contiguous, numel
from ..notation.pattern import Affine, Axes, Pattern
from ..ops.collectives import need_of_all
from ..ops.einsum import Einsum
from ..ops.elementwise import Dropout, Pointwise
from ..ops.fill import Assign, Pad
from ..ops.index import Arange, Gather, Scatter
from ..ops.kv_cache import Append, Cache, InitialState
from ..ops.layout import Concat, Expand, KeepAlive, Rearrange, Slice
from ..ops.loops import Kernel, Repeat
from ..ops.opaque import need_declared
from ..ops.reduce import Pool, Reduce
from .rewrite import Rewriter, bound, bound_record

__all__ = [
    "head_of",
    "needed_ops",
    "needed_formals",
    "SequenceLengths",
    "resized",
    "step_of",
    "tokens_of",
    "Replayer",
    "positions_of",
    "decode",
    "prefill",
]


# -- pruning -----------------------------------------------------------------------------------------------------------


def needed_ops(graph: Graph, *, static: bool = False) -> set[Op]:
    """Return the ops that the outputs depend on, including ops in bodies.

    A needed loop needs all its carries and slices, but only the captured tensors that its needed ops read. With
    `static`, tensors cached once (by a `cache` without an axis) exist already, so that their operands are not needed.
    """
    needed: set[Op] = set()
    _walk(graph, needed, static=static)
    return needed


def _walk(graph: Graph, needed: set[Op], *, static: bool) -> set[Tensor]:
    """Add the ops that the outputs of a graph or body depend on, and return the tensors they read."""
    read_tensors = set(graph.outputs)
    for op in reversed(graph.ops):
        if not any(t in read_tensors for t in op.results):
            continue
        needed.add(op)
        if static and _is_static(op):
            continue
        if op.body is None:
            read_tensors.update(op.operands)
            continue
        body_reads = _walk(op.body, needed, static=static)
        body_reads |= _always_read(op)
        read_tensors.update(t for f, t in zip(op.body.formals, op.operands, strict=True) if f in body_reads)
    return read_tensors


def _is_static(op: Op) -> bool:
    """Whether an op marks a tensor that is cached once."""
    return isinstance(op.kind, Cache) and op.kind.axis is None


def _always_read(op: Op) -> set[Tensor]:
    """Return a body's carried or sliced formals."""
    return set() if op.loop is None else {*op.loop.carries, *op.loop.slices}


def needed_formals(op: Op, needed: set[Op]) -> list[bool]:
    """Return, for each formal of a body, whether its needed ops read it; carries and slices always count."""
    assert op.body is not None
    read = (
        {t for o in op.body.ops if o in needed for t in _needed_operands(o, needed)}
        | set(op.body.outputs)
        | _always_read(op)
    )
    return [f in read for f in op.body.formals]


def _needed_operands(op: Op, needed: set[Op]) -> list[Tensor]:
    if _is_static(op):
        return []
    if op.body is None:
        return list(op.operands)
    return [t for t, is_needed in zip(op.operands, needed_formals(op, needed), strict=True) if is_needed]


def head_of(place: str, graph: Graph, positions: str) -> Op:
    """Return the op that computes the logits: only ops with a single per-position operand follow it.

    Raises UnsupportedError if there is none.
    """
    op = graph.outputs[0].producer if len(graph.outputs) == 1 else None
    while op is not None:
        per_position = [t for t in op.operands if any(positions in n.names() for n in t.sizes)]
        contracts = isinstance(op.kind, Einsum) or (
            isinstance(op.kind, Kernel) and op.body is not None and any(isinstance(o.kind, Einsum) for o in op.body.ops)
        )
        if len(per_position) != 1:
            break
        if contracts:
            return op
        if not isinstance(op.kind, Pointwise | Rearrange | KeepAlive | Kernel):
            break
        op = per_position[0].producer
    raise UnsupportedError(
        f"{place}: graph {graph.name!r} has no head that computes its output, expected logits='all' or a single "
        f"output computed by a linear layer"
    )


# -- resize ------------------------------------------------------------------------------------------------------------
# Updates the records of ops whose operands have grown or shrunk along the sequence.

K = TypeVar("K", bound=OpKind)


@dataclass(frozen=True)
class SequenceLengths:
    """Numbers of positions that replace the sequence length; they differ between ops."""

    symbol: str
    """the sequence length of the declared graph"""
    new_positions: Poly
    """positions computed by a step"""
    others: tuple[Poly, ...] = ()
    """other lengths in a step: positions in caches, or a single one"""

    @property
    def earlier(self) -> Poly:
        """Positions before the computed ones."""
        return poly(symbol(self.symbol)) - self.new_positions

    def with_other(self, length: Poly) -> SequenceLengths:
        """Return a copy with one more length."""
        present = length in (self.new_positions, *self.others)
        return self if present else SequenceLengths(self.symbol, self.new_positions, (*self.others, length))

    def of(self, old: Poly, new: Poly, place: str) -> Poly | None:
        """Return the length that turns size `old` into `new`, None if `old` does not depend on positions."""
        if self.symbol not in old.names():
            return None
        for length in (self.new_positions, *self.others):
            if old.bind({self.symbol: length}) == new:
                return length
        raise UnsupportedError(
            f"{place}: an axis of size {old} has become {new}, expected a size that follows from the positions"
        )

    def bound(self, value: Any, length: Poly | None = None) -> Any:
        """Bind the sequence length in a value, by default to a step's positions."""
        return bound(value, {self.symbol: self.new_positions if length is None else length})

    def record(self, kind: K, length: Poly | None = None) -> K:
        """Bind the sequence length in all fields of a record, by default to a step's positions."""
        return bound_record(kind, {self.symbol: self.new_positions if length is None else length})


def resized(op: Op, operands: Sequence[Any], lengths: SequenceLengths) -> OpKind:
    """Return an op's record for resized operands, which are None where no longer computed; bodies are unchanged.

    Raises UnsupportedError if the op states a formula in the sequence length that does not tell new positions from
    cached ones.
    """
    rule: _Rule = _RULES.get(type(op.kind), _bound)
    return rule(op, op.kind, operands, lengths)


def _axes(op: Op, operands: Sequence[Any], lengths: SequenceLengths) -> list[list[Poly | None]]:
    """Return the length for each axis of each operand, None for axes without positions."""
    return [
        []
        if new is None
        else [lengths.of(a, b, f"operand {i + 1} of {op.name!r}") for a, b in zip(old.sizes, new.sizes, strict=True)]
        for i, (old, new) in enumerate(zip(op.operands, operands, strict=True))
    ]


def _bound(op: Op, kind: K, operands: Sequence[Any], lengths: SequenceLengths) -> K:
    """Bind all stated formulas to the one length that the operands share."""
    if all(lengths.symbol not in p.names() for p in _polys(kind.stated())):
        return kind
    operand_lengths = {n for axes in _axes(op, operands, lengths) for n in axes if n is not None}
    if operand_lengths - {lengths.new_positions}:
        raise UnsupportedError(
            f"op {op.name!r} states its sizes or costs in {lengths.symbol} and reads cached tensors, expected an op "
            f"that distinguishes new positions from cached ones"
        )
    return lengths.record(kind)


def _contraction(op: Op, kind: Einsum, operands: Sequence[Any], lengths: SequenceLengths) -> Einsum:
    """Take axis sizes from the operands; the output of a sliding window follows the axis it slides over."""
    if kind.causal and operands[0].sizes[-1] != lengths.new_positions:
        return _after_history(kind, lengths)
    by_name, slid = _by_name(op, kind.pattern, operands, lengths)
    if kind.orders is not None and any(n not in (None, lengths.new_positions) for n in by_name.values()):
        raise UnsupportedError(f"op {op.name!r} has no contraction order, expected order= where it is declared")
    extents = {n: lengths.bound(size, by_name.get(n)) for n, size in kind.extents.items()}
    return replace(lengths.record(kind), extents=extents, rooms=lengths.bound(kind.rooms, slid))


def _pooled(op: Op, kind: Pool, operands: Sequence[Any], lengths: SequenceLengths) -> Pool:
    by_name, _ = _by_name(op, kind.pattern, operands, lengths)
    return replace(kind, extents={n: lengths.bound(size, by_name.get(n)) for n, size in kind.extents.items()})


def _by_name(
    op: Op, pattern: Pattern, operands: Sequence[Any], lengths: SequenceLengths
) -> tuple[dict[str, Poly | None], Poly | None]:
    """Return the length for each axis of a pattern, and for the sliding axis."""
    by_name: dict[str, Poly | None] = {}
    slid: Poly | None = None
    for axes, dims in zip(_axes(op, operands, lengths), pattern.operands, strict=True):
        for length, dim in zip(axes, dims, strict=True):
            for name in dim.names:
                if isinstance(dim, Affine) or length is not None or name not in by_name:
                    by_name[name] = length
            if isinstance(dim, Affine) and length is not None:
                slid = length
    return by_name, slid


def _after_history(kind: Einsum, lengths: SequenceLengths) -> Einsum:
    """Return a causal convolution over cached and new inputs: no padding, one output per new position."""
    pattern = kind.pattern
    *leading, last = pattern.operands[0]
    assert isinstance(last, Affine)
    slides = Affine(last.terms, 0)
    out = {n for n, _ in last.terms if n in pattern.result_names}
    extents = {n: lengths.new_positions if n in out else lengths.bound(size) for n, size in kind.extents.items()}
    pattern = Pattern(((*leading, slides), *pattern.operands[1:]), pattern.result)
    return replace(lengths.record(kind), pattern=pattern, extents=extents, causal=False, rooms=())


def _rearranged(op: Op, kind: Rearrange, operands: Sequence[Any], lengths: SequenceLengths) -> Rearrange:
    (x,), (old,), pattern = operands, op.operands, kind.pattern
    (axes,) = _axes(op, operands, lengths)
    if pattern is None:
        merged = x.sizes if kind.merged == old.sizes else _reshaped(op, kind, x, axes, lengths)
        return replace(kind, split=x.sizes, merged=merged)
    names = pattern.operand_names(0)
    sizes = dict(zip(names, kind.split, strict=True))
    for length, dim in zip(axes, pattern.operands[0], strict=True):
        sizes |= {n: lengths.bound(sizes[n], length) for n in dim.names}
    merged = tuple(prod((sizes[n] for n in a.names), start=ONE) for a in pattern.result if isinstance(a, Axes))
    return replace(kind, split=tuple(sizes[n] for n in names), merged=merged)


def _reshaped(
    op: Op, kind: Rearrange, x: Tensor, axes: Sequence[Poly | None], lengths: SequenceLengths
) -> tuple[Poly, ...]:
    """Return the reshaped sizes if all axes have the same length."""
    operand_lengths = {n for n in axes if n is not None} or {lengths.new_positions}
    for length in operand_lengths:
        merged = tuple(n.bind({lengths.symbol: length}) for n in kind.merged)
        if len(operand_lengths) == 1 and numel(merged) == x.numel:
            return merged
    raise UnsupportedError(f"op {op.name!r} reshapes {x!r}, expected a rearrange that names its axes")


def _cut(op: Op, kind: Slice, operands: Sequence[Any], lengths: SequenceLengths) -> Slice:
    """Bind the fields with the length of the sliced axis."""
    length = _axes(op, operands, lengths)[0][kind.axis]
    bound_kind = lengths.record(kind, length)
    if length is not None or lengths.symbol not in kind.size.names():
        return bound_kind
    # a table of positions: the rows of new positions follow the earlier ones
    room = None if bound_kind.room is None else bound_kind.room - lengths.earlier
    return replace(bound_kind, start=bound_kind.start + lengths.earlier, room=room)


def _padded(op: Op, kind: Pad, operands: Sequence[Any], lengths: SequenceLengths) -> Pad:
    """Bind the fields with the length of the padded axis."""
    return lengths.record(kind, _axes(op, operands, lengths)[0][kind.axis])


def _expanded(op: Op, kind: Expand, operands: Sequence[Any], lengths: SequenceLengths) -> Expand:
    """Keep the sizes of the operand's axes; expanded axes follow a step's positions."""
    (x,), (old,) = operands, op.operands
    sizes = tuple(
        x.sizes[axis] if axis is not None and size == old.sizes[axis] else lengths.bound(size)
        for size, axis in zip(kind.sizes, kind.kept, strict=True)
    )
    return replace(kind, sizes=sizes)


def _positions(op: Op, kind: Arange, operands: Sequence[Any], lengths: SequenceLengths) -> Arange:
    if kind.context:
        return kind
    bound_kind = _bound(op, kind, operands, lengths)
    return bound_kind if kind.reverse else replace(bound_kind, start=kind.start + lengths.earlier)


def _unchanged(op: Op, kind: OpKind, operands: Sequence[Any], lengths: SequenceLengths) -> OpKind:
    """Return the record unchanged: all sizes come from the operands."""
    return kind


def _looped(op: Op, kind: Repeat, operands: Sequence[Any], lengths: SequenceLengths) -> Repeat:
    """Set the iteration count to the number of slices."""
    slices = kind.parts(op).slices
    sliced = (t for f, t in zip(kind.body.formals, operands, strict=True) if f in slices)
    return replace(kind, count=next(sliced).sizes[0] if slices else lengths.bound(kind.count))


#: Returns an op's record for resized operands.
_Rule = Callable[[Op, Any, Sequence[Any], SequenceLengths], OpKind]

#: Kinds that need a rule per axis; in all others, one length is bound in every field.
_RULES: dict[type[OpKind], _Rule] = {
    Einsum: _contraction,
    Pool: _pooled,
    Rearrange: _rearranged,
    Slice: _cut,
    Pad: _padded,
    Expand: _expanded,
    Arange: _positions,
    Repeat: _looped,
    Reduce: _unchanged,
    Concat: _unchanged,
    KeepAlive: _unchanged,
    Assign: _unchanged,
    Dropout: _unchanged,
    Gather: _unchanged,
    Scatter: _unchanged,
}


# -- decode steps of traces --------------------------------------------------------------------------------------------
# A trace with marked caches is a step already; only its number of new positions is bound.


class _TraceStep(Rewriter):
    """Copies a traced step, binding its new positions."""

    def changed(self, old: Graph) -> dict[str, Any]:
        """Return the changed facts: the assumptions on the sizes that remain symbolic."""
        try:
            for relation in old.relations.relations:
                relation.check(self.values)
        except BindingError as error:
            raise UnsupportedError(
                f"decode: {error}: graph {old.name!r} takes another branch for this number of new positions, "
                f"expected a trace with that number"
            ) from None
        remaining = Relations(relation.at(self.values) for relation in old.relations.relations)
        return super().changed(old) | {"relations": remaining}


def step_of(graph: Graph, caches: Sequence[Tensor], tokens: object, logits: str) -> Graph:
    """Return the decode step of a trace with marked caches, for the given number of new positions.

    Raises GraphError if the graph is a step without symbolic sizes, and UnsupportedError if new and earlier positions
    cannot be distinguished.
    """
    inputs = [t for t in graph.tensors if t.role == "input" and t.producer is None]
    input_names, cache_names = _size_names(inputs), _size_names(caches)
    new_sizes, cached_sizes = sorted(input_names - cache_names), sorted(cache_names - input_names)
    if graph.name.endswith((".decode", ".prefill")):
        raise GraphError(f"decode: graph {graph.name!r} is a step already, expected a forward pass")
    if len(new_sizes) > 1 or len(cached_sizes) > 1:
        raise UnsupportedError(
            f"decode: inputs of graph {graph.name!r} have open sizes {shown(new_sizes)} that no cache has, and its "
            f"caches {shown(cached_sizes)} that no input has, expected at most one of each: new and earlier positions"
        )
    if logits == "last":
        raise UnsupportedError("decode: logits='last' of a trace, expected a program that returns only the last logits")
    if not new_sizes:
        if tokens != 1:
            raise UnsupportedError(
                f"decode: tokens {shown(tokens)} of graph {graph.name!r}, whose new positions have no name, expected a "
                f"trace that names their axis"
            )
        return Rewriter().run(graph, f"{graph.name}.decode")
    (name,) = new_sizes
    new_positions = tokens_of("decode", graph, tokens, name)
    if new_positions == ONE:
        raise UnsupportedError(
            f"decode: tokens=1 of graph {graph.name!r}, but the named sizes of a trace are larger than 1: expected a "
            f"trace of one position that gives the axis of {name} no name (None), or tokens= above 1"
        )
    step = _TraceStep({name: new_positions} | {n: poly(symbol(name)) - new_positions for n in cached_sizes}).run(
        graph, f"{graph.name}.decode"
    )
    if cached_sizes:
        with step:
            step.assume(f"{name} > {new_positions} + 1")
    return step


def _size_names(tensors: Iterable[Tensor]) -> set[str]:
    return set().union(*(n.names() for t in tensors for n in t.sizes))


def tokens_of(place: str, graph: Graph, tokens: object, name: str) -> Poly:
    """Return the number of new positions; a symbol must not clash with a dimension of the graph."""
    count = positive(f"{place}: tokens", symbol(tokens) if isinstance(tokens, str) else tokens)
    if count.constant is None and not isinstance(count.expr, sympy.Symbol):
        raise ShapeError(f"{place}: tokens {count}, expected an integer or one symbol")
    if count.names() & known_names(graph) - {name}:
        raise GraphError(f"{place}: tokens {count} is a dimension of graph {graph.name!r}, expected another name")
    return count


# -- replay ------------------------------------------------------------------------------------------------------------


def positions_of(op: Op) -> Poly | None:
    """Return the number of positions that an op runs over, None if it keeps no state between positions."""
    match op.kind:
        case Cache(axis=int(axis)) | Pad(axis=axis, causal=True):
            return op.operands[0].sizes[axis]
    if op.loop is not None and op.loop.xs:
        producers = [_outside_kernels(t).producer for t in op.loop.starts]
        recurs = any(producer is not None and isinstance(producer.kind, InitialState) for producer in producers)
        return op.loop.count if recurs else None
    sliding = _sliding(op)
    return None if sliding is None else op.operands[sliding[0]].sizes[-1]


class Replayer(Rewriter):
    """Copies a forward pass op by op, each with the current sizes of its operands."""

    def __init__(self, place: str, lengths: SequenceLengths, needed: set[Op], head: Op | None, *, writes: bool) -> None:
        super().__init__({lengths.symbol: lengths.new_positions})
        self.place, self.lengths = place, lengths
        self.needed = needed
        """Ops that the results depend on."""
        self.head = head
        """The op that reads only the last position, None for none."""
        self.writes = writes
        """Whether all positions are computed: attention reads fresh tensors, and caches are only written."""
        self.states: dict[Tensor, Tensor] = {}
        """Cache for each initial state of a recurrence."""
        self.ends: list[tuple[Tensor, Tensor]] = []
        """Pairs of cache and final state of recurrences in the kernel being built."""

    # -- sources and caches ------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; drop inputs that only a cache replaces."""
        used = any(op in self.needed for op in old.graph.successors(old)) or old in old.graph.outputs
        return super().source(old, new, suffix) if used or old.role != "input" else None

    def buffer(self, op: Op, new: Graph, like: Tensor, axis: int | None = None, window: Poly | None = None) -> Tensor:
        """Add a dense cache for an op, with room for the visible positions of one axis."""
        if new.fused:
            raise UnsupportedError(f"{self.place}: {op.name!r} is inside a kernel, expected caches outside kernels")
        sizes = like.sizes
        if axis is not None:
            capacity = poly(symbol(self.lengths.symbol))
            if window is not None:
                window = self.lengths.bound(window)
                capacity = smaller(capacity, window if self.writes else window + self.lengths.new_positions - 1)
            sizes = (*sizes[:axis], capacity, *sizes[axis + 1 :])
            self.lengths = self.lengths.with_other(capacity)
        cache = Tensor(new, new.unique(f"{op.name}.kept"), sizes, like.dtype, role="cache")
        new.add_node(cache)
        return cache

    def write_cache(self, op: Op, kind: Cache, new: Graph) -> None:
        """Write to a cache, and continue with the fresh tensor if it holds all positions, else with the cache."""
        (t,), axis = op.operands, kind.axis
        if axis is None and not self.writes:
            sizes = tuple(n.bind(self.values) for n in t.sizes)
            self.tensors[op.results[0]] = self.buffer(op, new, Tensor(new, t.name, sizes, t.dtype, role="cache"))
            return
        x = self.tensors[t]
        cache = self.buffer(op, new, x, axis, kind.window)
        write = Assign() if axis is None else Append(axis=axis)
        extended = self.in_scope_of(op, new.add_op(write, [cache, x], op.name, op.phase))
        self.tensors[op.results[0]] = x if self.writes else extended

    def start_recurrence(self, op: Op, kind: InitialState, new: Graph) -> None:
        """Start a recurrence: from zeros for a whole prompt, else from the state of the last step."""
        sizes = self.lengths.bound(kind.sizes)
        state = self.buffer(op, new, Tensor(new, op.name, sizes, kind.dtype, role="cache"))
        start = state
        if self.writes:
            start = self.in_scope_of(op, new.add_op(replace(kind, sizes=sizes), [], op.name, op.phase))
        self.tensors[op.results[0]] = start
        self.states[op.results[0]] = state

    def save_final_state(self, op: Op, loop: Loop, new: Graph) -> None:
        """Cache the final state of a recurrence."""
        for start, end in zip(map(_outside_kernels, loop.starts), loop.lasts, strict=True):
            if new.fused and start in self.states:
                self.ends.append((self.states[start], self.tensors[end]))
            elif start in self.states and self.tensors[end] is not self.states[start]:
                self.in_scope_of(op, new.add_op(Assign(), [self.states[start], self.tensors[end]], op.name, op.phase))

    def in_scope_of(self, old: Op, op: Op) -> Tensor:
        """Give a new op the scope of the one it replaces, and return its result."""
        op.scope = old.scope
        result: Tensor = op.results[0]
        return result

    def prepend_history(self, op: Op, kind: Pad, new: Graph) -> None:
        """Prepend cached positions to the new ones, in place of zero padding."""
        (t,), axis, history = op.operands, kind.axis, kind.start
        x = self.tensors[t]
        cache = self.buffer(op, new, _resized_axis(x, axis, history))
        if self.writes:
            self.in_scope_of(op, new.add_op(Append(axis=axis), [cache, x], op.name, op.phase))
            self.copy(op, new)
            return
        extended = self.in_scope_of(op, new.add_op(Concat(axis=axis), [cache, x], op.name, op.phase))
        cut = Slice(axis=axis, start=x.sizes[axis], size=history, step=1)
        last = self.in_scope_of(op, new.add_op(cut, [extended], f"{op.name}.last", op.phase))
        self.in_scope_of(op, new.add_op(Assign(), [cache, last], f"{op.name}.keep", op.phase))
        self.tensors[op.results[0]] = extended

    def slide_over_history(self, op: Op, new: Graph) -> None:
        """Let a causal convolution read cached inputs before the new ones, in place of zero padding."""
        sliding = _sliding(op)
        assert sliding is not None
        index, history = sliding
        x = self.tensors[op.operands[index]]
        axis = x.ndim - 1
        capacity = (ONE if self.writes else x.sizes[axis]) + history  # window of the next position
        cache = self.buffer(op, new, _resized_axis(x, axis, capacity))
        extended = self.in_scope_of(op, new.add_op(Append(axis=axis), [cache, x], f"{op.name}.history"))
        if not self.writes:
            self.tensors[op.operands[index]] = extended
            self.lengths = self.lengths.with_other(capacity)
        self.copy(op, new)
        self.tensors[op.operands[index]] = x

    def declare_params(self, op: Op, new: Graph) -> None:
        """Declare the parameters of a pruned loop: they still occupy memory."""
        if op.body is None:
            return
        for body, times in _bodies_with_counts(op):
            for t in body.tensors:
                if t.role != "param" or t.producer is not None:
                    continue
                sizes = tuple(n.bind(self.values) for n in (*times, *t.sizes))
                param = Tensor(
                    new, new.unique(t.name), sizes, t.dtype, role="param", pieces=len(times), host=t.storage.host
                )
                param.requires_grad = t.requires_grad
                new.add_node(param)

    # -- ops ---------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy or replace an op."""
        if op not in self.needed:
            self.declare_params(op, new)
        elif isinstance(op.kind, Cache):
            self.write_cache(op, op.kind, new)
        elif isinstance(op.kind, InitialState):
            self.start_recurrence(op, op.kind, new)
        elif isinstance(op.kind, Pad) and op.kind.causal:
            self.prepend_history(op, op.kind, new)
        elif not new.fused and _sliding(op) is not None:
            self.slide_over_history(op, new)
        elif isinstance(op.kind, Slice) and not self.writes and _is_causal(op.operands[0].producer):
            self.tensors[op.results[0]] = self.tensors[op.operands[0]]  # no padding to cut off
        else:
            super().emit(op, new, suffix)

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op with its current operands."""
        operands: list[Tensor | None] = [self.tensors.get(t) for t in op.operands]
        if op.body is not None:
            needed = needed_formals(op, self.needed)
            operands = [t if w else None for t, w in zip(operands, needed, strict=True)]
        if op is self.head:
            operands = [self._last(op, t, x, new) for t, x in zip(op.operands, operands, strict=True)]
        kind = resized(op, operands, self.lengths)
        if isinstance(kind, Einsum) and kind.domain is not None and self.lengths.new_positions == ONE:
            # a single query, at the last position, attends to the whole cache
            kind = replace(kind, domain=None if kind.domain[0].causal else kind.domain)
        if isinstance(kind, BodyKind):
            kind = replace(kind, body=self.copy_body(op, operands, new))
        present = [t for t in operands if t is not None]
        if self.ends and isinstance(kind, Kernel):
            kind = replace(kind, changed=self.write_states(op, kind.body, present, new))
        try:
            new_op = self.add(op, kind, present, new, op.name + suffix)  # a kernel may have gained results
        except ShapeError as error:
            raise UnsupportedError(
                f"{self.place}: {error}: tensors of earlier positions must be marked with costgraph.ops.cache, "
                f"and positions of keys with arange(context=True)"
            ) from None
        if op.loop is not None:
            self.save_final_state(op, op.loop, new)
        return new_op

    def write_states(self, op: Op, body: Graph, operands: list[Tensor], new: Graph) -> tuple[int, ...]:
        """Let a kernel write its recurrences' final states into their caches, adding these as operands."""
        if new.fused:
            raise UnsupportedError(
                f"{self.place}: {op.name!r} is inside another kernel, expected a recurrence in a single kernel"
            )
        changed = []
        for cache, end in self.ends:
            if cache not in operands:
                body.formal(cache, f"{cache.name}.in", cache.sizes, cache.strides)
                operands.append(cache)
            changed.append(operands.index(cache))
            target = body.formals[changed[-1]]
            body.outputs.append(body.add_op(Assign(), [target, end], f"{op.name}.keep").results[0])
        self.ends.clear()
        return tuple(changed)

    def copy_body(self, op: Op, operands: Sequence[Tensor | None], new: Graph) -> Graph:
        """Copy an op's body, with formals that match the current operands."""
        old, loop = op.body, op.loop
        assert old is not None
        carries, slices = ((), ()) if loop is None else (loop.carries, loop.slices)
        body = new.start_body(old.name, fused=old.fused)
        for f, t in zip(old.formals, operands, strict=True):
            if t is None:  # only cached tensors depended on it
                continue
            if f in slices:
                if t.domain is not None:
                    raise UnsupportedError(
                        f"{self.place}: {t!r} is read slice by slice, expected a tensor without a domain"
                    )
                formal = body.formal(t, f.name, t.sizes[1:], t.strides[1:])
            else:
                formal = body.formal(t, f.name, t.sizes, contiguous(t.sizes) if f in carries else t.strides)
                formal.offset = formal.offset if f in carries else t.offset
            self.tensors[f] = formal
        self.fill(old, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in old.outputs]
        return body

    def _last(self, op: Op, old: Tensor, x: Tensor | None, new: Graph) -> Tensor | None:
        """Return the last position of a head operand."""
        axes = [i for i, n in enumerate(old.sizes) if n == poly(symbol(self.lengths.symbol))]
        if x is None or not axes or x.sizes[axes[0]] == ONE:
            return x
        last = Slice(axis=axes[0], start=x.sizes[axes[0]] - 1, size=ONE, step=1)
        return self.in_scope_of(op, new.add_op(last, [x], f"{op.name}.last", op.phase))


def _outside_kernels(t: Tensor) -> Tensor:
    """Return the tensor outside all kernels that a formal stands for."""
    while t.role == "formal" and t.graph.fused and t.graph.owner is not None:
        t = t.graph.owner.operands[t.graph.formals.index(t)]
    return t


def _resized_axis(x: Tensor, axis: int, size: Poly) -> Tensor:
    """Return a tensor of the same shape except for one axis."""
    return Tensor(x.graph, x.name, (*x.sizes[:axis], size, *x.sizes[axis + 1 :]), x.dtype, role="cache")


def _bodies_with_counts(op: Op, times: tuple[Poly, ...] = ()) -> Iterator[tuple[Graph, tuple[Poly, ...]]]:
    """Yield the bodies inside an op, each with the counts of the enclosing loops."""
    assert op.body is not None
    counts = times if op.loop is None else (*times, op.loop.count)
    yield op.body, counts
    for inner in op.body.ops:
        if inner.body is not None:
            yield from _bodies_with_counts(inner, counts)


def _is_causal(op: Op | None) -> bool:
    return op is not None and _sliding(op) is not None


def _sliding(op: Op) -> tuple[int, int] | None:
    """Return the operand that a causal convolution slides over, and how many earlier positions it reads."""
    body = op.kind.body if isinstance(op.kind, Kernel) else None
    for inner in [op] if body is None else body.ops:
        if isinstance(inner.kind, Einsum) and inner.kind.causal:
            dim = inner.kind.pattern.operands[0][-1]
            assert isinstance(dim, Affine)
            return 0 if body is None else body.formals.index(inner.operands[0]), -dim.offset
    return None


# -- prefill and decode ------------------------------------------------------------------------------------------------


def prefill(graph: Graph, chunk: object = None, *, logits: str = "all") -> Graph:
    """Return the pass over a prompt, which also writes the caches.

    Parameters
    ----------
    graph : Graph
        A forward pass whose inference state is marked by `cache` and `initial_state`; it is not modified.
    chunk : sympy.Expr, int or str, optional
        Chunk size for chunked prefill: the graph is the chunk that ends at position S and attends to the cached chunks
        before it, as in `decode(graph, chunk)`. Default: the whole prompt.
    logits : str
        `all`: logits of every position, as declared. `last`: only of the last one, as generation needs; the head then
        reads a single position.

    Returns
    -------
    Graph
        With the caches as buffers of role `cache`.

    Raises
    ------
    GraphError
        If the graph has a backward pass, or marks no inference state.
    UnsupportedError
        If an op states costs that do not tell new positions from cached ones, as in traces, or `logits="last"` finds
        no head.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("llama-2-7b")
    >>> cg.flops(cg.prefill(g)) == cg.flops(g)
    True
    >>> last = cg.prefill(g, logits="last")
    >>> cg.matmul_flops(g, B=1, S=512) - cg.matmul_flops(last, B=1, S=512)  # 2*D*V for each of the others
    133955584000
    """
    return _replay("prefill", graph, chunk, logits)


def decode(graph: Graph, tokens: object = 1, *, logits: str = "all") -> Graph:
    """Return one decode step: only new positions are computed, earlier ones come from caches.

    Parameters
    ----------
    graph : Graph
        A forward pass whose inference state is marked by `cache` and `initial_state`, or a trace with marked caches
        (`trace(..., cached=...)`); it is not modified.
    tokens : sympy.Expr, int or str
        New positions per sequence: 1 to generate, several to verify draft tokens (speculative decoding), a symbol or
        its name to leave it open.
    logits : str
        `all`: logits of every new position. `last`: only of the last one.

    Returns
    -------
    Graph
        Its S, the sequence length of the declaration, is the context length including the new positions: the positions
        in the caches after the step. Caches are buffers of role `cache`; with a window they hold
        Min(S, window + tokens - 1) positions. In a trace, the dimension of the new positions becomes the context length
        and determines the number of earlier ones. Its caches are the tensors that the step reads, and the program
        itself joins them with the new positions.

    Raises
    ------
    GraphError
        If the graph has a backward pass, or marks no inference state.
    UnsupportedError
        If an op states costs that do not tell new positions from cached ones, as in traces without caches, or a trace
        took a branch that does not hold for this number of new positions.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.decode(cg.models.load("llama-3-70b"))
    >>> cg.matmul_flops(step, B=1, S=8192)  # 2 for each parameter but the table, and 4*H*K*S*L of attention
    160478265344
    >>> cg.cache_bytes(step, B=1, S=1)
    327680
    """
    return _replay("decode", graph, tokens, logits)


def _replay(place: str, graph: Graph, tokens: object, logits: str) -> Graph:
    need_of_all(place, graph)
    caches = [t for t in graph.tensors if t.role == "cache" and t.producer is None]
    if caches and place == "decode":
        return step_of(graph, caches, tokens, logits)
    need_declared(place, graph, "trace a step with what it keeps, named in cached=")
    need_choice(f"{place}: logits", logits, ("all", "last"))
    if graph.gradients or any(op.phase != "forward" for op in graph.walk()):
        raise GraphError(f"{place}: graph {graph.name!r} has a backward pass, expected only a forward pass")
    name = _sequence_length_name(place, graph)
    context = poly(symbol(name))
    new_positions = context if tokens is None else tokens_of(place, graph, tokens, name)
    writes = place == "prefill" and new_positions == context
    needed = needed_ops(graph, static=not writes)
    head = head_of(place, graph, name) if logits == "last" else None

    def replayed(new_positions: Poly) -> Graph:
        return Replayer(place, SequenceLengths(name, new_positions, (context, ONE)), needed, head, writes=writes).run(
            graph, f"{graph.name}.{place}"
        )

    if new_positions == ONE:
        # sizes could agree by accident at one position: check the replay with a symbolic number first
        replayed(poly(symbol(_unused_name(graph))))
    new = replayed(new_positions)
    if new_positions != context:
        with new:
            new.assume(f"{name} >= {new_positions}")
    return new


def _unused_name(graph: Graph) -> str:
    """Return a name that is not a dimension of the graph."""
    names = known_names(graph)
    return next(n for i in range(len(names) + 1) if (n := f"new{i}") not in names)


def _sequence_length_name(place: str, graph: Graph) -> str:
    """Return the name of the sequence length: the size that all caches and recurrences run over."""
    op_of_size: dict[Poly, str] = {}
    for g in graph.bodies():
        for op in g.ops:
            size = positions_of(op)
            if size is not None:
                op_of_size.setdefault(size, op.name)
    if not op_of_size:
        raise GraphError(
            f"{place}: graph {graph.name!r} keeps no state between steps, expected costgraph.ops.cache on keys and "
            f"values, or a scan over positions from an initial_state"
        )
    names = {str(n) for n in op_of_size}
    size, op_name = next(iter(op_of_size.items()))
    if len(names) > 1 or not isinstance(size.expr, sympy.Symbol):
        raise UnsupportedError(f"{place}: {op_name!r} runs over {' and '.join(sorted(names))}, expected one open size")
    (name,) = size.names()
    return name
