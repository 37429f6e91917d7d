"""Collectives on a device mesh as seen by one rank: reductions, gathers, point-to-point, local shards."""

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
from .fill import DenseFactory
from .registry import register

__all__ = [
    "COLLECTIVES",
    "REDUCING",
    "Unshard",
    "Collective",
    "Meshed",
    "LocalShard",
    "collective",
    "need_of_all",
    "Receive",
    "Send",
    "Pack",
    "Merge",
]


# -- collectives -------------------------------------------------------------------------------------------------------

#: Collectives; the size of an axis is multiplied by the number of ranks to the given power.
COLLECTIVES = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": -1, "all_to_all": 0, "send": 0}
#: Collectives that reduce.
REDUCING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Meshed(OpKind):
    """Op along a mesh axis, which gathers or splits each block on the tensor axis `dim`."""

    restricted = True
    ranks: Size
    axis: str = ""
    """Mesh axis name."""
    dim: Index = 0
    """Tensor axis that is gathered or split."""
    blocks: Size = ONE
    """Blocks on that axis, each distributed over all ranks: 1 if a shard is contiguous."""


def _are_limits(value: object) -> bool:
    return isinstance(value, tuple) and len(value) in (0, 2) and all(is_count(n, 1) for n in value)


@register
@dataclass(frozen=True, kw_only=True)
class Collective(Meshed):
    """Collective along a mesh axis, as seen by one rank."""

    name = "collective"
    collective: Annotated[str, one_of(*COLLECTIVES)]
    operation: Annotated[str, one_of("sum", "mean", "max", "min")] = "sum"
    """Reduction operation."""
    source: Annotated[int | None, optional("an integer of at least 0", is_count)] = None
    """Axis that an all-to-all gathers, None if it is the one that it splits."""
    source_blocks: Size = ONE
    """Blocks on the source axis."""
    inplace: Flag = False
    """Whether it works in place: an all-gather into the storage around its operand, a reduction into the operand, of
    which a reduce-scatter returns the local shard."""
    bucket: Annotated[tuple[int, ...], Rule("two numbers of bytes, or nothing", _are_limits)] = ()
    """Bucket sizes in bytes, for the first and for all other reductions: a full bucket is sent. Tensors of one dtype
    share buckets; empty if each is sent on its own."""
    ring: Flag = False
    """Whether it is a ring in steps, overlapped with compute: each shard is used, or added to, as it passes by."""
    writes = rules.all_results

    @property
    def sends(self) -> Poly:
        """Number of ring steps: all other shards pass by, and a sum also returns home."""
        return self.ranks if self.collective in REDUCING else self.ranks - 1

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer one rank's result."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        if x.domain is not None and not self.axis:  # on a mesh, the placement accounts for the domain
            raise ShapeError(f"collective of {x!r}, which is restricted to a domain: expected an unrestricted tensor")
        places = [i for i in (self.dim, self.source) if i is not None]
        if x.ndim and max(places) >= x.ndim:
            raise ShapeError(f"{self.collective} of {x!r} along axis {max(places)}, expected an existing axis")
        sizes = list(x.sizes)
        if sizes:
            sizes[self.dim] *= self.ranks ** COLLECTIVES[self.collective]
            if self.source is not None:
                sizes[self.dim] /= self.ranks
                sizes[self.source] *= self.ranks
        split = self.dim if self.source is not None or COLLECTIVES[self.collective] < 0 else None
        gathered = self.dim if COLLECTIVES[self.collective] > 0 else self.source
        domain = carried_parts(x, split, gathered, (self.axis, self.ranks))
        if self.inplace:
            if self.collective == "all_to_all" or (self.collective == "reduce_scatter" and self.blocks != ONE):
                raise ShapeError(f"{self.collective} of {x!r} in place, expected a result within its operand's storage")
            return [Result(tuple(sizes), x.dtype, x.strides, of=0, offset=x.offset, domain=domain)]
        return [Result(tuple(sizes), x.dtype, domain=domain)]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the operand's elements, or for a ring those of all passing shards."""
        if self.ring and self.collective == "all_gather":
            return (rules.elements(op.results[0]),)
        return rules.whole(self, op)

    def overwrites(self) -> tuple[int, ...]:
        """Return the operand if the op works in place."""
        return (0,) if self.inplace else ()

    def flops(self, op: Op) -> Flops:
        """Count one addition per element and rank but one, spread evenly over the ranks."""
        if self.collective not in REDUCING:
            return Flops()
        return Flops(pointwise=rules.points(op.operands[0]) * (self.ranks - 1) / self.ranks)


