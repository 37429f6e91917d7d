"""Formulas raise for the same sizes as their graphs: random graphs with size constraints, and the zoo."""

from contextlib import suppress

import pytest
from budget import drawing
from hypothesis import given
from hypothesis import strategies as st
from shared import load

import costgraph as cg
from costgraph import models, testing
from costgraph.ir.graph import known_names

LAW = "what_the_graph_refuses_its_formulas_refuse"
B, D, F, H, K, L, P, S, W = cg.dims("B D F H K L P S W")
ASSUMPTIONS = ("S <= P", "D == H*K", "F >= D", "F == 4*D", "S >= 2*W", "L >= 2", "P == 3*S + 1")


@st.composite
def demanding(draw):
    """A graph with differences, quotients and roundings as sizes, some assumptions, and a point."""
    with cg.Graph("demanding") as g:
        x = g.input("x", (B, S, D))
        for what in draw(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=4, unique=True)):
            with suppress(cg.CostGraphError):  # ops that no size can satisfy raise at once
                x = STEPS[what](draw, g, x)
        g.output(x)
        with suppress(cg.PatternError):  # some assumptions contradict each other
            g.assume(*draw(st.lists(st.sampled_from(ASSUMPTIONS), max_size=2, unique=True)))
        g.defaults |= draw(st.dictionaries(st.sampled_from(sorted(known_names(g))), st.integers(1, 12), max_size=2))
    return g, {n: draw(st.integers(1, 12)) for n in sorted(known_names(g))} | g.defaults


def split_heads(draw, g, x):
    parts, names = draw(st.sampled_from([(H, "b s (h k) -> b h s k"), (3, "b s (h k) -> b s h k")]))
    y = cg.relu(cg.rearrange(x, names, h=parts))
    back = "b h s k -> b s (h k)" if parts is H else "b s h k -> b s (h k)"
    return cg.rearrange(y, back)


def split_positions(draw, g, x):
    y = cg.rearrange(x, "b (n w) d -> b n w d", w=draw(st.sampled_from([W, 4])))
    return cg.rearrange(cg.relu(y), "b n w d -> b (n w) d")


def attend(draw, g, x):
    q = cg.rearrange(x, "b s (h k) -> b h s k", h=H)
    y = cg.attention(q, q, q, causal=draw(st.booleans()), window=draw(st.sampled_from([W, 2, W - 1])))
    return cg.rearrange(y, "b h s k -> b s (h k)")


def layers(draw, g, x):
    return cg.repeat(draw(st.sampled_from([L, L / 2, L - 1, 2 * L])), lambda y: cg.relu(cg.relu(y)) + y, x)


def stated(draw, g, x):
    amount = draw(st.sampled_from([B - 3, B * S - 20, S * S]))
    (y,) = cg.opaque("stated", [x], [((B, S, D), "fp32")], flops=amount, reads=[amount])
    return y


STEPS = {
    "slice": lambda draw, g, x: cg.relu(x[:, draw(st.sampled_from([5, 1, W])) :]),
    "stride": lambda draw, g, x: cg.relu(x[:, 1::3]),
    "until": lambda draw, g, x: cg.relu(x[:, : draw(st.sampled_from([4, W, P]))]),
    "heads": split_heads,
    "positions": split_positions,
    "attend": attend,
    "layers": layers,
    "wide": lambda draw, g, x: cg.linear(x, "b s d -> b s f", f=draw(st.sampled_from([F, F - 2, D / 2]))),
    "first": lambda draw, g, x: stated(draw, g, g.input("y", (B, S, D))),
}


@drawing(80)
@given(demanding())
def test_graphs_that_ask_much_of_sizes(case):
    graph, point = case
    testing.check(graph, [LAW], **point)


#: One model per zoo family, and queries with one unpublished size.
FAMILIES = [next(iter(family.presets)) for family in models.registry.FAMILIES]


def published(name):
    """Return a model with open sizes, and its published sizes."""
    graph = load(name, symbolic=True)
    return graph, {**dict.fromkeys(sorted(known_names(graph)), 64), **load(name).defaults}


def said(ask, *args, **sizes):
    """Return an answer, or an error message."""
    try:
        return ask(*args, **sizes)
    except cg.BindingError as error:
        return str(error)


def sizes_of(formula, point):
    names = {s.name for s in formula.free_symbols}.union(*(v.names for v in getattr(formula, "held", ())))
    return {k: v for k, v in point.items() if k in names}


@pytest.mark.parametrize("name", FAMILIES)
def test_zoo_formulas_raise_the_same_errors_as_graphs(name):
    graph, point = published(name)
    formulas = [cg.flops(graph), cg.peak_memory(graph)]
    for other in testing.properties.around(point):
        expected = said(cg.flops, graph, **other)
        refused = isinstance(expected, str)
        for formula in formulas if refused else formulas[:1]:
            assert said(cg.evaluate, formula, **sizes_of(formula, other)) == expected


@pytest.mark.long  # every question of every model: minutes
@pytest.mark.parametrize("name", models.names())
def test_models_keep_the_refusal_law(name):
    graph, point = published(name)
    testing.check(graph, [LAW], **point)
