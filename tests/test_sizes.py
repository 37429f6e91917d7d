"""Sizes are integers once bound, whatever they are made from; stated amounts are nonnegative."""

import pickle
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from math import isqrt
from typing import Annotated

import pytest
import sympy
from budget import drawing, examples
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

import costgraph as cg
from costgraph.algebra import polynomial
from costgraph.algebra.polynomial import ONE, ZERO, Poly, poly
from costgraph.errors import BindingError, PatternError, ShapeError
from costgraph.ir.graph import (
    Amount,
    Extents,
    Length,
    Limit,
    OpKind,
    Result,
    Size,
    Sizes,
    apply,
    conditions,
)

B, S, N, L = cg.dims("B S N L")


def test_integer_roots_are_sizes():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (sympy.sqrt(N) - 1,))))
    assert cg.flops(g, N=9) == 2
    with pytest.raises(
        BindingError,
        match=r"N=2: axis 0 of 'x' has size sqrt\(N\) - 1 = -1 \+ sqrt\(2\), expected a positive integer",
    ):
        cg.flops(g, N=2)
    with pytest.raises(BindingError, match=r"N=1: axis 0 of 'x' has size sqrt\(N\) - 1 = 0, expected a positive"):
        cg.flops(g, N=1)


def test_sizes_inside_an_op_are_checked():
    with cg.Graph("g") as g:
        g.output(cg.rearrange(g.input("x", (N,)), "(h w) -> (w h)", h=sympy.sqrt(N)))
    assert cg.bytes_moved(g, N=9) == 72  # one read, one write
    with pytest.raises(BindingError, match=r"N=10: split of 'rearrange' has size sqrt\(N\) = sqrt\(10\), expected"):
        cg.bytes_moved(g, N=10)


def test_negative_stated_amounts_are_refused_at_binding():
    with cg.Graph("g") as g:
        y = cg.opaque("fft", [g.input("x", (B,))], (B,), flops=B - 100, reads=[B * S - 100])
        with cg.kernel("own", workspace=S - 7):
            y = cg.relu(y)
        g.output(y)
    assert cg.flops(g, B=101, S=8) == 1 + 101
    for sizes, text in (
        ({"B": 2, "S": 100}, "B=2: pointwise FLOPs of 'fft' is B - 100 = -98, expected an amount that is not negative"),
        ({"B": 100, "S": 6}, "S=6: workspace of 'own' is S - 7 = -1, expected an amount that is not negative"),
    ):
        for question in (cg.flops, cg.bytes_moved, cg.peak_memory):
            with pytest.raises(BindingError, match=text):
                question(g, **sizes)


def test_conditions_list_what_binding_can_violate():
    with cg.Graph("g") as g:
        x = g.input("x", (B, S, N / 4))
        g.output(cg.ops.slice_axis(x, 1, 0, S - 5))
    found = [(str(c.formula), c.place, c.least, c.whole) for c in conditions(g)]
    assert found == [("N/4", "axis 2 of 'x'", 1, True), ("S - 5", "axis 1 of 'slice'", 1, True)]
    with g:
        g.assume("S >= 6", "N == 4*L")
    assert [str(c.formula) for c in conditions(g)] == ["N/4"]


TILE = poly(N - 6)


@dataclass(frozen=True, kw_only=True)
class Tiled(OpKind):
    """A user-defined kind with formulas in fields of all types."""

    name = "tiled"
    tile: Size = ONE
    last_tile: Size | None = None
    each: tuple[Size, ...] = ()
    sides: Sizes = ()
    by_axis: Extents = field(default_factory=dict)
    spare_bytes: Amount = ZERO
    by_unit: Mapping[str, Amount] = field(default_factory=dict)
    ahead: Annotated[Size, Limit(0, words="ahead in")] = ZERO
    length: Length = ONE
    plain: Poly = ZERO
    mixed: tuple[Size, Amount] | None = None

    def infer(self, operands):
        return [Result((self.length,), operands[0].dtype)]


