"""Laws of times: what levels of memory add to them, and that formulas say the same as numbers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache

from ..analysis.duration import seconds
from ..analysis.roofline import roofline
from ..bind.evaluate import evaluate
from ..errors import StandInWarning, UnsupportedError
from ..hardware.specs import Hardware, load_hardware
from ..hardware.units import Quantity
from .laws import Trial, law

__all__ = ["through"]


@cache
def through(size: int) -> Hardware:
    """Return a device with two levels of caches of so many bytes."""
    device = load_hardware("a100-80-sxm")
    cache = {key: Quantity(size, "B") for key in ("l2", "l1_and_shared_per_core", "registers_per_core")}
    cache["l2_bandwidth"] = Quantity(10**13, "B/s")
    tables = {**device.tables, "cache": cache, "cores": {"count": Quantity(1, "1")}}
    return replace(device, tables=tables)


@law
def levels_of_memory_take_no_less_time(trial: Trial) -> None:
    """Neither estimate nor bound falls, the bound stays below, and formulas give the same at the point."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StandInWarning)  # of formats that the device has no rate for
        _hold_levels(trial, through(32))


def _hold_levels(trial: Trial, device: Hardware) -> None:
    try:
        flat = roofline(trial.graph, device, **trial.point)  # type: ignore[arg-type]  # sizes are no switches
    except UnsupportedError:  # a collective over an axis of no mesh
        return
    both, switches = (device, through(10**18)), {"fallback": None, "hierarchical": True, "overlap": "none"}
    deep, wide = (roofline(trial.graph, d, **switches, **trial.point) for d in both)  # type: ignore[arg-type]
    assert wide.estimate == flat.estimate, f"estimate where all fits {wide.estimate}, expected {flat.estimate}"
    about = 1 + 1e-9
    assert flat.estimate <= deep.estimate * about, f"estimate of levels {deep.estimate}, below {flat.estimate}"
    assert flat.lower_bound <= deep.lower_bound * about, f"bound of levels {deep.lower_bound}, below {flat.lower_bound}"
    assert deep.lower_bound <= deep.estimate * about, f"bound {deep.lower_bound}, above the estimate {deep.estimate}"
    for which, expected in (("estimate", deep.estimate), ("lower", deep.lower_bound)):
        formula = seconds(trial.graph, device, which, hierarchical=True)
        names = {s.name for s in getattr(formula, "free_symbols", ())}
        found = evaluate(formula, **{k: v for k, v in trial.point.items() if k in names})
        assert abs(found - expected) <= 1e-9 * expected, f"{which}: {found} of the formula, expected {expected}"
