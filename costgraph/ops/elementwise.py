"""Elementwise functions with broadcasting, dropout, and constant tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce as fold
from numbers import Integral, Real
from typing import Annotated, TypeVar

import numpy as np
import sympy

from ..algebra.polynomial import ONE, Poly, poly
from ..algebra.symbols import shown
from ..dtypes import DTYPES, DType, promote
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Domain,
    Flag,
    Flops,
    Op,
    OpKind,
    Result,
    Split,
    Tensor,
    all_of,
    apply,
    current_graph,
    named,
    need,
    need_flag,
    need_tensor,
    optional,
)
from ..ir.strides import Sizes, elementwise, is_integral
from ..notation.validation import NUMBER, REAL, Rule
from . import rules
from . import sharding_rule as splits
from .access_footprint import shared
from .fill import fill
from .functions import FUNCTIONS, Elementwise, Function, define, of_complex
from .registry import register

__all__ = [
    "FUNCTIONS",
    "Function",
    "Pointwise",
    "cast",
    "pointwise",
    "Dropout",
    "dropout",
    "equal",
    "exp",
    "full",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "log",
    "maximum",
    "minimum",
    "sqrt",
    "where",
    "zeros",
]


# -- pointwise op ------------------------------------------------------------------------------------------------------

T = TypeVar("T")


#: Functions that keep the first operand's dtype, whatever the mask and fill value.
_FILLS = ("masked_fill", "masked_scale")
#: Linear functions: they map a partial sum to a partial sum.
_LINEAR = ("add", "sub", "neg", "copy", "cast")


def _broadcast(operands: Sequence[Tensor]) -> Sizes:
    rank = max(t.ndim for t in operands)
    sizes = []
    for i in range(rank):
        axis_sizes = [(t, t.sizes[i - rank + t.ndim]) for t in operands if i - rank + t.ndim >= 0]
        size = next((n for _, n in axis_sizes if n != ONE), ONE)
        for t, n in axis_sizes:
            if n != ONE and not t.graph.same(n, size):
                raise ShapeError(
                    f"axis {i - rank} has sizes {size} and {n} in {' and '.join(map(repr, operands))}, expected equal "
                    f"sizes or 1"
                )
        sizes.append(size)
    return tuple(sizes)


def _format(function: Function, operands: Sequence[Tensor], dtype: DType | None, numbers: str) -> DType:
    if dtype is not None:
        return dtype
    if function.result == "bool":
        return find_dtype("bool")
    # conditions, masks and fill values do not take part in type promotion
    voters = operands[1:] if function.name == "where" else operands[:1] if function.name in _FILLS else operands
    common = fold(promote, (t.dtype for t in voters))
    if function.name not in _FILLS:
        common = _with_numbers(common, numbers)
    if common.kind == "complex" and function.name == "abs":
        return find_dtype(common.element)
    return find_dtype("fp32") if function.result == "float" and common.kind in ("int", "bool") else common


def _with_numbers(common: DType, numbers: str) -> DType:
    """Return the dtype after promotion with scalars: as in torch, only a higher category than the tensors' counts."""
    if numbers == "complex" and common.kind != "complex":
        return find_dtype("complex128" if common.name == "fp64" else "complex64")
    if numbers == "float" and common.kind in ("int", "bool"):
        return find_dtype("fp32")
    return find_dtype("int64") if numbers == "int" and common.kind == "bool" else common


def _number_category(numbers: Sequence[object]) -> str:
    """Return the highest category among scalars: complex, float, int or bool."""
    if any(isinstance(n, complex) for n in numbers):
        return "complex"
    if all(isinstance(n, bool | np.bool_) for n in numbers):
        return "bool"
    return "int" if all(map(_is_integer, numbers)) else "float"


def _is_integer(number: object) -> bool:
    if isinstance(number, sympy.Expr) and not number.is_number:  # D/H is a float, as in Python
        return is_integral(poly(_exact(number)))
    return isinstance(number, Integral | Poly)  # sizes are integers


def _plain_number(place: str, number: object) -> complex | Poly:
    """Return a number as a Python number, or as a formula: both can be saved in files."""
    if isinstance(number, sympy.Expr):
        return _formula(place, number)
    if isinstance(number, np.generic):
        number = number.item()
    if isinstance(number, int | float | complex | Poly):
        return number
    return int(number) if isinstance(number, Integral) else float(number)  # type: ignore[arg-type]  # a Real


