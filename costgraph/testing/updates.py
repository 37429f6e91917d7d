"""What optimizers do with the numbers at one index point, and with whole tensors in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph.graph import apply
from ..graph.tensor import Tensor
from ..ops.fill import fill
from ..ops.keep import Keep, StopGradient, keep, stop_gradient
from ..ops.updates import FusedUpdate, Unscale, ZeroGrad
from ..optimizers.adaptive import Adam
from ..optimizers.fused import fused_update
from ..optimizers.sgd import SGD
from .arithmetic import FUNCTIONS, Number, function
from .meanings import meaning
from .samples import sample
from .sketch import Sketch
from .values import At

__all__: list[str] = []


@function("add_scaled")
def _add_scaled(a: Any, b: Any, t: Any) -> Any:
    return a + t * b


@function("add_product")
def _add_product(a: Any, b: Any, c: Any) -> Any:
    return a + b * c


@function("add_quotient")
def _add_quotient(a: Any, b: Any, c: Any) -> Any:
    return a + b / c


@function("add_scaled_product")
def _add_scaled_product(a: Any, b: Any, c: Any, t: Any) -> Any:
    return a + t * b * c


@function("add_scaled_quotient")
def _add_scaled_quotient(a: Any, b: Any, c: Any, t: Any) -> Any:
    return a + t * b / c


@function("non_finite")
def _non_finite(x: Number) -> Number:
    return x.once(float(not np.isfinite(x.value)))


# -- whole tensors -----------------------------------------------------------------------------------------------


def _changeable(s: Sketch) -> Tensor:
    """Draw a tensor that an op may write into."""
    x = s.tensor(lambda t: s.may_change(t) and t.touched == t.numel)
    return x if s.may_change(x) and x.touched == x.numel else fill(x.shape, 1.5)


@meaning(Keep)
def _keep(at: At[Keep]) -> None:
    at.view(np.asarray)


@meaning(StopGradient)
def _stop(at: At[StopGradient]) -> None:
    at.view(np.asarray)


@sample(StopGradient)
def _drawn_stop(s: Sketch) -> Sequence[Tensor]:
    return [stop_gradient(s.tensor())]


@sample(Keep)
def _drawn_keep(s: Sketch) -> Sequence[Tensor]:
    return [keep(s.tensor(), *(s.tensor() for _ in range(s.number(0, 2))))]


@meaning(FusedUpdate)
def _fused_update(at: At[FusedUpdate]) -> None:
    """Take the update's steps at each index point; what passes from one to the next is in registers."""
    changed, steps, updated = at.kind.changed, at.kind.steps, at.kind.updated
    for i, place in enumerate(changed):
        at.made[i] = at.operands[place]
    for index in at.operands[0].points():
        registers: list[Any] = [at.number(i, *index) for i in range(updated)]
        for record, scalars, places, target in steps:
            found = iter(places)
            given = [registers[next(found)] if s is None else Number(s, at.tally) for s in scalars]
            made = FUNCTIONS[record.name](*given)
            registers[target:] = [made, *registers[target + 1 :]]
        for i, place in enumerate(changed):
            at.write(registers[place], *index, to=i)
    for i in range(updated, len(at.operands)):  # what every element reads once: the step counter
        for index in at.operands[i].points():
            at.read(i, *index)


@sample(FusedUpdate)
def _drawn_fused_update(s: Sketch) -> Sequence[Tensor]:
    x = _changeable(s)
    optimizer, count = s.one_of(
        [(SGD(), 0), (SGD(momentum=0.9, weight_decay=0.1), 1), (Adam(), 2), (Adam(amsgrad=True, maximize=True), 3)]
    )
    states = [fill(x.shape, 0.5, name="state") for _ in range(count)]
    beside = (fill((), 1.0),) if s.chance(2) else ()
    return fused_update(optimizer._update, (x, s.fresh(x.shape, "fp32"), *states), beside, name="fused_update")[:1]


@meaning(ZeroGrad)
def _zero_grad(at: At[ZeroGrad]) -> None:
    at.made[0] = at.operands[0]
    for index in at.operands[0].points():
        at.write(0.0, *index)


@sample(ZeroGrad)
def _drawn_zero_grad(s: Sketch) -> Sequence[Tensor]:
    return apply(ZeroGrad(), [_changeable(s)], "zero_")


@sample(Unscale)
def _drawn_unscale(s: Sketch) -> Sequence[Tensor]:
    operands = [_changeable(s), s.fresh((), "fp32"), fill((), 0.0)]
    return apply(Unscale(), operands, "unscale")


@meaning(Unscale)
def _unscale(at: At[Unscale]) -> None:
    at.made[0], (gradient, _, flag) = at.operands[0], at.operands
    inverse = at.number(1)
    at.read(2)
    for index in gradient.points():
        x = at.number(0, *index)
        if _non_finite(x).value:
            flag.array[()] = 1
        at.write(x * inverse, *index)
