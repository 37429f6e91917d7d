"""The table of vector-Jacobian rules, and what a rule is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from ...errors import UnsupportedError
from ...graph.op import Op, OpKind
from ...graph.tensor import Tensor
from ...notation.door import guarded
from ...ops.foreign import Foreign, refusal
from ...ops.registry import adding

__all__ = ["RULES", "Pull", "Rule", "rule_of", "vjp"]


K = TypeVar("K", bound=OpKind)


@guarded()
@dataclass(frozen=True)
class Pull(Generic[K]):
    """What a vector-Jacobian rule is given: an op of the forward pass and the gradients of its results."""

    op: Op
    """op of the forward pass"""
    grads: tuple[Tensor | None, ...]
    """gradient of each result, of its shape; None where there is none, one of them at least is a tensor"""
    needs: tuple[bool, ...]
    """for each operand whether its gradient is wanted"""
    saved: Callable[[Tensor], Tensor]
    """what stands for an operand or result of the op in the backward pass: asking for it is what saves it"""

    @property
    def kind(self) -> K:
        """Record of the op."""
        return self.op.kind  # type: ignore[return-value]  # a rule is given ops of its own kind


#: Adds ops to the graph that is open and returns the gradient of each operand, None where none is wanted or it is zero.
Rule = Callable[[Pull[K]], Sequence[Tensor | None]]

_rules: dict[type[OpKind], Rule[Any]] = {}
#: Rule of each op kind.
RULES: Mapping[type[OpKind], Rule[Any]] = MappingProxyType(_rules)


def vjp(*kinds: type[K]) -> Callable[[Rule[K]], Rule[K]]:
    """Register the vector-Jacobian rule of an op kind: `@costgraph.vjp(MyKind)`.

    Parameters
    ----------
    *kinds : subclass of OpKind
        Of which ops it is.

    Returns
    -------
    callable
        Decorator of the rule, a function `rule(pull)` that adds ops and returns a gradient or None for each operand:
        `pull.kind` is the record.

    Raises
    ------
    GraphError
        If the kind has a rule already.
    """
    return adding(_rules, "a vector-Jacobian rule", *kinds)


def rule_of(op: Op) -> Rule[Any]:
    """Return the rule of an op's kind.

    UnsupportedError if it has none.
    """
    if isinstance(op.kind, Foreign):
        raise refusal("backward", op, "trace with train=True")
    if type(op.kind) not in _rules:
        raise UnsupportedError(
            f"backward of {op.name!r}: op kind {op.kind.name!r} has no vector-Jacobian rule, expected one from "
            f"costgraph.vjp"
        )
    return _rules[type(op.kind)]
