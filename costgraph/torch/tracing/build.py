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
from ...ir.graph import Call as GraphCall
from ...ir.graph import Graph, Op, Tensor, added_since, apply, opened
from ...ir.strides import Sizes, is_integral
from ...ops.access_footprint import larger
from ...ops.fill import SliceUpdate
from ...ops.layout import Concat, Expand, KeepAlive, StopGradient, reshape
from ...ops.opaque import CustomCall, Output
from ...transforms.reroll import Join, LoopTrace
from ...transforms.views import rebased, view_path, write_through
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
        self.loop_trace = LoopTrace()
        self.written: set[int] = set()
        """storages written in the current iteration"""
        self._path: tuple[tuple[int, int], ...] = ()
        self._next: tuple[tuple[int, int], ...] = ()
        self._before_loops: dict[int, Handle] = {}
        """first tensor of each storage that exists before the loops"""

    def begin(self, path: tuple[tuple[int, int], ...]) -> None:
        """Start another iteration, after applying the slice writes of the last one."""
        if self._path:
            for number in sorted(self.written):
                if number in self._before_loops:
                    self.settle(self._before_loops[number])
        elif path:
            self._before_loops = {number: next(iter(names)) for number, names in self.names.items() if names}
        self.written.clear()
        self._next = path

    def label(self, node_count: int) -> None:
        """Assign the ops added since the graph had `before` nodes to the current iteration."""
        if self._path:
            self.loop_trace.paths |= dict.fromkeys(added_since(self.graph, node_count), self._path)
        self._path = self._next

    def join(self, event: JoinedTensor, parts: Sequence[Tensor]) -> Tensor:
        """Add a placeholder for a join; it becomes a `Concat` once the iterations are folded into a loop."""
        graph, name = self.graph, f"joined.{len(self.loop_trace.joins)}"
        placeholder = Tensor(graph, name, event.result.sizes, event.result.dtype, role="buffer")
        graph.add_node(placeholder)
        self.loop_trace.joins[name] = Join(event.loop, Concat(axis=event.axis, stacked=event.stacked), event.reverse)
        return graph.add_op(
            KeepAlive(), [placeholder, *parts], "stack" if event.stacked else "cat", event.phase
        ).results[0]

    def counted(self, counts: Loops, translator: Translator) -> LoopTrace:
        """Return the iterations of all loops, with their counts."""
        for number, loop in enumerate(counts.loops):
            self.loop_trace.counts[number] = translator.size(loop.count)
            self.loop_trace.played[number] = loop.iterations
        return self.loop_trace


# -- slices ------------------------------------------------------------------------------------------------------------
# Locate a written view within its tensor.

#: Axis, first position, step.
AxisSlice = tuple[int, Poly, int]


class LastWrite(NamedTuple):
    """The last write to a storage."""

    tensors: Mapping[Handle, Tensor]
    """tensors of the storage before the write"""
    part: Tensor
    earlier: LastWrite | None
    """the write before it"""
    untracked: bool = False
    """whether the write is invisible to autograd"""


class StorageSlice(NamedTuple):
    """A slice of a tensor."""

    axis_slices: Sequence[AxisSlice]
    """one per axis that it does not cover"""
    sizes: Sizes
    """its shape, including all axes of the tensor"""


def part_of(part: Tensor, base: Tensor, views: Iterable[Tensor]) -> StorageSlice | None:
    """Return the slice of `base` that `part` covers; None if it is no slice.

    A slice along several axes is found through intermediate views in `views`, as left by slicing one axis after
    another.
    """
    if not base.ndim and not part.ndim:
        return StorageSlice([], ())
    single = _axis_slice_of(part, base)
    if single is not None:
        return StorageSlice([single[0]], single[1])
    for view in views:
        inner = _axis_slice_of(part, view) if view.ndim == base.ndim and view.sizes != part.sizes else None
        outer = None if inner is None else part_of(view, base, views)
        if inner is not None and outer is not None and inner[0][0] not in [axis for axis, *_ in outer.axis_slices]:
            return StorageSlice([*outer.axis_slices, inner[0]], inner[1])
    return None


