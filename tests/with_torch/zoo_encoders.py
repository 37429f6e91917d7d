"""Reference modules of encoders, encoder-decoders and vision transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lazy import lazy_import
from torch import nn
from zoo_reference import Reference

transformers = lazy_import("transformers")

B, S = 2, 13
EAGER = {"attention": "eager"}


# -- plain modules that transformers lacks -----------------------------------------------------------------------------


class Layer(nn.Module):
    """`EncoderBlock` in torchvision's vision_transformer.py."""

    def __init__(self, d: int, heads: int, f: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d, eps=1e-6), nn.LayerNorm(d, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(d, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    """`VisionTransformer` in torchvision's vision_transformer.py."""

    def __init__(
        self, side: int, patch: int, d: int, heads: int, f: int, depth: int, classes: int = 1000, channels: int = 3
    ):
        super().__init__()
        self.conv_proj = nn.Conv2d(channels, d, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, d))
        self.pos_embedding = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, d))
        self.layers = nn.Sequential(*(Layer(d, heads, f) for _ in range(depth)))
        self.ln, self.head = nn.LayerNorm(d, eps=1e-6), nn.Linear(d, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.ln(self.layers(x + self.pos_embedding))[:, 0])


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """`DiTBlock` in facebookresearch/DiT, models.py, with timm's attention."""

    def __init__(self, d: int, heads: int, f: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(d, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.heads, self.qkv, self.proj = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, f), nn.GELU(approximate="tanh"), nn.Linear(f, d))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))

    def attn(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (d // self.heads) ** -0.5) @ k.transpose(-2, -1)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift, scale))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """`DiT` in facebookresearch/DiT, models.py."""

    def __init__(
        self, side: int, patch: int, d: int, heads: int, f: int, depth: int, classes: int = 1000, channels: int = 4,
        waves: int = 256, learn_sigma: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.waves, self.patch, self.grid = waves, patch, side // patch
        self.out = channels * 2 if learn_sigma else channels
        self.x_embedder = nn.Conv2d(channels, d, patch, patch)
        self.t_embedder = nn.Sequential(nn.Linear(waves, d), nn.SiLU(), nn.Linear(d, d))
        self.y_embedder = nn.Embedding(classes + 1, d)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid**2, d), requires_grad=False)
        self.blocks = nn.ModuleList(DiTBlock(d, heads, f) for _ in range(depth))
        self.norm_final = nn.LayerNorm(d, elementwise_affine=False, eps=1e-6)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(d, 2 * d))
        self.linear = nn.Linear(d, patch * patch * self.out)

    def times(self, t: torch.Tensor) -> torch.Tensor:
        half = self.waves // 2
        freqs = torch.exp(-9.21 * torch.arange(half, dtype=torch.float32) / half)
        args = t[:, None].float() * freqs[None]
        return self.t_embedder(torch.cat([torch.cos(args), torch.sin(args)], dim=-1))

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.times(t) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        x = self.linear(modulate(self.norm_final(x), shift, scale))
        x = x.reshape(x.shape[0], self.grid, self.grid, self.patch, self.patch, self.out)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], self.out, self.grid * self.patch, -1)


# -- module inputs -----------------------------------------------------------------------------------------------------


def ids(*shape: int, high: int = 2) -> torch.Tensor:
    return torch.randint(0, high, shape)


def transformer(kind: Any, config: Any) -> Callable[[], nn.Module]:
    config._attn_implementation = "eager"
    return lambda: kind(config)


def bert(**sizes: int) -> Reference:
    config = transformers.BertConfig(**sizes)
    return Reference(transformer(transformers.BertModel, config), lambda: (ids(B, S),), {"B": B, "S": S}, EAGER)


