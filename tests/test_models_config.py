"""transformers configurations: every field is used, known not to affect costs, or named in an error."""

import json

import pytest
from each import each
from shared import load

import costgraph as cg
from costgraph.errors import FormatError, GraphError, UnsupportedError
from costgraph.models import from_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}


def written(tmp_path, fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


def test_configuration_files_match_presets(tmp_path):
    path = written(tmp_path, LLAMA)
    preset = load("llama-3-8b")
    for given in (path, str(path), tmp_path, LLAMA):
        g = from_config(given)
        assert g.defaults == preset.defaults
        assert cg.flops(g) == cg.flops(preset)
        assert cg.param_bytes(g) == cg.param_bytes(preset)


def test_dtype_defaults_to_configuration():
    wide = {**LLAMA, "torch_dtype": "float32"}
    assert cg.param_bytes(from_config(wide)) == 2 * cg.param_bytes(from_config(LLAMA))
    assert cg.param_bytes(from_config(wide, dtype="bf16")) == cg.param_bytes(from_config(LLAMA))
    assert cg.param_bytes(from_config({**LLAMA, "dtype": "torch.float16", "torch_dtype": None})) == cg.param_bytes(
        from_config(LLAMA)
    )
    with pytest.raises(UnsupportedError, match="config: dtype is 'int3', expected one of float32"):
        from_config({**LLAMA, "torch_dtype": "int3"})


def test_load_options_are_accepted():
    g = from_config(LLAMA, symbolic=True, attention="eager")
    assert g.defaults == {}
    assert cg.matmul_flops(g) == cg.matmul_flops(load("llama-3-8b", symbolic=True, attention="eager"))
    with pytest.raises(GraphError, match=r"model 'LlamaForCausalLM': routing='even', expected one of "):
        from_config(LLAMA, routing="even")


def test_configuration_mapping_is_not_modified():
    before = json.dumps(LLAMA)
    from_config(LLAMA)
    assert json.dumps(LLAMA) == before


@each(
    ("change", "error", "text"),
    [
        ({"architectures": ["LlamaForCausalLn"]}, UnsupportedError, "'LlamaForCausalLn' is unknown, expected one of"),
        ({"architectures": ["A", "B"]}, FormatError, r"architectures is \['A', 'B'\], expected a list of one name"),
        ({"architectures": None}, FormatError, "architectures is None, expected a list of one name"),
        ({"hidden_size": None}, FormatError, "config: hidden_size is missing, expected an integer"),
        ({"hidden_size": "4096"}, FormatError, "hidden_size is '4096', expected an integer of at least 1"),
        ({"hidden_size": 4096.5}, FormatError, "hidden_size is 4096.5, expected an integer"),
        ({"hidden_size": True}, FormatError, "hidden_size is True, expected an integer"),
        ({"num_hidden_layers": 0}, FormatError, "num_hidden_layers is 0, expected an integer of at least 1"),
        ({"tie_word_embeddings": 1}, FormatError, "tie_word_embeddings is 1, expected true or false"),
        ({"hidden_act": "relu7"}, UnsupportedError, "hidden_act is 'relu7', expected"),
        ({"window_of_attention": 5}, UnsupportedError, "config: window_of_attention is 5, expected a known field"),
        ({"num_experts": 8}, UnsupportedError, "num_experts is 8, expected a known field"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor is 0.5, expected 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, UnsupportedError, "is 0.25, expected 1"),
    ],
)
def test_unsupported_fields_are_named(change, error, text):
    with pytest.raises(error, match=text):
        from_config({**LLAMA, **change})


def test_invalid_configuration_files_are_refused(tmp_path):
    with pytest.raises(FormatError, match=r"nowhere.json: No such file or directory, expected a config.json"):
        from_config(tmp_path / "nowhere.json")
    for content, text in ((b"{", "expected JSON"), (b"[1]", r"\[1\], expected an object"), (b"\xff", "no UTF-8")):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(FormatError, match=text):
            from_config(tmp_path / "bad.json")
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(FormatError, match="expected JSON"):
        from_config(tmp_path / "deep.json")
    (tmp_path / "large.json").write_text(" " * 2**21, encoding="utf-8")
    with pytest.raises(FormatError, match="more than 1048576 bytes, expected a config"):
        from_config(tmp_path / "large.json")
    with pytest.raises(FormatError, match="from_config of int, expected a path, a mapping, or a configuration"):
        from_config(7)


def test_config_object_is_read_by_its_fields():
    class Configuration:
        def to_dict(self):
            return LLAMA

    assert cg.param_count(from_config(Configuration())) == cg.param_count(from_config(LLAMA))
    with pytest.raises(FormatError, match="from_config of type"):
        from_config(Configuration)


# -- weight formats ----------------------------------------------------------------------------------------------------

AWQ = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def quantized(method):
    return {**LLAMA, "quantization_config": method}


def test_quantization_config_sets_weight_storage():
    D, F, L, V = 4096, 14336, 32, 128256
    layers = L * (2 * D * D + 2 * D * 1024 + 3 * D * F)  # elements of linear layers in the stack
    rest = 2 * (2 * V * D + (2 * L + 1) * D)  # embedding, head and norms in bf16
    # 4 bits, plus a 16-bit scale and a 4-bit zero point per 128 elements of a column
    assert cg.param_bytes(from_config(quantized(AWQ))) == layers * (4 + 20 / 128) / 8 + rest
    # 8 bits, plus 32 per 128 x 128 block
    g = from_config(quantized(FP8))
    assert cg.param_bytes(g) == layers * (1 + 4 / 128**2) + rest
    assert cg.param_count(g) == cg.param_count(from_config(LLAMA))
    assert cg.matmul_flops(g, B=1, S=7) == cg.matmul_flops(from_config(LLAMA), B=1, S=7)
    listed = {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.3.input_layernorm"], "scale_fmt": "float"}
    assert cg.param_bytes(from_config(quantized(listed))) == cg.param_bytes(g)
    assert cg.param_bytes(cg.decode(g)) == cg.param_bytes(g)


def test_explicit_dtype_overrides_quantization_config():
    for method in (AWQ, FP8, {"quant_method": "gptq", "bits": 4}):
        assert cg.param_bytes(from_config(quantized(method), dtype="bf16")) == cg.param_bytes(from_config(LLAMA))


@each(
    ("method", "error", "text"),
    [
        ("banana", FormatError, "quantization_config is 'banana', expected an object"),
        (
            {"quant_method": "banana"},
            UnsupportedError,
            "quantization_config has quant_method 'banana', expected one of",
        ),
        (
            {"quant_method": "gptq"},
            UnsupportedError,
            "'gptq', expected one of awq, gguf, fp8, mxfp4: its stored weights",
        ),
        (
            {"quant_method": "mxfp4"},
            UnsupportedError,
            "its stored weights of a llama model are not modelled; pass dtype=",
        ),
        ({}, UnsupportedError, "quantization_config is {}, expected quant_method to be a string"),
        ({**AWQ, "bits": 8}, UnsupportedError, "quantization_config: bits is 8, expected 4"),
        ({**AWQ, "zero_point": False}, UnsupportedError, "zero_point is False, expected True"),
        ({**AWQ, "group_size": -1}, FormatError, "group_size is -1, expected an integer"),
        ({**AWQ, "act_order": 1}, UnsupportedError, "act_order is 1, expected a known field"),
        ({**FP8, "weight_block_size": None}, FormatError, "weight_block_size is missing, expected [128, 128]"),
        (
            {**FP8, "weight_block_size": [64, 128]},
            UnsupportedError,
            "weight_block_size is [64, 128], expected [128, 12",
        ),
        ({**FP8, "activation_scheme": "static"}, UnsupportedError, "activation_scheme is 'static', expected 'dynamic'"),
        (
            {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.3"]},
            UnsupportedError,
            "has 'model.layers.3', ex",
        ),
        ({**FP8, "modules_to_not_convert": ["mlp.gate"]}, UnsupportedError, "has ['mlp.gate'], expected only modules"),
    ],
)
def test_unknown_quantization_methods_are_named(method, error, text):
    with pytest.raises(error) as caught:
        from_config(quantized(method))
    assert text in str(caught.value)


def test_every_architecture_maps_to_one_family():
    from costgraph.models.registry import FAMILIES

    names = [name for family in FAMILIES for name in family.architectures]
    assert len(set(names)) == len(names)
    presets = [name for family in FAMILIES for name in family.presets]
    assert len(set(presets)) == len(presets)
    assert all(family.read is not None for family in FAMILIES if family.architectures)
