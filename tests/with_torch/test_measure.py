import doctest
import gc
import json
import math
import re
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch.utils.flop_counter")

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from costgraph.errors import BindingError, UnsupportedError
from costgraph.notation.progress import progressing
from costgraph.torch.measurement import (
    Times,
    _peak_of,
    environment,
    measure,
    peak_bytes,
    timed,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "training"))

from tracked import measured_peak, setting, step, tracked_peak

CPU = torch.device("cpu")


def peak_of(call):
    for _ in range(2):  # the third run is in the steady state
        call()
    return peak_bytes(call, CPU)


def error_of(kind, call, *args, **options):
    with pytest.raises(kind) as error:
        call(*args, **options)
    return str(error.value)


# -- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("B", "D", "F", "K"),
    [(31, 7, 53, 11), (31, 7, 11, 53)],  # the second result is narrower than the first, and wider
    ids=["at the relu", "at the second product"],
)
def test_peak_of_a_matmul_chain_by_hand(B, D, F, K):
    x, w1, w2 = torch.rand(B, D), torch.rand(D, F), torch.rand(F, K)

    def chain():
        h = x @ w1
        r = h.relu()
        del h
        return r @ w2

    # h 4BF | h and r 8BF | r and y 4BF + 4BK; y is returned
    assert peak_of(chain) == (max(8 * B * F, 4 * B * F + 4 * B * K), 4 * B * K)


def test_peak_of_a_mixed_dtype_chain_by_hand():
    n = 1009

    def chain():
        x = torch.ones(n, dtype=torch.float64)
        y = x.bfloat16()  # 8n + 2n
        del x
        z = y.to(torch.int64) + y.to(torch.int16)  # 2n + 8n + 2n, the narrower one widened 8n, and the sum 8n
        del y
        return z > 1  # 8n + n

    assert peak_of(chain) == (28 * n, n)


def test_python_scalars_become_tensors():
    x = torch.ones(7)
    assert peak_of(lambda: x.mul_(0.9)) == (12, 0)  # 8 B as a Python number, 4 B in the dtype of x


def test_frees_of_earlier_runs_lower_the_peak():
    n, kept = 997, [None]

    def freed_first():
        kept[0] = None
        kept[0] = torch.ones(n)

    def freed_last():
        kept[0] = torch.ones(n)

    assert peak_of(freed_first) == (0, 0)
    assert peak_of(freed_last) == (4 * n, 0)


def test_remaining_bytes_are_counted_without_a_return_value():
    tensors = []
    assert peak_of(lambda: tensors.append(torch.ones(13))) == (52, 52)


def test_addresses_of_earlier_sessions_are_ignored():
    tensors = [torch.ones(5000)]
    peak_of(lambda: tensors.append(torch.ones(5000)))  # the profiler remembers their addresses
    tensors.clear()
    old = [torch.ones(3001) for _ in range(9)]  # they may get the same addresses, unseen by the profiler

    def frees():
        if old:
            old.pop()
        return torch.ones(7)

    assert peak_bytes(frees, CPU) == (28, 28)


def test_peak_follows_event_order():
    # baseline 100 at the mark; -100 frees an earlier one, +300, +50, -300; frees of unknown addresses are ignored
    events = [(1, 100), None, (1, -100), (2, 300), (3, 50), (9, -4096), (2, -300)]
    assert _peak_of(events) == (250, -50)
    assert _peak_of([(1, 100), None]) == (0, 0)
    assert _peak_of([(1, 10), (1, -10), (1, 30), None, (1, -30), (1, 7)]) == (0, -23)  # a reused address


def test_garbage_collection_is_off_while_measuring():
    def cycle():
        a = [torch.ones(101)]
        a.append(a)

    assert gc.isenabled()
    # the collector is off: the cycle lives to the end of the run
    assert peak_of(cycle) == (404, 404)
    assert gc.isenabled()


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_linear_training_step_by_hand(momentum):
    B, D, F = 13, 37, 29
    x, dy, w = torch.rand(B, D), torch.rand(B, F), nn.Parameter(torch.rand(D, F))
    optimizer = torch.optim.SGD([w], lr=1e-3, momentum=momentum, foreach=False)

    def training_step():
        y = x @ w
        y.backward(dy)
        optimizer.step()
        optimizer.zero_grad()

    # y 4BF, held until the end; dw 4DF, which becomes the gradient; x needs none. The update is in place, and the
    # momentum exists since the first step; scaling it by a number takes the number's 12 B.
    measurement = measure(training_step, budget=0)
    assert (measurement.peak, measurement.left) == (4 * (B * F + D * F) + (12 if momentum else 0), 0)
    assert measurement.flops == 2 * 2 * B * D * F  # forward and dw