@each(
    ("facts", "text"),
    [
        ({"tile": TILE}, "tile of 'tiled' has size N - 6 = 0, expected a positive integer"),
        ({"last_tile": TILE}, "last tile of 'tiled' has size N - 6 = 0, expected a positive integer"),
        ({"each": (poly(N), TILE)}, "each of 'tiled' has size N - 6 = 0, expected a positive integer"),
        ({"sides": (poly(N), TILE)}, "sides of 'tiled' has size N - 6 = 0, expected a positive integer"),
        ({"by_axis": {"h": TILE}}, "by axis of 'tiled' has size N - 6 = 0, expected a positive integer"),
        ({"spare_bytes": TILE - 1}, "spare bytes of 'tiled' is N - 7 = -1, expected an amount that is not negative"),
        ({"by_unit": {"a": TILE - 1}}, "by unit of 'tiled' is N - 7 = -1, expected an amount that is not negative"),
        (
            {"ahead": TILE - 1},
            "ahead in 'tiled' has size N - 7 = -1, expected a whole number that is not negative",
        ),
    ],
)
def test_formulas_in_user_defined_kinds_are_checked(facts, text):
    with cg.Graph("g") as g:
        g.output(*apply(Tiled(**facts), [g.input("x", (N,))], "tiled"))
    assert cg.peak_memory(g, N=8) > 0
    with pytest.raises(BindingError) as caught:
        cg.peak_memory(g, N=6)
    assert str(caught.value) == f"N=6: {text}"


def test_unchecked_fields_add_no_conditions():
    with cg.Graph("g") as g:
        g.output(*apply(Tiled(length=poly(N), plain=TILE, mixed=(TILE, TILE)), [g.input("x", (N,))], "tiled"))
    assert conditions(g) == ()


# -- sizes of all forms ------------------------------------------------------------------------------------------------


class _Unknown:
    """Marks a non-rational value: the oracle's answer for inexact roots, logarithms and constants."""


def _root(value, degree):
    """Return the exact root of a Fraction in integer arithmetic."""
    if value < 0:
        return _Unknown
    parts = []
    for n in (value.numerator, value.denominator):
        found = next((r for r in (round(n ** (1 / degree)) + i for i in (-1, 0, 1)) if r >= 0 and r**degree == n), None)
        if found is None:
            return _Unknown
        parts.append(found)
    return Fraction(*parts)


def _power_of_two(exponent):
    return Fraction(2) ** exponent.numerator if exponent.denominator == 1 else _Unknown


LEAVES = [
    (N, lambda p: p["N"]),
    (S, lambda p: p["S"]),
    (N / S, lambda p: p["N"] / p["S"]),
    (sympy.sqrt(N), lambda p: _root(p["N"], 2)),
    (1 / sympy.sqrt(N), lambda p: _root(1 / p["N"], 2)),
    (sympy.cbrt(N * S), lambda p: _root(p["N"] * p["S"], 3)),
    (sympy.sqrt(N + S), lambda p: _root(p["N"] + p["S"], 2)),
    (sympy.sqrt(N - 4), lambda p: _root(p["N"] - 4, 2)),
    (sympy.sqrt(N / S), lambda p: _root(p["N"] / p["S"], 2)),
    (2 ** (N / 3), lambda p: _power_of_two(p["N"] / 3)),
    (S**2 / (N - 3), lambda p: p["S"] ** 2 / (p["N"] - 3) if p["N"] != 3 else _Unknown),
    (sympy.floor(sympy.sqrt(N)), lambda p: Fraction(isqrt(int(p["N"])))),
    (sympy.ceiling(N / S), lambda p: -(-p["N"] // p["S"]) + Fraction(0)),
    (cg.Max(N, S), lambda p: max(p["N"], p["S"])),
    (sympy.pi, lambda p: _Unknown),
    (sympy.sqrt(2) * N, lambda p: _Unknown),
    (sympy.log(2 * N), lambda p: _Unknown),
    (sympy.sin(N), lambda p: _Unknown),
    (sympy.Derivative(sympy.Function("f")(N), N), lambda p: _Unknown),
]


@st.composite
def formulas(draw):
    """Draw a formula with its exact value at a point: a leaf, scaled and shifted by rational numbers."""
    leaf, value = draw(st.sampled_from(LEAVES))
    times = draw(st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 2), Fraction(-1)]))
    plus = draw(st.sampled_from([0, 1, -1, -10, Fraction(1, 2)]))

    def exact(point):
        found = value({k: Fraction(v) for k, v in point.items()})
        return found if found is _Unknown else times * found + plus

    return leaf * sympy.Rational(str(times)) + sympy.Rational(str(plus)), exact


def _attended(g, n):
    q = g.input("q", (1, 1, 10**6, 1))
    return cg.attention(q, q, q, causal=True, window=n)


