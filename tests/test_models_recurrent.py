"""Recurrent models: published sizes, decode state, and configurations."""

import pytest
from each import each
from shared import load, training_step

import costgraph as cg

NAMES = sorted(
    n for n in cg.models.names() if n.startswith(("mamba", "rwkv", "linear-attention", "xlstm", "lstm", "gru"))
)

# -- parameters, by hand from the papers' layer definitions -----------------------------------------------------------


def mamba(V, D, L):
    E, N, R, W = 2 * D, 16, D // 16, 4
    projections = D * 2 * E + E * (R + 2 * N) + R * E + E * D
    return V * D + L * (projections + E * W + E + E + E * N + E + D) + D  # conv, dt, A, skip, and the final norm


def mamba2(V, D, L, *, H=None, G=1, tied=True):
    E, N, W = 2 * D, 128, 4
    H, channels = H or E // 64, E + 2 * G * N
    layer = D * (E + channels + H) + channels * W + channels + 3 * H + E + E * D + D
    return V * D * (1 if tied else 2) + L * layer + D


def rwkv7(V, D, L, w, a, v, g):
    """Peng et al. 2025, parameter appendix: the first layer has no value residual."""
    return 2 * D * V + 4 * D + L * D * (12 * D + 2 * (w + a + v + g) + 19) - (2 * D * v + D)


def rnn(V, D, L, gates):
    return V * D + L * gates * (2 * D * D + 2 * D) + D * V + V


PARAMETERS = {
    "mamba-130m": mamba(50280, 768, 24),
    "mamba-370m": mamba(50280, 1024, 48),
    "mamba-790m": mamba(50280, 1536, 48),
    "mamba-1.4b": mamba(50280, 2048, 48),
    "mamba-2.8b": mamba(50280, 2560, 64),
    "mamba2-130m": mamba2(50288, 768, 24),
    "mamba2-370m": mamba2(50288, 1024, 48),
    "mamba2-780m": mamba2(50288, 1536, 48),
    "mamba2-1.3b": mamba2(50288, 2048, 48),
    "mamba2-2.7b": mamba2(50288, 2560, 64),
    "mamba-codestral-7b": mamba2(32768, 4096, 64, H=128, G=8, tied=False),
    "rwkv-7-0.1b": rwkv7(65536, 768, 12, 64, 64, 32, 128),
    "rwkv-7-0.4b": rwkv7(65536, 1024, 24, 64, 64, 32, 128),
    "rwkv-7-1.5b": rwkv7(65536, 2048, 24, 96, 96, 64, 256),
    "rwkv-7-2.9b": rwkv7(65536, 2560, 32, 96, 96, 64, 320),
    **{f"lstm-ptb-{n}": rnn(10000, D, 2, 4) for n, D in (("small", 200), ("medium", 650), ("large", 1500))},
    **{f"gru-ptb-{n}": rnn(10000, D, 2, 3) for n, D in (("small", 200), ("medium", 650), ("large", 1500))},
}

