"""Planning formulas for work, time and capacity, each against a hand calculation."""

from fractions import Fraction

import pytest
import sympy
from each import each
from shared import load, training_step

import costgraph as cg

N, T, n, M = cg.dims("N T n M")
u = sympy.Symbol("u", positive=True)  # a fraction of 1 is not a size
DAY = 86_400
H100 = 989.5e12  # dense bf16 FLOP/s, as printed after rounding; the specification has 989.4


def llama(**options):
    return training_step(load("llama-2-70b"), **options)


# -- FLOPs -----------------------------------------------------------------------------------------------------------


def test_training_flops_are_6nd():
    assert cg.plan.training_flops(N, T) == 6 * N * T
    assert cg.plan.training_flops(70e9, 15e12) == 6_300_000_000_000_000_000_000_000  # 6 * 70e9 * 15e12 = 6.3e24
    assert cg.evaluate(cg.plan.training_flops(N, T), N=70 * 10**9, T=15 * 10**12) == cg.plan.training_flops(70e9, 15e12)


def test_exact_flops_against_6nd():
    step = llama()
    split = cg.plan.leading_term(step, 15e12, B=1, S=4096)
    assert split.params == 68_976_648_192
    assert split.leading == 6 * 68_976_648_192 * 15 * 10**12
    # Without matmuls for the 32000 x 8192 embedding and the 161 norms of 8192. In 80 layers, 64 heads of 128 attend to
    # (S + 1)/2 positions on average, with 2 matmuls of 2 FLOPs each forward and twice that backward.
    others = -6 * (32000 * 8192 + 161 * 8192) + 12 * 80 * 64 * 128 * Fraction(4097, 2)
    assert split.remainder == others * 15 * 10**12
    assert split.total == cg.plan.training_flops(step, 15e12, B=1, S=4096)
    assert abs(split.remainder / split.leading) < 0.04


def test_flops_breakdown_is_symbolic():
    B, D, F, L, S, H, K, G, V = cg.dims("B D F L S H K G V")
    step = training_step(load("llama-3-8b", symbolic=True))
    split = cg.plan.leading_term(step, T)
    assert sympy.expand(split.leading - 6 * cg.param_count(step) * T) == 0
    # embedding and norms have no matmuls; attention has
    assert sympy.expand(split.remainder - T * (6 * L * H * K * (S + 1) - 6 * (V * D + 2 * L * D + D))) == 0
    assert sympy.expand(split.total - cg.plan.training_flops(step, T)) == 0
    full = cg.plan.leading_term(step, T, count="full")
    assert sympy.expand(full.remainder - T * (12 * L * H * K * S - 6 * (V * D + 2 * L * D + D))) == 0
    assert {B, G, F} & cg.plan.leading_term(step, T).remainder.free_symbols == set()


def test_training_flops_ignore_batch_and_checkpoint():
    sizes = {"S": 128}
    for options in ({}, {"checkpoint": cg.every_block()}, {"accumulate": 7}, {"precision": "fp32"}):
        found = cg.plan.training_flops(llama(**options), T, **sizes)
        assert found == cg.plan.training_flops(llama(), T, **sizes)
    assert cg.dims("B") not in cg.plan.training_flops(llama(), T).free_symbols


# -- time ------------------------------------------------------------------------------------------------------------


def test_training_days_for_70b_model_and_15t_tokens():
    days = cg.plan.training_days(cg.plan.training_flops(70e9, 15e12), H100, devices=1024, mfu=0.5)
    assert days == pytest.approx(6.3e24 / (1024 * 0.5 * 989.5e12) / DAY)
    assert round(days, 1) == 143.9
    assert round(days) == 144
    by_name = cg.plan.training_days(6.3e24, "h100-sxm", devices=1024, mfu=0.5, dtype="bf16")
    assert by_name == pytest.approx(days * 989.5 / 989.4)


def test_training_time_is_symbolic():
    seconds = cg.plan.training_seconds(cg.plan.training_flops(N, T), 10**15, devices=n, mfu=u)
    assert seconds == 6 * N * T / (n * u * 10**15)
    assert cg.plan.training_days(6 * N * T, 10**15, devices=n, mfu=u) == seconds / DAY
    number = seconds.subs({N: 7 * 10**9, T: 10**12, n: 64, u: sympy.Rational(2, 5)})
    assert float(number) == pytest.approx(
        cg.plan.training_seconds(cg.plan.training_flops(7e9, 1e12), 1e15, devices=64, mfu=0.4)
    )


