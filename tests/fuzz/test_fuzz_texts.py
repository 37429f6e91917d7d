"""Patterns, formulas, relations, sizes, names and units: hostile, mutated and random texts from users."""

import pytest
from budget import examples
from guard import outcome, refused
from hostile import FORMULAS, TEXTS, VALUES, nested
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import costgraph as cg
from costgraph.algebra.polynomial import Poly
from costgraph.algebra.symbols import read_size
from costgraph.cli.options import read_sizes
from costgraph.hardware import units
from costgraph.notation.grammar import parse_formula, parse_relation
from costgraph.notation.pattern import parse_pattern

B, S, D, H, W = cg.dims("B S D H W")


def fuzz(n):
    return settings(
        max_examples=examples(n), derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )  # fmt: skip


def tensors():
    g = cg.Graph("g")
    return g.input("x", (B, S, D)), g.param("w", (D, H)), g.input("image", (B, 3, S, S))


def rearranged(text):
    return cg.rearrange(tensors()[0], text)


def reduced(text):
    return cg.reduce(tensors()[0], text, "sum")


def contracted(text):
    x, w, _ = tensors()
    return cg.einsum(x, w, text)


def convolved(text):
    return cg.conv(tensors()[2], text, window=3, o=D)


def linear(text):
    return cg.linear(tensors()[0], text, f=H)


def assumed(text):
    g = cg.Graph("g")
    g.assume(text)
    return g.relations


def formula(text):
    """Round-trip a formula: its printed text parses to the same formula."""
    parsed = parse_formula(text)
    assert isinstance(parsed, Poly)
    if len(str(parsed)) < 2000:
        assert parse_formula(str(parsed)) == parsed, f"{parsed} is read as {parse_formula(str(parsed))}"
    return parsed


