"""`from_config` matches the module that transformers builds from any mutated config, or raises an error.

A plain run changes a fixed sample of fields per config; COSTGRAPH_EXAMPLES multiplies it.
"""

import dataclasses
import random
from contextlib import suppress

import pytest
from budget import examples, multiplier
from config_files import FILES
from config_mutations import (
    LARGEST_RUN,
    MISSING,
    RECURRENT,
    RefusedError,
    changed,
    file_of,
    flops_of,
    graph_of,
    module_of,
    mutations,
    own_flops,
    parameters_of,
)
from lazy import lazy_import

import costgraph as cg
from costgraph.models.config import (
    ALIASES,
    DEFAULTS,
    NO_COST,
)

transformers = lazy_import("transformers")

#: Fields that the config classes validate more strictly than their modules need.
STRICTER = {
    "hidden_size": "a multiple of the heads, also where heads have a size of their own",
    "num_attention_heads": "the same",
    "depth_coefficient": "a number with a point",
    "width_coefficient": "the same",
    "squeeze_expansion_ratio": "the same",
    "mlp_ratio": "the same",
}
#: Fields where transformers' configs, modules or checkpoints disagree: the value accepted here although transformers
#: builds no module or another one, and the reason.
INCONSISTENT = {
    ("T5ForConditionalGeneration", "tie_word_embeddings"): "its modules are always tied, and untied when a checkpoint "
    "with a head of its own is loaded; the parameters are those of the checkpoint",
}


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.logging.set_verbosity_error()


def built(fields, *, run):
    """Build the module of a config: with data if it will run, on the meta device if its first values are refused."""
    if run:
        with suppress(RefusedError):
            return module_of(fields, "cpu")
    return module_of(fields)


def compare_with_transformers(name, fields, *changes):
    """Return "refused" or "equal", or None if transformers builds no module; fail where the two differ."""
    given = changed(fields, *changes)
    try:
        graph = graph_of(given)
    except cg.CostGraphError:
        return "refused"
    own = int(cg.param_count(graph))  # queries never fail on an accepted config
    try:
        module = built(given, run=own <= LARGEST_RUN)
        theirs = parameters_of(module)
        assert own == theirs, f"{name} with {changes}: {own} parameters, in transformers {theirs}"
        if theirs > LARGEST_RUN or name.startswith(RECURRENT):
            return "equal parameters"
        try:
            own = own_flops(graph, given)
        except cg.CostGraphError:
            return "refused"  # sizes bound by a FLOP query, such as more positions than the model has
        theirs = flops_of(module, given)
    except RefusedError:
        return "no module"
    assert own == theirs, f"{name} with {changes}: {own} FLOPs, in transformers {theirs}"
    return "equal"


def known(name, *changes):
    return any((name.split()[0], field) in INCONSISTENT for field, _ in changes)


#: Layer counts, tested with none, one, and all layers.
COUNTS = ("n_layer", "num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "first_k_dense_replace")


#: One architecture per kind of config: the heads do not depend on the layer count.
COUNTED = {repr(given): name for name, given in reversed(FILES.items()) if not given[1].keys().isdisjoint(COUNTS)}


@pytest.mark.parametrize("name", sorted(COUNTED.values()))
def test_every_count_of_layers(name):
    """Layer counts of zero, one, some, all, and more than the model has."""
    fields = file_of(name, whole=False)
    for field in fields.keys() & set(COUNTS):
        for count in (0, 2, 4, 6) if field == "first_k_dense_replace" else (1, 2, 6):
            if count != fields[field]:  # as in the next tests
                found = compare_with_transformers(name, fields, (field, count))
                assert found.startswith("equal") or name.startswith("xLSTM"), (field, count, found)


# -- the tables ------------------------------------------------------------------------------------------------------


def as_plain_data(value):
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("kind", sorted(set(DEFAULTS) - {"refined_web"}))
def test_config_defaults_equal_those_of_transformers(kind):
    fields = {f.name: f for f in dataclasses.fields(transformers.CONFIG_MAPPING[kind])}
    theirs = {
        name: as_plain_data(f.default if f.default is not dataclasses.MISSING else f.default_factory())
        for name, f in fields.items()
        if name in DEFAULTS[kind]
    }
    assert theirs == DEFAULTS[kind]
    assert all(type(theirs[name]) is type(value) for name, value in DEFAULTS[kind].items())


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in FILES.values()}))
def test_config_aliases_equal_those_of_transformers(kind):
    # an alias may map either way: the table's value for the field must be the class's value
    theirs = dict(transformers.CONFIG_MAPPING[kind].attribute_map)
    declared = {f.name for f in dataclasses.fields(transformers.CONFIG_MAPPING[kind])} | {"num_layers"}
    theirs = {(a, b) if b in declared else (b, a) for a, b in theirs.items()}
    theirs |= {("n_embed", "hidden_size")} if kind == "falcon" else set()  # set in its __post_init__
    # layers that the module lacks, and an alias that is resolved too late
    theirs -= {("num_nextn_predict_layers", "num_mtp_layers")}
    theirs -= {("num_hidden_layers", "num_layers")} if kind == "t5" else set()
    assert set(ALIASES.get(kind, {}).items()) == theirs


