"""Dense decoders: published sizes and configuration files, attention windows and patterns, caches, and refusals."""

import json

import pytest
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph import models

# Parameters of safetensors checkpoints, from the repository index ("total_size" over bytes per element) or from the
# hub; a tied head counts once.
PARAMETERS = {
    "mistral-7b": 7_241_732_096,  # 7.24B; 32*(2*4096*4096 + 2*4096*1024 + 3*4096*14336 + 2*4096) + 4096 + 2*32000*4096
    "mistral-7b-v0.3": 7_248_023_552,  # 768 more rows in embedding and head: 2*768*4096
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    # the published checkpoints with image encoder and projector have 4,300,079,472, 12,187,325,040 and 27,432,406,640
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "phi-3-mini": 3_821_079_552,
    "phi-3.5-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "falcon-7b": 6_921_720_704,
    "falcon-11b": 11_102_822_400,
    "falcon-40b": 41_303_293_952,  # files store the tied head twice: with 65024*8192 more it has 41.84B
    "falcon-180b": 178_557_088_768,  # 179.52B with the head stored twice
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
}
#: One or two models per family, for questions asked of all.
SEVERAL = [
    "mistral-7b", "qwen2.5-7b", "qwen3-0.6b", "gemma-2-2b", "gemma-3-1b", "phi-3-mini", "phi-4-mini", "falcon-7b",
    "falcon-40b", "olmo-2-7b",
]  # fmt: skip
POINT = {"B": 2, "S": 13}


@each("name", sorted(PARAMETERS))
def test_parameters_match_checkpoints(name):
    assert cg.param_count(load(name)) == PARAMETERS[name]


@each(
    ("name", "billions"),
    # As stated in Jiang et al. 2023; Qwen 2.5 (2412.15115) and 3 without embeddings; Gemma 2, table 2, and Gemma 3,
    # table 1, embeddings and the rest; Phi-3 (2404.14219); Almazrouei et al. 2023.
    [
        ("qwen2.5-0.5b", (0.49, 0.36)), ("qwen2.5-1.5b", (1.54, 1.31)), ("qwen2.5-3b", (3.09, 2.77)),
        ("qwen2.5-7b", (7.61, 6.53)), ("qwen2.5-14b", (14.7, 13.1)), ("qwen2.5-32b", (32.5, 31.0)),
        ("qwen2.5-72b", (72.7, 70.0)),
        ("gemma-2-2b", (None, 2.024)), ("gemma-2-9b", (None, 8.324)), ("gemma-2-27b", (None, 26.047)),
        ("gemma-3-1b", (None, 0.698)), ("gemma-3-4b", (None, 3.209)), ("gemma-3-12b", (None, 10.759)),
        ("gemma-3-27b", (None, 25.600)),
    ],
)  # fmt: skip
def test_parameters_match_papers(name, billions):
    g = load(name)
    tables = sum(t.name in ("tokens/table", "head/weight") for t in g.params) * g.defaults["V"] * g.defaults["D"]
    total, without = billions
    assert total is None or cg.param_count(g) == pytest.approx(total * 1e9, rel=0.009)
    assert cg.param_count(g) - tables == pytest.approx(without * 1e9, rel=0.009)


# -- configuration files ---------------------------------------------------------------------------------------------

