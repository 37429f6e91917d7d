"""Symbolic time: against hand sums, at numbers, on every device, and with symbolic hardware."""

import math
import random
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import sympy
from budget import examples
from each import each
from shared import load

import costgraph as cg
from costgraph.algebra.polynomial import poly
from costgraph.analysis.costs import compute_dtype, executions, traffic_of
from costgraph.bind.evaluate import exactly
from costgraph.dtypes import dtype
from costgraph.hardware.specs import (
    fastest,
    nearest,
)
from costgraph.hardware.units import Quantity
from costgraph.ir.graph import bindings

H100 = cg.load_hardware("h100-sxm")
UNKNOWN = H100.symbolic()
B, S, D, F, N, bandwidth, peak_bf16, vector_fp32 = cg.dims("B S D F N bandwidth peak_bf16 vector_fp32")


def mlp(dtype="bf16", *assumed):
    with cg.Graph("mlp", dtype=dtype) as g:
        h = cg.relu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, name="up"))
        g.output(cg.relu(cg.linear(h, "b f -> b d", d=D, name="down")))
        g.assume(*assumed)
    return g


def by_hand(graph, device, sizes):
    """Return the estimate in fractions; a kernel is one op."""
    values, times = bindings(graph, sizes), []
    for op, runs, moves in executions(graph):
        moved = sum(traffic_of(op).values(), start=poly(0)) * runs
        worked = {
            kind: (amount * runs).bind(values).constant
            for kind, amount in op.kind.flops(op).by_kind().items()
            if amount
        }
        rates = {kind: device.rate(compute_dtype(op), "matmul" if kind == "matmul" else "vector") for kind in worked}
        if moves:
            times.append([0, Fraction(moved.bind(values).constant) / device.bandwidth.value])
        times[-1][0] += sum(Fraction(worked[kind]) / rates[kind].value for kind in worked)
    return sum(map(max, times))


# -- the formula ---------------------------------------------------------------------------------------------------


def test_time_sums_max_of_compute_and_memory():
    # 2 B D F FLOPs for a matmul on 2-byte operands; relu has one FLOP and 4 bytes per element
    product = cg.Max(2 * B * D * F / peak_bf16, 2 * (B * D + D * F + B * F) / bandwidth)
    relus = [cg.Max(B * n / vector_fp32, 4 * B * n / bandwidth) for n in (D, F)]
    seconds = cg.seconds(mlp(), UNKNOWN)
    for sizes in ({"B": 2, "D": 3, "F": 5}, {"B": 7, "D": 10**6, "F": 11}):
        at = {**sizes, "bandwidth": 13, "peak_bf16": 17, "vector_fp32": 19}
        assert cg.evaluate(seconds, **at) == cg.evaluate(2 * product + sum(relus), **at)
    # the two matmuls are one term
    assert sum(t.has(cg.Max) for t in sympy.Add.make_args(seconds)) == 3


def test_proportional_op_times_are_one_term():
    with cg.Graph("g", dtype="bf16") as g:
        for name, heads in (("k", 1), ("q", 3)):
            g.output(cg.relu(g.input(name, (heads, S, D))))
    assert cg.seconds(g, UNKNOWN) == 4 * S * D * cg.Max(1 / vector_fp32, 4 / bandwidth)


def test_size_independent_bound_has_no_max():
    # relu's 0.25 FLOP/B is below every ridge point of the vector unit, as numbers decide
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.relu(g.input("x", (S,))))
    assert cg.seconds(g, H100) == 4 * S / sympy.Integer(H100.bandwidth.value)
    assert [row.bound for row in cg.roofline(g, H100).rows] == ["memory"]


def test_assumptions_decide_maxima():
    g, tall = mlp("bf16"), mlp("bf16", "B >= 4096", "D >= 4096", "F >= 4096")
    assert cg.seconds(g, H100).has(cg.Max)
    assert not cg.seconds(tall, H100).has(cg.Max)
    assert [row.bound for row in cg.roofline(tall, H100).rows] == ["compute", "memory"] * 2
    assert cg.evaluate(cg.seconds(tall, H100), B=4096, D=8192, F=4099) == cg.seconds(g, H100, B=4096, D=8192, F=4099)


