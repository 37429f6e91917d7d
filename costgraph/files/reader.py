"""From the data of a file to a graph, op by op, with nothing of the file taken at its word.

Shapes, layouts and costs are derived again; what a file states of them has to agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from math import inf, nan
from typing import Any

from ..algebra.dominance import Relation, Relations
from ..algebra.polynomial import Poly
from ..algebra.symbols import shorten, shown
from ..dtypes import dtype as find_dtype
from ..errors import CostGraphError, FormatError, GraphError
from ..graph.arguments import need_name, sizes_of
from ..graph.call import Call
from ..graph.domain import Domain
from ..graph.graph import Graph
from ..graph.loop import Repeat
from ..graph.op import Op, OpKind
from ..graph.tensor import SOURCES, Tensor
from ..notation.grammar import parse_formula, parse_relation
from ..notation.pattern import parse_pattern
from ..ops.pointwise import FUNCTIONS, Function
from ..ops.registry import KINDS
from .fields import of_version_1, of_version_2, typed
from .ranks import RANKS

__all__ = ["MALFORMED", "Reader", "kept", "need", "node_id", "texts"]

# What goes wrong underneath where a field says what nothing of its kind can be.
MALFORMED = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError, RecursionError, ZeroDivisionError,
    OverflowError,
)  # fmt: skip
_PHASES = ("forward", "recompute", "backward", "optimizer")
# What stands in a file: of a graph, of what is said about one, the outermost one's beside it, and of nodes.
_GRAPH = {"directed", "multigraph", "graph", "nodes", "edges"}
_FACTS = {"name", "dtype", "outputs", "formals"}
_ROOT = {"schema", "assumptions", "defaults", "loss", "gradients", "matmul_dtype", "layers", "parts", *RANKS}
_OP = {"id", "type", "kind", "operands", "results", "attrs", "scope", "phase", "call"}
_TENSOR = {"id", "type", "role", "shape", "dtype"}
_BY_ROLE = {
    "param": {"pieces", "grad"}, "input": {"pieces", "grad"}, "formal": {"pieces", "offset", "domain"},
}  # fmt: skip
_DEEPEST = 20
_DEEPEST_REPEAT = 8  # three iterations of each are looked at, so that every level takes three times as long
_MOST_TERMS = 1 << 18  # of all sizes of a file
_MOST_ASSUMPTIONS = 1000  # each is held against the others
_MOST_STATES = 64  # of what was known while a graph was declared: each is worked out from the first assumption on


class Known:
    """What was known of sizes when an op was made: some assumptions were stated already, the first ones.

    Most programs state them all before their ops or all behind, so that these come first, and others where they are
    asked for.
    """

    def __init__(self, relations: Sequence[Relation]) -> None:
        self.relations = relations
        self._made: dict[int, Relations] = {}

    def __iter__(self) -> Iterator[Relations]:
        every = len(self.relations)
        for count in dict.fromkeys((every, 0, *range(every - 1, 0, -1))):
            if count not in self._made:
                if len(self._made) == _MOST_STATES:
                    raise GraphError(f"fits none of {_MOST_STATES} states of the assumptions, expected one of them")
                self._made[count] = Relations(self.relations[:count])
            yield self._made[count]


def node_id(node: Tensor | Op) -> str:
    """Return what a node is called in a file: an op beside the tensor of its name."""
    return f"{node.name}()" if isinstance(node, Op) else node.name


class Reader:
    """Rebuilds a graph, op by op, from the data of a file."""

    def __init__(self, place: str, assumptions: Sequence[str], version: int) -> None:
        self.place, self.version = place, version
        if len(assumptions) > _MOST_ASSUMPTIONS:
            raise self.error(f"top: {len(assumptions)} assumptions, expected at most {_MOST_ASSUMPTIONS}")
        self.known = Known(list(map(parse_relation, assumptions)))
        self.depth = self.repeats = self.terms = 0
        self.sizes: dict[str, Poly] = {}

    def error(self, what: str) -> FormatError:
        """Return an error that names the file."""
        return FormatError(f"{self.place}: {what}")

    def need(self, data: Any, key: str, kind: type, where: str) -> Any:
        """Return what stands under a key, or raise FormatError if it is of another type."""
        return need(self.place, data, key, kind, where)

    def texts(self, data: Any, key: str, where: str) -> list[str]:
        """Return the list of names that stands under a key."""
        return texts(self.place, data, key, where)

    def size(self, text: Any, where: str) -> Poly:
        """Read a formula, once for every text: a file has few sizes and writes them often."""
        if not isinstance(text, str) or text not in self.sizes:
            found = parse_formula(text, where)
            self.terms += len(found.terms)
            if self.terms > _MOST_TERMS:
                raise self.error(f"{where}: more than {_MOST_TERMS} terms in the sizes, expected fewer")
            self.sizes[text] = found
        return self.sizes[text]

    def decode(self, data: Any, parent: Graph, where: str) -> Any:
        """Return an attribute: a plain value, or what its tag says."""
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
        """Return a domain: whether it is causal, its window, and the axes of a mesh that split its queries."""
        causal, window, *ranks = kept(list, data)
        return Domain(causal, self.decode(window, parent, where), tuple(self.decode(r, parent, where) for r in ranks))

    def graph(self, data: Any, parent: Graph | None, where: str) -> Graph:
        """Return the graph of a file, or the body of an op."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self.error(f"{where}: bodies in bodies, expected at most {_DEEPEST} levels")
        facts = self.need(data, "graph", dict, where)
        keys(self.place, data, _GRAPH, where)
        keys(self.place, facts, _FACTS | (_ROOT if parent is None else set()), where)
        if not self.need(data, "directed", bool, where) or self.need(data, "multigraph", bool, where):
            raise self.error(f"{where}: another kind of graph, expected 'directed' true and 'multigraph' false")
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
        """Return a tensor that was made before."""
        if name not in tensors:
            raise self.error(f"{where}: tensor {shorten(name)} is not there, expected one made before")
        return tensors[name]

    def source(self, graph: Graph, node: dict[str, Any], where: str) -> Tensor:
        """Add a tensor that no op makes."""
        role, name = node["role"], node["id"]
        allowed = [r for r in SOURCES if r != ("formal" if graph.parent is None else "input")]
        if role not in allowed:
            raise self.error(f"{where}: role {shorten(role)}, expected one of {', '.join(allowed)}")
        keys(self.place, node, _TENSOR | {"host", "strides"} | _BY_ROLE.get(role, {"pieces"}), where)
        need_name(role, name)
        self.claim(graph, name, where)
        shape = [self.size(s, where) for s in self.texts(node, "shape", where)]
        stated = role == "param" or (role == "input" and "grad" in node)
        grad = self.need(node, "grad", bool, where) if stated else False
        strides = None
        if role == "formal" or "strides" in node:
            strides = tuple(self.size(s, where) for s in self.texts(node, "strides", where))
            if len(strides) != len(shape):
                raise self.error(f"{where}: {len(strides)} strides of {len(shape)} axes, expected one of each")
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
        """Return how many leading axes of a source have a storage for each of their positions."""
        pieces: int = self.need(node, "pieces", int, where) if "pieces" in node else 0
        if not 0 <= pieces <= axes:
            raise self.error(f"{where}: {shown(pieces)} leading axes of pieces, expected 0 to {axes}")
        return pieces

    def gradients(self, data: Any, tensors: Mapping[str, Tensor], where: str) -> dict[Tensor, Tensor]:
        """Return which tensor is the gradient of which source."""
        out: dict[Tensor, Tensor] = {}
        for i in range(len(self.need(data, "gradients", list, where)) if "gradients" in data else 0):
            spot = f"{where}: gradient {i + 1}"
            pair = data["gradients"][i]
            names = self.texts({"pair": pair}, "pair", spot)
            if len(names) != 2:
                raise self.error(f"{spot}: {shown(pair)}, expected the names of a source and of its gradient")
            of, gradient = (self.tensor(tensors, n, spot) for n in names)
            if of.producer is not None or of.role not in ("input", "param") or of in out:
                raise self.error(f"{spot}: of {of.name!r}, expected a parameter or an input, once")
            fits = gradient.sizes == of.sizes and gradient.storage.pieces == of.storage.pieces
            if not fits or gradient.dtype.kind != "float":
                raise self.error(f"{spot}: {gradient!r} of {of!r}, expected a floating tensor of its shape and pieces")
            out[of] = gradient
        return out

    def claim(self, graph: Graph, name: str, where: str) -> None:
        """Take a name, which nothing else may have."""
        if name in graph.root._taken:
            raise self.error(f"{where}: name {shorten(name)} a second time, expected unique names")
        graph.root._taken[name] = 1

    def op(self, graph: Graph, node: dict[str, Any], tensors: dict[str, Tensor], where: str) -> None:
        """Add an op; its results are derived, and named as the file has them."""
        node = node if self.version > 2 else dict(of_version_2(node))
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
        if self.repeats > _DEEPEST_REPEAT:
            raise self.error(f"{where}: repeats in repeats, expected at most {_DEEPEST_REPEAT} levels")
        op = self.made(graph, kind, operands, node, where)
        self.repeats -= repeated
        op.scope = scope
        self.results(op, node, name, tensors, where)

    def made(self, graph: Graph, kind: type[OpKind], operands: list[Tensor], node: dict[str, Any], where: str) -> Op:
        """Append the op itself."""
        name, phase = node["id"].removesuffix("()"), node["phase"]
        try:
            facts = {k: self.decode(v, graph, where) for k, v in self.need(node, "attrs", dict, where).items()}
            whole = next((t for t in operands if t.storage.pieces and kind is not Repeat), None)
            # a list may have an element for each layer of a stack, and what is kept is not read
            if whole is not None and not kind.takes_lists and "pieces" not in facts:
                raise GraphError(f"{kind.name} of {whole!r}, expected a loop: it has a storage for each iteration")
            op = self.added(graph, kind, facts, operands, name, phase)
            if op.body is not None:
                op.body.owner, op.body.fused = op, kind is not Repeat
            op.kind.flops(op), op.kind.reads(op), op.kind.writes(op)  # what cannot be counted is refused now
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

    def added(
        self, graph: Graph, kind: type[OpKind], facts: dict[str, Any], operands: list[Tensor], name: str, phase: str
    ) -> Op:
        """Add an op whose fields are of their types, and say what the operands say."""
        try:
            record = typed(kind, facts if self.version > 1 else of_version_1(kind, facts, operands))
            record.verify(operands, self.known)
            return graph.add_op(record, operands, name, phase)
        except CostGraphError as error:
            raise GraphError(f"attributes of {kind.name!r} are malformed: {error}") from None

    def results(self, op: Op, node: dict[str, Any], name: str, tensors: dict[str, Tensor], where: str) -> None:
        """Give the results of an op the names that the file has for them."""
        names = self.texts(node, "results", where)
        if op.name != name or len(names) != len(op.results):
            raise self.error(f"{where}: {name!r} has {len(op.results)} results, the file names {len(names)}")
        for t, given in zip(op.results, names, strict=True):
            if t.name != given:
                need_name("result", given)
                op.graph.root._taken.pop(t.name, None)
                self.claim(op.graph, given, where)
                t.name = given
                if t.storage.role == "activation" and not t.is_view:
                    t.storage.name = given
            tensors[given] = t

    def agree(self, graph: Graph, data: Any, where: str) -> None:
        """Compare stated nodes, edges and shapes with the derived ones: a file that disagrees was tampered with."""
        edges = self.need(data, "edges", list, where)
        stated = Counter((self.need(e, "source", str, where), self.need(e, "target", str, where)) for e in edges)
        for edge in edges:
            keys(self.place, edge, ("source", "target"), f"{where}: an edge")
        derived = Counter((node_id(a), node_id(b)) for a, b in graph.edges)
        if stated != derived:
            odd = sorted(map(str, (stated - derived) + (derived - stated)))[0]
            raise self.error(f"{where}: edge {shorten(odd)} does not agree with the operands of the ops")
        nodes = Counter(n["id"] for n in data["nodes"])
        for odd in (nodes - Counter(map(node_id, graph.nodes))) or ():
            raise self.error(f"{where}: tensor {shorten(odd)} is no result of an op, or stands there twice")
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
    """Return a function of the table by its name, or a record of one's own with all that it says."""
    if not isinstance(data, dict):
        return FUNCTIONS[kept(str, data)]
    data = {"order": [], **data}  # which older files do not have
    names = [f.name for f in fields(Function)]
    if sorted(data) != sorted(names):
        raise TypeError(f"function {shown(sorted(data))}, expected {', '.join(names)}")
    return Function(**{**data, "grad": _tuples(data["grad"]), "order": _tuples(data["order"])})


