"""Reference interpreter: run a graph on NumPy index point by index point, and count FLOPs, bytes and memory.

It is slow and simple, and shares no formula with the library. FLOPs are counted as they run, bytes as addresses
that are accessed, memory as buffers that are allocated and freed. From the graph it takes facts only: the order of ops,
their patterns and sizes, number formats, and the workspace that kernels declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import combinations, product
from math import ceil, isnan, prod
from operator import lt, mul
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np

from ..algebra.polynomial import Poly
from ..dtypes import DType
from ..errors import BindingError, GraphError, UnsupportedError
from ..ir.graph import Domain, Graph, Loop, Op, OpKind, Storage, Tensor, bindings, known_names, need_graph
from ..notation.pattern import Affine, Axes, Pattern
from ..ops.einsum import Einsum
from ..ops.elementwise import Dropout, Pointwise
from ..ops.index import Arange
from ..ops.layout import Concat, Expand, KeepAlive, Rearrange, Slice
from ..ops.loops import Accumulate, Empty, Kernel, Undef, taken
from ..ops.opaque import Transfer
from ..ops.reduce import Pool, PoolBackward, PoolingBase, Reduce
from ..ops.registry import adding
from ..transforms.rewrite import flat, members
from .arithmetic import FUNCTIONS, Number, tally, value

__all__ = [
    "RANK",
    "At",
    "Buffer",
    "Sizes",
    "Value",
    "array_of",
    "position_of",
    "storage_bytes",
    "whole",
    "REFERENCE_SEMANTICS",
    "Meaning",
    "reference_semantics",
    "scalars",
    "Event",
    "peak_of",
    "Counted",
    "Run",
    "run",
]


# -- buffers and values ------------------------------------------------------------------------------------------------

Array = np.ndarray[Any, Any]
Point = tuple[int, ...]
#: Mesh coordinates of the running rank by axis; 0 for missing axes.
RANK: ContextVar[Mapping[str, int]] = ContextVar("costgraph_rank", default=MappingProxyType({}))

K_co = TypeVar("K_co", bound=OpKind, covariant=True)


def storage_bytes(shape: Point, dtype: DType) -> Fraction:
    """Return the bytes of a dense tensor, with its block scales counted one by one."""
    rows = 1
    for n in shape[:-1]:
        rows *= n
    columns = shape[-1] if shape else 1
    if shape and dtype.padded != (1, 1):
        rows += -rows % dtype.padded[1]
        columns += -columns % dtype.padded[0]
    bits = rows * columns * dtype.bits
    for scale in dtype.scale:
        if scale.per is None:
            bits += scale.bits
        elif scale.flat:
            bits += ceil(rows * columns / scale.per) * scale.bits
        else:
            bits += ceil(rows / scale.rows) * (ceil(columns / scale.per) if scale.per else 1) * scale.bits
    return Fraction(bits, 8)


@dataclass(eq=False)
class Buffer:
    """A block of memory."""

    name: str
    """name of the tensor it was allocated for, with the iteration"""
    bytes: Fraction
    """size in bytes"""
    array: Array
    """its elements"""
    throughout: bool = False
    """whether it is live from start to end"""
    inside: bool = False
    """whether it is internal to a fused kernel and takes no memory"""
    host: bool = False
    """whether it is in host memory"""
    held: set[int] | None = None
    """addresses that have been written, None for buffers that are initialized"""

    @property
    def element(self) -> Fraction:
        """Bytes per element, including its share of the scales."""
        return self.bytes / self.array.size


@dataclass(eq=False)
class Value:
    """An array in a buffer."""

    array: Array
    """a NumPy view into the buffer"""
    buffer: Buffer
    """the buffer"""
    limit: Array | None = None
    """mask of the index points in the domain of a restricted view, None for all"""

    def __post_init__(self) -> None:
        """Cache start and strides, which `address` needs for each element."""
        data, base = (a.__array_interface__["data"][0] for a in (self.array, self.buffer.array))
        self._start: int = data - base
        self._strides = self.array.strides

    def address(self, index: Point) -> int:
        """Return an element's byte offset in the buffer."""
        offset: int = self._start + sum(map(mul, index, self._strides))
        return offset

    @property
    def whole(self) -> bool:
        """Whether every index point holds a value."""
        written = self.buffer.held
        return self.limit is None and (written is None or len(written) == self.buffer.array.size)

    def index(self) -> Iterator[Point]:
        """Yield every index point."""
        return product(*map(range, self.array.shape))

    def points(self) -> Iterator[Point]:
        """Yield the index points that hold a value."""
        return self.index() if self.whole else filter(self.holds, list(self.index()))

    def holds(self, index: Point, address: int | None = None) -> bool:
        """Whether an index point holds a value: it has been written and is in the domain."""
        written, limit = self.buffer.held, self.limit
        if written is not None and (self.address(index) if address is None else address) not in written:
            return False
        return limit is None or bool(limit[index])


def array_of(stored: Any) -> Array:
    """Return a tensor's array; per-iteration storages are stacked."""
    if isinstance(stored, list):
        return np.stack([array_of(v) for v in stored]) if stored else np.empty(0)
    array: Array = stored.array
    return array


def position_of(v: Any, i: int) -> Any:
    """Return one slice along a tensor's first axis, or the storage of one iteration."""
    if v is None or isinstance(v, list):
        return None if v is None else v[i]
    return Value(v.array[i, ...], v.buffer, None if v.limit is None else v.limit[i, ...])


