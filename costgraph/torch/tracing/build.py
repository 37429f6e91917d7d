"""From what was recorded to a graph: an op for each call, and storages that live as long as they did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...algebra.polynomial import ZERO, Poly
from ...graph.graph import Graph
from ...graph.scopes import opened
from ...graph.strides import contiguous
from ...graph.tensor import Tensor
from ...ops.aten import Aten, Output
from ...ops.keep import Keep
from .call import Counts
from .recorder import Death, Handle, Made, Source

__all__ = ["Builder"]


class Builder:
    """Adds recorded calls to a graph.

    Parameters
    ----------
    graph : Graph
        Empty.
    sources : mapping of int to Source
        Storages that are there before the first op, by number.
    """

    def __init__(self, graph: Graph, sources: Mapping[int, Source]) -> None:
        self.graph = graph
        self.tensors: dict[Handle, Tensor] = {}
        """The tensor that stands for a view now: an op in place makes a new one."""
        self.first: dict[int, Tensor] = {}
        """A tensor of each storage."""
        self.phase = "forward"
        self._clock = 0
        self._made = 0  # when something was made last
        self._read: dict[int, int] = {}  # when each storage was read last
        self._alive: dict[int, None] = {}
        self._held: list[int] = []
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
        self.first[number] = t
        self.tensors[_dense(t, number)] = t
        if whole:  # however its axes lie in memory: an order of elements that is no matter of costs
            self.tensors[h] = t

    def run(self, events: Sequence[Made | Death]) -> None:
        """Add all events in order."""
        for event in events:
            if isinstance(event, Death):
                self._died(event.storage)
            else:
                self.add(event)

    def finish(self) -> None:
        """Let what was never given back live to the end."""
        for number in list(self._alive):
            self._died(number)
        self._keep()

    def tensor(self, handle: Handle) -> Tensor:
        """Return the tensor for a view; one that nothing was seen to make is made from its storage."""
        found = self.tensors.get(handle)
        if found is None:
            base = self.first[handle.storage]
            arguments = ({"operand": 0}, handle.sizes, handle.strides, handle.offset)
            call = Made("as_strided.default", (), [], Counts(), False, arguments, {}, "", self.phase)
            (found,) = self._apply(call, [base], [(handle, 0, 0, None)])
        return found

    def add(self, call: Made) -> None:
        """Add one call."""
        made = [h.storage for h, of, _, _ in call.outputs if of is None]
        self._clock += 1
        if made:
            self._keep()
            self._made = self._clock
            self._alive |= dict.fromkeys(made)
        self.phase = call.phase
        operands = [self.tensor(h) for h in call.operands]
        self._apply(call, operands, call.outputs)
        self._read |= {h.storage: self._clock for h in call.operands}
        self._read |= dict.fromkeys(made, self._clock)

    def _apply(
        self, call: Made, operands: list[Tensor], outputs: list[tuple[Handle, int | None, int, Poly | None]]
    ) -> tuple[Tensor, ...]:
        c = call.counts
        nothing = (ZERO,) * len(operands) if not call.moves else None
        kind = Aten(
            target=call.target,
            arguments=call.arguments,
            keywords=call.keywords,
            places=tuple(place for _, _, place, _ in outputs),
            outputs=tuple(_stated(*row) for row in outputs),
            matmul=c.matmul,
            full=c.full,
            pointwise=c.pointwise,
            transcendental=c.transcendental,
            bytes_read=nothing if c.reads is None else tuple(c.reads),
            bytes_written=(ZERO,) * len(outputs) if not call.moves else None if c.writes is None else tuple(c.writes),
            workspace=c.workspace,
        )
        with opened(levels=tuple(call.scope.split("/")) if call.scope else (), phase=call.phase):
            op = self.graph.add_op(kind, operands, call.target.partition(".")[0] or "op")
        for (handle, of, _, bytes_), t in zip(outputs, op.results, strict=True):
            if bytes_ is None:
                self.tensors[handle] = t
            if of is None:
                self.first[handle.storage] = t
                self.tensors[_dense(t, handle.storage)] = t
        return op.results

    # -- lifetimes -----------------------------------------------------------------------------------------------

    def _died(self, number: int) -> None:
        """Note that a storage is given back here; it matters where something was made since its last reader."""
        if number in self._alive:
            del self._alive[number]
            if self._read[number] < self._made:
                self._held.append(number)

    def _keep(self) -> None:
        """Let the storages that were given back since the last op that made something live up to here."""
        if self._held:
            held, self._held = self._held, []
            self.graph.add_op(Keep(), [self.first[n] for n in held], "keep", self.phase)


def _dense(t: Tensor, number: int) -> Handle:
    return Handle(t.sizes, t.strides if t.producer is not None else contiguous(t.sizes), t.dtype, number, t.offset)


def _stated(handle: Handle, of: int | None, place: int, bytes_: Poly | None) -> Output:
    """Return what an op states of a result; a storage larger than its tensor is stated as one row of elements."""
    if bytes_ is not None:
        return ((bytes_ / handle.dtype.bytes,), handle.dtype, None, None, ZERO)
    return (handle.sizes, handle.dtype, handle.strides, of, handle.offset)
