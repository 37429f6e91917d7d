from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import expand

import costgraph as cg
from costgraph import GraphError

B, D, F, L, M, T = cg.dims("B D F L M T")
SIZES = {"B": 3, "D": 5, "F": 7}


def residual(x, g):
    return x + cg.linear(cg.relu(cg.linear(x, "b d -> b f", f=F, name="up")), "b f -> b d", d=D, name="down")


def normed(x, g):
    return x + cg.nn.gated_mlp(cg.rms_norm(x), F)


def in_place(x, g):
    return cg.relu(cg.gelu(x), inplace=True)


def swapped(a, b, g):
    return b, cg.tanh(a)


def exchanged(a, b, g):
    cg.tanh(cg.tanh(a))
    return b, a


def passed(a, b, g):
    return cg.relu(a) + b, b


def rotated(a, b, c, g):
    return b, c, cg.relu(a) * c


def doubled(a, b, g):
    y = cg.relu(a + b)
    return y, y


def tall(x, g):
    wide = cg.linear(x, "b d -> b f", f=F, name="up")
    return cg.reduce(cg.tanh(wide) + 1, "b f -> b", "sum").producer and cg.linear(wide, "b f -> b d", d=D, name="down")


BODIES = {
    "residual": (residual, 1), "normed": (normed, 1), "in_place": (in_place, 1), "swapped": (swapped, 2),
    "exchanged": (exchanged, 2),
    "passed": (passed, 2), "rotated": (rotated, 3), "doubled": (doubled, 2), "tall": (tall, 1),
}  # fmt: skip


def program(body, carries, count, *, looped, first="op", after="carry"):
    """Build the same model with `cg.repeat` or with a Python loop."""
    with cg.Graph("g") as g:
        xs = [g.input(f"x{i}", (B, D)) for i in range(carries)]
        state = tuple(xs) if first == "input" else tuple(cg.gelu(x) for x in xs)
        before = state
        if looped:
            state = cg.repeat(count, lambda *xs: body(*xs, g), state, name="layers")
        else:
            for i in range(count):
                with cg.scope(f"layer{i}"):
                    made = body(*state, g)
                state = made if isinstance(made, tuple) else (made,)
        last = before[0] if after == "start" else state[0]
        g.output(cg.reduce(cg.tanh(last) + state[-1], "b d -> b", "sum"))
        if after == "outputs":
            g.output(*state)
    return g


def answers(g, **sizes):
    return cg.costs(g, **sizes).total(), cg.param_count(g, **sizes), cg.peak_memory(g, **sizes)


ENDS = list(product(["op", "input"], ["carry", "start", "outputs"]))


@pytest.mark.parametrize(("first", "after"), ENDS)
@pytest.mark.parametrize("name", BODIES)
def test_repeat_costs_match_python_loop(name, first, after):
    body, carries = BODIES[name]
    sizes = {k: v for k, v in SIZES.items() if k != "F" or name in ("residual", "normed", "tall")}
    looped = program(body, carries, L, looped=True, first=first, after=after)
    holds_from = cg.timeline(looped, **sizes).holds_from["L"]
    closed = cg.peak_memory(looped, **sizes)
    assert 1 <= holds_from <= 3 + 2 * carries
    for n in (1, 2, 3, 5, 8):
        loop = program(body, carries, n, looped=False, first=first, after=after)
        unrolled = answers(loop, **sizes)
        if name == "doubled":  # the Python loop sees that both carries are one tensor
            assert (cg.flops(looped, L=n, **sizes), cg.peak_memory(looped, L=n, **sizes)) == (
                cg.flops(loop, **sizes),
                unrolled[-1],
            )
        else:
            assert answers(looped, L=n, **sizes) == unrolled, n
        # loop traffic is a lower bound if carries are only forwarded
        fused = cg.bytes_moved(looped, fused=True, L=n, **sizes), cg.bytes_moved(loop, fused=True, **sizes)
        assert fused[0] <= fused[1], n
        assert fused[0] == fused[1] or carries > 1, n
        if n >= holds_from:
            value = cg.evaluate(closed, **({"L": n} if hasattr(closed, "free_symbols") else {}))
            # whether carries end in their original buffers depends on n; the formula takes the worse case
            assert value >= unrolled[-1] if name == "exchanged" else value == unrolled[-1], n


def test_closed_forms_hold_at_every_count():
    looped = program(residual, 1, L, looped=True)
    for question in (cg.flops, cg.bytes_moved, cg.param_count, cg.matmul_flops):
        formula = question(looped)
        for n in (1, 2, 5):
            unrolled = question(program(residual, 1, n, looped=False))
            assert formula.subs(L, n) - unrolled == 0


