"""Proofs about sizes are never wrong, and pruning never changes a value: brute force over points says so."""

import itertools
import random
from fractions import Fraction
from unittest.mock import patch

import pytest
import sympy
from algebra import NAMES, A, B, C, D, atoms, mixed, outputs_under_hash_seeds, points, sums
from hypothesis import given, settings
from hypothesis import strategies as st

from costgraph import BindingError, PatternError, dims
from costgraph.algebra import dominance
from costgraph.algebra.dominance import NOTHING_KNOWN, Relations, lower
from costgraph.algebra.polynomial import as_poly, poly
from costgraph.algebra.pruning import prune
from costgraph.algebra.solving import solve
from costgraph.notation.grammar import parse_formula, parse_relation
from costgraph.testing import value

fast = settings(max_examples=60, deadline=None)

# Assumptions as text, and the same as a Python test of a point.
KNOWN = [
    ("A >= B", lambda a, b, c, d: a >= b),
    ("A > B", lambda a, b, c, d: a > b),
    ("A == B*C", lambda a, b, c, d: a == b * c),
    ("A == B/C", lambda a, b, c, d: a * c == b),
    ("D <= 7", lambda a, b, c, d: d <= 7),
    ("D >= 3", lambda a, b, c, d: d >= 3),
    ("B <= D", lambda a, b, c, d: b <= d),
    ("C <= 5", lambda a, b, c, d: c <= 5),
    ("C >= B - 2", lambda a, b, c, d: c >= b - 2),
    ("2*D >= C", lambda a, b, c, d: 2 * d >= c),
    ("B/C > 1", lambda a, b, c, d: b > c),
    ("A + C <= 11", lambda a, b, c, d: a + c <= 11),
    ("C == 2*D", lambda a, b, c, d: c == 2 * d),
    ("A < C*D", lambda a, b, c, d: a < c * d),
    ("floor(A/2) >= B", lambda a, b, c, d: a // 2 >= b),
    ("B == 3", lambda a, b, c, d: b == 3),
]
GRID = [dict(zip(NAMES, p, strict=True)) for p in itertools.product((1, 2, 3, 4, 6, 8, 12), repeat=4)]


def known(chosen) -> tuple[Relations, list[dict[str, int]]]:
    """The relations, and the points of the grid that they admit."""
    admitted = [p for p in GRID if all(test(*p.values()) for _, test in chosen)]
    return Relations([parse_relation(text) for text, _ in chosen]), admitted


some_known = st.lists(st.sampled_from(KNOWN), max_size=4, unique_by=lambda k: k[0])


# -- proofs ------------------------------------------------------------------------------------------------------------


@fast
@given(mixed(), points(1000))
def test_nothing_known_proves_nothing_wrong(x, point):
    p, exact = poly(x), value(x, point)
    assert not NOTHING_KNOWN.nonnegative(p) or exact >= 0
    assert not NOTHING_KNOWN.positive(p) or exact > 0
    least = lower(p)
    assert least is None or exact >= least


@settings(max_examples=100)
@given(mixed())
def test_signs_that_are_met_spare_proofs_that_would_fail_and_no_others(x):
    def found(p):
        return NOTHING_KNOWN.sign(p), NOTHING_KNOWN.nonnegative(p), NOTHING_KNOWN.nonnegative(-p)

    p = poly(x)
    with patch.object(dominance, "signs_met", return_value=frozenset()):
        proved = found(p)
    assert found(p) == proved


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(sums(coefficients=st.integers(-4, 4)), atoms(), mixed()), some_known, st.randoms(use_true_random=False)
)
def test_relations_prove_nothing_wrong(x, chosen, rnd):
    try:
        relations, admitted = known(chosen)
    except PatternError:
        assert not any(all(test(*p.values()) for _, test in chosen) for p in GRID)
        return
    p = poly(x)
    nonnegative, positive, least = relations.nonnegative(p), relations.positive(p), lower(p, relations)
    reduced = relations.reduce(p).expr
    for point in rnd.sample(admitted, min(25, len(admitted))):
        exact = value(x, point)
        assert not nonnegative or exact >= 0
        assert not positive or exact > 0
        assert least is None or exact >= least
        assert value(reduced, point) == exact


def test_no_pair_of_assumptions_is_refused_that_a_point_satisfies():
    for pair in itertools.combinations(KNOWN, 2):
        satisfiable = any(all(test(*p.values()) for _, test in pair) for p in GRID)
        try:
            known(pair)
        except PatternError:
            assert not satisfiable, [text for text, _ in pair]


