"""Clipping, unscaling and zeroing of gradients against torch."""

import numpy as np
import pytest
from each import each
from update_graphs import SHAPES, draw, values

import costgraph as cg
from costgraph.optimizers import Slot, clip_grad_norm, unscale, zero_grad

torch = pytest.importorskip("torch")


def graph_of(step):
    with cg.Graph("g", "fp64") as g:
        slots = [Slot(g.param(f"w{i}", s), g.input(f"g{i}", s)) for i, s in enumerate(SHAPES)]
        made = step(slots)
        if isinstance(made, tuple):
            g.output(made[0])
    return g


def gradients(numbers):
    params = [torch.nn.Parameter(torch.tensor(numbers[f"w{i}"])) for i in range(len(SHAPES))]
    for i, p in enumerate(params):
        p.grad = torch.tensor(numbers[f"g{i}"])
    return params


@each("foreach", [False, True])
@each("most", [0.5, 1e3])  # clipped and unclipped
def test_gradient_clipping_matches_torch(most, foreach):
    numbers = draw()
    g = graph_of(lambda slots: clip_grad_norm(slots, most, foreach=foreach))
    counted, found = values(g, numbers)
    params = gradients(numbers)
    total = torch.nn.utils.clip_grad_norm_(params, most, foreach=foreach)
    np.testing.assert_allclose(counted.outputs[0], total.item(), rtol=1e-12)
    for i, p in enumerate(params):
        np.testing.assert_allclose(found[f"g{i}"], p.grad.numpy(), rtol=1e-12)
    assert counted.bytes_moved == cg.bytes_moved(g)
    assert counted.peak == cg.peak_memory(g)
    # 44 elements: square, sum and product; for the 3 norms sqrt, square and sum; sqrt, + eps, 1 / x, * max, min
    assert counted.flops == cg.flops(g) == 3 * 44 + 3 * 3 + 5


@each("bad", [None, np.inf, np.nan])
def test_unscaling_matches_torch(bad):
    numbers = draw()
    if bad is not None:
        numbers["g1"][2, 3] = bad
    g = graph_of(unscale)
    counted, found = values(g, {**numbers, "loss_scale": 8.0})
    params = gradients(numbers)
    flag = torch.zeros((), dtype=torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in params], flag, torch.tensor(1 / 8))
    assert counted.outputs[0] == flag.item() == (bad is not None)
    for i, p in enumerate(params):
        np.testing.assert_allclose(found[f"g{i}"], p.grad.numpy(), rtol=1e-12)
    # a check and a product per element, 44 in all, and the reciprocal
    assert counted.flops == cg.flops(g) == 2 * 44 + 1
    # gradients in place; each of 3 kernels reads both scalars; the flag, and the scale 4 -> 8 -> 8 -> 4
    assert counted.bytes_moved == cg.bytes_moved(g) == (8 + 8) * 44 + 3 * 8 + 4 + (4 + 8 + 8 + 8 + 8 + 4)


def test_unscale_with_existing_scale():
    with cg.Graph("g") as g:
        scale = g.input("scale", ())
        unscale([Slot(g.param("w", (7,)), g.input("g", (7,)))], scale)
    assert [t.name for t in g.tensors if t.role == "state"] == []


def test_zero_grad_clears_gradients():
    numbers = draw()
    g = graph_of(lambda slots: zero_grad(slots, set_to_none=False))
    counted, found = values(g, numbers)
    assert not any(found[f"g{i}"].any() for i in range(3))
    assert (cg.flops(g), cg.bytes_moved(g), counted.bytes_moved) == (0, 8 * 44, 8 * 44)
    assert graph_of(zero_grad).ops == []


def test_reading_overwritten_gradients_is_refused():
    def stale(slots):
        clip_grad_norm(slots, 1.0)
        zero_grad(slots, set_to_none=False)

    with pytest.raises(cg.GraphError, match="which 'clip_grad_norm/mul_1' has overwritten in place"):
        graph_of(stale)
