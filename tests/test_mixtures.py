"""GGUF format mixtures: published file sizes, the format of each layer, and refusals."""

import pytest
from shared import load

import costgraph as cg
from costgraph.errors import BindingError, FormatError, GraphError, UnsupportedError

# File sizes in bytes on huggingface.co: TheBloke's llama-2-7b-chat.Q4_K_M.gguf, bartowski's
# Meta-Llama-3-8B-Instruct-Q4_K_M.gguf, microsoft's Phi-3-mini-4k-instruct-q4.gguf, each from the public file lists with
# checksums; for 70B bartowski's table of Llama-3.1-70B in units of 10**7. Besides tensors, the files hold the
# vocabulary and a few kilobytes, less than 10 MB; norms are in fp32.
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
def test_weight_bytes_match_published_files(model, mixture):
    file = FILES[model, mixture]
    found = cg.param_bytes(cg.quantize(load(model), mixture))
    assert file * 0.995 < found < file


def formats(g, which):
    """Return a parameter's formats by layer, from the unrolled loops."""
    names = {t.name: t.dtype.name for t in g.params}
    return [names[f"layers/{which}/weight.i{i}"] for i in range(len(names)) if f"layers/{which}/weight.i{i}" in names]


def more(i, n):
    """llama.cpp's use_more_bits: the first and last eighth, and every third layer in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def decoder(layers, **sizes):
    """Build a decoder with small sizes, whose matrix rows are all whole blocks."""
    g = cg.models.load("llama-3-8b", symbolic=True)  # a separate model, as sizes are stated
    g.defaults |= {"D": 256, "H": 4, "G": 2, "K": 64, "F": 512, "V": 17, "L": layers} | sizes
    return g


@pytest.mark.parametrize(
    ("n", "mixture", "value", "down"),
    [
        (1, "Q4_K_M", lambda i, n: "q6_k", lambda i, n: "q6_k"),
        (11, "Q4_K_M", lambda i, n: "q6_k" if more(i, n) else "q4_k", lambda i, n: "q6_k" if more(i, n) else "q4_k"),
        (8, "Q4_K_S", lambda i, n: "q5_k" if i < 4 else "q4_k", lambda i, n: "q5_k" if i < n // 8 else "q4_k"),
        (17, "Q3_K_M", lambda i, n: "q5_k" if i < 2 else "q4_k", lambda i, n: "q5_k" if i < n // 16 else "q4_k"),
    ],
)
def test_layers_follow_mixture_rules(n, mixture, value, down):
    loop, played = cg.quantize(decoder(n), mixture), cg.quantize(cg.unroll(decoder(n)), mixture)
    assert formats(played, "attention/v") == [value(i, n) for i in range(n)]
    assert formats(played, "mlp/down") == [down(i, n) for i in range(n)]
    assert cg.param_bytes(loop) == cg.param_bytes(played)
    assert cg.param_count(loop) == cg.param_count(played) == cg.param_count(decoder(n), **decoder(n).defaults)


def test_python_loop_layers_are_numbered():
    def layer(x):
        x = x + cg.nn.self_attention(x, heads=4, size=64)
        return x + cg.nn.gated_mlp(x, f=512)

    def model(stack):
        with cg.Graph("model", dtype="bf16") as g:
            g.output(stack(g.input("x", (*cg.dims("B S"), 256))))
        return cg.quantize(g, "Q4_K_M")

    def one_by_one(x):
        for _ in range(11):
            x = layer(x)
        return x

    played, loop = model(one_by_one), model(lambda x: cg.repeat(11, layer, x, name="layers"))
    values = [t.dtype.name for t in played.params if "/v" in t.name]
    assert values == ["q6_k" if more(i, 11) else "q4_k" for i in range(11)]
    assert cg.param_bytes(played) == cg.param_bytes(loop)


def test_decode_step_costs_match_unrolled_layers():
    step = cg.quantize(cg.decode(decoder(8)), "Q4_K_M", cache="fp8_e4m3")
    played, sizes = cg.unroll(step), {"B": 2, "S": 5}
    for of in (cg.flops, cg.bytes_moved, cg.peak_memory, cg.cache_bytes):
        assert of(step, **sizes) == of(played, **sizes)
    assert cg.flops(step, **sizes) == cg.flops(cg.decode(decoder(8)), **sizes)
    after = cg.decode(cg.quantize(decoder(8), "Q4_K_M"))
    assert cg.bytes_moved(after, **sizes) == cg.bytes_moved(cg.quantize(cg.decode(decoder(8)), "Q4_K_M"), **sizes)


def test_mixed_layers_are_numbered_in_execution_order():
    g = cg.models.load("gemma-3-1b", symbolic=True)
    g.defaults |= {"D": 256, "H": 4, "G": 2, "K": 64, "F": 512, "V": 17, "L": 26, "W": 3}
    unrolled = cg.unroll(cg.quantize(g, "Q4_K_M"))
    wide = [
        t for t in unrolled.params if t.name.partition(".")[0].endswith("mlp/down/weight") and t.dtype.name == "q6_k"
    ]
    assert len(wide) == sum(
        more(i, 26) for i in range(26)
    )  # 4 periods of five local layers and a global one, and 2 more local layers
    # layer 5 is the first global one: 5 - 26 // 8 = 2
    first = next(t for t in unrolled.params if t.name.startswith("layers/global/mlp/down"))
    assert (more(5, 26), first.dtype.name) == (True, "q6_k")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # row lengths D, H*K and F: 320 is no multiple of 256, and 40 none of 32
        ({"D": 320, "H": 5, "G": 5, "K": 8}, {"q": "q5_1", "proj": "fp16", "gate": "q5_1", "down": "q5_k"}),
        ({"D": 512, "H": 4, "G": 1, "K": 64, "F": 96}, {"q": "q5_k", "proj": "q5_k", "gate": "q5_k", "down": "q5_1"}),
    ],
)
def test_short_rows_use_formats_with_shorter_blocks(sizes, expected):
    g = cg.quantize(decoder(1, **sizes), "Q5_K_S")
    found = {t.name.split("/")[-2]: t.dtype.name for t in g.params if t.ndim > 1}
    assert {name: found[name] for name in expected} == expected


def test_special_rules_for_eight_experts_and_eighty_layers():
    g = cg.quantize(load("mixtral-8x7b"), "Q4_K_M")
    found = {"/".join(t.name.partition(".")[0].split("/")[-3:]): t.dtype.name for t in g.params}
    assert {found[f"attention/{which}/weight"] for which in "kv"} == {"q8_0"}
    assert (found["attention/q/weight"], found["attention/proj/weight"]) == ("q4_k", "q5_k")
    assert (found["moe/experts/gate_up"], found["router/gate/weight"]) == ("q4_k", "bf16")
    for heads, expected in ((2, "q5_k"), (4, "q3_k")):  # of 4 heads: two share a key head, or none does
        g = cg.quantize(decoder(80, G=heads), "Q3_K_S")
        assert [t.dtype.name for t in g.params if t.name.endswith("/v/weight")] == [expected]


def test_skipped_parameters_stay_unquantized():
    g = cg.quantize(decoder(3), "Q6_K", skip=["head", "mlp"])
    assert {t.name.split("/")[-2] for t in g.params if t.dtype.name == "bf16" and t.ndim > 1} == {
        "head",
        "gate",
        "up",
        "down",
    }
    tied = cg.quantize(load("gemma-2-2b"), "Q4_K_M")
    assert [t.dtype.name for t in tied.params if t.name == "tokens/table"] == ["q6_k"]
    # without per-layer rules, sizes may be open
    assert cg.param_count(cg.quantize(load("llama-3-8b", symbolic=True), "Q8_0")).has(cg.dims("L"))


def stacked():
    """Build a loop whose layers read and write slices."""
    B, D, L = cg.dims("B D L")
    with cg.Graph("stacked", dtype="bf16") as g:
        g.defaults = {"D": 256, "L": 8}
        x = g.input("x", (B, D))

        def body(x, _):
            with cg.scope("attention"):
                y = cg.linear(x, "b d -> b e", e=D, name="v")
            with cg.scope("mlp"):
                y = cg.linear(y, "b d -> b e", e=D, name="down")
            return y, y

        _, every = cg.scan(L, body, x, name="layers")
        g.output(every)
    return g


@pytest.mark.parametrize(
    ("graph", "options", "error", "text"),
    [
        (lambda: decoder(2), {"activations": "int8"}, FormatError,
         "activations='int8' with the mixture 'Q4_K_M', expected only weights"),
        (lambda: decoder(2), {"group": 32}, FormatError,
         "weights 'Q4_K_M' have their own scales, expected no group="),
        (lambda: load("llama-3-8b", symbolic=True), {}, BindingError,
         "weights 'Q4_K_M': iterations of 'layers' are L, expected a number: formats depend on it"),
        (lambda: decoder(5000), {}, BindingError,
         "weights 'Q4_K_M': 5000 iterations of 'layers', expected at most 4096"),
        (lambda: load("mamba-130m"), {}, GraphError,
         "weights 'Q4_K_M' has rules for down, packed, value, which the graph lacks; expected layers of costgraph.nn"),
        (lambda: load("t5-base"), {}, UnsupportedError,
         "weights 'Q4_K_M': 'decoder/layers/cross/q/weight' does not belong to a decoder, expected a decoder"),
        (stacked, {}, UnsupportedError,
         ("weights 'Q4_K_M': 'layers' reads or writes a slice in each iteration, expected a loop that only forwards "
          "carries")),
    ],
)  # fmt: skip
def test_unsupported_mixtures_are_refused(graph, options, error, text):
    with pytest.raises(error) as found:
        cg.quantize(graph(), "Q4_K_M", **options)
    assert str(found.value) == f"quantize: {text}"
