"""Convolutions and their gradients: 2 for every index point, each group by itself."""

from __future__ import annotations

from math import prod
from typing import Any

from ....algebra.polynomial import ONE, Poly
from ..call import Call, Counts, Spec
from .amounts import REDUCE, each, together
from .table import rule

__all__: list[str] = []  # its rules are found in RULES


def _points(slid: Spec, weight: Spec) -> Poly:
    """Return the index points: every element of the weight at each batch entry and place where the window stands.

    A weight has the shape (channels made, channels read of one group, *window), whose elements are the pairs of
    channels of all groups; windows stand at the places of the result or, transposed, of the operand. Places of a
    window in the padding count: kernels multiply zeros there.
    """
    return slid.sizes[0] * prod(slid.sizes[2:], start=ONE) * weight.numel


def _forward(call: Call, operand: Spec, result: Spec, transposed: bool) -> Counts:
    made = Counts(matmul=2 * _points(operand if transposed else result, call["weight"]))
    return together(made, each(result.numel, "add")) if call.get("bias") is not None else made


@rule("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "cudnn_convolution",
      "cudnn_convolution_transpose", "miopen_convolution", "miopen_convolution_transpose",
      "miopen_depthwise_convolution", "_slow_conv2d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d",
      "slow_conv3d_forward", "slow_conv_transpose2d", "slow_conv_transpose3d", "_conv_depthwise2d",
      "conv_depthwise3d")  # fmt: skip
def convolution(call: Call) -> Counts:
    """Count 2 for each index point, and the addition of a bias."""
    operand: Spec = call.get("input") or call["self"]
    transposed = bool(call.get("transposed")) or "transpose" in call.name
    return _forward(call, _batched(operand, call), _batched(call.out, call), transposed)


def _batched(t: Spec, call: Call) -> Spec:
    """Return a tensor with a batch axis, which may be left out."""
    weight: Spec = call["weight"]
    return t if len(t.sizes) == len(weight.sizes) else Spec((ONE, *t.sizes), (ONE, *t.strides), t.dtype)


@rule("cudnn_convolution_relu", "cudnn_convolution_add_relu")
def with_activation(call: Call) -> Counts:
    """Count the convolution, the sum with a tensor where there is one, and the maximum."""
    added = ("add", "mul") if "add" in call.name else ()
    return together(convolution(call), each(call.out.numel, *added, "relu"))


@rule("convolution_backward", "convolution_backward_overrideable")
def convolution_backward(call: Call) -> Counts:
    """Count as many index points for the operand's gradient, and for the weight's, as the convolution has.

    The gradient of a bias is a sum over batch and places.
    """
    grad, operand = call["grad_output"], call["input"]
    slid = operand if call["transposed"] else grad
    wanted: Any = call["output_mask"]
    product = Counts(matmul=2 * _points(slid, call["weight"]))
    bias = each(grad.numel, REDUCE) if wanted[2] else Counts()
    return together(*(product for asked in wanted[:2] if asked), bias)


@rule("conv_tbc")
def over_time(call: Call) -> Counts:
    """Count 2 for each index point: weight (window, channels read, channels made), result (time, batch, channels)."""
    places = call.out.sizes[0] * call.out.sizes[1]
    return together(Counts(matmul=2 * places * call["weight"].numel), each(call.out.numel, "add"))
