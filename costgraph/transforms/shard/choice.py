"""Sharding propagation: choose which axes of an op the mesh splits, by the sharding rule of its kind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

from ...algebra.polynomial import ONE, Poly
from ...errors import UnsupportedError
from ...ir.graph import (
    Domain,
    Factors,
    Graph,
    Mesh,
    Op,
    OpKind,
    Placement,
    Split,
    Tensor,
    agree,
    distributed,
    size_of,
    tidy,
)
from ...ir.strides import numel
from ...ops.einsum import Einsum
from ...ops.elementwise import Pointwise
from ...ops.experts import Dispatch, GroupedMatmul, GroupedOuter
from ...ops.index import Indexed, Scatter
from ...ops.layout import Expand, KeepAlive, Rearrange, StopGradient
from ...ops.loops import Undef

__all__ = [
    "Choice",
    "PlacedOperand",
    "choose",
    "with_local_domain",
    "key_placement",
    "local_kind",
    "queries",
    "restricted",
    "RowOrder",
    "LocalIndices",
    "Routing",
    "RankOrderedRows",
]


# -- sharding choice ---------------------------------------------------------------------------------------------------

#: A redistributed operand: its index, the mesh axis, and the reason.
Moved = tuple[int, str, str]


@dataclass
class PlacedOperand:
    """An operand and its placement before the op."""

    placement: Placement | None
    """None if it is created for this reader, at any placement."""
    gathered: Collection[str] = ()
    """Mesh axes along which it is gathered for its readers: a parameter under ZeRO-3."""
    is_param: bool = False
    """Whether it is a parameter, to which the other operands are redistributed."""
    name: str = ""
    """The tensor's name."""
    stated: bool = False
    """Whether its placement is stated, so that other operands are redistributed."""
    repeated: Collection[int] = ()
    """Axes along which it is expanded without a copy."""
    zero: bool = False
    """Whether it is all zeros, and thus a valid partial sum."""


@dataclass
class Choice:
    """The placements that an op requires for its operands, and those of its results."""

    operands: list[Placement | None]
    """None for an operand that is used with any placement."""
    results: list[Placement]
    extents: dict[str, Poly]
    """Local size of each name in the rule."""
    ranks: dict[str, str]
    """The mesh axis that splits a contracted name."""
    spread: dict[str, Factors]
    """Factors by name."""
    moved: list[Moved] = field(default_factory=list)
    """Operands that are gathered although the op does not need it."""


