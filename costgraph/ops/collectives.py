"""What ranks of a mesh do together, as one of them sees it, and the part of a tensor that is its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ..algebra.polynomial import ONE, Poly, total
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Amount,
    Flag,
    Flops,
    Graph,
    Index,
    Op,
    OpKind,
    Result,
    Size,
    Tensor,
    apply,
    is_count,
    itself,
    named,
    need_choice,
    need_graph,
    one_of,
    optional,
    positive,
)
from ..notation.validation import Rule
from . import rules
from . import sharding_rule as splits
from .access_footprint import carried_parts
from .fill import Fresh
from .registry import register

__all__ = [
    "COLLECTIVES",
    "REDUCING",
    "Around",
    "Collective",
    "Meshed",
    "Part",
    "collective",
    "need_of_all",
    "Receive",
    "Send",
    "Pack",
    "Merge",
]


# -- collectives -------------------------------------------------------------------------------------------------------

#: Collectives and what each does to an axis: times the number of ranks, divided by it, or nothing.
COLLECTIVES = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": -1, "all_to_all": 0, "send": 0}
#: Those that put the values of all ranks together.
REDUCING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Meshed(OpKind):
    """What is said along an axis of a mesh: of a tensor's axis `dim`, each of some blocks is split or put together."""

    restricted = True
    ranks: Size
    axis: str = ""
    """Name of the axis of the mesh."""
    dim: Index = 0
    """The axis of the tensor that is put together or split."""
    blocks: Size = ONE
    """Blocks of that axis, of each of which every rank has a part: 1 where its part is one piece."""


def _are_limits(value: object) -> bool:
    return isinstance(value, tuple) and len(value) in (0, 2) and all(is_count(n, 1) for n in value)