def test_every_model_type_has_defaults():
    kinds = {kind for family in cg.models.registry.FAMILIES for kind in family.architectures.values()}
    assert kinds | {"clip_text_model", "clip_vision_model"} == set(DEFAULTS)
    assert {name.split()[0] for name in FILES} | {"RWForCausalLM"} == {
        name for family in cg.models.registry.FAMILIES for name in family.architectures
    }


# -- small configs -----------------------------------------------------------------------------------------------------


#: The first architecture for each kind of config. Others differ by their head, which `test_a_changed_file` covers.
KINDS = {repr(given): name for name, given in reversed(FILES.items())}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["lean", "whole"])
@pytest.mark.parametrize(
    "name", [n if n in KINDS.values() else pytest.param(n, marks=pytest.mark.long) for n in sorted(FILES)]
)
def test_a_file_as_it_is(name, whole):
    fields = file_of(name, whole=whole)
    assert compare_with_transformers(name, fields) in ("equal", "equal parameters")
    assert cg.param_count(graph_of(fields, "flash")) == cg.param_count(graph_of(fields))


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_changed_file(name):
    """Half of the mutations change cost-related fields; in the heavy run a quarter change two fields."""
    draw = random.Random(f"{name} {multiplier()}")
    every = [(whole, change) for whole in (False, True) for change in mutations(name, whole=whole)]
    weighty = [(whole, change) for whole, change in every if change[0] not in NO_COST and not change[0].endswith("_id")]
    found = []
    for i in range(examples(2)):
        whole, change = draw.choice(weighty if i % 4 else every)
        more = [draw.choice(weighty)[1]] if multiplier() > 1 and i % 4 == 3 else []
        fields = file_of(name, whole=whole)
        if known(name, change, *more):
            continue
        found.append(compare_with_transformers(name, fields, change, *more))
        if found[-1] == "no module" and not more and change[0] not in STRICTER:
            # no reference module exists, so the field must not change the result
            as_it_was = {k: v for k, v in fields.items() if k != change[0]} | {
                k: v for k, v in file_of(name, whole=True).items() if k == change[0]
            }
            assert cg.param_count(graph_of(changed(fields, change))) == cg.param_count(graph_of(as_it_was)), change
    print({outcome: found.count(outcome) for outcome in sorted(set(found))})


# -- regressions -------------------------------------------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"
SEVEN = "FalconForCausalLM 7b"