def test_tokens_invert_training_time():
    seconds = cg.plan.training_seconds(cg.plan.training_flops(7e9, 1e12), 1e15, devices=64, mfu=0.5)
    assert cg.plan.training_tokens(7e9, seconds, 1e15, devices=64, mfu=0.5) == pytest.approx(1e12)
    step = llama(precision="bf16")
    spent = cg.plan.training_seconds(cg.plan.training_flops(step, 1e9, S=64), "h100-sxm", dtype="bf16", mfu=0.4)
    assert cg.plan.training_tokens(step, spent, "h100-sxm", mfu=0.4, S=64) == pytest.approx(1e9)
    assert cg.plan.training_tokens(N, 86400, 10**15, devices=n) == sympy.Rational(86400 * 10**15, 6) * n / N


# -- capacity --------------------------------------------------------------------------------------------------------


def test_trainable_parameters_on_eight_80_gb_devices():
    # 8 * 80e9 / 16 = 40e9, / 12 = 53.3e9
    assert cg.plan.largest_params(8 * 80e9, 16) == 40_000_000_000
    assert cg.plan.largest_params("h100-sxm", 16, devices=8) == 85_017_493_504 // 2
    assert cg.plan.largest_params(80e9, 12, devices=8) == 53_333_333_333
    for precision, expected in (("fp32", 42_508_746_752), ("bf16", 56_678_329_002), ("megatron-bf16", 37_785_552_668)):
        each = cg.bytes_per_param(llama(precision=precision))
        assert cg.plan.largest_params("h100-sxm", each, devices=8) == expected
    assert cg.plan.largest_params(M, 16, devices=n) == sympy.floor(M * n / 16)
    assert cg.evaluate(cg.plan.largest_params(M, 12), M=640 * 10**9) == 53_333_333_333


def test_dataset_bytes():
    assert cg.plan.dataset_tokens(2.8e12, 2) == 1_400_000_000_000
    assert cg.plan.dataset_tokens(2.8e12, 4) == 700_000_000_000
    assert cg.plan.dataset_bytes(15e12, 2) == 30_000_000_000_000
    assert cg.plan.dataset_bytes(T, n) == T * n
    assert cg.plan.dataset_tokens(M, n) == M / n


def test_decimal_arguments_are_exact():
    assert cg.plan.dataset_bytes(0.1, 3) == 0.3  # a tenth exactly, not its binary approximation
    assert cg.plan.training_seconds(1, 10, mfu=0.1) == 1


@each(
    ("ask", "error", "text"),
    [
        (
            lambda: cg.plan.training_flops(0, 1),
            cg.BindingError,
            "training_flops: parameters: 0, expected a positive number",
        ),
        (
            lambda: cg.plan.training_flops(1, -1),
            cg.BindingError,
            "training_flops: tokens: -1, expected a positive number",
        ),
        (lambda: cg.plan.training_flops(1, "1T"), cg.BindingError, "training_flops: tokens: '1T', expected"),
        (
            lambda: cg.plan.training_flops(1, 1, B=2),
            cg.BindingError,
            "sizes B with a number of parameters; expected a graph, or no sizes",
        ),
        (
            lambda: cg.plan.training_flops(load("gpt2"), 1),
            cg.GraphError,
            "'gpt2' has no gradients; expected",
        ),
        (lambda: cg.plan.training_flops(llama(), 1, Q=2), cg.BindingError, "'Q' is not a dimension"),
        (lambda: cg.plan.leading_term(7e9, 1), cg.GraphError, "leading_term: step is 7000000000.0, expected a graph"),
        (
            lambda: cg.plan.training_days(1, 1, mfu=1.1),
            cg.BindingError,
            "mfu: 1.1, expected a number above 0 and up to 1",
        ),
        (
            lambda: cg.plan.training_days(1, 1, mfu=0),
            cg.BindingError,
            "training_days: mfu: 0, expected a number above 0",
        ),
        (
            lambda: cg.plan.training_days(1, "h100-sxm"),
            cg.BindingError,
            "training_days: dtype=None, expected a",
        ),
        (lambda: cg.plan.training_days(1, "h1"), cg.SpecError, "hardware 'h1' is unknown"),
        (
            lambda: cg.plan.training_seconds(1, 1, devices=None),
            cg.BindingError,
            "training_seconds: devices: None, expected",
        ),
        (
            lambda: cg.plan.training_tokens(1, float("inf"), 1),
            cg.BindingError,
            "training_tokens: seconds: inf, expected",
        ),
        (lambda: cg.plan.largest_params(-1, 16), cg.BindingError, "largest_params: memory: -1, expected"),
        (lambda: cg.plan.largest_params(1, 0), cg.BindingError, "largest_params: bytes_per_param: 0, expected"),
        (lambda: cg.plan.dataset_bytes(1, []), cg.BindingError, r"dataset_bytes: bytes_per_token: \[\], expected"),
        (lambda: cg.plan.dataset_tokens(True, 1), cg.BindingError, "dataset_tokens: bytes: True, expected"),
    ],
)
def test_invalid_amounts_are_refused(ask, error, text):
    with pytest.raises(error, match=text):
        ask()
