"""Regimes of a maximum: cases dominated by a convex combination are dropped, and within a box only reachable cases
stay.
"""

import itertools
import random

import numpy as np
import pytest
import sympy
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph import BindingError, Max, Min
from costgraph.algebra.dominance import (
    corners,
    skyline,
)
from costgraph.algebra.polynomial import Poly, poly
from costgraph.analysis.liveness import (
    copies_for,
    live_bytes,
    play,
)
from costgraph.ir.graph import bindings
from costgraph.notation.grammar import parse_formula
from costgraph.testing import value

A, B, C, D, F, S = cg.dims("A B C D F S")

# -- means of rows -----------------------------------------------------------------------------------------------------


def upper_hull(rows):
    """Return the upper convex hull of points in the plane, from the highest to the rightmost (Andrew's algorithm)."""
    top = max(rows, key=lambda r: (r[1], r[0]))
    chain = []
    highest = {x: max(r for r in rows if r[0] == x) for x, _ in rows if x >= top[0]}
    for p in sorted(highest.values()):

        def bends_left(a, b, p=p):
            return (b[0] - a[0]) * (p[1] - a[1]) - (b[1] - a[1]) * (p[0] - a[0]) >= 0

        while len(chain) > 1 and bends_left(chain[-2], chain[-1]):
            chain.pop()
        chain.append(p)
    return set(chain)


@each("seed", range(25))
def test_two_column_pruning_leaves_hull_vertices(seed):
    rnd = random.Random(seed)
    most = rnd.choice([7, 97, 10**6])
    rows = [(rnd.randint(0, most), rnd.randint(0, most)) for _ in range(rnd.randint(2, 40))]
    table = np.array(rows)
    first = skyline(table, range(len(rows)))
    found = [rows[first[i]] for i in corners(table[first])]
    assert set(found) == upper_hull(rows)
    assert len(found) == len(set(found))


@each("scale", [1, 10**30])  # the second one exceeds int64
@each("seed", range(10))
def test_pruned_rows_are_never_the_unique_maximum(seed, scale):
    rnd = random.Random(seed)
    rows = [[rnd.randint(0, 9) * scale for _ in range(6)] for _ in range(30)]
    table = np.array(rows, dtype=object if scale > 1 else np.int64)
    first = skyline(table, range(len(rows)))
    kept = [rows[first[i]] for i in corners(table[first])]
    for _ in range(300):
        weights = [rnd.choice([0, 0, 1, 3, 1000]) for _ in range(6)]
        best = [max(sum(w * n for w, n in zip(weights, row, strict=True)) for row in some) for some in (rows, kept)]
        assert best[0] == best[1]


def test_non_decimal_convex_weights_are_found():
    # the last row is 1/3 of the first and 2/3 of the second; any rounding error makes it unreachable
    rows = [[3 * 10**15, 0, 7], [0, 3 * 10**15, 1]]
    mean = [10**15, 2 * 10**15, 3]
    assert corners(np.array([*rows, mean])) == [0, 1]
    for column in range(3):
        more = list(mean)
        more[column] += 1
        assert corners(np.array([*rows, more])) == [0, 1, 2]


def test_convexly_dominated_cases_are_pruned():
    # with recomputation of k layers the step keeps k residuals or L - k; the maximum is at the two ends
    rows = [k * B * S + (12 - k) * D * F for k in range(13)]
    assert Max(*rows) == Max(12 * B * S, 12 * D * F)
    assert Min(*rows) == Min(12 * B * S, 12 * D * F)
    assert len(Max(A**2, A * B, B**2).args) == 3  # between the others in value, but not a mean of them term by term
    assert Max(3 * A, 3 * B, A + 2 * B - 5) == Max(3 * A, 3 * B)


