"""Softmax and norms, forward and backward: what the library's own kernels for them cost."""

from __future__ import annotations

from math import prod

from ....algebra.polynomial import ONE, Poly
from ..call import Call, Counts, Spec
from .amounts import REDUCE, each, product, size, together
from .declared import norm_backward, norm_forward, softmax_backward, softmax_forward
from .table import rule

__all__: list[str] = []  # its rules are found in RULES


def _along(operand: Spec, dim: int) -> tuple[Poly, Poly]:
    """Return rows, and elements of each, of a function along one axis."""
    if not operand.sizes:
        return ONE, ONE
    length = operand.sizes[dim]
    others = [n for i, n in enumerate(operand.sizes) if i != dim % len(operand.sizes)]
    return prod(others, start=ONE), length


# -- softmax -----------------------------------------------------------------------------------------------------


@rule("_softmax", "_log_softmax")
def softmax(call: Call) -> Counts:
    """Count what the library's softmax, or its logarithm, costs along the axis."""
    return softmax_forward(call.name.removeprefix("_"), *_along(call["self"], call["dim"]))


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_gradient(call: Call) -> Counts:
    """Count what the library's gradient costs, from the result alone."""
    name = call.name.removeprefix("_").removesuffix("_backward_data")
    return softmax_backward(name, *_along(call["output"], call["dim"]))


@rule("_safe_softmax")
def safe_softmax(call: Call) -> Counts:
    """Count a softmax, and the rows that are all minus infinity found and replaced by zeros."""
    operand: Spec = call["self"]
    plain = softmax_forward("softmax", *_along(operand, call["dim"]))
    return together(plain, each(operand.numel, "eq", REDUCE, "where"))


@rule("_masked_softmax")
def masked_softmax(call: Call) -> Counts:
    """Count the mask and a softmax."""
    operand: Spec = call["self"]
    dim = call.get("dim")
    plain = softmax_forward("softmax", *_along(operand, -1 if dim is None else dim))
    return together(each(operand.numel, "masked_fill"), plain)


# -- layer norm and RMS norm -------------------------------------------------------------------------------------


def _rows(call: Call, operand: Spec) -> tuple[Poly, Poly]:
    length = product(call["normalized_shape"])
    return operand.numel / length, length


@rule("native_layer_norm")
def layer_norm(call: Call) -> Counts:
    """Count what `costgraph.layer_norm` does."""
    affine, bias = call.get("weight") is not None, call.get("bias") is not None
    return _norm(call, _rows(call, call["input"]), affine, bias)


def _norm(call: Call, rows: tuple[Poly, Poly], affine: bool, bias: bool) -> Counts:
    """A shift without a scale is an addition for each element: the library declares none."""
    counts = norm_forward(*rows, centred=True, affine=affine, bias=affine and bias)
    return together(counts, each(rows[0] * rows[1], "add")) if bias and not affine else counts


