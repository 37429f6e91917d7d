"""Dropout: the one op that needs random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from ..dtypes import dtype as find_dtype
from ..errors import GraphError
from ..graph.graph import apply
from ..graph.op import Attrs, OpKind, Result
from ..graph.strides import elementwise
from ..graph.tensor import Tensor
from . import rules
from .pointwise import Function
from .registry import register

__all__ = ["DROPOUT", "dropout"]

_DROPOUT = Function("dropout", 1, 2, formula="x * mask * scale")


def _infer(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    (x,) = operands
    strides = elementwise(x.sizes, [(x.sizes, x.strides)])
    return [
        Result(x.sizes, x.dtype, strides, domain=x.domain),
        Result(x.sizes, find_dtype(attrs["mask"]), strides, domain=x.domain),
    ]


DROPOUT = register(
    OpKind("dropout", _infer, rules.per_element, reads=rules.whole, writes=rules.all_results, restricted=True)
)


def dropout(x: Tensor, p: float = 0.1, *, mask: str = "bool", name: str = "dropout") -> Tensor:
    """Zero elements at random and scale the others; free with `p=0`.

    Parameters
    ----------
    x : Tensor
        Any shape.
    p : float
        Probability that an element is zeroed, 0 <= p < 1; no cost depends on it.
    mask : str or DType
        Format of the mask that the kernel writes beside its result: bool as torch on a GPU, or that of `x` as torch
        on a CPU.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        FLOPs: 2 an element; random numbers are not counted.

    Raises
    ------
    GraphError
        If `p` is no probability.
    """
    if isinstance(p, bool) or not isinstance(p, Real) or not 0 <= p < 1:
        raise GraphError(f"dropout: p={p!r}, expected a number from 0 to below 1")
    if p == 0:
        return x
    return apply(DROPOUT, [x], {"function": _DROPOUT, "mask": find_dtype(mask).name, "p": float(p)}, name)[0]
