"""Optimizers with adaptive step sizes: Adam, AdamW, AdaGrad, RMSProp."""

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

__all__ = ["AdaGrad", "Adam", "AdamW", "RMSProp"]

_ANY = float("inf")


def _with_decay(calls: Calls, g: Column, p: Column, *, maximize: bool, weight_decay: float) -> tuple[Column, bool]:
    """Negate the gradient to maximize, and add weight decay; also return whether it is now a temporary."""
    is_temporary = False
    if maximize:
        g, is_temporary = calls.new("neg", g), True
    if weight_decay:
        # foreach reuses the list of negated gradients
        g, is_temporary = calls.add(g, p, weight_decay, inplace=calls.listed and is_temporary), True
    return g, is_temporary


@guarded()
@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam, op for op as torch.optim.Adam.

    Raises
    ------
    GraphError
        If torch would refuse a value.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import Adam, Slot
    >>> N = cg.dims("N")
    >>> def step(**options):
    ...     with cg.Graph("g") as g:
    ...         Adam(**options).update([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))])
    ...     return g
    >>> cg.peak_memory(step()), cg.peak_memory(step(implementation="fused"))
    (20*N, 16*N + 4)
    """

    counts: ClassVar[bool] = True

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0
    """L2 penalty, or with `decoupled_weight_decay` a decay of the parameter; 0 for none."""
    amsgrad: bool = False
    """Whether to keep the maximum of the second moments."""
    maximize: bool = False
    """Whether to maximize the objective."""
    decoupled_weight_decay: bool = False
    """Whether weight decay shrinks the parameter directly, as in AdamW."""

    def __post_init__(self) -> None:
        super().__post_init__()
        place = type(self).__name__
        bounds(place, weight_decay=(self.weight_decay, 0, _ANY), eps=(self.eps, 0, _ANY))
        for i, beta in enumerate(self.betas):
            bounds(place, **{f"beta{i + 1}": (beta, 0, 1)})
            if beta == 1:
                raise GraphError(f"{place}: beta{i + 1} is 1, expected a number below 1")

    def _states(self, slot: Slot) -> Column:
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))
        return tuple(slot.state(name) for name in names)

    def _update(self, calls: Calls, p: Column, g: Column, *states: Column) -> tuple[Column, Column]:
        raw_grad, decoupled = g, self.decoupled_weight_decay
        decay = 0 if decoupled else self.weight_decay
        g, is_temporary = _with_decay(calls, g, p, maximize=self.maximize, weight_decay=decay)
        if self.weight_decay and decoupled:
            p = calls.inplace("mul", p, 1 - self.lr * self.weight_decay)
        (beta1, beta2), (mean, square, *largest) = self.betas, states
        mean = calls.inplace("lerp", mean, g, 1 - beta1)
        square = calls.addcmul_(calls.inplace("mul", square, beta2), g, g, 1 - beta2)
        size, root = self.lr / (1 - beta1**self.step), (1 - beta2**self.step) ** 0.5
        if largest:
            square = calls.inplace("maximum", largest[0], square)
        divide = calls.inplace if calls.listed else calls.new
        denominator = calls.inplace("add", divide("div", calls.new("sqrt", square), root), self.eps)
        return calls.keep(calls.addcdiv_(p, mean, denominator, -size), *([g] if is_temporary else [])), raw_grad


@guarded()
@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, op for op as torch.optim.AdamW.

    Raises
    ------
    GraphError
        If torch would refuse a value.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import AdamW, Slot
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     slots = AdamW(implementation="fused").update([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))])
    >>> cg.costs(g).filter(kind="pointwise").total().flops  # 13 and a square root of each, and the counter's step
    13*N + 1
    """

    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.decoupled_weight_decay:
            raise GraphError("AdamW: decoupled_weight_decay is False, expected True; use Adam for coupled weight decay")


