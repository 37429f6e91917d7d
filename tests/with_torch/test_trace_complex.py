"""Gradients through complex numbers of traced forward passes: the library's own, beside autograd's."""

import pytest
import torch
from torch import nn

import costgraph as cg
from costgraph.torch import trace


class Program(nn.Module):
    """A function of what is given times a weight."""

    def __init__(self, function, *sizes):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(*sizes))

    def forward(self, x):
        return self.function(x * self.weight)


def test_a_recorded_call_of_complex_numbers_is_refused_and_not_passed_by():
    net = Program(lambda x: torch.polar(x, x).abs().sum(), 5, 7)
    with pytest.raises(cg.UnsupportedError, match=r"backward: .* is a recorded call of .*, expected declared ops"):
        cg.backward(trace(net, torch.rand(5, 7)))
