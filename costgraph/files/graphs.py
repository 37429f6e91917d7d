"""Save and load graphs as JSON in networkx's node-link form.

Files name op kinds and their attributes; nothing in them is evaluated. Loading rebuilds a graph op by op and derives
shapes, layouts and costs again; the shapes in the file must agree.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from math import inf, isfinite, nan
from typing import Any, TypeVar

import networkx as nx

from ..algebra.dominance import Relation, Relations
from ..algebra.polynomial import Poly
from ..algebra.symbols import is_name, shorten, shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import CostGraphError, FormatError, GraphError
from ..ir.graph import (
    SOURCES,
    Call,
    Domain,
    Graph,
    InFlightMicroBatches,
    Mesh,
    Op,
    OpKind,
    Placement,
    Repeat,
    Sharding,
    Tensor,
    hints,
    need_name,
    opened,
    sizes_of,
)
from ..ir.strides import contiguous
from ..notation.grammar import parse_formula, parse_relation
from ..notation.pattern import Pattern, parse_pattern
from ..notation.validation import Rule, rule
from ..ops.elementwise import FUNCTIONS, Function
from ..ops.index import Gather, Indexed
from ..ops.opaque import OpaqueBackward
from ..ops.registry import KINDS
from ..text_file import place_of, read_text, unique, write_file

__all__ = [
    "of_version_1",
    "of_version_2",
    "of_version_3",
    "typed",
    "RANKS",
    "ranks_data",
    "read_ranks",
    "MALFORMED",
    "Reader",
    "kept",
    "need",
    "node_id",
    "texts",
    "graph_of",
    "load",
    "save",
    "text_of",
]


# -- op kinds from fields ----------------------------------------------------------------------------------------------

R = TypeVar("R", OpKind, Call)

_rules_by_kind: dict[type[OpKind | Call], dict[str, tuple[Rule, bool]]] = {}


def _rules(kind: type[OpKind | Call]) -> dict[str, tuple[Rule, bool]]:
    """Return each field's rule, and whether it is required."""
    if kind not in _rules_by_kind:
        field_hints = hints(kind)
        _rules_by_kind[kind] = {f.name: (rule(field_hints[f.name]), f.default is MISSING) for f in fields(kind)}
    return _rules_by_kind[kind]


def typed(kind: type[R], facts: Mapping[str, Any]) -> R:
    """Return a record from fields, checked against its annotations.

    Raise GraphError if a field is unknown, missing or has the wrong type.
    """
    field_rules, kind_name = _rules(kind), "call" if kind is Call else kind.name
    unknown = next((name for name in facts if name not in field_rules), None)
    if unknown is not None:
        raise GraphError(
            f"unknown attribute {shown(unknown)} of {kind_name!r}, expected one of {', '.join(field_rules)}"
        )
    for name, (expectation, required) in field_rules.items():
        if required and name not in facts:
            raise GraphError(f"attribute {name!r} of {kind_name!r} is missing, expected {expectation.expected}")
    for name, value in facts.items():
        if not field_rules[name][0].holds(value):
            raise GraphError(
                f"attribute {name!r} of {kind_name!r} is {shown(value)}, expected {field_rules[name][0].expected}"
            )
    return kind(**facts)


def of_version_1(kind: type[OpKind], facts: Mapping[str, Any], operands: Sequence[Tensor]) -> dict[str, Any]:
    """Convert fields from version 1.

    Version 1 also stored `inplace` for kinds that always are, called bytes `reads` and `writes`, and had lookups by row
    or along the last axis instead of `batch`.
    """
    if issubclass(kind, Indexed):
        along = facts.get("mode") == "along" or facts.get("along") is True
        obsolete = {("mode", "rows"), ("mode", "along")} if kind is Gather else {("along", True)}
        facts = {k: v for k, v in facts.items() if not (isinstance(v, str | bool) and (k, v) in obsolete)}
        facts |= {"batch": max(operands[0].ndim - 1, 0)} if along and operands else {}
    names = {f.name for f in fields(kind)}
    renamed = {k: f"bytes_{v}" for k, v in (("reads", "read"), ("writes", "written")) if f"bytes_{v}" in names}
    needless = "inplace" not in names and facts.get("inplace") is True
    return {renamed.get(k, k): v for k, v in facts.items() if k != "inplace" or not needless}


