"""Graphs as JSON files, in networkx's node-link form. Nothing in a file is evaluated.

A file names op kinds and states their attributes; shapes, layouts and costs are derived again when it is loaded, and
have to agree with the shapes that it states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import networkx as nx

from .domain import Domain
from .dtypes import DType
from .dtypes import dtype as find_dtype
from .errors import CostGraphError, FormatError
from .grammar import parse_formula
from .graph import Graph
from .op import Op
from .ops.pointwise import FUNCTIONS, Function
from .ops.registry import KINDS
from .pattern import Pattern, parse_pattern
from .polynomial import Poly
from .symbols import shorten
from .tensor import SOURCES, Tensor

__all__ = ["load", "save"]

_SCHEMA = "costgraph/graph/1"
_LARGEST = 64 * 2**20
# What goes wrong underneath when attributes are of another type than an op kind expects.
_MALFORMED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    AssertionError,
    RecursionError,
    ZeroDivisionError,
)


def _show(value: object) -> str:
    """Cut a value from a file to what an error message can carry."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- writing -----------------------------------------------------------------------------------------------------


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Poly):
        return {"size": str(value)}
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, Pattern):
        return {"pattern": str(value)}
    if isinstance(value, Function):
        return {"function": value.name if FUNCTIONS.get(value.name) == value else asdict(value)}
    if isinstance(value, Domain):
        return {"domain": [value.causal, _encode(value.window)]}
    if isinstance(value, Graph):
        return {"graph": _graph_data(value)}
    if isinstance(value, tuple | list):
        return {"tuple": [_encode(v) for v in value]}
    if isinstance(value, Mapping):
        return {"dict": {k: _encode(v) for k, v in value.items()}}
    raise FormatError(
        f"cannot save {value!r} of type {type(value).__name__}, expected a size, format, pattern or number"
    )


def _node_id(node: Tensor | Op) -> str:
    return f"{node.name}()" if isinstance(node, Op) else node.name


def _node_data(node: Tensor | Op) -> dict[str, Any]:
    if isinstance(node, Tensor):
        data: dict[str, Any] = {
            "type": "tensor",
            "role": node.role,
            "shape": [str(n) for n in node.sizes],
            "dtype": node.dtype.name,
        }
        if node.role == "formal":
            data |= {"strides": [str(s) for s in node.strides], "offset": str(node.offset)}
            data["domain"] = None if node.domain is None else _encode(node.domain)
        if node.producer is not None:
            data["role"] = "result"
        return data | ({"grad": node.requires_grad} if data["role"] == "param" else {})
    return {
        "type": "op",
        "kind": node.kind.name,
        "operands": [t.name for t in node.operands],
        "results": [t.name for t in node.results],
        "attrs": {k: _encode(v) for k, v in node.attrs.items()},
        "scope": node.scope,
        "phase": node.phase,
    }


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
    plain.add_nodes_from((_node_id(n), _node_data(n)) for n in graph.nodes)
    plain.add_edges_from((_node_id(a), _node_id(b)) for a, b in graph.edges)
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
    text = json.dumps(_graph_data(graph), indent=1)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        raise FormatError(f"{shorten(str(path))}: cannot be written, {error}") from None


# -- reading -----------------------------------------------------------------------------------------------------


