import pytest
from each import each

import costgraph as cg
from costgraph import GraphError, ShapeError

B, D, F, L, M, T = cg.dims("B D F L M T")
SIZES = {"B": 3, "D": 5, "F": 7}


# -- kernels -----------------------------------------------------------------------------------------------------


def test_kernel_intermediates_never_reach_memory():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        with cg.kernel("chain"):
            y = cg.relu(cg.tanh(2 * x))
        g.output(y)
    assert cg.flops(g) == 3 * B * D
    assert cg.bytes_moved(g) == 4 * B * D + 4 * B * D
    assert cg.peak_memory(g) == 8 * B * D


def test_tensors_read_outside_a_kernel_are_its_results():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        with cg.kernel("two"):
            a = cg.relu(x)
            b = cg.tanh(a)
        g.output(a + b)
    kernel = next(op for op in g.ops if op.name == "two")
    assert len(kernel.results) == 2
    assert cg.costs(g).filter(op="two").total().bytes == 4 * 3 * B * D  # x in, a and b out


def test_nested_kernels_merge_into_one():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        with cg.kernel("outer"):
            with cg.kernel("inner"):
                a = cg.relu(x)
            y = cg.tanh(a)
        g.output(y)
    assert cg.flops(g) == 2 * B * D
    assert cg.bytes_moved(g) == 8 * B * D


def test_params_declared_inside_a_kernel_belong_to_the_graph():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        with cg.kernel("scaled"):
            y = x * g.param("scale", (D,)) + g.input("shift", (D,))
        g.output(y)
    assert cg.param_count(g) == D
    assert cg.bytes_moved(g) == 4 * (2 * B * D + 2 * D)
    assert [t.name for t in g.tensors if t.producer is None] == ["x", "scaled/scale", "shift"]


def test_operand_view_returned_by_kernel_is_written():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        with cg.kernel("turn"):
            y = x.T
        g.output(y)
    assert not y.is_view or g.outputs[0].storage is not x.storage
    assert cg.bytes_moved(g) == 8 * B * D


def test_kernel_moves_only_the_slice_it_reads():
    with cg.Graph("g") as g:
        x = g.input("x", (7, 5))
        with cg.kernel("part"):
            y = cg.relu(x[:2])
        g.output(y)
    assert cg.bytes_moved(g) == 4 * 10 + 4 * 10


def test_kernel_workspace_is_live_during_the_kernel():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        with cg.kernel("work", workspace=100 * B):
            y = cg.relu(x)
        g.output(y)
    assert cg.peak_memory(g) == 8 * B * D + 100 * B


def test_kernel_without_a_used_result_raises():
    def build():
        with cg.Graph("g") as g:
            x = g.input("x", (B, D))
            with cg.kernel("lost"):
                cg.relu(x)
            g.output(x + 1)

    with pytest.raises(GraphError, match="kernel 'lost': no op outside reads its results"):
        build()


# -- scan --------------------------------------------------------------------------------------------------------


def recurrence(emit):
    with cg.Graph("g") as g:
        xs, h = g.input("xs", (T, B, D)), g.input("h", (B, F))
        wx, wh = g.param("wx", (D, F)), g.param("wh", (F, F))

        def cell(h, x):
            h = cg.tanh(cg.einsum(x, wx, "b d, d f -> b f") + cg.einsum(h, wh, "b f, f g -> b g"))
            return h, emit(h)

        last, ys = cg.scan(T, cell, h, xs, name="time")
        g.output(last)
        g.output(*(ys if isinstance(ys, tuple) else (ys,)))
    return g, last, ys


def test_scan_counts_every_step_and_stacks_states():
    g, last, ys = recurrence(lambda h: h)
    assert (last.shape, ys.shape) == ((B, F), (T, B, F))
    t, b, d, f = 5, 3, 7, 2
    sizes = {"T": t, "B": b, "D": d, "F": f}
    assert cg.matmul_flops(g, **sizes) == t * 2 * b * (d * f + f * f)
    assert cg.flops(g, **sizes) == t * (2 * b * (d * f + f * f) + 2 * b * f)
    step = (b * d + d * f + b * f) + (b * f + f * f + b * f) + 3 * b * f + 2 * b * f
    copied = 2 * b * f  # the carry lives on, so the stack gets a copy
    assert cg.bytes_moved(g, **sizes) == 4 * t * (step + copied)
    fixed = t * b * d + b * f + d * f + f * f + t * b * f  # xs, h, weights and the stack
    # peak: the old state and both products, or both products and their sum
    assert cg.peak_memory(g, **sizes) == 4 * (fixed + 3 * b * f)


