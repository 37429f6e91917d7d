"""How fast formulas are derived and evaluated, as ratios of two times taken in one process: no seconds are asserted.

Each ratio is that of the best of several rounds, alternating, after a warm-up.
"""

import subprocess
import sys
from time import perf_counter

import numpy as np
import pytest
import sympy

import costgraph as cg
from costgraph import models

LLAMA_7B = {"D": 4096, "H": 32, "G": 32, "K": 128, "F": 11008, "L": 32, "V": 32000}


def best(rounds, *functions):
    """Best time of each function, in seconds: a slow moment of the machine falls on all of them."""
    for function in functions:
        function()
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, taken in zip(functions, times, strict=True):
            start = perf_counter()
            function()
            taken.append(perf_counter() - start)
    return [min(taken) for taken in times]


def declare_and_derive():
    g = models.load("llama-2-7b", symbolic=True)
    return cg.flops(g), cg.bytes_moved(g), cg.peak_memory(g)


def test_deriving_formulas_against_counting_with_torch(benchmark):
    torch = pytest.importorskip("torch")
    from plain_torch import Llama
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        module = Llama(**LLAMA_7B)
        ids = torch.zeros((1, 128), dtype=torch.int64)

    def count():
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(ids)
        return counter.get_total_flops()

    assert count() == cg.matmul_flops(models.load("llama-2-7b"), count="full", B=1, S=128)
    ours, theirs = best(5, declare_and_derive, count)
    benchmark.extra_info["ratio"] = theirs / ours
    benchmark.pedantic(declare_and_derive, rounds=3)
    assert theirs / ours >= 5


def test_depth_costs_nothing(benchmark):
    def derive(depth):
        g = models.load("llama-2-7b")
        return cg.flops(g, L=depth), cg.bytes_moved(g, L=depth), cg.peak_memory(g, L=depth)

    shallow, deep = best(10, lambda: derive(32), lambda: derive(3200))
    benchmark.extra_info["ratio"] = deep / shallow
    benchmark.pedantic(derive, (3200,), rounds=3)
    assert deep / shallow < 1.5


def test_sweep_against_lambdify(benchmark):
    B, S, D, L = cg.dims("B S D L")
    names = ("B", "S", "D", "L")
    powers = [(b, s, d, n) for b in (1, 2) for s in (0, 1, 2) for d in (1, 2) for n in (0, 1)][:20]
    formula = sympy.Add(*((2 * i + 3) * B**b * S**s * D**d * L**n for i, (b, s, d, n) in enumerate(powers, 1)))
    assert len(formula.args) == 20
    random = np.random.default_rng(0)
    points = {name: random.integers(1, 100, 10**6).astype(np.float64) for name in names}
    compiled = cg.compile(formula)
    plain = sympy.lambdify((B, S, D, L), formula, "numpy")
    np.testing.assert_allclose(compiled(**points), plain(**points), rtol=1e-12)
    ours, theirs = best(5, lambda: compiled(**points), lambda: plain(**points))
    benchmark.extra_info["points_per_second"] = 10**6 / ours
    benchmark.extra_info["points_per_second_lambdify"] = 10**6 / theirs
    benchmark.pedantic(compiled, kwargs=points, rounds=3)
    assert ours < theirs


IMPORTS = """
import sys
from time import perf_counter
start = perf_counter()
import sympy, networkx, numpy
middle = perf_counter()
# the bytecode of a checkout may be missing, that of an installed package is not
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
import costgraph
print(middle - start, perf_counter() - start)
"""


def test_import_costs_little_more_than_what_it_imports(benchmark, tmp_path):
    def times():
        command = [sys.executable, "-c", IMPORTS, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return map(float, run.stdout.split())

    benchmark.pedantic(times, rounds=1)
    theirs, ours = map(min, zip(*(times() for _ in range(7)), strict=True))
    benchmark.extra_info["ratio"] = ours / theirs
    assert ours / theirs <= 1.3
