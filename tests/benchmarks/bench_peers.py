"""The same questions asked of other tools, in the same process and with the same answers."""

import random
from contextlib import suppress
from time import process_time

import opt_einsum
import pytest
import sympy
from limits import TooSlowError, limited
from timing import best

import costgraph as cg
from costgraph import models

# Longest that sympy.Max may take for one operation; what is cut off here takes minutes elsewhere.
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
    # a graph of checked ops comes with it
    assert mine <= 30 * their


def sums(count, terms):
    """Sums none of which is the largest everywhere."""
    chosen = random.Random(0)
    dims = cg.dims("B S D L")

    def term():
        return sympy.Mul(chosen.randint(1, 9), *(d ** chosen.randint(0, 2) for d in dims))

    return [sympy.Add(*(term() for _ in range(terms))) for _ in range(count)]


def timed(function):
    """Seconds of a call and what it returns, None for what was cut off."""
    made = None
    start = process_time()
    with suppress(TooSlowError), limited(LIMIT):
        made = function()
    return process_time() - start, made


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
