"""Ordering along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import dtype as find_dtype
from ..errors import ShapeError
from ..graph.arguments import need_flag, need_tensor
from ..graph.facts import Flag
from ..graph.graph import apply
from ..graph.op import Op, OpKind, Result
from ..graph.placement import Split
from ..graph.tensor import Tensor
from . import rules, splits
from .registry import register

__all__ = ["Sort", "sort"]


@register
@dataclass(frozen=True, kw_only=True)
class Sort(OpKind):
    """The elements along the last axis in order, and where each of them was."""

    name = "sort"
    descending: Flag = False
    flops, reads, writes = rules.per_element_reduced, rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Values and indices."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        if not x.ndim:
            raise ShapeError(f"sort of {x!r}: expected at least one axis")
        return [Result(x.sizes, x.dtype), Result(x.sizes, find_dtype("int64"))]

    def placed(self, op: Op) -> Split:
        """Split the other axes."""
        return splits.alike(op, whole=[op.results[0].ndim - 1])


def sort(x: Tensor, *, descending: bool = False, name: str = "sort") -> tuple[Tensor, Tensor]:
    """Order the elements along the last axis, as `torch.sort`.

    Parameters
    ----------
    x : Tensor
        Shape (..., n).
    descending : bool
        The largest first.
    name : str
        Name of the op.

    Returns
    -------
    tuple of Tensor
        Values in the format of `x` and indices in int64, each of its shape. FLOPs: 1 for each element, as `top_k`: how
        often elements are compared depends on the algorithm, and radix sorts compare none.

    Raises
    ------
    GraphError, ShapeError
        If it is no tensor, or has no axis.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     values, ids = cg.ops.sort(g.input("x", (B, S)))
    >>> ids.shape, cg.flops(g), cg.bytes_moved(g)
    ((B, S), B*S, 16*B*S)
    """
    need_tensor("sort", x)
    need_flag("sort", descending=descending)
    values, ids = apply(Sort(descending=descending), [x], name)
    return values, ids