LLAMA_LIKE = {"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-05, "use_cache": True}
#: Files as on the hub, except for token names.
FILES = {
    "gpt2-xl": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1600,
        "n_head": 25, "n_layer": 48, "n_positions": 1024, "output_past": True, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama-3-8b": {
        **LLAMA_LIKE, "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "mistral-7b": {
        **LLAMA_LIKE, "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "vocab_size": 32000,
    },
    "mistral-7b-v0.3": {
        **LLAMA_LIKE, "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32768,
    },
    "qwen2.5-7b": {
        **LLAMA_LIKE, "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_size": 3584,
        "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2",
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen3-8b": {
        **LLAMA_LIKE, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "model_type": "gemma2", "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, "torch_dtype": "float32", "use_cache": True, "vocab_size": 256000,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "use_cache": True, "vocab_size": 262144,
    },
    "phi-3-mini": {
        **LLAMA_LIKE, "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False, "attention_dropout": 0.0, "auto_map": {}, "embd_pdrop": 0.0, "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "resid_pdrop": 0.0, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
        "tie_word_embeddings": False, "vocab_size": 32064,
    },
    "phi-4-mini": {
        **LLAMA_LIKE, "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "embd_pdrop": 0.0, "full_attn_mod": 1, "hidden_size": 3072, "interpolate_factor": 1,
        "intermediate_size": 8192, "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0,
        "rope_scaling": {"long_factor": [1] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "falcon-7b": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "bias": False, "hidden_dropout": 0.0, "hidden_size": 4544,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True,
        "use_cache": True, "vocab_size": 65024,
    },
    "falcon-7b of the first files": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["RWForCausalLM"],
        "bias": False, "hidden_dropout": 0.0, "hidden_size": 4544, "layer_norm_epsilon": 1e-05,
        "model_type": "RefinedWebModel", "multi_query": True, "n_head": 71, "n_layer": 32, "parallel_attn": True,
        "vocab_size": 65024,
    },
    "falcon-40b of the first files": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["RWForCausalLM"],
        "bias": False, "hidden_dropout": 0.0, "hidden_size": 8192, "layer_norm_epsilon": 1e-05,
        "model_type": "RefinedWeb", "n_head": 128, "n_head_kv": 8, "n_layer": 60, "parallel_attn": True,
        "vocab_size": 65024,
    },
    "falcon-11b": {
        "activation": "gelu", "alibi": False, "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0,
        "bias": False, "ff_factor": 4, "ffn_hidden_size": 16384, "hidden_dropout": 0.0, "hidden_size": 4096,
        "max_position_embeddings": 8192, "model_type": "falcon", "multi_query": True,
        "new_decoder_architecture": True, "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8,
        "num_ln_in_parallel_attn": 1, "parallel_attn": True, "rope_scaling": None, "rope_theta": 500042.0,
        "tie_word_embeddings": False, "vocab_size": 65024,
    },
    "olmo-2-7b": {
        **LLAMA_LIKE, "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rope_scaling": None,
        "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FILES))
def test_published_files_match_presets(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 3], **FILES[name]}))
    g, preset = models.from_config(tmp_path, dtype="bf16"), load(name.split()[0])
    assert g.defaults == preset.defaults
    for question in (cg.param_count, cg.flops, cg.bytes_moved):
        assert question(g) == question(preset)


def changed(name, **fields):
    return {k: v for k, v in {**FILES[name], **fields}.items() if v is not KeyError}  # `KeyError` removes a field


def test_tied_head_configuration():
    # meta-llama/Llama-3.2-1B: 1,235,814,400 parameters
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    g = models.from_config(changed("llama-3-8b", **sizes, tie_word_embeddings=True, mlp_bias=False))
    assert cg.param_count(g) == 1_235_814_400


def test_bias_options_of_configurations():
    plain, biased = (models.from_config(changed("llama-3-8b", attention_bias=b, mlp_bias=b)) for b in (False, True))
    # queries and output projection 4096 each, keys and values 1024 each; gate and up 14336 each, down 4096
    assert cg.param_count(biased) - cg.param_count(plain) == 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    tied = models.from_config(FILES["gpt2-xl"])
    apart = models.from_config(changed("gpt2-xl", tie_word_embeddings=False, activation_function="relu"))
    assert cg.param_count(apart) - cg.param_count(tied) == 50257 * 1600
    # GELU's tanh form takes 9 FLOPs per element, ReLU 1
    assert cg.flops(tied, B=1, S=2) - cg.flops(apart, B=1, S=2) == 48 * 2 * 6400 * 8


def test_missing_fields_use_transformers_defaults():
    assert models.from_config(changed("mistral-7b", sliding_window=KeyError)).defaults["W"] == 4096
    assert "W" not in models.from_config(changed("mistral-7b", sliding_window=None)).defaults
    assert models.from_config(changed("mistral-7b", num_key_value_heads=None)).defaults["G"] == 32
    assert models.from_config(changed("qwen3-8b", head_dim=KeyError)).defaults["K"] == 128
    assert models.from_config(changed("olmo-2-7b", num_key_value_heads=KeyError)).defaults["G"] == 32
    assert models.from_config(changed("gemma-2-9b", sliding_window=KeyError)).defaults["W"] == 4096
    capped = models.from_config(changed("gemma-2-9b", attn_logit_softcapping=KeyError), attention="eager")
    free = models.from_config(changed("gemma-2-9b", attn_logit_softcapping=None), attention="eager")
    # divide, tanh, multiply for each score in 16 heads and 42 layers
    assert cg.flops(capped, **POINT) - cg.flops(free, **POINT) == 3 * 42 * 16 * 2 * 13 * 13
    with pytest.raises(cg.FormatError, match="num_key_value_heads is missing, expected an integer"):
        models.from_config(changed("mistral-7b", num_key_value_heads=KeyError))


