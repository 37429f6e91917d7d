"""Loop unrolling: replace loops by their iterations, each with its own ops and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..algebra.polynomial import ONE, Poly, as_poly
from ..errors import BindingError, UnsupportedError
from ..ir.graph import (
    Graph,
    Loop,
    Op,
    Tensor,
    base_name,
    bindings,
    same_suffix,
)
from ..ir.strides import Sizes
from ..ops.fill import SliceUpdate
from ..ops.layout import (
    Rearrange,
    Slice,
)
from ..ops.loops import (
    Empty,
    Env,
    LoopExecutor,
    PlayedIteration,
    Stacked,
)
from .rewrite import Rewriter, flat
from .selection import layers_of

__all__ = ["position", "unroll"]

_MOST_OPS = 1 << 17  # at about half a millisecond each: a minute


def unroll(graph: Graph, /, **dims: int) -> Graph:
    """Replace every Repeat by its iterations.

    Parameters
    ----------
    graph : Graph
        The graph to unroll; it is not modified.
    **dims : int
        Sizes; at least those in the counts of all Repeats.

    Returns
    -------
    Graph
        With the same FLOPs, bytes, parameters and peak memory.

    Raises
    ------
    BindingError
        If a count is symbolic, or the iterations have more than 131,072 ops.
    UnsupportedError
        If an op outside loops reads a list with one element per iteration, as made by `fold`, or the graph is a
        pipeline stage.

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
    if graph.parts or graph.waiting is not None:  # in-flight activations are known per group of iterations
        raise UnsupportedError(
            f"unroll: graph {graph.name!r} is a pipeline stage, expected the graph before costgraph.parallelize"
        )
    _need_few(graph, values)
    return _Unroller(values).run(graph)


#: Where an op is added: the new graph, and the suffix of the iteration.
_Target = tuple[Graph, str]


class _Unroller(Rewriter, LoopExecutor[_Target]):
    """Executes loops. A tensor with one storage per iteration becomes a list, an undefined sum None."""

    lies = True

    def __init__(self, values: Mapping[str, Poly]) -> None:
        Rewriter.__init__(self, values)
        LoopExecutor.__init__(self)
        self.layers = set[str]()
        """layer scopes, with their iterations"""
        self._originals: dict[Tensor, Any] = {}
        """original tensors whose slices a loop writes in place"""

    def run(self, old: Graph, name: str | None = None) -> Graph:
        new = super().run(old, name)
        new.layers = frozenset({*new.layers, *self.layers})
        return new

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        if not old.storage.pieces:
            return super().source(old, new, suffix)
        sizes = tuple(n.bind(self.values) for n in old.sizes)
        return self.part(old, new, suffix, sizes, old.storage.pieces)

    def part(self, old: Tensor, new: Graph, suffix: str, sizes: Sizes, depth: int) -> Any:
        """Declare each storage of a source."""
        if depth:
            return [self.part(old, new, f"{suffix}.i{i}", sizes[1:], depth - 1) for i in range(_count(old, sizes[0]))]
        tensor = Tensor(
            new, new.unique(old.name + suffix), sizes, old.dtype,
            role=old.role, requires_grad=old.requires_grad, host=old.storage.host,
        )  # fmt: skip
        new.add_node(tensor)
        self.origins[tensor] = old
        return tensor

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        self.one(op, self.tensors, (new, suffix))

    def step(self, op: Op, env: Env, place: _Target) -> None:
        new, suffix = place
        if isinstance(op.kind, Stacked) or any(isinstance(env[t], list | None) for t in op.operands):
            self.read_all(op, new)
        else:
            self.copy(op, new, suffix)

    def read_all(self, op: Op, new: Graph) -> None:
        """Add an op outside loops that reads all storages of a tensor."""
        if not op.kind.takes_lists and not isinstance(op.kind, Stacked):
            raise UnsupportedError(
                f"unroll: {op.name!r} reads a value of every iteration, expected an op inside a loop"
            )
        operands = [t for t in flat(op, self.tensors) if t is not None]
        new_op = new.add_op(op.kind, operands, op.name, op.phase)
        new_op.scope = op.scope
        self.tensors[op.results[0]] = new_op.results[0]

    # -- loops -------------------------------------------------------------------------------------------------------

    def turns(self, loop: Loop, xs: Sequence[Any]) -> Iterator[PlayedIteration]:
        count = self.around[-1].at if loop.until else _count(loop.op, loop.count.bind(self.values))
        for iteration in range(count):
            yield PlayedIteration(count - 1 - iteration if loop.reverse else iteration, count)

    def stack(self, loop: Loop, t: Tensor, env: Env, place: _Target) -> Tensor | None:
        if _is_part(t):
            return None
        empty = Empty(sizes=tuple(n.bind(self.values) for n in t.sizes), dtype=t.dtype, host=t.storage.host)
        (stack,) = place[0].add_op(empty, [], _scoped_name(loop.op, t), loop.op.phase).results
        return stack

    def slice(self, loop: Loop, value: Any, turn: PlayedIteration, place: _Target) -> Any:
        return _slice(value, turn.at, place[0], loop.op)

    def inside(self, env: Env) -> Env:
        return env

    def iteration(self, loop: Loop, env: Env, turn: PlayedIteration, stacks: Sequence[Any], place: _Target) -> None:
        iteration_suffix = f"{place[1]}.i{self.before(loop) + turn.at}"
        self.layers |= layers_of(loop.op, iteration_suffix)
        self.fill(loop.body, place[0], iteration_suffix)

    def before(self, loop: Loop) -> int:
        """Return the number of iterations in preceding loops that were split from the same one."""
        name, counts = base_name(loop.op.name), 0
        for op in loop.op.graph.ops:
            if op is loop.op:
                break
            if op.loop is not None and op.phase == loop.op.phase == "forward" and base_name(op.name) == name:
                counts += _count(op, op.loop.count.bind(self.values))
        return counts

    def one(self, op: Op, env: Env, place: _Target) -> None:
        """Run an op; slices and stacks next to an inner loop get its iteration's suffix."""
        with same_suffix(op.name + place[1]):
            super().one(op, env, place)

    def loop(self, loop: Loop, env: Env, place: _Target) -> None:
        """Run a loop; slices that its iterations write in place exist before the first write."""
        count = self.around[-1].at if loop.until else _count(loop.op, loop.count.bind(self.values))
        originals = {x: env[x] for i in range(len(loop.pieces)) if (x := loop.updated_operand(i)) is not None}
        for x, t in originals.items():
            env[x] = [position(t, as_poly(i), place[0], loop.op) for i in range(count)]
        self._originals |= originals
        super().loop(loop, env, place)
        env |= originals

    def slice_updated(self, whole: Tensor, env: Env, rows: Sequence[Any], place: _Target) -> Any:
        updated = self._originals[whole]
        for index, row in enumerate(rows):
            merge = Rearrange(split=row.sizes, order=tuple(range(row.ndim)), merged=(ONE, *row.sizes))
            (part,) = place[0].add_op(merge, [row], f"{base_name(row.name)}.part", row.producer.phase).results
            kind = SliceUpdate(axes=(0,), starts=(as_poly(index),), steps=(1,))
            (updated,) = (
                place[0].add_op(kind, [updated, part], f"{base_name(row.name)}.written", row.producer.phase).results
            )
        return updated

    def filled(self, loop: Loop, i: int, stack: Any, rows: Sequence[Any], place: _Target) -> Any:
        if stack is None:
            return list(rows)
        t, graph = loop.stacks[i], loop.op.graph
        return _filled(stack, rows, place[0], loop.op, is_read=graph.out_degree(t) > 0 or t in graph.outputs)


