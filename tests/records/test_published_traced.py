"""Plain torch programs with published times: the costs of their traces against explicit arithmetic."""

from dataclasses import replace
from decimal import Decimal

import pytest
from each import each

pytest.importorskip("torch.utils.flop_counter")

import costgraph as cg
from costgraph.report.records.predictions import predict
from costgraph.torch.validation_programs import (
    PROGRAMS,
    traced,
)

#: Programs whose traces another program already covers.
ALIKE = ("tiled_swiglu", "tiled_geglu", "geglu", "fused_linear_simpo_loss", "fused_linear_orpo_loss")
BANDWIDTH = float(cg.load_hardware("h100-sxm").bandwidth)


@pytest.fixture
def timed(measured):
    like = next(r for r in measured if r.family == "liger" and r.what == "kernel")

    def predicted(kernel, mode, **sizes):
        inputs = {"provider": "torch", "dtype": "bfloat16", "kernel": kernel, "mode": mode, **sizes}
        return predict(replace(like, device="h100-sxm", inputs=inputs, value=Decimal("1.5")), Decimal("0.001"))

    return predicted


def test_pointwise_programs_move_operands_and_results(timed):
    m, n = 4093, 8191
    forward = timed("relu_squared", "forward", M=m, N=n)
    # relu and square: one tensor in and one out each, 2 bytes per element
    assert forward.estimate == pytest.approx(4 * 2 * m * n / BANDWIDTH, rel=1e-6)
    full = timed("relu_squared", "full", M=m, N=n)
    backward = timed("relu_squared", "backward", M=m, N=n)
    assert full.estimate == pytest.approx(forward.estimate + backward.estimate)
    assert (full.subject, full.violated) == ("pointwise", False)


def test_gated_mlp_has_three_matmuls_and_six_in_backward():
    g = traced(PROGRAMS["swiglu"], "bfloat16")
    b, t, d, f = 2, 61, 127, 131
    for phase, products in (("forward", 3), ("backward", 6)):
        flops = cg.costs(g).bind(R=b * t, D=d, F=f).filter(phase=phase, kind="matmul").total().flops
        assert flops == products * 2 * b * t * d * f


def test_fused_linear_cross_entropy_has_three_matmuls(timed):
    row = timed("fused_linear_cross_entropy", "full", BT=1021, H=509, V=4093)
    g = traced(PROGRAMS["fused_linear_cross_entropy"], "bfloat16")
    assert cg.matmul_flops(g, R=1021, H=509, V=4093) == 3 * 2 * 1021 * 509 * 4093
    assert (row.reason, row.subject) == ("", "losses")


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if not p.untimed and n not in ALIKE])
def test_every_program_is_traced_with_open_sizes(name):
    program = PROGRAMS[name]
    g = traced(program, program.format or "bfloat16")
    facts = {n: 4 + 2 * i for i, n in enumerate(("B", "T", "M", "N", "H", "V", "D", "BT", "S", "L"))}
    facts |= {"hidden_size": 192, "intermediate_size": 34, "num_q_heads": 6, "num_kv_heads": 2, "ffn_local": 14}
    facts |= {"C_in": 4, "C_out": 6}
    assert {op.phase for op in g.ops} == {"forward", "backward"}
    assert cg.bytes_moved(g, **program.bound(facts)) > 0


@each(
    ("change", "reason"),
    [
        ({"provider": "liger"}, "inputs: provider 'liger' has kernels of its own, expected plain torch"),
        ({"kernel": "knitting"}, "inputs: kernel 'knitting' has no plain program here, expected one that has"),
        ({"mode": "sideways"}, "inputs: mode 'sideways', expected one of forward, backward, full"),
        ({"dtype": "float7"}, "inputs: dtype 'float7', expected one of float32, bfloat16, float16"),
        ({"kernel": "tvd"}, "time: it is timed without what its inputs are made by"),
        ({"M": 0}, "inputs: no size M or BT or T, expected a positive integer"),
        ({"M": None}, "inputs: no size M or BT or T, expected a positive integer"),
    ],
)
def test_unpredicted_programs_state_the_reason(timed, change, reason):
    given = {"kernel": "softmax", "mode": "full", "provider": "torch", "M": 3, "N": 5} | change
    assert timed(**given).reason == reason


def test_size_names_vary_between_records():
    program = PROGRAMS["swiglu"]
    rest = {"hidden_size": 5, "intermediate_size": 7}
    for stated in ({"B": 3, "T": 11}, {"bsz": 3, "T": 11}, {"BT": 33}):
        assert program.bound(rest | stated) == {"R": 33, "D": 5, "F": 7}
