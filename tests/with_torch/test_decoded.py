"""Stepwise generation with caches gives the logits of a single pass."""

from itertools import product

import pytest
from decoded import difference
from shared import load

import costgraph as cg
from costgraph.ops.fill import pad

B, S, D, H, G, K, F, L, V, W = cg.dims("B S D H G K F L V W")
SIZES = {"B": 2, "D": 12, "H": 6, "G": 2, "K": 4, "F": 10, "L": 2, "V": 17}


def decoder(**attention):
    with cg.Graph("decoder", dtype="fp32") as g:
        x = cg.embedding(g.input("ids", (B, S), "int64"), g.param("table", (V, D)))
        rope = cg.nn.rotary_tables(cg.ops.arange(S), K)

        def block(x):
            x = x + cg.nn.self_attention(cg.rms_norm(x, name="n1"), H, K, groups=G, rope=rope, **attention)
            return x + cg.nn.gated_mlp(cg.rms_norm(x, name="n2"), F)

        x = cg.repeat(L, block, x, name="layers")
        g.output(cg.linear(x, "b s d -> b s v", v=V, name="head"))
    return g


@pytest.mark.parametrize(("window", "kernel"), list(product([None, 3, W], ["flash", "eager"])))
def test_attention_with_kv_cache_matches_a_single_pass(kernel, window):
    sizes = SIZES | ({"W": 4} if window is W else {})
    assert difference(decoder(kernel=kernel, window=window), 3, [1, 1, 2], **sizes) < 1e-12


def recurrence():
    """A K x F state per head, updated and read at every position."""
    with cg.Graph("recurrence", dtype="fp32") as g:
        x = cg.embedding(g.input("ids", (B, S), "int64"), g.param("table", (V, D)))

        def block(x):
            k, q = (cg.linear(x, "b s d -> s b h k", h=H, k=K, name=n) for n in "kq")
            v = cg.linear(x, "b s d -> s b h f", h=H, f=F, name="v")

            def step(state, xs):
                k, q, v = xs
                state = 0.5 * state + cg.einsum(k, v, "b h k, b h f -> b h k f")
                return state, cg.einsum(q, state, "b h k, b h k f -> b h f")

            _, y = cg.scan(S, step, cg.ops.initial_state((B, H, K, F)), (k, q, v))
            return x + cg.linear(y, "s b h f -> b s d", d=D, name="out")

        g.output(cg.repeat(L, block, x, name="layers"))
    return g


def convolution(bias):
    """A causal depthwise convolution, then a shift by one position."""
    with cg.Graph("convolution", dtype="fp32") as g:
        x = cg.embedding(g.input("ids", (B, S), "int64"), g.param("table", (V, D)))

        def block(x):
            y = cg.conv(cg.rearrange(x, "b s d -> b d s"), "b d s -> b e s", window=3, padding="causal", groups=D,
                        bias=bias, e=D)  # fmt: skip
            y = cg.rearrange(cg.silu(y), "b d s -> b s d")
            return x + cg.linear(y - pad(y, 1, 1, S + 1, causal=True)[:, :S], "b s d -> b s e", e=D)

        g.output(cg.repeat(L, block, x, name="layers"))
    return g


def encoder_decoder():
    """A decoder whose cross-attention keys and values are computed once from the encoder's output."""
    M = cg.dims("M")
    with cg.Graph("both", dtype="fp32") as g:
        ids = g.input("ids", (B, S), "int64")
        memory = g.input("frames", (B, M, D))
        memory = cg.repeat(
            L, lambda x: x + cg.nn.self_attention(x, H, K, causal=False, cached=False), memory, name="encoder"
        )
        table = g.param("table", (V, D))
        x = cg.embedding(ids, table) + g.param("positions", (V, D))[:S]

        def block(x):
            x = x + cg.nn.self_attention(x, H, K)
            q = cg.rearrange(cg.linear(x, "b s d -> b s h k", h=H, k=K, name="q"), "b s h k -> b h s k")
            k, v = (
                cg.ops.cache(cg.linear(memory, "b m d -> b h m k", h=H, k=K, name=n), "b h m k", name=f"{n}_cache")
                for n in "kv"
            )
            y = cg.attention(q, k, v, causal=False, name="cross")
            return x + cg.linear(cg.rearrange(y, "b h s k -> b s (h k)"), "b s e -> b s d", d=D, name="out")

        g.output(cg.nn.tied_head(cg.repeat(L, block, x, name="decoder"), table))
    return g


MORE = {"B": 2, "D": 12, "H": 3, "K": 4, "F": 5, "L": 2, "V": 17}


def test_recurrence_continues_from_its_state():
    g = recurrence()
    assert difference(g, 5, [1, 1, 2], **MORE) < 1e-12
    # K*F elements of four bytes per head and layer, for any context length
    assert str(cg.cache_bytes(cg.decode(g))) == "4*B*F*H*K*L"