# -- floors and ceilings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [sympy.floor, sympy.ceiling])
@pytest.mark.parametrize("inner", [sympy.floor, sympy.ceiling])
def test_nested_floors_are_canonical(outer, inner):
    T = cg.dims("T")
    numbers = list(itertools.product([1, 2, 3], [-5, 0, 4], [1, 2, 3], [-3, 0, 5]))
    seen = {}
    for p, m, q, n in random.Random(5).sample(numbers, 40):
        expr = outer((inner((T + m) / p, evaluate=False) + n) / q, evaluate=False)
        made = poly(expr)
        exact = [int(outer((inner(sympy.Rational(t + m, p)) + n) / sympy.Integer(q))) for t in range(1, 40)]
        assert [made.bind({"T": poly(t)}).constant for t in range(1, 40)] == exact
        assert seen.setdefault(tuple(exact), made) == made  # equal at all of these points means one polynomial


def test_traced_and_declared_sizes_are_equal():
    declared, traced = parse_formula("ceiling(T/4 - 9/4)"), parse_formula("floor(floor(T/2)/2 - 5/2) + 1")
    assert [declared.bind({"T": poly(t)}).constant for t in (9, 13, 14, 17)] == [0, 1, 2, 2]
    assert declared == traced


def test_larger_multiple_of_an_atom_dominates():
    X = sympy.ceiling(S / 4)
    assert Max(8 * X, 4 * X + 1, D * 0) == 8 * X  # X is at least 1
    Y = sympy.floor(S / 4)
    assert Max(8 * Y, 4 * Y) == 8 * Y  # at least 0
    with cg.Graph("g") as g:  # the window must fit, so other sizes are refused
        y = cg.conv(g.input("x", (B, A, S)), "b a s -> b o s", window=(7,), stride=4, padding=0, o=A)
        g.output(cg.relu(cg.relu(y)))
    places = sympy.floor((S - 7) / 4) + 1
    assert poly(cg.peak_memory(g)) == poly(4 * A * B * S + 28 * A**2 + 8 * A * B * places)  # twice y, x, and w


# -- regimes in a box --------------------------------------------------------------------------------------------------


def brute(formula, box):
    """Return the cases that are the unique maximum at some point of a box."""
    found = set()
    for point in itertools.product(*(range(low, high + 1) for low, high in box.values())):
        values = [value(a, dict(zip(box, point, strict=True))) for a in formula.args]
        if values.count(max(values)) == 1:
            found.add(formula.args[values.index(max(values))])
    return found


@each(
    ("rows", "box"),
    [
        (("A*B", "7*A", "11*B"), {"A": (1, 13), "B": (1, 5)}),
        (("A*B", "7*A", "11*B"), {"A": (2, 5), "B": (2, 5)}),
        (("A**2", "30*A - 190", "5*B"), {"A": (1, 40), "B": (1, 3)}),
        (("A*B + 3*A", "B**2 + 20", "2*A*B"), {"A": (1, 17), "B": (1, 17)}),
        (("A*B*C", "13*A*C", "29*B", "17*A + 19*C"), {"A": (1, 7), "B": (1, 11), "C": (1, 5)}),
    ],
)
def test_cases_reachable_in_a_box_are_kept(rows, box):
    formula = Max(*(parse_formula(t).expr for t in rows))
    regimes = cg.regimes(formula, within=box)
    needed = brute(formula, box)
    assert needed <= {r.formula for r in regimes}
    assert abs(sum(r.share for r in regimes) - 1) < 1e-9
    for point in itertools.product(*(range(low, high + 1) for low, high in box.values())):
        at = dict(zip(box, point, strict=True))
        assert max(value(r.formula, at) for r in regimes) == value(formula, at)


