"""Elements that a graph's ops read from a tensor, against marks in a NumPy array."""

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
    return start, size, step if size > 1 else 1  # a single row has no stride


def marked(parts):
    """Return the union size of the slices, the largest slice, and whether all are disjoint."""
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
        ([(7, 5, 1), (0, 7, 1)], 12 * 3),  # adjacent, the later one first
        ([(0, 7, 1), (7, 3, 1), (11, 2, 1)], 12 * 3),
        ([(7, 3, 1), (11, 2, 1), (0, 7, 1)], 12 * 3),
        ([(0, 7, 1), (6, 5, 1)], 7 * 3),  # one common row
        ([(0, 2, 1), (2, 5, 1), (6, 3, 1)], 5 * 3),  # the last two of three overlap
        ([(6, 3, 1), (2, 5, 1), (0, 2, 1)], 5 * 3),
        ([(0, 4, 2), (7, 2, 3)], 6 * 3),  # rows 0 2 4 6, then 7 10
        ([(0, 4, 2), (6, 2, 3)], 4 * 3),  # rows 0 2 4 6, then 6 9
        ([(3, 1, 1), (4, 1, 1)], 2 * 3),
    ],
)
def test_slice_reads_match_hand_counts(parts, elements):
    assert reading(parts) == elements


def test_repeated_slice_counts_once():
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
def test_symbolic_split_parts_add_up_in_any_order(read):
    sizes = (S, D, T)
    with cg.Graph("g") as g:
        x, y = g.input("x", (S + D + T, B)), g.input("y", (S + D + T, B))
        parts = cg.ops.split(x, sizes, axis=0)
        for i in read:
            cg.relu(parts[i])
            cg.relu(slice_rows(y, (0, S, S + D)[i], sizes[i]))  # created in reading order
    for tensor in (x, y):
        assert elements_read(g, tensor).expr.expand() == (sum(sizes[i] for i in read) * B).expand()


@each("shape", [(3, 5, 7), (5, 3, 7), (7, 2, 1)])
def test_possibly_overlapping_slices_count_widest(shape):
    with cg.Graph("g") as g:
        x = g.input("x", (S + D + T, B))
        cg.relu(slice_rows(x, 0, S))
        cg.relu(slice_rows(x, D, T))  # starts at D, which may be below S
    s, d, t = shape
    found = elements_read(g, x).expr.subs({S: s, D: d, T: t, B: 2})
    assert found == 2 * max(s, t)


def test_two_possibly_overlapping_slices_of_three_count_widest():
    with cg.Graph("g") as g:
        x = g.input("x", (S + D + T, B))
        cg.relu(slice_rows(x, D, T))
        cg.relu(slice_rows(x, S + D, T))  # disjoint from the first if T <= S
        cg.relu(slice_rows(x, 0, 1))  # disjoint from both
    assert elements_read(g, x) == poly(B * T)


def test_non_slice_reader_counts_as_whole_tensor():
    with cg.Graph("g") as g:
        x = g.input("x", (ROWS, COLUMNS))
        cg.relu(x[:2])
        assert elements_read(g, x) == 2 * 3
        cg.relu(x[:, :2])  # another axis: rows and columns may overlap
        assert elements_read(g, x) == 13 * 2
        cg.relu(cg.rearrange(x, "a b -> b a"))
        assert elements_read(g, x) == 13 * 3


def test_nested_slice_counts_elements_read():
    with cg.Graph("g") as g:
        x = g.input("x", (ROWS, COLUMNS))
        upper = x[:7]
        cg.relu(upper[:2])
        cg.relu(upper[5:])
        cg.relu(x[11:])
    assert elements_read(g, x) == (2 + 2 + 2) * 3


def test_unread_tensor_has_no_reads():
    with cg.Graph("g") as g:
        x = g.input("x", (ROWS, COLUMNS))
        x[2:5]
    assert elements_read(g, x) == 0


@each(("b", "s"), [(3, 11), (11, 3), (5, 5)])
def test_longer_of_two_lookups_counts(b, s):
    with cg.Graph("g") as g:
        table = g.param("table", (1000, D))
        for name, n in (("few", B), ("many", S)):
            g.output(cg.ops.gather(table, g.input(name, (n,), dtype="int64")))
    indices, rows = 8 * (b + s), 4 * 7 * (b + s)
    assert cg.bytes_moved(g, fused=True, B=b, S=s, D=7) == 4 * 7 * max(b, s) + indices + rows


def test_in_place_operand_is_read_whole():
    with cg.Graph("g") as g:
        x = g.input("x", (5, 7))
        cg.gelu(cg.relu(x, inplace=True)[:2])
    assert elements_read(g, x) == 5 * 7


def test_loop_reads_slices_per_iteration_and_shared_tensors_once():
    with cg.Graph("g") as g:
        xs, state, shared = g.input("xs", (L, 3, 5)), g.input("h", (3, 5)), g.input("w", (11, 5))

        def body(h, x):
            return cg.tanh(h + x + shared[2:5]), None

        g.output(cg.scan(L, body, state, xs)[0])
    for tensor, elements in ((xs, 3 * 5 * L), (state, 3 * 5), (shared, 3 * 5)):
        assert elements_read(g, tensor) == poly(elements)


def test_loop_reads_only_slice_parts_its_body_reads():
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
def test_lower_bounds_hold_for_all_sizes(a, b, known):
    assert at_least(poly(a), poly(b)) is known


@each(("a", "b"), [(0, S), (S, 0), (S, 2 * S), (2 * S, S), (S, D), (D + 1, S * T)])
def test_larger_amount_matches_python_max(a, b):
    made = larger(poly(a), poly(b)).expr
    for point in ({S: 2, D: 3, T: 5}, {S: 7, D: 3, T: 1}, {S: 1, D: 1, T: 1}):
        x, y = (e.subs(point) if e else 0 for e in (a, b))
        assert made.subs(point) == max(x, y)