@register
@dataclass(frozen=True, kw_only=True)
class LocalShard(Meshed):
    """Local shard: a view if it is contiguous, else a copy."""

    name = "local_shard"
    flops = rules.free

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the first rank's shard; all ranks share its layout."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        if self.dim >= x.ndim:
            raise ShapeError(f"local_shard of {x!r} along axis {self.dim}, expected an existing axis")
        sizes = (*x.sizes[: self.dim], x.sizes[self.dim] / self.ranks, *x.sizes[self.dim + 1 :])
        domain = carried_parts(x, self.dim, None, (self.axis, self.ranks))
        if self.blocks != ONE:
            return [Result(sizes, x.dtype, domain=domain)]
        return [Result(sizes, x.dtype, x.strides, of=0, offset=x.offset, domain=domain)]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the copied elements."""
        (x,) = op.operands
        return (rules.elements(x) / self.ranks,) if self.blocks != ONE else rules.nothing(self, op)

    def writes(self, op: Op) -> tuple[Poly, ...]:
        """Return the copied elements."""
        return rules.all_results(self, op) if self.blocks != ONE else rules.nothing(self, op)


@register
@dataclass(frozen=True, kw_only=True)
class Unshard(Meshed):
    """Full tensor around a contiguous local shard: a view, uninitialized outside the shard."""

    name = "unshard"
    flops, reads, writes = rules.free, rules.nothing, rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the tensor that begins with the first rank's shard."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        if self.dim >= x.ndim or self.blocks != ONE:
            raise ShapeError(
                f"unshard of {x!r} along axis {self.dim}, expected a contiguous shard along an existing axis"
            )
        sizes = (*x.sizes[: self.dim], x.sizes[self.dim] * self.ranks, *x.sizes[self.dim + 1 :])
        domain = carried_parts(x, None, self.dim, (self.axis, self.ranks))
        return [Result(sizes, x.dtype, x.strides, of=0, offset=x.offset, domain=domain)]


def need_of_all(place: str, graph: Graph) -> None:
    """Raise GraphError unless a value is an all-device graph, not a per-rank graph."""
    need_graph(place, graph)
    if graph.sharding is not None or any(isinstance(op.kind, Meshed) and op.kind.axis for op in graph.walk()):
        raise GraphError(f"{place}: graph {graph.name!r} is already the graph of one rank, expected an unsharded graph")


def collective(x: Tensor, collective: str, ranks: object, *, name: str = "") -> Tensor:
    """Declare a collective, with the FLOPs for its reduction and the bytes read and written on one rank.

    Parameters
    ----------
    x : Tensor
        Operand on each rank.
    collective : str
        One of `COLLECTIVES`; all_gather multiplies the first axis by the ranks, reduce_scatter divides it.
    ranks : sympy.Expr or int
        Number of ranks.
    name : str
        Op name, by default the collective's.

    Returns
    -------
    Tensor
        Result on each rank.

    Notes
    -----
    `costgraph.shard` derives collectives from placements. The ranks of a declared one are assumed to be neighbours when
    its time is estimated.
    """
    need_choice("collective", collective, tuple(COLLECTIVES))
    kind = Collective(collective=collective, ranks=positive("collective: ranks", ranks))
    return apply(kind, [x], named(name, collective))[0]


# -- point-to-point ----------------------------------------------------------------------------------------------------


@register
@dataclass(frozen=True, kw_only=True)
class Receive(DenseFactory):
    """Tensor received from a neighbouring pipeline stage."""

    name = "receive"
    axis: str = "pp"
    """Mesh axis name."""


@register
@dataclass(frozen=True, kw_only=True)
class Send(OpKind):
    """Tensor sent to a neighbouring pipeline stage; the result is the tensor itself, which stays alive."""

    name = "send"
    axis: str = "pp"
    """Mesh axis name."""
    flops, reads, writes = rules.free, rules.whole, rules.nothing
    placed = splits.as_it_is

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the operand itself."""
        rules.need_operands(self, operands, 1)
        return [itself(operands[0])]


# -- flat buffers ------------------------------------------------------------------------------------------------------


@register
@dataclass(frozen=True, kw_only=True)
class Pack(OpKind):
    """Flattened copy into the buffer for a bucketed collective, the first operand."""

    name = "pack"
    flops, writes = rules.free, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the buffer."""
        if len(operands) < 2:
            raise ShapeError(f"pack of {len(operands)} operands, expected a buffer and at least one tensor")
        buffer, *tensors = operands
        size = total(t.numel for t in tensors)
        if not buffer.graph.same(buffer.numel, size) or any(t.dtype != buffer.dtype for t in tensors):
            raise ShapeError(f"pack of {tensors!r} into {buffer!r}, expected one format and {size} elements")
        return [itself(buffer)]

    def overwrites(self) -> tuple[int, ...]:
        """Return the buffer."""
        return (0,)

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the elements in all parts; the buffer is not read."""
        return (rules.nothing(self, op)[0], *rules.whole(self, op)[1:])


# -- expert-parallel tokens --------------------------------------------------------------------------------------------


@register
@dataclass(frozen=True, kw_only=True)
class Merge(OpKind):
    """Merge rows from several ranks, each sorted by expert, into one list sorted by expert.

    The operand holds the local experts' row offsets, rank by rank. Each rank sends the same number of rows.
    """

    name = "merge"
    restricted = True
    ranks: Size
    """Number of ranks."""
    axis: str
    """Mesh axis with the ranks."""
    rows: Size
    """Number of received rows."""
    chosen: Amount
    """Mean number of local experts that a token chooses."""
    owners: Flag = False
    """Whether to also return each row's local expert index."""
    reads, writes = rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the experts' end offsets, the source row for each position, and its inverse."""
        rules.need_operands(self, operands, 1)
        (ends,) = operands
        if ends.ndim != 1 or ends.dtype.kind != "int":
            raise ShapeError(f"row offsets {ends!r}: expected integers (ranks * experts,)")
        rows = [Result((self.rows,), find_dtype("int64"))] * (3 if self.owners else 2)
        return [Result((ends.sizes[0] / self.ranks,), ends.dtype), *rows]

    def flops(self, op: Op) -> Flops:
        """Count one per row for sorting, and the sums of row offsets over ranks."""
        return Flops(pointwise=self.rows + rules.elements(op.operands[0]))
