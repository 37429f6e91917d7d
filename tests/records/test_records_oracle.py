"""The declared model of the records beside the same model in torch: exact, but for what is named.

Fake tensors have every storage of a step and compute nothing; the profiler has what a real step takes.
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
    """All cases, of which a plain run holds those at some places."""
    return pytest.mark.parametrize("facts", [
        pytest.param(facts, marks=() if i in plain else pytest.mark.long, id="-".join(str(facts[n]) for n in NAMES))
        for i, facts in enumerate(CASES)
    ])  # fmt: skip


every = cases(*range(len(CASES)))
# the seed of the backward pass, the sum of weights of a loss and a loss that a variable holds
SCALARS = 3 * 4


def row(name, facts):
    return Row("case", name, facts, {}, 0, {})


def statistics(facts):
    """On a CPU layer norm keeps mean and deviation in the format of its input, on a GPU in fp32 as declared.

    Of layers that are computed again there are none at the loss, which holds the peak.
    """
    norms = 1 if facts["checkpoint"] else 2 * facts["layers"] + 1
    return -2 * norms * facts["b"] * facts["s"] * 2 if facts["precision"] == "bf16" else 0


def wide_masks(facts):
    """On a CPU a dropout mask has the format of its input, on a GPU a byte an element as declared."""
    if not facts["dropout"] or facts["checkpoint"]:
        return 0
    squares, rows = facts["b"] * facts["h"] * facts["s"] ** 2, facts["b"] * facts["s"] * facts["d"]
    return facts["layers"] * (squares + 2 * rows)  # 2 bytes for 1


def random_states(facts):
    """A checkpoint keeps the state of the generator, outside fake tensors and, on a GPU, on the host."""
    return facts["layers"] * torch.get_rng_state().nbytes if facts["checkpoint"] else 0


@cases(1, 5, 8, 10)
def test_peak_of_a_step(facts):
    named = statistics(facts) + wide_masks(facts)
    ours = predictions.peak_above(row("train_step", facts), "cpu", "exact")
    assert 0 <= tracked_step(facts) - ours - named <= SCALARS


@every
def test_peak_of_a_forward_pass(facts):
    ours = predictions.peak_above(row("forward", facts), "cpu", "exact")
    assert 0 <= tracked_forward(facts) - ours <= SCALARS


@pytest.mark.parametrize("facts", [CASES[1], CASES[8]], ids=["fp32", "bf16-mixed"])
def test_peak_in_blocks_of_an_allocator(facts):
    # scalars take a block each
    for name, tracked in (("train_step", tracked_step), ("forward", tracked_forward)):
        ours = predictions.peak_above(row(name, facts), "cpu")
        assert 0 <= tracked(facts, predictions.BLOCK) - ours <= SCALARS // 4 * predictions.BLOCK


@every
def test_bytes_that_a_real_step_takes(facts):
    named = statistics(facts) + wide_masks(facts) + random_states(facts)
    ours = predictions.peak_above(row("train_step", facts), "cpu", "exact")
    assert abs(measured_step(facts) - ours - named) <= 64


def test_variables_of_a_block_that_is_computed_again():
    # with few words a block holds the peak: while it runs again, variables name q, k, v, what attention makes of them,
    # and under autocast what the first norm returns, in fp32; the product reads copies and a converted tensor
    facts = {**CASES[10], "v": 53, "dropout": 0.0}
    ours = predictions.peak_above(row("train_step", facts), "cpu", "exact")
    variables = (4 * 2 + 4) * facts["b"] * facts["s"] * facts["d"]
    assert 0 <= tracked_step(facts) - ours <= variables


@cases(5, 8, 11)
def test_flops(facts):
    assert predictions.counted(row("train_step", facts), "cpu") == counted_step(facts)
