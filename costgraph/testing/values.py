"""What the interpreter computes with: buffers, the arrays that lie in them, and one op at work on index points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import ceil
from typing import Any

import numpy as np

from ..domain import Domain
from ..dtypes import DType
from ..errors import GraphError
from ..op import Op
from ..polynomial import Poly
from ..tensor import Tensor
from .arithmetic import Number, Tally, value

__all__ = ["At", "Buffer", "Sizes", "Value", "sees", "storage_bytes"]

Array = np.ndarray[Any, Any]
Point = tuple[int, ...]


def storage_bytes(shape: Point, dtype: DType) -> Fraction:
    """Return the bytes of a dense tensor, the scales of its blocks counted row by row."""
    rows = 1
    for n in shape[:-1]:
        rows *= n
    last = shape[-1] if shape else 1
    bits = rows * last * dtype.bits
    if dtype.block is not None:
        blocks = ceil(last / dtype.block) if dtype.block else 1
        bits += rows * blocks * dtype.scale_bits + dtype.tensor_bits
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
    domain: tuple[Domain, int, int, int | None] | None = None
    """index points that hold anything: domain, query axis, key axis and window"""

    def address(self, index: Point) -> int:
        """Return how many bytes into the buffer NumPy keeps an element."""
        start: int = self.array.__array_interface__["data"][0] - self.buffer.array.__array_interface__["data"][0]
        return start + sum(i * s for i, s in zip(index, self.array.strides, strict=True))

    def points(self) -> Iterator[Point]:
        """Yield the index points that hold anything."""
        for index in product(*map(range, self.array.shape)):
            if self.holds(index):
                yield index

    def holds(self, index: Point) -> bool:
        """Whether there is anything at an index point."""
        if self.domain is None:
            return True
        domain, query, key, window = self.domain
        shape = self.array.shape
        return sees(domain, window, index[query], index[key], shape[query], shape[key])


def sees(domain: Domain, window: int | None, query: int, key: int, queries: int, keys: int) -> bool:
    """Whether a query position sees a key position, both counted from 0 and aligned at their last ones."""
    own = query + keys - queries
    if domain.causal and key > own:
        return False
    return window is None or (key > own - window and (domain.causal or key < own + window))


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

    def of(self, attribute: Any) -> Any:
        """Return an attribute of an op with numbers put in."""
        if isinstance(attribute, Poly):
            return self(attribute)
        if isinstance(attribute, tuple | list):
            return tuple(self.of(a) for a in attribute)
        if isinstance(attribute, Mapping):
            return {k: self.of(a) for k, a in attribute.items()}
        return attribute

    def domain(self, t: Tensor) -> tuple[Domain, int, int, int | None] | None:
        """Return the restriction of a tensor, its window as a number."""
        if t.domain is None:
            return None
        domain, query, key = t.domain
        return domain, query, key, None if domain.window is None else self(domain.window)


@dataclass
class At:
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
    tally: Tally = field(default_factory=Tally)
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

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the op with numbers put in."""
        return self.sizes.of(self.op.attrs.get(name, default))

    def read(self, i: int, *index: int) -> Any:
        """Read an element of an operand."""
        v = self.operands[i]
        address = v.address(index)
        self.read_at.setdefault(v.buffer, set()).add(address)
        self.read_by.setdefault(i, set()).add(address)
        return v.array[index].item()

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
        domain = self.sizes.domain(t)
        place = self.placed.get(t, self.placed.get(t.storage))
        if place is not None:
            if place.array.shape != shape:
                raise GraphError(f"{t.name!r}: {shape} elements for a slice of {place.array.shape}")
            return Value(place.array, place.buffer, domain)
        # one format for all: it holds every number exactly, and what nobody has written shows as NaN
        array = np.full(shape, np.nan) if like is None else np.full_like(like, np.nan, dtype=float, order="K")
        buffer = Buffer(t.name + self.where, storage_bytes(shape, t.dtype), array, inside=self.inside)
        return Value(array, buffer, domain)

    def view(self, array: Array, i: int = 0) -> Value:
        """Return an array made of operand `i` as the result: a view, or a copy that is counted as one."""
        t, source = self.op.results[0], self.operands[i]
        if np.may_share_memory(array, source.buffer.array) and not self.op.attrs.get("copy"):
            self.made[0] = Value(array, source.buffer, self.sizes.domain(t))
        return self.result()

    def write(self, value: Any, *index: int, to: int = 0) -> None:
        """Write an element of a result."""
        v = self.result(to)
        v.array[index] = value.value if isinstance(value, Number) else value
        self.written_at.setdefault(v.buffer, set()).add(v.address(index))
