"""Diffusion U-Nets: residual blocks conditioned on time, down- and upsampling, and skip connections.

Sizes: Ho et al. 2020 (arXiv 2006.11239), appendix B, for CIFAR-10; Rombach et al. 2021 (arXiv 2112.10752) and
`unet/config.json` of stable-diffusion-v1-5 for Stable Diffusion. Op order: `UNet2DModel` and `UNet2DConditionModel` of
diffusers 0.31.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import sympy

import costgraph as cg

from .blocks import bidirectional_attention, block
from .family import Family, Preset


@dataclass(frozen=True)
class _Layers:
    """Building blocks of all levels."""

    attention: str
    dropout: float
    time: cg.Tensor
    """Time embedding, after its activation."""
    text: cg.Tensor | None
    """Text for cross-attention; without it, attention is a separate layer."""

    def norm(self, x: cg.Tensor, name: str = "norm") -> cg.Tensor:
        return cg.nn.group_norm(x, cg.dims("N"), name=name)

    def residual(self, x: cg.Tensor, width: sympy.Expr, name: str) -> cg.Tensor:
        """Add two convolutions, with the time embedding between them, to the input or to its projection."""
        with cg.scope(name):
            y = conv(cg.silu(self.norm(x, "norm1")), width, 3, name="conv1")
            shift = cg.linear(self.time, "b t -> b d", d=width, bias=True, name="time")
            y = y + cg.rearrange(shift, "b d -> b d 1 1")
            y = conv(cg.dropout(cg.silu(self.norm(y, "norm2")), self.dropout), width, 3, name="conv2")
            return (x if x.shape[1] == width else conv(x, width, 1, name="shortcut")) + y

    def attend(self, x: cg.Tensor, name: str) -> cg.Tensor:
        """Add attention over the positions of an image, and over the text if there is one."""
        width, rows, heads = x.shape[1], x.shape[2], cg.dims("H")
        with cg.scope(name):
            y = self.norm(x)
            y = y if self.text is None else conv(y, width, 1, name="in")
            y = cg.rearrange(y, "b c h w -> b (h w) c")
            if self.text is None:
                y = bidirectional_attention(self.attention, 0, heads, width / heads)(y)
            else:
                y = cg.repeat(cg.dims("L"), lambda y: self.transformer(y, heads), y, name="layers")
            y = cg.rearrange(y, "b (h w) c -> b c h w", h=rows)
            return x + (y if self.text is None else conv(y, width, 1, name="out"))

    def transformer(self, y: cg.Tensor, heads: sympy.Expr) -> cg.Tensor:
        """Apply self-attention, cross-attention and a gated feed-forward layer, each with LayerNorm before it."""
        width = y.shape[2]
        assert self.text is not None
        cross = partial(
            cg.nn.cross_attention, memory=self.text, heads=heads, size=width / heads, kernel=self.attention,
            out_bias=True, cached=False,
        )  # fmt: skip
        mlp = partial(cg.nn.gated_mlp, f=4 * width, activation=cg.gelu, bias=True, packed=True)
        mixer = bidirectional_attention(self.attention, 0, heads, width / heads, bias=False)
        return block(attention=mixer, cross=cross, mlp=mlp, norm=cg.layer_norm)(y)


def conv(x: cg.Tensor, width: sympy.Expr, window: int, stride: int = 1, *, name: str) -> cg.Tensor:
    """Convolve with bias and `same` padding."""
    return cg.conv(
        x, "b c h w -> b d h w", d=width, window=window, stride=stride, padding=window // 2, bias=True, name=name
    )  # fmt: skip


def unet(
    name: str, attention: str, dropout: float, dtype: str,
    *, levels: int = 4, kept: tuple[int, ...] = (), blocks: int = 2, attended: tuple[int, ...] = (2,),
    text: bool = False,
) -> cg.Graph:  # fmt: skip
    """Declare a U-Net: images (B, IC, R, R) and times (B,), with `text` also (B, M, E), to images (B, OC, R, R).

    Level i has `blocks` residual blocks on the way down and one more on the way up, with Di channels, or with those of
    the previous level if it is in `kept`. Levels in `attended`, and the middle, have attention of H heads after each
    block. Norms have N groups.
    """
    B, R, IC, OC, M, E = cg.dims("B R IC OC M E")
    widths: list[sympy.Expr] = []
    for i in range(1, levels + 1):
        widths.append(widths[-1] if i in kept else cg.dims(f"D{i}"))

    with cg.Graph(name, dtype=dtype) as g:
        x, times = g.input("images", (B, IC, R, R)), g.input("times", (B,), dtype="int64")
        text_input = g.input("text", (B, M, E)) if text else None
        t = cg.nn.timestep_embedding(times, widths[0])
        t = cg.linear(t, "b d -> b t", t=4 * widths[0], bias=True, name="time/first")
        t = cg.linear(cg.silu(t), "b t -> b u", u=4 * widths[0], bias=True, name="time/second")
        layers = _Layers(attention, dropout, cg.silu(t), text_input)
        x = conv(x, widths[0], 3, name="in")
        x = _down_and_up(layers, x, widths, blocks, attended)
        g.output(conv(cg.silu(layers.norm(x, "out/norm")), OC, 3, name="out/conv"))
        g.loss = "mean_squared_error"
    return g


def _down_and_up(
    layers: _Layers, x: cg.Tensor, widths: list[sympy.Expr], blocks: int, attended: tuple[int, ...]
) -> cg.Tensor:
    """Apply the down path, the middle, and the up path."""
    skips = [x]
    for i, width in enumerate(widths, 1):
        with cg.scope(f"down{i}"):
            for j in range(blocks):
                x = layers.residual(x, width, f"block{j}")
                x = layers.attend(x, f"attend{j}") if i in attended else x
                skips.append(x)
            if i < len(widths):
                x = conv(x, width, 3, 2, name="halve")
                skips.append(x)
    with cg.scope("middle"):
        x = layers.attend(layers.residual(x, widths[-1], "block0"), "attend0")
        x = layers.residual(x, widths[-1], "block1")
    for i, width in reversed(list(enumerate(widths, 1))):
        with cg.scope(f"up{i}"):
            for j in range(blocks + 1):
                x = layers.residual(cg.ops.concat([x, skips.pop()], 1), width, f"block{j}")
                x = layers.attend(x, f"attend{j}") if i in attended else x
            if i > 1:  # match the skip connection, also where half of an odd size was rounded
                x = conv(cg.nn.upsample(x, sizes=skips[-1].shape[2:]), width, 3, name="double")
    return x


DDPM = {"R": 32, "IC": 3, "OC": 3, "D1": 128, "D2": 256, "H": 1, "N": 32}
STABLE_DIFFUSION = {"R": 64, "IC": 4, "OC": 4, "D1": 320, "D2": 640, "D3": 1280, "H": 8, "N": 32, "L": 1}
TEXT = {"M": 77, "E": 768}  # the output of CLIP's text encoder

FAMILIES = (
    Family(
        unet,
        {
            "ddpm-cifar10": Preset(DDPM, {"kept": (3, 4)}),
            "stable-diffusion-1.5-unet": Preset(
                STABLE_DIFFUSION | TEXT, {"kept": (4,), "attended": (1, 2, 3), "text": True}
            ),
        },
        legend={
            "D#": "channels in level #",
            "OC": "output channels",
            "N": "normalization groups",
            "M": "text length",
            "E": "text width",
            "L": "transformer layers",
        },
    ),
)
