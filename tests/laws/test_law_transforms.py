"""Transforms preserve values on drawn graphs: the interpreter runs both graphs on equal inputs."""

import numpy as np
import pytest
from budget import drawing, without_calls
from hypothesis import given

import costgraph as cg
from costgraph import testing
from costgraph.ir.graph import known_names

A, B, D, L, N = cg.dims("A B D L N")
LOOPS = ("repeat", "pointwise", "einsum", "rearrange", "slice", "reduce")
CHAINS = ("pointwise", "reduce", "dropout", "kernel", "expand", "rearrange", "repeat")

drawn = drawing(60)


def base(name):
    """Return a tensor's name before its loop was unrolled."""
    return name.split(".i")[0]


def _used(size, point):
    return {s.name: point[s.name] for s in getattr(size, "free_symbols", ())}


def inputs_of(graph, point):
    """Return a value per floating input and parameter, a function of its name, equal in all iterations."""
    out = {}
    for body in graph.bodies():
        for t in body.tensors:
            if t.producer is None and t.role != "formal" and t.dtype.kind == "float":
                shape = tuple(int(cg.evaluate(n, **_used(n, point))) for n in t.shape)
                seed = list(base(t.name).encode())
                out[t.name] = np.random.default_rng(seed).uniform(0.5, 2, shape)
    return out


def same_values(one, other, point):
    points = [{n: point[n] for n in known_names(g)} for g in (one, other)]
    first, second = (testing.run(g, inputs_of(g, point), **p) for g, p in zip((one, other), points, strict=True))
    for mine, expected in zip(first.outputs, second.outputs, strict=True):
        assert mine.shape == expected.shape
        assert np.allclose(mine, expected, rtol=1e-9, atol=0, equal_nan=True)
    return first, second


def holds_fused(graph, fused, point):
    """Check equal values, FLOPs and parameters, and that bytes neither grow nor exceed the interpreter's count."""
    before, after = same_values(graph, fused, point)
    assert (after.matmul, after.pointwise, after.transcendental) == (
        before.matmul, before.pointwise, before.transcendental,
    )  # fmt: skip
    for ask in (cg.flops, cg.matmul_flops, cg.param_count, cg.param_bytes):
        assert ask(fused, **point) == ask(graph, **point), ask.__name__
    assert cg.bytes_moved(fused, **point) <= cg.bytes_moved(graph, **point)
    assert (fused.defaults, fused.relations.relations) == (graph.defaults, graph.relations.relations)
    assert [(t.dtype, t.shape) for t in fused.outputs] == [(t.dtype, t.shape) for t in graph.outputs]


@drawn
@given(case=without_calls(testing.graphs(most=9, kinds=CHAINS)))
def test_a_fused_graph_computes_the_same_and_moves_no_more(case):
    holds_fused(case.graph, cg.fuse(case.graph), case.point)


@drawn
@given(case=without_calls(testing.graphs(most=7)))
def test_any_graph_fused_computes_the_same_and_moves_no_more(case):
    holds_fused(case.graph, cg.fuse(case.graph), case.point)


@drawing(25)
@given(case=without_calls(testing.graphs(most=7, kinds=CHAINS)))
def test_a_fused_graph_keeps_all_laws(case):
    testing.check(cg.fuse(case.graph), **case.point)


@drawn
@given(case=testing.graphs(most=4, kinds=LOOPS))
def test_an_unrolled_graph_computes_the_same(case):
    flat = cg.unroll(case.graph, **case.point)
    assert not any(op.loop is not None for op in flat.walk())
    if any(op.kind.name == "empty" for op in flat.ops):
        return  # a stack is filled by the writers of its slices, which its reader does not name
    before, after = same_values(case.graph, flat, case.point)
    assert (after.flops, after.params, after.param_bytes) == (before.flops, before.params, before.param_bytes)
    assert after.bytes_moved == before.bytes_moved
    assert after.peak == before.peak


def test_viewed_chain_results_keep_their_layout():
    with cg.Graph("turned") as g:
        y = cg.tanh(cg.relu(cg.rearrange(g.input("x", (A, B)), "a b -> b a")))
        g.output(cg.rearrange(y, "b a -> (a b)"), cg.rearrange(y, "b a -> (a b) 1"))
    # relu and tanh read and write A*B each, the outputs are views; dense results would need two copies
    assert cg.bytes_moved(g, A=3, B=5) == 4 * 4 * 3 * 5
    fused = cg.fuse(g)
    assert cg.bytes_moved(fused, A=3, B=5) == 2 * 4 * 3 * 5
    assert [t.strides for t in fused.outputs] == [t.strides for t in g.outputs]
    assert all(t.is_view for t in fused.outputs)


def test_unread_chain_is_not_fused():
    with cg.Graph("unread") as g:
        x = g.input("x", (A, B))
        cg.tanh(cg.relu(x))
        g.output(cg.tanh(cg.relu(2 * x)))
    fused = cg.fuse(g)
    assert [op.kind.name for op in fused.ops] == ["pointwise", "pointwise", "kernel"]
    # relu and tanh read and write A*B each, the kernel does so once
    assert cg.bytes_moved(fused, A=3, B=5) == 4 * (4 + 2) * 3 * 5


@pytest.mark.parametrize("count", [1, 2, 5])
def test_unrolled_stack_holds_each_iteration_slice(count):
    with cg.Graph("rnn") as g:

        def step(h, slices):
            x, y = slices
            new = cg.tanh(h * x) + y
            return new, (new, 2 * h)

        h, (news, olds) = cg.scan(L, step, g.input("h", (A, D)), (g.input("x", (L, A, D)), g.input("y", (L, D))))
        g.output(h, news, olds)
    point = {"A": 2, "D": 3}
    flat = cg.unroll(g, L=count)
    values = inputs_of(g, {**point, "L": count})
    expected = testing.run(g, values, L=count, **point).outputs
    result = testing.run(flat, values, **point)
    assert np.allclose(result.outputs[0], expected[0])
    for stack, whole in zip(flat.outputs[1:], expected[1:], strict=True):
        parts = [(t, v.array) for t, v in result.values if t.storage is stack.storage and t.ndim < stack.ndim]
        assert np.allclose(np.stack([a for _, a in parts]), whole)
        # slices are contiguous: slice i starts at i * A * D elements
        assert [t.offset.bind({}).expr for t, _ in parts] == [i * A * D for i in range(count)]
        assert all(t.strides == parts[0][0].strides for t, _ in parts)


def test_fused_training_step_keeps_all_laws():
    with cg.Graph("conv") as g:
        x = g.input("x", (B, 3, 3, 2))
        y = cg.conv(x, "b c h w -> b o h w", window=3, padding=1, o=2)
        y = cg.relu(cg.nn.batch_norm(y), inplace=True)
        y = cg.relu(cg.conv(y, "b c h w -> b o h w", window=3, padding=1, o=3, name="last") + x)
        g.output(cg.reduce(y, "b c h w -> ", "mean"))
    step = cg.training_step(g, optimizer=cg.SGD(momentum=0.9))
    fused = cg.fuse(step, epilogues=True)
    kernels = [{inner.name for inner in op.body.ops} for op in fused.ops if op.body is not None]
    assert {"last/conv", "add", "relu_1"} in kernels
    assert any("threshold_backward" in names and len(names) > 1 for names in kernels)
    assert cg.flops(fused, B=2) == cg.flops(step, B=2)
    assert cg.bytes_moved(fused, B=2) < cg.bytes_moved(step, B=2)
    testing.check(fused, B=2)
