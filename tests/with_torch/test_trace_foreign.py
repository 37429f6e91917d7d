"""Non-tensor objects of a program: a trace inspects only tensors, whatever methods their classes override."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import costgraph as cg
from costgraph.torch import trace

BASES = (tuple, list, dict, set, frozenset, deque, OrderedDict, object)
METHODS = (
    "__len__", "__eq__", "__ne__", "__iter__", "__bool__", "__contains__", "__getitem__", "__getattr__", "__repr__",
    "items", "keys", "values", "clear", "extend", "update", "__length_hint__",
)  # fmt: skip


class ForeignError(Exception):
    """An error in the program."""


def _raising(*args: object, **kwargs: object) -> Any:
    raise ForeignError(args[1:])


def _foreign(base: type, methods: list[str], *, lies: bool) -> Any:
    """Return an object whose class overrides methods of `base` by ones that raise, and optionally `__class__`."""
    body: dict[str, Any] = {} if base is dict or base is OrderedDict else dict.fromkeys(methods, _raising)
    if base is OrderedDict or base is dict:
        body = {m: _raising for m in methods if m != "__getitem__"}
    if "__eq__" in methods:
        body["__hash__"] = object.__hash__
    if lies:
        body["__class__"] = property(_raising)
    kind = type("Foreign", (base,), body)
    return kind() if base is object else kind({1: 2}) if issubclass(base, dict) else kind((1, 2))


class Holder(nn.Module):
    """A linear layer with attributes of any class."""

    def __init__(self, value: Any, where: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.own = {"attribute": value, "list": [value], "dict": {"key": value}}.get(where)
        self.returned = [value] if where == "returned" else []

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), self.returned


@settings(max_examples=40)
@given(
    st.sampled_from(BASES),
    st.lists(st.sampled_from(METHODS), unique=True),
    st.booleans(),
    st.sampled_from(["attribute", "list", "dict", "returned"]),
)
def test_objects_whose_methods_raise_do_not_stop_a_trace(base: type, methods: list[str], lies: bool, where: str):
    value = _foreign(base, methods, lies=lies and where != "attribute")  # torch itself reads its `__class__`
    holder = Holder(value, where)
    assert cg.matmul_flops(trace(holder, torch.zeros(3, 8), dims=[("N", None)]), N=5) == 2 * 5 * 32


@pytest.mark.parametrize("base", [list, dict, deque, OrderedDict])
def test_tensors_in_opaque_containers_are_found_and_restored(base: type):
    kind = type("Silent", (base,), {"__len__": lambda self: 0, "__iter__": lambda self: iter(())})
    weight = torch.randn(8, 4)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = kind({0: weight} if issubclass(base, dict) else [weight])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.held[0]
            self.held[0] = w * 2
            return x @ w

    module = Hidden()
    before = weight.clone()
    assert cg.matmul_flops(trace(module, torch.zeros(3, 8), dims=[("N", None)]), N=5) == 2 * 5 * 32
    assert module.held[0] is weight
    assert torch.equal(weight, before)
