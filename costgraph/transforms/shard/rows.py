"""Rows that each rank has ordered for itself: where positions in them mean something, and which tensors have them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...algebra.polynomial import Poly
from ...errors import UnsupportedError
from ...graph.graph import Graph
from ...graph.op import Op, OpKind
from ...graph.placement import Factors, Mesh, Placement, Split, size_of, tidy
from ...graph.tensor import Tensor
from ...ops.grouped import Dispatch, Grouped, GroupedOuter
from ...ops.index import Indexed, Scatter
from ...ops.keep import Keep, StopGradient
from ...ops.moves import Rearrange
from .choice import Choice

__all__ = ["Order", "Own", "Routing", "Rows"]

#: Kinds that hand positions on as they are.
_SAME = (Keep, StopGradient, Rearrange)


@dataclass(frozen=True, eq=False)
class Routing:
    """Choices of experts that were ordered together."""

    experts: Poly
    """among how many"""
    chosen: Poly
    """how many of them a token has"""
    rows: Poly
    """choices of the tokens of one rank"""
    owners: bool
    """whether the expert of each row was asked for"""


@dataclass(frozen=True)
class Own:
    """What integers say on one rank."""

    what: str
    """positions of tokens or of rows, ends of rows, owners: experts of rows, or nothing that is known"""
    factors: Factors
    """parts of the axis that the positions are on"""
    rows: Factors
    """parts of the rows"""
    routing: Routing
    """the choices that they are of"""
    axis: str = ""
    """the axis of the mesh along which rows are with their experts; empty where they are with their tokens"""


@dataclass(frozen=True)
class Order:
    """Which axes of a tensor are rows in the order of a rank."""

    dims: frozenset[int]
    """which"""
    routing: Routing
    """the choices that they are of"""
    axis: str = ""
    """the axis of the mesh along which they are with their experts; empty where they are with their tokens"""


class Rows:
    """What of the tensors of a rank is in an order of its own."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.own: dict[Any, Own] = {}
        """New tensors of integers that mean something on their rank alone."""
        self.ordered: dict[Any, Order] = {}
        """New tensors with rows in the order of their rank."""
        self.ends: dict[tuple[Routing, Graph], Tensor] = {}
        """Where the rows of each expert end, in a body."""

    def stands_for(self, made: Tensor, t: Tensor) -> None:
        """Note that a new tensor is another one elsewhere in the graph, a slice or a stack of it perhaps."""
        if t in self.own:
            self.own[made] = own = self.own[t]
            if own.what == "ends" and made.ndim == 1:
                self.ends[own.routing, made.graph] = made
        if t in self.ordered:
            order = self.ordered[t]
            self.ordered[made] = replace(order, dims=frozenset(i + made.ndim - t.ndim for i in order.dims))

    # -- where rows are ----------------------------------------------------------------------------------------------

    def asked(self, op: Op, given: Sequence[Any], table: Placement | None) -> tuple[str, Routing] | None:
        """Return along which axis of the mesh an op wants rows with their experts, empty for none; None: no matter.

        `table` is where parameters of experts lie: matrices of all of them, or rows that are looked up for each row.
        """
        kind, used = op.kind, _integers(op.kind, given)
        own = next((self.own[t] for t in used if t in self.own), None)
        if any(t in self.own and self.own[t].axis and not any(t is u for u in used) for t in given):
            self.refuse(op)  # numbers of experts, or ends, of another rank's rows
        if own is not None and isinstance(kind, Indexed) and own.what != "owners":
            return "", own.routing
        axes = [o.axis for o in (self.own.get(t) or self.ordered.get(t) for t in given) if o is not None and o.axis]
        axis = axes[0] if axes else self._experts(op, own, table) if own is not None and table is not None else ""
        if not axis:
            return None
        orders = [self.ordered[t] for t in given if t in self.ordered]
        return axis, own.routing if own is not None else orders[0].routing

    def _experts(self, op: Op, own: Own, table: Placement) -> str:
        """Return the axis of the mesh that splits experts and tokens, empty where none does both."""
        parts = table.dims[0]
        found = [f for f in parts if isinstance(f, str) and f in _axes([own.rows])]
        if found and parts != self.experts(found[0], own.routing):
            raise UnsupportedError(
                f"shard: {op.name!r}: experts lie as {table}, and rows go to the ranks that have theirs: expected one "
                f"axis of the mesh to split them, each rank with experts beside each other"
            )
        return found[0] if found else ""

    def experts(self, axis: str, routing: Routing) -> Factors:
        """Return the parts of an axis of experts that ranks have some of."""
        return tidy((axis, routing.experts / self.mesh[axis]))

    # -- ops ---------------------------------------------------------------------------------------------------------

    def rule(self, op: Op, rule: Split, given: Sequence[Any], axis: str) -> Split:
        """Return the rule of an op where operands have an order of their own, with their experts along an axis."""
        kind = op.kind
        if isinstance(kind, Grouped | GroupedOuter):
            return self._grouped(op, kind, rule, given, axis)
        if not isinstance(kind, Indexed):
            return rule
        found = [self.own[t] for t in kind.places(given) if t in self.own]
        if not found or (found[0].what == "owners" and not axis):
            return rule
        (own, *others), table = found, given[0]
        _, ids, names = kind.names(op)
        if own.what == "owners":
            if others or kind.batch or (isinstance(kind, Scatter) and isinstance(table, Tensor)):
                self.refuse(op)
            fixed = {ids[0][0]: own.rows, names[0]: self.experts(axis, own.routing)}
            return replace(rule, fixed=fixed, once=frozenset(), local=lambda extents, ranks: kind)
        # a target that is made for this op has no order yet
        in_order = table in self.ordered or (isinstance(kind, Scatter) and not isinstance(table, Tensor))
        fits = own.what == ("rows" if table in self.ordered else "tokens") or (in_order and own.what == "rows")
        if others or kind.batch or not fits:
            self.refuse(op)
        paired = frozenset(n for axis in ids for n in axis)
        return replace(
            rule, fixed={names[0]: own.factors}, paired=paired, reduced=dict.fromkeys(paired, "own"), into=None,
            once=frozenset(), local=lambda extents, ranks: kind,
        )  # fmt: skip

    def _grouped(self, op: Op, kind: Grouped | GroupedOuter, rule: Split, given: Sequence[Any], axis: str) -> Split:
        """Return the rule of a product by expert, of rows that each rank has ordered."""
        ends = self.own.get(given[2])
        rows = given[:1] if isinstance(kind, Grouped) else given[:2]
        if any((t in self.ordered) != (ends is not None and ends.what == "ends") for t in rows):
            self.refuse(op)
        if ends is None:
            return rule
        fixed, local = {"r": ends.rows}, kind
        if axis:
            fixed["e"] = self.experts(axis, ends.routing)
            local = replace(kind, chosen=kind.chosen / self.mesh[axis]) if isinstance(kind, Grouped) else kind
        # which ends are meant is known
        operands = (*rule.operands[:2], None)
        return replace(rule, operands=operands, fixed=fixed, whole=frozenset("e"), local=lambda extents, ranks: local)

    def note(
        self, op: Op, rule: Split | None, choice: Choice, given: Sequence[Any], made: Sequence[Tensor], axis: str
    ) -> None:
        """Note what of the results of an op is in an order of its own, and along which axis with its experts."""
        if isinstance(op.kind, Dispatch):
            self._dispatched(op, op.kind, choice, made)
            return
        used = _integers(op.kind, given)
        for own in [self.own[t] for t in given if t in self.own and not any(t is u for u in used)][:1]:
            if isinstance(op.kind, _SAME) or own.what != "ends":  # of ends, a part of a sum is made
                self.own |= dict.fromkeys(made, own if isinstance(op.kind, _SAME) else replace(own, what="nothing"))
        if rule is None:
            return
        pairs = list(zip(rule.operands, given, strict=True))
        dims = {t: self.ordered[t].dims for _, t in pairs if t in self.ordered}
        names = {n for labels, t in pairs if labels for i in dims.get(t, ()) for n in labels[i]}
        if any(self.own[t].what == "rows" for t in used if t in self.own):
            names |= {*rule.fixed}
        routings = [o.routing for o in (self.own.get(t) or self.ordered.get(t) for _, t in pairs) if o is not None]
        for labels, t in zip(rule.results, made, strict=True):
            axes = frozenset(i for i, own_names in enumerate(labels) if names & {*own_names})
            if axes:
                self.ordered[t] = Order(axes, routings[0], axis)

    def _dispatched(self, op: Op, kind: Dispatch, choice: Choice, made: Sequence[Tensor]) -> None:
        rows, places = choice.results[0].dims[0], choice.results[2]
        if not rows:
            return
        ids = op.operands[0]
        routing = Routing(kind.experts, ids.sizes[-1], size_of(rows, op.results[0].sizes[0]), kind.owners)
        sizes = op.results[2].sizes[:-1]
        tokens = tidy(f for dim, n in zip(places.dims, sizes, strict=False) for f in (dim or (n,)))
        for t, what, factors in zip(made, ("tokens", "ends", "rows", "owners"), (tokens, (), rows, ()), strict=False):
            self.own[t] = Own(what, factors, rows, routing)
        self.ends[routing, made[1].graph] = made[1]
        self.ordered |= dict.fromkeys([made[0], *made[3:]], Order(frozenset({0}), routing))

    def counted(self, op: Op, choice: Choice) -> Choice:
        """Return where results lie: where rows end on each rank is a part of a sum over those that have others."""
        if not isinstance(op.kind, Dispatch):
            return choice
        tokens, ends, *rest = choice.results
        parts = tuple((axis, "sum") for axis in self.mesh if axis in tokens.axes)
        return replace(choice, results=[tokens, replace(ends, partial=parts), *rest])

    def need_kept(self, t: Tensor, before: Sequence[Factors], after: Sequence[Factors]) -> None:
        """Refuse to take what is in the order of a rank elsewhere."""
        lost = t in self.own and not _axes(before) & _axes([self.own[t].rows]) <= _axes(after)
        if lost or any(before[i] != after[i] for i in self._dims(t)):
            self.refuse(t)

    def _dims(self, t: Tensor) -> Collection[int]:
        return self.ordered[t].dims if t in self.ordered else ()

    def refuse(self, what: Op | Tensor) -> None:
        """Refuse what would mix the orders of several ranks."""
        raise UnsupportedError(
            f"shard: {what.name!r} is in the order of each rank, or has positions in it, which mean nothing elsewhere: "
            f"expected what is made of it to be split as its rows are"
        )


def _axes(dims: Sequence[Factors]) -> frozenset[str]:
    return frozenset(f for dim in dims for f in dim if isinstance(f, str))


def _integers(kind: OpKind, given: Sequence[Any]) -> Sequence[Any]:
    """Return the operands that say where rows go, or end."""
    if isinstance(kind, Indexed):
        return kind.places(given)
    return given[2:] if isinstance(kind, Grouped | GroupedOuter) else ()
