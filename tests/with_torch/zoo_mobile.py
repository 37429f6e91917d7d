"""Reference modules for the presets of image models that transformers lacks as published, and of DLRM.

The modules follow `torchvision.models.mobilenetv2`, `mobilenetv3` and `efficientnet`, and `dlrm_s_pytorch.py` of
facebookresearch/dlrm.
"""

from collections.abc import Callable
from itertools import pairwise
from math import ceil
from typing import Any

import torch
from lazy import lazy_import
from torch import nn
from zoo_reference import Reference

transformers = lazy_import("transformers")


def divisible(v: float, divisor: int = 8) -> int:
    """`torchvision.models._utils._make_divisible`."""
    new = max(divisor, int(v + divisor / 2) // divisor * divisor)
    return new + divisor if new < 0.9 * v else new


def conv_norm(
    given: int, made: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: Any = None
) -> nn.Sequential:
    """`torchvision.ops.Conv2dNormActivation`."""
    conv = nn.Conv2d(given, made, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(made), *([] if act is None else [act()]))


class SqueezeExcitation(nn.Module):
    """`torchvision.ops.SqueezeExcitation`."""

    def __init__(self, channels: int, squeezed: int, act: Any, gate: Any) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.activation, self.scale_activation = act(), gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))
        return scale * x


class Block(nn.Module):
    """`InvertedResidual` in MobileNet V2 and V3, and `MBConv` in EfficientNet."""

    def __init__(
        self, given: int, middle: int, made: int, kernel: int, stride: int, act: Any, squeeze: nn.Module | None = None
    ) -> None:
        super().__init__()
        layers = [conv_norm(given, middle, 1, act=act)] if middle != given else []
        layers.append(conv_norm(middle, middle, kernel, stride, groups=middle, act=act))
        layers += [] if squeeze is None else [squeeze]
        self.block = nn.Sequential(*layers, conv_norm(middle, made, 1))
        self.residual = stride == 1 and given == made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        return x + y if self.residual else y


class Classifier(nn.Module):
    """Features, global average pooling, and a classifier."""

    def __init__(self, features: list[nn.Module], *classifier: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(*classifier)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    """`torchvision.models.mobilenet_v2`."""
    setting = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]
    features, width = [conv_norm(3, 32, stride=2, act=nn.ReLU6)], 32
    for expand, made, count, stride in setting:
        for i in range(count):
            features.append(Block(width, expand * width, made, 3, stride if i == 0 else 1, nn.ReLU6))
            width = made
    return Classifier([*features, conv_norm(width, 1280, 1, act=nn.ReLU6)], nn.Dropout(0.2), nn.Linear(1280, classes))


# input channels, kernel, expanded channels, output channels, squeeze-excitation, activation, stride: torchvision's
# _mobilenet_v3_conf
V3 = {
    "large": [
        (16, 3, 16, 16, False, "RE", 1), (16, 3, 64, 24, False, "RE", 2), (24, 3, 72, 24, False, "RE", 1),
        (24, 5, 72, 40, True, "RE", 2), (40, 5, 120, 40, True, "RE", 1), (40, 5, 120, 40, True, "RE", 1),
        (40, 3, 240, 80, False, "HS", 2), (80, 3, 200, 80, False, "HS", 1), (80, 3, 184, 80, False, "HS", 1),
        (80, 3, 184, 80, False, "HS", 1), (80, 3, 480, 112, True, "HS", 1), (112, 3, 672, 112, True, "HS", 1),
        (112, 5, 672, 160, True, "HS", 2), (160, 5, 960, 160, True, "HS", 1), (160, 5, 960, 160, True, "HS", 1),
    ],
    "small": [
        (16, 3, 16, 16, True, "RE", 2), (16, 3, 72, 24, False, "RE", 2), (24, 3, 88, 24, False, "RE", 1),
        (24, 5, 96, 40, True, "HS", 2), (40, 5, 240, 40, True, "HS", 1), (40, 5, 240, 40, True, "HS", 1),
        (40, 5, 120, 48, True, "HS", 1), (48, 5, 144, 48, True, "HS", 1), (48, 5, 288, 96, True, "HS", 2),
        (96, 5, 576, 96, True, "HS", 1), (96, 5, 576, 96, True, "HS", 1),
    ],
}  # fmt: skip


