"""What a measured time follows: the bytes at the measured bandwidth, the FLOPs at the measured peak, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from ...analysis.work import exact, works
from ...bind.evaluate import real
from ...graph.graph import Graph
from ...graph.sizes import bindings
from ...hardware.specs import Hardware

__all__ = ["FOLLOWS", "OUTCOMES", "Attained", "agrees", "outcome"]

FOLLOWS = 2.0
"""A time follows another one that is at most so many times as long, or as short."""

OUTCOMES = ("memory", "compute", "both", "overhead", "faster")
"""What bounds an op by its measured time; `both` near the ridge point."""


def outcome(seconds: float, memory: float, compute: float) -> str:
    """Say what a time, the fastest run, follows: its bytes at the measured bandwidth, or its FLOPs at the rate.

    memory or compute where the time is within a factor `FOLLOWS` of that one alone, both where it is of both; overhead
    where it is longer than either by more than that: launches, memory that has to be fetched from the system, a rate
    that this op does not reach; faster where it is shorter than the longer of them, as where operands come from a
    cache.

    Examples
    --------
    >>> outcome(1.2e-3, memory=1e-3, compute=1e-4), outcome(1.2e-3, memory=1e-3, compute=2e-3)
    ('memory', 'both')
    >>> outcome(1e-5, memory=1e-6, compute=1e-6), outcome(1e-4, memory=1e-3, compute=1e-5)
    ('overhead', 'faster')
    """
    near = [name for name, s in (("memory", memory), ("compute", compute)) if _near(seconds, s)]
    if near:
        return near[0] if len(near) == 1 else "both"
    return "overhead" if seconds > max(memory, compute) else "faster"


def _near(a: float, b: float) -> bool:
    return a <= FOLLOWS * b and b <= FOLLOWS * a


def agrees(bound: str, found: str) -> bool | None:
    """Say whether what a roofline predicts is what was measured; None where overhead hides it, or it was faster.

    Examples
    --------
    >>> agrees("memory", "memory"), agrees("compute", "memory"), agrees("memory", "overhead")
    (True, False, None)
    """
    return None if found in ("overhead", "faster") else found in (bound, "both")


@dataclass(frozen=True)
class Attained:
    """Times of a graph at measured rates."""

    memory: float
    """bytes moved, as declared, at the measured bandwidth; s"""
    compute: float
    """FLOPs at the measured peaks; s"""

    @classmethod
    def of(cls, graph: Graph, hardware: Hardware, fallback: Mapping[str, str], sizes: Mapping[str, int]) -> Attained:
        """Return the times on a device, with the rates that it attains where they were measured.

        Transcendentals run at the rate of the fastest of them that was measured, where one was: the vector unit's peak
        is one of fused multiply-adds. `fallback` has rates that stand in for those of formats that are missing.
        """
        values, memory, compute = bindings(graph, dict(sizes)), Fraction(0), Fraction(0)
        for work in works(graph):
            memory += exact(work.bytes.bind(values)) / Fraction(hardware.bandwidth.value)
            for (kind, dtype), amount in work.flops.items():
                compute += exact(amount.bind(values)) / _rate(hardware, kind, dtype, fallback)
        return cls(real(memory), real(compute))


def _rate(hardware: Hardware, kind: str, dtype: str, fallback: Mapping[str, str]) -> Fraction:
    if kind == "transcendental":
        measured = hardware.tables.get("measured", {})
        found = [Fraction(q.value) for key, q in measured.items() if key.startswith("transcendental_")]
        if found:
            return max(found)
    return Fraction(hardware.rate(dtype, "matmul" if kind == "matmul" else "vector", fallback=fallback).value)
