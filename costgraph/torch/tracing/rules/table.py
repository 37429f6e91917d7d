"""The table of aten ops: a rule for each name, found by the call."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from ....algebra.polynomial import ZERO
from ....errors import UnsupportedError
from ....ops.registry import adding
from ..call import Call, Counts, Spec
from .complex_numbers import complex_counts
from .workspaces import workspace_of

__all__ = ["RULES", "Rule", "counts_of", "rule"]

#: What a call costs.
Rule = Callable[[Call], Counts]

#: Rules by the name of the op, or by name and overload such as `max.other` where overloads are different functions.
RULES: dict[str, Rule] = {}

#: The shape of their result is in the data of their operands: no formula of sizes says what they cost.
DATA_DEPENDENT = frozenset({
    "_unique", "_unique2", "bincount", "masked_select", "nonzero", "unique_consecutive", "unique_dim",
})  # fmt: skip


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


def counts_of(call: Call, tags: Collection[Any] = ()) -> Counts:
    """Return what a call costs.

    Parameters
    ----------
    call : Call
        The op and its arguments.
    tags : collection of torch.Tag
        Tags of the overload: an op that torch calls pointwise and that no rule names counts 1 for each element of its
        first result.

    Returns
    -------
    Counts
        FLOPs by kind, and bytes where an operand or a result is not touched as a whole.

    Raises
    ------
    UnsupportedError
        If there is no rule for the op, or none for these arguments of it.
    """
    shown = f"aten::{call.name}.{call.overload}"
    found = RULES.get(f"{call.name}.{call.overload}") or RULES.get(call.name)
    if found is None:
        if call.name in DATA_DEPENDENT:
            raise UnsupportedError(
                f"{shown}: the shape of its result depends on the data, expected an op whose shapes follow from sizes; "
                f"write it with a mask, or with a size that is given"
            )
        if torch.Tag.pointwise not in tags or not call.results:
            raise UnsupportedError(
                f"{shown}: no rule says what it costs, expected one of {len(RULES)} ops that have one; register a rule "
                f"under {call.name!r} with costgraph.torch.tracing.rules.rule"
            )
        found = _each_once
    counts = found(call)
    if any(t.dtype.kind == "complex" for t in (*call.operands, *call.results)):
        counts = complex_counts(call, counts)
    counts, more = _without_outs(call, counts), workspace_of(call)
    return replace(counts, workspace=counts.workspace + more) if more else counts


def _each_once(call: Call) -> Counts:
    """Count 1 for each element."""
    return Counts(pointwise=call.out.numel)


def _without_outs(call: Call, counts: Counts) -> Counts:
    """Leave tensors out of the reads that a caller hands in for results."""
    outs = {id(t) for name in ("out", "out0", "out1", "out2") if isinstance(t := call.get(name), Spec)}
    if not outs or counts.reads is not None:
        return counts
    reads = tuple(ZERO if id(t) in outs else t.bytes for t in call.operands)
    return replace(counts, reads=reads)
