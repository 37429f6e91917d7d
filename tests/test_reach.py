"""Elements that the ops of a graph read of a tensor, against the marks that NumPy leaves in an array."""

import numpy as np
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

import costgraph as cg
from costgraph.algebra.polynomial import poly
from costgraph.ops.access_footprint import (
    at_least,
    larger,
)
from costgraph.ops.uses import elements_read

A, B, D, L, S, T = cg.dims("A B D L S T")
ROWS, COLUMNS = 13, 3


@st.composite
def slices(draw):
    start, step = draw(st.integers(0, ROWS - 1)), draw(st.integers(1, 3))
    size = draw(st.integers(1, (ROWS - 1 - start) // step + 1))
    return start, size, step if size > 1 else 1  # of one row a step says nothing


def marked(parts):
    """Elements that a slice or another touches, the most that one of them does, and whether none meets another."""
    seen, alone, spans = np.zeros((ROWS, COLUMNS), dtype=bool), [], []
    for start, size, step in parts:
        rows = slice(start, start + (size - 1) * step + 1, step)
        seen[rows] = True
        alone.append(size * COLUMNS)
        spans.append(set(range(rows.start, rows.stop)))
    apart = all(not a & b for i, a in enumerate(spans) for b in spans[i + 1 :])
    return int(seen.sum()), max(alone), apart


def reading(parts):
    with cg.Graph("g") as g:
        x = g.input("x", (ROWS, COLUMNS))
        for start, size, step in parts:
            cg.relu(x[start : start + (size - 1) * step + 1 : step])
    return elements_read(g, x)


@given(st.lists(slices(), min_size=1, max_size=4, unique=True))
@settings(max_examples=200, deadline=None)
def test_slices_that_are_apart_add_up_and_of_others_the_widest_counts(parts):
    together, widest, apart = marked(parts)
    assert reading(parts) == (together if apart else widest)


@each(
    ("parts", "elements"),
    [
        ([(7, 5, 1), (0, 7, 1)], 12 * 3),  # side by side, the later one first
        ([(0, 7, 1), (7, 3, 1), (11, 2, 1)], 12 * 3),
        ([(7, 3, 1), (11, 2, 1), (0, 7, 1)], 12 * 3),
        ([(0, 7, 1), (6, 5, 1)], 7 * 3),  # one row in common
        ([(0, 2, 1), (2, 5, 1), (6, 3, 1)], 5 * 3),  # of three the last two meet
        ([(6, 3, 1), (2, 5, 1), (0, 2, 1)], 5 * 3),
        ([(0, 4, 2), (7, 2, 3)], 6 * 3),  # rows 0 2 4 6, then 7 10
        ([(0, 4, 2), (6, 2, 3)], 4 * 3),  # rows 0 2 4 6, then 6 9
        ([(3, 1, 1), (4, 1, 1)], 2 * 3),
    ],
)
def test_slices_by_hand(parts, elements):
    assert reading(parts) == elements


def test_the_same_slice_read_twice_counts_once():
    with cg.Graph("g") as g:
        x = g.input("x", (ROWS, COLUMNS))
        for _ in range(2):
            cg.relu(x[2:7])
        cg.relu(x[7:12])
    assert elements_read(g, x) == (5 + 5) * 3


def slice_rows(x, start, size):
    return cg.ops.layout.slice_axis(x, 0, start, size)


ORDERS = [(0,), (2,), (0, 2), (2, 0), (1, 0, 2), (2, 1), (2, 1, 0), (0, 1, 2), (1, 2, 0)]


@each("read", ORDERS)
def test_parts_of_a_split_add_up_in_any_order_with_symbols_as_sizes(read):
    sizes = (S, D, T)
    with cg.Graph("g") as g:
        x, y = g.input("x", (S + D + T, B)), g.input("y", (S + D + T, B))
        parts = cg.ops.split(x, sizes, axis=0)
        for i in read:
            cg.relu(parts[i])
            cg.relu(slice_rows(y, (0, S, S + D)[i], sizes[i]))  # made in the order in which they are read
    for tensor in (x, y):
        assert elements_read(g, tensor).expr.expand() == (sum(sizes[i] for i in read) * B).expand()


@each("shape", [(3, 5, 7), (5, 3, 7), (7, 2, 1)])
def test_slices_that_may_meet_count_the_widest_at_every_size(shape):
    with cg.Graph("g") as g:
        x = g.input("x", (S + D + T, B))
        cg.relu(slice_rows(x, 0, S))
        cg.relu(slice_rows(x, D, T))  # from D on: below S or not
    s, d, t = shape
    found = elements_read(g, x).expr.subs({S: s, D: d, T: t, B: 2})
    assert found == 2 * max(s, t)


def test_of_three_slices_two_that_may_meet_are_enough_for_the_widest():
    with cg.Graph("g") as g:
        x = g.input("x", (S + D + T, B))
        cg.relu(slice_rows(x, D, T))
        cg.relu(slice_rows(x, S + D, T))  # apart from the first where T <= S
        cg.relu(slice_rows(x, 0, 1))  # apart from both
    assert elements_read(g, x) == poly(B * T)


def test_readers_that_are_no_slices_count_beside_them_as_one_whole():
    with cg.Graph("g") as g:
        x = g.input("x", (ROWS, COLUMNS))
        cg.relu(x[:2])
        assert elements_read(g, x) == 2 * 3
        cg.relu(x[:, :2])  # another axis: rows and columns may meet
        assert elements_read(g, x) == 13 * 2
        cg.relu(cg.rearrange(x, "a b -> b a"))
        assert elements_read(g, x) == 13 * 3


def test_a_slice_of_a_slice_counts_what_is_read_of_it():
    with cg.Graph("g") as g:
        x = g.input("x", (ROWS, COLUMNS))
        upper = x[:7]
        cg.relu(upper[:2])
        cg.relu(upper[5:])
        cg.relu(x[11:])
    assert elements_read(g, x) == (2 + 2 + 2) * 3


def test_what_nobody_reads_is_not_read():
    with cg.Graph("g") as g:
        x = g.input("x", (ROWS, COLUMNS))
        x[2:5]
    assert elements_read(g, x) == 0


@each(("b", "s"), [(3, 11), (11, 3), (5, 5)])
def test_of_two_lookups_the_longer_one_counts(b, s):
    with cg.Graph("g") as g:
        table = g.param("table", (1000, D))
        for name, n in (("few", B), ("many", S)):
            g.output(cg.ops.gather(table, g.input(name, (n,), dtype="int64")))
    indices, rows = 8 * (b + s), 4 * 7 * (b + s)
    assert cg.bytes_moved(g, fused=True, B=b, S=s, D=7) == 4 * 7 * max(b, s) + indices + rows


def test_what_is_changed_in_place_is_read_whole_even_if_little_of_the_result_is():
    with cg.Graph("g") as g:
        x = g.input("x", (5, 7))
        cg.gelu(cg.relu(x, inplace=True)[:2])
    assert elements_read(g, x) == 5 * 7


def test_a_loop_reads_slices_once_an_iteration_and_what_it_shares_once():
    with cg.Graph("g") as g:
        xs, state, shared = g.input("xs", (L, 3, 5)), g.input("h", (3, 5)), g.input("w", (11, 5))

        def body(h, x):
            return cg.tanh(h + x + shared[2:5]), None

        g.output(cg.scan(L, body, state, xs)[0])
    for tensor, elements in ((xs, 3 * 5 * L), (state, 3 * 5), (shared, 3 * 5)):
        assert elements_read(g, tensor) == poly(elements)


def test_a_loop_reads_half_of_each_slice_where_its_body_does():
    with cg.Graph("g") as g:
        xs = g.input("xs", (L, 3, 4))

        def body(h, x):
            return cg.tanh(h + x[:, :2]), None

        g.output(cg.scan(L, body, g.input("h", (3, 2)), xs)[0])
    assert elements_read(g, xs) == poly(3 * 2 * L)


@each(
    ("a", "b", "known"),
    [(S, 0, True), (S, S, True), (S + 1, S, True), (2 * S, S, True), (S, S + 1, False), (S, D, False), (S, 1, True)],
)
def test_what_is_at_least_something_for_all_sizes(a, b, known):
    assert at_least(poly(a), poly(b)) is known


@each(("a", "b"), [(0, S), (S, 0), (S, 2 * S), (2 * S, S), (S, D), (D + 1, S * T)])
def test_the_larger_of_two_amounts_is_that_of_python_at_every_size(a, b):
    made = larger(poly(a), poly(b)).expr
    for point in ({S: 2, D: 3, T: 5}, {S: 7, D: 3, T: 1}, {S: 1, D: 1, T: 1}):
        x, y = (e.subs(point) if e else 0 for e in (a, b))
        assert made.subs(point) == max(x, y)
