"""Inference number formats: bytes with scales, matmul units, and refusals."""

import pytest
from each import each
from shared import load

import costgraph as cg
from costgraph import testing
from costgraph.ops.kv_cache import append

B, S, D, F, L, G, K, V = cg.dims("B S D F L G K V")
ODD = {"B": 2, "S": 3, "D": 5, "F": 7, "L": 2}


def layer(x):
    h = cg.gelu(cg.linear(cg.layer_norm(x), "b s d -> b s f", f=F, bias=True, name="up"))
    return x + cg.linear(h, "b s f -> b s d", d=D, name="down")


def mlp():
    with cg.Graph("mlp", dtype="bf16") as g:
        g.output(cg.repeat(L, layer, g.input("x", (B, S, D)), name="layers"))
    return g


def product(dtype="bf16"):
    with cg.Graph("product", dtype=dtype) as g:
        g.output(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F))
    return g


def attention(kernel, window=None):
    """Attend with one query per sequence to a cache, after appending to it."""
    with cg.Graph("attention", dtype="bf16") as g:
        q, new = g.input("q", (B, G, 1, K)), g.input("new", (B, G, 1, K))
        held = g.buffer("kept", (B, G, S, K), role="cache")
        kept = append(held, new, 2)
        g.output(cg.attention(q, kept, kept, causal=window is not None, window=window, kernel=kernel))
    return g


# -- dtypes ----------------------------------------------------------------------------------------------------------


@each(
    ("name", "sizes", "expected"),
    [
        # 3 rows of 130 elements: two groups each
        ("int4_g128_fp16", (3, 130), 3 * 130 / 2 + 3 * 2 * 2),
        ("int4_g128_fp16_zero", (3, 130), 3 * 130 / 2 + 3 * 2 * (2 + 1 / 2)),
        ("int8_row_fp32", (3, 130), 3 * 130 + 3 * 4),
        ("fp8_e4m3_row_fp32", (2, 3, 7), 2 * 3 * 7 + 2 * 3 * 4),
        # blocks of 2 rows and 128 columns: 8 for 3*5 rows, 2 for 130 columns
        ("fp8_b2x128_fp32", (3, 5, 130), 3 * 5 * 130 + 8 * 2 * 4),
        ("int4_b128x128_fp16_zero", (130, 7), 130 * 7 / 2 + 2 * (2 + 1 / 2)),
        ("fp4_g32_fp8_e8m0", (3, 64), cg.evaluate(3 * 64 / 2 + 3 * 2)),  # the definition of mxfp4
    ],
)
def test_scaled_dtype_bytes(name, sizes, expected):
    with cg.Graph("g") as g:
        g.param("w", sizes, dtype=name)
    assert cg.param_bytes(g) == expected


def test_scaled_dtype_is_parsed_from_name():
    found = cg.dtype("fp8_row_fp32")
    assert found == cg.dtype("fp8_e4m3_row_fp32") == cg.dtype(found)
    assert (found.name, found.element, found.bits, found.block) == ("fp8_e4m3_row_fp32", "fp8_e4m3", 8, 0)
    assert float(cg.bits_per_element("int4_g128_fp16")) == 4 + 16 / 128
    blocks = cg.dtype("fp8_b64x128_fp32")
    assert (blocks.name, blocks.block, blocks.rows) == ("fp8_e4m3_b64x128_fp32", 128, 64)
    assert float(cg.bits_per_element(blocks)) == 8 + 32 / (64 * 128)


@each(
    "name",
    ["int4_g0_fp16", "int4_g128", "bf16_g128_fp16", "int4_g128_int8", "mxfp4_g32_fp16", "bool_row_fp32",
     "fp8_row_fp32_zero", "fp8_e8m0_row_fp32", "int4_g12345678_fp16", "int4_row_fp16_zero_zero", "fp8_b0x128_fp32",
     "fp8_b128_fp32"],
)  # fmt: skip
def test_invalid_dtype_names_are_refused(name):
    with pytest.raises(cg.FormatError, match="is unknown"):
        cg.dtype(name)


def test_quantized_graph_survives_save_and_load(tmp_path):
    q = cg.quantize(mlp(), "int4", group=2)
    cg.save(q, tmp_path / "q.json")
    again = cg.load(tmp_path / "q.json")
    assert cg.param_bytes(again) == cg.param_bytes(q)
    assert cg.peak_memory(again, **ODD) == cg.peak_memory(q, **ODD)


