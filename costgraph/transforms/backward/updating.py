"""Updates of parameters inside the backward pass: each as soon as its gradient is complete, which then dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...algebra.polynomial import Poly
from ...dtypes import DType
from ...graph.scopes import opened
from ...graph.tensor import Tensor
from ...ops.keep import keep
from ...optimizers import Optimizer, Slot

__all__ = ["Update"]

#: Declares state of a name, sizes and a format beside a parameter.
Declare = Callable[[str, Sequence[object], "str | DType"], Tensor]
#: Adds what stands for one position along the first axis of a tensor, under a name.
Cut = Callable[[Tensor, str], Tensor]


class Update:
    """What is done with the gradient of one parameter.

    `declare` declares its state; `master` and `moments` are formats of a copy that is updated in its place, and of its
    state. Where the parameter is a part of a whole, `outer` is of that, and done when this one is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        declare: Declare,
        master: DType | None,
        moments: DType | None,
        outer: Update | None = None,
    ) -> None:
        self.optimizer, self.declare, self.master, self.moments = optimizer, declare, master, moments
        self.outer = outer
        self.done = False

    def inside(self, cut: Cut, count: Poly) -> Update:
        """Return the update of what an iteration of a loop owns of the parameter."""

        def declare(name: str, sizes: Sequence[object], dtype: str | DType) -> Tensor:
            return cut(self.declare(name, (count, *sizes), dtype), name)

        return Update(self.optimizer, declare, self.master, self.moments, self)

    def __call__(self, param: Tensor, grad: Tensor) -> None:
        """Add the ops of the update, once."""
        if self.done:
            return
        with opened(phase="optimizer"):
            master = None if self.master is None else self.declare("master", param.sizes, self.master)
            (slot,) = self.optimizer.update([Slot(param, grad, master, self.moments, self.declare)])
            keep(slot.param, slot.grad)  # a gradient is given up after the update, not within it
        around: Update | None = self
        while around is not None:
            around.done, around = True, around.outer
