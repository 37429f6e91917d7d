"""Training steps: how the time to derive them grows, compared with torch's MemTracker at one size."""

import os

import pytest
from timing import best, growth, once

import costgraph as cg
from costgraph import models

# COSTGRAPH_BENCHMARKS=long takes minutes: all layers of llama-2-7b, and 10^4 ops
LONG = os.environ.get("COSTGRAPH_BENCHMARKS") == "long"

B, D = cg.dims("B D")


def perceptron(ops):
    """Two-op layers with one weight each."""
    with cg.Graph("perceptron") as g:
        x = g.input("x", (B, D))
        for i in range(ops // 2):
            x = cg.relu(cg.einsum(x, g.param(f"w{i}", (D, D)), "b d, d e -> b e"))
        g.output(cg.reduce(x, "b d -> ", "mean"))
    return g


def residual(ops):
    """Six-op blocks with a weight each: gradients of the block input are accumulated."""
    with cg.Graph("residual") as g:
        x = g.input("x", (B, D))
        for i in range(ops // 6):
            left = cg.relu(x)
            y = cg.einsum(left * cg.silu(x), g.param(f"w{i}", (D, D)), "b d, d e -> b e")
            x = x + (y + left)
        g.output(cg.reduce(x, "b d -> ", "mean"))
    return g


def derive(g):
    step = cg.training_step(g)
    return cg.flops(step), cg.bytes_moved(step), cg.peak_memory(step)


@pytest.mark.parametrize("family", [perceptron, residual])
def test_time_of_a_step_grows_in_proportion_to_the_ops(benchmark, family):
    derive(family(600))
    rounds = {100: 7, 300: 5, 1000: 3, 3000: 3} | ({10**4: 1} if LONG else {})
    times = {n: min(once(lambda n=n: derive(family(n))) for _ in range(most)) for n, most in rounds.items()}
    benchmark.extra_info |= {f"seconds of {n} ops": seconds for n, seconds in times.items()}
    most = max(times)
    benchmark.extra_info[f"microseconds an op, {most} ops"] = times[most] / most * 1e6
    benchmark.extra_info["growth exponent"] = growth(times)
    benchmark.pedantic(lambda: derive(family(300)), rounds=3)
    assert growth(times) <= 1.2


MODELS = {
    "gpt2": {"D": 768, "H": 12, "F": 3072, "L": 12, "V": 50257, "P": 1024},
    "llama-2-7b": {"D": 4096, "H": 32, "G": 32, "K": 128, "F": 11008, "L": 32 if LONG else 12, "V": 32000},
}


@pytest.mark.parametrize("name", MODELS)
def test_peak_of_a_step_against_memtracker(benchmark, name):
    pytest.importorskip("torch")
    from tracked import tracked_peak

    sizes, found = MODELS[name], []

    def closed_form():
        step = cg.training_step(models.load(name, attention="eager", symbolic=True))
        return cg.evaluate(cg.peak_memory(step), B=1, S=512, **sizes)

    theirs = once(lambda: found.append(tracked_peak(name, sizes, 1, 512, "bf16")))
    assert closed_form() == pytest.approx(found[0], rel=1e-3)
    (ours,) = best(5, closed_form)
    benchmark.extra_info["layers"] = sizes["L"]
    benchmark.extra_info["milliseconds"] = ours * 1e3
    benchmark.extra_info["milliseconds, MemTracker"] = theirs * 1e3
    benchmark.extra_info["ratio"] = theirs / ours
    benchmark.pedantic(closed_form, rounds=3)
    # MemTracker's time grows with the depth, that of a closed form does not
    assert theirs / ours >= (100 if sizes["L"] == 32 else 10)


def test_peak_of_a_step_with_every_size_open(benchmark):
    def build(name):
        model = models.load(name, symbolic=True)
        step = cg.training_step(model, precision="bf16-mixed", optimizer=cg.AdamW())
        return len(cg.regimes(cg.peak_memory(step)))

    for name in ("llama-3-8b", "deepseek-v3", "swin-t"):
        (seconds,) = best(2, lambda name=name: build(name))
        benchmark.extra_info[f"seconds, {name}"] = seconds
        benchmark.extra_info[f"cases, {name}"] = build(name)
    benchmark.pedantic(build, args=("llama-3-8b",), rounds=3)
    assert benchmark.extra_info["seconds, llama-3-8b"] < 2
