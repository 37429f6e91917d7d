"""Copying a forward pass for inference: each op with the sizes that it has once earlier positions are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...algebra.extremum import smaller
from ...algebra.polynomial import ONE, Poly, poly
from ...algebra.symbols import symbol
from ...errors import ShapeError, UnsupportedError
from ...graph.graph import Graph
from ...graph.loop import Loop
from ...graph.op import Bodied, Op
from ...graph.strides import contiguous
from ...graph.tensor import Tensor
from ...notation.pattern import Affine
from ...ops.blocks import Kernel
from ...ops.cached import Append, Cache, InitialState
from ...ops.contraction import Einsum
from ...ops.fill import Assign, Pad
from ...ops.moves import Concat, Slice
from ..rewrite import Rewriter
from .needed import needed_formals
from .resize import Lengths, resized

__all__ = ["Replayer", "positions_of"]


def positions_of(op: Op) -> Poly | None:
    """Return the number of positions that an op runs over, None if it keeps nothing of earlier ones."""
    match op.kind:
        case Cache(axis=int(axis)) | Pad(axis=axis, causal=True):
            return op.operands[0].sizes[axis]
    if op.loop is not None and op.loop.xs:
        makers = [_outside(t).producer for t in op.loop.starts]
        recurs = any(maker is not None and isinstance(maker.kind, InitialState) for maker in makers)
        return op.loop.count if recurs else None
    found = _sliding(op)
    return None if found is None else op.operands[found[0]].sizes[-1]


class Replayer(Rewriter):
    """Copies a forward pass op by op, each with the sizes that its operands have by then."""

    def __init__(self, place: str, lengths: Lengths, kept: set[Op], head: Op | None, *, writes: bool) -> None:
        super().__init__({lengths.symbol: lengths.own})
        self.place, self.lengths = place, lengths
        self.kept = kept
        """Ops that the results depend on."""
        self.head = head
        """The op whose activations are cut to their last position, None for none."""
        self.writes = writes
        """Whether all positions are computed: what is attended to is there, and caches are written alone."""
        self.states: dict[Tensor, Tensor] = {}
        """The cache of what a recurrence starts from."""
        self.ends: list[tuple[Tensor, Tensor]] = []
        """Caches, and what recurrences inside the kernel that is being made end with."""

    # -- sources and caches ------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; what a cache replaces reads no input."""
        used = any(op in self.kept for op in old.graph.successors(old)) or old in old.graph.outputs
        return super().source(old, new, suffix) if used or old.role != "input" else None

    def buffer(self, op: Op, new: Graph, like: Tensor, axis: int | None = None, window: Poly | None = None) -> Tensor:
        """Add the cache of an op: dense, and with room for what is seen of one axis."""
        if new.fused:
            raise UnsupportedError(f"{self.place}: {op.name!r} is inside a kernel, expected what is cached outside")
        sizes = like.sizes
        if axis is not None:
            room = poly(symbol(self.lengths.symbol))
            if window is not None:
                window = self.lengths.bound(window)
                room = smaller(room, window if self.writes else window + self.lengths.own - 1)
            sizes = (*sizes[:axis], room, *sizes[axis + 1 :])
            self.lengths = self.lengths.with_other(room)
        made = Tensor(new, new.unique(f"{op.name}.kept"), sizes, like.dtype, role="cache")
        new.add_node(made)
        return made

    def cached(self, op: Op, kind: Cache, new: Graph) -> None:
        """Write what is cached, and go on with all that is seen: fresh where that is there, else from the cache."""
        (t,), axis = op.operands, kind.axis
        if axis is None and not self.writes:
            sizes = tuple(n.bind(self.values) for n in t.sizes)
            self.tensors[op.results[0]] = self.buffer(op, new, Tensor(new, t.name, sizes, t.dtype, role="cache"))
            return
        x = self.tensors[t]
        held = self.buffer(op, new, x, axis, kind.window)
        write = Assign() if axis is None else Append(axis=axis)
        whole = self.made(op, new.add_op(write, [held, x], op.name, op.phase))
        self.tensors[op.results[0]] = x if self.writes else whole

    def begun(self, op: Op, kind: InitialState, new: Graph) -> None:
        """Start a recurrence: from zeros over a whole prompt, else from what the last step left."""
        sizes = self.lengths.bound(kind.sizes)
        held = self.buffer(op, new, Tensor(new, op.name, sizes, kind.dtype, role="cache"))
        start = held
        if self.writes:
            start = self.made(op, new.add_op(replace(kind, sizes=sizes), [], op.name, op.phase))
        self.tensors[op.results[0]] = start
        self.states[op.results[0]] = held

    def left(self, op: Op, loop: Loop, new: Graph) -> None:
        """Keep what a recurrence ends with."""
        for start, end in zip(map(_outside, loop.starts), loop.lasts, strict=True):
            if new.fused and start in self.states:
                self.ends.append((self.states[start], self.tensors[end]))
            elif start in self.states and self.tensors[end] is not self.states[start]:
                self.made(op, new.add_op(Assign(), [self.states[start], self.tensors[end]], op.name, op.phase))

    def made(self, old: Op, op: Op) -> Tensor:
        """Let an op stand in the scope of the one that it stands for."""
        op.scope = old.scope
        result: Tensor = op.results[0]
        return result

    def shifted(self, op: Op, kind: Pad, new: Graph) -> None:
        """Put what came before in front of the new positions, where the declaration has zeros."""
        (t,), axis, history = op.operands, kind.axis, kind.start
        x = self.tensors[t]
        held = self.buffer(op, new, _resized_axis(x, axis, history))
        if self.writes:
            self.made(op, new.add_op(Append(axis=axis), [held, x], op.name, op.phase))
            self.copy(op, new)
            return
        whole = self.made(op, new.add_op(Concat(axis=axis), [held, x], op.name, op.phase))
        cut = Slice(axis=axis, start=x.sizes[axis], size=history, step=1)
        last = self.made(op, new.add_op(cut, [whole], f"{op.name}.last", op.phase))
        self.made(op, new.add_op(Assign(), [held, last], f"{op.name}.keep", op.phase))
        self.tensors[op.results[0]] = whole

    def slid(self, op: Op, new: Graph) -> None:
        """Let a causal convolution see the inputs before the new ones, where the declaration has zeros."""
        found = _sliding(op)
        assert found is not None
        place, history = found
        x = self.tensors[op.operands[place]]
        axis = x.ndim - 1
        room = (ONE if self.writes else x.sizes[axis]) + history  # the window of the next one
        held = self.buffer(op, new, _resized_axis(x, axis, room))
        whole = self.made(op, new.add_op(Append(axis=axis), [held, x], f"{op.name}.history"))
        if not self.writes:
            self.tensors[op.operands[place]] = whole
            self.lengths = self.lengths.with_other(room)
        self.copy(op, new)
        self.tensors[op.operands[place]] = x

    def hold(self, op: Op, new: Graph) -> None:
        """Keep the parameters of a loop that does not run: they are in memory all the same."""
        if op.body is None:
            return
        for body, times in _repeated(op):
            for t in body.tensors:
                if t.role != "param" or t.producer is not None:
                    continue
                sizes = tuple(n.bind(self.values) for n in (*times, *t.sizes))
                made = Tensor(
                    new, new.unique(t.name), sizes, t.dtype, role="param", pieces=len(times), host=t.storage.host
                )
                made.requires_grad = t.requires_grad
                new.add_node(made)

    # -- ops ---------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op."""
        if op not in self.kept:
            self.hold(op, new)
        elif isinstance(op.kind, Cache):
            self.cached(op, op.kind, new)
        elif isinstance(op.kind, InitialState):
            self.begun(op, op.kind, new)
        elif isinstance(op.kind, Pad) and op.kind.causal:
            self.shifted(op, op.kind, new)
        elif not new.fused and _sliding(op) is not None:
            self.slid(op, new)
        elif isinstance(op.kind, Slice) and not self.writes and _is_causal(op.operands[0].producer):
            self.tensors[op.results[0]] = self.tensors[op.operands[0]]  # no more is made than is wanted
        else:
            super().emit(op, new, suffix)

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Make an op again with the operands that it has now."""
        operands: list[Tensor | None] = [self.tensors.get(t) for t in op.operands]
        if op.body is not None:
            wanted = needed_formals(op, self.kept)
            operands = [t if w else None for t, w in zip(operands, wanted, strict=True)]
        if op is self.head:
            operands = [self._last(op, t, x, new) for t, x in zip(op.operands, operands, strict=True)]
        kind = resized(op, operands, self.lengths)
        if isinstance(kind, Einsum) and kind.domain is not None and self.lengths.own == ONE:
            # one query, the last position, sees all that a cache holds
            kind = replace(kind, domain=None if kind.domain[0].causal else kind.domain)
        if isinstance(kind, Bodied):
            kind = replace(kind, body=self.inner(op, operands, new))
        given = [t for t in operands if t is not None]
        if self.ends and isinstance(kind, Kernel):
            kind = replace(kind, changed=self.written(op, kind.body, given, new))
        try:
            made = self.add(op, kind, given, new, op.name + suffix)  # a kernel may keep something beside its results
        except ShapeError as error:
            raise UnsupportedError(
                f"{self.place}: {error}: what is seen of earlier positions has to be marked with costgraph.ops.cache, "
                f"and positions of keys with arange(context=True)"
            ) from None
        if op.loop is not None:
            self.left(op, op.loop, new)
        return made

    def written(self, op: Op, body: Graph, given: list[Tensor], new: Graph) -> tuple[int, ...]:
        """Let a kernel write what its recurrences end with into their caches, which it reads or is given as well."""
        if new.fused:
            raise UnsupportedError(f"{self.place}: {op.name!r} is inside a kernel, expected a recurrence in one alone")
        changed = []
        for held, end in self.ends:
            if held not in given:
                body.formal(held, f"{held.name}.in", held.sizes, held.strides)
                given.append(held)
            changed.append(given.index(held))
            target = body.formals[changed[-1]]
            body.outputs.append(body.add_op(Assign(), [target, end], f"{op.name}.keep").results[0])
        self.ends.clear()
        return tuple(changed)

    def inner(self, op: Op, operands: Sequence[Tensor | None], new: Graph) -> Graph:
        """Make the body of an op again, its inputs as what they stand for is now."""
        old, loop = op.body, op.loop
        assert old is not None
        carries, slices = ((), ()) if loop is None else (loop.carries, loop.slices)
        body = new.start_body(old.name, fused=old.fused)
        for f, t in zip(old.formals, operands, strict=True):
            if t is None:  # only what is cached already was made from it
                continue
            if f in slices:
                if t.domain is not None:
                    raise UnsupportedError(
                        f"{self.place}: {t!r} is read slice by slice, expected a tensor that is whole"
                    )
                made = body.formal(t, f.name, t.sizes[1:], t.strides[1:])
            else:
                made = body.formal(t, f.name, t.sizes, contiguous(t.sizes) if f in carries else t.strides)
                made.offset = made.offset if f in carries else t.offset
            self.tensors[f] = made
        self.fill(old, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in old.outputs]
        return body

    def _last(self, op: Op, old: Tensor, x: Tensor | None, new: Graph) -> Tensor | None:
        """Return the last position of what the head reads."""
        at = [i for i, n in enumerate(old.sizes) if n == poly(symbol(self.lengths.symbol))]
        if x is None or not at or x.sizes[at[0]] == ONE:
            return x
        last = Slice(axis=at[0], start=x.sizes[at[0]] - 1, size=ONE, step=1)
        return self.made(op, new.add_op(last, [x], f"{op.name}.last", op.phase))


def _outside(t: Tensor) -> Tensor:
    """Return what an input of a kernel stands for."""
    while t.role == "formal" and t.graph.fused and t.graph.owner is not None:
        t = t.graph.owner.operands[t.graph.formals.index(t)]
    return t


def _resized_axis(x: Tensor, axis: int, size: Poly) -> Tensor:
    """Return what has the shape of a tensor but for one axis."""
    return Tensor(x.graph, x.name, (*x.sizes[:axis], size, *x.sizes[axis + 1 :]), x.dtype, role="cache")


def _repeated(op: Op, times: tuple[Poly, ...] = ()) -> Iterator[tuple[Graph, tuple[Poly, ...]]]:
    """Yield the bodies inside an op, each with the counts of the loops around."""
    assert op.body is not None
    inside = times if op.loop is None else (*times, op.loop.count)
    yield op.body, inside
    for inner in op.body.ops:
        if inner.body is not None:
            yield from _repeated(inner, inside)


def _is_causal(op: Op | None) -> bool:
    return op is not None and _sliding(op) is not None


def _sliding(op: Op) -> tuple[int, int] | None:
    """Return the operand that a causal convolution slides over, and how many earlier positions it sees."""
    body = op.kind.body if isinstance(op.kind, Kernel) else None
    for inner in [op] if body is None else body.ops:
        if isinstance(inner.kind, Einsum) and inner.kind.causal:
            dim = inner.kind.pattern.operands[0][-1]
            assert isinstance(dim, Affine)
            return 0 if body is None else body.formals.index(inner.operands[0]), -dim.offset
    return None
