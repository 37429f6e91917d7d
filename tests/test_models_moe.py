"""Models with experts and latent attention: published numbers, configurations, and inference steps."""

import pytest
from each import each
from shared import load

import costgraph as cg

#: Total and active parameters of each preset, counting embedding and head once each.
PUBLISHED = {
    # model card of mistralai/Mixtral-8x7B-v0.1: 46.7B and 12.9B; 8x22B: 141B and 39B
    "mixtral-8x7b": (46.7, 12.9, 0),
    "mixtral-8x22b": (141, 39, 0),
    # arXiv 2407.10671, table 1: 57B-A14B; Qwen/Qwen1.5-MoE-A2.7B: 14.3B and 2.7B
    "qwen1.5-moe-a2.7b": (14.3, 2.7, 0),
    "qwen2-57b-a14b": (57, 14, 0),
    # model cards of Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B: 30.5B and 3.3B, 235B and 22B
    "qwen3-30b-a3b": (30.5, 3.35, 0),
    "qwen3-235b-a22b": (235, 22, 0),
    # arXiv 2508.10925, table 1: 20.91B and 3.61B, 116.83B and 5.13B; its active counts exclude the embedding
    "gpt-oss-20b": (20.91, 3.61, 201088 * 2880),
    "gpt-oss-120b": (116.83, 5.13, 201088 * 2880),
    # arXiv 2405.04434: 236B and 21B; V2-Lite 15.7B and 2.4B, its active counts truncated and without the embedding
    "deepseek-v2": (236, 21, 0),
    "deepseek-v2-lite": (15.7, 2.4, 102400 * 2048),
    # arXiv 2412.19437: 671B and 37B; the active count again excludes the embedding
    "deepseek-v3": (671, 37, 129280 * 7168),
}


def digits(number):
    """Return half a unit of the last printed digit."""
    text = str(number)
    return 0.5 * 10.0 ** -(len(text.partition(".")[2]))


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_match_published_counts(name):
    g, (whole, active, without) = load(name), PUBLISHED[name]
    assert cg.param_count(g) / 1e9 == pytest.approx(whole, abs=digits(whole))
    met = (cg.param_count(g, active=True) - without) / 1e9
    if name == "deepseek-v2-lite":
        assert int(10 * met) / 10 == active
    else:
        assert met == pytest.approx(active, abs=digits(active))


def test_active_parameters_are_symbolic():
    g = load("mixtral-8x7b", symbolic=True)
    D, E, k, Fe, L = cg.dims("D E k Fe L")
    idle = cg.param_count(g) - cg.param_count(g, active=True)
    assert (idle - 3 * D * Fe * (E - k) * L).expand() == 0


# -- caches ----------------------------------------------------------------------------------------------------------

#: Cached elements per token: 2*G*K per layer, or the latent vector and the rotary key.
KEPT = {
    "mixtral-8x7b": 32 * 2 * 8 * 128,
    "qwen3-30b-a3b": 48 * 2 * 4 * 128,
    "deepseek-v2": 60 * (512 + 64),
    "deepseek-v2-lite": 27 * (512 + 64),
    "deepseek-v3": 61 * (512 + 64),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [*((n, {}) for n in sorted(KEPT)), *((n, {"absorbed": True}) for n in ("deepseek-v2-lite", "deepseek-v3"))],
)
def test_cache_bytes_per_token(name, options):
    g = load(name, **options)
    for step in (cg.prefill(g), cg.decode(g)):
        assert cg.cache_bytes(step, B=1, S=1) == 2 * KEPT[name]  # bf16
        assert cg.cache_bytes(step, B=3, S=1000) == 3000 * 2 * KEPT[name]


def test_window_bounds_cache():
    step = cg.decode(load("gpt-oss-20b"))
    # 12 layers keep all positions, 12 the last 128: 2 times 8 heads with 64 elements each
    for length in (100, 128, 5000):
        assert cg.cache_bytes(step, B=1, S=length) == 2 * 2 * 8 * 64 * 12 * (length + min(length, 128))


