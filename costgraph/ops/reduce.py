"""Reductions over named axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ..algebra.polynomial import ONE
from ..algebra.symbols import shown
from ..dtypes import dtype as find_dtype
from ..errors import PatternError, ShapeError, UnsupportedError
from ..ir.graph import (
    Op,
    OpKind,
    Result,
    Split,
    Tensor,
    apply,
    current_graph,
    named,
    need,
    need_choice,
    need_tensor,
    one_of,
)
from ..ir.graph import sizes as sizes_by_name
from ..notation.pattern import Affine, Axes, Pattern, PatternText, parse_pattern
from . import (
    rules,
    sharding_rule,
)
from .access_footprint import left_over
from .axis_sizes import extents_of, need_plain
from .layout import rearrange
from .registry import register

if TYPE_CHECKING:
    from ..algebra.dominance import Relations

__all__ = ["REDUCTIONS", "Reduce", "reduce"]

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
