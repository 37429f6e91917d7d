"""ConvNeXt: 7 x 7 depthwise convolutions, LayerNorm, and an inverted bottleneck of linear layers.

Sizes: Liu et al. 2022 (arXiv 2201.03545), section 3, and the `config.json` of facebook/convnext-tiny-224,
convnext-small-224, convnext-base-224 and convnext-large-224. Op order: `ConvNextForImageClassification` in
transformers, equal to `torchvision.models.convnext`.
"""

from __future__ import annotations

import costgraph as cg

from .config import Config
from .family import Family, Preset


def convnext(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    stages: int = 4,
    patch: int = 4,
    activation: str = "gelu",
    layer_scale: bool = True,
    head: bool = True,
) -> cg.Graph:
    """Declare ConvNeXt: images (B, IC, R, R) to logits (B, C), or without `head` to features; with stochastic depth."""
    B, R, IC, C = cg.dims("B R IC C")
    widths = [cg.dims(f"D{i}") for i in range(1, stages + 1)]

    def block(x: cg.Tensor) -> cg.Tensor:
        width = x.shape[1]
        y = cg.conv(x, "b c h w -> b d h w", d=width, window=7, padding=3, groups=width, bias=True, name="depthwise")
        y = cg.layer_norm(cg.rearrange(y, "b c h w -> b h w c"))
        y = cg.nn.mlp(y, 4 * width, activation=lambda t: cg.ops.pointwise(activation, t), bias=True)
        if layer_scale:
            y = y * g.param("layer_scale", (width,))
        return x + cg.nn.stochastic_depth(cg.rearrange(y, "b h w c -> b c h w"), dropout)

    with cg.Graph(name, dtype=dtype) as g:
        x = g.input("images", (B, IC, R, R))
        for i, width in enumerate(widths, 1):
            with cg.scope(f"stage{i}"):
                x = _channels_norm(x, "downsample/norm") if i > 1 else x
                kernel = patch if i == 1 else 2
                x = cg.conv(
                    x, "b c h w -> b d h w", d=width, window=kernel, stride=kernel, bias=True, name="downsample"
                )
                x = _channels_norm(x, "norm") if i == 1 else x
                x = cg.repeat(cg.dims(f"L{i}"), block, x, name="blocks")
        x = cg.layer_norm(cg.reduce(x, "b c h w -> b c", "mean"), name="norm")
        g.output(cg.linear(x, "b d -> b c", c=C, bias=True, name="head") if head else x)
        g.loss = "cross_entropy" if head else None
    return g


def _channels_norm(x: cg.Tensor, name: str) -> cg.Tensor:
    """Normalize the channels of each position."""
    y = cg.layer_norm(cg.rearrange(x, "b c h w -> b h w c"), name=name)
    return cg.rearrange(y, "b h w c -> b c h w")


def read(c: Config) -> Preset:
    """Read a transformers `ConvNextConfig`."""
    widths, depths = c.sizes("hidden_sizes"), c.sizes("depths")
    if len(widths) != len(depths):
        raise cg.FormatError(
            f"{c.place}: hidden_sizes has {len(widths)} numbers, expected {len(depths)}, the length of depths"
        )
    c.expect("num_stages", len(depths))
    c.ignore("drop_path_rate", "is_encoder_decoder", "stage_names", "out_features", "out_indices")
    head = c.architecture == "ConvNextForImageClassification"
    sizes = {"R": c.size("image_size"), "IC": c.size("num_channels")}
    sizes |= {"C": c.labels()} if head else {}
    structure: dict[str, object] = {"stages": len(depths), "patch": c.size("patch_size"), "head": head}
    structure |= {"activation": c.activation("hidden_act")}
    structure |= {"layer_scale": c.number("layer_scale_init_value") > 0}
    return Preset(sizes | _stages(widths, depths), structure)


def _stages(widths: list[int], depths: list[int]) -> dict[str, int]:
    named = [{f"D{i}": width, f"L{i}": depth} for i, (width, depth) in enumerate(zip(widths, depths, strict=True), 1)]
    return {name: size for stage in named for name, size in stage.items()}


def _preset(width: int, deep: int) -> Preset:
    stages = _stages([width, 2 * width, 4 * width, 8 * width], [3, 3, deep, 3])
    return Preset({"R": 224, "IC": 3, "C": 1000, **stages})


FAMILIES = (
    Family(
        convnext,
        {
            "convnext-tiny": _preset(96, 9),
            "convnext-small": _preset(96, 27),
            "convnext-base": _preset(128, 27),
            "convnext-large": _preset(192, 27),
        },
        architectures={"ConvNextModel": "convnext", "ConvNextForImageClassification": "convnext"},
        read=read,
    ),
)