def _axis_slice_of(part: Tensor, base: Tensor) -> tuple[AxisSlice, Sizes] | None:
    """Return the slice along the single axis where a view differs, and its shape with that axis; None otherwise."""
    relations = base.graph.root.relations
    for axis in range(base.ndim) if part.dtype == base.dtype else ():
        sizes, strides = list(part.sizes), list(part.strides)
        if part.ndim == base.ndim - 1:
            sizes.insert(axis, ONE)
            strides.insert(axis, base.strides[axis])
        if len(sizes) != base.ndim or not base.strides[axis]:
            continue
        others = [i for i in range(base.ndim) if i != axis]
        others_match = all(
            sizes[i] == base.sizes[i] and (sizes[i] == ONE or strides[i] == base.strides[i]) for i in others
        )
        step = 1 if sizes[axis] == ONE else (strides[axis] / base.strides[axis]).constant
        start = (part.offset - base.offset) / base.strides[axis]
        if not others_match or not isinstance(step, int) or not is_integral(start):
            continue
        bounds = [lower(n, relations) for n in (start, base.sizes[axis] - start - (sizes[axis] - 1) * step - 1)]
        # a view of a whole storage lies within it, even where its bounds cannot be proven
        if base.region() == (base.storage,) or all(n is not None and n >= 0 for n in bounds):
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
        self.last_writes: dict[int, LastWrite] = {}
        """Last write to each storage."""
        self._clock = 0
        self._last_allocation = 0  # time of the last allocation
        self._last_read: dict[int, int] = {}  # time of each storage's last read
        self._alive: dict[int, None] = {}
        self._to_extend: list[int] = []
        self._shared_storages: dict[int, int] = {}
        """Storages split by a no-op cast that must be one, since one alias is written and another read."""
        self._templates: dict[Any, Template | None] = {}
        self.loop_labels = LoopLabels(graph, self.tensors, self.settle)
        for number, source in sources.items():
            self._declare(number, source)

    def _declare(self, number: int, source: Source) -> None:
        handle = source.handle
        covers_storage = source.bytes == handle.numel * handle.dtype.bytes
        sizes = handle.sizes if covers_storage else (source.bytes / handle.dtype.bytes,)
        declare = {"param": self.graph.param, "input": self.graph.input}.get(source.role)
        shape = [n.expr for n in sizes]
        if declare is not None:
            t = declare(source.name, shape, handle.dtype, grad=source.grad)
        else:
            t = self.graph.buffer(source.name, shape, handle.dtype, role=source.role)
        if covers_storage:
            t.strides = handle.strides
        self.first[number] = self.sources[number] = t
        self.tensors[number][_handle_of(t, number)] = t

    def run(self, events: Sequence[Event]) -> None:
        """Add all events in order."""
        self._shared_storages = _shared_by_casts(events)
        for event in events:
            node_count = len(self.graph)
            if isinstance(event, Release):
                self._release(event.storage)
            elif isinstance(event, LoopIteration):
                self.loop_labels.begin(event.path)
            elif isinstance(event, JoinedTensor):
                self._add_join(event)
            elif isinstance(event, FormatAssertion):
                self._add_format_assertion(event)
            else:
                self.add(event)
            self.loop_labels.label(node_count)

    def finish(self) -> None:
        """Keep storages that were never freed alive to the end."""
        for number in list(self._alive):
            self._release(number)
        self._extend_lifetimes()

    def tensor(self, handle: Handle) -> Tensor:
        """Return a view's tensor; a view without a producer becomes `as_strided` on its storage."""
        handle = self._canonical(handle)
        views = self.tensors[handle.storage]
        view = views.get(handle)
        if view is None:  # after a write, equal views have the same value
            view = next((t for h, t in views.items() if replace(h, view=handle.view) == handle), None)
        if view is None and handle.barrier is not None:
            return self._barrier(handle, handle.barrier)
        if view is None:
            view = self._apply_slice_writes(handle, self.last_writes.get(handle.storage))
        if view is None:
            base = self.first[handle.storage]
            arguments = ({"operand": 0}, handle.sizes, handle.strides, handle.offset)
            call = RecordedOp("as_strided.default", (), [], Counts(), False, arguments, {}, "", self.phase, None, None)
            (view,) = self._custom_call(call, [base], [(handle, 0, 0, None)])[1]
        return view

    def _barrier(self, handle: Handle, barrier: Barrier) -> Tensor:
        """Return a view that stops gradients, or states them, if a parameter or an input precedes it."""
        tensor = self.tensor(replace(handle, barrier=None))
        ancestors = {tensor, *nx.ancestors(self.graph, tensor)}
        sources = (t for t in ancestors if isinstance(t, Tensor) and t.role in ("param", "input"))
        from_source = any(t.dtype.kind in ("float", "complex") for t in sources)
        if not from_source if barrier.alone else from_source or barrier.leaf:
            with opened(graph=self.graph, levels=(), phase=self.phase):
                kind = KeepAlive(custom_grad=barrier.by, leaf=barrier.leaf) if barrier.by else StopGradient()
                (tensor,) = apply(kind, [tensor], "leaf" if barrier.leaf else barrier.by or "detach")
        self.tensors[handle.storage][handle] = tensor
        return tensor

    def _apply_slice_writes(self, handle: Handle, write: LastWrite | None) -> Tensor | None:
        """Return a tensor with pending slice writes applied; None if that is impossible."""
        base = None if write is None else write.tensors.get(handle) or self._apply_slice_writes(handle, write.earlier)
        if write is None or base is None or base.apart(write.part):
            return base
        part = part_of(write.part, base, write.tensors.values())
        overwritten = write is not self.last_writes.get(handle.storage)
        if part is None or (overwritten and part.sizes != write.part.sizes):  # a reshape reads the written values
            return self._replayed(handle, base, write)
        with opened(graph=self.graph, levels=(), phase=self.phase):
            update = write.part if write.part.sizes == part.sizes else reshape(write.part, part.sizes)
            axes, starts, steps = zip(*part.axis_slices, strict=True) if part.axis_slices else ((), (), ())
            kind = SliceUpdate(axes=axes, starts=starts, steps=steps, untracked=write.untracked)
            (updated,) = apply(kind, [base, update], "slice_update")
        self.tensors[handle.storage][handle] = self.first[handle.storage] = updated
        return updated

    def _replayed(self, handle: Handle, view: Tensor, write: LastWrite) -> Tensor | None:
        """Return a view after the last write, if the written part is no slice of it; None if that is impossible."""
        found, written = view_path(view), view_path(write.part)
        if found is None or written is None or any(isinstance(op.kind, Expand) for op in written[1]):
            return None
        root_handle, views = _handle_of(found[0], handle.storage), self.tensors[handle.storage]
        last = self.last_writes[handle.storage]
        with opened(graph=self.graph, levels=(), phase=self.phase):
            if not found[1] and write is last:
                views[handle] = write_through(view, write.part, write.part, untracked=write.untracked)
                self.first[handle.storage] = views[handle]
            elif found[1] and handle != root_handle:
                root = views.get(root_handle) or self._apply_slice_writes(root_handle, last)
                if root is not None:
                    views[handle] = rebased(found[1], root)
        return views.get(handle)

    def _settle_base(self, storage: int) -> None:
        """Apply the last write to the base, before another one, unless a slice update can do so at any time."""
        write = self.last_writes.get(storage)
        found = None if write is None else view_path(write.part)
        if write is None or found is None:
            return
        handle = _handle_of(found[0], storage)
        base = None if handle in self.tensors[storage] else write.tensors.get(handle)
        part = None if base is None else part_of(write.part, base, ())
        if base is not None and (part is None or part.sizes != write.part.sizes):
            self._apply_slice_writes(handle, write)

    def settle(self, handle: Handle) -> None:
        """Apply pending slice writes to a tensor."""
        if handle not in self.tensors[handle.storage]:
            self._apply_slice_writes(handle, self.last_writes.get(handle.storage))

    def _canonical(self, handle: Handle) -> Handle:
        """Return a view with the canonical number of its storage."""
        return (
            replace(handle, storage=self._shared_storages[handle.storage])
            if handle.storage in self._shared_storages
            else handle
        )

    def add(self, call: RecordedOp) -> None:
        """Add one call."""
        allocated = [h.storage for h, of, _, _ in call.outputs if of is None]
        self._clock += 1
        if allocated:
            self._extend_lifetimes()
            self._last_allocation = self._clock
            self._alive |= dict.fromkeys(allocated)
        self.phase = call.phase
        if call.moves:
            for storage in {self._canonical(h).storage for h, of, _, _ in call.outputs if of is not None}:
                self._settle_base(storage)
        operands = [self.tensor(h) for h in call.operands]
        read = self._apply(call, operands)
        self._last_read |= {call.operands[i].storage: self._clock for i in read}
        self._last_read |= dict.fromkeys(allocated, self._clock)

    def _add_format_assertion(self, event: FormatAssertion) -> None:
        """Add a no-op cast as a view that states the format; a separate result becomes another name of its storage."""
        t, result, result_storage = self.tensor(event.operand), self._canonical(event.result), event.result.storage
        separate = result.storage == result_storage != event.operand.storage
        if event.fixed is not None and (separate or event.fixed):
            self._extend_lifetimes()
            with opened(levels=tuple(event.scope.split("/")) if event.scope else (), phase=event.phase):
                (t,) = self.graph.add_op(KeepAlive(requested_dtype=t.dtype, fixed=event.fixed), [t], "to").results
        self.tensors[result.storage][result] = t
        if separate or event.fixed:
            self.first[result.storage] = t
        if result_storage != event.operand.storage:
            self._clock += 1
            self._last_allocation = self._clock
            self._last_read |= {event.operand.storage: self._clock, result_storage: self._clock}
            self._alive[result_storage] = None

    def _apply(self, call: RecordedOp, operands: list[Tensor]) -> Iterable[int]:
        """Add a call's declared ops, or one op with stated costs; return the operands that are read."""
        template = self._template(call, operands)
        with opened(levels=tuple(call.scope.split("/")) if call.scope else (), phase=call.phase):
            if template is None:
                self._custom_call(call, operands, call.outputs)
                return range(len(operands))
            ops, results = template.add(self.graph, operands, call.name)
        for inner in ops if call.no_grad else ():
            inner.state(no_grad=True)
        op = ops[-1]
        numbers = {t.storage: self._canonical(h).storage for t, h in zip(operands, call.operands, strict=True)}
        for storage in (inner.operands[i].storage for inner in ops for i in inner.kind.overwrites()):
            self._overwritten(numbers[storage], next(t for t in results if t.storage is storage), call.untracked)
        self._register([(*row[:3], None) for row in call.outputs], results, call.untracked)
        indices = {operands[i]: i for i in reversed(range(len(operands)))}
        operand_indices = tuple(operands.index(t) if t in indices else -1 for t in op.operands)
        new_results = [(row, t) for row, t in zip(call.outputs, results, strict=True) if t not in indices]
        if op.results == tuple(t for _, t in new_results):
            op.call = _graph_call(call, operand_indices, tuple(index for (_, _, index, _), _ in new_results))
        return template.operands

    def _template(self, call: RecordedOp, operands: list[Tensor]) -> Template | None:
        if call.translation is None or call.call is None:
            return None
        observed = [
            ObservedResult(
                Spec(h.sizes, h.strides, h.dtype),
                of,
                h.offset - (ZERO if of is None else _offset_in_view_dtype(operands[of], h)),
                index,
                ZERO if bytes_ is None else bytes_ - h.numel * h.dtype.bytes,
            )
            for h, of, index, bytes_ in call.outputs
        ]
        key = (
            call.target,
            _key((call.arguments, call.keywords)),
            tuple((t.sizes, t.strides, t.dtype) for t in operands),
            tuple(observed),
            workspace := workspace_of(call.call) if call.counts is None else call.counts.workspace,
            one_kernel := call.choice is not None,
        )
        if key not in self._templates:
            numbers = {h: i for i, h in enumerate(call.operands)}
            self._templates[key] = template_of(
                call.translation, call.call, numbers, operands, observed, workspace, one_kernel=one_kernel
            )
        return self._templates[key]

    def _add_join(self, event: JoinedTensor) -> None:
        """Add a join of per-iteration results."""
        operands = [self.tensor(replace(h, barrier=None)) for h in event.parts]
        self._clock += 1
        self._extend_lifetimes()
        self._last_allocation = self._clock
        self._alive[event.result.storage] = None
        with opened(levels=tuple(event.scope.split("/")) if event.scope else (), phase=event.phase):
            result = self.loop_labels.join(event, operands)
        self._last_read |= {h.storage: self._clock for h in (*event.parts, event.result)}
        self._register([(replace(event.result, barrier=None), None, 0, None)], [result])

    def _custom_call(
        self, call: RecordedOp, operands: list[Tensor], outputs: list[tuple[Handle, int | None, int, Poly | None]]
    ) -> tuple[Op, tuple[Tensor, ...]]:
        """Add a `custom_call` op, with stated shapes, layouts and costs."""
        counts, reads, writes = call.counts, None, None
        if call.call is not None:
            try:
                counts = counts_of(call.call, call.tags, self.graph.relations) if counts is None else counts
            except UnsupportedError as error:
                raise UnsupportedError(f"{call.line}: {error}") from error
            reads, writes = _bytes_of_graph_tensors(call.call, counts, call.operands, [h for h, *_ in outputs])
        assert counts is not None
        no_bytes = (ZERO,) * len(operands) if not call.moves else None
        kind = CustomCall(
            outputs=tuple(_output_of(*row) for row in outputs),
            matmul=counts.matmul,
            full=counts.full,
            pointwise=counts.pointwise,
            transcendental=counts.transcendental,
            bytes_read=no_bytes if reads is None else tuple(reads),
            bytes_written=(ZERO,) * len(outputs) if not call.moves else None if writes is None else tuple(writes),
            workspace=counts.workspace,
        )
        op = self.graph.add_op(kind, operands, call.name, self.phase)
        result_indices = tuple(index for _, _, index, _ in outputs)
        op.call = GraphCall(call.target, call.arguments, call.keywords, result_indices, *_choice_of(call))
        for (handle, of, *_), t in zip(outputs, op.results, strict=True):
            # other slices may be read later, or the gradient of the whole tensor still flows to its earlier value
            if of is not None and call.moves and (call.untracked or t.numel != t.storage.elements):
                self._overwritten(self._canonical(handle).storage, t, call.untracked)
        self._register(outputs, op.results, call.untracked)
        return op, op.results

    def _register(
        self, outputs: Sequence[tuple[Handle, int | None, int, Poly | None]], results: Sequence[Tensor],
        untracked: bool = False,
    ) -> None:  # fmt: skip
        """Register the tensors that stand for a call's outputs."""
        for (handle, of, _, bytes_), t in zip(outputs, results, strict=True):
            handle = self._canonical(handle)
            if untracked and handle.storage not in self.first and handle.storage in self.last_writes:
                self.first[handle.storage] = t  # readers hold it by its earlier names
                continue
            if bytes_ is None:
                self.tensors[handle.storage][handle] = t
            if of is None or handle.storage not in self.first:
                self.first[handle.storage] = t
                self.tensors[handle.storage][_handle_of(t, handle.storage)] = t

    def _overwritten(self, storage: int, part: Tensor, untracked: bool = False) -> None:
        """Drop an overwritten storage's tensors: later reads derive from the write."""
        self.first.pop(storage, None)
        tensors, previous = self.tensors.pop(storage, {}), self.last_writes.get(storage)
        self.tensors[storage] = {h: t for h, t in tensors.items() if t.apart(part)}
        if previous is not None and previous.part.region() == part.region() and previous.untracked == untracked:
            tensors, previous = {**previous.tensors, **tensors}, previous.earlier
        self.last_writes[storage] = LastWrite(tensors, part, previous, untracked)
        self.loop_labels.written.add(storage)

    # -- lifetimes -----------------------------------------------------------------------------------------------

    def _release(self, number: int) -> None:
        """Record that a storage is freed; it stays alive longer only if something was allocated since its last read."""
        if number in self._alive:
            del self._alive[number]
            if self._last_read[number] < self._last_allocation:
                self._to_extend.append(number)

    def _extend_lifetimes(self) -> None:
        """Extend the lifetimes of storages freed since the last allocation."""
        if self._to_extend:
            storages, self._to_extend = self._to_extend, []
            self.graph.add_op(
                KeepAlive(), [self.first[self._shared_storages.get(n, n)] for n in storages], "keep_alive", self.phase
            )


