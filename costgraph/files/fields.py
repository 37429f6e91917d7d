"""From what a file says of an op to the record of its kind: every field is of the type that the record states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from ..algebra.symbols import shown
from ..errors import GraphError
from ..graph.call import Call
from ..graph.facts import hints
from ..graph.op import OpKind
from ..graph.tensor import Tensor
from ..notation.door import Rule, rule
from ..ops.index import Gather, Indexed

__all__ = ["of_version_1", "of_version_2", "typed"]

R = TypeVar("R", OpKind, Call)

_known: dict[type[OpKind | Call], dict[str, tuple[Rule, bool]]] = {}


def _rules(kind: type[OpKind | Call]) -> dict[str, tuple[Rule, bool]]:
    """Return of each field what it asks, and whether it has to be there."""
    if kind not in _known:
        found = hints(kind)
        _known[kind] = {f.name: (rule(found[f.name]), f.default is MISSING) for f in fields(kind)}
    return _known[kind]


def typed(kind: type[R], facts: Mapping[str, Any]) -> R:
    """Return a record, of fields that are of the right types, none missing.

    GraphError if a field is unknown, missing or of another type.
    """
    known, word = _rules(kind), "call" if kind is Call else kind.name
    odd = next((name for name in facts if name not in known), None)
    if odd is not None:
        raise GraphError(f"attribute {shown(odd)} of {word!r}, expected none but {', '.join(known)}")
    for name, (asked, needed) in known.items():
        if needed and name not in facts:
            raise GraphError(f"attribute {name!r} of {word!r} is missing, expected {asked.expected}")
    for name, value in facts.items():
        if not known[name][0].holds(value):
            raise GraphError(f"attribute {name!r} of {word!r} is {shown(value)}, expected {known[name][0].expected}")
    return kind(**facts)


def of_version_1(kind: type[OpKind], facts: Mapping[str, Any], operands: Sequence[Tensor]) -> dict[str, Any]:
    """Return the fields of a file of version 1.

    It said of each op that it works in place, called bytes `reads`, and had lookups of rows or along the last axis.
    """
    if issubclass(kind, Indexed):
        along = facts.get("mode") == "along" or facts.get("along") is True
        known = {("mode", "rows"), ("mode", "along")} if kind is Gather else {("along", True)}
        facts = {k: v for k, v in facts.items() if not (isinstance(v, str | bool) and (k, v) in known)}
        facts |= {"batch": max(operands[0].ndim - 1, 0)} if along and operands else {}
    names = {f.name for f in fields(kind)}
    renamed = {k: f"bytes_{v}" for k, v in (("reads", "read"), ("writes", "written")) if f"bytes_{v}" in names}
    needless = "inplace" not in names and facts.get("inplace") is True
    return {renamed.get(k, k): v for k, v in facts.items() if k != "inplace" or not needless}


def of_version_2(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an op of a file of version 1 or 2: what a trace saw of an op was said by a kind of its own, `aten`."""
    attrs = node.get("attrs")
    if node.get("kind") != "aten" or not isinstance(attrs, Mapping):
        return node
    called = {f.name for f in fields(Call)}
    call = {k: v for k, v in attrs.items() if k in called}
    return {**node, "kind": "foreign", "attrs": {k: v for k, v in attrs.items() if k not in called}, "call": call}