@pytest.mark.parametrize("bias", [False, True])
def test_convolution_and_shift_read_previous_positions(bias):
    assert difference(convolution(bias), 5, [1, 1, 3, 1], **MORE) < 1e-12
    assert difference(convolution(bias), 1, [1, 2], **MORE) < 1e-12  # a prompt shorter than the window


def test_cross_attention_keys_and_values_are_cached():
    g = encoder_decoder()
    assert difference(g, 3, [1, 2], M=7, **MORE) < 1e-12
    step = cg.decode(g)
    assert [t.name for t in step.tensors if t.role == "input"] == ["ids"]
    assert cg.param_count(step) == cg.param_count(g)  # the encoder's parameters stay in memory


LATENT = {"C": 6, "Kn": 4, "Kr": 2, "Kv": 5, "E": 4, "k": 2, "D": 12, "H": 3}
#: A small model of each generating family: their caches differ.
FAMILIES = [
    ("gpt2", {}, {"D": 12, "H": 3, "F": 10, "L": 2, "P": 16}),
    ("mistral-7b", {}, {**SIZES, "W": 3}),
    ("qwen2.5-0.5b", {}, SIZES),
    ("qwen3-8b", {}, SIZES),
    ("gemma-2-2b", {}, {**SIZES, "W": 3}),
    ("gemma-3-1b", {}, {**SIZES, "L": 8, "W": 3}),
    ("phi-3-mini", {}, {**SIZES, "W": 3}),
    ("falcon-7b", {}, {"D": 12, "H": 3, "F": 10, "L": 2}),
    ("olmo-2-7b", {}, SIZES),
    ("mixtral-8x7b", {}, {"E": 4, "k": 2, "Fe": 5, **SIZES}),
    ("gpt-oss-20b", {}, {**SIZES, "E": 4, "k": 2, "Fe": 5, "W": 3}),
    ("deepseek-v2-lite", {}, {**LATENT, "F": 10, "Fe": 5, "L": 2}),
    ("deepseek-v2-lite", {"absorbed": True}, {**LATENT, "F": 10, "Fe": 5, "L": 2}),
    ("t5-small", {}, {"D": 12, "H": 3, "K": 4, "F": 10, "L": 2, "M": 5, "N": 2}),
    ("whisper-tiny", {}, {"D": 12, "H": 3, "F": 10, "L": 2, "M": 6, "N": 2, "HN": 3, "FN": 7, "mels": 5}),
    ("mamba-130m", {}, {"D": 12, "E": 10, "N": 3, "R": 2, "L": 2}),
    ("mamba2-130m", {}, {"D": 12, "H": 4, "K": 6, "G": 2, "N": 3, "L": 2}),
    ("rwkv-7-0.1b", {}, {"D": 12, "K": 4, "F": 10, "L": 2}),
    ("linear-attention-mnist", {}, {"D": 12, "H": 3, "F": 10, "L": 2}),
    ("xlstm-7b", {}, {"D": 16, "H": 2, "K": 4, "U": 8, "F": 10, "L": 2}),
    ("xlstm-125m-7-1", {"slstm": (1,)}, {"D": 16, "H": 2, "F": 10, "L": 3}),
    ("lstm-ptb-small", {}, {}),
    ("gru-ptb-small", {}, {}),
]


#: Models whose caches work like others': grouped KV heads, windowed or full.
ALIKE = (
    "mistral-7b", "qwen2.5-0.5b", "qwen3-8b", "gemma-2-2b", "phi-3-mini", "olmo-2-7b", "falcon-7b", "mixtral-8x7b",
    "gemma-3-1b", "gru-ptb-small", "xlstm-7b",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [pytest.param(*f, marks=pytest.mark.long) if f[0] in ALIKE else f for f in FAMILIES],
)
def test_stepwise_generation_matches_a_single_pass(name, options, sizes):
    g = load(name, **options)
    sizes = {k: v for k, v in {"V": 17, **sizes}.items() if k in g.defaults or k == "M"}
    assert difference(g, 3, [1, 2], B=2, **sizes) < 1e-9


def test_window_cache_matches_a_ring_buffer():
    import torch
    from transformers import MistralConfig
    from transformers.cache_utils import DynamicCache, StaticCache

    B, G, K, W, S = 2, 1, 4, 5, 11
    fields = {
        "hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": G, "head_dim": K, "intermediate_size": 7,
        "num_hidden_layers": 1, "vocab_size": 13, "sliding_window": W,
    }  # fmt: skip
    config = MistralConfig(**fields)
    rings = {"ring": StaticCache(config, max_cache_len=S), "cut": DynamicCache(config=config)}
    cached = {}
    for name, held in rings.items():
        for _ in range(S):
            keys, _ = held.update(torch.zeros(B, G, 1, K), torch.zeros(B, G, 1, K), 0)
        assert keys.shape[2] == W  # read by attention in a decode step
        cached[name] = 2 * held.layers[0].keys.numel() * 4
    step = cg.decode(cg.models.from_config({**config.to_dict(), "architectures": ["MistralForCausalLM"]}, dtype="fp32"))
    assert cg.cache_bytes(step, B=B, S=S) == cached["ring"] == cached["cut"] + 2 * B * G * K * 4
