"""What the interpreter computes with: buffers, the arrays that lie in them, and one op at work on index points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import ceil
from operator import mul
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np

from ..algebra.polynomial import Poly
from ..dtypes import DType
from ..errors import GraphError
from ..graph.domain import Domain
from ..graph.op import Op, OpKind
from ..graph.tensor import Tensor
from .arithmetic import Number, tally, value

__all__ = ["RANK", "At", "Buffer", "Sizes", "Value", "array_of", "position_of", "storage_bytes", "whole"]

Array = np.ndarray[Any, Any]
Point = tuple[int, ...]
#: Place on a mesh of the rank that runs, by axis: the first one where it is not said.
RANK: ContextVar[Mapping[str, int]] = ContextVar("costgraph_rank", default=MappingProxyType({}))

K_co = TypeVar("K_co", bound=OpKind, covariant=True)


def storage_bytes(shape: Point, dtype: DType) -> Fraction:
    """Return the bytes of a dense tensor, the scales of its blocks counted one by one."""
    rows = 1
    for n in shape[:-1]:
        rows *= n
    last = shape[-1] if shape else 1
    if shape and dtype.padded != (1, 1):
        rows += -rows % dtype.padded[1]
        last += -last % dtype.padded[0]
    bits = rows * last * dtype.bits
    for scale in dtype.scale:
        if scale.per is None:
            bits += scale.bits
        elif scale.flat:
            bits += ceil(rows * last / scale.per) * scale.bits
        else:
            bits += ceil(rows / scale.rows) * (ceil(last / scale.per) if scale.per else 1) * scale.bits
    return Fraction(bits, 8)


@dataclass(eq=False)
class Buffer:
    """A block of memory."""

    name: str
    """tensor that it was made for, with the iteration"""
    bytes: Fraction
    """bytes it takes"""
    array: Array
    """its elements"""
    throughout: bool = False
    """whether it is there from the start and stays"""
    inside: bool = False
    """whether a fused kernel keeps it to itself, so that it is no memory"""
    host: bool = False
    """whether it is memory of the host"""
    held: set[int] | None = None
    """addresses that have been written, None where there was something everywhere from the start"""

    @property
    def element(self) -> Fraction:
        """Bytes of one element, its share of the scales included."""
        return self.bytes / self.array.size


@dataclass(eq=False)
class Value:
    """A tensor with numbers in it: an array in a buffer."""

    array: Array
    """a NumPy view into the buffer"""
    buffer: Buffer
    """where the elements lie"""
    limit: Array | None = None
    """whether a view that is restricted has an index point, None for all"""

    def __post_init__(self) -> None:
        """Note where the elements lie, which is asked for each of them."""
        data, base = (a.__array_interface__["data"][0] for a in (self.array, self.buffer.array))
        self._start: int = data - base
        self._strides = self.array.strides

    def address(self, index: Point) -> int:
        """Return how many bytes into the buffer NumPy keeps an element."""
        found: int = self._start + sum(map(mul, index, self._strides))
        return found

    @property
    def whole(self) -> bool:
        """Whether there is something at every index point."""
        held = self.buffer.held
        return self.limit is None and (held is None or len(held) == self.buffer.array.size)

    def index(self) -> Iterator[Point]:
        """Yield every index point."""
        return product(*map(range, self.array.shape))

    def points(self) -> Iterator[Point]:
        """Yield the index points that hold anything."""
        return self.index() if self.whole else filter(self.holds, list(self.index()))

    def holds(self, index: Point, address: int | None = None) -> bool:
        """Whether there is anything at an index point: it has been written, and the view does not leave it out."""
        held, limit = self.buffer.held, self.limit
        if held is not None and (self.address(index) if address is None else address) not in held:
            return False
        return limit is None or bool(limit[index])


def array_of(made: Any) -> Array:
    """Return the numbers of a tensor, those of one with a storage for each iteration stacked."""
    if isinstance(made, list):
        return np.stack([array_of(v) for v in made]) if made else np.empty(0)
    array: Array = made.array
    return array


def position_of(v: Any, i: int) -> Any:
    """Return one position along the first axis of a tensor, or the storage of an iteration."""
    if v is None or isinstance(v, list):
        return None if v is None else v[i]
    return Value(v.array[i, ...], v.buffer, None if v.limit is None else v.limit[i, ...])


class Sizes:
    """Numbers for formulas at one point."""

    def __init__(self, point: Mapping[str, int]) -> None:
        self.point = dict(point)
        self._known: dict[Poly, Any] = {}

    def __call__(self, p: Poly) -> Any:
        """Return the value of a formula, an int where it is whole."""
        if p not in self._known:
            found = value(p.expr, self.point)
            self._known[p] = int(found) if isinstance(found, Fraction) and found.denominator == 1 else found
        return self._known[p]

    def of(self, fact: Any) -> Any:
        """Return a fact of an op with numbers put in."""
        if isinstance(fact, Poly):
            return self(fact)
        if isinstance(fact, tuple | list):
            return tuple(self.of(f) for f in fact)
        if isinstance(fact, Mapping):
            return {k: self.of(f) for k, f in fact.items()}
        return fact

    def held(self, t: Tensor) -> Array:
        """Return for each index point of a tensor whether the library says that it holds anything."""
        shape = tuple(self(n) for n in t.sizes)
        return self.seen(t.domain, shape) if t.domain is not None else np.ones(shape, dtype=bool)

    def seen(self, restriction: tuple[Domain, int, int], shape: Point) -> Array:
        """Return for each index point of a shape whether a domain over two of its axes has it."""
        domain, query, key = restriction
        pairs = self.pairs(domain, shape[query], shape[key])
        found = np.empty(shape, dtype=bool)
        for index in np.ndindex(*shape):
            found[index] = pairs[index[query], index[key]]
        return found

    def pairs(self, domain: Domain, queries: int, keys: int) -> Array:
        """Return for each query position of the rank that runs, and each key position, whether it is seen."""
        place, parts = 0, 1
        for axis, n in domain.ranks:
            place, parts = place * self(n) + RANK.get().get(axis, 0), parts * self(n)
        own = np.arange(queries)[:, None] + place * queries + keys - queries * parts
        key, window = np.arange(keys)[None], None if domain.window is None else self(domain.window)
        found: Array = key <= own if domain.causal else np.ones((queries, keys), dtype=bool)
        if window is not None:
            found &= (key > own - window) & (domain.causal | (key < own + window))
        return found


@dataclass
class At(Generic[K_co]):
    """One op at work: what it may read, and what is counted while it does."""

    op: Op
    """the op"""
    sizes: Sizes
    """numbers for its formulas"""
    operands: list[Value]
    """what it reads"""
    placed: dict[Any, Value] = field(default_factory=dict)
    """storages, or tensors, that are there already: slices of the stacks of a scan"""
    inside: bool = False
    """whether a fused kernel runs it"""
    where: str = ""
    """iterations around it"""
    tally: Any = field(default_factory=tally)
    """FLOPs counted"""
    read_at: dict[Buffer, set[int]] = field(default_factory=dict)
    """addresses read"""
    read_by: dict[int, set[int]] = field(default_factory=dict)
    """the same by operand"""
    written_at: dict[Buffer, set[int]] = field(default_factory=dict)
    """addresses written"""
    stated: dict[str, Any] = field(default_factory=dict)
    """bytes read and written of an op that states them"""
    repeats: bool = False
    """whether an index looked up the same row twice, which a formula cannot know"""
    made: dict[int, Value] = field(default_factory=dict)
    """results by place"""

    @property
    def kind(self) -> K_co:
        """The record of the op: its facts in fields."""
        return cast("K_co", self.op.kind)  # what is said of a kind gets ops of that kind alone

    @overload
    def of(self, fact: Poly) -> Any: ...

    @overload
    def of(self, fact: tuple[Any, ...]) -> tuple[Any, ...]: ...

    @overload
    def of(self, fact: Mapping[str, Any]) -> dict[str, Any]: ...

    def of(self, fact: Any) -> Any:
        """Return a fact of the op with numbers put in: `at.of(at.kind.size)`."""
        return self.sizes.of(fact)

    def read(self, i: int, *index: int) -> Any:
        """Read an element of an operand."""
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
        """Read an element of an operand as a number whose arithmetic is counted."""
        return Number(self.read(i, *index), self.tally)

    def result(self, i: int = 0, like: Array | None = None) -> Value:
        """Return a result: a new dense array at the first call, with the axes in the order of another one if given."""
        if i not in self.made:
            self.made[i] = self._new(self.op.results[i], like)
        return self.made[i]

    def _new(self, t: Tensor, like: Array | None) -> Value:
        shape = tuple(self.sizes(n) for n in t.sizes)
        place = self.placed.get(t, self.placed.get(t.storage))
        if place is not None:
            if place.array.shape != shape:
                raise GraphError(f"{t.name!r}: {shape} elements for a slice of {place.array.shape}")
            return Value(place.array, place.buffer)
        # one format for all: it holds every number exactly, and what nobody has written shows as NaN
        array = np.full(shape, np.nan) if like is None else np.full_like(like, np.nan, dtype=float, order="K")
        buffer = Buffer(t.name + self.where, storage_bytes(shape, t.dtype), array, inside=self.inside, held=set())
        buffer.host = t.storage.host
        return Value(array, buffer)

    def view(self, change: Callable[[Array], Array], *, copy: bool = False) -> Value:
        """Return what NumPy makes of the operand as the result: a view, or a new array to be written if it copies."""
        source = self.operands[0]
        array, limit = change(source.array), None if source.limit is None else change(source.limit)
        if np.may_share_memory(array, source.buffer.array) and not copy:
            self.made[0] = Value(array, source.buffer, limit)
        return self.result()

    def write(self, value: Any, *index: int, to: int = 0) -> None:
        """Write an element of a result."""
        v = self.result(to)
        v.array[index] = value.value if isinstance(value, Number) else value
        address = v.address(index)
        self.written_at.setdefault(v.buffer, set()).add(address)
        if v.buffer.held is not None:
            v.buffer.held.add(address)


def whole(function: Callable[[At[Any]], Array], to: int = 0) -> Callable[[At[Any]], None]:
    """Write a whole array into a result, where it holds anything."""

    def run(at: At[OpKind]) -> None:
        found, v = function(at), at.result(to)
        held = at.sizes.held(at.op.results[to])
        v.array[held] = np.broadcast_to(found, v.array.shape)[held]
        if v.buffer.held is not None:
            v.buffer.held.update(v.address(index) for index in map(tuple, np.argwhere(held).tolist()))

    return run