class _Op:
    """The sharding rule of an op, its operands, and the choices made so far."""

    def __init__(self, rule: Split, operands: Sequence[PlacedOperand], mesh: Mesh) -> None:
        self.rule, self.operands, self.mesh = rule, operands, mesh
        self.parts: list[dict[str, Factors] | None] = [self._parts(i) for i in range(len(operands))]
        self.moved: list[Moved] = []
        self.decided: set[str] = set()
        """Mesh axes decided by a parameter or a requested placement."""
        self.by_placement: set[str] = set()
        """Mesh axes decided by another stated placement, which takes precedence over inferred ones."""
        result_names = {n for result in rule.results for dim in result for n in dim}
        self.free = {n for n in rule.extents if n not in rule.whole and (n in result_names or n in rule.reduced)}
        self.result_names = result_names

    def _parts(self, i: int) -> dict[str, Factors] | None:
        """Return the factors of each name in an operand."""
        labels, placement = self.rule.operands[i], self.operands[i].placement
        if labels is None or placement is None:
            return None
        out: dict[str, Factors] = {}
        for names, dim in zip(labels, placement.dims, strict=True):
            factors = distributed(dim, [self.rule.extents[n] for n in names], self.mesh) if names else ((),)
            if factors is not None and names:
                out |= dict(zip(names, factors, strict=True))
        return out

    def names(self, axis: str, preferred: Mapping[str, str], taken: Mapping[str, str]) -> dict[str, list[int]]:
        """Return the names that a mesh axis splits, with the indices of the operands in which it does."""
        out: dict[str, list[int]] = {}
        if self.same_on(axis, preferred):
            self.decided.add(axis)
            return out
        for i, (parts, operand) in enumerate(zip(self.parts, self.operands, strict=True)):
            if (
                parts is None
                or operand.placement is None
                or axis in operand.gathered
                or axis not in operand.placement.axes
            ):
                continue
            name = next((n for n, dim in parts.items() if axis in dim and n in self.free), None)
            if any(axis in parts.get(n, ()) for n in self.rule.fixed):
                continue
            if name is None:
                why = (
                    "its shard spans several axes"
                    if not any(axis in d for d in parts.values())
                    else "the op cannot shard this axis"
                )
                self.moved.append((i, axis, why))
            elif self.fits(name, axis) and self.divides(name, axis, taken):
                out.setdefault(name, []).append(i)
        name = preferred.get(axis, "")
        if name in self.free and (self.only_new(name) or self.reduced(name, axis)) and self.divides(name, axis, taken):
            out.setdefault(name, [])
        return {n: indices for n, indices in out.items() if n not in self.rule.once or self.alone(n, axis, taken)}

    def same_on(self, axis: str, preferred: Mapping[str, str]) -> bool:
        """Whether ranks along an axis replicate a parameter that other members of a joint axis split."""
        stay = [g.placement.axes for g in self.operands if g.is_param and g.placement is not None]
        return any(axis not in axes and self.mesh.beside(axis) & {*axes} for axes in (*stay, preferred))

    def alone(self, name: str, axis: str, taken: Mapping[str, str]) -> bool:
        """Whether only axes that are joint with this one split a name already."""
        before = [a for a, n in taken.items() if n == name]
        return not before or self.mesh.begins([*before, axis])

    def reduced(self, name: str, axis: str) -> bool:
        """Whether a partial sum has an axis into which it may be reduce-scattered."""
        pairs = zip(self.rule.operands, self.operands, strict=True)
        return any(
            labels and (name,) in labels and g.placement is not None and axis in g.placement.pending
            for labels, g in pairs
        )

    def paired(self, axis: str, names: Mapping[str, list[int]]) -> Mapping[str, list[int]]:
        """Return the names that may be split; along a mesh axis of rank-local rows, those paired with rows."""
        rows = [n for n, dim in self.rule.fixed.items() if axis in dim]
        if not rows:  # along other mesh axes, updates of one row would be on several ranks
            return {n: indices for n, indices in names.items() if self.rule.reduced.get(n) != "own"}
        if self.rule.paired:
            return {n: indices for n, indices in names.items() if n in self.rule.paired}
        name = next((n for n in rows if n in self.result_names), rows[0])
        lost = (i for n, indices in names.items() if n != name for i in indices if self.operands[i].is_param)
        self.moved += [(i, axis, "rows are sharded along it") for i in lost]
        return {name: []}

    def only_new(self, name: str) -> bool:
        """Whether only operands created for this reader have a name, so that splitting it is free."""
        having = [
            g for labels, g in zip(self.rule.operands, self.operands, strict=True) if labels and (name,) in labels
        ]
        return bool(having) and all(g.placement is None for g in having)

    def divides(self, name: str, axis: str, taken: Mapping[str, str]) -> bool:
        """Whether a name can be split evenly; unknown sizes can."""
        parts = prod((self.mesh[a] for a, n in taken.items() if n == name), start=self.mesh[axis])
        size = (self.rule.extents[name] / parts).constant
        return size is None or (isinstance(size, int) and size >= 1)

    def fits(self, name: str, axis: str) -> bool:
        """Whether a contracted name leaves the same partial sum as the accumulator holds."""
        into = self.rule.into
        if into is None or name in self.result_names:
            return True
        base = self.operands[into]
        return base.zero or (base.placement is not None and base.placement.pending.get(axis) == self.rule.reduced[name])

    def pick(self, axis: str, names: Mapping[str, list[int]], preferred: Mapping[str, str]) -> str | None:
        """Choose a name: a parameter's first, then the requested one, then a result's."""
        if not names:
            return None
        in_params = [n for n, indices in names.items() if any(self.operands[i].is_param for i in indices)]
        requested = [n for n in names if preferred.get(axis) == n]
        in_results = [n for n in names if n in self.result_names]
        name = (in_params or requested or in_results or list(names))[0]
        if in_params or requested:
            self.decided.add(axis)
        elif any(self.operands[i].stated for i in names[name]):
            self.by_placement.add(axis)
        return name

    def conflicts(self, operands: Sequence[Placement | None], chosen: Mapping[str, str]) -> Iterator[Moved]:
        """Yield redistributed operands that no stated placement asks for.

        An operand without the axis along which the op is sharded must be whole, as keys for queries. Rank-local rows
        go to their experts, and their partners follow.
        """
        if self.rule.fixed:
            return
        noted = {(i, axis) for i, axis, _ in self.moved}
        for i, (operand, want) in enumerate(zip(self.operands, operands, strict=True)):
            labels = self.rule.operands[i]
            if operand.placement is None or want is None or labels is None:
                continue
            decided = self.decided | (set() if operand.stated else self.by_placement)
            for axis in sorted(operand.placement.axes - {*operand.gathered} - decided):
                dim, name = operand.placement.dim(axis), chosen.get(axis)
                assert dim is not None
                stays = want.dim(axis) == dim and agree(operand.placement.dims[dim], want.dims[dim], self.mesh)
                dim_names = (names for d, names in enumerate(labels) if d not in operand.repeated)
                other = name is not None and not any(name in names for names in dim_names)
                if not (stays or other or (i, axis) in noted):
                    yield i, axis, self.conflict_reason(i, axis)

    def conflict_reason(self, i: int, axis: str) -> str:
        """Return why an operand cannot keep its sharding along a mesh axis, in words."""
        others = (
            g for j, g in enumerate(self.operands) if j != i and g.placement is not None and axis in g.placement.axes
        )
        other = next(others, None)
        return (
            "its shards do not match those of the op"
            if other is None
            else f"{other.name!r} is sharded along it differently"
        )

    def pending(self, axis: str) -> str | None:
        """Return the reduction of operands that are all partial along an axis, None if they are not.

        In a product, one operand is partial and the other is sharded along joint axes: the gradients of a shared KV
        head from its query heads are reduced with that of the parameter.
        """
        if self.rule.into is not None:
            return self.accumulated(axis, self.rule.into)
        if not self.rule.linear:
            having = [g.placement for g in self.operands if g.placement is not None and axis in g.placement.pending]
            joint = self.rule.product and len(having) == 1 and bool(self.mesh.beside(axis) & having[0].axes)
            alone = joint or (self.rule.scaled and len(having) == 1)
            return having[0].pending[axis] if alone and having[0].pending[axis] == "sum" else None
        reductions = set()
        read = {n for labels in self.rule.operands if labels for names in labels for n in names}
        axes = [names for result in self.rule.results for names in result if names and not read & {*names}]
        if any(self.rule.extents[n] != ONE for names in axes for n in names):
            return None  # the result is expanded along an axis: reduce fewer bytes, before it
        for i, operand in enumerate(self.operands):
            if self.rule.operands[i] is None or operand.zero:
                continue
            reductions.add(operand.placement.pending.get(axis) if operand.placement is not None else None)
        reduction = reductions.pop() if len(reductions) == 1 else None
        return reduction if reduction in ("sum", "mean") else None  # a maximum does not commute with differences

    def accumulated(self, axis: str, into: int) -> str | None:
        """Return the reduction for a term added to zeros or to a partial sum of the same kind."""
        base, term = self.operands[into], self.operands[-1].placement
        reduction = None if term is None else term.pending.get(axis)
        fits = base.zero or (base.placement is not None and base.placement.pending.get(axis) == reduction)
        return reduction if reduction == "sum" and fits and "sum" in self.rule.reduced.values() else None


