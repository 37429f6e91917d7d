"""Reading GGUF files written by the gguf package."""

import random
from contextlib import suppress

import pytest
from each import each

import costgraph as cg
from costgraph.errors import FormatError
from costgraph.files.checkpoints import (
    FILE_TYPES,
    FORMATS,
    read_gguf,
)

gguf = pytest.importorskip("gguf")
numpy = pytest.importorskip("numpy")

NAMES = {"fp32": "F32", "fp16": "F16", "fp64": "F64"}


def written(path, tensors, fields=(), arch="llama"):
    """Write a file with gguf's own writer; tensors map names to (shape, type), their data are zeros."""
    writer = gguf.GGUFWriter(path, arch)
    for name, value in dict(fields).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "\u00e9"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 0.25])
    for name, (shape, kind) in tensors.items():
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        raw = numpy.zeros((*shape[:-1], shape[-1] // elements * size), numpy.uint8)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_formats_and_file_types_match_gguf_package():
    for number, (name, elements, size) in FORMATS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert gguf.GGML_QUANT_SIZES[kind] == (elements, size)
        assert NAMES.get(name, name.upper().replace("INT", "I")) == kind.name
    for number, name in FILE_TYPES.items():
        known = gguf.LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        assert NAMES.get(name, name.upper()) == known


@each("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4"])
def test_block_bytes_match_gguf_package(name):
    elements, size = next((e, s) for n, e, s in FORMATS.values() if n == name)
    assert cg.bits_per_element(name) * elements == 8 * size


def test_reader_agrees_with_gguf_package(tmp_path):
    rng = random.Random(7)
    kinds = [gguf.GGMLQuantizationType(n) for n in FORMATS]
    tensors = {}
    for i, kind in enumerate(kinds):
        last = gguf.GGML_QUANT_SIZES[kind][0] * rng.choice((1, 2, 3))
        tensors[f"blk.{i}.x"] = ((*(rng.choice((1, 2, 3, 5)) for _ in range(rng.randint(0, 3))), last), kind)
    path = written(tmp_path / "m.gguf", tensors, {"llama.block_count": 3, "general.name": "x"})
    weights = cg.read_weights(path)
    package = gguf.GGUFReader(path)
    assert {(w.name, w.shape[::-1], w.bytes) for w in weights.rows} == {
        (t.name, tuple(int(n) for n in t.shape), t.n_bytes) for t in package.tensors
    }
    read = read_gguf(str(path))
    assert (read.fields["general.architecture"], read.fields["llama.block_count"]) == ("llama", 3)
    assert read.lengths == {"tokenizer.ggml.tokens": 3, "tokenizer.ggml.scores": 2}


def test_file_is_checked_against_a_declared_model(tmp_path):
    with cg.Graph("net", dtype="bf16") as g:
        x = cg.linear(g.input("x", (3, 64)), "b d -> b f", f=96, name="up")
        g.output(cg.linear(x, "b f -> b d", d=64, name="down"))
    kinds = gguf.GGMLQuantizationType
    path = written(
        tmp_path / "m.gguf", {"blk.0.up.weight": ((96, 64), kinds.BF16), "blk.0.down.weight": ((64, 96), kinds.BF16)}
    )
    assert cg.compare_weights(g, path).agree
    path = written(
        tmp_path / "q.gguf", {"blk.0.up.weight": ((96, 64), kinds.Q4_0), "blk.0.down.weight": ((64, 96), kinds.Q4_0)}
    )
    assert cg.compare_weights(cg.quantize(g, weights="q4_0"), path).agree
    rows = cg.compare_weights(g, path).rows
    assert {(r.kind, r.expected.split()[-1], r.found.split()[-1]) for r in rows} == {("format", "bf16", "q4_0")}


def damaged(path, at, content):
    raw = bytearray(path.read_bytes())
    raw[at : at + len(content)] = content
    path.with_name("d.gguf").write_bytes(raw)
    return path.with_name("d.gguf")


def test_damaged_files_raise_with_position(tmp_path):
    path = written(tmp_path / "m.gguf", {"w": ((3, 32), gguf.GGMLQuantizationType.Q8_0)})
    for at, content, text in (
        (0, b"nope", "begins with b'nope', expected a GGUF file"),
        (4, b"\x00\x00\x00\x03", "version 50331648, expected 2 or 3, little-endian"),
        (8, b"\xff" * 8, "complete header"),
        (24, b"\xff" * 8, "complete header"),
    ):
        with pytest.raises(FormatError, match=r"d\.gguf: ") as refused:
            cg.read_weights(damaged(path, at, content))
        assert text in str(refused.value)
    short = tmp_path / "s.gguf"
    short.write_bytes(path.read_bytes()[:-70])
    with pytest.raises(FormatError, match=r"'w' has 102 bytes at offset 0, expected .* an end within the file"):
        cg.read_weights(short)


def test_corrupted_files_load_or_raise_format_error(tmp_path):
    raw = written(tmp_path / "m.gguf", {"w": ((3, 32), gguf.GGMLQuantizationType.Q8_0)}).read_bytes()
    rng = random.Random(11)
    path = tmp_path / "d.gguf"
    for _ in range(300):
        other = bytearray(raw[: rng.choice((len(raw), rng.randrange(len(raw))))])
        for _ in range(rng.randint(0, 4)):
            other[rng.randrange(len(other)) if len(other) else 0 : 1] = bytes([rng.randrange(256)])
        path.write_bytes(bytes(other))
        with suppress(FormatError):
            cg.read_weights(path)


# -- models ----------------------------------------------------------------------------------------------------------

D, H, G, K, F, L, V = 512, 4, 2, 128, 768, 3, 307
KINDS = gguf.GGMLQuantizationType


def fields_of(arch, file_type, **more):
    sizes = {"block_count": L, "embedding_length": D, "feed_forward_length": F, "attention.head_count": H,
             "attention.head_count_kv": G, "context_length": 2048, "rope.freq_base": 1e4, **more}  # fmt: skip
    return {f"{arch}.{k}": v for k, v in sizes.items()} | {"general.file_type": file_type}


def tensors_of(kind, *, head=True, norm=False, bias=False):
    """Return tensors stored and named as in llama.cpp; norms and biases in fp32."""
    matrices = {"attn_q": (H * K, D), "attn_k": (G * K, D), "attn_v": (G * K, D), "attn_output": (D, H * K),
                "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}  # fmt: skip
    vectors = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,)}
    vectors |= {"attn_q_norm.weight": (K,), "attn_k_norm.weight": (K,)} if norm else {}
    vectors |= {f"{n}.bias": matrices[n][:1] for n in ("attn_q", "attn_k", "attn_v")} if bias else {}
    tensors = {"token_embd.weight": ((V, D), kind), "output_norm.weight": ((D,), KINDS.F32)}
    tensors |= {"output.weight": ((V, D), kind)} if head else {}
    for i in range(L):
        tensors |= {f"blk.{i}.{n}.weight": (shape, kind) for n, shape in matrices.items()}
        tensors |= {f"blk.{i}.{n}": (shape, KINDS.F32) for n, shape in vectors.items()}
    return tensors


