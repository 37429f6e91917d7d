"""Losses that compare element by element, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....graph.tensor import Tensor
from ....ops.blocks import save
from ....ops.functions import FUNCTIONS, Function
from ....ops.layout import split
from ....ops.pointwise import pointwise
from ....ops.reduce import reduce
from ..call import Call
from .table import translation

__all__ = ["bent", "entropy", "gated", "log_sigmoid", "margin", "squared"]

#: Reductions of torch.nn by number, and none.
_REDUCTIONS = (None, "mean", "sum")


def _reduced(call: Call, each: Tensor) -> Tensor:
    """Return what a loss makes of those of elements."""
    operation = _REDUCTIONS[call["reduction"]]
    return each if operation is None else reduce(each, f"{' '.join(f'a{i}' for i in range(each.ndim))} -> ", operation)


def _is_alike(x: Tensor, target: Tensor) -> bool:
    """Whether a loss compares each element with one of its own."""
    return x.ndim == target.ndim and all(map(x.graph.same, x.sizes, target.sizes))


def _difference(call: Call) -> Tensor | None:
    x, target = call["self"], call["target"]
    return pointwise("sub", x, target) if x.dtype == target.dtype and _is_alike(x, target) else None


@translation("mse_loss")
def squared(call: Call) -> Tensor | None:
    """Squares of differences."""
    apart = _difference(call)
    return None if apart is None else _reduced(call, pointwise("square", apart))


@translation("smooth_l1_loss", "huber_loss")
def bent(call: Call) -> Tensor | None:
    """Squares of small differences, and large ones as they are: beyond a bound the gradient is as large as there."""
    apart, huber = _difference(call), call.name == "huber_loss"
    bound = float(call["delta"] if huber else call["beta"])
    if apart is None or not bound:
        return None
    slope: Any = ("minimum", ("maximum", "a", -bound), bound)
    made = Function(
        f"{call.name}_{bound:g}".translate(str.maketrans(".-", "__")), 1, 7 if huber else 6,
        formula="x*x / 2 where x is small, else |x|",
        grad=(("mul", "g", slope if huber else ("div", slope, bound)),),
    )  # fmt: skip
    return _reduced(call, pointwise(made, apart))


#: Steps of a loss of a probability, or of its logit, and torch's gradients of it and of what it is compared with.
_ENTROPIES: dict[str, tuple[Sequence[str], tuple[Any, ...]]] = {
    "binary_cross_entropy": (
        ("log", "maximum", "mul", "sub", "sub", "log", "maximum", "mul", "add", "neg"),
        (
            ("one", ("mul", "g", ("div", ("sub", "a", "b"), ("maximum", ("mul", ("sub", 1, "a"), "a"), 1e-12)))),
            ("mul", "g", ("sub", ("log", ("sub", 1, "a")), ("log", "a"))),
        ),
    ),
    "binary_cross_entropy_with_logits": (
        ("sub", "mul", "minimum", "abs", "neg", "exp", "log1p", "sub", "sub"),
        (("mul_", ("sub_", ("sigmoid", "a"), "b"), "g"), ("mul", ("neg", "a"), "g")),
    ),
}


@translation(*_ENTROPIES)
def entropy(call: Call) -> Tensor | None:
    """Cross entropies of two classes, those of one of them weighted perhaps, and those of elements."""
    x, target, share, weight = call["self"], call["target"], call.get("pos_weight"), call.get("weight")
    if not _is_alike(x, target):
        return None
    steps, slopes = _ENTROPIES[call.name]
    operands, formula = [x, target], "-(t * log(p) + (1 - t) * log(1 - p))"
    if share is not None:  # 1 + (w - 1) * t in place of 1
        once: Any = ("mul", "c", "b")
        slope = ("mul_", ("sub_", ("mul_", ("sub_", ("add", once, 1), "b"), ("sigmoid", "a")), once), "g")
        steps, slopes, operands = (*steps, "sub", "mul", "add", "mul"), (slope, None, None), [x, target, share]
        formula = "-(w * t * log(p) + (1 - t) * log(1 - p))"
    records = [FUNCTIONS[s] for s in steps]
    flops, hard = sum(f.flops for f in records), sum(f.transcendentals for f in records)
    made = Function(call.name, len(operands), flops, hard, "float", formula, slopes)
    each = pointwise(made, *operands)
    return _reduced(call, each if weight is None else pointwise("mul", each, weight))


@translation("soft_margin_loss")
def margin(call: Call) -> Tensor | None:
    """Logarithms of the odds that a sign is another one."""
    x, target = call["self"], call["target"]
    if not _is_alike(x, target):
        return None
    odds: Any = ("call", ("exp", ("mul", ("neg", "b"), "a")))
    slope: Any = ("mul_", ("div_", ("mul_", ("mul", "b", odds), -1), ("add_", odds, 1)), "g")
    made = Function("soft_margin_loss", 2, 2, 2, "float", "log(1 + exp(-t * x))", (slope, None))
    return _reduced(call, pointwise(made, x, target))


@translation("log_sigmoid_forward")
def log_sigmoid(call: Call) -> Sequence[Tensor]:
    """The logarithm of a sigmoid, and the exponential that its gradient reads."""
    x: Tensor = call["self"]
    small = save(pointwise("exp", pointwise("neg", pointwise("abs", x))))
    return pointwise("sub", pointwise("minimum", x, 0), pointwise("log1p", small)), small


@translation("glu")
def gated(call: Call) -> Tensor:
    """One half of an axis by the sigmoid of the other."""
    x: Tensor = call["self"]
    half = call.out.sizes[call["dim"] % x.ndim]
    a, b = split(x, [half, half], call["dim"])
    return pointwise("mul", a, pointwise("sigmoid", b))
