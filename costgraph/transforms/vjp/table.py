"""The table of vector-Jacobian rules, and what a rule is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ...errors import UnsupportedError
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.registry import adding

__all__ = ["RULES", "Pull", "Rule", "rule_of", "vjp"]


@dataclass(frozen=True)
class Pull:
    """What a vector-Jacobian rule is given: an op of the forward pass and the gradients of its results."""

    op: Op
    """op of the forward pass"""
    grads: tuple[Tensor | None, ...]
    """gradient of each result, of its shape; None where there is none, one of them at least is a tensor"""
    needs: tuple[bool, ...]
    """for each operand whether its gradient is wanted"""
    saved: Callable[[Tensor], Tensor]
    """what stands for an operand or result of the op in the backward pass: asking for it is what saves it"""


#: Adds ops to the graph that is open and returns the gradient of each operand, None where none is wanted or it is zero.
Rule = Callable[[Pull], Sequence[Tensor | None]]

_rules: dict[str, Rule] = {}
#: Rule of each op kind, by its name.
RULES: Mapping[str, Rule] = MappingProxyType(_rules)


def vjp(kind: str) -> Callable[[Rule], Rule]:
    """Register the vector-Jacobian rule of an op kind: `@costgraph.vjp("my_kind")`.

    Parameters
    ----------
    kind : str
        Name of the op kind.

    Returns
    -------
    callable
        Decorator of the rule, a function `rule(pull)` that adds ops and returns a gradient or None for each operand.

    Raises
    ------
    GraphError
        If the kind has a rule already.
    """
    return adding(_rules, "a vector-Jacobian rule", kind)


def rule_of(op: Op) -> Rule:
    """Return the rule of an op's kind.

    Raises
    ------
    UnsupportedError
        If it has none.
    """
    if op.kind.name not in _rules:
        raise UnsupportedError(
            f"backward of {op.name!r}: op kind {op.kind.name!r} has no vector-Jacobian rule, expected one from "
            f"costgraph.vjp"
        )
    return _rules[op.kind.name]