def test_cases_unreachable_in_a_box_are_pruned():
    formula = Max(A * B, 7 * A, 11 * B)
    assert [r.formula for r in cg.regimes(formula, within={"A": (12, 99), "B": (8, 99)})] == [A * B]
    assert [r.formula for r in cg.regimes(formula, within={"A": (12, 99)})] == [7 * A, A * B]
    assert [r.share for r in cg.regimes(formula, within={"A": (12, 99)})] == [None, None]
    assert [r.formula for r in cg.regimes(Min(A, 5 * B), within={"A": (1, 5)})] == [A]
    assert [r.formula for r in cg.regimes(D + 2 * Max(A, B), within={"A": (5, 9), "B": (1, 5)})] == [2 * A + D]
    # along A*(100 - A) no mean of the others reaches 49*A - 600, yet their maximum is above it everywhere
    formula = Max(A**2, 100 * A - 2000, 900)
    assert {r.formula for r in cg.regimes(formula, within={"A": (1, 20)})} == {sympy.Integer(900)}


def graph():
    with cg.Graph("g") as g:
        h = cg.einsum(g.input("x", (B, D)), g.param("w1", (D, F)), "b d, d f -> b f")
        g.output(cg.einsum(cg.relu(h), g.param("w2", (F, A)), "b f, f a -> b a"))
    return g


def test_peak_in_a_box_refuses_sizes_outside():
    g = graph()
    peak = cg.peak_memory(g, within={"F": (1, 64), "A": (128, 512)})
    assert peak == 4 * (A * F + B * D + D * F + B * F + A * B)  # for A below F the second product holds the peak
    assert cg.evaluate(peak, A=128, B=3, D=5, F=64) == cg.peak_memory(g, A=128, B=3, D=5, F=64)
    with pytest.raises(BindingError, match="F=65: against the assumption 'F <= 64'"):
        cg.evaluate(peak, A=128, B=3, D=5, F=65)
    with pytest.raises(BindingError, match="A=127: against the assumption 'A >= 128'"):
        peak.subs(A, 127)
    with pytest.raises(BindingError, match="against the assumption"):
        cg.compile(peak)(A=128, B=3, D=5, F=np.array([7, 100]))
    one = cg.peak_memory(g, within={"F": (3, 3)}, A=128, B=3, D=5)
    assert cg.evaluate(one, F=3) == cg.peak_memory(g, A=128, B=3, D=5, F=3)


def test_invalid_ranges_are_refused():
    g = graph()
    for within, text in [
        (5, "peak_memory: within is 5, expected a mapping from text to (an integer, an integer)"),
        ({"X": (1, 2)}, "within has 'X', expected open sizes: A, B, D, F"),
        ({"B": 3}, "within is {'B': 3}, expected a mapping from text to (an integer, an integer)"),
        ({"B": (3, 2)}, "within has B=(3, 2), expected the smallest size first"),
        ({"B": (0, 2)}, "B=0: expected a positive integer"),
        ({"B": (1.5, 2)}, "within is {'B': (1.5, 2)}, expected a mapping"),
    ]:
        with pytest.raises(cg.CostGraphError) as caught:
            cg.peak_memory(g, within=within)
        assert text in str(caught.value)
    with pytest.raises(BindingError, match="within has 'B', expected open sizes: A, D, F"):
        cg.peak_memory(g, within={"B": (1, 2)}, B=3)
    with g.__class__("h") as h:
        h.output(cg.relu(h.input("x", (B, D))))
        h.assume("B >= 9")
    with pytest.raises(BindingError, match="within: assumption"):
        cg.peak_memory(h, within={"B": (1, 8)})


# -- composition of a peak ---------------------------------------------------------------------------------------------


def test_regime_roles_sum_to_case_and_match_timeline():
    step = training_step(load("gpt2"), optimizer=cg.AdamW())
    for case in cg.regimes(cg.peak_memory(step)):
        assert sympy.expand(sum(case.by_role.values()) - case.formula) == 0
        formula, op, phase = case
        assert (formula, op, phase) == tuple(case)
    for sizes in ({"B": 1, "S": 1024}, {"B": 64, "S": 1024}):
        t = cg.timeline(step, **sizes)
        held = max(cg.regimes(cg.peak_memory(step)), key=lambda r: value(r.formula, sizes))
        assert {k: v for k, v in t.by_role.items() if v} == {k: value(v, sizes) for k, v in held.by_role.items()}