def test_compute_bound_is_a_size_condition():
    row = cg.roofline(mlp(), H100, D=1024, F=4096).rows[0]
    turn = cg.crossover(next(mlp().walk()), H100, "B", D=1024, F=4096)
    assert row.bound.compute.lhs == B
    assert float(row.bound.compute.rhs) == turn
    assert str(row.bound) == f"compute where B >= {turn:.4g}, else memory"
    for size in (math.floor(turn), math.ceil(turn)):
        assert cg.roofline(mlp(), H100, B=size, D=1024, F=4096).rows[0].bound == (
            "compute" if row.bound.compute.subs(B, size) else "memory"
        )


def test_rows_and_totals_are_symbolic():
    found, at = cg.roofline(mlp(), H100, D=512), {"B": 64, "F": 2048}
    bound, named = cg.roofline(mlp(), H100, D=512, **at), {B: 64, F: 2048}
    for name in ("estimate", "lower_bound", "flops", "bytes", "fused_bytes"):
        assert cg.evaluate(getattr(found, name), **at) == getattr(bound, name)
    for row, number in zip(found.rows, bound.rows, strict=True):
        only = {n: at[n] for n in map(str, row.compute_s.free_symbols | row.memory_s.free_symbols)}
        assert cg.evaluate(row.seconds, **only) == number.seconds
        assert float(row.intensity.subs(named)) == pytest.approx(number.intensity)
        assert float(row.attainable.subs(named)) == pytest.approx(number.attainable)
    assert "compute where B*F" in str(found)
    with pytest.raises(cg.BindingError, match="expected numbers, still unbound: B, F"):
        _ = found.bound
    with pytest.raises(cg.BindingError, match="plot of graph 'mlp': expected numbers, still unbound: B, F"):
        found.plot()


def test_time_formula_supports_common_operations():
    seconds = cg.seconds(mlp(), H100, D=1024, F=4096)
    sizes = np.array([1, 64, 4096])
    swept = cg.compile(seconds)(B=sizes)
    assert list(swept) == pytest.approx([cg.seconds(mlp(), H100, B=int(b), D=1024, F=4096) for b in sizes])
    # far from the ridge point, one more row costs either its FLOPs or its bytes
    slope = cg.evaluate(seconds.diff(B), B=10**6)
    relu = 4 * (1024 + 4096) / H100.bandwidth.value
    assert slope == pytest.approx(2 * 2 * 1024 * 4096 / H100.peak["bf16"].value + relu)
    assert str(seconds) in str(sympy.sympify(seconds))


def test_lower_bound_names_bounding_unit():
    regimes = cg.regimes(cg.seconds(mlp(), H100, "lower", D=1024, F=4096))
    assert [r.op for r in regimes] == ["matmul", "memory"]
    with pytest.raises(cg.GraphError, match="seconds: which 'fastest', expected one of estimate, lower, calibrated"):
        cg.seconds(mlp(), H100, "fastest")


# -- at numbers -----------------------------------------------------------------------------------------------------

#: A small preset of every family; those sampled in this file come first.
FAMILIES = (
    "gpt2", "llama-3-8b", "mixtral-8x7b", "mamba-130m", "vit-b-32", "resnet18", "bert-base", "t5-small", "dlrm-small",
    "alexnet", "clip-vit-b-32", "convnext-tiny", "ddpm-cifar10", "deepseek-v2-lite", "densenet121", "dit-s-8",
    "efficientnet-b0", "falcon-7b", "gemma-2-2b", "gemma-3-1b", "gpt-oss-20b", "gru-ptb-small",
    "linear-attention-mnist", "lstm-ptb-small", "mamba2-130m", "mistral-7b", "mlp", "mobilenet-v2", "olmo-2-1b",
    "phi-3-mini", "qwen1.5-moe-a2.7b",
    "qwen2.5-0.5b", "qwen3-0.6b", "rwkv-7-0.1b", "swin-t", "vgg11", "whisper-tiny", "xlstm-125m",
    "stable-diffusion-1.5-unet",
)  # fmt: skip


