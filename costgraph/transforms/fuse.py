"""Kernel fusion: merge ops as torch.compile does, so that intermediate results never reach memory."""

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
from ..ops.collectives import Collective
from ..ops.einsum import Einsum
from ..ops.elementwise import Dropout, Pointwise
from ..ops.fill import Fill
from ..ops.index import Gather, Scatter
from ..ops.layout import Concat, Expand, KeepAlive, Rearrange, Slice
from ..ops.loops import Kernel
from ..ops.reduce import Pool, Reduce
from .rewrite import Rewriter, map_stages

__all__ = [
    "Space",
    "workspace_is_casts",
    "same_element_order",
    "is_view",
    "fused_space",
    "constant_along_rows",
    "space_of",
    "base_of",
    "fusion_groups",
    "fuse",
]


# -- iteration spaces --------------------------------------------------------------------------------------------------

#: Operands of a concat that is fused: torch 2.13, torch/_inductor/config.py, max_complex_pointwise_cat_inputs.
_MAX_CONCAT_OPERANDS = 8


@dataclass(frozen=True)
class Space:
    """A kernel's iteration space, as a loop nest."""

    points: Poly
    """number of points, reduced axes included"""
    rows: Poly | None = None
    """number of reduction results, None without a reduction"""
    across: tuple[Poly, ...] | None = None
    """strides of the kept axes if a reduction's rows are split over thread blocks, which delays its results to the end
    of the kernel; else None"""
    product: bool = False
    """whether it is a library matmul or convolution, which may have an elementwise epilogue"""


def space_of(op: Op) -> Space | None:
    """Return the iteration space for a matmul or an op that compilers turn into loops; None for other ops."""
    kind = op.kind
    if _is_constant_scatter(op):
        return Space(op.results[0].numel)
    if (op.workspace and not workspace_is_casts(op)) or (kind.overwrites() and not isinstance(kind, Pointwise)):
        return None
    if isinstance(kind, Reduce):
        return _space_of_reduction(op.operands[0], op.results[0].numel, kind.pattern)
    if isinstance(kind, Kernel):
        return _space_of_kernel(op)
    if isinstance(kind, Einsum):
        return Space(op.results[0].numel, product=kind.summed)
    is_concat = isinstance(kind, Concat) and not kind.stacked and len(op.operands) <= _MAX_CONCAT_OPERANDS
    is_loop = is_concat or isinstance(kind, Pointwise | Dropout | Gather | Pool | Rearrange)
    return Space(op.results[0].numel) if is_loop else None


def workspace_is_casts(op: Op) -> bool:
    """Whether an op's workspace only holds casts of operands, which a compiled kernel keeps in registers."""
    if not op.workspace or op.body is None or len(op.body.ops) != 1:
        return False
    if not isinstance(op.body.ops[0].kind, Pointwise | Reduce):
        return False
    operands = [t for t in op.operands if t.ndim]
    dtypes = {op.results[0].dtype, reduce(promote, (t.dtype for t in op.operands))}
    casts = [total(t.numel * dtype.bytes for t in operands if t.dtype != dtype) for dtype in dtypes]
    return op.workspace in casts


def _is_constant_scatter(op: Op) -> bool:
    """Whether an op writes one element per row of a constant, which inductor compiles to an index comparison.

    torch 2.13: `scatter_upon_const_tensor` (torch/_inductor/fx_passes/joint_graph.py:1094).
    """
    if not isinstance(op.kind, Scatter) or op.workspace:
        return False
    target, ids, *_ = op.operands
    is_filled = target.producer is not None and isinstance(target.producer.kind, Fill)
    return is_filled and 0 < op.kind.batch == target.ndim - 1 and ids.sizes[op.kind.batch :] == (ONE,)


def _space_of_reduction(x: Tensor, rows: Poly, pattern: Pattern) -> Space:
    """Return a reduction's space; rows of trailing axes stay in one thread block, unless there is only one row."""
    names = pattern.operand_names(0)
    kept_axes = [names.index(n) for n in pattern.result_names]
    if kept_axes == list(range(len(kept_axes))) and rows != ONE:
        return Space(x.numel, rows)
    strides = contiguous(x.sizes)
    return Space(x.numel, rows, across=tuple(strides[i] for i in kept_axes))


