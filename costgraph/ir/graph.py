"""Intermediate representation: tensors, ops, loops and the graph that holds them in program order.

`Graph` is a networkx DiGraph with two kinds of node, tensors and ops; the node order is the program order. Ops are
added by the functions in `costgraph.ops` and `costgraph.nn`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cache, cached_property, partial, wraps
from inspect import CO_VARKEYWORDS
from itertools import accumulate, islice
from math import prod
from operator import itemgetter
from types import MappingProxyType, TracebackType
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, get_args

import networkx as nx
import sympy

from ..algebra.conditions import Condition, Conditions, Validity
from ..algebra.dominance import NOTHING_KNOWN, Relations, lower
from ..algebra.extremum import at_least_zero, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, Rational, as_poly, cached, generator, poly
from ..algebra.symbols import integer, is_level, kind_of, shorten, shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import BindingError, CostGraphError, GraphError, ShapeError, UnsupportedError
from ..notation.grammar import parse_relation
from ..notation.validation import READ, Rule, guarded, hints_of, rule
from .strides import Sizes as SizeTuple
from .strides import apart, contiguous, distinct, is_integral, is_polynomial, numel, settled, united, windows_along

__all__ = [
    "Factor",
    "Factors",
    "Held",
    "Mesh",
    "Placement",
    "Sharding",
    "Split",
    "InFlightMicroBatches",
    "agree",
    "blocks",
    "distributed",
    "seen",
    "size_of",
    "tidy",
    "Attributes",
    "Node",
    "filled",
    "reduced",
    "BuildContext",
    "base_name",
    "building",
    "close",
    "current_graph",
    "enter",
    "here",
    "iterations_of",
    "module",
    "opened",
    "phase",
    "same_suffix",
    "scope",
    "scopes_of",
    "with_suffix",
    "VIEWS",
    "explore",
    "summary",
    "summary_html",
    "ALIASES",
    "OPERATORS",
    "SOURCES",
    "Storage",
    "Tensor",
    "nbytes",
    "amount",
    "named",
    "need_call",
    "need_choice",
    "need_flag",
    "need_list",
    "need_name",
    "need_tensor",
    "positive",
    "sizes",
    "sizes_of",
    "FACTS",
    "GraphAttribute",
    "Journal",
    "CheckedAttribute",
    "append",
    "carry_facts",
    "changing",
    "forget",
    "modify",
    "SIZE_ALIASES",
    "public",
    "transactional",
    "with_size_aliases",
    "Bindings",
    "bindings",
    "conditions",
    "known_names",
    "need_open",
    "of_stages",
    "same",
    "dimension_size",
    "stages",
    "simplified",
    "Amount",
    "Amounts",
    "Count",
    "Extents",
    "Flag",
    "Index",
    "Length",
    "Limit",
    "MemoryFormat",
    "Places",
    "Room",
    "Rooms",
    "Shape",
    "Size",
    "Sizes",
    "Start",
    "all_of",
    "hints",
    "is_amount",
    "is_count",
    "is_size",
    "limits_of",
    "need",
    "one_of",
    "optional",
    "Domain",
    "adopt",
    "capture",
    "export",
    "formal",
    "Call",
    "BodyKind",
    "Flops",
    "Op",
    "OpKind",
    "Result",
    "WorkspaceKind",
    "itself",
    "Loop",
    "Repeat",
    "is_pass",
    "loops",
    "need_fit",
    "need_formals",
    "same_place",
    "check",
    "overwritten_by",
    "add_node",
    "add_op",
    "add_result",
    "added_since",
    "home",
    "source",
    "unique",
    "Graph",
    "apply",
    "need_graph",
]


# -- placement ---------------------------------------------------------------------------------------------------------
# DTensor-style placements: which mesh axes split which tensor axes, and which mesh axes hold partial sums.

#: A factor in a tensor axis: a size, or the mesh axis that splits it.
Factor = Poly | str
#: A tensor axis as its factors, slowest first; empty if no mesh axis splits it.
Factors = tuple[Factor, ...]


@dataclass(frozen=True)
class Mesh:
    """Device mesh: a grid with named axes, outermost first, built by `costgraph.mesh`."""

    axes: tuple[tuple[str, Poly], ...]
    """Name and number of ranks for each axis."""
    joint: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Joint names for groups of neighbouring axes: a collective along all of them is one collective."""

    def __getitem__(self, axis: str) -> Poly:
        sizes = dict(self.axes)
        return prod((sizes[a] for a in self.parts(axis)), start=ONE)

    def parts(self, axis: str) -> tuple[str, ...]:
        """Return the mesh axes that a name stands for."""
        return dict(self.joint).get(axis, (axis,))

    def together(self, axes: Sequence[str]) -> str | None:
        """Return the joint name of some axes, or None if they have none."""
        return axes[0] if len(axes) == 1 else next((n for n, mesh_axes in self.joint if mesh_axes == tuple(axes)), None)

    def beside(self, axis: str) -> frozenset[str]:
        """Return the other axes that share a joint name with an axis."""
        return frozenset(a for _, mesh_axes in self.joint if axis in mesh_axes for a in mesh_axes) - {axis}

    def begins(self, axes: Sequence[str]) -> bool:
        """Return whether some axes lead a joint name."""
        return any(mesh_axes[: len(axes)] == tuple(axes) for _, mesh_axes in self.joint)

    def __iter__(self) -> Iterator[str]:
        return iter(name for name, _ in self.axes)

    def __contains__(self, axis: object) -> bool:
        return any(axis == name for name, _ in (*self.axes, *self.joint))

    @property
    def devices(self) -> Poly:
        """Number of devices."""
        return prod((n for _, n in self.axes), start=ONE)

    def __str__(self) -> str:
        joint = (f"{name}=({', '.join(mesh_axes)})" for name, mesh_axes in self.joint)
        return f"mesh({', '.join([*(f'{name}={n}' for name, n in self.axes), *joint])})"


def tidy(factors: Iterable[Factor]) -> Factors:
    """Return factors with neighbouring sizes multiplied; empty if no mesh axis is among them."""
    merged: list[Factor] = []
    for f in factors:
        if isinstance(f, str) or not merged or isinstance(merged[-1], str):
            if f != ONE:
                merged.append(f)
        else:
            merged[-1] = merged[-1] * f
    return tuple(merged) if any(isinstance(f, str) for f in merged) else ()


#: In-flight micro-batches besides the running one. Three pairs count those that wait for their backward pass and for
#: their weight gradients alone: in groups of layers, in modules before the layers, in modules after them. The last
#: entry is 1 if the running micro-batch computes all its gradients at once in a schedule with separate wgrad passes.
Held = tuple[Poly, Poly, Poly, Poly, Poly, Poly, Poly]


#: Pipeline schedule without a backward pass, as in inference.
FORWARD = "forward"


@dataclass(frozen=True)
class InFlightMicroBatches:
    """One rank's pipeline schedule, with its in-flight micro-batches."""

    first: tuple[Held, ...]
    """in-flight micro-batches while the very first one runs, at several points in time"""
    later: tuple[Held, ...]
    """the same once all weight gradients exist"""
    schedule: str
    """schedule name, `FORWARD` without backward passes"""
    stages: Poly
    """ranks in the whole pipeline"""
    micro_batches: Poly
    """micro-batches per step"""
    alike: Poly
    """ranks that run the same program, this one included"""
    groups: Poly = ONE
    """virtual stages: layer groups per rank"""
    asked: tuple[tuple[Poly, str, int], ...] = ()
    """formulas that must be integers: formula, description, least value"""
    ranks: tuple[tuple[Poly, Poly], ...] = ()
    """first and last rank in each run of neighbouring ranks with the same program"""
    handed: bool = False
    """whether boundary tensors use receive buffers for all micro-batches and stay alive at the sender, as in torch"""
    ends: tuple[Poly, Poly] = (ZERO, ZERO)
    """in-flight micro-batches at the last forward, in a group that receives nothing and in one that sends nothing"""


@dataclass(frozen=True)
class Split:
    """Sharding rule: how operand and result axes of an op correspond, by factor names local to the rule.

    A factor that operands and results share may be split. A factor that only operands have may be split if `reduced`
    names the reduction over its ranks. All other factors are replicated.
    """

    operands: tuple[tuple[tuple[str, ...], ...] | None, ...]
    """For each operand, the factors in each axis, slowest first; None for an operand that keeps its placement."""
    results: tuple[tuple[tuple[str, ...], ...], ...]
    """The same for each result."""
    extents: Mapping[str, Poly]
    """Size of each factor."""
    local: Callable[[Mapping[str, Poly], Mapping[str, str]], OpKind]
    """Builds one rank's op kind from the local sizes and the mesh axis that splits each factor."""
    reduced: Mapping[str, str] = field(default_factory=dict)
    """Factors that results reduce: sum, mean, max or min; own if the result has one element per shard."""
    whole: frozenset[str] = frozenset()
    """Factors that cannot be split."""
    fixed: Mapping[str, Factors] = field(default_factory=dict)
    """Factors with a given placement: rows that each rank orders for itself, and positions of a rank's own indices."""
    paired: frozenset[str] = frozenset()
    """Factors split along the axes of the fixed ones, index by index."""
    once: frozenset[str] = frozenset()
    """Factors that at most one mesh axis can split."""
    consecutive: frozenset[str] = frozenset()
    """Factors whose local elements must be consecutive."""
    linear: bool = False
    """Whether partial sums in all operands may stay partial in the results."""
    product: bool = False
    """Whether the op is linear in each operand separately."""
    scaled: bool = False
    """Whether a partial sum in one operand may stay partial in the results: the op scales it by a number."""
    into: int | None = None
    """Operand that the reduced value is added to: it must be zero, or a partial sum itself."""


@dataclass(frozen=True)
class Placement:
    """Placement on a mesh: DTensor's Shard, Replicate and Partial for each mesh axis.

    A split axis is a product of factors in element order. (tp, F/tp) is F in consecutive blocks, one for each rank of
    tp; (B, tp, H/tp) results from merging B with a split H, as DTensor's strided shard.
    """

    dims: tuple[Factors, ...]
    """Factors in each tensor axis, empty if it is replicated."""
    partial: tuple[tuple[str, str], ...] = ()
    """Mesh axes whose ranks hold partial values, with their reduction: sum, mean, max, min."""

    @property
    def axes(self) -> frozenset[str]:
        """Mesh axes that split the tensor."""
        return frozenset(f for dim in self.dims for f in dim if isinstance(f, str))

    @property
    def pending(self) -> dict[str, str]:
        """Reduction for partial values, by mesh axis."""
        return dict(self.partial)

    def dim(self, axis: str) -> int | None:
        """Return the tensor axis that a mesh axis splits, or None."""
        return next((i for i, dim in enumerate(self.dims) if axis in dim), None)

    def local(self, sizes: SizeTuple) -> SizeTuple:
        """Return the local sizes on one rank."""
        return tuple(size_of(dim, n) for dim, n in zip(self.dims, sizes, strict=True))

    def without(self, axes: Iterable[str], mesh: Mesh) -> Placement:
        """Return the placement after gathering and reducing along some mesh axes."""
        dropped = set(axes)
        dims = tuple(tidy(mesh[f] if f in dropped and isinstance(f, str) else f for f in dim) for dim in self.dims)
        return Placement(dims, tuple(p for p in self.partial if p[0] not in dropped))

    def with_dims(self, dims: Sequence[Factors]) -> Placement:
        """Return the same placement for other axes."""
        return replace(self, dims=tuple(dims))

    def __str__(self) -> str:
        dims = " ".join(f"({' '.join(map(str, dim))})" if dim else "_" for dim in self.dims)
        return dims + "".join(f" + {reduction} over {axis}" for axis, reduction in self.partial)


@dataclass(frozen=True)
class Sharding:
    """Mesh and placements in a per-rank graph."""

    mesh: Mesh
    places: Mapping[str, Placement]
    """Source placements by name."""
    outputs: tuple[Placement, ...]
    """Output placements."""
    gradients: Mapping[str, Placement]
    """Gradient placements, by name of the parameter or input."""
    replicated: tuple[str, ...] = field(default=(), kw_only=True)
    """Matmul weights that tensor parallelism leaves replicated."""
    resharded: tuple[str, ...] = ()
    """Descriptions of all-gathers that the partitioner inserted without being asked."""
    own: tuple[str, ...] = ()
    """Sources that exist in the per-rank graph only."""


def size_of(factors: Factors, full_size: Poly) -> Poly:
    """Return the local size along an axis."""
    return prod((f for f in factors if not isinstance(f, str)), start=ONE) if factors else full_size


def blocks(factors: Factors, axis: str) -> Poly:
    """Return the number of blocks that a mesh axis splits one by one; 1 if shards are contiguous."""
    return prod((f for f in factors[: factors.index(axis)] if not isinstance(f, str)), start=ONE)


def seen(dim: Factors, axes: frozenset[str], mesh: Mesh) -> Factors:
    """Return an axis's factors, with all but some mesh axes counted as sizes."""
    return tidy(mesh[f] if isinstance(f, str) and f not in axes else f for f in dim)


def agree(a: Factors, b: Factors, mesh: Mesh) -> bool:
    """Return whether two axes are split in the same way by the mesh axes that they share."""
    shared_axes = frozenset(f for f in a if isinstance(f, str) and f in b)
    return seen(a, shared_axes, mesh) == seen(b, shared_axes, mesh)


