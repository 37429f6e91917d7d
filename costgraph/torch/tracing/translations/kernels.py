"""Kernels of several steps: softmax, norms, losses."""

from __future__ import annotations

import sympy

from ....algebra.polynomial import ONE, poly
from ....graph.scopes import building
from ....graph.tensor import Tensor
from ....nn.attention import attention as attend
from ....nn.norms import normalised, of_running, of_the_batch
from ....nn.softmax import along, log_softmax, softmax
from ....ops.fill import fill
from ....ops.index import take_along
from ....ops.layout import rearrange, reshape
from ....ops.pointwise import pointwise
from ....ops.reduce import reduce
from ....transforms.vjp.kernels import row_sums
from ..call import Call
from .table import translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS


@translation("_softmax", "_log_softmax")
def soft(call: Call) -> Tensor | None:
    """A softmax, or its logarithm, along an axis."""
    x: Tensor = call["self"]
    if not x.ndim or call["half_to_float"]:
        return None
    return (softmax if call.name == "_softmax" else log_softmax)(x, call["dim"])


@translation("_softmax_backward_data")
def softmax_backward(call: Call) -> Tensor | None:
    """Return y * (g - sum(g * y)) along the axis."""
    g, y = call["grad_output"], call["output"]
    if not y.ndim or call.out.dtype != y.dtype:
        return None
    names, kept = along(y, call["dim"])
    return pointwise("mul", y, g - reduce(g * y, f"{names} -> {kept}", "sum"))


@translation("_log_softmax_backward_data")
def log_softmax_backward(call: Call) -> Tensor | None:
    """Return g - exp(y) * sum(g) along the axis."""
    g, y = call["grad_output"], call["output"]
    if not y.ndim or call.out.dtype != y.dtype:
        return None
    names, kept = along(y, call["dim"])
    return pointwise("sub", g, pointwise("exp", y) * reduce(g, f"{names} -> {kept}", "sum"))


def _rows(x: Tensor, count: int) -> tuple[str, str]:
    """Return patterns that reduce the last axes and keep them with size 1."""
    names = [f"a{i}" for i in range(x.ndim)]
    return " ".join(names), " ".join((*names[: x.ndim - count], *("1" for _ in range(count))))


@translation("native_layer_norm")
def layer_norm(call: Call) -> tuple[Tensor, Tensor, Tensor] | None:
    """Normalise the last axes, and hand out mean and reciprocal deviation of each row."""
    x, weight, bias = call["input"], call.get("weight"), call.get("bias")
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)) or len(call.results) != 3:
        return None
    names, kept = _rows(x, len(call["normalized_shape"]))
    return normalised(x, f"{names} -> {kept}", weight, bias, epsilon=call["eps"])


@translation("native_batch_norm", "_native_batch_norm_legit_no_training")
def batch_norm(call: Call) -> tuple[Tensor | None, ...] | None:
    """Normalise channels by the statistics of the batch, which running ones then move to, or by those."""
    x, *params = (call[n] for n in ("input", "weight", "bias"))
    mean, variance = call.get("running_mean"), call.get("running_var")
    if any(t is None for t in (*params, mean, variance)) or len({t.dtype for t in (x, *params)}) > 1:
        return None
    if not call.get("training"):
        return of_running(x, mean, variance, params, epsilon=call["eps"]), None, None
    y, average, spread, scale = of_the_batch(x, params, epsilon=call["eps"])
    steps = [
        pointwise("lerp", old, new, call["momentum"], inplace=True)
        for old, new in ((mean, average), (variance, spread))
    ]
    return y, average, scale, *steps


@translation("_scaled_dot_product_flash_attention_for_cpu")
def attention(call: Call) -> tuple[Tensor, Tensor] | None:
    """Attention in one kernel, which hands out the logarithm of the sum of each row as well."""
    q, k, v = (call[name] for name in ("query", "key", "value"))
    causal, scale = bool(call["is_causal"]), call["scale"]
    if call["dropout_p"] or (causal and q.sizes[2] != k.sizes[2]):
        return None  # what is dropped is told from a seed; a query that is not the last may see no key
    mask = call["attn_mask"]
    if mask is not None:
        mask = reshape(mask, (*(ONE for _ in range(4 - mask.ndim)), *mask.sizes))
    y = attend(q, k, v, causal=causal, bias=mask)
    op = y.producer.operands[0].producer if y.producer is not None else None
    assert op is not None
    assert op.body is not None
    factor = poly(sympy.sqrt(1 / q.shape[-1])) if scale is None else poly(scale)
    number = factor if factor.names() else float(factor.expr)
    for inner in op.body.ops:
        if inner.name.endswith("/scale"):
            inner.state(scalars=(None, number))
    with building(op.body):
        sums = rearrange(row_sums(op)[1], "b g r s 1 -> b s (g r)")
    return y, rearrange(op.body.export(sums), "b s h -> b h s")


@translation("nll_loss_forward")
def nll(call: Call) -> tuple[Tensor, Tensor] | None:
    """The mean, or the sum, of what each target picks, with its sign turned, and how many they are."""
    x, targets = call["self"], call["target"]
    if call.get("weight") is not None or call["reduction"] == 0 or x.ndim != 2:
        return None
    picked = take_along(x, reshape(targets, (*targets.sizes, ONE)))
    operation = "mean" if call["reduction"] == 1 else "sum"
    loss = -reduce(picked, "n i -> ", operation)
    return loss, fill((), targets.sizes[0], x.dtype)
