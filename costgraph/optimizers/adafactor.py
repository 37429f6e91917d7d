"""Adafactor, which factors second moments into row and column means."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..ir.graph import Tensor
from ..notation.validation import guarded
from ..ops.elementwise import pointwise
from ..ops.operators import matmul
from ..ops.reduce import reduce
from ..ops.updates import ADD_SCALED
from .optimizer import (
    Calls,
    Column,
    Optimizer,
    Slot,
    bounds,
    norm,
    root_mean_square,
)

__all__ = ["Adafactor"]


@guarded()
@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adafactor, as torch.optim.Adafactor.

    Parameters with two or more axes keep the means over their last and second-to-last axis, others the whole second
    moment. torch moves norms to the host to divide them by the root of a size and to compute the step size; here these
    are root mean squares and ops on scalars.

    Raises
    ------
    GraphError
        If torch would refuse a value, or a fused kernel is requested.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import Adafactor, Slot
    >>> D, F = cg.dims("D F")
    >>> with cg.Graph("g") as g:
    ...     slots = Adafactor().update([Slot(g.param("w", (D, F)), g.input("w.grad", (D, F)))])
    >>> [(t.name, t.shape) for t in g.tensors if t.role == "state" and t.producer is None]
    [('w.row_var', (D, 1)), ('w.col_var', (1, F))]
    """

    available: ClassVar[tuple[str, ...]] = ("foreach", "for-loop")
    counts: ClassVar[bool] = True

    lr: float = 1e-2
    implementation: str = "for-loop"  # torch's default for Adafactor
    beta2_decay: float = -0.8
    """Exponent of the step number in the second moment's decay."""
    eps: tuple[float | None, float] = (None, 1e-3)
    """Lower bounds of the second moment, by default the dtype's epsilon, and of a parameter's size."""
    d: float = 1.0
    """Clipping threshold: maximal root mean square of an update."""
    weight_decay: float = 0
    """Decoupled weight decay; 0 for none."""
    maximize: bool = False
    """Whether to maximize the objective."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inf = float("inf")
        bounds("Adafactor", weight_decay=(self.weight_decay, 0, inf), beta2_decay=(self.beta2_decay, -inf, 0))
        bounds("Adafactor", d=(self.d, 1, inf), eps2=(self.eps[1], 0, inf))
        if self.eps[0] is not None:
            bounds("Adafactor", eps1=(self.eps[0], 0, inf))

    def _kind(self, slot: Slot) -> object:
        return slot.updated.dtype, len(slot.axes()) > 1

    def _states(self, slot: Slot) -> Column:
        if len(slot.axes()) > 1:
            return slot.state("row_var", slot.factor(-1)), slot.state("col_var", slot.factor(-2))
        return (slot.state("variance"),)

    def _update(self, calls: Calls, p: Column, g: Column, *states: Column) -> tuple[Column, Column]:
        raw_grad = g
        if self.maximize:
            g = calls.new("neg", g)
        decay = self.step**self.beta2_decay
        eps = float(p[0].dtype.epsilon) if self.eps[0] is None else self.eps[0]
        (size,) = calls.each("size", root_mean_square, p)
        if self.weight_decay:
            p = calls.inplace("mul", p, 1 - self.lr * self.weight_decay)
        if len(states) > 1:
            estimate, temporaries = self._factored(calls, g, states, decay, eps)
        else:
            temporaries = [calls.new("mul", g, g)]
            estimate = calls.new("copy", calls.inplace("lerp", states[0], temporaries[0], decay))
        update = calls.inplace("rsqrt", calls.inplace("maximum", estimate, eps * eps))
        update = calls.inplace("mul", update, g)
        (change,) = calls.each("norm", root_mean_square, update)
        (rate,) = calls.each("rate", partial(_rate, self), size, change)
        if not calls.listed:
            temporaries += [g] if self.maximize else []
            return calls.keep(calls.each("add_", _add_scaled, p, update, rate)[0], *temporaries), raw_grad
        return calls.inplace("add", p, calls.inplace("mul", update, rate)), raw_grad

    def _factored(
        self, calls: Calls, g: Column, states: tuple[Column, ...], decay: float, eps: float
    ) -> tuple[Column, list[Column]]:
        """Estimate second moments from row and column means, which are returned too."""
        means, averages = [], []
        for variance, axis in zip(states, (-1, -2), strict=True):
            (mean,) = calls.each("norm", partial(norm, axis=axis), g)
            # squared by the for-loop, multiplied by itself by foreach: one operation each
            mean = calls.inplace("square", mean)
            (mean,) = calls.each("div_", partial(_divided, axis=axis), mean, g)
            means.append(mean)
            averages.append(calls.inplace("lerp", variance, mean, decay))
        rows, columns = averages
        (estimate,) = calls.each("matmul", matmul, rows, columns)
        (mean,) = calls.each("mean", _mean_of_rows, rows)
        return calls.inplace("div", estimate, calls.inplace("maximum", mean, eps)), means


def _divided(total: Tensor, g: Tensor, axis: int) -> Tensor:
    """Divide a sum along an axis by its size."""
    return pointwise("div", total, g.sizes[axis], inplace=True, dtype=total.dtype)


def _mean_of_rows(rows: Tensor) -> Tensor:
    names = [f"a{i}" for i in range(rows.ndim)]
    kept_names = [*names[:-2], "1", names[-1]]
    return reduce(rows, f"{' '.join(names)} -> {' '.join(kept_names)}", "mean")


def _add_scaled(p: Tensor, update: Tensor, rate: Tensor) -> Tensor:
    return pointwise(ADD_SCALED, p, update, rate, inplace=True, dtype=p.dtype, name="add_scaled")


def _rate(optimizer: Adafactor, size: Tensor, change: Tensor) -> Tensor:
    """Return minus the step size: parameter size times learning rate, over the update's clipping factor."""
    rate = min(optimizer.lr, 1 / optimizer.step**0.5)
    size = pointwise("mul", pointwise("maximum", size, optimizer.eps[1]), -rate)
    return pointwise("div", size, pointwise("maximum", pointwise("div", change, optimizer.d), 1.0))
