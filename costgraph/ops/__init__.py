"""Op kinds and the functions that build them, beyond those exported by `costgraph` itself."""

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
from .grouped import dispatch, grouped_matmul, top_k
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
