"""Communication buffers of a pipeline stage under `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..algebra.extremum import smaller
from ..algebra.polynomial import ONE, ZERO, Poly, total
from ..ir.graph import Graph, Held, InFlightMicroBatches, Loop, Op
from ..ops.collectives import Receive, Send

__all__ = [
    "PipelineBuffers",
]


class _Direction(NamedTuple):
    """Bytes sent or received in one direction: equal per group of layers, except for a group at an end of the model."""

    each: Poly
    """bytes per group and micro-batch"""
    lacking: Poly
    """bytes missing for the rank's group at the end of the model: `each`, or zero"""

    def of(self, groups: Poly, without: Poly) -> Poly:
        """Return the bytes for `groups` layer groups, including `without` groups at an end of the model."""
        return self.each * groups - self.lacking * without


class PipelineBuffers:
    """Communication buffer bytes in torch's pipeline stages, derived from the send and receive ops in one pass.

    Each stage allocates receive buffers for every micro-batch, in both directions, before the first step
    (`torch.distributed.pipelining.stage`), so received tensors saved for the backward pass take no extra memory. In a
    folded pipeline, the rank at the turn passes tensors to itself through these buffers. The output of a stage stays
    in `fwd_cache` until its backward pass. Sent tensors stay until the schedule waits for the send: after the next
    pass in 1F1B, after all passes of a direction in GPipe, and at the end of the step in all other schedules.
    """

    def __init__(self, passes: Loop, waiting: InFlightMicroBatches) -> None:
        self.waiting, self.count = waiting, passes.count
        directions = [
            _direction(passes.body, kind, back, waiting.groups) for kind in (Receive, Send) for back in (False, True)
        ]
        self.received, self.sent = directions[:2], directions[2:]
        if waiting.groups != ONE and not any(loop.body.ops[0].kind == Send() for loop in _loops(passes.body)):
            self.received = [direction._replace(lacking=ZERO) for direction in self.received]  # receives from itself
        layers = [loop for loop in _loops(passes.body) if loop.op.phase == "forward"]
        self.kept = any(f.storage in {t.storage for t in loop.saved} for loop in layers for f in loop.carries)

    @property
    def buffers(self) -> Poly:
        """Receive buffer bytes."""
        return self.count * total(direction.of(self.waiting.groups, ONE) for direction in self.received)

    def extra_bytes(self, held: Held, *, later: bool) -> Poly:
        """Return the bytes kept in addition to the saved tensors, minus the saved tensors that lie in receive buffers.

        `held` counts the in-flight micro-batches during a pass. `later` is true for the last such peak, when all
        forward passes are done, and all backward passes except those in flight.
        """
        groups, schedule = self.waiting.groups, self.waiting.schedule
        waits, weights = held[0] + groups, held[1]
        first, last = (n if groups == ONE else smaller(n, waits) for n in self.waiting.ends)
        buffered = self.sent[0].of(waits + weights, last + held[5])
        if later and schedule not in ("1f1b", "gpipe"):
            buffered = self.sent[0].of(groups, ONE) * self.count
        if later and schedule != "1f1b":
            buffered = buffered + self.sent[1].of(groups, ONE) * self.count - self.sent[1].of(waits, first)
        return buffered - self.received[0].of(waits + weights, first + held[3]) if self.kept else buffered


def _direction(body: Graph, kind: type, back: bool, groups: Poly) -> _Direction:
    """Return the bytes that `kind` ops transfer in one direction of a pass, between groups and at the ends."""
    ends = _bytes(body.ops, kind, back)
    between = [(n, loop.count) for loop in _loops(body) if (n := _bytes(loop.body.ops, kind, back))]
    each = total(n for n, _ in between) or ends
    return _Direction(each, each * groups - total(n * count for n, count in between) - ends)


def _loops(body: Graph) -> list[Loop]:
    """Return the loops in a pass."""
    return [op.loop for op in body.ops if op.loop is not None]


def _bytes(ops: Iterable[Op], kind: type, back: bool) -> Poly:
    """Return the bytes that `kind` ops transfer in one direction."""
    transfers = (op for op in ops if isinstance(op.kind, kind) and (op.phase != "forward") == back)
    return total((op.operands or op.results)[0].storage.bytes for op in transfers)
