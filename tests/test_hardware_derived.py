"""Devices derived as a share or under a power limit: which figures scale with the share."""

from fractions import Fraction

import pytest
from each import each

import costgraph as cg
from costgraph import SpecError


def test_mi250x_die_matches_published_figures():
    die = cg.load_hardware("mi250x").part(Fraction(1, 2))
    # torchtitan's get_peak_flops: 191.5e12 "for each GCD"; ROCm's table: 110 CUs, 64 GiB and 8 MiB L2 per GCD
    assert die.rate("bf16").value == 191_500_000_000_000
    assert die.tables["cores"]["count"].value == 110
    assert die.memory.value == 64 * 2**30
    assert die.tables["cache"]["l2"].value == 8 * 2**20
    whole = cg.load_hardware("mi250x")
    assert die.bandwidth.value * 2 == whole.bandwidth.value
    assert die.ridge("bf16") == whole.ridge("bf16")
    assert die.tables["cache"]["shared_per_core"] == whole.tables["cache"]["shared_per_core"]
    assert die.tables["clock"] == whole.tables["clock"]
    assert die.name.startswith("0.5 of AMD Instinct MI250X")


def test_device_share_drops_links_and_measurements():
    part = cg.load_hardware("h100-sxm").part(0.25)
    with pytest.raises(SpecError, match=r"0\.25 of h100-sxm: interconnect\.per_direction is missing"):
        part.link("interconnect")
    with pytest.raises(SpecError, match=r"memory\.measured is missing"):
        part.capacity(measured=True)


def test_limited_device_lowers_compute_but_not_bandwidth():
    device = cg.load_hardware("h100-sxm")
    limited = device.at_clock(0.8)
    for unit, table in (("matmul", device.peak), ("vector", device.vector)):
        for key in table:
            if key in cg.DTYPES:
                assert limited.rate(key, unit).value * 10 == device.rate(key, unit).value * 8
    assert limited.bandwidth == device.bandwidth
    assert limited.memory == device.memory
    assert limited.capacity(measured=True) == device.capacity(measured=True) if device.measured_memory else True
    assert limited.ridge("bf16") * 10 == device.ridge("bf16") * 8
    assert limited.link("pcie") == device.link("pcie")


def test_times_scale_and_results_name_the_limit():
    B, D = cg.dims("B D")
    with cg.Graph("g", dtype="bf16") as g:
        g.output(g.input("x", (B, D)) @ g.param("w", (D, D)))
    device = cg.load_hardware("h100-sxm")
    whole, limited = (cg.roofline(g, hw, B=8192, D=8192) for hw in (device, device.at_clock(0.5)))
    # compute-bound: half the rate, twice the time
    assert limited.estimate == pytest.approx(2 * whole.estimate)
    few, slow = (cg.roofline(g, hw, B=1, D=8192) for hw in (device, device.at_clock(0.5)))
    assert few.estimate == slow.estimate  # memory-bound
    assert "0.5 of its clock" in limited.hardware.name


@each("share", [0, -0.5, 1.5, True, "half", None, float("nan"), float("inf")])
@each(("way", "text"), [("part", "share"), ("at_clock", "share of the clock")])
def test_invalid_shares_raise(way, text, share):
    with pytest.raises(SpecError, match=rf"hardware l4: {text} is .*expected a number above 0 and at most 1"):
        getattr(cg.load_hardware("l4"), way)(share)


def test_symbolic_device_has_no_share():
    with pytest.raises(SpecError, match="a symbol of symbolic hardware"):
        cg.load_hardware("l4").symbolic().part(0.5)