#: Millions of parameters, as Beck et al. 2024 (arXiv 2405.04517) print them with width, blocks and heads.
XLSTM = {
    "xlstm-125m": 163.8, "xlstm-350m": 409.3, "xlstm-760m": 840.4, "xlstm-1.3b": 1422.6,
    "xlstm-125m-7-1": 163.7, "xlstm-350m-7-1": 408.4, "xlstm-760m-7-1": 839.7,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_match_hand_counts(name):
    assert cg.param_count(load(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", XLSTM)
def test_xlstm_parameters_match_paper(name):
    assert round(cg.param_count(load(name)) / 1e6, 1) == XLSTM[name]


def test_parameters_match_published_checkpoints():
    # safetensors in state-spaces/mamba-130m-hf, mamba-2.8b-hf and NX-AI/xLSTM-7b; the RWKV-7 World models
    numbers = {"mamba-130m": 129135360, "mamba-2.8b": 2768345600, "xlstm-7b": 6865424896, "rwkv-7-0.1b": 191034624}
    numbers |= {"rwkv-7-2.9b": 2947735040}
    assert {n: cg.param_count(load(n)) for n in numbers} == numbers


# -- supported questions ----------------------------------------------------------------------------------------------

# one per family, and per implementation
WAYS = [
    ("mamba-130m", {}), ("mamba-130m", {"scan": "ops"}), ("mamba2-130m", {}), ("mamba2-130m", {"scan": "ops"}),
    ("mamba2-130m", {"form": "chunked"}), ("mamba-codestral-7b", {"form": "chunked", "scan": "ops"}),
    ("rwkv-7-0.1b", {}), ("rwkv-7-0.1b", {"scan": "ops"}), ("linear-attention-mnist", {}),
    ("linear-attention-mnist", {"scan": "ops"}), ("lstm-ptb-medium", {}), ("lstm-ptb-medium", {"tied": True}),
    ("gru-ptb-medium", {"bias": False}), ("xlstm-7b", {}), ("xlstm-7b", {"scan": "ops"}),
    ("xlstm-7b", {"form": "chunked"}), ("xlstm-125m-7-1", {}), ("xlstm-125m", {"slstm": (0, 1, 22), "tied": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_report_training_step_and_symbolic_sizes(name, options):
    g = load(name, **options)
    sizes = {"B": 1, "S": 512}
    assert cg.report(g, **sizes).figures["params"].value == cg.param_count(g)
    step = training_step(g)
    forward, whole = (cg.matmul_flops(t, B=1) for t in (g, step))
    # the embedding has no matmul in the forward pass, so 3 times is slightly off in either direction
    assert 2.5 < whole.subs("S", 512) / forward.subs("S", 512) < 3.6
    assert {str(n) for n in cg.matmul_flops(step).free_symbols} <= {"B", "S"}
    opened = load(name, symbolic=True, **options)
    assert not opened.defaults
    assert {"B", "S", "D", "V"} <= {str(n) for n in cg.matmul_flops(opened).free_symbols}


@pytest.mark.parametrize(
    "name", ["mamba-130m", "mamba2-130m", "rwkv-7-0.1b", "xlstm-125m-7-1", "lstm-ptb-medium", "linear-attention-mnist"]
)
def test_costs_are_linear_in_sequence_length(name):
    g = load(name)
    S = cg.dims("S")
    for formula in (cg.flops(g, B=1), cg.bytes_moved(g, B=1), cg.flops(training_step(g), B=1)):
        assert formula.as_poly(S).degree() == 1


def test_dropout_positions_match_reference():
    g = load("lstm-ptb-medium", dropout=0.5)
    # after the embedding and after each layer
    assert sorted(op.name for op in g.walk() if op.kind.name == "dropout") == ["dropout", "layers/dropout"]


# -- inference --------------------------------------------------------------------------------------------------------


def conv(channels, window=4):
    return channels * window * 2  # bf16


#: Cache bytes per sequence, independent of its length: fp32 states, and bf16 inputs of windows and token shifts.
KEPT = {
    "mamba-130m": 24 * (1536 * 16 * 4 + conv(1536)),
    "mamba2-130m": 24 * (1536 * 128 * 4 + conv(1536 + 2 * 128)),
    "rwkv-7-0.1b": 12 * (12 * 64 * 64 * 4 + 2 * 768 * 2),
    "linear-attention-mnist": 8 * (8 * 32 * 32 + 8 * 32) * 2,
    "lstm-ptb-medium": 2 * 2 * 650 * 2,
    "gru-ptb-medium": 2 * 650 * 2,
    "xlstm-7b": 32 * 8 * (256 * 512 + 256 + 1) * 4,
    "xlstm-125m-7-1": 22 * (4 * (384 * 384 + 384 + 1) * 4 + conv(1536)) + 2 * (4 * 768 * 2 + conv(768)),
}


@pytest.mark.parametrize("name", KEPT)
def test_cache_size_is_independent_of_length(name):
    g = load(name)
    assert cg.cache_bytes(cg.prefill(g), B=1, S=700) == KEPT[name]
    step = cg.decode(g)
    assert "S" not in {str(n) for n in cg.bytes_moved(step).free_symbols}
    # 2 per parameter except tables, vectors and convolutions, and the matmuls with the state
    assert cg.matmul_flops(step, B=1, S=700) < 2.3 * cg.param_count(g)


@pytest.mark.parametrize("name", KEPT)
def test_stepwise_prefill_costs_match_prefill(name):
    """FLOPs are equal, except for convolution results past the last position, which a step does not compute."""
    g = load(name)
    whole, step = cg.matmul_flops(g, B=1).as_poly(cg.dims("S")), cg.matmul_flops(cg.decode(g), B=1, S=700)
    assert whole.coeff_monomial(cg.dims("S")) == step


@each(("name", "text"), [("mamba2-130m", "S/Q"), ("xlstm-7b", "S/Q")])
def test_chunked_inference_step_is_refused(name, text):
    with pytest.raises(cg.UnsupportedError) as caught:
        cg.decode(load(name, form="chunked"))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options"), [("mamba2-130m", {"form": "chunked"}), ("xlstm-7b", {}), ("gru-ptb-small", {})]
)
def test_costs_survive_save_and_load(name, options, tmp_path):
    g = load(name, **options)
    for made in (cg.training_step(g), *([] if options else [cg.decode(g)])):
        cg.save(made, tmp_path / "g.json")
        again = cg.load(tmp_path / "g.json")
        assert cg.flops(again, B=1, S=512) == cg.flops(made, B=1, S=512)
        assert cg.bytes_moved(again, B=1, S=512) == cg.bytes_moved(made, B=1, S=512)


@pytest.mark.parametrize("name", ["mamba-130m", "rwkv-7-0.1b", "linear-attention-mnist"])
def test_least_step_traffic_reads_and_writes_states(name):
    kernel, ops = (
        cg.bytes_moved(cg.decode(load(name, scan=scan)), fused=True, B=1, S=512) for scan in ("kernel", "ops")
    )
    assert kernel == ops


def test_length_not_divisible_by_chunk_is_refused():
    with pytest.raises(cg.BindingError) as caught:
        cg.flops(load("mamba2-130m", form="chunked"), B=1, S=300)
    assert "75/64" in str(caught.value)


# -- structures that are refused --------------------------------------------------------------------------------------


@each(
    ("name", "options", "text"),
    [
        ("mamba-130m", {"scan": "fused"}, "scan 'fused', expected one of kernel, ops"),
        ("mamba2-130m", {"form": "parallel"}, "form='parallel', expected 'recurrent' or 'chunked'"),
        ("xlstm-7b", {"form": None}, "form=None, expected 'recurrent' or 'chunked'"),
        ("xlstm-125m", {"slstm": (3, 1)}, "slstm=(3, 1), expected a tuple of block positions in ascending order"),
        ("xlstm-125m", {"slstm": [1]}, "slstm=[1], expected a tuple of block positions"),
        ("xlstm-125m", {"slstm": (True,)}, "slstm=(True,), expected a tuple of block positions"),
        ("rwkv-7-0.1b", {"tied": True}, "tied=True, expected one of scan"),
    ],
)
def test_unknown_structure_is_refused(name, options, text):
    with pytest.raises(cg.GraphError) as caught:
        load(name, **options)
    assert text in str(caught.value)


def test_invalid_depths_are_refused():
    with pytest.raises(cg.BindingError):
        cg.param_count(load("xlstm-125m-7-1"), L=20)
    with pytest.raises(cg.BindingError):
        cg.param_count(load("rwkv-7-0.1b"), L=1)


# -- external configurations ------------------------------------------------------------------------------------------

# as on the Hugging Face hub
MAMBA = {
    "architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "d_inner": 1536, "d_model": 768,
    "eos_token_id": 0, "expand": 2, "fused_add_norm": True, "hidden_act": "silu", "hidden_size": 768,
    "initializer_range": 0.1, "intermediate_size": 1536, "layer_norm_epsilon": 1e-05, "model_type": "mamba",
    "n_layer": 24, "num_hidden_layers": 24, "pad_token_id": 0, "pad_vocab_size_multiple": 8,
    "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {}, "state_size": 16,
    "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001,
    "time_step_rank": 48, "time_step_scale": 1.0, "torch_dtype": "float32", "transformers_version": "4.39.0.dev0",
    "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 50280,
}  # fmt: skip
CODESTRAL = {
    "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 0,
    "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1,
    "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 8,
    "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64, "pad_token_id": 0,
    "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "state_size": 128,
    "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_init_scheme": "random",
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
    "time_step_scale": 1.0, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True,
    "vocab_size": 32768,
}  # fmt: skip
XLSTM_7B = {
    "architectures": ["xLSTMForCausalLM"], "add_out_norm": True, "autocast_kernel_dtype": "bfloat16",
    "bos_token_id": 0, "chunk_size": 64, "chunkwise_kernel": "chunkwise--triton_xl_chunk", "embedding_dim": 4096,
    "eos_token_id": 2, "eps": 1e-06, "ffn_proj_factor": 2.667, "ffn_round_up_to_multiple_of": 64,
    "gate_soft_cap": 15.0, "hidden_size": 4096, "inference_state_dtype": "float32", "mode": "inference",
    "model_type": "xlstm", "norm_eps": 1e-06, "norm_reduction_force_float32": True, "num_blocks": 32, "num_heads": 8,
    "num_hidden_layers": 32, "output_logit_soft_cap": 30.0, "pad_token_id": 1, "qk_dim_factor": 0.5,
    "return_last_states": True, "sequence_kernel": "native_sequence__triton", "step_kernel": "triton",
    "tie_word_embeddings": False, "torch_dtype": "float32", "use_bias": False, "use_cache": True, "v_dim_factor": 1.0,
    "vocab_size": 50304, "weight_mode": "single",
}  # fmt: skip


@each(("fields", "name"), [(MAMBA, "mamba-130m"), (CODESTRAL, "mamba-codestral-7b"), (XLSTM_7B, "xlstm-7b")])
def test_configurations_match_presets(fields, name):
    found, preset = cg.models.from_config(fields, dtype="bf16"), load(name)
    assert found.defaults == preset.defaults
    assert cg.flops(found) == cg.flops(preset)


@each(
    ("fields", "changed", "error", "text"),
    [
        (MAMBA, {"scan_layers": 3}, cg.UnsupportedError, "scan_layers is 3, expected a known field"),
        (MAMBA, {"hidden_size": None}, cg.FormatError, "hidden_size is missing, expected an integer"),
        (MAMBA, {"d_inner": 1024}, cg.UnsupportedError, "d_inner is 1024, expected 1536"),
        (MAMBA, {"hidden_act": "gelu"}, cg.UnsupportedError, "hidden_act is 'gelu', expected 'silu' or 'swish'"),
        (MAMBA, {"ssm_cfg": {"d_state": 8}}, cg.UnsupportedError, "ssm_cfg is"),
        (MAMBA, {"time_step_rank": "half"}, cg.FormatError, "time_step_rank is 'half', expected an integer"),
        (
            CODESTRAL,
            {"num_heads": 64},
            cg.FormatError,
            "num_heads*head_dim is 4096, expected expand*hidden_size = 8192",
        ),
        (CODESTRAL, {"rms_norm": False}, cg.UnsupportedError, "rms_norm is False, expected True"),
        (XLSTM_7B, {"weight_mode": "fused"}, cg.UnsupportedError, "weight_mode is 'fused', expected 'single'"),
        (XLSTM_7B, {"use_bias": True}, cg.UnsupportedError, "use_bias is True, expected False"),
        (XLSTM_7B, {"num_heads": 7}, cg.FormatError, "key size 2048 and value size 4096 with num_heads 7, expected"),
        (XLSTM_7B, {"inference_state_dtype": "bfloat16"}, cg.UnsupportedError, "inference_state_dtype is 'bfloat16'"),
        (MAMBA, {"architectures": ["RwkvForCausalLM"]}, cg.UnsupportedError, "'RwkvForCausalLM' is unknown"),
        (
            MAMBA,
            {"architectures": ["FalconMambaForCausalLM"]},
            cg.UnsupportedError,
            "'FalconMambaForCausalLM' is unknown",
        ),
    ],
)
def test_unsupported_configurations_are_refused(fields, changed, error, text):
    with pytest.raises(error) as caught:
        cg.models.from_config({**fields, **changed})
    assert text in str(caught.value)


def test_default_rank_follows_width():
    for fields in ({**MAMBA, "time_step_rank": "auto"}, {k: v for k, v in MAMBA.items() if k != "time_step_rank"}):
        assert cg.models.from_config(fields).defaults["R"] == 48
        assert cg.models.from_config({**fields, "hidden_size": 24, "d_model": 24, "d_inner": 48,
                                      "intermediate_size": 48}).defaults["R"] == 2  # fmt: skip