PROVED = [
    ([], "A*B - 1"),
    ([], "A**2*B - A*B"),
    ([], "1 - 1/A"),
    ([], "floor(A/2)"),
    ([], "Max(5, A) - 5"),
    ([], "A - Min(A, 3)*0 - 1"),
    ([], "(1 - 1/A)**B"),
    (["A <= B"], "(1 - A/B)**C"),
    (["F >= D"], "F - D"),
    (["F >= D", "D >= H"], "F - H"),
    (["A > B", "B > C"], "A - C - 2"),
    (["D == H*K"], "2*D - H*K"),
    (["S <= 1024"], "1024*B - S*B"),
    (["S <= 1024", "S >= D"], "1024 - D"),
    (["S >= D", "S <= 1024"], "1024 - D"),
    (["S <= 1024", "S == 4*T"], "256 - T"),
    (["K == D/H", "H <= 64"], "64*K - D"),
    (["K == D/H", "H >= J"], "D - J*K"),
    (["2*S >= 5"], "S - 3"),
    (["2*S <= 5"], "2 - S"),
    (["F >= D - 5"], "F - 1"),
    (["F >= D - 5"], "F - D + 5"),
    (["F >= D", "F == D"], "D - F"),
    (["D/H > 1"], "D - H - 1"),
    (["A + B <= 10"], "9 - A"),
]


@pytest.mark.parametrize(("texts", "formula"), PROVED)
def test_what_is_known_to_be_nonnegative(texts, formula):
    assert Relations(map(parse_relation, texts)).nonnegative(parse_formula(formula))


@pytest.mark.parametrize(
    ("texts", "formula"),
    [
        ([], "A - B"),
        ([], "(1 - A/B)**C"),  # A may be larger than B
        ([], "floor((1 - A)/2)/B"),
        ([], "1/Min(A - 5, B)"),
        ([], "Min(A - 5, B)*C + 4"),  # the product is below the product of the bounds
        (["F >= D"], "F - D - 1"),
        (["S <= 1024"], "1023 - S"),
        (["D/H > 1"], "D - 2*H"),  # 3/2 is above 1 too
        (["S >= D"], "1024 - D"),
    ],
)
def test_what_is_not_proved_because_it_is_wrong(texts, formula):
    assert not Relations(map(parse_relation, texts)).nonnegative(parse_formula(formula))


@pytest.mark.parametrize(
    ("formula", "least"),
    [
        ("0", 0),
        ("-3/2", Fraction(-3, 2)),
        ("A + 2*B", 3),
        ("A*B - B + 3", 3),
        ("A - B", None),
        ("1/A", 0),
        ("5 + 1/A", 5),
        ("1 - 1/A", 0),
        ("floor(A/2) + ceiling(A/2)", 1),
        ("Max(A, 7)", 7),
        ("Min(A, 7)", 1),
        ("Min(A - 5, B)", -4),
        ("Max(A - B, 2)", 2),
        ("floor((1 - A)/2)/B", None),
    ],
)
def test_lower_bounds(formula, least):
    assert lower(parse_formula(formula)) == least


# -- contradictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "against"),
    [
        (["S <= 0"], "'S <= 0': contradicts every positive integer"),
        (["S == 0"], "every positive integer"),
        (["D == -1"], "every positive integer"),
        (["S == S + 1"], "every positive integer"),
        (["2*D == 7"], "every positive integer"),
        (["A + B <= 1"], "every positive integer"),
        (["A*B < 1"], "every positive integer"),
        (["1/A > 1"], "every positive integer"),
        (["S <= 4", "S >= 8"], "'S <= 4': contradicts 'S >= 8'"),
        (["S >= 8", "S <= 4"], "contradicts"),
        (["A > B", "B > A"], "contradicts 'A > B'"),
        (["A > B", "B > C", "C > A"], "'A > B' and 'B > C'"),
        (["A >= B", "B >= C", "C > A"], "contradicts"),
        (["D == H*K", "D == 2", "H == 3"], "contradicts"),
        (["F == D", "F > D"], "contradicts"),
        (["2*S <= 5", "2*S >= 5"], "contradicts"),
        (["S > 2", "S < 3"], "contradicts 'S > 2'"),
        (["S <= 10", "T <= 10", "S*T >= 1000"], "contradicts"),
        (["S >= 2000*T", "S <= 1024"], "contradicts"),
        (["X >= Y", "S >= 9", "S == 4"], "'S >= 9': contradicts 'S == 4'"),
    ],
)
def test_contradictions_are_errors_that_name_the_culprit(texts, against):
    with pytest.raises(PatternError) as caught:
        Relations(map(parse_relation, texts))
    assert against in str(caught.value)


def test_bound_sizes_are_checked():
    relation = parse_relation("F >= D")
    relation.check({"F": as_poly(3), "D": as_poly(3)})
    relation.check({"F": as_poly(1)})
    with pytest.raises(BindingError, match="D=4, F=3: against the assumption 'F >= D'"):
        relation.check({"F": as_poly(3), "D": as_poly(4), "X": as_poly(1)})
    parse_relation("D/H > 1").check({"D": as_poly(3), "H": as_poly(2)})
    with pytest.raises(BindingError, match="D=2, H=2"):
        parse_relation("D/H > 1").check({"D": as_poly(2), "H": as_poly(2)})
    with pytest.raises(BindingError, match="against"):
        parse_relation("2**A > 2**B").check({"A": as_poly(2), "B": as_poly(2)})