def choose(rule: Split, placed: Sequence[PlacedOperand], mesh: Mesh, preferred: Mapping[str, str]) -> Choice:
    """Choose for each mesh axis the name of an op's sharding rule that it splits.

    `preferred` gives names by mesh axis, from the placement requested for the result.
    """
    op = _Op(rule, placed, mesh)
    chosen: dict[str, str] = {}
    pending: dict[str, str] = {}
    for axis in mesh:
        reduction = op.pending(axis)
        if reduction is not None:
            pending[axis] = reduction
            op.decided.add(axis)
            continue
        name = op.pick(axis, op.paired(axis, op.names(axis, preferred, chosen)), preferred)
        if name is not None:
            chosen[axis] = name
    spread = {n: _spread(n, [a for a, name in chosen.items() if name == n], op) for n in rule.extents}
    spread |= rule.fixed
    operands: list[Placement | None] = []
    for labels, operand in zip(rule.operands, placed, strict=True):
        if labels is None:
            operands.append(None)
            continue
        partial = pending if rule.linear else {} if operand.placement is None else operand.placement.pending
        passing = tuple((a, reduction) for a, reduction in pending.items() if a in partial)
        operands.append(Placement(tuple(_dim(names, spread, rule.extents) for names in labels), passing))
    contracted = [
        (a, rule.reduced[n]) for a, n in chosen.items() if n not in op.result_names and rule.reduced[n] != "own"
    ]
    if rule.into is not None and (contracted or pending):
        base = operands[rule.into]
        assert base is not None
        operands[rule.into] = Placement(base.dims, tuple({**dict(base.partial), **pending, **dict(contracted)}.items()))
    order = list(mesh)
    after = tuple(sorted({**pending, **dict(contracted)}.items(), key=lambda p: order.index(p[0])))
    results = [Placement(tuple(_dim(names, spread, rule.extents) for names in r), after) for r in rule.results]
    op.moved += op.conflicts(operands, chosen)
    extents = {n: size_of(spread[n], size) for n, size in rule.extents.items()}
    along = {n: [a for a, name in chosen.items() if name == n] for n in chosen.values()}
    ranks = {n: mesh.together(axes) or axes[-1] for n, axes in along.items() if n in rule.extents}
    return Choice(operands, results, extents, ranks, spread, op.moved)


