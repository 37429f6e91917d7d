"""FSDP policies: how sharded parameters are gathered and freed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...algebra.symbols import shown
from ...dtypes import dtype as find_dtype
from ...errors import CostGraphError, FormatError, GraphError
from ...ir.graph import need_flag
from ...notation.validation import guarded

__all__ = [
    "FullyShard",
    "unit_of",
]


@guarded()
@dataclass(frozen=True)
class FullyShard:
    """Gather parameters in units, as torch's `fully_shard` does; the defaults are torch's.

    Parameters that a loop body reads in slices are a unit (a layer); all others are the root unit. A unit is gathered
    by one all-gather into one buffer, copied to its parameters before the first op that reads one, and freed after the
    last. Its gradients are reduced by one reduce-scatter.

    Parameters
    ----------
    axes : str or iterable of str
        Mesh axes.
    units : str or iterable of str
        Name prefixes of parameters outside loops that form a unit each, `"layers.*"`.
    reshard_after_forward : bool, str or iterable of str
        Whether parameters are freed after the forward pass and gathered again in the backward pass. Names are the mesh
        axes along which they are resharded; ranks of the other axes keep them between the passes, as with torch's
        integer.
    reshard_root : bool
        Whether this applies to the root unit as well.
    prefetch : bool
        Whether a unit's buffer lives until the next one exists, and the backward pass gathers the next unit while it
        computes: two buffers at once, and communication that overlaps compute.
    by_unit : bool
        If False, each parameter has its own collective, directly before it is read.
    param_dtype : str, optional
        Format in which parameters are gathered: a rank casts its shards first. By default the cast follows the
        all-gather. All ops of the step must read parameters through such a cast, as with
        `cg.Policy("mixed", params="fp32", compute="bf16")`.
    reduce_dtype : str, optional
        Format in which gradients are reduced, cast while they are copied into their buffer and back; by default the
        format in which they are computed.
    resident : mapping of str to str, optional
        Members of `axes` along which some parameters stay sharded, by name pattern: with `{"*/experts/*": "ep"}` a rank
        keeps its experts and receives tokens, while other parameters are sharded over `ep` and gathered.

    Raises
    ------
    FormatError, GraphError
        If a format is not a floating format or is combined with `by_unit=False`, or if another argument is invalid.

    Notes
    -----
    torch 2.13, `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py` and `_fsdp_collectives.py`.

    Examples
    --------
    >>> import costgraph as cg
    >>> cg.FullyShard(("node", "gpu"), reshard_after_forward="gpu").reshard_after_forward
    ('gpu',)
    """

    axes: str | Iterable[str]
    units: str | Iterable[str] = ()
    reshard_after_forward: bool | str | Iterable[str] = True
    reshard_root: bool = False
    prefetch: bool = True
    by_unit: bool = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    resident: Mapping[str, str | Iterable[str]] | Iterable[tuple[str, Iterable[str]]] = ()

    def __post_init__(self) -> None:
        for name in ("axes", "units", "reshard_after_forward"):
            value = getattr(self, name)
            if name == "reshard_after_forward" and isinstance(value, bool):
                value = self.axes if value else ()
            names = _names(value)
            if not all(isinstance(text, str) for text in names):
                raise GraphError(f"FullyShard: {name}={shown(value)}, expected one or several names")
            object.__setattr__(self, name, names)
        need_flag("FullyShard", reshard_root=self.reshard_root, prefetch=self.prefetch, by_unit=self.by_unit)
        for name in ("param_dtype", "reduce_dtype"):
            object.__setattr__(self, name, self._format(name, getattr(self, name)))
        pairs = self.resident.items() if isinstance(self.resident, Mapping) else self.resident
        resident = tuple((pattern, _names(along)) for pattern, along in pairs)
        object.__setattr__(self, "resident", resident)
        unknown = sorted({a for _, along in resident for a in along} - {*self.axes})
        if unknown:
            raise GraphError(f"FullyShard: resident: {shown(unknown[0])} is not one of the axes {shown(self.axes)}")
        unknown = sorted({*_names(self.reshard_after_forward)} - {*self.axes})
        if unknown:
            raise GraphError(
                f"FullyShard: reshard_after_forward: {shown(unknown[0])} is not one of the axes {shown(self.axes)}"
            )

    def _format(self, name: str, value: object) -> str | None:
        if value is None:
            return None
        try:
            parsed = find_dtype(value)
        except CostGraphError as error:
            raise FormatError(f"FullyShard: {name}: {error}") from None
        if parsed.kind != "float" or not self.by_unit:
            raise FormatError(f"FullyShard: {name}={parsed.name!r}, expected a floating-point format and by_unit=True")
        return parsed.name

    def between(self, unit: str) -> frozenset[str]:
        """Return the mesh axes along which a unit is sharded between the forward and backward pass."""
        return frozenset(_names(self.reshard_after_forward) if unit or self.reshard_root else ())


def _names(value: object) -> tuple[str, ...]:
    """Return one or several names as a tuple; an invalid value is returned as its only element."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (value,)  # type: ignore[return-value]  # the caller looks at it
    return tuple(value)


def unit_of(name: str, patterns: Iterable[str]) -> str:
    """Return the prefix of a name that is a unit, an empty string for the root."""
    words = re.split(r"([./])", name)
    for pattern in patterns:
        length = 2 * len(re.split(r"[./]", pattern)) - 1
        if length < len(words) and fnmatchcase("".join(words[:length]), pattern):
            return "".join(words[:length])
    return ""