class Sizes:
    """Evaluates formulas for concrete sizes."""

    def __init__(self, point: Mapping[str, int]) -> None:
        self.point = dict(point)
        self._values: dict[Poly, Any] = {}

    def __call__(self, p: Poly) -> Any:
        """Return the value of a formula, as an int if it is whole."""
        if p not in self._values:
            result = value(p.expr, self.point)
            self._values[p] = int(result) if isinstance(result, Fraction) and result.denominator == 1 else result
        return self._values[p]

    def of(self, fact: Any) -> Any:
        """Evaluate an op field, nested formulas included."""
        if isinstance(fact, Poly):
            return self(fact)
        if isinstance(fact, tuple | list):
            return tuple(self.of(f) for f in fact)
        if isinstance(fact, Mapping):
            return {k: self.of(f) for k, f in fact.items()}
        return fact

    def held(self, t: Tensor) -> Array:
        """Return the mask of index points at which the graph declares a value."""
        shape = tuple(self(n) for n in t.sizes)
        return self.seen(t.domain, shape) if t.domain is not None else np.ones(shape, dtype=bool)

    def seen(self, restriction: tuple[Domain, int, int], shape: Point) -> Array:
        """Return the mask of a shape for a domain over two of its axes."""
        domain, query, key = restriction
        pairs = self.pairs(domain, shape[query], shape[key])
        mask = np.empty(shape, dtype=bool)
        for index in np.ndindex(*shape):
            mask[index] = pairs[index[query], index[key]]
        return mask

    def pairs(self, domain: Domain, queries: int, keys: int) -> Array:
        """Return a domain's attention mask (queries x keys) for the running rank."""
        rank, ranks = 0, 1
        for axis, n in domain.ranks:
            rank, ranks = rank * self(n) + RANK.get().get(axis, 0), ranks * self(n)
        query_positions = np.arange(queries)[:, None] + rank * queries + keys - queries * ranks
        key, window = np.arange(keys)[None], None if domain.window is None else self(domain.window)
        mask: Array = key <= query_positions if domain.causal else np.ones((queries, keys), dtype=bool)
        if window is not None:
            mask &= (key > query_positions - window) & (domain.causal | (key < query_positions + window))
        return mask


@dataclass
class At(Generic[K_co]):
    """One op execution: operands and cost counters."""

    op: Op
    """the op"""
    sizes: Sizes
    """sizes for its formulas"""
    operands: list[Value]
    """the operands"""
    placed: dict[Any, Value] = field(default_factory=dict)
    """preallocated storages or tensors, such as slices of stacked outputs"""
    inside: bool = False
    """whether it runs in a fused kernel"""
    where: str = ""
    """iterations of the enclosing loops"""
    tally: Any = field(default_factory=tally)
    """FLOPs"""
    read_at: dict[Buffer, set[int]] = field(default_factory=dict)
    """addresses read"""
    read_by: dict[int, set[int]] = field(default_factory=dict)
    """addresses read, by operand"""
    written_at: dict[Buffer, set[int]] = field(default_factory=dict)
    """addresses written"""
    stated: dict[str, Any] = field(default_factory=dict)
    """bytes read and written, for ops that declare them"""
    repeats: bool = False
    """whether an index looked up the same row twice, which depends on data"""
    made: dict[int, Value] = field(default_factory=dict)
    """results by position"""

    @property
    def kind(self) -> K_co:
        """The op kind, with its fields."""
        return cast("K_co", self.op.kind)  # semantics are only called with ops of their kind

    @overload
    def of(self, fact: Poly) -> Any: ...

    @overload
    def of(self, fact: tuple[Any, ...]) -> tuple[Any, ...]: ...

    @overload
    def of(self, fact: Mapping[str, Any]) -> dict[str, Any]: ...

    def of(self, fact: Any) -> Any:
        """Evaluate an op field: `at.of(at.kind.size)`."""
        return self.sizes.of(fact)

    def read(self, i: int, *index: int) -> Any:
        """Read an operand element."""
        v = self.operands[i]
        address = v.address(index)
        if i not in self.read_by:
            self.read_at.setdefault(v.buffer, set())
            self.read_by[i] = set()
        self.read_at[v.buffer].add(address)
        self.read_by[i].add(address)
        assert v.holds(index, address), f"{self.op.name!r} reads operand {i + 1} at {index}, where it holds nothing"
        return v.array.item(index)

    def number(self, i: int, *index: int) -> Number:
        """Read an operand element as a FLOP-counting number."""
        return Number(self.read(i, *index), self.tally)

    def result(self, i: int = 0, like: Array | None = None) -> Value:
        """Return a result, allocated on the first call: dense, with the axis order of `like` if given."""
        if i not in self.made:
            self.made[i] = self._new(self.op.results[i], like)
        return self.made[i]

    def _new(self, t: Tensor, like: Array | None) -> Value:
        shape = tuple(self.sizes(n) for n in t.sizes)
        preallocated = self.placed.get(t, self.placed.get(t.storage))
        if preallocated is not None:
            if preallocated.array.shape != shape:
                raise GraphError(f"{t.name!r}: shape {shape} in a stack slice of shape {preallocated.array.shape}")
            return Value(preallocated.array, preallocated.buffer)
        # float64 represents every format exactly, and NaN marks unwritten elements
        array = np.full(shape, np.nan) if like is None else np.full_like(like, np.nan, dtype=float, order="K")
        buffer = Buffer(t.name + self.where, storage_bytes(shape, t.dtype), array, inside=self.inside, held=set())
        buffer.host = t.storage.host
        return Value(array, buffer)

    def view(self, change: Callable[[Array], Array], *, copy: bool = False) -> Value:
        """Make a NumPy view of the operand the result; allocate the result instead if NumPy or `copy` makes a copy."""
        source = self.operands[0]
        array, limit = change(source.array), None if source.limit is None else change(source.limit)
        if np.may_share_memory(array, source.buffer.array) and not copy:
            self.made[0] = Value(array, source.buffer, limit)
        return self.result()

    def write(self, value: Any, *index: int, to: int = 0) -> None:
        """Write a result element."""
        v = self.result(to)
        v.array[index] = value.value if isinstance(value, Number) else value
        address = v.address(index)
        self.written_at.setdefault(v.buffer, set()).add(address)
        if v.buffer.held is not None:
            v.buffer.held.add(address)


