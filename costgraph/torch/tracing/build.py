"""Build a graph from a recording: one op per call, and storages that live as long as in the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import networkx as nx

from ...algebra.dominance import lower
from ...algebra.polynomial import ONE, ZERO, Poly
from ...errors import UnsupportedError
from ...ir.graph import Call as Seen
from ...ir.graph import Graph, Op, Tensor, added_since, apply, opened
from ...ir.strides import Sizes, is_integral
from ...ops.access_footprint import larger
from ...ops.fill import SliceUpdate
from ...ops.keep_alive import KeepAlive, StopGradient
from ...ops.layout import Concat, reshape
from ...ops.opaque import Foreign, Output
from ...transforms.reroll import Join, LoopTrace
from .call import Call, Counts, Spec
from .recorder import Barrier, Event, FormatAssertion, Handle, JoinedTensor, LoopIteration, RecordedOp, Release, Source
from .rules.counts import counts_of
from .rules.workspaces import workspace_of
from .sizes import Translator
from .symbolic_range import Loops
from .template import ObservedResult, Template, template_of

__all__ = [
    "LoopLabels",
    "StorageSlice",
    "LastWrite",
    "part_of",
    "Builder",
]


# -- loop iterations ---------------------------------------------------------------------------------------------------


class LoopLabels:
    """Label ops with their loop iterations as they are added.

    `names` maps each storage to its current tensors; `settle` applies a pending slice write to one of them.
    """

    def __init__(
        self, graph: Graph, names: Mapping[int, Mapping[Handle, Tensor]], settle: Callable[[Handle], None]
    ) -> None:
        self.graph, self.names, self.settle = graph, names, settle
        self.turns = LoopTrace()
        self.written: set[int] = set()
        """storages written in the current iteration"""
        self._path: tuple[tuple[int, int], ...] = ()
        self._next: tuple[tuple[int, int], ...] = ()
        self._around: dict[int, Handle] = {}
        """first tensor of each storage that exists before the loops"""

    def begin(self, path: tuple[tuple[int, int], ...]) -> None:
        """Start another iteration, after applying the slice writes of the last one."""
        if self._path:
            for number in sorted(self.written):
                if number in self._around:
                    self.settle(self._around[number])
        elif path:
            self._around = {number: next(iter(names)) for number, names in self.names.items() if names}
        self.written.clear()
        self._next = path

    def label(self, before: int) -> None:
        """Assign the ops added since the graph had `before` nodes to the current iteration."""
        if self._path:
            self.turns.paths |= dict.fromkeys(added_since(self.graph, before), self._path)
        self._path = self._next

    def join(self, event: JoinedTensor, parts: Sequence[Tensor]) -> Tensor:
        """Add a placeholder for a join; it becomes a `Concat` once the iterations are folded into a loop."""
        graph, name = self.graph, f"joined.{len(self.turns.joins)}"
        whole = Tensor(graph, name, event.made.sizes, event.made.dtype, role="buffer")
        graph.add_node(whole)
        self.turns.joins[name] = Join(event.loop, Concat(axis=event.axis, stacked=event.stacked), event.back)
        return graph.add_op(KeepAlive(), [whole, *parts], "stack" if event.stacked else "cat", event.phase).results[0]

    def counted(self, counts: Loops, translator: Translator) -> LoopTrace:
        """Return the iterations of all loops, with their counts."""
        for number, loop in enumerate(counts.loops):
            self.turns.counts[number], self.turns.played[number] = translator.size(loop.count), loop.played
        return self.turns


# -- slices ------------------------------------------------------------------------------------------------------------
# Locate a written view within its tensor.

#: Axis, first position, step.
Place = tuple[int, Poly, int]


class LastWrite(NamedTuple):
    """The last write to a storage."""

    names: Mapping[Handle, Tensor]
    """tensors of the storage before the write"""
    part: Tensor
    earlier: LastWrite | None
    """the write before it"""
    unseen: bool = False
    """whether the write is invisible to autograd"""


class StorageSlice(NamedTuple):
    """A slice of a tensor."""

    places: Sequence[Place]
    """one per axis that it does not cover"""
    sizes: Sizes
    """its shape, including all axes of the tensor"""


def part_of(part: Tensor, whole: Tensor, names: Iterable[Tensor]) -> StorageSlice | None:
    """Return the slice of `whole` that `part` covers; None if it is no slice.

    A slice along several axes is found through intermediate views in `names`, as left by slicing one axis after
    another.
    """
    if not whole.ndim and not part.ndim:
        return StorageSlice([], ())
    found = _place_of(part, whole)
    if found is not None:
        return StorageSlice([found[0]], found[1])
    for name in names:
        own = _place_of(part, name) if name.ndim == whole.ndim and name.sizes != part.sizes else None
        rest = None if own is None else part_of(name, whole, names)
        if own is not None and rest is not None and own[0][0] not in [axis for axis, *_ in rest.places]:
            return StorageSlice([*rest.places, own[0]], own[1])
    return None


def _place_of(part: Tensor, whole: Tensor) -> tuple[Place, Sizes] | None:
    """Return the slice along the single axis where a view differs, and its shape with that axis; None otherwise."""
    known = whole.graph.root.relations
    for axis in range(whole.ndim) if part.dtype == whole.dtype else ():
        sizes, strides = list(part.sizes), list(part.strides)
        if part.ndim == whole.ndim - 1:
            sizes.insert(axis, ONE)
            strides.insert(axis, whole.strides[axis])
        if len(sizes) != whole.ndim or not whole.strides[axis]:
            continue
        others = [i for i in range(whole.ndim) if i != axis]
        alike = all(sizes[i] == whole.sizes[i] and (sizes[i] == ONE or strides[i] == whole.strides[i]) for i in others)
        step = 1 if sizes[axis] == ONE else (strides[axis] / whole.strides[axis]).constant
        start = (part.offset - whole.offset) / whole.strides[axis]
        if not alike or not isinstance(step, int) or not is_integral(start):
            continue
        bounds = [lower(n, known) for n in (start, whole.sizes[axis] - start - (sizes[axis] - 1) * step - 1)]
        # a view of a whole storage lies within it, even where its bounds cannot be proven
        if whole.region() == (whole.storage,) or all(n is not None and n >= 0 for n in bounds):
            return (axis, start, step), tuple(sizes)
    return None


# -- build -------------------------------------------------------------------------------------------------------------


class Builder:
    """Adds recorded events to an empty graph; `sources` are storages that exist before the first op, by number."""

    def __init__(self, graph: Graph, sources: Mapping[int, Source]) -> None:
        self.graph = graph
        self.tensors: defaultdict[int, dict[Handle, Tensor]] = defaultdict(dict)
        """Current tensor for each view, by storage; in-place ops create new ones."""
        self.first: dict[int, Tensor] = {}
        """A current tensor for each storage."""
        self.sources: dict[int, Tensor] = {}
        """Tensor of each storage that exists from the start."""
        self.phase = "forward"
        self.before: dict[int, LastWrite] = {}
        """Last write to each storage."""
        self._clock = 0
        self._made = 0  # time of the last allocation
        self._read: dict[int, int] = {}  # time of each storage's last read
        self._alive: dict[int, None] = {}
        self._held: list[int] = []
        self._one: dict[int, int] = {}
        """Storages split by a no-op cast that must be one, since one alias is written and another read."""
        self._templates: dict[Any, Template | None] = {}
        self.turns = LoopLabels(graph, self.tensors, self.settle)
        for number, source in sources.items():
            self._declare(number, source)

    def _declare(self, number: int, source: Source) -> None:
        h = source.handle
        whole = source.bytes == h.numel * h.dtype.bytes
        sizes = h.sizes if whole else (source.bytes / h.dtype.bytes,)
        declare = {"param": self.graph.param, "input": self.graph.input}.get(source.role)
        shape = [n.expr for n in sizes]
        if declare is not None:
            t = declare(source.name, shape, h.dtype, grad=source.grad)
        else:
            t = self.graph.buffer(source.name, shape, h.dtype, role=source.role)
        if whole:
            t.strides = h.strides
        self.first[number] = self.sources[number] = t
        self.tensors[number][_dense(t, number)] = t

    def run(self, events: Sequence[Event]) -> None:
        """Add all events in order."""
        self._one = _written_and_read(events)
        for event in events:
            before = len(self.graph)
            if isinstance(event, Release):
                self._died(event.storage)
            elif isinstance(event, LoopIteration):
                self.turns.begin(event.path)
            elif isinstance(event, JoinedTensor):
                self._joined(event)
            elif isinstance(event, FormatAssertion):
                self._asked(event)
            else:
                self.add(event)
            self.turns.label(before)

    def finish(self) -> None:
        """Keep storages that were never freed alive to the end."""
        for number in list(self._alive):
            self._died(number)
        self._keep()

    def tensor(self, handle: Handle) -> Tensor:
        """Return a view's tensor; a view without a producer becomes `as_strided` on its storage."""
        handle = self._named(handle)
        views = self.tensors[handle.storage]
        found = views.get(handle)
        if found is None:  # after a write, equal views have the same value
            found = next((t for h, t in views.items() if replace(h, view=handle.view) == handle), None)
        if found is None and handle.barrier is not None:
            return self._barrier(handle, handle.barrier)
        if found is None:
            found = self._revised(handle, self.before.get(handle.storage))
        if found is None:
            base = self.first[handle.storage]
            arguments = ({"operand": 0}, handle.sizes, handle.strides, handle.offset)
            call = RecordedOp("as_strided.default", (), [], Counts(), False, arguments, {}, "", self.phase, None, None)
            (found,) = self._foreign(call, [base], [(handle, 0, 0, None)])[1]
        return found

    def _barrier(self, handle: Handle, barrier: Barrier) -> Tensor:
        """Return a view that stops gradients, or states them, if a parameter or an input precedes it."""
        found = self.tensor(replace(handle, barrier=None))
        behind = {found, *nx.ancestors(self.graph, found)}
        sources = (t for t in behind if isinstance(t, Tensor) and t.role in ("param", "input"))
        from_source = any(t.dtype.kind in ("float", "complex") for t in sources)
        if not from_source if barrier.alone else from_source or barrier.leaf:
            with opened(graph=self.graph, levels=(), phase=self.phase):
                kind = KeepAlive(pulled_by=barrier.by, leaf=barrier.leaf) if barrier.by else StopGradient()
                (found,) = apply(kind, [found], "leaf" if barrier.leaf else barrier.by or "detach")
        self.tensors[handle.storage][handle] = found
        return found

    def _revised(self, handle: Handle, written: LastWrite | None) -> Tensor | None:
        """Return a tensor with pending slice writes applied; None if that is impossible."""
        whole = None if written is None else written.names.get(handle) or self._revised(handle, written.earlier)
        if written is None or whole is None or whole.apart(written.part):
            return whole
        part = part_of(written.part, whole, written.names.values())
        if part is None:
            return None
        with opened(graph=self.graph, levels=(), phase=self.phase):
            inner = written.part if written.part.sizes == part.sizes else reshape(written.part, part.sizes)
            axes, starts, steps = zip(*part.places, strict=True) if part.places else ((), (), ())
            kind = SliceUpdate(axes=axes, starts=starts, steps=steps, unseen=written.unseen)
            (found,) = apply(kind, [whole, inner], "revised")
        self.tensors[handle.storage][handle] = self.first[handle.storage] = found
        return found

    def settle(self, handle: Handle) -> None:
        """Apply pending slice writes to a tensor."""
        if handle not in self.tensors[handle.storage]:
            self._revised(handle, self.before.get(handle.storage))

    def _named(self, handle: Handle) -> Handle:
        """Return a view with the canonical number of its storage."""
        return replace(handle, storage=self._one[handle.storage]) if handle.storage in self._one else handle

    def add(self, call: RecordedOp) -> None:
        """Add one call."""
        made = [h.storage for h, of, _, _ in call.outputs if of is None]
        self._clock += 1
        if made:
            self._keep()
            self._made = self._clock
            self._alive |= dict.fromkeys(made)
        self.phase = call.phase
        operands = [self.tensor(h) for h in call.operands]
        read = self._apply(call, operands)
        self._read |= {call.operands[i].storage: self._clock for i in read}
        self._read |= dict.fromkeys(made, self._clock)

    def _asked(self, event: FormatAssertion) -> None:
        """Add a no-op cast as a view that states the format; a separate result becomes another name of its storage."""
        t, made, number = self.tensor(event.of), self._named(event.made), event.made.storage
        apart = made.storage == number != event.of.storage
        if event.fixed is not None and (apart or event.fixed):
            self._keep()
            with opened(levels=tuple(event.scope.split("/")) if event.scope else (), phase=event.phase):
                (t,) = self.graph.add_op(KeepAlive(asked=t.dtype, fixed=event.fixed), [t], "to").results
        self.tensors[made.storage][made] = t
        if apart or event.fixed:
            self.first[made.storage] = t
        if number != event.of.storage:
            self._clock += 1
            self._made = self._clock
            self._read |= {event.of.storage: self._clock, number: self._clock}
            self._alive[number] = None

    def _apply(self, call: RecordedOp, operands: list[Tensor]) -> Iterable[int]:
        """Add a call's declared ops, or one op with stated costs; return the operands that are read."""
        template = self._template(call, operands)
        with opened(levels=tuple(call.scope.split("/")) if call.scope else (), phase=call.phase):
            if template is None:
                self._foreign(call, operands, call.outputs)
                return range(len(operands))
            ops, results = template.add(self.graph, operands, call.name)
        for each in ops if call.no_grad else ():
            each.state(no_grad=True)
        op, numbers = ops[-1], {t.storage: self._named(h).storage for t, h in zip(operands, call.operands, strict=True)}
        for storage in (each.operands[i].storage for each in ops for i in each.kind.overwrites()):
            self._overwritten(numbers[storage], next(t for t in results if t.storage is storage), call.unseen)
        self._stand([(*row[:3], None) for row in call.outputs], results, call.unseen)
        places = {operands[i]: i for i in reversed(range(len(operands)))}
        given = tuple(operands.index(t) if t in places else -1 for t in op.operands)
        made = [(row, t) for row, t in zip(call.outputs, results, strict=True) if t not in places]
        if op.results == tuple(t for _, t in made):
            op.call = _seen(call, given, tuple(place for (_, _, place, _), _ in made))
        return template.operands

    def _template(self, call: RecordedOp, operands: list[Tensor]) -> Template | None:
        if call.translation is None or call.call is None:
            return None
        wanted = [
            ObservedResult(
                Spec(h.sizes, h.strides, h.dtype),
                of,
                h.offset - (ZERO if of is None else _start(operands[of], h)),
                place,
                ZERO if bytes_ is None else bytes_ - h.numel * h.dtype.bytes,
            )
            for h, of, place, bytes_ in call.outputs
        ]
        key = (
            call.target,
            _key((call.arguments, call.keywords)),
            tuple((t.sizes, t.strides, t.dtype) for t in operands),
            tuple(wanted),
            space := workspace_of(call.call) if call.counts is None else call.counts.workspace,
            whole := call.choice is not None,
        )
        if key not in self._templates:
            numbers = {h: i for i, h in enumerate(call.operands)}
            self._templates[key] = template_of(
                call.translation, call.call, numbers, operands, wanted, space, whole=whole
            )
        return self._templates[key]

    def _joined(self, event: JoinedTensor) -> None:
        """Add a join of per-iteration results."""
        operands = [self.tensor(replace(h, barrier=None)) for h in event.parts]
        self._clock += 1
        self._keep()
        self._made = self._clock
        self._alive[event.made.storage] = None
        with opened(levels=tuple(event.scope.split("/")) if event.scope else (), phase=event.phase):
            made = self.turns.join(event, operands)
        self._read |= {h.storage: self._clock for h in (*event.parts, event.made)}
        self._stand([(replace(event.made, barrier=None), None, 0, None)], [made])

    def _foreign(
        self, call: RecordedOp, operands: list[Tensor], outputs: list[tuple[Handle, int | None, int, Poly | None]]
    ) -> tuple[Op, tuple[Tensor, ...]]:
        """Add a `foreign` op, with stated shapes, layouts and costs."""
        c, reads, writes = call.counts, None, None
        if call.call is not None:
            try:
                c = counts_of(call.call, call.tags, self.graph.relations) if c is None else c
            except UnsupportedError as error:
                raise UnsupportedError(f"{call.line}: {error}") from error
            reads, writes = _matched(call.call, c, call.operands, [h for h, *_ in outputs])
        assert c is not None
        nothing = (ZERO,) * len(operands) if not call.moves else None
        kind = Foreign(
            outputs=tuple(_stated(*row) for row in outputs),
            matmul=c.matmul,
            full=c.full,
            pointwise=c.pointwise,
            transcendental=c.transcendental,
            bytes_read=nothing if reads is None else tuple(reads),
            bytes_written=(ZERO,) * len(outputs) if not call.moves else None if writes is None else tuple(writes),
            workspace=c.workspace,
        )
        op = self.graph.add_op(kind, operands, call.name, self.phase)
        places = tuple(place for _, _, place, _ in outputs)
        op.call = Seen(call.target, call.arguments, call.keywords, places, *_chosen(call))
        for (handle, of, *_), t in zip(outputs, op.results, strict=True):
            # other slices may be read later, or the gradient of the whole tensor still flows to its earlier value
            if of is not None and call.moves and (call.unseen or t.numel != t.storage.elements):
                self._overwritten(self._named(handle).storage, t, call.unseen)
        self._stand(outputs, op.results, call.unseen)
        return op, op.results

    def _stand(
        self, outputs: Sequence[tuple[Handle, int | None, int, Poly | None]], results: Sequence[Tensor],
        unseen: bool = False,
    ) -> None:  # fmt: skip
        """Register the tensors that stand for a call's outputs."""
        for (handle, of, _, bytes_), t in zip(outputs, results, strict=True):
            handle = self._named(handle)
            if unseen and handle.storage not in self.first and handle.storage in self.before:
                self.first[handle.storage] = t  # readers hold it by its earlier names
                continue
            if bytes_ is None:
                self.tensors[handle.storage][handle] = t
            if of is None or handle.storage not in self.first:
                self.first[handle.storage] = t
                self.tensors[handle.storage][_dense(t, handle.storage)] = t

    def _overwritten(self, storage: int, part: Tensor, unseen: bool = False) -> None:
        """Drop an overwritten storage's tensors: later reads derive from the write."""
        self.first.pop(storage, None)
        names, before = self.tensors.pop(storage, {}), self.before.get(storage)
        self.tensors[storage] = {h: t for h, t in names.items() if t.apart(part)}
        if before is not None and before.part.region() == part.region() and before.unseen == unseen:
            names, before = {**before.names, **names}, before.earlier
        self.before[storage] = LastWrite(names, part, before, unseen)
        self.turns.written.add(storage)

    # -- lifetimes -----------------------------------------------------------------------------------------------

    def _died(self, number: int) -> None:
        """Record that a storage is freed; it stays alive longer only if something was allocated since its last read."""
        if number in self._alive:
            del self._alive[number]
            if self._read[number] < self._made:
                self._held.append(number)

    def _keep(self) -> None:
        """Extend the lifetimes of storages freed since the last allocation."""
        if self._held:
            held, self._held = self._held, []
            self.graph.add_op(KeepAlive(), [self.first[self._one.get(n, n)] for n in held], "keep", self.phase)


