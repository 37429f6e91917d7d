"""What reads the parameters and caches of a graph, through views and into bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...algebra.symbols import shown
from ...errors import GraphError
from ...graph.arguments import need_list
from ...graph.graph import Graph, need_graph
from ...graph.op import Op
from ...graph.scopes import base_name
from ...graph.tensor import Tensor
from ...notation.pattern import Affine
from ...ops.blocks import Kernel
from ...ops.cached import Append
from ...ops.contraction import Einsum
from ...ops.fill import Assign
from ...ops.grouped import Grouped
from ...ops.index import Gather
from ...ops.moves import Concat, Expand, Rearrange, Slice
from ..backward.walk import is_view_op
from ..precision.autocast import word
from ..selecting import Names

__all__ = ["Use", "caches_of", "left_out", "summed_axes", "uses_of", "weights_of"]


@dataclass(frozen=True)
class Use:
    """One op that reads a parameter."""

    op: Op
    """the op"""
    operand: int
    """which of its operands"""
    kind: str
    """product of a parameter with an activation, lookup of rows, or other"""
    summed: tuple[int, ...] = ()
    """axes of the parameter that the product sums"""


#: For each axis of a tensor, the axes of its source that are in it.
_Axes = tuple[frozenset[int], ...]


class Sources:
    """Follows tensors back to where they were declared or made."""

    def __init__(self, graph: Graph) -> None:
        self.outer: dict[Tensor, Tensor] = {}
        for op in graph.walk():
            if op.loop is not None:
                self.outer |= dict(zip(op.loop.captured, op.loop.shared, strict=True))
            elif op.body is not None:
                self.outer |= dict(zip(op.body.formals, op.operands, strict=True))

    def of(self, t: Tensor) -> tuple[Tensor, _Axes | None]:
        """Return the source of a tensor, and its axes; None for what a view leaves no account of."""
        axes: _Axes | None = tuple(frozenset((i,)) for i in range(t.ndim))
        while True:
            if t in self.outer:
                t = self.outer[t]
            elif t.producer is not None and is_view_op(t.producer):
                axes = _before(t.producer, axes)
                t = t.producer.operands[0]
            else:
                return t, axes


def _before(op: Op, axes: _Axes | None) -> _Axes | None:
    """Return the axes of a view in those of its operand."""
    if axes is None or isinstance(op.kind, Slice):
        return axes
    if isinstance(op.kind, Expand):
        places = [frozenset[int]() if at is None else frozenset((at,)) for at in op.kind.kept]
    elif isinstance(op.kind, Rearrange) and op.kind.pattern is not None:
        pattern = op.kind.pattern
        places = [
            frozenset(i for i, d in enumerate(pattern.operands[0]) if set(d.names) & set(dim.names))
            for dim in pattern.result
        ]
    elif isinstance(op.kind, Rearrange) and op.kind.merged == tuple(op.kind.split[i] for i in op.kind.order):
        if len(op.kind.order) != op.operands[0].ndim:
            return None
        places = [frozenset((i,)) for i in op.kind.order]  # permuted, and nothing else
    else:
        return None
    return tuple(frozenset[int]().union(*(places[i] for i in inner)) for inner in axes)


def uses_of(graph: Graph) -> dict[Tensor, list[Use]]:
    """Return what reads each parameter: views read nothing; ops inside a body read what stands for its inputs."""
    need_graph("uses", graph)
    sources = Sources(graph)
    found: dict[Tensor, list[Use]] = {t: [] for t in graph.params}
    for op in graph.walk():
        if is_view_op(op):
            continue
        own = () if isinstance(op.kind, Kernel) else op.operands
        for i, t in enumerate(own if op.loop is None else (*op.loop.starts, *op.loop.xs)):
            leaf, axes = sources.of(t)
            if leaf in found:
                found[leaf].append(_use(op, i, axes, sources))
    for body in graph.bodies():
        for t in body.outputs:
            leaf, _ = sources.of(t)
            if leaf in found and body.owner is not None:
                found[leaf].append(Use(body.owner, 0, "other"))
    for t in graph.outputs:
        leaf, _ = sources.of(t)
        if leaf in found:
            found[leaf].append(Use(t.producer or next(iter(graph.walk())), 0, "other"))
    return {t: uses for t, uses in found.items() if uses}


def is_in(name: str, scope: str) -> bool:
    """Whether a name has a scope, or that of a parameter, among its levels."""
    return f"/{scope}/" in f"/{name}/"


def weights_of(graph: Graph, kept: Sequence[str], *, embeddings: bool) -> dict[Tensor, list[Use]]:
    """Return the parameters that can be quantized, and what reads them; GraphError if there are none.

    `kept` are scopes and names of those that stay; `embeddings` says whether tables that rows are looked up in are
    among the rest.
    """
    found = {}
    for t, uses in uses_of(graph).items():
        products = sum(u.kind == "product" for u in uses)
        whole = all(u.kind in ("product", "lookup") for u in uses)
        if not whole or t.ndim < 2 or t.dtype != graph.dtype or (products < len(uses) and not embeddings):
            continue
        if not any(is_in(t.name, name) for name in kept):
            found[t] = uses
    if not found:
        raise GraphError(
            f"quantize: graph {graph.name!r} has no weight that products with activations alone read outside "
            f"{', '.join(kept) or 'nothing'}, expected linear layers in its default format {graph.dtype.name!r}"
        )
    return found


def summed_axes(t: Tensor, uses: Sequence[Use]) -> tuple[int, ...]:
    """Return the axes of a parameter that products sum, of a table those of a row."""
    return next((u.summed for u in uses if u.kind == "product"), tuple(range(1, t.ndim)))


def _use(op: Op, i: int, axes: _Axes | None, sources: Sources) -> Use:
    if isinstance(op.kind, Gather) and not op.kind.batch and i == 0 and len(op.operands) == 2:
        return Use(op, i, "lookup")
    if isinstance(op.kind, Grouped) and i == 1 and axes is not None and sources.of(op.operands[0])[0].role != "param":
        return Use(op, i, "product", tuple(sorted(axes[1])))
    if not isinstance(op.kind, Einsum) or word(op) != "matmul" or len(op.operands) != 2 or axes is None:
        return Use(op, i, "other")
    other, _ = sources.of(op.operands[1 - i])
    pattern = op.kind.pattern
    kept = set(pattern.result_names)
    summed: set[int] = set()
    for dim, inner in zip(pattern.operands[i], axes, strict=True):
        if set(dim.names) & kept and set(dim.names) - kept:
            return Use(op, i, "other")
        if dim.names and not set(dim.names) & kept:
            summed |= inner
    if other.role == "param" or not summed:
        return Use(op, i, "other")
    return Use(op, i, "product", tuple(sorted(summed)))


# -- caches ----------------------------------------------------------------------------------------------------------


def caches_of(graph: Graph) -> set[Tensor]:
    """Return the caches of positions: keys, values, latent vectors, and what was computed once.

    They are buffers of role cache in a floating format; what a recurrence goes on from, and the last inputs of a
    convolution, are none.
    """
    sources = Sources(graph)
    found = {t for g in graph.bodies() for t in g.tensors if t.producer is None and t.role == "cache"}
    left = {t for t in found if t.dtype.kind == "float"}
    for op in graph.walk():
        if op.body is None:
            left -= _states(op, sources)
        elif op.loop is not None:
            left -= {_held(t, sources) for t in (*op.loop.starts, *op.loop.xs)}
    return left


def _held(t: Tensor, sources: Sources) -> Tensor:
    """Return the cache that a tensor is a view of, or has been appended to."""
    while True:
        t, _ = sources.of(t)
        if t.producer is None or not isinstance(t.producer.kind, Append | Assign):
            return t
        t = t.producer.operands[0]


def _states(op: Op, sources: Sources) -> set[Tensor]:
    """Return the caches that an op reads or writes as the state of a recurrence, or as earlier inputs of some width."""
    if isinstance(op.kind, Assign):
        held = _held(op.operands[0], sources)
        made = sources.of(op.operands[1])[0].producer
        if made is None:
            return set()
        # what came before and the new positions, of which the last ones stay
        shifted = isinstance(made.kind, Concat) and any(_held(t, sources) is held for t in made.operands)
        return {held} if shifted or made.loop is not None else set()
    if isinstance(op.kind, Append):  # as much as is seen of earlier positions, however many there are
        held, new = op.operands
        room, more = (t.sizes[op.kind.axis] for t in (held, new))
        short = room.constant is not None and more.constant is None
        return {_held(held, sources)} if short else set()
    slides = isinstance(op.kind, Einsum) and any(isinstance(d, Affine) for o in op.kind.pattern.operands for d in o)
    return {_held(t, sources) for t in op.operands} if slides else set()


def left_out(graph: Graph, skip: Sequence[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return what stays as it is: names or scopes of parameters, some by default."""
    if skip is None:
        return default
    names, kept = Names(graph), list[str]()
    for name in need_list("quantize: skip", skip):
        text = name if isinstance(name, str) else ""
        # the name may also be a pattern, or lack the loop suffixes of an unrolled graph
        found = [t.name for t in graph.params if is_in(base_name(t.name), text) or names.answers(t, [text])]
        if not found:
            known = ", ".join(sorted({t.name for t in graph.params})[:8])
            raise GraphError(f"quantize: skip {shown(name)} is no parameter or scope of one, expected some of {known}")
        kept += dict.fromkeys(text if is_in(n, text) else n for n in found)
    return tuple(kept)
