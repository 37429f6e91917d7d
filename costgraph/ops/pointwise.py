"""Elementwise functions with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce as fold
from numbers import Integral, Real

import numpy as np

from .. import rules
from ..arguments import named, need_flag, need_tensor
from ..dtypes import DType, promote
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, ShapeError
from ..graph import apply
from ..layout import Sizes, elementwise
from ..op import Attrs, OpKind, Result
from ..polynomial import ONE
from ..tensor import Tensor
from .registry import register

__all__ = ["FUNCTIONS", "POINTWISE", "Function", "cast", "pointwise"]


@dataclass(frozen=True)
class Function:
    """An elementwise function: what one element costs."""

    name: str
    """Name in tables, files and `costgraph.pointwise`."""
    arity: int
    """Number of operands."""
    flops: int
    """Adds, multiplies, divides, comparisons and selections."""
    transcendentals: int = 0
    """exp, log, sqrt, sin, tanh, erf and the like, one each."""
    result: str = "same"
    """Format of the result: same as the operands', float, or bool."""
    formula: str = ""
    """What is computed."""


def _table() -> dict[str, Function]:
    f = Function
    rows = [
        f("copy", 1, 0, formula="x"),
        f("cast", 1, 0, formula="x in another format"),
        f("add", 2, 1, formula="a + b"),
        f("sub", 2, 1, formula="a - b"),
        f("mul", 2, 1, formula="a * b"),
        f("div", 2, 1, result="float", formula="a / b"),
        f("maximum", 2, 1, formula="max(a, b)"),
        f("minimum", 2, 1, formula="min(a, b)"),
        f("pow", 2, 1, 2, "float", "exp(b * log(a))"),
        f("eq", 2, 1, result="bool", formula="a == b"),
        f("less", 2, 1, result="bool", formula="a < b"),
        f("logical_and", 2, 1, result="bool", formula="a and b"),
        f("where", 3, 1, formula="a if c else b"),
        f("masked_fill", 2, 1, formula="fill if mask else x"),
        f("causal_mask", 1, 1, formula="x, or -inf where the query does not see the key"),
        f("fma", 3, 2, formula="a * b + c"),
        f("lerp", 3, 3, formula="a + t * (b - a)"),
        f("neg", 1, 1, formula="-x"),
        f("abs", 1, 1, formula="|x|"),
        f("sign", 1, 1, formula="sign(x)"),
        f("square", 1, 1, formula="x * x"),
        f("reciprocal", 1, 1, result="float", formula="1 / x"),
        f("clamp", 1, 2, formula="min(max(x, low), high)"),
        f("round", 1, 1, formula="nearest integer"),
        f("floor", 1, 1, formula="largest integer below"),
        f("logical_not", 1, 1, result="bool", formula="not x"),
        f("exp", 1, 0, 1, "float", "exp(x)"),
        f("expm1", 1, 0, 1, "float", "exp(x) - 1"),
        f("log", 1, 0, 1, "float", "log(x)"),
        f("log1p", 1, 0, 1, "float", "log(1 + x)"),
        f("sqrt", 1, 0, 1, "float", "sqrt(x)"),
        f("rsqrt", 1, 0, 1, "float", "1 / sqrt(x)"),
        f("sin", 1, 0, 1, "float", "sin(x)"),
        f("cos", 1, 0, 1, "float", "cos(x)"),
        f("tanh", 1, 0, 1, "float", "tanh(x)"),
        f("erf", 1, 0, 1, "float", "erf(x)"),
        f("relu", 1, 1, formula="max(x, 0)"),
        f("relu6", 1, 2, formula="min(max(x, 0), 6)"),
        f("relu2", 1, 2, formula="max(x, 0)**2"),
        f("leaky_relu", 1, 2, formula="max(x, slope * x)"),
        f("sigmoid", 1, 3, 1, "float", "1 / (1 + exp(-x))"),
        f("silu", 1, 3, 1, "float", "x / (1 + exp(-x))"),
        f("gelu", 1, 4, 1, "float", "0.5 * x * (1 + erf(x * sqrt(1/2)))"),
        f("gelu_tanh", 1, 8, 1, "float", "0.5 * x * (1 + tanh(c * (x + 0.044715 * x*x*x)))"),
        f("quick_gelu", 1, 3, 1, "float", "x / (1 + exp(-1.702 * x))"),
        f("softplus", 1, 1, 2, "float", "log(1 + exp(x))"),
        f("mish", 1, 2, 3, "float", "x * tanh(log(1 + exp(x)))"),
        f("elu", 1, 4, 1, "float", "x if x > 0 else a * (exp(x) - 1)"),
        f("softcap", 1, 2, 1, "float", "c * tanh(x / c)"),
        f("hardsigmoid", 1, 4, formula="min(max(x + 3, 0), 6) / 6"),
        f("hardswish", 1, 5, formula="x * min(max(x + 3, 0), 6) / 6"),
    ]
    return {row.name: row for row in rows}


#: Every elementwise function by name.
FUNCTIONS: dict[str, Function] = _table()


def _broadcast(operands: Sequence[Tensor]) -> Sizes:
    rank = max(t.ndim for t in operands)
    out = []
    for i in range(rank):
        at = [(t, t.sizes[i - rank + t.ndim]) for t in operands if i - rank + t.ndim >= 0]
        size = next((n for _, n in at if n != ONE), ONE)
        for t, n in at:
            if n != ONE and not t.graph.same(n, size):
                raise ShapeError(
                    f"axis {i - rank} has sizes {size} and {n} in {' and '.join(map(repr, operands))}, expected equal "
                    f"sizes or 1"
                )
        out.append(size)
    return tuple(out)


