"""GPT-2 and GPT-3: learned positions, LayerNorm, a fused QKV projection, a tied head.

Sizes: GPT-2 from the `config.json` of openai-community/gpt2, gpt2-medium, gpt2-large and gpt2-xl; GPT-3 from Brown et
al. 2020 (arXiv 2005.14165), table 2.1. Op order: `GPT2LMHeadModel` in transformers. GPT-3 has locally banded attention
in every other layer; all layers are declared dense.
"""

from __future__ import annotations

import costgraph as cg

from .blocks import block
from .config import Config
from .decoder import decoder
from .eager_ops import KERNELS, EagerOps
from .family import Family, Preset


def gpt2(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    eager_ops: bool = False,
    *,
    tied: bool = True,
    activation: str = "gelu_tanh",
) -> cg.Graph:
    """Declare GPT-2: tokens (B, S) to logits (B, S, V)."""
    S, D, H, F, L, P = cg.dims("S D H F L P")
    run = EagerOps(dtype, renamed=True) if eager_ops else KERNELS

    def mixer(x: cg.Tensor) -> cg.Tensor:
        if eager_ops:  # heads are split after queries, keys and values
            qkv = cg.linear(x, "b s d -> b s e", e=3 * D, bias=True, name="attention/kqv")
            q, k, v = (cg.rearrange(piece, "b s (h k) -> b h s k", h=H) for piece in cg.ops.split(qkv, (D, D, D)))
        else:
            qkv = cg.linear(x, "b s d -> b s n h k", n=3, h=H, k=D / H, bias=True, name="attention/kqv")
            q, k, v = (cg.rearrange(piece, "b s 1 h k -> b h s k") for piece in cg.ops.split(qkv, (1, 1, 1), 2))
        y = run.attention(q, k, v, attention, dropout)
        y = cg.linear(y, "b s e -> b s d", d=D, bias=True, name="attention/proj")
        return run.keep(cg.dropout(y, dropout), qkv)

    def channels(x: cg.Tensor) -> cg.Tensor:
        with cg.scope("mlp"):
            y = run.pointwise(activation, cg.linear(x, "b s d -> b s f", f=F, bias=True, name="ffw1"))
            y = cg.linear(y, "b s f -> b s d", d=D, bias=True, name="ffw2")
        return cg.dropout(y, dropout)

    def stack(x: cg.Tensor) -> cg.Tensor:
        positions = run.keep_for_model(cg.ops.arange(S))
        x = x + run.keep_for_model(cg.embedding(positions, x.graph.param("positions/table", (P, D))))
        run.create_mask(positions, attention)
        layer = block(attention=mixer, mlp=channels, norm=cg.layer_norm, run=run)
        return cg.repeat(L, layer, cg.dropout(x, dropout), name="layers")

    return decoder(name, dtype, stack, norm=cg.layer_norm, tied=tied, assume=("S <= P",), run=run)


def read(c: Config) -> Preset:
    """Read a transformers `GPT2Config`."""
    c.expect("scale_attn_weights", True)
    c.expect("reorder_and_upcast_attn", False)
    c.ignore("attn_pdrop", "embd_pdrop", "resid_pdrop", "scale_attn_by_inverse_layer_idx")
    c.ignore("n_ctx", "n_special", "output_past", "predict_special_tokens")  # in older files
    for field in ("activation", "first_dropout", "type", "proj_to_labels", "use_proj"):
        c.ignore(f"summary_{field}")  # for another head
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
        eager_ops=True,
        architectures={"GPT2LMHeadModel": "gpt2"},
        read=read,
    ),
)