@pytest.mark.parametrize(
    ("formula", "prefer", "expected"),
    [
        ("D - H*K", ["D"], ("D", "H*K")),
        ("K - D/H", [], ("K", "D/H")),
        ("H*K - 12", ["K"], ("K", "12/H")),
        ("3*A - 2*B + 1", [], ("A", "2*B/3 - 1/3")),
        ("S - 2*floor(S/2)", [], None),  # the symbol is inside the atom too
        ("A**2 - B**2", [], None),
    ],
)
def test_solve(formula, prefer, expected):
    found = solve(parse_formula(formula), prefer)
    assert found == (None if expected is None else (expected[0], parse_formula(expected[1])))


# -- pruning -----------------------------------------------------------------------------------------------------------


def best(exprs, point, largest):
    return (max if largest else min)(value(e, point) for e in exprs)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(sums(0, 2, 4, st.integers(-2, 4)), mixed()), min_size=1, max_size=6),
    some_known,
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_pruning_never_changes_a_value(exprs, chosen, largest, rnd):
    try:
        relations, admitted = known(chosen)
    except PatternError:
        return
    for knowledge, space in ((NOTHING_KNOWN, GRID), (relations, admitted)):
        kept = [p.expr for p, _ in prune(((poly(e), None) for e in exprs), knowledge, largest=largest)]
        assert kept
        for point in rnd.sample(space, min(20, len(space))):
            assert best(kept, point, largest) == best(exprs, point, largest)


@fast
@given(
    st.lists(sums(0, 2, 3, st.integers(-2, 4)), min_size=2, max_size=6),
    some_known,
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_order_of_the_candidates_has_no_say(exprs, chosen, largest, rnd):
    try:
        relations, _ = known(chosen)
    except PatternError:
        return
    shuffled = rnd.sample(exprs, len(exprs))
    one, other = (
        {p for p, _ in prune(((poly(e), None) for e in order), relations, largest=largest)}
        for order in (exprs, shuffled)
    )
    assert one == other


@fast
@given(st.lists(mixed(), min_size=2, max_size=6), st.booleans(), st.permutations([A, B, C, D]))
def test_renaming_symbols_renames_what_is_kept(exprs, largest, new):
    renaming = dict(zip((A, B, C, D), new, strict=True))

    def kept(given_exprs):
        return {p for p, _ in prune(((poly(e), None) for e in given_exprs), largest=largest)}

    assert {poly(p.expr.xreplace(renaming)) for p in kept(exprs)} == kept([e.xreplace(renaming) for e in exprs])


def test_labels_stay_with_their_candidates_and_the_first_of_equals_stays():
    found = prune([(poly(A), "small"), (poly(2 * A), "first"), (poly(B * C), "other"), (poly(2 * A), "second")])
    assert [(p.expr, label) for p, label in found] == [(2 * A, "first"), (B * C, "other")]
    assert prune([]) == []


def test_relations_drop_what_they_dominate():
    candidates = [(parse_formula(t), t) for t in ("B*F", "B*D", "B*H*K", "B*S", "1024*B")]
    relations = Relations(map(parse_relation, ["F >= D", "D == H*K", "S <= 1024"]))
    assert [label for _, label in prune(candidates, relations)] == ["B*F", "1024*B"]
    assert {label for _, label in prune(candidates, relations, largest=False)} < {"B*D", "B*H*K", "B*S"}


def test_pruning_many_candidates_leaves_few_comparisons():
    rnd = random.Random(3)
    names = dims("A B C D E F G H")
    rows = [
        sympy.Add(*(rnd.randint(1, 9) * sympy.Mul(*rnd.sample(names, 3)) for _ in range(12))) * (i % 17 + 1)
        for i in range(150)
    ]
    kept = [p for p, _ in prune((poly(r), None) for r in rows)]
    for p in kept:
        assert not any(q is not p and NOTHING_KNOWN.nonnegative(q - p) for q in kept)


def test_the_result_does_not_depend_on_the_hash_seed():
    code = (
        "from costgraph.algebra.dominance import Relations\n"
        "from costgraph.algebra.pruning import prune\n"
        "from costgraph.notation.grammar import parse_formula as f, parse_relation as r\n"
        "known = Relations(map(r, ['F >= D', 'D == H*K', 'S <= 1024']))\n"
        "texts = ['B*F', 'B*D', 'B*H*K', 'B*S', 'S**2', 'Max(B*D, S*F)', '2*B*floor(S/2)', 'Min(B, S)*F']\n"
        "print([(str(p), t) for p, t in prune([(f(t), t) for t in texts], known)])\n"
    )
    assert len(outputs_under_hash_seeds(code)) == 1