def _space_of_kernel(op: Op) -> Space | None:
    """Return the space for a kernel of elementwise ops and reductions with equal rows; None for others."""
    assert op.body is not None
    combined: Space | None = None
    for inner in op.body.ops:
        space = Space(ONE) if is_view(inner) or isinstance(inner.kind, Fill) else space_of(inner)
        if space is None or space.across is not None:
            return None
        if space.rows is not None or space.product:
            if combined is not None and (combined != space or space.product):
                return None
            combined = space
    result_sizes = {t.numel for t in op.results}
    if combined is None:
        return Space(op.results[0].numel) if len(result_sizes) == 1 else None
    return combined if result_sizes <= {combined.points, combined.rows} else None


def is_view(op: Op) -> bool:
    """Whether an op only returns a view of its operand's storage."""
    return isinstance(op.kind, Rearrange | Slice | Expand) and op.results[0].storage is op.operands[0].storage


def fused_space(graph: Graph, a: Space, b: Space) -> Space | None:
    """Return the space of one kernel that covers both, None if they cannot be fused.

    These are the rules of torch 2.13's inductor, `SIMDScheduling.can_fuse` (torch/_inductor/codegen/simd.py:1998).
    Loops fuse if they have equal numbers of points, reductions if their rows and points are equal, and a loop fuses
    with a reduction if it runs over its points or rows. A split reduction becomes two (`num_splits`,
    torch/_inductor/ir.py); only the second one has its rows. A matmul takes ops over its results, as a template does.
    """
    if a.product or b.product:
        main, loop = (a, b) if a.product else (b, a)
        fits = not loop.product and loop.rows is None and graph.same(a.points, b.points)
        return main if fits else None
    if a.rows is not None and b.rows is not None:
        fits = a.across == b.across and graph.same(a.points, b.points) and graph.same(a.rows, b.rows)
        return a if fits else None
    main, loop = (b, a) if a.rows is None else (a, b)
    fits = main.across is None and graph.same(loop.points, main.points)
    return main if fits or (main.rows is not None and graph.same(loop.points, main.rows)) else None


def same_element_order(view: Tensor, tensor: Tensor) -> bool:
    """Whether a view has all elements of a tensor, in the same order."""
    return view is tensor or (view.graph.same(view.numel, tensor.numel) and view.is_contiguous and tensor.is_contiguous)


def constant_along_rows(operand: Tensor, shape: Sizes, rows: Poly) -> bool:
    """Whether an operand of ops over a shape has one value per row: constant along all trailing axes."""
    graph, missing = operand.graph, len(shape) - operand.ndim
    strides = (ZERO,) * missing + tuple(
        s if n != ONE else ZERO for n, s in zip(operand.sizes, operand.strides, strict=True)
    )
    last = max((i for i, s in enumerate(strides) if s), default=-1)
    outer = shape[: last + 1]
    dense = all(graph.same(s, numel(outer[i + 1 :])) for i, s in enumerate(strides[: last + 1]) if shape[i] != ONE)
    return dense and graph.same(numel(outer), rows)


# -- fusion groups -----------------------------------------------------------------------------------------------------
# Groups are merged two at a time, in an order that stays legal.

#: Most operands for a loop that is recomputed at its use, for several readers and for one: torch 2.13,
#: torch/_inductor/config.py:861 and 870, realize_reads_threshold and realize_acc_reads_threshold.
_MAX_READS, _MAX_READS_ONCE = 4, 8


@dataclass(eq=False)
class _Group:
    """Ops of one kernel, in program order."""

    ops: list[Op]
    space: Space | None
    """None for ops that are not loop nests and stay separate"""


def fusion_groups(graph: Graph, *, epilogues: bool) -> list[tuple[list[Op], list[Tensor]]]:
    """Return a graph's fusion groups in execution order, each with the tensors that it returns.

    Views are in no group.

    Parameters
    ----------
    graph : Graph
        Bodies are not entered.
    epilogues : bool
        Whether matmuls take elementwise ops on their results.
    """
    groups = _Groups(graph, epilogues=epilogues)
    while groups.step():
        pass
    return [(group.ops, groups.exported(group.ops, group.ops)) for group in groups.order]


def base_of(t: Tensor) -> Tensor:
    """Return the tensor that a view is based on."""
    while t.producer is not None and is_view(t.producer):
        t = t.producer.operands[0]
    return t


