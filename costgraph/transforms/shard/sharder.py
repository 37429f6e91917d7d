"""The graph of one rank, from the graph of all: op by op, with what takes tensors to where they are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...algebra.polynomial import Poly
from ...errors import UnsupportedError
from ...graph.graph import Graph
from ...graph.op import Op, OpKind
from ...graph.placement import Mesh, Placement, Split
from ...graph.strides import contiguous
from ...graph.tensor import Storage, Tensor
from ...ops.blocks import Kernel
from ...ops.collectives import Collective
from ...ops.fill import Fill
from ...ops.fresh import Fresh
from ...ops.layout import contiguous_copy
from ...ops.pieces import Absent
from ...ops.stacks import Empty
from ..rewrite import Rewriter
from .choice import Choice, Given, choose
from .convert import steps
from .targets import targets

__all__ = ["Sharder", "Stated"]


@dataclass(frozen=True)
class Stated:
    """What is asked for: where sources and gradients lie, and what is gathered for its readers."""

    mesh: Mesh
    places: Mapping[Tensor, Placement]
    """Of sources of the old graph, and of other tensors whose placement is stated."""
    gradients: Mapping[Tensor, Placement]
    """Of gradients of the old graph."""
    staying: Mapping[Tensor, frozenset[str]]
    """Axes of the mesh that split what a gradient is of, while an op reads it."""
    gathered: frozenset[str]
    """Axes of the mesh along which parameters are put together where an op reads them."""


class _Later:
    """What an op without operands makes, before it is known where a reader wants it."""

    def __init__(self, op: Op) -> None:
        self.op = op
        value = op.kind.value if isinstance(op.kind, Fill) else None
        self.zero = isinstance(op.kind, Absent) or value == 0


class _Wider(Exception):
    """Raised where an iteration hands on what is split along more axes than what it was handed."""

    def __init__(self, at: int, placement: Placement) -> None:
        self.at, self.placement = at, placement


class Sharder(Rewriter):
    """Copies a graph with the sizes of one rank; `at` says where each new tensor lies."""

    replays = False

    def __init__(self, stated: Stated) -> None:
        super().__init__()
        self.stated, self.mesh = stated, stated.mesh
        self.at: dict[Tensor, Placement] = {}
        self.params: set[Tensor] = set()
        """New tensors that are parameters, or stand for them."""
        self.copies: dict[tuple[Tensor, Placement, Graph, str], Tensor] = {}
        self.moved: list[str] = []
        """What was put together although nobody asked for it, in words."""
        self.wanted: dict[Tensor, Placement] = {}
        """Old tensors that are gradients, and where they are kept."""
        self.staying: dict[Tensor, frozenset[str]] = {}
        self.piece: _Pieces | None = None
        """The kernel that is being cut."""
        self.parts: dict[Storage, tuple[Tensor, Placement]] = {}
        """Storages that ranks have written their parts of: the last old tensor there, and where it should lie."""

    def run(self, old: Graph, name: str | None = None) -> Graph:
        self.wanted = targets(old, self.stated.gradients)
        self.staying = targets(old, self.stated.staying)
        return super().run(old, name)

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        around, self.parts = self.parts, {}
        super().fill(old, new, suffix)
        for t, place in self.parts.values():
            self.put_together(t, place, new)
        self.parts = around
        if old.parent is None:
            for t in old.outputs:
                now = self.value(t, new)
                self.tensors[t] = self.moved_to(now, self.at[now].without(self.at[now].pending, self.mesh), new, "forward")
            for t, g in old.gradients.items():
                self.tensors[g] = self.value(g, new)

    # -- tensors -----------------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        place = self.stated.places.get(old, Placement(((),) * old.ndim))
        tensor = Tensor(
            new, new.unique(old.name + suffix), place.local(old.sizes), old.dtype,
            role=old.role, requires_grad=old.requires_grad, pieces=old.storage.pieces,
        )  # fmt: skip
        new.add_node(tensor)
        self.at[tensor] = place
        if old.role == "param":
            self.params.add(tensor)
        return tensor

    def value(self, old: Tensor, new: Graph, want: Placement | None = None, phase: str = "forward") -> Tensor:
        """Return what stands for an old tensor, made now where it was not made yet, at the placement that is wanted."""
        found = self.tensors[old]
        if isinstance(found, _Later):
            return self.made(found, old, new, want or Placement(((),) * old.ndim))
        return found if want is None else self.moved_to(found, want, new, phase)

    def here(self, new: Graph) -> Graph:
        """Return where ops go now: into the kernel that is being written, if there is one."""
        return new if self.piece is None else self.piece.graph()

    def made(self, later: _Later, old: Tensor, new: Graph, want: Placement) -> Tensor:
        """Make what has no operands with the sizes of one rank."""
        if not later.zero:
            want = want.without(want.pending, self.mesh)
        kind = later.op.kind
        assert isinstance(kind, Fresh)
        op = self.here(new).add_op(replace(kind, sizes=want.local(old.sizes)), [], later.op.name, later.op.phase)
        op.scope = later.op.scope
        self.at[op.results[0]] = want
        return op.results[0]

    def moved_to(self, t: Tensor, want: Placement, new: Graph, phase: str) -> Tensor:
        """Return a tensor at another placement; what readers of the same phase have asked for is there already."""
        have = self.at[t]
        if have == want:
            return t
        key = (t, want, new, "" if t in self.params else phase)
        if key in self.copies:
            return self.copies[key]
        made, param = t, t in self.params
        for kind, after, name in steps(have, want, self.mesh):
            made = self.step(kind, made, name, new, phase)
            self.at[made] = after
        assert self.at[made] == want, f"{t!r}: {have} -> {self.at[made]}, expected {want}"
        if param:
            self.params.add(made)
        self.copies[key] = made
        return made

    def step(self, kind: OpKind, t: Tensor, name: str, new: Graph, phase: str) -> Tensor:
        """Add an op that moves a tensor; a kernel is cut where ranks have to meet."""
        graph = new if self.piece is None else self.piece.site(kind)
        base = t.name.removesuffix(".in")
        op = graph.add_op(kind, [t], f"{base}.{name}", phase)
        op.scope = base.rpartition("/")[0]
        return op.results[0]

    # -- ops ---------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        if isinstance(op.kind, Fresh) and not isinstance(op.kind, Empty):  # a stack is there before its slices are
            self.tensors[op.results[0]] = _Later(op)
        elif op.loop is not None:
            self.loop(op, new)
        elif isinstance(op.kind, Kernel):
            self.kernel(op, new)
        else:
            self.plain(op, new)
        for t in op.results:
            if t in self.wanted and not isinstance(self.tensors[t], _Later):
                self.tensors[t] = self.moved_to(self.tensors[t], self.wanted[t], new, op.phase)

    def plain(self, op: Op, new: Graph) -> None:
        """Add an op of a rank."""
        rule = None if isinstance(op.kind, Empty) else op.kind.placed(op)
        choice = self.whole(op) if rule is None else choose(self.restricted(rule, op), self.given(op), self.mesh, self.asked(op, rule))
        self.moved += [
            f"{op.name!r}: {op.operands[i].name!r} put together along {axis}: {why}" for i, axis, why in choice.moved
        ]
        operands = [self.value(t, new, want, op.phase) for t, want in zip(op.operands, choice.operands, strict=True)]
        self.need_in_place(op, operands)
        kind = op.kind if rule is None else rule.local(choice.extents, choice.ranks)
        made = self.add(op, kind, operands, self.here(new))
        for t, place in zip(made.results, choice.results, strict=True):
            self.at[t] = place
        for i, t in zip(op.kind.overwrites(), op.results, strict=False):
            self.note_part(op.operands[i], operands[i], t)

    def note_part(self, before: Tensor, written: Tensor, after: Tensor) -> None:
        """Note what is written in parts although every rank has it whole."""
        storage = written.storage
        if storage in self.parts:
            self.parts[storage] = after, self.parts[storage][1]
        elif isinstance(self.tensors[before], Tensor) and self.at[written] != self.at[self.tensors[before]]:
            if storage.role != "activation":
                self.parts[storage] = after, self.at[self.tensors[before]]

    def put_together(self, old: Tensor, place: Placement, new: Graph) -> None:
        """Let ranks exchange their parts of what each of them keeps whole, in place."""
        t = self.tensors[old]
        for axis in reversed(list(self.mesh)):
            at = self.at[t]
            dim = at.dim(axis)
            if dim is None or place.dim(axis) is not None:
                continue
            kind = Collective(collective="all_gather", ranks=self.mesh[axis], axis=axis, dim=dim, inplace=True)
            assert old.producer is not None
            op = new.add_op(kind, [t], f"{t.name}.all_gather", old.producer.phase)
            op.scope = old.producer.scope
            (t,) = op.results
            self.at[t] = at.without([axis], self.mesh)
        self.tensors[old] = t

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
            if isinstance(found, _Later):
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
        if place is None:
            return {}
        axes = self.staying[made] if made in self.wanted else place.axes
        return {
            axis: names[0]
            for names, dim in zip(rule.results[0], place.dims, strict=True)
            for axis in axes
            if axis in dim and names
        }

    def whole(self, op: Op) -> Choice:
        """Have every operand whole on every rank, as nothing is known of the op."""
        self.moved += [
            f"{op.name!r}: {t.name!r} put together along {axis}: {op.kind.name} has no rule of placement"
            for t in op.operands
            if not isinstance(self.tensors[t], _Later)
            for axis in self.mesh
            if axis in {*self.at[self.tensors[t]].axes, *self.at[self.tensors[t]].pending}
        ]
        operands = [Placement(((),) * t.ndim) for t in op.operands]
        return Choice(list(operands), [Placement(((),) * t.ndim) for t in op.results], {}, {})

    def need_in_place(self, op: Op, operands: Sequence[Tensor]) -> None:
        """Refuse to write into a copy in place of what it is a copy of."""
        for i in op.kind.overwrites():
            old = self.tensors[op.operands[i]]
            if isinstance(old, Tensor) and operands[i].storage is not old.storage and self.lives_on(op, i):
                raise UnsupportedError(
                    f"shard: {op.name!r} writes into {old.name!r}, which lies as {self.at[old]} and is wanted as "
                    f"{self.at[operands[i]]}: expected one placement"
                )

    def lives_on(self, op: Op, i: int) -> bool:
        """Whether what an op writes into is kept by more than the op itself."""
        return op.operands[i].storage.role != "activation"

    # -- bodies ------------------------------------------------------------------------------------------------------

    def kernel(self, op: Op, new: Graph) -> None:
        """Copy a kernel, cut where ranks have to meet: what was one kernel is then several, with collectives between."""
        kind, body = op.kind, op.body
        assert isinstance(kind, Kernel) and body is not None
        operands = [self.prepared(op, i, new) for i in range(len(op.operands))]
        outer, self.piece = self.piece, _Pieces(op, kind, operands, new, self.piece)
        for f, t in zip(body.formals, operands, strict=True):
            self.tensors[f] = t
        live = _live(body)
        for inner in body.ops:
            self.emit(inner, new)
            self.piece.useful |= inner in live
        made = [self.value(o, new) for o in body.outputs]
        self.piece.outputs = made
        self.piece.close(last=True)
        self.piece = outer
        for t, inner_t in zip(op.results, made, strict=True):
            result = self.here(new).adopt(inner_t)
            self.at[result] = self.at[inner_t]
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
        for f, t in zip(loop.carries, loop.starts, strict=True):
            now = self.tensors[t]
            place = self.stated.places.get(f)
            if place is None and isinstance(now, Tensor):
                place = self.at[now].without(self.at[now].pending, self.mesh)
            starts.append(place)
        known = dict(self.tensors)
        while True:
            try:
                with new.whole():
                    self.iterations(op, new, starts)
                return
            except _Wider as wider:
                starts[wider.at] = wider.placement
                self.tensors = dict(known)

    def iterations(self, op: Op, new: Graph, starts: Sequence[Placement | None]) -> None:
        """Add the loop with its carries at some placements."""
        loop, kind = op.loop, op.kind
        assert loop is not None
        places = [Placement(((),) * t.ndim) if p is None else p for p, t in zip(starts, loop.starts, strict=True)]
        begun = [self.value(t, new, p, op.phase) for t, p in zip(loop.starts, places, strict=True)]
        begun = [self.dense(t) for t in begun]
        xs = []
        for t in loop.xs:
            now = self.value(t, new)
            at = self.at[now]
            first = {f for f in at.dims[0] if isinstance(f, str)}
            xs.append(self.moved_to(now, at.without(first | set(at.pending), self.mesh), new, op.phase))
        shared = []
        for t in loop.shared:
            now = self.value(t, new)
            shared.append(self.moved_to(now, self.at[now].without(self.at[now].pending, self.mesh), new, op.phase))
        body = new.start_body(loop.body.name, fused=False)
        for f, outer in zip(loop.carries, begun, strict=True):
            self.stand_for(f, outer, body, outer.sizes, contiguous(outer.sizes), self.at[outer])
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
        self.fill(loop.body, body)
        for i, t in enumerate(loop.nexts):
            self.hand_on(i, t, body, op, starts[i], places[i])
        for t in (*loop.ys, *loop.saved):
            now = self.value(t, body)
            self.tensors[t] = self.moved_to(now, self.at[now].without(self.at[now].pending, self.mesh), body, op.phase)
        body.outputs += [body.adopt(self.tensors[t]) for t in loop.body.outputs]
        made_op = self.add(op, replace(kind, body=body), [*begun, *xs, *shared], new)  # type: ignore[call-arg]
        for i, (r, t) in enumerate(zip(made_op.results, loop.body.outputs, strict=True)):
            at = self.at[self.tensors[t]]
            self.at[r] = at if i < len(loop.lasts) else at.with_dims([(), *at.dims])

    def aim(self, t: Tensor, place: Placement, staying: frozenset[str]) -> None:
        """Note where a gradient is kept that is made inside a body."""
        self.wanted |= targets(t.graph, {t: place})
        self.staying |= targets(t.graph, {t: staying})

    def hand_on(self, i: int, t: Tensor, body: Graph, op: Op, start: Placement | None, place: Placement) -> None:
        """Take what an iteration hands on to where the next one wants it, or ask for another beginning."""
        found = self.tensors[t]
        if isinstance(found, _Later):
            self.tensors[t] = self.value(t, body, place, op.phase)
            return
        after = self.at[found].without(self.at[found].pending, self.mesh)
        more = after.axes - place.axes
        if more and t not in self.stated.places and op.loop.carries[i] not in self.stated.places:  # type: ignore[union-attr]
            dims = [d if not place.dims[j] else place.dims[j] for j, d in enumerate(after.dims)]
            wider = Placement(tuple(dims))
            if wider != place and len(wider.axes) == sum(len([f for f in d if isinstance(f, str)]) for d in dims):
                raise _Wider(i, wider)
        self.tensors[t] = self.dense(self.moved_to(found, place, body, op.phase))

    def dense(self, t: Tensor) -> Tensor:
        """Return a carry as every iteration hands it on: in the order of its axes."""
        made = contiguous_copy(t)
        self.at[made] = self.at[t]
        return made

    def stand_for(
        self, f: Tensor, outer: Tensor, body: Graph, sizes: tuple[Poly, ...], strides: tuple[Poly, ...],
        place: Placement, lead: int = 0,
    ) -> Tensor:  # fmt: skip
        """Add an input of a loop\'s body."""
        pieces = max(outer.storage.pieces - lead, 0)
        made = body.formal(outer, f.name, sizes, strides, pieces)
        made.domain = f.domain
        self.tensors[f], self.at[made] = made, place
        if outer in self.params:
            self.params.add(made)
        return made