READERS = {
    "pattern": parse_pattern,
    "rearrange": rearranged,
    "reduce": reduced,
    "einsum": contracted,
    "conv": convolved,
    "linear": linear,
    "formula": formula,
    "relation": parse_relation,
    "assumption": assumed,
    "dims": cg.dims,
    "size": lambda t: read_size(t, "S"),
    "format": cg.dtype,
    "format of a model": lambda t: cg.models.load("gpt2", dtype=t),
    "hardware": cg.load_hardware,
    "rate": lambda t: cg.load_hardware("h100-sxm").rate(t, fallback=t),
    "link": lambda t: cg.load_hardware("h100-sxm").link(t),
    "model": cg.models.load,
    "attention": lambda t: cg.models.load("gpt2", attention=t),
    "unit": lambda t: units.quantity(1, t),
    "unit of a text": lambda t: units.format_quantity(1, t),
    "graph": cg.load,
    "operation": lambda t: cg.reduce(tensors()[0], "b s d -> b s", t),
}
#: Functions that take user-chosen names.
NAMERS = {
    "word": lambda t: read_sizes([t]),
    "pair": lambda t: read_sizes([f"B={t}"]),
    "graph": lambda t: cg.flops(cg.Graph(t)),
    "input": lambda t: cg.Graph("g").input(t, (B,)),
    "function": lambda t: cg.ops.pointwise(t, tensors()[0]),
    "op": lambda t: cg.ops.pointwise("relu", tensors()[0], name=t or "relu"),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_hostile_texts_and_values_are_read_or_refused(reader):
    for text in [*TEXTS, *VALUES, nested(500)]:
        outcome(reader, text)


@pytest.mark.parametrize("reader", NAMERS.values(), ids=NAMERS)
def test_hostile_names_are_taken_or_refused(reader):
    for text in TEXTS:
        outcome(reader, text)


@pytest.mark.parametrize("text", FORMULAS, ids=lambda t: t[:30])
def test_expensive_formulas_are_answered_or_refused_in_time(text):
    parsed = outcome(parse_formula, text)
    outcome(lambda: str(parsed))
    outcome(assumed, f"{text} >= 1")
    outcome(assumed, f"Q == {text}")
    if isinstance(parsed, Poly):
        outcome(lambda: cg.evaluate(parsed.expr, **dict.fromkeys(parsed.names(), 3)))
        outcome(lambda: cg.Graph("g").input("x", (parsed, parsed)))


def test_sizes_as_keywords_are_taken_or_refused():
    g = cg.models.load("mlp", symbolic=True)
    peak = cg.peak_memory(g)
    for value in [*VALUES, *TEXTS[:40]]:
        for question in (cg.flops, cg.peak_memory, cg.bytes_moved, cg.param_count, cg.unroll, cg.lifetimes):
            # unrolling makes as many ops as iterations
            if question is not cg.unroll or not (isinstance(value, int) and value > 100):
                outcome(question, g, about=(question, value), L=value)
        outcome(cg.evaluate, peak, about=value, **dict.fromkeys("BCDFL", value))
        outcome(cg.compile(peak), about=value, **dict.fromkeys("BCDFL", value))
    for name in TEXTS:
        refused(cg.flops, g, about=name, **{name: 3})
        refused(cg.evaluate, peak, about=name, **{name: 3})


def test_numbers_of_quantities_are_taken_or_refused():
    for value in [*VALUES, *TEXTS]:
        outcome(units.quantity, value, "GB")
        outcome(units.quantity, value, "no unit")
        outcome(units.exact, value)
        outcome(units.format_quantity, value, "s")
        outcome(units.format_bytes, value)
        outcome(lambda v: units.Quantity(v, "B") / units.Quantity(v, "B/s"), value)


# -- random inputs -----------------------------------------------------------------------------------------------------

AXES = st.sampled_from(["b", "s", "d", "f", "h", "k", "1", "...", "_0", "_1", "(h k)", "(b s)", "()", "h*2+r-1", "a-1"])
NOISE = st.text(st.sampled_from("bsdhk1(), .->*+-_0\n"), max_size=20) | st.text(max_size=8)
PATTERNS = st.builds(
    lambda left, right: " , ".join(map(" ".join, left)) + " -> " + " ".join(right),
    st.lists(st.lists(AXES, max_size=4), min_size=1, max_size=3),
    st.lists(AXES, max_size=4),
)


def damaged(texts):
    """Draw valid texts of a grammar with parts deleted, repeated, replaced or inserted."""
    cut = st.tuples(st.integers(0, 60), st.integers(0, 6), NOISE)

    def apply(text, edits):
        for at, width, new in edits:
            text = text[:at] + new + text[at + width :]
        return text

    return st.builds(apply, texts, st.lists(cut, max_size=2))


@fuzz(250)
@given(damaged(PATTERNS) | st.text())
def test_patterns_are_read_or_refused(text):
    for reader in (rearranged, reduced, contracted, convolved):
        outcome(reader, text)
    if not isinstance(found := outcome(parse_pattern, text), cg.CostGraphError):
        assert outcome(parse_pattern, str(found)) == found


NUMBERS = st.integers(0, 10**40).map(str) | st.sampled_from(["0", "1", "2", "0.5", "64", "1024", "1.25"])
ATOMS = NUMBERS | st.sampled_from(["A", "B", "C", "D"])
SUMS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "/", "**"]), inner),
        st.builds("{}({}, {})".format, st.sampled_from(["Max", "Min"]), inner, inner),
        st.builds("{}({})".format, st.sampled_from(["floor", "ceiling", "-", "Max"]), inner),
        st.builds("({})**{}".format, inner, st.integers(-70, 1100)),
    ),
    max_leaves=12,
)


@fuzz(400)
@given(SUMS)
def test_formulas_are_read_or_refused_and_their_text_is_the_formula(text):
    found = outcome(formula, text)
    if isinstance(found, Poly):
        outcome(lambda: cg.evaluate(found.expr, **dict.fromkeys(found.names(), 3)), about=text)
        outcome(lambda: cg.flops(cg.Graph("g").input("x", (found, 2)).graph), about=text)


@fuzz(300)
@given(damaged(SUMS) | st.text())
def test_damaged_formulas_are_read_or_refused(text):
    outcome(formula, text)


@fuzz(200)
@given(st.lists(st.tuples(SUMS, st.sampled_from(["==", ">=", "<=", ">", "<"]), SUMS), min_size=1, max_size=3))
def test_relations_are_stated_or_refused(relations):
    def ask():
        g = cg.Graph("g")
        g.assume(*(" ".join(r) for r in relations))
        with g:
            g.output(cg.relu(g.input("x", cg.dims("A B C D"))))
        return cg.peak_memory(g), cg.flops(g, A=2, B=3, C=4, D=5)

    outcome(ask, about=relations)


@fuzz(300)
@given(st.text("0123456789.eE+-KMGTkiB _", max_size=12) | st.text(max_size=6))
def test_sizes_are_exact_or_refused(text):
    found = outcome(read_size, text, "S")
    if isinstance(found, int):
        assert found > 0
        assert outcome(read_size, str(found), "S") == found or found >= 10**30