def _format(function: Function, operands: Sequence[Tensor], wanted: DType | None, numbers: str) -> DType:
    if wanted is not None:
        return wanted
    if function.result == "bool":
        return find_dtype("bool")
    # a condition, a mask and what fills it have no say in the format of what is selected
    voters = operands[1:] if function.name == "where" else operands[:1] if function.name == "masked_fill" else operands
    common = fold(promote, (t.dtype for t in voters))
    if function.name != "masked_fill":
        common = _with_numbers(common, numbers)
    return find_dtype("fp32") if function.result == "float" and common.kind != "float" else common


def _with_numbers(common: DType, numbers: str) -> DType:
    """Return the format after numbers have had their say: torch's rule, only a kind above the tensors' counts."""
    if numbers == "float" and common.kind != "float":
        return find_dtype("fp32")
    return find_dtype("int64") if numbers == "int" and common.kind == "bool" else common


def _kind_of(numbers: Sequence[object]) -> str:
    """Return the highest kind among Python numbers: float, int or bool."""
    if all(isinstance(n, bool | np.bool_) for n in numbers):
        return "bool"
    return "int" if all(isinstance(n, Integral) for n in numbers) else "float"


def _plain(number: object) -> int | float:
    """Return a number as one of Python's own, which a file can hold."""
    if isinstance(number, np.generic):
        number = number.item()
    return number if isinstance(number, int | float) else float(number)  # type: ignore[arg-type]  # a Real


def _infer(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    function = attrs["function"]
    numbers = [n for n in attrs.get("scalars", ()) if n is not None]
    if len(operands) + len(numbers) != function.arity:
        raise ShapeError(f"{function.name} of {len(operands) + len(numbers)} operands, expected {function.arity}")
    sizes = _broadcast(operands)
    domain = next((t.domain for t in operands if t.domain is not None and t.sizes == sizes), None)
    result = _format(function, operands, attrs.get("dtype"), attrs.get("numbers", "bool"))
    if attrs.get("inplace"):
        first = operands[0]
        if first.sizes != sizes or first.dtype != result or first.touched != first.numel:
            raise ShapeError(
                f"in place into {first!r}: expected an operand of the result's shape and format, not expanded"
            )
        return [Result(sizes, result, first.strides, of=0, offset=first.offset, domain=domain)]
    told = operands[0].graph.told
    strides = elementwise(told(sizes), [(told(t.sizes), told(t.strides)) for t in operands])
    return [Result(sizes, result, strides, domain=domain)]


POINTWISE = register(
    OpKind(
        name="pointwise",
        infer=_infer,
        flops=rules.per_element,
        reads=rules.whole,
        writes=rules.all_results,
    )
)


def pointwise(
    function: str | Function,
    *operands: Tensor | float,
    inplace: bool = False,
    dtype: object = None,
    name: str = "",
) -> Tensor:
    """Apply an elementwise function, shapes broadcast from the right as in NumPy.

    Parameters
    ----------
    function : str or Function
        A name of `FUNCTIONS`, or a record of one's own.
    *operands : Tensor or number
        At least one tensor; a number is free to read.
    inplace : bool
        Write into the storage of the first operand.
    dtype : str or DType, optional
        Format of the result, by default torch's common one.
    name : str
        Name of the op, by default the function's.

    Returns
    -------
    Tensor
        FLOPs: the function's for each element of the result. The order of the operands' axes in memory is kept.

    Raises
    ------
    GraphError, ShapeError
        If the function is unknown, or sizes do not broadcast.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     y = cg.pointwise("gelu", g.input("x", (B, D)))
    >>> cg.flops(g)
    5*B*D
    """
    record = FUNCTIONS.get(function) if isinstance(function, str) else function
    if not isinstance(record, Function):
        raise GraphError(f"pointwise: function {function!r}, expected one of {', '.join(FUNCTIONS)}")
    tensors = [t for t in operands if isinstance(t, Tensor)]
    numbers = [t for t in operands if not isinstance(t, Tensor)]
    if not tensors or not all(isinstance(n, Real | np.bool_) for n in numbers):
        raise GraphError(f"{record.name}: operands {operands!r}, expected tensors and numbers, one tensor at least")
    need_flag(record.name, inplace=inplace)
    attrs: dict[str, object] = {"function": record}
    if numbers:
        # None where a tensor stands
        scalars = tuple(None if isinstance(t, Tensor) else _plain(t) for t in operands)
        attrs["scalars"], attrs["numbers"] = scalars, _kind_of(numbers)
    if inplace:
        if not isinstance(operands[0], Tensor):
            raise GraphError(f"{record.name}: in place into {operands[0]!r}, expected a tensor first")
        attrs["inplace"] = True
    if dtype is not None:
        attrs["dtype"] = find_dtype(dtype)
    return apply(POINTWISE, tensors, attrs, named(name, record.name))[0]


def cast(x: Tensor, dtype: object, *, name: str = "cast") -> Tensor:
    """Convert to another number format: no FLOPs, one read and one write; free if it has the format already."""
    need_tensor("cast", x)
    wanted = find_dtype(dtype)
    return x if x.dtype == wanted else pointwise("cast", x, dtype=wanted, name=name)
