"""Sizes that remember what was made of them: a run asks for the same products and comparisons again and again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import sympy
from torch.fx.experimental.sym_node import SymNode

__all__ = ["Node", "remembering"]

#: Operations of two sizes; those of one are rare.
_BINARY = (
    "add", "sub", "mul", "mod", "eq", "ne", "gt", "lt", "ge", "le", "and_", "or_", "int_floordiv", "sym_min", "sym_max",
)  # fmt: skip


class Node(SymNode):
    """A size as torch has it, whose operations are worked out once for each pair of operands."""

    def wrap_int(self, num: int) -> SymNode:
        """Return a number that meets a size."""
        known = _known(self)
        if num not in known:
            known[num] = remembering(super().wrap_int(num))
        return known[num]

    def neg(self) -> SymNode:
        """Return a size with the other sign."""
        return remembering(super().neg())

    def statically_known_true(self, file: str, line: int) -> bool:
        """Whether it holds of all sizes: none is above the end of a slice `:`, which is no call then, as in any run."""
        if isinstance(self.expr, sympy.Le) and self.expr.rhs == sys.maxsize:
            return True
        return bool(super().statically_known_true(file, line))


def _known(node: SymNode) -> dict[Any, SymNode]:
    """Return what is remembered of all sizes of a run."""
    known: dict[Any, SymNode] = getattr(node.shape_env, "known_nodes")  # noqa: B009  # of the tracer's own shapes
    return known


def remembering(node: SymNode) -> SymNode:
    """Let a size remember what is made of it: a third of the time of a run goes into working that out again."""
    if type(node) is SymNode:
        node.__class__ = Node
    return node


def _remembered(name: str) -> Callable[[Node, Any], Any]:
    plain = getattr(SymNode, name)

    def operation(self: Node, other: Any) -> Any:
        shapes: Any = self.shape_env  # the tracer's own
        if not isinstance(other, SymNode) or shapes is None:
            return plain(self, other)
        # an expression of numbers alone does not say of which type they are
        key = (name, self._expr, self.pytype, other._expr, other.pytype)
        known = _known(self)
        if key not in known:
            made = remembering(plain(self, other))
            known[key] = shapes.padding(made) if name == "mod" else made
        return known[key]

    return operation


for _name in _BINARY:
    setattr(Node, _name, _remembered(_name))