def whole(function: Callable[[At[Any]], Array], to: int = 0) -> Callable[[At[Any]], None]:
    """Make semantics that write a whole array to a result, within its domain."""

    def run(at: At[OpKind]) -> None:
        array, v = function(at), at.result(to)
        mask = at.sizes.held(at.op.results[to])
        v.array[mask] = np.broadcast_to(array, v.array.shape)[mask]
        if v.buffer.held is not None:
            v.buffer.held.update(v.address(index) for index in map(tuple, np.argwhere(mask).tolist()))

    return run


# -- semantics ---------------------------------------------------------------------------------------------------------

K = TypeVar("K", bound=OpKind)
Meaning = Callable[[At[Any]], None]

#: Reference semantics of each op kind without a body.
REFERENCE_SEMANTICS: dict[type[OpKind], Meaning] = {}


def reference_semantics(*kinds: type[K]) -> Callable[[Callable[[At[K]], None]], Callable[[At[K]], None]]:
    """Define the reference semantics of op kinds, index point by index point, so that their cost rules can be checked.

    Parameters
    ----------
    *kinds : subclass of OpKind
        Op kinds that it applies to.

    Returns
    -------
    callable
        Decorator of a function of `At`. There, `at.kind` is the op kind and `at.of(at.kind.size)` evaluates one of its
        fields; use `at.read(operand, *index)`, `at.number(operand, *index)`, `at.write(value, *index)` and `at.tally`.

    Raises
    ------
    GraphError
        If a kind already has semantics.
    """
    return adding(REFERENCE_SEMANTICS, "reference semantics", *kinds)


# -- contractions ------------------------------------------------------------------------------------------------


def _position(dim: Axes | Affine, point: Mapping[str, int], extents: Mapping[str, int]) -> int:
    """Return the position along one tensor dimension at an index point."""
    if isinstance(dim, Affine):
        return sum(step * point[name] for name, step in dim.terms) + dim.offset
    position = 0
    for name in dim.names:
        position = position * extents[name] + point[name]
    return position


def _index_points(extents: Mapping[str, int]) -> Iterator[dict[str, int]]:
    for point in product(*map(range, extents.values())):
        yield dict(zip(extents, point, strict=True))


def _inside(index: Point, shape: Point) -> bool:
    """Whether an index is inside the array: windows may overlap the padding."""
    return all(map(lt, index, shape)) and (not index or min(index) >= 0)


@reference_semantics(Einsum)
def _einsum(at: At[Einsum]) -> None:
    pattern, extents, restriction = at.kind.pattern, at.of(at.kind.extents), at.kind.domain
    overlapping = any(isinstance(d, Affine) and len(d.terms) > 1 for d in pattern.result)
    summed = overlapping or bool(set(extents) - set(pattern.result_names))
    array = at.result().array
    if restriction is None:
        array[...] = 0
    else:
        domain, q, k = restriction
        visible = at.sizes.pairs(domain, extents[q], extents[k])
    for point in _index_points(extents):
        if restriction is not None and not visible[point[q], point[k]]:
            at.tally.full += 2 if summed else 0
            continue
        target = tuple(_position(d, point, extents) for d in pattern.result)
        term = 1.0
        for i, dims in enumerate(pattern.operands):
            index = tuple(_position(d, point, extents) for d in dims)
            term = term * at.read(i, *index) if _inside(index, at.operands[i].array.shape) else 0.0
        _charge(at, summed)
        if _inside(target, array.shape):
            previous = array.item(target)
            at.write(term + (0 if isnan(previous) else previous), *target)
    result_axes = {d.names for d in pattern.result if isinstance(d, Axes)}
    if restriction is None or not {(n,) for n in restriction[1:]} <= result_axes:
        _fill_unreached(at)
    if at.kind.orders is not None:
        cheapest = _cheapest([set(_names(d)) for d in pattern.operands], set(pattern.result_names), extents)
        at.tally = tally(cheapest, cheapest) if summed else tally(pointwise=cheapest)


def _fill_unreached(at: At[OpKind]) -> None:
    """Write the zeros of empty sums: fully masked rows, and positions that no index reaches."""
    v = at.result()
    reached = at.written_at.get(v.buffer, set())
    for index in v.index():
        if v.address(index) not in reached:
            at.write(0.0, *index)


def _charge(at: At[OpKind], summed: bool) -> None:
    """Count a multiply-add for an index point, or only the product if nothing is summed."""
    if summed:
        at.tally.matmul += 2
        at.tally.full += 2
    else:
        at.tally.pointwise += 1


def _names(dims: Sequence[Axes | Affine]) -> list[str]:
    return [n for d in dims for n in d.names]


def _cheapest(operands: list[set[str]], result: set[str], extents: Mapping[str, int]) -> int:
    """Return the fewest FLOPs over all pairwise contraction orders."""
    if len(operands) == 1:
        return 0
    costs = []
    for i, j in combinations(range(len(operands)), 2):
        others = [o for n, o in enumerate(operands) if n not in (i, j)]
        axes = operands[i] | operands[j]
        kept_axes = axes & result.union(*others)
        points = sum(1 for _ in _index_points({n: extents[n] for n in sorted(axes)}))
        costs.append(points * (2 if axes - kept_axes else 1) + _cheapest([*others, kept_axes], result, extents))
    return min(costs)


def _flat(pattern: Pattern, index: Point, shape: Point) -> int:
    """Return an element's flat position along the windowed axes."""
    position = 0
    for d, i, n in zip(pattern.operands[0], index, shape, strict=True):
        position = position * n + i if isinstance(d, Affine) else position
    return position


