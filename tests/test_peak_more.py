"""Peaks and lifetimes of loops whose bodies hand their carries around, against the same loops written out."""

import oracles
import pytest

import costgraph as cg

B, D, L, M = cg.dims("B D L M")


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
    """Carries of different sizes would not fit a ring: what differs is which are inputs and which are read after."""
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
def test_a_ring_of_carries_has_the_peak_of_the_loop_written_out_at_every_count(body, carries, read):
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


def test_two_loops_say_from_which_count_on_their_formula_holds():
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


def test_moments_are_the_first_op_and_those_that_take_memory():
    with cg.Graph("g") as g:
        h = cg.relu(g.input("x", (7, 5)), inplace=True)  # takes none, but is the first
        h = cg.relu(cg.gelu(h), inplace=True)
        (y,) = cg.opaque("op", [h.T], [((3,), "fp32")], flops=0, workspace=11)
        g.output(cg.relu(y, inplace=True))
    line = cg.timeline(g)
    at = 4 * 7 * 5
    assert [(m.op, m.phase, m.bytes) for m in line.moments] == [
        ("relu", "forward", at), ("gelu", "forward", 2 * at), ("op", "forward", 2 * at + 12 + 11),
    ]  # fmt: skip
    assert line.by_role == {"input": at, "activation": at, "output": 12, "workspace": 11}


def test_the_first_op_can_hold_the_peak():
    with cg.Graph("g") as g:
        x = g.input("x", (7, 5))
        cg.ops.concat([x] * 3, 0)
        g.output(cg.relu(x))
    line = cg.timeline(g)
    assert (line.peak, line.op, line.regimes[0].op) == (4 * 35 * 4, "concat", "concat")


def test_a_graph_without_ops_holds_what_it_is_given():
    with cg.Graph("g") as g:
        g.output(g.param("w", (B, 7)))
    line = cg.timeline(g)
    assert [(m.op, m.phase, m.bytes) for m in line.moments] == [("", "forward", 28 * B)]
    assert [(r.formula, r.op) for r in line.regimes] == [(28 * B, None)]
    bound = cg.timeline(g, B=3)
    assert (bound.peak, bound.by_role, bound.regimes[0].op, bound.regimes[0].phase) == (84, {"param": 84}, None, None)


@pytest.mark.parametrize("ask", [cg.peak_memory, cg.timeline, cg.lifetimes, cg.param_count, cg.costs])
@pytest.mark.parametrize("wrong", [None, 3, "mlp", {}])
def test_what_is_no_graph_is_refused(ask, wrong):
    with pytest.raises(cg.GraphError, match="expected a"):
        ask(wrong)


def test_the_slices_that_a_scan_stacks_are_there_until_its_last_reader():
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
