"""The roofs of a device on logarithmic axes: the slope of its memory and the rates of its units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..hardware.units import Quantity, format_quantity
from .drawing import ROOF
from .labels import Label

__all__ = ["draw_roofs", "range_of"]

#: Of all the time, what the ops take that have to be seen; those beyond them may be a decade away.
_SHARE, _DECADE = 0.99, 10.0


def range_of(points: Sequence[tuple[float, float]], ridge: float) -> tuple[float, float]:
    """Return the intensities that axes show, of the intensity and the time of each op.

    Some op that takes no time may have an intensity far away from all others: it does not stretch the axes.
    """
    total, seen, held = sum(t for _, t in points), 0.0, [x for x in (ridge,) if 0 < x < math.inf]
    for x, seconds in sorted(points, key=lambda p: -p[1]):
        if seen >= _SHARE * total and held:
            break
        held.append(x)
        seen += seconds
    held = held or [1.0]
    every = [x for x, _ in points] + held
    low, high = max(min(every), min(held) / _DECADE), min(max(every), max(held) * _DECADE)
    room = max(1.0, (_DECADE**2 * low / high) ** 0.5)  # two decades at least
    return low / room / 2.5, high * room * 6  # names stand to the right


def draw_roofs(ax: Any, memory: Quantity, rates: Mapping[str, float], ends: tuple[float, float]) -> list[Label]:
    """Draw roofs and set the limits of the axes; return the names of the roofs, to be placed."""
    bandwidth, (low, high) = float(memory.value), ends
    ranked = sorted(rates.items(), key=lambda item: -item[1])
    top = ranked[0][1]
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=(low * bandwidth / 1.5, 4 * top))
    # the slope ends at the highest roof; lower roofs are dashed
    ax.plot([low, top / bandwidth], [low * bandwidth, top], color=ROOF, linewidth=1.6)
    for _, rate in ranked:
        style = "-" if rate == top else "--"
        ax.plot([rate / bandwidth, high], [rate, rate], color=ROOF, linewidth=1.6, linestyle=style)
    middle = math.sqrt(low * min(ranked[-1][1] / bandwidth, high))
    named = [(f"{name}, {format_quantity(rate, 'FLOP/s')}", (high, rate)) for name, rate in ranked]
    return [*named, (f"memory, {memory}", (middle, middle * bandwidth))]