def _spread(name: str, axes: Sequence[str], op: _Op) -> Factors:
    """Return a name's factors: those in the operand with most of the chosen axes, with the others inside."""
    if not axes:
        return ()
    if name in op.rule.once:  # gathered rows are concatenated
        return tidy((*axes, op.rule.extents[name] / prod((op.mesh[a] for a in axes), start=ONE)))
    candidates = [p[name] for p in op.parts if p is not None and p.get(name)]
    best = max(candidates, key=lambda dim: sum(a in dim for a in axes), default=())
    parts = tidy(op.mesh[f] if isinstance(f, str) and f not in axes else f for f in best)
    missing = [a for a in axes if a not in parts]
    if name in op.rule.consecutive:
        order = [*(f for f in parts if isinstance(f, str)), *missing]
        return tidy((*order, op.rule.extents[name] / prod((op.mesh[a] for a in order), start=ONE)))
    if not missing:
        return parts
    *before, last = parts or (op.rule.extents[name],)
    for axis in missing:
        before.append(axis)
        last = last / op.mesh[axis] if isinstance(last, Poly) else last
    return tidy((*before, last))


def _dim(names: Sequence[str], spread: Mapping[str, Factors], extents: Mapping[str, Poly]) -> Factors:
    """Return the factors of an axis that several names make up."""
    return tidy(f for n in names for f in (spread[n] or (extents[n],)))


# -- domains -----------------------------------------------------------------------------------------------------------
# Attention domains on a mesh: queries are split into blocks, and each block sees all keys.

K = TypeVar("K", bound=OpKind)
Names = tuple[str, ...]