def _formula(place: str, expr: sympy.Expr) -> int | float | Poly:
    """Return a formula of sizes, or its value if it has none; floats count as the decimals that they print."""
    try:
        formula = poly(_exact(expr))
        if formula.names():
            return formula
        return formula.constant if isinstance(formula.constant, int) else float(formula.expr)
    except (ShapeError, TypeError, ValueError, OverflowError) as error:
        raise ShapeError(f"{place}: number {shown(expr)}: {error}") from None


def _exact(expr: sympy.Expr) -> sympy.Expr:
    return expr.xreplace({f: sympy.Rational(repr(float(f))) for f in expr.atoms(sympy.Float, sympy.NumberSymbol)})


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, int | float | complex | Poly)


@register
@dataclass(frozen=True, kw_only=True)
class Pointwise(OpKind):
    """Elementwise function of tensors and scalars."""

    name = "pointwise"
    restricted = True
    takes_complex = True
    function: Elementwise
    scalars: Annotated[
        tuple[int | float | complex | Poly | None, ...],
        Rule("a tuple of numbers, formulas and None", all_of(_is_scalar)),
    ] = ()
    """Function arguments, None in place of each tensor; empty if all are tensors."""
    numbers: Annotated[str, Rule("bool, int, float or complex", ("bool", "int", "float", "complex").__contains__)] = (
        "bool"
    )
    """Highest category among the scalars, for type promotion."""
    inplace: Flag = False
    """Whether it writes into its first operand."""
    dtype: Annotated[DType | None, optional("a number format", lambda v: isinstance(v, DType))] = None
    """Result dtype, None for torch's promotion."""
    masked: Annotated[Domain | None, optional("a domain", lambda v: isinstance(v, Domain))] = None
    """Domain that a causal mask keeps."""
    reads, writes = rules.under_the_result, rules.all_results

    def arguments(self, operands: Sequence[T]) -> tuple[complex | Poly | T | None, ...]:
        """Return the function's arguments: operands and scalars in order."""
        remaining = iter(operands)
        return tuple(next(remaining) if s is None else s for s in self.scalars or (None,) * len(operands))

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer one result with the broadcast shape."""
        function = self.function
        need(bool(operands), "no operand")
        numbers = [n for n in self.scalars if n is not None]
        tensors = len(self.scalars) - len(numbers) if self.scalars else len(operands)
        need(tensors == len(operands), f"scalars {shown(self.scalars)} for {len(operands)} operands")
        if len(operands) + len(numbers) != function.arity:
            raise ShapeError(f"{function.name} of {len(operands) + len(numbers)} operands, expected {function.arity}")
        sizes = _broadcast(operands)
        # a mask's gradient is zero outside the operand's domain
        domain = None if function.name == "causal_mask_backward" else shared(operands, sizes)
        result = _format(function, operands, self.dtype, self.numbers)
        if self.inplace:
            first = operands[0]
            if first.sizes != sizes or first.dtype != result:
                raise ShapeError(f"in place into {first!r}: expected an operand of the result's shape and format")
            if first.domain != domain:
                raise ShapeError(f"in place into {first!r}: expected the domain of the result")
            return [Result(sizes, result, first.strides, of=0, offset=first.offset, domain=domain)]
        simplified = operands[0].graph.simplified
        strides = elementwise(simplified(sizes), [(simplified(t.sizes), simplified(t.strides)) for t in operands])
        return [Result(sizes, result, strides, domain=domain)]

    def flops(self, op: Op) -> Flops:
        """Count the function's FLOPs for each result element."""
        complex_ = any(t.dtype.kind == "complex" for t in (*op.operands, *op.results))
        return rules.applied(rules.points(op.results[0]), of_complex(self.function) if complex_ else self.function)

    def overwrites(self) -> tuple[int, ...]:
        """Return the first operand if the op works in place."""
        return (0,) if self.inplace else ()

    def placed(self, op: Op) -> Split:
        """Split any axis but a mask's keys; for a mask without a known domain also not the queries."""
        unsplittable = range(op.results[0].ndim)[-2:] if self.function.name.startswith("causal_mask") else ()
        unsplittable = unsplittable[1:] if self.masked is not None else unsplittable
        scaled = self.function.name in ("mul", "div") and len(op.operands) == 1
        scaled = scaled and self.scalars[:1] == (None,)
        real = op.results[0].dtype.kind in ("float", "complex")  # rounding and comparing are not linear
        linear = self.function.name in _LINEAR and not any(s is not None for s in self.scalars)
        product = real and self.function.name == "mul" and len(op.operands) == 2
        numbers = op.graph.fused and bool(op.operands[0].ndim) and not any(t.ndim for t in op.operands[1:])
        by_number = real and numbers and len(op.operands) == 2 and self.function.name in ("mul", "div")
        rule = splits.alike(op, whole=unsplittable, linear=real and (scaled or linear))
        return replace(rule, product=product, scaled=by_number)


