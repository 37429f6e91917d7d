"""Block-wise quantized states: bytes kept by bitsandbytes and torchao, and the traffic of one kernel per parameter."""

import pytest
from each import each
from shared import load, training_step
from update_graphs import stacked, states, updated

import costgraph as cg
from costgraph import BindingError, GraphError
from costgraph.optimizers import SGD, STATES, AdaGrad, Adam, AdamW, BlockStates, Slot

D, F, N = cg.dims("D F N")

SHAPES = ((67, 61), (64, 64), (64, 68), (4096,), (4095,), (128, 257), (7,))
# Bytes of one moment per parameter, with its scales and table, of the CPU optimizers (torchao 0.18.0, bitsandbytes
# 0.50.2, torch 2.13.0).
MEASURED = {
    ("torchao-8bit", "fp32"): (16348, 5184, 5444, 5184, 16380, 131584, 28),
    ("torchao-8bit", "bf16"): (8174, 5184, 5444, 5184, 8190, 65792, 14),
    ("torchao-4bit", "fp32"): (16348, 2240, 2376, 2240, 16380, 17540, 28),
    ("torchao-4bit", "bf16"): (8174, 2240, 2376, 2240, 8190, 17540, 14),
    ("torchao-fp8", "fp32"): (16348, 4160, 4420, 4160, 16380, 131584, 28),
    ("torchao-fp8", "bf16"): (8174, 4160, 4420, 4160, 8190, 65792, 14),
    ("bitsandbytes-8bit", "fp32"): (16348, 4160, 4420, 4160, 16380, 33412, 28),
    ("bitsandbytes-8bit", "bf16"): (16348, 4160, 4420, 4160, 16380, 33412, 28),
}
SHARED = {"bitsandbytes-8bit": 2 * 256 * 4}  # two tables for all tensors


def fused(name):
    return AdamW(implementation="fused", states=name)


@each(("name", "dtype"), MEASURED)
def test_state_bytes_match_library(name, dtype):
    kept = states(updated(fused(name), SHAPES, dtype))
    for i, moment in enumerate(MEASURED[name, dtype]):
        of_one = [t for t in kept if t.name.startswith(f"w{i}.exp_avg")]
        assert sum(t.storage.bytes.constant for t in of_one) == 2 * moment, SHAPES[i]
    assert sum(t.storage.bytes.constant for t in kept) == 2 * sum(MEASURED[name, dtype]) + SHARED.get(name, 0)


def test_update_traffic_counts_codes_and_scales():
    # 67 * 71 = 4757 elements. The kernel reads parameter and gradient and writes the parameter in fp32. For two moments
    # it reads and writes 1-byte codes and the scales of ceiling(4757 / 256) = 19 blocks. It reads two tables.
    g = updated(fused("bitsandbytes-8bit"), ((67, 71),))
    assert cg.bytes_moved(g) == 3 * 4 * 4757 + 2 * 2 * (4757 + 4 * 19) + 2 * 1024
    # nothing is live except parameter, gradient and state
    assert cg.peak_memory(g) == 2 * 4 * 4757 + 2 * (4757 + 4 * 19) + 2 * 1024
    assert cg.flops(g) == cg.flops(updated(AdamW(implementation="fused", counters="host"), ((67, 71),)))


def test_block_threshold_applies_per_stacked_layer():
    apart, stack = (stacked(fused("bitsandbytes-8bit"), 3, ((67, 71), (4001,)), family=f) for f in (False, True))
    assert cg.peak_memory(stack) == cg.peak_memory(apart)
    assert cg.bytes_moved(stack) == cg.bytes_moved(apart)
    of_one = 2 * (4757 + 4 * 19) + 2 * 4 * 4001
    assert sum(t.storage.bytes.constant for t in states(stack)) == 3 * of_one + 2 * 1024


@each(("optimizer", "moments"), [(SGD, 1), (AdaGrad, 1), (Adam, 2)])
def test_all_fused_optimizers_support_block_states(optimizer, moments):
    options = {"momentum": 0.9} if optimizer is SGD else {}
    g = updated(optimizer(implementation="fused", states="torchao-fp8", **options), ((128, 64),))
    assert sum(t.storage.bytes.constant for t in states(g)) == moments * (8192 + 4 * 32)


