"""DiT: a diffusion transformer over latent patches, with adaptive norms conditioned on time and class.

Sizes: Peebles and Xie 2022 (arXiv 2212.09748), table 1. Op order: `DiT` of facebookresearch/DiT, models.py, with
adaLN-Zero blocks, at 256x256 pixels: 32x32 latents of 4 channels. It predicts noise and variance.
"""

from __future__ import annotations

import costgraph as cg

from .blocks import bidirectional_attention
from .family import Family, Preset


def dit(
    name: str, attention: str, dropout: float, dtype: str, *, patch: int = 2, learned_variance: bool = True
) -> cg.Graph:
    """Declare DiT: latents (B, IC, R, R), times (B,) and classes (B,) to noise, and variance, (B, 2*IC, R, R).

    `patch` is the side of a patch. `dropout` applies to attention probabilities and residual branches.
    """
    B, R, IC, D, H, F, L, C, waves = cg.dims("B R IC D H F L C waves")

    def block(x: cg.Tensor, c: cg.Tensor) -> tuple[cg.Tensor, cg.Tensor]:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = _by_condition(c, 6)
        y = bidirectional_attention(attention, dropout, H, D / H)(_modulated(x, shift, scale))
        x = x + gate * cg.dropout(y, dropout)
        y = cg.nn.mlp(_modulated(x, shift_mlp, scale_mlp), F, activation=_gelu, bias=True, p=dropout, name="mlp")
        return x + gate_mlp * y, c

    with cg.Graph(name, dtype=dtype) as g:
        latents, times = g.input("latents", (B, IC, R, R)), g.input("times", (B,), dtype="int64")
        classes = g.input("classes", (B,), dtype="int64")
        x = cg.conv(latents, "b c h w -> b d h w", window=patch, stride=patch, bias=True, d=D, name="patches")
        side = x.shape[2]
        x = cg.rearrange(x, "b d h w -> b (h w) d")
        x = x + g.param("positions", (1, side**2, D), grad=False)
        with cg.scope("times"):
            y = cg.linear(cg.nn.timestep_embedding(times, waves), "b w -> b d", d=D, bias=True, name="up")
            c = cg.linear(cg.silu(y), "b d -> b e", e=D, bias=True, name="down")
        # an additional row for samples without a class (classifier-free guidance)
        c = c + cg.embedding(classes, g.param("classes/table", (C + 1, D)))
        x, c = cg.repeat(L, block, (x, c), name="layers")
        with cg.scope("head"):
            shift, scale = _by_condition(c, 2)
            out_width = IC * (2 if learned_variance else 1) * patch**2
            y = cg.linear(_modulated(x, shift, scale), "b n d -> b n e", e=out_width, bias=True, name="linear")
        g.output(cg.rearrange(y, "b (h w) (p q c) -> b c (h p) (w q)", h=side, w=side, p=patch, q=patch))
    return g


def _modulated(x: cg.Tensor, shift: cg.Tensor, scale: cg.Tensor) -> cg.Tensor:
    return cg.layer_norm(x, affine=False, name="norm") * (1.0 + scale) + shift


def _by_condition(c: cg.Tensor, count: int) -> tuple[cg.Tensor, ...]:
    y = cg.linear(cg.silu(c), "b d -> b n e", n=count, e=cg.dims("D"), bias=True, name="modulation")
    return cg.ops.split(y, (1,) * count, 1)


def _gelu(x: cg.Tensor) -> cg.Tensor:
    return cg.gelu(x, approximate="tanh")


_WIDTHS = {"s": (384, 6, 12), "b": (768, 12, 12), "l": (1024, 16, 24), "xl": (1152, 16, 28)}


def _sizes(size: str, patch: int) -> Preset:
    D, H, L = _WIDTHS[size]
    sizes = {"R": 32, "IC": 4, "D": D, "H": H, "F": 4 * D, "L": L, "C": 1000, "waves": 256}
    return Preset(sizes, {"patch": patch})


FAMILIES = (
    Family(
        dit,
        {f"dit-{size}-{patch}": _sizes(size, patch) for size in _WIDTHS for patch in (2, 4, 8)},
        legend={"R": "latent side", "IC": "latent channels", "waves": "timestep embedding size"},
    ),
)
