"""The records' declared model against the same model in torch: exact, except for named differences.

Fake tensors give every storage in a step without computing; the profiler measures a real step.
"""

import pytest

pytest.importorskip("torch")

import predictions
import torch
from plain_record import counted_step, measured_step, tracked_forward, tracked_step
from raw_records import Row

SIZES = {"v": 2003, "d": 48, "h": 3, "f": 131, "layers": 2, "b": 2, "s": 67}
VARIANTS = [
    ("sgd", "fp32", 0.0, False, False),
    ("adamw-for-loop", "fp32", 0.0, False, False),
    ("adamw-foreach", "fp32", 0.0, False, False),
    ("adamw-fused", "fp32", 0.0, False, False),
    ("adamw-fused", "bf16", 0.0, False, False),
    ("adamw-fused", "bf16", 0.1, False, False),
    ("adamw-fused", "bf16", 0.0, True, False),
    ("adamw-fused", "bf16-mixed", 0.0, False, False),
    ("adamw-fused", "bf16-mixed", 0.0, True, False),
    ("adamw-fused", "bf16", 0.0, False, True),
    ("adamw-fused", "bf16-mixed", 0.1, False, True),
    ("adamw-foreach", "bf16", 0.0, True, True),
]
NAMES = ("optimizer", "precision", "dropout", "fused_attention", "checkpoint")
CASES = [{**SIZES, **dict(zip(NAMES, variant, strict=True))} for variant in VARIANTS]


def cases(*plain):
    """Return all cases; a plain run takes a sample."""
    return pytest.mark.parametrize("facts", [
        pytest.param(facts, marks=() if i in plain else pytest.mark.long, id="-".join(str(facts[n]) for n in NAMES))
        for i, facts in enumerate(CASES)
    ])  # fmt: skip


every = cases(*range(len(CASES)))
# the backward seed, the sum of loss weights and a loss that a variable references
SCALARS = 3 * 4


def row(name, facts):
    return Row("case", name, facts, {}, 0, {})


def statistics(facts):
    """On a CPU, layer norm saves mean and deviation in its input's dtype; the declaration has fp32, as on a GPU.

    At the loss, which determines the peak, no recomputed layer is live.
    """
    norms = 1 if facts["checkpoint"] else 2 * facts["layers"] + 1
    return -2 * norms * facts["b"] * facts["s"] * 2 if facts["precision"] == "bf16" else 0


def wide_masks(facts):
    """On a CPU, a dropout mask has its input's dtype; the declaration has one byte per element, as on a GPU."""
    if not facts["dropout"] or facts["checkpoint"]:
        return 0
    squares, rows = facts["b"] * facts["h"] * facts["s"] ** 2, facts["b"] * facts["s"] * facts["d"]
    return facts["layers"] * (squares + 2 * rows)  # 2 bytes, not 1


def random_states(facts):
    """A checkpoint saves the RNG state, except with fake tensors; on a GPU it is on the host."""
    return facts["layers"] * torch.get_rng_state().nbytes if facts["checkpoint"] else 0


@cases(1, 5, 8, 10)
def test_step_peak_equals_fake_tensors(facts):
    named = statistics(facts) + wide_masks(facts)
    ours = predictions.peak_above(row("train_step", facts), "cpu", "exact")
    assert 0 <= tracked_step(facts) - ours - named <= SCALARS


@every
def test_forward_peak_equals_fake_tensors(facts):
    ours = predictions.peak_above(row("forward", facts), "cpu", "exact")
    assert 0 <= tracked_forward(facts) - ours <= SCALARS


@pytest.mark.parametrize("facts", [CASES[1], CASES[8]], ids=["fp32", "bf16-mixed"])
def test_peak_in_allocator_blocks(facts):
    # each scalar takes a block
    for name, tracked in (("train_step", tracked_step), ("forward", tracked_forward)):
        ours = predictions.peak_above(row(name, facts), "cpu")
        assert 0 <= tracked(facts, predictions.BLOCK) - ours <= SCALARS // 4 * predictions.BLOCK


@every
def test_real_step_peak_matches_prediction(facts):
    named = statistics(facts) + wide_masks(facts) + random_states(facts)
    ours = predictions.peak_above(row("train_step", facts), "cpu", "exact")
    assert abs(measured_step(facts) - ours - named) <= 64


def test_recomputed_block_variables_bound_the_error():
    # with a small vocabulary a block determines the peak: during recomputation, variables reference q, k, v, the
    # attention output and, under autocast, the fp32 result of the first norm; the matmul reads copies and a converted
    # tensor
    facts = {**CASES[10], "v": 53, "dropout": 0.0}
    ours = predictions.peak_above(row("train_step", facts), "cpu", "exact")
    variables = (4 * 2 + 4) * facts["b"] * facts["s"] * facts["d"]
    assert 0 <= tracked_step(facts) - ours <= variables


@cases(5, 8, 11)
def test_step_flops_equal_torchs_counter(facts):
    assert predictions.counted(row("train_step", facts), "cpu") == counted_step(facts)