def holds_at_numbers(graph, pick, points):
    open_ = sorted({str(s) for s in cg.flops(graph).free_symbols | cg.bytes_moved(graph).free_symbols})
    estimate, lower = (cg.seconds(graph, H100, which) for which in ("estimate", "lower"))
    for _ in range(points):
        # lengths divisible by patches, chunks and windows
        sizes = {n: pick.randrange(1, 65) if n == "B" else 64 * pick.randrange(1, 8) for n in open_}
        found = cg.roofline(graph, H100, **sizes)
        assert cg.evaluate(estimate, **sizes) == found.estimate
        assert cg.evaluate(lower, **sizes) == found.lower_bound
    assert found.estimate == float(by_hand(graph, H100, sizes))


def op_by_op(graph, device):
    """Return the estimate in fractions as a function of sizes: the larger of two times per op, counting equal ops."""
    times = []
    for op, runs, moves in executions(graph):
        worked = [
            amount * runs / device.rate(compute_dtype(op), "matmul" if kind == "matmul" else "vector").value
            for kind, amount in op.kind.flops(op).by_kind().items()
            if amount
        ]
        if moves:
            moved = sum(traffic_of(op).values(), start=poly(0)) * runs
            times.append([poly(0), moved / device.bandwidth.value])
        times[-1][0] += sum(worked, start=poly(0))
    values = bindings(graph, {})
    alike = Counter((compute.bind(values), memory.bind(values)) for compute, memory in times)
    plans = [(exactly(compute), exactly(memory), count) for (compute, memory), count in alike.items()]
    return lambda sizes: sum(max(compute(sizes), memory(sizes)) * count for compute, memory, count in plans)


def holds_at_many_points(graph, pick):
    """Compare the formula with numeric sums at 100 points (COSTGRAPH_EXAMPLES=10: 1,000) and `roofline` at some."""
    open_ = sorted({str(s) for s in cg.flops(graph).free_symbols | cg.bytes_moved(graph).free_symbols})
    estimate, lower = (cg.seconds(graph, H100, which) for which in ("estimate", "lower"))
    summed = op_by_op(graph, H100)
    for i in range(examples(100)):
        sizes = {n: pick.randrange(1, 65) if n == "B" else 64 * pick.randrange(1, 8) for n in open_}
        at_once = cg.evaluate(estimate, **sizes)
        assert at_once == float(summed(sizes)), sizes
        if i % 50 == 0:
            found = cg.roofline(graph, H100, **sizes)
            assert (at_once, cg.evaluate(lower, **sizes)) == (found.estimate, found.lower_bound), sizes


@pytest.mark.parametrize("name", FAMILIES[:9])
def test_formula_at_numbers_matches_roofline(name):
    model, pick = load(name), random.Random(name)
    holds_at_numbers(model, pick, 3)
    if name == "gpt2":
        holds_at_numbers(cg.training_step(model), pick, 2)
        holds_at_numbers(cg.decode(model), pick, 3)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_formula_matches_roofline_for_every_family(name):
    model, pick = load(name), random.Random(name)
    made = [model]
    for change in (cg.training_step, cg.decode):
        with suppress(cg.CostGraphError):  # models without a loss or a cache
            made.append(change(model))
    for graph in made:
        holds_at_many_points(graph, pick)


# -- symbolic hardware ----------------------------------------------------------------------------------------------


def test_substituting_device_rates_gives_device_times():
    g = mlp()
    at = {"B": 5, "D": 1000, "F": 3000}
    for device in map(cg.load_hardware, ("h100-sxm", "a100-80-sxm", "mi300x", "l4")):
        asked = {str(s): v for s, v in device.bindings().items() if s in cg.seconds(g, UNKNOWN).free_symbols}
        assert cg.evaluate(cg.seconds(g, UNKNOWN), **at, **{n: int(v) for n, v in asked.items()}) == cg.seconds(
            g, device, **at
        )


