"""Translations of multi-step kernels: softmax, norms, attention, losses, and kernels with stated costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy

from ....algebra.polynomial import ONE, Poly, poly
from ....errors import UnsupportedError
from ....ir.graph import Op, Tensor, apply, building
from ....ir.strides import contiguous
from ....nn.activations import log_softmax, one_kernel, softmax
from ....nn.attention import attention as attend
from ....nn.norms import normalised, of_groups, of_root, of_running, of_the_batch
from ....ops.elementwise import cast, pointwise
from ....ops.fill import fill
from ....ops.index import gather, take_along
from ....ops.layout import permute, rearrange, reshape
from ....ops.opaque import Opaque, OpaqueBackward
from ....ops.reduce import reduce
from ....transforms.vjp.kernels import row_sums
from ..call import Call, Counts, Spec
from ..rules.table import RULES
from ..rules.workspaces import workspace_of
from .table import translation

__all__ = [
    "attended",
    "batch_norm",
    "group_norm",
    "layer_norm",
    "nll",
    "root_norm",
    "softmax_kernel",
    "spec_of",
    "stated_with_gradient",
    "stated_kernel",
]


# -- kernels -----------------------------------------------------------------------------------------------------------


@translation("_softmax", "_log_softmax")
def softmax_kernel(call: Call) -> Tensor | None:
    """Translate into a softmax, or its logarithm, along an axis."""
    x: Tensor = call["self"]
    if call.get("half_to_float"):
        x = cast(x, "fp32")
    row = x if x.ndim else reshape(x, (ONE,))
    out = (softmax if call.name == "_softmax" else log_softmax)(row, call["dim"])
    return out if x.ndim else reshape(out, ())


@translation("_safe_softmax")
def safe_softmax(call: Call) -> Tensor | None:
    """Translate into a softmax that zeroes rows of minus infinity, with the plain softmax gradient."""
    x, dim = call["self"], call["dim"]
    if not x.ndim or call.out.dtype != x.dtype:
        return None
    names = [f"a{i}" for i in range(x.ndim)]
    rows = " ".join("1" if i == dim % x.ndim else n for i, n in enumerate(names))

    def body(x: Tensor) -> Tensor:
        masked_rows = reduce(pointwise("eq", x, float("-inf")), f"{' '.join(names)} -> {rows}", "all")
        return pointwise("masked_fill", softmax(x, dim), masked_rows)

    return one_kernel("safe_softmax", body, x, backward="softmax")


def _row_patterns(x: Tensor, count: int) -> tuple[str, str]:
    """Return patterns that reduce the last axes, keeping size 1."""
    names = [f"a{i}" for i in range(x.ndim)]
    return " ".join(names), " ".join((*names[: x.ndim - count], *("1" for _ in range(count))))


@translation("native_layer_norm")
def layer_norm(call: Call) -> tuple[Tensor, ...] | None:
    """Translate into a layer norm that also returns the mean and reciprocal deviation per row."""
    x, weight, bias = call["input"], call.get("weight"), call.get("bias")
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        return None
    names, reduced = _row_patterns(x, len(call["normalized_shape"]))
    y, *statistics = normalised(x, f"{names} -> {reduced}", weight, bias, epsilon=call.get("eps") or 0.0)
    return y, *_in_kernel_dtypes(call, statistics)


def _in_kernel_dtypes(call: Call, statistics: Sequence[Tensor]) -> list[Tensor]:
    """Cast statistics to the dtypes that torch's kernel returns."""
    formats = [spec.dtype for spec in call.results[1:]] or [t.dtype for t in statistics]
    return [cast(t, dtype) for t, dtype in zip(statistics, formats, strict=False)]


@translation("_fused_rms_norm")
def root_norm(call: Call) -> tuple[Tensor, ...]:
    """Translate into an RMS norm that also returns the reciprocal root mean square per row."""
    x = call["input"]
    names, reduced = _row_patterns(x, len(call["normalized_shape"]))
    y, scale = of_root(x, f"{names} -> {reduced}", call.get("weight"), epsilon=call.get("eps") or 0.0)
    return y, *_in_kernel_dtypes(call, [scale])


@translation("native_group_norm")
def group_norm(call: Call) -> tuple[Tensor, ...] | None:
    """Translate into a group norm that also returns the mean and reciprocal deviation per group."""
    x, params = call["input"], [call.get(n) for n in ("weight", "bias")]
    if any(t is not None and t.dtype != x.dtype for t in params):
        return None
    y, *statistics = of_groups(x, poly(call["group"]), params, epsilon=call.get("eps") or 0.0)
    return y, *_in_kernel_dtypes(call, statistics)