#: Functions that declare a graph with a size, and its FLOPs per unit of size, or None if they are not proportional.
DOORS = {
    "input": (lambda g, n: cg.relu(g.input("x", (n,))), 1),
    "param": (lambda g, n: cg.relu(g.param("x", (3, n))), 3),
    "buffer": (lambda g, n: cg.relu(g.buffer("x", (n, 2))), 2),
    "linear": (lambda g, n: cg.linear(g.input("x", (3, 5)), "b d -> b f", f=n), 30),
    "expand": (lambda g, n: cg.relu(cg.ops.expand(g.input("x", (7,)), "s -> b s", b=n)), 7),
    "split": (lambda g, n: cg.relu(cg.rearrange(g.input("x", (n * 5,)), "(h w) -> (w h)", h=n, w=5)), 5),
    "repeat": (lambda g, n: cg.repeat(n, cg.relu, g.input("x", (3,))), 3),
    "slice": (lambda g, n: cg.relu(cg.ops.slice_axis(g.input("x", (10**9,)), 0, 0, n)), 1),
    "start": (lambda g, n: cg.relu(cg.ops.slice_axis(g.input("x", (10**9,)), 0, n - 1, 3)), None),
    "opaque": (lambda g, n: cg.relu(cg.opaque("o", [], (n, 2), flops=0)), 2),
    "ranks": (lambda g, n: cg.relu(cg.ops.collective(g.input("x", (3,)), "all_gather", n)), 3),
    "top_k": (lambda g, n: cg.ops.top_k(g.input("x", (10**9,)), n)[0], None),
    "window": (_attended, None),
}


@settings(parent=drawing(120))
@given(formulas(), st.sampled_from(sorted(DOORS)), st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 8, 25]))
def test_a_size_is_whole_or_refused(formula, door, n, s):
    (size, exact), (declare, each) = formula, DOORS[door]
    point = {"N": n, "S": s}
    value = exact(point)
    try:
        with cg.Graph("g") as g:
            g.input("point", (N, S))
            g.output(declare(g, size))
        found = cg.flops(g, **point)
    except (ShapeError, BindingError):
        found = None
    if value is _Unknown or value.denominator != 1 or value < 1:
        assert found is None
    else:
        assert type(found) is int
        assert found >= 0
        assert each is None or found == each * value


STATED = {
    "flops": (lambda g, n: cg.opaque("o", [g.input("x", (2,))], (2,), flops=n), cg.flops, 0),
    "reads": (lambda g, n: cg.opaque("o", [g.input("x", (2,))], (2,), flops=0, reads=[n]), cg.bytes_moved, 8),
    "writes": (lambda g, n: cg.opaque("o", [g.input("x", (2,))], (2,), flops=0, writes=[n]), cg.bytes_moved, 8),
    "workspace": (lambda g, n: cg.opaque("o", [g.input("x", (2,))], (2,), flops=0, workspace=n), cg.peak_memory, 16),
}


@settings(parent=drawing(60))
@given(formulas(), st.sampled_from(sorted(STATED)), st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 8, 25]))
def test_a_stated_amount_is_not_negative_or_refused(formula, what, n, s):
    (amount, exact), (declare, question, rest) = formula, STATED[what]
    point = {"N": n, "S": s}
    value = exact(point)
    try:
        with cg.Graph("g") as g:
            g.input("point", (N, S))
            g.output(declare(g, amount))
        found = question(g, **point) - (rest + 4 * n * s if what == "workspace" else rest)
    except (ShapeError, BindingError):
        assert value is _Unknown or value < 0
    else:
        assert found >= 0 if value is _Unknown else found == pytest.approx(float(value)) and value >= 0


@each("size", [sympy.sin(B), sympy.log(2 * S), sympy.pi, sympy.Derivative(sympy.Function("f")(B), B)])
@each("door", sorted(DOORS))
def test_impossible_sizes_are_refused_immediately(door, size):
    if door != "start":  # positions on an axis are checked at binding
        with pytest.raises(ShapeError, match="expected"), cg.Graph("g") as g:
            DOORS[door][0](g, size)


def test_layers_refuse_impossible_sizes():
    with cg.Graph("g") as g:
        x = g.input("x", (B, S, 8))
        for size in (sympy.sin(B), sympy.log(2 * S)):
            for call in (
                lambda n: cg.nn.self_attention(x, heads=n, size=4),
                lambda n: cg.nn.cross_attention(x, x, heads=n, size=4),
                lambda n: cg.nn.moe(x, n, 2, f=16),
                lambda n: cg.nn.moe(x, 4, 2, f=n),
                cg.every,
            ):
                with pytest.raises(ShapeError, match="expected"):
                    call(size)


