"""DenseNet: every layer reads the concatenated outputs of all previous layers in its block.

Sizes: Huang et al. 2016 (arXiv 1608.06993), table 1. Op order: `DenseNet` in torchvision 0.20. The inputs of layers
grow, so no two layers are equal: the depth of a block is structure, not a symbol.
"""

from __future__ import annotations

import sympy

import costgraph as cg

from .family import Family, Preset


def densenet(
    name: str, attention: str, dropout: float, dtype: str,
    *, blocks: tuple[int, ...] = (6, 12, 24, 16), statistics: str = "auto",
) -> cg.Graph:  # fmt: skip
    """Declare DenseNet: images (B, IC, R, R) to logits (B, C), with dropout on the output of each layer.

    Each layer adds K channels, with a bottleneck of Z*K; `blocks` lists the number of layers between transitions.
    """
    B, R, IC, D, K, Z, C = cg.dims("B R IC D K Z C")

    def conv(x: cg.Tensor, width: sympy.Expr, window: int, stride: int = 1, name: str = "conv") -> cg.Tensor:
        return cg.conv(
            x, "b c h w -> b d h w", d=width, window=window, stride=stride, padding=window // 2, name=name
        )  # fmt: skip

    def norm(x: cg.Tensor, name: str = "norm") -> cg.Tensor:
        return cg.relu(cg.nn.batch_norm(x, statistics=statistics, name=name), inplace=True)

    def layer(features: list[cg.Tensor]) -> cg.Tensor:
        x = norm(cg.ops.concat(features, 1), "norm1")
        x = norm(conv(x, Z * K, 1, name="conv1"), "norm2")
        return cg.dropout(conv(x, K, 3, name="conv2"), dropout)

    with cg.Graph(name, dtype=dtype) as g:
        x = norm(conv(g.input("images", (B, IC, R, R)), D, 7, 2, "stem/conv"), "stem/norm")
        x = cg.nn.pool(x, "max", window=3, stride=2, padding=1)
        for i, depth in enumerate(blocks, 1):
            if i > 1:
                with cg.scope(f"transition{i - 1}"):
                    x = cg.nn.pool(conv(norm(x), x.shape[1] / 2, 1), "mean", window=2)
            features = [x]
            for j in range(depth):
                with cg.scope(f"block{i}/{j}"):
                    features.append(layer(features))
            x = cg.ops.concat(features, 1, name=f"block{i}")
        x = cg.reduce(norm(x), "b d h w -> b d", "mean", name="pool")
        g.output(cg.linear(x, "b d -> b c", c=C, bias=True, name="head"))
        g.loss = "cross_entropy"
    return g


def _preset(*blocks: int, D: int = 64, K: int = 32) -> Preset:
    return Preset({"R": 224, "IC": 3, "D": D, "K": K, "Z": 4, "C": 1000}, {"blocks": blocks})


FAMILIES = (
    Family(
        densenet,
        {
            "densenet121": _preset(6, 12, 24, 16),
            "densenet161": _preset(6, 12, 36, 24, D=96, K=48),
            "densenet169": _preset(6, 12, 32, 32),
            "densenet201": _preset(6, 12, 48, 32),
        },
        legend={"D": "channels after the first layer", "K": "growth rate", "Z": "bottleneck factor"},
    ),
)
