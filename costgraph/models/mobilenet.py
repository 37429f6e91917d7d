"""MobileNet V2 and V3: inverted residuals with depthwise convolutions; V3 adds squeeze and excitation.

Sizes: Sandler et al. 2018 (arXiv 1801.04381), table 2; Howard et al. 2019 (arXiv 1905.02244), tables 1 and 2. Op order:
`torchvision.models.mobilenet_v2` and `mobilenet_v3`. Configurations: `MobileNetV2ForImageClassification` in
transformers.
"""

from __future__ import annotations

from typing import Any

import costgraph as cg

from .config import Config
from .family import Family, Preset


def mobilenet_v2(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    strides: tuple[int, ...] = (1, 2, 2, 2, 1, 2, 1),
    single: tuple[int, ...] = (1, 7),
    joined: tuple[int, ...] = (),
    expand_stem: bool = False,
    activation: str = "relu6",
    head: bool = True,
) -> cg.Graph:
    """Declare MobileNet V2: images (B, IC, R, R) to logits (B, C), or without `head` to features.

    Stage i has L{i} blocks with D{i} output channels, and the first has the stride. Stages in `single` have one block,
    and those in `joined` keep the width of the previous stage. The first stage expands only with `expand_stem`.
    """
    B, IC, R, C, E, width = cg.dims("B IC R C E D0")

    with cg.Graph(name, dtype=dtype) as g:
        x = conv_norm_act(g.input("images", (B, IC, R, R)), width, 3, 2, activation, "stem")
        for i, stride in enumerate(strides, 1):
            in_width, width = width, width if i in joined else cg.dims(f"D{i}")
            depth: Any = cg.dims(f"L{i}")
            middle = in_width if i == 1 else E * in_width

            def block(x: cg.Tensor) -> cg.Tensor:
                width = x.shape[1]
                return cg.nn.inverted_residual(x, E * width, width, activation=activation, residual=True)

            with cg.scope(f"stage{i}"):
                x = cg.nn.inverted_residual(
                    x, middle, width, stride=stride, activation=activation, expand=i > 1 or expand_stem,
                    residual=i in joined and stride == 1, name="first",
                )  # fmt: skip
                x = x if i in single else cg.repeat(depth - 1, block, x, name="blocks")
        x = conv_norm_act(x, cg.dims(f"D{len(strides) + 1}"), 1, 1, activation, "last")
        x = cg.dropout(cg.reduce(x, "b c h w -> b c", "mean"), dropout if head else 0)
        g.output(cg.linear(x, "b d -> b c", c=C, bias=True, name="head") if head else x)
        g.loss = "cross_entropy" if head else None
    return g


#: A block of V3: window, stride, activation, and whether it expands, has squeeze and excitation, and a residual.
Row = tuple[int, int, str, bool, bool, bool]


def mobilenet_v3(name: str, attention: str, dropout: float, dtype: str, *, blocks: tuple[Row, ...] = ()) -> cg.Graph:
    """Declare MobileNet V3: images (B, IC, R, R) to logits (B, C).

    Block i has E{i} expanded channels, Q{i} channels in squeeze and excitation, and D{i} output channels, unless equal
    to its input.
    """
    B, IC, R, C, F, width = cg.dims("B IC R C F D0")

    with cg.Graph(name, dtype=dtype) as g:
        x = conv_norm_act(g.input("images", (B, IC, R, R)), width, 3, 2, "hardswish", "stem")
        for i, (window, stride, activation, expand, squeezed, residual) in enumerate(blocks, 1):
            middle, width = cg.dims(f"E{i}") if expand else width, width if residual else cg.dims(f"D{i}")
            x = cg.nn.inverted_residual(
                x, middle, width, window=window, stride=stride, activation=activation, expand=expand, residual=residual,
                squeezed=cg.dims(f"Q{i}") if squeezed else None, gate="hardsigmoid", name=f"block{i}",
            )  # fmt: skip
        x = conv_norm_act(x, cg.dims(f"D{len(blocks) + 1}"), 1, 1, "hardswish", "last")
        x = cg.linear(cg.reduce(x, "b c h w -> b c", "mean"), "b d -> b f", f=F, bias=True, name="hidden")
        x = cg.dropout(cg.ops.pointwise("hardswish", x), dropout)
        g.output(cg.linear(x, "b f -> b c", c=C, bias=True, name="head"))
        g.loss = "cross_entropy"
    return g


