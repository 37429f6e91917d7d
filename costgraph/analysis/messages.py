"""Which messages what is reduced in buckets goes in: how many there are, and how large each is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..algebra.polynomial import Poly
from ..errors import BindingError
from ..graph.graph import Graph
from ..graph.loop import is_pass
from ..graph.op import Op
from ..ops.collectives import Collective

__all__ = ["Bucketed", "bucketed"]


@dataclass
class Bucketed:
    """What a reduction in buckets takes part in, in one backward pass."""

    parts: dict[int, int] = field(default_factory=dict)
    """Bytes of messages, and how many of them are its own, all of its runs together."""
    runs: int = 0
    """How often it runs."""
    completes: int = 0
    """How many messages it is the last one of."""


def bucketed(graph: Graph, values: Mapping[str, Poly]) -> Mapping[Op, Bucketed]:
    """Return what reductions in buckets take part in, for sizes of all parameters.

    Each format has a bucket that is open. What is reduced is added to it in the order of the program; once it has as
    many bytes as its limit it is a message, and what is left at the end of a backward pass is the last one:
    `compute_bucket_assignment_by_size` of torch/csrc/distributed/c10d/reducer.cpp. BindingError if the size of a
    gradient or the number of layers is open.
    """
    wanted = dict(values)
    if graph.cache.get("bucketed", (None,))[0] != wanted:
        graph.cache["bucketed"] = wanted, _bucketed(graph, values)
    out: Mapping[Op, Bucketed] = graph.cache["bucketed"][1]
    return out


@dataclass
class _Open:
    """A bucket that is not full yet."""

    members: list[Op] = field(default_factory=list)
    size: int = 0
    before: int = 0
    """How many of its kind are full."""


def _bucketed(graph: Graph, values: Mapping[str, Poly]) -> Mapping[Op, Bucketed]:
    own: dict[Op, int] = {}
    open_: dict[object, _Open] = defaultdict(_Open)
    found: dict[Op, Bucketed] = {}

    def close(bucket: _Open) -> None:
        for op in bucket.members:
            parts = found.setdefault(op, Bucketed()).parts
            parts[bucket.size] = parts.get(bucket.size, 0) + own[op]
            found[op].runs += 1
        found[op].completes += 1
        bucket.members, bucket.size, bucket.before = [], 0, bucket.before + 1

    for op, kind in _in_order(graph, values):
        (x,) = op.operands
        if op not in own:
            own[op] = _number(op, "bytes", x.numel * x.element_bytes(), values)
        bucket = open_[kind.axis, x.dtype]
        bucket.members.append(op)
        bucket.size += own[op]
        if bucket.size >= kind.bucket[min(bucket.before, 1)]:
            close(bucket)
    for bucket in open_.values():
        if bucket.members:
            close(bucket)
    return found


def _in_order(graph: Graph, values: Mapping[str, Poly]) -> Iterator[tuple[Op, Collective]]:
    """Yield reductions in buckets as often as a backward pass runs them: of micro-batches one."""
    for op in graph.ops:
        if isinstance(op.kind, Collective) and op.kind.bucket:
            yield op, op.kind
        elif op.loop is not None and any(isinstance(o.kind, Collective) and o.kind.bucket for o in op.loop.body.walk()):
            once = is_pass(op.loop.body)
            for _ in range(1 if once else _number(op, "iterations", op.loop.count, values)):
                yield from _in_order(op.loop.body, values)


def _number(op: Op, what: str, size: Poly, values: Mapping[str, Poly]) -> int:
    found = size.bind(values).constant
    if found is None:
        raise BindingError(
            f"messages of {op.name!r}: {size.bind(values)} {what}, expected sizes of parameters that are bound: what "
            f"fills a bucket is a number of bytes"
        )
    return int(found)
