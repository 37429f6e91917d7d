"""ResNet, ResNeXt and Wide ResNet: stages of residual blocks of convolutions with batch norm.

Sizes: He et al. 2015 (arXiv 1512.03385), table 1; Xie et al. 2016 (arXiv 1611.05431), table 1; Zagoruyko and Komodakis
2016 (arXiv 1605.07146). Op order: `ResNet` in torchvision 0.20, whose bottlenecks have their stride in the 3x3
convolution. Configurations: `ResNetModel` and `ResNetForImageClassification` in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

import costgraph as cg

from .config import Config
from .family import Family, Preset


@dataclass(frozen=True)
class _Block:
    """Options common to all residual blocks of a model."""

    bottleneck: bool
    early: bool
    activation: str
    inplace: bool
    statistics: str

    def conv(
        self, x: cg.Tensor, width: sympy.Expr, window: int, stride: int = 1, groups: sympy.Expr | int = 1, *, act: bool,
        name: str,
    ) -> cg.Tensor:  # fmt: skip
        """Convolve without bias, normalize and, unless the residual sum follows, activate."""
        x = cg.conv(
            x, "b c h w -> b o h w", o=width, window=window, stride=stride, padding=window // 2, groups=groups,
            name=f"{name}/conv",
        )  # fmt: skip
        x = cg.nn.batch_norm(x, statistics=self.statistics, name=f"{name}/norm")
        return self.act(x) if act else x

    def act(self, x: cg.Tensor) -> cg.Tensor:
        return cg.ops.pointwise(self.activation, x, inplace=self.inplace)

    def __call__(self, x: cg.Tensor, width: sympy.Expr, stride: int = 1, *, shortcut: bool = False) -> cg.Tensor:
        """Add the convolutions to the input or to its projection."""
        if self.bottleneck:
            inner, groups = width / cg.dims("Z"), cg.dims("G")
            first, second = (stride, 1) if self.early else (1, stride)
            y = self.conv(x, inner, 1, first, act=True, name="reduce")
            y = self.conv(y, inner, 3, second, groups, act=True, name="middle")
            y = self.conv(y, width, 1, act=False, name="expand")
        else:
            y = self.conv(x, width, 3, stride, act=True, name="first")
            y = self.conv(y, width, 3, act=False, name="second")
        if shortcut:
            x = self.conv(x, width, 1, stride, act=False, name="shortcut")
        return self.act(cg.ops.pointwise("add", y, x, inplace=True))


def resnet(
    name: str, attention: str, dropout: float, dtype: str,
    *, stages: int = 4, bottleneck: bool = True, widened: bool = True, first_stride: int = 1, early: bool = False,
    single: tuple[int, ...] = (), activation: str = "relu", inplace: bool = True, head: bool = True,
    statistics: str = "auto",
) -> cg.Graph:  # fmt: skip
    """Declare ResNet: images (B, IC, R, R) to logits (B, C), or without `head` to features and their mean.

    Stage i has Li blocks of Di channels. Its first block has a projection shortcut and, from the second stage on, a
    stride of 2. If `widened` is False, the first stage has the width of the stem, D0, and no projection unless it has a
    stride. Stages in `single` have one block. Bottlenecks have Di/Z inner channels in G groups; `early` puts the stride
    into their first convolution.
    """
    B, R, IC, C, stem = cg.dims("B R IC C D0")
    block = _Block(bottleneck, early, activation, inplace, statistics)

    with cg.Graph(name, dtype=dtype) as g:
        x = block.conv(g.input("images", (B, IC, R, R)), stem, 7, 2, act=True, name="stem")
        x = cg.nn.pool(x, "max", window=3, stride=2, padding=1)
        for i in range(1, stages + 1):
            width, depth = cg.dims(f"D{i} L{i}")
            width = width if i > 1 or widened else stem
            with cg.scope(f"stage{i}"):
                stride = 2 if i > 1 else first_stride
                has_entry = i > 1 or widened or stride > 1
                if has_entry:
                    with cg.scope("entry"):
                        x = block(x, width, stride, shortcut=True)
                if not (has_entry and i in single):
                    remaining = depth - 1 if has_entry else depth
                    x = cg.repeat(remaining, lambda x, width=width: block(x, width), x, name="blocks")
        if head:
            x = cg.reduce(x, "b d h w -> b d", "mean", name="pool")
            g.output(cg.linear(x, "b d -> b c", c=C, bias=True, name="head"))
            g.loss = "cross_entropy"
        else:
            g.output(x, cg.reduce(x, "b d h w -> b d 1 1", "mean", name="pool"))
    return g


def read(c: Config) -> Preset:
    """Read a transformers `ResNetConfig`."""
    widths, depths = c.sizes("hidden_sizes"), c.sizes("depths")
    if len(widths) != len(depths):
        c.expect("hidden_sizes", f"{len(depths)} numbers, the length of depths")
    c.ignore("stage_names", "out_features", "out_indices", "_out_features", "_out_indices")  # of backbones only
    stem, head = c.size("embedding_size"), c.architecture == "ResNetForImageClassification"
    structure: dict[str, object] = {"stages": len(depths), "inplace": False, "head": head}
    structure |= {"bottleneck": c.choice("layer_type", choices=("basic", "bottleneck")) == "bottleneck"}
    structure |= {"widened": widths[0] != stem, "first_stride": 2 if c.flag("downsample_in_first_stage") else 1}
    structure |= {
        "early": c.flag("downsample_in_bottleneck"),
        "activation": c.activation("hidden_act"),
    }
    structure |= {"single": tuple(i for i, depth in enumerate(depths, 1) if depth == 1)}
    sizes = {"R": c.size("image_size", default=224), "IC": c.size("num_channels"), "D0": stem}
    sizes |= {"C": c.labels()} if head else {}
    sizes |= {"Z": 4, "G": 1} if structure["bottleneck"] else {}
    return Preset(sizes | _stages(widths, depths, widened=widths[0] != stem), structure)


def _stages(widths: list[int], depths: list[int], *, widened: bool) -> dict[str, int]:
    sizes = {f"L{i}": depth for i, depth in enumerate(depths, 1)}
    return sizes | {f"D{i}": width for i, width in enumerate(widths, 1) if widened or i > 1}


def _basic(*depths: int) -> Preset:
    sizes = _stages([64, 128, 256, 512], list(depths), widened=False)
    return Preset({"R": 224, "IC": 3, "C": 1000, "D0": 64, **sizes}, {"bottleneck": False, "widened": False})


def _bottleneck(*depths: int, Z: int = 4, G: int = 1) -> Preset:
    sizes = _stages([256, 512, 1024, 2048], list(depths), widened=True)
    return Preset({"R": 224, "IC": 3, "C": 1000, "D0": 64, **sizes, "Z": Z, "G": G})


FAMILIES = (
    Family(
        resnet,
        {
            "resnet18": _basic(2, 2, 2, 2),
            "resnet34": _basic(3, 4, 6, 3),
            "resnet50": _bottleneck(3, 4, 6, 3),
            "resnet101": _bottleneck(3, 4, 23, 3),
            "resnet152": _bottleneck(3, 8, 36, 3),
            "resnext50-32x4d": _bottleneck(3, 4, 6, 3, Z=2, G=32),
            "resnext101-32x8d": _bottleneck(3, 4, 23, 3, Z=1, G=32),
            "resnext101-64x4d": _bottleneck(3, 4, 23, 3, Z=1, G=64),
            "wide-resnet50-2": _bottleneck(3, 4, 6, 3, Z=2),
            "wide-resnet101-2": _bottleneck(3, 4, 23, 3, Z=2),
        },
        architectures={"ResNetModel": "resnet", "ResNetForImageClassification": "resnet"},
        read=read,
        legend={"Z": "bottleneck reduction", "G": "convolution groups"},
    ),
)
