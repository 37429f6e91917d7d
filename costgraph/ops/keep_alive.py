"""Views with side information: extended lifetimes, requested dtypes, and gradients that stop."""

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
    "KeepAlive",
    "StopGradient",
    "keep_alive",
    "stop_gradient",
]


@register
@dataclass(frozen=True, kw_only=True)
class KeepAlive(OpKind):
    """View of its first operand that keeps the others alive until here."""

    name = "keep_alive"
    restricted = crosses = takes_lists = True
    requested_dtype: Annotated[DType | None, optional("a number format", lambda v: isinstance(v, DType))] = None
    """Dtype that the program requests here, equal to that of the first operand: another dtype would be cast."""
    fixed: Flag = False
    """Whether it is requested independently of the model's dtype."""
    custom_grad: Annotated[str, optional("the name of a function", lambda v: isinstance(v, str))] = ""
    """Function of the program that defines the operand's gradient, or the reason why it is an autograd leaf."""
    leaf: Flag = False
    """Whether it is an autograd leaf whose gradient belongs to no parameter of the graph."""
    flops, reads, writes = rules.free, rules.nothing, rules.nothing
    placed = splits.as_it_is

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the first operand itself."""
        if not operands:
            raise GraphError("keep_alive without operands, expected at least one")
        x = operands[0]
        need(self.requested_dtype in (None, x.dtype), f"requested format {self.requested_dtype} of {x!r} in {x.dtype}")
        need(self.requested_dtype is not None or not self.fixed, "a fixed format without a requested one")
        return [itself(x)]


@register
@dataclass(frozen=True, kw_only=True)
class StopGradient(OpKind):
    """View that blocks gradients."""

    name = "stop_gradient"
    restricted = True
    passes_gradients = False
    flops, reads, writes = rules.free, rules.nothing, rules.nothing
    placed = splits.as_it_is

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the operand itself."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        return [itself(x)]


def keep_alive(x: Tensor, *others: Tensor, name: str = "keep_alive") -> Tensor:
    """Keep other tensors alive until here, as program variables do.

    A tensor dies after its last reader. In eager code a variable, or an argument of a pending call, can keep it alive
    longer: put `keep_alive` where the last reference is dropped.

    Parameters
    ----------
    x : Tensor
        Tensor to return.
    *others : Tensor
        Tensors that stay alive at least until `x` exists.
    name : str
        Op name.

    Returns
    -------
    Tensor
        A view of `x`, without FLOPs or bytes. Gradients pass to `x` only.

    Raises
    ------
    GraphError
        If an argument is not a tensor.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> def peak(hold):
    ...     with cg.Graph("g") as g:
    ...         residual = cg.relu(g.input("x", (B, D)))
    ...         y = cg.tanh(cg.tanh(residual))
    ...         g.output(cg.ops.keep_alive(y, residual) if hold else y)
    ...     return cg.peak_memory(g)
    >>> peak(False), peak(True)
    (12*B*D, 16*B*D)
    """
    need_tensor("keep_alive", x, *others)
    return apply(KeepAlive(), [x, *others], name)[0]


def stop_gradient(x: Tensor, *, name: str = "stop_gradient") -> Tensor:
    """Stop gradients: `x.detach()` in torch, `stop_gradient` in JAX.

    Parameters
    ----------
    x : Tensor
        Tensor to treat as a constant.
    name : str
        Op name.

    Returns
    -------
    Tensor
        A view of `x`, without FLOPs or bytes. Ops whose operands are all constant get no backward pass.

    Raises
    ------
    GraphError
        If `x` is not a tensor.

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
