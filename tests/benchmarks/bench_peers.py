"""Speed of costgraph and other tools on the same questions, in the same process, with equal answers."""

import json
import os
import random
import subprocess
from contextlib import suppress
from pathlib import Path
from time import process_time

import numpy as np
import opt_einsum
import pytest
import sympy
from limits import TooSlowError, limited
from timing import best

import costgraph as cg
from costgraph import models

# Time limit of one sympy.Max operation in seconds; longer ones take minutes.
LIMIT = 8


def declare_and_derive():
    g = models.load("llama-2-7b", symbolic=True)
    return cg.flops(g), cg.bytes_moved(g), cg.peak_memory(g)


def test_deriving_formulas_against_counting_with_torch(benchmark):
    torch = pytest.importorskip("torch")
    from plain_torch import LLAMA_7B, Llama
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
    benchmark.extra_info["milliseconds"] = ours * 1e3
    benchmark.extra_info["milliseconds, FlopCounterMode"] = theirs * 1e3
    benchmark.extra_info["ratio"] = theirs / ours
    benchmark.pedantic(declare_and_derive, rounds=3)
    assert theirs / ours >= 5


NETWORKS = {
    "five tensors": ("pi,qj,ijkl,rk,sl->pqrs", [(10, 10), (10, 10), (10, 10, 10, 10), (10, 10), (10, 10)]),
    "four tensors": ("xyf,xtf,ytpf,fr->tpr", [(35, 37, 59), (35, 51, 59), (37, 51, 51, 59), (59, 27)]),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_order_of_a_contraction_against_opt_einsum(benchmark, network):
    expression, shapes = NETWORKS[network]
    left, right = expression.split("->")
    pattern = ", ".join(" ".join(names) for names in left.split(",")) + " -> " + " ".join(right)

    def ours():
        with cg.Graph("network") as g:
            g.output(cg.einsum(*(g.input(f"x{i}", shape) for i, shape in enumerate(shapes)), pattern))
        return cg.matmul_flops(g)

    def theirs():
        return opt_einsum.contract_path(expression, *shapes, shapes=True, optimize="optimal")[1].opt_cost

    assert ours() == theirs()
    mine, their = best(20, ours, theirs)
    benchmark.extra_info["milliseconds, graph and order"] = mine * 1e3
    benchmark.extra_info["milliseconds, opt_einsum"] = their * 1e3
    benchmark.extra_info["ratio"] = their / mine
    benchmark.pedantic(ours, rounds=5)
    # includes constructing a graph with checked ops
    assert mine <= 30 * their


def sums(count, terms):
    """Return sums, none of which is the largest everywhere."""
    chosen = random.Random(0)
    dims = cg.dims("B S D L")

    def term():
        return sympy.Mul(chosen.randint(1, 9), *(d ** chosen.randint(0, 2) for d in dims))

    return [sympy.Add(*(term() for _ in range(terms))) for _ in range(count)]


def timed(function):
    """Return the seconds and the result of a call, None if it exceeds the limit."""
    result = None
    start = process_time()
    with suppress(TooSlowError), limited(LIMIT):
        result = function()
    return process_time() - start, result


def test_maximum_against_that_of_sympy(benchmark):
    B, S, D, L = cg.dims("B S D L")
    exprs = sums(10, 10)
    build, theirs = timed(lambda: sympy.Max(*exprs))
    ours = cg.Max(*exprs)
    assert theirs is not None
    assert len(cg.regimes(ours)) == len(theirs.args)
    questions = {
        "subs": lambda m: m.subs({B: 3}),
        "nest": lambda m: type(m)(m + B * S, L * D**2),
        "diff": lambda m: m.diff(B),
    }
    slower = {"build": build / best(5, lambda: cg.Max(*exprs))[0]}
    for name, ask in questions.items():
        slower[name] = timed(lambda ask=ask: ask(theirs))[0] / best(5, lambda ask=ask: ask(ours))[0]
    benchmark.extra_info |= {f"ratio, {name}": ratio for name, ratio in slower.items()}
    benchmark.pedantic(cg.Max, exprs, rounds=3)
    point = {B: 3, S: 5, D: 7, L: 2}
    assert ours.subs(point) == max(e.subs(point) for e in exprs)
    assert min(slower.values()) >= 5


def _rates(formulas, points, at):
    """Return evaluations per second of several formulas together: compiled, over a grid, and one by one."""
    compiled = [cg.compile(f) for f in formulas]
    exact = [cg.evaluate(f, **at) for f in formulas]
    assert [float(call(**points)[0]) for call in compiled] == pytest.approx(exact, rel=1e-12)
    swept, one = best(
        3, lambda: [call(**points) for call in compiled], lambda: [cg.evaluate(f, **at) for f in formulas]
    )
    return 10**6 / swept, 1 / one


def test_evaluations_a_second_beside_other_planners(benchmark):
    python, calculon = os.environ.get("COSTGRAPH_PLANNERS", ":").split(":")
    if not python:
        pytest.skip("COSTGRAPH_PLANNERS=PYTHON:CALCULON names an interpreter with llm-analysis, and a checkout")
    script = Path(__file__).with_name("other_planners.py")
    run = subprocess.run([python, script, calculon], capture_output=True, text=True, check=True, env={})
    theirs = json.loads(run.stdout)
    assert theirs["version of llm-analysis"] == "0.2.2"  # the version that the page states
    model = models.load("llama-2-7b")
    step = cg.training_step(model, precision="bf16-mixed", optimizer=cg.AdamW())
    rank = cg.parallelize(step, tp=8, sequence=True)
    draw = np.random.default_rng(0)
    points = {"B": draw.integers(1, 65, 10**6), "S": 8 * draw.integers(16, 1025, 10**6)}
    asked = {
        "forward pass": [cg.seconds(model, "h100-sxm")],
        "step of one rank of eight, time and peak": [cg.seconds(rank, "h100-sxm"), cg.peak_memory(rank)],
    }
    at = {name: int(sizes[0]) for name, sizes in points.items()}
    rates = {name: _rates(formulas, points, at) for name, formulas in asked.items()}
    for name, (swept, one) in rates.items():
        benchmark.extra_info[f"million points a second, {name}"] = swept / 1e6
        benchmark.extra_info[f"points one by one a second, {name}"] = round(one)
    for tool in ("llm-analysis", "calculon"):
        for question, found in theirs[tool].items():
            benchmark.extra_info[f"evaluations a second, {tool}, {question}"] = round(found)
    benchmark.pedantic(cg.compile(asked["forward pass"][0]), kwargs=points, rounds=3)
    assert min(swept for swept, _ in rates.values()) > 10**6
    steps = max(theirs["llm-analysis"]["training"], theirs["calculon"]["training"])
    assert rates["step of one rank of eight, time and peak"][0] > 100 * steps
