"""The specification files of a calibration, from synthetic rates."""

import os
import tomllib
from fractions import Fraction

import pytest

pytest.importorskip("torch.utils.flop_counter")

import torch

import costgraph as cg
from costgraph.errors import FormatError, UnsupportedError
from costgraph.torch.calibration import (
    BUILT_IN,
    Calibration,
    Probe,
    Rate,
    _Rounds,
    entry,
    last_level_cache,
    specification,
    streams,
    working_sets,
)

CPU = torch.device("cpu")
MIB = 2**20
PLACE = {
    "device": "cpu",
    "name": 'Example \\ "9" \x7f\n\u00e9',
    "memory_bytes": 24 * 10**9 + 8,
    "threads": 2,
    "torch": "2.13.0",
    "python": "3.11.7",
    "platform": "Linux",
    "date": "2026-01-02",
    "command": "costgraph calibrate --out 'a b.toml'",
}
RATES = {
    ("bandwidth", "read", str(8 * MIB)): Rate(90e9, "sum"),  # in the cache
    ("bandwidth", "read", str(64 * MIB)): Rate(20e9, "sum"),
    ("bandwidth", "update", str(64 * MIB)): Rate(30e9, "in place"),
    ("bandwidth", "update", str(256 * MIB)): Rate(29e9, "in place"),
    ("matmul", "fp32", "256"): Rate(100.123456e9, "a @ b"),
    ("matmul", "fp32", "convolution"): Rate(90e9, "convolution"),
    ("matmul", "bf16", "256"): Rate(201e9, "a @ b"),
    ("pointwise", "add", "1024"): Rate(6e9, "add"),
    ("transcendental", "exp", "1024"): Rate(1e9, "exp"),
    ("launch", "op", "1"): Rate(400_000, "sums"),
}


def calibration(like=None, place=PLACE, rates=RATES, cache=32 * MIB):
    return Calibration(place, rates, cache, None if like is None else cg.load_hardware(like))


# -- the specification ---------------------------------------------------------------------------------------------


def test_attained_rates_are_the_peaks_without_a_datasheet(tmp_path):
    hardware = calibration().save(tmp_path / "mine.toml")
    assert hardware.id == "mine"
    assert hardware.name == PLACE["name"] + ", 2 threads"
    assert hardware.bandwidth.value == 30 * 10**9  # the fastest beyond twice the cache
    assert hardware.rate("fp32").value == 100_130_000_000  # rounded up to five digits
    assert hardware.rate("bf16").value == 201 * 10**9
    assert hardware.rate("bf16", "vector").value == 100_130_000_000  # the fp32 matmul units
    assert hardware.memory.value == hardware.capacity(measured=True).value == PLACE["memory_bytes"]
    assert hardware.tables["cache"]["last_level"].value == 32 * MIB
    assert hardware.tables["attained"]["launch"].value == Fraction(25, 10**7)
    assert hardware.attained().peak.keys() == hardware.peak.keys() == {"fp32", "bf16"}
    assert hardware.attained().rate("fp32") == hardware.rate("fp32")
    for said in ("torch 2.13.0", "Python 3.11.7", "2 threads", "2026-01-02", PLACE["command"]):
        assert said in hardware.sources["CALIBRATED"]


def test_all_measured_rates_are_recorded():
    measured = {key: q.value for key, q in calibration().hardware.tables["measured"].items()}
    assert measured == {
        "bandwidth_8MiB": 90 * 10**9,
        "bandwidth_64MiB": 30 * 10**9,
        "bandwidth_256MiB": 29 * 10**9,
        "bandwidth_read": 20 * 10**9,
        "bandwidth_update": 30 * 10**9,
        "matmul_fp32_256": 100_130_000_000,
        "matmul_fp32_convolution": 90 * 10**9,
        "matmul_bf16_256": 201 * 10**9,
        "pointwise_add": 6 * 10**9,
        "transcendental_exp": 10**9,
    }


@pytest.mark.parametrize("name", cg.list_hardware())
def test_calibration_keeps_datasheet_values(name, tmp_path):
    sheet = cg.load_hardware(name)
    hardware = calibration(like=name).save(tmp_path / "mine.toml")
    assert (hardware.name, hardware.vendor, hardware.arch, hardware.types) == (
        sheet.name,
        sheet.vendor,
        sheet.arch,
        sheet.types,
    )
    assert hardware.disagreements == sheet.disagreements
    assert (hardware.peak, hardware.vector) == (sheet.peak, sheet.vector)
    assert (hardware.bandwidth, hardware.memory) == (sheet.bandwidth, sheet.memory)
    before = {k: v for k, v in sheet.rows if k != "memory.measured"}
    assert before.items() <= dict(hardware.rows).items()
    assert sheet.sources.items() <= hardware.sources.items()
    assert hardware.capacity(measured=True).value == PLACE["memory_bytes"]
    assert hardware.attained().rate("bf16").value == 201 * 10**9
    assert hardware.attained().bandwidth.value == 30 * 10**9


def test_device_names_map_to_existing_specifications():
    assert set(BUILT_IN.values()) <= set(cg.list_hardware())
    assert len(set(BUILT_IN.values())) == len(BUILT_IN)