def test_ridge_points_and_balance_are_symbolic():
    assert UNKNOWN.ridge("bf16") == peak_bf16 / bandwidth
    g = mlp()
    op = next(g.walk())
    # 2 B D F / P = 2 (B D + D F + B F) / W
    balanced = cg.crossover(op, UNKNOWN, "bandwidth")
    assert sympy.cancel(balanced - peak_bf16 * (B * D + D * F + B * F) / (B * D * F)) == 0
    turn = cg.crossover(op, UNKNOWN, "B")
    assert sympy.cancel(turn - D * F * peak_bf16 / (D * F * bandwidth - (D + F) * peak_bf16)) == 0
    assert float(turn.subs({**H100.bindings(), D: 1024, F: 4096})) == cg.crossover(op, H100, "B", D=1024, F=4096)
    assert cg.plan.training_days(1e20, UNKNOWN, mfu=0.5, dtype="bf16").has(peak_bf16)


def test_units_of_symbolic_device_overlap():
    with cg.Graph("g", dtype="fp32") as g:
        g.output(cg.relu(g.input("a", (N, N)) @ g.input("b", (N, N))))
    at = {k: v for k, v in H100.bindings().items() if k in cg.seconds(g, UNKNOWN, "lower").free_symbols}
    # on the H100 both run on one unit, which raises the bound
    assert float(cg.seconds(g, UNKNOWN, "lower").subs({**at, N: 4096})) < cg.seconds(g, H100, "lower", N=4096)


def test_numeric_questions_refuse_symbols():
    with pytest.raises(cg.SpecError, match=r"peak_bf16: a symbol of symbolic hardware; expected a number"):
        float(UNKNOWN.rate("bf16"))
    assert str(UNKNOWN.bandwidth) == "bandwidth B/s"
    with pytest.raises(cg.BindingError, match="report: rates of h100-sxm are symbols, expected a device with numbers"):
        cg.report(mlp(), UNKNOWN, B=1, D=2, F=3)
    step = cg.decode(load("gpt2"))
    with pytest.raises(cg.BindingError, match="still unbound: bandwidth, c2c"):
        cg.plan.throughput(step, UNKNOWN, "B", [1], S=8)
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (bandwidth,))))
    with pytest.raises(cg.BindingError, match="bandwidth names a dimension and a rate of the device"):
        cg.seconds(g, UNKNOWN)
    assert cg.seconds(g, H100, bandwidth=3) > 0
    with pytest.raises(cg.ShapeError):
        Quantity(sympy.Symbol("x"), "B/s")


# -- missing rates --------------------------------------------------------------------------------------------------


def rates(**values):
    return {key: Quantity(value, "FLOP/s") for key, value in values.items()}


@each(
    ("wanted", "unit", "peak", "vector", "used", "why"),
    [
        ("bf16", "matmul", rates(fp32=1, fp64=1, fp16=9), {}, "peak.fp32", "next wider format"),
        ("bf16", "matmul", rates(fp16=9), {}, "peak.fp16", "nearest format"),  # fp16 cannot represent all bf16 values
        ("fp8_e4m3", "matmul", rates(bf16=3, fp16=2, fp32=1), {}, "peak.fp16", "next wider format"),
        ("fp32", "matmul", rates(bf16=9), rates(fp32=1), "vector.fp32", "vector unit"),
        ("fp32", "matmul", rates(bf16=9, int8=18), {}, "peak.bf16", "nearest format"),
        ("int4", "matmul", rates(int8=2, fp8=2, bf16=1), {}, "peak.int8", "next wider format"),
        ("int8", "matmul", rates(bf16=1, fp8=2), {}, "peak.bf16", "next wider format"),
        ("fp32", "vector", rates(fp32=5, bf16=9), {}, "peak.fp32", "matrix unit"),
        ("fp32", "vector", rates(bf16=9), {}, "peak.bf16", "matrix unit, nearest format"),
        ("fp32", "vector", rates(bf16=9), rates(fp64=1), "vector.fp64", "next wider format"),
        ("fp64", "vector", rates(fp64=2), rates(fp32=1), "peak.fp64", "matrix unit"),
    ],
)
def test_fallback_rates(wanted, unit, peak, vector, used, why):
    assert nearest(dtype(wanted), unit, peak, vector) == (used, why)
    assert fastest(peak, vector) == max((q.value, f"peak.{k}") for k, q in peak.items())[1]
    assert nearest(dtype(wanted), unit, {}, {}) is fastest({}, {}) is None


