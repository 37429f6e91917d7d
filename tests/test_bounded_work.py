"""Small inputs that ask for unbounded work raise an error naming the limit; limits count work, not time."""

import itertools
import json

import numpy as np
import pytest
from budget import drawing
from each import each
from hypothesis import given
from hypothesis import strategies as st

import costgraph as cg
from costgraph.algebra import dominance
from costgraph.transforms import unroll as unrolling

B, D, L, S = cg.dims("B D L S")


def stack():
    with cg.Graph("g") as g:
        x = cg.repeat(L, lambda x: cg.linear(x, "b d -> b e", e=D), g.input("x", (B, D)), name="layers")
        g.output(cg.reduce(x, "b d -> ", "mean"))
    return g


@pytest.fixture
def ops(monkeypatch):
    """Count the ops that are created."""
    counter = [0]
    add = cg.Graph.add_op

    def counted(*args, **named):
        counter[0] += 1
        return add(*args, **named)

    monkeypatch.setattr(cg.Graph, "add_op", counted)
    return counter


@each("power", range(5, 60, 9))
def test_too_many_iterations_raise(power, ops):
    g = stack()
    before = ops[0]
    if power > 5:
        with pytest.raises(cg.BindingError, match=r"unroll.*expected at most 131072"):
            cg.unroll(g, L=10**power)
        assert ops[0] == before
    with pytest.raises(cg.BindingError, match=r"checkpoint_for: .* layers, expected at most 10000"):
        cg.plan.checkpoint_for(g, memory=1e9, L=10**power, B=2, D=3)
    assert ops[0] == before


def test_nested_loops_multiply_their_iteration_counts(ops):
    with cg.Graph("g") as g:
        inner = lambda x: cg.repeat(L, cg.tanh, x)  # noqa: E731
        g.output(cg.repeat(L, inner, g.input("x", (B,))))
    before = ops[0]
    with pytest.raises(cg.BindingError, match=r"unroll of graph 'g': 1000000 ops, expected at most 131072"):
        cg.unroll(g, L=1000)
    assert ops[0] == before
    assert len(cg.unroll(g, L=10).ops) == 100
    assert unrolling._MOST_OPS == 2**17


ENDLESS = {"count": itertools.count(1), "same": itertools.repeat(2), "range": range(1, 10**12), "list": [2] * 1001}


@pytest.mark.parametrize("values", ENDLESS.values(), ids=ENDLESS)
def test_unbounded_sweep_values_raise(values):
    step = cg.decode(cg.models.load("llama-3-8b"))
    with pytest.raises(cg.BindingError, match="throughput: expected at most 1000 values"):
        cg.plan.throughput(step, "h100-sxm", "B", values, S=64)


# -- assumptions in files ----------------------------------------------------------------------------------------------


def with_assumptions(count, tmp_path):
    names = cg.dims(" ".join(f"N{i}" for i in range(count + 1)))
    with cg.Graph("g") as g:
        x, y, z = g.input("x", (B, D)), g.input("y", (D, S)), g.input("z", (S, names[-1]))
        for i in range(4):
            g.output(cg.einsum(x, y, z, "b d, d s, s n -> b n", name=f"p{i}"))
        g.assume(*(f"N{i} >= {i % 7 + 2}" for i in range(count)))
    cg.save(g, tmp_path / "g.json")
    return tmp_path / "g.json"


@pytest.fixture
def admitted(monkeypatch):
    """Count the assumptions that are processed."""
    times = [0]
    admit = dominance.Relations._admit

    def counted(self, relation):
        times[0] += 1
        admit(self, relation)

    monkeypatch.setattr(dominance.Relations, "_admit", counted)
    return times


def test_loading_work_is_linear_in_assumptions(tmp_path, admitted):
    work = []
    for count in (50, 100, 200):
        path = with_assumptions(count, tmp_path)
        admitted[0] = 0
        assert len(cg.load(path).relations.relations) == count
        work.append(admitted[0])
    assert work[2] <= 2.2 * work[1] <= 2.2 * 2.2 * work[0]
    assert work[2] <= 4 * 200


def test_files_with_too_many_assumptions_raise(tmp_path, admitted):
    path = with_assumptions(80, tmp_path)
    data = json.loads(path.read_text())
    (product,) = [n for n in data["nodes"] if n["id"] == "p0()"]
    product["attrs"]["orders"] = {"size": "B"}
    path.write_text(json.dumps(data))
    admitted[0] = 0
    with pytest.raises(cg.FormatError, match="fits none of 64 states of the assumptions"):
        cg.load(path)
    assert admitted[0] <= 64 * 80
    data["graph"]["assumptions"] = [f"B <= {i}" for i in range(10, 1012)]
    path.write_text(json.dumps(data))
    with pytest.raises(cg.FormatError, match="1002 assumptions, expected at most 1000"):
        cg.load(path)


