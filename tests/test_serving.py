"""Serving questions: largest batch, compute-bound crossover, throughput against latency."""

import json
import math
from fractions import Fraction

import pytest
from each import each
from shared import load

import costgraph as cg
from costgraph.cli import main

#: Devices with a rate for 16-bit matrices.
MATRIX = [name for name in cg.list_hardware() if name != "a30"]
S = 8192


def step(name="llama-3-70b", **options):
    return cg.decode(load(name, **options))


LLAMA = step()
# 2 bytes each for key and value per position, in 8 heads of 128 and 80 layers
CACHE = 2 * 2 * 8 * 128 * 80
#: Usable memory of an H100 in bytes.
H100 = 85_017_493_504


# -- one sequence ----------------------------------------------------------------------------------------------------


def test_all_devices_with_16_bit_rate_are_covered():
    assert {n for n in cg.list_hardware() if {"bf16", "fp16"} & set(cg.load_hardware(n).peak)} == {*MATRIX}
    assert len(MATRIX) > 40


@each("name", MATRIX)
def test_single_sequence_decode_is_memory_bound(name):
    device = cg.load_hardware(name)
    # devices without a bf16 rate use the fp16 rate, and devices without a vector rate use the matrix unit's
    estimate = cg.roofline(LLAMA, device, fallback="bf16" if "bf16" in device.peak else "fp16", B=1, S=S)
    assert {row.bound for row in estimate.rows} == {"memory"}
    assert estimate.bound == "memory"
    # all weights except the embedding table, of which one row is read, and the cache
    least = Fraction(2 * (cg.param_count(LLAMA) - 128255 * 8192) + CACHE * S, device.bandwidth.value)
    assert 1 <= estimate.lower_bound / float(least) < 1.001
    assert estimate.lower_bound <= estimate.estimate < 1.01 * estimate.lower_bound


# -- largest sizes ---------------------------------------------------------------------------------------------------


@each("name", ["b200", "b300", "mi300x", "mi325x", "mi355x", "gb200", "tpu-v7x"])
def test_largest_batch_fills_memory_beside_weights(name):
    room = cg.load_hardware(name).capacity().value - cg.param_bytes(LLAMA)
    found = cg.largest(LLAMA, "B", hardware=name, S=S)
    # 265 kB of activations per sequence, beside 2.7 GB of its cache
    assert found == math.floor(room / (CACHE * S + 272904))
    assert found in (math.floor(room / (CACHE * S)), math.floor(room / (CACHE * S)) - 1)
    assert cg.peak_memory(LLAMA, B=found, S=S) <= cg.load_hardware(name).capacity().value
    assert cg.peak_memory(LLAMA, B=found + 1, S=S) > cg.load_hardware(name).capacity().value


def test_nothing_fits_if_weights_do_not():
    assert cg.largest(LLAMA, "B", hardware="h100-sxm", S=S) == 0


def test_largest_context():
    g, batch = step("llama-3-8b"), 4
    room = H100 - cg.param_bytes(g)
    each = 2 * 2 * 8 * 128 * 32 * batch
    found = cg.largest(g, "S", hardware="h100-sxm", B=batch)
    assert 0 <= room / each - found < 20  # activations of 4 tokens


def test_quantization_increases_largest_batch():
    q = cg.quantize(LLAMA, "int4", cache="fp8_e4m3", group=128)
    room = H100 - cg.param_bytes(q)
    assert cg.largest(q, "B", hardware="h100-sxm", S=S) == math.floor(room / (CACHE / 2 * S + 272904)) == 33


# -- crossovers ------------------------------------------------------------------------------------------------------


def excess(g, hardware, **sizes):
    rows = cg.roofline(g, hardware, **sizes).rows
    return sum(row.compute_s for row in rows) - sum(row.memory_s for row in rows)