def mobilenet_v3(kind: str, classes: int = 1000) -> nn.Module:
    """`torchvision.models.mobilenet_v3_large` and `mobilenet_v3_small`."""
    features: list[nn.Module] = [conv_norm(3, 16, stride=2, act=nn.Hardswish)]
    for given, kernel, middle, made, squeezed, name, stride in V3[kind]:
        act = nn.Hardswish if name == "HS" else nn.ReLU
        squeeze = SqueezeExcitation(middle, divisible(middle // 4), nn.ReLU, nn.Hardsigmoid) if squeezed else None
        features.append(Block(given, middle, made, kernel, stride, act, squeeze))
    last, hidden = 6 * made, {"large": 1280, "small": 1024}[kind]
    head = nn.Linear(last, hidden), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(hidden, classes)
    return Classifier([*features, conv_norm(made, last, 1, act=nn.Hardswish)], *head)


def efficientnet(wide: float, deep: float, classes: int = 1000) -> nn.Module:
    """`torchvision.models.efficientnet_b0` to `efficientnet_b7`."""
    setting = [
        (1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2), (6, 3, 2, 40, 80, 3), (6, 5, 1, 80, 112, 3),
        (6, 5, 2, 112, 192, 4), (6, 3, 1, 192, 320, 1),
    ]  # fmt: skip
    features: list[nn.Module] = [conv_norm(3, divisible(32 * wide), stride=2, act=nn.SiLU)]
    for expand, kernel, stride, first, made, count in setting:
        given, made = divisible(first * wide), divisible(made * wide)
        for i in range(ceil(count * deep)):
            middle = divisible(given * expand)
            squeeze = SqueezeExcitation(middle, max(1, given // 4), nn.SiLU, nn.Sigmoid)
            features.append(Block(given, middle, made, kernel, stride if i == 0 else 1, nn.SiLU, squeeze))
            given = made
    features.append(conv_norm(made, 4 * made, 1, act=nn.SiLU))
    return Classifier(features, nn.Dropout(0.2), nn.Linear(4 * made, classes))


class ChannelsNorm(nn.LayerNorm):
    """`LayerNorm2d` in `torchvision.models.convnext`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """`CNBlock` in `torchvision.models.convnext`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.layer_scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x + self.layer_scale * y


def convnext(widths: list[int], depths: list[int], classes: int = 1000) -> nn.Module:
    """`torchvision.models.convnext_tiny` to `convnext_large`; transformers' cannot be built with fake tensors."""
    features: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelsNorm(widths[0])]
    for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        features += [ChannelsNorm(widths[i - 1]), nn.Conv2d(widths[i - 1], width, 2, 2)] if i else []
        features += [ConvNeXtBlock(width) for _ in range(depth)]
    return Classifier(features, nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes))


class DLRM(nn.Module):
    """`DLRM_Net` in dlrm_s_pytorch.py, with arch_interaction_op dot and a sigmoid as the top network's last layer."""

    def __init__(self, rows: list[int], bottom: list[int], top: list[int], itself: bool = False) -> None:
        super().__init__()
        width, count, self.itself = bottom[-1], len(rows) + 1, itself
        pairs = count * (count + 1 if itself else count - 1) // 2
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        self.bot_l, self.top_l = self.mlp(bottom, nn.ReLU), self.mlp([width + pairs, *top], nn.Sigmoid)

    def mlp(self, sizes: list[int], last: Any) -> nn.Sequential:
        layers: list[nn.Module] = []
        for i, (given, made) in enumerate(pairwise(sizes), 2):
            layers += [nn.Linear(given, made), (last if i == len(sizes) else nn.ReLU)()]
        return nn.Sequential(*layers)

    def forward(self, dense: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        x = self.bot_l(dense)
        vectors = torch.stack([x, *(table(ids) for table, ids in zip(self.emb_l, indices, strict=True))], 1)
        products = torch.bmm(vectors, torch.transpose(vectors, 1, 2))
        count, offset = products.shape[1], 1 if self.itself else 0
        li = torch.tensor([i for i in range(count) for _ in range(i + offset)])
        lj = torch.tensor([j for i in range(count) for j in range(i + offset)])
        return self.top_l(torch.cat([x, products[:, li, lj]], 1))


def dlrm(rows: str, bottom: str, top: str) -> nn.Module:
    """Build the model as the command line of dlrm_s_pytorch.py does."""
    return DLRM(*([int(n) for n in text.split("-")] for text in (rows, bottom, top)))


TERABYTE = (
    "39884406-39043-17289-7420-20263-3-7120-1543-63-38532951-2953546-403346-10-2208-11938-155-4-976-14-39979771-"
    "25641295-39664984-585935-12972-108-36"
)
KAGGLE = (
    "1460-583-10131227-2202608-305-24-12517-633-3-93145-5683-8351593-3194-27-14992-5461306-10-5652-2173-4-7046547-18-"
    "15-286181-105-142572"
)


def clicks() -> tuple[torch.Tensor, ...]:
    """Features for two samples, one index into each of 26 tables."""
    return torch.zeros(2, 13), *(torch.zeros(2, 1, dtype=torch.int64) for _ in range(26))


def _images(module: Callable[[], nn.Module], side: int = 224, **options: Any) -> Callable[[], Reference]:
    return lambda: Reference(module, lambda: (torch.zeros(2, 3, side, side),), {"B": 2}, options)


def _convnext(width: int, deep: int) -> Callable[[], Reference]:
    return _images(lambda: convnext([width, 2 * width, 4 * width, 8 * width], [3, 3, deep, 3]))


def _swin(width: int, heads: int, deep: int) -> Callable[[], Reference]:
    def build() -> nn.Module:
        config = transformers.SwinConfig(
            embed_dim=width, depths=[2, 2, deep, 2], num_heads=[heads * 2**i for i in range(4)], num_labels=1000,
            attn_implementation="eager",
        )  # fmt: skip
        return transformers.SwinForImageClassification(config)

    return _images(build, attention="eager")


REFERENCES: dict[str, Callable[[], Reference]] = {
    "mobilenet-v2": _images(mobilenet_v2),
    "mobilenet-v3-small": _images(lambda: mobilenet_v3("small")),
    "mobilenet-v3-large": _images(lambda: mobilenet_v3("large")),
    "efficientnet-b0": _images(lambda: efficientnet(1.0, 1.0)),
    "efficientnet-b1": _images(lambda: efficientnet(1.0, 1.1), 240),
    "efficientnet-b2": _images(lambda: efficientnet(1.1, 1.2), 288),
    "efficientnet-b3": _images(lambda: efficientnet(1.2, 1.4), 300),
    "efficientnet-b4": _images(lambda: efficientnet(1.4, 1.8), 380),
    "efficientnet-b5": _images(lambda: efficientnet(1.6, 2.2), 456),
    "efficientnet-b6": _images(lambda: efficientnet(1.8, 2.6), 528),
    "efficientnet-b7": _images(lambda: efficientnet(2.0, 3.1), 600),
    "convnext-tiny": _convnext(96, 9),
    "convnext-small": _convnext(96, 27),
    "convnext-base": _convnext(128, 27),
    "convnext-large": _convnext(192, 27),
    "swin-t": _swin(96, 3, 6),
    "swin-s": _swin(96, 3, 18),
    "swin-b": _swin(128, 4, 18),
    "dlrm-mlperf": lambda: Reference(lambda: dlrm(TERABYTE, "13-512-256-128", "1024-1024-512-256-1"), clicks, {"B": 2}),
    "dlrm-small": lambda: Reference(lambda: dlrm(KAGGLE, "13-512-256-64-16", "512-256-1"), clicks, {"B": 2}),
}
