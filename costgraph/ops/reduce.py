"""Reductions over named axes, and pooling over windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

from ..algebra.polynomial import ONE, ZERO, Poly
from ..algebra.symbols import shown
from ..dtypes import dtype as find_dtype
from ..errors import PatternError, ShapeError, UnsupportedError
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
    apply,
    current_graph,
    named,
    need,
    need_choice,
    need_tensor,
    one_of,
)
from ..ir.graph import sizes as sizes_by_name
from ..ir.strides import dense_in, memory_format
from ..notation.pattern import Affine, Axes, Pattern, PatternText, parse_pattern
from ..notation.validation import Rule
from . import rules, sharding_rule
from .access_footprint import left_over
from .axis_sizes import extents_of, need_indexed, need_plain
from .layout import rearrange
from .registry import register

if TYPE_CHECKING:
    from ..algebra.dominance import Relations

__all__ = [
    "REDUCTIONS",
    "Reduce",
    "reduce",
    "Pool",
    "PoolBackward",
    "PoolingBase",
]


# -- reductions --------------------------------------------------------------------------------------------------------


#: Operations for `reduce`; each costs one FLOP per reduced element.
REDUCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all", "argmax", "argmin")


@register
@dataclass(frozen=True, kw_only=True)
class Reduce(OpKind):
    """Reduction over the axes that the right side of a pattern omits."""

    name = "reduce"
    restricted = takes_complex = True
    pattern: Pattern
    operation: Annotated[str, one_of(*REDUCTIONS)]
    flops, reads, writes = rules.per_element_reduced, rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer one contiguous result, whatever the operand's memory order."""
        rules.need_operands(self, operands, 1)
        x, operation = operands[0], self.operation
        if x.dtype.kind == "complex" and operation not in ("sum", "mean"):
            raise UnsupportedError(f"{operation} of complex numbers has no cost rule, expected a sum or a mean")
        names = [a.names[0] if a.names else None for a in self.pattern.operands[0]]
        result_names = [a.names[0] if a.names else None for a in self.pattern.result]
        places = [names.index(n) if n is not None else None for n in result_names]
        sizes = tuple(ONE if p is None else x.sizes[p] for p in places)
        dtype = {"any": "bool", "all": "bool", "argmax": "int64", "argmin": "int64"}.get(operation)
        if operation in ("sum", "prod") and x.dtype.kind in ("int", "bool"):
            dtype = "int64"  # as in torch: sums of integers and bools are 64-bit
        result = x.dtype if dtype is None else find_dtype(dtype)
        if operation == "mean" and result.kind in ("int", "bool"):
            raise ShapeError(f"mean of {x!r}: expected a floating format")
        return [Result(sizes, result, domain=left_over(x, places))]

    def placed(self, op: Op) -> Split:
        """Split kept axes, and reduced axes if partial results can be reduced again."""
        operand_names, result_names = (
            [a.names for a in dims] for dims in (self.pattern.operands[0], self.pattern.result)
        )
        reduced_names = {n for names in operand_names for n in names} - {n for names in result_names for n in names}
        reducible = self.operation in ("sum", "mean", "max", "min")
        domain = op.operands[0].domain if self.operation == "mean" else None
        # a mean of ranks' means needs equal counts, and early queries of a causal domain see fewer keys
        uneven = reduced_names & {n for i in domain[1:] for n in operand_names[i]} if domain is not None else ()
        return sharding_rule.across(
            op, [tuple(operand_names)], tuple(result_names), lambda extents, ranks: self, whole=frozenset(uneven),
            reduced=dict.fromkeys(reduced_names, self.operation) if reducible else {},
            linear=self.operation in ("sum", "mean"),
        )  # fmt: skip

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check the pattern against the operand: single axes, each once."""
        pattern, x = self.pattern, operands[0]
        need(len(pattern.operands) == 1 and len(pattern.operands[0]) == x.ndim, "the operands of the pattern")
        single = all(isinstance(a, Axes) and len(a.names) <= 1 for a in (*pattern.operands[0], *pattern.result))
        operand_names, result_names = pattern.operand_names(0), set(pattern.result_names)
        once = len(set(operand_names)) == len(operand_names) == x.ndim
        need(single and once and result_names < set(operand_names), f"pattern {shown(str(pattern))}")
        need_plain(pattern)


def reduce(x: Tensor, pattern: PatternText, /, operation: str, *, name: str = "", **sizes: object) -> Tensor:
    """Reduce the axes that the right side of the pattern omits.

    Parameters
    ----------
    x : Tensor
        Operand.
    pattern : str
        As in einops: `"b s d -> b s"`, `"b s d -> b s 1"`, `"b (h h2) -> b h"` with `h2=2`.
    operation : str
        sum, mean, max, min, prod, any, all, argmax or argmin.
    name : str
        Op name, by default the operation.
    **sizes : sympy.Expr or int
        Split axis sizes.

    Returns
    -------
    Tensor
        FLOPs: one per element of `x`.

    Raises
    ------
    PatternError, ShapeError, GraphError
        If the pattern does not fit, nothing is reduced, or the operation is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D = cg.dims("B S D")
    >>> with cg.Graph("g") as g:
    ...     y = cg.reduce(g.input("x", (B, S, D)), "b s d -> b s", "mean")
    >>> y.shape, cg.flops(g)
    ((B, S), B*D*S)
    """
    need_choice("reduce: operation", operation, REDUCTIONS)
    need_tensor("reduce", x)
    parsed = parse_pattern(pattern, (x.ndim,))
    if any(isinstance(a, Affine) for a in (*parsed.operands[0], *parsed.result)):
        raise PatternError(f"pattern {pattern!r}: affine index such as h*2+r, expected axis names")
    names = parsed.operand_names(0)
    if len(set(names)) < len(names):
        raise PatternError(f"pattern {pattern!r}: expected each axis of the operand once")
    graph = current_graph(x.graph)
    x = graph.adopt(x)
    extents = extents_of(graph, parsed, [x], sizes_by_name("reduce", sizes))
    unused = sorted(set(extents) - set(names))
    if unused:
        raise PatternError(f"pattern {pattern!r}: size given for {unused[0]!r}, which is not one of its axes")
    missing = sorted(set(parsed.result_names) - set(parsed.operand_names(0)))
    if missing:
        raise PatternError(f"pattern {pattern!r}: axis {missing[0]!r} of the result is not in the operand")
    if set(parsed.result_names) == set(parsed.operand_names(0)):
        raise PatternError(f"pattern {pattern!r}: nothing is reduced, expected an axis that the result omits")
    if any(len(a.names) != 1 for a in parsed.operands[0]):
        axis_sizes: dict[str, Any] = {n: extents[n] for n in names}
        x = rearrange(x, f"{' '.join(map(str, parsed.operands[0]))} -> {' '.join(names)}", **axis_sizes)
    flat = parse_pattern(f"{' '.join(names)} -> {' '.join(a.names[0] if a.names else '1' for a in _flat(parsed))}")
    (y,) = apply(Reduce(pattern=flat, operation=operation), [x], named(name, operation))
    if any(len(a.names) > 1 for a in parsed.result):
        axis_sizes = {n: extents[n] for n in parsed.result_names}
        flat_names = " ".join(a.names[0] if a.names else "1" for a in _flat(parsed))
        y = rearrange(y, f"{flat_names} -> {' '.join(map(str, parsed.result))}", **axis_sizes)
    return y


def _flat(pattern: Pattern) -> list[Axes | Affine]:
    """Return the result's dimensions with merged axes split; merging them is a separate op."""
    dims: list[Axes | Affine] = []
    for a in pattern.result:
        dims += [Axes((n,)) for n in a.names] if len(a.names) > 1 else [a]
    return dims


# -- pooling -----------------------------------------------------------------------------------------------------------


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
