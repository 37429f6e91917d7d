"""FSDP: all-gather the parameters of a unit before a pass reads them, and reduce-scatter its gradients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...algebra.polynomial import Poly, total
from ...dtypes import DType
from ...dtypes import dtype as find_dtype
from ...errors import FormatError, UnsupportedError
from ...ir.graph import Graph, Loop, Op, Placement, Storage, Tensor, is_pass
from ...ir.strides import contiguous, numel
from ...ops.collectives import Collective, LocalShard, Pack
from ...ops.elementwise import Pointwise
from ...ops.layout import KeepAlive
from ...ops.loops import Empty, Undef
from .fsdp_policy import unit_of
from .grad_buffers import GradBuffers, add_op, cast_to, from_rows, in_rows, joined, pieces
from .partial_sums import adds, targets
from .placed_tensors import RequestedPlacements

__all__ = [
    "BodyGroups",
    "ParamGroup",
    "is_cast",
    "reads",
    "window",
    "Buffers",
    "Reducing",
    "ParamGroups",
]


# -- units and frames --------------------------------------------------------------------------------------------------

#: The pass of each phase: recomputation belongs to the backward pass.
_WINDOWS = {"forward": "forward", "recompute": "backward", "backward": "backward"}


def window(op: Op) -> str | None:
    """Return the pass that an op belongs to, None for an update."""
    return _WINDOWS.get(op.phase)


def is_cast(op: Op) -> bool:
    """Whether an op only converts to another format."""
    return isinstance(op.kind, Pointwise) and op.kind.function.name == "cast"


def reads(op: Op) -> Sequence[Tensor]:
    """Return the operands an op reads whole; a loop reads others in slices, or gathers them itself."""
    if op.loop is None:
        return () if isinstance(op.kind, KeepAlive) else op.operands
    return (*op.loop.starts, *(() if is_pass(op.loop.body) else op.loop.shared))


@dataclass
class ParamGroup:
    """Parameters that are all-gathered together: torch's FSDP parameter group."""

    key: str
    """The common prefix of their names; empty for the root."""
    members: list[Tensor] = field(default_factory=list)
    """Old parameters."""
    first: dict[str, Op] = field(default_factory=dict)
    """The first op of each pass that reads a member."""
    last: dict[str, Op] = field(default_factory=dict)
    """The last op of each pass that reads a member."""


@dataclass
class CarriedBuffer:
    """A carry that keeps a buffer alive until the next iteration."""

    role: str
    """flat (parameters) or input (gradients)"""
    start: Tensor
    next: Tensor | None = None


