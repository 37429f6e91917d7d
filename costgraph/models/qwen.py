"""Dense Qwen 2.5 and Qwen 3: Llama's layers with QKV biases, or with norms of query and key heads.

Sizes: Yang et al. 2024 (arXiv 2412.15115), Yang et al. 2025 (arXiv 2505.09388), table 1, and the `config.json` of
Qwen/Qwen2.5-0.5B to Qwen2.5-72B and Qwen/Qwen3-0.6B to Qwen3-32B. Op order: `Qwen2ForCausalLM` and `Qwen3ForCausalLM`
in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import costgraph as cg

from .blocks import Tables, block, causal_attention, gated_mlp
from .config import Config
from .decoder import decoder
from .family import Family, Preset


def qwen(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    kinds: Sequence[str] = ("global",),
    rest: int = 0,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["none", "head", "all"] = "none",
    tied: bool = False,
    activation: str = "silu",
) -> cg.Graph:
    """Declare Qwen: tokens (B, S) to logits (B, S, V); `kinds` lists global and local (last W positions) layers."""
    K, L, W = cg.dims("K L W")

    def stack(x: cg.Tensor, rope: Tables) -> cg.Tensor:
        options = {"bias": bias, "out_bias": out_bias, "qk_norm": qk_norm}
        bodies = {
            kind: block(
                attention=causal_attention(attention, dropout, rope, window=window, **options),
                mlp=gated_mlp(activation),
            )
            for kind, window in (("global", None), ("local", W))
        }
        return cg.nn.layers(L, bodies, x, kinds, rest=rest)

    return decoder(name, dtype, stack, rope=K, tied=tied)


def read(c: Config) -> Preset:
    """Read a transformers `Qwen2Config` or `Qwen3Config`."""
    c.ignore("max_position_embeddings")
    c.expect("use_mrope", False)
    third = c.architecture == "Qwen3ForCausalLM"
    sizes = c.decoder()
    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    c.ignore("sliding_window", "max_window_layers")
    kind_of_type = {"full_attention": "global"} | ({} if window is None else {"sliding_attention": "local"})
    kinds, rest = c.layer_types(kind_of_type, sizes["L"], _rule(c, sizes["L"], window))
    sizes |= {} if window is None or "local" not in kinds else {"W": window}
    biases = c.flag("attention_bias") if third else True
    structure = {"kinds": kinds, "rest": rest, "bias": biases, "out_bias": biases and third}
    structure |= {"qk_norm": "head" if third else "none", "tied": c.flag("tie_word_embeddings")}
    return Preset(sizes, structure | {"activation": c.activation("hidden_act")})


def _rule(c: Config, depth: int, window: int | None) -> list[str]:
    """Return the pattern of layers for files that do not list them: with a window, the first layers are global."""
    first = depth if window is None or c.has("layer_types") else c.size("max_window_layers", minimum=0)
    if 0 < first < depth:
        return ["full_attention"] * first + ["sliding_attention"] * (c.list_length(depth) - first)
    return ["full_attention" if first else "sliding_attention"]


def _second(D: int, H: int, G: int, F: int, L: int, V: int = 151936, *, K: int = 128, tied: bool = False) -> Preset:
    sizes = {"D": D, "H": H, "G": G, "K": K, "F": F, "L": L, "V": V}
    return Preset(sizes, {"bias": True, "tied": tied})


def _third(D: int, H: int, F: int, L: int, *, tied: bool = False) -> Preset:
    sizes = {"D": D, "H": H, "G": 8, "K": 128, "F": F, "L": L, "V": 151936}
    return Preset(sizes, {"qk_norm": "head", "tied": tied})


FAMILIES = (
    Family(
        qwen,
        {
            "qwen2.5-0.5b": _second(896, 14, 2, 4864, 24, K=64, tied=True),
            "qwen2.5-1.5b": _second(1536, 12, 2, 8960, 28, tied=True),
            "qwen2.5-3b": _second(2048, 16, 2, 11008, 36, tied=True),
            "qwen2.5-7b": _second(3584, 28, 4, 18944, 28, 152064),
            "qwen2.5-14b": _second(5120, 40, 8, 13824, 48, 152064),
            "qwen2.5-32b": _second(5120, 40, 8, 27648, 64, 152064),
            "qwen2.5-72b": _second(8192, 64, 8, 29568, 80, 152064),
            "qwen3-0.6b": _third(1024, 16, 3072, 28, tied=True),
            "qwen3-1.7b": _third(2048, 16, 6144, 28, tied=True),
            "qwen3-4b": _third(2560, 32, 9728, 36, tied=True),
            "qwen3-8b": _third(4096, 32, 12288, 36),
            "qwen3-14b": _third(5120, 40, 17408, 40),
            "qwen3-32b": _third(5120, 64, 25600, 64),
        },
        architectures={"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"},
        read=read,
    ),
)
