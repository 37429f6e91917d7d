"""Mixtures of GGUF formats: sizes of published files, which layer has which format, and what is refused."""

import pytest

import costgraph as cg

# bytes of published files: of Llama-2-7B and Llama-3-8B as the Hugging Face hub lists them (TheBloke, bartowski), of
# Phi-3-mini Microsoft's own, of 70B bartowski's table of Llama-3.1-70B in units of 10**7. What is no tensor in them is
# the vocabulary and a few kilobytes, less than 10 MB; norms are in fp32 there.
FILES = {
    ("llama-2-7b", "Q4_K_M"): 4_081_004_224,
    ("llama-3-8b", "Q4_K_M"): 4_920_734_272,
    ("phi-3-mini", "Q4_K_M"): 2_393_231_072,
    ("llama-3-70b", "Q3_K_S"): 30_910_000_000,
    ("llama-3-70b", "Q3_K_M"): 34_270_000_000,
    ("llama-3-70b", "Q3_K_L"): 37_140_000_000,
    ("llama-3-70b", "Q4_K_S"): 40_350_000_000,
    ("llama-3-70b", "Q4_K_M"): 42_520_000_000,
    ("llama-3-70b", "Q5_K_M"): 49_950_000_000,
    ("llama-3-70b", "Q6_K"): 57_890_000_000,
    ("llama-3-70b", "Q8_0"): 74_980_000_000,
}


@pytest.mark.parametrize(("model", "mixture"), FILES)
def test_weights_take_what_published_files_do(model, mixture):
    file = FILES[model, mixture]
    found = cg.param_bytes(cg.quantize(cg.models.load(model), mixture))
    assert file * 0.995 < found < file


def formats(g, which):
    """Formats of a parameter by layer, each of one played-out loop."""
    names = {t.name: t.dtype.name for t in g.params}
    return [names[f"layers/{which}/weight.i{i}"] for i in range(len(names)) if f"layers/{which}/weight.i{i}" in names]


def more(i, n):
    """llama.cpp's use_more_bits: first and last eighth, and every third layer between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def decoder(layers, **sizes):
    """A decoder of small sizes, in which every matrix has rows of whole blocks."""
    g = cg.models.load("llama-3-8b", symbolic=True)
    g.defaults |= {"D": 256, "H": 4, "G": 2, "K": 64, "F": 512, "V": 17, "L": layers} | sizes
    return g


@pytest.mark.parametrize("n", [1, 8, 17])
@pytest.mark.parametrize(
    ("mixture", "value", "down"),
    [
        ("Q4_K_M", lambda i, n: "q6_k" if more(i, n) else "q4_k", lambda i, n: "q6_k" if more(i, n) else "q4_k"),
        ("Q4_K_S", lambda i, n: "q5_k" if i < 4 else "q4_k", lambda i, n: "q5_k" if i < n // 8 else "q4_k"),
        ("Q3_K_M", lambda i, n: "q5_k" if i < 2 else "q4_k", lambda i, n: "q5_k" if i < n // 16 else "q4_k"),
    ],
)
def test_layers_have_their_formats(n, mixture, value, down):
    loop, played = cg.quantize(decoder(n), mixture), cg.quantize(cg.unroll(decoder(n)), mixture)
    assert formats(played, "attention/v") == [value(i, n) for i in range(n)]
    assert formats(played, "mlp/down") == [down(i, n) for i in range(n)]
    assert cg.param_bytes(loop) == cg.param_bytes(played)
    assert cg.param_count(loop) == cg.param_count(played) == cg.param_count(decoder(n), **decoder(n).defaults)
