"""Published memory peaks: saved tensors and temporaries, tensor by tensor."""

from dataclasses import replace
from math import prod

import pytest
from each import each

pytest.importorskip("torch.utils.flop_counter")

import costgraph as cg
from costgraph.errors import UnsupportedError
from costgraph.report.records.families import Run
from costgraph.report.records.predictions import (
    LIMITS,
    _peak,
    predict,
)
from costgraph.report.records.record import column, last_digits
from costgraph.torch.validation_programs import (
    PROGRAMS,
    axes_of,
    benchmarked,
    joined,
    made_of,
)
from costgraph.torch.validation_programs import (
    PublishedProgram as Program,
)

MIB = 2**20
#: cuBLAS workspaces for two threads, up to Ada: two 4 MiB blocks and eight 16 KiB blocks each.
THREADS = 2 * (2 * 4 * MIB + 8 * 16 * 2**10)


@pytest.fixture(scope="module")
def peaks(measured):
    rows = [r for r in measured if r.family == "liger" and r.what == "peak memory"]
    last = last_digits(measured)

    def predicted(kernel, **facts):
        given = {"kernel": kernel} | facts
        record = next(r for r in rows if given.items() <= (r.inputs | {"device": r.device}).items()
                      and r.inputs["provider"] in ("torch", "huggingface"))  # fmt: skip
        return predict(record, last[column(record)])

    return predicted


def matrices(count, rows, columns, element):
    return count * rows * columns * element


@pytest.mark.parametrize("device", ["a100-80-sxm", "h100-sxm"])
def test_layer_norm_peak_by_hand(peaks, device):
    row = peaks("layer_norm", N=2048, device=device)
    # x, its gradient, y, its gradient, and a new gradient for x; two 8 KiB parameters, their alternate forms, their
    # gradients, and new ones; mean and deviation for 4096 rows
    assert row.peak == matrices(5, 4096, 2048, 4) + 8 * 2048 * 4 + 2 * 4096 * 4
    assert row.bytes == row.peak


def test_bf16_norm_with_fp32_weight_peak_by_hand(peaks):
    row = peaks("rms_norm")
    # 8 MiB each: x, its gradient, that of y, and the rounded norm; 16 MiB each: x in fp32, y, its gradient in fp32,
    # that of the norm, and four for the mean of squares; 8 KiB each: two weights, a gradient, a factor per row
    assert row.peak == row.bytes == 160 * MIB + 2**15


def test_cross_entropy_peak_by_hand(peaks):
    row = peaks("cross_entropy", V=32768)
    # logits, their gradient, log-probabilities, and gradients of both; targets; a block each for the loss and its
    # gradient
    assert row.peak == matrices(5, 16384, 32768, 4) + 16384 * 8 + 2 * 512
    assert row.bytes == row.peak


def test_gated_mlp_peak_includes_workspaces_of_two_threads(peaks):
    row = peaks("tiled_swiglu", mode="forward", T=4096)
    # three weights, input and result; two matmuls, the activation, and the gated product
    rows, d, f = 2 * 4096, 2048, 4096
    assert row.peak == matrices(3, d, f, 2) + matrices(2, rows, d, 2) + matrices(4, rows, f, 2) + THREADS
    assert row.bytes == row.peak


def test_backward_only_peak_counts_from_its_start(peaks):
    row = peaks("geglu", mode="backward")
    assert row.peak == row.bytes
    R = cg.dims("R")
    with cg.Graph("forward") as graph:
        graph.output(cg.relu(graph.input("x", (R,))))
    with pytest.raises(UnsupportedError, match="forward before it has more than the backward counted"):
        _peak(Run(graph, {"R": 61}, phases=("backward",)), cg.load_hardware("t4"))


def test_attention_peak_op_by_op(peaks):
    row = peaks("fused_neighborhood_attention", seq_len=4096, hidden_size=512, device="rtx3090")
    b, s, d, heads = 2, 4096, 512, 8
    # probabilities, their gradient, that of scores, and the product it is computed from; the mask; two sets of four
    # weights, and gradients of one; x and its gradient, that of the result, copies of three projections, the attention
    # output and its gradient, and the result
    squares, weights = matrices(4, b * heads * s, s, 4) + s * s, matrices(12, d, d, 4) + matrices(12, 1, d, 4)
    assert row.peak == squares + weights + matrices(9, b * s, d, 4) + THREADS
    assert row.bytes == row.peak


