"""AlexNet in one column: five convolutions and three linear layers.

Sizes: Krizhevsky 2014 (arXiv 1404.5997). Op order: `AlexNet` in torchvision 0.20.
"""

from __future__ import annotations

import costgraph as cg

from .family import Family, Preset

#: Window, stride and padding of each convolution, and whether pooling follows it.
CONVS = ((11, 4, 2, True), (5, 1, 2, True), (3, 1, 1, False), (3, 1, 1, False), (3, 1, 1, True))


def alexnet(name: str, attention: str, dropout: float, dtype: str) -> cg.Graph:
    """Declare AlexNet: images (B, IC, R, R) to logits (B, C), with dropout before the first two linear layers."""
    B, R, IC, F, C = cg.dims("B R IC F C")

    with cg.Graph(name, dtype=dtype) as g:
        x = g.input("images", (B, IC, R, R))
        for i, (window, stride, padding, pooled) in enumerate(CONVS, 1):
            x = cg.conv(
                x, "b c h w -> b d h w", d=cg.dims(f"D{i}"), window=window, stride=stride, padding=padding, bias=True,
                name=f"conv{i}",
            )  # fmt: skip
            x = cg.relu(x, inplace=True)
            x = cg.nn.pool(x, "max", window=3, stride=2) if pooled else x
        x = cg.rearrange(cg.nn.adaptive_pool(x, (6, 6)), "b d h w -> b (d h w)", name="flatten")
        for i in (1, 2):
            x = cg.linear(cg.dropout(x, dropout), "b d -> b f", f=F, bias=True, name=f"linear{i}")
            x = cg.relu(x, inplace=True)
        g.output(cg.linear(x, "b f -> b c", c=C, bias=True, name="head"))
        g.loss = "cross_entropy"
    return g


SIZES = {"R": 224, "IC": 3, "D1": 64, "D2": 192, "D3": 384, "D4": 256, "D5": 256, "F": 4096, "C": 1000}
FAMILIES = (
    Family(
        alexnet, {"alexnet": Preset(SIZES)}, legend={"D#": "channels of convolution #", "F": "width of linear layers"}
    ),
)
