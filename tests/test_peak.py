"""Peaks and lifetimes, with loops checked against their unrolled form."""

import oracles
import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

import costgraph as cg
from costgraph import BindingError

B, D, F, K, L, M = cg.dims("B D F K L M")


def worked():
    with cg.Graph("worked") as g:
        h = cg.einsum(g.input("x", (B, D)), g.param("w1", (D, F)), "b d, d f -> b f", name="first")
        g.output(cg.einsum(cg.relu(h), g.param("w2", (F, K)), "b f, f k -> b k", name="second"))
    return g


def test_worked_example_has_two_regimes():
    peak = cg.peak_memory(worked())
    fixed = 4 * (D * F + F * K + B * D)
    found = {r.op: (r.formula - fixed).expand() for r in cg.regimes(peak)}
    assert found == {"relu": 8 * B * F, "second": 4 * B * F + 4 * B * K}


@each(("b", "d", "f", "k"), [(2, 3, 5, 7), (2, 3, 7, 5), (11, 3, 5, 5), (1, 1, 1, 1)])
def test_worked_example_at_numbers(b, d, f, k):
    expected = 4 * (d * f + f * k + b * d) + max(8 * b * f, 4 * b * f + 4 * b * k)
    assert cg.peak_memory(worked(), B=b, D=d, F=f, K=k) == expected
    line = cg.timeline(worked(), B=b, D=d, F=f, K=k)
    assert line.peak == expected
    assert line.op == ("relu" if f >= k else "second")
    assert line.phase == "forward"
    assert sum(line.by_role.values()) == expected
    assert line.by_role["param"] == 4 * (d * f + f * k)
    assert [m.bytes for m in line.moments] == [
        4 * (d * f + f * k + b * d) + n for n in (4 * b * f, 8 * b * f, 4 * b * f + 4 * b * k)
    ]


def test_peak_holder_requires_bound_sizes():
    line = cg.timeline(worked())
    assert len(line.moments) == 3
    with pytest.raises(BindingError, match="what holds the peak: expected numbers, still unbound: B, D, F, K"):
        _ = line.op
    with pytest.raises(BindingError, match="roles at the peak: expected numbers"):
        _ = line.by_role
    with pytest.raises(BindingError, match="plot of a timeline: expected numbers"):
        line.plot()


def test_workspace_counts_while_its_op_runs():
    with cg.Graph("g") as g:
        x = g.input("x", (B,))
        (y,) = cg.opaque("op", [x], [((B,), "fp32")], flops=0, workspace=100)
        g.output(cg.relu(y))
    assert cg.peak_memory(g, B=2) == 8 + 8 + 100
    assert cg.peak_memory(g, B=1000) == 4000 + max(4000 + 100, 8000)
    assert cg.timeline(g, B=2).by_role == {"input": 8, "activation": 8, "workspace": 100}


def test_block_format_peaks_include_scales():
    with cg.Graph("g") as g:
        g.output(g.param("w", (7, 64), dtype="mxfp8"))
    assert cg.peak_memory(g) == 7 * 64 + 7 * 2  # one 8-bit scale per 32 elements


OPS = ("tanh", "relu_in_place", "add", "view", "slice", "matmul", "reduce", "concat", "copy")


@st.composite
def programs(draw):
    count = draw(st.integers(1, 14))
    steps = [(draw(st.sampled_from(OPS)), draw(st.integers(0, 99)), draw(st.integers(0, 99))) for _ in range(count)]
    outputs = draw(st.lists(st.integers(0, 99), max_size=3))
    return steps, outputs


def build(program, size):
    """Build a random graph of square matrices; operands overwritten in place are not read again."""
    steps, outputs = program
    with cg.Graph("g", dtype="bf16") as g:
        alive = [g.input("x", (size, size)), g.param("w", (size, size), dtype="fp32"), g.input("y", (size, size))]
        for kind, i, j in steps:
            a, b = alive[i % len(alive)], alive[j % len(alive)]
            if kind == "tanh":
                made = cg.tanh(a)
            elif kind == "relu_in_place":
                made = cg.relu(a, inplace=True)
                alive = [t for t in alive if t.storage is not a.storage]
            elif kind == "add":
                made = a + b
            elif kind == "view":
                made = a.T
            elif kind == "slice":
                made = a[:1] + b
            elif kind == "matmul":
                made = a @ b
            elif kind == "reduce":
                made = cg.reduce(a, "i j -> 1 j", "sum") * b
            elif kind == "concat":
                made = cg.ops.concat([cg.ops.cast(a, "bf16"), cg.ops.cast(b, "bf16")], 0)[:size]
            else:
                made = cg.ops.contiguous_copy(a)
            alive.append(made)
        g.output(*(alive[i % len(alive)] for i in outputs))
    return g