def t5(**sizes: Any) -> Reference:
    M = 17
    config = transformers.T5Config(decoder_start_token_id=0, use_cache=False, **sizes)
    return Reference(
        transformer(transformers.T5ForConditionalGeneration, config), tuple, {"B": B, "S": S, "M": M}, EAGER,
        keywords=lambda: {"input_ids": ids(B, M), "decoder_input_ids": ids(B, S), "use_cache": False},
    )  # fmt: skip


def whisper(d: int, heads: int, depth: int, vocabulary: int = 51865, mels: int = 80) -> Reference:
    config = transformers.WhisperConfig(
        d_model=d, encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_layers=depth,
        decoder_layers=depth, encoder_ffn_dim=4 * d, decoder_ffn_dim=4 * d, vocab_size=vocabulary, num_mel_bins=mels,
        use_cache=False,
    )  # fmt: skip
    return Reference(
        transformer(transformers.WhisperForConditionalGeneration, config), tuple, {"B": 1, "S": S}, EAGER,
        keywords=lambda: {
            "input_features": torch.zeros(1, mels, 3000), "decoder_input_ids": ids(1, S), "use_cache": False,
        },
    )  # fmt: skip


def vit(patch: int, d: int, heads: int, depth: int) -> Reference:
    module = partial(VisionTransformer, 224, patch, d, heads, 4 * d, depth)
    name = "VisionTransformer of torchvision, as a plain module"
    return Reference(module, lambda: (torch.zeros(B, 3, 224, 224),), {"B": B}, name=name)


def clip(patch: int, d: int, dv: int, depth: int, joint: int) -> Reference:
    config = transformers.CLIPConfig(
        text_config={"hidden_size": d, "intermediate_size": 4 * d, "num_attention_heads": d // 64},
        vision_config={
            "hidden_size": dv, "intermediate_size": 4 * dv, "num_attention_heads": dv // 64, "patch_size": patch,
            "num_hidden_layers": depth,
        },
        projection_dim=joint,
    )  # fmt: skip
    return Reference(
        transformer(transformers.CLIPModel, config), lambda: (ids(B, 77), torch.zeros(B, 3, 224, 224)), {"B": B}, EAGER
    )


def dit(patch: int, d: int, heads: int, depth: int) -> Reference:
    module = partial(DiT, 32, patch, d, heads, 4 * d, depth)
    name = "DiT of facebookresearch/DiT, as a plain module"
    return Reference(module, lambda: (torch.zeros(B, 4, 32, 32), ids(B), ids(B)), {"B": B}, name=name)


#: Each model's reference.
REFERENCES: dict[str, Callable[[], Reference]] = {
    "bert-base": bert,
    "bert-large": partial(bert, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
    "t5-small": partial(t5, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8),
    "t5-base": partial(t5, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12),
    "t5-large": partial(t5, d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16),
    "t5-3b": partial(t5, d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32),
    "t5-11b": partial(t5, d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128),
    "whisper-tiny": partial(whisper, 384, 6, 4),
    "whisper-base": partial(whisper, 512, 8, 6),
    "whisper-small": partial(whisper, 768, 12, 12),
    "whisper-medium": partial(whisper, 1024, 16, 24),
    "whisper-large-v3": partial(whisper, 1280, 20, 32, 51866, 128),
    "vit-b-16": partial(vit, 16, 768, 12, 12),
    "vit-b-32": partial(vit, 32, 768, 12, 12),
    "vit-l-16": partial(vit, 16, 1024, 16, 24),
    "vit-h-14": partial(vit, 14, 1280, 16, 32),
    "clip-vit-b-32": partial(clip, 32, 512, 768, 12, 512),
    "clip-vit-b-16": partial(clip, 16, 512, 768, 12, 512),
    "clip-vit-l-14": partial(clip, 14, 768, 1024, 24, 768),
    **{
        f"dit-{size}-{patch}": partial(dit, patch, *sizes)
        for size, sizes in {"s": (384, 6, 12), "b": (768, 12, 12), "l": (1024, 16, 24), "xl": (1152, 16, 28)}.items()
        for patch in (2, 4, 8)
    },
}
