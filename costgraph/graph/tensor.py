"""Tensors: sizes, number format, strides, and the storage that they are a view of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from fractions import Fraction
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import sympy

from ..algebra.polynomial import ZERO, Poly, poly
from ..dtypes import DType
from .copies import Node
from .strides import Sizes, apart, contiguous, distinct, numel, windows_along

if TYPE_CHECKING:
    from .domain import Domain
    from .graph import Graph
    from .op import Op

__all__ = ["ALIASES", "OPERATORS", "SOURCES", "Storage", "Tensor", "nbytes"]

#: What `+`, `@`, indexing and the like do: filled by `costgraph.ops.operators`, as ops are made of tensors.
OPERATORS: dict[str, Callable[..., Tensor]] = {}

#: What storages of a body's inputs stand for in the iteration that is looked at: a storage and an offset in it.
ALIASES: ContextVar[Mapping[Storage, tuple[Storage, Poly]]] = ContextVar(
    "costgraph_aliases", default=MappingProxyType({})
)

#: Roles of tensors that no op makes; all but a body's own inputs live from the first op to the last.
SOURCES = ("input", "param", "buffer", "cache", "state", "gradient", "formal")


def nbytes(sizes: Sequence[Poly], dtype: DType) -> Poly:
    """Return the bytes that a dense tensor takes, the scales of block formats included.

    Blocks that share a scale run along the innermost axis, which is the last; elements below a byte are packed without
    gaps.
    """
    along, across = dtype.padded
    if dtype.padded != (1, 1) and sizes:
        sizes = (windows_along(numel(sizes[:-1]), 0, across) * across, windows_along(sizes[-1], 0, along) * along)
    count = numel(sizes)
    out = count * (dtype.bits // 8 if dtype.bits % 8 == 0 else dtype.bytes)
    if dtype.block is not None:
        last, rows = sizes[-1] if sizes else poly(1), numel(sizes[:-1])
        for bits, per, high, flat in dtype.shares:
            blocks = windows_along(count if flat else last, 0, per) if per else poly(1)
            shared = poly(1) if flat else rows if high == 1 else windows_along(rows, 0, high)
            out = out + shared * blocks * bits / 8
        out = out + poly(dtype.tensor_bits) / 8
    return out


@cache
def _bytes_of(bits: int) -> Poly:
    return poly(Fraction(bits, 8))


class Storage:
    """A block of memory: what lives and dies. Views share the storage of the tensor that they were made from."""

    __slots__ = ("bytes", "elements", "host", "name", "pieces", "role")

    def __init__(
        self, name: str, sizes: Sizes, dtype: DType, role: str, pieces: int = 0, *, host: bool = False
    ) -> None:
        self.name = name
        """Name of the tensor that it was made for."""
        self.elements = numel(sizes)
        """Elements it holds."""
        self.bytes = numel(sizes[:pieces]) * nbytes(sizes[pieces:], dtype)
        """Bytes it takes: blocks of a format end where a piece does."""
        self.role = role
        """input, param, buffer, cache, state (of an optimizer), formal (a body's own input) or activation."""
        self.pieces = pieces
        """Leading axes whose positions are blocks of their own: one for each iteration of that many loops."""
        self.host = host
        """Whether it is memory of the host, not of the device."""


class Tensor(Node):
    """A tensor node of a graph.

    Tensors are made by `Graph.input`, `Graph.param` and by ops. `+ - * / @`, `-x`, `x.T`, `x.mT` and indexing with
    slices work as they do in NumPy.
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
        sizes: Sizes,
        dtype: DType,
        *,
        role: str,
        strides: Sizes | None = None,
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
        """Index points that hold anything: (Domain, query axis, key axis), None for all."""

    @property
    def role(self) -> str:
        """Role of the storage."""
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
        """Number of index points."""
        return numel(self.sizes)

    @property
    def is_view(self) -> bool:
        """Whether the storage belongs to another tensor."""
        return self.producer is not None and any(t.storage is self.storage for t in self.producer.operands)

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are those of a fresh tensor."""
        fresh = contiguous(self.sizes)
        return all(n == 1 or self.graph.same(s, f) for n, s, f in zip(self.sizes, self.strides, fresh, strict=True))

    @property
    def touched(self) -> Poly:
        """Number of different elements: an expanded axis repeats the same ones."""
        return distinct(self.sizes, self.strides)

    def region(self) -> tuple[object, ...]:
        """Identify the elements that the tensor stands for: equal for views of the same elements."""
        storage, offset = self.storage, self.offset
        for aliases in (ALIASES.get(), self.graph.root.handed):
            while storage in aliases:
                storage, delta = aliases[storage]
                offset = offset + delta
        if self.graph.same(self.touched, storage.elements):
            return (storage,)
        told = self.graph.told
        pieces = frozenset((n, s) for n, s in zip(told(self.sizes), told(self.strides), strict=True) if s and n != 1)
        return (storage, *told((offset,)), pieces)

    def apart(self, other: Tensor) -> bool:
        """Whether it is a view of the storage of another tensor that is known to share no element with it."""
        if self.storage is not other.storage or self.dtype != other.dtype:
            return False
        one, two = ((t.sizes, t.strides, t.offset) for t in (self, other))
        return apart(one, two, self.graph.root.relations)

    def element_bytes(self) -> Poly:
        """Return the bytes moved for each element, scales included."""
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

    __array_ufunc__ = None  # NumPy's operands would otherwise go through their own elements one by one
    __iter__ = None  # indexing would otherwise make it look like an endless sequence

    @property
    def mT(self) -> Tensor:  # noqa: N802  # torch's name
        """View with the last two axes exchanged."""
        return OPERATORS["transpose"](self)

    T = mT

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.sizes))}; {self.dtype.name})"
