"""Rows that each rank has ordered for itself: where positions in them mean something, and which tensors have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UnsupportedError
from ...graph.op import Op
from ...graph.placement import Factors, Split, tidy
from ...graph.tensor import Tensor
from ...ops.grouped import Dispatch, Grouped, GroupedOuter
from ...ops.index import Indexed, Scatter
from ...ops.keep import Keep, StopGradient
from ...ops.moves import Rearrange
from .choice import Choice

__all__ = ["Own", "Rows"]

#: Kinds that hand positions on as they are.
_SAME = (Keep, StopGradient, Rearrange)


@dataclass(frozen=True)
class Own:
    """What integers say on one rank."""

    what: str
    """positions of tokens or of rows, ends of rows, or nothing that is known"""
    factors: Factors
    """parts of the axis that the positions are on"""
    rows: Factors
    """parts of the rows"""


class Rows:
    """What of the tensors of a rank is in an order of its own."""

    def __init__(self) -> None:
        self.own: dict[Any, Own] = {}
        """New tensors of integers that mean something on their rank alone."""
        self.ordered: dict[Any, frozenset[int]] = {}
        """New tensors of which axes are rows in the order of their rank."""

    def stands_for(self, made: Tensor, t: Tensor) -> None:
        """Note that a new tensor is another one elsewhere in the graph, a slice or a stack of it perhaps."""
        if t in self.own:
            self.own[made] = self.own[t]
        if t in self.ordered:
            self.ordered[made] = frozenset(i + made.ndim - t.ndim for i in self.ordered[t])

    def rule(self, op: Op, rule: Split, given: Sequence[Any]) -> Split:
        """Return the rule of an op where operands have an order of their own."""
        kind = op.kind
        if isinstance(kind, Grouped | GroupedOuter):
            ends = self.own.get(given[2])
            rows = given[:1] if isinstance(kind, Grouped) else given[:2]
            if any((t in self.ordered) != (ends is not None and ends.what == "ends") for t in rows):
                self.refuse(op)
            return rule if ends is None else replace(rule, fixed={"r": ends.rows}, whole=frozenset("e"))
        if not isinstance(kind, Indexed):
            return rule
        found = [self.own[t] for t in kind.places(given) if t in self.own]
        if not found:
            return rule
        (own, *others), table = found, given[0]
        # a target that is made for this op has no order yet
        in_order = table in self.ordered or (isinstance(kind, Scatter) and not isinstance(table, Tensor))
        fits = own.what == ("rows" if table in self.ordered else "tokens") or (in_order and own.what == "rows")
        if others or kind.batch or not fits:
            self.refuse(op)
        _, ids, names = kind.names(op)
        paired = frozenset(n for axis in ids for n in axis)
        return replace(
            rule, fixed={names[0]: own.factors}, paired=paired, reduced=dict.fromkeys(paired, "own"), into=None,
            once=frozenset(), local=lambda extents, ranks: kind,
        )  # fmt: skip

    def note(self, op: Op, rule: Split | None, choice: Choice, given: Sequence[Any], made: Sequence[Tensor]) -> None:
        """Note what of the results of an op is in an order of its own."""
        if isinstance(op.kind, Dispatch):
            self._dispatched(op, choice, made)
            return
        used = op.kind.places(given) if isinstance(op.kind, Indexed) else ()
        used = given[2:] if isinstance(op.kind, Grouped | GroupedOuter) else used
        for own in [self.own[t] for t in given if t in self.own and not any(t is u for u in used)][:1]:
            self.own |= dict.fromkeys(made, own if isinstance(op.kind, _SAME) else replace(own, what="nothing"))
        if rule is None:
            return
        pairs = zip(rule.operands, given, strict=True)
        names = {n for labels, t in pairs if labels for i in self.ordered.get(t, ()) for n in labels[i]}
        if any(self.own[t].what == "rows" for t in used if t in self.own):
            names |= {*rule.fixed}
        for labels, t in zip(rule.results, made, strict=True):
            axes = frozenset(i for i, own_names in enumerate(labels) if names & {*own_names})
            if axes:
                self.ordered[t] = axes

    def _dispatched(self, op: Op, choice: Choice, made: Sequence[Tensor]) -> None:
        rows, places = choice.results[0].dims[0], choice.results[2]
        if not rows:
            return
        sizes = op.results[2].sizes[:-1]
        tokens = tidy(f for dim, n in zip(places.dims, sizes, strict=False) for f in (dim or (n,)))
        for t, what, factors in zip(made, ("tokens", "ends", "rows"), (tokens, (), rows), strict=False):
            self.own[t] = Own(what, factors, rows)
        self.ordered |= dict.fromkeys([made[0], *made[3:]], frozenset({0}))

    def need_kept(self, t: Tensor, before: Sequence[Factors], after: Sequence[Factors]) -> None:
        """Refuse to take what is in the order of a rank elsewhere."""
        lost = t in self.own and not _axes(before) & _axes([self.own[t].rows]) <= _axes(after)
        if lost or any(before[i] != after[i] for i in self.ordered.get(t, ())):
            self.refuse(t)

    def refuse(self, what: Op | Tensor) -> None:
        """Refuse what would mix the orders of several ranks."""
        raise UnsupportedError(
            f"shard: {what.name!r} is in the order of each rank, or has positions in it, which mean nothing elsewhere: "
            f"expected what is made of it to be split as its rows are"
        )


def _axes(dims: Sequence[Factors]) -> frozenset[str]:
    return frozenset(f for dim in dims for f in dim if isinstance(f, str))