@translation("native_batch_norm", "_native_batch_norm_legit_no_training")
def batch_norm(call: Call) -> tuple[Tensor | None, ...] | None:
    """Translate into a batch norm by batch statistics, which update the running ones, or by running statistics."""
    x, *params = (call.get(n) for n in ("input", "weight", "bias"))
    running = [call.get(n) for n in ("running_mean", "running_var")]
    if x is None or any(t is not None and t.dtype != x.dtype for t in params):
        return None
    if not call.get("training"):
        mean, variance = running
        return None if None in running else (of_running(x, mean, variance, params, epsilon=call["eps"]), None, None)
    y, average, spread, scale = of_the_batch(x, params, epsilon=call["eps"])
    updated = [
        pointwise("lerp", old, new, call["momentum"], inplace=True, dtype=old.dtype)
        for old, new in zip(running, (average, spread), strict=True)
        if old is not None and "momentum" in call.arguments
    ]
    return y, *_in_kernel_dtypes(call, (average, scale)), *updated


#: For each kernel: layout of the logsumexp, its returned view and result index, and seed shapes.
_LAYOUTS: dict[str, tuple[str, str, int, tuple[tuple[int, ...], ...]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": ("b g r s 1 -> b s (g r)", "b s h -> b h s", 2, ()),
    "_scaled_dot_product_flash_attention": ("b g r s 1 -> b (g r) s", "", 6, ((2,), ())),
    "_scaled_dot_product_cudnn_attention": ("b g r s 1 -> b (g r) s 1", "", 6, ((), ())),
    "_scaled_dot_product_efficient_attention": ("b g r s 1 -> b (g r) s", "", 2, ((), ())),
}


@translation(*_LAYOUTS)
def attention(call: Call) -> list[Tensor | None] | None:
    """Translate into fused attention that also returns the logsumexp per row, and placeholder seeds."""
    pattern, view_pattern, index, seeds = _LAYOUTS[call.name]
    mask = call.get("attn_mask") or call.get("attn_bias")
    fused_attention = attended(call, call["query"], call["key"], call["value"], mask)
    if fused_attention is None:
        return None
    y, op = fused_attention
    assert op.body is not None
    with building(op.body):
        extra_results = [rearrange(row_sums(op)[1], pattern), *(fill(sizes, 0, "int64") for sizes in seeds)]
    sums, *states = map(op.body.export, extra_results)
    return [y, rearrange(sums, view_pattern) if view_pattern else sums, *(None for _ in range(index - 2)), *states]


def attended(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Op] | None:
    """Return attention with a call's scale and mask, and its kernel."""
    causal, scale = bool(call["is_causal"]), call["scale"]
    if call["dropout_p"] or (causal and q.sizes[2] != k.sizes[2]):
        return None  # dropout is recomputed from a seed; a query that is not the last may see no key
    if mask is not None:
        mask = reshape(mask, (*(ONE for _ in range(4 - mask.ndim)), *mask.sizes))
    y = attend(q, k, v, causal=causal, bias=mask)
    op = y.producer.operands[0].producer if y.producer is not None else None
    assert op is not None
    assert op.body is not None
    factor: Any = poly(sympy.sqrt(1 / q.shape[-1])) if scale is None else scale
    number = factor if isinstance(factor, Poly) and factor.names() else float(getattr(factor, "expr", factor))
    for inner in op.body.ops:
        if inner.name.endswith("/scale"):
            inner.state(scalars=(None, number))
    return y, op


@translation("nll_loss_forward", "nll_loss2d_forward")
def nll(call: Call) -> tuple[Tensor, Tensor] | None:
    """Translate into the negative, possibly weighted, log-likelihood per target, reduced or not, and the weight."""
    x, targets, weight, ignored = call["self"], call["target"], call.get("weight"), call["ignore_index"]
    if x.ndim < 2 or (ignored >= 0 and (weight is not None or call["reduction"] == 0)):
        return None
    x = permute(x, [0, *range(2, x.ndim), 1]) if x.ndim > 2 else x
    selected = reshape(take_along(x, reshape(targets, (*targets.sizes, ONE))), targets.sizes)
    axes = " ".join(f"n{i}" for i in range(targets.ndim))
    if weight is not None:
        weights = gather(weight, targets)
        total, losses = reduce(weights, f"{axes} -> ", "sum"), selected * weights
        if call["reduction"]:
            losses = reduce(losses, f"{axes} -> ", "sum")
        return -(losses / total if call["reduction"] == 1 else losses), total
    if ignored < 0:  # no class, as for padding: assumed absent, since targets are unknown
        if call["reduction"]:
            selected = reduce(selected, f"{axes} -> ", "mean" if call["reduction"] == 1 else "sum")
        return -selected, fill((), targets.numel, x.dtype)
    is_ignored = pointwise("eq", targets, ignored)
    total = reduce(pointwise("masked_fill", selected, is_ignored), f"{axes} -> ", "sum")
    count = pointwise("sub", targets.numel, reduce(cast(is_ignored, x.dtype), f"{axes} -> ", "sum"))
    return -(total / count if call["reduction"] == 1 else total), count


# -- stated costs ------------------------------------------------------------------------------------------------------
# Kernels with stated costs, forward and backward.

#: Forward kernels: arguments, and result indices, that the backward kernel reads.
_READ_BY_BACKWARD: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "adaptive_max_pool2d": ((), (1,)), "adaptive_max_pool3d": ((), (1,)),
    "col2im": ((), ()),
    "grid_sampler_2d": (("input", "grid"), ()), "grid_sampler_3d": (("input", "grid"), ()),
    **dict.fromkeys(("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
                     "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
                     "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), ((), ())),
}  # fmt: skip
#: Backward kernels that only move elements: the backward of `col2im` extracts windows.
_COPIES = frozenset({"col2im_backward"})


def spec_of(t: Tensor) -> Spec:
    """Return a tensor's spec."""
    return Spec(t.sizes, t.strides, t.dtype)


def _with_specs(call: Call, **extra: Any) -> Call:
    """Return a call as cost rules see it, with specs in place of tensors."""
    arguments = {k: spec_of(v) if isinstance(v, Tensor) else v for k, v in call.arguments.items()}
    return replace(call, arguments={**arguments, **extra})


def _counts(call: Call) -> Counts:
    counts = Counts() if call.name in _COPIES else RULES[call.name](call)
    if counts is None:
        raise UnsupportedError(f"{call.name}: its cost rule does not accept these arguments")
    return replace(counts, workspace=counts.workspace + workspace_of(call))


def stated_kernel(call: Call) -> Sequence[Tensor]:
    """Return the results of a kernel with stated costs; operands and results are accessed whole."""
    return _opaque(call, None)


@translation(*_READ_BY_BACKWARD)
def stated_with_gradient(call: Call) -> Sequence[Tensor]:
    """Return the results of a kernel with stated costs, forward and backward.

    A kernel outside the table has a backward kernel that reads the gradient only.
    """
    names = [k for k, v in call.arguments.items() if isinstance(v, Tensor)]
    read_arguments, read_results = _READ_BY_BACKWARD.get(call.name, ((), ()))
    backward_counts, read_indices = _counts(_backward_of(call)), tuple(map(names.index, read_arguments))
    flops = backward_counts.matmul, backward_counts.pointwise, backward_counts.transcendental
    return _opaque(call, OpaqueBackward(*flops, read_indices, read_results, None, None, backward_counts.workspace))


def _opaque(call: Call, backward: OpaqueBackward | None) -> Sequence[Tensor]:
    counts = _counts(_with_specs(call))
    kind = Opaque(
        matmul=counts.matmul,
        pointwise=counts.pointwise,
        transcendental=counts.transcendental,
        outputs=tuple((t.sizes, t.dtype) for t in call.results),
        backward=backward,
    )
    return apply(kind, [t for t in call.arguments.values() if isinstance(t, Tensor)], call.name)


def _backward_of(call: Call) -> Call:
    """Return the backward call for all operands, with contiguous tensors."""
    forward_call = _with_specs(call, grad_output=_contiguous(call.out))
    results = tuple(_contiguous(v) for v in call.arguments.values() if isinstance(v, Tensor))
    return replace(forward_call, name=f"{call.name}_backward", inplace=False, results=results)


def _contiguous(t: Tensor | Spec) -> Spec:
    return Spec(t.sizes, contiguous(t.sizes), t.dtype)


@translation(*(f"{name}_backward" for name in _READ_BY_BACKWARD))
def stated_backward(call: Call) -> Sequence[Tensor] | None:
    """Return a backward kernel's gradients; None unless all are requested."""
    return stated_kernel(call) if all(call.get("output_mask") or (True,)) else None
