"""Loops whose carries alias each other in some iterations read as much as the unrolled Python loop."""

import sympy
from each import each

import costgraph as cg
from costgraph.ir.graph import ALIASES

B, D, L, N = cg.dims("B D L N")


def rolled(body, start, count=L):
    with cg.Graph("rolled") as g:
        xs = [g.input(n, (D,)) for n in "xyz"]
        result = cg.repeat(count, lambda *hs: body(hs, xs), tuple(xs[i] for i in start))
        g.output(*result)
    return g


def by_hand(body, start, count):
    with cg.Graph("by hand") as g:
        xs = [g.input(n, (D,)) for n in "xyz"]
        hs = tuple(xs[i] for i in start)
        for _ in range(count):
            hs = body(hs, xs)
        g.output(*dict.fromkeys(hs))
    return g


# loop body over the carries and the captured x, y, z; initial values of the carries
BODIES = {
    "starts from what it reads": (lambda h, x: (h[0] + x[0],), [0]),
    "starts from another": (lambda h, x: (h[0] + x[0],), [1]),
    "reads it in two ops": (lambda h, x: ((h[0] + x[0]) * x[0],), [0]),
    "reads it beside another": (lambda h, x: (cg.ops.pointwise("fma", h[0], x[0], x[1]),), [1]),
    "two carries start from one": (lambda h, x: (h[0] * h[1], cg.relu(h[1])), [0, 0]),
    "two carries start from one and stay": (lambda h, x: (h[0], h[1] * h[0]), [0, 0]),
    "nothing changes": (lambda h, x: (h[0], cg.relu(h[0] + x[0])), [0, 1]),
    "changing places": (lambda h, x: (h[1], cg.relu(h[0] + x[0])), [0, 1]),
    "changing places, both read": (lambda h, x: (h[1], h[0] * h[1]), [0, 0]),
    "turning without work": (lambda h, x: (h[1], h[0], h[2] + h[0] * x[0]), [0, 1, 2]),
    "turning three": (lambda h, x: (h[1], h[2], h[0], h[3] + h[0] * x[0]), [0, 1, 2, 2]),
    "turning three, two read": (lambda h, x: (h[2], h[0], h[1], (h[3] + h[0]) * x[1]), [0, 1, 2, 1]),
    "one result in two places": (lambda h, x: (cg.relu(h[0] + h[1]),) * 2, [0, 1]),
    "one result in two places, from one": (lambda h, x: (cg.relu(h[0] + h[1]),) * 2, [0, 0]),
    "an older one": (lambda h, x: (cg.relu(h[0] + h[1]), h[0]), [0, 0]),
    "an older one twice": (lambda h, x: (cg.relu(h[1] + h[2]), h[0], h[0]), [0, 1, 2]),
    "older and older": (lambda h, x: (cg.relu(h[0] + h[2]), h[0], h[1]), [0, 1, 0]),
    "older ones in two rows": (lambda h, x: (cg.relu(h[1] + h[3]), h[0], h[0], h[2]), [0, 1, 2, 1]),
    "the captured one last": (lambda h, x: (h[1], h[2], x[0], h[3] * h[0] + x[0]), [1, 2, 1, 2]),
    "a captured one is handed on": (lambda h, x: (x[1], h[0] * x[1], h[0] + h[1]), [0, 1, 2]),
    "a captured one comes later": (lambda h, x: (h[1], x[0], h[2] + h[0] * x[0]), [1, 2, 2]),
    "shared at first, not read": (lambda h, x: (cg.relu(h[0]), h[0], h[1] * x[0]), [0, 0, 0]),
    "older ones of two": (lambda h, x: (cg.relu(h[2] + h[3]), cg.tanh(h[3]), h[0], h[1]), [0, 1, 2, 1]),
    "turning beside it": (lambda h, x: (h[1], h[0], cg.relu(h[2] + x[0])), [1, 2, 0]),
    "shared, but never in one op": (lambda h, x: (cg.relu(h[0] + x[2]), h[0], h[1], cg.relu(h[2])), [0, 0, 0, 1]),
    "every second and then never": (lambda h, x: (h[1], h[0], h[2] * h[0], cg.relu(h[3] + x[0])), [0, 1, 0, 0]),
}


