"""Units of parameters: put together by one collective before a pass reads them, and given back behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...algebra.polynomial import total
from ...dtypes import DType
from ...errors import FormatError
from ...graph.graph import Graph
from ...graph.loop import is_pass
from ...graph.op import Op
from ...graph.strides import numel
from ...graph.tensor import Tensor
from ...ops.collectives import Collective, Part
from ...ops.keep import Keep
from ...ops.pack import Pack
from ...ops.stacks import Empty
from .flat import added, from_rows, in_rows, joined, pieces
from .frames import Frame, Unit, reads, window
from .fully import unit_of
from .reducing import Reducing
from .targets import targets
from .tensors import Stated

__all__ = ["Units"]

#: Parameters that one collective can put together: the axes of the mesh, and they.
_Group = tuple[tuple[str, ...], list[Tensor]]


class Units(Reducing):
    """Opens and shuts the units of each body while its ops are copied."""

    def __init__(self, stated: Stated) -> None:
        super().__init__(stated)
        self.apart = False
        """Whether parameters stay in parts although an op reads them: a view of a part is made."""

    def plain(self, op: Op, new: Graph) -> None:
        """Add an op of a rank."""
        raise NotImplementedError

    # -- bodies ------------------------------------------------------------------------------------------------------

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        """Copy ops, and open and shut units between them."""
        around, self.frame = self.frame, self._frame(old, new)
        if self.frame.layer and not self.frame.split:
            for unit in self.frame.units:
                self._open(unit, self._phase(old), old, new)
        super().fill(old, new, suffix)
        self.left, self.frame = self.frame, around

    def close(self, old: Graph, new: Graph) -> None:
        """Shut what is open at the end of a body, and reduce what is left."""
        for unit in self.frame.units if self.frame.layer else ():
            self._shut(unit, self._phase(old), new)
        for key in dict.fromkeys(self.frame.late.values()):
            self.reduce([t for t, k in self.frame.late.items() if k == key], new)
        if self.frame.split:
            self.hand_on_last(new, self._phase(old))
        if old.parent is None:  # gradients are of what a rank has
            self.tensors |= {t: self.frame.shards[t] for unit in self.frame.units for t in unit.members}

    @staticmethod
    def _phase(old: Graph) -> str:
        return "forward" if old.owner is None else window(old.owner) or "backward"

    def _frame(self, old: Graph, new: Graph) -> Frame:
        frame = Frame(around=old.owner)
        if self.policy is None or not self.policy.by_unit:
            return frame
        if old.parent is None:
            params = [t for t in old.tensors if t.role == "param" and t.producer is None]
            for t in params:  # an op may read the root's before the last of them is declared
                self.tensors[t] = self.source(t, new, "")
            found = [t for t in params if self._along(self.tensors[t])]
            members = {t: unit_of(t.name, self.policy.units) for t in found if not t.storage.pieces}
        else:
            loop = old.owner.loop if old.owner is not None else None
            formals = [f for f in old.formals if isinstance(self.tensors.get(f), Tensor)]
            found = [f for f in formals if self._along(self.tensors[f])]
            if loop is None or (loop.op.phase == "optimizer" and not is_pass(loop.body)):
                return frame
            frame.layer = not is_pass(loop.body) and any(self.tensors.get(f) in self.params for f in loop.slices)
            names = {f: self.names[self.tensors[f]] for f in found if not self.tensors[f].storage.pieces}
            members = {f: "layer" if frame.layer else unit_of(name, self.policy.units) for f, name in names.items()}
            if frame.layer:
                members |= self._apart(names, old)
                frame.split = len({*members.values()}) > 1
        frame.note(old, members, self.policy.param_dtype)
        frame.shards = {t: self.tensors[t] for unit in frame.units for t in unit.members}
        self._need_casts(frame)
        frame.owners = self._owners(old, members)
        return frame

    @staticmethod
    def _apart(names: Mapping[Tensor, str], old: Graph) -> dict[Tensor, str]:
        """Return the layers of parameters where an iteration has several, as where layers of two kinds alternate."""
        scopes = sorted(old.root.layers)
        found = {t: next((s for s in scopes if name.startswith(f"{s}/")), "") for t, name in names.items()}
        found = {t: scope for t, scope in found.items() if scope}
        return found if len({*found.values()}) > 1 else {}

    @staticmethod
    def _owners(old: Graph, members: Mapping[Tensor, str]) -> dict[Tensor, str]:
        """Return the units of gradients that a graph, or the iteration of a pass, makes, and of terms of these."""
        loop = old.owner.loop if old.owner is not None else None
        inner = {} if loop is None else dict(zip(loop.shared, loop.captured, strict=True))
        left = {} if loop is None else dict(zip(loop.lasts, loop.nexts, strict=True))
        of = {left.get(g, g): members.get(inner.get(t, t)) for t, g in old.root.gradients.items()}
        return targets(old, {g: unit for g, unit in of.items() if unit is not None})

    def _need_casts(self, frame: Frame) -> None:
        """Refuse a format that a pass does not read a parameter in."""
        wanted = None if self.policy is None else self.policy.param_dtype
        for t in (t for unit in frame.units for t in unit.members if wanted not in (None, t.dtype.name)):
            for op in t.graph.successors(t):
                if window(op) and not (op.results and op.results[0] in frame.casts) and t in reads(op):
                    raise FormatError(
                        f"shard: {op.name!r} reads {t.name!r} in {t.dtype.name}, expected a cast to "
                        f"param_dtype={wanted!r} and nothing else"
                    )

    def _along(self, shard: Tensor) -> frozenset[str]:
        """Return the axes along which a parameter of a rank is gathered."""
        return self.params.get(shard, frozenset()) & self.at[shard].axes

    # -- ops ---------------------------------------------------------------------------------------------------------

    def before(self, op: Op, new: Graph) -> None:
        """Open what an op is the first to read, and reduce gradients that it reads."""
        frame = self.frame
        while any(t in frame.late or t in frame.waiting for t in op.operands):
            self.reduce([*frame.late], new)
        if frame.layer and not frame.split:
            self._show(op, new)
            return
        for unit, phase in list(frame.beginning(op)):
            self._open(unit, phase, op.graph, new)
        self._show(op, new)
        if op.loop is not None and not frame.layer:
            self.release(new, op.phase)

    def _show(self, op: Op, new: Graph) -> None:
        """Let an op have members put together where they are, and views of them; an update what a rank has of them."""
        if isinstance(op.kind, Keep):  # what a program names until here is no more than what is left of it
            self.tensors |= {t: self.reduced[t.storage] for t in op.operands[1:] if t.storage in self.reduced}
        for t in op.operands:
            unit = self.frame.of.get(t.storage)
            if unit is None:
                continue
            found = self.frame.open.get(unit.key) if window(op) else None
            self.tensors[t] = self._seen(t, self.frame.shards if found is None else found, new)

    def _seen(self, t: Tensor, whole: dict[Tensor, Tensor], new: Graph) -> Tensor:
        """Return what stands for a member, or for a view of one, which each pass has of its own."""
        if t in self.frame.casts:
            return self._seen(self.frame.casts[t], whole, new)
        if t not in whole:
            assert t.producer is not None
            of = next(o for o in t.producer.operands if o.storage is t.storage)
            self.tensors[of] = self._seen(of, whole, new)
            if not isinstance(t.producer.kind, Keep):
                around, self.apart = self.apart, whole is self.frame.shards
                self.plain(t.producer, new)
                self.apart = around
            whole[t] = self.tensors[of if isinstance(t.producer.kind, Keep) else t]
        return whole[t]

    def after(self, op: Op, new: Graph) -> None:
        """Shut what no further op of the pass reads."""
        frame = self.frame
        for t in op.results:  # views of members, and what updates have made of them
            if t.storage in frame.of and t in self.tensors and t not in frame.casts:
                found = frame.open.get(frame.of[t.storage].key) if window(op) else None
                (frame.shards if found is None else found)[t] = self.tensors[t]
        if frame.split or not frame.layer:
            for unit, phase in list(frame.ending(op)):
                self._shut(unit, phase, new)
            if frame.end is op and not frame.layer:
                self.hold(frame.flats, new, "forward")
                frame.flats = []

    # -- parameters --------------------------------------------------------------------------------------------------

    def _part(self, t: Tensor, phase: str) -> Tensor:
        """Return what a rank has of a member at the beginning of a pass."""
        return self.frame.halves.get(t, self.frame.shards[t]) if phase == "backward" else self.frame.shards[t]

    def _format(self, t: Tensor) -> DType:
        """Return the format that a member is put together in."""
        return next((c.dtype for c, of in self.frame.casts.items() if of is t), t.dtype)

    def _groups(self, unit: Unit, phase: str) -> list[_Group]:
        """Return the members that one collective each puts together."""
        found: dict[object, _Group] = {}
        for t in unit.members:
            shard = self._part(t, phase)
            axes = tuple(a for a in self.mesh if a in self._along(shard))
            found.setdefault((axes, shard.dtype, self._format(t)), (axes, []))[1].append(t)
        return list(found.values())

    def _open(self, unit: Unit, phase: str, old: Graph, new: Graph) -> None:
        frame, policy = self.frame, self.policy
        assert policy is not None
        if unit.key not in frame.open:
            self._put_together(unit, phase, old, new)
        if policy.prefetch and phase == "backward" and frame.split:
            order = frame.ordered(phase, old)
            ahead = order[order.index(unit) + 1 :][:1]
            if not ahead:  # the first layer of the next iteration is put together in a buffer of its own
                for c in (c for c in frame.carried if c.what == "flat"):
                    kind = Empty(sizes=c.start.sizes, dtype=c.start.dtype)
                    c.next = added(new, kind, [], f"{c.start.name}.next", phase)
            elif ahead[0].key not in {*frame.open, *frame.ahead}:
                frame.ahead[ahead[0].key] = self._buffers(ahead[0], phase, old, new)
        elif policy.prefetch and phase == "backward" and not frame.layer:
            following = frame.following(unit, old)
            if isinstance(following, Op):
                self._before_layers(following, new)
            elif following is not None and following.key not in {*frame.open, *frame.ahead}:
                frame.ahead[following.key] = self._buffers(following, phase, old, new)

    def _put_together(self, unit: Unit, phase: str, old: Graph, new: Graph) -> None:
        """Put a unit together, from buffers that may be there already."""
        frame, policy = self.frame, self.policy
        assert policy is not None
        flats = frame.ahead.pop(unit.key, None) or self._buffers(unit, phase, old, new)
        if policy.prefetch and phase == "forward":
            flats = self.after_last(flats, new, phase)
        made: dict[Tensor, Tensor] = {}
        for (axes, members), flat in zip(self._groups(unit, phase), flats, strict=True):
            made |= self._copied_out(members, axes, flat, new, phase)
        frame.open[unit.key] = made

    def _before_layers(self, op: Op, new: Graph) -> None:
        """Ask for the buffers of the first of the layers of a loop before it, as it is the unit that is read next."""
        loop, policy = op.loop, self.policy
        assert loop is not None
        assert policy is not None
        outer = {f: t for f, x in zip(loop.body.formals, op.operands, strict=True) if (t := self._shard_of(x))}
        slices = {*loop.slices}
        if is_pass(loop.body) or not slices & outer.keys():
            return
        frame = Frame(around=op, layer=True, shards=outer)
        layers = self._apart({f: self.names.get(t, t.name) for f, t in outer.items()}, loop.body)
        frame.note(loop.body, {**dict.fromkeys(outer, "layer"), **layers}, policy.param_dtype)
        around, self.frame = self.frame, frame
        for unit in frame.ordered("backward", loop.body)[:1]:
            for axes, members in self._groups(unit, "backward"):
                whole = total(numel(outer[t].sizes[t in slices :]) for t in members)
                kind = Empty(sizes=(*(self.mesh[a] for a in axes), whole), dtype=self._format(members[0]))
                self.early[op, kind] = added(new, kind, [], f"{op.name}.flat", op.phase)
        self.frame = around

    def _shard_of(self, t: Tensor) -> Tensor | None:
        """Return what a rank has of what is put together where a loop reads it, None where that is nothing."""
        made = self.tensors.get(t)
        made = self.kept.get(made, made) if isinstance(made, Tensor) and made in self.params else None
        return made if made is not None and self._along(made) else None

    def _buffers(self, unit: Unit, phase: str, old: Graph, new: Graph) -> list[Tensor]:
        """Put members together in buffers, a row for each rank."""
        frame, policy = self.frame, self.policy
        # prefetch: the buffer of the next layer exists while one is computed, so an iteration receives the first one
        over = frame.layer and policy is not None and policy.prefetch and phase == "backward"
        over = over and (not frame.split or frame.ordered(phase, old)[0] is unit)
        groups = self._groups(unit, phase)
        return [self._gathered(unit.key, axes, members, new, phase, over=over) for axes, members in groups]

    def _gathered(
        self, key: str, axes: Sequence[str], members: Sequence[Tensor], new: Graph, phase: str, *, over: bool
    ) -> Tensor:
        frame = self.frame
        shards = [self._part(t, phase) for t in members]
        name = f"{new.name if frame.layer and not frame.split else key or 'root'}.all_gather"
        sizes, dtype = (*(self.mesh[a] for a in axes), total(t.numel for t in shards)), self._format(members[0])
        if dtype != self.frame.shards[members[0]].dtype:
            rows = [in_rows(new, t, self.at[t], (), self.mesh, phase) for t in shards]
            shards = [joined(new, rows, dtype, f"{name}.cast", phase)]
        kind = Empty(sizes=sizes, dtype=dtype)
        buffer = self.hand_over("flat", kind, new) if over else added(new, kind, [], f"{name}.buffer", phase)
        flat = buffer
        for i, axis in enumerate(axes):
            flat = added(new, Part(ranks=self.mesh[axis], axis=axis, dim=i), [flat], f"{name}.own", phase)
        flat = added(new, Pack(), [flat, *shards], f"{name}.copy_in", phase)
        for i, axis in reversed([*enumerate(axes)]):
            kind_of = Collective(collective="all_gather", ranks=self.mesh[axis], axis=axis, dim=i, inplace=True)
            flat = added(new, kind_of, [flat], name, phase)
        if over and not frame.split:
            frame.carried[-1].next = flat
        return flat

    def _copied_out(
        self, members: Sequence[Tensor], axes: Sequence[str], flat: Tensor, new: Graph, phase: str
    ) -> dict[Tensor, Tensor]:
        """Copy parameters from a buffer."""
        shards = [self._part(t, phase) for t in members]
        rows = pieces(new, flat, [t.numel for t in shards], flat.name, phase)
        out = {}
        for t, shard, row in zip(members, shards, rows, strict=True):
            at, name = self.at[shard], f"{self.names.get(shard, shard.name)}.all_gather"
            made = from_rows(new, row, at, shard.sizes, axes, self.mesh, name, phase, whole=True)
            self.at[made] = at.without(axes, self.mesh)
            self.params[made] = self.params[shard]
            out[t] = made
        return out

    def _half(self, t: Tensor, made: Tensor, axes: frozenset[str], new: Graph, phase: str) -> Tensor:
        """Return a copy of the part of a parameter that a rank has between the passes."""
        at = self.at[self.frame.shards[t]]
        gone = self._along(self.frame.shards[t]) - axes
        part = self.moved_to(made, at.without(gone, self.mesh), new, phase)
        return self.copied(part, new, f"{part.name}.copy", phase) if part.is_view else part

    def _shut(self, unit: Unit, phase: str, new: Graph) -> None:
        frame, policy = self.frame, self.policy
        assert policy is not None
        made = frame.open.get(unit.key)
        if made is None:
            return
        between = policy.between(unit.key) & self.stated.gathered
        if phase == "forward" and not between:
            frame.kept += ((t, made[t]) for t in unit.members if frame.layer)
            return
        if phase == "forward" and between != self.stated.gathered:
            frame.halves |= {t: self._half(t, made[t], between, new, phase) for t in unit.members}
            frame.kept += ((t, frame.halves[t]) for t in unit.members if frame.layer)
        self.hold([made[t] for t in unit.members], new, phase)
        del frame.open[unit.key]
        self.tensors |= {t: frame.shards[t] for t in unit.members}
        self.reduce([t for t, key in frame.late.items() if key == unit.key], new)