# -- latent attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3"])
def test_absorption_keeps_parameters_and_changes_matmuls(name):
    plain, absorbed = load(name, attention="eager"), load(name, attention="eager", absorbed=True)
    assert cg.param_count(plain) == cg.param_count(absorbed)
    n = plain.defaults
    B, S, T = 3, 1, 4096  # one token in each of 3 sequences, with 4096 positions
    H, C, Kn, Kr, Kv = (n[k] for k in ("H", "C", "Kn", "Kr", "Kv"))
    # keys and values for all positions, and matmuls by head; or two small matmuls for the token, and matmuls with
    # latents
    made = 2 * B * T * C * H * (Kn + Kv) + 2 * B * H * S * T * (Kn + Kr + Kv)
    small = 2 * B * S * H * C * (Kn + Kv) + 2 * B * H * S * T * (C + Kr + C)
    steps = [cg.matmul_flops(cg.decode(g), B=B, S=T) for g in (plain, absorbed)]
    assert steps[0] - steps[1] == n["L"] * (made - small)


def test_absorbed_attention_reads_cache_once():
    g = load("deepseek-v3", absorbed=True, symbolic=True)
    read = sum(
        r.amount.expr
        for r in cg.costs(cg.decode(g)).filter(kind="matmul")
        if r.direction == "read" and r.op == "layers/attention"
    )
    L, Ld, B, H, S, C, Kr = cg.dims("L Ld B H S C Kr")
    # queries with C + Kr elements per head, and C + Kr elements per position: the values are part of the keys
    assert (read - 2 * (L - Ld) * B * (C + Kr) * (H + S)).expand() == 0


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_routing_assumption_is_a_load_option(name):
    sizes = {"B": 2, "S": 3}
    balanced, expected = (load(name, routing=r) for r in ("balanced", "expected"))
    assert cg.matmul_flops(balanced, **sizes) == cg.matmul_flops(expected, **sizes)
    assert cg.bytes_moved(expected, fused=True, **sizes) < cg.bytes_moved(balanced, fused=True, **sizes)
    filled = load(name, routing="capacity", capacity=2)
    assert cg.matmul_flops(filled, **sizes) > cg.matmul_flops(balanced, **sizes)
    n = balanced.defaults
    assert cg.bytes_moved(filled, fused=True, **sizes) > n["E"] * 3 * n["D"] * n["Fe"] * n["L"]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_sizes_may_stay_open(name):
    g = load(name, symbolic=True)
    sizes = load(name).defaults
    assert {s.name for s in cg.param_count(g).free_symbols} <= sizes.keys()
    assert cg.param_count(g, **sizes) == cg.param_count(load(name))


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_reports_are_consistent(name):
    assert name in str(cg.report(load(name), B=1, S=512))


def test_unavailable_options_are_refused():
    with pytest.raises(cg.GraphError, match="absorbed=True, expected one of routing, capacity"):
        load("mixtral-8x7b", absorbed=True)
    with pytest.raises(cg.GraphError, match="expected a capacity factor with routing='capacity' only"):
        load("mixtral-8x7b", routing="capacity")


# -- published configurations ----------------------------------------------------------------------------------------

# files have more fields than sizes, including some for the authors' own code
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "factor": 40, "type": "yarn"}, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
LITE = {
    **{k: v for k, v in V3.items() if k not in ("quantization_config", "num_nextn_predict_layers")},
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "seq_aux": True,
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy",
    "vocab_size": 102400,
}  # fmt: skip
GPT = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["model.embed_tokens"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "rope_type": "yarn"}, "rope_theta": 150000,
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
FILES = {
    "deepseek-v3": V3, "deepseek-v2-lite": LITE, "gpt-oss-20b": GPT, "qwen3-30b-a3b": QWEN, "mixtral-8x7b": MIXTRAL,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FILES))
def test_published_files_match_presets(name):
    # a given dtype applies to all weights, whatever the file says
    g, preset = cg.models.from_config(FILES[name], dtype="bf16"), load(name)
    assert g.defaults == preset.defaults
    assert cg.flops(g) == cg.flops(preset)
    assert cg.param_bytes(g) == cg.param_bytes(preset)


