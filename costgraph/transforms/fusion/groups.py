"""Groups of ops that one kernel runs, put together two at a time, in an order that stays legal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.tensor import Storage, Tensor
from ...ops.blocks import Kernel
from ...ops.keep import Keep
from ...ops.pointwise import Pointwise
from ...ops.reduce import Reduce
from ...ops.stochastic import Dropout
from .spaces import Space, in_order, is_view, joined, leading, space_of

__all__ = ["base_of", "grouped"]

#: Tensors that a loop may read to be computed again where it is read, once, or in several places: torch 2.13,
#: torch/_inductor/config.py:861 and 870, realize_reads_threshold and realize_acc_reads_threshold.
_MOST_READ, _MOST_READ_ONCE = 4, 8


@dataclass(eq=False)
class _Group:
    """Ops of one kernel, in program order."""

    ops: list[Op]
    space: Space | None
    """None of what is no loop nest: it stays alone."""


def grouped(graph: Graph, *, epilogues: bool) -> list[tuple[list[Op], list[Tensor]]]:
    """Return the ops of a graph in groups, in an order in which these can run, and what each makes for others.

    Views are in none of them.

    Parameters
    ----------
    graph : Graph
        One of bodies stays as it is.
    epilogues : bool
        Whether products take what is done with each element of their results.
    """
    found = _Groups(graph, epilogues=epilogues)
    while found.step():
        pass
    return [(group.ops, found.exported(group.ops, group.ops)) for group in found.order]


def base_of(t: Tensor) -> Tensor:
    """Return the tensor that was made, where one is a view of it."""
    while t.producer is not None and is_view(t.producer):
        t = t.producer.operands[0]
    return t


class _Groups:
    def __init__(self, graph: Graph, *, epilogues: bool) -> None:
        self.graph = graph
        self.ops = [op for op in graph.ops if not is_view(op)]
        self.before = dict(_before(self.ops))
        self.place = {op: i for i, op in enumerate(self.ops)}
        self.readers: dict[Tensor, dict[Op, None]] = {}
        """Of each tensor that was made the ops that read it or a view of it."""
        for op in self.ops:
            for t in _read(op):
                self.readers.setdefault(base_of(t), {})[op] = None
        self.kept = {base_of(t) for t in (*graph.outputs, *graph.gradients, *graph.gradients.values())}
        self.made: dict[Storage, list[Tensor]] = {}
        """What a storage is made for, and what ops that write into it make of it."""
        for op in self.ops:
            for t in op.results:
                self.made.setdefault(t.storage, []).append(t)
        self.of: dict[Op, _Group] = {}
        self.order: list[_Group] = []
        live = self.live()
        for op in self.ops:
            space = space_of(op) if op in live else None
            self.of[op] = _Group([op], None if space is not None and space.product and not epilogues else space)
            self.order.append(self.of[op])

    def live(self) -> set[Op]:
        """Return the ops that anything comes of: of loops that nobody needs a compiler makes no kernel."""
        found: set[Op] = set()
        for op in reversed(self.ops):
            read = (t in self.kept or not found.isdisjoint(self.readers.get(t, ())) for t in op.results)
            if op.kind.overwrites() or space_of(op) is None or any(read):
                found.add(op)
        return found

    def step(self) -> bool:
        """Put together what reads with what makes, then what reads the same; return whether anything was."""
        found = [self.joins(a, b) for a, b in self.edges()]
        if not any(found):
            found = [self.joins(a, b) for a, b in self.beside()]
        return any(found)

    def edges(self) -> Iterator[tuple[Op, Op]]:
        """Yield pairs of an op and one that reads what it makes."""
        for op in self.ops:
            for producer in dict.fromkeys(base_of(t).producer for t in op.operands):
                if producer is not None:
                    yield producer, op

    def beside(self) -> Iterator[tuple[Op, Op]]:
        """Yield pairs of ops that read all of one tensor."""
        for t, readers in self.readers.items():
            if t.sizes:
                whole = [op for op in readers if any(base_of(v) is t and in_order(v, t) for v in op.operands)]
                yield from pairwise(whole)

    def joins(self, first: Op, second: Op) -> bool:
        """Make one group of those of two ops, if that is legal and is worth it."""
        a, b = self.of[first], self.of[second]
        if a is b or a.space is None or b.space is None or a.ops[0].phase != b.ops[0].phase:
            return False
        if self.order.index(a) > self.order.index(b):
            return self.joins(second, first)
        space = self.space(a, a.space, b, b.space)
        if space is None:
            return False
        made = _Group(sorted([*a.ops, *b.ops], key=self.place.__getitem__), space)
        return self.is_sound(made) and self.reorder(a, b, made)

    def space(self, a: _Group, over: Space, b: _Group, then: Space) -> Space | None:
        """Return the space of one kernel of two groups, the second of which may read what the first makes."""
        both = joined(self.graph, over, then)
        edges = [(base_of(t), t, op) for op in b.ops for t in op.operands if base_of(t).producer in a.ops]
        if not all(t.domain in (None, op.results[0].domain) for _, t, op in edges):
            return None
        if both is not None and all(self.fits(both, *edge) for edge in edges):
            return both
        plain = over.rows is None and not over.product and not then.product
        once = self.graph.same(over.points, then.points)
        return then if plain and edges and self.is_inlined(a, b, _MOST_READ_ONCE if once else _MOST_READ) else None

    def fits(self, space: Space, made: Tensor, seen: Tensor, reader: Op) -> bool:
        """Whether a block of threads has made what it reads: the same points, or the numbers of its own rows."""
        same, kind = self.graph.same, reader.kind
        if not isinstance(kind, Pointwise | Dropout | Reduce | Kernel):
            return False
        points = reader.results[0].numel if isinstance(kind, Pointwise) else seen.numel
        if same(made.numel, points):
            # a reduction that is spread over blocks is not there yet, and rows are those of memory
            late = space.across is not None and not same(made.numel, space.rows or space.points)
            return in_order(seen, made) and not late and (space.rows is None or made.is_contiguous)
        shape = reader.results[0].sizes if isinstance(kind, Pointwise) else seen.sizes
        by_rows = space.rows is not None and space.across is None and same(made.numel, space.rows)
        return by_rows and same(points, space.points) and leading(seen, shape, made.numel)

    def is_inlined(self, a: _Group, b: _Group, most: int) -> bool:
        """Whether loops are computed where they are read, whatever the order: for it alone and of few operands."""
        read = {base_of(t) for op in a.ops for t in op.operands if base_of(t).producer not in a.ops}
        return len(read) <= most and not self.exported([*a.ops, *b.ops], a.ops)

    def exported(self, members: Sequence[Op], makers: Sequence[Op]) -> list[Tensor]:
        """Return what some members make that is read outside."""
        inside = set(members)
        made = [t for op in makers for t in op.results]
        return [t for t in made if t in self.kept or not inside.issuperset(self.readers.get(t, ()))]

    def is_sound(self, group: _Group) -> bool:
        """Whether it has results, each of which can be written into memory of its own."""
        out = self.exported(group.ops, group.ops)
        if not out:
            return False
        for op in group.ops:
            if op.kind.overwrites():
                first, *others = self.made[op.results[0].storage]
                inside = first.producer in group.ops
                # what the caller owns, or a loop hands on, is changed for others as well
                if first.is_view or sum(t in out for t in (first, *others)) > int(inside):
                    return False
        return True

    def reorder(self, a: _Group, b: _Group, made: _Group) -> bool:
        """Put one group in place of two, behind it what needs the first of them, unless the second needs that."""
        first, last = self.order.index(a), self.order.index(b)
        later: list[_Group] = []
        needing = {a}
        between: list[_Group] = []
        for group in self.order[first + 1 : last]:
            if needing.isdisjoint(self.needed(group)):
                between.append(group)
            else:
                needing.add(group)
                later.append(group)
        if not self.needed(b).isdisjoint(later):
            return False
        self.order[first : last + 1] = [*between, made, *later]
        self.of |= dict.fromkeys(made.ops, made)
        return True

    def needed(self, group: _Group) -> set[_Group]:
        """Return the groups that have to run before one."""
        return {self.of[op] for member in group.ops for op in self.before[member]} - {group}


def _read(op: Op) -> tuple[Tensor, ...]:
    """Return the operands that an op reads: a `Keep` extends lifetimes and reads nothing."""
    if not isinstance(op.kind, Keep):
        return op.operands
    (made,) = op.results
    return op.operands[:1] if op.graph.out_degree(made) or made in op.graph.outputs else ()


def _before(ops: Sequence[Op]) -> Iterator[tuple[Op, set[Op]]]:
    """Yield each op with those that have to run before it: what makes its operands, and what uses memory it writes."""
    written: dict[Storage, Op] = {}
    read: dict[Storage, list[Op]] = {}
    for op in ops:
        needed = {maker for t in op.operands if (maker := base_of(t).producer) is not None}
        over = {op.operands[i].storage for i in op.kind.overwrites()}
        for storage in dict.fromkeys(t.storage for t in op.operands):
            if storage in written:
                needed.add(written[storage])
            if storage in over:
                needed.update(read.pop(storage, ()))
                written[storage] = op
            else:
                read.setdefault(storage, []).append(op)
        yield op, needed - {op}
