"""Costs of fused scaled dot-product attention and its backward, by attended pairs of query and key.

With a causal mask, executed FLOPs count attended pairs and full FLOPs all pairs. The forward pass has two matmuls, the
backward pass five, since it recomputes scores from the logsumexp (Dao et al. 2022, arXiv 2205.14135). An explicit mask
is data, so every pair is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from ....algebra.extremum import smaller
from ....algebra.polynomial import ONE, Poly, poly, total
from ....ir.graph import Domain
from ....ops.functions import Function
from ..call import Call, Counts, Spec
from .table import (
    REDUCE,
    combined,
    per_element,
    rule,
    unsupported,
)

__all__: list[str] = []  # its rules are found in RULES


@dataclass(frozen=True)
class _Sizes:
    """Sizes of an attention call."""

    heads: Poly
    """batch size times query heads"""
    queries: Poly
    keys: Poly
    size: Poly
    """width of a query or key"""
    value: Poly
    """width of a value"""
    attended: Poly
    """computed pairs"""


def _sizes(call: Call, positions: int, causal: str) -> _Sizes:
    """Return the sizes; `positions` is the position axis, 1 or 2; heads are the other one.

    `causal` is "", "first" if query i attends to keys 0 to i, or "last" if the last query and the last key are aligned.
    """
    q: Spec = call["query"]
    k: Spec = call["key"]
    v: Spec = call["value"]
    for name, t in (("query", q), ("key", k), ("value", v)):
        if len(t.sizes) != 4:
            raise unsupported(call, f"{name} has {len(t.sizes)} axes", "four: batch, heads, positions and head size")
    queries, keys = q.sizes[positions], k.sizes[positions]
    if causal == "last" or (causal and queries == keys):
        attended = Domain(causal=True).points(queries, keys)
    elif causal:
        attended = _pairs_aligned_at_first(queries, keys)
    else:
        attended = queries * keys
    return _Sizes(q.sizes[0] * q.sizes[3 - positions], queries, keys, q.sizes[-1], v.sizes[-1], attended)


def _pairs_aligned_at_first(queries: Poly, keys: Poly) -> Poly:
    """Return the pairs if query i attends to keys 0 to i: a triangle, and all keys for later queries."""
    side = smaller(queries, keys)
    return side * (side + 1) / 2 + (queries - side) * keys


def _matmuls(s: _Sizes, scores: int, values: int) -> Counts:
    """Return the cost of matmuls over the key width and over the value width."""
    each_pair = 2 * s.heads * (scores * s.size + values * s.value)
    return Counts(matmul=each_pair * s.attended, full=each_pair * s.queries * s.keys)


def _mask_and_dropout(call: Call) -> Sequence[str]:
    """Return further steps per score: an added bias, and dropout by a mask and a scale."""
    biased = any(isinstance(call.get(name), Spec) for name in ("attn_mask", "attn_bias", "bias"))
    dropped = bool(call.get("dropout_p"))
    return (*(("add",) if biased else ()), *(("mul", "mul") if dropped else ()))


#: Softmax of scaled scores, and logsumexp per row.
_SCORES: tuple[str | Function, ...] = ("mul", REDUCE, "sub", "exp", REDUCE, "div")
_STATISTIC = ("log", "add")
#: Probabilities from scores; the softmax gradient; the scale.
_GRADIENTS = ("mul", "sub", "exp", "sub", "mul", "mul")
#: Row sums of gradient times result.
_ROW: tuple[str | Function, ...] = ("mul", REDUCE)


def _forward(call: Call, s: _Sizes) -> Counts:
    pairs = per_element(s.heads * s.attended, *_SCORES, *_mask_and_dropout(call))
    return combined(_matmuls(s, 1, 1), pairs, per_element(s.heads * s.queries, *_STATISTIC))


def _backward(call: Call, s: _Sizes) -> Counts:
    pairs = per_element(s.heads * s.attended, *_GRADIENTS, *_mask_and_dropout(call))
    rows = per_element(s.heads * s.queries * s.value, *_ROW)
    return combined(_matmuls(s, 3, 2), pairs, rows)


@rule("_transform_bias_rescale_qkv")
def heads(call: Call) -> Counts:
    """Count the QKV bias and the query scale."""
    qkv: Spec = call["qkv"]
    return combined(per_element(qkv.numel, "add"), per_element(qkv.numel / 3, "mul"))


# -- BHSD layout -------------------------------------------------------------------------------------------------

_HEADS_FIRST = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


def _causal(call: Call) -> str:
    return "first" if call.get("is_causal") else ""


@rule("_scaled_dot_product_flash_attention_backward")
def flash_backward(call: Call) -> Counts:
    """Count the backward pass; the CUDA kernel accumulates query gradients in fp32, and key gradients per query head.

    `mha_bwd` of aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: rows and heads are padded.
    """
    s = _sizes(call, 2, _causal(call))
    rows = _padded(s.queries, _ROWS)
    q, k, v = (call[n] for n in ("query", "key", "value"))
    workspace = 4 * s.heads * rows * (1 + _padded(s.size, _WIDTH))
    if q.sizes[1] != k.sizes[1]:
        workspace += (q.sizes[1] / k.sizes[1]) * total(t.numel * t.dtype.bytes for t in (k, v))
    return combined(_backward(call, s), Counts(workspace=workspace))


#: Tile sizes to which rows and head widths are padded.
_ROWS, _WIDTH = 128, 32


def _padded(n: Poly, step: int) -> Poly:
    return step * poly(sympy.ceiling(n.expr / step))


@rule(*_HEADS_FIRST)
def attention(call: Call) -> Counts:
    """Count both matmuls of attended pairs, and their softmax; scores never reach memory."""
    return _forward(call, _sizes(call, 2, _causal(call)))


@rule(*(f"{name}_backward" for name in _HEADS_FIRST if name != "_scaled_dot_product_flash_attention"))
def attention_backward(call: Call) -> Counts:
    """Count the five matmuls of attended pairs, and the softmax gradient."""
    return _backward(call, _sizes(call, 2, _causal(call)))


# -- BSHD layout, called by the above on a GPU -------------------------------------------------------------------


def _bshd_sizes(call: Call) -> _Sizes:
    lengths = ("cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k", "seqlen_k", "seqused_k", "block_table")
    packed = next((n for n in lengths if isinstance(call.get(n), Spec) and call[n].numel), None)
    if packed is not None and len(call["query"].sizes) != 4:
        raise unsupported(call, f"the sequence lengths are data ({packed})", "a batch of equal lengths")
    window = next(
        (n for n in ("window_size_left", "window_size_right", "window_size") if _is_window(call.get(n))), None
    )
    if window is not None:
        raise unsupported(call, f"{window} is {call[window]}", "no window")
    if "custom_mask_type" in call.arguments:  # 0 none, 1 causal from the first position, 2 aligned at the last
        return _sizes(call, 1, ("", "first", "last")[int(call["custom_mask_type"])])
    return _sizes(call, 1, "last" if call.get("is_causal") else "")


def _is_window(value: object) -> bool:
    return isinstance(value, Poly | int) and not isinstance(value, bool) and value != ONE * -1


@rule("_flash_attention_forward", "_efficient_attention_forward")
def inner_attention(call: Call) -> Counts:
    """Count as the forward pass above."""
    return _forward(call, _bshd_sizes(call))


@rule("_flash_attention_backward", "_efficient_attention_backward")
def inner_attention_backward(call: Call) -> Counts:
    """Count as the backward pass above."""
    return _backward(call, _bshd_sizes(call))


@rule("torch_attn._varlen_attn")
def packed_attention(call: Call) -> Counts:
    """Count packed sequences, each as long as the stated maximum.

    Lengths are data: the count is exact if all are equal, and an upper bound otherwise.
    """
    return _forward(call, _packed_sizes(call))


@rule("torch_attn._varlen_attn_backward")
def packed_attention_backward(call: Call) -> Counts:
    """Count the backward pass of packed sequences."""
    return _backward(call, _packed_sizes(call))


def _packed_sizes(call: Call) -> _Sizes:
    q, v = call["query"], call["value"]
    window = [n for n in call.get("window_size") or () if n != ONE * -1]
    if window not in ([], [0]) or any(isinstance(call.get(name), Spec) for name in ("seqused_k", "block_table")):
        raise unsupported(call, "the call has a window or a paged KV cache", "full or causal attention")
    max_queries, max_keys = poly(call["max_q"]), poly(call["max_k"])
    causal = bool(call.get("is_causal")) or window == [0]
    pairs = Domain(causal=True).points(max_queries, max_keys) if causal else max_queries * max_keys
    return _Sizes(q.sizes[1] * q.sizes[0] / max_queries, max_queries, max_keys, q.sizes[-1], v.sizes[-1], pairs)
