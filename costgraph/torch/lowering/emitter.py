"""Calls of torch written down in an fx graph; each is tried on meta tensors at once, which tells layouts and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...algebra.polynomial import Poly
from ...bind.evaluate import answer
from ...errors import BindingError
from ...graph.graph import Graph
from ...graph.sizes import bindings, known_names
from ...transforms.rewrite import bound

__all__ = ["Emitter", "Numbers"]


class Numbers:
    """Numbers for the formulas of a graph.

    BindingError if a size is left open, or is none.
    """

    def __init__(self, graph: Graph, dims: Mapping[str, object]) -> None:
        self.values = bindings(graph, dims)
        known = {name for name, p in self.values.items() if p.constant is not None}
        missing = sorted(known_names(graph) - known)
        if missing:
            raise BindingError(
                f"lower of graph {graph.name!r}: {', '.join(missing)} not bound, expected a size for each"
            )
        self._found: dict[Poly, int] = {}

    def __call__(self, p: Poly) -> int:
        """Return the value of a size."""
        if p not in self._found:
            self._found[p] = int(p.bind(self.values).constant)  # type: ignore[arg-type]  # all symbols are bound
        return self._found[p]

    def of(self, sizes: Sequence[Poly]) -> tuple[int, ...]:
        """Return the values of several sizes."""
        return tuple(map(self, sizes))

    def fact(self, value: Any) -> Any:
        """Return a fact of an op with numbers in the place of formulas."""
        return _plain(bound(value, self.values))


def _plain(value: Any) -> Any:
    if isinstance(value, Poly):
        return answer(value)
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


class Emitter:
    """Writes calls into an fx graph and knows the shape, format and strides of what they return.

    On `device` tensors are made that no other tensor tells the device of.
    """

    def __init__(self, device: torch.device) -> None:
        self.graph = fx.Graph()
        self.device = device
        self._shadows: dict[fx.Node, Any] = {}

    def source(self, node: fx.Node, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Note what an input or parameter looks like."""
        self._shadows[node] = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
        return node

    def shadow(self, node: Any) -> Any:
        """Return the meta tensor that stands for a node, or for each node inside."""
        return fx.node.map_arg(node, self._shadows.__getitem__)

    def tried(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on meta tensors alone."""
        options = kwargs | ({"device": torch.device("meta")} if "device" in kwargs else {})
        with torch.no_grad():
            return function(*self.shadow(args), **self.shadow(options))

    def call(self, function: Callable[..., Any], *args: Any, like: Any = None, **kwargs: Any) -> Any:
        """Write a call down; `like` is what it returns, where that is not found out by calling it."""
        made = self.tried(function, *args, **kwargs) if like is None else like
        node = self.graph.call_function(function, args, kwargs)
        self._shadows[node] = made
        return node
