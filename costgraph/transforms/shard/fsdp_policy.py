"""How parameters that ranks have parts of are put together and given back: the policies of systems, by name."""

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
    """Parameters are put together in units where a pass reads them, as torch's `fully_shard` does; its defaults.

    What the body of a loop reads slices of is a unit, a layer; all others are one, the root. A unit is one buffer of
    one all-gather, copied to parameters before the first op that reads one, and given back together behind the last.
    Its gradients are one buffer of one reduce-scatter.

    Parameters
    ----------
    axes : str or iterable of str
        Axes of the mesh.
    units : str or iterable of str
        Beginnings of names of parameters outside of loops that make one unit each, `"layers.*"`.
    reshard_after_forward : bool, str or iterable of str
        Whether they are given back behind the forward pass, and put together again by the backward pass. Names are
        axes of `axes` along which alone they are: the ranks of the others have them between the passes, as with torch's
        integer.
    reshard_root : bool
        Whether the root is as well.
    prefetch : bool
        Whether a unit's buffer lives until the next one is there, and the backward pass puts the next unit together
        while it works on one: two buffers at once, and communication beside compute.
    by_unit : bool
        False where each parameter has a collective of its own, directly before it is read.
    param_dtype : str, optional
        Format of the casts of parameters that the step has: a rank casts its parts and gathers these, where by default
        what is gathered is cast. Of a step whose ops read all parameters so, such as that of
        `cg.Policy("mixed", params="fp32", compute="bf16")`.
    reduce_dtype : str, optional
        Format that gradients are reduced in, cast as they are copied to their buffer and back in one piece; by default
        the one that they are computed in.
    resident : mapping of str to str, optional
        Axes of `axes` along which some parameters stay sharded, by a pattern of their names: with
        `{"*/experts/*": "ep"}` a rank keeps its experts and receives tokens, while other parameters are sharded over
        `ep` and gathered.

    Raises
    ------
    FormatError, GraphError
        If a format holds no fractions or belongs to no unit, or another argument is none.

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
            given = getattr(self, name)
            if name == "reshard_after_forward" and isinstance(given, bool):
                given = self.axes if given else ()
            names = _names(given)
            if not all(isinstance(text, str) for text in names):
                raise GraphError(f"FullyShard: {name}={shown(given)}, expected a name or several")
            object.__setattr__(self, name, names)
        need_flag("FullyShard", reshard_root=self.reshard_root, prefetch=self.prefetch, by_unit=self.by_unit)
        for name in ("param_dtype", "reduce_dtype"):
            object.__setattr__(self, name, self._format(name, getattr(self, name)))
        pairs = self.resident.items() if isinstance(self.resident, Mapping) else self.resident
        resident = tuple((pattern, _names(along)) for pattern, along in pairs)
        object.__setattr__(self, "resident", resident)
        odd = sorted({a for _, along in resident for a in along} - {*self.axes})
        if odd:
            raise GraphError(f"FullyShard: resident along {shown(odd[0])}, expected axes of {shown(self.axes)}")
        odd = sorted({*_names(self.reshard_after_forward)} - {*self.axes})
        if odd:
            raise GraphError(f"FullyShard: reshard_after_forward={shown(odd[0])}, expected axes of {shown(self.axes)}")

    def _format(self, name: str, given: object) -> str | None:
        if given is None:
            return None
        try:
            found = find_dtype(given)
        except CostGraphError as error:
            raise FormatError(f"FullyShard: {name}: {error}") from None
        if found.kind != "float" or not self.by_unit:
            raise FormatError(f"FullyShard: {name}={found.name!r}, expected a floating format, and units")
        return found.name

    def between(self, unit: str) -> frozenset[str]:
        """Return the axes along which a unit is split between the forward pass and the backward pass."""
        return frozenset(_names(self.reshard_after_forward) if unit or self.reshard_root else ())


def _names(given: object) -> tuple[str, ...]:
    """Return one or several names as several, anything else as one that is none."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return (given,)  # type: ignore[return-value]  # the caller looks at it
    return tuple(given)


def unit_of(name: str, patterns: Iterable[str]) -> str:
    """Return the beginning of a name that makes a unit of its own, nothing where none does: the root."""
    words = re.split(r"([./])", name)
    for pattern in patterns:
        most = 2 * len(re.split(r"[./]", pattern)) - 1
        if most < len(words) and fnmatchcase("".join(words[:most]), pattern):
            return "".join(words[:most])
    return ""
