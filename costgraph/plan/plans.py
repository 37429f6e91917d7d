"""Plans of training on several devices, as a table: the fastest first, each with what it takes and why it is slower."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..algebra.symbols import shorten
from ..hardware.specs import Hardware
from ..hardware.tables import Column, Fact, Table
from ..hardware.units import format_quantity
from ..notation.door import guarded
from .structures import Family

__all__ = ["TIE", "Plan", "Search"]

#: Times of steps that differ by less are a tie: no prediction is as exact.
TIE = 0.01

#: What has a column where plans differ in it.
_CHOICES = ("schedule", "virtual", "precision", "offload")


@guarded()
@dataclass(frozen=True)
class Plan:
    """One way to train on several devices."""

    dp: int
    """ranks that have a part of the batch each"""
    tp: int
    """ranks that have a part of each layer each"""
    pp: int
    """stages of a pipeline"""
    cp: int
    """ranks that have a part of the sequence each"""
    ep: int
    """ranks that have a part of the experts each, and of the batch"""
    zero: int
    """stage of ZeRO, as in `parallelize`"""
    sequence: bool
    """whether what layers hand on is split along the sequence, over `tp`"""
    micro_batch: int
    """samples that a rank works on at once"""
    accumulate: int
    """micro-batches of a step"""
    checkpoint: str
    """what is computed again, as on the command line: none, every-block and the like"""
    schedule: str
    """of the pipeline, nothing where there is none"""
    virtual: int
    """groups of layers of a rank"""
    precision: str
    """name of the policy"""
    offload: tuple[str, ...]
    """what lies on the host"""
    seconds: float
    """estimated seconds of a step"""
    throughput: float
    """tokens or samples in a second, of all devices: `unit` of the search says which"""
    memory: int
    """bytes of a device at the peak, of the stage that needs the most"""
    parts: Mapping[str, float]
    """seconds by what they go into, one after the other: compute, memory traffic beyond it, each collective; of the
    slowest stage of a pipeline, with what it sends and the time that it is idle"""
    stages: tuple[int, ...] = ()
    """bytes of the first, a middle and the last stage; one where there is no pipeline, two where it has no middle"""
    why: str = ""
    """which part of the time is longer than that of the plan before it, and by how much; nothing where it is faster, as
    of a tie"""

    @property
    def bound(self) -> str:
        """What most of the time goes into: compute, memory traffic, or a collective over an axis."""
        return max(self.parts, key=lambda name: self.parts[name])


@guarded()
@dataclass(frozen=True, repr=False)
class Search(Table):
    """Plans that fit, the fastest first; of a tie, fewer stages of a pipeline. Made by `search`."""

    graph: str
    """name of the model"""
    hardware: Hardware
    """the devices"""
    devices: int
    """how many there are"""
    limit: float
    """bytes that a plan may take on each"""
    rows: tuple[Plan, ...]
    """by time, then by memory; of those up to 1 % behind the fastest that is left, fewer stages of a pipeline first"""
    tried: int
    """plans that divide the devices and the batch, those that the model refuses or that do not fit included"""
    notes: tuple[str, ...] = ()
    """what the network has no links for, and structures whose formulas hold for single degrees alone, each with why"""
    unit: str = "tokens"
    """what a step goes over, and its throughput is of: tokens or samples"""
    family: Family | None = field(default=None, compare=False)
    """what was searched, for further questions"""
    policies: str = ""
    """whose policies all plans follow, in words"""

    @property
    def best(self) -> Plan | None:
        """The first plan: the fastest, or one of fewer stages that is up to 1 % behind it. None where none fits."""
        return self.rows[0] if self.rows else None

    def pareto(self) -> Search:
        """Return the plans beside which no other is both as fast and as small, where a tie is as fast.

        Returns
        -------
        Search
            From the best to the smallest: each takes less memory than all before it.
        """
        kept: list[Plan] = []
        for plan in self.rows:
            if not kept or plan.memory < kept[-1].memory:
                kept.append(plan)
        return replace(self, rows=explained(kept))

    def _about(self) -> str:
        return f"{shorten(self.graph)} on {self.devices:,} {self.hardware.id}, {len(self.rows):,} plans"

    def _columns(self) -> Sequence[Column]:
        return (
            *(Column(d, "1") for d in ("dp", "tp", "pp", "cp", "ep") if d in ("dp", "tp") or self._varies(d)),
            Column("zero", "1"),
            Column("sequence", title="seq", text=lambda split: "yes" if split else ""),
            Column("micro_batch", "1", title="micro"), Column("accumulate", "1", title="times"),
            Column("checkpoint"),
            *(Column(name, text=_joined) for name in _CHOICES if self._several(name)),
            Column("seconds", "s", title="step"), Column("throughput", "1",
            title=f"{self.unit}/s"), Column("memory", "B", title="peak memory"), Column("bound", title="bound by"),
            Column("why", title="slower by"),
        )  # fmt: skip

    def _varies(self, degree: str) -> bool:
        return any(getattr(plan, degree) != 1 for plan in self.rows)

    def _several(self, name: str) -> bool:
        values = {getattr(plan, name) for plan in self.rows if name != "schedule" or plan.pp > 1}
        return len(values) > 1 or (name == "offload" and any(values))

    def _facts(self) -> Iterable[Fact]:
        yield Fact("fit", f"{len(self.rows):,} of {self.tried:,} plans")
        yield from (Fact("note", text) for text in (*self.notes[:3], self.policies) if text)


def _joined(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def ordered(plans: Iterable[Plan]) -> list[Plan]:
    """Return plans as a search has them: by time, and of a tie those first whose time rests on less, as of one stage.

    A tie is of all that are no more than 1 % behind the fastest that is left.
    """
    out, tie = list[Plan](), list[Plan]()
    for plan in sorted(plans, key=_order):
        if tie and plan.seconds > tie[0].seconds * (1 + TIE):
            out += sorted(tie, key=lambda p: p.pp)
            tie = []
        tie.append(plan)
    return out + sorted(tie, key=lambda p: p.pp)


def _order(plan: Plan) -> tuple[Any, ...]:
    degrees = plan.pp, plan.tp, plan.cp, plan.ep
    names = plan.schedule, plan.virtual, plan.precision, plan.offload
    return plan.seconds, plan.memory, plan.zero, *degrees, plan.sequence, plan.micro_batch, plan.checkpoint, *names


def explained(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return plans, each with what makes it slower than the one before it."""
    return tuple(replace(p, why=_longer(plans[i - 1], p) if i else "") for i, p in enumerate(plans))


def _longer(before: Plan, plan: Plan) -> str:
    grown = {name: seconds - before.parts.get(name, 0.0) for name, seconds in plan.parts.items()}
    name = max(grown, key=lambda n: grown[n])
    return f"{format_quantity(grown[name], 's')} {name}" if grown[name] > 0 and plan.seconds > before.seconds else ""
