"""Traffic that no fusion avoids: graph inputs, parameters and buffers read, outputs written."""

from __future__ import annotations

from collections.abc import Iterator

from ..algebra.dominance import Relations
from ..algebra.extremum import Min
from ..algebra.polynomial import ONE, ZERO, Poly, poly, total
from ..graph.graph import Graph
from ..graph.tensor import SOURCES, Tensor
from ..notation.grammar import parse_relation
from ..ops.grouped import Grouped
from ..ops.reach import at_least
from ..ops.readers import elements_read, together

__all__ = ["compulsory", "repeated_bodies"]


def repeated_bodies(graph: Graph, times: Poly = ONE) -> Iterator[tuple[Graph, Poly]]:
    """Yield a graph and every repeated body inside it, with the number of times that it runs."""
    yield graph, times
    for op in graph.ops:
        if op.body is not None:
            repeated = times if op.loop is None else times * op.loop.count
            yield from repeated_bodies(op.body, repeated)


def _known(graph: Graph) -> Relations:
    """Return what is known of sizes, and that no token chooses more experts than there are."""
    products = ((op, op.kind) for op in graph.walk() if isinstance(op.kind, Grouped))
    pairs = {(op.operands[1].sizes[0], kind.chosen) for op, kind in products if kind.routing == "expected"}
    texts = sorted(f"{experts} >= {chosen}" for experts, chosen in pairs if (experts - chosen).constant is None)
    return Relations([*graph.root.relations.relations, *map(parse_relation, texts)])


def _at_most(touched: Poly, whole: Poly, known: Relations) -> Poly:
    """Return what is touched of a tensor, never more than the whole."""
    if at_least(whole, touched) or known.nonnegative(whole - touched):
        return touched
    return whole if at_least(touched, whole) else poly(Min(touched.expr, whole.expr))


def _made(t: Tensor) -> tuple[object, ...] | None:
    """Identify the elements that an output needs written: None where a loop may only have handed them on."""
    source = t
    while source.is_view and source.producer is not None:
        source = next(o for o in source.producer.operands if o.storage is t.storage)
    op = source.producer
    if op is None or op.body is None or op.loop is None:
        return t.region()
    inner = op.body.outputs[op.results.index(source)]
    made = None if inner.role != "activation" else _made(inner)
    return None if made is None else (op, *made, *t.region()[1:])


def _outputs(graph: Graph) -> Iterator[Poly]:
    """Yield the bytes of each storage that outputs need written; of parts that may overlap the largest."""
    by_storage: dict[object, dict[tuple[object, ...], Tensor]] = {}
    for t in graph.outputs:
        if t.storage.role == "activation" and not t.storage.host and (made := _made(t)):
            by_storage.setdefault(t.storage, {}).setdefault(made, t)
    seen: set[tuple[object, ...]] = set()
    for found in by_storage.values():
        tensors = [t for made, t in found.items() if made not in seen]
        seen.update(found)
        if tensors:
            yield together(tensors) * tensors[0].element_bytes()


def _kept(graph: Graph, t: Tensor) -> Poly:
    """Return the elements of a cache that a step writes: the next one reads them."""
    if t.role != "cache":
        return ZERO
    changing = [op for op in graph.successors(t) if op.kind.overwrites()]
    # a kernel writes into caches beside what it hands out
    return total(
        written
        for op in changing
        for made, written in zip(op.results, op.kind.writes(op), strict=True)
        if made.storage is t.storage
    )


def compulsory(graph: Graph) -> Poly:
    """Return the bytes that no fusion avoids.

    Those are of each input, parameter and buffer the part that its widest reader touches, never more than the whole,
    and of each output every element; of a cache also what is written to it. What nobody reads is not moved.
    """
    if "compulsory" not in graph.cache:
        parts, known = [], _known(graph)
        for g, times in repeated_bodies(graph):
            for t in g.tensors:
                if t.producer is None and t.role in SOURCES and t.role != "formal" and not t.storage.host:
                    touched = _at_most(elements_read(g, t), t.storage.elements, known)
                    parts.append((touched + _kept(g, t)) * t.element_bytes() * times)
        parts += _outputs(graph)
        graph.cache["compulsory"] = total(parts)
    out: Poly = graph.cache["compulsory"]
    return out
