"""GPT-2 and GPT-3: learned positions, LayerNorm, one linear layer for queries, keys and values, a tied head.

Sizes: GPT-2 from the `config.json` of openai-community/gpt2, gpt2-medium, gpt2-large and gpt2-xl; GPT-3 from
Brown et al. 2020 (arXiv 2005.14165), table 2.1. Order of ops: `GPT2LMHeadModel` of transformers. GPT-3 has
locally banded attention in every other layer; all of them are declared dense.
"""

from __future__ import annotations

import costgraph as cg

from . import composed
from .config import Config
from .family import Family, Preset


def gpt2(
    name: str, attention: str, dropout: float, dtype: str, *, tied: bool = True, activation: str = "gelu_tanh"
) -> cg.Graph:
    """Declare GPT-2: tokens (B, S) to logits (B, S, V)."""
    B, S, D, H, F, L, V, P = cg.dims("B S D H F L V P")

    def block(x: cg.Tensor) -> cg.Tensor:
        y = cg.layer_norm(x, name="attention/norm")
        qkv = cg.linear(y, "b s d -> b s n h k", n=3, h=H, k=D / H, bias=True, name="attention/kqv")
        q, k, v = (cg.rearrange(part, "b s 1 h k -> b h s k") for part in cg.ops.split(qkv, (1, 1, 1), 2))
        k, v = (cg.ops.cache(t, "b h t k", along="t", name=f"attention/{c}_cache") for c, t in (("k", k), ("v", v)))
        y = cg.attention(q, k, v, causal=True, kernel=attention, p=dropout, name="attention")
        y = cg.rearrange(y, "b h s k -> b s (h k)", name="attention/merge")
        y = cg.linear(y, "b s e -> b s d", d=D, bias=True, name="attention/proj")
        x = x + cg.dropout(y, dropout)
        y = cg.layer_norm(x, name="mlp/norm")
        with cg.scope("mlp"):
            y = cg.ops.pointwise(activation, cg.linear(y, "b s d -> b s f", f=F, bias=True, name="ffw1"))
            y = cg.linear(y, "b s f -> b s d", d=D, bias=True, name="ffw2")
        return x + cg.dropout(y, dropout)

    with cg.Graph(name, dtype=dtype) as g:
        g.assume("S <= P")
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        x = cg.embedding(tokens, table)
        x = x + cg.embedding(cg.ops.arange(S), g.param("positions/table", (P, D)))
        x = cg.repeat(L, block, cg.dropout(x, dropout), name="layers")
        x = cg.layer_norm(x, name="norm")
        g.output(cg.nn.tied_head(x, table) if tied else cg.linear(x, "b s d -> b s v", v=V, name="head"))
        g.loss = "cross_entropy"
    return g


def composed_gpt2(name: str, attention: str, dropout: float, dtype: str) -> cg.Graph:
    """Declare GPT-2 as transformers' eager code runs it, with what its variables still name."""
    B, S, D, F, L, V, P = cg.dims("B S D F L V P")

    def block(x: cg.Tensor) -> cg.Tensor:
        y = cg.layer_norm(x, name="attention/norm")
        attended, probabilities = _attend(y, mask, dropout)
        middle = cg.ops.keep(attended + x, y)
        y = cg.layer_norm(middle, name="mlp/norm")
        with cg.scope("mlp"):
            z = composed.gelu_new(cg.linear(y, "b s d -> b s f", f=F, bias=True, name="ffw1"))
            z = cg.linear(z, "b s f -> b s d", d=D, bias=True, name="ffw2")
        # what the layer was given and what its attention returned are named until it returns
        return cg.ops.keep(middle + cg.dropout(z, dropout), y, attended, *probabilities, x)

    with cg.Graph(name, dtype=dtype) as g:
        g.assume("S <= P")
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        embedded, positions = cg.embedding(tokens, table), cg.ops.arange(S)
        placed = cg.embedding(positions, g.param("positions/table", (P, D)))
        x = embedded + placed
        mask = composed.causal_mask(positions, B, dtype) if attention == "eager" else None
        x = cg.repeat(L, block, cg.dropout(x, dropout), name="layers")
        x = cg.ops.keep(cg.layer_norm(x, name="norm"), embedded, placed, positions, *([] if mask is None else [mask]))
        with cg.scope("head"):
            g.output(cg.einsum(x, table, "b s d, v d -> b s v", name="matmul"))
        g.loss = "cross_entropy"
    return g


def _attend(x: cg.Tensor, mask: cg.Tensor | None, dropout: float) -> tuple[cg.Tensor, list[cg.Tensor]]:
    """Return what attention adds, and the probabilities that it returns as well."""
    D, H = cg.dims("D H")
    qkv = cg.linear(x, "b s d -> b s e", e=3 * D, bias=True, name="attention/kqv")
    q, k, v = (cg.rearrange(part, "b s (h k) -> b h s k", h=H) for part in cg.ops.split(qkv, (D, D, D)))
    y, probabilities = composed.attend(q, k, v, mask, dropout)
    y = cg.linear(y, "b s e -> b s d", d=D, bias=True, name="attention/proj")
    return cg.ops.keep(cg.dropout(y, dropout), qkv), probabilities


def read(c: Config) -> Preset:
    """Read a config.json of transformers' GPT2Config."""
    c.expect("scale_attn_weights", True)
    c.expect("reorder_and_upcast_attn", False)
    c.ignore("attn_pdrop", "embd_pdrop", "resid_pdrop", "scale_attn_by_inverse_layer_idx")
    c.ignore("n_ctx", "n_special", "output_past", "predict_special_tokens")  # of older files
    for field in ("activation", "first_dropout", "type", "proj_to_labels", "use_proj"):
        c.ignore(f"summary_{field}")  # of another head
    D = c.size("n_embd")
    sizes = {"D": D, "H": c.size("n_head"), "F": c.size("n_inner", default=4 * D), "L": c.size("n_layer")}
    structure = {"tied": c.flag("tie_word_embeddings")}
    sizes |= {"V": c.size("vocab_size"), "P": c.size("n_positions")}
    return Preset(sizes, {**structure, "activation": c.activation("activation_function")})


FAMILIES = (
    Family(
        gpt2,
        {
            "gpt2": Preset({"D": 768, "H": 12, "F": 3072, "L": 12, "V": 50257, "P": 1024}),
            "gpt2-medium": Preset({"D": 1024, "H": 16, "F": 4096, "L": 24, "V": 50257, "P": 1024}),
            "gpt2-large": Preset({"D": 1280, "H": 20, "F": 5120, "L": 36, "V": 50257, "P": 1024}),
            "gpt2-xl": Preset({"D": 1600, "H": 25, "F": 6400, "L": 48, "V": 50257, "P": 1024}),
            "gpt3-175b": Preset({"D": 12288, "H": 96, "F": 49152, "L": 96, "V": 50257, "P": 2048}),
        },
        composed=composed_gpt2,
        architectures={"GPT2LMHeadModel": "gpt2"},
        read=read,
    ),
)