# -- weights ---------------------------------------------------------------------------------------------------------


def test_groups_run_along_summed_axis():
    q = cg.quantize(product(), "int4", group=128)
    # 11 outputs with 300 inputs: 3 groups each, the last with 44
    assert cg.param_bytes(q, D=300, F=11) == 300 * 11 / 2 + 11 * 3 * 2
    assert cg.param_count(q) == D * F
    # with 130 outputs and 7 inputs, outputs share no scale
    assert cg.param_bytes(q, D=7, F=130) == 7 * 130 / 2 + 130 * 1 * 2


def test_jointly_summed_axes_share_channel_scale():
    with cg.Graph("g", dtype="bf16") as g:
        x = g.input("x", (B, S, G, K))
        g.output(cg.linear(x, "b s g k -> b s d", d=D))
    assert cg.param_bytes(cg.quantize(g, "int8")) == D * G * K + 4 * D
    w8a8 = cg.quantize(g, "int8", "int8")
    # x is read, its quantized copy with per-token scales is written and read, and the result is written
    sizes = {"B": 2, "S": 3, "G": 5, "K": 7, "D": 11}
    x, tokens = 2 * 3 * 5 * 7, 2 * 3
    assert cg.bytes_moved(w8a8, **sizes) == 2 * x + 2 * (x + 4 * tokens) + (11 * 35 + 4 * 11) + 2 * tokens * 11
    assert testing.run(w8a8, **sizes).bytes_moved == cg.bytes_moved(w8a8, **sizes)


FORMATS = [
    {"weights": "int8"},
    {"weights": "uint8", "zero": True},
    {"weights": "int4", "group": 2},
    {"weights": "int4", "group": 2, "zero": True},
    {"weights": "int4", "group": 3, "scale": "bf16"},
    {"weights": "mxfp4"},
    {"weights": "nvfp4"},
    {"weights": "int8", "activations": "int8"},
    {"weights": "fp8_e4m3", "activations": "fp8_e4m3"},
    {"weights": "fp8_e4m3", "activations": "fp8_e5m2"},
    {"weights": "int4", "activations": "int8", "group": 2},
    {"weights": "int4", "activations": "fp8"},
    {"weights": "mxfp4", "activations": "mxfp8"},
    {"weights": "nvfp4", "activations": "nvfp4"},
]


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_quantized_formulas_match_interpreter(formats):
    q = cg.quantize(mlp(), **formats)
    counted = testing.run(q, **ODD)
    assert (counted.matmul, counted.flops) == (cg.matmul_flops(q, **ODD), cg.flops(q, **ODD))
    assert (counted.bytes_moved, counted.peak) == (cg.bytes_moved(q, **ODD), cg.peak_memory(q, **ODD))
    assert counted.param_bytes == cg.param_bytes(q, **ODD)
    assert counted.matmul == cg.matmul_flops(mlp(), **ODD)
    assert cg.param_count(q) == cg.param_count(mlp())


@each("formats", FORMATS, ids=str)
def test_matmul_inside_kernel_stays_fused(formats):
    with cg.Graph("g", dtype="bf16") as g:
        x, w, v = g.input("x", (B, D)), g.param("w", (D, F)), g.param("v", (D,))
        with cg.kernel("own"):
            y = cg.relu(cg.einsum(x * v, w, "b d, d f -> b f"))
        g.output(y)
    q, sizes = cg.quantize(g, **formats), {"B": 2, "D": 5, "F": 3}
    assert [op.name for op in q.ops if op.body] == ["own"]
    counted = testing.run(q, **sizes)
    assert (counted.flops, counted.bytes_moved) == (cg.flops(q, **sizes), cg.bytes_moved(q, **sizes))
    # only the operands and the result are in memory
    assert cg.bytes_moved(q, **sizes) == 2 * 2 * 5 + cg.param_bytes(q, **sizes) + 2 * 2 * 3