def test_text_and_latex_have_one_line_per_case():
    g = graph()
    regimes = cg.regimes(cg.peak_memory(g))
    assert str(regimes).splitlines()[0] == "4*A*F + 4*B*D + 4*B*F + 4*D*F + the largest of"
    assert [line.split()[0] for line in str(regimes).splitlines()[1:]] == [
        str(sympy.expand(r.formula - 4 * (A * F + B * D + D * F + B * F))) for r in regimes
    ]
    latex = cg.peak_memory(g)._repr_latex_()
    assert latex.startswith(r"$\displaystyle ")
    assert latex.count(r"\\") == len(regimes) - 1
    assert r"\text{einsum with w2 (forward)}" in latex


def test_ops_have_readable_names():
    step = training_step(load("gpt2"), optimizer=cg.AdamW())
    labels = {r.op: r.label for r in cg.regimes(cg.peak_memory(step))}
    assert labels == {
        "cross_entropy/log_softmax/log_softmax_backward": "cross_entropy/log_softmax: log_softmax_backward (backward)",
        "adamw/sqrt_4": "adamw: sqrt (optimizer)",
    }


# -- formulas in terms of a quantity -----------------------------------------------------------------------------------


def test_factored_quantity_can_be_substituted_back():
    N = cg.dims("N")
    model = load("llama-3-8b", symbolic=True)
    quantity = cg.param_count(model)
    step = cg.training_step(model, precision="bf16-mixed", optimizer=cg.AdamW())
    for case in cg.regimes(cg.peak_memory(step))[:8]:
        written = cg.in_terms_of(case.formula, N=quantity)
        assert N in written.free_symbols
        assert poly(written).bind({"N": poly(quantity)}) == poly(case.formula)


def test_in_terms_of_rewrites_formula():
    N, M = cg.dims("N M")
    assert cg.in_terms_of(6 * A * B * D * F + 6 * A * B * D + A, N=D * F + D) == 6 * A * B * N + A
    assert cg.in_terms_of(6 * A * D * F + 4 * A * D, N=D * F + D) == 4 * A * N + 2 * A * D * F
    assert cg.in_terms_of(6 * A * D * F + 6 * A * D * C, N=D * F + D * C + D) == 6 * A * N - 6 * A * D
    assert cg.in_terms_of(Max(12 * D * F + B, 4 * D * F + B * C), N=D * F) == Max(12 * N + B, 4 * N + B * C)
    assert cg.in_terms_of(17 * B + 100, N=7) == 2 * B * N + 3 * B + 14 * N + 2
    assert cg.in_terms_of(9 * A * B, N=A, M=B) == 9 * M * N
    assert cg.in_terms_of(A + 1, N=B) == A + 1
    assert cg.in_terms_of(40, N=B) == 40
    with pytest.raises(BindingError, match="in_terms_of: A is already a size"):
        cg.in_terms_of(A * B, A=B)
    with pytest.raises(BindingError, match="in_terms_of: N is 0"):
        cg.in_terms_of(A * B, N=0)


# -- published models --------------------------------------------------------------------------------------------------

