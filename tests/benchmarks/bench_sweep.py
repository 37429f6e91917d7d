"""Sweeps of a formula over a million points, against sympy.lambdify in the same process."""

import numpy as np
import sympy
from timing import best

import costgraph as cg
from costgraph import models

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