def test_weights_are_dequantized_inside_kernel():
    g, sizes = product(), {"B": 3, "D": 256, "F": 5}
    q = cg.quantize(g, "int4", group=128)
    packed = 256 * 5 / 2 + 5 * 2 * 2
    assert cg.bytes_moved(q, **sizes) == 2 * 3 * 256 + packed + 2 * 3 * 5
    assert cg.peak_memory(q, **sizes) == 2 * 3 * 256 + packed + 2 * 3 * 5
    # one scale multiplication per element, and one subtraction if there are zero points
    assert cg.flops(q) - cg.flops(g) == D * F
    assert cg.flops(cg.quantize(g, "int4", group=128, zero=True)) - cg.flops(g) == 2 * D * F
    # per-channel scales apply to the matmul result
    assert cg.flops(cg.quantize(g, "int8")) - cg.flops(g) == B * F


def test_activation_quantization_flops():
    g = product()
    q = cg.quantize(g, "int8", "int8")
    # per element: magnitude, comparison, multiplication and two clamps; per token a division; two scales
    assert cg.flops(q) - cg.flops(g) == 5 * B * D + B + 2 * B * F
    # group scales apply to partial sums, which are then added
    grouped = cg.quantize(g, "int4", "int8", group=128)
    sizes = {"B": 3, "D": 300, "F": 5}
    assert cg.flops(grouped, **sizes) - cg.flops(g, **sizes) == 5 * 900 + 3 + 2 * 3 * 5 * 3 + 3 * 5


def test_shared_activations_are_quantized_once():
    with cg.Graph("g", dtype="bf16") as g:
        x = g.input("x", (B, D))
        g.output(cg.linear(x, "b d -> b f", f=F, name="a") + cg.linear(x, "b d -> b f", f=F, name="b"))
    q = cg.quantize(g, "int8", "int8")
    assert [op.name for op in q.ops if op.body] == ["a/quantize", "a/matmul", "b/matmul"]


@each(
    ("formats", "unit"),
    [
        ({"weights": "int4", "group": 128}, "bf16"),
        ({"weights": "fp8"}, "bf16"),
        ({"weights": "int8", "activations": "int8"}, "int8"),
        ({"weights": "int4", "activations": "int8"}, "int8"),
        ({"weights": "fp8", "activations": "fp8"}, "fp8_e4m3"),
        ({"weights": "mxfp4", "activations": "mxfp8"}, "mxfp8"),
        ({"weights": "nvfp4", "activations": "nvfp4"}, "nvfp4"),
    ],
    ids=str,
)
def test_matmul_unit_follows_operand_dtypes(formats, unit):
    b300, sizes = cg.load_hardware("b300"), {"B": 2**12, "D": 2**12, "F": 2**12}
    q = cg.quantize(product(), **formats)
    assert set(cg.costs(q).filter(kind="matmul", direction="compute").group("dtype")) == {unit}
    rates = cg.roofline(q, b300, **sizes).rates
    assert rates[f"matmul {unit}"] == float(b300.rate(unit).value)


def test_missing_rate_falls_back_to_next_wider_dtype():
    q = cg.quantize(product(), "int4", "int4")
    estimate = cg.roofline(q, "h100-sxm", B=1, D=2, F=3)
    assert ("peak.int4", "peak.int8", "next wider format") in estimate.stand_ins
    assert cg.roofline(q, "h100-sxm", B=1, D=2, F=3, fallback={"int4": "int8"}).estimate == estimate.estimate


def test_integer_matmul_uses_integer_rate():
    with cg.Graph("g") as g:
        x, w = g.input("x", (B, D), dtype="int8"), g.param("w", (D, F), dtype="int8")
        g.output(cg.einsum(x, w, "b d, d f -> b f", dtype="int32"))
    assert set(cg.costs(g).filter(kind="matmul", direction="compute").group("dtype")) == {"int8"}


# -- weight selection ------------------------------------------------------------------------------------------------


def decoder(*, tied=False):
    with cg.Graph("decoder", dtype="bf16") as g:
        table = g.param("table", (V, D))
        x = cg.rms_norm(cg.embedding(g.input("tokens", (B, S), dtype="int64"), table))
        x = cg.linear(x, "b s d -> b s f", f=F, bias=True, name="up")
        x = cg.linear(x, "b s f -> b s d", d=D, name="down")
        g.output(cg.nn.tied_head(x, table) if tied else cg.linear(x, "b s d -> b s v", v=V, name="head"))
    return g


def wide(q):
    return [t.name for t in q.params if t.dtype.name == "bf16"]