def conv_norm_act(x: cg.Tensor, width: object, window: int, stride: int, activation: str, name: str) -> cg.Tensor:
    """Convolve, batch-normalize and activate: the first layer, and the last one before pooling."""
    x = cg.conv(x, "b c h w -> b d h w", d=width, window=window, stride=stride, padding=(window - 1) // 2, name=name)
    return cg.ops.pointwise(activation, cg.nn.batch_norm(x, name=f"{name}/norm"))


def round_channels(value: float, divisor: int = 8, minimum: int | None = None) -> int:
    """Round channels to a multiple, never down by more than a tenth, as the authors' code does."""
    rounded = max(divisor if minimum is None else minimum, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


def read_v2(c: Config) -> Preset:
    """Read a transformers `MobileNetV2Config`."""
    factor, divisor = c.number("depth_multiplier", above=0), c.size("depth_divisible_by")
    minimum = c.size("min_depth")
    ratio, limit = c.number("expand_ratio", above=0), c.size("output_stride")
    c.ignore("tf_padding", "classifier_dropout_prob", "semantic_loss_ignore_index", "is_encoder_decoder")
    widths = [round_channels(round(n * factor), divisor, minimum) for n in (32, 16, 24, 32, 64, 96, 160, 320, 1280)]
    if c.flag("finegrained_output") and factor < 1:
        widths[-1] = 1280
    if ratio % 1 or any(round_channels(round(n * ratio), divisor, minimum) != ratio * n for n in widths[1:8]):
        raise cg.UnsupportedError(
            f"{c.place}: expand_ratio {ratio} of {widths[1:8]} channels in multiples of {divisor} and at least "
            f"{minimum}, expected products without rounding"
        )
    strides, total_stride = [1], 2
    for stride in (2, 2, 2, 1, 2, 1):  # beyond output_stride windows are dilated instead, at the same cost
        strides.append(1 if total_stride == limit else stride)
        total_stride *= strides[-1]
    joined = tuple(i for i in range(2, 8) if widths[i] == widths[i - 1] and strides[i - 1] == 1)
    head = c.architecture == "MobileNetV2ForImageClassification"
    structure = {"strides": tuple(strides), "joined": joined, "head": head}
    structure |= {"expand_stem": not c.flag("first_layer_is_expansion")}
    structure |= {"activation": c.activation("hidden_act")}
    sizes = {"R": c.size("image_size"), "IC": c.size("num_channels"), "E": int(ratio)}
    sizes |= {f"D{i}": n for i, n in enumerate(widths) if i not in joined}
    return Preset(sizes | {f"L{i}": n for i, n in _DEPTHS.items()} | ({"C": c.labels()} if head else {}), structure)


_DEPTHS = {2: 2, 3: 3, 4: 4, 5: 3, 6: 3}
_V2 = {"R": 224, "IC": 3, "C": 1000, "E": 6, **{f"L{i}": n for i, n in _DEPTHS.items()}}
_V2 |= {f"D{i}": n for i, n in enumerate((32, 16, 24, 32, 64, 96, 160, 320, 1280))}

# window, expanded and output channels, squeeze and excitation, activation, stride
_LARGE = (
    (3, 16, 16, False, "relu", 1), (3, 64, 24, False, "relu", 2), (3, 72, 24, False, "relu", 1),
    (5, 72, 40, True, "relu", 2), (5, 120, 40, True, "relu", 1), (5, 120, 40, True, "relu", 1),
    (3, 240, 80, False, "hardswish", 2), (3, 200, 80, False, "hardswish", 1), (3, 184, 80, False, "hardswish", 1),
    (3, 184, 80, False, "hardswish", 1), (3, 480, 112, True, "hardswish", 1), (3, 672, 112, True, "hardswish", 1),
    (5, 672, 160, True, "hardswish", 2), (5, 960, 160, True, "hardswish", 1), (5, 960, 160, True, "hardswish", 1),
)  # fmt: skip
_SMALL = (
    (3, 16, 16, True, "relu", 2), (3, 72, 24, False, "relu", 2), (3, 88, 24, False, "relu", 1),
    (5, 96, 40, True, "hardswish", 2), (5, 240, 40, True, "hardswish", 1), (5, 240, 40, True, "hardswish", 1),
    (5, 120, 48, True, "hardswish", 1), (5, 144, 48, True, "hardswish", 1), (5, 288, 96, True, "hardswish", 2),
    (5, 576, 96, True, "hardswish", 1), (5, 576, 96, True, "hardswish", 1),
)  # fmt: skip


def _v3(table: tuple[tuple[int, int, int, bool, str, int], ...], hidden: int) -> Preset:
    width, blocks = 16, []
    sizes = {"R": 224, "IC": 3, "C": 1000, "F": hidden, "D0": width}
    for i, (window, middle, out, squeezed, activation, stride) in enumerate(table, 1):
        expand, residual = middle != width, stride == 1 and out == width
        blocks.append((window, stride, activation, expand, squeezed, residual))
        sizes |= {f"E{i}": middle} if expand else {}
        sizes |= {f"Q{i}": round_channels(middle // 4)} if squeezed else {}
        sizes |= {} if residual else {f"D{i}": out}
        width = out
    return Preset({**sizes, f"D{len(table) + 1}": 6 * width}, {"blocks": tuple(blocks)})


FAMILIES = (
    Family(
        mobilenet_v2,
        {"mobilenet-v2": Preset(_V2)},
        architectures=dict.fromkeys(("MobileNetV2Model", "MobileNetV2ForImageClassification"), "mobilenet_v2"),
        read=read_v2,
        legend={"E": "expansion factor"},
    ),
    Family(
        mobilenet_v3,
        {"mobilenet-v3-small": _v3(_SMALL, 1024), "mobilenet-v3-large": _v3(_LARGE, 1280)},
        legend={
            "D#": "output channels of block #",
            "E#": "expanded channels of block #",
            "Q#": "squeeze-and-excitation channels of block #",
            "F": "classifier width",
        },
    ),
)
