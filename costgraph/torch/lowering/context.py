"""Infrastructure of lowering: the fx emitter, bound sizes, module tensors, index bounds, process groups, op sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from math import inf, prod
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, overload

import torch
from torch import fx, nn

from ...algebra.polynomial import Poly
from ...bind.evaluate import answer
from ...dtypes import DType
from ...errors import BindingError, GraphError, UnsupportedError
from ...ir.graph import Domain, Graph, Op, OpKind, Tensor, bindings, known_names
from ...ir.strides import numel
from ...ops.collectives import Collective, LocalShard, Merge, Meshed, Pack, Unshard
from ...ops.elementwise import Pointwise
from ...ops.experts import Dispatch, TopK
from ...ops.fill import Assign, Fill, SliceUpdate
from ...ops.index import Arange, Gather, Indexed, Sort
from ...ops.kv_cache import Append, Cache
from ...ops.layout import Concat, Expand, KeepAlive, Rearrange, Slice, StopGradient
from ...ops.loops import Stacked
from ...ops.opaque import Transfer
from ...ops.reduce import Reduce
from ...ops.registry import adding
from ...transforms.rewrite import bound

__all__ = [
    "FORMATS",
    "torch_dtype",
    "Emitter",
    "ConcreteSizes",
    "Leaf",
    "Leaves",
    "random_values",
    "Indices",
    "Group",
    "Groups",
    "groups_of",
    "LoweringState",
    "LoweringContext",
    "has_strides",
    "strided",
    "LOWERINGS",
    "Lowering",
    "lowering",
]


# -- dtypes ------------------------------------------------------------------------------------------------------------

#: torch dtypes by format; tf32 is stored as fp32.
FORMATS: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e8m0": torch.float8_e8m0fnu,
    "complex128": torch.complex128,
    "complex64": torch.complex64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def torch_dtype(place: str, dtype: DType) -> torch.dtype:
    """Return a format's torch dtype; UnsupportedError if torch has none."""
    if dtype.name not in FORMATS:
        raise UnsupportedError(f"{place}: torch has no tensors of {dtype.name}, expected one of {', '.join(FORMATS)}")
    return FORMATS[dtype.name]


# -- emitter -----------------------------------------------------------------------------------------------------------


class ConcreteSizes:
    """Values of a graph's formulas at the given sizes.

    BindingError if a size is missing or invalid.
    """

    def __init__(self, graph: Graph, dims: Mapping[str, object]) -> None:
        self.values = bindings(graph, dims)
        bound_names = {name for name, p in self.values.items() if p.constant is not None}
        missing = sorted(known_names(graph) - bound_names)
        if missing:
            raise BindingError(
                f"lower of graph {graph.name!r}: {', '.join(missing)} not bound, expected a size for each"
            )
        self._cache: dict[Poly, int] = {}

    def __call__(self, p: Poly) -> int:
        """Return a formula's value."""
        if p not in self._cache:
            self._cache[p] = int(p.bind(self.values).constant)  # type: ignore[arg-type]  # all symbols are bound
        return self._cache[p]

    def of(self, sizes: Sequence[Poly]) -> tuple[int, ...]:
        """Return the formulas' values."""
        return tuple(map(self, sizes))

    def bind(self, value: Any) -> Any:
        """Return an op's field with formulas replaced by numbers."""
        return _plain(bound(value, self.values))


def _plain(value: Any) -> Any:
    if isinstance(value, Poly):
        return answer(value)
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


