"""EfficientNet: inverted residuals with squeeze and excitation, scaled in width and depth.

Sizes: Tan and Le 2019 (arXiv 1905.11946), table 1; scaling factors of B1 to B7 and image sizes of `torchvision.models`.
Op order: torchvision. Configurations: `EfficientNetForImageClassification` in transformers.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import sympy

import costgraph as cg

from .config import Config
from .family import Family, Preset
from .mobilenet import conv_norm_act, round_channels

_WIDTHS, _DEPTHS = (32, 16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1)


def efficientnet(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    windows: tuple[int, ...] = (3, 3, 5, 3, 5, 5, 3),
    strides: tuple[int, ...] = (1, 2, 2, 2, 1, 2, 1),
    expansions: tuple[int, ...] = (1, 6, 6, 6, 6, 6, 6),
    single: tuple[int, ...] = (1, 7),
    activation: str = "silu",
    head: bool = True,
) -> cg.Graph:
    """Declare EfficientNet: images (B, IC, R, R) to logits (B, C), or without `head` to features.

    Stage i has L{i} blocks with D{i} output channels, and the first has the stride; stages in `single` have one block.
    Squeeze and excitation has 1/Q of the input channels of the block.
    """
    B, IC, R, C, width = cg.dims("B IC R C D0")
    if not len(windows) == len(strides) == len(expansions):
        raise cg.GraphError(
            f"model {name!r}: windows, strides and expansions differ in length, expected one of each per stage"
        )

    def stage(x: cg.Tensor, i: int, in_width: sympy.Expr, width: sympy.Expr) -> cg.Tensor:
        options = (expansions[i - 1], strides[i - 1], windows[i - 1])
        depth = None if i in single else cg.dims(f"L{i}")
        with cg.scope(f"stage{i}"):
            return _blocks(x, depth, in_width, width, *options, activation=activation, p=dropout)

    with cg.Graph(name, dtype=dtype) as g:
        x = conv_norm_act(g.input("images", (B, IC, R, R)), width, 3, 2, activation, "stem")
        for i in range(1, len(windows) + 1):
            in_width, width = width, cg.dims(f"D{i}")
            x = stage(x, i, in_width, width)
        x = conv_norm_act(x, cg.dims(f"D{len(windows) + 1}"), 1, 1, activation, "last")
        x = cg.dropout(cg.reduce(x, "b c h w -> b c", "mean"), dropout if head else 0)
        g.output(cg.linear(x, "b d -> b c", c=C, bias=True, name="head") if head else x)
        g.loss = "cross_entropy" if head else None
    return g


def _blocks(
    x: cg.Tensor, depth: Any, in_width: sympy.Expr, width: sympy.Expr, expansion: int, stride: int, window: int,
    *, activation: str, p: float,
) -> cg.Tensor:  # fmt: skip
    """Apply the blocks of a stage; one block if `depth` is None."""
    Q = cg.dims("Q")
    options: dict[str, Any] = {"window": window, "activation": activation, "expand": expansion != 1}
    options["squeeze_activation"] = activation

    def block(x: cg.Tensor) -> cg.Tensor:
        return cg.nn.inverted_residual(x, expansion * width, width, squeezed=width / Q, residual=True, p=p, **options)

    x = cg.nn.inverted_residual(
        x, expansion * in_width, width, squeezed=in_width / Q, stride=stride, name="first", **options
    )
    return x if depth is None else cg.repeat(depth - 1, block, x, name="blocks")


def read(c: Config) -> Preset:
    """Read a transformers `EfficientNetConfig`."""
    wide, deep = c.number("width_coefficient", above=0), c.number("depth_coefficient", above=0)
    divisor, ratio = c.size("depth_divisor"), c.number("squeeze_expansion_ratio", above=0)
    names = ("in_channels", "out_channels", "kernel_sizes", "strides", "num_block_repeats", "expand_ratios")
    tables = [c.sizes(n) for n in names]
    in_channels, out_channels, windows, strides, repeats, expansions = tables
    if len({*map(len, tables)}) != 1 or in_channels[1:] != out_channels[:-1]:
        raise cg.FormatError(
            f"{c.place}: {', '.join(names)}, expected equally long lists in which the input channels of a stage "
            f"are the output channels of the previous one"
        )
    depths = [ceil(deep * n) for n in repeats]
    widths = [round_channels(n * wide, divisor) for n in (32, *out_channels, 1280)]
    _check_padding(c, windows, strides, depths)
    first = round_channels(in_channels[0] * wide, divisor)
    if first != widths[0] or (1 / ratio) % 1 or any(int(n * ratio) != n * ratio for n in widths[:-1]):
        raise cg.UnsupportedError(
            f"{c.place}: squeeze_expansion_ratio {ratio} of {[first, *widths[1:-1]]} channels, expected integers, "
            f"and the {widths[0]} output channels of the stem as input of the first stage"
        )
    c.expect("hidden_dim", widths[-1])
    c.expect("num_hidden_layers", 4 * sum(repeats))
    c.ignore("pooling_type", "batch_norm_eps", "batch_norm_momentum", "dropout_rate", "drop_connect_rate")
    c.ignore("is_encoder_decoder")
    head = c.architecture == "EfficientNetForImageClassification"
    sizes = {"R": c.size("image_size"), "IC": c.size("num_channels"), "Q": int(1 / ratio)}
    preset = _preset(sizes | ({"C": c.labels()} if head else {}), widths, depths)
    structure = {"windows": tuple(windows), "strides": tuple(strides), "expansions": tuple(expansions), "head": head}
    activation = c.activation("hidden_act")
    return Preset(preset.sizes, {**preset.structure, **structure, "activation": activation})


def _check_padding(c: Config, windows: list[int], strides: list[int], depths: list[int]) -> None:
    """Reject odd sides whose padding in transformers changes the output size: it must round up."""
    side = c.size("image_size")
    padded = c.sizes("depthwise_padding", minimum=0, empty=True, limit=2**16)
    unsupported = side % 2 == 1
    side = -(-side // 2)
    for i, stride in enumerate(strides):
        unsupported = unsupported or (stride == 2 and side % 2 == 1 and sum(depths[:i]) not in padded)
        side = -(-side // stride)
    if unsupported or any(n % 2 == 0 for n in windows) or any(n > 2 for n in strides):
        raise cg.UnsupportedError(
            f"{c.place}: image_size, strides and depthwise_padding {padded}, expected padding of every odd side before "
            f"a stride of 2 so that it rounds up, odd kernel_sizes, and strides of at most 2"
        )


def _preset(sizes: dict[str, int], widths: list[int], depths: list[int]) -> Preset:
    sizes = {**sizes, **{f"D{i}": n for i, n in enumerate(widths)}}
    sizes |= {f"L{i}": n for i, n in enumerate(depths, 1) if n > 1}
    return Preset(sizes, {"single": tuple(i for i, n in enumerate(depths, 1) if n == 1)})


def _scaled(wide: float, deep: float, side: int) -> Preset:
    widths, depths = [round_channels(n * wide) for n in (*_WIDTHS, 1280)], [ceil(deep * n) for n in _DEPTHS]
    return _preset({"R": side, "IC": 3, "C": 1000, "Q": 4}, widths, depths)


FAMILIES = (
    Family(
        efficientnet,
        {
            "efficientnet-b0": _scaled(1.0, 1.0, 224),
            "efficientnet-b1": _scaled(1.0, 1.1, 240),
            "efficientnet-b2": _scaled(1.1, 1.2, 288),
            "efficientnet-b3": _scaled(1.2, 1.4, 300),
            "efficientnet-b4": _scaled(1.4, 1.8, 380),
            "efficientnet-b5": _scaled(1.6, 2.2, 456),
            "efficientnet-b6": _scaled(1.8, 2.6, 528),
            "efficientnet-b7": _scaled(2.0, 3.1, 600),
        },
        architectures=dict.fromkeys(("EfficientNetModel", "EfficientNetForImageClassification"), "efficientnet"),
        read=read,
        legend={"Q": "squeeze-and-excitation reduction"},
    ),
)