@given(programs())
@settings(max_examples=200, deadline=None)
def test_peak_is_that_of_a_replay_with_sets_of_live_storages(program):
    graph = build(program, 5)
    expected = oracles.peak(graph)
    assert cg.peak_memory(graph) == expected
    assert cg.timeline(graph).peak == expected


@given(programs(), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_the_symbolic_peak_is_that_of_a_replay_at_every_size(program, size):
    symbolic = build(program, D)  # symbols and numbers larger than 1 give the same views
    assert cg.peak_memory(symbolic, D=size + 1) == oracles.peak(build(program, size + 1))


def test_bound_timeline_unrolls_loops():
    with cg.Graph("g") as g:
        g.output(cg.repeat(L, lambda x: cg.tanh(cg.relu(x)), g.input("x", (B,)), name="layers"))
    line = cg.timeline(g, B=3, L=5)
    assert len(line.moments) == 10
    assert line.moments[-1].op == "layers/tanh[4]"
    assert line.peak == cg.peak_memory(g, B=3, L=5) == 4 * 3 * 3  # the input, and the operands of one op


def test_timeline_names_op_of_single_regime():
    B, D = cg.dims("B D")
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B, D))))
    shape = cg.timeline(g)
    assert [(r.formula, r.op, r.phase) for r in shape.regimes] == [(8 * B * D, "relu", "forward")]  # input and output
    assert (shape.op, shape.phase) == ("relu", "forward")
    assert [(r.formula, r.op) for r in cg.timeline(g, B=2, D=3).regimes] == [(48, "relu")]


def rotated(a, b, c):
    cg.tanh(a)
    return b, c, a


def turned_back(a, b, c):
    cg.tanh(cg.gelu(b))
    return c, a, b


def two_rings(a, b, c, d, e):
    cg.tanh(c)
    return b, a, d, e, c


def one_is_made(a, b, c):
    return b, c, cg.tanh(a)


def one_is_kept(a, b, c):
    cg.tanh(a)
    return b, a, c


def with_a_tail(a, b, c):
    return b, c, cg.relu(c)


BODIES = [(rotated, 3), (turned_back, 3), (two_rings, 5), (one_is_made, 3), (one_is_kept, 3), (with_a_tail, 3)]