@pytest.mark.parametrize("hardware", ["h100-sxm", "a100-80-sxm", "mi300x"])
@pytest.mark.parametrize("context", [1, 128, 512])
def test_crossover_batch_formula_matches_scan(hardware, context):
    formula = cg.crossover(LLAMA, hardware, "B")
    assert {s.name for s in formula.free_symbols} == {"S"}
    place = cg.crossover(LLAMA, hardware, "B", S=context)
    assert place == pytest.approx(float(formula.subs(dict.fromkeys(formula.free_symbols, context))))
    last = math.ceil(2 * place)
    for batch in sorted({*range(1, last, last // 20), math.floor(place), math.ceil(place)}):
        assert (excess(LLAMA, hardware, B=batch, S=context) >= 0) == (batch >= place)


def test_long_context_decode_is_never_compute_bound():
    formula = cg.crossover(LLAMA, "h100-sxm", "B")
    (context,) = formula.free_symbols
    # where reading a sequence's cache takes as long as computing its token
    last = math.floor(cg.crossover(LLAMA, "h100-sxm", "S", B=10**9))
    assert formula.subs(context, last) > 0 > formula.subs(context, last + 1)
    assert cg.crossover(LLAMA, "h100-sxm", "B", S=last + 1) == math.inf
    assert excess(LLAMA, "h100-sxm", B=10**9, S=last) > 0 > excess(LLAMA, "h100-sxm", B=10**9, S=last + 1)


def test_crossover_context():
    place = cg.crossover(LLAMA, "h100-sxm", "S", B=512)
    assert excess(LLAMA, "h100-sxm", B=512, S=math.floor(place)) > 0
    assert excess(LLAMA, "h100-sxm", B=512, S=math.ceil(place)) < 0
    assert {s.name for s in cg.crossover(LLAMA, "h100-sxm", "S").free_symbols} == {"B"}


def test_quantized_weights_lower_crossover_batch():
    narrow = cg.quantize(LLAMA, "int8", "int8")
    weights_only = cg.quantize(LLAMA, "int8")
    places = [cg.crossover(g, "h100-sxm", "B", S=1) for g in (weights_only, narrow, LLAMA)]
    # Half the bytes at one rate. At twice the rate, weight bytes per FLOP stay the same and activation bytes double.
    assert places[0] < 0.6 * places[2]
    assert places[2] < places[1] < 1.5 * places[2]


# -- throughput against latency --------------------------------------------------------------------------------------


def test_throughput_row_matches_roofline_and_peak():
    table = cg.plan.throughput(LLAMA, "b200", "B", [4, 1, 4, 2], S=S)
    assert [row.size for row in table.rows] == [1, 2, 4]
    for row in table.rows:
        times = cg.roofline(LLAMA, "b200", B=row.size, S=S)
        assert (row.seconds, row.lower_bound, row.bound) == (times.estimate, times.lower_bound, times.bound)
        assert row.memory == cg.peak_memory(LLAMA, B=row.size, S=S)
        assert row.tokens == row.size
        assert row.tokens_per_second == row.size / times.estimate
    assert table.best is table.rows[-1]
    assert table.sizes["S"] == S
    assert "B" not in table.sizes
    assert repr(table) == "Throughput('llama-3-70b.decode' on b200, 3 sizes of B)"


def test_default_sizes_end_with_largest_fitting():
    table = cg.plan.throughput(LLAMA, "b200", "B", S=S)
    assert [row.size for row in table.rows] == [1, 2, 4, 8, 16, 18]
    assert all(row.fits for row in table.rows)
    assert [row.size for row in cg.plan.throughput(LLAMA, "h100-sxm", "B", S=S).rows] == [1]


def test_rows_that_do_not_fit_are_marked():
    table = cg.plan.throughput(LLAMA, "b200", "B", [18, 19], S=S)
    assert [row.fits for row in table.rows] == [True, False]
    assert table.best is table.rows[0]
    assert cg.plan.throughput(LLAMA, "h100-sxm", "B", [1], S=S).best is None
    assert str(table).split("\n")[2].endswith("does not fit  memory")


def test_multi_token_steps():
    several = cg.decode(load("llama-3-8b"), "n")
    (row,) = cg.plan.throughput(several, "h100-sxm", "B", [3], S=100, n=5).rows
    assert row.tokens == 15


def test_context_length_may_be_varied():
    table = cg.plan.throughput(step("llama-3-8b"), "h100-sxm", "S", [1024, 2048], B=2)
    assert [row.tokens for row in table.rows] == [2, 2]
    assert table.rows[0].seconds < table.rows[1].seconds


@each(
    ("arguments", "sizes", "text"),
    [
        (("B", [1]), {}, "throughput of graph 'llama-3-70b.decode': expected numbers, still unbound: S"),
        (("B", [0]), {"S": 1}, "throughput: B=0: expected a positive integer"),
        (("B", []), {"S": 1}, "throughput: no values, expected at least one"),
        (("B", "12"), {"S": 1}, "throughput: values '12', expected sizes such as [1, 2, 4]"),
        (("B", 3), {"S": 1}, "throughput: values 3, expected sizes such as [1, 2, 4]"),
    ],
)
def test_invalid_throughput_arguments_are_refused(arguments, sizes, text):
    with pytest.raises(cg.BindingError) as error:
        cg.plan.throughput(LLAMA, "h100-sxm", *arguments, **sizes)
    assert str(error.value).startswith(text)


def test_missing_rate_warns_unless_fallback_is_named():
    with pytest.warns(cg.StandInWarning, match=r"peak\.bf16 is missing, peak\.fp32 \(next wider format\) stands in"):
        cg.plan.throughput(LLAMA, "v100-sxm2-32gb", "B", [1], S=1)
    assert cg.plan.throughput(LLAMA, "v100-sxm2-32gb", "B", [1], S=1, fallback="fp16").rows


def test_throughput_plot(tmp_path):
    pytest.importorskip("matplotlib")
    table = cg.plan.throughput(step("llama-3-8b"), "h100-sxm", "B", [1, 16, 64, 1024], S=2048)
    figure = table.plot(tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    (ax,) = figure.axes
    labels = ax.get_legend_handles_labels()[1]
    assert {"estimate", "bound by memory", "bound by memory, does not fit"} <= set(labels)
    with pytest.raises(cg.FormatError, match="expected a file ending in"):
        table.plot("curve.txt")


# -- latency ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time", ["estimate", "lower_bound"])
def test_latency_is_prefill_plus_decode_steps(time):
    g = load("llama-3-8b")
    whole, one = cg.prefill(g, logits="last"), cg.decode(g)
    latency = cg.plan.latency(whole, one, "h100-sxm", prompt=100, steps=7, B=3, time=time)
    times = [getattr(cg.roofline(one, "h100-sxm", B=3, S=100 + i), time) for i in range(1, 8)]
    assert latency.first_token == getattr(cg.roofline(whole, "h100-sxm", B=3, S=100), time)
    assert (latency.next_token, latency.last_token) == (times[0], times[-1])
    assert latency.total == pytest.approx(latency.first_token + math.fsum(times), rel=1e-9)
    assert latency.per_token == pytest.approx(math.fsum(times) / 7, rel=1e-9)


def test_steps_across_crossover_are_summed_individually():
    g = load("llama-3-8b")
    whole, one = cg.prefill(g), cg.decode(g)
    latency = cg.plan.latency(whole, one, "h100-sxm", prompt=1, steps=40, B=400)
    times = [cg.roofline(one, "h100-sxm", B=400, S=1 + i).estimate for i in range(1, 41)]
    assert latency.total - latency.first_token == pytest.approx(math.fsum(times), rel=1e-9)


def test_multi_token_steps_grow_context_faster():
    g = load("llama-3-8b")
    latency = cg.plan.latency(cg.prefill(g), cg.decode(g, 4), "h100-sxm", prompt=10, steps=3, B=1)
    assert latency.last_token == cg.roofline(cg.decode(g, 4), "h100-sxm", B=1, S=10 + 3 * 4).estimate


def test_encoder_runs_once_per_request():
    g = load("t5-small")
    latency = cg.plan.latency(cg.prefill(g), cg.decode(g), "h100-sxm", prompt=1, steps=9, B=2, M=64)
    assert latency.next_token == cg.roofline(cg.decode(g), "h100-sxm", B=2, M=64, S=2).estimate
    assert latency.next_token <= latency.last_token < latency.first_token


def test_invalid_latency_arguments_are_refused():
    g = load("llama-3-8b")
    whole, one = cg.prefill(g), cg.decode(g)
    with pytest.raises(cg.BindingError, match="still unbound: B"):
        cg.plan.latency(whole, one, "h100-sxm", prompt=10, steps=3)
    with pytest.raises(cg.BindingError, match="latency: steps=0: expected a positive integer"):
        cg.plan.latency(whole, one, "h100-sxm", prompt=10, steps=0, B=1)
    with pytest.raises(cg.BindingError, match="latency: W is not a dimension of either graph"):
        cg.plan.latency(whole, one, "h100-sxm", prompt=10, steps=1, B=1, W=1)
    sequences, positions, width = cg.dims("B S D")
    with cg.Graph("other", dtype="bf16") as other:
        other.output(cg.relu(other.input("x", (sequences, positions, width))))
        other.defaults["D"] = 3
    with pytest.raises(cg.GraphError, match="share no inputs along S with equal numbers of sequences"):
        cg.plan.latency(other, one, "h100-sxm", prompt=10, steps=1, B=1)
    with pytest.raises(cg.GraphError, match="expected one of estimate, lower_bound"):
        cg.plan.latency(whole, one, "h100-sxm", prompt=10, steps=1, B=1, time="best")


# -- the command line ------------------------------------------------------------------------------------------------


def test_serving_command(capsys):
    pytest.importorskip("typer")
    line = "decode llama-3-70b --hardware h100-sxm --weights int4 --group 128 --cache fp8_e4m3 --values 1,8 S=8192"
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert "weights  39.5 GB (36.79 GiB)" in out
    assert "largest B that fits: 33" in out
    q = cg.quantize(LLAMA, "int4", group=128, cache="fp8_e4m3")
    assert str(cg.plan.throughput(q, "h100-sxm", "B", [1, 8], S=8192)) in out


def test_serving_command_writes_files(capsys, tmp_path):
    pytest.importorskip("typer")
    line = "decode llama-3-8b --hardware h100-sxm --values 1,2 S=100 --json - --csv"
    assert main([*line.split(), str(tmp_path / "rows.csv")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "costgraph/throughput/2"
    assert [row["size"] for row in data["rows"]] == [1, 2]
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    columns = "size,tokens,seconds,lower_bound,tokens_per_second,devices,tokens_per_device,memory,fits,bound"
    assert lines[0] == columns
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("decode llama-3-8b --hardware h100-sxm B=1 S=1", "--vary B: the dimension also has a size"),
        ("decode llama-3-8b --hardware h100-sxm --group 128 S=1", "group=128 without weights="),
        ("decode llama-3-8b --hardware h100-sxm --values 1,x S=1", "--values"),
        ("decode mlp --hardware h100-sxm", "graph 'mlp' keeps no state between steps"),
    ],
)
def test_invalid_command_arguments_are_refused(line, text, capsys):
    pytest.importorskip("typer")
    assert main(line.split()) == 2
    assert text in capsys.readouterr().err