@each("name", BODIES)
@each("count", (1, 2, 3, 4, 7))
def test_loop_traffic_matches_unrolled_loop(name, count):
    body, start = BODIES[name]
    plain = by_hand(body, start, count)
    g = rolled(body, start)
    for ask in (cg.bytes_moved, cg.flops):
        expected = ask(plain, D=7)
        assert ask(g, D=7, L=count) == expected
        assert ask(rolled(body, start, count), D=7) == expected
        formula = ask(g)
        assert cg.evaluate(formula, **{s.name: {"D": 7, "L": count}[s.name] for s in formula.free_symbols}) == expected
    assert cg.bytes_moved(cg.unroll(g, L=count), D=7) == cg.bytes_moved(plain, D=7)
    assert not ALIASES.get()


@each(
    ("name", "expected"),
    [
        # x + x reads D, h + x reads 2*D in the other iterations, each writes D; 4 bytes per element
        ("starts from what it reads", 4 * (2 * D + 3 * D * (L - 1))),
        ("starts from another", 4 * 3 * D * L),
        # h0 * h1 reads one tensor at first and two later; relu reads and writes
        ("two carries start from one", 4 * (2 * D + 3 * D * (L - 1) + 2 * D * L)),
        # the third carry starts as x as well, but no other op reads x at that point: relu, and h1 * x
        ("one result in two places", 4 * (3 * D + 2 * D * (L - 1) + 2 * D * L)),
        ("one result in two places, from one", 4 * (2 * D * L + 2 * D * L)),
        # h0 + h1 reads a single tensor in the first iteration only
        ("an older one", 4 * (2 * D + 3 * D * (L - 1) + 2 * D * L)),
        # no other op reads the values that enter the other two carries, and the rotation itself is free
        ("older and older", 4 * (2 * D + 3 * D * (L - 1) + 2 * D * L)),
        ("turning beside it", 4 * (2 * D + 3 * D * (L - 1) + 2 * D * L)),
        ("shared, but never in one op", 4 * (3 * D + 2 * D + 2 * D) * L),
    ],
)
def test_traffic_formula_has_one_term_per_aliasing_pattern(name, expected):
    assert sympy.expand(cg.bytes_moved(rolled(*BODIES[name])) - expected) == 0


def test_alternating_aliases_have_formula_in_halves():
    formula = cg.bytes_moved(rolled(*BODIES["changing places"]), D=7)
    flops = [cg.evaluate(formula, L=n) for n in range(1, 7)]
    assert flops == [cg.bytes_moved(by_hand(*BODIES["changing places"], n), D=7) for n in range(1, 7)]
    # carries that differ in their initial values only need no rounding, however long their cycle
    for name in ("older and older", "turning without work", "shared at first, not read"):
        body, start = BODIES[name]
        assert cg.bytes_moved(rolled(body, start), D=7, L=12) == cg.bytes_moved(by_hand(body, start, 12), D=7)


def plain_loop(count, body, x):
    for _ in range(count):
        x = body(x)
    return x


def multiplied(loop, inner, w, x, y):
    return lambda h: loop(inner, lambda k: cg.relu(k * h + x), h)


def from_elsewhere(loop, inner, w, x, y):
    return lambda h: loop(inner, lambda k: cg.ops.pointwise("fma", k, h, x), y)


def handing_on_a_part(loop, inner, w, x, y):
    def body(h, total):
        return w[2:9], loop(inner, lambda k: cg.ops.pointwise("fma", k, h, w[2:9]), total)

    return body


@each("case", [multiplied, from_elsewhere, handing_on_a_part])
@each("inner", [1, 2, 3])
@each("count", [1, 2, 3, 4])
def test_nested_loop_traffic_matches_unrolled_loops(case, count, inner):
    traffic = []
    for rolled_up in (True, False):
        with cg.Graph("g") as g:
            w, x, y = g.input("w", (13,)), g.input("x", (7,)), g.input("y", (7,))
            body = case(cg.repeat if rolled_up else plain_loop, N if rolled_up else inner, w, x, y)
            if case is handing_on_a_part:
                h = (x, y)
                h = cg.repeat(L, body, h) if rolled_up else plain_loop(count, lambda h, b=body: b(*h), h)
                g.output(*h)
            else:
                g.output(cg.repeat(L, body, x) if rolled_up else plain_loop(count, body, x))
        traffic.append(cg.bytes_moved(g, **({"L": count, "N": inner} if rolled_up else {})))
    assert traffic[0] == traffic[1]


