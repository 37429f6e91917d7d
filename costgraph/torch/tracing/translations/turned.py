"""Copies in another order of elements, and diagonals."""

from __future__ import annotations

from ....algebra.polynomial import ONE, ZERO, poly
from ....dtypes import dtype as find_dtype
from ....graph.graph import apply
from ....graph.tensor import Tensor
from ....nn.kernels import one_kernel
from ....ops.fill import fill
from ....ops.index import Arange, reverse, scatter
from ....ops.layout import broadcast, permute, reshape
from ....ops.pointwise import pointwise
from ..call import Call
from .table import translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS


@translation("flip", "rot90")
def flipped(call: Call) -> Tensor | None:
    """Axes from end to start; a quarter turn is that of one of two axes, which are exchanged."""
    x, dims = call["self"], [d % call["self"].ndim for d in call["dims"]]
    order = list(range(x.ndim))
    if call.name == "rot90":
        quarters = call["k"] % 4
        if quarters % 2:
            order[dims[0]], order[dims[1]] = dims[1], dims[0]
        dims = [[], dims[1:], dims, dims[:1]][quarters]
    if not dims:
        return None

    made = one_kernel("flip", reverse, x, backward="flip", axes=dims)
    return made if order == list(range(x.ndim)) else permute(made, order)


@translation("diag_embed")
def diagonal(call: Call) -> Tensor | None:
    """Zeros with elements on the diagonal of a matrix."""
    x: Tensor = call["self"]
    if call["offset"] or call["dim1"] % (x.ndim + 1) != x.ndim - 1 or call["dim2"] % (x.ndim + 1) != x.ndim:
        return None
    n = x.sizes[-1]
    (places,) = apply(Arange(size=n, dtype=find_dtype("int64"), start=ZERO), [], "arange")
    ids = broadcast(reshape(places, (n, ONE)), (*x.sizes, ONE))
    return scatter(fill((*x.sizes, n), 0, x.dtype), ids, reshape(x, (*x.sizes, ONE)), "set", along=True)


@translation("channel_shuffle")
def shuffled(call: Call) -> Tensor:
    """Channels of all groups in turn."""
    x, groups = call["self"], poly(call["groups"])
    apart = (x.sizes[0], groups, x.sizes[1] / groups, *x.sizes[2:])
    made = reshape(permute(reshape(x, apart), [0, 2, 1, *range(3, x.ndim + 1)]), x.sizes)
    return pointwise("copy", made) if made.is_view else made
