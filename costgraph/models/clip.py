"""CLIP: a text tower and a vision tower, whose final vectors are compared.

Sizes: Radford et al. 2021 (arXiv 2103.00020), table 20, and the `config.json` of openai/clip-vit-base-patch32,
clip-vit-base-patch16 and clip-vit-large-patch14. Op order: `CLIPModel` in transformers. Both towers have biases and
LayerNorm before attention and MLP; the text tower is causal.
"""

from __future__ import annotations

from functools import partial

import sympy

import costgraph as cg

from .blocks import Branch, bidirectional_attention, block
from .config import Config
from .family import Family, Preset


def clip(
    name: str, attention: str, dropout: float, dtype: str,
    *, patch: int = 32, text_activation: str = "quick_gelu", vision_activation: str = "quick_gelu",
) -> cg.Graph:  # fmt: skip
    """Declare CLIP: B texts (B, S) and B images (B, IC, R, R) to logits (B, B), with a row for each text.

    `ends` (B,) indexes the last token of each text among the B*S tokens; `patch` is the side of a patch. `dropout`
    applies to attention probabilities only.
    """
    B, S, V, P, D, H, F, L, joint = cg.dims("B S V P D H F L joint")
    R, IC, DV, HV, FV, LV = cg.dims("R IC DV HV FV LV")  # of the vision tower
    layer = partial(_layer, kernel=attention, p=dropout)

    def texts(tokens: cg.Tensor, ends: cg.Tensor) -> cg.Tensor:
        x = cg.embedding(tokens, tokens.graph.param("tokens/table", (V, D)))
        x = x + cg.embedding(cg.ops.arange(S), tokens.graph.param("positions/table", (P, D)))
        x = cg.repeat(L, layer(H, D / H, F, text_activation, causal=True), x, name="layers")
        x = cg.ops.gather(cg.rearrange(cg.layer_norm(x, name="norm"), "b s d -> (b s) d"), ends, name="last")
        return _unit(cg.linear(x, "b d -> b e", e=joint, name="projection"))

    def images(x: cg.Tensor) -> cg.Tensor:
        x = cg.nn.patch_embedding(x, patch, DV, bias=False)
        first = cg.ops.expand(x.graph.param("class_token", (DV,)), "d -> b 1 d", b=B)
        x = cg.ops.concat([first, x], 1)
        x = x + cg.embedding(cg.ops.arange(x.shape[1]), x.graph.param("positions/table", x.shape[1:]))
        x = cg.layer_norm(x, name="first_norm")
        x = cg.repeat(LV, layer(HV, DV / HV, FV, vision_activation, causal=False), x, name="layers")
        x = cg.layer_norm(cg.rearrange(x[:, :1], "b 1 d -> b d", name="first"), name="norm")
        return _unit(cg.linear(x, "b d -> b e", e=joint, name="projection"))

    with cg.Graph(name, dtype=dtype) as g:
        g.assume("S <= P")
        tokens, ends = g.input("tokens", (B, S), dtype="int64"), g.input("ends", (B,), dtype="int64")
        pictures = g.input("images", (B, IC, R, R))
        with cg.scope("vision"):
            image_vectors = images(pictures)
        with cg.scope("text"):
            text_vectors = texts(tokens, ends)
        logits = cg.einsum(text_vectors, image_vectors, "b e, c e -> b c", name="logits")
        g.output(logits * cg.ops.pointwise("exp", g.param("logit_scale", ())))
        g.loss = "contrastive"
    return g


def _layer(
    heads: sympy.Expr, size: sympy.Expr, f: sympy.Expr, activation: str, *, causal: bool, kernel: str, p: float
) -> Branch:
    mixer = bidirectional_attention(kernel, p, heads, size, causal=causal)
    mlp = partial(cg.nn.mlp, f=f, activation=partial(cg.ops.pointwise, activation), bias=True)
    return block(attention=mixer, mlp=mlp, norm=cg.layer_norm)


def _unit(x: cg.Tensor) -> cg.Tensor:
    """Normalize vectors to unit length."""
    return x / cg.ops.pointwise("sqrt", cg.reduce(cg.ops.pointwise("square", x), "b e -> b 1", "sum"))


def _tower(c: Config) -> tuple[list[int], str]:
    """Read fields common to both towers."""
    for field in ("is_decoder", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"):
        c.expect(field, False)
    # the projections have the size stated for the whole model
    c.ignore("projection_dim", "dropout", "tie_word_embeddings", "top_k", "tf_legacy_loss")
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
    return [c.size(name) for name in names], c.activation("hidden_act")


def read(c: Config) -> Preset:
    """Read a transformers `CLIPConfig`."""
    c.ignore("logit_scale_init_value", "is_encoder_decoder", "tie_word_embeddings", "text_config", "vision_config")
    # if the older field exists as well, transformers reads only that one
    text, vision = (
        c.nested(name + ("_dict" if c.has(f"{name}_dict") else ""), f"clip_{tower}_model")
        for tower, name in (("text", "text_config"), ("vision", "vision_config"))
    )
    (D, H, F, L), text_act = _tower(text)
    (DV, HV, FV, LV), vision_act = _tower(vision)
    P = text.size("max_position_embeddings")
    sizes = {"V": text.size("vocab_size"), "P": P, "S": P, "D": D, "H": H, "F": F, "L": L}
    sizes |= {"R": vision.size("image_size"), "IC": vision.size("num_channels")}
    sizes |= {"DV": DV, "HV": HV, "FV": FV, "LV": LV, "joint": c.size("projection_dim")}
    structure = {"patch": vision.size("patch_size"), "text_activation": text_act}
    return Preset(sizes, structure | {"vision_activation": vision_act})


def _sizes(patch: int, D: int, DV: int, HV: int, LV: int, joint: int) -> Preset:
    sizes = {"V": 49408, "P": 77, "S": 77, "D": D, "H": D // 64, "F": 4 * D, "L": 12, "R": 224, "IC": 3}
    return Preset(sizes | {"DV": DV, "HV": HV, "FV": 4 * DV, "LV": LV, "joint": joint}, {"patch": patch})


FAMILIES = (
    Family(
        clip,
        {
            "clip-vit-b-32": _sizes(32, 512, 768, 12, 12, 512),
            "clip-vit-b-16": _sizes(16, 512, 768, 12, 12, 512),
            "clip-vit-l-14": _sizes(14, 768, 1024, 16, 24, 768),
        },
        architectures={"CLIPModel": "clip"},
        read=read,
        legend={
            "DV": "vision width",
            "HV": "vision attention heads",
            "FV": "vision MLP width",
            "LV": "vision layers",
            "joint": "embedding size",
            "D": "text width",
            "H": "text attention heads",
            "F": "text MLP width",
            "L": "text layers",
        },
    ),
)
