"""Layers of `quantize_dynamic`: their packed weights have no dense tensors, which a run takes in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["unpack_linears"]

_LIBRARY: Any = torch.library.Library("costgraph", "DEF")  # type: ignore[no-untyped-call]  # torch has no types for it
_LIBRARY.define("linear_dynamic(Tensor input, Tensor weight, Tensor? bias) -> Tensor")


def _result(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty([*input.shape[:-1], weight.shape[0]])


torch.library.register_fake("costgraph::linear_dynamic", _result, lib=_LIBRARY)


def _packed(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    for m in module.modules():
        if type(m).__module__.startswith("torch.ao.nn.") and ".dynamic." in type(m).__module__:
            unpack = getattr(getattr(m, "_packed_params", None), "_weight_bias", None)
            if unpack is not None:
                yield m, unpack


def unpack_linears(module: nn.Module) -> None:
    """Give each dynamically quantized linear layer its weights as parameters without data, and a call of them.

    Weights stay in their format: 8 bits, or fp16. The layers are as before once what `borrowed` has met is restored.
    """
    for m, unpack in _packed(module):
        with _disable_current_modes():
            weight, bias = unpack()
        dtype = torch.int8 if weight.is_quantized else torch.float16
        m._parameters["weight"] = nn.Parameter(torch.empty(tuple(weight.shape), dtype=dtype), requires_grad=False)
        m._parameters["bias"] = None
        if bias is not None:
            m._parameters["bias"] = nn.Parameter(torch.empty(tuple(bias.shape)), requires_grad=False)
        m.__dict__["forward"] = partial(_forward, m, "ReLU" in type(m).__name__)


def _forward(m: nn.Module, positive: bool, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.costgraph.linear_dynamic(x, m._parameters["weight"], m._parameters["bias"])
    return made.relu_() if positive else made