def restricted(rule: Split, op: Op, placements: Sequence[Placement | None]) -> Split:
    """Return the rule with the keys of a domain whole, and queries in contiguous blocks or whole."""
    unsplit, blocks = set(rule.whole), set(rule.consecutive)
    for query, keys in _positions(op, rule):
        unsplit |= {*keys}
        blocks |= {*query}
        query_dims = [
            placement.dims[i]
            for labels, placement in zip(rule.operands, placements, strict=True)
            if labels is not None and placement is not None
            for i, names in enumerate(labels)
            if {*query} & {*names}
        ]
        if not (len(query) == 1 and _same_length(rule, query[0], keys) and all(_in_blocks(dim) for dim in query_dims)):
            unsplit |= {*query}
    return replace(rule, whole=frozenset(unsplit), consecutive=frozenset(blocks)) if blocks else rule


def queries(op: Op, rule: Split, choice: Choice) -> frozenset[str]:
    """Return the mesh axes that split queries of a domain."""
    names = {n for query, _ in _positions(op, rule) for n in query}
    return frozenset(f for n in names for f in choice.spread[n] if isinstance(f, str))


def key_placement(rule: Split, choice: Choice, params: Sequence[bool]) -> Placement | None:
    """Return the placement of a sum over all ranks' queries: keys are sharded like their queries.

    Queries and keys are axes with equal length in one operand that is not a parameter: the gradient of scores.
    """
    if len(choice.results) != 1:
        return None
    names, result = rule.results[0], choice.results[0]
    for query in choice.ranks:
        parts = choice.spread[query]
        axes = {f for f in parts if isinstance(f, str)}
        key = _key_axis(query, rule, params)
        if axes <= result.pending.keys() and key in names and not any(query in dim for dim in names):
            dims = (parts if dim == key else factors for dim, factors in zip(names, result.dims, strict=True))
            return Placement(tuple(dims), tuple(p for p in result.partial if p[0] not in axes))
    return None


def _key_axis(query: str, rule: Split, params: Sequence[bool]) -> Names | None:
    """Return the nearest axis of the same operand with an equal length."""
    for labels, param in zip(rule.operands, params, strict=True):
        if labels is None or param or (query,) not in labels:
            continue
        position = labels.index((query,))
        candidates = [i for i, dim in enumerate(labels) if i != position and _same_length(rule, query, dim)]
        if candidates:
            return labels[min(candidates, key=lambda i: (abs(i - position), -i))]
    return None


def local_kind(kind: K, rule: Split, choice: Choice, mesh: Mesh) -> K:
    """Return the kind of an op with its local domain."""
    if isinstance(kind, Einsum) and kind.domain is not None:
        domain, query, key = kind.domain
        return replace(kind, domain=(_local_domain(domain, choice.spread[query], mesh), query, key))
    if isinstance(kind, Pointwise) and kind.masked is not None:
        return replace(kind, masked=_local_domain(kind.masked, choice.results[0].dims[-2], mesh))
    return with_local_domain(kind, choice.results[0], mesh) if choice.results else kind


def with_local_domain(kind: K, placement: Placement, mesh: Mesh) -> K:
    """Return the kind of an op whose result is restricted, with its local domain."""
    if isinstance(kind, Expand | Undef) and kind.domain is not None:
        domain, query, key = kind.domain
        return replace(kind, domain=(_local_domain(domain, placement.dims[query], mesh), query, key))
    return kind


def _positions(op: Op, rule: Split) -> Iterator[tuple[Names, Names]]:
    """Yield the names of queries and keys in an op's domains."""
    for labels, t in (*zip(rule.operands, op.operands, strict=True), *zip(rule.results, op.results, strict=True)):
        if t.domain is not None and labels is not None:
            yield labels[t.domain[1]], labels[t.domain[2]]
    if isinstance(op.kind, Einsum) and op.kind.domain is not None:
        yield op.kind.domain[1:2], op.kind.domain[2:]
    if isinstance(op.kind, Pointwise) and op.kind.masked is not None:
        yield rule.results[0][-2], rule.results[0][-1]


