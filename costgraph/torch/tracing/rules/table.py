"""The table of aten ops: a rule for each name, found by the call."""

from __future__ import annotations

from collections.abc import Callable

from ....ops.registry import adding
from ..call import Call, Counts

__all__ = ["RULES", "Rule", "rule"]

#: What a call costs.
Rule = Callable[[Call], Counts]

#: Rules by the name of the op, or by name and overload such as `max.other` where overloads are different functions.
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ops by name.

    Parameters
    ----------
    *names : str
        Names of aten ops as `Call.name` has them, each also with an overload behind a dot.

    Returns
    -------
    callable
        A decorator that leaves the rule as it is.

    Raises
    ------
    GraphError
        If a name has a rule already.

    Examples
    --------
    >>> from costgraph.torch.tracing.call import Counts
    >>> from costgraph.torch.tracing.rules import RULES, rule
    >>> @rule("my_activation")
    ... def my_activation(call):
    ...     return Counts(pointwise=3 * call.out.numel)
    >>> RULES.pop("my_activation") is my_activation
    True
    """
    return adding(RULES, "a rule", *names, what="op of torch")
