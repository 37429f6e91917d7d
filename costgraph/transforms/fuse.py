"""Fusion: several ops become one kernel, so that what they pass to each other never reaches memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..algebra.polynomial import ONE, Poly, total
from ..errors import GraphError
from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.scopes import building
from ..graph.tensor import Tensor
from ..notation.pattern import Pattern
from ..ops.blocks import Kernel
from ..ops.pointwise import Pointwise
from ..ops.reduce import Reduce
from ..ops.stochastic import Dropout
from .rewrite import Rewriter

__all__ = ["fuse"]


def fuse(graph: Graph, /, scope: str | None = None) -> Graph:
    """Fuse ops into kernels.

    Parameters
    ----------
    graph : Graph
        What is fused; it stays as it is.
    scope : str, optional
        Fuse every op inside this module scope, whatever its kind, into one kernel for each place where it runs. By
        default chains of elementwise ops, reductions of trailing axes and kernels made of them are fused wherever it
        is legal.

    Returns
    -------
    Graph
        With the same FLOPs, and by default never more bytes moved. A kernel of a scope writes its results dense in
        the order of their axes, also where a view of the result was free before and is a copy then.

    Raises
    ------
    GraphError
        If no op is in the scope, or one outside would have to run in the middle of the kernel.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.gelu(2 * g.input("x", (B, D)) + 1))
    >>> cg.bytes_moved(g), cg.bytes_moved(cg.fuse(g))
    (24*B*D, 8*B*D)
    """
    groups = _by_scope(graph, scope) if scope is not None else [g for b in _bodies(graph) for g in _chains(b)]
    return _Fuser(groups, scope).run(graph)


def _bodies(graph: Graph) -> list[Graph]:
    """The graph and the bodies of its Repeats: those of kernels are fused already."""
    out = [graph]
    for op in graph.ops:
        if op.loop is not None and op.body is not None:
            out += _bodies(op.body)
    return out


class _Fuser(Rewriter):
    def __init__(self, groups: Sequence[Sequence[Op]], scope: str | None) -> None:
        super().__init__()
        self.scope = scope
        self.last = {group[-1]: group for group in groups}
        self.inner = {op for group in groups for op in group}

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        if op not in self.inner:
            super().emit(op, new, suffix)
        elif op in self.last:
            self.kernel(self.last[op], new)

    def kernel(self, group: Sequence[Op], new: Graph) -> None:
        """Add the kernel for some ops."""
        scope = group[-1].scope if self.scope is None else self.scope
        name = "fused" if self.scope is None else self.scope.replace("/", "_")
        prefix = f"{scope}/" if self.scope is None and scope else ""
        body = new.start_body(name, fused=True)
        with building(body):
            for op in group:
                self.copy(op, body)
        kind = Kernel(body=body, workspace=total(op.workspace for op in group))
        made = new.add_op(kind, body.captured, prefix + name, group[0].phase)
        made.scope, body.owner = scope, made
        for t in _read_outside(group):  # now, so that results stand right behind their op as in a file
            body.export(self.tensors[t])


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


def _is_light(op: Op) -> bool:
    """Whether an op does its work element by element, or along the innermost axes."""
    if op.kind.overwrites() or op.workspace:
        return False
    if isinstance(op.kind, Reduce):
        return _is_trailing(op.kind.pattern)
    if isinstance(op.kind, Kernel) and op.body is not None:
        return all(_is_light(inner) for inner in op.body.ops)
    return isinstance(op.kind, Pointwise | Dropout)


def _is_trailing(pattern: Pattern) -> bool:
    """Whether a reduction leaves the leading axes as they are, so that a row stays with one block of threads."""
    names = [a.names for a in pattern.operands[0]]
    kept = [a.names for a in pattern.result if a.names]
    return names[: len(kept)] == kept


def _space(op: Op) -> tuple[Poly, ...]:
    """Shape that an op runs over: that of its largest tensor."""
    sizes = max(((t.sizes, t.ndim) for t in (*op.operands, *op.results)), key=lambda item: item[1])[0]
    for t in (*op.operands, *op.results):
        if t.ndim == len(sizes):
            sizes = tuple(b if a == ONE else a for a, b in zip(sizes, t.sizes, strict=True))
    return sizes


def _chains(graph: Graph) -> list[list[Op]]:
    """Grow chains in program order: an op joins the chain of a producer with the same iteration space."""
    chain_of: dict[Op, list[Op]] = {}
    chains: list[list[Op]] = []
    order = graph.ops
    place = {op: i for i, op in enumerate(order)}
    for op in order:
        if not _is_light(op):
            continue
        producers = dict.fromkeys(t.producer for t in op.operands if t.producer is not None)
        for producer in producers:
            chain = chain_of.get(producer)
            if chain is not None and _joins(order[place[chain[0]] : place[op] + 1], chain, op, producer):
                chain.append(op)
                chain_of[op] = chain
                break
        else:
            chain_of[op] = [op]
            chains.append(chain_of[op])
    return [chain for chain in chains if len(chain) > 1 and _is_worth_it(chain)]


def _is_worth_it(chain: Sequence[Op]) -> bool:
    """Whether something is read outside, and all of it lies as a kernel would write it: else views become copies."""
    read = _read_outside(chain)
    return bool(read) and all(t.is_contiguous for t in read)


def _read_outside(group: Sequence[Op]) -> list[Tensor]:
    """Tensors made in a group that have to reach memory."""
    members, graph = set(group), group[0].graph
    made = [t for op in group for t in op.results]
    return [t for t in made if t in graph.outputs or not members.issuperset(graph.successors(t))]


def _joins(order: Sequence[Op], chain: list[Op], op: Op, producer: Op) -> bool:
    if op.phase != chain[0].phase:
        return False
    rows = _space(chain[0])
    space = _space(op)
    # after a reduction only the leading axes are left, and they have to be the chain's
    if space[: len(rows)] != rows[: len(space)] or (not space and rows and not isinstance(producer.kind, Reduce)):
        return False
    if not all(t.domain == op.results[0].domain for t in op.operands if t.domain is not None):
        return False
    whole = isinstance(producer.kind, Reduce) and not producer.results[0].sizes
    return not whole and _in_between(order, [*chain, op]) is None