@register
@dataclass(frozen=True, kw_only=True)
class Collective(Meshed):
    """What ranks do together, as one of them sees it."""

    name = "collective"
    collective: Annotated[str, one_of(*COLLECTIVES)]
    operation: Annotated[str, one_of("sum", "mean", "max", "min")] = "sum"
    """How a reduction puts values together."""
    source: Annotated[int | None, optional("an integer of at least 0", is_count)] = None
    """The axis that an all-to-all puts together, None where it is the one that it splits."""
    source_blocks: Size = ONE
    """Its blocks."""
    inplace: Flag = False
    """Whether it writes where its operand is: an all-gather into the storage of which that is a part, a reduction into
    the operand, of which a reduce-scatter's result is the rank's own part."""
    bucket: Annotated[tuple[int, ...], Rule("two numbers of bytes, or nothing", _are_limits)] = ()
    """Bytes from which on a message of several reductions is full, the first one and all others: what is reduced goes
    with others of its format; nothing where each is a message."""
    ring: Flag = False
    """Whether each rank uses a part as it passes by in a ring, or adds to it: sends to the next rank, one by one."""
    writes = rules.all_results

    @property
    def sends(self) -> Poly:
        """How often a rank of a ring sends a part: all parts but its own pass by, a sum comes home as well."""
        return self.ranks if self.collective in REDUCING else self.ranks - 1

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return what each rank gets."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        if x.domain is not None and not self.axis:  # what lies on a mesh has its parts elsewhere
            raise ShapeError(f"collective of {x!r}, which is restricted to a domain: expected a whole tensor")
        places = [i for i in (self.dim, self.source) if i is not None]
        if x.ndim and max(places) >= x.ndim:
            raise ShapeError(f"{self.collective} of {x!r} along axis {max(places)}, expected one that it has")
        sizes = list(x.sizes)
        if sizes:
            sizes[self.dim] *= self.ranks ** COLLECTIVES[self.collective]
            if self.source is not None:
                sizes[self.dim] /= self.ranks
                sizes[self.source] *= self.ranks
        split = self.dim if self.source is not None or COLLECTIVES[self.collective] < 0 else None
        joined = self.dim if COLLECTIVES[self.collective] > 0 else self.source
        domain = carried_parts(x, split, joined, (self.axis, self.ranks))
        if self.inplace:
            if self.collective == "all_to_all" or (self.collective == "reduce_scatter" and self.blocks != ONE):
                raise ShapeError(f"{self.collective} of {x!r} in place, expected a result that lies in its operand")
            return [Result(tuple(sizes), x.dtype, x.strides, of=0, offset=x.offset, domain=domain)]
        return [Result(tuple(sizes), x.dtype, domain=domain)]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return what the rank brings, of a ring all that passes by."""
        if self.ring and self.collective == "all_gather":
            return (rules.elements(op.results[0]),)
        return rules.whole(self, op)

    def overwrites(self) -> tuple[int, ...]:
        """Return the operand where what the others bring is written into it or beside it."""
        return (0,) if self.inplace else ()

    def flops(self, op: Op) -> Flops:
        """Count one addition for each element and each rank but one, spread evenly over the ranks."""
        if self.collective not in REDUCING:
            return Flops()
        return Flops(pointwise=rules.points(op.operands[0]) * (self.ranks - 1) / self.ranks)


@register
@dataclass(frozen=True, kw_only=True)
class Part(Meshed):
    """The part of a tensor that is a rank's own: a view where it is one piece, else a copy."""

    name = "part"
    flops = rules.free

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the part of the first rank, which lies as those of the others do."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        if self.dim >= x.ndim:
            raise ShapeError(f"part of {x!r} along axis {self.dim}, expected one that it has")
        sizes = (*x.sizes[: self.dim], x.sizes[self.dim] / self.ranks, *x.sizes[self.dim + 1 :])
        domain = carried_parts(x, self.dim, None, (self.axis, self.ranks))
        if self.blocks != ONE:
            return [Result(sizes, x.dtype, domain=domain)]
        return [Result(sizes, x.dtype, x.strides, of=0, offset=x.offset, domain=domain)]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return what is copied."""
        (x,) = op.operands
        return (rules.elements(x) / self.ranks,) if self.blocks != ONE else rules.nothing(self, op)

    def writes(self, op: Op) -> tuple[Poly, ...]:
        """Return the copy."""
        return rules.all_results(self, op) if self.blocks != ONE else rules.nothing(self, op)


@register
@dataclass(frozen=True, kw_only=True)
class Around(Meshed):
    """The tensor of which another one is a rank's own part, one piece: a view, beside the part whatever is there."""

    name = "around"
    flops, reads, writes = rules.free, rules.nothing, rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return what the part of the first rank begins."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        if self.dim >= x.ndim or self.blocks != ONE:
            raise ShapeError(f"around {x!r} along axis {self.dim}, expected a part in one piece along an axis of it")
        sizes = (*x.sizes[: self.dim], x.sizes[self.dim] * self.ranks, *x.sizes[self.dim + 1 :])
        domain = carried_parts(x, None, self.dim, (self.axis, self.ranks))
        return [Result(sizes, x.dtype, x.strides, of=0, offset=x.offset, domain=domain)]


def need_of_all(place: str, graph: Graph) -> None:
    """Refuse the graph of one rank of a mesh: what the others do to it is in there already.

    GraphError if it is that of one rank, or no graph.
    """
    need_graph(place, graph)
    if graph.sharding is not None or any(isinstance(op.kind, Meshed) and op.kind.axis for op in graph.walk()):
        raise GraphError(f"{place}: graph {graph.name!r} is that of one rank already, expected one of all devices")