def test_norms_biases_embeddings_and_head_stay_unquantized():
    assert wide(cg.quantize(decoder(), "int8")) == ["table", "rms_norm/weight", "up/bias", "head/weight"]
    assert wide(cg.quantize(decoder(), "int8", skip=["up"])) == ["table", "rms_norm/weight", "up/weight", "up/bias"]
    assert wide(cg.quantize(decoder(), "int8", skip=[])) == ["table", "rms_norm/weight", "up/bias"]
    assert wide(cg.quantize(decoder(), "int8", skip=(), embeddings=True)) == ["rms_norm/weight", "up/bias"]


def test_tied_table_is_quantized_only_with_head():
    assert "table" in wide(cg.quantize(decoder(tied=True), "int8"))
    assert "table" in wide(cg.quantize(decoder(tied=True), "int8", skip=[]))
    q = cg.quantize(decoder(tied=True), "int8", skip=[], embeddings=True)
    assert "table" not in wide(q)
    # B*S rows of D bytes with a scale are read and as many dequantized ones written, in one kernel
    sizes = {"B": 2, "S": 3, "D": 5, "F": 7, "V": 11}
    rows = cg.costs(q, **sizes).filter(op="embedding").total()
    assert (rows.bytes, rows.flops) == (6 * (5 + 4) + 8 * 6 + 2 * 6 * 5, 6 * 5)


def test_weights_with_other_readers_stay_unquantized():
    with cg.Graph("g", dtype="bf16") as g:
        x = g.input("x", (B, D))
        shared, own = g.param("shared", (D, D)), g.param("own", (D, D))
        exact = g.param("exact", (D, D), dtype="fp32")
        y = cg.einsum(x, shared, "b d, d e -> b e") + cg.reduce(shared, "d e -> e", "sum")
        y = cg.einsum(y, cg.einsum(own, own, "d e, e f -> d f"), "b d, d f -> b f")
        y = cg.einsum(y, exact, "b d, d e -> b e", dtype="bf16")
        g.output(cg.linear(y, "b d -> b f", f=F))
    q = cg.quantize(g, "int8")
    assert {t.name: t.dtype.name for t in q.params} == {
        "shared": "bf16", "own": "bf16", "exact": "fp32", "linear/weight": "int8_row_fp32",
    }  # fmt: skip


def test_quantization_follows_weight_views():
    with cg.Graph("g", dtype="bf16") as g:
        w = g.param("w", (D, 2, F))
        first = cg.rearrange(w[:, 0:1], "d 1 f -> d f")
        g.output(cg.einsum(g.input("x", (B, D)), first, "b d, d f -> b f"))
    q = cg.quantize(g, "int4", group=4)
    assert cg.param_bytes(q, D=8, F=3) == 8 * 2 * 3 / 2 + 2 * 3 * 2 * 2
    # half of it is read: 24 elements with 6 scales
    assert cg.bytes_moved(q, B=1, D=8, F=3) == 2 * 8 + (12 + 6 * 2) + 2 * 3


def test_expert_weights_have_their_own_scales():
    E, k = cg.dims("E k")
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.nn.moe(g.input("x", (B, D)), E, k, F))
    sizes = {"B": 1, "D": 256, "F": 128, "E": 64, "k": 2}
    weight = 3 * 256 * 128  # elements per expert
    before, after = (cg.bytes_moved(h, **sizes) for h in (g, cg.quantize(g, "int4", group=128)))
    assert before - after == 2 * (2 * weight - weight / 2 - weight / 128 * 2)
    more = cg.flops(cg.quantize(g, "int4", group=128), **sizes) - cg.flops(g, **sizes)
    assert more == 2 * weight
    assert {t.name: t.dtype.name for t in cg.quantize(g, "int4", group=128).params}["moe/router/gate/weight"] == "bf16"
    w8a8 = cg.quantize(g, "int8", "int8")
    assert set(cg.costs(w8a8).filter(kind="matmul", direction="compute").group("dtype")) == {"bf16", "int8"}
    # zero points and scales have stated costs, also after save and load
    q = cg.quantize(g, "int4", group=128, zero=True)
    assert cg.flops(q, **sizes) - cg.flops(g, **sizes) == 2 * 2 * weight