class _Groups:
    def __init__(self, graph: Graph, *, epilogues: bool) -> None:
        self.graph = graph
        self.ops = [op for op in graph.ops if not is_view(op)]
        self.predecessors = dict(_with_predecessors(self.ops))
        self.index = {op: i for i, op in enumerate(self.ops)}
        self.readers: dict[Tensor, dict[Op, None]] = {}
        """Ops that read a tensor or a view of it."""
        for op in self.ops:
            for t in _read_operands(op):
                self.readers.setdefault(base_of(t), {})[op] = None
        self.returned = {base_of(t) for t in (*graph.outputs, *graph.gradients, *graph.gradients.values())}
        self.tensors_in: dict[Storage, list[Tensor]] = {}
        """Tensors in a storage: the one that allocated it, and results of in-place ops."""
        for op in self.ops:
            for t in op.results:
                self.tensors_in.setdefault(t.storage, []).append(t)
        self.group_of: dict[Op, _Group] = {}
        self.order: list[_Group] = []
        live_ops = self.live_ops()
        for op in self.ops:
            space = space_of(op) if op in live_ops else None
            self.group_of[op] = _Group([op], None if space is not None and space.product and not epilogues else space)
            self.order.append(self.group_of[op])

    def live_ops(self) -> set[Op]:
        """Return the live ops; a compiler removes dead loops."""
        live: set[Op] = set()
        for op in reversed(self.ops):
            is_read = (t in self.returned or not live.isdisjoint(self.readers.get(t, ())) for t in op.results)
            if op.kind.overwrites() or space_of(op) is None or any(is_read):
                live.add(op)
        return live

    def step(self) -> bool:
        """Merge producers with consumers, else ops that read the same tensor; return whether anything changed."""
        merged = [self.merge(a, b) for a, b in self.edges()]
        if not any(merged):
            merged = [self.merge(a, b) for a, b in self.co_readers()]
        return any(merged)

    def edges(self) -> Iterator[tuple[Op, Op]]:
        """Yield pairs of producer and consumer."""
        for op in self.ops:
            for producer in dict.fromkeys(base_of(t).producer for t in op.operands):
                if producer is not None:
                    yield producer, op

    def co_readers(self) -> Iterator[tuple[Op, Op]]:
        """Yield pairs of ops that read all of one tensor."""
        for t, readers in self.readers.items():
            if t.sizes:
                full_readers = [
                    op for op in readers if any(base_of(v) is t and same_element_order(v, t) for v in op.operands)
                ]
                yield from pairwise(full_readers)

    def merge(self, first: Op, second: Op) -> bool:
        """Merge two ops' groups, if that is legal and profitable."""
        a, b = self.group_of[first], self.group_of[second]
        if a is b or a.space is None or b.space is None or a.ops[0].phase != b.ops[0].phase:
            return False
        if self.order.index(a) > self.order.index(b):
            return self.merge(second, first)
        space = self.space(a, a.space, b, b.space)
        if space is None:
            return False
        merged = _Group(sorted([*a.ops, *b.ops], key=self.index.__getitem__), space)
        return self.is_sound(merged) and self.reorder(a, b, merged)

    def space(self, a: _Group, first_space: Space, b: _Group, second_space: Space) -> Space | None:
        """Return the space of a kernel for two groups, where the second may read results of the first."""
        combined = fused_space(self.graph, first_space, second_space)
        edges = [(base_of(t), t, op) for op in b.ops for t in op.operands if base_of(t).producer in a.ops]
        if not all(t.domain in (None, op.results[0].domain) for _, t, op in edges):
            return None
        if combined is not None and all(self.fits(combined, *edge) for edge in edges):
            return combined
        is_pointwise = first_space.rows is None and not first_space.product and not second_space.product
        same_points = self.graph.same(first_space.points, second_space.points)
        return (
            second_space
            if is_pointwise and edges and self.is_inlined(a, b, _MAX_READS_ONCE if same_points else _MAX_READS)
            else None
        )

    def fits(self, space: Space, tensor: Tensor, view: Tensor, reader: Op) -> bool:
        """Whether a thread block computes the values it reads: at the same points, or in its own rows."""
        same, kind = self.graph.same, reader.kind
        if not isinstance(kind, Pointwise | Dropout | Reduce | Kernel):
            return False
        points = reader.results[0].numel if isinstance(kind, Pointwise) else view.numel
        if same(tensor.numel, points):
            # results of a split reduction are not complete yet, and rows follow the order in memory
            incomplete = space.across is not None and not same(tensor.numel, space.rows or space.points)
            return same_element_order(view, tensor) and not incomplete and (space.rows is None or tensor.is_contiguous)
        shape = reader.results[0].sizes if isinstance(kind, Pointwise) else view.sizes
        by_rows = space.rows is not None and space.across is None and same(tensor.numel, space.rows)
        return by_rows and same(points, space.points) and constant_along_rows(view, shape, tensor.numel)

    def is_inlined(self, a: _Group, b: _Group, max_reads: int) -> bool:
        """Whether loops can be inlined into their only reader: in any order, if they read few operands."""
        inputs = {base_of(t) for op in a.ops for t in op.operands if base_of(t).producer not in a.ops}
        return len(inputs) <= max_reads and not self.exported([*a.ops, *b.ops], a.ops)

    def exported(self, members: Sequence[Op], producers: Sequence[Op]) -> list[Tensor]:
        """Return the results of `producers` that are read outside `members`."""
        member_set = set(members)
        results = [t for op in producers for t in op.results]
        return [t for t in results if t in self.returned or not member_set.issuperset(self.readers.get(t, ()))]

    def is_sound(self, group: _Group) -> bool:
        """Whether a group has results, and none of them aliases memory that others can see."""
        exported = self.exported(group.ops, group.ops)
        if not exported:
            return False
        for op in group.ops:
            if op.kind.overwrites():
                first, *others = self.tensors_in[op.results[0].storage]
                allocates = first.producer in group.ops
                # writes into memory of the caller, or of a loop carry, are visible outside
                if first.is_view or sum(t in exported for t in (first, *others)) > int(allocates):
                    return False
        return True

    def reorder(self, a: _Group, b: _Group, merged: _Group) -> bool:
        """Replace two groups by one and move dependents of the first behind it, unless the second needs these."""
        first, last = self.order.index(a), self.order.index(b)
        later: list[_Group] = []
        dependents = {a}
        independent: list[_Group] = []
        for group in self.order[first + 1 : last]:
            if dependents.isdisjoint(self.required(group)):
                independent.append(group)
            else:
                dependents.add(group)
                later.append(group)
        if not self.required(b).isdisjoint(later):
            return False
        self.order[first : last + 1] = [*independent, merged, *later]
        self.group_of |= dict.fromkeys(merged.ops, merged)
        return True

    def required(self, group: _Group) -> set[_Group]:
        """Return the groups that must run before one."""
        return {self.group_of[op] for member in group.ops for op in self.predecessors[member]} - {group}