@guarded()
@dataclass(frozen=True, kw_only=True)
class AdaGrad(Optimizer):
    """AdaGrad, op for op as torch.optim.Adagrad.

    Raises
    ------
    GraphError
        If torch would refuse a value.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import AdaGrad, Slot
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     slots = AdaGrad(implementation="for-loop").update([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))])
    >>> cg.flops(g)
    7*N
    """

    counts: ClassVar[bool] = True

    lr: float = 1e-2
    lr_decay: float = 0
    """Decay of the learning rate per step."""
    weight_decay: float = 0
    """L2 penalty, added to the gradient; 0 for none."""
    eps: float = 1e-10
    """Added to the denominator."""
    maximize: bool = False
    """Whether to maximize the objective."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds("AdaGrad", weight_decay=(self.weight_decay, 0, _ANY), eps=(self.eps, 0, _ANY))
        bounds("AdaGrad", lr_decay=(self.lr_decay, 0, _ANY))

    def _states(self, slot: Slot) -> Column:
        return (slot.state("sum"),)

    def _update(self, calls: Calls, p: Column, g: Column, *states: Column) -> tuple[Column, Column]:
        raw_grad = g
        g, is_temporary = _with_decay(calls, g, p, maximize=self.maximize, weight_decay=self.weight_decay)
        total = calls.addcmul_(states[0], g, g)
        root = calls.inplace("add", calls.new("sqrt", total), self.eps)
        rate = self.lr / (1 + (self.step - 1) * self.lr_decay)
        if not calls.listed:
            return calls.addcdiv_(p, g, root, -rate), raw_grad
        numerator = calls.inplace("mul", g, -rate) if is_temporary else calls.new("mul", g, -rate)
        return calls.addcdiv_(p, numerator, root), raw_grad


@guarded()
@dataclass(frozen=True, kw_only=True)
class RMSProp(Optimizer):
    """RMSProp, op for op as torch.optim.RMSprop, which has no fused kernel.

    Raises
    ------
    GraphError
        If torch would refuse a value.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import RMSProp, Slot
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     slots = RMSProp().update([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))])
    >>> cg.flops(g)
    9*N
    """

    available: ClassVar[tuple[str, ...]] = ("foreach", "for-loop")
    counts: ClassVar[bool] = True

    lr: float = 1e-2
    alpha: float = 0.99
    """Decay rate of the mean square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0
    """L2 penalty, added to the gradient; 0 for none."""
    momentum: float = 0
    """Momentum; 0 for none, and no momentum state."""
    centered: bool = False
    """Whether to normalize by the variance instead, which keeps the mean gradient too."""
    maximize: bool = False
    """Whether to maximize the objective."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds("RMSProp", weight_decay=(self.weight_decay, 0, _ANY), eps=(self.eps, 0, _ANY))
        bounds("RMSProp", momentum=(self.momentum, 0, _ANY), alpha=(self.alpha, 0, _ANY))

    def _states(self, slot: Slot) -> Column:
        needed = {"square_avg": True, "grad_avg": self.centered, "momentum_buffer": self.momentum > 0}
        return tuple(slot.state(name) for name, is_needed in needed.items() if is_needed)

    def _update(self, calls: Calls, p: Column, g: Column, *states: Column) -> tuple[Column, Column]:
        raw_grad, (square, *optional) = g, states
        g, _ = _with_decay(calls, g, p, maximize=self.maximize, weight_decay=self.weight_decay)
        square = calls.addcmul_(calls.inplace("mul", square, self.alpha), g, g, 1 - self.alpha)
        if self.centered:
            mean = calls.inplace("lerp", optional.pop(0), g, 1 - self.alpha)
            root = calls.inplace("sqrt", calls.addcmul(square, mean, mean, -1))
        else:
            root = calls.new("sqrt", square)
        root = calls.inplace("add", root, self.eps)
        if not self.momentum:
            return calls.addcdiv_(p, g, root, -self.lr), raw_grad
        buffer = calls.addcdiv_(calls.inplace("mul", optional[0], self.momentum), g, root)
        return calls.add(p, buffer, -self.lr, inplace=True), raw_grad
