"""Axes of positions on a mesh: the queries of a domain in blocks, each of them with all keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ...errors import UnsupportedError
from ...graph.domain import Domain
from ...graph.op import Op, OpKind
from ...graph.placement import Factors, Mesh, Placement, Split
from ...graph.strides import numel
from ...ops.contraction import Einsum
from ...ops.moves import Expand
from ...ops.pieces import Absent
from ...ops.pointwise import Pointwise
from .choice import Choice

__all__ = ["at_places", "of_keys", "of_rank", "queries", "restricted"]

K = TypeVar("K", bound=OpKind)
Names = tuple[str, ...]


def restricted(rule: Split, op: Op, given: Sequence[Placement | None]) -> Split:
    """Return the rule with the keys of a domain whole, and queries in blocks, whole if a rank could not have one."""
    found, blocks = set(rule.whole), set(rule.consecutive)
    for own, seen in _positions(op, rule):
        found |= {*seen}
        blocks |= {*own}
        lying = [
            at.dims[i]
            for labels, at in zip(rule.operands, given, strict=True)
            if labels is not None and at is not None
            for i, names in enumerate(labels)
            if {*own} & {*names}
        ]
        if not (len(own) == 1 and _as_many(rule, own[0], seen) and all(_in_blocks(dim) for dim in lying)):
            found |= {*own}
    return replace(rule, whole=frozenset(found), consecutive=frozenset(blocks)) if blocks else rule


def queries(op: Op, rule: Split, choice: Choice) -> frozenset[str]:
    """Return the axes of the mesh that split queries of a domain."""
    names = {n for own, _ in _positions(op, rule) for n in own}
    return frozenset(f for n in names for f in choice.spread[n] if isinstance(f, str))


def of_keys(rule: Split, choice: Choice, params: Sequence[bool]) -> Placement | None:
    """Return where a sum over the queries of all ranks belongs: each key has it on the rank of its own query.

    Queries and keys are axes of as many positions of one operand that is no parameter: of gradients of scores.
    """
    if len(choice.results) != 1:
        return None
    names, made = rule.results[0], choice.results[0]
    for own in choice.ranks:
        parts = choice.spread[own]
        axes = {f for f in parts if isinstance(f, str)}
        key = _beside(own, rule, params)
        if axes <= made.pending.keys() and key in names and not any(own in dim for dim in names):
            dims = (parts if dim == key else place for dim, place in zip(names, made.dims, strict=True))
            return Placement(tuple(dims), tuple(p for p in made.partial if p[0] not in axes))
    return None


def _beside(own: str, rule: Split, params: Sequence[bool]) -> Names | None:
    """Return the axis of an operand that is as long as another one of it, the nearest."""
    for labels, param in zip(rule.operands, params, strict=True):
        if labels is None or param or (own,) not in labels:
            continue
        at = labels.index((own,))
        found = [i for i, dim in enumerate(labels) if i != at and _as_many(rule, own, dim)]
        if found:
            return labels[min(found, key=lambda i: (abs(i - at), -i))]
    return None


def of_rank(kind: K, rule: Split, choice: Choice, mesh: Mesh) -> K:
    """Return the record of an op with its domain as a rank has it."""
    if isinstance(kind, Einsum) and kind.domain is not None:
        domain, query, key = kind.domain
        return replace(kind, domain=(_over(domain, choice.spread[query], mesh), query, key))
    if isinstance(kind, Pointwise) and kind.masked is not None:
        return replace(kind, masked=_over(kind.masked, choice.results[0].dims[-2], mesh))
    return at_places(kind, choice.results[0], mesh) if choice.results else kind


def at_places(kind: K, at: Placement, mesh: Mesh) -> K:
    """Return the record of an op that says by their places which axes of its result are restricted."""
    if isinstance(kind, Expand | Absent) and kind.domain is not None:
        domain, query, key = kind.domain
        return replace(kind, domain=(_over(domain, at.dims[query], mesh), query, key))
    return kind


def _positions(op: Op, rule: Split) -> Iterator[tuple[Names, Names]]:
    """Yield the names of queries and of keys of domains that an op has to do with."""
    for labels, t in (*zip(rule.operands, op.operands, strict=True), *zip(rule.results, op.results, strict=True)):
        if t.domain is not None and labels is not None:
            yield labels[t.domain[1]], labels[t.domain[2]]
    if isinstance(op.kind, Einsum) and op.kind.domain is not None:
        yield op.kind.domain[1:2], op.kind.domain[2:]
    if isinstance(op.kind, Pointwise) and op.kind.masked is not None:
        yield rule.results[0][-2], rule.results[0][-1]


def _as_many(rule: Split, own: str, seen: Names) -> bool:
    return bool(seen) and rule.extents[own] == numel([rule.extents[n] for n in seen])


def _in_blocks(dim: Factors) -> bool:
    """Whether each rank has positions that follow each other."""
    return all(isinstance(f, str) for f in dim[:-1])


def _over(domain: Domain, dim: Factors, mesh: Mesh) -> Domain:
    if not _in_blocks(dim):
        raise UnsupportedError(
            f"shard: queries of a domain in parts {' '.join(map(str, dim))}, expected one block for each rank"
        )
    return replace(domain, ranks=tuple((f, mesh[f]) for f in dim if isinstance(f, str)))