def _read_operands(op: Op) -> tuple[Tensor, ...]:
    """Return the operands that an op reads: a `KeepAlive` extends live ranges and reads nothing."""
    if not isinstance(op.kind, KeepAlive):
        return op.operands
    (result,) = op.results
    used = op.operands[:1] if op.graph.out_degree(result) or result in op.graph.outputs else ()
    return (*used, *(t for t in op.operands if t not in used and _is_copied_out(t)))


def _is_copied_out(t: Tensor) -> bool:
    """Whether a tensor is copied out of a collective's buffer, as FSDP hooks do outside compiled code."""
    op = t.producer
    if op is None or not op.operands:
        return False
    buffer, owner = base_of(op.operands[0]), op.graph.owner
    if owner is not None and owner.loop is not None and buffer in owner.loop.carries:  # gathered one iteration ahead
        buffer = base_of(owner.loop.nexts[owner.loop.carries.index(buffer)])
    return buffer.producer is not None and isinstance(buffer.producer.kind, Collective)


def _with_predecessors(ops: Sequence[Op]) -> Iterator[tuple[Op, set[Op]]]:
    """Yield each op with those it must follow: its producers, and earlier users of memory that it writes."""
    written: dict[Storage, Op] = {}
    read: dict[Storage, list[Op]] = {}
    for op in ops:
        predecessors = {producer for t in op.operands if (producer := base_of(t).producer) is not None}
        overwritten = {op.operands[i].storage for i in op.kind.overwrites()}
        for storage in dict.fromkeys(t.storage for t in op.operands):
            if storage in written:
                predecessors.add(written[storage])
            if storage in overwritten:
                predecessors.update(read.pop(storage, ()))
                written[storage] = op
            else:
                read.setdefault(storage, []).append(op)
        yield op, predecessors - {op}