def test_gradient_of_the_previous_step_is_in_the_baseline():
    B, D, F = 13, 37, 29
    x, dy, w = torch.rand(B, D), torch.rand(B, F), nn.Parameter(torch.rand(D, F))

    def training_step():
        w.grad = None
        (x @ w).backward(dy)

    # the old gradient is freed before the first op: -4DF, then y 4BF and the new one 4DF; y stays alive
    assert peak_of(training_step) == (4 * B * F, 0)


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2", {"D": 56, "H": 7, "F": 211, "L": 2, "V": 307, "P": 61}),
        ("mlp", {"D": 31, "F": 53, "L": 2, "C": 11}),
    ],
)
def test_training_steps_match_torchs_trackers(name, sizes, implementation):
    B, S = 3, 41
    parts = setting(name, sizes, B, S, "fp32", implementation)
    measurement = measure(step, *parts, budget=0, least=1, flops=False)
    module, optimizer, *batch = parts
    state = [t for s in optimizer.state.values() for t in s.values()]
    held = {t.untyped_storage() for t in [*module.parameters(), *module.buffers(), *state, *batch]}
    baseline = sum({s.data_ptr(): s.nbytes() for s in held}.values())
    assert measurement.left == 0
    # temporary scalars, such as the seed of the backward pass, are ordered differently in MemTracker
    assert abs(measurement.peak + baseline - tracked_peak(name, sizes, B, S, implementation=implementation)) <= 64
    assert measurement.peak == measured_peak(name, sizes, B, S, implementation)


# -- FLOPs ---------------------------------------------------------------------------------------------------------


def test_flops_by_index_points():
    x, w, b = torch.rand(7, 11), torch.rand(13, 11), torch.rand(13)
    image, window = torch.rand(2, 3, 17, 19), torch.rand(5, 3, 3, 3)
    for call, flops in (
        (lambda: nn.functional.linear(x, w, b), 2 * 7 * 11 * 13),
        (lambda: nn.functional.conv2d(image, window, padding=1), 2 * 2 * 5 * 17 * 19 * 3 * 3 * 3),
        (lambda: x.exp(), 0),
    ):
        assert measure(call, budget=0, least=1, peak=False).flops == flops


def test_unrequested_quantities_are_none():
    measurement = measure(torch.ones, 3, budget=0, flops=False, peak=False)
    assert (measurement.flops, measurement.peak, measurement.left) == (None, None, None)
    assert "matmul" not in str(measurement)
    assert "peak" not in str(measurement)


# -- time ----------------------------------------------------------------------------------------------------------


def test_a_sleep_takes_its_time():
    times = timed(lambda: time.sleep(0.01), CPU, least=3, budget=0)
    assert times.runs == 3
    assert 0.01 <= times.min <= times.lower <= times.median <= times.upper <= times.max < 5


def test_timing_stops_at_the_budget_or_run_limit():
    assert timed(lambda: None, CPU, least=2, most=9, budget=60).runs == 9
    assert timed(lambda: time.sleep(0.02), CPU, least=2, most=10**6, budget=0.1).runs <= 6


def test_summary_of_runs():
    # quartiles of 1..5 by the inclusive method: 2, 3, 4
    times = Times.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (times.min, times.lower, times.median, times.upper, times.max, times.runs) == (1, 2, 3, 4, 5, 5)
    assert times.spread == pytest.approx(2 / 3)
    assert times.noisy
    assert str(times) == "3 s (median of 5 runs from 1 s to 5 s, spread 67%: noisy)"
    assert str(Times.of([1.0, 1.01, 1.02])) == "1.01 s (median of 3 runs from 1 s to 1.02 s, spread 1%)"
    assert str(Times.of([0.25])) == "250 ms (a single run: noisy)"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"least": 0}, "least=0: expected a positive number of runs"),
        ({"least": True}, "least=True: expected a positive number of runs"),
        ({"most": 2.5}, "most=2.5: expected a positive number of runs"),
        ({"budget": -1}, "budget=-1: expected seconds, zero or more"),
        ({"budget": math.nan}, "budget=nan: expected seconds, zero or more"),
        ({"budget": "1 s"}, "budget='1 s': expected seconds, zero or more"),
    ],
)
def test_numbers_of_runs_that_are_none(options, text):
    assert error_of(BindingError, measure, torch.ones, 3, **options) == text


