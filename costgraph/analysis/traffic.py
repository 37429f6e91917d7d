"""Traffic that no fusion avoids: graph inputs, parameters and buffers read, outputs written."""

from __future__ import annotations

from collections.abc import Iterator

from ..dominance import lower
from ..extremum import Max, Min
from ..graph import Graph
from ..polynomial import ONE, ZERO, Poly, poly, total
from ..rules import elements
from ..tensor import SOURCES, Storage, Tensor

__all__ = ["compulsory", "repeated_bodies"]


def repeated_bodies(graph: Graph, times: Poly = ONE) -> Iterator[tuple[Graph, Poly]]:
    """Yield a graph and every repeated body inside it, with the number of times that it runs."""
    yield graph, times
    for op in graph.ops:
        if op.body is not None:
            repeated = times * op.attrs["count"] if op.kind.body == "repeated" else times
            yield from repeated_bodies(op.body, repeated)


def _at_least(a: Poly, b: Poly) -> bool:
    return a == b or (lower(a - b) or -1) >= 0


def _larger(a: Poly, b: Poly) -> Poly:
    return a if _at_least(a, b) else b if _at_least(b, a) else poly(Max(a.expr, b.expr))


def _smaller(a: Poly, b: Poly) -> Poly:
    return a if _at_least(b, a) else b if _at_least(a, b) else poly(Min(a.expr, b.expr))


def _read(graph: Graph, storage: Storage) -> Poly:
    """Elements of a storage that some op reads: a lower bound of those that all of them read together."""
    most = ZERO
    for op in graph.ops:
        amounts = op.kind.reads(op)
        for i, t in enumerate(op.operands):
            if t.storage is not storage:
                continue
            if op.kind.body == "repeated":
                most = _larger(most, _read_by_loop(op.body, op.attrs, i, t))  # type: ignore[arg-type]
            elif i < len(amounts):
                most = _larger(most, amounts[i])
    return most


def _read_by_loop(body: Graph, attrs: dict[str, object], i: int, outer: Tensor) -> Poly:
    formal = body.formals[i]
    inner = _read(body, formal.storage)
    first = attrs["carries"]
    sliced = first <= i < first + attrs["xs"]  # type: ignore[operator]
    return inner * attrs["count"] if sliced else inner  # type: ignore[operator,return-value]


def compulsory(graph: Graph) -> Poly:
    """Return the bytes that no fusion avoids.

    Parameters
    ----------
    graph : Graph
        What is asked.

    Returns
    -------
    Poly
        Bytes: of each input, parameter and buffer the part that its widest reader touches, never more than the
        whole, and of each output every element. What nobody reads is not moved.
    """
    if "compulsory" not in graph.cache:
        parts = []
        for g, times in repeated_bodies(graph):
            for t in g.tensors:
                if t.producer is None and t.role in SOURCES and t.role != "formal":
                    touched = _smaller(_read(g, t.storage), t.storage.elements)
                    parts.append(touched * t.element_bytes() * times)
        written: set[tuple[object, ...]] = set()
        for t in graph.outputs:
            if t.storage.role == "activation" and t.region() not in written:
                written.add(t.region())
                parts.append(elements(t) * t.element_bytes())
        graph.cache["compulsory"] = total(parts)
    out: Poly = graph.cache["compulsory"]
    return out
