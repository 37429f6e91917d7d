"""Graphs as JSON files, in networkx's node-link form. Nothing in a file is evaluated.

A file names op kinds and states their attributes; shapes, layouts and costs are derived again when it is loaded, and
have to agree with the shapes that it states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

import networkx as nx

from ..algebra.polynomial import Poly
from ..algebra.symbols import is_name, shorten, shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import CostGraphError, FormatError
from ..graph.domain import Domain
from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.scopes import opened
from ..graph.strides import contiguous
from ..graph.tensor import Tensor
from ..notation.pattern import Pattern
from ..ops.pointwise import FUNCTIONS, Function
from ..ops.stated import Backward
from ..text_file import place_of, read_text, unique, write_file
from .ranks import ranks_data, read_ranks
from .reader import MALFORMED, Reader, kept, need, node_id, texts

__all__ = ["graph_of", "load", "save", "text_of"]

_SCHEMAS = {"costgraph/graph/1": 1, "costgraph/graph/2": 2, "costgraph/graph/3": 3}
_SCHEMA = "costgraph/graph/3"
_LARGEST = 64 * 2**20

# -- writing -----------------------------------------------------------------------------------------------------


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return {"float": str(value)}  # JSON has no such number
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {"complex": [_encode(value.real), _encode(value.imag)]}
    if isinstance(value, Poly):
        return {"size": str(value)}
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, Pattern):
        return {"pattern": str(value)}
    if isinstance(value, Function):
        return {"function": value.name if FUNCTIONS.get(value.name) == value else asdict(value)}
    if isinstance(value, Domain):
        return {"domain": [value.causal, _encode(value.window), *map(_encode, value.ranks)]}
    if isinstance(value, Graph):
        return {"graph": _graph_data(value)}
    if isinstance(value, Backward):
        return _encode(value._asdict())
    if isinstance(value, tuple | list):
        return {"tuple": [_encode(v) for v in value]}
    if isinstance(value, Mapping):
        return {"dict": {k: _encode(v) for k, v in value.items()}}
    raise FormatError(
        f"cannot save {shown(value)} of type {type(value).__name__}, expected a size, format, pattern or number"
    )


def _node_data(node: Tensor | Op) -> dict[str, Any]:
    if isinstance(node, Tensor):
        data: dict[str, Any] = {
            "type": "tensor",
            "role": node.role,
            "shape": [str(n) for n in node.sizes],
            "dtype": node.dtype.name,
        }
        if node.role == "formal" and node.producer is None:
            data |= {"strides": [str(s) for s in node.strides], "offset": str(node.offset)}
            data["domain"] = None if node.domain is None else _encode(node.domain)
        if node.producer is not None:
            data["role"] = "result"
        elif node.storage.pieces:
            data["pieces"] = node.storage.pieces
        if node.producer is None and node.role != "formal" and node.strides != contiguous(node.sizes):
            data["strides"] = [str(s) for s in node.strides]
        if node.producer is None and node.storage.host:
            data["host"] = True
        stated = data["role"] == "param" or (data["role"] == "input" and node.requires_grad)
        return data | ({"grad": node.requires_grad} if stated else {})
    seen = {} if node.call is None else vars(node.call)
    call = {"call": {k: _encode(v) for k, v in seen.items() if v != ""}} if seen else {}
    return call | {
        "type": "op",
        "kind": node.kind.name,
        "operands": [t.name for t in node.operands],
        "results": [t.name for t in node.results],
        "attrs": {k: _encode(v) for k, v in node.kind.stated().items()},
        "scope": node.scope,
        "phase": node.phase,
    }


def _ordered(graph: Graph) -> Iterator[Tensor | Op]:
    """Yield the nodes of a graph, results behind their op: one that was asked for later stands elsewhere."""
    for node in graph.nodes:
        if isinstance(node, Op):
            yield node
            yield from node.results
        elif node.producer is None:
            yield node


def _graph_data(graph: Graph) -> dict[str, Any]:
    plain = nx.DiGraph(
        name=graph.name,
        dtype=graph.dtype.name,
        outputs=[t.name for t in graph.outputs],
        formals=[t.name for t in graph.formals],
    )
    if graph.parent is None:
        plain.graph |= {
            "schema": _SCHEMA,
            "assumptions": [r.text for r in graph.relations.relations],
            "defaults": dict(graph.defaults),
            "loss": graph.loss,
        }
        if graph.matmul_dtype is not None:
            plain.graph["matmul_dtype"] = graph.matmul_dtype
        if graph.layers:
            plain.graph["layers"] = sorted(graph.layers)
        plain.graph |= ranks_data(graph, _encode)
        if graph.parts:
            plain.graph["parts"] = [_graph_data(part) for part in graph.parts]
        if graph.gradients:
            plain.graph["gradients"] = [[t.name, g.name] for t, g in graph.gradients.items()]
    plain.add_nodes_from((node_id(n), _node_data(n)) for n in _ordered(graph))
    plain.add_edges_from((node_id(a), node_id(b)) for a, b in graph.edges)
    data: dict[str, Any] = nx.node_link_data(plain, edges="edges")
    return data


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a JSON file.

    Parameters
    ----------
    graph : Graph
        What is written.
    path : str or path-like
        File, replaced if it is there.

    Raises
    ------
    FormatError
        If the file cannot be written, or an attribute of an op has no form in a file.
    """
    write_file(path, text_of(graph, place_of(path)) + "\n")


