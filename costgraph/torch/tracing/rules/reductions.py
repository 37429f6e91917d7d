"""Costs of reductions, scans, losses, pooling, softmax and norms, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

import sympy

from ....algebra.extremum import Min, smaller
from ....algebra.polynomial import ONE, ZERO, Poly, poly, total
from ....ops.functions import LOSSES, Function
from ..call import Call, Counts, Spec
from .counts import counts_of
from .table import REDUCE, Rule, combined, is_number, operand_bytes, per_element, rule, size, unsupported

__all__: list[str] = []


# -- reductions --------------------------------------------------------------------------------------------------------


# -- reductions and scans ----------------------------------------------------------------------------------------------

#: Steps per element of the operand.
_STEPS: dict[str, tuple[str | Function, ...]] = {
    **dict.fromkeys(
        ("all", "amax", "amin", "any", "argmax", "argmin", "cummax", "cummin", "cumprod", "cumsum", "max", "mean",
         "min", "prod", "sum", "_cummax_helper", "_cummin_helper", "_is_all_true", "_is_any_true"),
        (REDUCE,),
    ),
    "aminmax": (REDUCE, REDUCE),
    "nansum": ("eq", "where", REDUCE),
    "count_nonzero": ("eq", REDUCE),
    "nonzero": ("eq", REDUCE),  # counted before their positions are written
    **dict.fromkeys(
        ("_unique", "_unique2", "bincount", "masked_select", "unique_consecutive", "unique_dim"), (REDUCE,)
    ),
    "histc": ("sub", "mul", "floor", REDUCE),  # the bin index, and its increment
    "logcumsumexp": ("maximum", "sub", "abs", "neg", "exp", "log1p", "add"),  # logaddexp with the running value
    # one pass over the data: how many more a sort needs depends on the algorithm and the data
    **dict.fromkeys(("kthvalue", "median", "mode", "nanmedian", "sort", "topk"), (REDUCE,)),
}  # fmt: skip


def _of(*steps: str | Function) -> Rule:
    return lambda call: per_element(call["self"].numel, *steps)


for _name, _steps in _STEPS.items():
    rule(_name)(_of(*_steps))


@rule("var", "var_mean", "std", "std_mean")
def variance(call: Call) -> Counts:
    """Count mean, subtraction, square and mean per element, and the root per result of a standard deviation."""
    spread = per_element(call["self"].numel, REDUCE, "sub", "square", REDUCE)
    return combined(spread, per_element(call.out.numel, "sqrt")) if call.name.startswith("std") else spread


@rule("logsumexp")
def logsumexp(call: Call) -> Counts:
    """Count maximum, subtraction, exp and sum per element; logarithm and addition per result."""
    return combined(
        per_element(call["self"].numel, REDUCE, "sub", "exp", REDUCE), per_element(call.out.numel, "log", "add")
    )


def norm_of(operand: Spec, order: object, results: Poly) -> Counts:
    """Return the cost of a norm; an order of None means 2."""
    steps: tuple[tuple[str | Function, ...], tuple[str, ...]]
    if order is None or is_number(order, 2):
        steps = ("square", REDUCE), ("sqrt",)
    elif is_number(order, 0):
        steps = ("eq", REDUCE), ()
    elif any(is_number(order, n) for n in (1, float("inf"), float("-inf"))):
        steps = ("abs", REDUCE), ()
    else:
        steps = ("abs", "pow", REDUCE), ("pow",)
    return combined(per_element(operand.numel, *steps[0]), per_element(results, *steps[1]))


@rule("linalg_vector_norm", "norm")
def norm(call: Call) -> Counts:
    """Count square and sum per element and a root per result, or the steps of another order."""
    return norm_of(call["self"], call.get("ord") if "ord" in call.arguments else call.get("p"), call.out.numel)


@rule("dist")
def distance(call: Call) -> Counts:
    """Count a subtraction per pair of elements, and the norm."""
    return combined(per_element(call["self"].numel, "sub"), norm_of(call["self"], call.get("p"), call.out.numel))


@rule("trace")
def trace(call: Call) -> Counts:
    """Count one addition per diagonal element; only the diagonal is read."""
    operand: Spec = call["self"]
    shorter = smaller(*operand.sizes)
    return Counts(pointwise=shorter, reads=(shorter * operand.dtype.bytes,))


# -- losses ------------------------------------------------------------------------------------------------------------

# torch.nn's reductions: 0 none, 1 mean, 2 sum
_NONE = 0

#: Elementwise losses: steps per element, forward and backward.
_ELEMENTWISE: dict[str, tuple[tuple[str | Function, ...], tuple[str, ...]]] = {
    "mse_loss": (("sub", "square"), ("sub", "mul", "mul")),
    "smooth_l1_loss": (("sub", LOSSES["smooth_l1_loss"]), ("sub", "clamp", "mul")),
    "huber_loss": (("sub", LOSSES["huber_loss"]), ("sub", "clamp", "mul")),
    "soft_margin_loss": ((LOSSES["soft_margin_loss"],), ("neg", "mul", "exp", "add", "div", "mul", "mul")),
    "binary_cross_entropy": ((LOSSES["binary_cross_entropy"],), ("sub", "sub", "mul", "maximum", "div", "mul")),
    "binary_cross_entropy_with_logits": (  # its gradient is composed of other ops
        (LOSSES["binary_cross_entropy_with_logits"],), (),
    ),
}  # fmt: skip


def _forward(steps: Sequence[str | Function]) -> Rule:
    def apply(call: Call) -> Counts:
        functions: tuple[str | Function, ...] = (*steps, *(("mul",) if call.get("weight") is not None else ()))
        if call.get("reduction") != _NONE:
            functions = (*functions, REDUCE)
        return per_element(call["self"].numel, *functions)

    return apply


def _backward(steps: Sequence[str]) -> Rule:
    def apply(call: Call) -> Counts:
        return per_element(call["self"].numel, *steps, *(("mul",) if call.get("weight") is not None else ()))

    return apply


for _loss_name, (_loss_steps, _gradient) in _ELEMENTWISE.items():
    rule(_loss_name)(_forward(_loss_steps))
    if _gradient:
        rule(f"{_loss_name}_backward")(_backward(_gradient))


# -- log-probabilities -------------------------------------------------------------------------------------------


def _bytes_per_target(call: Call) -> dict[str, Poly]:
    """Return the bytes of one log-probability, and one weight, per target."""
    targets = call["target"].numel
    return {
        name: targets * operand.dtype.bytes
        for name in ("self", "weight")
        if isinstance(operand := call.get(name), Spec)
    }


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll(call: Call) -> Counts:
    """Count the mean of the selected log-probabilities, and its negation; class weights add a product and their sum."""
    targets: Poly = call["target"].numel
    weighted: tuple[str | Function, ...] = ("mul", REDUCE) if call.get("weight") is not None else ()
    if call["reduction"] == _NONE:
        counts = per_element(targets, "neg", *weighted[:1])
    else:
        counts = combined(per_element(targets, REDUCE, *weighted), per_element(ONE, "neg"))
    return combined(counts, reads=operand_bytes(call, **_bytes_per_target(call)))


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_backward(call: Call) -> Counts:
    """Count negation, division and addition per target; all other gradients are zeros."""
    targets: Poly = call["target"].numel
    weighted = ("mul",) if call.get("weight") is not None else ()
    read = operand_bytes(call, **(_bytes_per_target(call) | {"self": ZERO}))
    if call["reduction"] == _NONE:
        return combined(per_element(targets, "neg", "add", *weighted), reads=read)
    return combined(per_element(targets, "div", "add", *weighted), per_element(ONE, "neg"), reads=read)


# -- margins -----------------------------------------------------------------------------------------------------


@rule("multi_margin_loss")
def multi_margin(call: Call) -> Counts:
    """Count max(0, margin - x[y] + x[i]), its sum, and the division of each row."""
    operand: Spec = call["self"]
    return combined(per_element(operand.numel, "sub", "add", "relu", REDUCE), per_element(call["target"].numel, "div"))


@rule("multilabel_margin_loss_forward")
def multilabel_margin(call: Call) -> Counts:
    """Count max(0, 1 - x[y] + x[i]) and its sum per pair of label and class; labels may be as many as classes."""
    operand: Spec = call["self"]
    return per_element(operand.numel * operand.sizes[-1], "sub", "add", "relu", REDUCE)


@rule("multilabel_margin_loss_backward")
def multilabel_margin_backward(call: Call) -> Counts:
    """Count the margin of each pair again, and both gradients where it is positive."""
    operand: Spec = call["self"]
    return per_element(operand.numel * operand.sizes[-1], "sub", "add", "less", "where", "add", "sub")


# -- connectionist temporal classification -----------------------------------------------------------------------


def _table_size(call: Call) -> Poly:
    """Return the size of the forward table: times, sequences, and 2 * labels + 1 states."""
    alpha: Spec = call["log_alpha"] if "log_alpha" in call.arguments else call.results[1]
    return alpha.numel


@rule("_ctc_loss")
def ctc(call: Call) -> Counts:
    """Count a log-sum-exp over three prefixes per cell: their maximum, three exp, the sum and its log.

    Graves et al. 2006, eq. 6 and 7.
    """
    steps = ("maximum", "maximum", "sub", "exp", "sub", "exp", "sub", "exp", "add", "add", "log", "add", "add")
    return per_element(_table_size(call), *steps)


@rule("_ctc_loss_backward")
def ctc_backward(call: Call) -> Counts:
    """Count the same for suffixes, their products with the prefixes, and the gradient per log-probability."""
    return combined(
        ctc(call),
        per_element(_table_size(call), "add", "exp", "add"),
        per_element(call["log_probs"].numel, "exp", "sub", "mul"),
    )


# -- pooling -----------------------------------------------------------------------------------------------------------


def _all_window_elements(call: Call, large: Spec, small: Spec) -> Poly:
    """Return the element count over all windows. With `ceil_mode`, the last windows end with the padding."""
    rank = _rank(call)
    window, stride, padding, dilation = (_per_axis(call, name, rank) for name in _WINDOW_ARGUMENTS)
    if not call.get("ceil_mode"):
        return small.numel * prod(window, start=ONE)
    axes = zip(large.sizes[-rank:], small.sizes[-rank:], window, stride or window, padding, dilation, strict=True)
    return prod((_window_elements(*axis) for axis in axes), start=prod(small.sizes[:-rank], start=ONE))


_DEFAULTS: Mapping[str, Sequence[int]] = {"stride": [], "padding": [0], "dilation": [1]}
_WINDOW_ARGUMENTS = ("kernel_size", *_DEFAULTS)


def _per_axis(call: Call, name: str, rank: int) -> list[Poly]:
    """Return a window argument per axis. An empty stride means the window size."""
    values: Sequence[Any] = _DEFAULTS[name] if call.get(name) is None else call[name]
    return [size(n) for n in (values if len(values) != 1 else [*values] * rank)]


def _window_elements(n: Poly, windows: Poly, window: Poly, stride: Poly, padding: Poly, dilation: Poly) -> Poly:
    """Return the window elements along one axis. Only the last window can end beyond the padding."""
    remaining = n + 2 * padding - (windows - 1) * stride
    return (windows - 1) * window + poly(Min(window.expr, sympy.ceiling((remaining / dilation).expr)))


def _rank(call: Call) -> int:
    return 3 if "3d" in call.name else 2


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "fractional_max_pool2d",
      "fractional_max_pool3d", "mkldnn_max_pool2d", "mkldnn_max_pool3d")  # fmt: skip
def pool(call: Call) -> Counts:
    """Count 1 per window element."""
    return Counts(pointwise=_all_window_elements(call, call["self"], call.out))


@rule("avg_pool2d_backward", "avg_pool3d_backward")
def mean_backward(call: Call) -> Counts:
    """Count 1 per window element; the operand is not read."""
    count = _all_window_elements(call, call["self"], call["grad_output"])
    return Counts(pointwise=count, reads=operand_bytes(call, self=ZERO))


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "fractional_max_pool2d_backward",
      "fractional_max_pool3d_backward", "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward",
      "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
      "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")  # fmt: skip
def picked_backward(call: Call) -> Counts:
    """Count an addition per gradient element; the operand is not read."""
    return Counts(pointwise=call["grad_output"].numel, reads=operand_bytes(call, self=ZERO))


# -- adaptive pooling --------------------------------------------------------------------------------------------


def _total_window_size(call: Call, length: Poly, windows: Poly) -> Poly:
    """Return the summed window sizes along one axis.

    Window i spans floor(i*n/k) to ceil((i + 1)*n/k). Each fractional boundary lies within an element that both windows
    share, and gcd(n, k) - 1 of the k - 1 boundaries are integers.
    """
    ratio = length / windows
    if windows == ONE or all(isinstance(c, int) and all(p > 0 for _, p in m) for m, c in ratio.terms.items()):
        return length
    n, k = length.constant, windows.constant
    if isinstance(n, int) and isinstance(k, int):
        return length + k - gcd(n, k)
    if not isinstance(k, int):
        raise unsupported(
            call,
            f"the size of {windows} windows over {length} elements is unknown",
            f"a constant number, or one that divides {length}",
        )
    boundaries = (length * i / k for i in range(1, k))
    return length + total(
        poly(sympy.ceiling(boundary.expr)) - poly(sympy.floor(boundary.expr)) for boundary in boundaries
    )


def _adaptive(call: Call, large: Spec, small: Spec) -> Counts:
    rank = _rank(call)
    axes = zip(large.sizes[-rank:], small.sizes[-rank:], strict=True)
    return Counts(
        pointwise=prod((_total_window_size(call, n, k) for n, k in axes), start=prod(small.sizes[:-rank], start=ONE))
    )


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
      "mkldnn_adaptive_avg_pool2d")  # fmt: skip
def adaptive(call: Call) -> Counts:
    """Count 1 per window element."""
    return _adaptive(call, call["self"], call.out)


@rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_backward(call: Call) -> Counts:
    """Count 1 per window element; the operand is not read."""
    counts = _adaptive(call, call["self"], call["grad_output"])
    return Counts(pointwise=counts.pointwise, reads=operand_bytes(call, self=ZERO))


# -- norms -------------------------------------------------------------------------------------------------------------


@rule("_safe_softmax")
def safe_softmax(call: Call) -> Counts:
    """Count a softmax, and finding and zeroing rows of minus infinity."""
    return combined(_softmax(call, call["dim"]), per_element(call["self"].numel, "eq", REDUCE, "where"))


@rule("_masked_softmax")
def masked_softmax(call: Call) -> Counts:
    """Count the mask and a softmax."""
    dim = call.get("dim")
    return combined(per_element(call["self"].numel, "masked_fill"), _softmax(call, -1 if dim is None else dim))


def _softmax(call: Call, dim: int) -> Counts:
    return counts_of(Call("_softmax", "", False, {"self": call["self"], "dim": dim}, call.results))


@rule("cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
      "_batch_norm_no_update", "_batch_norm_with_update_functional",
      "_native_batch_norm_legit_functional")  # fmt: skip
def batch_norm(call: Call) -> Counts:
    """Count as `native_batch_norm`."""
    arguments = {"training": "with_update" in call.name, "momentum": 0.1, "eps": call.get("epsilon"), **call.arguments}
    return replace(counts_of(replace(call, name="native_batch_norm", arguments=arguments)), reads=None)


@rule("cudnn_batch_norm_backward", "batch_norm_backward", "miopen_batch_norm_backward")
def batch_norm_backward(call: Call) -> Counts:
    """Count as `native_batch_norm_backward`."""
    names = {"grad_out": "grad_output", "save_invstd": "save_var", "eps": "epsilon", "train": "update"}
    arguments = {ours: call.arguments[theirs] for ours, theirs in names.items() if theirs in call.arguments}
    arguments = {"train": True, "output_mask": (True, True, True), **arguments, **call.arguments}
    return replace(counts_of(replace(call, name="native_batch_norm_backward", arguments=arguments)), reads=None)


# -- weight norm -------------------------------------------------------------------------------------------------


@rule("_weight_norm_interface")
def weight_norm(call: Call) -> Counts:
    """Count the norm of each row, and the scale by g / norm."""
    rows = call["g"].numel
    return combined(per_element(call["v"].numel, "square", REDUCE, "mul"), per_element(rows, "sqrt", "div"))


@rule("_weight_norm_interface_backward")
def weight_norm_backward(call: Call) -> Counts:
    """Count g / norm * (gradient - v * d / norm**2) and d / norm, with d the row sum of gradient * v."""
    rows = call["saved_g"].numel
    return combined(
        per_element(call["saved_v"].numel, "mul", REDUCE, "mul", "sub", "mul"),
        per_element(rows, "div", "div", "square", "div"),
    )
