"""Index points that an op runs over, and which ops may run over theirs in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from ...algebra.polynomial import ONE, ZERO, Poly, total
from ...dtypes import promote
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.strides import Sizes, contiguous, numel
from ...graph.tensor import Tensor
from ...notation.pattern import Pattern
from ...ops.blocks import Kernel
from ...ops.contraction import Einsum
from ...ops.fill import Fill
from ...ops.index import Gather, Scatter
from ...ops.moves import Concat, Expand, Rearrange, Slice
from ...ops.pointwise import Pointwise
from ...ops.pooling import Pool
from ...ops.reduce import Reduce
from ...ops.stochastic import Dropout

__all__ = ["Space", "casts_alone", "in_order", "is_view", "joined", "leading", "space_of"]

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