@each("begin", [0, 2, 3])
@each("count", [1, 2, 3])
def test_loop_traffic_with_captured_overlapping_slice(begin, count):
    with cg.Graph("g") as g:
        w = g.input("w", (13,))
        start, read = w[2:7], w[begin : begin + 5]
        g.output(cg.repeat(L, lambda h: cg.relu(h * read), start))
    # the product reads 5 or 10 elements at first and 10 later, and writes 5; relu reads and writes 5
    first = 5 if begin == 2 else 10
    assert cg.bytes_moved(g, L=count) == 4 * (first + 10 * (count - 1) + (5 + 10) * count)


@each("count", [1, 2, 3])
def test_each_scan_step_reads_one_row_element(count):
    with cg.Graph("g") as g:
        row, other, h = g.input("row", (L,)), g.input("other", (L,)), g.input("h", ())
        g.output(cg.scan(L, lambda h, ab: (cg.ops.pointwise("fma", h, *ab[:2]) * ab[2], ()), h, (row, row, other))[0])
    # h and one element of the row; the result and one element of the other: each op writes one
    assert cg.bytes_moved(g, L=count) == 4 * count * (2 + 1 + 2 + 1)


@each("first", ["same", "apart", "elsewhere"])
@each("count", [1, 2, 3, 5])
def test_captured_slices_are_distinguished_by_offset(first, count):
    def body(h, w):
        begin = {"same": 2, "apart": 5, "elsewhere": 0}[first]
        part = w[2:7]
        return part, cg.relu(h[0] * w[begin : begin + 5] + h[1])

    with cg.Graph("g") as g:
        w, x = g.input("w", (13,)), g.input("x", (5,))
        g.output(*cg.repeat(L, lambda *h: body(h, w), (x, x)))
    with cg.Graph("plain") as plain:
        w, x = plain.input("w", (13,)), plain.input("x", (5,))
        h = (x, x)
        for _ in range(count):
            h = body(h, w)
        plain.output(*h)
    assert cg.bytes_moved(g, L=count) == cg.bytes_moved(plain)


@each("pair", ["same", "shifted", "captured"])
@each("count", [1, 2, 3, 5])
def test_equal_scan_slices_alias_and_shifted_ones_do_not(pair, count):
    def pieces(rows, length):
        return {"same": (rows[:length], rows[:length]), "shifted": (rows[:length], rows[1:])}.get(
            pair, (rows[:length], rows[1:])
        )

    with cg.Graph("g") as g:
        rows, h = g.input("rows", (L + 1, 7)), g.input("h", (7,))
        last = rows[0]

        def step(h, ab):
            return cg.relu(h + ab[0] * (last if pair == "captured" else ab[1]))

        g.output(cg.scan(L, lambda h, ab: (step(h, ab), ()), h, pieces(rows, L))[0])
    with cg.Graph("plain") as plain:
        rows, h = plain.input("rows", (count + 1, 7)), plain.input("h", (7,))
        last = rows[0]
        first, second = pieces(rows, count)
        for i in range(count):
            h = step(h, (first[i], second[i]))
        plain.output(h)
    if pair == "captured":  # row 0 aliases slice 0 at first: not analysed
        assert cg.bytes_moved(g, L=count) - cg.bytes_moved(plain) in (0, 4 * 7)
    else:
        assert cg.bytes_moved(g, L=count) == cg.bytes_moved(plain)


def rows_before(state, x):
    before, earlier, out = state
    return (x, before, out + (x - before) * (before - earlier)), ()


def of_rows(state, rows):
    return cg.scan(L, rows_before, state, rows)[0], ()


@each("nested", [False, True])
@each("count", [1, 2, 3, 7])
def test_costs_with_carried_slices_match_unrolled_graph(count, nested):
    with cg.Graph("differences") as g:
        x = g.input("x", (N, L, B) if nested else (L, B))
        state = tuple(g.input(name, (B,)) for name in ("before", "earlier", "out"))
        g.output(cg.scan(N, of_rows, state, x)[0][2] if nested else cg.scan(L, rows_before, state, x)[0][2])
    sizes = {"L": count, **({"N": 5} if nested else {})}
    flat = cg.unroll(g, **sizes)
    for cost in (cg.bytes_moved, cg.flops, cg.peak_memory):
        assert cost(g, B=11, **sizes) == cost(flat, B=11)
