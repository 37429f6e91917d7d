"""Configurations of transformers: every field is used, known to change no cost, or an error that names it."""

import json

import pytest

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


def test_the_file_of_a_preset_is_the_preset(tmp_path):
    path = written(tmp_path, LLAMA)
    preset = cg.models.load("llama-3-8b")
    for given in (path, str(path), tmp_path, LLAMA):
        g = from_config(given)
        assert g.defaults == preset.defaults
        assert cg.flops(g) == cg.flops(preset)
        assert cg.param_bytes(g) == cg.param_bytes(preset)


def test_the_format_is_that_of_the_file_unless_one_is_given():
    wide = {**LLAMA, "torch_dtype": "float32"}
    assert cg.param_bytes(from_config(wide)) == 2 * cg.param_bytes(from_config(LLAMA))
    assert cg.param_bytes(from_config(wide, dtype="bf16")) == cg.param_bytes(from_config(LLAMA))
    assert cg.param_bytes(from_config({**LLAMA, "dtype": "torch.float16", "torch_dtype": None})) == cg.param_bytes(
        from_config(LLAMA)
    )
    with pytest.raises(UnsupportedError, match="config: dtype is 'int3', expected one of float32"):
        from_config({**LLAMA, "torch_dtype": "int3"})


def test_options_are_those_of_load():
    g = from_config(LLAMA, symbolic=True, attention="eager")
    assert g.defaults == {}
    assert cg.matmul_flops(g) == cg.matmul_flops(cg.models.load("llama-3-8b", symbolic=True, attention="eager"))
    with pytest.raises(GraphError, match=r"model 'LlamaForCausalLM': routing='even', expected one of "):
        from_config(LLAMA, routing="even")


def test_a_mapping_is_not_changed():
    before = json.dumps(LLAMA)
    from_config(LLAMA)
    assert json.dumps(LLAMA) == before


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"architectures": ["LlamaForCausalLn"]}, UnsupportedError, "'LlamaForCausalLn' is not known, expected one of"),
        ({"architectures": ["A", "B"]}, FormatError, r"architectures is \['A', 'B'\], expected a list of one name"),
        ({"architectures": None}, FormatError, "architectures is None, expected a list of one name"),
        ({"hidden_size": None}, FormatError, "config: hidden_size is missing, expected a whole number"),
        ({"hidden_size": "4096"}, FormatError, "hidden_size is '4096', expected a whole number of at least 1"),
        ({"hidden_size": 4096.5}, FormatError, "hidden_size is 4096.5, expected a whole number"),
        ({"hidden_size": True}, FormatError, "hidden_size is True, expected a whole number"),
        ({"num_hidden_layers": 0}, FormatError, "num_hidden_layers is 0, expected a whole number of at least 1"),
        ({"tie_word_embeddings": 1}, FormatError, "tie_word_embeddings is 1, expected true or false"),
        ({"hidden_act": "relu7"}, UnsupportedError, "hidden_act is 'relu7', expected"),
        ({"window_of_attention": 5}, UnsupportedError, "config: window_of_attention is 5, expected a field that is"),
        ({"num_experts": 8}, UnsupportedError, "num_experts is 8, expected a field that is known"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor is 0.5, expected 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, UnsupportedError, "is 0.25, expected 1"),
    ],
)
def test_what_is_not_understood_is_named(change, error, text):
    with pytest.raises(error, match=text):
        from_config({**LLAMA, **change})


def test_files_that_are_none(tmp_path):
    with pytest.raises(FormatError, match=r"nowhere.json: No such file or directory, expected a config.json"):
        from_config(tmp_path / "nowhere.json")
    for content, text in ((b"{", "expected JSON"), (b"[1]", r"\[1\], expected an object"), (b"\xff", "expected JSON")):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(FormatError, match=text):
            from_config(tmp_path / "bad.json")
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(FormatError, match="expected JSON"):
        from_config(tmp_path / "deep.json")
    (tmp_path / "large.json").write_text(" " * 2**21, encoding="utf-8")
    with pytest.raises(FormatError, match="more than 1048576 bytes, expected a config"):
        from_config(tmp_path / "large.json")
    with pytest.raises(FormatError, match="from_config of int, expected a path or a mapping"):
        from_config(7)


def test_every_architecture_is_of_one_family():
    from costgraph.models.registry import FAMILIES

    names = [name for family in FAMILIES for name in family.architectures]
    assert len(set(names)) == len(names)
    presets = [name for family in FAMILIES for name in family.presets]
    assert len(set(presets)) == len(presets)
    assert all(family.read is not None for family in FAMILIES if family.architectures)
