"""The rates of a specification that were measured on the device, beside those of the vendor."""

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


def test_the_vendors_rates_stay_where_nothing_else_is_asked(card):
    found = card()
    assert (found.rate("bf16").value, found.bandwidth.value) == (10**14, 10**12)
    assert float(found.tables["attained"]["launch"]) == 4.5e-6


def test_attained_rates_take_the_place_of_all_others(card):
    found = card().attained()
    assert (found.rate("bf16").value, found.bandwidth.value) == (8 * 10**13, 9 * 10**11)
    assert found.rate("bf16", "vector").value == 8 * 10**12
    assert found.rate("bf16").source == "RUN"
    assert found.memory == card().memory  # no rate
    for dtype, unit in (("fp8", "matmul"), ("fp64", "vector")):
        with pytest.raises(SpecError, match=rf"no {unit} rate .*; expected one of peak\.bf16, vector\.fp32, "):
            found.rate(dtype, unit)  # the vendor's is no measurement
    assert dict(found.rows)["memory.bandwidth"].value == 9 * 10**11


def test_the_roofline_stands_on_either(card):
    N = cg.dims("N")
    with cg.Graph("product", dtype="bf16") as g:
        g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    # 2 * 4096^3 FLOPs bound it
    assert cg.roofline(g, card(), N=4096).lower_bound == pytest.approx(2 * 4096**3 / 100e12)
    assert cg.roofline(g, card().attained(), N=4096).lower_bound == pytest.approx(2 * 4096**3 / 80e12)


@pytest.mark.parametrize("lacking", ["bf16", "bandwidth"])
def test_a_roof_needs_both_sides(card, lacking):
    lines = [line for line in ATTAINED.split("\n") if not line.startswith(lacking)]
    with pytest.raises(SpecError) as error:
        card("\n".join(lines)).attained()
    assert str(error.value) == (
        "hardware card: [attained] has no bandwidth or no matrix rate; "
        "expected both, as costgraph calibrate writes them"
    )


def test_a_device_that_was_never_measured_has_none():
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
def test_what_is_refused(card, line, text):
    with pytest.raises(SpecError, match=text):
        card(f"[attained]\n{line}")