def of_version_2(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert an op from version 1 or 2, where recorded calls had their own kind, `aten`."""
    attrs = node.get("attrs")
    if node.get("kind") != "aten" or not isinstance(attrs, Mapping):
        return node
    called = {f.name for f in fields(Call)}
    call = {k: v for k, v in attrs.items() if k in called}
    return {**node, "kind": "foreign", "attrs": {k: v for k, v in attrs.items() if k not in called}, "call": call}


#: Names up to version 3 of op kinds, and of their fields by kind; `*` stands for all kinds.
EARLIER_NAMES = {
    "absent": "undef",
    "around": "unshard",
    "foreign": "custom_call",
    "grouped": "grouped_matmul",
    "keep": "keep_alive",
    "part": "local_shard",
    "revised": "slice_update",
    "unpool": "pool_backward",
    "*.again": "recompute",
    "accumulate.lent": "aliased",
    "append.part": "mesh_axis",
    "arange.back": "reverse",
    "gather.part": "mesh_axis",
    "gather.passed": "padding_idx",
    "grouped_matmul.unpacked": "unpack_flops",
    "keep_alive.asked": "requested_dtype",
    "keep_alive.pulled_by": "custom_grad",
    "pool.inside": "exclude_padding",
    "pool_backward.inside": "exclude_padding",
    "repeat.least": "min_count",
    "scatter.part": "mesh_axis",
    "scatter.passed": "padding_idx",
    "slice_update.unseen": "untracked",
    "view_as.what": "view",
}


def of_version_3(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert an op from version 1, 2 or 3, where some kinds and fields had other names."""
    kind, attrs = node.get("kind"), node.get("attrs")
    if not isinstance(kind, str) or not isinstance(attrs, Mapping):
        return node
    kind = EARLIER_NAMES.get(kind, kind)
    renamed = {k: EARLIER_NAMES.get(f"{kind}.{k}") or EARLIER_NAMES.get(f"*.{k}", k) for k in attrs}
    return {**node, "kind": kind, "attrs": {renamed[k]: v for k, v in attrs.items()}}


# -- placements and schedules ------------------------------------------------------------------------------------------

#: Keys for the sharding and the pipeline schedule in a per-rank graph.
RANKS = ("sharding", "waiting")

Encode = Callable[[Any], Any]


def ranks_data(graph: Graph, encode: Encode) -> dict[str, Any]:
    """Encode a per-rank graph's placements and pipeline schedule."""
    data: dict[str, Any] = {}
    if graph.sharding is not None:
        sharding = graph.sharding
        placed = {"places": sharding.places, "gradients": sharding.gradients}
        data["sharding"] = {
            "mesh": [encode(sharding.mesh.axes), encode(sharding.mesh.joint)],
            "outputs": [_placement_data(placement, encode) for placement in sharding.outputs],
            "replicated": list(sharding.replicated),
            "resharded": list(sharding.resharded),
            "own": list(sharding.own),
            **{
                key: {name: _placement_data(placement, encode) for name, placement in by_name.items()}
                for key, by_name in placed.items()
            },
        }
    if graph.waiting is not None:
        data["waiting"] = {f.name: encode(getattr(graph.waiting, f.name)) for f in fields(InFlightMicroBatches)}
    return data


def _placement_data(placement: Placement, encode: Encode) -> list[Any]:
    return [encode(placement.dims), encode(placement.partial)]


def read_ranks(graph: Graph, facts: Mapping[str, Any], decode: Encode) -> None:
    """Decode placements and a pipeline schedule into a graph; raise TypeError or similar if they are malformed."""
    if "sharding" in facts:
        sharding_data = facts["sharding"]
        axes, joint = map(decode, sharding_data["mesh"])
        _require(all(isinstance(name, str) and isinstance(n, Poly) for name, n in axes), "mesh")
        mesh = Mesh(axes, joint)
        names = {t.name: t.ndim for g in graph.bodies() for t in g.tensors}

        def placement(data: Any, ndim: int) -> Placement:
            placed = Placement(*map(decode, data))
            valid = all(f in mesh if isinstance(f, str) else isinstance(f, Poly) for dim in placed.dims for f in dim)
            _require(len(placed.dims) == ndim and valid, "placement")
            return placed

        outputs = zip(sharding_data["outputs"], graph.outputs, strict=True)
        graph.sharding = Sharding(
            mesh,
            {name: placement(data, names[name]) for name, data in sharding_data["places"].items()},
            tuple(placement(data, t.ndim) for data, t in outputs),
            {name: placement(data, names[name]) for name, data in sharding_data["gradients"].items()},
            tuple(map(_text, sharding_data["resharded"])),
            tuple(map(_text, sharding_data["own"])),
            replicated=tuple(map(_text, sharding_data["replicated"])),
        )
    if "waiting" in facts:
        graph.waiting = InFlightMicroBatches(**{name: decode(value) for name, value in facts["waiting"].items()})


def _text(value: Any) -> str:
    _require(isinstance(value, str), "text")
    return str(value)


def _require(holds: bool, description: str) -> None:
    if not holds:
        raise TypeError(f"malformed {description} in a per-rank graph, expected axes, sizes and names")


# -- reader ------------------------------------------------------------------------------------------------------------

# Errors that malformed fields cause in the code below.
MALFORMED = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError, RecursionError, ZeroDivisionError,
    OverflowError,
)  # fmt: skip
_PHASES = ("forward", "recompute", "backward", "optimizer")
# Known keys in a graph, in its attributes, in the root graph's attributes, and in nodes.
_GRAPH = {"directed", "multigraph", "graph", "nodes", "edges"}
_FACTS = {"name", "dtype", "outputs", "formals"}
_ROOT = {"schema", "assumptions", "defaults", "legend", "loss", "gradients", "matmul_dtype", "layers", "parts", *RANKS}
_OP = {"id", "type", "kind", "operands", "results", "attrs", "scope", "phase", "call"}
_TENSOR = {"id", "type", "role", "shape", "dtype"}
_BY_ROLE = {
    "param": {"pieces", "grad"}, "input": {"pieces", "grad"}, "formal": {"pieces", "offset", "domain"},
}  # fmt: skip
_MAX_BODY_DEPTH = 20
_MAX_LOOP_DEPTH = 8  # three iterations of each are examined, so every level triples the time
_MOST_TERMS = 1 << 18  # over all sizes of a file
_MOST_ASSUMPTIONS = 1000  # they are compared pairwise
_MOST_STATES = 64  # prefixes of the assumptions to try: each is derived from scratch