# -- fuse --------------------------------------------------------------------------------------------------------------


def fuse(graph: Graph, /, scope: str | None = None, *, epilogues: bool = False) -> Graph:
    """Fuse ops into kernels.

    Parameters
    ----------
    graph : Graph
        The graph to fuse; it is not modified.
    scope : str, optional
        Fuse every op inside this module scope, of any kind, into one kernel per occurrence. By default, fuse the ops
        that `torch.compile` fuses on a GPU with default options.
    epilogues : bool
        Whether elementwise ops on the result of a matmul or convolution (bias, norm with given statistics, activation,
        residual) are fused into its kernel, as by templates (`mode="max-autotune"`) and inference engines. By default
        these are separate library calls.

    Returns
    -------
    Graph
        With the same FLOPs, and by default never more bytes moved. A scope kernel writes contiguous results, even
        where a view of the result was free before and becomes a copy.

    Raises
    ------
    GraphError
        If the scope has no op, or an op outside would have to run within the kernel, or `epilogues` is combined with
        a scope, which fuses everything anyway.

    Notes
    -----
    The rules are those of torch 2.13's inductor: `Scheduler.can_fuse` (torch/_inductor/scheduler.py:7327), the
    backend's `SIMDScheduling.can_fuse` (torch/_inductor/codegen/simd.py:1998), and `realize_reads_threshold`
    (config.py:861) for inlining. One kernel holds loops over the same index points; loops over the points or the
    results of a reduction of trailing axes; and ops that read the same tensor. A value with a single reader is inlined,
    even if broadcast, sliced, concatenated or permuted, as long as it reads few operands itself. Other reductions are
    split over thread blocks, and ops that need all their results go to the next kernel. In-place ops become
    out-of-place, and values that are only kept alive (`costgraph.ops.layout`) are not written.

    Inductor recomputes a cheap value in several kernels, with more FLOPs; here it is written once. It writes the parts
    of a matmul's concatenated operand with one kernel each, here it is one, with the same bytes. Declared kernels are
    not split: batch statistics, for example, get no kernel of their own.

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
            raise GraphError(
                f"fuse scope {scope!r}: epilogues=True, expected only one of the two: a scope already fuses all its ops"
            )
        return _ScopeFuser(_by_scope(graph, scope), scope).run(graph)
    return _Fuser(epilogues=epilogues).run(graph)


def _bodies(graph: Graph) -> list[Graph]:
    """Return the graph and the bodies of its loops; those of kernels are fused already."""
    out = [graph]
    for op in graph.ops:
        if op.loop is not None and op.body is not None:
            out += _bodies(op.body)
    return out


class _KernelBuilder(Rewriter):
    """Rewriter that adds fused kernels."""

    lies = True
    dense = True
    """Whether kernel results are made contiguous, whatever their layout was."""

    def kernel(self, group: Sequence[Op], new: Graph, name: str, scope: str, results: Sequence[Tensor]) -> None:
        """Add a kernel that returns the tensors read outside."""
        body = new.start_body(name.rpartition("/")[2], fused=True)
        with building(body):
            for op in group:
                self.add_member(op, group, body)
        body.outputs += [self.tensors[t] for t in results]
        strides = () if self.dense else tuple(None if t.is_contiguous else t.strides for t in results)
        workspace = total(op.workspace for op in group if not workspace_is_casts(op))
        kind = Kernel(body=body, workspace=workspace, strides=strides if any(strides) else ())
        kernel_op = new.add_op(kind, body.captured, name, group[0].phase)
        kernel_op.scope, body.owner = scope, kernel_op
        self.tensors |= zip(results, kernel_op.results, strict=True)

    def add_member(self, op: Op, group: Sequence[Op], body: Graph) -> None:
        """Add an op to the kernel."""
        self.copy(op, body)


class _ScopeFuser(_KernelBuilder):
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


class _Fuser(_KernelBuilder):
    dense = False

    def __init__(self, *, epilogues: bool) -> None:
        super().__init__()
        self.epilogues = epilogues
        self.unread: dict[Op | None, list[Tensor]] = {}
        """Unread views, by the producer of their base: their sizes still count as dimensions."""
        self.intermediates: set[Tensor] = set()
        """Intermediate results of kernels, which never reach memory."""

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        if old.fused:
            return super().fill(old, new, suffix)
        for t in old.tensors:
            if t.producer is None and t.role != "formal":
                self.tensors[t] = self.source(t, new, suffix)
        unread = _unread(old)
        for t in unread:
            self.unread.setdefault(base_of(t).producer, []).append(t)
        for group, results in fusion_groups(old, epilogues=self.epilogues):
            operands = [t for op in group for t in op.operands if base_of(t).producer not in group]
            in_memory = [t for t in operands if base_of(t) not in self.intermediates]
            for t in in_memory:
                self.copy_view(t, new)
            if len(group) == 1:
                if in_memory == operands:
                    self.emit(group[0], new, suffix)
                elif in_memory:  # a `KeepAlive` of the tensors that are in memory
                    self.add(group[0], group[0].kind, [self.tensors[t] for t in in_memory], new)
                continue
            self.intermediates |= {t for op in group for t in op.results} - {*results}
            scope = group[-1].scope
            self.kernel(group, new, f"{scope}/fused" if scope else "fused", scope, results)
            for t in (t for op in group for t in op.operands if base_of(t) is not t):
                if base_of(t).producer in group:
                    self.tensors.pop(t, None)  # each kernel has its own views
        for t in (*old.outputs, *old.gradients, *old.gradients.values(), *unread):
            self.copy_view(t, new)
        return None

    def copy_view(self, t: Tensor, target: Graph) -> None:
        """Copy a view where it is needed."""
        if t not in self.tensors and t.producer is not None and is_view(t.producer):
            self.copy_view(t.producer.operands[0], target)
            self.copy(t.producer, target)

    def add_member(self, op: Op, group: Sequence[Op], body: Graph) -> None:
        for t in op.operands:
            self.copy_view(t, body)
        if isinstance(op.kind, Pointwise) and op.kind.inplace:
            self.add(op, replace(op.kind, inplace=False), [self.tensors[t] for t in op.operands], body)
        else:
            self.copy(op, body)
        for t in self.unread.get(op, ()):
            self.copy_view(t, body)


def _unread(graph: Graph) -> list[Tensor]:
    """Return the views without readers."""
    views = (t for op in graph.ops if is_view(op) for t in op.results)
    return [t for t in views if not graph.out_degree(t) and t not in graph.outputs]


# -- fusion by scope -------------------------------------------------------------------------------------------------


def _by_scope(graph: Graph, scope: str) -> list[list[Op]]:
    groups = []
    for body in _bodies(graph):
        group = [op for op in body.ops if op.scope == scope or op.scope.startswith(f"{scope}/")]
        if not group:
            continue
        if any(op.loop is not None for op in group):
            raise GraphError(
                f"fuse scope {scope!r}: {group[0].name!r} contains a Repeat, expected ops that one kernel can run"
            )
        interleaved = _interleaved_op(body.ops, group)
        if interleaved is not None:
            raise GraphError(
                f"fuse scope {scope!r}: {interleaved.name!r} outside the scope must run between its ops, expected "
                f"ops that can run consecutively"
            )
        groups.append(group)
    if not groups:
        raise GraphError(f"fuse: no op in scope {scope!r} of graph {graph.name!r}")
    return groups


def _interleaved_op(order: Sequence[Op], group: Sequence[Op]) -> Op | None:
    """Return an outside op that would run within the group and reads its results or overwrites its operands."""
    members = set(group)
    results = {t for op in group for t in op.results}
    operand_storages = {t.storage for op in group for t in op.operands}
    for op in order[order.index(group[0]) : order.index(group[-1])]:
        if op in members:
            continue
        if results.intersection(op.operands):
            return op
        if op.kind.overwrites() and any(op.operands[i].storage in operand_storages for i in op.kind.overwrites()):
            return op
    return None


def _read_outside(group: Sequence[Op]) -> list[Tensor]:
    """Return the tensors of a group that must reach memory."""
    members, graph = set(group), group[0].graph
    results = [t for op in group for t in op.results]
    return [t for t in results if t in graph.outputs or not members.issuperset(graph.successors(t))]
