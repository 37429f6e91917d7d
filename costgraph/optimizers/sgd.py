"""Optimizers whose only state is a momentum: SGD and Lion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import GraphError
from ..notation.validation import guarded
from .optimizer import (
    Calls,
    Column,
    Optimizer,
    Slot,
    bounds,
)

__all__ = ["SGD", "Lion"]


@guarded()
@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent, op for op as torch.optim.SGD.

    Raises
    ------
    GraphError
        If torch would refuse a value.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import SGD, Slot
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     slots = SGD(momentum=0.9).update([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))])
    >>> cg.flops(g), cg.bytes_moved(g)
    (4*N, 32*N)
    """

    momentum: float = 0
    """Momentum; 0 for none, and no state."""
    dampening: float = 0
    """Dampening of the momentum: share of the gradient that does not enter it."""
    nesterov: bool = False
    """Whether to use Nesterov momentum."""
    weight_decay: float = 0
    """L2 penalty, added to the gradient; 0 for none."""
    maximize: bool = False
    """Whether to maximize the objective."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inf = float("inf")
        bounds("SGD", momentum=(self.momentum, 0, inf), weight_decay=(self.weight_decay, 0, inf))
        bounds("SGD", dampening=(self.dampening, -inf, inf))
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise GraphError(
                f"SGD: nesterov with momentum {self.momentum} and dampening {self.dampening}, expected a nonzero "
                "momentum and "
                f"no dampening"
            )

    def _states(self, slot: Slot) -> Column:
        return (slot.state("momentum_buffer"),) if self.momentum else ()

    def _update(self, calls: Calls, p: Column, g: Column, *states: Column) -> tuple[Column, Column]:
        raw_grad, is_temporary = g, False
        if self.maximize:
            g, is_temporary = calls.new("neg", g), True
        if self.weight_decay:
            g, is_temporary = calls.add(g, p, self.weight_decay, inplace=calls.listed and is_temporary), True
        step = g
        if self.momentum:
            (buffer,) = states
            buffer = calls.add(calls.inplace("mul", buffer, self.momentum), g, 1 - self.dampening, inplace=True)
            # torch's foreach writes into the gradient itself
            step = calls.add(g, buffer, self.momentum, inplace=calls.listed) if self.nesterov else buffer
        p = calls.add(p, step, -self.lr, inplace=True)
        return p, step if self.nesterov and calls.listed and not is_temporary else raw_grad


@guarded()
@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): steps by the sign of an interpolated momentum.

    torch has no Lion; this one loops over parameters.

    Raises
    ------
    GraphError
        If another implementation is requested, or a value is out of range.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import Lion, Slot
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     slots = Lion().update([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))])
    >>> cg.flops(g), cg.peak_memory(g)  # parameter, gradient and momentum, and the sign
    (9*N, 16*N)
    """

    available: ClassVar[tuple[str, ...]] = ("for-loop",)

    lr: float = 1e-4
    implementation: str = "for-loop"
    betas: tuple[float, float] = (0.9, 0.99)
    """Weights of the momentum in the step, and of the old momentum in the new one."""
    weight_decay: float = 0
    """Decoupled weight decay; 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds("Lion", weight_decay=(self.weight_decay, 0, float("inf")))
        bounds("Lion", beta1=(self.betas[0], 0, 1), beta2=(self.betas[1], 0, 1))

    def _states(self, slot: Slot) -> Column:
        return (slot.state("exp_avg"),)

    def _update(self, calls: Calls, p: Column, g: Column, *states: Column) -> tuple[Column, Column]:
        (average,) = states
        if self.weight_decay:
            p = calls.inplace("mul", p, 1 - self.lr * self.weight_decay)
        update = calls.inplace("sign", calls.new("lerp", average, g, 1 - self.betas[0]))
        p = calls.add(p, update, -self.lr, inplace=True)
        calls.inplace("lerp", average, g, 1 - self.betas[1])
        return p, g
