"""VGG: five stages of 3x3 convolutions with pooling, and three linear layers.

Sizes: Simonyan and Zisserman 2014 (arXiv 1409.1556), table 1, configurations A, B, D and E. Op order: `VGG` in
torchvision 0.20; names with -bn have batch norm.
"""

from __future__ import annotations

import sympy

import costgraph as cg

from .family import Family, Preset


def vgg(
    name: str, attention: str, dropout: float, dtype: str,
    *, stages: int = 5, single: tuple[int, ...] = (), norm: bool = False, statistics: str = "auto",
) -> cg.Graph:  # fmt: skip
    """Declare VGG: images (B, IC, R, R) to logits (B, C), with dropout after the first two linear layers.

    Stage i has Li convolutions of Di channels, or one if it is in `single`.
    """
    B, R, IC, F, C = cg.dims("B R IC F C")

    def layer(x: cg.Tensor, width: sympy.Expr) -> cg.Tensor:
        x = cg.conv(x, "b c h w -> b d h w", d=width, window=3, padding=1, bias=True)
        return cg.relu(cg.nn.batch_norm(x, statistics=statistics, name="norm") if norm else x, inplace=True)

    with cg.Graph(name, dtype=dtype) as g:
        x = g.input("images", (B, IC, R, R))
        for i in range(1, stages + 1):
            width, depth = cg.dims(f"D{i} L{i}")
            with cg.scope(f"stage{i}"):
                x = layer(x, width)
                if i not in single:
                    x = cg.repeat(depth - 1, lambda x, width=width: layer(x, width), x, name="layers")
                x = cg.nn.pool(x, "max", window=2)
        x = cg.rearrange(cg.nn.adaptive_pool(x, (7, 7)), "b d h w -> b (d h w)", name="flatten")
        for i in (1, 2):
            x = cg.relu(cg.linear(x, "b d -> b f", f=F, bias=True, name=f"linear{i}"), inplace=True)
            x = cg.dropout(x, dropout)
        g.output(cg.linear(x, "b f -> b c", c=C, bias=True, name="head"))
        g.loss = "cross_entropy"
    return g


def _preset(*depths: int, norm: bool = False) -> Preset:
    sizes = {"R": 224, "IC": 3, "F": 4096, "C": 1000}
    sizes |= {f"D{i}": width for i, width in enumerate((64, 128, 256, 512, 512), 1)}
    sizes |= {f"L{i}": depth for i, depth in enumerate(depths, 1)}
    return Preset(sizes, {"norm": norm, "single": tuple(i for i, depth in enumerate(depths, 1) if depth == 1)})


DEPTHS = {"vgg11": (1, 1, 2, 2, 2), "vgg13": (2, 2, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}
FAMILIES = (
    Family(
        vgg,
        {name: _preset(*depths) for name, depths in DEPTHS.items()}
        | {f"{name}-bn": _preset(*depths, norm=True) for name, depths in DEPTHS.items()},
        legend={"F": "width of linear layers", "L#": "convolutions in stage #"},
    ),
)