@pytest.mark.parametrize(
    ("arch", "more"),
    [("llama", {}), ("llama", {"head": False}), ("qwen2", {"bias": True}), ("qwen3", {"norm": True})],
    ids=["llama", "tied", "qwen2", "qwen3"],
)
def test_model_is_derived_from_gguf_file(tmp_path, arch, more):
    fields = fields_of(arch, gguf.LlamaFileType.ALL_F32.value, **{"attention.key_length": K})
    path = written(tmp_path / "m.gguf", tensors_of(KINDS.F32, **more), fields, arch)
    g = cg.models.from_config(path)
    assert (cg.param_count(g), cg.param_bytes(g)) == (cg.read_weights(path).elements, cg.read_weights(path).bytes)
    assert cg.compare_weights(g, path).agree


def test_quantization_mixture_keeps_per_matrix_bytes(tmp_path):
    fields = fields_of("llama", gguf.LlamaFileType.MOSTLY_Q8_0.value)
    path = written(tmp_path / "m.gguf", tensors_of(KINDS.Q8_0), fields)
    norms = sum(w.bytes for w in cg.read_weights(path).rows if w.format == "fp32")
    g = cg.models.from_config(path)  # in bf16 except for its matrices
    assert cg.param_bytes(g) == cg.read_weights(path).bytes - norms + norms // 2
    assert cg.param_bytes(cg.models.from_config(path, dtype="bf16")) == 2 * cg.param_count(g)


def test_file_type_is_inferred_from_uniform_float_matrices(tmp_path):
    fields = {k: v for k, v in fields_of("llama", 0).items() if k != "general.file_type"}
    path = written(tmp_path / "half.gguf", tensors_of(KINDS.F16), fields)
    g = cg.models.from_config(path)
    assert g.params[0].dtype.name == "fp16"
    assert cg.param_count(g) == cg.read_weights(path).elements
    for name, kind in (("block", KINDS.Q8_0), ("mixed", KINDS.F32)):
        tensors = tensors_of(kind) | ({"output.weight": ((V, D), KINDS.F16)} if name == "mixed" else {})
        with pytest.raises(FormatError, match=r"general\.file_type is None, expected one of 0"):
            cg.models.from_config(written(tmp_path / f"{name}.gguf", tensors, fields))


@pytest.mark.parametrize(
    ("arch", "fields", "text"),
    [
        ("mamba", {}, "architecture 'mamba', expected one of llama, qwen2, qwen3"),
        ("qwen2", {"qwen2.expert_count": 8}, "architecture 'qwen2' with experts, expected one of llama"),
        ("llama", {"llama.attention.head_count_kv": [2, 1, 2]}, "llama.attention.head_count_kv is an array of 3"),
        ("llama", {"llama.odd": 7}, "llama.odd is 7, expected a number for one of block_count"),
        ("llama", {"general.file_type": 99}, "general.file_type is 99, expected one of 0, 1, 2"),
    ],
)
def test_unknown_gguf_models_raise(tmp_path, arch, fields, text):
    path = written(tmp_path / "m.gguf", {}, fields_of("llama", 0) | fields, arch)
    with pytest.raises(cg.CostGraphError) as refused:
        cg.models.from_config(path)
    assert text in str(refused.value)
