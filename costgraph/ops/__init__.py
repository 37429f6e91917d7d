"""Op kinds and the functions that build them, beyond those exported by `costgraph` itself."""

import warnings
from typing import Any

# imported to register their op kinds; models do not call these modules
from . import (  # noqa: F401  # isort: skip
    opaque,
    collectives,
    fourier,
    loops,
    updates,
)
from .collectives import collective
from .elementwise import (
    cast,
    equal,
    exp,
    full,
    greater,
    greater_equal,
    less,
    less_equal,
    log,
    maximum,
    minimum,
    pointwise,
    sqrt,
    where,
    zeros,
)  # fmt: skip
from .experts import dispatch, grouped_matmul, top_k
from .index import arange, gather, scatter, sort, take_along
from .kv_cache import (
    cache,
    initial_state,
)
from .layout import concat, contiguous_copy, expand, keep_alive, reshape, roll, slice_axis, split, stack, stop_gradient
from .opaque import transfer
from .operators import matmul, transpose

__all__ = [
    "arange",
    "cache",
    "cast",
    "collective",
    "concat",
    "contiguous_copy",
    "dispatch",
    "equal",
    "exp",
    "expand",
    "full",
    "gather",
    "greater",
    "greater_equal",
    "grouped_matmul",
    "initial_state",
    "keep_alive",
    "less",
    "less_equal",
    "log",
    "matmul",
    "maximum",
    "minimum",
    "pointwise",
    "reshape",
    "roll",
    "scatter",
    "slice_axis",
    "sort",
    "split",
    "sqrt",
    "stack",
    "stop_gradient",
    "take_along",
    "top_k",
    "transfer",
    "transpose",
    "where",
    "zeros",
]

#: Earlier names, available with a DeprecationWarning until the next release.
_RENAMED = {"grouped": "grouped_matmul", "keep": "keep_alive"}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"ops.{name} is now ops.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