def program(body, carries, count, read, *, looped):
    """Carries of different sizes cannot form a ring; programs differ in inputs and in which carries are read
    afterwards.
    """
    with cg.Graph("g") as g:
        x, y = g.input("x", (7, 5)), g.input("y", (7, 5))
        state = tuple(cg.gelu(x) if i % 2 else (x, y)[i // 2 % 2] for i in range(carries))
        if looped:
            state = cg.repeat(count, body, state, name="layers")
        else:
            for _ in range(count):
                state = body(*state)
        wide = cg.ops.concat([cg.relu(y)] * 3, 0)
        g.output(cg.reduce(wide, "a b -> b", "sum") + cg.reduce(state[read], "a b -> b", "sum"))
    return g


@pytest.mark.parametrize(("body", "carries"), BODIES)
@pytest.mark.parametrize("read", [0, 1, 2])
def test_carry_ring_peak_matches_unrolled_loop(body, carries, read):
    looped = program(body, carries, L, read, looped=True)
    formula, holds_from = cg.peak_memory(looped), cg.timeline(looped).holds_from["L"]
    most = 0
    for count in range(1, 15):
        expected = oracles.peak(program(body, carries, count, read, looped=False))
        assert cg.peak_memory(looped, L=count) == expected
        line = cg.timeline(looped, L=count)
        assert (line.peak, max(m.bytes for m in line.moments)) == (expected, expected)
        if count >= holds_from:
            most = max(most, expected)
            assert cg.evaluate(formula, **({} if isinstance(formula, int) else {"L": count})) >= expected
    assert cg.evaluate(formula, **({} if isinstance(formula, int) else {"L": 14})) == most


def shrinks(x):
    return cg.tanh(cg.reduce(cg.ops.concat([x, x], 0), "(n a) b -> a b", "sum", n=2))


def grows_within(x):
    return x + cg.reduce(cg.ops.concat([cg.relu(x)] * 3, 0), "(n a) b -> a b", "sum", n=3)


def test_two_loop_formula_states_minimum_count():
    def build(one, other):
        with cg.Graph("g") as g:
            x = cg.repeat(one, shrinks, g.input("x", (B, D)), name="first")
            g.output(cg.repeat(other, grows_within, x, name="second"))
        return g

    looped = build(L, M)
    formula, holds_from = cg.peak_memory(looped), cg.timeline(looped).holds_from
    assert set(holds_from) == {"L", "M"}
    wrong = {"L": set(), "M": set()}
    for one in range(1, 6):
        for other in range(1, 6):
            sizes = {"B": 7, "D": 5, "L": one, "M": other}
            known = {n: v for n, v in sizes.items() if n in map(str, formula.free_symbols)}
            right = cg.evaluate(formula, **known) == cg.peak_memory(looped, **sizes)
            for name, count in (("L", one), ("M", other)):
                others = [(n, c) for n, c in (("L", one), ("M", other)) if n != name]
                if not right and all(c >= holds_from[n] for n, c in others):
                    wrong[name].add(count)
    for name, least in holds_from.items():
        assert all(count < least for count in wrong[name])
        assert least == 1 or least - 1 in wrong[name]


# -- moments -----------------------------------------------------------------------------------------------------------


def test_moments_are_first_op_and_allocating_ops():
    with cg.Graph("g") as g:
        h = cg.relu(g.input("x", (7, 5)), inplace=True)  # allocates nothing, but comes first
        h = cg.relu(cg.gelu(h), inplace=True)
        (y,) = cg.opaque("op", [h.T], [((3,), "fp32")], flops=0, workspace=11)
        g.output(cg.relu(y, inplace=True))
    line = cg.timeline(g)
    at = 4 * 7 * 5
    assert [(m.op, m.phase, m.bytes) for m in line.moments] == [
        ("relu", "forward", at), ("gelu", "forward", 2 * at), ("op", "forward", 2 * at + 12 + 11),
    ]  # fmt: skip
    assert line.by_role == {"input": at, "activation": at, "output": 12, "workspace": 11}


def test_first_op_can_hold_the_peak():
    with cg.Graph("g") as g:
        x = g.input("x", (7, 5))
        cg.ops.concat([x] * 3, 0)
        g.output(cg.relu(x))
    line = cg.timeline(g)
    assert (line.peak, line.op, line.regimes[0].op) == (4 * 35 * 4, "concat", "concat")


def test_graph_without_ops_holds_its_inputs():
    with cg.Graph("g") as g:
        g.output(g.param("w", (B, 7)))
    line = cg.timeline(g)
    assert [(m.op, m.phase, m.bytes) for m in line.moments] == [("", "forward", 28 * B)]
    assert [(r.formula, r.op) for r in line.regimes] == [(28 * B, None)]
    bound = cg.timeline(g, B=3)
    assert (bound.peak, bound.by_role, bound.regimes[0].op, bound.regimes[0].phase) == (84, {"param": 84}, None, None)


@pytest.mark.parametrize("ask", [cg.peak_memory, cg.timeline, cg.lifetimes, cg.param_count, cg.costs])
@pytest.mark.parametrize("wrong", [None, 3, "mlp", {}])
def test_non_graphs_are_refused(ask, wrong):
    with pytest.raises(cg.GraphError, match="expected a"):
        ask(wrong)


def test_scan_slices_live_until_last_reader():
    def body(h, x):
        y = cg.relu(h + x)
        return cg.tanh(y), y  # the slice is written before the last op runs

    with cg.Graph("g") as g:
        _, stack = cg.scan(L, body, g.input("h", (5,)), g.input("xs", (L, 5)), name="time")
        cg.scan(L, body, g.input("k", (5,)), g.input("zs", (L, 5)), name="unread")
        g.output(cg.reduce(stack, "t a -> a", "sum"))
    rows = {r.tensor: (r.born, r.dies) for r in cg.lifetimes(g, L=4)}
    stacks = [r for r in cg.lifetimes(g, L=4) if r.bytes == 4 * 4 * 5 and r.role == "activation"]
    assert [(r.born, r.dies) for r in stacks] == [("time/add[0]", "sum"), ("unread/add[0]", "unread/tanh[3]")]
    assert rows["xs"] == (None, None)