def _tuples(value: Any) -> Any:
    """Return nested lists, as a file has them, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def need(place: str, data: Any, key: str, kind: type, where: str) -> Any:
    """Return what stands under a key, or raise FormatError if it is of another type."""
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise FormatError(f"{place}: {where}: {key!r} is {shown(value)}, expected {kind.__name__}")
    return value


def keys(place: str, data: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise FormatError if something stands under a key that nobody reads: it is misspelt, or of another version."""
    odd = next((key for key in data if key not in known), None)
    if odd is not None:
        raise FormatError(f"{place}: {where}: key {shorten(odd)}, expected one of {', '.join(sorted(known))}")


def texts(place: str, data: Any, key: str, where: str) -> list[str]:
    """Return the list of names that stands under a key."""
    values = need(place, data, key, list, where)
    if not all(isinstance(v, str) for v in values):
        raise FormatError(f"{place}: {where}: {key!r} is {shown(values)}, expected a list of names")
    return list(values)


def kept(kind: type, value: Any) -> Any:
    """Return a value of this type; a text would else be a list of letters."""
    if not isinstance(value, kind):
        raise TypeError(f"{shown(value)}, expected {kind.__name__}")
    return value


def _restriction(found: Any, tensor: Tensor) -> tuple[Domain, int, int] | None:
    """Return the domain of a body's input, if it is one over two of its axes."""
    if found is None:
        return None
    domain, *axes = found
    inside = all(isinstance(a, int) and not isinstance(a, bool) and 0 <= a < tensor.ndim for a in axes)
    if not isinstance(domain, Domain) or len(axes) != 2 or axes[0] == axes[1] or not inside:
        raise FormatError(f"domain {shown(found)} of {tensor!r}, expected a domain and two axes")
    domain.points(tensor.sizes[axes[0]], tensor.sizes[axes[1]])  # refuses what it cannot count
    return domain, axes[0], axes[1]
