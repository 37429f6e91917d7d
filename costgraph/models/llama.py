"""Llama 2, 3 and 3.1: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, an untied head.

Sizes: Grattafiori et al. 2024 (arXiv 2407.21783), table 3, and the `config.json` of meta-llama/Llama-2-7b-hf,
Llama-2-13b-hf and Llama-2-70b-hf (Touvron et al. 2023, arXiv 2307.09288). Order of ops: `LlamaDecoderLayer`
of transformers.
"""

from __future__ import annotations

import sympy

import costgraph as cg

from . import composed

PRESETS: dict[str, dict[str, int]] = {
    "llama-2-7b": {"D": 4096, "H": 32, "G": 32, "K": 128, "F": 11008, "L": 32, "V": 32000},
    "llama-2-13b": {"D": 5120, "H": 40, "G": 40, "K": 128, "F": 13824, "L": 40, "V": 32000},
    "llama-2-70b": {"D": 8192, "H": 64, "G": 8, "K": 128, "F": 28672, "L": 80, "V": 32000},
    "llama-3-8b": {"D": 4096, "H": 32, "G": 8, "K": 128, "F": 14336, "L": 32, "V": 128256},
    "llama-3-70b": {"D": 8192, "H": 64, "G": 8, "K": 128, "F": 28672, "L": 80, "V": 128256},
    "llama-3.1-405b": {"D": 16384, "H": 128, "G": 8, "K": 128, "F": 53248, "L": 126, "V": 128256},
}


def llama(name: str, attention: str, dropout: float, dtype: str) -> cg.Graph:
    """Declare Llama: tokens (B, S) to logits (B, S, V); dropout falls on attention probabilities alone."""
    B, S, D, H, G, K, F, L, V = cg.dims("B S D H G K F L V")

    def heads(x: cg.Tensor, count: object, name: str) -> cg.Tensor:
        y = cg.linear(x, "b s d -> b s h k", h=count, k=K, name=name)
        return cg.rearrange(y, "b s h k -> b h s k")

    with cg.Graph(name, dtype=dtype) as g:
        g.assume("H >= G")
        tokens = g.input("tokens", (B, S), dtype="int64")
        x = cg.embedding(tokens, g.param("tokens/table", (V, D)))
        cos, sin = cg.rotary_tables(cg.arange(S), K)

        def block(x: cg.Tensor) -> cg.Tensor:
            y = cg.rms_norm(x, name="attention/norm")
            q, k, v = (heads(y, n, f"attention/{c}") for c, n in (("q", H), ("k", G), ("v", G)))
            with cg.scope("attention"):
                q, k = cg.rotary(q, cos, sin), cg.rotary(k, cos, sin)
            y = cg.attention(q, k, v, causal=True, kernel=attention, p=dropout, name="attention")
            y = cg.rearrange(y, "b h s k -> b s (h k)", name="attention/merge")
            x = x + cg.linear(y, "b s e -> b s d", d=D, name="attention/proj")
            return x + cg.gated_mlp(cg.rms_norm(x, name="mlp/norm"), F, name="mlp")

        x = cg.rms_norm(cg.repeat(L, block, x, name="layers"), name="norm")
        g.output(cg.linear(x, "b s d -> b s v", v=V, name="head"))
    g.loss = "cross_entropy"
    return g


def composed_llama(name: str, attention: str, dropout: float, dtype: str) -> cg.Graph:
    """Declare Llama as transformers' eager code runs it, with what its variables still name."""
    B, S, D, H, G, K, F, L, V = cg.dims("B S D H G K F L V")
    # a model whose heads all have keys and values of their own repeats none
    shared = PRESETS[name]["G"] < PRESETS[name]["H"]

    def block(x: cg.Tensor) -> cg.Tensor:
        y = composed.rms_norm(x, "attention/norm")
        attended, probabilities = _attend(y, cos, sin, mask, G if shared else H, dropout)
        middle = x + cg.keep(attended, y)
        y = composed.rms_norm(middle, "mlp/norm")
        y = cg.keep(cg.gated_mlp(y, F, name="mlp"), y)
        # what the layer was given and what its attention returned are named until it returns
        return cg.keep(middle + y, *probabilities, x)

    with cg.Graph(name, dtype=dtype) as g:
        if shared:
            g.assume("H > G")
        tokens = g.input("tokens", (B, S), dtype="int64")
        embedded, positions = cg.embedding(tokens, g.param("tokens/table", (V, D))), cg.arange(S)
        mask = composed.causal_mask(positions, B, dtype) if attention == "eager" else None
        cos, sin = composed.rotary_tables(positions, K, dtype)
        x = cg.repeat(L, block, embedded, name="layers")
        y = composed.rms_norm(x, "norm")
        y = cg.keep(y, x, embedded, positions, cos, sin, *([] if mask is None else [mask]))
        g.output(cg.linear(y, "b s d -> b s v", v=V, name="head"))
    g.loss = "cross_entropy"
    return g


def _attend(
    x: cg.Tensor, cos: cg.Tensor, sin: cg.Tensor, mask: cg.Tensor | None, groups: sympy.Expr, dropout: float
) -> tuple[cg.Tensor, list[cg.Tensor]]:
    """Return what attention adds, and the probabilities that it returns as well."""
    D, H, K = cg.dims("D H K")
    made = [
        cg.linear(x, "b s d -> b s h k", h=n, k=K, name=f"attention/{c}")
        for c, n in (("q", H), ("k", groups), ("v", groups))
    ]
    q, k, v = (cg.rearrange(t, "b s h k -> b h s k") for t in made)
    with cg.scope("attention"):
        turned, keys = composed.rotary(q, cos, sin), composed.rotary(k, cos, sin)
        keys = cg.keep(keys, q, k)  # both names go over to what is turned once both are
    y, probabilities = composed.attend(turned, keys, v, mask, dropout, repeats=H / groups, softmax="fp32")
    y = cg.linear(y, "b s e -> b s d", d=D, name="attention/proj")
    return cg.keep(y, turned, keys, v), probabilities
