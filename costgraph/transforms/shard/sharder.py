"""The graph of one rank, from the graph of all: op by op, with what takes tensors to where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...algebra.polynomial import Poly
from ...errors import UnsupportedError
from ...graph.graph import Graph
from ...graph.loop import Loop
from ...graph.op import Op
from ...graph.placement import Placement, Split
from ...graph.strides import contiguous
from ...graph.tensor import Tensor
from ...ops.blocks import Kernel
from ...ops.fresh import Fresh
from ...ops.moves import Rearrange, Slice
from ...ops.pointwise import Pointwise
from ...ops.stacks import Empty
from .choice import Choice, Given, choose
from .kernels import Pieces, live
from .targets import targets
from .tensors import Later, Placed

__all__ = ["Sharder"]


#: Kinds whose result is the parameter that they are of, in another form.
_SAME = (Rearrange, Slice, Pointwise)


class _WiderError(Exception):
    """Raised where an iteration hands on what is split along more axes than what it was handed."""

    def __init__(self, at: int, placement: Placement) -> None:
        self.at, self.placement = at, placement


class Sharder(Placed):
    """Copies ops with the sizes of one rank, and moves operands to where their rule wants them."""

    # -- ops ---------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op, and take gradients to where they are kept."""
        if isinstance(op.kind, Fresh) and not isinstance(op.kind, Empty):  # a stack is there before its slices are
            self.tensors[op.results[0]] = Later(op)
        elif op.loop is not None:
            self.loop(op, new)
        elif isinstance(op.kind, Kernel):
            self.kernel(op, new)
        else:
            self.plain(op, new)
        for t in op.results:
            if t in self.wanted and not isinstance(self.tensors[t], Later):
                self.tensors[t] = self.moved_to(self.tensors[t], self.wanted[t], new, op.phase)

    def plain(self, op: Op, new: Graph) -> None:
        """Add an op of a rank."""
        before = [self.tensors[t] for t in op.operands]
        rule = None if isinstance(op.kind, Empty) else op.kind.placed(op)
        if rule is not None:
            rule = self.rows.rule(op, self.restricted(rule, op), before)
        choice = self.whole(op) if rule is None else choose(rule, self.given(op), self.mesh, self.asked(op, rule))
        self.moved += [
            f"{op.name!r}: {op.operands[i].name!r} put together along {axis}: {why}" for i, axis, why in choice.moved
        ]
        operands = [self.value(t, new, want, op.phase) for t, want in zip(op.operands, choice.operands, strict=True)]
        self.need_in_place(op, operands)
        kind = op.kind if rule is None else rule.local(choice.extents, choice.ranks)
        made = self.add(op, kind, operands, self.here(new))
        for t, place in zip(made.results, choice.results, strict=True):
            self.at[t] = place
        self.rows.note(op, rule, choice, before, made.results)
        if len(operands) == 1 and operands[0] in self.params and isinstance(op.kind, _SAME):
            self.params.update(made.results)
        for i, t in zip(op.kind.overwrites(), op.results, strict=False):
            self.note_part(op.operands[i], operands[i], t)

    def restricted(self, rule: Split, op: Op) -> Split:
        """Return the rule with the axes of a domain whole: which of its points a rank has is not the same for all."""
        found = set(rule.whole)
        for labels, t in (*zip(rule.operands, op.operands, strict=True), *zip(rule.results, op.results, strict=True)):
            if t.domain is not None and labels is not None:
                found |= {n for i in t.domain[1:] for n in labels[i]}
        domain = getattr(op.kind, "domain", None)
        if domain is not None and isinstance(domain[1], str):
            found |= {domain[1], domain[2]}
        return replace(rule, whole=frozenset(found)) if found != rule.whole else rule

    def given(self, op: Op) -> list[Given]:
        """Return the operands as they lie."""
        out = []
        for t in op.operands:
            found = self.tensors[t]
            if isinstance(found, Later):
                out.append(Given(None, zero=found.zero))
                continue
            param = found in self.params
            read = param and op.phase != "optimizer"  # an update is made of each rank's own part
            out.append(Given(self.at[found], self.stated.gathered if read else (), stays=param))
        return out

    def asked(self, op: Op, rule: Split) -> dict[str, str]:
        """Return which names of the rule are asked for, by axis of the mesh: of a gradient, or a stated placement."""
        made = op.results[0]
        place = self.wanted.get(made) or self.stated.places.get(made)
        axes = self.staying[made] if made in self.wanted else None
        given = [self.tensors[t] for t in op.operands]
        if place is None and any(isinstance(t, Tensor) and self.at[t].pending for t in given):
            place = self.met(made)
        if place is None:
            return {}
        axes = place.axes if axes is None else axes
        return {
            axis: names[0]
            for names, dim in zip(rule.results[0], place.dims, strict=True)
            for axis in axes
            if axis in dim and names
        }

    def met(self, t: Tensor) -> Placement | None:
        """Return where the tensor lies that an old one, or what elementwise ops make of it, is put together with."""
        while True:
            if t in self.met_by:
                return self.met_by[t]
            readers = list(t.graph.successors(t))
            if not readers and t.graph.fused and t in t.graph.outputs and t.graph.owner is not None:
                t = t.graph.owner.results[t.graph.outputs.index(t)]  # what a kernel hands out
                continue
            if not readers:
                return None
            others = [self.tensors.get(o) for o in readers[0].operands if o is not t and o.sizes == t.sizes]
            found = [self.at[o] for o in others if isinstance(o, Tensor) and not self.at[o].pending]
            alone = len(readers[0].operands) == 1 and readers[0].results[0].sizes == t.sizes
            if found or not alone or readers[0].loop is not None:
                return found[0] if found else None
            t = readers[0].results[0]

    def whole(self, op: Op) -> Choice:
        """Have every operand whole on every rank, as nothing is known of the op."""
        self.moved += [
            f"{op.name!r}: {t.name!r} put together along {axis}: {op.kind.name} has no rule of placement"
            for t in op.operands
            if not isinstance(self.tensors[t], Later)
            for axis in self.mesh
            if axis in {*self.at[self.tensors[t]].axes, *self.at[self.tensors[t]].pending}
        ]
        operands = [Placement(((),) * t.ndim) for t in op.operands]
        return Choice(list(operands), [Placement(((),) * t.ndim) for t in op.results], {}, {})

    def need_in_place(self, op: Op, operands: Sequence[Tensor]) -> None:
        """Refuse to write into a copy in place of what it is a copy of."""
        for i in op.kind.overwrites():
            old = self.tensors[op.operands[i]]
            kept = op.operands[i].storage.role != "activation"  # by more than this op
            if kept and isinstance(old, Tensor) and operands[i].storage is not old.storage:
                raise UnsupportedError(
                    f"shard: {op.name!r} writes into {old.name!r}, which lies as {self.at[old]} and is wanted as "
                    f"{self.at[operands[i]]}: expected one placement"
                )

    # -- bodies ------------------------------------------------------------------------------------------------------

    def kernel(self, op: Op, new: Graph) -> None:
        """Copy a kernel, cut where ranks have to meet: it is then several, with collectives between them."""
        kind = op.kind
        assert isinstance(kind, Kernel)
        body = kind.body
        operands = [self.prepared(op, i, new) for i in range(len(op.operands))]
        outer, self.piece = self.piece, Pieces(op, kind, operands, new, self.piece)
        for f, t in zip(body.formals, operands, strict=True):
            self.tensors[f] = t
        needed = live(body)
        for inner in body.ops:
            self.emit(inner, new)
            self.piece.useful |= inner in needed
        made = [self.value(o, new) for o in body.outputs]
        self.piece.outputs = made
        self.piece.useful |= any(t.graph is self.piece.body for t in made)
        self.piece.close(last=True)
        self.piece = outer
        for t, inner_t in zip(op.results, made, strict=True):
            result = self.here(new).adopt(inner_t)
            self.stands_for(result, inner_t)
            self.tensors[t] = result

    def prepared(self, op: Op, i: int, new: Graph) -> Tensor:
        """Return an operand of a kernel: a part of a sum is reduced before it is read, to where its like lies."""
        old = op.operands[i]
        t = self.value(old, new)
        at = self.at[t]
        if t in self.params and op.phase != "optimizer":
            at = at.without(self.stated.gathered & at.axes, self.mesh)
        if at.pending:
            like = next(
                (
                    self.at[self.tensors[o]]
                    for o in op.operands
                    if o is not old and o.sizes == old.sizes and isinstance(self.tensors[o], Tensor)
                    and not self.at[self.tensors[o]].pending
                ),
                at.without(at.pending, self.mesh),
            )  # fmt: skip
            at = like
        return self.moved_to(t, at, new, op.phase)

    def loop(self, op: Op, new: Graph) -> None:
        """Copy a loop; carries lie as an iteration leaves them."""
        loop = op.loop
        assert loop is not None
        starts: list[Placement | None] = []
        for f, t, last in zip(loop.carries, loop.starts, loop.lasts, strict=True):
            now = self.tensors[t]
            place = self.stated.places.get(f)
            if place is None and isinstance(now, Later):
                place = self.wanted.get(last)
            elif place is None:
                place = self.at[now].without(self.at[now].pending, self.mesh)
            starts.append(place)
        host, around = self.here(new), self.piece
        known, copies = dict(self.tensors), dict(self.copies)
        self.piece = None  # a loop inside a kernel is not cut: ranks meet where they have to
        while True:
            try:
                with host.whole():
                    self.iterations(op, host, starts)
                break
            except _WiderError as wider:
                starts[wider.at] = wider.placement
                self.tensors, self.copies = dict(known), dict(copies)  # what was added is taken back
        self.piece = around

    def iterations(self, op: Op, new: Graph, starts: Sequence[Placement | None]) -> None:
        """Add the loop with its carries at some placements."""
        loop = op.loop
        assert loop is not None
        places = [Placement(((),) * t.ndim) if p is None else p for p, t in zip(starts, loop.starts, strict=True)]
        begun = [self.value(t, new, p, op.phase) for t, p in zip(loop.starts, places, strict=True)]
        begun = [self.dense(t, new, op.phase) for t in begun]
        xs = [self.summed(t, new, op.phase, sliced=True) for t in loop.xs]
        shared = [self.summed(t, new, op.phase) for t in loop.shared]
        body = new.start_body(loop.body.name, fused=False)
        self.enter(loop, begun, xs, shared, body)
        self.met_by |= {t: place for t, place in zip(loop.nexts, starts, strict=True) if place is not None}
        self.fill(loop.body, body)
        for i, t in enumerate(loop.nexts):
            self.hand_on(i, t, body, op, places[i])
        for t in (*loop.ys, *loop.saved):
            self.tensors[t] = self.summed(t, body, op.phase)
        body.outputs += [body.adopt(self.tensors[t]) for t in loop.body.outputs]
        made_op = self.add(op, replace(loop.kind, body=body), [*begun, *xs, *shared], new)
        for i, (r, t) in enumerate(zip(made_op.results, loop.body.outputs, strict=True)):
            inner = self.tensors[t]
            self.stands_for(r, inner)
            if i >= len(loop.lasts):
                self.at[r] = self.at[inner].with_dims([(), *self.at[inner].dims])

    def summed(self, old: Tensor, graph: Graph, phase: str, *, sliced: bool = False) -> Tensor:
        """Return what stands for an old tensor with nothing pending; what is read in slices has all of them."""
        t = self.value(old, graph)
        at = self.at[t]
        first = at.dims[0] if sliced else ()
        gone = {*at.pending, *(f for f in first if isinstance(f, str))}
        return self.moved_to(t, at.without(gone, self.mesh), graph, phase)

    def enter(
        self, loop: Loop, begun: Sequence[Tensor], xs: Sequence[Tensor], shared: Sequence[Tensor], body: Graph
    ) -> None:
        """Add the inputs of a body, and note where gradients are kept that are made inside it."""
        for f, outer in zip(loop.carries, begun, strict=True):
            made = self.stand_for(f, outer, body, outer.sizes, contiguous(outer.sizes), self.at[outer])
            self.carried.add(made.storage)
        for f, outer in zip(loop.slices, xs, strict=True):
            at = self.at[outer].with_dims(self.at[outer].dims[1:])
            self.stand_for(f, outer, body, outer.sizes[1:], outer.strides[1:], at, lead=1)
        for f, outer in zip(loop.captured, shared, strict=True):
            made = self.stand_for(f, outer, body, outer.sizes, outer.strides, self.at[outer])
            made.offset = outer.offset
        for r, o in zip((*loop.stacks, *loop.pieces), (*loop.ys, *loop.saved), strict=True):
            if r in self.wanted:
                self.aim(o, self.wanted[r].with_dims(self.wanted[r].dims[1:]), self.staying[r])
        for r, o in zip(loop.lasts, loop.nexts, strict=True):
            if r in self.wanted:
                self.aim(o, self.wanted[r], self.staying[r])

    def aim(self, t: Tensor, place: Placement, staying: frozenset[str]) -> None:
        """Note where a gradient is kept that is made inside a body."""
        self.wanted |= targets(t.graph, {t: place})
        self.staying |= targets(t.graph, {t: staying})

    def hand_on(self, i: int, t: Tensor, body: Graph, op: Op, place: Placement) -> None:
        """Take what an iteration hands on to where the next one wants it, or ask for another beginning."""
        found = self.tensors[t]
        if isinstance(found, Later):
            self.tensors[t] = self.value(t, body, place, op.phase)
            return
        after = self.at[found].without(self.at[found].pending, self.mesh)
        more = after.axes - place.axes
        if more and t not in self.stated.places and op.loop.carries[i] not in self.stated.places:  # type: ignore[union-attr]
            dims = [d if not place.dims[j] else place.dims[j] for j, d in enumerate(after.dims)]
            wider = Placement(tuple(dims))
            if wider != place and len(wider.axes) == sum(len([f for f in d if isinstance(f, str)]) for d in dims):
                raise _WiderError(i, wider)
        self.tensors[t] = self.dense(self.moved_to(found, place, body, op.phase), body, op.phase)

    def dense(self, t: Tensor, graph: Graph, phase: str) -> Tensor:
        """Return a carry as every iteration hands it on: in the order of its axes."""
        if t.is_contiguous:
            return t
        kind = Rearrange(split=t.sizes, order=tuple(range(t.ndim)), merged=t.sizes, copy=True)
        (made,) = graph.add_op(kind, [t], f"{t.name}.contiguous", phase).results
        self.stands_for(made, t)
        return made

    def stand_for(
        self, f: Tensor, outer: Tensor, body: Graph, sizes: tuple[Poly, ...], strides: tuple[Poly, ...],
        place: Placement, lead: int = 0,
    ) -> Tensor:  # fmt: skip
        """Add an input of a loop's body."""
        pieces = max(outer.storage.pieces - lead, 0)
        made = body.formal(outer, f.name, sizes, strides, pieces)
        made.domain = f.domain
        self.stands_for(made, outer)
        self.tensors[f], self.at[made] = made, place
        return made
