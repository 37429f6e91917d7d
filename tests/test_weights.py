"""Checkpoints: headers are parsed directly and compared with declared models."""

import json
import random
import re

import pytest
from budget import examples
from config_files import DECODER, file_of
from each import each
from limits import limited
from shared import load

import costgraph as cg
from costgraph.errors import CostGraphError, FormatError
from costgraph.files.checkpoints import (
    Weight,
    Weights,
)

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8_e4m3": 8, "int32": 32, "uint8": 8}


def written(path, tensors, metadata=True):
    """Write a safetensors file according to its specification, with zero data."""
    header, at = {"__metadata__": {"format": "pt"}} if metadata else {}, 0
    for name, (word, shape, size) in tensors.items():
        header[name] = {"dtype": word, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(at))
    return path


TENSORS = {"a.weight": ("BF16", [3, 5], 30), "b": ("F32", [7], 28), "c": ("I64", [], 8), "none": ("U8", [0, 2], 0)}


# -- reading ---------------------------------------------------------------------------------------------------------


def test_header_matches_safetensors_package(tmp_path):
    numpy, package = pytest.importorskip("numpy"), pytest.importorskip("safetensors.numpy")
    rng = random.Random(5)
    for _ in range(5):
        shapes = [[rng.choice((0, 1, 2, 3, 7)) for _ in range(rng.randint(0, 4))] for _ in range(rng.randint(1, 6))]
        kinds = [rng.choice(("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")) for _ in shapes]
        arrays = {f"t{i}": numpy.zeros(s, k) for i, (s, k) in enumerate(zip(shapes, kinds, strict=True))}
        package.save_file(arrays, tmp_path / "m.safetensors")
        read = cg.read_weights(tmp_path / "m.safetensors")
        assert {w.name: (w.shape, w.bytes) for w in read.rows} == {n: (x.shape, x.nbytes) for n, x in arrays.items()}
        assert read.elements == sum(x.size for x in arrays.values())


def test_table_and_totals(tmp_path):
    found = cg.read_weights(written(tmp_path / "m.safetensors", TENSORS))
    assert (found.elements, found.bytes) == (3 * 5 + 7 + 1, 30 + 28 + 8)
    assert found.by_format() == {"bf16": 30, "fp32": 28, "int64": 8, "uint8": 0}
    assert "a.weight  (3, 5)  bf16" in str(found)


def test_index_names_files_in_its_folder(tmp_path):
    names = list(TENSORS)
    parts = {"one.safetensors": names[:2], "two.safetensors": names[2:]}
    for file, held in parts.items():
        written(tmp_path / file, {n: TENSORS[n] for n in held})
    index = tmp_path / "model.safetensors.index.json"
    listed = {n: file for file, held in parts.items() for n in held}
    index.write_text(json.dumps({"metadata": {"total_size": 66}, "weight_map": listed}))
    assert cg.read_weights(tmp_path).rows == cg.read_weights(index).rows
    assert cg.read_weights(tmp_path).bytes == 66
    for change, text in (
        ({"b": "two.safetensors"}, "'b' is only in one.safetensors or only in the index"),
        ({"b": "../one.safetensors"}, "'../one.safetensors', expected up to 4096 safetensors files in the same"),
        ({"b": "/dev/zero"}, "'/dev/zero', expected"),
        ({"none": "three.safetensors", "c": "three.safetensors"}, "three.safetensors: No such file"),
        ({"b": 3}, "expected the name of a file for each tensor"),
    ):
        index.write_text(json.dumps({"weight_map": listed | change}))
        with pytest.raises(FormatError, match=re.escape(text)):
            cg.read_weights(index)


A = {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}


@pytest.mark.parametrize(
    ("header", "data", "text"),
    [
        ({"a": A}, 6, None),
        ({"a": A}, 7, "7 bytes of data, expected 6 according to the header"),
        (
            {"a": {**A, "data_offsets": [1, 7]}},
            7,
            "'a' has bytes 1 to 7, expected 0 to 6: bf16 of shape (3,), and no gap",
        ),
        ({"a": A, "b": A}, 6, "'b' has bytes 0 to 6, expected 6 to 12"),
        ({"a": {**A, "shape": [4]}}, 6, "'a' has bytes 0 to 6, expected 0 to 8"),
        ({"a": {**A, "dtype": "F7"}}, 6, "expected a dtype of BOOL, U8"),
        ({"a": {**A, "dtype": []}}, 6, "expected a dtype of BOOL, U8"),
        ({"a": {**A, "shape": [-3]}}, 6, "expected a dtype"),
        ({"a": {**A, "shape": [True]}}, 6, "expected a dtype"),
        ({"a": {**A, "shape": [2**62] * 9}}, 6, "expected a dtype"),
        ({"a": {**A, "more": 1}}, 6, "expected a dtype"),
        ({"a": [A]}, 6, "expected a dtype"),
        ([], 0, "[], expected an object"),
        (b'{"a": 1, "a": 2}', 0, "'a' twice in one object, expected it once"),
        (b'{"\xff": 1}', 0, "byte 10 is not valid UTF-8"),
        (b"[" * 10**5, 0, "expected JSON"),
        (b"9" * 10**4, 0, "expected JSON"),
        (b"{", 0, "a header of 1 bytes in a file of 9"),
    ],
)
def test_invalid_headers_are_refused(tmp_path, header, data, text):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    if text is None:
        assert cg.read_weights(path).bytes == data
        return
    with limited(), pytest.raises(FormatError, match=re.escape(text)):
        cg.read_weights(path)


