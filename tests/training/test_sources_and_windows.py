"""Training steps with input gradients, poolings, and splits."""

import numpy as np
import pytest

import costgraph as cg

B, C, D, L = cg.dims("B C D L")


def test_input_with_gradient_is_no_parameter():
    def model(grad):
        with cg.Graph("g") as g:
            y = cg.linear(g.input("x", (B, D), grad=grad), "b d -> b e", e=D)
            g.output(cg.reduce(y, "b e -> ", "sum"))
        return g

    plain, wanted = (cg.training_step(model(grad)) for grad in (False, True))
    assert cg.matmul_flops(plain) == 4 * B * D**2
    assert cg.matmul_flops(wanted) == 6 * B * D**2
    assert {t.name for t in wanted.gradients} == {"x", "linear/weight"}
    assert cg.param_count(wanted) == cg.param_count(plain)


def pooled(depth=None):
    def layer(x):
        x = cg.conv(x, "b c h w -> b o h w", window=(3, 3), padding=1, o=C, name="conv")
        return cg.nn.pool(x, "max", window=3, stride=1, padding=1, name="pool")

    with cg.Graph("g") as g:
        x = g.input("x", (B, C, 8, 8))
        x = layer(x) if depth is None else cg.repeat(depth, layer, x, name="layers")
        g.output(cg.reduce(x, "b c h w -> ", "mean"))
    return g


def test_max_pooling_saves_input_and_indices():
    layer = 64 * B * C
    # the convolution reads the graph input; the pooling input is saved for its shape
    assert cg.saved_bytes(cg.training_step(pooled()))[""] == 4 * layer + 8 * layer
    assert cg.saved_bytes(cg.training_step(pooled(L)))["layers"] == 4 * layer + 4 * layer + 8 * layer
    again = cg.training_step(pooled(L), checkpoint=cg.every_block())
    assert cg.saved_bytes(again)["layers"] == 4 * layer
    forward = next(op for op in pooled().ops if op.kind.name == "pool")
    assert len(forward.results) == 1  # without a backward pass no op reads indices


def test_pooling_gradient_values():
    torch = pytest.importorskip("torch")
    from costgraph.testing.interpreter import run

    with cg.Graph("g", dtype="fp64") as g:
        x = g.param("x", (2, 3, 7, 5))
        y = cg.nn.pool(x, "max", window=3, stride=2, padding=1)
        g.output(cg.reduce(y * y, "b c h w -> ", "sum"))
    step = cg.backward(g)
    values = np.random.default_rng(0).permutation(210).reshape(2, 3, 7, 5).astype(float)
    result = run(step, {"x": values})
    theirs = torch.tensor(values, requires_grad=True)
    (torch.nn.functional.max_pool2d(theirs, 3, 2, 1) ** 2).sum().backward()
    assert np.allclose(result.gradients["x"], theirs.grad.numpy())


def test_split_gradients_are_concatenated_in_its_scope():
    def layer(x):
        with cg.scope("half"):
            a, b = cg.ops.split(x, (D, D))
            return cg.ops.concat([cg.relu(a), b], -1)

    with cg.Graph("g") as g:
        x = cg.linear(g.input("x", (B, D)), "b d -> b e", e=2 * D)
        g.output(cg.reduce(cg.repeat(L, layer, x, name="layers"), "b d -> ", "sum"))
    step = cg.backward(g)
    (joined,) = [op for op in step.walk() if op.kind.name == "concat" and op.phase == "backward"]
    assert joined.scope == "layers/half"
