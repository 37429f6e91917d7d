"""A multilayer perceptron: an input layer, L hidden layers and an output layer, with ReLU between them.

Sizes: `NeuralNetwork` of the PyTorch tutorial "Quickstart", images of 28 x 28 in ten classes.
"""

from __future__ import annotations

import costgraph as cg

from .family import Family, Preset


def mlp(name: str, attention: str, dropout: float, dtype: str, eager_ops: bool = False) -> cg.Graph:
    """Declare an MLP: features (B, D) to logits (B, C); there is no attention, and `eager_ops` has no effect."""
    B, D, F, L, C = cg.dims("B D F L C")

    def hidden(x: cg.Tensor, name: str = "linear") -> cg.Tensor:
        return cg.dropout(cg.relu(cg.linear(x, "b d -> b f", f=F, bias=True, name=name)), dropout)

    with cg.Graph(name, dtype=dtype) as g:
        x = hidden(g.input("x", (B, D)), "first")
        x = cg.repeat(L, hidden, x, name="layers")
        g.output(cg.linear(x, "b f -> b c", c=C, bias=True, name="head"))
        g.loss = "cross_entropy"
    return g


FAMILIES = (Family(mlp, {"mlp": Preset({"D": 784, "F": 512, "L": 1, "C": 10})}, eager_ops=True),)
