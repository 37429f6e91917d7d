"""Names coined by other libraries keep their original meaning.

Each kind of name has a table. A test asserts that the table is complete, so a new name needs a row with a source.
"""

import inspect
from fractions import Fraction
from math import ceil

import pytest
from each import each
from shared import load

import costgraph as cg
from costgraph import testing
from costgraph.optimizers.optimizer import STATES
from costgraph.transforms.loss import LOSSES
from costgraph.transforms.pipeline_schedules import SCHEDULES
from costgraph.transforms.precision import POLICIES
from costgraph.transforms.quantize import MIXTURES
from costgraph.transforms.shard.parallelize import SYSTEMS

B, D, F = cg.dims("B D F")


def linear(rows, row):
    """A linear layer with a rows-by-row weight."""
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.linear(g.input("x", (2, row)), "b d -> b f", f=rows))
    return g


# -- weight formats ----------------------------------------------------------------------------------------------------

SIDE = 2**12
CHANNEL = Fraction(32, SIDE)  # one fp32 scale per output channel

#: Bits per weight in a 4096 x 4096 matrix, with scales but without per-tensor scales; and the source.
WEIGHTS = {
    "nf4": (4 + Fraction(32, 64), "bitsandbytes 0.50.2: Params4bit, blocksize=64, absmax in fp32"),
    "fp4": (4 + Fraction(32, 64), "bitsandbytes 0.50.2: Params4bit, blocksize=64, quant_type='fp4' (its default)"),
    "nf4_double": (
        4 + Fraction(8, 64) + Fraction(32, 64 * 256),
        "bitsandbytes 0.50.2: quantize_4bit(compress_statistics=True), absmax in 8 bits, blocks of 256 of these",
    ),
    "int4": (4 + Fraction(16, 128), "transformers 5.24 GPTQConfig and AwqConfig, torchao 0.18: group_size=128"),
    "int8": (
        8 + CHANNEL,
        "bitsandbytes 0.50.2: Int8Params, SCB in fp32 for each row; torchao Int8WeightOnlyConfig: PerRow",
    ),
    "fp8": (8 + CHANNEL, "torchao 0.18: Float8WeightOnlyConfig, PerRow, scales in fp32"),
    "float8_e4m3fn": (8 + CHANNEL, "torch's name of E4M3"),
    "fp8_e4m3_b128x128_fp32": (8 + Fraction(32, 128**2), "transformers 5.24 FineGrainedFP8Config: (128, 128)"),
    "mxfp8": (8 + Fraction(8, 32), "OCP Microscaling Formats 1.0, table 1"),
    "mxfp8_e5m2": (8 + Fraction(8, 32), "OCP Microscaling Formats 1.0, table 1"),
    "mxfp6": (6 + Fraction(8, 32), "OCP Microscaling Formats 1.0, table 1"),
    "mxfp6_e3m2": (6 + Fraction(8, 32), "OCP Microscaling Formats 1.0, table 1"),
    "mxfp4": (4 + Fraction(8, 32), "OCP Microscaling Formats 1.0, table 1"),
    "nvfp4": (4 + Fraction(8, 16), "NVIDIA: E2M1, an E4M3 scale for 16 elements, one in fp32 for the tensor"),
    # ggml-common.h, and GGML_QUANT_SIZES in gguf 0.19: block bytes divided by block elements
    "q4_0": (Fraction(8 * 18, 32), "ggml-common.h: block_q4_0"),
    "q4_1": (Fraction(8 * 20, 32), "ggml-common.h: block_q4_1"),
    "q5_0": (Fraction(8 * 22, 32), "ggml-common.h: block_q5_0"),
    "q5_1": (Fraction(8 * 24, 32), "ggml-common.h: block_q5_1"),
    "q8_0": (Fraction(8 * 34, 32), "ggml-common.h: block_q8_0"),
    "q2_k": (Fraction(8 * 84, 256), "ggml-common.h: block_q2_K"),
    "q3_k": (Fraction(8 * 110, 256), "ggml-common.h: block_q3_K"),
    "q4_k": (Fraction(8 * 144, 256), "ggml-common.h: block_q4_K"),
    "q5_k": (Fraction(8 * 176, 256), "ggml-common.h: block_q5_K"),
    "q6_k": (Fraction(8 * 210, 256), "ggml-common.h: block_q6_K"),
}
#: Element formats that no library uses alone: stored with one scale per output channel.
ELEMENTS = {"fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "uint8", "int6", "uint6", "uint4"}


def test_every_weight_format_has_a_row():
    narrow = {name for name, d in cg.dtypes.DTYPES.items() if d.bits <= 8 and d.kind != "bool"} - {"fp8_e8m0"}
    assert narrow - ELEMENTS <= WEIGHTS.keys()
    assert not ELEMENTS & WEIGHTS.keys()


@each("name", [*WEIGHTS, *sorted(ELEMENTS)])
def test_bits_per_weight_match_source(name):
    bits = WEIGHTS[name][0] if name in WEIGHTS else cg.dtypes.DTYPES[name].bits + CHANNEL
    stored = cg.param_bytes(cg.quantize(linear(SIDE, SIDE), name))
    assert 0 <= stored - bits * SIDE**2 / 8 <= 4  # a per-tensor scale or mean


@each("name", ["nf4", "fp4"])
@each(("rows", "row", "block"), [(30, 100, 64), (7, 63, 64), (5, 64, 64), (30, 100, 32)])
def test_bitsandbytes_blocks_run_over_flattened_weight(name, rows, row, block):
    """`quantize_4bit` in bitsandbytes/functional.py: -(n // -blocksize) blocks of n elements, two to a byte."""
    n = rows * row
    options = {} if block == 64 else {"group": block}
    stored = cg.param_bytes(cg.quantize(linear(rows, row), name, **options))
    assert ceil(stored) == (n + 1) // 2 + 4 * -(n // -block)


@each(
    ("options", "text"),
    [
        ({"weights": "fp4", "activations": "fp8"}, "activations='fp8' with weights 'fp4', expected nvfp4 or mxfp4"),
        ({"weights": "nvfp4", "activations": "fp4"}, "activations='fp4' with weights 'nvfp4', expected nvfp4 or mxfp4"),
        ({"cache": "fp4"}, "cache='fp4', expected nvfp4 or mxfp4"),
    ],
)
def test_fp4_is_valid_for_weights_only(options, text):
    with pytest.raises(cg.FormatError, match=f"quantize: {text}"):
        cg.quantize(linear(8, 8), **options)


def test_channelwise_int4_has_its_own_name():
    assert cg.param_bytes(cg.quantize(linear(8, 256), "int4_row_fp32")) == 8 * 128 + 8 * 4
    assert cg.param_bytes(cg.quantize(linear(8, 256), "int4", scale="bf16")) == 8 * 128 + 8 * 2 * 2


#: File types that `llama-quantize` knows and that are not number formats: tools/quantize/quantize.cpp, QUANT_OPTIONS.
FILES = {
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S",
    "Q5_K_M", "Q3_K", "Q4_K", "Q5_K",
}  # fmt: skip


def test_quantization_mixtures_are_file_types():
    assert set(MIXTURES) == FILES
    # upper case names a mixture; a lower-case number format applies to every tensor
    model = load("gpt2")
    for name, same in (("Q4_K", "Q4_K_M"), ("q4_k_m", "Q4_K_M"), ("Q3_K", "Q3_K_M")):
        assert cg.param_bytes(cg.quantize(model, name)) == cg.param_bytes(cg.quantize(model, same))


# -- optimizers --------------------------------------------------------------------------------------------------------

#: The torch.optim class of each optimizer, and the settings under which the test inspects its state.
OPTIMIZERS = {
    cg.SGD: ("SGD", [{}, {"momentum": 0.9}]),
    cg.Adam: ("Adam", [{}, {"amsgrad": True}]),
    cg.AdamW: ("AdamW", [{}, {"amsgrad": True}]),
    cg.AdaGrad: ("Adagrad", [{}]),
    cg.RMSProp: ("RMSprop", [{}, {"centered": True}, {"momentum": 0.9}]),
    cg.Adafactor: ("Adafactor", [{}]),
    cg.Muon: ("Muon", [{}]),
}
#: Lion is not in torch: Chen et al. 2023, arXiv 2302.06675, and lion-pytorch.
LION = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0}