def _same_length(rule: Split, query: str, keys: Names) -> bool:
    return bool(keys) and rule.extents[query] == numel([rule.extents[n] for n in keys])


def _in_blocks(dim: Factors) -> bool:
    """Whether each rank has consecutive positions."""
    return all(isinstance(f, str) for f in dim[:-1])


def _local_domain(domain: Domain, dim: Factors, mesh: Mesh) -> Domain:
    if not _in_blocks(dim):
        raise UnsupportedError(
            f"shard: queries of a domain are sharded as {' '.join(map(str, dim))}; expected one contiguous block per "
            f"rank"
        )
    return replace(domain, ranks=tuple((f, mesh[f]) for f in dim if isinstance(f, str)))


# -- rank-local rows ---------------------------------------------------------------------------------------------------
# Tokens that each rank has sorted by expert: indices into them are valid on one rank only.

#: Kinds that forward indices unchanged.
_SAME = (KeepAlive, StopGradient, Rearrange)


@dataclass(frozen=True, eq=False)
class Routing:
    """Expert choices that were sorted together."""

    experts: Poly
    """number of experts"""
    chosen: Poly
    """experts chosen by each token"""
    rows: Poly
    """rows (token-expert pairs) of one rank"""
    owners: bool
    """whether the expert of each row is requested"""


@dataclass(frozen=True)
class LocalIndices:
    """The meaning of an integer tensor on one rank."""

    meaning: str
    """tokens or rows (indices), ends (row offsets), owners (expert of each row), or nothing (unknown)"""
    factors: Factors
    """factors of the indexed axis"""
    rows: Factors
    """factors of the rows"""
    routing: Routing
    """the routing they belong to"""
    axis: str = ""
    """the mesh axis along which rows are with their experts; empty if they are with their tokens"""


@dataclass(frozen=True)
class RowOrder:
    """Axes of a tensor that are rows in rank-local order."""

    dims: frozenset[int]
    """indices of the axes"""
    routing: Routing
    """the routing they belong to"""
    axis: str = ""
    """the mesh axis along which rows are with their experts; empty if they are with their tokens"""


