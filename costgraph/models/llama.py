"""Llama 2, 3 and 3.1: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, an untied head.

Sizes: Grattafiori et al. 2024 (arXiv 2407.21783), table 3, and the `config.json` of meta-llama/Llama-2-7b-hf,
Llama-2-13b-hf and Llama-2-70b-hf (Touvron et al. 2023, arXiv 2307.09288). Order of ops: `LlamaDecoderLayer`
of transformers.
"""

from __future__ import annotations

from functools import partial

import sympy

import costgraph as cg

from . import composed
from .config import Config
from .family import Family, Preset


def llama(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    bias: bool = False,
    mlp_bias: bool = False,
    tied: bool = False,
    activation: str = "silu",
) -> cg.Graph:
    """Declare Llama: tokens (B, S) to logits (B, S, V); dropout falls on attention probabilities alone."""
    B, S, D, H, G, K, F, L, V = cg.dims("B S D H G K F L V")

    with cg.Graph(name, dtype=dtype) as g:
        g.assume("H >= G")
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        x = cg.embedding(tokens, table)
        rope = cg.nn.rotary_tables(cg.ops.arange(S), K)

        def block(x: cg.Tensor) -> cg.Tensor:
            y = cg.rms_norm(x, name="attention/norm")
            x = x + cg.nn.self_attention(
                y, H, K, groups=G, rope=rope, kernel=attention, bias=bias, out_bias=bias, p=dropout
            )
            y = cg.rms_norm(x, name="mlp/norm")
            return x + cg.nn.gated_mlp(y, F, activation=partial(cg.ops.pointwise, activation), bias=mlp_bias)

        x = cg.rms_norm(cg.repeat(L, block, x, name="layers"), name="norm")
        g.output(cg.nn.tied_head(x, table) if tied else cg.linear(x, "b s d -> b s v", v=V, name="head"))
        g.loss = "cross_entropy"
    return g


def composed_llama(name: str, attention: str, dropout: float, dtype: str) -> cg.Graph:
    """Declare Llama as transformers' eager code runs it, with what its variables still name."""
    B, S, D, H, G, K, F, L, V = cg.dims("B S D H G K F L V")
    # a model whose heads all have keys and values of their own repeats none
    shared = not name.startswith(("llama-2-7b", "llama-2-13b"))

    def block(x: cg.Tensor) -> cg.Tensor:
        y = composed.rms_norm(x, "attention/norm")
        attended, probabilities = _attend(y, cos, sin, mask, G if shared else H, dropout)
        middle = x + cg.ops.keep(attended, y)
        y = composed.rms_norm(middle, "mlp/norm")
        y = cg.ops.keep(cg.nn.gated_mlp(y, F, name="mlp"), y)
        # what the layer was given and what its attention returned are named until it returns
        return cg.ops.keep(middle + y, *probabilities, x)

    with cg.Graph(name, dtype=dtype) as g:
        if shared:
            g.assume("H > G")
        tokens = g.input("tokens", (B, S), dtype="int64")
        embedded, positions = cg.embedding(tokens, g.param("tokens/table", (V, D))), cg.ops.arange(S)
        mask = composed.causal_mask(positions, B, dtype) if attention == "eager" else None
        cos, sin = composed.rotary_tables(positions, K, dtype)
        x = cg.repeat(L, block, embedded, name="layers")
        y = composed.rms_norm(x, "norm")
        y = cg.ops.keep(y, x, embedded, positions, cos, sin, *([] if mask is None else [mask]))
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
        keys = cg.ops.keep(keys, q, k)  # both names go over to what is turned once both are
    y, probabilities = composed.attend(turned, keys, v, mask, dropout, repeats=H / groups, softmax="fp32")
    y = cg.linear(y, "b s e -> b s d", d=D, name="attention/proj")
    return cg.ops.keep(y, turned, keys, v), probabilities


def read(c: Config) -> Preset:
    """Read a config.json of transformers' LlamaConfig."""
    c.ignore("max_position_embeddings", "max_sequence_length", "is_llama_config", "rope_interleaved")
    structure = {"bias": c.flag("attention_bias"), "mlp_bias": c.flag("mlp_bias")}
    structure |= {"tied": c.flag("tie_word_embeddings")}
    return Preset(c.decoder(), structure | {"activation": c.activation("hidden_act")})


def _sizes(D: int, H: int, G: int, F: int, L: int, V: int) -> Preset:
    return Preset({"D": D, "H": H, "G": G, "K": D // H, "F": F, "L": L, "V": V})


FAMILIES = (
    Family(
        llama,
        {
            "llama-2-7b": _sizes(4096, 32, 32, 11008, 32, 32000),
            "llama-2-13b": _sizes(5120, 40, 40, 13824, 40, 32000),
            "llama-2-70b": _sizes(8192, 64, 8, 28672, 80, 32000),
            "llama-3-8b": _sizes(4096, 32, 8, 14336, 32, 128256),
            "llama-3-70b": _sizes(8192, 64, 8, 28672, 80, 128256),
            "llama-3.1-405b": _sizes(16384, 128, 8, 53248, 126, 128256),
        },
        composed=composed_llama,
        architectures={"LlamaForCausalLM": "llama"},
        read=read,
    ),
)