def distributed(factors: Factors, sizes: Sequence[Poly], mesh: Mesh) -> tuple[Factors, ...] | None:
    """Return the factors after unflattening a split axis, or None if a factor crosses two new axes.

    (tp, H*K/tp) unflattened into heads and head dim is (tp, H/tp) and K. Divisibility, of H by tp here, is checked once
    sizes are bound.
    """
    if len(sizes) == 1:
        return (factors,)
    if not factors:
        return ((),) * len(sizes)
    placements: list[Factors] = []
    pending = list(factors)
    for dim, size in enumerate(sizes):
        local_factors: list[Factor] = []
        uncovered = size
        while uncovered != ONE and pending:
            factor = pending.pop(0)
            if isinstance(factor, str):
                local_factors.append(factor)
                quotient = _divided(uncovered, mesh[factor])
                if quotient is None:
                    return None
                uncovered = quotient
                continue
            if dim == len(sizes) - 1 or factor == uncovered:
                local_factors.append(factor)
                uncovered = ONE if factor == uncovered else uncovered
                continue
            outer_ratio, inner_ratio = _divided(factor, uncovered), _divided(uncovered, factor)
            inner_size = numel(sizes[dim + 1 :]) / prod(
                (mesh[f] if isinstance(f, str) else f for f in pending), start=ONE
            )
            if outer_ratio is not None and (is_integral(outer_ratio) or outer_ratio == inner_size):
                local_factors.append(uncovered)
                pending.insert(0, outer_ratio)
                uncovered = ONE
            elif inner_ratio is not None and is_integral(inner_ratio):
                local_factors.append(factor)
                uncovered = inner_ratio
            else:
                return None
        placements.append(tidy(local_factors))
    return None if any(isinstance(f, str) for f in pending) else tuple(placements)


def _divided(a: Poly, b: Poly) -> Poly | None:
    """Return a/b if it can be a size, else None."""
    if len(b.terms) != 1 and a != b:
        return None
    try:
        ratio = a / b
    except ShapeError:
        return None
    constant = ratio.constant
    return ratio if constant is None or (isinstance(constant, int) and constant >= 1) else None


# -- pickling and deep copies ------------------------------------------------------------------------------------------
# Tensors and ops refer to each other and to their graph, in chains as long as the graph; naive recursion would overflow
# the stack. A graph is therefore pickled as a list of empty nodes, then their contents; every reference to a node is
# its graph and its index in that list.

#: Attributes that are not copied: caches and build state.
_NOT_COPIED = ("__networkx_cache__", "_places", "cache", "journal")


class Attributes(dict[str, Any]):
    """Graph attributes that networkx passes to copies and views: user entries, and the library's facts.

    Facts are kept apart from the entries, as networkx's writers cannot serialize them.
    """

    def __init__(self, entries: Any = (), facts: Any = ()) -> None:
        super().__init__(entries)
        self.facts: dict[str, Any] = dict(facts)

    def update(self, *others: Any, **entries: Any) -> None:
        """Merge entries, and the facts of other graphs' attributes."""
        super().update(*others, **entries)
        for other in others:
            if isinstance(other, Attributes):
                self.facts.update(other.facts)

    def copy(self) -> Attributes:
        """Return a copy with the same entries and facts."""
        return Attributes(self, self.facts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attributes:
        return Attributes(deepcopy(dict(self), memo), self.facts)  # networkx copies these alone, for the same nodes


class Node:
    """Base of tensors and ops: copied together with their graph."""

    __slots__ = ()
    graph: Graph

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        places = _own_nodes(self.graph)[1]
        if self in places:
            return _node, (self.graph, places[self])
        return _node_of, (type(self),), _contents(self)  # a node removed from its graph

    def __copy__(self) -> Any:
        return self

    def __setstate__(self, contents: dict[str, Any]) -> None:
        for name, value in contents.items():
            setattr(self, name, value)


def _contents(node: Node) -> dict[str, Any]:
    return {name: getattr(node, name) for kind in type(node).__mro__ for name in getattr(kind, "__slots__", ())}


def _own_nodes(graph: Graph) -> tuple[list[Any], dict[Any, int]]:
    """Return the nodes that belong to this graph itself, and the index of each."""
    if _own_nodes not in graph.cache:
        nodes = [n for n in graph._node if isinstance(n, Node) and n.graph is graph]
        graph.cache[_own_nodes] = nodes, {n: i for i, n in enumerate(nodes)}
    indexed: tuple[list[Any], dict[Any, int]] = graph.cache[_own_nodes]
    return indexed


def reduced(graph: Graph) -> tuple[Any, ...]:
    """Return a graph's `__reduce_ex__` value, for pickle and deepcopy."""
    graph.cache.pop(_own_nodes, None)  # networkx may have removed some since
    nodes, _ = _own_nodes(graph)
    state = {
        name: value
        for name, value in vars(graph).items()
        if name not in _NOT_COPIED and not isinstance(getattr(type(graph), name, None), cached_property)
    }
    state["graph"] = dict(graph.graph), graph.graph.facts
    return _graph_of, (type(graph), [type(n) for n in nodes]), (state, [_contents(n) for n in nodes])


def filled(graph: Graph, state: Iterable[Any]) -> None:
    """Restore the state of a graph and its nodes."""
    attributes, contents = state
    graph.__dict__.update(attributes)
    graph.graph = Attributes(*graph.graph)
    for node, content in zip(_own_nodes(graph)[0], contents, strict=True):
        node.__setstate__(content)


def _graph_of(kind: type[Graph], kinds: Iterable[type[Node]]) -> Graph:
    graph = kind()
    nodes = [_node_of(k) for k in kinds]
    graph.cache[_own_nodes] = nodes, {n: i for i, n in enumerate(nodes)}
    return graph


def _node_of(kind: type[Node]) -> Node:
    return kind.__new__(kind)


def _node(graph: Graph, index: int) -> Node:
    node: Node = _own_nodes(graph)[0][index]
    return node


# -- build context -----------------------------------------------------------------------------------------------------
# Target for new ops: the open graph, its module scope, phase and loop suffix.


@dataclass(frozen=True, eq=False)  # compared by identity: each is closed on its own
class BuildContext:
    """Target for new ops."""

    graph: Graph | None = None
    """Graph or body that is being built."""
    levels: tuple[str, ...] = ()
    """Levels in the open scope."""
    phase: str = "forward"
    """Phase for new ops: forward, recompute, backward or optimizer."""
    suffix: str = ""
    """Suffix for new names: a part of a split loop, or an iteration of an unrolled loop, such as `.i3`."""


#: Loop suffix of a name, such as `.cut1.last.i0.i3`: the part of a split loop and the iterations of unrolled loops. It
#: precedes the numbers that make a name unique.
_SUFFIX = re.compile(r"(?:\.(?:(?:i|cut|part)\d+|(?:first|last)\d*))+(?=(?:_\d+)*$)")

#: Stack of open places, innermost last. Generators may close an outer one first.
_OPEN: ContextVar[tuple[BuildContext, ...]] = ContextVar("costgraph_open", default=(BuildContext(),))


def here() -> BuildContext:
    """Return the innermost open place."""
    return _OPEN.get()[-1]


def current_graph(of: Graph | None = None) -> Graph:
    """Return the graph that receives new ops: the body being built, if it belongs to the same root graph."""
    current = here().graph
    if of is None:
        if current is None:
            raise GraphError("no graph is open; build the model inside 'with costgraph.Graph(...) as g:'")
        return current
    if current is not None and current.root is of.root:
        return current
    return of.root


def enter(**facts: Any) -> BuildContext:
    """Open a copy of the innermost place with some fields replaced."""
    context = replace(here(), **facts)
    _OPEN.set((*_OPEN.get(), context))
    return context


def close(context: BuildContext) -> bool:
    """Close a place, innermost or not; return whether it was the innermost."""
    inmost = here() is context
    _OPEN.set(tuple(p for p in _OPEN.get() if p is not context))
    return inmost


@contextmanager
def opened(**facts: Any) -> Iterator[None]:
    """Build new ops with some fields of the place replaced: graph, levels, phase."""
    context = enter(**facts)
    try:
        yield
    finally:
        close(context)


def iterations_of(name: str) -> list[str]:
    """Return the unrolled iterations in a name's loop suffix, such as `.i0` and `.i3`, outermost first."""
    return re.findall(r"\.i\d+", _suffix(name))


def base_name(name: str) -> str:
    """Return a name without its loop suffix."""
    return _SUFFIX.sub("", name) if "." in name else name


def _suffix(name: str) -> str:
    match = _SUFFIX.search(name) if "." in name else None
    return "" if match is None else match.group()


def with_suffix(name: str) -> str:
    """Return a name for a new op or parameter, with the open loop suffix."""
    suffix = here().suffix
    return name + suffix if suffix and not _suffix(name) else name


def same_suffix(name: str) -> AbstractContextManager[None]:
    """Give new ops and parameters a name's loop suffix."""
    suffix = _suffix(name)
    return opened(suffix=suffix) if suffix else nullcontext()


def scopes_of(name: str) -> list[str]:
    """Return a name's enclosing scopes and the name itself, outermost first."""
    return [*accumulate(name.split("/"), "{}/{}".format)]


def phase(name: str) -> AbstractContextManager[None]:
    """Assign a phase to new ops."""
    return opened(phase=name)


def building(graph: Graph) -> AbstractContextManager[None]:
    """Build new ops in a graph, or in a body."""
    return opened(graph=graph)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefix the names of new ops and parameters; cost tables group their rows by scope.

    Parameters
    ----------
    name : str
        One or several levels, separated by `/`; a number is an index in a list of layers.

    Raises
    ------
    GraphError
        If a level is neither an identifier nor a number.
    """
    levels = tuple(name.split("/")) if isinstance(name, str) else ()
    if not levels or not all(map(is_level, levels)):
        raise GraphError(f"scope {shorten(str(name))}: expected identifiers separated by '/'")
    with opened(levels=(*here().levels, *levels)):
        yield


@contextmanager
def module(graph: Graph, name: str) -> Iterator[str]:
    """Open a scope that is unique in the graph, numbered if needed, and yield its name.

    A name may have several levels, separated by `/`. Raise GraphError if a level is not an identifier.
    """
    taken, number, level = graph.root.modules, 0, name
    while "/".join((*here().levels, str(level))) in taken:
        number += 1
        level = f"{name}_{number}"
    qualified = "/".join((*here().levels, str(level)))
    with scope(level):
        taken.add(qualified)
        graph.note(lambda: taken.discard(qualified))
        yield level


# -- registered views --------------------------------------------------------------------------------------------------
# Reports import this module, so `costgraph` registers them here.

#: Functions of `costgraph.report` that show graphs and results, by name.
VIEWS: dict[str, Callable[..., Any]] = {}


def explore(self: Graph, path: object = None, /, *, views: object = None) -> Any:
    """Return the interactive page from `costgraph.explore`, which notebooks display.

    Parameters
    ----------
    path : str or path-like, optional
        HTML file to write.
    views : sequence of str or mapping of str to Graph, optional
        Graphs to choose from on the page.

    Returns
    -------
    costgraph.report.explore.Page
        `.html`, `.save(path)`.
    """
    return VIEWS["explore"](self, path, views=views)


def summary(self: Graph) -> str:
    """Return the table of scopes, as `print` shows it."""
    text: str = VIEWS["summary"](self)
    return text


def summary_html(self: Graph) -> str:
    """Return the table of scopes that a notebook shows."""
    text: str = VIEWS["summary_html"](self)
    return text


# -- tensor ------------------------------------------------------------------------------------------------------------
# Tensors: sizes, dtype, strides, and the storage that they view.

#: Implementations of `+`, `@`, indexing and others, registered by `costgraph.ops.operators` to avoid an import cycle.
OPERATORS: dict[str, Callable[..., Tensor]] = {}

#: Storages of body inputs in the current iteration, each as an outer storage and an offset.
ALIASES: ContextVar[Mapping[Storage, tuple[Storage, Poly]]] = ContextVar(
    "costgraph_aliases", default=MappingProxyType({})
)

#: Roles of tensors without a producer; all but formals live from the first op to the last.
SOURCES = ("input", "param", "buffer", "cache", "state", "gradient", "formal")


def nbytes(sizes: Sequence[Poly], dtype: DType) -> Poly:
    """Return the bytes in a dense tensor, including the scales in block formats.

    Blocks that share a scale run along the last axis; elements smaller than a byte are packed without gaps.
    """
    column_multiple, row_multiple = dtype.padded
    if dtype.padded != (1, 1) and sizes:
        sizes = (
            windows_along(numel(sizes[:-1]), 0, row_multiple) * row_multiple,
            windows_along(sizes[-1], 0, column_multiple) * column_multiple,
        )
    count = numel(sizes)
    total = count * (dtype.bits // 8 if dtype.bits % 8 == 0 else dtype.bytes)
    if dtype.block is not None:
        columns, rows = sizes[-1] if sizes else poly(1), numel(sizes[:-1])
        for bits, per, high, flat in dtype.shares:
            blocks = windows_along(count if flat else columns, 0, per) if per else poly(1)
            shared = poly(1) if flat else rows if high == 1 else windows_along(rows, 0, high)
            total = total + shared * blocks * bits / 8
        total = total + poly(dtype.tensor_bits) / 8
    return total


@cache
def _bytes_of(bits: int) -> Poly:
    return poly(Fraction(bits, 8))


class Storage:
    """A block of memory, the unit of liveness. Views share their base tensor's storage."""

    __slots__ = ("bytes", "elements", "host", "name", "pieces", "role")

    def __init__(
        self, name: str, sizes: SizeTuple, dtype: DType, role: str, pieces: int = 0, *, host: bool = False
    ) -> None:
        self.name = name
        """Base tensor name."""
        self.elements = numel(sizes)
        """Number of elements."""
        self.bytes = numel(sizes[:pieces]) * nbytes(sizes[pieces:], dtype)
        """Bytes: blocks of a format end where a piece does."""
        self.role = role
        """input, param, buffer, cache, state (in an optimizer), formal (body input) or activation."""
        self.pieces = pieces
        """Number of leading axes whose positions are separate allocations: one per iteration of as many loops."""
        self.host = host
        """Whether it lies in host memory."""


class Tensor(Node):
    """A tensor node of a graph.

    `Graph.input`, `Graph.param` and ops create tensors. `+ - * / @`, `-x`, `x.T`, `x.mT` and indexing with slices work
    as in NumPy.
    """

    __slots__ = (
        "domain",
        "dtype",
        "graph",
        "name",
        "offset",
        "producer",
        "requires_grad",
        "sizes",
        "storage",
        "strides",
    )

    def __init__(
        self,
        graph: Graph,
        name: str,
        sizes: SizeTuple,
        dtype: DType,
        *,
        role: str,
        strides: SizeTuple | None = None,
        offset: Poly = ZERO,
        storage: Storage | None = None,
        requires_grad: bool = False,
        pieces: int = 0,
        host: bool = False,
    ) -> None:
        self.graph = graph
        self.name = name
        self.sizes = sizes
        self.dtype = dtype
        self.strides = contiguous(sizes) if strides is None else strides
        self.offset = offset
        self.storage = Storage(name, sizes, dtype, role, pieces, host=host) if storage is None else storage
        self.requires_grad = requires_grad
        self.producer: Op | None = None
        self.domain: tuple[Domain, int, int] | None = None
        """Attention domain: (Domain, query axis, key axis), or None if every index point holds a value."""

    @property
    def role(self) -> str:
        """Storage role."""
        return self.storage.role

    @property
    def shape(self) -> tuple[sympy.Expr, ...]:
        """Sizes as sympy expressions."""
        return tuple(n.expr for n in self.sizes)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.sizes)

    @property
    def numel(self) -> Poly:
        """Number of elements."""
        return numel(self.sizes)

    @property
    def is_view(self) -> bool:
        """Whether the storage belongs to another tensor."""
        return self.producer is not None and any(t.storage is self.storage for t in self.producer.operands)

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are C-contiguous."""
        fresh = contiguous(self.sizes)
        return all(n == 1 or self.graph.same(s, f) for n, s, f in zip(self.sizes, self.strides, fresh, strict=True))

    @property
    def touched(self) -> Poly:
        """Number of distinct elements: an expanded axis repeats the same ones."""
        return distinct(self.sizes, self.strides)

    def region(self) -> tuple[object, ...]:
        """Return a key for the viewed elements: equal for views of the same elements."""
        storage, offset = self.storage, self.offset
        for aliases in (ALIASES.get(), self.graph.root.handed):
            while storage in aliases:
                storage, delta = aliases[storage]
                offset = offset + delta
        if self.graph.same(self.touched, storage.elements):
            return (storage,)
        simplified = self.graph.simplified
        axes = frozenset(
            (n, s) for n, s in zip(simplified(self.sizes), simplified(self.strides), strict=True) if s and n != 1
        )
        return (storage, *simplified((offset,)), axes)

    def apart(self, other: Tensor) -> bool:
        """Return whether it views another tensor's storage but provably shares no element with it."""
        if self.storage is not other.storage or self.dtype != other.dtype:
            return False
        first, second = ((t.sizes, t.strides, t.offset) for t in (self, other))
        return apart(first, second, self.graph.root.relations)

    def element_bytes(self) -> Poly:
        """Return the bytes per element, scales included."""
        if self.dtype.block is None:
            return _bytes_of(self.dtype.bits)
        return self.storage.bytes / self.storage.elements

    def __add__(self, other: object) -> Tensor:
        return OPERATORS["add"](self, other)

    def __sub__(self, other: object) -> Tensor:
        return OPERATORS["sub"](self, other)

    def __mul__(self, other: object) -> Tensor:
        return OPERATORS["mul"](self, other)

    def __truediv__(self, other: object) -> Tensor:
        return OPERATORS["div"](self, other)

    def __pow__(self, other: object) -> Tensor:
        return OPERATORS["pow"](self, other)

    def __radd__(self, other: object) -> Tensor:
        return OPERATORS["add"](other, self)

    def __rsub__(self, other: object) -> Tensor:
        return OPERATORS["sub"](other, self)

    def __rmul__(self, other: object) -> Tensor:
        return OPERATORS["mul"](other, self)

    def __rtruediv__(self, other: object) -> Tensor:
        return OPERATORS["div"](other, self)

    def __lt__(self, other: object) -> Tensor:
        return OPERATORS["less"](self, other)

    def __le__(self, other: object) -> Tensor:
        return OPERATORS["less_equal"](self, other)

    def __gt__(self, other: object) -> Tensor:
        return OPERATORS["less"](other, self)

    def __ge__(self, other: object) -> Tensor:
        return OPERATORS["less_equal"](other, self)

    def __neg__(self) -> Tensor:
        return OPERATORS["neg"](self)

    def __matmul__(self, other: object) -> Tensor:
        return OPERATORS["matmul"](self, other)

    def __getitem__(self, key: object) -> Tensor:
        return OPERATORS["index"](self, key)

    __array_ufunc__ = None  # NumPy would otherwise broadcast over its own elements one by one
    __iter__ = None  # indexing would otherwise make it an endless sequence

    @property
    def mT(self) -> Tensor:  # noqa: N802  # torch's name
        """View with the last two axes transposed."""
        return OPERATORS["transpose"](self)

    T = mT

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.sizes))}; {self.dtype.name})"


