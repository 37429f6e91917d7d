"""Pooling: a maximum or a mean of each window, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from ..algebra.polynomial import ZERO, Poly
from ..dtypes import dtype as find_dtype
from ..errors import ShapeError
from ..graph.op import Attrs, Op, OpKind, Result
from ..graph.tensor import Tensor
from . import rules
from .registry import register

__all__ = ["POOL", "UNPOOL"]


def _pooled(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    (x,) = operands
    names = [n for a in attrs["pattern"].result for n in a.names]
    sizes = tuple(attrs["extents"][n] for n in names)
    # where each maximum stood, which a backward pass reads
    places = [Result(sizes, find_dtype("int64"))] if attrs.get("indices") else []
    return [Result(sizes, x.dtype), *places]


def _unpooled(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    gradient, x, *indices = operands
    made = tuple(attrs["extents"][n] for n in attrs["pattern"].result_names)
    for t in (gradient, *indices):
        if t.ndim != len(made) or not all(map(x.graph.same, t.sizes, made)):
            raise ShapeError(f"unpool of {t!r}: expected ({', '.join(map(str, made))})")
    return [Result(x.sizes, x.dtype)]


def _unpool_reads(op: Op) -> tuple[Poly, ...]:
    # of the input of the pooling the shape alone is needed, but torch keeps it all the same
    return tuple(ZERO if i == 1 else rules.elements(t) for i, t in enumerate(op.operands))


POOL = register(
    OpKind(
        name="pool",
        infer=_pooled,
        flops=rules.per_index_point,
        reads=rules.reached_by_index,
        writes=rules.all_results,
    )
)
#: Gradient of a pooling: operands are that of its result, its input and, of a maximum, where each maximum stood.
UNPOOL = register(
    OpKind(
        name="unpool",
        infer=_unpooled,
        flops=rules.per_index_point,
        reads=_unpool_reads,
        writes=rules.all_results,
    )
)
