"""Losses and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from ....algebra.polynomial import ONE, ZERO, Poly
from ....ops.functions import Function
from ..call import Call, Counts, Spec
from .amounts import REDUCE, each, operand_bytes, together
from .table import Rule, rule

__all__: list[str] = []  # its rules are found in RULES

# torch.nn's reductions: 0 none, 1 mean, 2 sum
_NONE = 0

#: Losses that compare element by element: the loss of one, and what its gradient takes besides that of the mean.
_ELEMENTWISE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mse_loss": (("sub", "square"), ("sub", "mul", "mul")),
    "smooth_l1_loss": (  # 0.5 * d*d / beta if d < beta else d - 0.5 * beta
        ("sub", "abs", "less", "square", "mul", "sub", "where"), ("sub", "clamp", "mul"),
    ),
    "huber_loss": (("sub", "abs", "less", "square", "mul", "sub", "mul", "where"), ("sub", "clamp", "mul")),
    "soft_margin_loss": (("neg", "mul", "exp", "log1p"), ("neg", "mul", "exp", "add", "div", "mul", "mul")),
    "binary_cross_entropy": (  # -(t * log(x) + (1 - t) * log(1 - x)), both logarithms at least -100
        ("log", "maximum", "mul", "sub", "sub", "log", "maximum", "mul", "add", "neg"),
        ("sub", "sub", "mul", "maximum", "div", "mul"),
    ),
    "binary_cross_entropy_with_logits": (  # (1 - t) * x - log_sigmoid(x); its gradient is made of other ops
        ("sub", "mul", "minimum", "abs", "neg", "exp", "log1p", "sub", "sub"), (),
    ),
}  # fmt: skip


def _forward(steps: Sequence[str]) -> Rule:
    def apply(call: Call) -> Counts:
        each_one: tuple[str | Function, ...] = (*steps, *(("mul",) if call.get("weight") is not None else ()))
        if call.get("reduction") != _NONE:
            each_one = (*each_one, REDUCE)
        return each(call["self"].numel, *each_one)

    return apply


def _backward(steps: Sequence[str]) -> Rule:
    def apply(call: Call) -> Counts:
        return each(call["self"].numel, *steps, *(("mul",) if call.get("weight") is not None else ()))

    return apply


for _name, (_steps, _gradient) in _ELEMENTWISE.items():
    rule(_name)(_forward(_steps))
    if _gradient:
        rule(f"{_name}_backward")(_backward(_gradient))


# -- log-probabilities -------------------------------------------------------------------------------------------


def _picked(call: Call) -> dict[str, Poly]:
    """Return the bytes of one log-probability, and of one weight, for each target."""
    targets = call["target"].numel
    return {
        name: targets * operand.dtype.bytes
        for name in ("self", "weight")
        if isinstance(operand := call.get(name), Spec)
    }


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll(call: Call) -> Counts:
    """Count the mean of what each target picks, and its sign; with weights a product and the sum of weights."""
    targets: Poly = call["target"].numel
    weighted: tuple[str | Function, ...] = ("mul", REDUCE) if call.get("weight") is not None else ()
    if call["reduction"] == _NONE:
        counts = each(targets, "neg", *weighted[:1])
    else:
        counts = together(each(targets, REDUCE, *weighted), each(ONE, "neg"))
    return together(counts, reads=operand_bytes(call, **_picked(call)))


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_backward(call: Call) -> Counts:
    """Count sign, share of the mean and addition of the gradient of each target; the rest is zeros."""
    targets: Poly = call["target"].numel
    weighted = ("mul",) if call.get("weight") is not None else ()
    read = operand_bytes(call, **(_picked(call) | {"self": ZERO}))
    if call["reduction"] == _NONE:
        return together(each(targets, "neg", "add", *weighted), reads=read)
    return together(each(targets, "div", "add", *weighted), each(ONE, "neg"), reads=read)


# -- margins -----------------------------------------------------------------------------------------------------


@rule("multi_margin_loss")
def multi_margin(call: Call) -> Counts:
    """Count max(0, margin - x[y] + x[i]), its sum and the division of each row."""
    operand: Spec = call["self"]
    return together(each(operand.numel, "sub", "add", "relu", REDUCE), each(call["target"].numel, "div"))


@rule("multilabel_margin_loss_forward")
def multilabel_margin(call: Call) -> Counts:
    """Count max(0, 1 - x[y] + x[i]) and its sum for each pair of a label and a class, of which there may be as many."""
    operand: Spec = call["self"]
    return each(operand.numel * operand.sizes[-1], "sub", "add", "relu", REDUCE)


@rule("multilabel_margin_loss_backward")
def multilabel_margin_backward(call: Call) -> Counts:
    """Count the margin of each pair again, and the gradients of both where it is positive."""
    operand: Spec = call["self"]
    return each(operand.numel * operand.sizes[-1], "sub", "add", "less", "where", "add", "sub")


# -- connectionist temporal classification -----------------------------------------------------------------------


def _cells(call: Call) -> Poly:
    """Return the cells of the table of prefixes: times, sequences, and 2 * labels + 1 states."""
    alpha: Spec = call["log_alpha"] if "log_alpha" in call.arguments else call.results[1]
    return alpha.numel


@rule("_ctc_loss")
def ctc(call: Call) -> Counts:
    """Count the sum of three prefixes in logarithms for each cell: a maximum of three, three exp, their sum and log.

    Graves et al. 2006, eq. 6 and 7.
    """
    steps = ("maximum", "maximum", "sub", "exp", "sub", "exp", "sub", "exp", "add", "add", "log", "add", "add")
    return each(_cells(call), *steps)


@rule("_ctc_loss_backward")
def ctc_backward(call: Call) -> Counts:
    """Count the same for suffixes, their products with the prefixes, and the gradient of each log-probability."""
    return together(
        ctc(call), each(_cells(call), "add", "exp", "add"), each(call["log_probs"].numel, "exp", "sub", "mul")
    )