@pytest.mark.parametrize(
    ("value", "unit", "base"),
    [
        (100.123456e9, "FLOP/s", (Fraction(10013, 100), "GFLOP/s")),
        (1e12, "FLOP/s", (1, "TFLOP/s")),
        (999_999_999_999.0, "B/s", (1000, "GB/s")),
        (12.0, "FLOP/s", (Fraction(12, 10**6), "MFLOP/s")),
        (2.38629e-6, "s", (Fraction(23862, 10**4), "us")),
        (25_276_510_208, "B", None),
    ],
)
def test_written_rates_are_rounded_up(value, unit, base):
    text = "[sources]\nR = 'r'\n[measured]\nx = " + entry(value, unit, "R", 'a "note"')
    parsed = tomllib.loads(text, parse_float=Fraction)["measured"]["x"]
    if base is not None:
        assert (parsed["value"], parsed["unit"]) == base
    read = cg.hardware.units.quantity(Fraction(parsed["value"]), parsed["unit"])
    assert read.unit == unit
    exact = Fraction(value)
    assert read.value <= exact if unit == "s" else read.value >= exact
    assert abs(read.value - exact) <= exact * Fraction(1, 10**4)
    assert unit != "B" or read.value == value  # bytes are exact
    assert parsed["note"] == 'a "note"'


def test_special_keys_are_quoted():
    text = specification("n", "v", {"A.B \u00fc": "x"}, {"peak": {}, "measured": {"a b": "1"}})
    assert tomllib.loads(text) == {"name": "n", "vendor": "v", "sources": {"A.B \u00fc": "x"}, "measured": {"a b": 1}}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("mine.json", "mine.json: expected a path that ends in .toml"),
        ("no/where.toml", "no/where.toml: no such folder, expected a file that can be written"),
        ("folder.toml", "folder.toml: Is a directory, expected a file that can be written"),
    ],
)
def test_unwritable_paths_are_refused(path, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(FormatError) as error:
        calibration().save(path)
    assert str(error.value) == text


# -- fastest among several runs ----------------------------------------------------------------------------------------


def test_faster_takes_the_higher_of_each_rate():
    slow = {key: Rate(rate.value / 2, "slow") for key, rate in RATES.items()}
    slow["matmul", "bf16", "256"] = Rate(300e9, "quiet")
    both = calibration().faster(calibration(rates=slow))
    assert both.rates == {**RATES, ("matmul", "bf16", "256"): Rate(300e9, "quiet")}
    assert calibration(rates=slow).faster(calibration()).rates == both.rates


@pytest.mark.parametrize(("key", "other"), [("threads", 1), ("name", "Other"), ("torch", "2.11.0")])
def test_calibrations_with_different_settings_are_not_merged(key, other):
    with pytest.raises(UnsupportedError, match=f"(?s)calibration: {key} .* and {other}, expected two of one device"):
        calibration().faster(calibration(place={**PLACE, key: other}))


def test_slow_probes_are_not_repeated():
    runs = []
    rounds = _Rounds(CPU, budget=0)

    def probe(size, flops):
        return Probe(("matmul", "fp16", size), "slow", flops, lambda: runs.append(size), "family")

    rounds.run(probe("1", 1))
    assert set(runs) == {"1"}
    rounds.families["family"] = 10.0  # FLOP/s
    rounds.run(probe("3", 5))  # 0.5 s
    rounds.run(probe("2", 3))  # 0.3 s
    assert set(runs) == {"1", "2"}


def test_only_unsupported_matmul_probes_may_fail():
    def fail():
        raise RuntimeError("not implemented for 'Half'")

    rounds = _Rounds(CPU, budget=0)
    rounds.run(Probe(("matmul", "fp16", "1"), "", 1, fail, "a"))
    assert rounds.rates == {}
    with pytest.raises(RuntimeError, match="not implemented"):
        rounds.run(Probe(("bandwidth", "read", "1"), "", 1, fail, "b"))


# -- caches and streams ----------------------------------------------------------------------------------------------


def cpus(folder, *caches):
    for cpu, index, level, size, shared in caches:
        where = folder / f"cpu{cpu}" / "cache" / f"index{index}"
        where.mkdir(parents=True)
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (where / name).write_text(f"{text}\n")
    return folder


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="reads what Linux says")
def test_last_level_cache_slices_add_up(tmp_path):
    # two cores share one L3 slice of 16 MiB, two others the second; each has its own L2
    sysfs = cpus(
        tmp_path,
        *((cpu, 2, 2, "512K", str(cpu)) for cpu in range(4)),
        *((cpu, 3, 3, "16M", f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}") for cpu in range(4)),
    )
    assert last_level_cache(CPU, sysfs) == 32 * MIB
    assert last_level_cache(CPU, tmp_path / "nowhere") is None


def test_unknown_cache_size_uses_only_the_largest_working_set():
    assert calibration(cache=None).best("bandwidth").value == 29e9
    assert "cache" not in calibration(cache=None).hardware.tables


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("cache", [None, MIB, 32 * MIB, 512 * MIB])
def test_working_sets_straddle_the_cache_and_fit_memory(cache, quick):
    within, beyond = working_sets(cache, 24 * 10**9, quick)
    level = cache or 64 * MIB
    assert all(n <= level / 4 or n == 2**18 for n in within)
    assert all(2 * level <= n <= 24 * 10**9 / 8 for n in beyond)
    assert max(beyond) == min(8 * level * (1 if quick else 2), 2**32, 24 * 10**9 // 8) // 4096 * 4096


def test_streams_move_their_stated_bytes():
    pool = torch.rand(3000)
    moved = {p.how: p.amount for p in streams(pool, [4 * 2999])}
    # 2999 numbers; half of them are 1499, a third 999
    assert moved == {
        "sum": 4 * 2999,
        "amax": 4 * 2999,
        "fill": 4 * 2999,
        "copy": 2 * 4 * 1499,
        "a = b + 2 c": 3 * 4 * 999,
        "a = 1 a in place": 2 * 4 * 2999,
    }
    before = pool.clone()
    for probe in streams(pool, [4 * 2999]):
        probe.call()
    assert pool[2999] == before[2999]
