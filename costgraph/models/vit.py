"""ViT: image patches and a class token in a pre-LayerNorm encoder.

Sizes: Dosovitskiy et al. 2020 (arXiv 2010.11929), table 1. Op order: `VisionTransformer` in torchvision 0.20 (its
vit_b_16, vit_b_32, vit_l_16 and vit_h_14, at 224x224 pixels with 1000 classes). Configurations: `ViTModel`, which has a
pooler, and `ViTForImageClassification` in transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import costgraph as cg

from .blocks import bidirectional_attention, block, with_dropout
from .config import Config
from .family import Family, Preset

#: Heads by architecture of a config.json.
HEADS = {"ViTModel": "pooler", "ViTForImageClassification": "classifier"}


def vit(
    name: str, attention: str, dropout: float, dtype: str,
    *, patch: int = 16, head: Literal["classifier", "pooler"] = "classifier", activation: str = "gelu",
    qkv_bias: bool = True, inner_dropout: bool = True, pooler_activation: str = "tanh",
) -> cg.Graph:  # fmt: skip
    """Declare ViT: images (B, IC, R, R) to logits (B, C).

    `patch` is the side of a patch. `head="pooler"` returns features (B, tokens, D) and a pooled vector (B, pooled).
    `inner_dropout` applies dropout to hidden units of the MLP as well, as in torchvision.
    """
    B, R, IC, D, H, F, L, C, pooled = cg.dims("B R IC D H F L C pooled")

    def hidden(x: cg.Tensor) -> cg.Tensor:
        return cg.dropout(cg.ops.pointwise(activation, x), dropout if inner_dropout else 0)

    mixer = bidirectional_attention(attention, dropout, H, D / H, bias=qkv_bias)
    mlp = partial(cg.nn.mlp, f=F, activation=hidden, bias=True, p=dropout)
    layer = block(attention=with_dropout(mixer, dropout), mlp=mlp, norm=cg.layer_norm)

    with cg.Graph(name, dtype=dtype) as g:
        x = cg.nn.patch_embedding(g.input("images", (B, IC, R, R)), patch, D)
        first = cg.ops.expand(g.param("class_token", (1, 1, D)), "1 1 d -> b 1 d", b=B)
        x = cg.ops.concat([first, x], 1)
        x = cg.dropout(x + g.param("positions", (1, *x.shape[1:])), dropout)
        x = cg.layer_norm(cg.repeat(L, layer, x, name="layers"), name="norm")
        first = cg.rearrange(x[:, :1], "b 1 d -> b d", name="first")
        if head == "classifier":
            g.output(cg.linear(first, "b d -> b c", c=C, bias=True, name="head"))
            g.loss = "cross_entropy"
        else:
            g.output(x)
            y = cg.linear(first, "b d -> b e", e=pooled, bias=True, name="pooler")
            g.output(cg.ops.pointwise(pooler_activation, y))
    return g


def read(c: Config) -> Preset:
    """Read a transformers `ViTConfig`."""
    c.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "encoder_stride")
    D, head = c.size("hidden_size"), HEADS[c.architecture]
    sizes = {"R": c.size("image_size"), "IC": c.size("num_channels"), "D": D}
    sizes |= {"H": c.size("num_attention_heads"), "F": c.size("intermediate_size"), "L": c.size("num_hidden_layers")}
    pooled, act = c.size("pooler_output_size", default=D), c.activation("pooler_act")
    sizes |= {"pooled": pooled} if head == "pooler" else {"C": c.labels()}
    structure = {"patch": c.size("patch_size"), "head": head, "activation": c.activation("hidden_act")}
    structure |= {"qkv_bias": c.flag("qkv_bias"), "inner_dropout": False, "pooler_activation": act}
    return Preset(sizes, structure)


def _sizes(patch: int, D: int, H: int, L: int) -> Preset:
    sizes = {"R": 224, "IC": 3, "D": D, "H": H, "F": 4 * D, "L": L, "C": 1000}
    return Preset(sizes, {"patch": patch})


FAMILIES = (
    Family(
        vit,
        {
            "vit-b-16": _sizes(16, 768, 12, 12),
            "vit-b-32": _sizes(32, 768, 12, 12),
            "vit-l-16": _sizes(16, 1024, 16, 24),
            "vit-h-14": _sizes(14, 1280, 16, 32),
        },
        architectures=dict.fromkeys(HEADS, "vit"),
        read=read,
        legend={"pooled": "pooled width"},
    ),
)
