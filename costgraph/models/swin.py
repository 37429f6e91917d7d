"""Swin Transformer: attention within windows of 7 x 7 positions, shifted by half a window in every other layer.

Sizes: Liu et al. 2021 (arXiv 2103.14030), section 3.3, and the `config.json` of microsoft/swin-tiny-patch4-window7-224,
swin-small-patch4-window7-224 and swin-base-patch4-window7-224. Op order: `SwinForImageClassification` in transformers;
rows and columns are padded as `torchvision.models.swin_transformer` pads them.
"""

from __future__ import annotations

from functools import partial

import costgraph as cg

from .blocks import Branch, bidirectional_attention, block
from .config import Config
from .family import Family, Preset

#: Kinds of stages. shifted: alternating layers without and with a shift, an even number; shifted-odd: an odd number;
#: whole: one window covers the image, so nothing is shifted; single: one layer.
STAGES = ("shifted", "shifted-odd", "whole", "single")


def swin(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    stages: tuple[str, ...] = ("shifted", "shifted", "shifted", "whole"),
    patch: int = 4,
    window: int = 7,
    activation: str = "gelu",
    qkv_bias: bool = True,
    positions: bool = False,
    head: bool = True,
) -> cg.Graph:
    """Declare Swin: images (B, IC, R, R) to logits (B, C), or without `head` to features (B, D*2**(stages - 1))."""
    B, R, IC, C, D = cg.dims("B R IC C D")
    layer = partial(_layer, window=window, kernel=attention, activation=activation, qkv_bias=qkv_bias, p=dropout)

    with cg.Graph(name, dtype=dtype) as g:
        x = g.input("images", (B, IC, R, R))
        x = cg.conv(x, "b c h w -> b d h w", d=D, window=patch, stride=patch, bias=True, name="patches")
        x = cg.layer_norm(cg.rearrange(x, "b d h w -> b h w d"), name="patches/norm")
        x = cg.dropout(x + g.param("positions/table", x.shape[1:]) if positions else x, dropout)
        for i, kind in enumerate(stages, 1):
            _assume(g, i, kind, patch, window)
            bodies = {"plain": layer(i, shift=0), "shifted": layer(i, shift=window // 2)}
            kinds = ("plain", "shifted") if kind.startswith("shifted") else ("plain",)
            with cg.scope(f"stage{i}"):
                x = cg.nn.layers(cg.dims(f"L{i}"), bodies, x, kinds, rest=int(kind == "shifted-odd"), name="blocks")
                x = cg.nn.patch_merging(x) if i < len(stages) else x
        x = cg.reduce(cg.layer_norm(x, name="norm"), "b h w d -> b d", "mean")
        g.output(cg.linear(x, "b d -> b c", c=C, bias=True, name="head") if head else x)
        g.loss = "cross_entropy" if head else None
    return g


def _layer(stage: int, *, shift: int, window: int, kernel: str, activation: str, qkv_bias: bool, p: float) -> Branch:
    """Return window attention and a feed-forward layer, with stochastic depth."""
    B, F, heads = cg.dims(f"B F H{stage}")

    def attend(x: cg.Tensor) -> cg.Tensor:
        y = cg.nn.window_partition(x, window, shift)
        masks = {} if shift == 0 else {"images": B, "masks": y.shape[0] / B}
        bias = cg.nn.window_bias(window, heads, name="attention/bias", **masks)
        y = bidirectional_attention(kernel, p, heads, y.shape[2] / heads, bias=qkv_bias, score_bias=bias)(y)
        return cg.nn.stochastic_depth(cg.nn.window_merge(cg.dropout(y, p), x, window, shift), p)

    def feed_forward(x: cg.Tensor) -> cg.Tensor:
        act = partial(cg.ops.pointwise, activation)
        return cg.nn.stochastic_depth(cg.nn.mlp(x, F * 2 ** (stage - 1), activation=act, bias=True, p=p), p)

    return block(attention=attend, mlp=feed_forward, norm=cg.layer_norm)


def _assume(g: cg.Graph, i: int, kind: str, patch: int, window: int) -> None:
    """State the conditions of a stage on image sizes: the side of its map is R/patch/2**(i - 1), rounded."""
    if kind not in STAGES:
        raise cg.GraphError(f"model {g.name!r}: stage {i} is {kind!r}, expected one of {', '.join(STAGES)}")
    span, conditions = patch * 2 ** (i - 1), {"single": f"L{i} <= 1"}
    conditions["whole"] = f"R <= {span * window + patch - 1}"
    g.assume(conditions.get(kind, f"R >= {span * window + patch}"))


def read(c: Config) -> Preset:
    """Read a transformers `SwinConfig`."""
    depths, heads = c.sizes("depths"), c.sizes("num_heads")
    width, ratio = c.size("embed_dim"), c.number("mlp_ratio", above=0)
    size, patch, window = (c.size(n) for n in ("image_size", "patch_size", "window_size"))
    c.expect("num_layers", len(depths))
    c.expect("hidden_size", width * 2 ** (len(depths) - 1))
    c.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "encoder_stride", "path_norm")
    c.ignore("stage_names", "out_features", "out_indices", "is_encoder_decoder")  # not used by the model
    if len(heads) != len(depths):
        raise cg.FormatError(
            f"{c.place}: num_heads has {len(heads)} numbers, expected {len(depths)}, the length of depths"
        )
    sides = [-(-(size // patch) // 2**i) for i in range(len(depths))]
    if size % patch or sides[-1] < window or not (ratio * width).is_integer():
        raise cg.UnsupportedError(
            f"{c.place}: image_size {size}, patch_size {patch}, window_size {window}, mlp_ratio {ratio}, expected "
            f"whole patches, at least one window in the last stage, and an integer number of hidden elements"
        )
    sizes = {"R": size, "IC": c.size("num_channels"), "D": width, "F": int(ratio * width)}
    sizes |= {f"L{i}": n for i, n in enumerate(depths, 1)} | {f"H{i}": n for i, n in enumerate(heads, 1)}
    head = c.architecture == "SwinForImageClassification"
    structure: dict[str, object] = {}
    structure["stages"] = tuple(_kind(size, depth, window) for size, depth in zip(sides, depths, strict=True))
    structure |= {"patch": patch, "window": window, "head": head, "qkv_bias": c.flag("qkv_bias")}
    structure |= {"activation": c.activation("hidden_act")}
    structure |= {"positions": c.flag("use_absolute_embeddings")}
    return Preset(sizes | ({"C": c.labels()} if head else {}), structure)


def _kind(size: int, depth: int, window: int) -> str:
    if size <= window:
        return "whole"
    return "single" if depth == 1 else "shifted-odd" if depth % 2 else "shifted"


def _preset(D: int, heads: int, deep: int) -> Preset:
    sizes = {"R": 224, "IC": 3, "C": 1000, "D": D, "F": 4 * D, "L1": 2, "L2": 2, "L3": deep, "L4": 2}
    return Preset(sizes | {f"H{i + 1}": heads * 2**i for i in range(4)})


FAMILIES = (
    Family(
        swin,
        {"swin-t": _preset(96, 3, 6), "swin-s": _preset(96, 3, 18), "swin-b": _preset(128, 4, 18)},
        architectures={"SwinModel": "swin", "SwinForImageClassification": "swin"},
        read=read,
        legend={"D": "channels in stage 1", "F": "MLP width in stage 1", "H#": "attention heads in stage #"},
    ),
)