def _written_and_read(events: Sequence[Event]) -> dict[int, int]:
    """Return the storages that a no-op cast must share with its operand, since one alias is written and another read.

    Elsewhere they stay separate: a real cast would leave the operand unchanged.
    """
    own: dict[int, int] = {}
    for event in events:
        if isinstance(event, FormatAssertion) and event.made.storage != event.of.storage:
            own[event.made.storage] = own.setdefault(event.of.storage, event.of.storage)
    written: dict[int, set[int]] = {}
    found = set[int]()
    for event in events if own else ():
        if isinstance(event, RecordedOp):
            for h in event.operands:
                if h.storage in own and written.get(own[h.storage], set()) - {h.storage}:
                    found.add(own[h.storage])
            for h, of, _, _ in event.outputs:
                if event.moves and of is not None and h.storage in own:
                    written.setdefault(own[h.storage], set()).add(h.storage)
    return {number: first for number, first in own.items() if first in found}


def _start(t: Tensor, handle: Handle) -> Poly:
    """Return a tensor's start in its storage, counted in the view's dtype."""
    return t.offset if t.dtype == handle.dtype else t.offset * t.dtype.bytes / handle.dtype.bytes


def _dense(t: Tensor, number: int) -> Handle:
    return Handle(t.sizes, t.strides, t.dtype, number, t.offset)