class _Reader:
    """Rebuilds a graph, op by op, from the data of a file."""

    def __init__(self, place: str) -> None:
        self.place = place

    def error(self, what: str) -> FormatError:
        return FormatError(f"{self.place}: {what}")

    def need(self, data: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
        value = data.get(key) if isinstance(data, dict) else None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            names = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
            raise self.error(f"{where}: {key!r} is {_show(value)}, expected {names}")
        return value

    def texts(self, data: Any, key: str, where: str) -> list[str]:
        values = self.need(data, key, list, where)
        if not all(isinstance(v, str) for v in values):
            raise self.error(f"{where}: {key!r} is {_show(values)}, expected a list of names")
        return list(values)

    def decode(self, data: Any, parent: Graph, where: str) -> Any:
        if data is None or isinstance(data, bool | int | float | str):
            return data
        if not isinstance(data, dict) or len(data) != 1:
            raise self.error(f"{where}: attribute {_show(data)}, expected a plain value or one tagged value")
        ((tag, value),) = data.items()
        decoders: dict[str, Callable[[Any], Any]] = {
            "size": lambda v: parse_formula(v, where),
            "dtype": find_dtype,
            "pattern": parse_pattern,
            "function": lambda v: Function(**v) if isinstance(v, dict) else FUNCTIONS[v],
            "domain": lambda v: Domain(v[0], self.decode(v[1], parent, where)),
            "graph": lambda v: self.graph(v, parent, where),
            "tuple": lambda v: tuple(self.decode(x, parent, where) for x in v),
            "dict": lambda v: {str(k): self.decode(x, parent, where) for k, x in v.items()},
        }
        if tag not in decoders:
            raise self.error(f"{where}: tag {shorten(tag)}, expected one of {', '.join(decoders)}")
        return decoders[tag](value)

    def graph(self, data: Any, parent: Graph | None, where: str) -> Graph:
        facts = self.need(data, "graph", dict, where)
        name = self.need(facts, "name", str, where)
        graph = Graph(name, dtype=self.need(facts, "dtype", str, where))
        if parent is not None:
            graph.parent = parent
        tensors: dict[str, Tensor] = {}
        for i, node in enumerate(self.need(data, "nodes", list, where)):
            spot = f"{where}: node {i + 1}"
            self.need(node, "id", str, spot)
            if self.need(node, "type", str, spot) == "op":
                self.op(graph, node, tensors, spot)
            elif self.need(node, "role", str, spot) != "result":
                tensors[node["id"]] = self.source(graph, node, spot)
        graph.formals = [self.tensor(tensors, n, where) for n in self.texts(facts, "formals", where)]
        graph.outputs.extend(self.tensor(tensors, n, where) for n in self.texts(facts, "outputs", where))
        self.edges(graph, data, where)
        return graph

    def tensor(self, tensors: Mapping[str, Tensor], name: str, where: str) -> Tensor:
        if name not in tensors:
            raise self.error(f"{where}: tensor {shorten(name)} is not there, expected one made before")
        return tensors[name]

    def source(self, graph: Graph, node: dict[str, Any], where: str) -> Tensor:
        role = node["role"]
        if role not in SOURCES or (role == "formal") != (graph.parent is not None and role == "formal"):
            raise self.error(f"{where}: role {shorten(role)}, expected one of {', '.join(SOURCES)}")
        self.claim(graph, node["id"], where)
        sizes = tuple(parse_formula(s, where) for s in self.texts(node, "shape", where))
        strides = None
        if role == "formal":
            strides = tuple(parse_formula(s, where) for s in self.texts(node, "strides", where))
        tensor = Tensor(
            graph, node["id"], sizes, find_dtype(self.need(node, "dtype", str, where)), role=role, strides=strides,
            requires_grad=bool(node.get("grad", False)),
        )  # fmt: skip
        if role == "formal":
            tensor.offset = parse_formula(self.need(node, "offset", str, where), where)
            tensor.domain = self.decode(node.get("domain"), graph, where)
        graph.add_node(tensor)
        return tensor

    def claim(self, graph: Graph, name: str, where: str) -> None:
        if name in graph.root._taken:
            raise self.error(f"{where}: name {shorten(name)} a second time, expected unique names")
        graph.root._taken[name] = 1

    def op(self, graph: Graph, node: dict[str, Any], tensors: dict[str, Tensor], where: str) -> None:
        kind = KINDS.get(self.need(node, "kind", str, where))
        if kind is None:
            raise self.error(f"{where}: op kind {shorten(node['kind'])}, expected one of {', '.join(KINDS)}")
        name = node["id"].removesuffix("()")
        operands = [self.tensor(tensors, n, where) for n in self.texts(node, "operands", where)]
        try:
            attrs = {k: self.decode(v, graph, where) for k, v in self.need(node, "attrs", dict, where).items()}
            op = graph.add_op(kind, operands, attrs, name, self.need(node, "phase", str, where))
            if op.body is not None:
                op.body.owner, op.body.fused = op, kind.body == "fused"
            kind.flops(op), kind.reads(op), kind.writes(op)  # what cannot be counted is refused now
        except FormatError:
            raise
        except CostGraphError as error:
            raise self.error(f"{where}: {error}") from None
        except _MALFORMED as error:
            raise self.error(
                f"{where}: attributes of {kind.name!r} are malformed ({type(error).__name__}: {error})"
            ) from None
        op.scope = self.need(node, "scope", str, where)
        names = self.texts(node, "results", where)
        if op.name != name or len(names) != len(op.results):
            raise self.error(f"{where}: {name!r} has {len(op.results)} results, the file names {len(names)}")
        for t, given in zip(op.results, names, strict=True):
            if t.name != given:
                graph.root._taken.pop(t.name, None)
                self.claim(graph, given, where)
                t.name = given
                if t.storage.role == "activation" and not t.is_view:
                    t.storage.name = given
            tensors[given] = t

    def edges(self, graph: Graph, data: Any, where: str) -> None:
        """Compare stated edges and shapes with the derived ones: a file that disagrees was tampered with."""
        stated = {
            (e.get("source"), e.get("target")) for e in self.need(data, "edges", list, where) if isinstance(e, dict)
        }
        derived = {(_node_id(a), _node_id(b)) for a, b in graph.edges}
        if stated != derived:
            odd = sorted(map(str, stated ^ derived))[0]
            raise self.error(f"{where}: edge {shorten(odd)} does not agree with the operands of the ops")
        shapes = {n["id"]: n.get("shape") for n in data["nodes"] if n["type"] == "tensor"}
        for t in graph.tensors:
            if shapes.get(t.name) != [str(n) for n in t.sizes]:
                raise self.error(
                    f"{where}: tensor {t.name!r} has shape {_show(shapes.get(t.name))}, expected "
                    f"{[str(n) for n in t.sizes]}"
                )


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
    place = str(path)
    try:
        file = Path(path)
        size = file.stat().st_size
        if size > _LARGEST:
            raise FormatError(f"{place}: {size} bytes, expected at most {_LARGEST}")
        data = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"{place}: no JSON that can be read, {type(error).__name__}: {error}") from None
    reader = _Reader(place)
    facts = reader.need(data, "graph", dict, "top")
    if facts.get("schema") != _SCHEMA:
        raise FormatError(f"{place}: schema {_show(facts.get('schema'))}, expected {_SCHEMA!r}")
    try:
        graph = reader.graph(data, None, "top")
        graph.assume(*reader.texts(facts, "assumptions", "top"))
        graph.defaults = _defaults(reader, facts)
        graph.loss = facts.get("loss") if isinstance(facts.get("loss"), str) else None
        graph.validate()
    except CostGraphError as error:  # the fact from below, with the place in front of it once
        text = str(error)
        raise FormatError(text if text.startswith(place) else f"{place}: {text}") from None
    except _MALFORMED as error:
        raise FormatError(f"{place}: malformed ({type(error).__name__}: {error})") from None
    return graph


def _defaults(reader: _Reader, facts: dict[str, Any]) -> dict[str, int]:
    defaults = reader.need(facts, "defaults", dict, "top")
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise reader.error(f"default {shorten(name)} is {_show(value)}, expected a positive integer")
    return dict(defaults)
