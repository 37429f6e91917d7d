"""Llama 2, 3 and 3.1: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, an untied head.

Sizes: Grattafiori et al. 2024 (arXiv 2407.21783), table 3, and the `config.json` of meta-llama/Llama-2-7b-hf,
Llama-2-13b-hf and Llama-2-70b-hf (Touvron et al. 2023, arXiv 2307.09288). Op order: `LlamaDecoderLayer` in
transformers.
"""

from __future__ import annotations

import costgraph as cg

from .blocks import System, block, gated_mlp
from .config import Config
from .decoder import decoder
from .eager_ops import KERNELS, EagerOps
from .family import Family, Preset


def llama(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    eager_ops: bool = False,
    *,
    bias: bool = False,
    mlp_bias: bool = False,
    tied: bool = False,
    activation: str = "silu",
    shared: bool = True,
    system: System = "torch",
) -> cg.Graph:
    """Declare Llama: tokens (B, S) to logits (B, S, V), with dropout on attention probabilities only.

    With `shared` there are fewer KV heads than query heads, so eager code (`eager_ops`) repeats them; `system` selects
    the implementation of layers.
    """
    S, H, G, K, L = cg.dims("S H G K L")
    run = EagerOps(dtype, softmax="fp32", renamed=False) if eager_ops else KERNELS
    fewer = shared or not eager_ops
    groups = G if fewer else H
    assume = "H > G" if eager_ops else "H >= G"

    def stack(x: cg.Tensor) -> cg.Tensor:
        positions = run.keep_for_model(cg.ops.arange(S))
        run.create_mask(positions, attention)
        rope = run.rotary_tables(positions, K)

        def attend(x: cg.Tensor) -> cg.Tensor:
            return run.self_attention(x, H, K, groups=groups, rope=rope, kernel=attention, bias=bias, p=dropout)

        mlp = gated_mlp(activation, bias=mlp_bias, system=system)
        layer = block(attention=attend, mlp=mlp, norm=run.rms_norm, run=run)
        return cg.repeat(L, layer, x, name="layers")

    return decoder(name, dtype, stack, norm=run.rms_norm, tied=tied, assume=(assume,) if fewer else (), run=run)


def read(c: Config) -> Preset:
    """Read a transformers `LlamaConfig`."""
    c.ignore("max_position_embeddings", "max_sequence_length", "is_llama_config", "rope_interleaved")
    structure = {"bias": c.flag("attention_bias"), "mlp_bias": c.flag("mlp_bias")}
    structure |= {"tied": c.flag("tie_word_embeddings")}
    return Preset(c.decoder(), structure | {"activation": c.activation("hidden_act")})


def _sizes(D: int, H: int, G: int, F: int, L: int, V: int, *, tied: bool = False) -> Preset:
    structure = {"shared": G < H} | ({"tied": True} if tied else {})
    return Preset({"D": D, "H": H, "G": G, "K": D // H, "F": F, "L": L, "V": V}, structure)


FAMILIES = (
    Family(
        llama,
        {
            "llama-2-7b": _sizes(4096, 32, 32, 11008, 32, 32000),
            "llama-2-13b": _sizes(5120, 40, 40, 13824, 40, 32000),
            "llama-2-70b": _sizes(8192, 64, 8, 28672, 80, 32000),
            "llama-3-8b": _sizes(4096, 32, 8, 14336, 32, 128256),
            "llama-3-70b": _sizes(8192, 64, 8, 28672, 80, 128256),
            "llama-3.1-8b": _sizes(4096, 32, 8, 14336, 32, 128256),
            "llama-3.1-70b": _sizes(8192, 64, 8, 28672, 80, 128256),
            "llama-3.1-405b": _sizes(16384, 128, 8, 53248, 126, 128256),
            "llama-3.2-1b": _sizes(2048, 32, 8, 8192, 16, 128256, tied=True),
            "llama-3.2-3b": _sizes(3072, 24, 8, 8192, 28, 128256, tied=True),
            "llama-3.3-70b": _sizes(8192, 64, 8, 28672, 80, 128256),
        },
        eager_ops=True,
        architectures={"LlamaForCausalLM": "llama"},
        read=read,
    ),
)