def test_layer_patterns_are_read():
    words = {"l": "sliding_attention", "g": "full_attention"}

    def structure(pattern):
        fields = {"layer_types": [words[c] for c in pattern], "num_hidden_layers": len(pattern)}
        g = models.from_config(changed("gemma-3-1b", **fields))
        W, S = 512, 1000
        # positions that the layers keep; 2*G*K in bf16 each
        kept = cg.cache_bytes(cg.decode(g), B=1, S=S) / (2 * 256 * 2)
        assert kept == pattern.count("l") * W + pattern.count("g") * S
        return g

    assert cg.param_count(structure("lgl"), L=5) == cg.param_count(structure("lglgl"))
    for pattern in ("l", "g", "lllllgllll", "gggl", "lgg", "lglll"):
        g = structure(pattern)
        assert ("W" in g.defaults) == ("l" in pattern)
    first_full = models.from_config(changed("qwen2.5-7b", use_sliding_window=True, max_window_layers=21))
    kept = cg.cache_bytes(cg.decode(first_full), B=1, S=200_000) / (2 * 4 * 128 * 2)
    assert kept == 21 * 200_000 + 7 * 131_072


@each(
    ("name", "change", "error", "text"),
    [
        ("mistral-7b", {"quantization_config": {"bits": 4}}, cg.UnsupportedError, "quantization_config is"),
        ("mistral-7b", {"num_experts": 8}, cg.UnsupportedError, "num_experts is 8, expected a known field"),
        ("mistral-7b", {"hidden_size": KeyError}, cg.FormatError, "hidden_size is missing, expected an integer"),
        ("mistral-7b", {"hidden_size": 4096.0}, cg.FormatError, "hidden_size is 4096.0, expected an integer"),
        ("mistral-7b", {"sliding_window": 0}, cg.FormatError, "sliding_window is 0, expected an integer"),
        ("mistral-7b", {"sliding_window": True}, cg.FormatError, "sliding_window is True"),
        ("mistral-7b", {"hidden_act": "gelglu"}, cg.UnsupportedError, "hidden_act is 'gelglu', expected one of"),
        ("mistral-7b", {"layer_types": ["full_attention"] * 32}, cg.UnsupportedError, "layer_types is"),
        ("mistral-7b", {"architectures": ["MistralModel"]}, cg.UnsupportedError, "expected .*MistralForCausalLM"),
        ("llama-3-8b", {"tie_word_embeddings": 1}, cg.FormatError, "tie_word_embeddings is 1, expected true or false"),
        ("llama-3-8b", {"partial_rotary_factor": 0.5}, cg.UnsupportedError, "partial_rotary_factor is 0.5, expected 1"),
        ("gpt2-xl", {"reorder_and_upcast_attn": True}, cg.UnsupportedError, "reorder_and_upcast_attn is True"),
        ("gpt2-xl", {"add_cross_attention": True}, cg.UnsupportedError, "add_cross_attention is True"),
        ("qwen2.5-7b", {"use_mrope": True}, cg.UnsupportedError, "use_mrope is True, expected False"),
        ("qwen2.5-7b", {"layer_types": ["sliding_attention"] * 28}, cg.UnsupportedError, "layer_types is"),
        ("qwen3-8b", {"layer_types": ["full_attention"] * 35}, cg.FormatError,
         "35 entries, expected one for each of 36"),
        ("gemma-3-1b", {"layer_types": []}, cg.UnsupportedError, "layer_types is"),
        ("gemma-3-1b", {"sliding_window": None}, cg.FormatError, "sliding_window is missing"),
        ("gemma-3-1b", {"sliding_window_pattern": 0}, cg.FormatError, "sliding_window_pattern is 0"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, cg.UnsupportedError, "use_bidirectional_attention is"),
        ("gemma-3-1b", {"architectures": ["Gemma3ForConditionalGeneration"]}, cg.UnsupportedError, "Gemma3ForCausalLM"),
        ("gemma-2-9b", {"sliding_window_size": 4095}, cg.UnsupportedError, "sliding_window_size is 4095"),
        ("gemma-2-9b", {"final_logit_softcapping": "30"}, cg.FormatError, "final_logit_softcapping is '30'"),
        ("phi-3-mini", {"attention_bias": True}, cg.UnsupportedError, "attention_bias is True, expected False"),
        ("phi-4-mini", {"partial_rotary_factor": 1.5}, cg.FormatError, "partial_rotary_factor is 1.5, expected a"),
        ("phi-4-mini", {"partial_rotary_factor": 0}, cg.FormatError, "partial_rotary_factor is 0.0"),
        ("phi-4-mini", {"partial_rotary_factor": 0.001}, cg.FormatError, "partial_rotary_factor is 0.001, expected"),
        ("falcon-7b", {"alibi": True}, cg.UnsupportedError, "alibi is True, expected False"),
        ("falcon-7b", {"multi_query": False, "num_kv_heads": 8}, cg.UnsupportedError, "num_kv_heads is 8, expected 71"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, cg.UnsupportedError, "num_ln_in_parallel_attn is 2, expected 1"),
        ("falcon-11b", {"num_ln_in_parallel_attn": 3}, cg.UnsupportedError, "num_ln_in_parallel_attn is 3"),
        ("falcon-11b", {"parallel_attn": False}, cg.UnsupportedError, "parallel_attn is False, expected True"),
        ("olmo-2-7b", {"clip_qkv": 8.0}, cg.UnsupportedError, "clip_qkv is 8.0"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_named(name, change, error, text):
    with pytest.raises(error, match=text):
        models.from_config(changed(name, **change))


# -- size and structure options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), [(name, kernel) for name in SEVERAL for kernel in ("flash", "eager")])
def test_symbolic_leaves_all_sizes_open(name, attention):
    g, preset = load(name, symbolic=True, attention=attention), load(name, attention=attention)
    free = {s.name for s in cg.flops(g).free_symbols | cg.param_count(g).free_symbols}
    # eager attention computes the full square regardless of the window
    assert free | {"W"} == {*preset.defaults, "B", "S", "W"}
    assert g.defaults == {}
    for question in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert question(g, **preset.defaults, **POINT) == question(preset, **POINT)


@each(("name", "depths"), [("gemma-2-2b", (2, 4, 28)), ("gemma-3-1b", (8, 14, 32)),
                                              ("mistral-7b", (1, 2, 33))])  # fmt: skip
def test_depth_override_needs_whole_periods(name, depths):
    g = load(name)
    period, rest = {"gemma-2-2b": (2, 0), "gemma-3-1b": (6, 2), "mistral-7b": (1, 0)}[name]
    per_period = cg.param_count(g, L=2 * period + rest) - cg.param_count(g, L=period + rest)
    for depth in depths:
        wanted = cg.param_count(g) + (depth - g.defaults["L"]) // period * per_period
        assert cg.param_count(g, L=depth) == wanted
    if period > 1:
        with pytest.raises(cg.BindingError, match="count of 'layers'"):
            cg.param_count(g, L=period + rest + 1)


def test_pattern_peak_closed_form_matches_unrolled():
    g = load("gemma-3-1b", symbolic=True)
    small = {"D": 12, "H": 4, "G": 2, "K": 6, "F": 20, "V": 31, "W": 3, "B": 2, "S": 7}
    for change in ({}, {"V": 1009}, {"F": 997}, {"S": 41}):
        for depth in (8, 14, 26):
            sizes = {**small, **change, "L": depth}
            closed = cg.peak_memory(g)
            used = {s.name for s in closed.free_symbols}
            assert cg.evaluate(closed, **{k: v for k, v in sizes.items() if k in used}) == cg.timeline(g, **sizes).peak


def test_family_options_pass_through_load():
    D, H, G, K, F, V = (load("gemma-3-1b").defaults[n] for n in "DHGKFV")
    layer = 2 * D * H * K + 2 * D * G * K + 3 * D * F + 4 * D + 2 * K
    g = load("gemma-3-1b", kinds=("local", "local", "global"), rest=0)
    assert cg.param_count(g, L=3) == V * D + D + 3 * layer
    assert cg.param_count(load("qwen3-8b", tied=True)) == 8_190_735_360 - 151936 * 4096
    assert cg.matmul_flops(load("mistral-7b", window=False), B=1, S=8192) > cg.matmul_flops(
        load("mistral-7b"), B=1, S=8192
    )
    in_turn = load("falcon-7b", parallel=False, norms=2)
    assert cg.param_count(in_turn) - cg.param_count(load("falcon-7b")) == 32 * 2 * 4544


@each(
    ("name", "options", "text"),
    [
        ("gemma-3-1b", {"kinds": ("lokal",)}, "kinds 'lokal', expected one of local, global"),
        ("gemma-3-1b", {"kinds": "local"}, "layers: kinds is 'local', expected a list, each text"),
        ("gemma-3-1b", {"kinds": None}, "layers: kinds is None, expected a list, each text"),
        ("gemma-3-1b", {"kinds": (["local"],)}, "layers: kinds is .*, expected a list, each text"),
        ("gemma-3-1b", {"rest": 6}, "rest 6, expected an integer below 6"),
        ("qwen3-8b", {"qk_norm": "heads"}, "qk_norm='heads', expected 'none' or 'head' or 'all'"),
        ("qwen3-8b", {"norms": 2}, "norms=2, expected one of"),
        ("olmo-2-7b", {"bias": "yes"}, "bias='yes', expected True or False"),
        ("falcon-7b", {"norms": 3}, "norms=3, expected 1 or 2"),
        ("falcon-7b", {"parallel": False}, "norms=1 with parallel=False, expected 2"),
        ("mistral-7b", {"activation": "softmax"}, "softmax"),
        ("mistral-7b", {"activation": "add"}, "add"),
    ],
)
def test_invalid_options_are_refused(name, options, text):
    with pytest.raises(cg.CostGraphError, match=text):
        load(name, **options)


# -- windows and caches -----------------------------------------------------------------------------------------------


def pairs(S, W):
    """Count visible keys over all queries, one by one."""
    return sum(min(i + 1, W) for i in range(S))


@pytest.mark.parametrize("S", [1, 2, 511, 512, 513, 1024, 5000])
def test_window_includes_own_position(S):
    g = load("gemma-3-1b")
    projections = cg.matmul_flops(g, B=1, S=S, count="full") - 26 * 4 * 4 * 256 * S * S
    # 26 layers: 4 periods with 5 local and 1 global, and 2 local ones
    attended = 4 * 4 * 256 * (22 * pairs(S, 512) + 4 * pairs(S, S))
    assert cg.matmul_flops(g, B=1, S=S) == projections + attended


@pytest.mark.parametrize(
    ("name", "bytes_a_token"),
    # 2 tensors with G*K 2-byte elements per layer
    [("mistral-7b", 131_072), ("qwen2.5-7b", 57_344), ("qwen3-8b", 147_456), ("phi-3-mini", 393_216),
     ("falcon-7b", 8_192), ("falcon-40b", 122_880), ("olmo-2-7b", 524_288), ("gemma-2-2b", 106_496)],
)  # fmt: skip
def test_cache_bytes(name, bytes_a_token):
    g = cg.decode(load(name))
    assert cg.cache_bytes(g, B=1, S=100) == 100 * bytes_a_token
    sizes = load(name).defaults
    K = sizes.get("K") or sizes["D"] // sizes["H"]
    assert bytes_a_token == 2 * sizes["L"] * sizes["G"] * K * 2


def test_window_bounds_cache():
    assert cg.cache_bytes(cg.decode(load("mistral-7b")), B=1, S=32_768) == 4096 * 131_072
    assert cg.cache_bytes(cg.decode(load("mistral-7b-v0.3")), B=1, S=32_768) == 32_768 * 131_072
    # in Gemma 2, 13 of 26 layers keep 4096 positions
    assert cg.cache_bytes(cg.decode(load("gemma-2-2b")), B=1, S=8192) == 106_496 // 2 * (4096 + 8192)


@pytest.mark.parametrize("name", SEVERAL)
def test_full_length_step_equals_forward_pass(name):
    g = load(name)
    assert cg.matmul_flops(cg.prefill(g), **POINT) == cg.matmul_flops(g, **POINT)
    assert cg.matmul_flops(cg.decode(g, 13), **POINT) == cg.matmul_flops(g, **POINT)
    last = cg.prefill(g, logits="last")
    head = 2 * g.defaults["D"] * g.defaults["V"]
    assert cg.matmul_flops(g, **POINT) - cg.matmul_flops(last, **POINT) == 2 * 12 * head


@pytest.mark.parametrize("name", SEVERAL)
def test_reports_are_consistent(name):
    g = load(name)
    assert name in str(cg.report(g, "h100-sxm", **POINT))


@pytest.mark.parametrize("name", SEVERAL)
def test_training_step_has_three_times_forward_matmuls(name):
    g = load(name)
    step = training_step(load(name, attention="eager"))
    # gradients of operands and of weights: one matmul each per forward matmul
    assert cg.matmul_flops(step, **POINT, count="full") == 3 * cg.matmul_flops(g, **POINT, count="full")
    assert cg.peak_memory(step, **POINT) > 4 * cg.param_bytes(g)
