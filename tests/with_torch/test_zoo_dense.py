"""Decoders without experts against small transformers modules: FLOPs, parameters, masks, steps."""

from functools import cache

import pytest
import torch
from lazy import lazy_import
from recorded_counts import counts_of
from shared import load
from torch.utils.flop_counter import FlopCounterMode
from zoo_dense import CONFIGS, SIZES, config, inputs, module

import costgraph as cg

transformers = lazy_import("transformers")

B, S = SIZES["B"], SIZES["S"]
GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, FALCON, OLMO2 = CONFIGS
#: Two query heads share a KV head; H*K differs from D where a config has a field for it.
SMALL = {
    "hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 23,
    "num_hidden_layers": 3, "vocab_size": 29,
}  # fmt: skip
WIDE = {**SMALL, "hidden_size": 24}  # heads with 4 elements
HEAD = {"head_dim": 10}
GPT2_SMALL = {"n_embd": 15, "n_head": 3, "n_layer": 3, "n_positions": 17, "vocab_size": 29}
FALCON_SMALL = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 3, "vocab_size": 29}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
WINDOW = {"sliding_window": 5}  # below S
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.6}
LOCAL, GLOBAL = "sliding_attention", "full_attention"

VARIANTS = {
    "gpt2": (GPT2, GPT2_SMALL),
    "gpt2 inner untied": (GPT2, {**GPT2_SMALL, "n_inner": 22, "activation_function": "relu", **UNTIED}),
    "llama": (LLAMA, WIDE),
    "llama heads": (LLAMA, {**SMALL, **HEAD, **TIED}),
    "llama all heads": (LLAMA, {**WIDE, "num_key_value_heads": None}),
    "llama biases": (LLAMA, {**WIDE, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "mistral": (MISTRAL, {**WIDE, **WINDOW}),
    "mistral full": (MISTRAL, {**SMALL, **HEAD, "sliding_window": None, **TIED}),
    "mistral long": (MISTRAL, {**WIDE, "sliding_window": 1009, "num_key_value_heads": 6}),
    "qwen2": (QWEN2, WIDE),
    "qwen2 tied": (QWEN2, {**WIDE, **TIED, "num_key_value_heads": 1}),
    "qwen2 window": (QWEN2, {**WIDE, **WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen2 all windows": (QWEN2, {**WIDE, **WINDOW, "use_sliding_window": True, "max_window_layers": 0}),
    "qwen3": (QWEN3, {**SMALL, **HEAD}),
    "qwen3 biases": (QWEN3, {**SMALL, **HEAD, "attention_bias": True, **TIED}),
    "qwen3 pattern": (
        QWEN3, {**SMALL, **HEAD, **WINDOW, "use_sliding_window": True, "layer_types": [LOCAL, GLOBAL, LOCAL]}
    ),
    "gemma2": (GEMMA2, {**SMALL, **HEAD, **WINDOW, "num_hidden_layers": 4}),
    "gemma2 odd": (GEMMA2, {**SMALL, **HEAD, **WINDOW, "attention_bias": True, **UNTIED}),
    "gemma2 uncapped": (
        GEMMA2,
        {**SMALL, **HEAD, **WINDOW, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2 pattern": (GEMMA2, {**SMALL, **HEAD, **WINDOW, "layer_types": [GLOBAL, GLOBAL, LOCAL]}),
    "gemma2 global": (GEMMA2, {**SMALL, **HEAD, "layer_types": [GLOBAL] * 3}),
    "gemma3": (GEMMA3, {**SMALL, **HEAD, **WINDOW, "num_hidden_layers": 6}),
    "gemma3 rest": (GEMMA3, {**SMALL, **HEAD, **WINDOW, "num_hidden_layers": 8}),
    "gemma3 local": (GEMMA3, {**SMALL, **HEAD, **WINDOW, "num_hidden_layers": 5}),
    "gemma3 pairs": (GEMMA3, {**SMALL, **HEAD, **WINDOW, "num_hidden_layers": 5, "sliding_window_pattern": 2}),
    "gemma3 capped": (
        GEMMA3, {**SMALL, **HEAD, **WINDOW, "attn_logit_softcapping": 30.0, "final_logit_softcapping": 20.0}
    ),
    "phi3": (PHI3, WIDE),
    "phi3 all heads": (PHI3, {**WIDE, **WINDOW, "num_key_value_heads": None}),
    "phi3 partial": (PHI3, {**WIDE, "hidden_size": 60, "rope_parameters": PARTIAL, **TIED}),  # 6 elements out of 10
    "falcon": (FALCON, FALCON_SMALL),
    "falcon biases": (FALCON, {**FALCON_SMALL, "bias": True, "ffn_hidden_size": 31, **UNTIED}),
    "falcon many": (FALCON, {**FALCON_SMALL, "multi_query": False}),
    "falcon in turn": (FALCON, {**FALCON_SMALL, "parallel_attn": False, "activation": "relu"}),
    "falcon new": (FALCON, {**FALCON_SMALL, **NEW}),
    "falcon new biases": (FALCON, {**FALCON_SMALL, **NEW, "bias": True}),
    "falcon new one norm": (FALCON, {**FALCON_SMALL, **NEW, "num_ln_in_parallel_attn": 1}),
    "olmo2": (OLMO2, WIDE),
    "olmo2 heads": (OLMO2, {**SMALL, "head_dim": 10, "attention_bias": True, **TIED}),
    "olmo2 all heads": (OLMO2, {**WIDE, "num_key_value_heads": None}),
}  # fmt: skip


#: One or two of each family, for tests slower than counting.
SEVERAL = [
    "gpt2", "llama biases", "mistral", "qwen2 window", "gemma2 odd", "gemma3 pairs", "phi3 partial",
    "falcon new biases", "olmo2 heads",
]  # fmt: skip


def build_module(name):
    classes, fields = VARIANTS[name]
    return module(classes, fields), config(classes, **fields).to_dict()


@cache
def graph_of(name, attention="flash"):
    classes, fields = VARIANTS[name]
    return cg.models.from_config(config(classes, **fields).to_dict(), attention=attention)


def counted(name):
    """Return torch's counts of a module: parameters and matmul FLOPs."""
    reference, _ = build_module(name)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        reference.eval()(*inputs())
    return sum(p.numel() for p in reference.parameters()), counter.get_total_flops()


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_small_dense_config_counts_equal_the_module(name):
    g = graph_of(name, "eager")
    counts = cg.param_count(g), cg.matmul_flops(g, count="full", **SIZES)
    assert counts == counts_of("dense", name, counted, live=name in SEVERAL)


@pytest.mark.long
def test_dense_module_counts_equal_the_record():
    for name in VARIANTS:
        assert counted(name) == counts_of("dense", name, counted, live=False), name


@pytest.mark.parametrize("name", SEVERAL)
def test_flash_and_eager_attention_count_the_same(name):
    flash, eager = graph_of(name), graph_of(name, "eager")
    assert cg.matmul_flops(flash, count="full", **SIZES) == cg.matmul_flops(eager, count="full", **SIZES)
    assert cg.param_count(flash) == cg.param_count(eager)


@pytest.mark.parametrize("name", ["mistral", "qwen2 window", "gemma2 odd", "gemma3 rest", "phi3 partial", "falcon new"])
def test_saved_dense_config_loads_the_same_graph(name, tmp_path):
    """transformers omits the fields that have the default of their class."""
    classes, fields = VARIANTS[name]
    config(classes, **fields).save_pretrained(tmp_path)
    g, same = cg.models.from_config(tmp_path), graph_of(name)
    assert g.defaults == same.defaults
    assert cg.flops(g) == cg.flops(same)
    assert cg.param_count(g) == cg.param_count(same)


# -- training steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEVERAL)
def test_dense_step_matmul_flops_equal_autograd(name):
    torch.manual_seed(0)
    reference, _ = build_module(name)
    with FlopCounterMode(display=False) as counter:
        logits = reference.train()(*inputs()).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(B * S, dtype=torch.int64)).backward()
    step = cg.training_step(graph_of(name, "eager"), optimizer=cg.SGD())
    assert cg.matmul_flops(step, count="full", **SIZES) == counter.get_total_flops()
    assert isinstance(cg.peak_memory(step, **SIZES), int)


# -- pairs outside the window ------------------------------------------------------------------------------------------

MASKED = {"mistral": 3, "mistral full": 0, "qwen2 window": 1, "qwen3 pattern": 2, "gemma2 odd": 2, "gemma3 rest": 7,
          "gemma3 local": 5, "phi3 all heads": 3, "gemma2 global": 0}  # fmt: skip


@pytest.mark.parametrize("name", sorted(MASKED))
def test_flash_flops_match_the_modules_masks(name):
    reference, _ = build_module(name)
    shown = []

    def seen(layer, arguments, keywords):
        mask = keywords["attention_mask"]
        assert mask.shape[1:] == (1, S, S)
        shown.append(int((mask[0] == 0).sum()))

    for layer in reference.model.layers:
        layer.self_attn.register_forward_pre_hook(seen, with_kwargs=True)
    with torch.no_grad():
        reference.eval()(*inputs())
    rows = reference.model.layers[0].self_attn
    sizes = reference.config
    H, K = sizes.num_attention_heads, rows.head_dim
    g = graph_of(name)
    # 2 matmuls, 2 FLOPs per element of a head, for each visible pair
    per_pair = 2 * 2 * H * K
    hidden = [S * S - n for n in shown]
    full = cg.matmul_flops(g, count="full", **SIZES)
    assert cg.matmul_flops(g, **SIZES) == full - B * per_pair * sum(hidden)
    triangle, band = S * (S - 1) // 2, S * S - (5 * S - 10)  # 5 keys, fewer for the first 4 queries: 4 + 3 + 2 + 1
    assert sorted(set(hidden)) == sorted({band if i < MASKED[name] else triangle for i in range(len(hidden))})
    assert hidden.count(band) == MASKED[name]


# -- full size: test_zoo_page.py compares each preset with its module --------------------------------------------------

#: One preset for each set of config fields: the others differ only in numbers.
WRITTEN = {(c, *sorted(fields)): (c, name) for c, published in CONFIGS.items() for name, fields in published.items()}


@pytest.mark.parametrize(("classes", "name"), sorted(WRITTEN.values()))
def test_dense_preset_equals_its_published_config(classes, name):
    g, preset = cg.models.from_config(config(classes, **CONFIGS[classes][name]).to_dict()), load(name)
    assert g.defaults == preset.defaults
    assert cg.param_count(g) == cg.param_count(preset)
    assert cg.flops(g) == cg.flops(preset)


def test_gemma_3_text_model_is_the_published_one_without_vision():
    # google/gemma-3-4b-pt has 4,300,079,472 parameters, including its image encoder and projector
    with torch.device("meta"):
        text = config(GEMMA3, **CONFIGS[GEMMA3]["gemma-3-4b"])
        vision = transformers.SiglipVisionConfig(
            hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, image_size=896,
            patch_size=14, vision_use_head=False,
        )  # fmt: skip
        whole = transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(text_config=text, vision_config=vision)
        )
    others = sum(p.numel() for n, p in whole.named_parameters() if "vision_tower" in n or "projector" in n)
    assert cg.param_count(load("gemma-3-4b")) == 4_300_079_472 - others
