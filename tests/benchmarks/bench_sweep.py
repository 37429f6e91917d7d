"""Sweeps of a formula over a million points, compared with sympy.lambdify in the same process."""

from math import prod

import numpy as np
import sympy
from timing import best

import costgraph as cg
from costgraph import models
from costgraph.algebra.polynomial import poly

POINTS = 10**6


def compare(benchmark, compiled, plain, points):
    np.testing.assert_allclose(compiled(**points), plain(**points), rtol=1e-12)
    ours, theirs = best(5, lambda: compiled(**points), lambda: plain(**points))
    benchmark.extra_info["million points a second"] = POINTS / ours / 1e6
    benchmark.extra_info["million points a second, lambdify"] = POINTS / theirs / 1e6
    benchmark.extra_info["ratio"] = theirs / ours
    benchmark.pedantic(compiled, kwargs=points, rounds=3)
    assert ours < theirs


def test_sweep_against_lambdify(benchmark):
    B, S, D, L = cg.dims("B S D L")
    names = ("B", "S", "D", "L")
    powers = [(b, s, d, n) for b in (1, 2) for s in (0, 1, 2) for d in (1, 2) for n in (0, 1)][:20]
    formula = sympy.Add(*((2 * i + 3) * B**b * S**s * D**d * L**n for i, (b, s, d, n) in enumerate(powers, 1)))
    assert len(formula.args) == 20
    random = np.random.default_rng(0)
    points = {name: random.integers(1, 100, POINTS).astype(np.float64) for name in names}
    compare(benchmark, cg.compile(formula), sympy.lambdify((B, S, D, L), formula, "numpy"), points)


def test_sweep_of_a_peak_against_lambdify_of_its_cases(benchmark):
    B, S, F, V = cg.dims("B S F V")
    peak = cg.peak_memory(models.load("llama-3-8b", symbolic=True), D=4096, H=32, G=8, K=128, L=32)
    cases = sympy.lambdify((B, S, F, V), [r.formula for r in cg.regimes(peak)], "numpy")
    random = np.random.default_rng(0)
    points = {n: random.integers(1, 2**15, POINTS).astype(np.float64) for n in "BSFV"}
    benchmark.extra_info["cases"] = len(cg.regimes(peak))
    assert len(cg.regimes(peak)) > 1
    compare(benchmark, cg.compile(peak), lambda B, S, F, V: np.maximum.reduce(cases(B, S, F, V)), points)


def test_sweep_of_a_time_against_lambdify_and_rooflines(benchmark):
    model, device = models.load("llama-3-8b"), cg.load_hardware("h100-sxm")
    time = cg.seconds(model, device)
    random = np.random.default_rng(0)
    points = {"B": random.integers(1, 512, POINTS), "S": random.integers(1, 8193, POINTS)}
    compiled, plain = cg.compile(time), sympy.lambdify(cg.dims("B S"), time, "numpy")
    at = {name: int(sizes[0]) for name, sizes in points.items()}
    assert compiled(**points)[0] == cg.roofline(model, device, **at).estimate
    sweep, one = best(3, lambda: compiled(**points), lambda: cg.roofline(model, device, **at))
    benchmark.extra_info["maxima"] = len(time.atoms(cg.Max))
    benchmark.extra_info["rooflines a second"] = 1 / one
    benchmark.extra_info["ratio, to rooflines one by one"] = one * POINTS / sweep
    assert one * POINTS > 10**4 * sweep
    compare(benchmark, compiled, plain, points)


def test_a_peak_at_one_point_against_a_loop_over_its_cases(benchmark):
    step = cg.training_step(models.load("llama-3-8b", symbolic=True), precision="bf16-mixed", optimizer=cg.AdamW())
    peak = cg.peak_memory(step, D=4096, H=32, G=8, K=128, L=32)
    at = {s.name: size for s, size in zip(sorted(peak.free_symbols, key=str), (3, 14336, 2048, 128256), strict=True)}
    cases = [list(poly(r.formula).terms.items()) for r in cg.regimes(peak)]

    def loop():
        return max(sum(c * prod(at[name] ** power for name, power in m) for m, c in case) for case in cases)

    compiled = cg.compile(peak)
    assert cg.evaluate(peak, **at) == compiled(**at) == loop()
    evaluated, called, bare = best(100, lambda: cg.evaluate(peak, **at), lambda: compiled(**at), loop)
    benchmark.extra_info["cases"] = len(cases)
    benchmark.extra_info["microseconds"] = evaluated * 1e6
    benchmark.extra_info["ratio"] = bare / evaluated
    benchmark.pedantic(cg.evaluate, args=(peak,), kwargs=at, rounds=20)
    assert max(evaluated, called) < 3 * bare