# -- environment -------------------------------------------------------------------------------------------------------


def test_measurement_record_states_its_environment():
    measurement = measure(torch.ones, 3, budget=0, command="by hand")
    record = json.loads(json.dumps(measurement.record()))
    assert record["seconds"]["runs"] == 5
    assert record["seconds"]["noisy"] is measurement.time.noisy
    assert (record["flops"], record["peak_bytes"], record["left_bytes"]) == (0, 12, 12)
    where = record["environment"]
    assert (where["device"], where["torch"], where["command"]) == ("cpu", torch.__version__, "by hand")
    assert where["threads"] == torch.get_num_threads()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", where["date"])
    assert where["name"] in str(measurement)
    assert "12 B above the baseline, 12 B left" in str(measurement)


def test_recorded_command_is_the_process_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somebody/bin/costgraph", "calibrate", "--out", "a b.toml"])
    assert environment()["command"] == "costgraph calibrate --out 'a b.toml'"


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("meta", "device 'meta': cannot be measured, expected cpu or cuda"),
        (3.5, "device '3.5': .*; expected cpu or cuda"),
        ("gpu", "device 'gpu': .*; expected cpu or cuda"),
        ("cuda:99", r"device 'cuda:99': torch sees \d+ CUDA devices, expected one of them"),
    ],
)
def test_unmeasurable_devices_are_refused(device, text):
    for ask in (lambda: environment(device), lambda: measure(torch.ones, 3, device=device)):
        assert re.fullmatch(text, error_of(UnsupportedError, ask))


def test_ops_on_other_devices_are_refused():
    x = torch.ones(3, device="meta")
    message = error_of(UnsupportedError, measure, torch.relu, x)
    assert message == "device 'meta': no way to measure it, expected cpu or cuda"
    assert error_of(UnsupportedError, measure, torch.relu, x, device="cpu") == (
        "measure: ops ran on meta, expected only cpu"
    )
    with FakeTensorMode():
        fake = torch.ones(3)
    assert "ran on fake tensors, expected tensors with data" in error_of(UnsupportedError, measure, fake.relu)


def test_errors_of_the_call_are_propagated():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        measure(torch.mm, torch.ones(2, 3), torch.ones(2, 3))
    assert gc.isenabled()


# -- progress ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rich", [True, False])
def test_progress_is_shown_on_request(capsys, monkeypatch, rich):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with progressing("measure", 2, show=True) as part:
        part("[time]")
        part("peak")
    done = capsys.readouterr()
    assert done.out == ""
    if not rich:
        assert "\rmeasure 1/2: [time]\rmeasure 2/2: peak" in done.err
    with progressing("measure", 1) as part:  # no terminal here
        part("time")
    assert capsys.readouterr().err == ""


# -- the page ------------------------------------------------------------------------------------------------------


def test_documented_examples_run():
    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "measure.md"
    assert doctest.testfile(str(page), module_relative=False).failed == 0


# -- CUDA ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_by_hand():
    n = 4096
    a, b = (torch.rand(n, n, device="cuda") for _ in range(2))

    def chain():
        h = a @ b
        r = h.relu()
        del h
        return r @ b

    measurement = measure(chain)
    # h and r, then r and y: two tensors with 4nn bytes, one returned; all are whole 512 B blocks
    assert (measurement.peak, measurement.left) == (8 * n * n, 4 * n * n)
    assert measurement.flops == 4 * n**3
    # 500 TFLOP/s is beyond any plain fp32 matmul: without synchronization the time would be shorter
    assert measurement.time.min > 4 * n**3 / 500e12
    assert measurement.environment["device"] == "cuda"
    assert error_of(UnsupportedError, measure, chain, device="cpu") == "measure: ops ran on cuda:0, expected cpu alone"
