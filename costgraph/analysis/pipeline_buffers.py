"""What a stage of a pipeline under torch keeps of tensors that it receives and sends, beside what its passes need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..algebra.extremum import smaller
from ..algebra.polynomial import ONE, ZERO, Poly, total
from ..ir.graph import Graph, Held, Loop, Op, Waiting
from ..ops.collectives import Receive, Send

__all__ = [
    "Handed",
]


class _Way(NamedTuple):
    """What goes one way between ranks: of each group of layers the same, but for one at an end of the model."""

    each: Poly
    """bytes of one group and micro-batch"""
    lacking: Poly
    """of that those that one group of the rank does not have: `each`, or nothing"""

    def of(self, groups: Poly, without: Poly) -> Poly:
        """Return the bytes of so many groups, of which some lack it."""
        return self.each * groups - self.lacking * without


class Handed:
    """Bytes of what torch's stages hand on, from the ops of one pass that receive and send.

    There are buffers for what each micro-batch receives, both ways, from the first step on
    (`torch.distributed.pipelining.stage`): what a pass keeps of these takes no room of its own. A rank where a folded
    pipeline turns puts what it hands to itself there. The result of a stage stays until its backward pass
    (`fwd_cache`), and what was sent until a schedule waits for it: 1F1B does behind the next pass, GPipe behind all
    passes of a direction, all others at the end of a step.
    """

    def __init__(self, passes: Loop, waiting: Waiting) -> None:
        self.waiting, self.count = waiting, passes.count
        ways = [_way(passes.body, kind, back, waiting.groups) for kind in (Receive, Send) for back in (False, True)]
        self.received, self.sent = ways[:2], ways[2:]
        if waiting.groups != ONE and not any(loop.body.ops[0].kind == Send() for loop in _loops(passes.body)):
            self.received = [way._replace(lacking=ZERO) for way in self.received]  # it hands on to itself
        layers = [loop for loop in _loops(passes.body) if loop.op.phase == "forward"]
        self.kept = any(f.storage in {t.storage for t in loop.saved} for loop in layers for f in loop.carries)

    @property
    def buffers(self) -> Poly:
        """Bytes of the buffers."""
        return self.count * total(way.of(self.waiting.groups, ONE) for way in self.received)

    def beside(self, held: Held, *, later: bool) -> Poly:
        """Return the bytes that are kept beside what passes need, less what of that lies in buffers.

        `held` is what waits while a pass runs, `later` whether it is the last time at which so much does: all forwards
        are done then, and all backwards but of what waits.
        """
        groups, schedule = self.waiting.groups, self.waiting.schedule
        waits, weights = held[0] + groups, held[1]
        first, last = (n if groups == ONE else smaller(n, waits) for n in self.waiting.ends)
        kept = self.sent[0].of(waits + weights, last + held[5])
        if later and schedule not in ("1f1b", "gpipe"):
            kept = self.sent[0].of(groups, ONE) * self.count
        if later and schedule != "1f1b":
            kept = kept + self.sent[1].of(groups, ONE) * self.count - self.sent[1].of(waits, first)
        return kept - self.received[0].of(waits + weights, first + held[3]) if self.kept else kept


def _way(body: Graph, kind: type, back: bool, groups: Poly) -> _Way:
    """Return what ops of a kind receive or send in a pass in one direction, between groups and at the ends."""
    ends = _bytes(body.ops, kind, back)
    between = [(n, loop.count) for loop in _loops(body) if (n := _bytes(loop.body.ops, kind, back))]
    each = total(n for n, _ in between) or ends
    return _Way(each, each * groups - total(n * count for n, count in between) - ends)


def _loops(body: Graph) -> list[Loop]:
    """Return the loops of a pass."""
    return [op.loop for op in body.ops if op.loop is not None]


def _bytes(ops: Iterable[Op], kind: type, back: bool) -> Poly:
    """Return the bytes of ops of a kind in one direction."""
    there = (op for op in ops if isinstance(op.kind, kind) and (op.phase != "forward") == back)
    return total((op.operands or op.results)[0].storage.bytes for op in there)