# -- argument validation -----------------------------------------------------------------------------------------------

_LONGEST_NAME = 500  # scopes included
_MOST_AXES = 1000  # an endless iterable is not a shape


def need_tensor(place: str, *values: object) -> None:
    """Raise GraphError if a value is not a tensor."""
    for value in values:
        if not isinstance(value, Tensor):
            raise GraphError(f"{place}: got {kind_of(value)}, expected a tensor")


def need_choice(place: str, value: object, choices: Collection[str]) -> None:
    """Raise GraphError if a value is not one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise GraphError(f"{place} {shown(value)}, expected one of {', '.join(choices)}")


def need_flag(place: str, **flags: object) -> None:
    """Raise GraphError if a flag is not a bool; passing a tensor is a common mistake."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise GraphError(f"{place}: {name} is {kind_of(value)}, expected True or False")


def need_call(place: str, value: object) -> None:
    """Raise GraphError if a value is not a function."""
    if not callable(value) or isinstance(value, type):
        raise GraphError(f"{place}: got {kind_of(value)}, expected a function")


def need_list(place: str, value: object) -> Sequence[Any]:
    """Return a list or tuple, or raise GraphError: strings and sets have no meaningful order."""
    if not isinstance(value, list | tuple):
        raise GraphError(f"{place}: got {kind_of(value)}, expected a list")
    return value


def need_name(place: str, value: object) -> None:
    """Raise GraphError if a value cannot name an op in tables, files and error messages."""
    text = value if isinstance(value, str) else ""
    if not 0 < len(text) <= _LONGEST_NAME or not text.isprintable() or " " in text:
        raise GraphError(f"{place}: name {shown(value)}, expected text without spaces")


def named(name: object, default: str) -> Any:
    """Return the name, or the default if it is empty."""
    return default if isinstance(name, str) and not name else name


def _size_text(size: Poly) -> str:
    return shown(size.constant) if isinstance(size.constant, int) else size.brief()


def positive(place: str, value: object) -> Poly:
    """Return a size as a polynomial; raise ShapeError if it is not a positive integer."""
    try:
        size = poly(value)
    except CostGraphError as error:
        raise type(error)(f"{place}: {error}") from None
    if _is_invalid_size(size):
        raise ShapeError(f"{place}: {_size_text(size)}, expected a positive integer")
    return size


@cached(1 << 12)  # called for every axis in every tensor, with few distinct values
def _is_invalid_size(size: Poly) -> bool:
    if size.constant is not None:
        return not isinstance(size.constant, int) or size.constant < 1
    negated_bound = lower(-size)
    return (negated_bound is not None and negated_bound >= 0) or not _may_be_integer(size)  # -B is below 1 for every B


def _may_be_integer(p: Poly) -> bool:
    """Return whether a formula can be an integer for some sizes: unrounded logarithms cannot."""
    return p.constant is not None or (
        bool(p.names()) and not any(_has_log(generator(k)) for k in p.generators() if k[0] == "~")
    )


def _has_log(expr: sympy.Expr) -> bool:
    return isinstance(expr, sympy.log) or (
        not isinstance(expr, sympy.floor | sympy.ceiling) and any(map(_has_log, expr.args))
    )


def amount(place: str, value: object) -> Poly:
    """Return FLOPs, bytes or elements as a polynomial; raise ShapeError if they are negative."""
    try:
        result = poly(value)
    except CostGraphError as error:
        raise type(error)(f"{place}: {error}") from None
    negated_bound = lower(-result) if result.constant is None else -result.constant
    if negated_bound is not None and negated_bound > 0:
        raise ShapeError(f"{place}: {_size_text(result)}, expected an amount that is not negative")
    return result


def sizes_of(shape: Sequence[object], place: str) -> SizeTuple:
    """Return a shape as polynomials; raise ShapeError if a size is not positive."""
    unordered = type(shape) is not tuple and isinstance(shape, str | bytes | set | frozenset | Mapping | Tensor)
    try:
        axis_sizes = None if unordered else [size for size, _ in zip(shape, range(_MOST_AXES + 1), strict=False)]
    except TypeError:  # NumPy scalars have __iter__ too
        axis_sizes = None
    if axis_sizes is None or len(axis_sizes) > _MOST_AXES:
        raise GraphError(f"{place}: shape {shown(shape)}, expected a tuple of sizes such as (B, S, D)")
    sizes = [positive(f"{place}: axis {i}", size) for i, size in enumerate(axis_sizes)]
    try:
        numel(sizes)
    except ShapeError as error:  # each is a valid size, but their product is too large
        raise ShapeError(f"{place}: {error}") from None
    return tuple(sizes)


def sizes(place: str, axis_sizes: Mapping[str, object]) -> dict[str, Poly]:
    """Return a caller's axis sizes as polynomials, by name."""
    return {name: positive(f"{place}: size of {shown(name)}", value) for name, value in axis_sizes.items()}


# -- transactions ------------------------------------------------------------------------------------------------------
# A public function changes a graph completely or not at all: if it raises, or a callback inside does, the undo journal
# rolls its changes back. Finished graphs refuse changes, and each change invalidates derived results.

T = TypeVar("T")


class Journal:
    """A graph's undo journal since the outermost transaction began."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] | None = None
        self.caller = ""
        """Outermost public call, named in error messages."""

    def note(self, undo: Callable[[], object]) -> None:
        """Record a change's undo function."""
        if self._undo is not None:
            self._undo.append(undo)

    @contextmanager
    def transaction(self, caller: str = "") -> Iterator[None]:
        """Run a transaction for a named call: roll back its changes if it raises."""
        outermost = self._undo is None
        if outermost:
            self.caller = caller
        undo = self._undo = [] if self._undo is None else self._undo
        savepoint = len(undo)
        try:
            yield
        except BaseException:
            while len(undo) > savepoint:
                undo.pop()()
            raise
        finally:
            if outermost:
                self._undo, self.caller = None, ""