def _shares(kind: PoolingBase, extents: Mapping[str, int], shape: Point) -> dict[Point, int]:
    """Return the number of elements in each window's mean."""
    counts: dict[Point, int] = {}
    for point in _index_points(extents):
        index = tuple(_position(d, point, extents) for d in kind.pattern.operands[0])
        target = tuple(_position(d, point, extents) for d in kind.pattern.result)
        counts[target] = counts.get(target, 0) + (not kind.exclude_padding or _inside(index, shape))
    return counts


@reference_semantics(PoolBackward)
def _pool_backward(at: At[PoolBackward]) -> None:
    """Route each window's gradient to its maximum, or spread it evenly over the window."""
    pattern, extents, largest = at.kind.pattern, at.of(at.kind.extents), at.kind.operation == "max"
    gradient, window = at.result().array, prod(n for name, n in extents.items() if name not in pattern.result_names)
    gradient[...] = 0
    shares = _shares(at.kind, extents, gradient.shape)
    slid = {n: extents.pop(n) for n in pattern.result_names}
    for start in _index_points(slid):
        window_index = tuple(_position(d, start, slid) for d in pattern.result)
        share = at.read(0, *window_index) / (1 if largest else shares[window_index])
        argmax = at.read(2, *window_index) if largest else None
        at.tally.pointwise += 1 if largest else window
        for point in _index_points(extents):
            index = tuple(_position(d, start | point, slid | extents) for d in pattern.operands[0])
            if _inside(index, gradient.shape) and (not largest or argmax == _flat(pattern, index, gradient.shape)):
                at.write(gradient[index] + share, *index)
    _fill_unreached(at)


@reference_semantics(Pool)
def _pool(at: At[Pool]) -> None:
    pattern, extents = at.kind.pattern, at.of(at.kind.extents)
    pooled, shape = at.result().array, at.operands[0].array.shape
    largest, shares = at.kind.operation == "max", _shares(at.kind, extents, shape)
    for point in _index_points(extents):
        index = tuple(_position(d, point, extents) for d in pattern.operands[0])
        target = tuple(_position(d, point, extents) for d in pattern.result)
        x = at.read(0, *index) if _inside(index, shape) else (-np.inf if largest else 0.0)
        previous = pooled[target]
        if at.kind.indices and (np.isnan(previous) or x > previous):
            at.write(_flat(pattern, index, shape), *target, to=1)
        updated = (
            (x if np.isnan(previous) else max(previous, x))
            if largest
            else x / shares[target] + (0 if np.isnan(previous) else previous)
        )
        at.write(updated, *target)
        at.tally.pointwise += 1


# -- elementwise -------------------------------------------------------------------------------------------------------


def _aligned(index: Point, shape: Point) -> Point:
    """Broadcast: return the operand index for an index point of the result."""
    tail = index[len(index) - len(shape) :]
    return tuple(0 if n == 1 else i for i, n in zip(tail, shape, strict=True))


def _common_points(at: At[OpKind], result: Value) -> Iterator[Point]:
    """Yield the index points of the result at which every operand holds a value."""
    partial = [v for v in at.operands if not v.whole]
    for index in result.index():
        if all(v.holds(_aligned(index, v.array.shape)) for v in partial):
            yield index


def _elementwise_layout(at: At[OpKind]) -> Any:
    """Let NumPy choose the layout of an elementwise result.

    If operands differ in axis order, NumPy prefers C order. Torch, and this library, take the order of the first.
    """
    arrays = [v.array for v in at.operands]
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    unbroadcast = [a for a in arrays if a.shape == shape and 0 not in a.strides]
    if unbroadcast and (unbroadcast[0] is arrays[0] or len({np.empty_like(a).strides for a in unbroadcast}) > 1):
        arrays = unbroadcast[:1]
    flags: Any = [["readonly"]] * len(arrays) + [["writeonly", "allocate"]]
    return np.nditer([*arrays, None], op_flags=flags, order="K").operands[-1]


def scalars(at: At[Pointwise]) -> tuple[Any, ...]:
    """Return the scalar arguments, None for tensors."""
    number = float if at.kind.numbers == "float" else lambda n: n
    return tuple(n if n is None else number(n) for n in at.of(at.kind.scalars) or (None,) * len(at.operands))


@reference_semantics(Pointwise)
def _pointwise(at: At[Pointwise]) -> None:
    name = at.kind.function.name
    if at.kind.overwrites():
        at.made[0] = at.operands[0]
    if name in ("causal_mask", "causal_mask_backward"):
        _mask(at, 0.0 if name.endswith("backward") else -np.inf)
        return
    if name not in FUNCTIONS:
        raise UnsupportedError(
            f"function {name!r} has no reference semantics, expected one from costgraph.testing.function"
        )
    result = at.result(like=_elementwise_layout(at))
    template = scalars(at)
    for index in _common_points(at, result):
        arguments, operands = [], iter(enumerate(at.operands))
        for scalar in template:
            if scalar is None:
                i, v = next(operands)
                arguments.append(at.number(i, *_aligned(index, v.array.shape)))
            else:
                arguments.append(Number(scalar, at.tally))
        at.write(FUNCTIONS[name](*arguments), *index)


def _mask(at: At[Pointwise], hidden: float) -> None:
    domain = at.kind.masked
    result = at.result(like=_elementwise_layout(at))
    visible = None if domain is None else at.sizes.pairs(domain, *result.array.shape[-2:])
    backward = hidden == 0  # gradients are zero outside the domain
    for index in list(result.index() if backward else _common_points(at, result)):
        x = at.number(0, *index) if at.operands[0].holds(index) else Number(hidden, at.tally)
        at.write(x.once(x.value if visible is None or visible[index[-2:]] else hidden), *index)


@reference_semantics(Dropout)
def _dropout(at: At[Dropout]) -> None:
    p = at.kind.p
    like = _elementwise_layout(at)
    result, _ = at.result(0, like), at.result(1, like)
    draw = np.random.default_rng(0)
    for index in _common_points(at, result):
        x = at.number(0, *index)
        keep = float(draw.random() >= p)
        at.write(x * keep * (1 / (1 - p)), *index)
        at.write(keep, *index, to=1)