def _shared_by_casts(events: Sequence[Event]) -> dict[int, int]:
    """Return the storages that a no-op cast must share with its operand, since one alias is written and another read.

    Elsewhere they stay separate: a real cast would leave the operand unchanged.
    """
    first_storage: dict[int, int] = {}
    for event in events:
        if isinstance(event, FormatAssertion) and event.result.storage != event.operand.storage:
            first_storage[event.result.storage] = first_storage.setdefault(event.operand.storage, event.operand.storage)
    written: dict[int, set[int]] = {}
    shared = set[int]()
    for event in events if first_storage else ():
        if isinstance(event, RecordedOp):
            for h in event.operands:
                if h.storage in first_storage and written.get(first_storage[h.storage], set()) - {h.storage}:
                    shared.add(first_storage[h.storage])
            for h, of, _, _ in event.outputs:
                if event.moves and of is not None and h.storage in first_storage:
                    written.setdefault(first_storage[h.storage], set()).add(h.storage)
    return {number: first for number, first in first_storage.items() if first in shared}


def _offset_in_view_dtype(t: Tensor, handle: Handle) -> Poly:
    """Return a tensor's start in its storage, counted in the view's dtype."""
    return t.offset if t.dtype == handle.dtype else t.offset * t.dtype.bytes / handle.dtype.bytes


