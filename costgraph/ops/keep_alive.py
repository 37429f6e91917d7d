"""Views that say something: what lives until here, in which format, and what a backward pass does not go through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ..dtypes import DType
from ..errors import GraphError
from ..ir.graph import Flag, OpKind, Result, Tensor, apply, itself, need, need_tensor, optional
from . import rules
from . import sharding_rule as splits
from .registry import register

__all__ = [
    "Keep",
    "StopGradient",
    "keep",
    "stop_gradient",
]


@register
@dataclass(frozen=True, kw_only=True)
class Keep(OpKind):
    """A view of its first operand, before which the others cannot be given back."""

    name = "keep"
    restricted = crosses = takes_lists = True
    asked: Annotated[DType | None, optional("a number format", lambda v: isinstance(v, DType))] = None
    """Number format that a program asks for here, which the first operand has: in another one it would be cast."""
    fixed: Flag = False
    """Whether it asks for that one whatever format its model is in."""
    pulled_by: Annotated[str, optional("the name of a function", lambda v: isinstance(v, str))] = ""
    """Function of a program that states the gradient of the first operand, or why that is a leaf of autograd."""
    leaf: Flag = False
    """Whether the program makes a leaf of autograd here, whose gradient belongs to no parameter of the graph."""
    flops, reads, writes = rules.free, rules.nothing, rules.nothing
    placed = splits.as_it_is

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the first operand."""
        if not operands:
            raise GraphError("keep of nothing, expected one operand at least")
        x = operands[0]
        need(self.asked in (None, x.dtype), f"{self.asked} asked for of {x!r} in {x.dtype}")
        need(self.asked is not None or not self.fixed, "a fixed format, and none that is asked for")
        return [itself(x)]


@register
@dataclass(frozen=True, kw_only=True)
class StopGradient(OpKind):
    """A view of its operand through which no gradient passes."""

    name = "stop_gradient"
    restricted = True
    passes_gradients = False
    flops, reads, writes = rules.free, rules.nothing, rules.nothing
    placed = splits.as_it_is

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the operand."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        return [itself(x)]


def keep(x: Tensor, *others: Tensor, name: str = "keep") -> Tensor:
    """Let other tensors live until here, as what a variable of a program still names.

    A tensor dies at the last op that reads it. In eager code a variable, or the arguments of a call that has not
    returned, can name it longer: `keep` stands where they let go.

    Parameters
    ----------
    x : Tensor
        What is returned.
    *others : Tensor
        What lives at least as long as it takes to make `x`.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        A view of `x`: no FLOPs and no bytes. Gradients pass to `x` alone.

    Raises
    ------
    GraphError
        If something else than tensors is given.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> def peak(hold):
    ...     with cg.Graph("g") as g:
    ...         residual = cg.relu(g.input("x", (B, D)))
    ...         y = cg.tanh(cg.tanh(residual))
    ...         g.output(cg.ops.keep(y, residual) if hold else y)
    ...     return cg.peak_memory(g)
    >>> peak(False), peak(True)
    (12*B*D, 16*B*D)
    """
    need_tensor("keep", x, *others)
    return apply(Keep(), [x, *others], name)[0]


def stop_gradient(x: Tensor, *, name: str = "stop_gradient") -> Tensor:
    """Let no gradient pass: `x.detach()` in torch, `stop_gradient` in JAX.

    Parameters
    ----------
    x : Tensor
        What is a constant from here on.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        A view of `x`: no FLOPs and no bytes. Of what is computed from it alone, a backward pass computes nothing.

    Raises
    ------
    GraphError
        If it is no tensor.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> def step(target):
    ...     with cg.Graph("g") as g:
    ...         x = g.input("x", (B, D))
    ...         y = cg.linear(x, "b d -> b f", f=F)
    ...         d = y - target(cg.linear(x, "b d -> b f", f=F, name="teacher"))
    ...         g.output(cg.reduce(d * d, "b f -> ", "mean"))
    ...     return cg.matmul_flops(cg.backward(g))
    >>> step(lambda t: t), step(cg.ops.stop_gradient)
    (8*B*D*F, 6*B*D*F)
    """
    need_tensor("stop_gradient", x)
    return apply(StopGradient(), [x], name)[0]
