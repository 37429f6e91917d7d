"""Passing a torch tensor or module in place of a graph's gives an error with the type and the remedy."""

import pytest
import torch

import costgraph as cg

B = cg.dims("B")
DATA, MODULE = torch.zeros(2, 3), torch.nn.Linear(3, 3)
HINT = "(costgraph.torch.trace makes a graph of a module, Graph.input a tensor)"


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda g, x: cg.relu(DATA), f"a torch.Tensor {HINT}"),
        (lambda g, x: cg.softmax(DATA), f"a torch.Tensor {HINT}"),
        (lambda g, x: cg.linear(DATA, "a b -> a c", c=2), f"a torch.Tensor {HINT}"),
        (lambda g, x: cg.linear(x, "a b -> a c", c=DATA), f"a torch.Tensor {HINT}"),
        (lambda g, x: cg.linear(x, "a b -> a c", c=3, weight=MODULE.weight), "a torch.nn.parameter.Parameter"),
        (lambda g, x: x + DATA, f"a torch.Tensor {HINT}"),
        (lambda g, x: cg.ops.concat([x, DATA], 0), "torch.Tensor"),
        (lambda g, x: g.output(DATA), f"a torch.Tensor {HINT}"),
        (lambda g, x: cg.einsum(x, DATA, "a b, c b -> a c"), "got (Tensor, torch.Tensor, str)"),
        (lambda g, x: x @ DATA, "@ of Tensor and torch.Tensor"),
        (lambda g, x: cg.flops(MODULE), f"a torch.nn.modules.linear.Linear {HINT}"),
        (lambda g, x: cg.report(MODULE), "torch.nn.modules.linear.Linear"),
    ],
)
def test_torch_tensors_are_named_in_errors(call, kind):
    with cg.Graph("g") as g:
        x = g.input("x", (B, 3))
        with pytest.raises(cg.CostGraphError) as caught:
            call(g, x)
        g.output(cg.relu(x))
    assert kind in str(caught.value)
    assert "\n" not in str(caught.value)
