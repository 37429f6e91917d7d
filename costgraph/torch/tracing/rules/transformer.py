"""Whole layers that torch runs as one op in inference: multi-head attention and the layer of an encoder."""

from __future__ import annotations

from ....algebra.polynomial import Poly
from ..call import Call, Counts, Spec
from .amounts import REDUCE, each, size, together
from .declared import norm_forward, softmax_forward
from .pointwise import gelu_steps
from .table import rule

__all__: list[str] = []  # its rules are found in RULES


def _attention(call: Call, queries: Spec, keys: Spec, heads: Poly) -> Counts:
    """Return the cost of projections with their biases, and of attention with its probabilities in memory."""
    batch, length, width = queries.sizes
    pairs = batch * length * keys.sizes[1]
    rows = queries.numel / width
    weights: Poly = call["qkv_weight"].numel + call["proj_weight"].numel
    masked = ("masked_fill",) if call.get("mask") is not None else ()
    return together(
        Counts(matmul=2 * rows * weights + 4 * pairs * width),
        each(rows * 4 * width, "add"),  # biases of queries, keys, values and the result
        each(queries.numel, "mul"),  # the scale
        each(pairs * heads, *masked),
        softmax_forward("softmax", batch * heads * length, keys.sizes[1]),
    )


@rule("_native_multi_head_attention")
def multi_head_attention(call: Call) -> Counts:
    """Count projections, both products of attention and its softmax, and the mean over heads that is asked for."""
    queries: Spec = call["query"]
    keys: Spec = call["key"]
    heads = size(call["num_head"])
    counts = _attention(call, queries, keys, heads)
    if not (call["need_weights"] and call["average_attn_weights"]):
        return counts
    return together(counts, each(queries.sizes[0] * heads * queries.sizes[1] * keys.sizes[1], REDUCE))


@rule("_transformer_encoder_layer_fwd")
def encoder_layer(call: Call) -> Counts:
    """Count attention, two linear layers with an activation, two norms and two sums with what came before."""
    x: Spec = call["src"]
    width = x.sizes[-1]
    rows = x.numel / width
    up: Spec = call["ffn_weight_1"]
    hidden = rows * up.sizes[0]
    norm = norm_forward(rows, width, centred=True, affine=True, bias=True)
    return together(
        _attention(call, x, x, size(call["num_heads"])),
        Counts(matmul=2 * rows * (up.numel + call["ffn_weight_2"].numel)),
        each(hidden, "add", *(gelu_steps("none") if call["use_gelu"] else ("relu",))),
        each(x.numel, "add", "add", "add"),  # a bias, and what came before, twice
        norm,
        norm,
    )
