"""Falcon: one head of keys or few, attention and feed-forward layer side by side, LayerNorm, a tied head.

Sizes: Almazrouei et al. 2023 (arXiv 2311.16867), table 15, and the `config.json` of tiiuae/falcon-7b, falcon-40b,
falcon-180B and falcon-11B. Order of ops: `FalconForCausalLM` of transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import costgraph as cg

from .config import Config
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
    """Declare Falcon: tokens (B, S) to logits (B, S, V); both halves of a layer read one of `norms`, or one each."""
    B, S, D, H, G, F, L, V = cg.dims("B S D H G F L V")
    if norms == 1 and not parallel:
        raise cg.GraphError(f"model {name!r}: norms=1 with parallel=False, expected 2")

    with cg.Graph(name, dtype=dtype) as g:
        g.assume("H >= G")
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        rope = cg.nn.rotary_tables(cg.ops.arange(S), D / H)

        def attend(x: cg.Tensor) -> cg.Tensor:
            return cg.nn.self_attention(
                x, H, D / H, groups=G, packed=True, rope=rope, kernel=attention, bias=bias, out_bias=bias
            )

        def block(x: cg.Tensor) -> cg.Tensor:
            mlp = partial(cg.nn.mlp, f=F, bias=bias, activation=partial(cg.ops.pointwise, activation))
            y = cg.layer_norm(x, name="attention/norm")
            if parallel:
                z = cg.layer_norm(x, name="mlp/norm") if norms == 2 else y
                return x + cg.dropout(mlp(z) + attend(y), dropout)
            x = x + cg.dropout(attend(y), dropout)
            return x + cg.dropout(mlp(cg.layer_norm(x, name="mlp/norm")), dropout)

        x = cg.repeat(L, block, cg.embedding(tokens, table), name="layers")
        x = cg.layer_norm(x, name="norm")
        g.output(cg.nn.tied_head(x, table) if tied else cg.linear(x, "b s d -> b s v", v=V, name="head"))
        g.loss = "cross_entropy"
    return g


def read(c: Config) -> Preset:
    """Read a config.json of transformers' FalconConfig, or of the code that came with the first checkpoints."""
    c.expect("alibi", False, None)
    c.expect("apply_residual_connection_post_layernorm", False)
    c.ignore("max_position_embeddings", "ff_factor")
    D, H = c.size("hidden_size"), c.size("num_attention_heads")
    # the code of the first checkpoints has another release for the architecture that has groups of heads
    new = c.flag("new_decoder_architecture", default=c.has("num_kv_heads"), null=False)
    groups, one = c.size("num_kv_heads", default=H), c.flag("multi_query", null=False)
    if new:
        c.expect("parallel_attn", True)
    elif not one:
        c.expect("num_kv_heads", H)
    parallel = c.flag("parallel_attn", null=False)
    norms = c.size("num_ln_in_parallel_attn", default=2 if new else 1) if parallel else 2
    c.expect("num_ln_in_parallel_attn", *((1, 2) if new else (1,)))
    sizes = {"D": D, "H": H, "G": groups if new or not one else 1, "F": c.size("ffn_hidden_size", default=4 * D)}
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
