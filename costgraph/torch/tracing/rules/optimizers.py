"""Ops on lists of tensors: foreach ops, fused optimizers, gradient scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....algebra.polynomial import ONE, ZERO, Poly, total
from ....ops.updates import NON_FINITE
from ....optimizers import SGD, AdaGrad, Adam, AdamW, Optimizer
from ..call import Call, Counts, Spec
from .amounts import each, together
from .declared import update
from .reductions import norm_of
from .table import RULES, Rule, rule

__all__: list[str] = []  # its rules are found in RULES

#: Foreach ops that do with each tensor of a list what the op of that name does with one.
_EACH = (
    "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min", "cos", "cosh",
    "div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p", "log2",
    "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh",
    "sqrt", "sub", "tan", "tanh", "trunc",
)  # fmt: skip


def _one_by_one(name: str) -> Rule:
    def apply(call: Call) -> Counts:
        one = RULES.get(name)
        return together(*(each(c.out.numel, "round") if one is None else one(c) for c in _members(call, name)))

    return apply


def _members(call: Call, name: str) -> list[Call]:
    """Return the calls of the plain op that a foreach op stands for."""
    # a number to the power of each tensor of a list has that list in the second place
    lead: Sequence[Spec] = next(v for v in call.arguments.values() if _is_list(v))
    calls = []
    for i, t in enumerate(lead):
        arguments = {k: v[i] if isinstance(v, tuple | list) else v for k, v in call.arguments.items()}
        if "scalars" in arguments and name.startswith("addc"):  # a factor for each tensor
            arguments["value"] = arguments["scalars"]
        calls.append(Call(name, call.overload, call.inplace, arguments, (t,)))
    return calls


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list) and bool(value) and isinstance(value[0], Spec)


for _name in _EACH:
    rule(f"_foreach_{_name}")(_one_by_one(_name))


@rule("_foreach_norm")
def norms(call: Call) -> Counts:
    """Count the norm of each tensor."""
    return together(*(norm_of(t, call["ord"], ONE) for t in call["self"]))


@rule("_foreach_max")
def largest(call: Call) -> Counts:
    """Count 1 for each element."""
    return Counts(pointwise=total(t.numel for t in call["self"]))


# -- updates in one kernel ---------------------------------------------------------------------------------------


def _updated(call: Call, optimizer: Optimizer, *changed: str) -> Counts:
    """Return the cost of the library's fused update, and of the division of gradients that were scaled.

    The schema says that a kernel writes everything but the step counters; it writes what changes.
    """
    count = total(t.numel for t in call["self"])
    scaled = call.get("grad_scale") is not None
    changed = ("self", *changed, *(("grads",) if scaled else ()))
    parts = [update(optimizer) * count]
    if scaled:
        parts.append(each(count, "mul"))
    return together(*parts, writes=_written(call, changed))


def _written(call: Call, changed: Sequence[str]) -> tuple[Poly, ...]:
    """Return the bytes written of each tensor that the schema says is written, in its order, empty ones left out."""
    said = [n for n, v in call.arguments.items() if _is_list(v) and (n != "state_steps" or _counts_itself(call))]
    return tuple(t.bytes if name in changed else ZERO for name in said for t in call[name] if t.numel)


def _counts_itself(call: Call) -> bool:
    return call.name == "_fused_adagrad" and call.overload in ("", "default")


@rule("_fused_adam", "_fused_adamw")
def adam(call: Call) -> Counts:
    """Count what `costgraph.Adam` or `costgraph.AdamW` does in one kernel."""
    kind = AdamW if call.name == "_fused_adamw" else Adam
    decay = 0.5 if call["weight_decay"] else 0.0  # its value costs nothing
    optimizer = kind(implementation="fused", weight_decay=decay, amsgrad=bool(call["amsgrad"]))
    return _updated(call, optimizer, "exp_avgs", "exp_avg_sqs", *(("max_exp_avg_sqs",) if call["amsgrad"] else ()))


@rule("_fused_sgd")
def sgd(call: Call) -> Counts:
    """Count what `costgraph.SGD` does in one kernel."""
    momentum = 0.5 if call["momentum"] else 0.0
    nesterov = bool(call["nesterov"])
    optimizer = SGD(
        implementation="fused",
        momentum=momentum,
        weight_decay=0.5 if call["weight_decay"] else 0.0,
        dampening=0.5 if call["dampening"] and momentum and not nesterov else 0,
        nesterov=nesterov,
    )
    return _updated(call, optimizer, "momentum_buffer_list")


@rule("_fused_adagrad")
def adagrad(call: Call) -> Counts:
    """Count what `costgraph.AdaGrad` does in one kernel."""
    decay = 0.5 if call["weight_decay"] else 0.0
    rate = 0.5 if call["lr_decay"] else 0.0
    return _updated(call, AdaGrad(implementation="fused", weight_decay=decay, lr_decay=rate), "state_sums")


# -- scaled gradients --------------------------------------------------------------------------------------------


@rule("_amp_foreach_non_finite_check_and_unscale")
def unscale(call: Call) -> Counts:
    """Count a look for what is not finite, and the product with the reciprocal scale."""
    return each(total(t.numel for t in call["self"]), NON_FINITE, "mul")


@rule("_amp_update_scale")
def update_scale(call: Call) -> Counts:
    """Count the comparison, the count of good steps and the product, of one number each."""
    return each(ONE, "eq", "add", "mul")