@each(
    ("kernel", "reason"),
    [
        ("embedding", "peak memory: 12 to 14 GB of other allocations are counted"),
        ("softmax", "peak memory: a vector of N elements is measured, no matrix"),
        ("fused_moe", "inputs: kernel 'fused_moe': which tokens an expert has is up to the data"),
        ("kto_loss", "inputs: kernel 'kto_loss': which rows of logits are chosen is up to the data"),
        ("multi_token_attention", "peak memory: what cuDNN takes for a convolution is not stated"),
    ],
)
def test_unpredicted_peaks_state_the_reason(peaks, kernel, reason):
    assert peaks(kernel).reason == reason


def test_incomplete_peak_records_state_the_reason(peaks):
    record = peaks("rms_norm").record
    for change, reason in (
        ({"unit": "s"},
         "unit: max_memory_allocated in s, expected one of B, KiB, MiB, GiB, MB, GB, GB (GiB by arithmetic)"),
        ({"device": "mi300x"}, "device 'mi300x' states no compute capability, expected a GPU of NVIDIA"),
        ({"inputs": record.inputs | {"measured": "soon"}},
         "inputs: measured 'soon', expected a date, such as 2026-05-15"),
    ):  # fmt: skip
        assert predict(replace(record, **change), 1).reason == reason


def test_program_version_follows_the_date():
    program = PROGRAMS["rms_norm"]
    assert program.at("2026-04-17") is program
    assert (program.kept, program.at("2026-04-18").kept, program.at("2026-04-18").drawn) == (("H float32",), (), True)


def test_sizes_may_be_products_and_quotients():
    program = Program("norms", len, {"x": "A (B 2) fixed"}, sizes={"A": ("c", "d*e"), "B": ("f/g/2",)})
    assert program.bound({"d": 3, "e": 5, "f": 42, "g": 7}) == {"A": 15, "B": 3}
    x = made_of("A (B 2) fixed", {"A": 15, "B": 3}, None)
    assert (x.shape, joined("A (B 2) fixed", x).shape) == ((15, 3, 2), (15, 6))
    with pytest.raises(UnsupportedError, match="inputs: no size f/g/2, expected a positive whole number"):
        program.bound({"d": 3, "e": 5, "f": 43, "g": 7})


def test_peak_limit_counts_close_predictions(peaks):
    row = replace(peaks("layer_norm"), peak=10**6, bytes=10**6)
    near = [replace(row, bytes=10**6 + 4096)] * 19
    (found,) = [limit for ask in LIMITS for limit in ask([*near, replace(row, bytes=10**6 - 4097)])]
    assert (found.holds, found.found) == (True, "19 of 20 are, off by 0.41% in the median; 0 have no prediction")
    (found,) = [limit for ask in LIMITS for limit in ask([*near[:18], replace(row, peak=10**6 + 8193)])]
    assert not found.holds


@pytest.mark.parametrize("kernel", ["dyt", "poly_norm", "modulated_rms_norm", "softmax", "embedding", "sparsemax"])
def test_peaks_of_unrecorded_programs_by_hand(kernel):
    """The result, the seed of the backward pass and the gradients are live together, in fp32."""
    program = PROGRAMS[kernel].at("2026-06-01")
    graph = benchmarked(program, "float32", "full", "sm_100")
    facts = {"BT": 509 * 127, "T": 127, "hidden_size": 1031, "vocab_size": 131, "has_shift": True, "beta": True}
    sizes = program.bound(facts)
    (made,) = program.made
    elements = prod(sizes[axis] for axis in axes_of(made))
    assert cg.peak_memory(graph, device="cuda", arch="sm_100", **sizes) > (2 + (kernel != "embedding")) * elements * 4
    assert program.kept == ()
