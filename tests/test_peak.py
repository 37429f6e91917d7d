import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import costgraph as cg
from costgraph import BindingError

B, D, F, K, L = cg.dims("B D F K L")


def worked():
    with cg.Graph("worked") as g:
        h = cg.einsum(g.input("x", (B, D)), g.param("w1", (D, F)), "b d, d f -> b f", name="first")
        g.output(cg.einsum(cg.relu(h), g.param("w2", (F, K)), "b f, f k -> b k", name="second"))
    return g


def test_the_worked_example_has_its_two_regimes():
    peak = cg.peak_memory(worked())
    fixed = 4 * (D * F + F * K + B * D)
    found = {r.op: (r.formula - fixed).expand() for r in cg.regimes(peak)}
    assert found == {"relu": 8 * B * F, "second": 4 * B * F + 4 * B * K}


@pytest.mark.parametrize(("b", "d", "f", "k"), [(2, 3, 5, 7), (2, 3, 7, 5), (11, 3, 5, 5), (1, 1, 1, 1)])
def test_the_worked_example_bound(b, d, f, k):
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


def test_what_holds_the_peak_needs_numbers():
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


def test_block_formats_take_their_scales_along():
    with cg.Graph("g") as g:
        g.output(g.param("w", (7, 64), dtype="mxfp8"))
    assert cg.peak_memory(g) == 7 * 64 + 7 * 2  # a scale of 8 bits for 32 elements


OPS = ("tanh", "relu_in_place", "add", "view", "slice", "matmul", "reduce", "concat", "copy")


@st.composite
def programs(draw):
    count = draw(st.integers(1, 14))
    steps = [(draw(st.sampled_from(OPS)), draw(st.integers(0, 99)), draw(st.integers(0, 99))) for _ in range(count)]
    outputs = draw(st.lists(st.integers(0, 99), max_size=3))
    return steps, outputs


def build(program, size):
    """A random graph of square matrices: tensors that an op in place has overwritten are left alone."""
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
    symbolic = build(program, D)  # a symbol and a number larger than 1 decide views alike
    assert cg.peak_memory(symbolic, D=size + 1) == oracles.peak(build(program, size + 1))


def test_loops_are_played_out_in_a_bound_timeline():
    with cg.Graph("g") as g:
        g.output(cg.repeat(L, lambda x: cg.tanh(cg.relu(x)), g.input("x", (B,)), name="layers"))
    line = cg.timeline(g, B=3, L=5)
    assert len(line.moments) == 10
    assert line.moments[-1].op == "layers/tanh[4]"
    assert line.peak == cg.peak_memory(g, B=3, L=5) == 4 * 3 * 3  # the input, and what an op reads and writes


def test_a_timeline_names_the_op_even_where_one_case_is_left():
    B, D = cg.dims("B D")
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B, D))))
    shape = cg.timeline(g)
    assert [(r.formula, r.op, r.phase) for r in shape.regimes] == [(8 * B * D, "relu", "forward")]  # input and output
    assert (shape.op, shape.phase) == ("relu", "forward")
    assert [(r.formula, r.op) for r in cg.timeline(g, B=2, D=3).regimes] == [(48, "relu")]
