"""Attained rates: measurements on a device, alongside the vendor's peaks."""

import pytest
from each import each

import costgraph as cg
from costgraph.errors import SpecError

SPEC = """
name = "Card"
vendor = "Example"

[sources]
SHEET = "data sheet"
RUN = "measured"

[peak]
bf16 = {{ value = 100, unit = "TFLOP/s", source = ["SHEET"] }}
fp8 = {{ value = 200, unit = "TFLOP/s", source = ["SHEET"] }}

[vector]
fp32 = {{ value = 10, unit = "TFLOP/s", source = ["SHEET"] }}
fp64 = {{ value = 5, unit = "TFLOP/s", source = ["SHEET"] }}

[memory]
capacity = {{ value = 24, unit = "GB", source = ["SHEET"] }}
bandwidth = {{ value = 1, unit = "TB/s", source = ["SHEET"] }}

{attained}
"""
ATTAINED = """
[attained]
bf16 = { value = 80, unit = "TFLOP/s", source = ["RUN"] }
vector_fp32 = { value = 8, unit = "TFLOP/s", source = ["RUN"] }
bandwidth = { value = 900, unit = "GB/s", source = ["RUN"] }
launch = { value = 4.5, unit = "us", source = ["RUN"] }
"""


@pytest.fixture
def card(tmp_path):
    def _card(attained=ATTAINED):
        path = tmp_path / "card.toml"
        path.write_text(SPEC.format(attained=attained))
        return cg.load_hardware(path)

    return _card


def test_vendor_rates_are_the_default(card):
    device = card()
    assert (device.rate("bf16").value, device.bandwidth.value) == (10**14, 10**12)
    assert float(device.tables["attained"]["launch"]) == 4.5e-6


def test_attained_rates_replace_all_vendor_rates(card):
    device = card().attained()
    assert (device.rate("bf16").value, device.bandwidth.value) == (8 * 10**13, 9 * 10**11)
    assert device.rate("bf16", "vector").value == 8 * 10**12
    assert device.rate("bf16").source == "RUN"
    assert device.memory == card().memory  # memory size is not a rate
    for dtype, unit in (("fp8", "matmul"), ("fp64", "vector")):
        with pytest.raises(SpecError, match=rf"no {unit} rate .*; expected one of peak\.bf16, vector\.fp32, "):
            device.rate(dtype, unit)  # the vendor's rate is not a measurement
    assert dict(device.rows)["memory.bandwidth"].value == 9 * 10**11


def test_roofline_accepts_vendor_or_attained_rates(card):
    N = cg.dims("N")
    with cg.Graph("product", dtype="bf16") as g:
        g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    # 2 * 4096^3 FLOPs bound it
    assert cg.roofline(g, card(), N=4096).lower_bound == pytest.approx(2 * 4096**3 / 100e12)
    assert cg.roofline(g, card().attained(), N=4096).lower_bound == pytest.approx(2 * 4096**3 / 80e12)


@pytest.mark.parametrize("lacking", ["bf16", "bandwidth"])
def test_attained_roofline_needs_compute_and_bandwidth(card, lacking):
    lines = [line for line in ATTAINED.split("\n") if not line.startswith(lacking)]
    with pytest.raises(SpecError) as error:
        card("\n".join(lines)).attained()
    assert str(error.value) == (
        "hardware card: [attained] has no bandwidth or no matrix rate; "
        "expected both, as costgraph calibrate writes them"
    )


def test_unmeasured_device_has_no_attained_rates():
    with pytest.raises(SpecError, match=r"hardware h100-sxm: \[attained\] has no bandwidth or no matrix rate"):
        cg.load_hardware("h100-sxm").attained()


@each(
    ("line", "text"),
    [
        (
            'launches = { value = 4, unit = "us", source = ["RUN"] }',
            r"attained: key 'launches' is unknown, did you mean",
        ),
        (
            'launch = { value = 4, unit = "GB/s", source = ["RUN"] }',
            r"attained: launch: unit 'GB/s', expected a unit of s",
        ),
        (
            'bandwidth = { value = 0, unit = "GB/s", source = ["RUN"] }',
            r"attained: bandwidth: value 0, expected a number above 0",
        ),
        ('fp32 = { value = 1, unit = "FLOP/s" }', r"attained: fp32: no 'source', expected value, unit, source"),
        ('fp32_sparse = { value = 1, unit = "FLOP/s", source = ["RUN"] }', r"expected dense rates only"),
    ],
)
def test_invalid_attained_tables_raise(card, line, text):
    with pytest.raises(SpecError, match=text):
        card(f"[attained]\n{line}")