def _handle_of(t: Tensor, number: int) -> Handle:
    return Handle(t.sizes, t.strides, t.dtype, number, t.offset)


def _key(value: Any) -> Any:
    """Return arguments as a hashable key."""
    if isinstance(value, Mapping):
        return tuple((k, _key(v)) for k, v in value.items())
    return tuple(map(_key, value)) if isinstance(value, tuple) else (type(value), value)


def _bytes_of_graph_tensors(
    call: Call, counts: Counts, operands: Sequence[Handle], outputs: Sequence[Handle]
) -> tuple[Sequence[Poly] | None, Sequence[Poly] | None]:
    """Return the bytes of the graph's operands and results: repeated operands are merged, empty tensors dropped."""
    reads, writes = counts.reads, counts.writes
    if reads is not None:
        bytes_by_spec: dict[Spec, Poly] = {}
        for spec, amount in zip(call.operands, reads, strict=True):
            bytes_by_spec[spec] = larger(bytes_by_spec[spec], amount) if spec in bytes_by_spec else amount
        reads = tuple(bytes_by_spec.get(h, ZERO) for h in operands)
    if writes is not None:
        bytes_by_result = dict(zip(call.results or outputs, writes, strict=True))
        writes = tuple(bytes_by_result.get(h, h.bytes) for h in outputs)
    return reads, writes


def _graph_call(call: RecordedOp, operand_indices: Sequence[int], results: tuple[int, ...]) -> GraphCall | None:
    """Return the call in terms of an op's operands; None if some are missing."""
    positions = {index: i for i, index in reversed(list(enumerate(operand_indices)))}

    def numbered(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: positions[v] if k == "operand" else numbered(v) for k, v in value.items()}
        return tuple(map(numbered, value)) if isinstance(value, tuple) else value

    try:
        arguments, keywords = numbered(call.arguments), numbered(call.keywords)
    except KeyError:
        return None
    return GraphCall(call.target, arguments, keywords, results, *_choice_of(call))


def _choice_of(call: RecordedOp) -> tuple[str, str]:
    return ("", "") if call.choice is None else (call.choice.rule, call.choice.why)


def _output_of(handle: Handle, of: int | None, index: int, bytes_: Poly | None) -> Output:
    """Return a result in stated form; a storage larger than its tensor becomes a flat row."""
    if bytes_ is not None:
        return ((bytes_ / handle.dtype.bytes,), handle.dtype, None, None, ZERO)
    return (handle.sizes, handle.dtype, handle.strides, of, handle.offset)
