"""Diffusion U-Nets after diffusers 0.31 (Apache 2.0), so that it need not be installed.

Follows `UNet2DModel`, `UNet2DConditionModel`, `ResnetBlock2D`, `Attention`, `Transformer2DModel`,
`BasicTransformerBlock`, `Downsample2D` and `Upsample2D`; attention is eager, as in its `AttnProcessor`.
"""

import math

import torch
from torch import nn
from torch.nn import functional


def timesteps(times, dim):
    half = dim // 2
    exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=times.device) / half
    emb = times[:, None].float() * torch.exp(exponent)[None, :]
    return torch.cat([torch.cos(emb), torch.sin(emb)], dim=-1)


class ResnetBlock2D(nn.Module):
    def __init__(self, in_channels, out_channels, temb_channels, groups):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
        self.time_emb_proj = nn.Linear(temb_channels, out_channels)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1)
        self.conv_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x, temb):
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + self.time_emb_proj(functional.silu(temb))[:, :, None, None]
        h = self.conv2(functional.silu(self.norm2(h)))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + h


class Attention(nn.Module):
    def __init__(self, dim, heads, context=None, bias=False):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=bias)
        self.to_k = nn.Linear(context or dim, dim, bias=bias)
        self.to_v = nn.Linear(context or dim, dim, bias=bias)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context=None):
        context = x if context is None else context
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, t in ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        )
        probabilities = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1)
        return self.to_out((probabilities @ v).transpose(1, 2).flatten(2))


class GEGLU(nn.Module):
    def __init__(self, dim, inner):
        super().__init__()
        self.proj = nn.Linear(dim, 2 * inner)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * functional.gelu(gate)


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim, heads, context):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn1, self.attn2 = Attention(dim, heads), Attention(dim, heads, context)
        self.ff = nn.Sequential(GEGLU(dim, 4 * dim), nn.Linear(4 * dim, dim))

    def forward(self, x, text):
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), text) + x
        return self.ff(self.norm3(x)) + x


class Transformer2D(nn.Module):
    def __init__(self, dim, heads, context, groups, layers):
        super().__init__()
        self.norm = nn.GroupNorm(groups, dim, eps=1e-6)
        self.proj_in = nn.Conv2d(dim, dim, kernel_size=1)
        self.blocks = nn.ModuleList(BasicTransformerBlock(dim, heads, context) for _ in range(layers))
        self.proj_out = nn.Conv2d(dim, dim, kernel_size=1)

    def forward(self, x, text):
        b, c, height, width = x.shape
        h = self.proj_in(self.norm(x)).permute(0, 2, 3, 1).reshape(b, height * width, c)
        for block in self.blocks:
            h = block(h, text)
        h = h.reshape(b, height, width, c).permute(0, 3, 1, 2).contiguous()
        return self.proj_out(h) + x


class AttentionBlock(nn.Module):
    """Attention over the pixels of an image, as in `UNet2DModel`."""

    def __init__(self, dim, heads, groups):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, dim)
        self.attention = Attention(dim, heads, bias=True)

    def forward(self, x, text):
        b, c, height, width = x.shape
        h = self.attention(self.group_norm(x).view(b, c, height * width).transpose(1, 2))
        return h.transpose(-1, -2).reshape(b, c, height, width) + x


class UNet(nn.Module):
    def __init__(
        self, in_channels, out_channels, channels, attended, *, layers=2, heads=1, groups=32, context=None, depth=1
    ):
        super().__init__()

        def attention(width):
            if context is None:
                return AttentionBlock(width, heads, groups)
            return Transformer2D(width, heads, context, groups, depth)

        temb, (first, *_), last = 4 * channels[0], channels, channels[-1]
        self.first = first
        self.time_embedding = nn.Sequential(nn.Linear(first, temb), nn.SiLU(), nn.Linear(temb, temb))
        self.conv_in = nn.Conv2d(in_channels, first, kernel_size=3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, width = [first], first
        for i, out in enumerate(channels):
            resnets, attentions = nn.ModuleList(), nn.ModuleList()
            for _ in range(layers):
                resnets.append(ResnetBlock2D(width, out, temb, groups))
                attentions.append(attention(out) if i in attended else None)
                width = out
                skips.append(out)
            halve = nn.Conv2d(out, out, 3, stride=2, padding=1) if i < len(channels) - 1 else None
            skips += [out] if halve is not None else []
            self.down.append(nn.ModuleList([resnets, attentions, halve]))
        self.middle = nn.ModuleList(
            [ResnetBlock2D(last, last, temb, groups), attention(last), ResnetBlock2D(last, last, temb, groups)]
        )
        for i, out in reversed(list(enumerate(channels))):
            resnets, attentions = nn.ModuleList(), nn.ModuleList()
            for _ in range(layers + 1):
                resnets.append(ResnetBlock2D(width + skips.pop(), out, temb, groups))
                attentions.append(attention(out) if i in attended else None)
                width = out
            double = nn.Conv2d(out, out, 3, padding=1) if i > 0 else None
            self.up.append(nn.ModuleList([resnets, attentions, double]))
        self.conv_norm_out = nn.GroupNorm(groups, first)
        self.conv_out = nn.Conv2d(first, out_channels, kernel_size=3, padding=1)

    def forward(self, x, times, text=None):
        temb = self.time_embedding(timesteps(times, self.first).to(x.dtype))
        x = self.conv_in(x)
        skips = [x]
        for resnets, attentions, halve in self.down:
            for resnet, attention in zip(resnets, attentions, strict=True):
                x = resnet(x, temb)
                x = x if attention is None else attention(x, text)
                skips.append(x)
            if halve is not None:
                x = halve(x)
                skips.append(x)
        first, attention, second = self.middle
        x = second(attention(first(x, temb), text), temb)
        for resnets, attentions, double in self.up:
            for resnet, attention in zip(resnets, attentions, strict=True):
                x = resnet(torch.cat([x, skips.pop()], dim=1), temb)
                x = x if attention is None else attention(x, text)
            if double is not None:  # upsample_size, for sizes that the levels do not halve evenly
                x = double(functional.interpolate(x, size=skips[-1].shape[2:], mode="nearest"))
        return self.conv_out(functional.silu(self.conv_norm_out(x)))
