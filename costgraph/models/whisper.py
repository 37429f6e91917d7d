"""Whisper: convolutions and an encoder over 30 s of log-mel spectrogram, and a text decoder.

Sizes: Radford et al. 2022 (arXiv 2212.04356), table 1, and the `config.json` of openai/whisper-tiny, -base, -small,
-medium and -large-v3. Op order: `WhisperForConditionalGeneration` in transformers: pre-LayerNorm, biases except for
keys, learned positions in the decoder and frozen sinusoidal ones in the encoder.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import costgraph as cg

from .blocks import Branch, block, with_dropout
from .config import Config
from .decoder import logits
from .family import Family, Preset


def whisper(
    name: str, attention: str, dropout: float, dtype: str, *, activation: str = "gelu", tied: bool = True
) -> cg.Graph:
    """Declare Whisper: spectrograms (B, mels, 2*M) and tokens (B, S) to logits (B, S, V).

    `dropout` applies to embeddings, attention probabilities and residual branches.
    """
    B, S, M, D, V, P, mels = cg.dims("B S M D V P mels")
    # L encoder layers, N decoder layers
    H, F, L, HN, FN, N = cg.dims("H F L HN FN N")
    act = partial(cg.ops.pointwise, activation)
    options: dict[str, Any] = {"kernel": attention, "bias": True, "key_bias": False, "out_bias": True, "p": dropout}
    attend = partial(cg.nn.self_attention, **options)
    mlp = partial(cg.nn.mlp, activation=act, bias=True, p=dropout)

    def encoder(x: cg.Tensor) -> cg.Tensor:
        x = x + cg.embedding(cg.ops.arange(M), x.graph.param("positions/table", (M, D), grad=False))
        mixer = partial(attend, heads=H, size=D / H, causal=False, cached=False)
        layer = block(attention=with_dropout(mixer, dropout), mlp=partial(mlp, f=F), norm=cg.layer_norm)
        return cg.layer_norm(cg.repeat(L, layer, cg.dropout(x, dropout), name="layers"), name="norm")

    def decoder(x: cg.Tensor, memory: cg.Tensor) -> cg.Tensor:
        x = x + cg.embedding(cg.ops.arange(S), x.graph.param("positions/table", (P, D)))
        mixer = with_dropout(partial(attend, heads=HN, size=D / HN), dropout)
        cross = with_dropout(partial(cg.nn.cross_attention, memory=memory, heads=HN, size=D / HN, **options), dropout)
        layer = block(attention=mixer, cross=cross, mlp=partial(mlp, f=FN), norm=cg.layer_norm)
        return cg.layer_norm(cg.repeat(N, layer, cg.dropout(x, dropout), name="layers"), name="norm")

    with cg.Graph(name, dtype=dtype) as g:
        g.assume("S <= P")
        sound, tokens = g.input("sound", (B, mels, 2 * M)), g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        with cg.scope("encoder"):
            memory = encoder(_conv_frontend(sound, act))
        with cg.scope("decoder"):
            x = decoder(cg.embedding(tokens, table), memory)
        g.output(logits(x, table, tied=tied))
        g.loss = "cross_entropy"
    return g


def _conv_frontend(sound: cg.Tensor, act: Branch) -> cg.Tensor:
    """Apply the convolutions, which halve the number of positions: (B, M, D)."""
    conv = partial(cg.conv, window=3, padding=1, bias=True, d=cg.dims("D"))
    x = act(conv(sound, "b c t -> b d t", name="conv1"))
    x = act(conv(x, "b c t -> b d t", stride=2, name="conv2"))
    return cg.rearrange(x, "b d m -> b m d")


def read(c: Config) -> Preset:
    """Read a transformers `WhisperConfig`."""
    c.expect("is_encoder_decoder", True)
    c.expect("apply_spec_augment", False)
    c.expect("encoder_layerdrop", 0, 0.0)
    c.expect("decoder_layerdrop", 0, 0.0)
    # for other architectures and for sampling
    c.ignore("use_weighted_layer_sum", "classifier_proj_size", "median_filter_width")
    c.ignore(*(f"mask_{axis}_{option}" for axis in ("time", "feature") for option in ("prob", "length", "min_masks")))
    c.ignore("dropout", "attention_dropout", "activation_dropout", "scale_embedding", "forced_decoder_ids")
    c.ignore("alignment_heads", "lang_to_id", "task_to_id", "is_multilingual", "no_timestamps_token_id")
    sizes = {"D": c.size("d_model"), "H": c.size("encoder_attention_heads"), "F": c.size("encoder_ffn_dim")}
    sizes |= {"L": c.size("encoder_layers"), "HN": c.size("decoder_attention_heads"), "FN": c.size("decoder_ffn_dim")}
    sizes |= {"N": c.size("decoder_layers"), "V": c.size("vocab_size"), "mels": c.size("num_mel_bins")}
    sizes |= {"M": c.size("max_source_positions"), "P": c.size("max_target_positions")}
    tied = c.flag("tie_word_embeddings")
    return Preset(sizes, {"activation": c.activation("activation_function"), "tied": tied})


def _sizes(D: int, H: int, L: int, V: int = 51865, mels: int = 80) -> Preset:
    sizes = {"D": D, "H": H, "F": 4 * D, "L": L, "HN": H, "FN": 4 * D, "N": L, "V": V, "mels": mels, "M": 1500}
    return Preset(sizes | {"P": 448})


FAMILIES = (
    Family(
        whisper,
        {
            "whisper-tiny": _sizes(384, 6, 4),
            "whisper-base": _sizes(512, 8, 6),
            "whisper-small": _sizes(768, 12, 12),
            "whisper-medium": _sizes(1024, 16, 24),
            "whisper-large-v3": _sizes(1280, 20, 32, 51866, 128),
        },
        architectures={"WhisperForConditionalGeneration": "whisper"},
        read=read,
        legend={
            "M": "encoder sequence length",
            "mels": "mel bins",
            "H": "encoder attention heads",
            "F": "encoder MLP width",
            "L": "encoder layers",
            "HN": "decoder attention heads",
            "FN": "decoder MLP width",
            "N": "decoder layers",
        },
    ),
)
