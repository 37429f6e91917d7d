"""Recurrent models against their torch modules: equal parameters and matmul FLOPs on all configs."""

import pytest
import torch
from lazy import lazy_import
from recurrent_modules import RWKV7, XLSTM, LinearTransformer, WordLanguageModel
from shared import load
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from zoo_recurrent import REFERENCES

import costgraph as cg

transformers = lazy_import("transformers")

BATCH, WORDS = 2, 41


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Use plain ops: no kernels that the counter skips, and no advice to install others."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def tokens(steps):
    return torch.randint(0, WORDS, (BATCH, steps))


def from_config(config, cls, **options):
    return cg.models.from_config({**config.to_dict(), "architectures": [cls.__name__]}, **options)


def assert_counts_equal(graph, module, steps, **sizes):
    """Compare a declaration with torch's count; `test_zoo_page.py` traces modules."""
    module = module.eval()
    given = tokens(steps)
    with FlopCounterMode(display=False) as counter:
        module(given)
    assert cg.param_count(graph, **sizes) == sum(p.numel() for p in module.parameters())
    assert cg.matmul_flops(graph, count="full", B=BATCH, S=steps, **sizes) == counter.get_total_flops()


# -- forward pass ------------------------------------------------------------------------------------------------------

MAMBA = {"vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 5, "use_cache": False}
FLIPPED = {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "residual_in_fp32": False}


@pytest.mark.parametrize("scan", ["kernel", "ops"])
@pytest.mark.parametrize(
    "fields",
    [{}, {**FLIPPED, "expand": 3, "tie_word_embeddings": False, "time_step_rank": 5}, {"hidden_size": 40, "expand": 1}],
)
def test_mamba(fields, scan):
    config = transformers.MambaConfig(**{**MAMBA, **fields})
    assert_counts_equal(
        from_config(config, transformers.MambaForCausalLM, scan=scan), transformers.MambaForCausalLM(config), 7
    )


MAMBA2 = {**MAMBA, "num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 8}


@pytest.mark.parametrize("fields", [{}, {**FLIPPED, "tie_word_embeddings": True}, {"n_groups": 1}, {"n_groups": 6}])
@pytest.mark.parametrize("steps", [8, 24])
def test_mamba2_in_chunks(fields, steps):
    config = transformers.Mamba2Config(**{**MAMBA2, **fields})
    graph = from_config(config, transformers.Mamba2ForCausalLM, form="chunked", scan="ops")
    assert_counts_equal(graph, transformers.Mamba2ForCausalLM(config), steps)


def test_mamba2_kernel_flops_per_group_and_chunk_state():
    config = transformers.Mamba2Config(**MAMBA2)
    kernels, ops, recurrent = (
        cg.matmul_flops(from_config(config, transformers.Mamba2ForCausalLM, **options), count="full", B=BATCH, S=24)
        for options in ({"form": "chunked"}, {"form": "chunked", "scan": "ops"}, {})
    )
    B, S, H, G, K, N, Q, L, M = BATCH, 24, 6, 2, 8, 5, 8, 3, 24 // 8
    # scores of H - G more heads, and all states times the decays between M + 1 of them
    assert ops - kernels == L * B * (2 * S * Q * N * (H - G) + 2 * (M + 1) ** 2 * H * K * N)
    # position by position, the state is read and no pairs of positions are multiplied
    scores, within, states = 2 * S * Q * N * G, 2 * S * Q * K * H, 2 * S * H * K * N
    assert kernels - recurrent == L * B * (scores + within + states)


XLSTM_CONFIG = {"vocab_size": WORDS, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "use_cache": False}


@pytest.mark.parametrize(
    ("fields", "steps", "options"),
    [
        ({}, 7, {"scan": "ops"}),
        ({"qk_dim_factor": 1.0, "v_dim_factor": 0.5, "ffn_proj_factor": 1.7}, 5, {"scan": "ops"}),
        ({"chunk_size": 16}, 16, {"form": "chunked"}),
        ({"chunk_size": 16}, 48, {"form": "chunked", "scan": "ops"}),
    ],
)
def test_xlstm_large(fields, steps, options):
    """Below a chunk, transformers runs position by position, with a matmul for each outer product."""
    config = transformers.xLSTMConfig(**{**XLSTM_CONFIG, **fields})
    assert_counts_equal(
        from_config(config, transformers.xLSTMForCausalLM, **options), transformers.xLSTMForCausalLM(config), steps
    )


def test_kernel_outer_products_are_no_matmuls():
    config = transformers.xLSTMConfig(**XLSTM_CONFIG)
    kernel, ops = (
        cg.matmul_flops(from_config(config, transformers.xLSTMForCausalLM, scan=scan), B=BATCH, S=7)
        for scan in ("kernel", "ops")
    )
    assert ops - kernel == 2 * BATCH * 7 * 4 * 16 * 32 * 2  # 2*B*S*H*K*U*L


SMALL = {
    "rwkv-7-0.1b": (
        lambda: RWKV7(24, 6, 36, 3, WORDS, {"w": 5, "a": 7, "v": 3, "g": 11}),
        {"D": 24, "K": 6, "F": 36, "L": 3, "V": WORDS, "R_w": 5, "R_a": 7, "R_v": 3, "R_g": 11},
        {},
    ),
    "linear-attention-mnist": (
        lambda: LinearTransformer(24, 4, 36, 3, WORDS, 50),
        {"D": 24, "H": 4, "F": 36, "L": 3, "V": WORDS, "P": 50},
        {},
    ),
    "lstm-ptb-small": (lambda: WordLanguageModel(nn.LSTM, 12, 3, WORDS), {"D": 12, "L": 3, "V": WORDS}, {}),
    "gru-ptb-small": (lambda: WordLanguageModel(nn.GRU, 12, 3, WORDS), {"D": 12, "L": 3, "V": WORDS}, {}),
    "lstm-ptb-medium": (
        lambda: WordLanguageModel(nn.LSTM, 12, 1, WORDS, tied=True), {"D": 12, "L": 1, "V": WORDS}, {"tied": True},
    ),
    "xlstm-125m": (
        lambda: XLSTM(24, 4, 36, 5, WORDS, (0, 3), window=3, block=6),
        {"D": 24, "H": 4, "F": 36, "L": 5, "V": WORDS}, {"slstm": (0, 3), "window": 3, "block": 6},
    ),
    "xlstm-350m": (lambda: XLSTM(20, 2, 36, 2, WORDS), {"D": 20, "H": 2, "L": 2, "V": WORDS}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_models_outside_transformers_match_their_modules(name):
    build, sizes, options = SMALL[name]
    assert_counts_equal(load(name, **options), build(), 7, **sizes)


def test_every_preset_has_a_module():
    families = ("mamba", "rwkv", "linear-attention", "xlstm", "lstm", "gru")
    assert set(REFERENCES) == {name for name in cg.models.names() if name.startswith(families)}


# -- a training step --------------------------------------------------------------------------------------------------


def step_flops(module, given):
    """Return torch's forward and backward FLOPs, except for grouped convolutions, which it miscounts.

    Both gradients take as many FLOPs as the convolution itself.
    """
    module = module.eval()
    with FlopCounterMode(display=False) as counter:
        logits = module(given)
        logits = getattr(logits, "logits", logits)
        nn.functional.cross_entropy(logits.flatten(0, 1), given.flatten()).backward()
    by_op = counter.get_flop_counts()["Global"]
    forward, backward = (by_op.get(op, 0) for op in (torch.ops.aten.convolution, torch.ops.aten.convolution_backward))
    return counter.get_total_flops() - backward + 2 * forward


def declared_step(graph, steps, **sizes):
    return cg.matmul_flops(cg.training_step(graph, optimizer=cg.SGD()), count="full", B=BATCH, S=steps, **sizes)


# The differences follow from three rules. (1) The gradient of y = sum_n h_n*c_n by h is an outer product without a sum,
# so it is no matmul here; torch writes it as one. (2) The gradient of an outer product or of a broadcast factor is a
# sum of products: a contraction here; torch multiplies and then sums. (3) The first state needs no gradient: torch
# omits it, and so does a loop, except inside a kernel, where all iterations are alike.


@pytest.mark.parametrize(("scan", "again"), [("ops", 0), ("kernel", 1)])
def test_step_of_mamba(scan, again):
    config, steps = transformers.MambaConfig(**MAMBA), 7
    unit = 2 * BATCH * steps * 48 * 5 * 3  # 2*B*S*E*N*L
    # (1): 1 unit less; (2): gradients of dt, A, dt*x and B are 4 more; a kernel recomputes y for the gate
    expected = step_flops(transformers.MambaForCausalLM(config), tokens(steps)) + (3 + again) * unit
    assert declared_step(from_config(config, transformers.MambaForCausalLM, scan=scan), steps) == expected


def test_step_of_mamba2_in_chunks():
    config, steps = transformers.Mamba2Config(**MAMBA2), 24
    unit = 2 * BATCH * steps * 6 * 8 * 3  # 2*B*S*H*K*L
    # (2): of dt times x, of the decays to and from the ends of a chunk, and of the skip connection
    expected = step_flops(transformers.Mamba2ForCausalLM(config), tokens(steps)) + 4 * unit
    assert (
        declared_step(from_config(config, transformers.Mamba2ForCausalLM, form="chunked", scan="ops"), steps)
        == expected
    )


@pytest.mark.parametrize(("scan", "vectors"), [("ops", 0), ("kernel", 1)])
def test_step_of_xlstm_large(scan, vectors):
    config, steps = transformers.xLSTMConfig(**XLSTM_CONFIG), 7
    matrix, vector = 2 * BATCH * steps * 4 * 16 * 32 * 2, 2 * BATCH * steps * 4 * 16 * 2  # 2*B*S*H*K*U*L and ...*K*L
    # (1): a matrix and two vectors less; (2): of both gates by both states, two of each more. A kernel has no matmul
    # for the outer product, and recomputes both products of q for the quotient
    expected = step_flops(transformers.xLSTMForCausalLM(config), tokens(steps)) + matrix + vectors * vector
    assert declared_step(from_config(config, transformers.xLSTMForCausalLM, scan=scan), steps) == expected


def rwkv_more(steps, *, again):
    unit = 2 * BATCH * steps * 4 * 6 * 6 * 3  # 2*B*S*H*K*K*L
    # (1): of removed, whose first one torch omits, and of y, 2 less; (2): of w, and of both factors of two outer
    # products, 5 more; a kernel recomputes the removed part
    return 3 * unit + unit // steps + again * unit


def linear_more(steps, *, again):
    matrix, vector = 2 * BATCH * steps * 4 * 6 * 6 * 3, 2 * BATCH * steps * 4 * 6 * 3
    # (1): of y one matrix less, of the normalizer two vectors; (2): of keys and values, two matrices more; a kernel
    # recomputes both for the quotient
    return matrix - 2 * vector + again * (matrix + vector)


def xlstm_more(steps, *, again):
    matrix, vector = 2 * BATCH * steps * 4 * 12 * 12, 2 * BATCH * steps * 4 * 12  # an mLSTM block
    gates = 2 * BATCH * 4 * 6 * 24  # the gates from the previous state, per position in an sLSTM block
    # (1), (2): as for xlstm-7b, and two matrices more of keys and values, as the module writes outer products as such;
    # with ops, one more in the forward pass too. A kernel recomputes y and the gates; (3): of each sLSTM
    mlstm = 4 * matrix if not again else 4 * matrix + vector
    return 3 * mlstm + 2 * again * gates * (1 + steps)


def nothing_more(steps, *, again):
    return 0


STEPS = {
    "rwkv-7-0.1b": rwkv_more,
    "linear-attention-mnist": linear_more,
    "xlstm-125m": xlstm_more,
    "lstm-ptb-small": nothing_more,
    "gru-ptb-small": nothing_more,
}


WAYS = {"rwkv-7-0.1b": "kernel", "linear-attention-mnist": "ops", "xlstm-125m": "kernel", "lstm-ptb-small": "ops"}


@pytest.mark.parametrize(
    ("name", "scan"),
    [
        pytest.param(name, scan, marks=() if WAYS.get(name) == scan else pytest.mark.long)
        for name in STEPS
        for scan in ("ops", "kernel")
    ],
)
def test_step_of_models_outside_transformers(name, scan):
    build, sizes, options = SMALL[name]
    if not name.startswith(("lstm", "gru")):  # LSTM and GRU cells are kernels in both variants
        options = {**options, "scan": scan}
    expected = step_flops(build(), tokens(7)) + STEPS[name](7, again=scan == "kernel")
    assert declared_step(load(name, dtype="fp32", **options), 7, **sizes) == expected


# -- decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("Mamba", MAMBA), ("Mamba2", MAMBA2)],
    ids=["config0-MambaForCausalLM", "config1-Mamba2ForCausalLM"],
)
def test_recurrent_decode_equals_the_cached_module(kind, fields):
    config = getattr(transformers, f"{kind}Config")(**fields)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    module = cls(config).eval()
    with torch.no_grad():
        cache = module(tokens(8), use_cache=True).cache_params
        with FlopCounterMode(display=False) as counter:
            module(tokens(1), cache_params=cache, use_cache=True)
    # causal_conv1d_update also computes the result of the previous position, and drops it
    channels = 48 if kind == "Mamba" else 48 + 2 * 2 * 5
    dropped = 2 * BATCH * channels * 4 * 3
    step = cg.decode(from_config(config, cls, scan="ops"))
    assert cg.matmul_flops(step, count="full", B=BATCH, S=9) == counter.get_total_flops() - dropped