@rule("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> Counts:
    """Count the gradients that are asked for."""
    return _norm_backward(call, _rows(call, call["input"]), call["output_mask"])


def _norm_backward(call: Call, rows: tuple[Poly, Poly], mask: tuple[bool, ...]) -> Counts:
    affine = call.get("weight") is not None
    wanted = {name for name, asked in zip(("x", "weight", "bias"), mask, strict=False) if asked}
    shift = "bias" in wanted and not affine  # as above: its gradient is a sum
    made = wanted if affine else wanted & {"x"}
    counts = norm_backward(*rows, centred=True, affine=affine, bias=affine, wanted=made)
    return together(counts, each(rows[0] * rows[1], REDUCE)) if shift else counts


@rule("_fused_rms_norm")
def rms_norm(call: Call) -> Counts:
    """Count what `costgraph.rms_norm` does."""
    affine = call.get("weight") is not None
    return norm_forward(*_rows(call, call["input"]), centred=False, affine=affine, bias=False)


@rule("_fused_rms_norm_backward")
def rms_norm_backward(call: Call) -> Counts:
    """Count the gradients that are asked for."""
    affine = call.get("weight") is not None
    wanted = [
        n for n, asked in zip(("x", "weight"), call["output_mask"], strict=True) if asked and (affine or n == "x")
    ]
    return norm_backward(*_rows(call, call["input"]), centred=False, affine=affine, bias=False, wanted=wanted)


# -- group norm and batch norm: a layer norm of other rows -------------------------------------------------------


def _groups(call: Call) -> tuple[Poly, Poly]:
    batch, channels, places, groups = (size(call[n]) for n in ("N", "C", "HxW", "group"))
    return batch * groups, channels * places / groups


@rule("native_group_norm")
def group_norm(call: Call) -> Counts:
    """Count a layer norm of each group."""
    return _norm(call, _groups(call), call.get("weight") is not None, call.get("bias") is not None)


@rule("native_group_norm_backward")
def group_norm_backward(call: Call) -> Counts:
    """Count the gradients of a layer norm of each group."""
    return _norm_backward(call, _groups(call), call["output_mask"])


def _channels(operand: Spec) -> tuple[Poly, Poly]:
    channels = operand.sizes[1]
    return channels, operand.numel / channels


def _normalised(call: Call, operand: Spec) -> Counts:
    """Count what running statistics take: the reciprocal deviation of each channel, then the elements."""
    channels, _ = _channels(operand)
    affine = [step for name, step in (("weight", "mul"), ("bias", "add")) if call.get(name) is not None]
    return together(each(channels, "add", "rsqrt"), each(operand.numel, "sub", "mul", *affine))


@rule("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_with_update",
      "_batch_norm_no_update", "_native_batch_norm_legit_no_training", "_batch_norm_with_update_functional",
      "_native_batch_norm_legit_functional", "miopen_batch_norm")  # fmt: skip
def batch_norm(call: Call) -> Counts:
    """Count a layer norm of each channel and the update of running statistics, or the use of them alone."""
    operand: Spec = call["input"]
    if not _trains(call):
        return _normalised(call, operand)
    counts = _norm(call, _channels(operand), call.get("weight") is not None, call.get("bias") is not None)
    kept = [name for name in ("running_mean", "running_var") if call.get(name) is not None]
    return together(counts, *(each(operand.sizes[1], "lerp") for _ in kept))


def _trains(call: Call) -> bool:
    if "training" in call.arguments:
        return bool(call["training"])
    return "with_update" in call.name


@rule("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward", "miopen_batch_norm_backward")
def batch_norm_backward(call: Call) -> Counts:
    """Count the gradients of a layer norm of each channel, or of an affine function where statistics were given."""
    operand: Spec = call["input"]
    mask = call.get("output_mask") or (True, True, True)
    if call.get("train") is False or call.get("update") is False:
        steps = ["mul", "mul"] if mask[0] else []  # the gradient by the scale and by the reciprocal deviation
        steps += ["sub", "mul", "mul"] if mask[1] else []
        return together(
            each(operand.sizes[1], "add", "rsqrt"),
            each(operand.numel, *steps, *((REDUCE,) if mask[1] else ()), *((REDUCE,) if mask[2] else ())),
        )
    return _norm_backward(call, _channels(operand), mask)


# -- weight norm -------------------------------------------------------------------------------------------------


@rule("_weight_norm_interface")
def weight_norm(call: Call) -> Counts:
    """Count the norm of each row, and the scale by g / norm."""
    rows = call["g"].numel
    return together(each(call["v"].numel, "square", REDUCE, "mul"), each(rows, "sqrt", "div"))


@rule("_weight_norm_interface_backward")
def weight_norm_backward(call: Call) -> Counts:
    """Count g / norm * (gradient - v * d / norm**2) and d / norm, d being the sum of gradient times v along a row."""
    rows = call["saved_g"].numel
    return together(
        each(call["saved_v"].numel, "mul", REDUCE, "mul", "sub", "mul"), each(rows, "div", "div", "square", "div")
    )
