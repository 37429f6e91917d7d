"""Fusion: several ops become one kernel, so that what they pass to each other never reaches memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

from ..algebra.polynomial import ONE, ZERO, Poly, total
from ..dtypes import promote
from ..errors import GraphError
from ..ir.graph import Graph, Op, Storage, Tensor, building, need_flag
from ..ir.strides import Sizes, contiguous, numel
from ..notation.pattern import Pattern
from ..ops.einsum import Einsum
from ..ops.elementwise import Dropout, Pointwise
from ..ops.fill import Fill
from ..ops.index import Gather, Scatter
from ..ops.keep_alive import Keep
from ..ops.layout import Concat, Expand, Rearrange, Slice
from ..ops.loops import Kernel
from ..ops.pooling import Pool
from ..ops.reduce import Reduce
from .rewrite import Rewriter, map_stages

__all__ = [
    "Space",
    "casts_alone",
    "in_order",
    "is_view",
    "joined",
    "leading",
    "space_of",
    "base_of",
    "grouped",
    "fuse",
]


# -- spaces ------------------------------------------------------------------------------------------------------------
# Index points that an op runs over, and which ops may run over theirs in one kernel.

#: Tensors that are joined where they are read: torch 2.13, torch/_inductor/config.py, max_complex_pointwise_cat_inputs.
_MOST_JOINED = 8


@dataclass(frozen=True)
class Space:
    """Index points of a kernel, as those of a loop nest."""

    points: Poly
    """Of all its loops, the reduced ones included."""
    rows: Poly | None = None
    """Results of its reductions, None where nothing is reduced."""
    across: tuple[Poly, ...] | None = None
    """Strides of the axes that are left, of a reduction whose rows are spread over blocks of threads: its results are
    there when these have ended."""
    product: bool = False
    """Whether it is a product of a library, which may do something with each element of its result."""


def space_of(op: Op) -> Space | None:
    """Return the index points of an op that a compiler makes loops of, or of a product; None of anything else."""
    kind = op.kind
    if _is_spot(op):
        return Space(op.results[0].numel)
    if (op.workspace and not casts_alone(op)) or (kind.overwrites() and not isinstance(kind, Pointwise)):
        return None
    if isinstance(kind, Reduce):
        return _space_of_reduction(op.operands[0], op.results[0].numel, kind.pattern)
    if isinstance(kind, Kernel):
        return _space_of_kernel(op)
    if isinstance(kind, Einsum):
        return Space(op.results[0].numel, product=kind.summed)
    joins = isinstance(kind, Concat) and not kind.stacked and len(op.operands) <= _MOST_JOINED
    loops = joins or isinstance(kind, Pointwise | Dropout | Gather | Pool | Rearrange)
    return Space(op.results[0].numel) if loops else None


def casts_alone(op: Op) -> bool:
    """Whether the workspace of an op is what it casts first, which a kernel of a compiler does on the way."""
    if not op.workspace or op.body is None or len(op.body.ops) != 1:
        return False
    if not isinstance(op.body.ops[0].kind, Pointwise | Reduce):
        return False
    operands = [t for t in op.operands if t.ndim]
    wanted = {op.results[0].dtype, reduce(promote, (t.dtype for t in op.operands))}
    casts = [total(t.numel * dtype.bytes for t in operands if t.dtype != dtype) for dtype in wanted]
    return op.workspace in casts


def _is_spot(op: Op) -> bool:
    """Whether one element of each row of a constant is written, which a compiler does by comparing places.

    torch 2.13's inductor: `scatter_upon_const_tensor` (torch/_inductor/fx_passes/joint_graph.py:1094).
    """
    if not isinstance(op.kind, Scatter) or op.workspace:
        return False
    target, ids, *_ = op.operands
    filled = target.producer is not None and isinstance(target.producer.kind, Fill)
    return filled and 0 < op.kind.batch == target.ndim - 1 and ids.sizes[op.kind.batch :] == (ONE,)


def _space_of_reduction(x: Tensor, rows: Poly, pattern: Pattern) -> Space:
    """Return that of a reduction: a row of trailing axes stays with one block of threads, unless it is the only one."""
    names = pattern.operand_names(0)
    kept = [names.index(n) for n in pattern.result_names]
    if kept == list(range(len(kept))) and rows != ONE:
        return Space(x.numel, rows)
    strides = contiguous(x.sizes)
    return Space(x.numel, rows, across=tuple(strides[i] for i in kept))


def _space_of_kernel(op: Op) -> Space | None:
    """Return that of ops which are fused already: of elementwise ones and of reductions of the same rows."""
    assert op.body is not None
    found: Space | None = None
    for inner in op.body.ops:
        space = Space(ONE) if is_view(inner) or isinstance(inner.kind, Fill) else space_of(inner)
        if space is None or space.across is not None:
            return None
        if space.rows is not None or space.product:
            if found is not None and (found != space or space.product):
                return None
            found = space
    of_results = {t.numel for t in op.results}
    if found is None:
        return Space(op.results[0].numel) if len(of_results) == 1 else None
    return found if of_results <= {found.points, found.rows} else None


def is_view(op: Op) -> bool:
    """Whether an op only looks at the storage of its operand in another way."""
    return isinstance(op.kind, Rearrange | Slice | Expand) and op.results[0].storage is op.operands[0].storage


def joined(graph: Graph, a: Space, b: Space) -> Space | None:
    """Return the space of one kernel that runs over both, None where there is none.

    These are the rules of torch 2.13's inductor, `SIMDScheduling.can_fuse` (torch/_inductor/codegen/simd.py:1998):
    loops over equal numbers of points; reductions over equal numbers of rows, and of points in each; and loops beside
    a reduction over its points or over its rows. One that is spread over blocks is split into two (`num_splits`,
    torch/_inductor/ir.py): the second has its rows alone. A product takes what runs over its results, as a template.
    """
    if a.product or b.product:
        one, other = (a, b) if a.product else (b, a)
        fits = not other.product and other.rows is None and graph.same(a.points, b.points)
        return one if fits else None
    if a.rows is not None and b.rows is not None:
        fits = a.across == b.across and graph.same(a.points, b.points) and graph.same(a.rows, b.rows)
        return a if fits else None
    one, other = (b, a) if a.rows is None else (a, b)
    fits = one.across is None and graph.same(other.points, one.points)
    return one if fits or (one.rows is not None and graph.same(other.points, one.rows)) else None


def in_order(seen: Tensor, made: Tensor) -> bool:
    """Whether a view of a tensor has all its elements, in the order in which they were made."""
    return seen is made or (seen.graph.same(seen.numel, made.numel) and seen.is_contiguous and made.is_contiguous)


def leading(seen: Tensor, shape: Sizes, rows: Poly) -> bool:
    """Whether an operand of ops over a shape is one number for each of its rows: the same along all trailing axes."""
    graph, missing = seen.graph, len(shape) - seen.ndim
    strides = (ZERO,) * missing + tuple(s if n != ONE else ZERO for n, s in zip(seen.sizes, seen.strides, strict=True))
    last = max((i for i, s in enumerate(strides) if s), default=-1)
    outer = shape[: last + 1]
    dense = all(graph.same(s, numel(outer[i + 1 :])) for i, s in enumerate(strides[: last + 1]) if shape[i] != ONE)
    return dense and graph.same(numel(outer), rows)


# -- groups ------------------------------------------------------------------------------------------------------------
# Groups of ops that one kernel runs, put together two at a time, in an order that stays legal.

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


# -- fuse --------------------------------------------------------------------------------------------------------------


def fuse(graph: Graph, /, scope: str | None = None, *, epilogues: bool = False) -> Graph:
    """Fuse ops into kernels.

    Parameters
    ----------
    graph : Graph
        What is fused; it stays as it is.
    scope : str, optional
        Fuse every op inside this module scope, whatever its kind, into one kernel for each place where it runs. By
        default ops are fused wherever `torch.compile` does so with its default options on a GPU.
    epilogues : bool
        Whether what is done with each element of a product or a convolution - bias, norm by given statistics,
        activation, residual - is done in its kernel, as by templates (`mode="max-autotune"`) and by engines of
        inference. By default products are calls of a library and stay alone.

    Returns
    -------
    Graph
        With the same FLOPs, and by default never more bytes moved. A kernel of a scope writes its results dense in
        the order of their axes, also where a view of the result was free before and is a copy then.

    Raises
    ------
    GraphError
        If no op is in the scope, or one outside would have to run in the middle of the kernel; if epilogues are asked
        for with a scope, which has them anyway.

    Notes
    -----
    The rules are those of torch 2.13's inductor: `Scheduler.can_fuse` (torch/_inductor/scheduler.py:7327), the
    backend's `SIMDScheduling.can_fuse` (torch/_inductor/codegen/simd.py:1998), and `realize_reads_threshold`
    (config.py:861) for what is computed where it is read. Loops over the same index points are one kernel; so are
    loops over the points, or the results, of a reduction of trailing axes; what reads the same; and what is read by one
    kernel alone, broadcast, sliced, joined or in another order, if it reads few operands itself. Other reductions are
    spread over blocks of threads, and what needs all of their results waits for the end. Ops in place are done out of
    place inside, and values that a program only names longer (`costgraph.ops.keep_alive`) are not written.

    Inductor differs where it computes a cheap value again in several kernels, which would be more FLOPs: here it is
    written once. It writes the parts of what is joined for a product by a kernel each, which is one here, of the same
    bytes. A kernel that is declared stays one: the statistics of a batch are no kernel of their own.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.gelu(2 * g.input("x", (B, D)) + 1))
    >>> cg.bytes_moved(g), cg.bytes_moved(cg.fuse(g))
    (24*B*D, 8*B*D)
    """
    need_flag("fuse", epilogues=epilogues)
    if graph.parts:
        return map_stages(graph, lambda stage: fuse(stage, scope, epilogues=epilogues))
    if scope is not None:
        if epilogues:
            raise GraphError(f"fuse scope {scope!r}: epilogues=True, expected one of them: a scope has all inside")
        return _ScopeFuser(_by_scope(graph, scope), scope).run(graph)
    return _Fuser(epilogues=epilogues).run(graph)


def _bodies(graph: Graph) -> list[Graph]:
    """The graph and the bodies of its Repeats: those of kernels are fused already."""
    out = [graph]
    for op in graph.ops:
        if op.loop is not None and op.body is not None:
            out += _bodies(op.body)
    return out


class _Joiner(Rewriter):
    """Adds a kernel for some ops."""

    lies = True
    dense = True
    """Whether results of kernels are dense in the order of their axes, however they lay before."""

    def kernel(self, group: Sequence[Op], new: Graph, name: str, scope: str, read: Sequence[Tensor]) -> None:
        """Add the kernel, which hands out what is read outside."""
        body = new.start_body(name.rpartition("/")[2], fused=True)
        with building(body):
            for op in group:
                self.member(op, group, body)
        body.outputs += [self.tensors[t] for t in read]
        strides = () if self.dense else tuple(None if t.is_contiguous else t.strides for t in read)
        space = total(op.workspace for op in group if not casts_alone(op))
        kind = Kernel(body=body, workspace=space, strides=strides if any(strides) else ())
        made = new.add_op(kind, body.captured, name, group[0].phase)
        made.scope, body.owner = scope, made
        self.tensors |= zip(read, made.results, strict=True)

    def member(self, op: Op, group: Sequence[Op], body: Graph) -> None:
        """Add an op to the body."""
        self.copy(op, body)


class _ScopeFuser(_Joiner):
    def __init__(self, groups: Sequence[Sequence[Op]], scope: str) -> None:
        super().__init__()
        self.scope = scope
        self.last = {group[-1]: group for group in groups}
        self.inner = {op for group in groups for op in group}

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        if op not in self.inner:
            super().emit(op, new, suffix)
        elif op in self.last:
            group = self.last[op]
            self.kernel(group, new, self.scope.replace("/", "_"), self.scope, _read_outside(group))


class _Fuser(_Joiner):
    dense = False

    def __init__(self, *, epilogues: bool) -> None:
        super().__init__()
        self.epilogues = epilogues
        self.unread: dict[Op | None, list[Tensor]] = {}
        """Views that nobody reads, by the op that makes what they are of: their sizes are dimensions all the same."""
        self.inside: set[Tensor] = set()
        """Intermediate results of kernels, which are not written to memory."""

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        if old.fused:
            return super().fill(old, new, suffix)
        for t in old.tensors:
            if t.producer is None and t.role != "formal":
                self.tensors[t] = self.source(t, new, suffix)
        unread = _unread(old)
        for t in unread:
            self.unread.setdefault(base_of(t).producer, []).append(t)
        for group, read in grouped(old, epilogues=self.epilogues):
            outside = [t for op in group for t in op.operands if base_of(t).producer not in group]
            written = [t for t in outside if base_of(t) not in self.inside]
            for t in written:
                self.look(t, new)
            if len(group) == 1:
                if written == outside:
                    self.emit(group[0], new, suffix)
                elif written:  # a `Keep`, of the tensors that are in memory
                    self.add(group[0], group[0].kind, [self.tensors[t] for t in written], new)
                continue
            self.inside |= {t for op in group for t in op.results} - {*read}
            scope = group[-1].scope
            self.kernel(group, new, f"{scope}/fused" if scope else "fused", scope, read)
            for t in (t for op in group for t in op.operands if base_of(t) is not t):
                if base_of(t).producer in group:
                    self.tensors.pop(t, None)  # inside, each kernel has views of its own
        for t in (*old.outputs, *old.gradients, *old.gradients.values(), *unread):
            self.look(t, new)
        return None

    def look(self, t: Tensor, to: Graph) -> None:
        """Make a view where it is needed."""
        if t not in self.tensors and t.producer is not None and is_view(t.producer):
            self.look(t.producer.operands[0], to)
            self.copy(t.producer, to)

    def member(self, op: Op, group: Sequence[Op], body: Graph) -> None:
        for t in op.operands:
            self.look(t, body)
        if isinstance(op.kind, Pointwise) and op.kind.inplace:
            self.add(op, replace(op.kind, inplace=False), [self.tensors[t] for t in op.operands], body)
        else:
            self.copy(op, body)
        for t in self.unread.get(op, ()):
            self.look(t, body)


def _unread(graph: Graph) -> list[Tensor]:
    """Return views that nobody reads."""
    views = (t for op in graph.ops if is_view(op) for t in op.results)
    return [t for t in views if not graph.out_degree(t) and t not in graph.outputs]


# -- what may be fused -------------------------------------------------------------------------------------------


def _by_scope(graph: Graph, scope: str) -> list[list[Op]]:
    groups = []
    for body in _bodies(graph):
        group = [op for op in body.ops if op.scope == scope or op.scope.startswith(f"{scope}/")]
        if not group:
            continue
        if any(op.loop is not None for op in group):
            raise GraphError(
                f"fuse scope {scope!r}: {group[0].name!r} holds a Repeat, expected ops that one kernel can run"
            )
        between = _in_between(body.ops, group)
        if between is not None:
            raise GraphError(
                f"fuse scope {scope!r}: {between.name!r} outside needs what is made inside before it ends, expected "
                f"ops that can run without a break"
            )
        groups.append(group)
    if not groups:
        raise GraphError(f"fuse: no op in scope {scope!r} of graph {graph.name!r}")
    return groups


def _in_between(order: Sequence[Op], group: Sequence[Op]) -> Op | None:
    """Return an op outside the group that runs before its end and either reads from it or overwrites in place."""
    members = set(group)
    made = {t for op in group for t in op.results}
    read = {t.storage for op in group for t in op.operands}
    for op in order[order.index(group[0]) : order.index(group[-1])]:
        if op in members:
            continue
        if made.intersection(op.operands):
            return op
        if op.kind.overwrites() and any(op.operands[i].storage in read for i in op.kind.overwrites()):
            return op
    return None


def _read_outside(group: Sequence[Op]) -> list[Tensor]:
    """Tensors made in a group that have to reach memory."""
    members, graph = set(group), group[0].graph
    made = [t for op in group for t in op.results]
    return [t for t in made if t in graph.outputs or not members.issuperset(graph.successors(t))]