def collective(x: Tensor, collective: str, ranks: object, *, name: str = "") -> Tensor:
    """Declare a collective over some ranks: its reduction's FLOPs and what it reads and writes on one rank.

    Parameters
    ----------
    x : Tensor
        What each rank brings.
    collective : str
        One of `COLLECTIVES`; all_gather multiplies the first axis by the ranks, reduce_scatter divides it.
    ranks : sympy.Expr or int
        Number of ranks.
    name : str
        Name of the op, by default the collective's.

    Returns
    -------
    Tensor
        What each rank gets.

    Notes
    -----
    Collectives that follow from where tensors lie on a mesh are derived: `costgraph.shard`. Of one that is declared the
    ranks are next to each other, where a time is asked for.
    """
    need_choice("collective", collective, tuple(COLLECTIVES))
    kind = Collective(collective=collective, ranks=positive("collective: ranks", ranks))
    return apply(kind, [x], named(name, collective))[0]


# -- hops --------------------------------------------------------------------------------------------------------------
# What stages of a pipeline hand to their neighbours, as one of them sees it.


@register
@dataclass(frozen=True, kw_only=True)
class Receive(Fresh):
    """A tensor that a neighbour along an axis of the mesh has sent."""

    name = "receive"
    axis: str = "pp"
    """Name of the axis."""


@register
@dataclass(frozen=True, kw_only=True)
class Send(OpKind):
    """A tensor that goes to a neighbour along an axis of the mesh; its result is the tensor, which stays here."""

    name = "send"
    axis: str = "pp"
    """Name of the axis."""
    flops, reads, writes = rules.free, rules.whole, rules.nothing
    placed = splits.as_it_is

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the tensor."""
        rules.need_operands(self, operands, 1)
        return [itself(operands[0])]


# -- pack --------------------------------------------------------------------------------------------------------------
# Tensors beside each other in one buffer: what a collective of many of them brings.


@register
@dataclass(frozen=True, kw_only=True)
class Pack(OpKind):
    """The elements of all further operands, one after the other, written into the first."""

    name = "pack"
    flops, writes = rules.free, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the buffer."""
        if len(operands) < 2:
            raise ShapeError(f"pack of {len(operands)} operands, expected a buffer and a tensor at least")
        buffer, *parts = operands
        size = total(t.numel for t in parts)
        if not buffer.graph.same(buffer.numel, size) or any(t.dtype != buffer.dtype for t in parts):
            raise ShapeError(f"pack of {parts!r} into {buffer!r}, expected one format and {size} elements")
        return [itself(buffer)]

    def overwrites(self) -> tuple[int, ...]:
        """Return the buffer."""
        return (0,)

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return all parts, and nothing of the buffer."""
        return (rules.nothing(self, op)[0], *rules.whole(self, op)[1:])


# -- merge -------------------------------------------------------------------------------------------------------------
# Rows that ranks have sent to those that have their experts, put in order there.


@register
@dataclass(frozen=True, kw_only=True)
class Merge(OpKind):
    """Rows that came from several ranks, those of each ordered by expert, as one list that is ordered by expert.

    It is given where on each rank the rows of this one's experts end, rank by rank. As many rows come from each.
    """

    name = "merge"
    restricted = True
    ranks: Size
    """How many they are."""
    axis: str
    """The axis of a mesh that they are on."""
    rows: Size
    """How many rows have come."""
    chosen: Amount
    """How many of the experts here a token chooses, in the mean."""
    owners: Flag = False
    """Whether the expert of each row is wanted as well: its number here."""
    reads, writes = rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Where the rows of each expert end, which row stands where, and where each one is."""
        rules.need_operands(self, operands, 1)
        (ends,) = operands
        if ends.ndim != 1 or ends.dtype.kind != "int":
            raise ShapeError(f"rows that end at {ends!r}: expected integers (ranks * experts,)")
        rows = [Result((self.rows,), find_dtype("int64"))] * (3 if self.owners else 2)
        return [Result((ends.sizes[0] / self.ranks,), ends.dtype), *rows]

    def flops(self, op: Op) -> Flops:
        """Count one for each row to order it, and the sums over experts of all ranks: where rows end."""
        return Flops(pointwise=self.rows + rules.elements(op.operands[0]))