class KnownAssumptions:
    """Assumptions that may have been stated before an op was built: prefixes of the list.

    Most programs state all of them before their ops or after, so these two come first; others follow on demand.
    """

    def __init__(self, relations: Sequence[Relation]) -> None:
        self.relations = relations
        self._states: dict[int, Relations] = {}

    def __iter__(self) -> Iterator[Relations]:
        total = len(self.relations)
        for count in dict.fromkeys((total, 0, *range(total - 1, 0, -1))):
            if count not in self._states:
                if len(self._states) == _MOST_STATES:
                    raise GraphError(f"fits none of {_MOST_STATES} states of the assumptions")
                self._states[count] = Relations(self.relations[:count])
            yield self._states[count]


def node_id(node: Tensor | Op) -> str:
    """Return a node's id in the file: ops have a suffix, as a tensor may have the same name."""
    return f"{node.name}()" if isinstance(node, Op) else node.name


class Reader:
    """Rebuilds a graph from file data, op by op."""

    def __init__(self, place: str, assumptions: Sequence[str], version: int) -> None:
        self.place, self.version = place, version
        if len(assumptions) > _MOST_ASSUMPTIONS:
            raise self.error(f"top: {len(assumptions)} assumptions, expected at most {_MOST_ASSUMPTIONS}")
        self.known = KnownAssumptions(list(map(parse_relation, assumptions)))
        self.depth = self.repeats = self.terms = 0
        self.sizes: dict[str, Poly] = {}

    def error(self, message: str) -> FormatError:
        """Return an error with the file's name."""
        return FormatError(f"{self.place}: {message}")

    def need(self, data: Any, key: str, kind: type, where: str) -> Any:
        """Return the value under a key, or raise FormatError if it has another type."""
        return need(self.place, data, key, kind, where)

    def texts(self, data: Any, key: str, where: str) -> list[str]:
        """Return the list of names under a key."""
        return texts(self.place, data, key, where)

    def size(self, text: Any, where: str) -> Poly:
        """Parse a formula, cached: files repeat few sizes many times."""
        if not isinstance(text, str) or text not in self.sizes:
            parsed = parse_formula(text, where)
            self.terms += len(parsed.terms)
            if self.terms > _MOST_TERMS:
                raise self.error(f"{where}: more than {_MOST_TERMS} terms in the sizes, expected fewer")
            self.sizes[text] = parsed
        return self.sizes[text]

    def decode(self, data: Any, parent: Graph, where: str) -> Any:
        """Decode an attribute: a plain value, or a tagged one."""
        if data is None or isinstance(data, bool | int | float | str):
            return data
        if not isinstance(data, dict) or len(data) != 1:
            raise self.error(f"{where}: attribute {shown(data)}, expected a plain value or one tagged value")
        ((tag, value),) = data.items()
        decoders: dict[str, Callable[[Any], Any]] = {
            "size": lambda v: self.size(v, where),
            "float": lambda v: {"inf": inf, "-inf": -inf, "nan": nan}[v],
            "complex": lambda v: complex(*(self.decode(x, parent, where) for x in kept(list, v))),
            "dtype": find_dtype,
            "pattern": lambda v: parse_pattern(v, scattered=True),
            "function": _function,
            "domain": lambda v: self.domain(v, parent, where),
            "graph": lambda v: self.graph(v, parent, where),
            "tuple": lambda v: tuple(self.decode(x, parent, where) for x in kept(list, v)),
            "dict": lambda v: {k: self.decode(x, parent, where) for k, x in kept(dict, v).items()},
        }
        if tag not in decoders:
            raise self.error(f"{where}: tag {shorten(tag)}, expected one of {', '.join(decoders)}")
        return decoders[tag](value)

    def domain(self, data: Any, parent: Graph, where: str) -> Domain:
        """Decode a domain: causal flag, window, and the mesh axes that split its queries."""
        causal, window, *ranks = kept(list, data)
        return Domain(causal, self.decode(window, parent, where), tuple(self.decode(r, parent, where) for r in ranks))

    def graph(self, data: Any, parent: Graph | None, where: str) -> Graph:
        """Rebuild the root graph or an op's body."""
        self.depth += 1
        if self.depth > _MAX_BODY_DEPTH:
            raise self.error(f"{where}: too many nested bodies, expected at most {_MAX_BODY_DEPTH} levels")
        facts = self.need(data, "graph", dict, where)
        keys(self.place, data, _GRAPH, where)
        keys(self.place, facts, _FACTS | (_ROOT if parent is None else set()), where)
        if not self.need(data, "directed", bool, where) or self.need(data, "multigraph", bool, where):
            raise self.error(f"{where}: unsupported kind of graph, expected 'directed' true and 'multigraph' false")
        name = self.need(facts, "name", str, where)
        graph = Graph(name, dtype=self.need(facts, "dtype", str, where))
        if parent is None:
            graph.relations = next(iter(self.known))
        else:
            graph.parent = parent
        tensors: dict[str, Tensor] = {}
        for i, node in enumerate(self.need(data, "nodes", list, where)):
            spot = f"{where}: node {i + 1}"
            self.need(node, "id", str, spot)
            type_ = self.need(node, "type", str, spot)
            if type_ not in ("op", "tensor"):
                raise self.error(f"{spot}: type {shorten(type_)}, expected 'op' or 'tensor'")
            if type_ == "op":
                keys(self.place, node, _OP, spot)
                self.op(graph, node, tensors, spot)
                continue
            if self.need(node, "role", str, spot) == "result":
                keys(self.place, node, _TENSOR, spot)
            else:
                tensors[node["id"]] = self.source(graph, node, spot)
        graph.formals = [self.tensor(tensors, n, where) for n in self.texts(facts, "formals", where)]
        graph.outputs.extend(self.tensor(tensors, n, where) for n in self.texts(facts, "outputs", where))
        if parent is None:
            graph.gradients = self.gradients(facts, tensors, where)
        self.agree(graph, data, where)
        self.depth -= 1
        return graph

    def tensor(self, tensors: Mapping[str, Tensor], name: str, where: str) -> Tensor:
        """Return an earlier tensor by name."""
        if name not in tensors:
            raise self.error(f"{where}: tensor {shorten(name)} is unknown, expected an earlier tensor")
        return tensors[name]

    def source(self, graph: Graph, node: dict[str, Any], where: str) -> Tensor:
        """Add a tensor without a producer."""
        role, name = node["role"], node["id"]
        allowed = [r for r in SOURCES if r != ("formal" if graph.parent is None else "input")]
        if role not in allowed:
            raise self.error(f"{where}: role {shorten(role)}, expected one of {', '.join(allowed)}")
        keys(self.place, node, _TENSOR | {"host", "strides"} | _BY_ROLE.get(role, {"pieces"}), where)
        need_name(role, name)
        self.claim(graph, name, where)
        shape = [self.size(s, where) for s in self.texts(node, "shape", where)]
        has_grad = role == "param" or (role == "input" and "grad" in node)
        grad = self.need(node, "grad", bool, where) if has_grad else False
        strides = None
        if role == "formal" or "strides" in node:
            strides = tuple(self.size(s, where) for s in self.texts(node, "strides", where))
            if len(strides) != len(shape):
                raise self.error(f"{where}: {len(strides)} strides for {len(shape)} axes, expected one for each")
        tensor = Tensor(
            graph, name, sizes_of(shape, f"{role} {name!r}"), find_dtype(self.need(node, "dtype", str, where)),
            role=role, strides=strides, requires_grad=grad, pieces=self.pieces(node, len(shape), where),
            host=self.need(node, "host", bool, where) if "host" in node else False,
        )  # fmt: skip
        if role == "formal":
            tensor.offset = self.size(node.get("offset"), where)
            tensor.domain = _restriction(self.decode(node.get("domain"), graph, where), tensor)
        graph.add_node(tensor)
        return tensor

    def pieces(self, node: dict[str, Any], axes: int, where: str) -> int:
        """Return the number of a source's leading axes with separate allocations."""
        pieces: int = self.need(node, "pieces", int, where) if "pieces" in node else 0
        if not 0 <= pieces <= axes:
            raise self.error(f"{where}: {shown(pieces)} leading axes with separate storages, expected 0 to {axes}")
        return pieces

    def gradients(self, data: Any, tensors: Mapping[str, Tensor], where: str) -> dict[Tensor, Tensor]:
        """Return each source's gradient."""
        by_source: dict[Tensor, Tensor] = {}
        for i in range(len(self.need(data, "gradients", list, where)) if "gradients" in data else 0):
            spot = f"{where}: gradient {i + 1}"
            pair = data["gradients"][i]
            names = self.texts({"pair": pair}, "pair", spot)
            if len(names) != 2:
                raise self.error(f"{spot}: {shown(pair)}, expected the names of a source and its gradient")
            source, gradient = (self.tensor(tensors, n, spot) for n in names)
            if source.producer is not None or source.role not in ("input", "param") or source in by_source:
                raise self.error(f"{spot}: source {source.name!r}, expected a parameter or an input, each once")
            fits = gradient.sizes == source.sizes and gradient.storage.pieces == source.storage.pieces
            if not fits or gradient.dtype.kind != "float":
                raise self.error(
                    f"{spot}: {gradient!r} of {source!r}, expected a floating tensor with its shape and storages"
                )
            by_source[source] = gradient
        return by_source

    def claim(self, graph: Graph, name: str, where: str) -> None:
        """Reserve a unique name."""
        if name in graph.root._taken:
            raise self.error(f"{where}: duplicate name {shorten(name)}, expected unique names")
        graph.root._taken[name] = 1

    def op(self, graph: Graph, node: dict[str, Any], tensors: dict[str, Tensor], where: str) -> None:
        """Add an op; its results are inferred, then renamed as in the file."""
        node = node if self.version > 2 else dict(of_version_2(node))
        node = node if self.version > 3 else dict(of_version_3(node))
        kind = KINDS.get(self.need(node, "kind", str, where))
        if kind is None:
            raise self.error(f"{where}: op kind {shorten(node['kind'])}, expected one of {', '.join(KINDS)}")
        phase, scope = self.need(node, "phase", str, where), self.need(node, "scope", str, where)
        if phase not in _PHASES:
            raise self.error(f"{where}: phase {shorten(phase)}, expected one of {', '.join(_PHASES)}")
        if scope:
            need_name(f"{self.place}: {where}: scope", scope)
        name = node["id"].removesuffix("()")
        operands = [self.tensor(tensors, n, where) for n in self.texts(node, "operands", where)]
        repeated = kind is Repeat
        self.repeats += repeated
        if self.repeats > _MAX_LOOP_DEPTH:
            raise self.error(f"{where}: too many nested repeats, expected at most {_MAX_LOOP_DEPTH} levels")
        op = self.build_op(graph, kind, operands, node, where)
        self.repeats -= repeated
        op.scope = scope
        self.results(op, node, name, tensors, where)

    def build_op(
        self, graph: Graph, kind: type[OpKind], operands: list[Tensor], node: dict[str, Any], where: str
    ) -> Op:
        """Append the op itself."""
        name, phase = node["id"].removesuffix("()"), node["phase"]
        try:
            facts = {k: self.decode(v, graph, where) for k, v in self.need(node, "attrs", dict, where).items()}
            stacked = next((t for t in operands if t.storage.pieces and kind is not Repeat), None)
            # recorded calls may take lists of layers, and `keep_alive` does not read its operands
            if stacked is not None and not kind.takes_lists and "pieces" not in facts:
                raise GraphError(f"{kind.name} of {stacked!r}, expected a loop: it has a storage for each iteration")
            op = self.add_checked_op(graph, kind, facts, operands, name, phase)
            if op.body is not None:
                op.body.owner, op.body.fused = op, kind is not Repeat
            op.kind.flops(op), op.kind.reads(op), op.kind.writes(op)  # fail now if it cannot be counted
            if "call" in node:
                call = {k: self.decode(v, graph, where) for k, v in self.need(node, "call", dict, where).items()}
                op.call = typed(Call, call)
                op.call.verify(len(operands), len(op.results))
        except FormatError:
            raise
        except CostGraphError as error:
            raise self.error(f"{where}: {error}") from None
        except MALFORMED as error:
            raise self.error(
                f"{where}: attributes of {kind.name!r} are malformed ({type(error).__name__}: {error})"
            ) from None
        return op

    def add_checked_op(
        self, graph: Graph, kind: type[OpKind], facts: dict[str, Any], operands: list[Tensor], name: str, phase: str
    ) -> Op:
        """Add an op after checking its fields against their types and the operands."""
        try:
            record = typed(kind, facts if self.version > 1 else of_version_1(kind, facts, operands))
            record.verify(operands, self.known)
            return graph.add_op(record, operands, name, phase)
        except CostGraphError as error:
            raise GraphError(f"attributes of {kind.name!r} are malformed: {error}") from None

    def results(self, op: Op, node: dict[str, Any], name: str, tensors: dict[str, Tensor], where: str) -> None:
        """Rename an op's results as in the file."""
        names = self.texts(node, "results", where)
        if op.name != name or len(names) != len(op.results):
            raise self.error(f"{where}: {name!r} has {len(op.results)} results, the file names {len(names)}")
        for t, file_name in zip(op.results, names, strict=True):
            if t.name != file_name:
                need_name("result", file_name)
                op.graph.root._taken.pop(t.name, None)
                self.claim(op.graph, file_name, where)
                t.name = file_name
                if t.storage.role == "activation" and not t.is_view:
                    t.storage.name = file_name
            tensors[file_name] = t

    def agree(self, graph: Graph, data: Any, where: str) -> None:
        """Compare stated nodes, edges and shapes with the derived ones; a mismatch means a corrupt or edited file."""
        edges = self.need(data, "edges", list, where)
        file_edges = Counter((self.need(e, "source", str, where), self.need(e, "target", str, where)) for e in edges)
        for edge in edges:
            keys(self.place, edge, ("source", "target"), f"{where}: an edge")
        derived = Counter((node_id(a), node_id(b)) for a, b in graph.edges)
        if file_edges != derived:
            mismatch = sorted(map(str, (file_edges - derived) + (derived - file_edges)))[0]
            raise self.error(f"{where}: edge {shorten(mismatch)} does not match the operands of the ops")
        nodes = Counter(n["id"] for n in data["nodes"])
        for mismatch in (nodes - Counter(map(node_id, graph.nodes))) or ():
            raise self.error(f"{where}: tensor {shorten(mismatch)} is not the result of an op, or occurs twice")
        facts = {n["id"]: (n.get("shape"), n.get("dtype")) for n in data["nodes"] if n["type"] != "op"}
        for t in graph.tensors:
            shape, format_ = facts.get(t.name, (None, None))
            if shape != [str(n) for n in t.sizes]:
                raise self.error(
                    f"{where}: tensor {t.name!r} has shape {shown(shape)}, expected {[str(n) for n in t.sizes]}"
                )
            if format_ != t.dtype.name:
                raise self.error(f"{where}: tensor {t.name!r} has format {shown(format_)}, expected {t.dtype.name!r}")


