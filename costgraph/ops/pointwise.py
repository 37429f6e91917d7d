"""Elementwise functions with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
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
from ..polynomial import ONE, Poly
from ..tensor import Tensor
from .functions import FUNCTIONS, Function
from .registry import register

__all__ = ["FUNCTIONS", "POINTWISE", "Function", "cast", "pointwise"]


#: Functions whose result has the format of the first operand: a mask and what fills it have no say.
_FILLS = ("masked_fill", "masked_scale")


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
    voters = operands[1:] if function.name == "where" else operands[:1] if function.name in _FILLS else operands
    common = fold(promote, (t.dtype for t in voters))
    if function.name not in _FILLS:
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
    return "int" if all(isinstance(n, Integral | Poly) for n in numbers) else "float"


def _plain(number: object) -> int | float | Poly:
    """Return a number as one of Python's own or a size, which a file can hold."""
    if isinstance(number, Poly):
        return number
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
    if function.name == "causal_mask_backward":
        domain = None  # zeros where the operand holds nothing
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
    *operands: Tensor | float | Poly,
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
    # a size is a number that is known once sizes are bound
    if not tensors or not all(isinstance(n, Real | np.bool_ | Poly) for n in numbers):
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
