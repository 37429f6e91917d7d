"""T5: an encoder-decoder with relative position biases, RMSNorm and linear layers without biases.

Sizes: Raffel et al. 2020 (arXiv 1910.10683), sections 2.1 and 3.7, and the `config.json` of google-t5/t5-small,
t5-base, t5-large, t5-3b and t5-11b, where heads times head size may differ from the width. Op order:
`T5ForConditionalGeneration` in transformers. T5 1.1 and Flan-T5 have gated feed-forward layers and an untied head.
"""

from __future__ import annotations

from functools import partial

import costgraph as cg

from .blocks import block, with_dropout
from .config import ACTIVATIONS, Config
from .decoder import logits
from .family import Family, Preset


def t5(
    name: str, attention: str, dropout: float, dtype: str,
    *, gated: bool = False, activation: str = "relu", tied: bool = True, scaled: bool = True,
) -> cg.Graph:  # fmt: skip
    """Declare T5: encoder tokens (B, M) and decoder tokens (B, S) to logits (B, S, V).

    `gated`: feed-forward layers have a gate; `tied`: the head shares the embedding table; `scaled`: the input of the
    head is divided by sqrt(D).
    """
    B, S, M, D, H, K, L, N, V = cg.dims("B S M D H K L N V")
    attend = partial(cg.nn.self_attention, heads=H, size=K, kernel=attention, p=dropout)
    mlp = partial(_feed_forward, gated=gated, activation=activation, p=dropout)

    def encoder(x: cg.Tensor) -> cg.Tensor:
        bias = _positions(cg.ops.arange(M), cg.ops.arange(M), bidirectional=True)
        mixer = partial(attend, score_bias=bias, causal=False, cached=False)
        layer = block(attention=with_dropout(mixer, dropout), mlp=with_dropout(mlp, dropout))
        return cg.dropout(cg.rms_norm(cg.repeat(L, layer, x, name="layers"), name="norm"), dropout)

    def decoder(x: cg.Tensor, memory: cg.Tensor) -> cg.Tensor:
        bias = _positions(cg.ops.arange(S), cg.ops.arange(S, context=True), bidirectional=False)
        cross = partial(cg.nn.cross_attention, memory=memory, heads=H, size=K, kernel=attention, p=dropout)
        mixer = partial(attend, score_bias=bias)
        layer = block(
            attention=with_dropout(mixer, dropout), cross=with_dropout(cross, dropout), mlp=with_dropout(mlp, dropout)
        )
        return cg.dropout(cg.rms_norm(cg.repeat(N, layer, x, name="layers"), name="norm"), dropout)

    with cg.Graph(name, dtype=dtype) as g:
        source, tokens = g.input("source", (B, M), dtype="int64"), g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        with cg.scope("encoder"):
            memory = encoder(cg.dropout(cg.embedding(source, table), dropout))
        with cg.scope("decoder"):
            x = decoder(cg.dropout(cg.embedding(tokens, table), dropout), memory)
        # by 1/sqrt(D); the value changes no cost
        x = cg.ops.pointwise("mul", x, 1.0, name="scale") if scaled else x
        g.output(logits(x, table, tied=tied))
        g.loss = "cross_entropy"
    return g


def _positions(queries: cg.Tensor, keys: cg.Tensor, *, bidirectional: bool) -> cg.Tensor:
    """Return the position bias of all layers of the encoder or the decoder."""
    H, buckets = cg.dims("H buckets")
    return cg.nn.relative_bias(queries, keys, H, buckets=buckets, bidirectional=bidirectional, name="positions")


def _feed_forward(x: cg.Tensor, *, gated: bool, activation: str, p: float) -> cg.Tensor:
    D, F = cg.dims("D F")
    with cg.scope("mlp"):
        h = cg.ops.pointwise(activation, cg.linear(x, "b s d -> b s f", f=F, name="gate" if gated else "up"))
        h = h * cg.linear(x, "b s d -> b s f", f=F, name="up") if gated else h
        return cg.linear(cg.dropout(h, p), "b s f -> b s d", d=D, name="down")


def read(c: Config) -> Preset:
    """Read a transformers `T5Config`."""
    c.expect("is_encoder_decoder", True)
    c.expect("is_decoder", False)
    c.ignore("dropout_rate", "relative_attention_max_distance", "n_positions", "output_past")
    projection = c.choice("feed_forward_proj", choices=[*ACTIVATIONS, *(f"gated-{a}" for a in ACTIVATIONS)])
    gated, plain = projection.startswith("gated-"), projection.removeprefix("gated-")
    # in transformers, gated-gelu is the tanh form of GELU, and gelu the exact one
    act = "gelu_tanh" if projection == "gated-gelu" else ACTIVATIONS[plain]
    # transformers writes this as well, and prefers it if the two differ
    c.expect("is_gated_act", gated)
    if c.activation("dense_act_fn", default="gelu_new" if projection == "gated-gelu" else plain) != act:
        c.expect("dense_act_fn", plain)
    tied = c.flag("tie_word_embeddings", default=True)
    structure = {"gated": gated, "activation": act, "tied": tied}
    structure["scaled"] = c.flag("scale_decoder_outputs", default=tied)
    L = c.size("num_layers")
    c.expect("num_hidden_layers", L)  # an alias that transformers applies after it has set the decoder layers
    sizes = {"D": c.size("d_model"), "H": c.size("num_heads"), "K": c.size("d_kv"), "F": c.size("d_ff"), "L": L}
    sizes |= {"N": c.size("num_decoder_layers", default=L), "V": c.size("vocab_size")}
    return Preset(sizes | {"buckets": c.size("relative_attention_num_buckets")}, structure)


def _sizes(D: int, H: int, K: int, F: int, L: int) -> Preset:
    return Preset({"D": D, "H": H, "K": K, "F": F, "L": L, "N": L, "V": 32128, "buckets": 32})


FAMILIES = (
    Family(
        t5,
        {
            "t5-small": _sizes(512, 8, 64, 2048, 6),
            "t5-base": _sizes(768, 12, 64, 3072, 12),
            "t5-large": _sizes(1024, 16, 64, 4096, 24),
            "t5-3b": _sizes(1024, 32, 128, 16384, 24),
            "t5-11b": _sizes(1024, 128, 128, 65536, 24),
        },
        architectures={"T5ForConditionalGeneration": "t5"},
        read=read,
        legend={
            "M": "encoder sequence length",
            "L": "encoder layers",
            "N": "decoder layers",
            "buckets": "relative position buckets",
        },
    ),
)