def _function(data: Any) -> Function:
    """Return a function from the table by name, or a custom record."""
    if not isinstance(data, dict):
        return FUNCTIONS[kept(str, data)]
    data = {"order": [], **data}  # missing in older files
    names = [f.name for f in fields(Function)]
    if sorted(data) != sorted(names):
        raise TypeError(f"function {shown(sorted(data))}, expected {', '.join(names)}")
    return Function(**{**data, "grad": _tuples(data["grad"]), "order": _tuples(data["order"])})


def _tuples(value: Any) -> Any:
    """Convert nested lists to tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def need(place: str, data: Any, key: str, kind: type, where: str) -> Any:
    """Return the value under a key, or raise FormatError if it has another type."""
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise FormatError(f"{place}: {where}: {key!r} is {shown(value)}, expected {kind.__name__}")
    return value


def keys(place: str, data: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise FormatError if there is an unknown key: misspelt, or from another version."""
    unknown = next((key for key in data if key not in known), None)
    if unknown is not None:
        raise FormatError(f"{place}: {where}: key {shorten(unknown)}, expected one of {', '.join(sorted(known))}")


def texts(place: str, data: Any, key: str, where: str) -> list[str]:
    """Return the list of names under a key."""
    values = need(place, data, key, list, where)
    if not all(isinstance(v, str) for v in values):
        raise FormatError(f"{place}: {where}: {key!r} is {shown(values)}, expected a list of names")
    return list(values)


