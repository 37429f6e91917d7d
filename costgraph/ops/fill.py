"""Ops that write memory whatever was in it: a constant, another tensor's elements, elements with zeros around them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from ..algebra.polynomial import ZERO, Poly, poly
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, ShapeError
from ..graph.arguments import need_tensor, positive, sizes_of
from ..graph.graph import apply
from ..graph.op import Attrs, Op, OpKind, Result
from ..graph.tensor import Tensor
from . import rules
from .layout import _axis, _room
from .reach import alike, carried
from .registry import register

__all__ = ["ASSIGN", "FILL", "PAD", "assign", "fill", "pad"]


def _filled(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    return [Result(attrs["sizes"], attrs["dtype"])]


def _assigned(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    target, value = operands
    if target.ndim != value.ndim or not all(map(target.graph.same, target.sizes, value.sizes)):
        raise ShapeError(f"assign {value!r} to {target!r}: expected equal shapes")
    if target.touched != target.numel:
        raise ShapeError(f"assign to {target!r}: expected a tensor that is not expanded")
    domain = alike(operands)
    return [Result(target.sizes, target.dtype, target.strides, of=0, offset=target.offset, domain=domain)]


def _padded(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    (x,) = operands
    axis, start, step, full = attrs["axis"], attrs["start"], attrs["step"], attrs["full"]
    for what, value in (("start", start), ("room", _room(full, start, x.sizes[axis], step))):
        if value.constant is not None and (value.constant < 0 or not isinstance(value.constant, int)):
            raise ShapeError(
                f"pad of {x!r}: {what} is {value} on axis {axis}, expected {x.sizes[axis]} positions from {start} by "
                f"{step} within {full}"
            )
    domain = carried(x, [None if i == axis else i for i in range(x.ndim)])
    return [Result((*x.sizes[:axis], full, *x.sizes[axis + 1 :]), x.dtype, domain=domain)]


def _value_read(op: Op) -> tuple[Poly, ...]:
    # what was in the target has no say
    return ZERO, rules.elements(op.operands[1])


FILL = register(OpKind("fill", _filled, flops=rules.free, reads=lambda op: (), writes=rules.all_results))
ASSIGN = register(OpKind("assign", _assigned, rules.free, _value_read, rules.all_results, restricted=True))
PAD = register(OpKind("pad", _padded, rules.free, rules.whole, rules.all_results, restricted=True))


def fill(shape: Sequence[object], value: float = 0, dtype: object = "fp32", *, name: str = "zeros") -> Tensor:
    """Make a tensor of one number: no FLOPs, one write. The graph is the one that is open.

    Parameters
    ----------
    shape : sequence of sympy.Expr or int
        Sizes.
    value : float
        What every element is.
    dtype : str or DType
        Number format.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        Dense.

    Raises
    ------
    GraphError, ShapeError, FormatError
        If the value is no number, a size is none, or the format is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.ops.fill import fill
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     zeros = fill((B, D))
    >>> cg.flops(g), cg.bytes_moved(g)
    (0, 4*B*D)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise GraphError(f"fill: value {value!r}, expected a number")
    attrs = {"sizes": sizes_of(shape, "fill"), "dtype": find_dtype(dtype), "value": float(value)}
    return apply(FILL, [], attrs, name)[0]


def assign(target: Tensor, value: Tensor, *, name: str = "assign") -> Tensor:
    """Write a tensor into the elements of another one, as torch's `copy_`: one read of it, one write, no FLOPs.

    Parameters
    ----------
    target : Tensor
        What is overwritten, a view if one likes.
    value : Tensor
        Of the same shape; its numbers are converted to the target's format.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        The target with the new elements, in the same storage.

    Raises
    ------
    GraphError, ShapeError
        If one is no tensor, or shapes differ.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.ops.fill import assign
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     y = assign(g.input("total", (N,)), g.input("part", (N,), "bf16"))
    >>> cg.flops(g), cg.bytes_moved(g)
    (0, 6*N)
    """
    need_tensor("assign", target, value)
    return apply(ASSIGN, [target, value], {"inplace": True}, name)[0]


def pad(
    x: Tensor, axis: int, start: object, full: object, step: int = 1, *, causal: bool = False, name: str = "pad"
) -> Tensor:
    """Put a tensor into zeros: at `start`, `start + step`, ... of an axis of size `full`. The reverse of `slice_axis`.

    Parameters
    ----------
    x : Tensor
        What is put there.
    axis : int
        Axis that grows.
    start : sympy.Expr or int
        Position of its first element.
    full : sympy.Expr or int
        Size of the axis of the result.
    step : int
        Positions between neighbours.
    causal : bool
        Whether the axis is that of positions and the zeros at its start stand for earlier ones, which `decode` keeps.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        Dense. No FLOPs: one read of `x`, one write of the result.

    Raises
    ------
    GraphError, ShapeError
        If it is no tensor, or is known not to fit.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.ops.fill import pad
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     y = pad(g.input("x", (B, S)), 1, 0, 2*S)
    >>> y.shape, cg.bytes_moved(g)
    ((B, 2*S), 12*B*S)
    """
    need_tensor("pad", x)
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ShapeError(f"pad of {x!r}: step {step!r}, expected a positive integer")
    at, first, whole = _axis(x, axis), poly(start), positive("pad: full", full)
    # looked at again when sizes are bound, as is the start
    room = _room(whole, first, x.sizes[at], step)
    attrs = {"axis": at, "start": first, "step": step, "full": whole, "room": room}
    return apply(PAD, [x], attrs | ({"causal": True} if causal else {}), name)[0]
