"""Op kinds, one file a family. The functions here are those that models need beside the ones of `costgraph` itself."""

from .cached import cache, initial_state
from .grouped import dispatch, grouped, top_k
from .index import arange, gather, scatter, take_along
from .keep import keep
from .layout import concat, contiguous_copy, expand, reshape, roll, slice_axis, split, stack
from .operators import matmul, transpose
from .pointwise import cast, pointwise
from .stated import collective, transfer

__all__ = [
    "arange",
    "cache",
    "cast",
    "collective",
    "concat",
    "contiguous_copy",
    "dispatch",
    "expand",
    "gather",
    "grouped",
    "initial_state",
    "keep",
    "matmul",
    "pointwise",
    "reshape",
    "roll",
    "scatter",
    "slice_axis",
    "split",
    "stack",
    "take_along",
    "top_k",
    "transfer",
    "transpose",
]
