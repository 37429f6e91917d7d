"""Max and average pooling, with their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Annotated

from ..algebra.polynomial import ONE, ZERO, Poly
from ..algebra.symbols import shown
from ..dtypes import dtype as find_dtype
from ..errors import ShapeError
from ..ir.graph import (
    Extents,
    Flag,
    Flops,
    Op,
    OpKind,
    Result,
    Split,
    Tensor,
    WorkspaceKind,
    need,
)
from ..ir.strides import (
    dense_in,
    memory_format,
)
from ..notation.pattern import Affine, Axes, Pattern
from ..notation.validation import Rule
from . import rules
from .axis_sizes import (
    need_indexed,
    need_plain,
)
from .registry import register

if TYPE_CHECKING:
    from ..algebra.dominance import Relations

__all__ = ["Pool", "PoolBackward", "PoolingBase"]

_POOLING = Rule("max or mean", lambda v: v in ("max", "mean"))


@dataclass(frozen=True, kw_only=True)
class PoolingBase(OpKind):
    """Base class for a pooling and its gradient."""

    pattern: Pattern
    """Windows that slide over the pooled tensor."""
    extents: Extents
    """Size of every pattern axis."""
    operation: Annotated[str, _POOLING]
    exclude_padding: Flag = False
    """Whether a mean excludes padding, as torch's `count_include_pad=False`."""

    @property
    def made(self) -> tuple[Poly, ...]:
        """Pooled shape."""
        return tuple(self.extents[n] for n in self.pattern.result_names)

    def flops(self, op: Op) -> Flops:
        """Count one per index point: each element in each window."""
        return Flops(pointwise=prod(self.extents.values(), start=ONE))

    def split(self, op: Op, x: Tensor) -> Split:
        """Return the rule that splits axes without windows."""
        (dims,) = self.pattern.operands
        input_labels = tuple(d.names if isinstance(d, Axes) else (f"{d.terms[0][0]} before",) for d in dims)
        result_labels = tuple(d.names for d in self.pattern.result if isinstance(d, Axes))
        slid = [d.terms[0][0] for d in dims if isinstance(d, Affine)]
        extents = {n: self.extents[n] for names in result_labels for n in names}
        extents |= {names[0]: n for names, n in zip(input_labels, x.sizes, strict=True) if len(names) == 1}

        def local(local_extents: Mapping[str, Poly], ranks: Mapping[str, str]) -> OpKind:
            return replace(self, extents={n: local_extents.get(n, size) for n, size in self.extents.items()})

        operands = tuple(input_labels if t is x else result_labels for t in op.operands)
        results = tuple(result_labels if x is op.operands[0] else input_labels for _ in op.results)
        unsplittable = frozenset([*slid, *(f"{n} before" for n in slid)])
        return Split(operands, results, extents, local, whole=unsplittable)

    def need_windows(self, x: Tensor) -> None:
        """Check the pattern against the pooled tensor."""
        need_indexed([x], self.pattern, self.extents)
        need(len(self.pattern.operands) == 1, "a pooling of several operands")
        need_plain(self.pattern)
        unpooled = [a.names for a in self.pattern.operands[0] if isinstance(a, Axes)]
        slid = [(a.terms[0][0],) for a in self.pattern.operands[0] if isinstance(a, Affine)]
        need(
            [a.names for a in self.pattern.result] == unpooled + slid,
            f"the result of pattern {shown(str(self.pattern))}",
        )


@register
@dataclass(frozen=True, kw_only=True)
class Pool(PoolingBase):
    """Maximum or mean of each window."""

    name = "pool"
    indices: Flag = False
    """Whether it also returns the indices of maxima, for the backward pass."""
    writes = rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer one element per window, and the indices."""
        rules.need_operands(self, operands, 1)
        places = [Result(self.made, find_dtype("int64"))] if self.indices else []
        return [Result(self.made, operands[0].dtype), *places]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the elements that windows reach."""
        return rules.reached_by_index(op, self.pattern, self.extents)

    def placed(self, op: Op) -> Split:
        """Split axes without windows."""
        return self.split(op, op.operands[0])

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check the pattern against the operand."""
        self.need_windows(operands[0])
        need(not self.indices or self.operation == "max", "indices of a mean")


@register
@dataclass(frozen=True, kw_only=True)
class PoolBackward(PoolingBase, WorkspaceKind):
    """Pooling gradient, from the incoming gradient, the input and, for a maximum, the indices."""

    name = "pool_backward"
    writes = rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the input gradient."""
        count = 3 if self.operation == "max" else 2
        need(len(operands) == count, f"{len(operands)} operands of a {self.operation}")
        gradient, x, *indices = operands
        for t in (gradient, *indices):
            if t.ndim != len(self.made) or not all(map(x.graph.same, t.sizes, self.made)):
                raise ShapeError(f"pool_backward of {t!r}: expected ({', '.join(map(str, self.made))})")
        return [Result(x.sizes, x.dtype, dense_in(x.sizes, memory_format(x.sizes, x.strides)))]

    def flops(self, op: Op) -> Flops:
        """Count an addition per element in each window, or for a maximum one per window."""
        return Flops(pointwise=op.operands[0].numel) if self.operation == "max" else super().flops(op)

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return all operands but the pooling's input, which torch saves only for its shape."""
        return tuple(ZERO if i == 1 else rules.elements(t) for i, t in enumerate(op.operands))

    def placed(self, op: Op) -> Split:
        """Split axes without windows."""
        return self.split(op, op.operands[1])

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check the pattern against the pooling's input."""
        self.need_windows(operands[1])