def _key(value: Any) -> Any:
    """Return arguments as a hashable key."""
    if isinstance(value, Mapping):
        return tuple((k, _key(v)) for k, v in value.items())
    return tuple(map(_key, value)) if isinstance(value, tuple) else (type(value), value)


def _matched(
    call: Call, counts: Counts, operands: Sequence[Handle], outputs: Sequence[Handle]
) -> tuple[Sequence[Poly] | None, Sequence[Poly] | None]:
    """Return the bytes of the graph's operands and results: repeated operands are merged, empty tensors dropped."""
    reads, writes = counts.reads, counts.writes
    if reads is not None:
        each: dict[Spec, Poly] = {}
        for spec, amount in zip(call.operands, reads, strict=True):
            each[spec] = larger(each[spec], amount) if spec in each else amount
        reads = tuple(each.get(h, ZERO) for h in operands)
    if writes is not None:
        made = dict(zip(call.results or outputs, writes, strict=True))
        writes = tuple(made.get(h, h.bytes) for h in outputs)
    return reads, writes


def _seen(call: RecordedOp, given: Sequence[int], results: tuple[int, ...]) -> Seen | None:
    """Return the call in terms of an op's operands; None if some are missing."""
    numbers = {place: i for i, place in reversed(list(enumerate(given)))}

    def numbered(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: numbers[v] if k == "operand" else numbered(v) for k, v in value.items()}
        return tuple(map(numbered, value)) if isinstance(value, tuple) else value

    try:
        arguments, keywords = numbered(call.arguments), numbered(call.keywords)
    except KeyError:
        return None
    return Seen(call.target, arguments, keywords, results, *_chosen(call))


def _chosen(call: RecordedOp) -> tuple[str, str]:
    return ("", "") if call.choice is None else (call.choice.rule, call.choice.why)


def _stated(handle: Handle, of: int | None, place: int, bytes_: Poly | None) -> Output:
    """Return a result in stated form; a storage larger than its tensor becomes a flat row."""
    if bytes_ is not None:
        return ((bytes_ / handle.dtype.bytes,), handle.dtype, None, None, ZERO)
    return (handle.sizes, handle.dtype, handle.strides, of, handle.offset)