def pointwise(
    function: str | Function,
    *operands: Tensor | Annotated[complex, NUMBER] | Poly | sympy.Expr,
    inplace: bool = False,
    dtype: object = None,
    name: str = "",
) -> Tensor:
    """Apply an elementwise function, with NumPy broadcasting.

    Parameters
    ----------
    function : str or Function
        Name in `FUNCTIONS`, or a custom record.
    *operands : Tensor, number or sympy.Expr
        At least one tensor; scalars are free to read and may be formulas of sizes: `scores * K**-0.5`.
    inplace : bool
        Whether to write into the first operand.
    dtype : str or DType, optional
        Result dtype, by default torch's promotion.
    name : str
        Op name, by default the function's.

    Returns
    -------
    Tensor
        Broadcast shape, in the operands' memory order. FLOPs: the function's per element.

    Raises
    ------
    GraphError, ShapeError
        If the function is unknown, sizes do not broadcast, or a formula contains other symbols than sizes.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     y = cg.ops.pointwise("gelu", g.input("x", (B, D)))
    >>> cg.flops(g)
    5*B*D
    """
    record = FUNCTIONS.get(function) if isinstance(function, str) else function
    if not isinstance(record, Function):
        raise GraphError(f"pointwise: function {shown(function)}, expected one of {', '.join(FUNCTIONS)}")
    tensors = [t for t in operands if isinstance(t, Tensor)]
    numbers = [t for t in operands if not isinstance(t, Tensor)]
    # formulas of sizes become numbers when sizes are bound
    if not tensors or not all(isinstance(n, Real | complex | np.bool_ | Poly | sympy.Expr) for n in numbers):
        operand_texts = ", ".join(map(shown, operands))
        raise GraphError(
            f"{record.name}: operands ({operand_texts}), expected tensors and numbers, at least one tensor"
        )
    need_flag(record.name, inplace=inplace)
    if inplace and not isinstance(operands[0], Tensor):
        raise GraphError(f"{record.name}: in place into {operands[0]!r}, expected a tensor first")
    kind = Pointwise(
        function=record,
        scalars=tuple(None if isinstance(t, Tensor) else _plain_number(record.name, t) for t in operands)
        if numbers
        else (),
        numbers=_number_category(numbers),
        inplace=inplace,
        dtype=None if dtype is None else find_dtype(dtype),
    )
    return apply(kind, tensors, named(name, record.name))[0]


def cast(x: Tensor, dtype: object, *, name: str = "cast") -> Tensor:
    """Cast to another dtype: no FLOPs, one read and one write; free if `x` has that dtype."""
    need_tensor("cast", x)
    target = find_dtype(dtype)
    return x if x.dtype == target else pointwise("cast", x, dtype=target, name=name)


# -- dropout -----------------------------------------------------------------------------------------------------------

_DROPOUT = define("dropout(x) = x * mask * scale")


@register
@dataclass(frozen=True, kw_only=True)
class Dropout(OpKind):
    """Dropout: zeros random elements and scales the rest; also returns the mask."""

    name = "dropout"
    restricted = True
    function: Elementwise = _DROPOUT
    mask: Annotated[str, Rule("the name of a number format", lambda v: v in DTYPES)]
    """Mask dtype."""
    p: Annotated[float, Rule("a number between 0 and 1", lambda v: isinstance(v, int | float) and 0 < v < 1)]
    """Probability that an element is zeroed."""
    reads, writes = rules.whole, rules.all_results
    placed = splits.same_shape

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the result and the mask."""
        rules.need_operands(self, operands, 1)
        x, name = operands[0], self.function.name
        need(self.function.arity == 1, f"function {name!r} of {self.function.arity} operands")
        strides = elementwise(x.sizes, [(x.sizes, x.strides)])
        mask = Result(x.sizes, find_dtype(self.mask), strides, domain=x.domain)
        return [Result(x.sizes, x.dtype, strides, domain=x.domain), mask]

    def flops(self, op: Op) -> Flops:
        """Count the function's FLOPs for each element."""
        return rules.applied(rules.points(op.results[0]), self.function)


