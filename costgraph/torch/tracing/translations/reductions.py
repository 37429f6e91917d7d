"""Sums, means and extrema of axes."""

from __future__ import annotations

from ....graph.tensor import Tensor
from ....ops.pointwise import cast
from ....ops.reduce import reduce
from ..call import Call
from .table import translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS

_OPERATIONS = {
    "sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "prod": "prod", "any": "any", "all": "all",
    "max": "max", "min": "min",
}  # fmt: skip


@translation(*(n for n in _OPERATIONS if n not in ("max", "min")), "max.default", "min.default")
def reduced(call: Call) -> Tensor | None:
    """Elements of some axes, or of all, taken together."""
    x, dims = call["self"], call.get("dim")
    if not x.ndim:
        return None
    given = [dims] if isinstance(dims, int) else list(dims or ())
    axes = {d % x.ndim for d in given} or set(range(x.ndim))
    kept = bool(call.get("keepdim"))
    before = " ".join(f"a{i}" for i in range(x.ndim))
    after = " ".join("1" if i in axes else f"a{i}" for i in range(x.ndim) if kept or i not in axes)
    wide = x
    if call.name in ("sum", "mean", "prod") and call.out.dtype != x.dtype:
        wide = cast(x, call.out.dtype)
    return reduce(wide, f"{before} -> {after}", _OPERATIONS[call.name])