def test_non_checkpoints_are_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"\x01")
    (tmp_path / "long").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    for path, text in (("short", "in a file of 1"), ("long", "a header of 9223372036854775808 bytes in a file of 10")):
        with limited(), pytest.raises(FormatError, match=text):
            cg.read_weights(tmp_path / path)
    with pytest.raises(FormatError, match=r"no weights in this folder, expected one of model.safetensors.index.json"):
        cg.read_weights(tmp_path)
    with pytest.raises(FormatError, match="no regular file"):
        cg.read_weights("/dev/zero")
    with pytest.raises(FormatError, match="read_weights of int, expected a path"):
        cg.read_weights(7)


def test_damaged_files_are_read_or_refused(tmp_path):
    raw, rng = written(tmp_path / "m.safetensors", TENSORS).read_bytes(), random.Random(6)
    for _ in range(examples(300)):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(raw))] = rng.randrange(256)
        (tmp_path / "d").write_bytes(damaged[: rng.choice((len(raw), rng.randrange(len(raw))))])
        try:
            found = cg.read_weights(tmp_path / "d")
        except CostGraphError:
            continue
        assert found.bytes <= len(raw)


# -- beside a model --------------------------------------------------------------------------------------------------


def weights(**shapes):
    """Return a checkpoint from names in which __ stands for a dot."""
    rows = []
    for name, (*shape, format_) in shapes.items():
        count = 1
        for n in shape:
            count *= n
        rows.append(Weight(name.replace("__", "."), tuple(shape), format_, count * BITS[format_] // 8))
    return Weights(tuple(rows), "file")


def layers(depth, **shapes):
    """Return the same tensors for each layer."""
    return weights(**{f"model__layers__{i}__{name}": facts for i in range(depth) for name, facts in shapes.items()})


def llama(**changes):
    """Return the small decoder's transformers checkpoint: D=24, 4 heads of 6, 2 key heads, F=23, 3 layers."""
    names = {
        "self_attn__q_proj__weight": (24, 24), "self_attn__k_proj__weight": (12, 24),
        "self_attn__v_proj__weight": (12, 24), "self_attn__o_proj__weight": (24, 24),
        "mlp__gate_proj__weight": (23, 24), "mlp__up_proj__weight": (23, 24), "mlp__down_proj__weight": (24, 23),
        "input_layernorm__weight": (24,), "post_attention_layernorm__weight": (24,),
    }  # fmt: skip
    top = {"model__embed_tokens__weight": (29, 24), "model__norm__weight": (24,), "lm_head__weight": (29, 24)}
    shapes = {f"model__layers__{i}__{n}": s for i in range(3) for n, s in names.items()} | top
    return weights(**{n: (*s, "bf16") for n, s in shapes.items()} | changes)


def declared(**fields):
    return cg.models.from_config({**file_of("LlamaForCausalLM"), "torch_dtype": "bfloat16", **fields})


def without(found, *names):
    return Weights(tuple(w for w in found.rows if w.name not in names), "file")


def test_matching_checkpoint_has_no_differences():
    found = cg.compare_weights(declared(), llama())
    # 2*29*24 for both tables, 24 for the last norm, 3 layers with 2*24*24 + 2*12*24 + 3*23*24 + 2*24
    count = 2 * 29 * 24 + 24 + 3 * (2 * 24 * 24 + 2 * 12 * 24 + 3 * 23 * 24 + 2 * 24)
    assert found.agree
    assert (found.parameters, found.bytes) == ((count, count), (2 * count, 2 * count))


@each(
    ("checkpoint", "expected"),
    [
        (without(llama(), "model.layers.1.self_attn.v_proj.weight"),
         [("missing", "layers/attention/v/weight", "", 1, "(24, 2, 6) bf16", "")]),
        (llama(extra__weight=(5, 7, "bf16")), [("unexpected", "", "extra.weight", 1, "", "(5, 7) bf16")]),
        (llama(model__layers__2__mlp__up_proj__weight=(23, 24, "fp32")),
         [("format", "layers/mlp/up/weight", "model.layers.#.mlp.up_proj.weight", 1, "(24, 23) bf16",
           "(23, 24) fp32")]),
        (llama(lm_head__weight=(31, 24, "bf16")),
         [("shape", "head/weight", "lm_head.weight", 1, "(24, 29) bf16", "(31, 24) bf16")]),
    ],
)  # fmt: skip
def test_each_difference_is_named(checkpoint, expected):
    rows = cg.compare_weights(declared(), checkpoint).rows
    assert [(r.kind, r.declared, r.stored, r.tensors, r.expected, r.found) for r in rows] == expected


def test_fused_and_split_tensors_match():
    apart = llama()
    names = [f"model.layers.{i}.self_attn.{x}_proj.weight" for i in range(3) for x in "qkv"]
    fused = layers(3, self_attn__qkv_proj__weight=(24 + 12 + 12, 24, "bf16"))
    together = Weights(without(apart, *names).rows + fused.rows, "file")
    assert cg.compare_weights(declared(), together).agree
    assert not cg.compare_weights(declared(), without(apart, *names)).agree
    phi = cg.models.from_config({**file_of("Phi3ForCausalLM"), "torch_dtype": "bfloat16"})  # declares it fused
    assert cg.compare_weights(phi, together).agree
    assert cg.compare_weights(phi, apart).agree


def quantized(depth, D, G, F, tensor, kept):
    """Return the weights of a decoder whose (out, in) linear layers are stored as several tensors each."""
    parts = {
        "self_attn__q_proj": (D, D),
        "self_attn__k_proj": (G, D),
        "self_attn__v_proj": (G, D),
        "self_attn__o_proj": (D, D),
        "mlp__gate_proj": (F, D),
        "mlp__up_proj": (F, D),
        "mlp__down_proj": (D, F),
    }
    held = {f"{n}__{of}": facts for n, (rows, across) in parts.items() for of, facts in tensor(rows, across).items()}
    norms = dict.fromkeys(("input_layernorm__weight", "post_attention_layernorm__weight"), (D, kept))
    top = weights(embed__weight=(29, D, kept), norm__weight=(D, kept), lm_head__weight=(29, D, kept))
    return Weights(layers(depth, **held, **norms).rows + top.rows, "file")  # fmt: skip


def test_scales_and_packed_elements_count_by_bytes():
    wide = {**DECODER, "hidden_size": 256, "intermediate_size": 384}  # 4 heads of 64, 2 key heads
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    tensors = {
        # one fp32 scale per 128 x 128 block
        "fp8": lambda n, k: {"weight": (n, k, "fp8_e4m3"), "weight_scale_inv": (-(-n // 128), -(-k // 128), "fp32")},
        # eight 4-bit elements per int32, in groups of 128 per column
        "awq": lambda n, k: {"qweight": (k, n // 8, "int32"), "qzeros": (k // 128, n // 8, "int32"),
                             "scales": (k // 128, n, "fp16")},
    }  # fmt: skip
    for config, kept in ((fp8, "bf16"), (awq, "fp16")):
        word = {"bf16": "bfloat16", "fp16": "float16"}[kept]
        g = declared(**wide, torch_dtype=word, quantization_config=config)
        file = quantized(3, 256, 128, 384, tensors[config["quant_method"]], kept)
        found = cg.compare_weights(g, file)
        assert found.agree, str(found)
        assert found.bytes[0] == found.bytes[1] == cg.param_bytes(g)
        assert not cg.compare_weights(g, Weights(file.rows[1:], "file")).agree
        assert not cg.compare_weights(declared(**wide), file).agree


def test_open_sizes_and_adversarial_headers():
    with pytest.raises(cg.BindingError, match="left open, expected a size for each dimension of a parameter"):
        cg.compare_weights(load("mlp", symbolic=True), llama())
    many = {f"t__{'x' * i}": (24, "bf16") for i in range(5000)}
    with limited(), pytest.raises(FormatError, match="5000 tensors whose names differ in more than numbers"):
        cg.compare_weights(declared(), weights(**many))
    with cg.Graph("g") as g:
        g.output(cg.linear(g.input("x", (2, 2**20)), "b d -> b f", f=2**20))
    flat = Weights((Weight("w", (2,) * 40, "fp32", 2**42),), "file")
    with limited():
        assert {r.kind for r in cg.compare_weights(g, flat).rows} <= {"shape", "missing", "unexpected"}
    with limited():
        cg.compare_weights(declared(), weights(**dict(list(many.items())[:600])))


def test_command_prints_tensors_and_differences(capsys, tmp_path):
    pytest.importorskip("typer")
    from costgraph.cli import main

    path = str(written(tmp_path / "m.safetensors", TENSORS))
    assert main(["weights", path]) == 0
    assert "a.weight  (3, 5)  bf16" in capsys.readouterr().out
    assert main(["weights", path, "mlp"]) == 1
    assert "missing" in capsys.readouterr().out
    assert main(["weights", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.endswith("none: No such file or directory, expected a safetensors file\n")
