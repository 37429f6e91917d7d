"""Formulas carry their validity conditions through arithmetic, binding, pickling, arrays and tables."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import sympy
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph import BindingError
from costgraph.algebra.conditions import held_by

B, D, H, K, L, S, T = cg.dims("B D H K L S T")
REFUSED = r"^S=3: axis 0 of 'slice' has size S - 5 = -2, expected a positive integer$"


@pytest.fixture
def short():
    """A slice that leaves S - 5 rows."""
    with cg.Graph("short") as g:
        g.output(cg.relu(g.input("x", (S, B))[5:]))
    return g


def stack():
    """Layers whose peak has a closed form for two layers or more."""
    with cg.Graph("stack") as g:
        g.output(cg.repeat(L, lambda x: cg.relu(cg.relu(x)) + x, g.input("x", (B, D))))
    return g


WAYS = {
    "itself": lambda f: f,
    "sum": lambda f: f + 1,
    "sum from the left": lambda f: B + f,
    "difference": lambda f: B**2 - f,
    "builtin sum": lambda f: sum([f, f, B]),
    "product": lambda f: 2 * f,
    "Integer's product": lambda f: sympy.Integer(2) * f,
    "NumPy's product": lambda f: np.int64(2) * f,
    "quotient": lambda f: f / B,
    "reciprocal": lambda f: 1 / f,
    "power": lambda f: f**2,
    "exponent": lambda f: 2**f,
    "sign": lambda f: -f,
    "floor": lambda f: f // 2,
    "rest": lambda f: f % 2,
    "Max": lambda f: cg.Max(f, B),
    "Min": lambda f: cg.Min(B, f + 1),
    "regime": lambda f: cg.regimes(cg.Max(f, T) + B)[0].formula,
    "derivative": lambda f: (f**2).diff(B),
    "expanded": lambda f: ((f + 1) ** 2).expand(),
    "factored": lambda f: f.factor(),
    "simplified": lambda f: f.simplify(),
    "another name": lambda f: f.subs(B, T),
    "a formula for a name": lambda f: f.subs({B: T + 1}),
    "replaced": lambda f: f.xreplace({B: T * 2}),
    "put into another": lambda f: (B * T).subs(B, 1) * f,
    "pickled": lambda f: pickle.loads(pickle.dumps(f)),
    "copied": lambda f: copy.copy(f),
    "copied whole": lambda f: copy.deepcopy(f),
    "floats": lambda f: 0.5 * f,
}


@each("way", WAYS)
def test_formula_raises_where_its_graph_does(short, way):
    f = WAYS[way](cg.flops(short))
    sizes = {s.name: 7 for s in f.free_symbols} | {"S": 3}
    with pytest.raises(BindingError, match=REFUSED):
        cg.evaluate(f, **sizes)
    with pytest.raises(BindingError, match=REFUSED):
        f.subs(S, 3)
    assert cg.evaluate(f, **{**sizes, "S": 9}) == float(f.subs({s: 9 if s == S else 7 for s in f.free_symbols}))
    if "S" in {s.name for s in f.free_symbols}:
        with pytest.raises(BindingError, match=r"^at \[1\] .*: S=3: axis 0 of 'slice' has size S - 5 = -2"):
            cg.compile(f)(**{**sizes, "S": [9, 3]})


def test_all_substitution_methods_check_conditions(short):
    f = cg.flops(short)
    for sizes in ({S: 3}, [(S, 3)], ((S, 3), (B, 2)), zip((S, B), (3, 2), strict=True), {(S, 3)}):
        with pytest.raises(BindingError, match=REFUSED):
            f.subs(sizes)
    with pytest.raises(BindingError, match=REFUSED):
        f.xreplace({S: sympy.Integer(3)})
    with pytest.raises(BindingError, match=REFUSED):
        f.evalf(subs={S: 3, B: 2})
    assert f.subs(zip((S, B), (9, 2), strict=True)) == 8
    assert float(f.evalf(subs={S: 9, B: 2})) == 8


def test_conditional_formula_behaves_like_plain_expression(short):
    f, plain = cg.flops(short), sympy.Add(B * S, -5 * B)
    assert held_by(f)
    assert not held_by(plain)
    assert f == plain
    assert plain == f
    assert f != plain + 1
    assert {plain: 1}[f] == 1
    assert isinstance(f, sympy.Add)
    assert f.func is sympy.Add
    assert (str(f), repr(f), sympy.latex(f), sympy.srepr(f)) == (
        str(plain), repr(plain), sympy.latex(plain), sympy.srepr(plain),
    )  # fmt: skip
    assert (f.args, f.free_symbols, f.is_integer, f.sort_key()) == (
        plain.args, plain.free_symbols, True, plain.sort_key(),
    )  # fmt: skip
    assert sympy.lambdify([B, S], f)(2, 9) == 8
    # sympy substitutes trial numbers to simplify expressions: the conditions must not apply to them
    assert f.equals(plain)
    assert f.is_positive is None
    assert sympy.solve(f - B, S) == [6]
    assert f.subs({B: sympy.Symbol("x")}).free_symbols == {sympy.Symbol("x"), S}


def test_conditions_do_not_leak_into_sympy_caches(short):
    f = cg.flops(short)
    for made in (sympy.Mul(f, T), sympy.sqrt(f + T), sympy.Max(f, T), cg.Max(f, T).args[0], sympy.log(f)):
        assert not any(held_by(e) for e in sympy.preorder_traversal(made) if e is not made)
    assert not held_by(sympy.Mul(B * S - 5 * B, T))


def test_a_formula_without_conditions_is_plain():
    with cg.Graph("plain") as g:
        g.output(cg.relu(g.input("x", (B, D))))
    assert not held_by(cg.flops(g))
    assert type(cg.flops(g)) is sympy.Mul
    with g:
        g.assume("B <= 8")
    assert held_by(cg.flops(g))
    assert not any(v.names for v in held_by(cg.flops(g, B=4)))


def test_formula_checks_assumed_relations():
    with cg.Graph("heads") as g:
        x = g.input("x", (B, D))
        g.output(cg.relu(cg.rearrange(x, "b (h k) -> b h k", h=H)))
        g.assume("D == H*K", "K >= 2", "B <= 8")
    f = cg.flops(g)
    assert f == B * H * K
    for sizes, words in (
        ({"B": 9, "H": 2, "K": 3}, "B=9: against the assumption 'B <= 8'"),
        ({"B": 2, "H": 2, "K": 1}, "K=1: against the assumption 'K >= 2'"),
        ({"B": 2, "H": 2, "K": 3, "D": 7}, "against the assumption 'D == H\\*K'"),
    ):
        with pytest.raises(BindingError, match=words):
            cg.evaluate(f, **sizes)
        with pytest.raises(BindingError, match=words):
            cg.compile(f)(**{k: [v] for k, v in sizes.items()})
    assert cg.evaluate(f, B=2, H=2, K=3, D=6) == 12
    for ask in (cg.evaluate, lambda f, **sizes: cg.compile(f)(**{k: [v] for k, v in sizes.items()})):
        with pytest.raises(BindingError, match=r"'D == H\*K' makes .=12/5, expected a positive integer"):
            ask(cg.flops(g, D=12), B=1, K=5)


def test_combined_formulas_need_both_conditions(short):
    with cg.Graph("third") as g:
        g.output(cg.relu(cg.rearrange(g.input("x", (T, B)), "(n r) b -> n r b", r=3)))
    both = cg.flops(short) / cg.flops(g)
    assert cg.evaluate(both, B=2, S=8, T=6) == 0.5
    with pytest.raises(BindingError, match=REFUSED):
        cg.evaluate(both, B=2, S=3, T=6)
    with pytest.raises(BindingError, match=r"T=7: .* has size T/3 = 7/3"):
        cg.evaluate(both, B=2, S=8, T=7)
    same = cg.flops(short) + cg.bytes_moved(short)
    assert len(held_by(same)) == 1


def test_substituting_formula_for_symbol_keeps_conditions(short):
    f = cg.flops(short).subs(S, T / 2)
    assert cg.evaluate(f, B=1, T=14) == 2
    with pytest.raises(BindingError, match="S=7/2: expected a positive integer"):
        cg.evaluate(f, B=1, T=7)
    with pytest.raises(BindingError, match="S=4: axis 0 of 'slice'"):
        cg.evaluate(f, B=1, T=8)
    assert np.array_equal(
        cg.compile(f, outside="nan")(B=1, T=[7, 8, 12, 14]), [np.nan, np.nan, 1, 2], equal_nan=True
    )  # fmt: skip
    swapped = cg.flops(short).subs({B: S, S: B}, simultaneous=True)
    assert cg.evaluate(swapped, B=7, S=3) == 6
    with pytest.raises(BindingError, match=REFUSED):
        cg.evaluate(swapped, B=3, S=7)


# -- arrays ------------------------------------------------------------------------------------------------------------


def test_array_points_outside_the_conditions(short):
    f = cg.flops(short)
    with pytest.raises(BindingError) as caught:
        cg.compile(f)(S=[[10], [3]], B=[1, 2])
    assert str(caught.value) == (
        "at [1, 0] (B=1, S=3): S=3: axis 0 of 'slice' has size S - 5 = -2, expected a positive integer"
    )
    values = cg.compile(f, outside="nan")(S=[[10], [3]], B=[1, 2])
    assert np.array_equal(values, [[5, 10], [np.nan, np.nan]], equal_nan=True)
    assert cg.compile(f, outside="nan")(S=10, B=2) == 10
    with pytest.raises(BindingError, match=REFUSED):  # a single point is not an array
        cg.compile(f, outside="nan")(S=3, B=2)
    with pytest.raises(cg.GraphError, match="outside"):
        cg.compile(f, outside="zero")


@each("scale", [1, 2**30, 2**50, 2**60, 10**30])
@each("kind", [np.int64, np.uint64, np.float64])
def test_integrality_conditions_are_exact(scale, kind):
    with cg.Graph("split") as g:
        g.output(cg.relu(cg.rearrange(g.input("x", (D * T,)), "(h k) -> h k", h=H)))
    if scale > 2**62 and kind is not np.float64:
        pytest.skip("no such integer in 64 bits")
    d, t, h = (np.array(v, dtype=kind) for v in ([scale, scale, 3 * scale], [3, 7, 5], [3, 2, 7]))
    exact = [int(a) * int(b) % int(c) == 0 for a, b, c in zip(d, t, h, strict=True)]
    values = cg.compile(cg.flops(g) + H, outside="nan")(D=d, T=t, H=h)
    assert (~np.isnan(values)).tolist() == exact


def test_conditions_with_rounding():
    with cg.Graph("pieces") as g:
        g.output(cg.relu(g.input("x", (S, B))[5::3]))
    sizes = np.arange(1, 40)
    values = cg.compile(cg.flops(g), outside="nan")(S=sizes, B=2)
    assert np.array_equal(values[5:], 2 * -(-(sizes[5:] - 5) // 3))
    assert np.isnan(values[:5]).all()


def test_points_outside_conditions_may_divide_by_zero():
    with cg.Graph("ratio") as g:
        g.output(cg.relu(g.input("x", (S, B))[5:]))
    ratio = cg.bytes_moved(g) / (cg.flops(g))
    values = cg.compile(ratio, outside="nan")(S=[5, 6], B=1)
    assert np.array_equal(values, [np.nan, 8], equal_nan=True)


def test_ragged_and_mismatched_arrays_raise(short):
    f = cg.compile(cg.flops(short))
    with pytest.raises(BindingError, match=r"S: \[\[7\], \[8, 9\]\] is not an array; expected rows of equal length"):
        f(S=[[7], [8, 9]], B=1)
    with pytest.raises(BindingError, match=r"broadcast together with shapes S \(2,\), B \(3,\)"):
        f(S=[7, 8], B=[1, 2, 3])


class Labelled:
    """A labelled array: the parts of the xarray.DataArray interface that the library uses."""

    def __init__(self, data, coords=None, dims=()):
        self.data, self.coords, self.dims = np.asarray(data), dict(coords or {}), tuple(dims)

    def __array__(self, dtype=None, copy=None):
        return self.data


def test_labelled_arrays_align_by_name():
    f = cg.compile(B * S + T)
    b = Labelled([1, 2, 3], {"batch": [1, 2, 3]}, ["batch"])
    s = Labelled([10, 20, 30], {"length": [10, 20, 30]}, ["length"])
    values = f(B=b, S=s, T=Labelled([[0 + 1, 2, 3]] * 3, {}, ["length", "batch"]))
    assert type(values) is Labelled
    assert values.dims == ("batch", "length")
    assert np.array_equal(values.data, np.outer([1, 2, 3], [10, 20, 30]) + np.array([[1], [2], [3]]))
    assert {k: list(v) for k, v in values.coords.items()} == {"batch": [1, 2, 3], "length": [10, 20, 30]}
    with pytest.raises(BindingError, match="S: labels of 'batch' differ from those of other arrays"):
        f(B=b, S=Labelled([1, 2, 3], {"batch": [1, 2, 4]}, ["batch"]), T=1)
    with pytest.raises(BindingError, match="S: an array without dimension names; expected named dimensions, as in B"):
        f(B=b, S=[1, 2, 3], T=1)


# -- loops -------------------------------------------------------------------------------------------------------------


def test_closed_form_states_its_minimum_count():
    g = stack()
    f, least = cg.peak_memory(g), cg.timeline(g).holds_from["L"]
    assert least == 2
    assert cg.evaluate(f, B=2, D=3, L=least) == cg.peak_memory(g, B=2, D=3, L=least)
    words = "L=1: the formula holds only from L=2; derive it from the graph with L bound"
    for formula in (f, 2 * f, pickle.loads(pickle.dumps(f)), cg.regimes(f)[0].formula, cg.timeline(g).peak):
        with pytest.raises(BindingError, match=words):
            cg.evaluate(formula, **{n: 1 for n in "BDL" if n in {s.name for s in formula.free_symbols} | {"L"}})
    with pytest.raises(BindingError, match=words):
        cg.compile(f)(B=2, D=3, L=[2, 1])
    values = cg.compile(f, outside="nan")(B=2, D=3, L=[[1], [2], [9]])
    assert np.isnan(values.ravel()).tolist() == [True, False, False]
    assert not any(v.names for v in held_by(cg.peak_memory(g, L=1)))


def test_conditions_on_several_small_counts():
    with cg.Graph("two") as g:
        x = g.input("x", (B, D))
        for count in (L, T):
            x = cg.repeat(count, lambda x: cg.relu(cg.relu(x)) + x, x)
        g.output(x)
    f = cg.peak_memory(g)
    points = [(n, m) for n in (1, 2, 3, 4) for m in (1, 2, 3, 4)]
    values = cg.compile(f, outside="nan")(B=2, D=3, L=[n for n, _ in points], T=[m for _, m in points])
    for (n, m), value in zip(points, values, strict=True):
        assert np.isnan(value) or value == cg.peak_memory(g, B=2, D=3, L=n, T=m)
    assert not np.isnan(values[points.index((2, 2))])


# -- tables ------------------------------------------------------------------------------------------------------------


def test_cost_tables_carry_conditions(short):
    table = cg.costs(short)
    for part in (table, table.filter(kind="pointwise"), table.group("op")):
        with pytest.raises(BindingError, match=REFUSED):
            part.bind(S=3)
    with pytest.raises(BindingError, match=REFUSED):
        cg.evaluate(table.total().flops, S=3, B=1)
    with pytest.raises(BindingError, match=REFUSED):
        cg.evaluate(next(iter(table)).value, S=3, B=1)
    with pytest.raises(BindingError, match=REFUSED):
        table.bind(B=2).bind(S=3)
    with pytest.raises(BindingError, match="S=9: the costs were derived with S=8; derive them again"):
        cg.costs(short, S=8).bind(S=9)
    assert (
        table.bind(S=8, B=2).total().flops == cg.flops(short, S=8, B=2) == cg.costs(short, S=8).bind(B=2).total().flops
    )


QUESTIONS = {
    "model_flops": cg.model_flops,
    "peak_memory": cg.peak_memory,
    "timeline": lambda g: cg.timeline(g).peak,
    "moment": lambda g: cg.timeline(g).moments[-1].bytes,
    "activation_memory": cg.activation_memory,
    "saved_bytes": lambda g: cg.saved_bytes(g)[""],
    "step_tokens": cg.step_tokens,
    "intensity": cg.intensity,
    "bytes_moved": lambda g: cg.bytes_moved(g, fused=True),
    "lifetimes": lambda g: next(r.bytes for r in cg.lifetimes(g) if isinstance(r.bytes, sympy.Expr)),
    "costs": lambda g: cg.costs(g).total().bytes,
    "training_flops": lambda g: cg.plan.training_flops(g, 10**9 * T),
    "leading_term": lambda g: cg.plan.leading_term(g, 10**9 * T).total,
    "training_days": lambda g: cg.plan.training_days(cg.plan.training_flops(g, T), "h100-sxm", dtype="bf16"),
    "mfu": lambda g: cg.mfu(g, 1.0, "h100-sxm"),
    "crossover": lambda g: cg.crossover(next(op for op in g.ops if "head" in op.name), "h100-sxm", "B"),
}


@pytest.fixture(scope="module")
def step():
    return training_step(load("gpt2"))


@each("question", QUESTIONS)
def test_all_step_queries_reject_too_long_sequences(step, question):
    formula = QUESTIONS[question](step)
    names = {s.name for s in formula.free_symbols}
    assert cg.evaluate(formula, **dict.fromkeys(names, 8)) > 0
    with pytest.raises(BindingError, match="P=1024, S=2000: against the assumption 'S <= P'"):
        cg.evaluate(formula, **{**dict.fromkeys(names, 8), "S": 2000})


def test_conditions_survive_pickling_across_processes(tmp_path):
    with cg.Graph("windows") as g:
        x = g.input("x", (B, S, D))
        g.output(
            cg.reduce(
                cg.attention(*(cg.rearrange(x, "b s (h k) -> b h s k", h=H),) * 3, window=T), "b h s k -> b", "max"
            )
        )
    path = tmp_path / "costs.pickle"
    path.write_bytes(pickle.dumps((cg.costs(g), cg.flops(g), cg.peak_memory(g))))
    code = f"""
import pickle, costgraph as cg
table, flops, peak = pickle.loads(open({str(path)!r}, "rb").read())
sizes = dict(B=2, S=5, D=6, H=3, T=2)
print(table.bind(**sizes).total().flops, cg.evaluate(flops, **sizes))
try:
    table.bind(**(sizes | dict(H=4)))
except cg.BindingError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = cg.flops(g, B=2, S=5, D=6, H=3, T=2)
    first, second = done.stdout.splitlines()
    assert first == f"{expected} {expected}"
    assert "D/H = 3/2, expected a positive integer" in second