@dataclass
class BodyGroups:
    """The state of a body's units while it is copied."""

    loop_op: Op | None = None
    """The loop, None for the graph itself."""
    layer: bool = False
    """Whether the body is an iteration of a loop over layers; it is one unit unless `split`."""
    split: bool = False
    """Whether an iteration has several layers, each of them a unit."""
    units: list[ParamGroup] = field(default_factory=list)
    by_storage: dict[Storage, ParamGroup] = field(default_factory=dict)
    """The unit by old storage, which includes views of members."""
    casts: dict[Tensor, Tensor] = field(default_factory=dict)
    """Old casts of members to the format that is gathered, and the members."""
    shards: dict[Tensor, Tensor] = field(default_factory=dict)
    """Shards by member."""
    kept_shards: dict[Tensor, Tensor] = field(default_factory=dict)
    """The part of each member that a rank keeps between the passes, if it is larger than the shard."""
    unsharded: dict[str, dict[Tensor, Tensor]] = field(default_factory=dict)
    """Unsharded members, by unit."""
    prefetched: dict[str, list[Tensor]] = field(default_factory=dict)
    """Prefetched buffers, by unit."""
    unreduced: dict[Tensor, str] = field(default_factory=dict)
    """Old gradients that are not reduced yet, and their units."""
    waiting: dict[Tensor, Op] = field(default_factory=dict)
    """Old tensors that wait for reduced gradients, and the ops that compute them."""
    owners: dict[Tensor, str] = field(default_factory=dict)
    """Units of old gradients."""
    flats: list[Tensor] = field(default_factory=list)
    """All-gather buffers that live until the next ones exist."""
    inputs: list[Tensor] = field(default_factory=list)
    """Reduce-scatter inputs that are freed just before the next ones are filled."""
    carried: list[CarriedBuffer] = field(default_factory=list)
    residuals: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Members that stay unsharded for the backward pass."""
    end: Op | None = None
    """The last op of the forward pass that reads a member."""

    def note(self, old: Graph, members: Mapping[Tensor, str], dtype: str | None = None) -> None:
        """Record the units of members, their casts, and each unit's first and last op."""
        read = {t.storage for op in old.ops if window(op) for t in reads(op)}
        for t, key in members.items():
            if t.storage in read:
                unit = next((u for u in self.units if u.key == key), None) or self._added(key)
                self.by_storage[t.storage] = unit
                unit.members.append(t)
        for op in old.ops:
            c = op.results[0] if op.results else None
            if c is not None and self._narrows(op, c, dtype):
                self.casts[c], self.by_storage[c.storage] = op.operands[0], self.by_storage[op.operands[0].storage]
        root = next((u for u in self.units if not u.key), None)
        for op in old.ops:
            phase = window(op)
            if phase is None or (op.results and op.results[0] in self.casts):
                continue
            touched = list(self._at(op))
            for unit in touched:
                unit.first.setdefault(phase, op)
                unit.last[phase] = op
            if phase == "forward" and (touched or op.loop is not None):
                self.end = op
            if root is not None and phase in root.first and (phase == "backward" or touched):
                root.last[phase] = op

    def ordered(self, phase: str, old: Graph) -> list[ParamGroup]:
        """Return the units that a pass reads, in order."""
        units = [u for u in self.units if phase in u.first]
        return sorted(units, key=lambda u: old.ops.index(u.first[phase]))

    def unit_at(self, op: Op) -> str:
        """Return the unit whose layer contains an op; gradients of other ops are reduced after all layers."""
        scope = f"{op.scope}/"
        return next((u.key for u in self.units if scope.startswith(f"{u.key}/")), "layer")

    def _narrows(self, op: Op, cast: Tensor, dtype: str | None) -> bool:
        """Whether an op casts a member to the gathered format, for the passes only."""
        escapes = cast in op.graph.outputs and (self.loop_op is None or cast not in self.loop_op.loop.saved)  # type: ignore[union-attr]
        member = is_cast(op) and any(op.operands[0] in unit.members for unit in self.units)
        return (
            member and cast.dtype.name == dtype and not escapes and all(map(window, (op, *op.graph.successors(cast))))
        )

    def _added(self, key: str) -> ParamGroup:
        self.units.append(ParamGroup(key))
        return self.units[-1]

    def _at(self, op: Op) -> Iterator[ParamGroup]:
        """Yield the units an op belongs to: those it reads, or whose scope it is in."""
        read = {self.by_storage[t.storage].key for t in reads(op) if t.storage in self.by_storage}
        scope = re.sub(r"[/.]+", ".", op.scope) + "."
        for unit in self.units:
            if unit.key in read or (unit.key and scope.startswith(re.sub(r"[/.]+", ".", unit.key) + ".")):
                yield unit

    def beginning(self, op: Op) -> Iterator[tuple[ParamGroup, str]]:
        """Yield the units that begin at an op."""
        yield from ((u, w) for u in self.units for w, first in u.first.items() if first is op)

    def ending(self, op: Op) -> Iterator[tuple[ParamGroup, str]]:
        """Yield the units that end at an op, the root the last."""
        units = sorted(self.units, key=lambda u: not u.key)
        yield from ((u, w) for u in units for w, last in u.last.items() if last is op)

    def following(self, unit: ParamGroup, old: Graph) -> ParamGroup | Op | None:
        """Return the unit that the backward pass reads next, or the loop before it."""
        order: list[ParamGroup | Op] = []
        for op in old.ops:
            order += [u for u, w in self.beginning(op) if w == "backward"]
            order += [op] if op.loop is not None else []
        index = order.index(unit) + 1
        return order[index] if index < len(order) else None


# -- buffers -----------------------------------------------------------------------------------------------------------