EQUAL = [
    ("MixtralForCausalLM", {"num_local_experts": MISSING, "num_experts": 3}),
    ("Qwen3MoeForCausalLM", {"num_experts": MISSING, "num_local_experts": 3}),
    ("GptOssForCausalLM", {"num_local_experts": MISSING, "num_experts": 3}),
    ("DeepseekV2ForCausalLM", {"n_routed_experts": MISSING, "num_experts": 9}),
    ("DeepseekV3ForCausalLM", {"n_routed_experts": MISSING, "num_local_experts": 9}),
    ("DeepseekV3ForCausalLM", {"first_k_dense_replace": MISSING}),
    ("DeepseekV2ForCausalLM", {"first_k_dense_replace": MISSING}),
    ("GptOssForCausalLM", {"num_key_value_heads": MISSING, "num_attention_heads": 16}),
    ("FalconForCausalLM", {"new_decoder_architecture": None, "num_kv_heads": MISSING}),
    ("FalconForCausalLM", {"new_decoder_architecture": False}),
    (SEVEN, {"multi_query": None}),
    (SEVEN, {"multi_query": False}),
    (SEVEN, {"parallel_attn": None}),
    (SEVEN, {"parallel_attn": False}),
    (SEVEN, {"bias": None}),
    (SEVEN, {"num_kv_heads": 2}),
    ("WhisperForConditionalGeneration", {"encoder_layers": MISSING, "num_hidden_layers": 4}),
    ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-silu"}),
    ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu", "is_gated_act": True}),
    ("T5ForConditionalGeneration", {"d_model": MISSING, "hidden_size": 11}),
    ("GPT2LMHeadModel", {"n_embd": MISSING, "hidden_size": 15}),
    ("SwinModel", {"num_heads": MISSING, "num_attention_heads": [1, 3]}),
    ("ViTForImageClassification", {"id2label": {"0": "a", "1": "b", "2": "c"}}),
    ("xLSTMForCausalLM", {"hidden_size": MISSING, "embedding_dim": MISSING}),
    ("Gemma3ForCausalLM", {"sliding_window_pattern": 2, "num_hidden_layers": 5}),
    ("Qwen3ForCausalLM", {"max_window_layers": 2, "num_hidden_layers": 4}),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_hidden_layers": 5}),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [7], "decoder_sparse_step": 9}),
    ("Phi3ForCausalLM", {"rope_scaling": None, "partial_rotary_factor": 0.7}),
]
REFUSED = [
    ("MixtralForCausalLM", {"num_experts": 3}, "num_local_experts is 5 and num_experts is 3, expected one value"),
    ("Qwen3MoeForCausalLM", {"num_local_experts": 4}, "num_experts is 5 and num_local_experts is 4"),
    ("GptOssForCausalLM", {"num_experts": 4}, "num_local_experts is 5 and num_experts is 4"),
    ("DeepseekV2ForCausalLM", {"num_experts": 4}, "n_routed_experts is 6 and num_experts is 4"),
    ("DeepseekV3ForCausalLM", {"num_local_experts": 4}, "n_routed_experts is 6 and num_local_experts is 4"),
    ("DeepseekV3ForCausalLM", {"num_experts": 4}, "num_experts is 4, expected a known field"),
    ("DeepseekV3ForCausalLM", {"first_k_dense_replace": None}, "first_k_dense_replace is missing"),
    ("GptOssForCausalLM", {"experts_per_token": 3}, "experts_per_token is 3, expected 2"),
    ("Qwen2MoeForCausalLM", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, "mlp_layer_types is"),
    ("FalconForCausalLM", {"parallel_attn": None}, "parallel_attn is None, expected True"),
    ("FalconForCausalLM", {"n_head": 3}, "n_head is 3, expected a known field"),
    ("WhisperForConditionalGeneration", {"num_hidden_layers": 2}, "encoder_layers is 3 and num_hidden_layers is 2"),
    ("T5ForConditionalGeneration", {"num_layers": MISSING, "num_hidden_layers": 3}, "num_layers is missing"),
    ("T5ForConditionalGeneration", {"is_gated_act": True}, "is_gated_act is True, expected False"),
    ("T5ForConditionalGeneration", {"dense_act_fn": "silu"}, "dense_act_fn is 'silu', expected 'relu'"),
    ("EfficientNetModel", {"depth_coefficient": 0.0}, "depth_coefficient is 0.0, expected a number above 0"),
    ("EfficientNetModel", {"depth_coefficient": -1.0}, "depth_coefficient is -1.0, expected a number above 0"),
    ("EfficientNetModel", {"squeeze_expansion_ratio": 0.0}, "squeeze_expansion_ratio is 0.0, expected a number above"),
    ("EfficientNetForImageClassification", {"hidden_dim": MISSING}, "hidden_dim is 2560, expected 1280"),
    ("ViTForImageClassification", {"id2label": {}}, "id2label is {}, expected a non-empty object from"),
    ("BertForTokenClassification", {"id2label": {"0": "a", "00": "b"}}, "id2label is {'0': 'a', '00': 'b'}"),
    ("ViTForImageClassification", {"id2label": {"0": "a"}, "num_labels": 3}, "num_labels is 3, expected 1"),
    ("xLSTMForCausalLM", {"hidden_size": MISSING}, "embedding_dim is 64, expected 4096"),
    ("LlamaForCausalLM", {"model_type": "mixtral"}, "model_type is 'mixtral', expected 'llama', the model type"),
    ("LlamaForCausalLM", {"attention_bias": None}, "attention_bias is missing, expected true or false"),
    ("DeepseekV3ForCausalLM", {"qk_head_dim": 12}, "qk_head_dim is 12, expected 10"),
    ("DeepseekV2ForCausalLM", {"num_key_value_heads": 2}, "num_key_value_heads is 2, expected 4"),
    ("MobileNetV2Model", {"expand_ratio": 2.5}, "expand_ratio 2.5 of"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor is 0, expected a"),
    ("LlamaForCausalLM", {"rope_parameters": 3}, "rope_parameters is 3, expected an object"),
]


@pytest.mark.parametrize(("name", "changes"), EQUAL, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_edge_cases_match_transformers(name, changes):
    assert compare_with_transformers(name, file_of(name, whole=False), *changes.items()) in (
        "equal",
        "equal parameters",
    )


@pytest.mark.parametrize(("name", "changes", "text"), REFUSED, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_invalid_configs_are_refused(name, changes, text):
    with pytest.raises(cg.CostGraphError) as caught:
        cg.models.from_config(changed(file_of(name, whole=False), *changes.items()))
    assert text in str(caught.value)


def test_untied_t5_matches_its_checkpoints():
    """The only intended deviation from a fresh transformers module."""
    fields = file_of("T5ForConditionalGeneration", whole=False)
    apart = {**fields, "tie_word_embeddings": False}
    module, other = module_of(fields, "cpu"), module_of(apart, "cpu")
    graph, separate = graph_of(fields), graph_of(apart)
    assert parameters_of(other) == parameters_of(module) == cg.param_count(graph)
    assert cg.param_count(separate) == cg.param_count(graph) + fields["vocab_size"] * fields["d_model"]
    assert flops_of(other, apart) == own_flops(separate, apart) == own_flops(graph, fields)
