"""Falcon: multi-query or grouped-query attention, parallel attention and MLP, LayerNorm, a tied head.

Sizes: Almazrouei et al. 2023 (arXiv 2311.16867), table 15, and the `config.json` of tiiuae/falcon-7b, falcon-40b,
falcon-180B and falcon-11B. Op order: `FalconForCausalLM` in transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import costgraph as cg

from .blocks import Tables, block, with_dropout
from .config import Config
from .decoder import decoder
from .family import Family, Preset


def falcon(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    norms: Literal[1, 2] = 1,
    parallel: bool = True,
    bias: bool = False,
    tied: bool = True,
    activation: str = "gelu",
) -> cg.Graph:
    """Declare Falcon: tokens (B, S) to logits (B, S, V); attention and MLP share one of `norms`, or have one each."""
    D, H, G, F, L = cg.dims("D H G F L")
    if norms == 1 and not parallel:
        raise cg.GraphError(f"model {name!r}: norms=1 with parallel=False, expected 2")
    channels = partial(cg.nn.mlp, f=F, bias=bias, activation=partial(cg.ops.pointwise, activation))

    def stack(x: cg.Tensor, rope: Tables) -> cg.Tensor:
        mixer = partial(
            cg.nn.self_attention, heads=H, size=D / H, groups=G, packed=True, rope=rope, kernel=attention, bias=bias,
            out_bias=bias,
        )  # fmt: skip

        def side_by_side(x: cg.Tensor) -> cg.Tensor:
            y = cg.layer_norm(x, name="attention/norm")
            z = cg.layer_norm(x, name="mlp/norm") if norms == 2 else y
            return x + cg.dropout(channels(z) + mixer(y), dropout)

        one_by_one = block(
            attention=with_dropout(mixer, dropout), mlp=with_dropout(channels, dropout), norm=cg.layer_norm
        )
        return cg.repeat(L, side_by_side if parallel else one_by_one, x, name="layers")

    return decoder(name, dtype, stack, rope=D / H, norm=cg.layer_norm, tied=tied)


def read(c: Config) -> Preset:
    """Read a transformers `FalconConfig`, or one of the code published with the first checkpoints."""
    c.expect("alibi", False, None)
    c.expect("apply_residual_connection_post_layernorm", False)
    c.ignore("max_position_embeddings", "ff_factor")
    D, H = c.size("hidden_size"), c.size("num_attention_heads")
    # the code of the first checkpoints has a separate release for grouped-query attention
    new_architecture = c.flag("new_decoder_architecture", default=c.has("num_kv_heads"), null=False)
    groups, multi_query = c.size("num_kv_heads", default=H), c.flag("multi_query", null=False)
    if new_architecture:
        c.expect("parallel_attn", True)
    elif not multi_query:
        c.expect("num_kv_heads", H)
    parallel = c.flag("parallel_attn", null=False)
    norms = c.size("num_ln_in_parallel_attn", default=2 if new_architecture else 1) if parallel else 2
    c.expect("num_ln_in_parallel_attn", *((1, 2) if new_architecture else (1,)))
    sizes = {
        "D": D,
        "H": H,
        "G": groups if new_architecture or not multi_query else 1,
        "F": c.size("ffn_hidden_size", default=4 * D),
    }
    sizes |= {"L": c.size("num_hidden_layers"), "V": c.size("vocab_size")}
    structure = {"norms": norms, "parallel": parallel, "bias": c.flag("bias", null=False)}
    structure["tied"] = c.flag("tie_word_embeddings")
    return Preset(sizes, {**structure, "activation": c.activation("activation")})


def _sizes(D: int, H: int, G: int, L: int) -> dict[str, int]:
    return {"D": D, "H": H, "G": G, "F": 4 * D, "L": L, "V": 65024}


FAMILIES = (
    Family(
        falcon,
        {
            "falcon-7b": Preset(_sizes(4544, 71, 1, 32)),
            "falcon-11b": Preset(_sizes(4096, 32, 8, 60), {"tied": False}),
            "falcon-40b": Preset(_sizes(8192, 128, 8, 60), {"norms": 2}),
            "falcon-180b": Preset(_sizes(14848, 232, 8, 80), {"norms": 2}),
        },
        architectures={"FalconForCausalLM": "falcon", "RWForCausalLM": "refined_web"},
        read=read,
    ),
)
