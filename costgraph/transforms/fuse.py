"""Fusion: several ops become one kernel, so that what they pass to each other never reaches memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..algebra.polynomial import total
from ..errors import GraphError
from ..graph.arguments import need_flag
from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.scopes import building
from ..graph.tensor import Tensor
from ..ops.blocks import Kernel
from ..ops.pointwise import Pointwise
from .fusion.groups import base_of, grouped
from .fusion.spaces import casts_alone, is_view
from .rewrite import Rewriter, map_stages

__all__ = ["fuse"]


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
    place inside, and values that a program only names longer (`costgraph.ops.keep`) are not written.

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
