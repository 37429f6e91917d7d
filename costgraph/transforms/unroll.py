"""Repeats played out: the same model without a loop, every iteration with ops and parameters of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..algebra.polynomial import ONE, Poly, as_poly
from ..errors import BindingError, UnsupportedError
from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.sizes import bindings
from ..graph.strides import Sizes
from ..graph.tensor import Tensor
from ..ops.keep import Keep
from ..ops.moves import Rearrange, Slice
from ..ops.pieces import Absent, Accumulate
from ..ops.stacks import Empty, Stacked
from .rewrite import Rewriter, members

__all__ = ["unroll"]

_MOST_OPS = 1 << 17  # each of them takes about half a millisecond: a minute


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
        If a count is still a symbol, or the iterations have more than 131,072 ops.
    UnsupportedError
        If an op outside of loops takes a list with an element for each iteration, as `fold` makes it.

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
    values = bindings(graph, dims)
    _need_few(graph, values)
    return _Unroller(values).run(graph)


class _Unroller(Rewriter):
    """Plays loops out. What has a storage for each iteration becomes a list, a sum before its first term None."""

    def __init__(self, values: Mapping[str, Poly]) -> None:
        super().__init__(values, _emit)
        self.index = [0]
        """Iterations of the loops around the op that is played out."""

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        if not old.storage.pieces:
            return super().source(old, new, suffix)
        sizes = tuple(n.bind(self.values) for n in old.sizes)
        return self.part(old, new, suffix, sizes, old.storage.pieces)

    def part(self, old: Tensor, new: Graph, suffix: str, sizes: Sizes, depth: int) -> Any:
        """Declare each of the storages of a source."""
        if depth:
            return [self.part(old, new, f"{suffix}.i{i}", sizes[1:], depth - 1) for i in range(_count(old, sizes[0]))]
        tensor = Tensor(
            new, new.unique(old.name + suffix), sizes, old.dtype, role=old.role, requires_grad=old.requires_grad
        )
        new.add_node(tensor)
        return tensor


def _count(of: object, count: Poly) -> int:
    if not isinstance(count.constant, int):
        raise BindingError(f"unroll: count {count} of {getattr(of, 'name', of)!r} is not bound, expected a number")
    if count.constant > _MOST_OPS:
        raise BindingError(f"unroll: {count} times {getattr(of, 'name', of)!r}, expected at most {_MOST_OPS} in all")
    return count.constant


def _need_few(graph: Graph, values: Mapping[str, Poly]) -> None:
    """Raise BindingError for more ops than anyone waits for."""

    def played(g: Graph) -> int:
        return sum(1 if op.body is None else times(op) * played(op.body) for op in g.ops)

    def times(op: Op) -> int:
        return _count(op, op.attrs["count"].bind(values)) if op.loop is not None else 1

    ops = played(graph)
    if ops > _MOST_OPS:
        raise BindingError(f"unroll of graph {graph.name!r}: {ops} ops, expected at most {_MOST_OPS}")


def _emit(rewriter: Rewriter, op: Op, new: Graph) -> bool:
    if isinstance(op.kind, Absent):
        rewriter.tensors[op.results[0]] = None
    elif isinstance(op.kind, Accumulate) and rewriter.tensors[op.operands[0]] is None:
        rewriter.tensors[op.results[0]] = rewriter.tensors[op.operands[1]]
    elif op.loop is not None:
        _play_out(rewriter, op, new)
    elif isinstance(op.kind, Stacked) or any(isinstance(rewriter.tensors[t], list) for t in op.operands):
        _take_whole(rewriter, op, new)
    else:
        return False
    return True


def _take_whole(rewriter: Rewriter, op: Op, new: Graph) -> None:
    """Let an op outside of loops read what has a storage for each iteration."""
    if not isinstance(op.kind, Keep) and not isinstance(op.kind, Stacked):
        raise UnsupportedError(f"unroll: {op.name!r} reads something of every iteration, expected an op inside a loop")
    operands = [t for o in op.operands for t in members(rewriter.tensors[o])]
    made = new.add_op(op.kind, operands, op.name, op.phase)
    made.scope = op.scope
    rewriter.tensors[op.results[0]] = made.results[0]


def _play_out(rewriter: Rewriter, op: Op, new: Graph) -> None:
    body, carries, xs = op.body, op.attrs["carries"], op.attrs["xs"]
    assert isinstance(rewriter, _Unroller)
    assert body is not None
    count = rewriter.index[-1] if op.attrs.get("until") else _count(op, op.attrs["count"].bind(rewriter.values))
    saved = len(op.results) - op.attrs.get("saved", 0)
    state = [rewriter.tensors[t] for t in op.operands[:carries]]
    stacks: list[Any] = []
    for t in op.results[carries:saved]:
        if _is_part(t):
            stacks.append(None)
            continue
        sizes = tuple(n.bind(rewriter.values) for n in t.sizes)
        stacks += new.add_op(Empty(sizes=sizes, dtype=t.dtype), [], t.name, op.phase).results
    left, made = [], []
    for turn in range(count):
        i = count - 1 - turn if op.attrs.get("reverse") else turn
        rewriter.tensors |= dict(zip(body.formals[:carries], state, strict=True))
        for f, t in zip(body.formals[carries : carries + xs], op.operands[carries:], strict=False):
            rewriter.tensors[f] = _slice(rewriter.tensors[t], i, new, op.phase)
        for f, t in zip(body.formals[carries + xs :], op.operands[carries + xs :], strict=True):
            rewriter.tensors[f] = rewriter.tensors[t]
        rewriter.index.append(i)
        rewriter.fill(body, new, f".i{i}")
        rewriter.index.pop()
        state = [rewriter.tensors[t] for t in body.outputs[:carries]]
        made.append([rewriter.tensors[t] for t in body.outputs[carries:saved]])
        left.append([rewriter.tensors[t] for t in body.outputs[saved:]])
    ordered = left[::-1] if op.attrs.get("reverse") else left
    pieces = [[row[k] for row in ordered] for k in range(len(op.results) - saved)]
    handed = op.results[carries:saved]
    read = [op.graph.out_degree(t) > 0 or t in op.graph.outputs for t in handed]
    rows = [[row[k] for row in (made[::-1] if op.attrs.get("reverse") else made)] for k in range(len(stacks))]
    filled = [
        row if s is None else _filled(s, row, new, op, read=r) for s, row, r in zip(stacks, rows, read, strict=True)
    ]
    rewriter.tensors |= dict(zip(op.results, [*state, *filled, *pieces], strict=True))


def _is_part(t: Tensor) -> bool:
    """Whether several loops write into a stack, of which a result of one of them is a part."""
    return any(isinstance(op.kind, Stacked) and t in op.operands[1:] for op in t.graph.successors(t))


def _filled(stack: Tensor, order: Sequence[Tensor], new: Graph, op: Op, *, read: bool) -> Tensor:
    """Return the stack once all of its slices are written, with an op that says so if anyone reads it."""
    if not read:  # its slices lie in it all the same
        Stacked().infer([stack, *order])
        return stack
    return new.add_op(Stacked(), [stack, *order], f"{stack.name}.filled", op.phase).results[0]


def _slice(t: Any, i: int, new: Graph, phase: str) -> Any:
    """View of one position of the first axis."""
    if t is None or isinstance(t, list):
        return None if t is None else t[i]
    sliced = new.add_op(
        Slice(axis=0, start=as_poly(i), size=ONE, step=1, split=True), [t], f"{t.name}.slice", phase
    ).results[0]
    whole = Rearrange(split=sliced.sizes, order=tuple(range(sliced.ndim)), merged=t.sizes[1:])
    return new.add_op(whole, [sliced], f"{t.name}.at", phase).results[0]
