"""Memory that was measured on many devices, beside the peak of the graph of one rank."""

import devices
import pytest

ROWS = {row["id"]: row for row in devices.ROWS}


def test_a_rank_of_megatron_has_what_was_allocated():
    # gradients in buffers of their own, states of 12 bytes split over dp, activations split along the sequence
    assert abs(devices.deviation(ROWS["simumax-llama3_405b_l4_tp4_pp1_dp2_cef-mem"])) < 0.02
    # a quarter of the logits and of their gradient
    assert abs(devices.deviation(ROWS["simumax-llama3_70b_l12_tp4_pp1_dp2_cef-mem"])) < 0.02


def test_a_step_takes_what_was_measured():
    # one calibration of single ops for each device; SimuMax itself is 7 % off
    assert abs(devices.deviation(ROWS["simumax-llama3_405b_l4_tp4_pp1_dp2_mbc32_cef-time"])) < 0.1
    # attention is most of it
    assert abs(devices.deviation(ROWS["simumax-llama3_70b_l12_tp1_cp8_pp1_dp1_seq131072_mbc4_cef-time"])) < 0.1


@pytest.mark.long
def test_the_page_is_what_the_script_makes_of_the_rows():
    assert devices.PAGE.read_text() == devices.page()
    derived = [row for row in devices.ROWS if "program" in row]
    timed = [row for row in derived if "device" in row]
    float8 = [row for row in timed if "products in float8" in row.get("note", "")]
    assert (len(timed) - len(float8), len(float8)) == (16, 5)
    assert all(abs(devices.deviation(row)) < 0.15 for row in timed if row not in float8)
    assert all(abs(devices.deviation(row)) < 0.1 for row in timed if row["device"] == "b200")
    # of 405B over two ranks of positions the deviation is named: copies of keys and values that pass by in its rings
    named = ROWS["titan-t6-cp2-tps"]
    assert "with copies 46.9" in named["note"]
    assert 0.2 < devices.deviation(named) < 0.201
    assert all(abs(devices.deviation(row)) < 0.16 for row in float8 if row is not named)
    peaks = [row for row in derived if "MiB" in row["unit"]]
    assert len(peaks) == 11
    assert all(abs(devices.deviation(row)) < 0.02 for row in peaks)
    assert sum(abs(devices.deviation(row)) < 0.0105 for row in peaks) == 9
    reserved = [row for row in derived if "reserved" in row.get("note", "")]
    assert len(reserved) == 10
    assert all(devices.deviation(row) < 0 for row in reserved)  # it has what is in tensors, and more
    assert all(row["source"] and ("why" in row) != ("program" in row) for row in ROWS.values())