def kept(kind: type, value: Any) -> Any:
    """Return a value with the given type; a string would otherwise pass as a list of letters."""
    if not isinstance(value, kind):
        raise TypeError(f"{shown(value)}, expected {kind.__name__}")
    return value


def _restriction(decoded: Any, tensor: Tensor) -> tuple[Domain, int, int] | None:
    """Return a formal's domain, checked against its axes."""
    if decoded is None:
        return None
    domain, *axes = decoded
    in_range = all(isinstance(a, int) and not isinstance(a, bool) and 0 <= a < tensor.ndim for a in axes)
    if not isinstance(domain, Domain) or len(axes) != 2 or axes[0] == axes[1] or not in_range:
        raise FormatError(f"domain {shown(decoded)} of {tensor!r}, expected a domain and two axes")
    domain.points(tensor.sizes[axes[0]], tensor.sizes[axes[1]])  # raises if it cannot be counted
    return domain, axes[0], axes[1]


# -- save and load -----------------------------------------------------------------------------------------------------

_SCHEMAS = {f"costgraph/graph/{version}": version for version in (1, 2, 3, 4)}
_SCHEMA = "costgraph/graph/4"
_MAX_FILE_BYTES = 64 * 2**20


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return {"float": str(value)}  # not representable in JSON
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
    if isinstance(value, OpaqueBackward):
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
        has_grad = data["role"] == "param" or (data["role"] == "input" and node.requires_grad)
        return data | ({"grad": node.requires_grad} if has_grad else {})
    call_fields = {} if node.call is None else vars(node.call)
    call = {"call": {k: _encode(v) for k, v in call_fields.items() if v != ""}} if call_fields else {}
    return call | {
        "type": "op",
        "kind": node.kind.name,
        "operands": [t.name for t in node.operands],
        "results": [t.name for t in node.results],
        "attrs": {k: _encode(v) for k, v in node.kind.stated().items()},
        "scope": node.scope,
        "phase": node.phase,
    }


