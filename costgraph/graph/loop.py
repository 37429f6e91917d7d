"""Loops: a body that runs again and again, and the names of what goes in, comes out and is handed on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from ..algebra.polynomial import ONE, ZERO, Poly
from ..errors import ShapeError
from ..notation.door import Rule
from .facts import Flag, Index, Limit, is_amount, is_count, is_size, need
from .op import Bodied, Flops, Op, Result
from .strides import contiguous
from .tensor import Storage, Tensor

if TYPE_CHECKING:
    from ..algebra.dominance import Relations
    from .graph import Graph

__all__ = ["Loop", "Repeat", "is_pass", "loops", "need_fit", "need_formals", "same_place"]

# 0 only where 'least' says so
_Times = Annotated[Poly, Rule("a positive size", lambda v: is_size(v) or (is_amount(v) and is_size(v + 1)))]


@dataclass(frozen=True, kw_only=True)
class Repeat(Bodied):
    """Runs its body `count` times; operands and outputs stand in the order in which `Loop` names them."""

    name = "repeat"
    restricted = crosses = True
    count: _Times
    """Iterations."""
    carries: Index
    """How many tensors an iteration hands to the next one."""
    xs: Index
    """How many tensors are read slice by slice."""
    saved: Index = 0
    """How many results have a storage for each iteration, or are an operand whose slices it has written."""
    reverse: Flag = False
    """Whether the last slice comes first."""
    until: Flag = False
    """Whether it runs the iterations before the one of the loop around."""
    least: Annotated[int, Rule("0, or nothing", lambda v: v == 0 and is_count(v))] = 1
    """0 where it may run no iteration at all."""

    def limits(self) -> Mapping[str, Limit]:
        """Return that of the count, which may be 0 where the record says so."""
        return {**super().limits(), "count": Limit(self.least)}

    def parts(self, op: Op) -> Loop:
        """Return the parts of the loop."""
        return Loop(op, self)

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Carries as they came, stacks of slices, and what each iteration leaves behind."""
        outputs = self.body.outputs
        out: list[Result] = []
        for i, t in enumerate(outputs):
            if i >= len(outputs) - self.saved:
                out.append(self._left_behind(operands, t))
                continue
            if t.domain is not None and (i >= self.carries or operands[i].domain is None):
                raise ShapeError(f"{t!r} leaves the body restricted to a domain, expected a tensor that is whole")
            if i >= self.carries:
                out.append(Result((self.count, *t.sizes), t.dtype, host=t.storage.host))
                continue
            entry = operands[i]
            same = (t.dtype, t.domain) == (entry.dtype, entry.domain) and len(t.sizes) == entry.ndim
            same = same and t.storage.host == entry.storage.host
            if not same or not all(map(entry.graph.same, t.sizes, entry.sizes)):
                raise ShapeError(
                    f"carry {i + 1} enters the body as {entry!r} and leaves it as {t!r}, expected the same"
                )
            made = Result(entry.sizes, t.dtype, domain=t.domain, pieces=entry.storage.pieces, host=t.storage.host)
            out.append(made)
        return out

    def _left_behind(self, operands: Sequence[Tensor], t: Tensor) -> Result:
        """Return what an iteration leaves in a storage of its own, or has written into one of an operand's."""
        first = self.carries
        for i, f in enumerate(self.body.formals[first : first + self.xs], first):
            outer = operands[i]
            if f.storage is t.storage and (outer.storage.pieces or same_place(f, t)):
                if t.ndim != f.ndim or t.domain is not None:
                    raise ShapeError(f"{t!r} is a view of what an iteration was given, expected a part with its axes")
                sizes, strides = (outer.sizes[0], *t.sizes), (outer.strides[0], *t.strides)
                offset = outer.offset + t.offset - f.offset
                return Result(sizes, t.dtype, strides, of=i, offset=offset, domain=outer.domain)
        domain = None if t.domain is None else (t.domain[0], t.domain[1] + 1, t.domain[2] + 1)
        sizes, pieces = (self.count, *t.sizes), t.storage.pieces + 1
        return Result(sizes, t.dtype, domain=domain, pieces=pieces, host=t.storage.host)

    def flops(self, op: Op) -> Flops:
        """Return none of its own: those of the body are counted where they stand."""
        return Flops()

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return nothing of its own."""
        return (ZERO,) * len(op.operands)

    def writes(self, op: Op) -> tuple[Poly, ...]:
        """Return nothing of its own."""
        return (ZERO,) * len(op.results)

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Hold the body's inputs and outputs against the operands."""
        body, count, carries, xs, saved = self.body, self.count, self.carries, self.xs, self.saved
        need(self.least == 0 or count.constant != 0, "count 0")
        need_formals(operands, body)
        need(carries + xs <= len(operands), f"{carries} carries and {xs} slices of {len(operands)} operands")
        need(carries + saved <= len(body.outputs), f"{carries} carries, {saved} saved of {len(body.outputs)} outputs")
        for i, (outer, inner) in enumerate(zip(operands, body.formals, strict=True)):
            if i < carries:
                need(inner.dtype == outer.dtype and inner.sizes == outer.sizes, f"carry {inner!r} of {outer!r}")
                need(inner.strides == contiguous(inner.sizes), f"strides of carry {inner!r}")
            elif i < carries + xs:
                need(outer.ndim > 0 and outer.graph.same(outer.sizes[0], count), f"{outer!r} in {count} slices")
                need_fit(outer, inner, 1)
            else:
                need_fit(outer, inner)
            pieces = outer.storage.pieces
            left = max(pieces - 1, 0) if carries <= i < carries + xs else pieces
            need(inner.storage.pieces == left, f"{inner.storage.pieces} axes of pieces of {inner!r}, {pieces} outside")
        for i, t in enumerate(body.outputs[: len(body.outputs) - saved]):
            need(i >= carries or t.is_contiguous, f"strides of carry {t!r}")
            pieces = operands[i].storage.pieces if i < carries else 0
            need(t.storage.pieces == pieces, f"{t.storage.pieces} axes of pieces of {t!r}, {pieces} outside")