_STEPS: dict[str, tuple[float, Callable[[Any, Any], Any]]] = {
    "sum": (0.0, lambda a, x: a + x),
    "mean": (0.0, lambda a, x: a + x),
    "max": (-np.inf, max),
    "min": (np.inf, min),
    "prod": (1.0, lambda a, x: a * x),
    "any": (0.0, lambda a, x: float(bool(a) or bool(x))),
    "all": (1.0, lambda a, x: float(bool(a) and bool(x))),
}


@reference_semantics(Reduce)
def _reduce(at: At[Reduce]) -> None:
    pattern, operation = at.kind.pattern, at.kind.operation
    names = [d.names[0] if d.names else None for d in pattern.operands[0]]
    places = [names.index(d.names[0]) if d.names else None for d in pattern.result]
    reduced_axes = [i for i in range(len(names)) if i not in places]
    rows: dict[Point, dict[Point, Any]] = {}
    for index in at.operands[0].points():
        target = tuple(0 if p is None else index[p] for p in places)
        rows.setdefault(target, {})[tuple(index[i] for i in reduced_axes)] = at.read(0, *index)
        at.tally.pointwise += 1  # the division of a mean is fused with its last addition
    for target in at.result().index():
        # fully masked rows have a result too
        if target in rows or at.op.results[0].domain is None:
            at.write(_reduced(operation, rows.get(target, {})), *target)


def _reduced(operation: str, elements: dict[Point, Any]) -> Any:
    """Reduce one row, given by position; argmax and argmin return a position in the row."""
    if operation in ("argmax", "argmin"):
        return max(elements, key=lambda i: elements[i] * (1 if operation == "argmax" else -1), default=(0,))[0]
    start, step = _STEPS[operation]
    for x in elements.values():
        start = step(start, x)
    return start / len(elements) if operation == "mean" and elements else start


# -- data movement -----------------------------------------------------------------------------------------------------


@reference_semantics(Rearrange)
def _rearrange(at: At[Rearrange]) -> None:
    """Permute and reshape axes; copy elementwise if NumPy cannot make a view."""
    split, order, merged = at.of(at.kind.split), at.kind.order, at.of(at.kind.merged)

    def moved(array: Any) -> Any:
        return array.reshape(split).transpose(order).reshape(merged)

    result, v = at.view(moved, copy=at.kind.copy), at.operands[0]
    if result.buffer is v.buffer:
        return
    source_index = np.empty(v.array.shape, dtype=object)
    for index in v.index():
        source_index[index] = index
    source_index = moved(source_index)
    for index in result.index():
        if v.holds(source_index[index]):
            at.write(at.read(0, *source_index[index]), *index)


@reference_semantics(Slice)
def _slice(at: At[Slice]) -> None:
    axis, start, size, step = at.kind.axis, at.of(at.kind.start), at.of(at.kind.size), at.kind.step
    array = at.operands[0].array
    if not 0 <= start <= start + max(size - 1, 0) * step < array.shape[axis] + (not size):
        raise GraphError(f"slice {at.op.name!r} of {array.shape}: {size} from {start} by {step} is out of bounds")
    # empty if a loop has no iterations left between its first and its last
    key = (slice(None),) * axis + (slice(start, start + (size - 1) * step + 1 if size else start, step),)
    at.view(lambda array: array[key])


@reference_semantics(Expand)
def _expand(at: At[Expand]) -> None:
    kept_axes, sizes, domain = at.kind.kept, at.of(at.kind.sizes), at.kind.domain
    places = [k for k in kept_axes if k is not None]
    index = tuple(None if k is None else slice(None) for k in kept_axes)

    def repeated(array: Any) -> Any:
        # a broadcast axis of size 1 is not a kept axis
        array = np.squeeze(array, tuple(i for i in range(array.ndim) if i not in places))
        array = array.transpose([sorted(places).index(k) for k in places])[index]
        # unlike `np.broadcast_to`, return a writable array: an op in place may write if only axes of size 1 are new
        strides = [0 if n == 1 else s for n, s in zip(array.shape, array.strides, strict=True)]
        return np.lib.stride_tricks.as_strided(array, sizes, strides)

    result = at.view(repeated)
    if domain is not None:  # gradient of a restricted tensor
        at.made[0] = Value(result.array, result.buffer, at.sizes.seen(domain, sizes))


@reference_semantics(Concat)
def _concat(at: At[Concat]) -> None:
    axis, stacked, offset = at.kind.axis, at.kind.stacked, 0
    for i, v in enumerate(at.operands):
        for index in v.points():
            at.write(
                at.read(i, *index),
                *index[:axis],
                offset + (0 if stacked else index[axis]),
                *index[axis + 1 - stacked :],
            )
        offset += 1 if stacked else v.array.shape[axis]


@reference_semantics(Transfer)
def _transfer(at: At[Transfer]) -> None:
    if at.kind.into:
        at.made[0] = at.operands[0]
    for index in at.operands[-1].points():
        at.write(at.read(len(at.operands) - 1, *index), *index)


@reference_semantics(Arange)
def _arange(at: At[Arange]) -> None:
    for i in range(at.of(at.kind.size)):
        at.write(at.of(at.kind.start) + (-i if at.kind.reverse else i), i)


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass
class Event:
    """One op execution."""

    op: str
    """op name, with the iteration of each enclosing loop"""
    made: list[Buffer]
    """buffers that it allocated"""
    touched: list[Buffer]
    """buffers that it accessed, including the allocated ones"""
    workspace: Any = 0
    """workspace in bytes"""


