"""Costs of a call, from its rule or from the declared ops of its translation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from ....algebra.dominance import Relations
from ....algebra.polynomial import ZERO, Poly
from ....algebra.symbols import shown as quoted
from ....dtypes import DTYPES
from ....errors import CostGraphError, UnsupportedError
from ....ir.graph import Flops
from ....ops.uses import elements_read
from ..call import Call, Counts, Spec
from ..template import declared
from ..translations.table import TRANSLATIONS, translation_of
from .elementwise import complex_counts
from .table import RULES, combined
from .workspaces import workspace_of

__all__ = ["counts_of", "is_derived"]


def counts_of(call: Call, tags: Collection[Any] = (), relations: Relations | None = None) -> Counts:
    """Return the costs of a call.

    Parameters
    ----------
    call : Call
        The op and its arguments.
    tags : collection of torch.Tag
        Tags of the overload: an op that torch tags as pointwise and that has no rule counts 1 FLOP per element in its
        first result.
    relations : Relations, optional
        Known relations of sizes.

    Returns
    -------
    Counts
        FLOPs by kind, and bytes where an operand or a result is not accessed whole.

    Raises
    ------
    UnsupportedError
        If the op has no rule, or its rule does not cover these arguments.
    """
    op_name = f"aten::{call.name}.{call.overload}"
    cost_rule = RULES.get(f"{call.name}.{call.overload}") or RULES.get(call.name)
    reason, counts = "no cost rule", None
    try:
        counts = _by_rule(cost_rule, call, op_name) if cost_rule is not None else _derived(call, relations)
    except CostGraphError as error:
        reason = str(error)
        if cost_rule is not None or reason.startswith(op_name):
            raise
        reason = f"no op kind accepts these operands ({reason}), and there is no cost rule"
    if counts is None:
        if torch.Tag.pointwise not in tags or not call.results:
            raise UnsupportedError(
                f"{op_name}: {reason}; expected one of {len(RULES)} ops with a rule, or register one "
                f"under {call.name!r} with costgraph.torch.tracing.rules.rule"
            )
        counts = Counts(pointwise=call.out.numel)
    if any(t.dtype.kind == "complex" for t in (*call.operands, *call.results)):
        counts = complex_counts(call, counts)
    counts, kernel_workspace = _without_outs(call, counts), workspace_of(call)
    return replace(counts, workspace=counts.workspace + kernel_workspace) if kernel_workspace else counts


def _by_rule(cost_rule: Callable[[Call], Counts | None], call: Call, op_name: str) -> Counts | None:
    """Apply a rule; foreign errors become library errors that name the op."""
    try:
        return cost_rule(call)
    except CostGraphError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {quoted(str(error), 300)}"
        raise UnsupportedError(f"{op_name}: its cost rule failed on these arguments with {reason}") from error


def is_derived(call: Call) -> bool:
    """Whether a call's costs come from its translation."""
    names = (f"{call.name}.{call.overload}", call.name)
    return not any(n in RULES for n in names) and any(n in TRANSLATIONS for n in names)


def _derived(call: Call, relations: Relations | None) -> Counts | None:
    """Return the costs from a call's declared ops, whatever its dtypes; None without a translation.

    CostGraphError if no kind accepts the operands.
    """
    translation = translation_of(call.name, call.overload, ())
    if translation is None:
        return None
    operands = {t: i for i, t in enumerate(dict.fromkeys(call.operands))}
    real_specs = {t: _real(t) for t in (*operands, *call.results)}
    declaration = declared(
        translation,
        replace(call, results=tuple(real_specs[t] for t in call.results)),
        operands,
        [real_specs[t] for t in operands],
        relations,
    )
    if declaration is None:
        return None
    body, inputs, _ = declaration
    bytes_read: dict[Spec, Poly] = {}
    for t, x in zip(operands, inputs, strict=False):
        inner = body.adopt(x) if x in body.captured else None
        bytes_read[t] = ZERO if inner is None else elements_read(body, inner) * t.dtype.bytes
    flops = sum((op.kind.flops(op) for op in body.walk() if op.body is None), start=Flops())
    return combined(flops, reads=tuple(bytes_read[t] for t in call.operands))


def _real(t: Spec) -> Spec:
    """Return a spec with floating and complex dtypes replaced by fp32, whose ops are the same."""
    return Spec(t.sizes, t.strides, t.dtype if t.dtype.kind in ("int", "bool") else DTYPES["fp32"])


def _without_outs(call: Call, counts: Counts) -> Counts:
    """Exclude output tensors passed by the caller from the reads."""
    outs = {id(t) for name in ("out", "out0", "out1", "out2") if isinstance(t := call.get(name), Spec)}
    if not outs or counts.reads is not None:
        return counts
    reads = tuple(ZERO if id(t) in outs else t.bytes for t in call.operands)
    return replace(counts, reads=reads)
