"""Whole updates of an optimizer in one kernel, and gradients set to zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ....graph.graph import apply
from ....graph.tensor import Tensor
from ....ops.pointwise import pointwise
from ....ops.updates import ZeroGrad
from ....optimizers import SGD, AdaGrad, Adam, AdamW, Optimizer
from ....optimizers.fused import fused_update
from ..call import Call
from .table import translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS

_MOMENTS = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
#: The library's optimizer, and the arguments that are its state.
_UPDATES: dict[str, tuple[type[Optimizer], tuple[str, ...]]] = {
    "_fused_adam": (Adam, _MOMENTS),
    "_fused_adamw": (AdamW, _MOMENTS),
    "_fused_sgd": (SGD, ("momentum_buffer_list",)),
    "_fused_adagrad": (AdaGrad, ("state_sums",)),
}


@translation(*_UPDATES)
def updated(call: Call) -> Sequence[Tensor]:
    """What the library's optimizer does, after a division of the gradient where it was scaled.

    Numbers that only the device knows cost nothing, whatever they are.
    """
    kind, states = _UPDATES[call.name]
    facts: dict[str, Any] = {f.name: n for f in fields(kind) if isinstance(n := call.get(f.name), bool | int | float)}
    update = kind(**facts)._update
    param, grad, *kept = (call[n] for n in ("self", "grads", *states) if call[n] is not None)
    scale = call.get("grad_scale")
    if scale is not None:
        grad = pointwise("div", grad, scale, inplace=True)
    group = (param, grad, *kept)
    beside = [t for k, t in call.arguments.items() if isinstance(t, Tensor) and k in ("state_steps", "lr", "found_inf")]
    return [*fused_update(update, group, tuple(beside), name="fused_update"), *beside]


@translation("zero")
def zeros(call: Call) -> Tensor | None:
    """Zeros in place."""
    return apply(ZeroGrad(), [call["self"]], "zero_")[0] if call.inplace else None