def test_frozen_quantized_weights_under_trained_adapters():
    with cg.Graph("g", dtype="bf16") as g:
        h = cg.linear(g.input("x", (B, D)), "b d -> b e", e=D, name="adapter")
        y = cg.einsum(h, g.param("w", (D, F)), "b d, d f -> b f")
        g.output(cg.reduce(y, "b f -> ", "mean"))
    step = cg.training_step(cg.quantize(g, "int4", group=64, skip=["adapter"]), optimizer=cg.SGD())
    # forward of both, the gradient of the quantized layer's input, and the adapter's weight gradient
    assert cg.matmul_flops(step) == 2 * (2 * B * D**2) + 2 * (2 * B * D * F)
    assert cg.state_bytes(step).gradients == 2 * D**2


# -- caches ----------------------------------------------------------------------------------------------------------

CACHED = {"B": 2, "G": 3, "K": 8, "S": 5}
POSITIONS = 2 * 3 * 5  # over all heads


@each(("cache", "row"), [("fp8_e4m3", 8), ("int8", 8 + 2), ("int4", 4 + 2), ("mxfp8", 8 + 1)])
def test_quantized_cache_is_dequantized_in_kernel(cache, row):
    g = attention("flash")
    q = cg.quantize(g, cache=cache)
    assert cg.cache_bytes(q, **CACHED) == POSITIONS * row
    query = 2 * 2 * 3 * 8
    # the new position is read in bf16 and written quantized; the kernel reads query and cache once and writes the
    # result
    assert cg.bytes_moved(q, **CACHED) == query + 2 * 3 * row + query + POSITIONS * row + query
    assert cg.matmul_flops(q) == cg.matmul_flops(g)
    assert set(cg.costs(q).filter(kind="matmul", direction="compute").group("dtype")) == {"bf16"}


def test_eager_attention_reads_dequantized_cache_copy():
    g, q = attention("eager"), cg.quantize(attention("eager"), cache="fp8_e4m3")
    elements = POSITIONS * 8
    # the dequantized copy: one narrow read, one wide write; then both matmuls read it as before
    more = cg.bytes_moved(q, **CACHED) - cg.bytes_moved(g, **CACHED)
    assert more == elements + 2 * elements - 2 * 3 * 8
    assert cg.peak_memory(q, **CACHED) >= elements + 2 * elements
    assert [op.name for op in q.ops if op.name.endswith("cast")] == ["attention/scores/cast"]


@each("cache", ["fp8_e4m3", "int8", "mxfp8"])
@each("window", [None, 3])
@each("kernel", ["flash", "eager"])
def test_quantized_cache_formulas_match_interpreter(cache, window, kernel):
    q = cg.quantize(attention(kernel, window), cache=cache)
    counted = testing.run(q, **CACHED)
    assert (counted.matmul, counted.flops) == (cg.matmul_flops(q, **CACHED), cg.flops(q, **CACHED))
    assert (counted.bytes_moved, counted.peak) == (cg.bytes_moved(q, **CACHED), cg.peak_memory(q, **CACHED))


def test_windowed_cache_reads_only_window():
    for kernel_format in ("fp8_e4m3", "int8"):
        g, q = attention("flash", 3), cg.quantize(attention("flash", 3), cache=kernel_format)
        row = 8 if kernel_format == "fp8_e4m3" else 8 + 2
        read = [cg.costs(h, **CACHED).filter(op="attention", direction="read").total().bytes for h in (g, q)]
        seen = 2 * 3 * 3  # positions of three keys
        assert read[0] - read[1] == seen * (2 * 8 - row)


@pytest.mark.parametrize("kernel", ["flash", "eager"])
@pytest.mark.parametrize("name", ["llama-2-7b", "gpt2"])
def test_zoo_caches_can_be_quantized(name, kernel):
    step = cg.decode(load(name, attention=kernel))
    half = cg.quantize(step, cache="fp8_e4m3")
    assert cg.cache_bytes(step) == 2 * cg.cache_bytes(half)
    whole = cg.prefill(load(name, attention=kernel))
    assert cg.cache_bytes(cg.quantize(whole, cache="fp8_e4m3")) == cg.cache_bytes(half)
    # the prompt attends to unquantized keys and values, which are then written quantized
    saved = cg.bytes_moved(whole) - cg.bytes_moved(cg.quantize(whole, cache="fp8_e4m3"))
    assert saved.expand() == cg.cache_bytes(half)


