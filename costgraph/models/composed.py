"""Functions of transformers' modules as its eager code runs them: an op for each call, and what variables still name.

Source: transformers 5.23, `activations.NewGELUActivation`, `LlamaRMSNorm`, `LlamaRotaryEmbedding`,
`apply_rotary_pos_emb`, `repeat_kv`, `eager_attention_forward` and `create_causal_mask`.
"""

from __future__ import annotations

from math import pi, sqrt

import sympy

import costgraph as cg

__all__ = ["attend", "causal_mask", "gelu_new", "rms_norm", "rotary", "rotary_tables"]

#: What a hidden score gets; the number makes no difference to any cost, and every floating format holds it.
_HIDDEN = -1e4


def gelu_new(x: cg.Tensor) -> cg.Tensor:
    """GELU in its tanh form, in eight ops; the module's input lives until it returns."""
    half = 0.5 * x
    y = 1.0 + cg.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3.0))
    return cg.ops.keep(half * y, x)


def rms_norm(x: cg.Tensor, name: str) -> cg.Tensor:
    """RMSNorm in steps, in fp32 and back."""
    with cg.scope(name):
        wide = cg.ops.cast(x, "fp32")
        variance = cg.reduce(wide**2.0, "b s d -> b s 1", "mean")
        y = cg.ops.cast(wide * cg.ops.pointwise("rsqrt", variance + 1e-6), x.dtype)
        return cg.ops.keep(x.graph.param("weight", x.shape[-1:]) * y, variance, wide)


def rotary_tables(positions: cg.Tensor, size: sympy.Expr, dtype: str) -> tuple[cg.Tensor, cg.Tensor]:
    """Make cosines and sines for all elements of a head, of both halves alike."""
    with cg.scope("rope"):
        frequencies = positions.graph.buffer("inv_freq", (size / 2,), dtype="fp32")
        positions.graph.buffer("original_inv_freq", (size / 2,), dtype="fp32")
        angles = cg.ops.cast(cg.rearrange(positions, "s -> 1 s 1"), "fp32") * frequencies
        both = cg.ops.concat([angles, angles])
        cos = cg.ops.pointwise("cos", both) * 1.0
        sin = cg.ops.pointwise("sin", both) * 1.0
        return cg.ops.cast(cos, dtype), cg.ops.keep(cg.ops.cast(sin, dtype), angles, both)


def rotary(x: cg.Tensor, cos: cg.Tensor, sin: cg.Tensor) -> cg.Tensor:
    """Rotate by products with cosines and sines: x * cos + rotate_half(x) * sin."""
    straight = x * cg.rearrange(cos, "1 s k -> 1 1 s k")
    half = x.shape[-1] / 2
    first, last = x[..., :half], x[..., half:]
    turned = cg.ops.concat([-last, first])
    return straight + turned * cg.rearrange(sin, "1 s k -> 1 1 s k")


def causal_mask(positions: cg.Tensor, batch: sympy.Expr, dtype: str) -> cg.Tensor:
    """Make what is added to scores, (batch, 1, s, s): 0 where a query sees a key."""
    with cg.scope("mask"):
        queries = cg.ops.expand(positions, "s -> b 1 s 1", b=batch)
        keys = cg.ops.expand(positions, "s -> b 1 1 s", b=batch)
        return cg.ops.pointwise("where", cg.ops.pointwise("less_equal", keys, queries), 0.0, _HIDDEN, dtype=dtype)


def attend(
    q: cg.Tensor,
    k: cg.Tensor,
    v: cg.Tensor,
    mask: cg.Tensor | None,
    p: float,
    *,
    repeats: sympy.Expr | int = 1,
    softmax: str = "",
) -> tuple[cg.Tensor, list[cg.Tensor]]:
    """Attention in separate ops, with its softmax in a format of its own if one is given; in one kernel without a mask.

    Returns
    -------
    tuple
        What is attended to, (b, s, h*k), and the probabilities if there are any: the module returns them as well.
    """
    if mask is None:
        y = cg.attention(q, k, v, kernel="flash", p=p)
        return cg.rearrange(y, "b h s k -> b s (h k)", name="attention/merge"), []
    with cg.scope("attention"):
        if repeats != 1:
            k, v = _repeat_kv(k, repeats), _repeat_kv(v, repeats)
        scores = _matmul(q, k.mT) * 1.0
        scores = scores + mask
        y = cg.ops.cast(cg.softmax(cg.ops.cast(scores, softmax or scores.dtype)), v.dtype)
        y = cg.dropout(cg.ops.keep(y, scores), p)
        out = cg.rearrange(_matmul(y, v), "b h s k -> b s (h k)", name="merge")
        return cg.ops.keep(out, k, v), [y]


def _repeat_kv(x: cg.Tensor, repeats: sympy.Expr) -> cg.Tensor:
    """Copy each head of keys or values for all heads of queries that share it."""
    return cg.rearrange(cg.ops.expand(x, "b g s k -> b g r s k", r=repeats), "b g r s k -> b (g r) s k")


def _matmul(a: cg.Tensor, b: cg.Tensor) -> cg.Tensor:
    """Multiply stacks as torch.matmul does: an operand whose heads lie inside its positions is copied first."""
    y = cg.rearrange(a, "b h i j -> (b h) i j") @ cg.rearrange(b, "b h i j -> (b h) i j")
    return cg.rearrange(y, "(b h) i j -> b h i j", h=a.shape[1])