class RankOrderedRows:
    """Tracks tensors of one rank that are in rank-local order."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.indices: dict[Any, LocalIndices] = {}
        """New integer tensors that are valid on their rank only."""
        self.ordered: dict[Any, RowOrder] = {}
        """New tensors with rows in rank-local order."""
        self.ends: dict[tuple[Routing, Graph], Tensor] = {}
        """Expert row offsets by body."""

    def note_alias(self, alias: Tensor, t: Tensor) -> None:
        """Note that a new tensor aliases another, or is a slice or a stack of it."""
        if t in self.indices:
            self.indices[alias] = indices = self.indices[t]
            if indices.meaning == "ends" and alias.ndim == 1:
                self.ends[indices.routing, alias.graph] = alias
        if t in self.ordered:
            order = self.ordered[t]
            self.ordered[alias] = replace(order, dims=frozenset(i + alias.ndim - t.ndim for i in order.dims))

    # -- row location ------------------------------------------------------------------------------------------------

    def location(self, op: Op, inputs: Sequence[Any], table: Placement | None) -> tuple[str, Routing] | None:
        """Return the mesh axis along which an op needs rows with their experts; empty for none, None for either.

        `table` is the placement of expert parameters: matrices of all experts, or rows to look up.
        """
        kind, integers = op.kind, _integers(op.kind, inputs)
        indices = next((self.indices[t] for t in integers if t in self.indices), None)
        if any(t in self.indices and self.indices[t].axis and not any(t is u for u in integers) for t in inputs):
            self.refuse(op)  # expert indices or offsets of rows on another rank
        if indices is not None and isinstance(kind, Indexed) and indices.meaning != "owners":
            return "", indices.routing
        axes = [
            o.axis for o in (self.indices.get(t) or self.ordered.get(t) for t in inputs) if o is not None and o.axis
        ]
        axis = (
            axes[0] if axes else self._experts(op, indices, table) if indices is not None and table is not None else ""
        )
        if not axis:
            return None
        orders = [self.ordered[t] for t in inputs if t in self.ordered]
        return axis, indices.routing if indices is not None else orders[0].routing

    def _experts(self, op: Op, indices: LocalIndices, table: Placement) -> str:
        """Return the mesh axis that splits both experts and tokens, empty if there is none."""
        parts = table.dims[0]
        shared_axes = [f for f in parts if isinstance(f, str) and f in _axes([indices.rows])]
        if shared_axes and parts != self.experts(shared_axes[0], indices.routing):
            raise UnsupportedError(
                f"shard: {op.name!r}: experts are placed as {table}, but rows are sent to the ranks of their experts; "
                f"expected one mesh axis that splits experts and tokens, with consecutive experts on each rank"
            )
        return shared_axes[0] if shared_axes else ""

    def experts(self, axis: str, routing: Routing) -> Factors:
        """Return the factors of an expert axis that a mesh axis splits."""
        return tidy((axis, routing.experts / self.mesh[axis]))

    # -- ops ---------------------------------------------------------------------------------------------------------

    def rule(self, op: Op, rule: Split, inputs: Sequence[Any], axis: str) -> Split:
        """Return the sharding rule of an op with rank-local operands."""
        kind = op.kind
        if isinstance(kind, GroupedMatmul | GroupedOuter):
            return self._grouped(op, kind, rule, inputs, axis)
        if not isinstance(kind, Indexed):
            return rule
        indexed = [self.indices[t] for t in kind.places(inputs) if t in self.indices]
        if not indexed or (indexed[0].meaning == "owners" and not axis):
            return rule
        (indices, *others), table = indexed, inputs[0]
        _, ids, names = kind.names(op)
        if indices.meaning == "owners":
            if others or kind.batch or (isinstance(kind, Scatter) and isinstance(table, Tensor)):
                self.refuse(op)
            fixed = {ids[0][0]: indices.rows, names[0]: self.experts(axis, indices.routing)}
            return replace(rule, fixed=fixed, once=frozenset(), local=lambda extents, ranks: kind)
        # a target that is created for this op has no order yet
        in_order = table in self.ordered or (isinstance(kind, Scatter) and not isinstance(table, Tensor))
        fits = indices.meaning == ("rows" if table in self.ordered else "tokens") or (
            in_order and indices.meaning == "rows"
        )
        if others or kind.batch or not fits:
            self.refuse(op)
        paired = frozenset(n for axis in ids for n in axis)
        return replace(
            rule, fixed={names[0]: indices.factors}, paired=paired, reduced=dict.fromkeys(paired, "own"), into=None,
            once=frozenset(), local=lambda extents, ranks: kind,
        )  # fmt: skip

    def _grouped(
        self, op: Op, kind: GroupedMatmul | GroupedOuter, rule: Split, inputs: Sequence[Any], axis: str
    ) -> Split:
        """Return the sharding rule of a grouped matmul over rank-local rows."""
        ends = self.indices.get(inputs[2])
        rows = inputs[:1] if isinstance(kind, GroupedMatmul) else inputs[:2]
        if any((t in self.ordered) != (ends is not None and ends.meaning == "ends") for t in rows):
            self.refuse(op)
        if ends is None:
            return rule
        fixed, local = {"r": ends.rows}, kind
        if axis:
            fixed["e"] = self.experts(axis, ends.routing)
            local = replace(kind, chosen=kind.chosen / self.mesh[axis]) if isinstance(kind, GroupedMatmul) else kind
        # the offsets are local
        operands = (*rule.operands[:2], None)
        return replace(rule, operands=operands, fixed=fixed, whole=frozenset("e"), local=lambda extents, ranks: local)

    def note(
        self, op: Op, rule: Split | None, choice: Choice, inputs: Sequence[Any], results: Sequence[Tensor], axis: str
    ) -> None:
        """Note which results of an op are in rank-local order, and along which mesh axis with their experts."""
        if isinstance(op.kind, Dispatch):
            self._dispatched(op, op.kind, choice, results)
            return
        integers = _integers(op.kind, inputs)
        for indices in [self.indices[t] for t in inputs if t in self.indices and not any(t is u for u in integers)][:1]:
            if isinstance(op.kind, _SAME) or indices.meaning != "ends":  # offsets become a partial sum
                self.indices |= dict.fromkeys(
                    results, indices if isinstance(op.kind, _SAME) else replace(indices, meaning="nothing")
                )
        if rule is None:
            return
        pairs = list(zip(rule.operands, inputs, strict=True))
        dims = {t: self.ordered[t].dims for _, t in pairs if t in self.ordered}
        names = {n for labels, t in pairs if labels for i in dims.get(t, ()) for n in labels[i]}
        if any(self.indices[t].meaning == "rows" for t in integers if t in self.indices):
            names |= {*rule.fixed}
        routings = [o.routing for o in (self.indices.get(t) or self.ordered.get(t) for _, t in pairs) if o is not None]
        for labels, t in zip(rule.results, results, strict=True):
            axes = frozenset(i for i, own_names in enumerate(labels) if names & {*own_names})
            if axes:
                self.ordered[t] = RowOrder(axes, routings[0], axis)

    def _dispatched(self, op: Op, kind: Dispatch, choice: Choice, results: Sequence[Tensor]) -> None:
        rows, places = choice.results[0].dims[0], choice.results[2]
        if not rows:
            return
        ids = op.operands[0]
        routing = Routing(kind.experts, ids.sizes[-1], size_of(rows, op.results[0].sizes[0]), kind.owners)
        sizes = op.results[2].sizes[:-1]
        tokens = tidy(f for dim, n in zip(places.dims, sizes, strict=False) for f in (dim or (n,)))
        for t, meaning, factors in zip(
            results, ("tokens", "ends", "rows", "owners"), (tokens, (), rows, ()), strict=False
        ):
            self.indices[t] = LocalIndices(meaning, factors, rows, routing)
        self.ends[routing, results[1].graph] = results[1]
        self.ordered |= dict.fromkeys([results[0], *results[3:]], RowOrder(frozenset({0}), routing))

    def counted(self, op: Op, choice: Choice) -> Choice:
        """Return a dispatch's choice with row counts as partial sums over the ranks that split tokens."""
        if not isinstance(op.kind, Dispatch):
            return choice
        tokens, ends, *others = choice.results
        parts = tuple((axis, "sum") for axis in self.mesh if axis in tokens.axes)
        return replace(choice, results=[tokens, replace(ends, partial=parts), *others])

    def need_kept(self, t: Tensor, before: Sequence[Factors], after: Sequence[Factors]) -> None:
        """Raise an error for redistributing a tensor in rank-local order."""
        lost = t in self.indices and not _axes(before) & _axes([self.indices[t].rows]) <= _axes(after)
        if lost or any(before[i] != after[i] for i in self._dims(t)):
            self.refuse(t)

    def _dims(self, t: Tensor) -> Collection[int]:
        return self.ordered[t].dims if t in self.ordered else ()

    def refuse(self, node: Op | Tensor) -> None:
        """Raise an error for mixing rank-local orders."""
        raise UnsupportedError(
            f"shard: {node.name!r} is in rank-local order, or holds indices into rows in that order, which are invalid "
            f"on other ranks; expected tensors computed from it to be sharded like its rows"
        )


def _axes(dims: Sequence[Factors]) -> frozenset[str]:
    return frozenset(f for dim in dims for f in dim if isinstance(f, str))


def _integers(kind: OpKind, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the operands that are row indices or offsets."""
    if isinstance(kind, Indexed):
        return kind.places(inputs)
    return inputs[2:] if isinstance(kind, GroupedMatmul | GroupedOuter) else ()