TOKENS = {"B": (1, 64), "S": (512, 16384)}
#: Boxes around published sizes.
BOXES = {
    "gpt2": {"B": (1, 64), "S": (128, 1024), "P": (1024, 1024), "D": (384, 1600), "F": (1536, 6400), "H": (6, 25)}
    | {"L": (6, 48), "V": (25000, 100000)},
    "llama-3-8b": {**TOKENS, "D": (2048, 8192), "F": (8192, 28672), "G": (8, 8), "H": (16, 64), "K": (128, 128)}
    | {"L": (16, 80), "V": (32000, 128256)},
    "mixtral-8x7b": {**TOKENS, "D": (2048, 8192), "Fe": (8192, 28672), "E": (8, 8), "k": (2, 2), "G": (8, 8)}
    | {"H": (32, 32), "K": (128, 128), "L": (16, 64), "V": (32000, 128256)},
    "vit-b-16": {"B": (16, 512), "R": (224, 384), "D": (384, 1280), "F": (1536, 5120), "H": (6, 20), "L": (12, 32)}
    | {"C": (1000, 1000), "IC": (3, 3)},
    "bert-base": {"B": (1, 64), "S": (128, 512), "P": (512, 512), "D": (384, 1536), "F": (1536, 6144), "H": (6, 24)}
    | {"L": (6, 24), "V": (30522, 30522), "kinds": (2, 2)},
    "mamba-130m": {**TOKENS, "D": (768, 2560), "E": (1536, 5120), "L": (24, 64), "N": (16, 16), "R": (48, 160)}
    | {"V": (50280, 50280)},
}
#: In this box, layers are up to four times as wide as in the model, with heads of 64.
SQUARE = ("vit-b-16", "bert-base")
#: Steps with published sizes, and with every size in a box around them.
STEPS = [
    pytest.param(name, box, marks=pytest.mark.long if name in ("llama-3-8b", "mixtral-8x7b") else ())
    for name, box in BOXES.items()
]
STEPS += [pytest.param(name, None, marks=pytest.mark.long if name in ("gpt2", "bert-base") else ()) for name in BOXES]


def mean(*outputs):
    return cg.reduce(outputs[-1], "b d -> ", "mean")


@pytest.mark.parametrize(("name", "box"), STEPS)
def test_step_peak_has_few_regimes_and_covers_all_moments(name, box):
    model = cg.models.load(name, symbolic=box is not None)  # a separate model, as more assumptions are added
    square = box is not None and name in SQUARE
    with model:
        model.assume(*(["F == 4*D", "D == 64*H"] if square else []))
    loss = None if model.loss else mean
    step = cg.training_step(model, loss, precision="bf16-mixed", optimizer=cg.AdamW())
    peak = cg.peak_memory(step, within=box)
    cases = cg.regimes(peak)
    assert len(cases) <= (4 if box is None else 8)
    values = bindings(step, {})
    live = {p.bind(values) for _, p in live_bytes(play(step, copies_for(values), values))}
    names = sorted({n for p in live for n in p.names()})
    ranges = dict.fromkeys(names, (1, 1024)) if box is None else box
    draw = np.random.default_rng(7)
    sizes = {n: draw.integers(ranges[n][0], ranges[n][1] + 1, 10_000) for n in names}
    if square:
        sizes |= {"D": 64 * sizes["H"], "F": 256 * sizes["H"]}
    rounded = {k for p in live for k in p.generators() if k[0] == "~"}
    assert rounded <= {"~floor(R/16)"}
    if rounded:
        sizes["~floor(R/16)"] = sizes["R"] // 16
    assert all(isinstance(c, int) for p in live for c in p.terms.values())
    most = {n: ranges[n][1] for n in names}
    assert max(sum(abs(value(Poly({m: c}).expr, most)) for m, c in p.terms.items()) for p in live) < 2**62  # fits int64

    def largest(ps):
        monomials = sorted({m for p in ps for m in p.terms})
        points = np.array([np.prod([sizes[n] ** e for n, e in m] + [np.ones(10_000, int)], axis=0) for m in monomials])
        return (np.array([[p.terms.get(m, 0) for m in monomials] for p in ps]) @ points).max(axis=0)

    assert (largest(live) == largest([poly(r.formula) for r in cases])).all()


def test_fractional_byte_peak_is_a_regime():
    # 7 elements of 6 bits are 5.25 bytes
    regimes = cg.regimes(5.25, within={})
    assert [(r.formula, r.share) for r in regimes] == [(5.25, 1.0)]
    assert "21/4" in str(regimes)
