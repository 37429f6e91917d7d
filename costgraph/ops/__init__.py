"""Op kinds, one file a family. The functions here are those that models need beside the ones of `costgraph` itself."""

# every kind is registered once this package is there; these have no function that models call
from . import foreign, hops, merge, pack, spectra, stacks, updates  # noqa: F401  # isort: skip
from .cached import cache, initial_state
from .collectives import collective
from .elementwise import (
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
    sqrt,
    where,
    zeros,
)  # fmt: skip
from .grouped import dispatch, grouped, top_k
from .index import arange, gather, scatter, take_along
from .keep import keep, stop_gradient
from .layout import concat, contiguous_copy, expand, reshape, roll, slice_axis, split, stack
from .operators import matmul, transpose
from .ordering import sort
from .pointwise import cast, pointwise
from .stated import transfer

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
    "grouped",
    "initial_state",
    "keep",
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