def peak_of(events: Sequence[Event], throughout: Iterable[Buffer], outputs: Iterable[Buffer]) -> tuple[Any, str]:
    """Return the peak device memory in bytes, and the first op that reaches it (empty if no op ran).

    Buffers in `throughout` are live all the time. Buffers in `outputs` are live from their allocation to the end.
    """
    last_use: dict[Buffer, int] = {}
    events = [_device_event(event) for event in events]
    throughout = [b for b in throughout if not b.host]
    for i, event in enumerate(events):
        for buffer in (*event.made, *event.touched):
            last_use[buffer] = i
    for buffer in outputs:
        last_use[buffer] = len(events)
    live = set(throughout)
    fixed = set(live)
    peak, peak_op = sum((b.bytes for b in live), start=Fraction(0)), ""
    live_bytes = peak
    for i, event in enumerate(events):
        allocated = set(event.made) - live
        live |= allocated
        live_bytes += sum(b.bytes for b in allocated)
        if live_bytes + event.workspace > peak:
            peak, peak_op = live_bytes + event.workspace, event.op
        freed = {b for b in (*event.made, *event.touched) if b in live and b not in fixed and last_use[b] <= i}
        live -= freed
        live_bytes -= sum(b.bytes for b in freed)
    return peak, peak_op


def _device_event(event: Event) -> Event:
    allocated, touched = ([b for b in buffers if not b.host] for buffers in (event.made, event.touched))
    return Event(event.op, allocated, touched, event.workspace)


# -- interpreter -------------------------------------------------------------------------------------------------------


@dataclass
class Counted:
    """Costs of one op, summed over its iterations."""

    tally: Any = field(default_factory=tally)
    """FLOPs by kind"""
    read: Any = 0
    """bytes read, counting each element once per execution"""
    written: Any = 0
    """bytes written, counting each element once per execution"""
    repeats: bool = False
    """whether an index looked up a row twice; formulas count every lookup"""
    widest: Any = 0
    """bytes read, counting only the widest view of each storage"""
    most: Any = 0
    """bytes read, counting overlapping views of a storage once per operand"""


@dataclass
class Run:
    """Costs and values from one run."""

    sizes: Sizes
    """sizes for formulas"""
    outputs: tuple[Array, ...] = ()
    """graph outputs"""
    gradients: dict[str, Array] = field(default_factory=dict)
    """parameter and input gradients by name, stacked over iterations"""
    ops: dict[str, Counted] = field(default_factory=dict)
    """costs by op name"""
    values: list[tuple[Tensor, Value]] = field(default_factory=list)
    """every computed tensor, in order"""
    events: list[Event] = field(default_factory=list)
    """every execution of an op, with its buffers"""
    buffers: list[Buffer] = field(default_factory=list)
    """buffers that are live throughout"""
    params: int = 0
    """number of parameters"""
    param_bytes: Fraction = Fraction(0)
    """parameter bytes"""
    touched: dict[Buffer, set[int]] = field(default_factory=dict)
    """addresses that any op read in buffers live throughout"""

    def _sum(self, kind: str) -> Any:
        return sum(getattr(c.tally, kind) for c in self.ops.values())

    @property
    def matmul(self) -> Any:
        """Executed contraction FLOPs."""
        return self._sum("matmul")

    @property
    def full(self) -> Any:
        """Contraction FLOPs, ignoring domains."""
        return self._sum("full")

    @property
    def pointwise(self) -> Any:
        """Elementwise FLOPs."""
        return self._sum("pointwise")

    @property
    def transcendental(self) -> Any:
        """FLOPs of exp, log, sqrt and similar functions."""
        return self._sum("transcendental")

    @property
    def flops(self) -> Any:
        """All FLOPs."""
        return self.matmul + self.pointwise + self.transcendental

    @property
    def bytes_moved(self) -> Any:
        """Bytes read and written by all ops, each as its own kernel."""
        return _as_int(sum(c.read + c.written for c in self.ops.values()))

    @property
    def repeats(self) -> bool:
        """Whether an index looked up a row twice; the byte formulas are then upper bounds."""
        return any(c.repeats for c in self.ops.values())

    @cached_property
    def peak(self) -> Any:
        """Peak memory in bytes."""
        return _as_int(peak_of(self.events, self.buffers, self._kept)[0])

    _kept: list[Buffer] = field(default_factory=list)


def run(
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    meanings: Mapping[type[OpKind], Meaning] | None = None,
    **dims: int,
) -> Run:
    """Execute a graph index point by index point, and count its costs.

    Parameters
    ----------
    graph : Graph
        The graph to run.
    inputs : mapping of str to array, optional
        Values of inputs and parameters by name. By default floats are random numbers from 0.5 to 2, and integers are
        0, 1, 2, ...
    seed : int
        Seed of the random numbers.
    meanings : mapping of type to callable, optional
        Semantics of op kinds, by default `costgraph.testing.REFERENCE_SEMANTICS`.
    **dims : int
        A size for every dimension without a default. Small primes reveal most errors.

    Returns
    -------
    Run
        FLOPs by kind, bytes moved, peak memory, parameters and outputs.

    Raises
    ------
    BindingError, UnsupportedError
        If a dimension has no size, or an op kind has no semantics.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph import testing
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.relu(cg.einsum(g.input("x", (B, D)), g.param("w", (D, F)), "b d, d f -> b f")))
    >>> counted = testing.run(g, B=2, D=3, F=5)
    >>> counted.matmul, counted.pointwise, counted.bytes_moved, counted.peak
    (60, 10, 204, 164)
    >>> cg.matmul_flops(g, B=2, D=3, F=5), cg.bytes_moved(g, B=2, D=3, F=5), cg.peak_memory(g, B=2, D=3, F=5)
    (60, 204, 164)
    """
    need_graph("run", graph)
    values = bindings(graph, dims)  # raises if sizes violate the graph's assumptions
    point = {name: int(p.constant) for name, p in values.items() if p.constant is not None}
    open_ = sorted(known_names(graph) - point.keys())
    if open_:
        raise BindingError(f"run of graph {graph.name!r}: {', '.join(open_)} not bound, expected a size for each")
    sources = {t.name for g in graph.bodies() for t in g.tensors if t.producer is None and t.role != "formal"}
    if inputs is not None and not inputs.keys() <= sources:
        odd = sorted(set(inputs) - sources)[0]
        raise GraphError(
            f"run of graph {graph.name!r}: value for {odd!r}, expected one of {', '.join(sorted(sources))}"
        )
    interpreter = _Interpreter(
        Sizes(point), dict(inputs or {}), seed, REFERENCE_SEMANTICS if meanings is None else meanings
    )
    env: dict[Tensor, Any] = {}
    with np.errstate(all="ignore"):
        interpreter.graph(graph, env, "", {}, inside=False)
    result = interpreter.out
    result.outputs = tuple(array_of(env[t]) for t in graph.outputs)
    result.gradients = {t.name: array_of(env[g]) for t, g in graph.gradients.items()}
    result._kept = [v.buffer for t in (*graph.outputs, *graph.gradients.values()) for v in members(env[t])]
    return result