def test_assumptions_between_ops_survive_a_file(tmp_path):
    """Comparisons that were undecided when a product was declared stay undecided in the file."""
    with cg.Graph("g") as g:
        x, y, z = g.input("x", (B, D)), g.input("y", (D, S)), g.input("z", (S, L))
        g.output(cg.einsum(x, y, z, "b d, d s, s l -> b l", name="open"))
        for relation in ("B <= 4", "S >= 64", "D >= 64", "L >= 64"):
            g.assume(relation)
            g.output(cg.einsum(x, y, z, "b d, d s, s l -> b l"))
    cg.save(g, tmp_path / "g.json")
    assert cg.flops(cg.load(tmp_path / "g.json")) == cg.flops(g)


# -- NumPy integers ----------------------------------------------------------------------------------------------------

KINDS = [np.int8, np.uint8, np.int16, np.int32, np.uint64, np.int64]
QUESTIONS = {
    "largest": lambda n: cg.largest(stack(), "B", memory=10**13, multiple_of=n, D=2, L=3),
    "bind": lambda n: cg.flops(stack(), B=n, D=n, L=n),
    "formula": lambda n: cg.evaluate(cg.flops(stack()), B=n, D=n, L=n),
    "unroll": lambda n: len(cg.unroll(stack(), L=n).ops),
    "every": lambda n: cg.flops(cg.training_step(stack(), checkpoint=cg.every(n)), B=5, D=7, L=2 * int(n)),
    "quotients": lambda n: cg.flops(conv(n)),
    "costs": lambda n: cg.costs(stack()).bind(B=n, D=n, L=n).total().flops,
    "assumed": lambda n: defaulted(n),
}


def conv(n):
    with cg.Graph("g") as g:
        g.output(cg.conv(g.input("x", (n, n, 9, 9)), "b c h w -> b o h w", window=(n, 1), padding=n, o=n))
    return g


def defaulted(n):
    g = stack()
    with g:
        g.defaults = {"B": n, "D": n, "L": n}
    return cg.flops(g)


@drawing(25)
@given(st.sampled_from(sorted(QUESTIONS)), st.sampled_from(KINDS), st.integers(2, 9))
def test_integers_of_numpy_are_integers(name, kind, number):
    def answer(n):
        try:
            return QUESTIONS[name](n)
        except cg.CostGraphError as error:
            return type(error)

    found, expected = answer(kind(number)), answer(number)
    assert found == expected
    assert type(found) is type(expected)


def test_numpy_products_do_not_overflow():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B,))))
    assert cg.largest(g, "B", memory=8 * 276548672193, multiple_of=np.int32(3)) == 276548672193


# -- folds and fallbacks -----------------------------------------------------------------------------------------------


@each("count", ["L", "F", "N"])
def test_folded_count_has_no_default(count):
    flat = cg.unroll(cg.models.load("mlp"), L=3)
    folded = cg.fold(flat, "layers", count)
    assert count not in folded.defaults
    assert cg.flops(folded, **{count: 3}, B=2) == cg.flops(flat, B=2)
    assert count in map(str, cg.flops(folded, B=2).free_symbols)


ODD = ["fp17", "peak.fp17", "bf-16", "vectors.fp32", "peak.", "", {"bf16": "fp17"}, {"bf17": "fp16"}, {"bf16": "a.x"}]


@pytest.mark.parametrize("fallback", ODD, ids=repr)
def test_invalid_fallback_raises_even_if_unused(fallback):
    g = stack()
    asked = [
        lambda: cg.roofline(g, "h100-sxm", fallback=fallback, B=2, D=3, L=4),
        lambda: cg.load_hardware("h100-sxm").rate("bf16", fallback=fallback),
        lambda: cg.crossover(g, "h100-sxm", "B", fallback=fallback, D=3, L=4),
        lambda: cg.mfu(cg.training_step(g), 1.0, "h100-sxm", dtype="bf16", fallback=fallback, B=2, D=3, L=4),
    ]
    for call in asked:
        with pytest.raises((cg.SpecError, cg.FormatError)):
            call()


@each("fallback", ["bf16", "peak.fp8", "vector.fp32", "fp4", {"nvfp4": "peak.fp8"}], ids=repr)
def test_valid_fallbacks_are_accepted(fallback):
    assert cg.load_hardware("h100-sxm").rate("bf16", fallback=fallback) == cg.load_hardware("h100-sxm").rate("bf16")
