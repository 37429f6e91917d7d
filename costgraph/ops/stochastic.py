"""Dropout: the one op that needs random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated

from ..dtypes import DTYPES
from ..dtypes import dtype as find_dtype
from ..errors import GraphError
from ..graph.facts import need
from ..graph.graph import apply
from ..graph.op import Flops, Op, OpKind, Result
from ..graph.strides import elementwise
from ..graph.tensor import Tensor
from ..notation.door import Rule
from . import rules, splits
from .functions import Elementwise, Function
from .registry import register

__all__ = ["Dropout", "dropout"]

_DROPOUT = Function("dropout", 1, 2, formula="x * mask * scale")


@register
@dataclass(frozen=True, kw_only=True)
class Dropout(OpKind):
    """Zeros at random places, and the mask that says where."""

    name = "dropout"
    restricted = True
    function: Elementwise = _DROPOUT
    mask: Annotated[str, Rule("the name of a number format", lambda v: v in DTYPES)]
    """Format of the mask."""
    p: Annotated[float, Rule("a number between 0 and 1", lambda v: isinstance(v, int | float) and 0 < v < 1)]
    """Probability that an element is zeroed."""
    reads, writes = rules.whole, rules.all_results
    placed = splits.same_shape

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the elements that are left, and the mask."""
        rules.need_operands(self, operands, 1)
        x, name = operands[0], self.function.name
        need(self.function.arity == 1, f"function {name!r} of {self.function.arity} operands")
        strides = elementwise(x.sizes, [(x.sizes, x.strides)])
        mask = Result(x.sizes, find_dtype(self.mask), strides, domain=x.domain)
        return [Result(x.sizes, x.dtype, strides, domain=x.domain), mask]

    def flops(self, op: Op) -> Flops:
        """Count what the function does with each element."""
        return rules.applied(rules.points(op.results[0]), self.function)


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
    return apply(Dropout(mask=find_dtype(mask).name, p=float(p)), [x], name)[0]