class Emitter:
    """Appends calls to an fx graph, each run_on_meta on meta tensors for its shape, dtype, strides and errors.

    Constructors create tensors on `device`.
    """

    def __init__(self, device: torch.device) -> None:
        self.graph = fx.Graph()
        self.device = device
        self._shadows: dict[fx.Node, Any] = {}

    def source(self, node: fx.Node, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Register an input or parameter by shape, strides and dtype."""
        self._shadows[node] = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
        return node

    def shadow(self, node: Any) -> Any:
        """Return a node's meta tensor, or the meta tensors for nodes in a structure."""
        return fx.node.map_arg(node, self._shadows.__getitem__)

    def run_on_meta(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on meta tensors only."""
        options = kwargs | ({"device": torch.device("meta")} if "device" in kwargs else {})
        with torch.no_grad():
            return function(*self.shadow(args), **self.shadow(options))

    def call(self, function: Callable[..., Any], *args: Any, like: Any = None, **kwargs: Any) -> Any:
        """Append a call; `like` is its meta result, computed by default."""
        result = self.run_on_meta(function, *args, **kwargs) if like is None else like
        node = self.graph.call_function(function, args, kwargs)
        self._shadows[node] = result
        return node


# -- module tensors ----------------------------------------------------------------------------------------------------
# Parameters, buffers, caches and optimizer state: their names in the module, and initial values.

#: Standard deviation for weights, as in GPT-2 (Radford et al. 2019).
_WEIGHTS = 0.02


@dataclass(frozen=True)
class Leaf:
    """A module parameter or buffer."""

    tensor: Tensor
    """graph tensor"""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    iterations: tuple[int, ...]
    """enclosing loop iterations"""
    limit: int | None
    """row count in the table that its integers index"""


class Leaves:
    """A module's parameters and buffers by qualified name.

    Levels in a graph name become submodules, dots become underscores, and an iteration number becomes the last
    level: `layers/mlp/up/weight` of iteration 3 is `layers.mlp.up.weight.3`.
    """

    def __init__(self, graph: Graph) -> None:
        sources = [t for g in graph.bodies() for t in g.tensors if t.producer is None and t.role != "formal"]
        inputs = [t.name for t in sources if t.role == "input"]
        self._arguments = _distinct((name, name.replace("/", "_").replace(".", "_")) for name in inputs)
        others = [t.name for t in sources if t.role != "input"]
        leaves = set(others)
        self._names = _distinct((name, _dotted(name, leaves)) for name in others)
        self.found: dict[str, Leaf] = {}

    def argument(self, name: str) -> str:
        """Return an input's argument name."""
        return self._arguments[name]

    def add(self, leaf: Leaf) -> str:
        """Register a tensor and return its qualified name."""
        target = ".".join([self._names[leaf.tensor.name], *map(str, leaf.iterations)])
        self.found[target] = leaf
        return target

    def module(self, device: torch.device, seed: int) -> nn.Module:
        """Return a module with all tensors, randomly initialized."""
        root = nn.Module()
        generator = torch.Generator().manual_seed(seed)
        for target, leaf in self.found.items():
            *levels, last = target.split(".")
            home = root
            for level in levels:
                if level not in home._modules:
                    home.add_module(level, nn.Module())
                home = home.get_submodule(level)
            values = random_values(leaf, device, generator)
            if leaf.tensor.role == "param" and (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
                home.register_parameter(last, nn.Parameter(values, requires_grad=False))
            else:
                home.register_buffer(last, values)
        return root


def _dotted(name: str, leaves: set[str]) -> str:
    """Return a qualified name; an underscore replaces the dot where a tensor shares a submodule's name."""
    levels = name.split("/")
    out = ""
    for i, level in enumerate(levels):
        text = level.replace(".", "_")
        text += "_" if hasattr(nn.Module(), text) or iskeyword(text) else ""
        out += text if not i else f"{'_' if '/'.join(levels[:i]) in leaves else '.'}{text}"
    return out


def _distinct(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return a unique name for each name."""
    names: dict[str, str] = {}
    used: set[str] = set()
    for name, candidate in pairs:
        while candidate in used:
            candidate += "_"
        used.add(candidate)
        names[name] = candidate
    return names


def random_values(leaf: Leaf, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Return random values for a tensor.

    Integers are valid indices of their table, else 0 or 1. Inputs are normal with standard deviation 1, matrices and
    larger parameters normal with 0.02. Vectors and scalars, which scale or shift, are uniform from 0.5 to 1.5, as is
    optimizer state, since second moments are nonnegative. Gradients and caches are zeros.
    """
    values = torch.empty_strided(leaf.sizes, leaf.strides, dtype=leaf.dtype, device=device)
    return values if device.type == "meta" else values.copy_(_random_values(leaf, generator))


def _random_values(leaf: Leaf, generator: torch.Generator) -> torch.Tensor:
    sizes, role = leaf.sizes, leaf.tensor.role
    if role in ("gradient", "cache"):
        return torch.zeros(sizes)
    if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        return torch.randint(0, leaf.limit or 2, sizes, generator=generator)
    wide = leaf.dtype if leaf.dtype.itemsize >= 8 else torch.float32
    if role == "input":
        return torch.randn(sizes, generator=generator, dtype=wide)
    if role == "param" and len(sizes) > 1 and prod(sizes) > 1:
        return torch.randn(sizes, generator=generator, dtype=wide).mul_(_WEIGHTS)
    return torch.rand(sizes, generator=generator, dtype=wide).add_(0.5)


# -- index bounds ------------------------------------------------------------------------------------------------------
# Integer tensors are bounded by the tables that they index; bounds propagate from the sources.

#: Kinds that forward their operands' values.
_FORWARDING = (
    Rearrange
    | Slice
    | Expand
    | Concat
    | KeepAlive
    | StopGradient
    | Cache
    | Append
    | Transfer
    | Unshard
    | Collective
    | LocalShard
    | Pack
    | Gather
    | Stacked
    | SliceUpdate
    | Assign
)


@dataclass(frozen=True)
class _Origin:
    """Where integer values come from."""

    sources: frozenset[Tensor] = frozenset()
    """source tensors, whose values can be chosen"""
    below: float = 0
    """exclusive upper bound on values produced by ops"""

    def __or__(self, other: _Origin) -> _Origin:
        return _Origin(self.sources | other.sources, max(self.below, other.below))


class Indices:
    """Static bounds on a graph's integers, propagated through views, copies, fused bodies and loops."""

    def __init__(self, graph: Graph, numbers: ConcreteSizes) -> None:
        self._numbers = numbers
        self._mesh = graph.sharding.mesh if graph.sharding is not None else None
        self._limits: dict[Tensor, int] = {}
        self._origins: dict[Tensor, _Origin] = {}
        self._seen: dict[Tensor, set[Op]] = {}
        for _ in range(2):  # the second pass includes loop-carried values
            self._follow(graph)

    def limit(self, t: Tensor) -> int | None:
        """Return the row count in the smallest table that a source indexes, None without a table."""
        return self._limits.get(t)

    def valid(self, op: Op) -> bool:
        """Whether a lookup's indices lie within its table, given valid sources."""
        return all(self._origin(t).below <= rows for t, rows in self._rows(op))

    def within(self, t: Tensor, rows: int) -> bool:
        """Whether integers lie below a number, given valid sources."""
        return self._origin(t).below <= rows

    def _rows(self, op: Op) -> list[tuple[Tensor, int]]:
        """Return the index tensors with their exclusive upper bounds."""
        assert isinstance(op.kind, Indexed)
        sizes = op.operands[0].sizes[op.kind.batch :]
        if op.kind.mesh_axis and self._mesh is not None:  # indices address rows on all ranks
            sizes = (sizes[0] * self._mesh[op.kind.mesh_axis], *sizes[1:])
        return [(t, self._numbers(n)) for t, n in zip(op.kind.places(op.operands), sizes, strict=False)]

    def _follow(self, graph: Graph) -> None:
        for t in graph.tensors:
            if t.producer is None and t.role != "formal":
                self._origins[t] = _Origin(frozenset([t]))
        for op in graph.ops:
            if isinstance(op.kind, Dispatch):
                for source in self._origin(op.operands[0]).sources:
                    experts = self._numbers(op.kind.experts)
                    self._limits[source] = min(self._limits.get(source, experts), experts)
            if isinstance(op.kind, Indexed):
                for t, rows in self._rows(op):
                    self._limits |= {s: min(self._limits.get(s, rows), rows) for s in self._origin(t).sources}
            if op.body is not None:
                self._follow_body(op)
            else:
                for i, t in enumerate(op.results):
                    self._origins[t] = self._origin_of_result(op, i)

    def _dispatch_bound(self, op: Op, experts: Poly, i: int) -> _Origin:
        """Return the bound on a dispatch result: tokens, ends, rows, experts."""
        rows, tokens = op.results[0].sizes[0], numel(op.operands[0].sizes[:-1])
        return _Origin(below=self._numbers((tokens, rows + 1, rows, experts)[min(i, 3)]))

    def _follow_body(self, op: Op) -> None:
        assert op.body is not None
        next_of_carry = {} if op.loop is None else dict(zip(op.loop.carries, op.loop.nexts, strict=True))
        for outer, inner in zip(op.operands, op.body.formals, strict=True):
            previous = self._origins.get(next_of_carry[inner]) if inner in next_of_carry else None
            self._origins[inner] = self._origin(outer) if previous is None else self._origin(outer) | previous
        self._follow(op.body)
        for outer, inner in zip(op.results, op.body.outputs, strict=True):
            self._origins[outer] = self._origin(inner)

    def _origin(self, t: Tensor) -> _Origin:
        return self._origins.get(t, _Origin(below=inf))

    def _origin_of_result(self, op: Op, i: int) -> _Origin:
        below: float = inf
        match op.kind:
            case kind if op.operands and _forwards_values(kind):
                origin = _Origin()
                for t in _forwarded_operands(kind, op.operands):
                    origin |= self._origin(t)
                return origin
            case Dispatch() as kind:
                return self._dispatch_bound(op, kind.experts, i)
            case Merge() as kind:
                rows = self._numbers(kind.rows)
                below = (rows + 1, rows, rows, self._numbers(op.results[0].sizes[0]))[i]
            case Arange() as kind:
                below = self._numbers(kind.start + 1 if kind.reverse else kind.size + kind.start)
            case Reduce() as kind if kind.operation.startswith("arg"):
                axes = zip(kind.pattern.operands[0], op.operands[0].sizes, strict=True)
                kept_axes = kind.pattern.result_names
                below = self._numbers(next(n for a, n in axes if a.names and a.names[0] not in kept_axes))
            case TopK() | Sort():
                below = self._numbers(op.operands[0].sizes[-1])
            case Fill() as kind if (value := self._numbers.bind(kind.value)) >= 0:
                below = value + 1
        return _Origin(below=below)


def _forwards_values(kind: OpKind) -> bool:
    """Whether an op forwards its operands' values."""
    return isinstance(kind, _FORWARDING) or (isinstance(kind, Pointwise) and kind.function.name in ("copy", "cast"))


def _forwarded_operands(kind: OpKind, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the operands whose values are forwarded."""
    if isinstance(kind, Gather):
        return operands[:1]
    return operands[1:] if isinstance(kind, Assign | Append) else operands


# -- process groups ----------------------------------------------------------------------------------------------------
# One per device mesh axis.


@dataclass(frozen=True)
class Group:
    """Process group along one mesh axis."""

    name: str
    """torch's process group name"""
    ranks: int
    rank: int
    """this process's rank in the group"""


#: Groups by axis name.
Groups = Mapping[str, Group]


def groups_of(graph: Graph, mesh: object, numbers: ConcreteSizes) -> Groups:
    """Return the process groups that a graph needs.

    GraphError if a sharded graph has no mesh, or the mesh lacks an axis or has another degree.
    """
    place = f"lower of graph {graph.name!r}"
    sharding = graph.sharding
    needed = dict(_degrees(graph, numbers))
    if mesh is None:
        if sharding is not None and needed:
            raise GraphError(
                f"{place}: the graph is partitioned over {sharding.mesh}, expected mesh= with torch's DeviceMesh"
            )
        return {}
    groups = {axis: _group(place, axis, mesh) for axis in needed}
    for axis, ranks in needed.items():
        if ranks is not None and groups[axis].ranks != ranks:
            raise GraphError(f"{place}: mesh has {groups[axis].ranks} ranks along {axis!r}, expected {ranks}")
    return groups


def _degrees(graph: Graph, numbers: ConcreteSizes) -> Iterator[tuple[str, int | None]]:
    """Yield the axes along which ranks communicate, with their degrees."""
    for op in graph.walk():
        if isinstance(op.kind, Indexed | Append) and op.kind.mesh_axis:
            yield op.kind.mesh_axis, None if graph.sharding is None else numbers(graph.sharding.mesh[op.kind.mesh_axis])
    for op in graph.walk():
        if isinstance(op.kind, Meshed | Merge) and op.kind.axis:
            yield op.kind.axis, numbers(op.kind.ranks)
        for domain in domains(op):
            yield from ((axis, numbers(n)) for axis, n in domain.ranks)


def domains(op: Op) -> Iterator[Domain]:
    """Yield an op's attention domains; with split queries they depend on the rank."""
    for name in ("domain", "masked"):
        fact = getattr(op.kind, name, None)
        if fact is not None:
            yield fact[0] if isinstance(fact, tuple) else fact
    yield from (t.domain[0] for t in (*op.operands, *op.results) if t.domain is not None)


def _group(place: str, axis: str, mesh: Any) -> Group:
    """Return an axis's group from a torch mesh or a mapping."""
    axes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "mesh_dim_names", None) or ()
    if axis not in axes:
        description = (
            f"axes {list(axes)}" if isinstance(mesh, Mapping) or axes else f"no axis names ({type(mesh).__name__})"
        )
        raise GraphError(
            f"{place}: mesh has {description}, expected a DeviceMesh or process groups by name with {axis!r}"
        )
    try:
        group: Any = mesh[axis] if isinstance(mesh, Mapping) else mesh.get_group(axis)
    except (RuntimeError, LookupError) as error:  # raised by torch for a mesh without this process
        raise GraphError(f"{place}: mesh has no process group along {axis!r} for this process, expected one") from error
    if not (hasattr(torch.distributed, "ProcessGroup") and isinstance(group, torch.distributed.ProcessGroup)):
        raise GraphError(f"{place}: mesh has {type(group).__name__} along {axis!r}, expected a process group")
    return Group(group.group_name, group.size(), group.rank())


# -- op sites ----------------------------------------------------------------------------------------------------------

K_co = TypeVar("K_co", bound=OpKind, covariant=True)


def strided(x: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """Return a view at an offset from the tensor's start, in elements."""
    return torch.as_strided(x, sizes, strides, x.storage_offset() + offset)


#: Functions that can write to an output with another dtype.
_CONVERTING: tuple[Callable[..., Any], ...] = (
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.pow, torch.addcmul, torch.addcdiv,
)  # fmt: skip


def has_strides(x: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides, ignoring size-1 axes."""
    return all(n <= 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))


@dataclass(frozen=True)
class LoweringState:
    """State shared by all lowerings in a graph."""

    emitter: Emitter
    """emitter that appends calls"""
    numbers: ConcreteSizes
    """formula values"""
    indices: Indices
    """integer bounds"""
    groups: Groups
    """process groups by mesh axis; empty to simulate one rank among identical ranks"""
    functions: Mapping[str, Callable[..., Any]]
    """caller's functions for unknown elementwise and opaque ops, by name"""
    lower_body: Callable[[Graph, Sequence[Any]], list[Any]]
    """lowers a fused body's ops, from input nodes to output nodes"""


@dataclass
class LoweringContext(Generic[K_co]):
    """Context in which one op is lowered."""

    op: Op
    shared: LoweringState
    operands: list[Any]
    """operand nodes"""
    slices: Mapping[Tensor, Any] = field(default_factory=dict)
    """nodes of the stack slices that results are written to"""
    results: dict[int, Any] = field(default_factory=dict)
    """result nodes by index"""

    @property
    def emitter(self) -> Emitter:
        """Emitter that appends calls."""
        return self.shared.emitter

    @property
    def numbers(self) -> ConcreteSizes:
        """Formula values."""
        return self.shared.numbers

    @property
    def kind(self) -> K_co:
        """The op kind, whose fields describe the op."""
        return cast("K_co", self.op.kind)  # a lowering only gets ops with its kind

    @overload
    def of(self, value: Poly) -> Any: ...

    @overload
    def of(self, value: tuple[Any, ...]) -> tuple[Any, ...]: ...

    @overload
    def of(self, value: Mapping[str, Any]) -> dict[str, Any]: ...

    def of(self, value: Any) -> Any:
        """Return an op's field with formulas replaced by numbers: `site.of(site.kind.size)`."""
        return self.numbers.bind(value)

    def sizes(self, t: Tensor) -> tuple[int, ...]:
        """Return a graph tensor's shape."""
        return self.numbers.of(t.sizes)

    def dtype(self, t: Tensor) -> torch.dtype:
        """Return a graph tensor's torch dtype."""
        return torch_dtype(repr(self.op.name), t.dtype)

    def mask_arguments(self, domain: Domain, queries: int, keys: int) -> tuple[bool, int | None, int]:
        """Return whether later keys are masked, the window, and the first query's position among the keys."""
        position, ranks_total = 0, 1
        for axis, n in domain.ranks:
            group, ranks = self.shared.groups.get(axis), self.numbers(n)
            position, ranks_total = position * ranks + (0 if group is None else group.rank), ranks_total * ranks
        window = None if domain.window is None else self.numbers(domain.window)
        return domain.causal, window, keys - queries * (ranks_total - position)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Append a call and return its node."""
        return self.emitter.call(function, *args, **kwargs)

    def shadow(self, node: Any) -> Any:
        """Return a node's meta tensor."""
        return self.emitter.shadow(node)

    def permuted(self, node: Any, order: Sequence[int]) -> Any:
        """Return a view with permuted axes."""
        return node if list(order) == list(range(len(order))) else self.call(torch.permute, node, list(order))

    def viewed(self, node: Any, sizes: Sequence[int]) -> Any:
        """Return a view with another shape."""
        same = tuple(self.shadow(node).shape) == tuple(sizes)
        return node if same else self.call(torch.ops.aten.view, node, list(sizes))

    def shaped(self, node: Any, sizes: Sequence[int]) -> Any:
        """Return a tensor with another shape, copied if it cannot be a view."""
        try:
            return self.viewed(node, sizes)
        except RuntimeError:
            return self.call(torch.reshape, node, list(sizes))

    def cast(self, node: Any, dtype: torch.dtype) -> Any:
        """Return a node in a dtype, copied only if it has another one."""
        if self.shadow(node).dtype == dtype:
            return node
        return self.call(torch.ops.aten._to_copy, node, dtype=dtype)

    # -- results -------------------------------------------------------------------------------------------------

    def alias(self, node: Any, i: int = 0) -> None:
        """Set a result that shares an operand's storage."""
        self.results[i] = node

    def own(self, function: Callable[..., Any], *args: Any, i: int = 0, shape: Any = None, **kwargs: Any) -> None:
        """Set a result with its own storage, computed by a torch function in the graph's layout.

        The function gets `out=` if its default layout or dtype differs. `i` is the result's index; `shape` is the
        shape that the function returns, if it differs from the result's, with the same elements in order.
        """
        meta = self.emitter.run_on_meta(function, *args, **kwargs)
        if self._fits(meta, i):
            self.results[i] = self.shaped(self.call(function, *args, **kwargs), self.sizes(self.op.results[i]))
            return
        target = self._target(i)
        out = target if shape is None else self.shaped(target, shape)
        written = self.into(out, function, *args, **kwargs)
        if written is None:
            self.results[i] = self.call(
                torch.Tensor.copy_, target, self._in_result_shape(self.call(function, *args, **kwargs), i)
            )
        else:
            self.results[i] = written if shape is None else self.shaped(written, self.sizes(self.op.results[i]))

    def into(self, target: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let a function write to a node; return None, without appending a call, if it cannot."""
        expected = self.shadow(target)
        try:
            meta = self.emitter.run_on_meta(function, *args, **kwargs)
            converts = meta.dtype == expected.dtype or function in _CONVERTING
            if meta.shape != expected.shape or not converts:
                return None
            return self.call(function, *args, **kwargs, out=target)
        except (TypeError, RuntimeError):  # no `out=`, or no conversion to the target's dtype
            return None

    def settle(self, node: Any, i: int = 0, *, fresh: bool = True) -> None:
        """Set a result from a node, copied if it does not have the graph's layout."""
        if fresh and self._fits(self.shadow(node), i):
            self.results[i] = self.shaped(node, self.sizes(self.op.results[i]))
        else:
            self.results[i] = self.call(torch.Tensor.copy_, self._target(i), self._in_result_shape(node, i))

    def _in_result_shape(self, node: Any, i: int) -> Any:
        return self.shaped(node, self.sizes(self.op.results[i]))

    def _target(self, i: int) -> Any:
        """Return the node to write a result to: a slice of a stack, or new memory in the graph's layout."""
        t = self.op.results[i]
        if t in self.slices:
            return self.slices[t]
        sizes, strides = self.sizes(t), self.numbers.of(t.strides)
        return self.call(torch.empty_strided, sizes, strides, dtype=self.dtype(t), device=self.emitter.device)

    def _fits(self, meta: torch.Tensor, i: int) -> bool:
        """Whether a call's result has the graph's dtype and layout."""
        t = self.op.results[i]
        if t in self.slices or meta.dtype != self.dtype(t):
            return False
        sizes, strides = self.sizes(t), self.numbers.of(t.strides)
        if tuple(meta.shape) == sizes:
            return has_strides(meta, strides)
        dense = torch.empty(sizes, device="meta").stride()
        return meta.is_contiguous() and all(n <= 1 or a == b for n, a, b in zip(sizes, strides, dense, strict=True))


# -- registry ----------------------------------------------------------------------------------------------------------

#: Appends one op's calls and sets its results.
Lowering = Callable[[LoweringContext[Any]], None]
K = TypeVar("K", bound=OpKind)

_lowerings: dict[type[OpKind], Lowering] = {}
#: Lowerings by op kind.
LOWERINGS: Mapping[type[OpKind], Lowering] = MappingProxyType(_lowerings)


def lowering(kind: type[K]) -> Callable[[Callable[[LoweringContext[K]], None]], Callable[[LoweringContext[K]], None]]:
    """Register a lowering for an op kind.

    Parameters
    ----------
    kind : subclass of OpKind
        Op kind to lower.

    Returns
    -------
    callable
        Decorator for a function of `LoweringContext`, which appends torch calls and sets every result. `site.kind` is
        the op kind;
        `site.of(site.kind.size)` evaluates one of its fields.

    Raises
    ------
    GraphError
        If the kind already has a lowering.
    """
    return adding(_lowerings, "a lowering", kind)