def text_of(graph: Graph, place: str) -> str:
    """Return what a file of a graph holds, or raise FormatError with the place in front."""
    try:
        return json.dumps(_graph_data(graph), indent=1, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise FormatError(f"{place}: cannot be written, {error}") from None


# -- reading -----------------------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def load(path: str | os.PathLike[str]) -> Graph:
    """Read a graph from a JSON file that `save` wrote.

    Parameters
    ----------
    path : str or path-like
        File of at most 64 MiB.

    Returns
    -------
    Graph
        Equal in every cost to the one that was saved.

    Raises
    ------
    FormatError
        If the file cannot be read, or is anything else than a graph: the text says where.
    """
    place = place_of(path)
    return graph_of(_data(path, place), place)


def graph_of(data: Any, place: str) -> Graph:
    """Return the graph that a file with this content holds, or raise FormatError with the place in front."""
    try:
        with opened(levels=()):  # names in a file are complete
            return _read(place, data)
    except CostGraphError as error:  # the fact from below, with the place in front of it once
        text = str(error)
        raise FormatError(text if text.startswith(place) else f"{place}: {text}") from None
    except MALFORMED as error:
        raise FormatError(f"{place}: malformed ({type(error).__name__}: {error})") from None


def _read(place: str, data: Any) -> Graph:
    """Return the graph that a file, or a part of one, holds."""
    facts = need(place, data, "graph", dict, "top")
    schema = facts.get("schema")
    if not isinstance(schema, str) or schema not in _SCHEMAS:
        raise FormatError(f"{place}: schema {shown(facts.get('schema'))}, expected {_SCHEMA!r}")
    reader = Reader(place, texts(place, facts, "assumptions", "top"), _SCHEMAS[schema])
    graph = reader.graph(data, None, "top")
    graph.defaults = _defaults(place, facts)
    graph.loss = None if facts["loss"] is None else kept(str, facts["loss"])
    graph.matmul_dtype = find_dtype(kept(str, facts["matmul_dtype"])).name if "matmul_dtype" in facts else None
    graph.layers = frozenset(texts(place, facts, "layers", "top") if "layers" in facts else ())
    read_ranks(graph, facts, lambda value: reader.decode(value, graph, "top"))
    parts = need(place, facts, "parts", list, "top") if "parts" in facts else []
    if any("parts" in need(place, part, "graph", dict, "parts") for part in parts):
        raise FormatError(f"{place}: parts of parts, expected stages of one pipeline")
    graph.parts = tuple(_read(place, part) for part in parts)
    graph.freeze()
    return graph


def _data(path: str | os.PathLike[str], place: str) -> Any:
    text = read_text(path, place, _LARGEST, "a graph in JSON")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: no JSON that can be read, {type(error).__name__}: {error}") from None


def _defaults(place: str, facts: dict[str, Any]) -> dict[str, int]:
    defaults = need(place, facts, "defaults", dict, "top")
    for name, value in defaults.items():
        if not is_name(name):
            raise FormatError(f"{place}: default {shorten(name)}, expected the name of a dimension")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(f"{place}: default {shorten(name)} is {shown(value)}, expected a positive integer")
    return dict(defaults)