def _nodes_in_order(graph: Graph) -> Iterator[Tensor | Op]:
    """Yield a graph's nodes with results right after their op, also those exported later."""
    for node in graph.nodes:
        if isinstance(node, Op):
            yield node
            yield from node.results
        elif node.producer is None:
            yield node


def _graph_data(graph: Graph) -> dict[str, Any]:
    exported = nx.DiGraph(
        name=graph.name,
        dtype=graph.dtype.name,
        outputs=[t.name for t in graph.outputs],
        formals=[t.name for t in graph.formals],
    )
    if graph.parent is None:
        exported.graph |= {
            "schema": _SCHEMA,
            "assumptions": [r.text for r in graph.relations.relations],
            "defaults": dict(graph.defaults),
            "loss": graph.loss,
        }
        if graph.legend:
            exported.graph["legend"] = dict(graph.legend)
        if graph.matmul_dtype is not None:
            exported.graph["matmul_dtype"] = graph.matmul_dtype
        if graph.layers:
            exported.graph["layers"] = sorted(graph.layers)
        exported.graph |= ranks_data(graph, _encode)
        if graph.parts:
            exported.graph["parts"] = [_graph_data(part) for part in graph.parts]
        if graph.gradients:
            exported.graph["gradients"] = [[t.name, g.name] for t, g in graph.gradients.items()]
    exported.add_nodes_from((node_id(n), _node_data(n)) for n in _nodes_in_order(graph))
    exported.add_edges_from((node_id(a), node_id(b)) for a, b in graph.edges)
    data: dict[str, Any] = nx.node_link_data(exported, edges="edges")
    return data


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a JSON file.

    Parameters
    ----------
    graph : Graph
        Graph to save.
    path : str or path-like
        File, overwritten if it exists.

    Raises
    ------
    FormatError
        If the file cannot be written, or an op attribute cannot be serialized.
    """
    write_file(path, text_of(graph, place_of(path)) + "\n")


def text_of(graph: Graph, place: str) -> str:
    """Return a graph as JSON text, or raise FormatError that names the place."""
    try:
        return json.dumps(_graph_data(graph), indent=1, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise FormatError(f"{place}: cannot write the graph, {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def load(path: str | os.PathLike[str]) -> Graph:
    """Read a graph from a JSON file that `save` wrote.

    Parameters
    ----------
    path : str or path-like
        File of at most 64 MiB.

    Returns
    -------
    Graph
        Graph with the same costs as the saved one.

    Raises
    ------
    FormatError
        If the file cannot be read, or is not a valid graph; the message says where.
    """
    place = place_of(path)
    return graph_of(_data(path, place), place)


def graph_of(data: Any, place: str) -> Graph:
    """Return the graph in parsed JSON, or raise FormatError that names the place."""
    try:
        with opened(levels=()):  # names in a file are complete
            return _read(place, data)
    except CostGraphError as error:  # prefix the place once
        text = str(error)
        raise FormatError(text if text.startswith(place) else f"{place}: {text}") from None
    except MALFORMED as error:
        raise FormatError(f"{place}: malformed ({type(error).__name__}: {error})") from None


def _read(place: str, data: Any) -> Graph:
    """Read a graph, or a stage of a pipeline."""
    facts = need(place, data, "graph", dict, "top")
    schema = facts.get("schema")
    if not isinstance(schema, str) or schema not in _SCHEMAS:
        raise FormatError(f"{place}: schema {shown(facts.get('schema'))}, expected {_SCHEMA!r}")
    reader = Reader(place, texts(place, facts, "assumptions", "top"), _SCHEMAS[schema])
    graph = reader.graph(data, None, "top")
    graph.defaults = _defaults(place, facts)
    graph.legend = _legend(place, facts)
    graph.loss = None if facts["loss"] is None else kept(str, facts["loss"])
    graph.matmul_dtype = find_dtype(kept(str, facts["matmul_dtype"])).name if "matmul_dtype" in facts else None
    graph.layers = frozenset(texts(place, facts, "layers", "top") if "layers" in facts else ())
    read_ranks(graph, facts, lambda value: reader.decode(value, graph, "top"))
    parts = need(place, facts, "parts", list, "top") if "parts" in facts else []
    if any("parts" in need(place, part, "graph", dict, "parts") for part in parts):
        raise FormatError(f"{place}: nested pipeline parts, expected stages of one pipeline")
    graph.parts = tuple(_read(place, part) for part in parts)
    graph.freeze()
    return graph


def _data(path: str | os.PathLike[str], place: str) -> Any:
    text = read_text(path, place, _MAX_FILE_BYTES, "a graph in JSON")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: invalid JSON, {type(error).__name__}: {error}") from None


def _defaults(place: str, facts: dict[str, Any]) -> dict[str, int]:
    defaults = need(place, facts, "defaults", dict, "top")
    for name, value in defaults.items():
        if not is_name(name):
            raise FormatError(f"{place}: default {shorten(name)}, expected the name of a dimension")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(f"{place}: default {shorten(name)} is {shown(value)}, expected a positive integer")
    return dict(defaults)


def _legend(place: str, facts: dict[str, Any]) -> dict[str, str]:
    legend = need(place, facts, "legend", dict, "top") if "legend" in facts else {}
    for name, text in legend.items():
        if not is_name(name) or not isinstance(text, str):
            raise FormatError(
                f"{place}: legend {shorten(name)}: {shown(text)}, expected a dimension and its description"
            )
    return dict(legend)
