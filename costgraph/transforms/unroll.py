"""Repeats played out: the same model without a loop, every iteration with ops and parameters of its own."""

from __future__ import annotations

from ..errors import BindingError
from ..graph import Graph
from ..layout import contiguous, numel
from ..op import Op, OpKind, Result
from ..ops.layout import REARRANGE, SLICE
from ..ops.registry import register
from ..polynomial import ONE, Poly, as_poly
from ..rules import free, nothing
from ..sizes import bindings
from ..tensor import Storage, Tensor
from .rewrite import Rewriter

__all__ = ["unroll"]

# A stack of slices before any of them is written: storage without content.
EMPTY = register(
    OpKind(
        name="empty",
        infer=lambda operands, attrs: [Result(attrs["sizes"], attrs["dtype"])],
        flops=free,
        reads=nothing,
        writes=nothing,
    )
)


def unroll(graph: Graph, /, **dims: int) -> Graph:
    """Replace every Repeat by its iterations.

    Parameters
    ----------
    graph : Graph
        What is unrolled; it stays as it is.
    **dims : int
        Sizes, of the counts of all Repeats at least.

    Returns
    -------
    Graph
        Equal in FLOPs, bytes, parameters and peak memory.

    Raises
    ------
    BindingError
        If a count is still a symbol.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, L = cg.dims("B D L")
    >>> with cg.Graph("g") as g:
    ...     layer = lambda x: cg.linear(x, "b d -> b e", e=D)
    ...     g.output(cg.repeat(L, layer, g.input("x", (B, D)), name="layers"))
    >>> len(cg.unroll(g, L=5).ops), cg.flops(cg.unroll(g, L=5))
    (5, 10*B*D**2)
    """
    return Rewriter(bindings(graph, dims), _emit).run(graph)


def _emit(rewriter: Rewriter, op: Op, new: Graph) -> bool:
    if op.kind.body != "repeated":
        return False
    body, carries, xs = op.body, op.attrs["carries"], op.attrs["xs"]
    assert body is not None
    count = op.attrs["count"].bind(rewriter.values)
    if not isinstance(count.constant, int):
        raise BindingError(f"unroll: count {count} of {op.name!r} is not bound, expected a number")
    state = [rewriter.tensors[t] for t in op.operands[:carries]]
    stacks: list[Tensor] = []
    for t in op.results[carries:]:
        sizes = tuple(n.bind(rewriter.values) for n in t.sizes)
        stacks += new.add_op(EMPTY, [], {"sizes": sizes, "dtype": t.dtype}, t.name).results
    for i in range(count.constant):
        rewriter.tensors |= dict(zip(body.formals[:carries], state, strict=True))
        for f, t in zip(body.formals[carries : carries + xs], op.operands[carries:], strict=False):
            rewriter.tensors[f] = _slice(rewriter.tensors[t], i, new)
        for f, t in zip(body.formals[carries + xs :], op.operands[carries + xs :], strict=True):
            rewriter.tensors[f] = rewriter.tensors[t]
        rewriter.fill(body, new, f".i{i}")
        state = [rewriter.tensors[t] for t in body.outputs[:carries]]
        for t, stack in zip(body.outputs[carries:], stacks, strict=True):
            # what an iteration makes for a stack is written into its slice at once
            made = rewriter.tensors[t]
            made.strides = contiguous(made.sizes)
            _move(made, made.storage, stack.storage, as_poly(i) * numel(made.sizes))
    rewriter.tensors |= dict(zip(op.results, [*state, *stacks], strict=True))
    return True


def _move(t: Tensor, old: Storage, new: Storage, offset: Poly) -> None:
    """Let a tensor, and what is a view of it, lie in another storage."""
    left = [t]
    while left:
        moved = left.pop()
        moved.storage, moved.offset = new, moved.offset + offset
        left += [r for op in moved.graph.successors(moved) for r in op.results if r.storage is old and r not in left]


def _slice(t: Tensor, i: int, new: Graph) -> Tensor:
    """View of one position of the first axis."""
    sliced = new.add_op(
        SLICE, [t], {"axis": 0, "start": as_poly(i), "size": ONE, "step": 1}, f"{t.name}.slice"
    ).results[0]
    attrs = {"split": sliced.sizes, "order": tuple(range(sliced.ndim)), "merged": t.sizes[1:]}
    return new.add_op(REARRANGE, [sliced], attrs, f"{t.name}.at").results[0]