def transactional(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Decorate a function to run as a transaction on its operands' graph, or on the open graph."""
    caller = name or function.__name__

    @wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        operand = next(_tensors(args), None) or next(_tensors(named.values()), None)
        graph = here().graph if operand is None else operand.graph
        if graph is None:
            return function(*args, **named)
        with graph.transaction(caller):
            return function(*args, **named)

    return called


#: Other names of a batch and a sequence, in a graph that calls them B and S.
SIZE_ALIASES = {"batch": "B", "batch_size": "B", "seq_len": "S", "sequence_length": "S"}


def with_size_aliases(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a question accept `batch` and `seq_len` as sizes of a graph whose dimensions are called B and S.

    Raises
    ------
    BindingError
        When it is called with both names of a dimension.
    """
    code = function.__code__
    if not code.co_flags & CO_VARKEYWORDS:
        return function
    aliases = SIZE_ALIASES.keys() - set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])

    @wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        for alias in sorted(aliases & named.keys()):
            graph = next((a for a in args if isinstance(a, Graph)), None)
            names = frozenset[str]().union(*map(known_names, stages(graph))) if graph is not None else frozenset()
            name = SIZE_ALIASES[alias]
            if alias in names or name not in names:
                continue
            if name in named:
                raise BindingError(f"{function.__name__}: {alias} and {name} are two names of one size, pass only one")
            named[name] = named.pop(alias)
        return function(*args, **named)

    return called


def public(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as users call it: it accepts size aliases, and a refused call leaves its graph as it was."""
    return transactional(with_size_aliases(function))


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (v for v in value if isinstance(v, Tensor))


def forget(graph: Graph) -> None:
    """Invalidate results derived from a graph, now and if the change is rolled back."""
    _forget(graph)
    graph.note(partial(_forget, graph))


def _forget(graph: Graph | None) -> None:
    while graph is not None:
        graph.cache.clear()
        graph = graph.parent


def modify(graph: Graph, caller: str) -> None:
    """Raise GraphError if the graph is finished, else invalidate derived results."""
    if graph.frozen:
        raise GraphError(
            f"{graph.root.journal.caller or caller}: graph {graph.root.name!r} is finished; reopen it with 'with g:'"
        )
    forget(graph)


def changing(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a mutating networkx method: it needs an open graph and invalidates derived results."""

    @wraps(method)
    def changed(graph: Graph, /, *args: Any, **kwargs: Any) -> None:
        modify(graph, method.__name__)
        method(graph, *args, **kwargs)

    return changed


def append(graph: Graph, tensors: list[Tensor], tensor: Tensor) -> None:
    """Append to a graph's inputs or outputs."""
    length = len(tensors)
    tensors.append(tensor)
    graph.note(lambda: tensors.__delitem__(slice(length, None)))


class GraphAttribute(Generic[T]):
    """Attribute stored in the dictionary that networkx passes to copies, views and reversed graphs."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, graph: Graph, owner: type) -> T:
        value: T = graph.graph.facts[self.name]
        return value

    def __set__(self, graph: Graph, value: T) -> None:
        forget(graph)
        graph.graph.facts[self.name] = value


class CheckedAttribute(GraphAttribute[T]):
    """Carried attribute that users may set: its values are validated."""

    def __set__(self, graph: Graph, value: T) -> None:
        expectation = rule(get_args(self.__orig_class__)[0])  # type: ignore[attr-defined]  # typing sets it
        if not expectation.holds(value):
            raise GraphError(f"graph {graph.name!r}: {self.name} is {shown(value)}, expected {expectation.expected}")
        super().__set__(graph, value)


#: Graph facts that refer to no tensor: transforms copy them unchanged.
FACTS = ("relations", "defaults", "legend", "loss", "layers", "matmul_dtype", "waiting")


def carry_facts(old: Graph, new: Graph, **changed: Any) -> None:
    """Copy a graph's facts to the graph that a transform builds from it.

    All transforms call this function, so a fact added to `FACTS` reaches all of them.

    Parameters
    ----------
    old : Graph
        Graph that is transformed.
    new : Graph
        Graph that is built.
    **changed : object
        Facts in `FACTS` that differ in the new graph. `loss=None` drops the loss.
    """
    for name in FACTS:
        fact = changed.pop(name, getattr(old, name))
        setattr(new, name, dict(fact) if isinstance(fact, dict) else fact)
    assert not changed, changed
    new.modules |= old.modules


# -- symbols and bindings ----------------------------------------------------------------------------------------------
# Symbolic dimensions in a graph, the conditions on them, and their bound values.

# Larger sizes would make unprintable products.
_MOST_BITS = 1024


def _polys(value: object) -> Iterable[Poly]:
    """Yield the formulas among an op's attributes."""
    if isinstance(value, Poly):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _polys(v)
    elif value is None or isinstance(value, str | int):
        return  # the common case; the Mapping check is slow
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _polys(v)
    elif hasattr(value, "window"):
        yield from _polys(value.window)


def same(graph: Graph, a: Poly, b: Poly) -> bool:
    """Return whether two sizes are equal under the graph's assumptions."""
    if a == b:
        return True
    a, b = graph.simplified((a, b))
    return a == b


def simplified(graph: Graph, sizes: SizeTuple) -> SizeTuple:
    """Return sizes or strides simplified under the graph's assumptions: equal ones become the same polynomial.

    Assumptions are the stated equalities, and that sizes such as D/H are integers: ceiling(D/H) becomes D/H.
    """
    relations, quotients = graph.root.relations, graph.root.quotients
    sizes = tuple(map(relations.reduce, sizes)) if relations.relations else sizes
    if not quotients or all(map(is_polynomial, sizes)):  # common case; the lookup is slow with many quotients
        return sizes
    quotients = frozenset(map(relations.reduce, quotients)) if relations.relations else quotients
    return tuple(settled(n, quotients) for n in sizes)


def known_names(graph: Graph) -> frozenset[str]:
    """Return the names of all dimensions in a graph and its bodies."""
    if "names" not in graph.cache:
        names_used: set[str] = set()
        formulas: set[Poly] = set()
        for g in graph.bodies():
            for t in g.tensors:
                formulas.update(t.sizes)
            for op in g.ops:
                formulas.update(p for v in op.kind.facts().values() for p in _polys(v))
        for p in formulas:
            names_used |= p.names()
        for relation in graph.root.relations.relations:
            names_used |= relation.difference.names()
        graph.cache["names"] = frozenset(names_used)
    names: frozenset[str] = graph.cache["names"]
    return names


def _constraints(graph: Graph) -> Iterator[tuple[Poly, str, int, bool]]:
    """Yield the constrained formulas in a graph and its bodies: formula, place, least value, whether an integer."""
    for g in graph.bodies():
        possibly_empty = set(_per_iteration_tensors(g))
        for t in g.tensors:
            # leading axes of stacked residuals equal an iteration count, which is checked itself
            for i, n in enumerate(t.sizes[t.storage.pieces :], t.storage.pieces):
                yield n, f"axis {i} of {t.name!r}", int(i > 0 or t not in possibly_empty), True
        for op in g.ops:
            limits = op.kind.limits()
            for key, value in op.kind.facts().items():
                if key in limits:
                    minimum, integral, wording = limits[key]
                    label = f"{wording or key.replace('_', ' ') + ' of'} {op.name!r}"
                    yield from ((p, label, minimum, integral) for p in _polys(value))
    if graph.sharding is not None:
        yield from ((n, f"axis {name!r} of the mesh", 1, True) for name, n in graph.sharding.mesh.axes)
    if graph.waiting is not None:
        yield from ((n, label, minimum, True) for n, label, minimum in graph.waiting.asked)


def _per_iteration_tensors(graph: Graph) -> Iterator[Tensor]:
    """Yield tensors that loops with possibly zero iterations slice or stack."""
    for op in graph.ops:
        if op.loop is not None and op.loop.kind.min_count == 0:
            yield from (*op.loop.xs, *op.loop.stacks, *op.loop.pieces)


def conditions(graph: Graph) -> tuple[Condition, ...]:
    """Return the conditions that bound sizes may violate: sizes must be positive integers, amounts nonnegative.

    Assumptions are kept separately, in `graph.root.relations`.
    """
    if "conditions" not in graph.cache:
        relations, places = graph.root.relations, dict[tuple[Poly, int, bool], str]()
        for p, label, minimum, integral in _constraints(graph):
            places.setdefault((p, minimum, integral), label)
        graph.cache["conditions"] = tuple(
            Condition(p, label, minimum, integral, frozenset(p.names()))
            for (p, minimum, integral), label in places.items()
            if not _always(p, minimum, integral, relations)
        )
    out: tuple[Condition, ...] = graph.cache["conditions"]
    return out


def _always(p: Poly, minimum: int, integral: bool, relations: Relations) -> bool:
    """Return whether a formula provably satisfies its condition."""
    return (not integral or is_integral(p)) and relations.nonnegative(p - minimum)


class Bindings(dict[str, Poly]):
    """Values for bound symbols, by name."""

    def __init__(self, graph: Graph, values: Mapping[str, Poly] = MappingProxyType({})) -> None:
        super().__init__(values)
        if "asked" not in graph.cache:
            graph.cache["asked"] = Conditions(graph.root.relations.relations, conditions(graph))
        self.validity = Validity(graph.cache["asked"], tuple(sorted(values.items(), key=itemgetter(0))))
        """Validity conditions of formulas after substitution."""

    @property
    def held(self) -> tuple[Validity, ...]:
        """The validity as a tuple, empty if nothing is bound and open sizes have no conditions."""
        return (self.validity,) if self.validity.names or self.validity.values else ()


def bindings(graph: Graph, dims: Mapping[str, object], left_open: Collection[str] = ()) -> Bindings:
    """Return the value for each bound symbol: the graph's defaults, overridden by the given sizes.

    Values are numbers, or formulas if an assumed equality ties an open symbol to others. Names in `left_open` ignore
    their default. Raise BindingError if a name is not in the graph, a size is not a positive integer or contradicts an
    assumption, or the values violate one of `conditions`.
    """
    names = known_names(graph)
    for name in dims:
        if name not in names:
            raise BindingError(
                f"{shorten(name)} is not a dimension of graph {graph.root.name!r}, "
                f"expected one of {', '.join(sorted(names))}"
            )
    defaults = {k: v for k, v in graph.root.defaults.items() if k in names and k not in left_open}
    chosen = {**defaults, **dims}
    values = Bindings(graph, {name: as_poly(dimension_size(name, value)) for name, value in chosen.items()})
    values.validity.conditions.settle(values)
    return values


def stages(graph: Graph) -> tuple[Graph, ...]:
    """Return one graph per kind of pipeline stage (first, middle, last), or the graph itself without a pipeline."""
    return graph.parts or (graph,)


def of_stages(
    graph: Graph, dims: Mapping[str, object], left_open: Collection[str] = ()
) -> list[tuple[Graph, Bindings]]:
    """Return a graph's stages, each with its bindings; errors as `bindings`."""
    stage_names = [(g, known_names(g)) for g in stages(graph)]
    all_names = frozenset[str]().union(*(names for _, names in stage_names))
    return [
        (g, bindings(g, {k: v for k, v in dims.items() if k in names or k not in all_names}, left_open))
        for g, names in stage_names
    ]


def dimension_size(name: str, value: object) -> int:
    """Return a bound size, or raise BindingError if it is not a positive integer."""
    try:
        size = integer(value)
    except TypeError:
        raise BindingError(f"{name}={shown(value)}: expected a positive integer") from None
    if size.bit_length() > _MOST_BITS:
        raise BindingError(f"{name}={shown(size)}: expected a positive integer of at most {_MOST_BITS} bits")
    if size < 1:
        raise BindingError(f"{name}={shown(size)}: expected a positive integer")
    return size


def need_open(graph: Graph, symbol: str, dims: Mapping[str, object], question: str) -> None:
    """Raise BindingError unless a symbol, the unknown to solve for, is an unbound dimension of the graph."""
    names = known_names(graph)
    if symbol not in names or symbol in dims:
        raise BindingError(
            f"{question}: {shown(symbol)}, expected an unbound dimension among {', '.join(sorted(names))}"
        )


# -- field types -------------------------------------------------------------------------------------------------------
# Annotated types for op kind fields: each carries a description and a test, used when files are loaded.


class Limit(NamedTuple):
    """Condition on the formulas in a field once sizes are bound; the last one in an annotation counts."""

    least: int
    """Least value."""
    whole: bool = True
    """Whether they must be integers."""
    words: str = ""
    """Words before the op name in the error message; the field name by default."""


_limits: dict[type, dict[str, Limit]] = {}


def hints(record: type) -> dict[str, Any]:
    """Return a record's resolved annotations.

    Raise GraphError if one names a type that is imported for type checkers only.
    """
    try:
        return hints_of(record)
    except NameError as error:
        raise GraphError(
            f"op kind {record.__name__}: {error} in its annotations; import the name at run time, not for type "
            "checkers only"
        ) from None


def limits_of(record: type) -> dict[str, Limit]:
    """Return field limits by name; fields with no limit or several have none."""
    if record not in _limits:
        limits = {name: _limit(hint) for name, hint in hints(record).items()}
        _limits[record] = {name: limit for name, limit in limits.items() if limit is not None}
    return _limits[record]


def _limit(hint: Any) -> Limit | None:
    """Return an annotation's limit: its own, or the only one among its type arguments."""
    direct = [a for a in getattr(hint, "__metadata__", ()) if isinstance(a, Limit)]
    if direct:
        return direct[-1]
    nested = {_limit(a) for a in get_args(hint)} - {None}
    return nested.pop() if len(nested) == 1 else None


def _passes(check: Callable[[str, object], Poly], value: object) -> bool:
    if not isinstance(value, Poly):
        return False
    try:
        check("", value)
    except CostGraphError:
        return False
    return True


def is_size(value: object) -> bool:
    """Return whether a value is a size: a formula not known to be fractional or below 1."""
    return _passes(positive, value)


def is_amount(value: object) -> bool:
    """Return whether a value is an amount: a formula not known to be negative."""
    return _passes(amount, value)


def is_count(value: object, least: int = 0) -> bool:
    """Return whether a value is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def all_of(fits: Callable[[Any], bool]) -> Callable[[object], bool]:
    """Return a test for tuples whose items all pass a test."""
    return lambda v: isinstance(v, tuple) and all(map(fits, v))


def one_of(*words: str) -> Rule:
    """Return the rule for a field that holds one of some words."""
    text = " or ".join(words) if len(words) == 2 else f"one of {', '.join(words)}"
    return Rule(text, lambda v: isinstance(v, str) and v in words)


def optional(expected: str, fits: Callable[[Any], bool]) -> Rule:
    """Return the rule for a field that may be None."""
    return Rule(expected, lambda v: v is None or fits(v))


def need(holds: bool, description: str) -> None:
    """Raise ShapeError if a field contradicts the operands."""
    if not holds:
        raise ShapeError(f"{description}: does not match the operands")


def _is_extents(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(is_size, value.values()))


#: Size or shape of a result, which is checked itself when sizes are bound.
Length = Annotated[Poly, Rule("a positive size", is_size)]
Shape = Annotated[tuple[Poly, ...], Rule("a tuple of positive sizes", all_of(is_size))]

Size = Annotated[Length, Limit(1)]
Sizes = Annotated[Shape, Limit(1)]
Extents = Annotated[Mapping[str, Poly], Rule("positive sizes by axis", _is_extents), Limit(1)]
Amount = Annotated[Poly, Rule("an amount that is not negative", is_amount), Limit(0, whole=False)]
Amounts = Annotated[
    tuple[Poly, ...] | None,
    Rule("None or a tuple of amounts", lambda v: v is None or all_of(is_amount)(v)),
    Limit(0, whole=False),
]
#: Offset on an axis, and the remaining length after it.
Start = Annotated[Amount, Limit(0)]
Room = Annotated[Amount, Limit(0, words="remaining length after")]
Rooms = Annotated[
    tuple[Poly, ...],
    Rule("a tuple of formulas", all_of(lambda v: isinstance(v, Poly))),
    Limit(0, words="remaining length after"),
]
Index = Annotated[int, Rule("an integer of at least 0", is_count)]
Count = Annotated[int, Rule("an integer of at least 1", lambda v: is_count(v, 1))]
Places = Annotated[tuple[int, ...], Rule("a tuple of integers of at least 0", all_of(is_count))]
Flag = Annotated[bool, Rule("True, or nothing", lambda v: v is True)]
MemoryFormat = Annotated[
    str, Rule("contiguous, grad, operand, bshd, or nothing", ("", "contiguous", "grad", "operand", "bshd").__contains__)
]


# -- attention domain --------------------------------------------------------------------------------------------------


def _triangle(n: Poly) -> Poly:
    """1 + 2 + ... + n."""
    return n * (n + 1) / 2


@guarded()
@dataclass(frozen=True)
class Domain:
    """Attention mask as a domain: query positions s < S and key positions t < T, aligned at their last positions.

    With `causal`, query s sees the keys up to its own position s + T - S. With a `window` of W it sees the last W of
    them; without `causal` it sees the keys less than W positions away on either side.

    On a mesh, queries may be split into consecutive blocks, one per rank: S and all counts are then local, T is global.
    Counts that differ between ranks are averaged, so their sum over all ranks equals the count without a mesh.
    """

    causal: bool
    """Whether later keys are hidden."""
    window: Annotated[Poly | None, READ] = None
    """Number of visible positions, the query's own included, or None for all."""
    ranks: Annotated[tuple[tuple[str, Poly], ...], READ] = ()
    """Mesh axes that split the queries, outermost first, each with its number of ranks."""

    def __post_init__(self) -> None:
        need_flag("domain", causal=self.causal)
        if self.window is not None:  # numbers and symbols are accepted too
            object.__setattr__(self, "window", positive("domain: window", self.window))
        pairs = isinstance(self.ranks, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in self.ranks)
        if not pairs or not all(isinstance(axis, str) for axis, _ in self.ranks):
            raise ShapeError(f"domain: ranks {shown(self.ranks)}, expected pairs (mesh axis, number of ranks)")
        object.__setattr__(self, "ranks", tuple((axis, positive(f"domain: {axis}", n)) for axis, n in self.ranks))
        if not self.causal and self.window is None:
            raise ShapeError("domain: neither causal nor a window, expected at least one of them")

    def points(self, queries: Poly, keys: Poly, known: Relations = NOTHING_KNOWN) -> Poly:
        """Return the number of pairs (s, t); `known` may prove that there are at least as many keys as queries.

        Notes
        -----
        Row k = 1..T of a causal square sees min(W, k) keys, and the queries are its last S rows: G(T) - G(T - S) with
        G(n) = sum(min(W, k), k=1..n) = m*n - m*(m - 1)/2, m = min(n, W). With T = S this is S*(S + 1)/2 without a
        window and m*S - m*(m - 1)/2 with one. Without `causal` each pair of different positions counts twice.
        """
        if self.ranks:
            return self._all.points(self._queries(queries, keys), keys, known) / self.parts
        if self.causal:
            earlier = keys - queries
            return self._rows(keys) - self._rows(earlier if known.nonnegative(earlier) else at_least_zero(earlier))
        if queries != keys:
            raise ShapeError(
                f"window without causal: {queries} queries and {keys} keys, expected equal numbers of both"
            )
        return 2 * self._rows(keys) - keys

    def _rows(self, n: Poly) -> Poly:
        if not n:
            return ZERO
        if self.window is None:
            return _triangle(n)
        m = smaller(n, self.window)
        return m * n - m * (m - 1) / 2

    @property
    def parts(self) -> Poly:
        """Number of ranks that split the queries."""
        return prod((n for _, n in self.ranks), start=ONE)

    @property
    def _all(self) -> Domain:
        return replace(self, ranks=())

    def _queries(self, queries: Poly, keys: Poly) -> Poly:
        """Return the queries on all ranks: one per key."""
        if queries * self.parts != keys:
            raise ShapeError(f"{queries} queries on each of {self.parts} ranks, expected {keys} in total, one per key")
        return keys

    def _earlier_keys(self, b: Poly) -> Poly:
        """Return the number of keys before their own blocks that ranks see, summed over ranks."""
        earlier_ranks = self.parts - 1
        if self.window is None:
            return b * earlier_ranks * self.parts / 2
        visible = self.window - 1
        fully_visible = smaller(earlier_ranks, poly(sympy.floor(visible.expr / b.expr)))
        return b * fully_visible * (fully_visible + 1) / 2 + (earlier_ranks - fully_visible) * visible

    def queries_used(self, queries: Poly, keys: Poly, known: Relations = NOTHING_KNOWN) -> Poly:
        """Return the number of queries that see any key."""
        if self.ranks:
            return self._all.queries_used(self._queries(queries, keys), keys, known) / self.parts
        return queries if known.nonnegative(keys - queries) else smaller(queries, keys)

    def keys_used(self, queries: Poly, keys: Poly, known: Relations = NOTHING_KNOWN) -> Poly:
        """Return the number of keys that any query sees.

        Notes
        -----
        Rank r = 0..P-1 has b queries, whose own positions are b keys. Of the r*b earlier keys it sees as many as its
        first query does, min(r*b, W - 1); without `causal`, rank P - 1 - r sees as many later keys. With
        f = min(P - 1, floor((W - 1)/b)) the sum over all ranks is b*f*(f + 1)/2 + (P - 1 - f)*(W - 1).
        """
        if self.ranks:
            self._queries(queries, keys)
            return queries + self._earlier_keys(queries) * (1 if self.causal else 2) / self.parts
        if self.window is None or queries == keys:
            return keys
        return smaller(keys, queries + self.window - 1)

    def reached(
        self, queries: Poly, keys: Poly, known: Relations = NOTHING_KNOWN, *, query: bool = True, key: bool = True
    ) -> Poly:
        """Return the number of positions that pairs reach in a tensor with both axes, one of them or none."""
        if query and key:
            return self.points(queries, keys, known)
        if query:
            return self.queries_used(queries, keys, known)
        return self.keys_used(queries, keys, known) if key else ONE


# -- capture -----------------------------------------------------------------------------------------------------------
# Bodies refer to outer tensors through formals, and pass results out through outputs.


def formal(
    graph: Graph, like: Tensor, name: str, sizes: SizeTuple, strides: SizeTuple, pieces: int | None = None
) -> Tensor:
    """Add a formal to a body: the input that stands for an outer tensor."""
    pieces = like.storage.pieces if pieces is None else pieces
    tensor = Tensor(graph, graph.unique(name), sizes, like.dtype, role="formal", strides=strides, pieces=pieces,
                    host=like.storage.host)  # fmt: skip
    tensor.domain = like.domain
    append(graph, graph.formals, tensor)
    graph.add_node(tensor)
    return tensor


def adopt(graph: Graph, tensor: Tensor) -> Tensor:
    """Return a tensor as seen from this graph: itself, its formal if captured, or the result that a kernel exports."""
    home = tensor.graph
    if home is graph or tensor in graph:
        return tensor
    ancestor = graph.parent
    while ancestor is not None and ancestor is not home:
        ancestor = ancestor.parent
    if ancestor is not None:
        return capture(graph, adopt(graph.parent, tensor))  # type: ignore[arg-type]  # it has an ancestor
    if home.fused and home.owner is not None:
        return adopt(graph, export(home, tensor))
    if home.owner is not None and home.root is graph.root:
        raise GraphError(
            f"tensor {tensor.name!r} is local to the body of {home.owner.name!r}; return it from the body to use it "
            "outside"
        )
    raise GraphError(
        f"tensor {tensor.name!r} belongs to graph {home.root.name!r}, expected one of graph {graph.root.name!r}"
    )


def capture(graph: Graph, outer: Tensor) -> Tensor:
    """Return this body's formal for a tensor in the enclosing graph, created on first use."""
    inner = graph._captured.get(outer)
    if inner is None:
        inner = graph._captured[outer] = formal(graph, outer, f"{outer.name}.in", outer.sizes, outer.strides)
        inner.offset = outer.offset
        graph.note(lambda: graph._captured.pop(outer, None))
    return inner


def export(graph: Graph, tensor: Tensor) -> Tensor:
    """Return the outer tensor for one made inside this fused body: an outside read forces it to memory."""
    owner = graph.owner
    assert owner is not None
    if tensor in graph.outputs:
        return owner.results[graph.outputs.index(tensor)]
    for outer, inner in graph._captured.items():
        if inner is tensor:
            return outer
    modify(owner.graph, owner.name)
    append(graph, graph.outputs, tensor)
    name = tensor.name if owner.results else None
    owner.graph.add_result(owner, owner.kind.infer(owner.operands)[len(graph.outputs) - 1], name)
    return owner.results[-1]


# -- recorded torch calls ----------------------------------------------------------------------------------------------


def _is_argument(value: object) -> bool:
    """Return whether a value is a torch op argument: a number, a string, an operand by index, or a list."""
    if isinstance(value, dict):
        shapes: dict[str, Callable[[object], bool]] = {
            "operand": is_count,
            "torch": lambda v: isinstance(v, str),
            "empty": all_of(lambda v: isinstance(v, Poly)),
            "dtype": lambda v: isinstance(v, DType),
        }
        return value.keys() in ({"operand"}, {"torch"}, {"empty", "dtype"}) and all(
            shapes[k](v) for k, v in value.items()
        )
    if isinstance(value, tuple):
        return all(map(_is_argument, value))
    return value is None or isinstance(value, bool | int | float | str | Poly | DType)


def _operand_indices(value: Any) -> Iterator[int]:
    """Yield the operand indices among arguments."""
    if isinstance(value, Mapping):
        if "operand" in value:
            yield value["operand"]
    elif isinstance(value, tuple):
        for v in value:
            yield from _operand_indices(v)


@dataclass(frozen=True)
class Call:
    """A torch op call recorded by a trace, replayed when the graph is lowered eagerly."""

    target: Annotated[str, Rule("the name of a torch op with its overload", lambda v: isinstance(v, str) and "." in v)]
    """Overload name as in `torch.ops.aten`, prefixed by its namespace if that is another one."""
    arguments: Annotated[tuple[Any, ...], Rule("a tuple of arguments", all_of(_is_argument))]
    """Positional arguments, with `{"operand": i}` in place of tensors."""
    keywords: Annotated[
        Mapping[str, Any],
        Rule("arguments by name", lambda v: isinstance(v, dict) and all(map(_is_argument, v.values()))),
    ]
    places: Annotated[tuple[int, ...], Rule("a tuple of integers of at least -1", all_of(lambda v: is_count(v, -1)))]
    """Each result's index among the outputs of the call, -1 for an operand that it mutates."""
    rule: Annotated[str, Rule("the name of a rule", lambda v: isinstance(v, str))] = ""
    """Rule that replaced the call by another device's kernel, empty if it ran as recorded."""
    why: Annotated[str, Rule("a text", lambda v: isinstance(v, str))] = ""
    """Reason for the rule."""

    @property
    def name(self) -> str:
        """Op name without its overload."""
        return self.target.partition(".")[0]

    def verify(self, operands: int, results: int) -> None:
        """Raise ShapeError if the call does not match the number of operands and results."""
        need(len(self.places) == results, f"{len(self.places)} places for {results} results")
        for i in _operand_indices((*self.arguments, *self.keywords.values())):
            need(i < operands, f"operand {i} in the arguments, of {operands}")


# -- op ----------------------------------------------------------------------------------------------------------------
# Op nodes and op kinds.


@dataclass(frozen=True)
class Result:
    """Inferred metadata for one result."""

    sizes: SizeTuple
    """Shape."""
    dtype: DType
    """Number format."""
    strides: SizeTuple | None = None
    """Strides in elements; None for a new contiguous tensor."""
    of: int | None = None
    """Index of the operand that it views, or None if it has its own storage."""
    offset: Poly = ZERO
    """Offset of the first element within the storage."""
    domain: tuple[Domain, int, int] | None = None
    """Attention domain, as in Tensor."""
    pieces: int = 0
    """Number of leading axes with separate allocations, as in Storage."""
    host: bool | None = None
    """Whether it lies in host memory; None to inherit this from the operands."""
    spare: Poly = ZERO
    """Bytes that its storage has beyond the elements."""


def itself(t: Tensor, of: int = 0) -> Result:
    """Return the result that aliases an operand: a rename, or its value after an in-place write."""
    return Result(t.sizes, t.dtype, t.strides, of=of, offset=t.offset, domain=t.domain)


#: Op kinds by name; `costgraph.ops.registry` fills it.
kinds: dict[str, type[OpKind]] = {}


@dataclass
class Flops:
    """FLOPs by hardware unit: formulas, or numbers once counted."""

    matmul: Poly = ZERO
    """multiplies and adds in contractions, as executed"""
    full: Poly = None  # type: ignore[assignment]  # never None once it is made
    """the same with every domain ignored; equal to `matmul` by default"""
    pointwise: Poly = ZERO
    """single arithmetic operations"""
    transcendental: Poly = ZERO
    """exp, log, sqrt, sin, tanh, erf and the like"""

    def __post_init__(self) -> None:
        if self.full is None:
            self.full = self.matmul

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.matmul + other.matmul,
            self.full + other.full,
            self.pointwise + other.pointwise,
            self.transcendental + other.transcendental,
        )

    def __mul__(self, times: Poly | Rational) -> Flops:
        return Flops(self.matmul * times, self.full * times, self.pointwise * times, self.transcendental * times)

    def by_kind(self, count: str = "executed") -> dict[str, Poly]:
        """Return the FLOPs by kind; matmul FLOPs as executed, or with every domain ignored."""
        matmul = self.full if count == "full" else self.matmul
        return {"matmul": matmul, "pointwise": self.pointwise, "transcendental": self.transcendental}


@dataclass(frozen=True, kw_only=True)
class OpKind:
    """Op kind: attributes as fields, and rules as methods. Missing rules raise, they never count as zero.

    `costgraph.ops.rules` has rules that many kinds share: assign `flops = rules.free` in the class body.
    """

    name: ClassVar[str]
    """Kind name in tables and files."""
    restricted: ClassVar[bool] = False
    """Whether operands may have an attention domain, which `infer` propagates; they are refused otherwise."""
    takes_complex: ClassVar[bool] = False
    """Whether its FLOPs also hold for complex numbers; other kinds with FLOPs refuse complex operands."""
    crosses: ClassVar[bool] = False
    """Whether its operands may lie in host and device memory at once."""
    renames: ClassVar[bool] = False
    """Whether it only renames an operand after an in-place write, without reading it."""
    takes_lists: ClassVar[bool] = False
    """Whether it accepts stacked residuals (one storage per iteration) outside a loop."""
    passes_gradients: ClassVar[bool] = True
    """Whether it is differentiable."""
    save: Flag = field(default=False, repr=False)
    """Whether an enclosing fused kernel also writes its result for the backward pass."""
    recompute: Flag = field(default=False, repr=False)
    """Whether it is recomputed in the backward pass."""
    no_grad: Flag = field(default=False, repr=False)
    """Whether it ran under `no_grad`, so that autograd saves no tensors."""
    saved_operands: Places = field(default=(), repr=False)
    """Operands that autograd saves because the backward kernel takes them, even if only for their shapes."""
    grad_memory_format: MemoryFormat = field(default="", repr=False)
    """Memory format into which the backward kernel copies the incoming gradient: contiguous, grad (its own), operand
    (channels-last if the operand is), bshd (batch, sequence, heads, width) for attention, or empty for no copy."""
    copies_grad_input: Flag = field(default=False, repr=False)
    """Whether the backward kernel computes in that format and copies the result back into the operand's."""
    copies_matmul_operands: Flag = field(default=False, repr=False)
    """Whether backward matmuls copy operands whose layout BLAS does not accept, one at a time."""

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer result shapes, dtypes and layouts; raise if the operands do not fit."""
        raise self._missing_rule("infer")

    def flops(self, op: Op) -> Flops:
        """Return the op's FLOPs."""
        raise self._missing_rule("flops")

    def reads(self, op: Op) -> Sequence[Poly]:
        """Return the elements read from each operand."""
        raise self._missing_rule("reads")

    def writes(self, op: Op) -> Sequence[Poly]:
        """Return the elements written to each result."""
        raise self._missing_rule("writes")

    def overwrites(self) -> tuple[int, ...]:
        """Return the indices of mutated operands."""
        return ()

    def parts(self, op: Op) -> Loop | None:
        """Return the loop if the op repeats a body, else None."""
        return None

    def placed(self, op: Op) -> Split | None:
        """Return the sharding rule; None if all operands must be replicated."""
        return None

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Raise if a field contradicts the operands; `infer` checks the rest.

        `known` yields alternative relations between sizes under which the record may have been built.
        """

    def facts(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def limits(self) -> Mapping[str, Limit]:
        """Return the conditions on fields once sizes are bound, by field name."""
        return limits_of(type(self))

    def stated(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not f.default and v != f.default}

    def results_of(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Check the operands and infer the results.

        Raises
        ------
        CostGraphError
            If an operand does not fit, has a domain that the kind cannot handle, or is expanded and written in place.
        """
        limited = None if self.restricted else next((t for t in operands if t.domain is not None), None)
        if limited is not None:
            raise ShapeError(
                f"{self.name} of {limited!r}, which is restricted to a domain: expected an unrestricted tensor"
            )
        results = self.infer(operands)
        expanded = next((t for t in map(operands.__getitem__, self.overwrites()) if t.touched != t.numel), None)
        if expanded is not None:
            raise ShapeError(f"{self.name} in place into {expanded!r}: expected a tensor that is not expanded")
        return results

    def _missing_rule(self, rule: str) -> UnsupportedError:
        return UnsupportedError(f"op kind {self.name!r} has no rule {rule!r}, expected one in {type(self).__name__}")


@dataclass(frozen=True, kw_only=True)
class WorkspaceKind(OpKind):
    """Kind of op with a workspace: temporary memory besides operands and results."""

    workspace: Amount = ZERO
    """Workspace in bytes."""


@dataclass(frozen=True, kw_only=True)
class BodyKind(OpKind):
    """Kind of op that runs a body graph."""

    body: Graph
    """Body; its formals stand for the operands, its outputs for the results."""


class Op(Node):
    """An op node: one kernel, which reads each operand once and writes each result once."""

    __slots__ = ("call", "graph", "kind", "name", "operands", "phase", "results", "scope")

    def __init__(
        self, graph: Graph, kind: OpKind, name: str, operands: tuple[Tensor, ...], scope: str, phase: str
    ) -> None:
        self.graph = graph
        self.kind = kind
        self.name = name
        self.operands = operands
        self.results: tuple[Tensor, ...] = ()
        self.scope = scope
        self.phase = phase
        self.call: Call | None = None
        """Torch call that a trace recorded; eager lowering replays it instead of the kind."""

    @property
    def body(self) -> Graph | None:
        """Body of a fused kernel or loop."""
        return self.kind.body if isinstance(self.kind, BodyKind) else None

    @property
    def loop(self) -> Loop | None:
        """Loop view, None if it is not a loop."""
        return self.kind.parts(self)

    @property
    def workspace(self) -> Poly:
        """Temporary bytes needed while it runs, besides operands and results."""
        return self.kind.workspace if isinstance(self.kind, WorkspaceKind) else ZERO

    @property
    def on_host(self) -> bool:
        """Whether it runs on the host; transfers run on neither side."""
        return not self.kind.crosses and any(t.storage.host for t in (*self.operands, *self.results))

    def state(self, **facts: Any) -> None:
        """Replace fields in the op's kind."""
        previous = self.kind
        self.kind = replace(previous, **facts)
        self.graph.note(lambda: setattr(self, "kind", previous))

    def __repr__(self) -> str:
        return f"{self.name}[{self.kind.name}]"


# -- loop --------------------------------------------------------------------------------------------------------------
# Loops in the style of `jax.lax.scan`: a body with carries, sliced inputs and stacked outputs.

# 0 is allowed only with `min_count=0`
_Times = Annotated[Poly, Rule("a positive size", lambda v: is_size(v) or (is_amount(v) and is_size(v + 1)))]


@dataclass(frozen=True, kw_only=True)
class Repeat(BodyKind):
    """Run a body `count` times; operands and outputs are ordered as in `Loop`."""

    name = "repeat"
    restricted = crosses = True
    count: _Times
    """Iterations."""
    carries: Index
    """Number of carries."""
    xs: Index
    """Number of operands that are sliced along their first axis."""
    saved: Index = 0
    """Number of stacked residuals: results with a storage per iteration, or operands that the slices are written to."""
    reverse: Flag = False
    """Whether iterations run from the last slice to the first."""
    until: Flag = False
    """Whether it runs the iterations before the enclosing loop's current one."""
    min_count: Annotated[int, Rule("0, or nothing", lambda v: v == 0 and is_count(v))] = 1
    """Least iteration count: 0 if the loop may be empty."""

    def limits(self) -> Mapping[str, Limit]:
        """Return the conditions on fields; the count may be 0 if `min_count` is."""
        return {**super().limits(), "count": Limit(self.min_count)}

    def parts(self, op: Op) -> Loop:
        """Return the op's loop view."""
        return Loop(op, self)

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer final carries, stacked outputs and stacked residuals."""
        outputs = self.body.outputs
        results: list[Result] = []
        for i, t in enumerate(outputs):
            if i >= len(outputs) - self.saved:
                results.append(self._stacked_residual(operands, t))
                continue
            if t.domain is not None and (i >= self.carries or operands[i].domain is None):
                raise ShapeError(f"{t!r} leaves the body restricted to a domain, expected an unrestricted tensor")
            if i >= self.carries:
                results.append(Result((self.count, *t.sizes), t.dtype, host=t.storage.host))
                continue
            entry = operands[i]
            unchanged = (t.dtype, t.domain) == (entry.dtype, entry.domain) and len(t.sizes) == entry.ndim
            unchanged = unchanged and t.storage.host == entry.storage.host
            if not unchanged or not all(map(entry.graph.same, t.sizes, entry.sizes)):
                raise ShapeError(
                    f"carry {i + 1} enters the body as {entry!r} and leaves it as {t!r}, expected the same"
                )
            final = Result(entry.sizes, t.dtype, domain=t.domain, pieces=entry.storage.pieces, host=t.storage.host)
            results.append(final)
        return results

    def _stacked_residual(self, operands: Sequence[Tensor], t: Tensor) -> Result:
        """Infer a stacked residual: a storage per iteration, or a slice of an operand written in place."""
        start = self.carries
        for i, f in enumerate(self.body.formals[start : start + self.xs], start):
            outer = operands[i]
            if f.storage is t.storage and (outer.storage.pieces or same_place(f, t)):
                if t.ndim != f.ndim or t.domain is not None:
                    raise ShapeError(f"{t!r} is a view of an iteration's slice, expected a part with the same axes")
                sizes, strides = (outer.sizes[0], *t.sizes), (outer.strides[0], *t.strides)
                offset = outer.offset + t.offset - f.offset
                return Result(sizes, t.dtype, strides, of=i, offset=offset, domain=outer.domain)
        domain = None if t.domain is None else (t.domain[0], t.domain[1] + 1, t.domain[2] + 1)
        sizes, pieces = (self.count, *t.sizes), t.storage.pieces + 1
        return Result(sizes, t.dtype, domain=domain, pieces=pieces, host=t.storage.host)

    def flops(self, op: Op) -> Flops:
        """Return zero: ops in the body are counted themselves."""
        return Flops()

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return zeros: ops in the body are counted themselves."""
        return (ZERO,) * len(op.operands)

    def writes(self, op: Op) -> tuple[Poly, ...]:
        """Return zeros: ops in the body are counted themselves."""
        return (ZERO,) * len(op.results)

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check the body's inputs and outputs against the operands."""
        body, count, carries, xs, saved = self.body, self.count, self.carries, self.xs, self.saved
        need(self.min_count == 0 or count.constant != 0, "count 0")
        need_formals(operands, body)
        need(carries + xs <= len(operands), f"{carries} carries and {xs} slices of {len(operands)} operands")
        need(carries + saved <= len(body.outputs), f"{carries} carries, {saved} saved of {len(body.outputs)} outputs")
        for i, (outer, inner) in enumerate(zip(operands, body.formals, strict=True)):
            if i < carries:
                need(inner.dtype == outer.dtype and inner.sizes == outer.sizes, f"carry {inner!r} of {outer!r}")
                need(inner.strides == contiguous(inner.sizes), f"strides of carry {inner!r}")
            elif i < carries + xs:
                need(outer.ndim > 0 and outer.graph.same(outer.sizes[0], count), f"{outer!r} in {count} slices")
                need_fit(outer, inner, 1)
            else:
                need_fit(outer, inner)
            pieces = outer.storage.pieces
            inner_pieces = max(pieces - 1, 0) if carries <= i < carries + xs else pieces
            need(
                inner.storage.pieces == inner_pieces,
                f"{inner.storage.pieces} axes with separate storages in {inner!r}, {pieces} outside",
            )
        for i, t in enumerate(body.outputs[: len(body.outputs) - saved]):
            need(i >= carries or t.is_contiguous, f"strides of carry {t!r}")
            pieces = operands[i].storage.pieces if i < carries else 0
            need(
                t.storage.pieces == pieces, f"{t.storage.pieces} axes with separate storages in {t!r}, {pieces} outside"
            )


class Loop:
    """View of an op that repeats a body, with names for its operands, results and body tensors.

    Outside, `starts` are the initial carries, `xs` are sliced along their first axis and each iteration reads all of
    `shared`. `lasts` are the final carries, `stacks` the stacked outputs and `pieces` the stacked residuals. The body
    takes `carries`, `slices` and `captured`, and returns `nexts`, `ys` and `saved`.
    """

    def __init__(self, op: Op, kind: Repeat) -> None:
        self.op, self.kind, self.body = op, kind, kind.body
        self.count, self.reverse, self.until = kind.count, kind.reverse, kind.until
        carries_end, xs_end = kind.carries, kind.carries + kind.xs
        self.starts, self.xs, self.shared = (
            op.operands[:carries_end],
            op.operands[carries_end:xs_end],
            op.operands[xs_end:],
        )
        stacked_end = len(op.results) - kind.saved
        self.lasts, self.stacks, self.pieces = (
            op.results[:carries_end],
            op.results[carries_end:stacked_end],
            op.results[stacked_end:],
        )

    @cached_property
    def carries(self) -> tuple[Tensor, ...]:
        """Body inputs: the carries."""
        return tuple(self.body.formals[: self.kind.carries])

    @cached_property
    def slices(self) -> tuple[Tensor, ...]:
        """Body inputs: the slices of `xs`."""
        return tuple(self.body.formals[self.kind.carries : self.kind.carries + self.kind.xs])

    @cached_property
    def captured(self) -> tuple[Tensor, ...]:
        """Body inputs: the formals of `shared`."""
        return tuple(self.body.formals[self.kind.carries + self.kind.xs :])

    @cached_property
    def nexts(self) -> tuple[Tensor, ...]:
        """Body outputs: the next carries."""
        return tuple(self.body.outputs[: self.kind.carries])

    @cached_property
    def ys(self) -> tuple[Tensor, ...]:
        """Body outputs: the slices of `stacks`."""
        return tuple(self.body.outputs[self.kind.carries : len(self.body.outputs) - self.kind.saved])

    @cached_property
    def saved(self) -> tuple[Tensor, ...]:
        """Body outputs: one iteration's residuals."""
        return tuple(self.body.outputs[len(self.body.outputs) - self.kind.saved :])

    def updated_operand(self, i: int) -> Tensor | None:
        """Return the operand that `pieces[i]` aliases, if each iteration writes its slice in place, else None."""
        residual, stack = self.saved[i], self.pieces[i]
        pairs = zip(self.slices, self.xs, strict=True)
        return None if stack.storage.pieces else next((x for f, x in pairs if f.storage is residual.storage), None)

    def handed_on(self) -> dict[Storage, tuple[Storage, Poly]]:
        """Return the final carries that alias loop inputs: an unchanged carry, or a captured outer tensor."""
        forwarded = {}
        for i, carry in enumerate(self.nexts):
            input_pairs = ((self.carries[i], self.starts[i]), *zip(self.captured, self.shared, strict=True))
            for formal_, outer in input_pairs:
                if formal_.storage is carry.storage:  # axis order is unchanged, as for all carries
                    forwarded[self.lasts[i].storage] = outer.storage, outer.offset + carry.offset - formal_.offset
        return forwarded


def loops(graph: Graph) -> Iterator[Loop]:
    """Yield the loops in a graph and its bodies."""
    for op in graph.walk():
        if op.loop is not None:
            yield op.loop


def is_pass(body: Graph) -> bool:
    """Return whether a body is a complete forward and backward pass, as for one micro-batch."""
    return {"forward", "backward"} <= {op.phase for op in body.ops}


def same_place(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors view the same elements in a storage, in the same order and shape."""
    alike = a.storage is b.storage and (a.sizes, a.offset) == (b.sizes, b.offset)
    return alike and all(n == ONE or s == t for n, s, t in zip(a.sizes, a.strides, b.strides, strict=True))


# -- body signature ----------------------------------------------------------------------------------------------


def need_fit(outer: Tensor, inner: Tensor, drop: int = 0) -> None:
    """Raise ShapeError unless a formal matches its outer tensor; strides of size-1 axes are ignored."""
    fits = inner.dtype == outer.dtype and inner.sizes == outer.sizes[drop:]
    fits = fits and inner.storage.host == outer.storage.host
    places = zip(inner.sizes, inner.strides, outer.strides[drop:], strict=fits)
    fits = fits and all(a == b for n, a, b in places if n != ONE) and (drop > 0 or outer.domain == inner.domain)
    need(fits, f"body input {inner!r} for {outer!r}")


def need_formals(operands: Sequence[Tensor], body: Graph) -> None:
    """Raise ShapeError unless the body's inputs, its formals and the operands match."""
    inputs = [t for t in body.tensors if t.role == "formal" and t.producer is None]
    need(len(body.formals) == len(inputs) and set(body.formals) == set(inputs), "inputs of the body")
    need(len(body.formals) == len(operands), f"{len(body.formals)} inputs of the body, {len(operands)} operands")


# -- validation --------------------------------------------------------------------------------------------------------
# Invariants, checked when a graph's context closes, and when it is loaded or frozen.


def check(graph: Graph) -> None:
    """Raise GraphError if a graph or one of its bodies violates an invariant."""
    for g in graph.bodies():
        _check_nodes(g)
        _check_order(g)
        _check_overwritten(g)


def _check_nodes(graph: Graph) -> None:
    for node in graph.nodes:
        if not isinstance(node, Op | Tensor):
            raise GraphError(f"graph {graph.name!r}: node {node!r}, expected tensors and ops only")
    if not nx.is_directed_acyclic_graph(graph):
        raise GraphError(f"graph {graph.name!r}: its edges form a cycle, expected a directed acyclic graph")


def _check_order(graph: Graph) -> None:
    ready = {t for t in graph.tensors if t.producer is None}
    for op in graph.ops:
        for t in (*op.operands, *op.results):
            if t not in graph or not (graph.has_edge(t, op) if t in op.operands else graph.has_edge(op, t)):
                raise GraphError(f"op {op.name!r}: tensor {t.name!r} is not connected to it, expected an edge")
        late = next((t for t in op.operands if t not in ready), None)
        if late is not None:
            raise GraphError(f"op {op.name!r}: reads {late.name!r} before it is produced, expected program order")
        if op.body is not None and op.body.fused and not op.results:
            raise GraphError(f"kernel {op.name!r}: no op outside reads its results, expected at least one that is used")
        ready.update(op.results)


def _aliased_storages(t: Tensor, base_of: Mapping[Storage, Tensor] = MappingProxyType({})) -> Iterator[Storage]:
    """Yield the storages that a tensor may alias: its own, and carries that a loop forwards.

    `base_of` maps a storage to its base tensor, if known: in-place accumulation creates long chains of views.
    """
    t = base_of.get(t.storage, t)
    while t.is_view and t.producer is not None:
        t = next(o for o in t.producer.operands if o.storage is t.storage)
    yield t.storage
    loop = None if t.producer is None else t.producer.loop
    if loop is None:
        return
    inputs = {f.storage: o for f, o in zip(loop.body.formals, loop.op.operands, strict=True)}
    forwarded = [inputs[s] for s in _aliased_storages(loop.body.outputs[loop.op.results.index(t)]) if s in inputs]
    carries = loop.starts
    # swapped carries may alias any initial carry
    for o in dict.fromkeys((*forwarded, *(carries if any(h in carries for h in forwarded) else ()))):
        yield from _aliased_storages(o, base_of)


def overwritten_by(op: Op, first: Mapping[Storage, Tensor] = MappingProxyType({})) -> list[Storage]:
    """Return the operand storages that an op mutates: itself, or through the carries in its iterations."""
    mutated = op.kind.overwrites()
    if mutated:
        return [s for i in mutated for s in _aliased_storages(op.operands[i], first)]
    if op.body is None or op.loop is None:
        return []
    outside = {f.storage: t.storage for f, t in zip(op.body.formals, op.operands, strict=True)}
    return [outside[s] for inner in op.body.ops for s in overwritten_by(inner) if s in outside]


def _is_unaffected(t: Tensor, op: Op) -> bool:
    """Return whether an op mutates only elements that a tensor does not view."""
    mutated = [op.operands[i] for i in op.kind.overwrites()]
    if op.loop is not None:  # each iteration writes its slice
        overwritten = {s for inner in op.loop.body.ops for s in overwritten_by(inner)}
        formal_pairs = zip(op.loop.body.formals, op.operands, strict=True)
        mutated = [o for f, o in formal_pairs if f.storage in overwritten]
        if not set(mutated) <= set(op.loop.xs):
            return False
    return bool(mutated) and all(t.apart(view) for view in mutated)


def _check_overwritten(graph: Graph) -> None:
    """Raise GraphError if an op or output reads a value that an in-place op has overwritten."""
    overwritten: dict[Tensor, Op] = {}
    base_of: dict[Storage, Tensor] = {}
    by_storage: dict[Storage, list[Tensor]] = {}
    for op in graph.ops:
        stale = None if op.kind.renames else next((t for t in op.operands if t in overwritten), None)
        if stale is not None:
            raise GraphError(
                f"op {op.name!r}: reads {stale.name!r}, which {overwritten[stale].name!r} has overwritten in place"
            )
        for t in op.operands:
            base_of.setdefault(t.storage, t)
            by_storage.setdefault(t.storage, []).append(t)
        for storage in overwritten_by(op, base_of):
            viewers = by_storage.pop(storage, [])
            by_storage[storage] = [t for t in viewers if _is_unaffected(t, op)]
            overwritten |= {t: op for t in viewers if t not in by_storage[storage]}
        for t in op.results:
            base_of.setdefault(t.storage, t)
            by_storage.setdefault(t.storage, []).append(t)
    stale = next((t for t in graph.outputs if t in overwritten), None)
    if stale is not None:
        raise GraphError(f"output {stale.name!r}, which {overwritten[stale].name!r} has overwritten in place")


# -- builder -----------------------------------------------------------------------------------------------------------
# Adding sources and ops, and making their names unique.


def unique(graph: Graph, base: str) -> str:
    """Return a unique name: the given one, numbered if it is taken."""
    taken = graph.root._taken
    number = taken.get(base, 0)
    name = base
    while name in taken:
        name = f"{base}_{number}"
        number += 1
    _reserve(graph, base, max(number, 1))
    _reserve(graph, name, taken.get(name, 1))
    return name


def _reserve(graph: Graph, name: str, number: int = 1) -> None:
    """Reserve a name, with the number of its next duplicate."""
    taken = graph.root._taken
    previous = taken.get(name)
    taken[name] = number
    graph.note(lambda: taken.pop(name, None) if previous is None else taken.__setitem__(name, previous))


def home(graph: Graph) -> Graph:
    """Return the graph that owns new parameters: the innermost open body that is not fused."""
    owner = current_graph(graph)
    while owner.fused and owner.parent is not None:
        owner = owner.parent
    return owner


def source(
    graph: Graph,
    name: str,
    shape: Sequence[object],
    dtype: str | DType | None,
    role: str,
    *,
    requires_grad: bool = False,
) -> Tensor:
    """Declare a tensor without a producer."""
    modify(graph, f"{role} {shorten(str(name))}")
    if not isinstance(name, str) or not all(map(is_level, name.replace(".", "/").split("/"))):
        raise GraphError(f"{role} {shorten(str(name))}: expected a name of letters, digits, '_', '.' and '/'")
    qualified = with_suffix("/".join((*here().levels, name))) if role != "input" else name
    if qualified in graph.root._taken:
        raise GraphError(f"{role} {qualified!r}: the name is taken in graph {graph.root.name!r}, expected a new one")
    format_ = graph.root.dtype if dtype is None else find_dtype(dtype)
    tensor = Tensor(
        graph, qualified, sizes_of(shape, f"{role} {qualified!r}"), format_, role=role, requires_grad=requires_grad
    )
    with graph.transaction():
        _reserve(graph, qualified)
        graph.add_node(tensor)
    return tensor


def add_node(graph: Graph, /, node: Tensor | Op, **attr: object) -> None:
    """Append a node."""
    if graph.frozen:
        modify(graph, f"add_node {node!r}")
    root, fractional = graph.root, [n for n in (node.sizes if isinstance(node, Tensor) else ()) if not is_integral(n)]
    if not root.quotients.issuperset(fractional):
        previous, root.quotients = root.quotients, united(root.quotients, frozenset(fractional))
        graph.note(lambda: setattr(root, "quotients", previous))
    nx.DiGraph.add_node(graph, node, **attr)
    graph.note(lambda: node in graph and nx.DiGraph.remove_node(graph, node))


def add_result(graph: Graph, op: Op, result: Result, name: str | None = None) -> None:
    """Attach another result to an op."""
    base = op.operands[result.of] if result.of is not None else None
    tensor = Tensor(
        graph,
        unique(graph, name or op.name) if name or op.results else op.name,
        result.sizes,
        result.dtype,
        role="activation",
        strides=result.strides,
        offset=result.offset,
        storage=None if base is None else base.storage,
        pieces=result.pieces,
        host=any(t.storage.host for t in op.operands) if result.host is None else result.host,
    )
    tensor.storage.bytes += result.spare
    tensor.producer = op
    tensor.domain = result.domain
    previous, op.results = op.results, (*op.results, tensor)
    graph.note(lambda: setattr(op, "results", previous))
    graph.add_node(tensor)
    nx.DiGraph.add_edge(graph, op, tensor)


def add_op(graph: Graph, kind: OpKind, operands: Iterable[Tensor], name: str, phase: str | None = None) -> Op:
    """Append an op and infer its results."""
    need_name(kind.name, name)
    operands = tuple(operands)
    foreign = next((t for t in operands if graph.frozen and t.graph.root is not graph.root), None)
    if foreign is not None:
        graph.adopt(foreign)  # raises the more specific error
    modify(graph, name)
    with graph.transaction():
        return _op(graph, kind, operands, name, phase)


def _op(graph: Graph, kind: OpKind, operands: Iterable[Tensor], name: str, phase: str | None) -> Op:
    adopted = tuple(graph.adopt(t) for t in operands)
    qualified = unique(graph, with_suffix("/".join((*here().levels, name))))
    try:
        need_one_memory(kind, adopted)
        results = kind.results_of(adopted)
        for i, result in enumerate(results):
            sizes_of(result.sizes, f"result {i + 1}")
    except CostGraphError as error:
        raise type(error)(f"{qualified!r} in graph {graph.root.name!r}: {error}") from None
    op = Op(graph, kind, qualified, adopted, qualified.rpartition("/")[0], phase or here().phase)
    graph.add_node(op)
    nx.DiGraph.add_edges_from(graph, ((t, op) for t in adopted))
    for result in results:
        add_result(graph, op, result)
    if op.body is not None:
        _share_scales(op)
    if op.loop is not None:
        _record_forwarded(graph, op.loop.handed_on())
    if any(t.dtype.kind == "complex" for t in (*adopted, *op.results)):
        _need_complex(op)
    return op


def need_one_memory(kind: OpKind, operands: Sequence[Tensor]) -> None:
    """Raise GraphError if operands lie in both host and device memory."""
    on_host = [t for t in operands if t.storage.host]
    on_device = next((t for t in operands if not t.storage.host), None)
    if on_host and on_device is not None and not kind.crosses:
        raise GraphError(
            f"{kind.name} of {on_host[0]!r} on the host and {on_device!r} on the device, expected both in one "
            "memory: transfer one of them"
        )


def _need_complex(op: Op) -> None:
    """Raise UnsupportedError for a complex op whose FLOPs are defined for real numbers only."""
    flops = op.kind.flops(op).by_kind()
    if any(flops.values()) and not op.kind.takes_complex:
        raise UnsupportedError(
            f"{op.name!r} in graph {op.graph.root.name!r}: {op.kind.name} of complex numbers has no cost "
            f"rule, expected real numbers or an elementwise op"
        )


def _share_scales(op: Op) -> None:
    """Give formals in block formats the same scale bytes per element as their operands."""
    assert op.body is not None
    pairs = [(f, t) for f, t in zip(op.body.formals, op.operands, strict=False) if f.dtype == t.dtype]
    scaled = [(f, t) for f, t in pairs if t.dtype.block is not None]
    for f, t in scaled:
        f.storage.bytes = f.storage.elements * t.element_bytes()
    for inner in op.body.ops if scaled else ():
        if inner.body is not None:
            _share_scales(inner)


def _record_forwarded(graph: Graph, storages: dict[Storage, tuple[Storage, Poly]]) -> None:
    forwarded = graph.root.handed
    forwarded.update(storages)
    graph.note(lambda: [forwarded.pop(s, None) for s in storages])


def added_since(graph: Graph, nodes: int) -> list[Op]:
    """Return the ops added since a graph had the given number of nodes, in program order."""
    added = [*islice(reversed(graph._node), len(graph) - nodes)]  # networkx's ordered node dictionary
    return [node for node in reversed(added) if isinstance(node, Op)]


# -- graph -------------------------------------------------------------------------------------------------------------


#: Members that completion offers: networkx's own methods work, but a reader of a model needs few of them.
PUBLIC_MEMBERS = (
    "assume", "bodies", "buffer", "copy", "defaults", "dtype", "edges", "explore", "freeze", "frozen", "gradients",
    "graph", "input", "inputs", "layers", "legend", "loss", "name", "nodes", "ops", "output", "outputs", "param",
    "params", "predecessors", "root", "sharding", "stages", "successors", "tensors", "walk",
)  # fmt: skip


# builder methods run once per op: their arguments are not validated
@guarded(
    "unique", "formal", "adopt", "capture", "export", "add_result", "add_op", "add_node", "start_body", "same",
    "simplified", "transaction", "note",
)  # fmt: skip
class Graph(nx.DiGraph):  # type: ignore[misc]  # networkx has no types
    """Model graph: tensors and ops in program order.

    A graph is open inside its `with` block and finished after it. Tensors and ops can be added or removed only while it
    is open; enter it again to reopen it. Outputs, assumptions, defaults, the legend and the loss can be set at any
    time. A graph that was never entered is open, and so is a copy.

    Parameters
    ----------
    name : str
        Name in reports.
    dtype : str or DType
        Default dtype for inputs and parameters.

    Raises
    ------
    FormatError
        If the dtype is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("mlp") as g:
    ...     x = g.input("x", (B, D))
    ...     g.output(cg.einsum(x, g.param("w", (D, F)), "b d, d f -> b f"))
    >>> cg.flops(g)
    2*B*D*F

    Reopen a finished graph to extend it:

    >>> with g:
    ...     g.outputs = [cg.relu(g.outputs[0])]
    >>> cg.flops(g)
    2*B*D*F + B*F
    """

    frozen = False
    """Whether it is finished; the attribute that `networkx.is_frozen` reads."""
    graph_attr_dict_factory = Attributes
    dtype = GraphAttribute[DType]()
    outputs = GraphAttribute[list[Tensor]]()
    relations = GraphAttribute[Relations]()
    defaults = CheckedAttribute[dict[str, int]]()
    legend = CheckedAttribute[dict[str, str]]()
    """Descriptions of dimensions, such as `{"S": "sequence length"}`, printed below results that show the symbols."""
    gradients = GraphAttribute[dict[Tensor, Tensor]]()
    """Gradients of parameters and inputs; they live from the first contribution to the end."""
    loss = CheckedAttribute[str | None]()
    handed = GraphAttribute[dict[Storage, tuple[Storage, Poly]]]()
    """Carry storages that loops forward unchanged, each with the initial storage and an offset."""
    sharding = GraphAttribute[Sharding | None]()
    """Mesh and placements in a per-rank graph."""
    parts = GraphAttribute[tuple["Graph", ...]]()
    waiting = GraphAttribute[InFlightMicroBatches | None]()
    """Schedule and in-flight micro-batches in a pipeline stage."""
    matmul_dtype = CheckedAttribute[str | None]()
    """Dtype in which the precision policy runs matmuls; None for the declared one."""
    layers = GraphAttribute[frozenset[str]]()
    """Scopes that are one layer each, if a loop iterates over a period with several layers."""

    add_nodes_from = changing(nx.DiGraph.add_nodes_from)
    add_edge = changing(nx.DiGraph.add_edge)
    add_edges_from = changing(nx.DiGraph.add_edges_from)
    clear = changing(nx.DiGraph.clear)
    clear_edges = changing(nx.DiGraph.clear_edges)
    remove_node = changing(nx.DiGraph.remove_node)
    remove_nodes_from = changing(nx.DiGraph.remove_nodes_from)
    remove_edge = changing(nx.DiGraph.remove_edge)
    remove_edges_from = changing(nx.DiGraph.remove_edges_from)

    def __init__(self, name: object = "graph", dtype: str | DType = "fp32", **attr: object) -> None:
        if name is not None and not isinstance(name, str | nx.Graph):
            raise GraphError(f"graph: name {shown(name)}, expected text")
        self.formals: list[Tensor] = []
        self.parent: Graph | None = None
        self.fused = False
        self.owner: Op | None = None
        self.cache: dict[object, Any] = {}
        self._captured: dict[Tensor, Tensor] = {}
        self._taken: dict[str, int] = {}
        self.quotients: frozenset[Poly] = frozenset()
        """Sizes such as D/H that are integers only by assumption; stored on the root graph."""
        self.modules: set[str] = set()
        """Scopes taken by a layer or a Repeat."""
        self._places: list[BuildContext] = []
        self.journal = Journal()
        # networkx calls the constructor without arguments, or with data to copy
        super().__init__(None if isinstance(name, str) else name, **attr)
        self.graph.setdefault("name", name if isinstance(name, str) else "graph")
        facts: dict[str, Any] = {"dtype": find_dtype(dtype), "outputs": [], "relations": NOTHING_KNOWN, "defaults": {}}
        facts |= {"gradients": {}, "handed": {}, "layers": frozenset(), "loss": None, "matmul_dtype": None}
        facts |= {"legend": {}, "sharding": None, "parts": (), "waiting": None}
        self.graph.facts = facts | self.graph.facts

    def copy(self, as_view: bool = False) -> Graph:
        """Return a copy with the same nodes, from which nodes can be removed; new ops still go to the original."""
        copied: Graph = super().copy(as_view=as_view)
        if not as_view:
            for entries in (copied.graph, copied.graph.facts):
                entries |= {key: v.copy() for key, v in entries.items() if isinstance(v, list | dict)}
        return copied

    # -- structure -----------------------------------------------------------------------------------------------

    @property
    def ops(self) -> list[Op]:
        """Ops in program order, without those in bodies."""
        return [n for n in self.nodes if isinstance(n, Op)]

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors in program order."""
        return [n for n in self.nodes if isinstance(n, Tensor)]

    @property
    def root(self) -> Graph:
        """Outermost graph."""
        graph = self
        while graph.parent is not None:
            graph = graph.parent
        return graph

    def walk(self) -> Iterator[Op]:
        """Yield every op, bodies included; an op precedes its body."""
        for op in self.ops:
            yield op
            if op.body is not None:
                yield from op.body.walk()

    def bodies(self) -> Iterator[Graph]:
        """Yield this graph and all nested bodies."""
        yield self
        for op in self.ops:
            if op.body is not None:
                yield from op.body.bodies()

    @property
    def params(self) -> list[Tensor]:
        """Parameters, bodies included: a loop body has one set per iteration."""
        return [t for g in self.bodies() for t in g.tensors if t.role == "param" and t.producer is None]

    def __repr__(self) -> str:
        return f"Graph({self.name!r}: {len(self.ops)} ops, {len(self.tensors)} tensors)"

    def __str__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        return summary_html(self)

    def __dir__(self) -> list[str]:
        return sorted(PUBLIC_MEMBERS)

    @property
    def inputs(self) -> list[Tensor]:
        """Input tensors in declaration order."""
        return [t for t in self.tensors if t.role == "input"]

    # -- declaring -----------------------------------------------------------------------------------------------

    def input(
        self, name: str, shape: Sequence[object], dtype: str | DType | None = None, *, grad: bool = False
    ) -> Tensor:
        """Declare an input, a tensor that the caller owns.

        Parameters
        ----------
        name : str
            Name, unique in the graph.
        shape : sequence of sympy.Expr or int
            Sizes; `()` for a scalar.
        dtype : str or DType, optional
            Dtype, the graph's by default.
        grad : bool
            Whether the backward pass computes its gradient.

        Returns
        -------
        Tensor
            With role input.

        Raises
        ------
        GraphError, ShapeError, FormatError
            If the name is taken, a size is invalid, or the dtype is unknown.
        """
        need_flag(f"input {name!r}", grad=grad)
        return source(self.root, name, shape, dtype, "input", requires_grad=grad)

    def param(
        self, name: str, shape: Sequence[object], dtype: str | DType | None = None, *, grad: bool = True
    ) -> Tensor:
        """Declare a parameter; inside the body of a Repeat, one per iteration.

        Parameters
        ----------
        name : str
            Name, prefixed by the scope and unique in the graph.
        shape : sequence of sympy.Expr or int
            Sizes.
        dtype : str or DType, optional
            Dtype, the graph's by default.
        grad : bool
            False for a frozen parameter, which has no gradient.

        Returns
        -------
        Tensor
            With role param.

        Raises
        ------
        GraphError, ShapeError, FormatError
            As `input`.
        """
        need_flag(f"param {name!r}", grad=grad)
        return source(home(self), name, shape, dtype, "param", requires_grad=grad)

    def buffer(
        self, name: str, shape: Sequence[object], dtype: str | DType | None = None, *, role: str = "buffer"
    ) -> Tensor:
        """Declare a persistent tensor that is not a parameter: a constant, or a cache or optimizer state by role."""
        need_choice(f"buffer {name!r}: role", role, ("buffer", "cache", "state", "gradient"))
        return source(home(self), name, shape, dtype, role)

    def output(self, *tensors: Tensor) -> None:
        """Declare graph outputs: they live from their producer to the end.

        Parameters
        ----------
        *tensors : Tensor
            Tensors in this graph; repeated calls append.

        Raises
        ------
        GraphError
            If a value is not a tensor in this graph.
        """
        forget(self)
        with self.transaction():
            for t in tensors:
                if not isinstance(t, Tensor):
                    raise GraphError(f"output of graph {self.name!r}: got {kind_of(t)}, expected a tensor")
                append(self, self.outputs, self.adopt(t))

    def assume(self, *relations: Annotated[str, READ]) -> None:
        """State relations between sizes; formulas simplify under them, and bound sizes must satisfy them.

        Parameters
        ----------
        *relations : str
            Such as `"F >= D"`, `"D == H*K"`, `"S <= 1024"`; `costgraph.notation.grammar` has the grammar.

        Raises
        ------
        PatternError
            If a text is not a relation, or contradicts an earlier one.
        """
        stated = self.root.relations.relations
        self.root.relations = Relations([*stated, *(parse_relation(r) for r in relations)])

    def freeze(self) -> Graph:
        """Validate and finish the graph, as the end of a `with` block does."""
        self.validate()
        self._finish()
        return self

    # -- context manager -----------------------------------------------------------------------------------------

    def __enter__(self) -> Graph:
        if self.frozen and self.parent is None:
            self._reopen()
        # a graph opened inside another one does not inherit its scope
        self._places.append(enter(graph=self, levels=()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        inmost = close(self._places.pop())
        outermost = self.parent is None and not self._places
        if outermost:
            self._finish()  # also after an error, so that nothing is added by accident
        if kind is not None:
            return
        if not inmost:  # ops of either graph may have the other one's scope
            raise GraphError(
                f"graph {self.name!r} is closed while a context opened later is still open, expected the innermost one "
                "first: two interleaved generators cannot both hold a graph open"
            )
        if self.parent is None:
            self.validate()

    def _finish(self) -> None:
        for g in self._own_bodies():
            g.cache.clear()  # its lists and dictionaries may have been mutated
            g.frozen = True

    def _reopen(self) -> None:
        for g in self._own_bodies():
            for name in [n for n, v in vars(g).items() if v is nx.classes.function.frozen]:
                delattr(g, name)  # set by nx.freeze
            g.frozen = False

    def _own_bodies(self) -> Iterator[Graph]:
        """Yield this graph and all nested bodies; nothing for a networkx view, which shares another graph's."""
        return iter(()) if hasattr(self, "_graph") else self.bodies()

    # -- internals -----------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return reduced(self)

    def __setstate__(self, state: Any) -> None:
        filled(self, state)

    def __copy__(self) -> Graph:
        return self.copy()

    def transaction(self, caller: str = "") -> AbstractContextManager[None]:
        """Run a transaction: roll back all changes to the root graph if it raises."""
        return self.root.journal.transaction(caller)

    def note(self, undo: Callable[[], object]) -> None:
        """Record a change's undo function."""
        self.root.journal.note(undo)

    add_node = add_node
    add_op = add_op
    add_result = add_result
    unique = unique
    formal = formal
    adopt = adopt
    capture = capture
    export = export
    explore = explore
    same = same
    simplified = simplified
    stages = property(stages)

    @property
    def captured(self) -> tuple[Tensor, ...]:
        """Tensors in the enclosing graph that ops in this body read."""
        return tuple(self._captured)

    def start_body(self, name: str, *, fused: bool) -> Graph:
        """Return an empty body graph."""
        modify(self, name)
        body = Graph(name, dtype=self.dtype)
        body.parent = self
        body.fused = fused
        return body

    def validate(self) -> None:
        """Check the graph's invariants.

        Raises
        ------
        GraphError
            If program order is broken, no kernel result is used, or a tensor is read after an in-place op has
            overwritten it.
        """
        check(self)


def need_graph(place: str, graph: object) -> None:
    """Raise GraphError if a value is not a graph."""
    if not isinstance(graph, Graph):
        raise GraphError(f"{place}: got {kind_of(graph)}, expected a graph")


def apply(kind: OpKind, operands: Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
    """Append an op to its operands' graph and return its results."""
    for i, t in enumerate(operands):
        if not isinstance(t, Tensor):
            raise GraphError(f"{kind.name}: operand {i + 1} is {kind_of(t)}, expected a tensor")
    graph = current_graph(operands[0].graph if operands else None)
    return graph.add_op(kind, operands, name).results