def test_choice_for_symbolic_size_is_recorded_as_assumption():
    with cg.Graph("g") as g:
        fused("torchao-8bit").update([Slot(g.param("w", (D, F)), g.input("g", (D, F)))])
    # 64 * 96 / 256 = 24 scales
    assert cg.peak_memory(g, D=64, F=96) == 2 * 4 * 6144 + 2 * (6144 + 4 * 24 + 1024)
    with pytest.raises(BindingError, match=r"D=63, F=64: against the assumption 'D\*F >= 4096'"):
        cg.peak_memory(g, D=63, F=64)
    with pytest.raises(BindingError, match=r"against the assumption 'ceiling\(D\*F/256\) == D\*F/256'"):
        cg.peak_memory(g, D=67, F=97)


def test_known_size_bounds_decide_block_quantization():
    with cg.Graph("g") as g:
        g.assume("N <= 1000", "D >= 64", "F >= 64")
        slots = [Slot(g.param(f"w{i}", s), g.input(f"g{i}", s)) for i, s in enumerate(((N,), (D, F)))]
        fused("bitsandbytes-8bit").update(slots)
    assert [t.dtype.name for t in states(g)][:4] == ["fp32"] * 2 + ["uint8_g256_fp32_flat"] * 2
    assert len(g.relations.relations) == 3


def test_defaults_decide_and_contradicting_sizes_are_refused():
    step = training_step(load("gpt2"), optimizer=fused("bitsandbytes-8bit"))
    n = cg.param_count(step)
    # per layer two norms, and the biases of qkv, the attention output and the MLP; then the last norm
    small = 12 * (4 + 3 + 1 + 4 + 1) * 768 + 2 * 768
    large = n - small
    # every matrix is a whole number of blocks
    assert cg.state_bytes(step).state == 8 * small + 2 * (large + 4 * large // 256) + 2048
    with pytest.raises(BindingError, match=r"D=4096: against the assumption 'D < 4096'"):
        cg.peak_memory(step, B=1, S=8, D=4096, H=32)


def test_block_states_survive_save_and_load(tmp_path):
    g = updated(fused("torchao-4bit"), ((128, 64), (7,)))
    cg.save(g, tmp_path / "step.json")
    assert cg.peak_memory(cg.load(tmp_path / "step.json")) == cg.peak_memory(g)


@each(
    ("make", "text"),
    [
        (lambda: AdamW(states="8bit"), "AdamW: states '8bit', expected one of bitsandbytes-8bit, torchao-8bit"),
        (
            lambda: AdamW(states="torchao-8bit"),
            "block-quantized states with implementation 'foreach', expected 'fused'",
        ),
        (
            lambda: AdamW(states="torchao-8bit", implementation="fused", counters="device"),
            "AdamW: counters 'device' with block-quantized states, expected 'host'",
        ),
        (lambda: BlockStates(format="bf16"), "BlockStates: format 'bf16', expected a block format"),
        (lambda: BlockStates(format="int8_row_fp32"), "expected a block format"),
        (lambda: BlockStates(format="mxfp8", least=-1), "least is -1, expected a nonnegative integer"),
        (lambda: BlockStates(format="mxfp8", table=0.5), "table is 0.5, expected a nonnegative integer"),
    ],
)  # fmt: skip
def test_refused(make, text):
    with pytest.raises(GraphError, match=text):
        make()


def test_flat_blocks_cross_row_boundaries():
    flat, rows = cg.dtype("uint8_g256_fp32_flat"), cg.dtype("uint8_g256_fp32")
    assert flat.name == "uint8_g256_fp32_flat"
    assert (flat.scale[0].flat, rows.scale[0].flat) == (True, False)
    for name in ("uint8_row_fp32_flat", "int8_b2x4_fp32_flat"):
        with pytest.raises(cg.FormatError, match="is unknown"):
            cg.dtype(name)


def test_every_preset_names_a_format_with_flat_blocks():
    assert all(cg.dtype(s.format).scale[0].flat for s in STATES.values())
