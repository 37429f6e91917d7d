"""Data-dependent branches: those with a known answer, and `choose` for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import costgraph as cg
from costgraph.errors import GraphError, UnsupportedError
from costgraph.torch import trace

X = torch.zeros(3, 8)


class Program(nn.Module):
    """A function as a module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return x @ x.T if self.call(x) else x


def _matmuls(call: Callable[..., Any], **options: Any) -> Any:
    return cg.matmul_flops(trace(Program(call), X, dims=[("N", None)], **options), N=5)


BOTH = 2 * 5 * 5 * 8


@pytest.mark.parametrize(
    ("call", "taken"),
    [
        (lambda x: torch.equal(x, x), True),
        (lambda x: torch.equal(x, x.view(x.shape)), True),
        (lambda x: x.equal(x[:1]), False),
        (lambda x: torch.equal(x, x.T), False),
        (lambda x: torch.equal(x, x.unsqueeze(0)), False),
    ],
)
def test_data_independent_equality_is_decided(call: Callable[..., Any], taken: bool):
    assert _matmuls(call) == BOTH * taken


@pytest.mark.parametrize(
    ("call", "name", "yes", "no"),
    [
        (lambda x: torch.equal(x, x + 1), "equal", True, False),
        (lambda x: torch.rand(1).item() <= 0.1, "rand", 0.05, 0.5),
        (lambda x: torch.rand(1) <= 0.1, "le", True, False),
        (lambda x: (x > 0).all(), "all", True, False),
        (lambda x: (x > 0).any().item(), "any", True, False),
        (lambda x: float(x.abs().max().double()) > 3, "max", 4, 2),
        (lambda x: x.sum()[None][0].item() > 3, "sum", 4, 2),
        (lambda x: int(x.argmax()) == 3, "argmax", 3, 2),
    ],
)
def test_branch_error_suggests_a_working_choose_argument(call: Callable[..., Any], name: str, yes: float, no: float):
    with pytest.raises(UnsupportedError, match=rf"choose=\{{'{name}': ") as error:
        _matmuls(call)
    advised = eval(str(error.value).partition("choose=")[2].partition("}")[0] + "}")  # the error's own text
    _matmuls(call, choose=advised)
    assert _matmuls(call, choose={name: yes}) == BOTH
    assert _matmuls(call, choose={name: no}) == 0


def test_layer_drop_takes_the_chosen_branch():
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if not (self.training and torch.rand(1).item() <= 0.1):
                    x = layer(x)
            return x.sum()

    for drawn, kept in ((0.05, 0), (0.5, 3)):
        g = trace(Drop(), X, dims=[("N", None)], choose={"rand": drawn})
        assert cg.matmul_flops(g, N=5) == kept * 2 * 5 * 64


def test_choose_accepts_only_numbers():
    with pytest.raises(GraphError, match="choose maps 'rand' to 'half'; expected op names with a number"):
        _matmuls(lambda x: True, choose={"rand": "half"})