def _count(of: object, count: Poly) -> int:
    if not isinstance(count.constant, int):
        raise BindingError(f"unroll: count {count} of {getattr(of, 'name', of)!r} is not bound, expected a number")
    if count.constant > _MOST_OPS:
        raise BindingError(
            f"unroll: {count} copies of {getattr(of, 'name', of)!r}, expected at most {_MOST_OPS} in total"
        )
    return count.constant


def _need_few(graph: Graph, values: Mapping[str, Poly]) -> None:
    """Raise BindingError for too many ops."""

    def executed_ops(g: Graph) -> int:
        return sum(1 if op.body is None else times(op) * executed_ops(op.body) for op in g.ops)

    def times(op: Op) -> int:
        return 1 if op.loop is None else _count(op, op.loop.count.bind(values))

    ops = executed_ops(graph)
    if ops > _MOST_OPS:
        raise BindingError(f"unroll of graph {graph.name!r}: {ops} ops, expected at most {_MOST_OPS}")


def _is_part(t: Tensor) -> bool:
    """Whether a loop result is part of a stack that several loops write into."""
    return any(isinstance(op.kind, Stacked) and t in op.operands[1:] for op in t.graph.successors(t))


def _scoped_name(op: Op, t: Tensor) -> str:
    """Return a name in the scope of a loop for an op that reads or writes a tensor for it."""
    return "/".join((*op.scope.split("/"), base_name(t.name).rpartition("/")[2])).lstrip("/")


def _filled(stack: Tensor, slices: Sequence[Tensor], new: Graph, op: Op, *, is_read: bool) -> Tensor:
    """Return a stack whose slices are all written, adding a `Stacked` op if it is read."""
    if not is_read:  # only check that the slices are in place
        Stacked().infer([stack, *slices])
        return stack
    return new.add_op(Stacked(), [stack, *slices], f"{_scoped_name(op, stack)}.filled", op.phase).results[0]


def _slice(t: Any, i: int, new: Graph, op: Op) -> Any:
    """Return one position of the first axis as a view, or a list element."""
    if t is None or isinstance(t, list):
        return None if t is None else t[i]
    return position(t, as_poly(i), new, op)


def position(t: Tensor, index: Poly, new: Graph, op: Op) -> Tensor:
    """Return a view of one position of the first axis, for a loop to read."""
    name, kind = _scoped_name(op, t), Slice(axis=0, start=index, size=ONE, step=1, split=True)
    (sliced,) = new.add_op(kind, [t], f"{name}.slice", op.phase).results
    drop_axis = Rearrange(split=sliced.sizes, order=tuple(range(sliced.ndim)), merged=t.sizes[1:])
    return new.add_op(drop_axis, [sliced], f"{name}.at", op.phase).results[0]
