"""Gemma 2 and 3: alternating local and global attention, norms before and after each branch, a tied head.

Sizes: Gemma Team 2024 (arXiv 2408.00118), table 1, and 2025 (arXiv 2503.19786), and the `config.json` of
google/gemma-2-2b, -9b, -27b and google/gemma-3-1b-pt, -4b-pt, -12b-pt, -27b-pt (`text_config`: the decoder of text). Op
order: `Gemma2ForCausalLM` and `Gemma3ForCausalLM` in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import costgraph as cg

from .blocks import block, causal_attention, gated_mlp
from .config import Config
from .decoder import decoder
from .family import Family, Preset


def gemma(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    kinds: Sequence[str] = ("local", "global"),
    rest: int = 0,
    softcap: float | None = None,
    logit_softcap: float | None = None,
    qk_norm: Literal["none", "head", "all"] = "none",
    local_base: bool = False,
    bias: bool = False,
    tied: bool = True,
    activation: str = "gelu_tanh",
) -> cg.Graph:
    """Declare Gemma: tokens (B, S) to logits (B, S, V); `kinds` lists local (last W positions) and global layers."""
    S, K, L, W = cg.dims("S K L W")
    mlp = gated_mlp(activation)

    def stack(x: cg.Tensor) -> cg.Tensor:
        x = cg.ops.pointwise("mul", x, 1.0, name="scale")  # by sqrt(D)
        # with two bases, local and global layers have separate tables
        two_tables = local_base and isinstance(kinds, list | tuple) and "local" in kinds and "global" in kinds
        ropes = [cg.nn.rotary_tables(cg.ops.arange(S), K) for _ in range(2 if two_tables else 1)]
        options = {"bias": bias, "out_bias": bias, "qk_norm": qk_norm, "softcap": softcap}
        bodies = {
            kind: block(
                attention=causal_attention(attention, dropout, rope, window=window, **options), mlp=mlp, norms="both"
            )
            for kind, window, rope in (("local", W, ropes[0]), ("global", None, ropes[-1]))
        }
        return cg.nn.layers(L, bodies, x, kinds, rest=rest)

    def end(x: cg.Tensor) -> cg.Tensor:
        return x if logit_softcap is None else cg.ops.pointwise("softcap", x, name="head/softcap")

    return decoder(name, dtype, stack, tied=tied, end=end)


def read(c: Config) -> Preset:
    """Read a transformers `Gemma2Config` or `Gemma3TextConfig`."""
    third = c.architecture == "Gemma3ForCausalLM"
    c.ignore(
        "max_position_embeddings", "query_pre_attn_scalar", "cache_implementation", "rope_local_base_freq", "hidden_act"
    )
    c.expect("use_bidirectional_attention", False, None)
    sizes = c.decoder()
    kind_of_type = {"sliding_attention": "local", "full_attention": "global"}
    kinds, rest = c.layer_types(kind_of_type, sizes["L"], _rule(c, sizes["L"], third=third))
    if "local" in kinds:
        sizes["W"] = c.size("sliding_window")
        c.expect("sliding_window_size", sizes["W"])
    c.ignore("sliding_window")
    caps = {"softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    structure: dict[str, object] = {option: c.factor(field) for option, field in caps.items()}
    structure |= {"kinds": kinds, "rest": rest, "tied": c.flag("tie_word_embeddings")}
    structure |= {"qk_norm": "head", "local_base": True} if third else {}
    activation = c.activation("hidden_activation")
    return Preset(sizes, structure | {"bias": c.flag("attention_bias"), "activation": activation})


def _rule(c: Config, depth: int, *, third: bool) -> list[str]:
    """Return the repeating pattern of layers for files that do not list them: one in so many is global."""
    period = c.size("sliding_window_pattern", default=6) if third else 2
    if not c.has("layer_types"):
        c.expect("_sliding_window_pattern", period)  # written by transformers, but no longer read
    c.ignore("_sliding_window_pattern")
    return (
        ["sliding_attention"] * (c.list_length(period) - 1) + ["full_attention"]
        if period <= depth
        else ["sliding_attention"]
    )


_SECOND: dict[str, object] = {"softcap": 50.0, "logit_softcap": 30.0}
_THIRD: dict[str, object] = {"kinds": ("local",) * 5 + ("global",), "qk_norm": "head", "local_base": True}


def _sizes(D: int, H: int, G: int, K: int, F: int, L: int, V: int, W: int) -> dict[str, int]:
    return {"D": D, "H": H, "G": G, "K": K, "F": F, "L": L, "V": V, "W": W}


FAMILIES = (
    Family(
        gemma,
        {
            "gemma-2-2b": Preset(_sizes(2304, 8, 4, 256, 9216, 26, 256000, 4096), _SECOND),
            "gemma-2-9b": Preset(_sizes(3584, 16, 8, 256, 14336, 42, 256000, 4096), _SECOND),
            "gemma-2-27b": Preset(_sizes(4608, 32, 16, 128, 36864, 46, 256000, 4096), _SECOND),
            "gemma-3-1b": Preset(_sizes(1152, 4, 1, 256, 6912, 26, 262144, 512), {**_THIRD, "rest": 2}),
            "gemma-3-4b": Preset(_sizes(2560, 8, 4, 256, 10240, 34, 262208, 1024), {**_THIRD, "rest": 4}),
            "gemma-3-12b": Preset(_sizes(3840, 16, 8, 256, 15360, 48, 262208, 1024), _THIRD),
            "gemma-3-27b": Preset(_sizes(5376, 32, 16, 128, 21504, 62, 262208, 1024), {**_THIRD, "rest": 2}),
        },
        architectures={"Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text"},
        read=read,
    ),
)
