"""Hostile values in every config field of every architecture give a model or an error."""

import json
import os
import random

import pytest
from budget import examples, seed
from config_files import FILES, file_of
from guard import outcome, refused
from hostile import TEXTS, VALUES, nested

import costgraph as cg
from costgraph.models.config import (
    ALIASES,
    DEFAULTS,
)

LARGE = [10**9, 2**63 - 1, 2**63, 10**308, 10**309, 1e308, -1e308, 1e-308, [10**9], [1] * 3000, ["x"] * 20_000]
HOSTILE = [*VALUES, *LARGE, *(t for t in TEXTS if len(t) < 100), nested(500), {"x": nested(500)}]
#: Fields that every config may have.
COMMON = [
    "architectures", "model_type", "dtype", "torch_dtype", "num_labels", "id2label", "rope_parameters", "rope_scaling",
    "partial_rotary_factor", "quantization_config", "layer_types", "mlp_only_layers", "x" * 10**5, "",
]  # fmt: skip
LIMITS = {"num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"}


def fields_of(name):
    kind, fields = FILES[name]
    return [*fields, *DEFAULTS[kind], *ALIASES.get(kind, ()), *COMMON]


def need_amounts(made):
    for amount in (cg.param_count(made), cg.param_bytes(made)):
        assert amount >= 0
        assert float(amount) < float("inf")


@pytest.mark.parametrize("name", sorted(FILES))
def test_hostile_config_values_give_a_model_or_an_error(name):
    draw = random.Random(seed() or name)
    for _ in range(examples(12)):
        field, value = draw.choice(fields_of(name)), draw.choice(HOSTILE)
        result = outcome(cg.models.from_config, {**file_of(name), field: value}, about=(name, field[:40]))
        if isinstance(result, cg.Graph):
            outcome(need_amounts, result, about=(name, field[:40], str(type(value))))


@pytest.mark.parametrize("name", sorted(FILES))
def test_huge_layer_counts_are_not_listed(name):
    fields = file_of(name)
    depths = [n for n in fields if n in LIMITS or n == "num_blocks"]
    result = outcome(cg.models.from_config, {**fields, **dict.fromkeys(depths, 10**9)})
    if depths:
        assert isinstance(result, cg.Graph) or "65536 of such at the most" in str(result)
        assert not isinstance(result, cg.Graph) or len(list(result.ops)) < 300
        # the error lists layers only if the first ones differ from all others
        assert isinstance(result, cg.Graph) or name == "Qwen3ForCausalLM"


def places(fields, prefix=()):
    """Yield every path in nested fields."""
    for key, value in fields.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from places(value, (*prefix, key))


@pytest.mark.parametrize("name", ["CLIPModel", "LlamaForCausalLM"])
def test_hostile_values_in_nested_fields(name):
    draw = random.Random(name)
    base = {**file_of(name), "rope_scaling": {"type": "linear", "factor": 2.0}}
    base["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True}
    inner = [place for place in places(base) if len(place) > 1]
    for _ in range(examples(60)):
        fields = json.loads(json.dumps(base))
        (part, key), value = draw.choice(inner), draw.choice(HOSTILE)
        fields[part][key] = value
        outcome(cg.models.from_config, fields, about=(name, part, key))


# -- small configs for large models ------------------------------------------------------------------------------------


def test_irregular_layer_patterns_are_refused():
    draw = random.Random(0)
    words = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(16_000)]
    fields = {**file_of("Gemma3ForCausalLM"), "num_hidden_layers": 16_000}
    assert "runs of equal layers before it repeats, expected at most 128" in str(
        refused(cg.models.from_config, {**fields, "layer_types": words})
    )
    halves = ["sliding_attention"] * 8_000 + ["full_attention"] * 8_000
    turns = ["sliding_attention", "full_attention"] * 8_000
    for layers in (halves, turns):
        result = outcome(cg.models.from_config, {**fields, "layer_types": layers})
        assert cg.param_count(result) == cg.param_count(outcome(cg.models.from_config, fields))
    moe = {**file_of("Qwen3MoeForCausalLM"), "num_hidden_layers": 3_000}
    one = outcome(cg.models.from_config, {**moe, "mlp_only_layers": [0]})
    assert len(list(one.ops)) < 300
    squares = [i * i for i in range(54)]
    assert isinstance(outcome(cg.models.from_config, {**moe, "mlp_only_layers": squares}), cg.Graph)
    assert "runs of equal layers" in str(
        refused(cg.models.from_config, {**moe, "mlp_only_layers": sorted(draw.sample(range(3_000), 1_000))})
    )
    many = {**file_of("Qwen3ForCausalLM"), "num_hidden_layers": 10**9, "max_window_layers": 10**8}
    assert "1000000000 layers that do not repeat, expected at most 65536" in str(refused(cg.models.from_config, many))


@pytest.mark.parametrize("name", ["ResNetModel", "ConvNextModel", "SwinModel", "EfficientNetModel"])
def test_number_of_network_stages_is_limited(name):
    fields = file_of(name)
    long = {n: v * 1500 for n, v in fields.items() if isinstance(v, list) and n != "architectures"}
    text = str(refused(cg.models.from_config, {**fields, **long}))
    assert "numbers, expected at most 32" in text
    most = {n: (v * 32)[:32] for n, v in fields.items() if isinstance(v, list) and n != "architectures"}
    outcome(cg.models.from_config, {**fields, **most, "image_size": 2**40, "num_stages": 32})


# -- files -------------------------------------------------------------------------------------------------------------


def test_config_paths_without_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path, tmp_path / "config.json", "/dev/zero", "\0", "x" * 5000, "\ud800"):
        refused(cg.models.from_config, path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"hidden_size": 8, "hidden_size": 9}', "hidden_size twice in one object, expected it once"),
        ('{"a": {"b": 1, "b": 1}}', "b twice in one object"),
        ("[]", "[], expected an object"),
        ('"x"', "'x', expected an object"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "expected JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "expected JSON"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": 1' + "0" * 400 + "}", "hidden_size is an integer of"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": NaN}', "hidden_size is nan, expected a whole number"),
        ('{"architectures": ["EfficientNetModel"], "width_coefficient": NaN}', "width_coefficient is nan, expected a"),
        ('{"architectures": ["EfficientNetModel"], "width_coefficient": 1e999}', "width_coefficient is inf, expected"),
        ('{"architectures": ["SwinModel"], "mlp_ratio": 1e300}', "mlp_ratio is 1e+300, expected a number above 0"),
        ('{"architectures": ["SwinModel"], "mlp_ratio": 0}', "mlp_ratio is 0, expected a number above 0"),
    ],
)
def test_invalid_config_files_state_the_problem(tmp_path, content, text):
    (tmp_path / "config.json").write_text(content)
    assert text in str(refused(cg.models.from_config, tmp_path))


def test_config_field_names_are_strings():
    assert "field name 1, expected a string" in str(refused(cg.models.from_config, {1: 2}))