def test_slices_written_directly_into_the_stack_are_not_copied():
    g, _, ys = recurrence(lambda h: h + 1)
    assert ys.shape == (T, B, F)
    assert not any(op.name.endswith("stack") for op in g.walk())


def test_scan_supports_zero_or_several_emits_and_no_reads():
    for emit, shapes in ((lambda h: None, []), (lambda h: (), []), (lambda h: (h + 1, h * 2), [(T, B, F)] * 2)):
        _, _, ys = recurrence(emit)
        assert [y.shape for y in ys] == shapes
    with cg.Graph("g") as g:
        (a, b), ys = cg.scan(T, lambda c, x: ((c[1], cg.relu(c[0])), x), (g.input("a", (B,)), g.input("b", (B,))))
        g.output(a, b)
    assert ys == ()
    assert cg.flops(g) == B * T


@each(
    ("call", "error", "text"),
    [
        (lambda x: cg.repeat(3, lambda x: cg.ops.cast(x, "bf16"), x), ShapeError,
         r"carry 1 enters the body as x.*fp32\) and leaves it as .*bf16\), expected the same"),
        (lambda x: cg.repeat(3, lambda x: cg.ops.concat([x, x], 0), x), ShapeError, "carry 1 enters the body as"),
        (lambda x: cg.repeat(3, lambda x: (x, x), x), GraphError, "expected 1 tensors as next carries"),
        (lambda x: cg.repeat(3, lambda x: None, x), GraphError, "expected 1 tensors as next carries"),
        (lambda x: cg.repeat(0, cg.relu, x), ShapeError, "count: axis 0: 0, expected a positive integer"),
        (lambda x: cg.repeat(2.5, cg.relu, x), ShapeError, "2.5"),
        (lambda x: cg.repeat(3, None, x), GraphError, "repeat: body is None, expected a function"),
        (lambda x: cg.repeat(3, cg.relu, 3), GraphError, r"repeat: x is 3, expected a tensor or a list, each a tensor"),
        (lambda x: cg.repeat(3, cg.relu, ()), GraphError, "expected tensors as initial carries"),
        (lambda x: cg.repeat(3, cg.relu, x, name="a b"), GraphError, "repeat 'a b': expected an identifier"),
        (lambda x: cg.scan(4, lambda c, x: (c, x), x[0], x), ShapeError, "expected a first axis of size 4"),
        (lambda x: cg.scan(3, lambda c, x: c, x[0], x), GraphError, r"expected a pair \(carry, y\)"),
        (lambda x: cg.scan(3, lambda c, x: (c, 3), x[0], x), GraphError, "y = 3, expected a tensor, a tuple or None"),
        (lambda x: cg.scan(3, lambda c, x: (c, (3,)), x[0], x), GraphError, "tensors as next carries"),
        (lambda x: cg.scan(3, 3, x[0], x), GraphError, "scan: body is 3, expected a function"),
        (lambda x: cg.kernel("a b").__enter__(), GraphError, "kernel 'a b': expected an identifier"),
        (lambda x: cg.kernel("k", workspace=-1).__enter__(), ShapeError, "workspace: -1, expected an amount"),
    ],
)  # fmt: skip
def test_errors_name_place_value_and_expectation(call, error, text):
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        with pytest.raises(error, match=text):
            call(x)


def test_body_tensors_are_invisible_outside_the_body():
    tensors = []
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        cg.repeat(3, lambda x: tensors.append(cg.relu(x)) or tensors[0], x, name="layers")
        with pytest.raises(
            GraphError, match="tensor 'layers/relu' is local to the body of 'layers'; return it from the body"
        ):
            cg.tanh(tensors[0])


def test_kernel_requires_an_open_graph():
    with pytest.raises(GraphError, match="no graph is open"), cg.kernel("k"):
        pass