def _live(body: Graph) -> set[Op]:
    """Return the ops of a body that its results depend on, and those that write in place."""
    found: set[Op] = set()
    needed = set(body.outputs)
    for op in reversed(body.ops):
        if needed.intersection(op.results) or op.kind.overwrites():
            found.add(op)
            needed.update(op.operands)
    return found


class _Pieces:
    """A kernel that is written anew: one body until ranks have to meet, and another one behind it."""

    def __init__(
        self, op: Op, kind: Kernel, operands: Sequence[Tensor], new: Graph, around: _Pieces | None
    ) -> None:
        self.op, self.kind, self.operands, self.new, self.around = op, kind, operands, new, around
        self.body: Graph | None = None
        self.cuts = 0
        self.useful = False
        """Whether anyone reads what the present body makes."""
        self.outputs: list[Tensor] = []

    def graph(self) -> Graph:
        """Return the body to which ops go now."""
        if self.body is None:
            home = self.new if self.around is None else self.around.graph()
            self.body = home.start_body(self.op.body.name, fused=True)  # type: ignore[union-attr]
            if not self.cuts:
                for t in self.operands:
                    self.body.adopt(t)
        return self.body

    def site(self, kind: OpKind) -> Graph:
        """Return where an op that moves a tensor goes: out of the kernel where ranks have to meet."""
        self.close()
        return self.new if self.around is None else self.around.site(kind)

    def close(self, *, last: bool = False) -> None:
        """Add the kernel that was written so far."""
        if self.body is None or not self.body.ops:
            self.body = None if not last else self.body
            if self.body is None:
                return
        if not self.useful and (self.cuts or not last):  # FLOPs that nobody wanted stay behind
            self.body = None
            return
        if (self.cuts or not last) and self.kind.changed:
            raise UnsupportedError(
                f"shard: {self.op.name!r} is a kernel that writes into its operands, and ranks have to meet inside: "
                "expected a placement that leaves it whole"
            )
        self.cuts += 1
        self.useful = False
        body, self.body = self.body, None
        if last:
            body.outputs += [t for t in self.outputs if t.graph is body and t not in body.outputs]
        kind = replace(self.kind, body=body, strides=()) if self.cuts == 1 else Kernel(body=body)
        assert body.parent is not None
        made = body.parent.add_op(kind, body.captured, self.op.name, self.op.phase)
        made.scope = self.op.scope
        body.owner = made
        if self.around is not None:
            self.around.useful = True