@pytest.mark.parametrize(
    "name",
    [
        "falcon-7b",
        "deepseek-v2-lite",
        "mixtral-8x7b",
        "t5-small",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("mistral-7b", "gemma-3-4b", "whisper-tiny")),
    ],
)
def test_other_model_families_can_be_quantized(name):
    for g in (cg.prefill(load(name)), cg.decode(load(name))):
        q = cg.quantize(g, "int8", "int8", cache="fp8_e4m3")
        assert cg.param_count(q) == cg.param_count(g)
        assert cg.matmul_flops(q) == cg.matmul_flops(g)
        assert (2 * cg.cache_bytes(q)).expand() == cg.cache_bytes(g).expand()
        units = set(cg.costs(q).filter(kind="matmul", direction="compute").group("dtype"))
        assert {"int8", "bf16"} <= units <= {"int8", "bf16", "fp32"}


def test_recurrent_states_stay_unquantized():
    with cg.Graph("g", dtype="bf16") as g:
        x = g.input("x", (S, B, D))
        _, ys = cg.scan(S, lambda h, x: (h + x, h * x), cg.ops.initial_state((B, D)), x)
        g.output(ys)
    for h in (cg.decode(g), cg.prefill(g)):
        with pytest.raises(cg.GraphError, match="has no cache of keys and values"):
            cg.quantize(h, cache="fp8_e4m3")


# -- a published model -----------------------------------------------------------------------------------------------


def test_llama_2_7b_int4_weight_bytes():
    # q, k, v and o with 4096*4096, gate, up and down with 4096*11008, in 32 layers
    linear = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    # two norms per layer and one at the end; embedding and head
    rest = (2 * 32 + 1) * 4096 + 2 * 32000 * 4096
    g = load("llama-2-7b")
    assert cg.param_bytes(cg.quantize(g, "int4", group=128)) == linear / 2 + linear / 128 * 2 + rest * 2
    # with 4-bit zero points, as AWQ stores them
    awq = cg.param_bytes(cg.quantize(g, "int4", group=128, zero=True))
    assert awq == linear / 2 + linear / 128 * (2 + 1 / 2) + rest * 2
    # one fp32 scale per output: 4096 for q, k, v, o and down, 11008 for gate and up
    outputs = 32 * (5 * 4096 + 2 * 11008)
    assert cg.param_bytes(cg.quantize(g, "int8", "int8")) == linear + 4 * outputs + rest * 2