def test_gpt_oss_bytes_match_checkpoint():
    # total_size in the model.safetensors.index.json of openai/gpt-oss-20b
    assert cg.param_bytes(cg.models.from_config(GPT)) == 13_761_264_768
    for field, value in (("quant_method", "banana"), ("modules_to_not_convert", ["model.layers.*.mlp.experts"])):
        with pytest.raises(cg.UnsupportedError, match=r"banana|mlp.experts"):
            cg.models.from_config({**GPT, "quantization_config": {**GPT["quantization_config"], field: value}})


def test_deepseek_v3_bytes_match_block_scales():
    D, H, C, Cq, Kn, Kr, Kv, E, Fe, F, V = 7168, 128, 512, 1536, 128, 64, 128, 256, 2048, 18432, 129280

    def blocks(rows, columns):  # one byte per element, and a 4-byte scale per 128 x 128 block
        return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)

    attention = blocks(Cq, D) + blocks(H * (Kn + Kr), Cq) + blocks(C + Kr, D) + blocks(H * (Kn + Kv), C)
    attention += blocks(D, H * Kv) + 2 * (2 * D + Cq + C)  # plus bf16 norms
    dense = 2 * blocks(F, D) + blocks(D, F)
    experts = (E + 1) * (2 * blocks(Fe, D) + blocks(D, Fe)) + 2 * E * D  # including the shared one, and a bf16 router
    g = cg.models.from_config(V3)
    ends = 2 * (2 * V * D + D)
    assert cg.param_bytes(g) == 61 * attention + 3 * dense + 58 * experts + ends
    # The files on the Hub, 688,586,727,753 bytes, also have a 62nd layer with bf16 embedding, head and mixing layer,
    # and headers with 92,000 tensor names.
    assert cg.param_bytes(g) + attention + experts + ends + 2 * 2 * D * D == pytest.approx(688_586_727_753, rel=3e-5)
    with pytest.raises(cg.UnsupportedError, match="expected moe_intermediate_size to be a multiple"):
        cg.models.from_config({**V3, "moe_intermediate_size": 2000})


@each("name", sorted(FILES))
def test_unknown_field_is_named(name):
    with pytest.raises(cg.UnsupportedError, match=r"expert_dropout is 0.1, expected a known field"):
        cg.models.from_config({**FILES[name], "expert_dropout": 0.1})


@each(
    ("name", "field"),
    [
        ("mixtral-8x7b", "num_local_experts"), ("mixtral-8x7b", "num_experts_per_tok"),
        ("qwen3-30b-a3b", "moe_intermediate_size"), ("qwen3-30b-a3b", "num_experts"), ("gpt-oss-20b", "hidden_size"),
        ("deepseek-v3", "kv_lora_rank"), ("deepseek-v3", "n_group"), ("deepseek-v3", "n_shared_experts"),
        ("deepseek-v2-lite", "v_head_dim"),
    ],
)  # fmt: skip
def test_missing_field_is_named(name, field):
    with pytest.raises(cg.FormatError, match=f"{field}.* is missing, expected a whole number"):
        cg.models.from_config({k: v for k, v in FILES[name].items() if k != field})


@each(
    ("name", "field", "value"),
    [
        ("mixtral-8x7b", "output_router_logits", True), ("mixtral-8x7b", "router_jitter_noise", 0.1),
        ("gpt-oss-20b", "swiglu_alpha", 1.0), ("gpt-oss-20b", "hidden_act", "gelu"),
        ("deepseek-v3", "topk_method", "greedy"), ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v3", "moe_layer_freq", 2), ("deepseek-v2-lite", "norm_topk_prob", True),
        ("deepseek-v2-lite", "topk_method", "noaux_tc"), ("qwen3-30b-a3b", "hidden_act", "swish2"),
    ],
)  # fmt: skip
def test_unsupported_structures_are_refused(name, field, value):
    with pytest.raises(cg.UnsupportedError, match=f"{field} is "):
        cg.models.from_config({**FILES[name], field: value})


def test_choosing_more_experts_than_exist_is_refused():
    with pytest.raises(cg.FormatError, match=r"E=8, k=9: .*expected a nonnegative integer"):
        cg.models.from_config({**MIXTRAL, "num_experts_per_tok": 9})