class Buffers(GradBuffers):
    """Extends buffer lifetimes for prefetching."""

    def __init__(self, requested: RequestedPlacements) -> None:
        super().__init__(requested)
        self.policy = requested.policy
        self.frame = BodyGroups()
        self.last_frame = BodyGroups()
        """The frame of the body that was copied last."""
        self.unsharded: dict[Tensor, Tensor] = {}
        """New stacks of parameters, and their unsharded residuals for the backward pass."""
        self.preallocated: dict[tuple[Op, Empty | Undef], Tensor] = {}
        """Buffers that are allocated before a loop, for its first layer."""

    def keep_alive(self, tensors: Sequence[Tensor], new: Graph, phase: str) -> None:
        """Keep tensors alive until here."""
        if tensors:
            add_op(new, KeepAlive(), tensors, f"{tensors[0].name}.freed", phase)

    def release(self, new: Graph, phase: str) -> None:
        """Free the waiting buffers before a loop, whose layers have their own."""
        self.keep_alive([*self.frame.flats, *self.frame.inputs], new, phase)
        self.frame.flats, self.frame.inputs = [], []

    def after_last(self, flats: Sequence[Tensor], new: Graph, phase: str) -> list[Tensor]:
        """Return all-gather buffers whose lifetimes overlap those of the previous unit."""
        out = []
        for flat in flats:
            waiting, self.frame.flats = self.frame.flats, []
            if self.frame.layer and not (self.frame.split and self.frame.carried):
                waiting = [self.add_carry("flat", Undef(sizes=flat.sizes, dtype=flat.dtype), new)]
            out.append(add_op(new, KeepAlive(), [flat, *waiting], f"{flat.name}.kept", phase) if waiting else flat)
            if self.frame.layer and not self.frame.split:
                self.frame.carried[-1].next = out[-1]
        self.frame.flats = [] if self.frame.layer and not self.frame.split else [*out]
        return out

    def carry_last_buffers(self, body: Graph, phase: str) -> None:
        """Carry the last unit's buffers to the next iteration, if shape and format match."""
        buffers = {"flat": self.frame.flats, "input": self.frame.inputs}
        for c in (c for c in self.frame.carried if c.next is None):
            matching = [t for t in buffers[c.role] if t.sizes == c.start.sizes and t.dtype == c.start.dtype]
            kind = Undef(sizes=c.start.sizes, dtype=c.start.dtype)
            c.next = matching[0] if matching else add_op(body, kind, [], f"{c.start.name}.none", phase)

    def before_input(self, row: Tensor, size: Poly, dtype: DType, new: Graph, phase: str) -> Tensor:
        """Return the first row of a reduce-scatter input, which is filled after the previous input is freed."""
        waiting, self.frame.inputs = self.frame.inputs, []
        if self.frame.layer and not (self.frame.split and any(c.role == "input" for c in self.frame.carried)):
            sizes = (*row.sizes[:-1], size)
            waiting = [self.add_carry("input", Undef(sizes=sizes, dtype=dtype), new)]
        return add_op(new, KeepAlive(), [row, *waiting], f"{row.name}.kept", phase) if waiting else row

    def add_carry(self, role: str, kind: Empty | Undef, body: Graph) -> Tensor:
        """Add a carry to the loop that is being written, and return its formal."""
        host, frame = body.parent, self.frame
        assert host is not None
        assert frame.loop_op is not None
        start = self.preallocated.get((frame.loop_op, kind))
        start = start or add_op(host, kind, [], f"{frame.loop_op.name}.{role}", frame.loop_op.phase)
        formal = body.formal(start, f"{start.name}.in", start.sizes, contiguous(start.sizes))
        body.formals.remove(formal)  # carries come first
        body.formals.insert(len(frame.loop_op.loop.carries) + len(frame.carried), formal)  # type: ignore[union-attr]
        frame.carried.append(CarriedBuffer(role, start))
        return formal

    # -- loops ------------------------------------------------------------------------------------------------------

    def with_unsharded(self, loop: Loop, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return the sliced operands of a loop, with parameters that stayed unsharded replaced by their residuals."""
        if not any(window(op) for op in loop.body.walk()):
            return [*xs]
        written = {t.storage for op in loop.body.walk() for i in op.kind.overwrites() for t in [op.operands[i]]}
        for f, t in zip(loop.slices, xs, strict=True):
            if t in self.unsharded and f.storage in written:
                raise UnsupportedError(
                    f"shard: {loop.op.name!r} updates {t.name!r}, but reshard_after_forward=False keeps an unsharded "
                    f"copy of it; expected updates after the backward pass, or reshard_after_forward=True"
                )
        return [self.unsharded.get(t, t) for t in xs]

    def add_loop(
        self, op: Op, body: Graph, operands: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor], new: Graph
    ) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Add a loop with the carries and residuals of its units; yield (result, inner tensor, whether stacked)."""
        frame, loop = self.last_frame, op.loop
        assert loop is not None
        (carried, xs, shared), carries = operands, len(loop.carries)
        stacks = dict(zip(loop.slices, xs, strict=True))
        residuals = [(stacks[t], full) for t, full in frame.residuals if t in stacks]
        nexts = [c.next for c in frame.carried if c.next is not None]
        # a cast of a parameter is gathered again, so it is not a residual
        regathered = {i: stacks[frame.casts[t]] for i, t in enumerate(loop.body.outputs) if t in frame.casts}
        self.tensors |= {op.results[i]: t for i, t in regathered.items()}
        kept_indices = [i for i in range(len(outputs)) if i not in regathered]
        outputs = [outputs[i] for i in kept_indices]
        inner = [*outputs[:carries], *nexts, *outputs[carries:], *(full for _, full in residuals)]
        body.outputs += [body.adopt(t) for t in inner]
        kind = replace(
            loop.kind, body=body, carries=carries + len(nexts), saved=loop.kind.saved - len(regathered) + len(residuals)
        )
        starts = [*carried, *(c.start for c in frame.carried)]
        loop_op = new.add_op(kind, [*starts, *xs, *shared], op.name, op.phase)
        loop_op.scope, body.owner = op.scope, loop_op
        stacked_results = loop_op.results[carries + len(nexts) :]
        loop_results = [*loop_op.results[:carries], *stacked_results[: len(outputs) - carries]]
        self.tensors |= {op.results[i]: t for i, t in zip(kept_indices, loop_results, strict=True)}
        for i, (r, t) in enumerate(zip(loop_results, outputs, strict=True)):
            yield r, t, i >= carries
        for (stack, t), r in zip(residuals, stacked_results[len(outputs) - carries :], strict=True):
            yield r, t, True
            self.unsharded[stack] = r
        lasts = list(zip(frame.carried, loop_op.results[carries : carries + len(nexts)], strict=True))
        if op.phase == "forward":
            self.frame.flats = [r for c, r in lasts if c.role == "flat"]
        self.frame.inputs = [r for c, r in lasts if c.role == "input"]


# -- gradient reduction ------------------------------------------------------------------------------------------------


class Reducing(Buffers):
    """Defers gradients until those of their unit can be reduced by one collective."""

    def __init__(self, requested: RequestedPlacements) -> None:
        super().__init__(requested)
        self.reduced: dict[Storage, Tensor] = {}
        """What remains of each gradient storage after reduction."""

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add an op with local sizes."""
        raise NotImplementedError

    def wait_for_grads(self, op: Op) -> bool:
        """Whether an op waits for gradients that are reduced with their unit."""
        frame = self.frame
        if op.results and op.results[0] in frame.casts:  # the gathered parameter has the format already
            self.tensors[op.results[0]] = self.tensors[op.operands[0]]
            return True
        waits = op.loop is None and any(t in frame.unreduced or t in frame.waiting for t in op.operands)
        if not waits or (op.phase == "optimizer" and not frame.layer):
            return False
        frame.waiting |= dict.fromkeys(op.results, op)
        return True

    def unfinished(self, t: Tensor) -> bool:
        """Whether an old tensor is a partial sum that ranks accumulate before they reduce it."""
        if self.requested.reduce_every_microbatch or self.policy is None or not self.policy.by_unit:
            return False
        return any(self._adds_to_parts(op) for op in t.graph.successors(t))

    def _adds_to_parts(self, op: Op) -> bool:
        """Whether an op accumulates into a partial sum."""
        t = op.operands[0] if adds(op) else None
        while t is not None and t not in self.tensors:
            t = t.producer.operands[0] if t.producer is not None and adds(t.producer) else None
        base = None if t is None else self.tensors[t]
        return isinstance(base, Tensor) and bool(self.placements[base].pending)

    def defer(self, t: Tensor) -> bool:
        """Defer a gradient's reduction to that of its unit; return False if that is impossible."""
        local = self.tensors[t]
        axes = self.reducible(local, self.grad_placements[t])
        if self.policy is None or not self.policy.by_unit or self.open_kernel is not None or not axes:
            return False
        self.frame.unreduced[t] = self._unit(t)
        return True

    def _unit(self, t: Tensor) -> str:
        """Return an old gradient's unit."""
        frame = self.frame
        if frame.split:
            op = t.producer
            # the sum is outside of layers, its terms are inside
            while op is not None and adds(op) and frame.unit_at(op) == "layer":
                op = op.operands[1].producer
            return "layer" if op is None else frame.unit_at(op)
        return "layer" if frame.layer else frame.owners.get(t, "")

    def reduce_before_cast(self, op: Op) -> bool:
        """Reduce a gradient in its computed format and cast afterwards; return False for other tensors."""
        t, grad = op.results[0], self.tensors.get(op.operands[0]) if op.operands else None
        policy = self.policy
        if policy is None or policy.param_dtype is None or self.open_kernel is not None or not isinstance(grad, Tensor):
            return False
        is_grad_cast = is_cast(op) and t in self.grad_placements and grad.dtype.name == policy.param_dtype
        if not is_grad_cast or self.unfinished(t) or not self.reducible(grad, self.grad_placements[t]):
            return False
        self.tensors[t] = grad
        return True

    def reducible(self, t: Tensor, want: Placement) -> tuple[str, ...]:
        """Return the mesh axes along which a partial sum is scattered into the gradient's shards."""
        pending = self.placements[t].pending
        return tuple(a for a in self.mesh if a in self.requested.gathered and a in pending and want.dim(a) is not None)

    def reduce(self, grads: Iterable[Tensor], new: Graph) -> None:
        """Reduce gradients, with one collective for those that can share it."""
        groups: dict[object, list[Tensor]] = {}
        grads = [*grads]
        # along axes that replicate the whole unit, all-reduce after the reduce-scatter: fewer bytes
        copied = {a for a in self.mesh if all(self._summed(t, a) for t in grads)}
        for t in grads:
            del self.frame.unreduced[t]
            want = self.grad_placements[t]
            axes = self.reducible(self.tensors[t], want)
            pending = tuple(p for p in self.placements[self.tensors[t]].partial if p[0] in {*axes, *copied})
            middle = Placement(want.without(axes, self.mesh).dims, pending)
            assert t.producer is not None
            self.tensors[t] = self.moved_to(self.tensors[t], middle, new, t.producer.phase)
            groups.setdefault((axes, pending, t.dtype, self.tensors[t].dtype), []).append(t)
        inputs = [self._reduce_together(members, new) for members in groups.values()]
        if self.policy is not None and self.policy.prefetch and (self.frame.split or not self.frame.layer):
            self.frame.inputs += inputs
        waiting = list(dict.fromkeys(self.frame.waiting.values()))
        for op in waiting:
            if not any(t in self.frame.unreduced or t in self.frame.waiting for t in op.operands):
                for t in op.results:
                    del self.frame.waiting[t]
                self.emit(op, new)

    def _summed(self, t: Tensor, axis: str) -> bool:
        """Whether a gradient is reduced over an axis and replicated along it."""
        return axis in self.placements[self.tensors[t]].pending and self.grad_placements[t].dim(axis) is None

    def _reduce_together(self, grads: Sequence[Tensor], new: Graph) -> Tensor:
        """Reduce gradients by one collective, and return its input buffer."""
        first, placements = self.tensors[grads[0]], [self.grad_placements[t] for t in grads]
        axes, pending = self.reducible(first, placements[0]), self.placements[first].pending
        assert grads[0].producer is not None
        assert self.policy is not None
        phase = grads[0].producer.phase
        rows = [
            in_rows(new, self.tensors[t], placement, axes, self.mesh, phase)
            for t, placement in zip(grads, placements, strict=True)
        ]
        parts, dtype = [row.sizes[-1] for row in rows], find_dtype(self.policy.reduce_dtype or first.dtype)
        unit = new.name if self.frame.layer and not self.frame.split else self._unit(grads[0]) or "root"
        name = f"{unit}.reduce_scatter"
        if self.policy.prefetch:
            rows[0] = self.before_input(rows[0], total(parts), dtype, new, phase)
        flat = buffer = joined(new, rows, dtype, f"{name}.copy_in", phase)
        if self.policy.prefetch and self.frame.layer and not self.frame.split:
            self.frame.carried[-1].next = flat
        for i, a in enumerate(axes):
            kind = Collective(collective="reduce_scatter", ranks=self.mesh[a], axis=a, dim=i, operation=pending[a])
            flat = add_op(new, kind, [flat], name, phase)
        for a in (a for a in pending if a not in axes):
            kind = Collective(collective="all_reduce", ranks=self.mesh[a], axis=a, operation=pending[a])
            flat = add_op(new, kind, [flat], f"{name}.all_reduce", phase)
        flat = cast_to(new, flat, grads[0].dtype, f"{name}.cast", phase)
        for t, placement, row in zip(grads, placements, pieces(new, flat, parts, name, phase), strict=True):
            sizes = placement.local(t.sizes)
            shard = from_rows(
                new, row, placement, sizes, axes, self.mesh, f"{t.name}.reduce_scatter", phase, full=False
            )
            self.tensors[t], self.placements[shard] = shard, placement
            self.reduced[t.storage] = shard
        return buffer


# -- FSDP --------------------------------------------------------------------------------------------------------------

#: Parameters that one collective can gather, with the mesh axes.
_Group = tuple[tuple[str, ...], list[Tensor]]


class ParamGroups(Reducing):
    """Unshards and reshards the units of each body while its ops are copied."""

    def __init__(self, requested: RequestedPlacements) -> None:
        super().__init__(requested)
        self.use_shards = False
        """Whether ops read sharded parameters, as views of shards do."""

    def plain(self, op: Op, new: Graph) -> None:
        """Add an op with local sizes."""
        raise NotImplementedError

    # -- bodies ------------------------------------------------------------------------------------------------------

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        """Copy ops, with units unsharded and resharded between them."""
        outer_frame, self.frame = self.frame, self._frame(old, new)
        if self.frame.layer and not self.frame.split:
            for unit in self.frame.units:
                self._unshard(unit, self._phase(old), old, new)
        super().fill(old, new, suffix)
        self.last_frame, self.frame = self.frame, outer_frame

    def close(self, old: Graph, new: Graph) -> None:
        """Reshard open units at the end of a body, and reduce the remaining gradients."""
        for unit in self.frame.units if self.frame.layer else ():
            self._reshard(unit, self._phase(old), new)
        for key in dict.fromkeys(self.frame.unreduced.values()):
            self.reduce([t for t, k in self.frame.unreduced.items() if k == key], new)
        if self.frame.split:
            self.carry_last_buffers(new, self._phase(old))
        if old.parent is None:  # gradients refer to shards
            self.tensors |= {t: self.frame.shards[t] for unit in self.frame.units for t in unit.members}

    @staticmethod
    def _phase(old: Graph) -> str:
        return "forward" if old.owner is None else window(old.owner) or "backward"

    def _frame(self, old: Graph, new: Graph) -> BodyGroups:
        frame = BodyGroups(loop_op=old.owner)
        if self.policy is None or not self.policy.by_unit:
            return frame
        if old.parent is None:
            params = [t for t in old.tensors if t.role == "param" and t.producer is None]
            for t in params:  # an op may read the root before its last parameter is declared
                self.tensors[t] = self.source(t, new, "")
            sharded = [t for t in params if self._along(self.tensors[t])]
            members = {t: unit_of(t.name, self.policy.units) for t in sharded if not t.storage.pieces}
        else:
            loop = old.owner.loop if old.owner is not None else None
            formals = [f for f in old.formals if isinstance(self.tensors.get(f), Tensor)]
            sharded = [f for f in formals if self._along(self.tensors[f])]
            if loop is None or (loop.op.phase == "optimizer" and not is_pass(loop.body)):
                return frame
            frame.layer = not is_pass(loop.body) and any(self.tensors.get(f) in self.params for f in loop.slices)
            names = {f: self.names[self.tensors[f]] for f in sharded if not self.tensors[f].storage.pieces}
            members = {f: "layer" if frame.layer else unit_of(name, self.policy.units) for f, name in names.items()}
            if frame.layer:
                members |= self._layers(names, old)
                frame.split = len({*members.values()}) > 1
        frame.note(old, members, self.policy.param_dtype)
        frame.shards = {t: self.tensors[t] for unit in frame.units for t in unit.members}
        self._need_casts(frame)
        frame.owners = self._owners(old, members)
        return frame

    @staticmethod
    def _layers(names: Mapping[Tensor, str], old: Graph) -> dict[Tensor, str]:
        """Return layers by parameter if an iteration has several, as when two kinds of layers alternate."""
        scopes = sorted(old.root.layers)
        layers = {t: next((s for s in scopes if name.startswith(f"{s}/")), "") for t, name in names.items()}
        layers = {t: scope for t, scope in layers.items() if scope}
        return layers if len({*layers.values()}) > 1 else {}

    @staticmethod
    def _owners(old: Graph, members: Mapping[Tensor, str]) -> dict[Tensor, str]:
        """Return the units of gradients, and their terms, that a graph or one iteration computes."""
        loop = old.owner.loop if old.owner is not None else None
        inner = {} if loop is None else dict(zip(loop.shared, loop.captured, strict=True))
        next_of_last = {} if loop is None else dict(zip(loop.lasts, loop.nexts, strict=True))
        of = {next_of_last.get(g, g): members.get(inner.get(t, t)) for t, g in old.root.gradients.items()}
        return targets(old, {g: unit for g, unit in of.items() if unit is not None})

    def _need_casts(self, frame: BodyGroups) -> None:
        """Raise an error if a pass reads a parameter without a cast to `param_dtype`."""
        dtype = None if self.policy is None else self.policy.param_dtype
        for t in (t for unit in frame.units for t in unit.members if dtype not in (None, t.dtype.name)):
            for op in t.graph.successors(t):
                if window(op) and not (op.results and op.results[0] in frame.casts) and t in reads(op):
                    raise FormatError(
                        f"shard: {op.name!r} reads {t.name!r} in {t.dtype.name}; expected it to be read only "
                        f"by casts to param_dtype={dtype!r}"
                    )

    def _along(self, shard: Tensor) -> frozenset[str]:
        """Return the mesh axes along which a shard is gathered."""
        return self.params.get(shard, frozenset()) & self.placements[shard].axes

    # -- ops ---------------------------------------------------------------------------------------------------------

    def before(self, op: Op, new: Graph) -> None:
        """Unshard units that an op is the first to read, and reduce gradients that it reads."""
        frame = self.frame
        while any(t in frame.unreduced or t in frame.waiting for t in op.operands):
            self.reduce([*frame.unreduced], new)
        if frame.layer and not frame.split:
            self._bind_members(op, new)
            return
        for unit, phase in list(frame.beginning(op)):
            self._unshard(unit, phase, op.graph, new)
        self._bind_members(op, new)
        if op.loop is not None and not frame.layer:
            self.release(new, op.phase)

    def _bind_members(self, op: Op, new: Graph) -> None:
        """Give an op the unsharded members and views of them; give an update the shards."""
        if isinstance(op.kind, KeepAlive):  # a gradient that is kept alive is its reduced shard
            self.tensors |= {t: self.reduced[t.storage] for t in op.operands[1:] if t.storage in self.reduced}
        for t in op.operands:
            unit = self.frame.by_storage.get(t.storage)
            if unit is None:
                continue
            unsharded = self.frame.unsharded.get(unit.key) if window(op) else None
            self.tensors[t] = self._member(t, self.frame.shards if unsharded is None else unsharded, new)

    def _member(self, t: Tensor, values: dict[Tensor, Tensor], new: Graph) -> Tensor:
        """Return the new tensor for a member, or for a view of one, which each pass creates anew."""
        if t in self.frame.casts:
            return self._member(self.frame.casts[t], values, new)
        if t not in values:
            assert t.producer is not None
            of = next(o for o in t.producer.operands if o.storage is t.storage)
            self.tensors[of] = self._member(of, values, new)
            if not isinstance(t.producer.kind, KeepAlive):
                previous, self.use_shards = self.use_shards, values is self.frame.shards
                self.plain(t.producer, new)
                self.use_shards = previous
            values[t] = self.tensors[of if isinstance(t.producer.kind, KeepAlive) else t]
        return values[t]

    def after(self, op: Op, new: Graph) -> None:
        """Reshard units that no further op of the pass reads."""
        frame = self.frame
        for t in op.results:  # views of members, and updated members
            if t.storage in frame.by_storage and t in self.tensors and t not in frame.casts:
                unsharded = frame.unsharded.get(frame.by_storage[t.storage].key) if window(op) else None
                (frame.shards if unsharded is None else unsharded)[t] = self.tensors[t]
        if frame.split or not frame.layer:
            for unit, phase in list(frame.ending(op)):
                self._reshard(unit, phase, new)
            if frame.end is op and not frame.layer:
                self.keep_alive(frame.flats, new, "forward")
                frame.flats = []

    # -- parameters --------------------------------------------------------------------------------------------------

    def _part(self, t: Tensor, phase: str) -> Tensor:
        """Return the part of a member that a rank has at the start of a pass."""
        return self.frame.kept_shards.get(t, self.frame.shards[t]) if phase == "backward" else self.frame.shards[t]

    def _format(self, t: Tensor) -> DType:
        """Return the format in which a member is gathered."""
        return next((c.dtype for c, of in self.frame.casts.items() if of is t), t.dtype)

    def _groups(self, unit: ParamGroup, phase: str) -> list[_Group]:
        """Group members that one collective can gather."""
        groups: dict[object, _Group] = {}
        for t in unit.members:
            shard = self._part(t, phase)
            axes = tuple(a for a in self.mesh if a in self._along(shard))
            groups.setdefault((axes, shard.dtype, self._format(t)), (axes, []))[1].append(t)
        return list(groups.values())

    def _unshard(self, unit: ParamGroup, phase: str, old: Graph, new: Graph) -> None:
        frame, policy = self.frame, self.policy
        assert policy is not None
        if unit.key not in frame.unsharded:
            self._all_gather(unit, phase, old, new)
        if policy.prefetch and phase == "backward" and frame.split:
            order = frame.ordered(phase, old)
            ahead = order[order.index(unit) + 1 :][:1]
            if not ahead:  # the first layer of the next iteration needs its own buffer
                for c in (c for c in frame.carried if c.role == "flat"):
                    kind = Empty(sizes=c.start.sizes, dtype=c.start.dtype)
                    c.next = add_op(new, kind, [], f"{c.start.name}.next", phase)
            elif ahead[0].key not in {*frame.unsharded, *frame.prefetched}:
                frame.prefetched[ahead[0].key] = self._buffers(ahead[0], phase, old, new)
        elif policy.prefetch and phase == "backward" and not frame.layer:
            following = frame.following(unit, old)
            if isinstance(following, Op):
                self._before_layers(following, new)
            elif following is not None and following.key not in {*frame.unsharded, *frame.prefetched}:
                frame.prefetched[following.key] = self._buffers(following, phase, old, new)

    def _all_gather(self, unit: ParamGroup, phase: str, old: Graph, new: Graph) -> None:
        """All-gather a unit, into prefetched buffers if there are any."""
        frame, policy = self.frame, self.policy
        assert policy is not None
        flats = frame.prefetched.pop(unit.key, None) or self._buffers(unit, phase, old, new)
        if policy.prefetch and phase == "forward":
            flats = self.after_last(flats, new, phase)
        unsharded: dict[Tensor, Tensor] = {}
        for (axes, members), flat in zip(self._groups(unit, phase), flats, strict=True):
            unsharded |= self._copied_out(members, axes, flat, new, phase)
        frame.unsharded[unit.key] = unsharded

    def _before_layers(self, op: Op, new: Graph) -> None:
        """Allocate the buffers of a loop's first layer before the loop, as it is the next unit."""
        loop, policy = op.loop, self.policy
        assert loop is not None
        assert policy is not None
        outer = {f: t for f, x in zip(loop.body.formals, op.operands, strict=True) if (t := self._shard_of(x))}
        slices = {*loop.slices}
        if is_pass(loop.body) or not slices & outer.keys():
            return
        frame = BodyGroups(loop_op=op, layer=True, shards=outer)
        layers = self._layers({f: self.names.get(t, t.name) for f, t in outer.items()}, loop.body)
        frame.note(loop.body, {**dict.fromkeys(outer, "layer"), **layers}, policy.param_dtype)
        outer_frame, self.frame = self.frame, frame
        for unit in frame.ordered("backward", loop.body)[:1]:
            for axes, members in self._groups(unit, "backward"):
                size = total(numel(outer[t].sizes[t in slices :]) for t in members)
                kind = Empty(sizes=(*(self.mesh[a] for a in axes), size), dtype=self._format(members[0]))
                self.preallocated[op, kind] = add_op(new, kind, [], f"{op.name}.flat", op.phase)
        self.frame = outer_frame

    def _shard_of(self, t: Tensor) -> Tensor | None:
        """Return the shard of a tensor that a loop gathers, None if it gathers nothing."""
        shard = self.tensors.get(t)
        shard = self.unsharded.get(shard, shard) if isinstance(shard, Tensor) and shard in self.params else None
        return shard if shard is not None and self._along(shard) else None

    def _buffers(self, unit: ParamGroup, phase: str, old: Graph, new: Graph) -> list[Tensor]:
        """All-gather members into buffers with a row for each rank."""
        frame, policy = self.frame, self.policy
        # prefetch: the next layer's buffer exists while one is computed, so an iteration receives the first one
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
            rows = [in_rows(new, t, self.placements[t], (), self.mesh, phase) for t in shards]
            shards = [joined(new, rows, dtype, f"{name}.cast", phase)]
        kind = Empty(sizes=sizes, dtype=dtype)
        buffer = self.add_carry("flat", kind, new) if over else add_op(new, kind, [], f"{name}.buffer", phase)
        flat = buffer
        for i, axis in enumerate(axes):
            flat = add_op(new, LocalShard(ranks=self.mesh[axis], axis=axis, dim=i), [flat], f"{name}.own", phase)
        flat = add_op(new, Pack(), [flat, *shards], f"{name}.copy_in", phase)
        for i, axis in reversed([*enumerate(axes)]):
            kind_of = Collective(collective="all_gather", ranks=self.mesh[axis], axis=axis, dim=i, inplace=True)
            flat = add_op(new, kind_of, [flat], name, phase)
        if over and not frame.split:
            frame.carried[-1].next = flat
        return flat

    def _copied_out(
        self, members: Sequence[Tensor], axes: Sequence[str], flat: Tensor, new: Graph, phase: str
    ) -> dict[Tensor, Tensor]:
        """Copy parameters out of an all-gather buffer."""
        shards = [self._part(t, phase) for t in members]
        rows = pieces(new, flat, [t.numel for t in shards], flat.name, phase)
        out = {}
        for t, shard, row in zip(members, shards, rows, strict=True):
            placement, name = self.placements[shard], f"{self.names.get(shard, shard.name)}.all_gather"
            full = from_rows(new, row, placement, shard.sizes, axes, self.mesh, name, phase, full=True)
            self.placements[full] = placement.without(axes, self.mesh)
            self.params[full] = self.params[shard]
            out[t] = full
        return out

    def _kept_part(self, t: Tensor, full: Tensor, axes: frozenset[str], new: Graph, phase: str) -> Tensor:
        """Return a copy of the part that a rank keeps between the passes."""
        placement = self.placements[self.frame.shards[t]]
        gathered_axes = self._along(self.frame.shards[t]) - axes
        part = self.moved_to(full, placement.without(gathered_axes, self.mesh), new, phase)
        return self.copied(part, new, f"{part.name}.copy", phase) if part.is_view else part

    def _reshard(self, unit: ParamGroup, phase: str, new: Graph) -> None:
        frame, policy = self.frame, self.policy
        assert policy is not None
        unsharded = frame.unsharded.get(unit.key)
        if unsharded is None:
            return
        between = policy.between(unit.key) & self.requested.gathered
        if phase == "forward" and not between:
            frame.residuals += ((t, unsharded[t]) for t in unit.members if frame.layer)
            return
        if phase == "forward" and between != self.requested.gathered:
            frame.kept_shards |= {t: self._kept_part(t, unsharded[t], between, new, phase) for t in unit.members}
            frame.residuals += ((t, frame.kept_shards[t]) for t in unit.members if frame.layer)
        self.keep_alive([unsharded[t] for t in unit.members], new, phase)
        del frame.unsharded[unit.key]
        self.tensors |= {t: frame.shards[t] for t in unit.members}
        self.reduce([t for t, key in frame.unreduced.items() if key == unit.key], new)
