import copy
import doctest
import json
import os
import pickle
import re
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
from each import each

from costgraph.dtypes import dtype
from costgraph.errors import FormatError, SpecError
from costgraph.hardware import file
from costgraph.hardware.specs import Hardware, list_hardware, load_hardware
from costgraph.hardware.units import UNITS

ROOT = Path(__file__).parents[1]

OWN = """
name = "Workstation card"
vendor = "Example"

[sources]
SHEET = "Example data sheet, 2026, page 2"
RUN = "readings on one card"

[peak]
bf16 = { value = 100.5, unit = "TFLOP/s", source = ["SHEET"] }
fp8 = { value = 201, unit = "TFLOP/s", source = ["SHEET", "RUN"], note = "FP32 accumulate" }

[memory]
type = "GDDR7"
capacity = { value = 24, unit = "GB", source = ["SHEET"] }
bandwidth = { value = 800, unit = "GB/s", source = ["SHEET"] }
"""


@pytest.fixture
def write(tmp_path):
    def _write(text, name="own.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return _write


def error_of(call, *arguments, **options):
    with pytest.raises(SpecError) as error:
        call(*arguments, **options)
    return str(error.value)


def refusal(path):
    return error_of(load_hardware, path).replace(f"{path}: ", "", 1)


# contents of the device files


def test_h100_ridge():
    h100 = load_hardware("h100-sxm")
    # dense bf16 989.4e12 FLOP/s over 3.35e12 B/s, without intermediate rounding
    assert h100.rate("bf16").value == 989_400_000_000_000
    assert h100.bandwidth.value == 3_350_000_000_000
    assert h100.ridge("bf16") == Fraction(9894, 10) * 1000 / 3350
    assert round(h100.ridge("bf16")) == 295


@each("name", list_hardware())
def test_every_device_number_has_a_source(name):
    device = load_hardware(name)
    assert device.id == name
    assert device.peak
    used = {key for _, found in device.rows for key in found.source.split(", ")}
    cited = " ".join(device.disagreements)
    assert used <= set(device.sources)
    assert {key for key in device.sources if key not in used and key not in cited} == set()


@each(("pattern", "arch"), [
    ("v100-", "sm_70"), ("t4", "sm_75"), ("a100-", "sm_80"), ("a10", "sm_86"), ("rtx3090", "sm_86"), ("l40s", "sm_89"),
    ("rtx4090", "sm_89"), ("h100-", "sm_90"), ("gh200-", "sm_90"), ("b200", "sm_100"), ("b300", "sm_103"),
    ("rtx5090", "sm_120"),
])  # fmt: skip
def test_nvidia_gpus_state_compute_capability(pattern, arch):
    """From the list at developer.nvidia.com/cuda/gpus."""
    names = [name for name in list_hardware() if name == pattern or (pattern[-1] == "-" and name.startswith(pattern))]
    assert {load_hardware(name).arch for name in names} == {arch}


def test_other_vendors_have_no_compute_capability():
    assert all((load_hardware(name).arch is not None) == (load_hardware(name).vendor == "NVIDIA")
               for name in list_hardware())  # fmt: skip


@each("name", list_hardware())
def test_device_rates_are_plausible(name):
    """Errors by a factor of 1000 or 2 (sparsity) would stand out here."""
    device = load_hardware(name)
    assert 10**11 <= device.bandwidth.value <= 10**13
    assert 10**10 <= device.memory.value <= 5 * 10**11
    for rates in (device.peak, device.vector):
        assert all(10**12 <= rate.value <= 2 * 10**16 for rate in rates.values())
    order = [device.peak[key].value for key in ("fp32", "tf32", "bf16", "fp8", "fp4") if key in device.peak]
    assert order == sorted(order)  # narrower formats are never slower


@each(
    ("name", "flops_per_core_and_cycle", "cores", "clock", "key"),
    [
        # one fused multiply-add is 2 FLOPs
        ("v100-sxm2-32gb", 2 * 64, 80, 1.53e9, "vector.fp32"),
        ("a100-80-sxm", 2 * 1024, 108, 1.41e9, "peak.bf16"),
        ("a100-40-pcie", 2 * 64, 108, 1.41e9, "vector.fp32"),
        ("t4", 2 * 512, 40, 1.59e9, "peak.fp16"),
        ("l4", 2 * 512, 58, 2.04e9, "peak.bf16"),
        ("rtx3090", 2 * 256, 82, 1.695e9, "peak.bf16"),
        ("rtx4090", 2 * 256, 128, 2.52e9, "peak.bf16"),
        ("rtx5090", 2 * 256, 170, 2.407e9, "peak.bf16"),
        ("h100-sxm", 2 * 2048, 132, 1.83e9, "peak.bf16"),
        ("h100-sxm", 2 * 128, 132, 1.98e9, "vector.fp32"),
        ("mi210", 2 * 64, 104, 1.7e9, "vector.fp32"),
        ("mi250x", 2 * 128, 220, 1.7e9, "peak.fp32"),
        ("mi300x", 2 * 1024, 304, 2.1e9, "peak.bf16"),
        ("mi300x", 2 * 128, 304, 2.1e9, "vector.fp32"),
        ("mi355x", 2 * 2048, 256, 2.4e9, "peak.bf16"),
    ],
)
def test_dense_rates_match_cores_times_clock(name, flops_per_core_and_cycle, cores, clock, key):
    table, key = key.split(".")
    rate = load_hardware(name).tables[table][key]
    assert float(rate) == pytest.approx(flops_per_core_and_cycle * cores * clock, rel=0.005)


def test_capacity_is_usable_memory():
    h200 = load_hardware("h200-sxm")
    assert h200.capacity() == h200.capacity(measured=True) == h200.measured_memory
    assert h200.capacity(measured=False).value == 141 * 10**9
    mi300x = load_hardware("mi300x")
    assert mi300x.capacity().value == mi300x.capacity(measured=False).value == 192 * 2**30
    assert error_of(mi300x.capacity, measured=True) == (
        "hardware mi300x: memory.measured is missing; expected it there, or measured=False for the vendor's 206.2 GB"
    )


@pytest.mark.parametrize("record", ["h100-sxm", "h200-sxm"])
def test_capacity_matches_recorded_total_memory(record):
    environment = json.loads((ROOT / f"tests/measured/{record}.json").read_text())["environment"]
    assert load_hardware(record).capacity().value == environment["total_memory"]


def test_nvidia_board_memory_is_printed_in_gibibytes():
    """An 80 GB board holds 79.1 to 79.35 GiB; ECC takes one sixteenth on GDDR6."""
    for name in list_hardware():
        device = load_hardware(name)
        if device.vendor == "NVIDIA" and device.measured_memory is not None:
            ecc = 15 / 16 if device.types["memory"] == "GDDR6" else 1
            share = float(device.capacity().value) / 2**30 / (float(device.memory.value) / 1e9) / ecc
            assert 0.97 <= share <= 1, (name, share)


def test_link_bandwidths():
    h100 = load_hardware("h100-sxm")
    assert h100.link("pcie").value == 63 * 10**9
    assert h100.link("interconnect").value == 450 * 10**9
    assert h100.link("network").value == 50 * 10**9  # 400 Gbit/s
    assert load_hardware("gh200-96gb").link("c2c").value == 450 * 10**9
    assert error_of(load_hardware("tpu-v4").link, "interconnect") == (
        "hardware tpu-v4: interconnect.per_direction is missing; expected it along with "
        "interconnect.per_link_per_direction = 45 GB/s, interconnect.links = 6"
    )
    assert error_of(load_hardware("t4").link, "interconnect") == (
        "hardware t4: interconnect.per_direction is missing; expected it along with a table [interconnect]"
    )
    assert error_of(h100.link, "usb") == (
        "hardware h100-sxm: link 'usb' is unknown; expected one of interconnect, c2c, pcie, network"
    )


# rates and fallbacks


@each(
    ("device", "asked", "key"),
    [
        ("h100-sxm", "fp8_e4m3", "fp8"),
        ("h100-sxm", "fp8_e5m2", "fp8"),
        ("h100-sxm", "uint8", "int8"),
        ("b200", "mxfp8", "fp8"),
        ("b200", "mxfp4", "fp4"),
        ("b200", "nvfp4", "fp4"),
        ("b300", "nvfp4", "nvfp4"),
        ("mi355x", "mxfp6_e3m2", "fp6"),
        ("h100-sxm", "float32", "fp32"),
    ],
)
def test_dtype_uses_rate_of_its_element_format(device, asked, key):
    loaded = load_hardware(device)
    assert loaded.rate(asked) is loaded.peak[key]
    assert loaded.rate(dtype(asked)) is loaded.peak[key]


def test_pointwise_work_uses_fp32_rate():
    h100 = load_hardware("h100-sxm")
    for stored in ("fp32", "bf16", "fp16", "fp8", "mxfp4", "int64", "bool", "tf32"):
        assert h100.rate(stored, "vector") is h100.vector["fp32"]
    assert h100.rate("fp64", "vector") is h100.vector["fp64"]
    mi250x = load_hardware("mi250x")
    assert mi250x.rate("fp32").value == 2 * mi250x.rate("fp32", "vector").value - 10**11  # printed: 95.7 and 47.9


def test_nothing_falls_back_silently():
    assert error_of(load_hardware("v100-sxm2-32gb").rate, "bf16") == (
        "hardware v100-sxm2-32gb: no matmul rate peak.bf16 for bf16; expected one of peak.fp64, peak.fp32, "
        "peak.fp16, vector.fp64, vector.fp32, or fallback= with one of them"
    )
    assert error_of(load_hardware("tpu-v3").rate, "bf16", "vector") == (
        "hardware tpu-v3: no vector rate vector.fp32 for bf16; expected one of peak.bf16, or fallback= with one of them"
    )
    assert error_of(load_hardware("t4").rate, "mxfp4", fallback="fp8") == (
        "hardware t4: no matmul rate peak.fp4 for mxfp4, nor one for its fallback fp8; expected one of "
        "peak.fp32, peak.fp16, peak.int8, peak.int4, vector.fp32"
    )


def test_fallbacks_are_explicit():
    v100, tpu, rtx = load_hardware("v100-sxm2-16gb"), load_hardware("tpu-v5e"), load_hardware("rtx4090")
    assert v100.rate("bf16", fallback="half") is v100.peak["fp16"]
    assert v100.rate("bf16", fallback=dtype("fp16")) is v100.peak["fp16"]
    assert v100.rate("bf16", fallback={"bfloat16": "fp16"}) is v100.peak["fp16"]
    assert v100.rate("fp32", fallback="fp16") is v100.peak["fp32"]  # fp32 has its own rate, so the fallback is unused
    assert tpu.rate("fp32", "vector", fallback="peak.bf16") is tpu.peak["bf16"]
    assert tpu.rate("fp32", "vector", fallback="bf16") is tpu.peak["bf16"]
    assert rtx.rate("fp4", fallback="fp8_accum_fp16") is rtx.peak["fp8_accum_fp16"]
    assert v100.rate("tf32", fallback="vector.fp32") is v100.vector["fp32"]
    assert "rate peak.tf32 for tf32; expected" in error_of(v100.rate, "tf32", fallback={"bf16": "fp16"})
    assert "fallback memory.bandwidth;" in error_of(v100.rate, "tf32", fallback="memory.bandwidth")
    with pytest.raises(FormatError, match="number format 'fp17' is unknown"):
        v100.rate("bf16", fallback="fp17")
    with pytest.raises(FormatError, match="number format 'fp17' is unknown"):
        v100.rate("fp17")
    with pytest.raises(FormatError, match="number format 5"):
        v100.rate("bf16", fallback=5)


def test_unknown_compute_unit_raises():
    text = "hardware t4: unit 'tensor' is unknown; expected 'matmul' or 'vector'"
    assert error_of(load_hardware("t4").rate, "fp16", "tensor") == text


# lookup


def test_names_are_sorted_and_unique_per_variant():
    names = list_hardware()
    assert names == sorted(names)
    assert len(names) == 43
    assert {"v100-sxm2-16gb", "v100-sxm2-32gb", "gh200-96gb", "gh200-141gb"} <= set(names)


def test_unknown_device_suggests_nearest_name():
    text = error_of(load_hardware, "h100")
    assert text.startswith("hardware 'h100' is unknown: did you mean ")
    assert "h100-sxm" in text.split("?")[0]
    assert text.endswith(f"expected the path of a .toml file or one of {', '.join(list_hardware())}")


@each("given", [None, 5, b"h100-sxm", ["h100-sxm"]])
def test_invalid_device_names_raise(given):
    assert error_of(load_hardware, given).endswith(": expected a name or the path of a TOML file")


def test_user_device_file_works_like_builtin_device(write):
    path = write(OWN)
    by_path, by_text = load_hardware(path), load_hardware(str(path))
    assert by_path == by_text
    assert hash(by_path) == hash(by_text)
    assert load_hardware(by_path) is by_path
    assert by_path.id == "own"
    assert by_path.rate("bf16").value == 100_500_000_000_000
    assert by_path.ridge("bf16") == Fraction(1005, 8)  # 100.5e12 / 800e9
    assert by_path.peak["fp8"].source == "SHEET, RUN"
    assert by_path.peak["fp8"].note == "FP32 accumulate"
    assert by_path.types == {"memory": "GDDR7"}
    assert by_path.vector == {}
    assert [place for place, _ in by_path.rows][1:3] == ["peak.fp8", "memory.capacity"]
    assert isinstance(pickle.loads(pickle.dumps(by_path)), Hardware)
    assert copy.deepcopy(by_path) == by_path


def test_documented_device_file_loads(write):
    page = Path(__file__).parent.parent / "docs" / "reference" / "hardware_files.md"
    example = re.search(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    device = load_hardware(write(example.group(1)))
    assert device.rate("bf16").value == 120 * 10**12
    assert device.rate("bf16", "vector").value == 30 * 10**12
    assert device.link("pcie").value == 31_500_000_000
    assert doctest.testfile(str(page), module_relative=False).failed == 0


def test_relative_path_needs_suffix_or_slash(write, monkeypatch):
    path = write(OWN)
    monkeypatch.chdir(path.parent)
    assert load_hardware("own.toml") == load_hardware("./own.toml") == load_hardware(path)


def test_installed_package_takes_precedence_over_checkout(tmp_path, monkeypatch):
    for folder, title in (("lib/costgraph/hardware_specs", "wheel"), ("lib/hardware_specs", "checkout")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "own.toml").write_text(OWN.replace("Workstation card", title))
    monkeypatch.setattr(file, "__file__", str(tmp_path / "lib/costgraph/hardware/find.py"))
    assert load_hardware("own").name == "wheel"
    shutil.rmtree(tmp_path / "lib/costgraph/hardware_specs")
    assert load_hardware("own").name == "checkout"


# invalid files


def test_unreadable_device_files_raise(write, tmp_path):
    assert refusal(tmp_path / "none.toml") == "No such file or directory, expected the TOML file of one device"
    assert refusal(tmp_path) == "Is a directory, expected the TOML file of one device"
    assert refusal(write("name = ")) == "Invalid value (at end of document); expected a readable TOML file"
    assert refusal(write("name = 5 5\n")) == (
        "Expected newline or end of document after a statement (at line 1, column 10); expected a readable TOML file"
    )
    assert refusal(write(b"\x00\x01")) == ("Invalid statement (at line 1, column 1); expected a readable TOML file")
    assert refusal(write(b"name = '\xff'")) == "byte 8 is no UTF-8, expected the TOML file of one device"
    assert refusal(write(b"#" * (2**20 + 1))) == "more than 1048576 bytes, expected the TOML file of one device"
    assert refusal(write("x = " + "[" * 100_000)) == "nested too deeply; expected the tables of a specification"
    assert refusal(tmp_path / ("n" * 300 + ".toml")) == "File name too long, expected the TOML file of one device"
    assert refusal("bad\0name.toml") == "embedded null byte, expected the TOML file of one device"
    assert refusal(write("x = " + "9" * 5000)).endswith("expected a readable TOML file")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_named_pipe_raises(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    assert refusal(tmp_path / "pipe.toml") == "no regular file, expected the TOML file of one device"


RATES = "fp64, fp32, tf32, bf16, fp16, fp8, fp6, fp4, nvfp4, int8, int4, fp16_accum_fp16, fp8_accum_fp16"
TABLES = (
    "name, vendor, arch, disagreements, sources, peak, vector, memory, cache, cores, clock, power, interconnect, "
    "pcie, network, host, attained, measured"
)
BF16 = 'bf16 = { value = 100.5, unit = "TFLOP/s", source = ["SHEET"] }'
VALUE, SOURCE, VENDOR = "value = 100.5", 'source = ["SHEET"]', 'vendor = "Example"'
NUMBER = "expected a number above 0, from 1e-60 to 1e60"
FIELDS = "value, unit, source, note"
DENSE = "expected dense rates only; halve one with 2:4 sparsity"
LISTED = "expected keys of [sources], which has SHEET, RUN"
MEMORY = "type, capacity, measured, reported, bandwidth"
SPARSE_RUN = '[measured]\nsparse_matmul = { value = 1, unit = "TFLOP/s", source = ["RUN"] }\n[peak]'


@each(
    ("old", "new", "text"),
    [
        # numbers
        (VALUE, "value = 0", f"peak: bf16: value 0, {NUMBER}"),
        (VALUE, "value = -1.5", f"peak: bf16: value -1.5, {NUMBER}"),
        (VALUE, "value = inf", f"peak: bf16: value Infinity, {NUMBER}"),
        (VALUE, "value = nan", f"peak: bf16: value NaN, {NUMBER}"),
        (VALUE, "value = 1e999999999", f"peak: bf16: value 1E+999999999, {NUMBER}"),
        (VALUE, f"value = 0x{'f' * 9000}", f"peak: bf16: value an integer of 36000 bits, {NUMBER}"),
        (VALUE, "value = true", f"peak: bf16: value True, {NUMBER}"),
        (VALUE, 'value = "100.5"', f"peak: bf16: value '100.5', {NUMBER}"),
        (VALUE, "value = 2026-01-01", f"peak: bf16: value datetime.date(2026, 1, 1), {NUMBER}"),
        (VALUE + ", ", "", f"peak: bf16: no 'value', expected {FIELDS}"),
        (BF16, "bf16 = 100.5", f"peak: bf16: 100.5, expected a record with {FIELDS}"),
        # units
        ("TFLOP/s", "TB/s", "peak: bf16: unit 'TB/s', expected a unit of FLOP/s"),
        ("GB/s", "GB", "memory: bandwidth: unit 'GB', expected a unit of B/s"),
        ("TFLOP/s", "TFLOPS", f"peak: bf16: unit 'TFLOPS', expected one of {', '.join(UNITS)}"),
        ('unit = "TFLOP/s", ', "", f"peak: bf16: no 'unit', expected {FIELDS}"),
        # sources
        (", " + SOURCE, "", f"peak: bf16: no 'source', expected {FIELDS}"),
        (SOURCE, "source = []", "peak: bf16: source [], expected a list of keys of [sources]"),
        (SOURCE, 'source = "SHEET"', "peak: bf16: source 'SHEET', expected a list of keys of [sources]"),
        (SOURCE, 'source = ["SHEET", "WEB"]', f"peak: bf16: source 'WEB', {LISTED}"),
        (SOURCE, "source = [7]", "peak: bf16: source[0] 7, expected text"),
        ("[sources]", "sources = 5\n[vector]", "sources 5, expected a table"),
        ("RUN =", '"a, b" =', "sources: key 'a, b', expected a key of letters, digits, - and _"),
        ('RUN = "readings on one card"', 'RUN = " "', "sources: RUN ' ', expected a text"),
        # keys and tables
        ("bf16 =", "bf61 =", f"peak: key 'bf61' is unknown, did you mean bf16? expected {RATES}"),
        ("[memory]", "[memry]", f"key 'memry' is unknown, did you mean memory? expected {TABLES}"),
        ("type =", "kind =", f"memory: key 'kind' is unknown, expected {MEMORY}"),
        (VALUE, "val = 1", f"peak: bf16: key 'val' is unknown, did you mean value? expected {FIELDS}"),
        (VENDOR, VENDOR + "\ncache = 5", "cache 5, expected a table"),
        # sparsity, anywhere
        ("fp8 =", "bf16_sparse =", f"peak: key 'bf16_sparse', {DENSE}"),
        (VALUE, VALUE + ", sparsity = true", f"peak: bf16: key 'sparsity', {DENSE}"),
        (VENDOR, VENDOR + "\nsparsity = false", f"key 'sparsity', {DENSE}"),
        ("[peak]", SPARSE_RUN, f"measured: key 'sparse_matmul', {DENSE}"),
        # required fields of a specification
        ('name = "Workstation card"', "", f"no 'name', expected {TABLES}"),
        (VENDOR, "vendor = 5", "vendor 5, expected a text"),
        (VENDOR, VENDOR + '\narch = "90"', "arch '90', expected a compute capability, such as sm_90"),
        (VENDOR, VENDOR + "\narch = 90", "arch 90, expected a compute capability, such as sm_90"),
        ("capacity =", "reported =", f"memory: no 'capacity', expected {MEMORY}"),
        (VENDOR, VENDOR + '\ndisagreements = "x"', "disagreements 'x', expected a list, each a text"),
        (VENDOR, VENDOR + "\ndisagreements = [1]", "disagreements[0] 1, expected a text"),
        ('"GDDR7"', "7", "memory: type 7, expected a text"),
        ('note = "FP32 accumulate"', "note = 3", "peak: fp8: note 3, expected a text"),
    ],
)
def test_errors_name_place_value_and_expectation(write, old, new, text):
    assert old in OWN
    assert refusal(write(OWN.replace(old, new, 1))) == text


def test_device_without_peak_or_bandwidth_raises(write):
    head, _, rest = OWN.partition("[peak]")
    without_peak = head + "[memory]" + rest.partition("[memory]")[2]
    assert refusal(write(without_peak)) == "peak has no rate, expected at least one, such as bf16"
    lines = [line for line in OWN.splitlines() if not line.startswith("bandwidth")]
    assert refusal(write("\n".join(lines))) == f"memory: no 'bandwidth', expected {MEMORY}"
    assert refusal(write("")) == f"no 'name', expected {TABLES}"


def test_measured_table_accepts_any_name_and_unit(write):
    more = '\n[measured]\ncopy = { value = 700, unit = "GB/s", source = ["RUN"] }\n'
    assert str(load_hardware(write(OWN + more)).tables["measured"]["copy"]) == "700 GB/s"