@st.composite
def bodies(draw):
    """Draw a random straight-line body over two carries: the operands of each op, and the values it returns."""
    ops = draw(
        st.lists(
            st.tuples(st.sampled_from(["tanh", "add", "linear", "wide"]), st.integers(0, 9), st.integers(0, 9)),
            min_size=1,
            max_size=5,
        )
    )
    return ops, draw(st.integers(0, 9)), draw(st.integers(0, 9))


def run(recipe, a, b, g):
    ops, first, second = recipe
    values = [a, b]
    for i, (kind, p, q) in enumerate(ops):
        x, y = values[p % len(values)], values[q % len(values)]
        if kind == "tanh":
            made = cg.tanh(x)
        elif kind == "add":
            made = x + y
        elif kind == "linear":
            made = cg.linear(x, "b d -> b e", e=D, name=f"w{i}")
        else:
            made = cg.linear(cg.relu(cg.linear(x, "b d -> b f", f=F, name=f"u{i}")), "b f -> b d", d=D, name=f"v{i}")
        values.append(made)
    rest = [v for i, v in enumerate(values) if i != first % len(values)]  # two carries are two tensors
    return values[first % len(values)], rest[second % len(rest)]


def only_exchanges(recipe):
    ops, first, second = recipe
    at = first % (len(ops) + 2)
    rest = [i for i in range(len(ops) + 2) if i != at]
    return (at, rest[second % len(rest)]) == (1, 0)


@given(bodies(), st.sampled_from(["op", "input"]), st.sampled_from(["carry", "start", "outputs"]))
@settings(max_examples=20, deadline=None)
def test_random_bodies_cost_what_the_same_loop_in_python_costs(recipe, first, after):
    def body(a, b, g):
        return run(recipe, a, b, g)

    looped = program(body, 2, L, looped=True, first=first, after=after)
    uses_f = any(kind == "wide" for kind, _, _ in recipe[0])
    sizes = {k: v for k, v in SIZES.items() if k != "F" or uses_f}
    holds_from = cg.timeline(looped, **sizes).holds_from["L"]
    closed = cg.peak_memory(looped, **sizes)
    for n in (1, 2, 3, 5, 8):
        unrolled = answers(program(body, 2, n, looped=False, first=first, after=after), **sizes)
        assert answers(looped, L=n, **sizes) == unrolled, n
        if n >= holds_from and not only_exchanges(recipe):
            assert cg.evaluate(closed, **({"L": n} if hasattr(closed, "free_symbols") else {})) == unrolled[-1], n


def test_nested_repeat_costs_multiply():
    def nested(count, inner, looped):
        with cg.Graph("g") as g:
            x = g.input("x", (B, D))

            def block(x):
                return x + cg.linear(x, "b d -> b e", e=D)

            def many(x):
                y = cg.repeat(inner, block, x, name="inner") if looped else x
                for i in range(0 if looped else inner):
                    with cg.scope(f"inner{i}"):
                        y = block(y)
                return cg.tanh(y)

            if looped:
                x = cg.repeat(count, many, x, name="outer")
            for i in range(0 if looped else count):
                with cg.scope(f"outer{i}"):
                    x = many(x)
            g.output(x)
        return g

    looped = nested(L, M, True)
    assert cg.param_count(looped) == L * M * D**2
    assert cg.matmul_flops(looped) == 2 * B * D**2 * L * M
    for n, m in ((1, 1), (1, 3), (2, 2), (4, 1), (3, 5), (5, 4)):
        unrolled = answers(nested(n, m, False), B=3, D=5)
        assert answers(looped, L=n, M=m, B=3, D=5) == unrolled


def test_captured_tensor_is_shared_by_iterations():
    with cg.Graph("g") as g:
        x, w = g.input("x", (B, D)), g.param("w", (D, D))
        g.output(cg.repeat(L, lambda x: cg.relu(cg.einsum(x, w, "b d, d e -> b e")), x, name="layers"))
    assert cg.param_count(g) == D**2
    assert cg.costs(g).filter(op="layers/einsum").total().read == expand(4 * L * (B * D + D**2))
    assert cg.bytes_moved(g, fused=True) == expand(4 * (2 * B * D + D**2))


def test_loop_may_overwrite_its_initial_carry():
    g = cg.Graph("g")
    x = cg.gelu(g.input("x", (B, D)))
    y = cg.repeat(L, lambda x: cg.relu(x, inplace=True), x, name="layers")
    g.output(y)
    assert cg.peak_memory(g) == 4 * B * D + 4 * B * D  # the input, and one storage for all iterations
    g.output(cg.tanh(x))
    with pytest.raises(GraphError, match="op 'tanh': reads 'gelu', which 'layers' has overwritten in place"):
        g.validate()


def test_body_returning_a_view_carries_a_dense_copy():
    with cg.Graph("g") as g:
        g.output(cg.repeat(L, lambda x: cg.relu(x).T, g.input("x", (D, D)), name="turn"))
    # relu reads and writes, then the copy reads and writes
    assert cg.bytes_moved(g) == 4 * 4 * L * D**2
