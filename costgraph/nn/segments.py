"""Softmax over segments: rows that belong together by an index, as the edges that end at one node of a graph."""

from __future__ import annotations

from ..graph.arguments import need_tensor, positive
from ..graph.scopes import scope
from ..graph.tensor import Tensor
from ..ops.fill import fill
from ..ops.index import gather, scatter
from ..ops.pointwise import pointwise

__all__ = ["segment_softmax"]


def segment_softmax(x: Tensor, segments: Tensor, count: object, *, name: str = "segment_softmax") -> Tensor:
    """Exponentials that add up to 1 over the rows of each segment, as attention over the edges of a graph needs them.

    Parameters
    ----------
    x : Tensor
        Rows along its first axis, (E, ...).
    segments : Tensor
        The segment of each row, (E,) in an integer format.
    count : sympy.Expr or int
        How many segments there are.
    name : str
        Scope of the ops.

    Returns
    -------
    Tensor
        Shape of `x`. Made of a maximum and a sum by segment, two lookups and three elementwise ops, a kernel each.

    Raises
    ------
    GraphError, ShapeError
        If one is no tensor, or the segments are not one integer a row.

    Examples
    --------
    >>> import costgraph as cg
    >>> E, N, H = cg.dims("E N H")
    >>> with cg.Graph("g") as g:
    ...     p = cg.nn.segment_softmax(g.input("scores", (E, H)), g.input("ends", (E,), "int64"), N)
    >>> cg.flops(g)  # a comparison, a subtraction, an exp, an addition and a division
    5*E*H
    """
    need_tensor("segment_softmax", x, segments)
    shape = (positive("segment_softmax: count", count), *x.sizes[1:])
    with scope(name):
        lowest = fill(shape, float("-inf"), x.dtype, name="lowest")
        # the largest are kept apart from what they start from, which a backward pass compares them with
        largest = scatter(lowest, segments, x, "max", inplace=False, name="largest")
        e = pointwise("exp", x - gather(largest, segments, name="largest_of_each"))
        total = scatter(fill(shape, 0, x.dtype, name="nothing"), segments, e, "add", name="sum")
        return e / gather(total, segments, name="sum_of_each")
