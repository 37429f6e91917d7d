"""Time to derive formulas from a graph: against the number of ops, the depth and the live sets."""

import pytest
from timing import best, growth, once

import costgraph as cg
from costgraph import models

B, D = cg.dims("B D")


def chain(ops):
    with cg.Graph("chain") as g:
        x = g.input("x", (B, D))
        for _ in range(ops):
            x = cg.relu(x)
        g.output(x)
    return g


def residual(ops):
    """Blocks of six ops with a weight each: three ops read the block input, one result has two readers."""
    with cg.Graph("residual") as g:
        x = g.input("x", (B, D))
        for i in range(ops // 6):
            left = cg.relu(x)
            both = left * cg.silu(x)
            y = cg.einsum(both, g.param(f"w{i}", (D, D)), "b d, d e -> b e")
            x = x + (y + left)
        g.output(x)
    return g


def derive(g):
    return cg.flops(g), cg.bytes_moved(g), cg.peak_memory(g)


@pytest.mark.parametrize("family", [chain, residual])
def test_time_grows_in_proportion_to_the_ops(benchmark, family):
    derive(family(600))
    rounds = {10**2: 20, 10**3: 5, 10**4: 2, 10**5: 1}
    times = {n: min(once(lambda n=n: derive(family(n))) for _ in range(most)) for n, most in rounds.items()}
    benchmark.extra_info |= {f"seconds of {n} ops": seconds for n, seconds in times.items()}
    benchmark.extra_info["microseconds an op, 10^5 ops"] = times[10**5] / 10**5 * 1e6
    benchmark.extra_info["growth exponent"] = growth(times)
    benchmark.pedantic(lambda: derive(family(10**3)), rounds=3)
    assert growth(times) <= 1.1


def test_formulas_do_not_grow_with_the_ops():
    # so that the growth is that of the derivation alone
    few, many = ([len(cg.flops(residual(n)).args), len(cg.bytes_moved(residual(n)).args)] for n in (60, 600))
    assert few == many


def test_depth_costs_nothing(benchmark):
    def at(depth):
        g = models.load("llama-2-7b")
        return cg.flops(g, L=depth), cg.bytes_moved(g, L=depth), cg.peak_memory(g, L=depth)

    shallow, deep = best(10, lambda: at(32), lambda: at(3200))
    benchmark.extra_info["ratio"] = deep / shallow
    benchmark.pedantic(at, (3200,), rounds=3)
    assert deep / shallow < 1.5


def incomparable(count):
    """Sequential hidden layers with independent widths: each may determine the peak."""
    with cg.Graph("widths") as g:
        x, y = g.input("x", (B, D)), g.input("y", (B,))
        for F in cg.dims(" ".join(f"F{i}" for i in range(count))):
            y = y + cg.reduce(cg.linear(x, "b d -> b f", f=F), "b f -> b", "sum")
        g.output(y)
    return g


def test_closed_form_peak_against_the_live_sets_that_survive(benchmark):
    times = {}
    for count in (2, 8, 32, 128):
        graphs = [incomparable(count) for _ in range(1 if count == 128 else 5)]
        assert len(cg.regimes(cg.peak_memory(incomparable(count)))) == count
        times[count] = min(once(lambda g=g: cg.peak_memory(g)) for g in graphs)
        benchmark.extra_info[f"milliseconds, {count} live sets"] = times[count] * 1e3
    benchmark.extra_info["growth exponent"] = growth(times)
    benchmark.pedantic(cg.peak_memory, setup=lambda: ((incomparable(32),), {}), rounds=3)
    # every pair is compared
    assert growth(times) <= 2