def test_fallback_warns_and_keeps_lower_bound():
    with pytest.warns(cg.StandInWarning, match=r"peak.bf16 is missing, peak.fp32 \(next wider format\)"):
        taken = cg.seconds(mlp(), "v100-sxm2-16gb", B=4096, D=4096, F=4096)
    estimate = cg.roofline(mlp(), "v100-sxm2-16gb", B=4096, D=4096, F=4096)
    v100 = cg.load_hardware("v100-sxm2-16gb")
    assert estimate.estimate == taken == cg.roofline(mlp(), v100, fallback="fp32", B=4096, D=4096, F=4096).estimate
    assert estimate.lower_bound == cg.roofline(mlp(), v100, fallback="fp16", B=4096, D=4096, F=4096).lower_bound
    assert "peak.bf16 is missing, peak.fp32 (next wider format) stands in" in str(estimate)
    assert [s.used for s in estimate.stand_ins] == ["peak.fp32", "peak.fp16"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cg.seconds(mlp(), v100, fallback="fp16", B=1)  # a named fallback does not warn
    with pytest.warns(cg.StandInWarning):
        cg.crossover(mlp(), v100, "B", D=4096, F=4096)


def test_device_without_rate_is_refused():
    bare = replace(H100, peak={}, vector={}, tables={**H100.tables, "peak": {}, "vector": {}})
    with pytest.raises(cg.SpecError, match=r"no matmul rate peak\.bf16 for bf16; expected at least one rate"):
        cg.roofline(mlp(), bare)


@pytest.fixture(scope="module")
def llamas():
    model = load("llama-3-8b")
    steps = [cg.training_step(model, precision=p) for p in ("bf16", "fp16-mixed")]
    half = load("llama-3-8b", dtype="fp16")
    return [model, half, cg.decode(model), cg.decode(half), *steps]


@pytest.mark.parametrize("device", cg.list_hardware())
def test_every_device_has_times(llamas, device):
    for graph in llamas:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cg.StandInWarning)
            least, taken = (cg.seconds(graph, device, which, B=1, S=2048) for which in ("lower", "estimate"))
        assert 0 < least <= taken < 1e4


# -- crossover assumptions ------------------------------------------------------------------------------------------


def test_crossover_respects_assumptions():
    # would be 1450 without the assumption S <= 1024
    assert cg.crossover(load("gpt2"), H100, "S", B=1) == math.inf
    turn = cg.crossover(mlp(), H100, "B", D=4096, F=4096)
    assert 300 < turn < 1000
    for assumed, expected in (
        ("B <= 300", math.inf), ("B*B <= 90000", math.inf), ("B >= 1001", 0), ("B <= 1000", turn), ("B == 7", math.inf),
        ("B == 5003", 0), ("B*D >= 4096*1000", 0),
    ):  # fmt: skip
        assert cg.crossover(mlp("bf16", assumed), H100, "B", D=4096, F=4096) == expected, assumed


def test_largest_respects_assumptions():
    with cg.Graph("g", dtype="bf16") as g:
        q = cg.einsum(g.input("x", (1, S, 640)), g.param("w", (640, 640)), "b s j, j k -> b s k")
        g.output(cg.attention(*[cg.ops.reshape(q, (1, 1, S, 640))] * 3, causal=True))
    turn = cg.crossover(g, H100, "S")
    assert 100 < turn < 10**4
    for most, expected in ((turn - 1, math.inf), (turn, turn), (turn + 1, turn)):
        with g.copy() as limited:
            limited.assume(f"S <= {most}")
        assert cg.crossover(limited, H100, "S") == expected
    with g.copy() as limited:
        limited.assume(f"S >= {turn + 5}")
    assert cg.crossover(limited, H100, "S") == 0