@pytest.mark.parametrize(("name", "published"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_gpt_oss_checkpoint_bytes(name, published):
    # OpenAI 2025 (arXiv 2508.10925), table 1, in GiB: experts in MXFP4, the rest in bf16
    q = cg.quantize(load(name), "mxfp4", skip=["attention", "head", "router"])
    assert round(cg.param_bytes(q) / 2**30, 1) == published


def test_prefill_decode_and_forward_share_weight_bytes():
    g = load("llama-2-7b")
    found = {cg.param_bytes(cg.quantize(h, "int4", group=128)) for h in (g, cg.prefill(g), cg.decode(g))}
    assert len(found) == 1


# -- refusals --------------------------------------------------------------------------------------------------------


@each(
    ("formats", "text"),
    [
        ({}, "quantize: no format, expected one for the weights or the cache"),
        ({"weights": "bf16"}, "quantize: weights: 'bf16', expected an integer or float of 8 bits or fewer"),
        ({"weights": "bool"}, "quantize: weights: 'bool', expected an integer or float of 8 bits or fewer"),
        ({"weights": "fp8_e8m0"}, "quantize: weights: 'fp8_e8m0', expected an integer or float of 8 bits or fewer"),
        ({"cache": "fp16"}, "quantize: cache: 'fp16', expected an integer or float of 8 bits or fewer"),
        ({"activations": "int8"}, "quantize: activations='int8' without weights=, expected a format for both"),
        ({"cache": "fp8", "group": 128}, "quantize: group=128 without weights=, expected a format for them"),
        ({"weights": "int8", "group": 0}, "quantize: group=0, expected a positive integer"),
        ({"weights": "int8", "group": True}, "quantize: group is True, expected a whole number"),
        ({"weights": "mxfp4", "group": 32}, "quantize: weights 'mxfp4' have their own scales, expected no group="),
        ({"weights": "nvfp4", "zero": True}, "quantize: weights 'nvfp4' have their own scales, expected no zero="),
        (
            {"weights": "fp8", "zero": True},
            (
                "quantize: weights 'fp8_e4m3' with scale='fp32', zero=True, expected a scale in fp32, fp16, bf16 "
                "or fp8, and a zero point only for integers"
            ),
        ),
        (
            {"weights": "int8", "activations": "fp8"},
            (
                "quantize: weights in 'int8' and activations in 'fp8_e4m3': neither holds the values of the other, "
                "expected the same format, or one that holds the other's values"
            ),
        ),
        (
            {"weights": "nvfp4", "activations": "mxfp8"},
            (
                "quantize: weights in 'nvfp4' and activations in 'mxfp8': the matrix unit applies block scales, "
                "expected the same block size on both sides, or no blocks"
            ),
        ),
        (
            {"weights": "fp8", "activations": "mxfp8"},
            (
                "quantize: weights in 'fp8_e4m3' and activations in 'mxfp8': the matrix unit applies block scales, "
                "expected the same block size on both sides, or no blocks"
            ),
        ),
    ],
    ids=str,
)
def test_unsupported_dtype_combinations_are_refused(formats, text):
    with pytest.raises(cg.CostGraphError) as error:
        cg.quantize(product(), **formats)
    assert str(error.value) == text


@each(
    ("options", "text"),
    [
        (
            {"weights": "int8", "skip": ["attn"]},
            "quantize: skip 'attn' matches no parameter or scope, expected some of linear/weight",
        ),
        ({"weights": "int8", "skip": "linear"}, "quantize: skip is 'linear', expected a list, each text"),
        (
            {"weights": "int8", "skip": ["linear"]},
            (
                "quantize: graph 'product' has no weight outside linear that only matmuls with activations read, "
                "expected linear layers in its default format 'bf16'"
            ),
        ),
        (
            {"cache": "fp8"},
            "quantize: graph 'product' has no cache of keys and values, expected the result of prefill or decode",
        ),
        ({"weights": "int8", "zero": 1}, "quantize: zero is 1, expected True or False"),
    ],
    ids=str,
)
def test_unmatched_parameter_names_are_refused(options, text):
    with pytest.raises(cg.GraphError) as error:
        cg.quantize(product(), **options)
    assert str(error.value) == text


def test_matmul_without_room_for_scales_is_refused():
    with cg.Graph("g", dtype="bf16") as g:
        x = g.input("x", (B, D * S))
        g.output(cg.einsum(x, g.param("w", (D, F)), "b (d s), d f -> b s f", s=S))
    assert cg.param_bytes(cg.quantize(g, "int8")) == D * F + 4 * F
    with pytest.raises(cg.UnsupportedError, match="sums over part of an axis of its activations"):
        cg.quantize(g, "int8", "int8")


# -- per-rank graphs -------------------------------------------------------------------------------------------------


def test_quantized_rank_weights_keep_placement():
    whole = cg.decode(load("llama-3-8b"))
    rank = cg.parallelize(whole, tp=4)
    quantized = cg.quantize(rank, "int8")
    # a byte per weight and a 4-byte scale per channel; a rank has a fourth of the scales, or all for a sharded sum axis
    assert cg.param_bytes(quantized, B=1, S=7) < 1.001 * cg.param_bytes(cg.quantize(whole, "int8"), B=1, S=7) / 4
    sent = [(r.op, r.axis, r.bytes) for r in cg.communication(rank).rows]
    assert [(r.op, r.axis, r.bytes) for r in cg.communication(quantized).rows] == sent
    assert quantized.sharding.mesh == rank.sharding.mesh
    places = {name: str(quantized.sharding.places[f"layers/attention/{name}/weight"]) for name in ("q", "proj")}
    # (D, H, K) is stored as (H, K, D): the summed axis is innermost, and the heads are still sharded
    assert places == {"q": "(tp H/4) _ _", "proj": "_ (tp H*K/4)"}


def test_quantized_rank_mixture_layers_keep_placement():
    rank = cg.parallelize(cg.decode(load("llama-3-8b")), tp=2)
    quantized = cg.quantize(rank, "Q4_K_M")
    assert cg.communication(quantized, B=1, S=7).total() == cg.communication(rank, B=1, S=7).total()
