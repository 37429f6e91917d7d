"""What stands between layers: elementwise functions under the names that models give them."""

from __future__ import annotations

from ..graph.arguments import need_choice
from ..graph.tensor import Tensor
from ..ops.pointwise import pointwise

__all__ = ["gelu", "relu", "sigmoid", "silu", "tanh"]


def relu(x: Tensor, *, inplace: bool = False) -> Tensor:
    """max(x, 0): 1 FLOP an element."""
    return pointwise("relu", x, inplace=inplace)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU: 5 FLOPs an element with erf, 9 with `approximate="tanh"`, one of them transcendental."""
    need_choice("gelu: approximate", approximate, ("none", "tanh"))
    return pointwise("gelu" if approximate == "none" else "gelu_tanh", x)


def silu(x: Tensor, *, inplace: bool = False) -> Tensor:
    """X / (1 + exp(-x)): 4 FLOPs an element, one of them transcendental."""
    return pointwise("silu", x, inplace=inplace)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)): 4 FLOPs an element, one of them transcendental."""
    return pointwise("sigmoid", x)


def tanh(x: Tensor) -> Tensor:
    """tanh(x): one transcendental an element."""
    return pointwise("tanh", x)
