"""Llama 2, 3 and 3.1: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, an untied head.

Sizes: Grattafiori et al. 2024 (arXiv 2407.21783), table 3, and the `config.json` of meta-llama/Llama-2-7b-hf,
Llama-2-13b-hf and Llama-2-70b-hf (Touvron et al. 2023, arXiv 2307.09288). Order of ops: `LlamaDecoderLayer`
of transformers.
"""

from __future__ import annotations

import costgraph as cg

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