def dropout(x: Tensor, p: float = 0.1, *, mask: str = "bool", name: str = "dropout") -> Tensor:
    """Zero elements at random and scale the others; free with `p=0`.

    Parameters
    ----------
    x : Tensor
        Any shape.
    p : float
        Probability that an element is zeroed, 0 <= p < 1; costs do not depend on it.
    mask : str or DType
        Mask dtype; the kernel also writes the mask. bool as torch on a GPU, or the dtype of `x` as torch on a CPU.
    name : str
        Op name.

    Returns
    -------
    Tensor
        FLOPs: 2 per element; random number generation is not counted.

    Raises
    ------
    GraphError
        If `p` is not a probability.
    """
    if isinstance(p, bool) or not isinstance(p, Real) or not 0 <= p < 1:
        raise GraphError(f"dropout: p={p!r}, expected a number from 0 to below 1")
    if p == 0:
        return x
    return apply(Dropout(mask=find_dtype(mask).name, p=float(p)), [x], name)[0]


# -- functions by name -------------------------------------------------------------------------------------------------

#: A tensor, or a scalar, which is free to read.
Operand = Tensor | Annotated[float, REAL]


def exp(x: Tensor) -> Tensor:
    """Return e**x elementwise: one transcendental per element."""
    return pointwise("exp", x)


def log(x: Tensor) -> Tensor:
    """Return the elementwise natural logarithm: one transcendental per element."""
    return pointwise("log", x)


def sqrt(x: Tensor) -> Tensor:
    """Return the elementwise square root: one transcendental per element."""
    return pointwise("sqrt", x)


def maximum(a: Operand, b: Operand) -> Tensor:
    """Return the elementwise maximum: 1 FLOP per element."""
    return pointwise("maximum", a, b)


def minimum(a: Operand, b: Operand) -> Tensor:
    """Return the elementwise minimum: 1 FLOP per element."""
    return pointwise("minimum", a, b)


def equal(a: Operand, b: Operand) -> Tensor:
    """Return elementwise `a == b` as bool: 1 FLOP per element. The operator `==` compares tensors by identity."""
    return pointwise("eq", a, b)


def less(a: Operand, b: Operand) -> Tensor:
    """Return elementwise `a < b` as bool: 1 FLOP per element."""
    return pointwise("less", a, b)


def less_equal(a: Operand, b: Operand) -> Tensor:
    """Return elementwise `a <= b` as bool: 1 FLOP per element."""
    return pointwise("less_equal", a, b)


def greater(a: Operand, b: Operand) -> Tensor:
    """Return elementwise `a > b` as bool: 1 FLOP per element."""
    return pointwise("less", b, a)


def greater_equal(a: Operand, b: Operand) -> Tensor:
    """Return elementwise `a >= b` as bool: 1 FLOP per element."""
    return pointwise("less_equal", b, a)


def where(condition: Tensor, a: Operand, b: Operand) -> Tensor:
    """Select elements from `a` where the condition holds, else from `b`: 1 FLOP per element.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, S))
    ...     y = cg.ops.where(x > 0, x, 0.1 * x)
    >>> y.dtype.name, cg.flops(g)
    ('fp32', 3*B*S)
    """
    return pointwise("where", condition, a, b)


def full(shape: Sequence[object], value: float, dtype: object = None, *, name: str = "full") -> Tensor:
    """Create a tensor filled with one value, in the graph's dtype by default: no FLOPs, one write."""
    return fill(shape, value, current_graph().root.dtype if dtype is None else dtype, name=name)


def zeros(shape: Sequence[object], dtype: object = None, *, name: str = "zeros") -> Tensor:
    """Create a tensor of zeros, in the graph's dtype by default: no FLOPs, one write."""
    return full(shape, 0, dtype, name=name)
