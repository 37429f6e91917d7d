"""Copying a graph op by op: names, scopes, bodies, and replaced ops."""

import pytest

import costgraph as cg
from costgraph.transforms.rewrite import Rewriter

B, D, L, W = cg.dims("B D L W")


def layered():
    with cg.Graph("layered") as g:

        def layer(x):
            with cg.scope("mlp"):
                return cg.softmax(cg.linear(x, "b d -> b e", e=D, name="w"), name="soft")

        g.output(cg.relu(cg.repeat(L, layer, g.input("x", (B, D)), name="layers")))
    return g


def facts(g):
    return [(op.name, op.kind.name, op.scope, op.phase) for op in g.walk()], [
        [t.name for t in body.tensors] for body in g.bodies()
    ]


def test_copy_keeps_names_and_scopes():
    g = layered()
    assert facts(Rewriter().run(g)) == facts(g)
    assert (Rewriter().run(g).name, Rewriter().run(g, "other").name) == ("layered", "other")


def test_ops_of_copied_bodies_belong_to_the_copied_ops():
    copied = Rewriter().run(layered())
    (loop, _) = copied.ops
    inner = loop.body.ops[0].results[0]
    match = "is local to the body of 'layers'; return it from the body to use it outside"
    with pytest.raises(cg.GraphError, match=match), copied:
        copied.output(inner)
    for op in copied.walk():
        assert op.body is None or op.body.owner is op


def test_values_inside_copied_kernel_can_be_outputs():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        with cg.kernel("both"):
            y = cg.tanh(x)
            z = cg.relu(y)
        g.output(z)
    copied = Rewriter().run(g)
    inner = copied.ops[0].body.ops[0].results[0]
    with copied:
        copied.output(inner)
    assert cg.bytes_moved(copied, B=3, D=5) == 4 * 3 * (3 * 5)  # x is read, two results are written


def test_transforms_ignore_open_scope():
    g = layered()
    with cg.Graph("outer") as outer, cg.scope("a"):
        cg.unroll(g, L=2)
        outer.output(cg.relu(outer.input("x", (B,))))
    assert [op.name for op in outer.ops] == ["a/relu"]
    with cg.scope("a"):
        assert facts(cg.unroll(g, L=1)) == facts(cg.unroll(layered(), L=1))
        assert not any(op.name.startswith("a/") for op in cg.unroll(g, L=2).ops)


class Noting(Rewriter):
    """Record the ops that are copied."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, op, new, suffix=""):
        self.seen.append(op.name)
        super().emit(op, new, suffix)


def test_emitted_ops_are_validated():
    class Cutting(Rewriter):
        def emit(self, op, new, suffix=""):
            made = self.copy(op, new)
            made.results[0].graph.remove_edge(made, made.results[0])

    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B,))))
    with pytest.raises(cg.GraphError, match="is not connected to it, expected an edge"):
        Cutting().run(g)


def test_unchanged_ops_are_copied():
    g, noting = layered(), Noting()
    made = noting.run(g)
    assert facts(made) == facts(g)
    assert noting.seen == [op.name for op in g.walk()]


def test_kernels_capturing_overlapping_views_bind_sizes():
    with cg.Graph("g") as g:
        x = g.input("x", (W + 7,))
        first, second = x[:7], x[W : W + 7]
        with cg.kernel("sum"):
            y = first + second
        g.output(y)
    for w in (1, 3, 5, 11):
        flat = cg.unroll(g, W=w)
        assert cg.bytes_moved(flat) == cg.bytes_moved(g, W=w)
        (kernel,) = [op for op in flat.ops if op.body is not None]
        # the second view starts w elements after the first, for the outer op and for the inner ones
        assert [f.offset for f in kernel.body.formals] == [t.offset for t in kernel.operands] == [0, w]