class Loop:
    """An op that repeats a body, by the names of its parts.

    Outside, `starts` are what the first iteration is handed, `xs` are read slice by slice and `shared` whole by each
    iteration; `lasts` is what the last one hands on, `stacks` hold a slice of each, `pieces` a storage of each. Inside,
    the body is given `carries`, `slices` and `captured`, and returns `nexts`, `ys` and `saved`.
    """

    def __init__(self, op: Op, kind: Repeat) -> None:
        self.op, self.kind, self.body = op, kind, kind.body
        self.count, self.reverse, self.until = kind.count, kind.reverse, kind.until
        first, last = kind.carries, kind.carries + kind.xs
        self.starts, self.xs, self.shared = op.operands[:first], op.operands[first:last], op.operands[last:]
        kept = len(op.results) - kind.saved
        self.lasts, self.stacks, self.pieces = op.results[:first], op.results[first:kept], op.results[kept:]

    @cached_property
    def carries(self) -> tuple[Tensor, ...]:
        """What an iteration is handed by the one before."""
        return tuple(self.body.formals[: self.kind.carries])

    @cached_property
    def slices(self) -> tuple[Tensor, ...]:
        """What it is given of each of `xs`."""
        return tuple(self.body.formals[self.kind.carries : self.kind.carries + self.kind.xs])

    @cached_property
    def captured(self) -> tuple[Tensor, ...]:
        """What stands in it for `shared`."""
        return tuple(self.body.formals[self.kind.carries + self.kind.xs :])

    @cached_property
    def nexts(self) -> tuple[Tensor, ...]:
        """What it hands to the next iteration."""
        return tuple(self.body.outputs[: self.kind.carries])

    @cached_property
    def ys(self) -> tuple[Tensor, ...]:
        """What it writes into its slice of each of `stacks`."""
        return tuple(self.body.outputs[self.kind.carries : len(self.body.outputs) - self.kind.saved])

    @cached_property
    def saved(self) -> tuple[Tensor, ...]:
        """What it leaves behind in a storage of its own."""
        return tuple(self.body.outputs[len(self.body.outputs) - self.kind.saved :])

    def revised(self, i: int) -> Tensor | None:
        """Return the operand that one of `pieces` is, once each iteration has written its slice; None of others."""
        left, made = self.saved[i], self.pieces[i]
        around = zip(self.slices, self.xs, strict=True)
        return None if made.storage.pieces else next((x for f, x in around if f.storage is left.storage), None)

    def handed_on(self) -> dict[Storage, tuple[Storage, Poly]]:
        """Return which results are what the loop was given: a carry as it came, or something from outside of it."""
        found = {}
        for i, left in enumerate(self.nexts):
            around = ((self.carries[i], self.starts[i]), *zip(self.captured, self.shared, strict=True))
            for given, outer in around:
                if given.storage is left.storage:  # in the same order, as all that a loop hands on
                    found[self.lasts[i].storage] = outer.storage, outer.offset + left.offset - given.offset
        return found


def loops(graph: Graph) -> Iterator[Loop]:
    """Yield the loops of a graph, those inside bodies included."""
    for op in graph.walk():
        if op.loop is not None:
            yield op.loop


def is_pass(body: Graph) -> bool:
    """Whether a graph or body is a whole pass, forward and back, as each micro-batch does one."""
    return {"forward", "backward"} <= {op.phase for op in body.ops}


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements of a storage, in the same order and of one shape."""
    alike = a.storage is b.storage and (a.sizes, a.offset) == (b.sizes, b.offset)
    return alike and all(n == ONE or s == t for n, s, t in zip(a.sizes, a.strides, b.strides, strict=True))


# -- agreement with the operands ---------------------------------------------------------------------------------


def need_fit(outer: Tensor, inner: Tensor, drop: int = 0) -> None:
    """Compare a body's input with what it stands for; strides of axes of size 1 mean nothing."""
    fits = inner.dtype == outer.dtype and inner.sizes == outer.sizes[drop:]
    fits = fits and inner.storage.host == outer.storage.host
    places = zip(inner.sizes, inner.strides, outer.strides[drop:], strict=fits)
    fits = fits and all(a == b for n, a, b in places if n != ONE) and (drop > 0 or outer.domain == inner.domain)
    need(fits, f"{inner!r} of the body, which stands for {outer!r}")


def need_formals(operands: Sequence[Tensor], body: Graph) -> None:
    """Compare the inputs of a body with its formals, and with the operands."""
    inputs = [t for t in body.tensors if t.role == "formal" and t.producer is None]
    need(len(body.formals) == len(inputs) and set(body.formals) == set(inputs), "inputs of the body")
    need(len(body.formals) == len(operands), f"{len(body.formals)} inputs of the body, {len(operands)} operands")