def test_every_optimizer_has_a_row():
    classes = {c for c in vars(cg.optimizers).values() if inspect.isclass(c) and issubclass(c, cg.optimizers.Optimizer)}
    assert classes == {*OPTIMIZERS, cg.Lion, cg.optimizers.Optimizer}
    assert {name: getattr(cg.Lion(), name) for name in LION} == LION


@each("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
def test_optimizer_defaults_match_torch(optimizer):
    torch = pytest.importorskip("torch")
    theirs = inspect.signature(getattr(torch.optim, OPTIMIZERS[optimizer][0])).parameters
    ours = optimizer()
    shared = {name for name in theirs if hasattr(ours, name) and theirs[name].default is not inspect.Parameter.empty}
    assert "lr" in shared
    skipped = {"adjust_lr_fn"} if optimizer is cg.Muon else set()  # None means "original"
    assert {n: getattr(ours, n) for n in shared - skipped} == {n: theirs[n].default for n in shared - skipped}


@each("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
def test_optimizer_state_matches_torch(optimizer):
    torch = pytest.importorskip("torch")
    name, settings = OPTIMIZERS[optimizer]
    for options in settings:
        w = torch.nn.Parameter(torch.ones(24, 40))
        w.grad = torch.ones_like(w)
        made = getattr(torch.optim, name)([w], **options)
        made.step()
        held = sum(t.nbytes for n, t in made.state[w].items() if torch.is_tensor(t) and n != "step")
        with cg.Graph("g") as g:
            x = g.input("x", (2, 24)) @ g.param("w", (24, 40))
            g.output(cg.reduce(x, "b f -> ", "mean"))
        assert cg.state_bytes(cg.training_step(g, optimizer=optimizer(**options))).state == held


#: Bytes of Adam's state for n = 2**16 elements, without lookup tables.
N = 2**16
BLOCKS = {
    "bitsandbytes-8bit": (2 * (N + 4 * N // 256), 2 * 4 * 256, "bitsandbytes 0.50.2: Optimizer2State, blocksize 256"),
    "torchao-8bit": (2 * (N + 4 * N // 256), 2 * 4 * 256, "torchao 0.18: AdamW8bit(block_size=256)"),
    "torchao-4bit": (2 * (N // 2 + 4 * N // 128), 2 * 4 * 16, "torchao 0.18: AdamW4bit(block_size=128)"),
    "torchao-fp8": (2 * (N + 4 * N // 256), 0, "torchao 0.18: AdamWFp8(block_size=256)"),
}


def test_blockwise_optimizer_state_bytes():
    assert set(BLOCKS) == set(STATES)
    for name, (states, tables, _) in BLOCKS.items():
        with cg.Graph("g") as g:
            x = g.input("x", (2, 256)) @ g.param("w", (256, 256))
            g.output(cg.reduce(x, "b f -> ", "mean"))
        step = cg.training_step(g, optimizer=cg.AdamW(implementation="fused", states=name))
        assert cg.state_bytes(step).state == states + tables


@pytest.mark.parametrize("model", ["gpt2", "llama-3-8b", "mixtral-8x7b"])
def test_muon_updates_hidden_matrices_only(model):
    """KellerJordan/Muon, torch.optim.Muon and DeepSpeed (`set_optimizer_flags`) skip embeddings and the head."""
    g = load(model)
    step = cg.training_step(g, optimizer=cg.Muon(), precision="fp32")
    outer = {t.name for t in g.params if t.name.split("/")[0] in ("tokens", "positions", "head")}
    by_adam = {t.name.rpartition(".")[0] for t in step.tensors if t.name.endswith(".exp_avg")}
    by_muon = {t.name.rpartition(".")[0] for t in step.tensors if t.name.endswith(".momentum_buffer")}
    assert outer <= by_adam
    assert not outer & by_muon
    assert {n for n in by_muon if not n.startswith("layers/")} == set()
    assert {t.name for t in g.params} == by_adam | by_muon


def test_muon_updates_each_expert_separately():
    """DeepSpeed's `muon_update` runs the Newton-Schulz iteration on each expert's matrix separately."""
    E, rows, columns, steps = 3, 4, 7, 5
    with cg.Graph("g") as g:
        w = g.param("moe/experts/down", (E, rows, columns))
        slots = [cg.optimizers.Slot(w, g.input("g", (E, rows, columns)))]
        cg.Muon(ns_steps=steps).update(slots)
    assert cg.matmul_flops(g) == E * steps * (4 * rows**2 * columns + 2 * rows**3)
    testing.check(g)


# -- precision and ZeRO ------------------------------------------------------------------------------------------------

#: Bytes per parameter for the weight, its gradient and AdamW's state (which includes a master copy).
PRECISIONS = {
    "fp32": (4, 4, 8, "torch.optim.AdamW over a model in fp32"),
    "bf16": (2, 2, 8, "own: moments in fp32; torch's AdamW over a bf16 model (bf16-true of Lightning) is None"),
    "bf16-master": (2, 2, 12, "Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1: K = 12"),
    "bf16-mixed": (4, 4, 8, "Lightning's MixedPrecision: torch.autocast over a model in fp32"),
    "fp16-mixed": (4, 4, 8, "Lightning's 16-mixed: torch.autocast over a model in fp32, with a GradScaler"),
    "megatron-bf16": (2, 4, 12, "Megatron-LM, distributed optimizer: 18 bytes with bf16 weights and fp32 gradients"),
    "fp8": (2, 2, 8, "own: TransformerEngine's E4M3 and E5M2 (HYBRID) over weights in bf16"),
}


def mlp():
    with cg.Graph("g") as g:
        x = g.input("x", (8, 64), dtype="fp32")
        g.output(cg.linear(cg.relu(cg.linear(x, "b d -> b f", f=128)), "b f -> b e", e=64))
    g.loss = "mean_squared_error"
    return g


def test_bytes_per_parameter_by_precision():
    assert set(PRECISIONS) == set(POLICIES)
    g = mlp()
    n = cg.param_count(g)
    for name, (param, grad, state, _) in PRECISIONS.items():
        held = cg.state_bytes(cg.training_step(g, optimizer=cg.AdamW(), precision=name))
        scale = 8 if name == "fp16-mixed" else 0  # the loss scale
        assert (held.params, held.gradients) == (param * n, grad * n), name
        assert 0 <= held.state - state * n <= scale, name


@pytest.mark.parametrize(
    ("stage", "params", "grads", "state"),
    [(0, 2, 2, 12), (1, 2, 2, 12 / 8), (2, 2, 2 / 8, 12 / 8), (3, 2 / 8, 2 / 8, 12 / 8)],
)
def test_zero_stages_match_published_bytes(stage, params, grads, state):
    """Rajbhandari et al. 2020, arXiv 1910.02054, figure 1: bytes per parameter on each of 8 ranks."""
    g = mlp()
    n = cg.param_count(g)
    step = cg.training_step(g, optimizer=cg.AdamW(), precision="bf16-master")
    held = cg.state_bytes(cg.parallelize(step, dp=8, zero=stage))
    assert (held.params, held.gradients, held.state) == (params * n, grads * n, state * n)


# -- schedules ---------------------------------------------------------------------------------------------------------

#: Peak micro-batches in flight on rank 0 of 8 (per chunk; 32 in all), as a formula in p, m and v; and the source.
HELD = {
    "gpipe": (lambda p, m, v: m, 1, "Huang et al. 2018, arXiv 1811.06965"),
    "1f1b": (lambda p, m, v: p, 1, "Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1"),
    "interleaved": (
        lambda p, m, v: (v - 1) * p + 2 * (p - 1) + 1, 2,
        "Megatron-LM: num_warmup_microbatches of forward_backward_pipelining_with_interleaving, and one more",
    ),
    "zb-h1": (lambda p, m, v: p, 1, "Qi et al. 2023, arXiv 2401.10241, section 2.2: the memory of 1F1B"),
    "interleaved-zb": (lambda p, m, v: v * p, 2, "own: zb-h1 with chunks, as torch's InterleavedZeroBubble"),
    "zbv": (lambda p, m, v: 2 * p, 2, "Qi et al. 2024, arXiv 2405.15362: p micro-batches of both chunks"),
    "dualpipe": (lambda p, m, v: p + 1, 2, "deepseek-ai/DualPipe, README: PP + 1"),
    "dualpipev": (lambda p, m, v: 2 * p + 1, 2, "deepseek-ai/DualPipe, README: PP + 1 of half a stage each"),
}  # fmt: skip


@each("name", SCHEDULES)
def test_micro_batches_in_flight_match_schedule(name):
    """tests/with_torch/test_torch_schedules.py compares the action lists with torch's."""
    formula, chunks, _ = HELD[name]
    assert cg.plan.in_flight(name, 8, 32, chunks, 0) == formula(8, 32, chunks)


def test_systems_and_losses_are_complete():
    """Names tested elsewhere: a new one needs a source."""
    assert SYSTEMS == ("torch", "megatron")
    # torch.nn.functional, transformers (training/test_transformers_loss.py), and CLIP's loss
    assert set(LOSSES) == {
        "cross_entropy", "fp32", "transformers", "contrastive", "binary_cross_entropy", "mean_squared_error",
    }  # fmt: skip