def test_sqrt_checkpointing_needs_integer_root_of_depth():
    with cg.Graph("g") as g:
        x = g.input("x", (B, 4))
        g.output(cg.reduce(cg.repeat(L, lambda y: cg.relu(cg.linear(y, "b d -> b e", e=4)), x), "b d -> ", "sum"))
    by_root, by_three = (cg.training_step(g, optimizer=cg.SGD(), checkpoint=cg.every(k)) for k in (sympy.sqrt(L), 3))
    assert cg.peak_memory(by_root, L=9, B=2) == cg.peak_memory(by_three, L=9, B=2)
    with pytest.raises(BindingError, match=r"expected a (positive )?whole number"):
        cg.flops(by_root, L=3, B=2)


def test_non_integer_sizes_in_files_are_refused(tmp_path):
    path = tmp_path / "g.json"
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (2 ** (B / 3), sympy.sqrt(S)))))
    cg.save(g, path)
    again = cg.load(path)
    assert again.outputs[0].sizes == g.outputs[0].sizes
    assert cg.flops(again, B=6, S=9) == 4 * 3
    with pytest.raises(BindingError, match=r"B=4: axis 0 of 'x' has size 2\*\*\(B/3\) = 2\*2\*\*\(1/3\), expected"):
        cg.flops(again, B=4, S=9)


def test_largest_power_is_accepted_and_next_is_refused():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B**1024,))))
        with pytest.raises(ShapeError, match=r"input 'y': B\*\*1025: expected an exponent within 1024"):
            g.input("y", (B**1024, B))
    assert cg.flops(g, B=2) == 2**1024


# -- atoms -------------------------------------------------------------------------------------------------------------


def test_atoms_of_graphs_that_are_gone_are_gone(monkeypatch):
    def declare(i):
        with cg.Graph("g") as g:
            x = g.input("x", (B, sympy.floor(S / (i + 7))))
            g.output(
                cg.conv(cg.ops.reshape(x, (B, 1, *x.shape[1:])), "b c s -> b o s", window=3, stride=2, padding=1, o=4)
            )
        return cg.flops(g)

    declare(0)
    monkeypatch.setattr(polynomial, "_limit", len(polynomial._by_expr) + 50)  # the real limit takes too long
    monkeypatch.setattr(polynomial, "_FEWEST", 50)
    before = len(polynomial._by_expr)
    for i in range(many := examples(100)):
        formula = declare(i)
    assert len(polynomial._by_expr) < 2 * before + 100  # one graph creates five atoms
    assert poly(formula).expr == formula == declare(many - 1)


def test_roots_are_canonical():
    root = poly(sympy.sqrt(N))
    assert root * root == poly(N)
    assert poly(N) / root == root
    assert 1 / root.expr == (poly(1) / root).expr
    assert poly(N ** sympy.Rational(5, 3)) == poly(N) * poly(N ** sympy.Rational(2, 3))


def test_formulas_with_atoms_unpickle_in_another_process():
    p = poly(sympy.sqrt(N) * S + sympy.floor(N / 2) / S)
    code = (
        "import pickle, sys; p = pickle.load(sys.stdin.buffer); print(p, p == type(p)(p.terms), hash(p) == hash(p + 0))"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(p), capture_output=True, check=True)
    assert ran.stdout.decode().strip() == f"{p} True True"
    assert pickle.loads(pickle.dumps(p)) == p


def test_assumptions_with_roots_are_evaluated():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B, L, N))))
        g.assume("B <= sqrt(N)", "L == sqrt(S)")
    assert cg.flops(g, B=3, N=10, S=16) == 3 * 4 * 10
    with pytest.raises(BindingError, match=r"B=4, N=10: against the assumption 'B <= sqrt\(N\)'"):
        cg.flops(g, B=4, N=10, S=16)
    with pytest.raises(BindingError, match=r"assumption 'L == sqrt\(S\)' makes L=sqrt\(10\), expected a positive"):
        cg.flops(g, B=3, N=10, S=10)
    with pytest.raises(PatternError, match="contradicts"), g:
        g.assume("K == sqrt(2)")


def test_equal_atoms_from_threads_are_identical():
    def make(i):
        return [poly(sympy.floor(S / (n + 1000))) * poly(sympy.sqrt(N + n)) for n in range(50)]

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(make, range(8))
    assert all(other == first for other in others)
    assert len({p for made in (first, *others) for p in made}) == 50
