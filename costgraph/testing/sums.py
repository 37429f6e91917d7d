"""Sums that a loop adds to: what they do, and how to draw one. What is absent is added to by nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..algebra.polynomial import poly
from ..dtypes import DTYPES
from ..graph.graph import apply
from ..graph.tensor import Tensor
from ..ops.fill import Revised, assign, fill
from ..ops.layout import slice_axis
from ..ops.pieces import Absent, Accumulate, absent, accumulate
from ..ops.pointwise import pointwise
from ..ops.stacks import Empty, Stacked
from .meanings import meaning
from .samples import sample
from .sketch import Sketch
from .values import At

__all__: list[str] = []  # what is said here is found in MEANINGS and SAMPLES


@meaning(Accumulate)
def _accumulate(at: At[Accumulate]) -> None:
    at.made[0] = at.operands[0]
    for index in list(at.operands[0].points()):
        at.write(at.number(0, *index) + at.number(1, *index), *index)


@sample(Accumulate)
def _drawn(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.dtype.kind == "float")
    term = s.like(x)
    so_far = x if s.may_change(x) and x.touched == x.numel else fill(x.shape, dtype=x.dtype)
    return [accumulate(so_far, term)]


@meaning(Empty)
def _empty(at: At[Empty]) -> None:
    at.result()


@meaning(Stacked, Revised)
def _stacked(at: At[Any]) -> None:
    at.made[0] = at.operands[0]  # the slices lie in it


@sample(Stacked)
def _drawn_stack(s: Sketch) -> Sequence[Tensor]:
    y = s.fresh(s.shape(1))
    sizes = (poly(2), *y.sizes)
    stack = apply(Empty(sizes=sizes, dtype=y.dtype), [], "empty")[0]
    return list(apply(Stacked(), [stack, y + 1, y * y], "stacked"))


@sample(Revised)
def _drawn_part(s: Sketch) -> Sequence[Tensor]:
    x = fill((poly(3), *s.fresh(s.shape(1)).sizes), 1.0)
    start, size = s.one_of([(0, 1), (1, 1), (1, 2)])
    part = slice_axis(x, 0, start, size)
    written = assign(part, pointwise("copy", part))
    return list(apply(Revised(axes=(0,), starts=(poly(start),), steps=(1,)), [x, written], "revised"))


@meaning(Absent)
def _nothing_yet(at: At[Absent]) -> None:
    """Do nothing: what a loop hands to `accumulate` before there is anything is no value."""


@sample(Absent)
def _nothing(s: Sketch) -> Sequence[Tensor]:
    absent(s.fresh(s.shape(1)).sizes, s.one_of([DTYPES["fp32"], DTYPES["bf16"]]))
    return []