class _Interpreter:
    """Runs a graph, including nested bodies."""

    def __init__(
        self, sizes: Sizes, inputs: dict[str, Any], seed: int, meanings: Mapping[type[OpKind], Meaning]
    ) -> None:
        self.sizes = sizes
        self.inputs = inputs
        self.random = np.random.default_rng(seed)
        self.meanings = meanings
        self.out = Run(sizes)
        self.allocated: list[Buffer] = []  # allocated since the last op
        self.index = [0]  # iterations of the enclosing loops
        self.stacks: dict[Storage, Value] = {}  # preallocated outputs, written in slices

    def graph(
        self, graph: Graph, env: dict[Tensor, Any], where: str, placed: dict[Any, Value], *, inside: bool
    ) -> list[dict[Buffer, set[int]]]:
        """Run a graph's ops and return the addresses that each reads."""
        for t in graph.tensors:
            if t.producer is None and t.role != "formal":
                env[t] = self.source(t, where)
        reads = []
        for op in graph.ops:
            self.out.ops.setdefault(op.name, Counted())
            if (loop := op.loop) is not None:
                self.loop(loop, env, where)
                continue
            if isinstance(op.kind, Undef) or (isinstance(op.kind, Accumulate) and env[op.operands[0]] is None):
                env[op.results[0]] = None if isinstance(op.kind, Undef) else env[op.operands[1]]
                if isinstance(op.kind, Undef) or not op.kind.aliased:
                    continue
                op = taken(op)
            if isinstance(op.kind, KeepAlive) and not isinstance(env[op.operands[0]], Value):  # stacked, or undefined
                env[op.results[0]] = env[op.operands[0]]
                self.out.events.append(Event(op.name + where, self.allocated, [v.buffer for v in flat(op, env) if v]))
                self.allocated = []
                continue
            preallocated = placed | self.slices(op)
            if isinstance(op.kind, Kernel):
                at = self.kernel(op, env, where, preallocated, inside=inside)
            else:
                at = At(op, self.sizes, flat(op, env), preallocated, inside, where)
                if type(op.kind) not in self.meanings:
                    description, expected = (
                        f"op kind {op.kind.name!r} of {op.name!r}",
                        "one from costgraph.testing.reference_semantics",
                    )
                    raise UnsupportedError(f"{description} has no reference semantics, expected {expected}")
                self.meanings[type(op.kind)](at)
            self.finish(at, env, inside=inside)
            if isinstance(op.kind, Empty):
                self.stacks[op.results[0].storage] = env[op.results[0]]
            reads.append(at.read_at)
        return reads

    def slices(self, op: Op) -> dict[Any, Value]:
        """Return where the results of an unrolled iteration lie in stacked outputs."""
        if isinstance(op.kind, Empty):  # allocates a new stack
            return {}
        return {t: stack_slice for t in op.results if (stack_slice := self.stack_slice(t)) is not None}

    def stack_slice(self, t: Tensor) -> Value | None:
        """Return the stack slice that a tensor lies in, or None."""
        stack = self.stacks.get(t.storage)
        if stack is None or t.touched != t.numel:  # broadcast views are never written
            return None
        shape, start = tuple(self.sizes(n) for n in t.sizes), self.sizes(t.offset)
        elements = stack.array.reshape(-1)[start : start + int(np.prod(shape))].reshape(shape)
        return Value(elements, stack.buffer)

    def source(self, t: Tensor, where: str) -> Any:
        """Create an input, parameter, buffer or cache, one per iteration in the body of a Repeat."""
        shape = tuple(self.sizes(n) for n in t.sizes)
        array = self.numbers(t, shape)
        return self.stored(t, array, where, t.storage.pieces)

    def stored(self, t: Tensor, array: Array, where: str, pieces: int) -> Any:
        """Store an array in one buffer, or in one buffer per position of its leading axes."""
        if pieces:
            return [self.stored(t, piece, f"{where}[{i}]", pieces - 1) for i, piece in enumerate(array)]
        steps = [self.sizes(s) for s in t.strides[t.ndim - array.ndim :]]
        order = sorted(range(array.ndim), key=lambda axis: -steps[axis])
        memory = np.array(array.transpose(order), order="C")
        buffer = Buffer(t.name + where, storage_bytes(array.shape, t.dtype), memory, True, host=t.storage.host)
        self.out.buffers.append(buffer)
        if t.role == "param":
            self.out.params += buffer.array.size
            self.out.param_bytes += buffer.bytes
        value = Value(memory.transpose(np.argsort(order)), buffer)
        self.out.values.append((t, value))
        return value

    def numbers(self, t: Tensor, shape: tuple[int, ...]) -> Array:
        """Return a source's given values, or default ones."""
        if t.name in self.inputs:
            array = np.array(self.inputs[t.name], dtype=float)
            if array.shape != shape:
                raise BindingError(f"value of {t.name!r} has shape {array.shape}, expected {shape}")
            return array
        if t.dtype.kind == "float":
            return self.random.uniform(0.5, 2, shape)
        top = 2 if t.dtype.kind == "bool" else max(int(np.prod(shape)), 1)
        return np.arange(int(np.prod(shape)), dtype=float).reshape(shape) % top

    def kernel(
        self, op: Op, env: dict[Tensor, Any], where: str, placed: dict[Any, Value], *, inside: bool
    ) -> At[OpKind]:
        """Run a fused body: intermediates take no memory."""
        body = op.body
        assert body is not None
        at: At[OpKind] = At(op, self.sizes, [env[t] for t in op.operands], placed, inside, where)
        body_env = {**env, **dict(zip(body.formals, at.operands, strict=True))}
        memory = {v.buffer for v in at.operands}
        reads = self.graph(body, body_env, where, {}, inside=True)
        changed = {body.formals[i].storage: at.operands[i] for i in op.kind.overwrites()}
        for i, t in enumerate(body.outputs):
            v = body_env[t]
            if t.storage in changed:
                at.made[i] = changed[t.storage]
            else:
                reads.append({v.buffer: {v.address(index) for index in v.points()}})
            for index in v.points():
                at.write(v.array[index], *index, to=i)
        for read in reads:
            for buffer in memory & read.keys():
                at.read_at.setdefault(buffer, set()).update(read[buffer])
        widest = {b: max((p[b] for p in reads if b in p), key=len) for b in at.read_at}
        at.stated["widest"] = _bytes(widest)
        at.repeats = any(self.out.ops[inner_op.name].repeats for inner_op in body.walk())
        return at

    def loop(self, loop: Loop, env: dict[Tensor, Any], where: str) -> None:
        """Run all iterations of a loop."""
        state, xs, shared = ([env[t] for t in tensors] for tensors in (loop.starts, loop.xs, loop.shared))
        stacks = []
        for t in loop.stacks:
            stack = self.stack_slice(t)
            if stack is None:
                shape = tuple(self.sizes(n) for n in t.sizes)
                buffer = Buffer(t.name + where, storage_bytes(shape, t.dtype), np.full(shape, np.nan), held=set())
                buffer.host = t.storage.host
                self.allocated.append(buffer)
                stack = Value(buffer.array, buffer)
            stacks.append(stack)
        count = self.index[-1] if loop.until else self.sizes(loop.count)
        residuals: list[list[Any]] = [[None] * count for _ in loop.pieces]
        formals = (*loop.carries, *loop.slices, *loop.captured)
        for turn in range(count):
            i = count - 1 - turn if loop.reverse else turn
            body_env = {**env, **dict(zip(formals, [*state, *(position_of(v, i) for v in xs), *shared], strict=True))}
            outputs = zip(loop.ys, stacks, strict=True)
            placed = {t.storage: Value(v.array[i, ...], v.buffer) for t, v in outputs}
            self.index.append(i)
            self.graph(loop.body, body_env, f"{where}[{i}]", placed, inside=False)
            self.index.pop()
            state = [body_env[t] for t in loop.nexts]
            for pieces, t in zip(residuals, loop.saved, strict=True):
                pieces[i] = body_env[t]
        bases = (loop.updated_operand(i) for i in range(len(residuals)))
        residual_values = [pieces if x is None else env[x] for pieces, x in zip(residuals, bases, strict=True)]
        env |= dict(zip((*loop.lasts, *loop.stacks, *loop.pieces), [*state, *stacks, *residual_values], strict=True))

    def finish(self, at: At[OpKind], env: dict[Tensor, Any], *, inside: bool) -> None:
        """Add up an op's costs and record its buffers."""
        for i, t in enumerate(at.op.results):
            env[t] = at.result(i)
            self.out.values.append((t, env[t]))
        costs = self.out.ops[at.op.name]
        costs.tally += at.tally
        costs.repeats |= at.repeats
        if inside:
            return
        for buffer, addresses in at.read_at.items():
            if buffer.throughout:
                self.out.touched.setdefault(buffer, set()).update(addresses)
        read = at.stated.get("reads", _bytes(at.read_at))
        costs.read += read
        widest, all_views = _view_bytes(at)
        costs.widest += at.stated.get("widest", widest if "reads" not in at.stated else read)
        costs.most += max(read, all_views) if "reads" not in at.stated else read
        costs.written += at.stated.get("writes", _bytes(at.written_at))
        # operands include undefined tensors and per-iteration lists
        operand_buffers = {v.buffer for operand in at.operands if operand is not None for v in members(operand)}
        allocated = [v.buffer for v in at.made.values() if v.buffer not in operand_buffers]
        touched = [*operand_buffers, *(v.buffer for v in at.made.values())]
        workspace = 0 if at.op.on_host else self.sizes(at.op.workspace)
        self.out.events.append(Event(at.op.name + at.where, self.allocated + allocated, touched, workspace))
        self.allocated = []


def _view_bytes(at: At[OpKind]) -> tuple[Any, Any]:
    """Return the bytes read with only the widest view of each storage, and with all distinct views."""
    views: dict[Buffer, set[frozenset[int]]] = {}
    for i, addresses in at.read_by.items():
        views.setdefault(at.operands[i].buffer, set()).add(frozenset(addresses))
    widest = sum(max(map(len, address_sets)) * buffer.element for buffer, address_sets in views.items())
    return widest, sum(sum(map(len, address_sets)) * buffer.element for buffer, address_sets in views.items())


def _as_int(amount: Any) -> Any:
    """Return an int if the number of bytes is whole."""
    return int(amount) if Fraction(amount).denominator == 1 else amount


def _bytes(addresses: Mapping[Buffer, set[int]]) -> Any:
    return sum(len(offsets) * buffer.element for buffer, offsets in addresses.items())
