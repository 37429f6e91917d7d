"""Reductions over named axes."""

from __future__ import annotations

from collections.abc import Sequence

from .. import rules
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, PatternError
from ..graph import apply, current_graph
from ..layout import contiguous, elementwise
from ..op import Attrs, OpKind, Result
from ..pattern import Affine, Axes, Pattern, parse_pattern
from ..polynomial import ONE, poly
from ..tensor import Tensor
from .extents import extents_of
from .layout import rearrange
from .registry import register

__all__ = ["REDUCE", "REDUCTIONS", "reduce"]

#: Names that `reduce` takes; each costs one operation for each element that is reduced.
REDUCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all", "argmax", "argmin")


def _infer(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    (x,) = operands
    pattern: Pattern = attrs["pattern"]
    names = [a.names[0] if a.names else None for a in pattern.operands[0]]
    kept = [a.names[0] if a.names else None for a in pattern.result]
    places = [names.index(n) if n is not None else None for n in kept]
    sizes = tuple(ONE if p is None else x.sizes[p] for p in places)
    strides = tuple(ONE if p is None else x.strides[p] for p in places)
    domain = None
    if x.domain is not None and x.domain[1] in places and x.domain[2] in places:
        domain = (x.domain[0], places.index(x.domain[1]), places.index(x.domain[2]))
    operation = attrs["operation"]
    dtype = {"any": "bool", "all": "bool", "argmax": "int64", "argmin": "int64"}.get(operation)
    if operation in ("sum", "prod") and x.dtype.kind != "float":
        dtype = "int64"  # torch's rule: sums of integers and of bools are 64-bit
    result = x.dtype if dtype is None else find_dtype(dtype)
    order = elementwise(sizes, [(sizes, strides)]) if sizes else contiguous(sizes)
    return [Result(sizes, result, order, domain=domain)]


REDUCE = register(
    OpKind(
        name="reduce",
        infer=_infer,
        flops=rules.per_element_reduced,
        reads=rules.whole,
        writes=rules.all_results,
    )
)


def reduce(x: Tensor, pattern: str, operation: str, *, name: str = "", **sizes: object) -> Tensor:
    """Reduce the axes that the right side of the pattern leaves out.

    Parameters
    ----------
    x : Tensor
        What is reduced.
    pattern : str
        As in einops: `"b s d -> b s"`, `"b s d -> b s 1"`, `"b (h h2) -> b h"` with `h2=2`.
    operation : str
        sum, mean, max, min, prod, any, all, argmax or argmin.
    name : str
        Name of the op, by default the operation's.
    **sizes : sympy.Expr or int
        Sizes of split axes.

    Returns
    -------
    Tensor
        FLOPs: one for each element of `x`.

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
    if operation not in REDUCTIONS:
        raise GraphError(f"reduce: operation {operation!r}, expected one of {', '.join(REDUCTIONS)}")
    if not isinstance(x, Tensor) or not isinstance(pattern, str):
        raise GraphError(
            f"reduce: got ({type(x).__name__}, {type(pattern).__name__}), expected a tensor and a pattern"
        )
    parsed = parse_pattern(pattern, (x.ndim,))
    if any(isinstance(a, Affine) for a in (*parsed.operands[0], *parsed.result)):
        raise PatternError(f"pattern {pattern!r}: an index such as h*2+r, expected names")
    graph = current_graph(x.graph)
    x = graph.adopt(x)
    extents = extents_of(graph, parsed, [x], {k: poly(v) for k, v in sizes.items()})
    missing = sorted(set(parsed.result_names) - set(parsed.operand_names(0)))
    if missing:
        raise PatternError(f"pattern {pattern!r}: axis {missing[0]!r} of the result is not in the operand")
    if set(parsed.result_names) == set(parsed.operand_names(0)):
        raise PatternError(
            f"pattern {pattern!r}: nothing is reduced, expected an axis that the result leaves out"
        )
    names = parsed.operand_names(0)
    if any(len(a.names) != 1 for a in parsed.operands[0]):
        given = {n: extents[n] for n in names}
        x = rearrange(x, f"{' '.join(map(str, parsed.operands[0]))} -> {' '.join(names)}", **given)
    plain = parse_pattern(
        f"{' '.join(names)} -> {' '.join(a.names[0] if a.names else '1' for a in _flat(parsed))}"
    )
    (y,) = apply(REDUCE, [x], {"pattern": plain, "operation": operation}, name or operation)
    if any(len(a.names) > 1 for a in parsed.result):
        given = {n: extents[n] for n in parsed.result_names}
        left = " ".join(a.names[0] if a.names else "1" for a in _flat(parsed))
        y = rearrange(y, f"{left} -> {' '.join(map(str, parsed.result))}", **given)
    return y


def _flat(pattern: Pattern) -> list[Axes | Affine]:
    """Dimensions of the result with merged axes apart: the merging is a view or copy of its own."""
    out: list[Axes | Affine] = []
    for a in pattern.result:
        out += [Axes((n,)) for n in a.names] if len(a.names) > 1 else [a]
    return out
