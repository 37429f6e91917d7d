"""A graph that grows op by op while hypothesis draws: sizes, tensors to read, and where they may be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple, TypeVar

import sympy
from hypothesis import strategies as st

from ..algebra.polynomial import poly
from ..algebra.symbols import dims
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import CostGraphError
from ..graph.checks import overwritten_by
from ..graph.domain import Domain
from ..graph.graph import Graph, current_graph
from ..graph.op import OpKind
from ..graph.scopes import here as place_now
from ..graph.tensor import Tensor
from ..ops.einsum import einsum
from ..ops.pointwise import pointwise
from .arithmetic import value

__all__ = ["Case", "Sketch"]

T = TypeVar("T")

#: Most elements of a tensor, and most index points of an op, at the point that is drawn.
LARGEST, MOST_POINTS = 72, 700
PRIMES = (2, 3, 5)
SYMBOLS = ("A", "B", "C", "D")
FLOATS = ("fp32", "bf16", "fp16", "fp64")
SMALL = ("fp8_e4m3", "mxfp8", "mxfp6", "nvfp4", "fp4_e2m1")


class Case(NamedTuple):
    """A graph, and a size for each of its dimensions."""

    graph: Graph
    """what was drawn"""
    point: dict[str, int]
    """small primes, and numbers made of them"""


class Sketch:
    """What a sample draws from: sizes, and tensors that may be read.

    Parameters
    ----------
    draw : callable
        hypothesis' own, of a composite strategy.
    graph : Graph
        It has to be open.
    """

    trained = False
    """whether what is drawn is differentiated"""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], graph: Graph) -> None:
        self._draw = draw
        self.graph = graph
        self.pool: list[Tensor] = []
        self.point: dict[str, int] = {name: self.one_of(PRIMES) for name in SYMBOLS}
        self.related = self.chance(5)
        if self.related:  # sizes that divide each other, as the width of a head does that of a model
            graph.assume("C == A*B")
            self.point["C"] = self.point["A"] * self.point["B"]
        self.kinds: Sequence[type[OpKind]] = ()
        """kinds of ops in bodies, all that have a sample where it is empty"""
        self.functions: Sequence[str] = ()
        """elementwise functions, all where it is empty"""
        self.depth = 0
        self.changes = True  # whether ops in place may be drawn
        # whether of tensors that are restricted to a domain none are read, or one wherever it fits; None to read any
        self.restricted: bool | None = None
        self._made = 0

    # -- drawing -------------------------------------------------------------------------------------------------

    def one_of(self, choices: Sequence[T]) -> T:
        """Draw one of several."""
        return self._draw(st.sampled_from(list(choices)))  # type: ignore[no-any-return]  # one of them

    def number(self, low: int, high: int) -> int:
        """Draw a whole number."""
        return int(self._draw(st.integers(low, high)))

    def chance(self, of: int = 2) -> bool:
        """Draw whether something that is rarer than 1 in `of` happens; hypothesis shrinks to no."""
        return self.number(0, of) == of

    def some(self, items: Sequence[T], least: int = 0) -> list[T]:
        """Draw some of several, in their order."""
        kept = [x for x in items if self.chance(1)]
        return kept if len(kept) >= least else list(items[:least])

    def order(self, items: Sequence[T]) -> list[T]:
        """Draw an order."""
        return list(self._draw(st.permutations(list(items))))

    # -- sizes ---------------------------------------------------------------------------------------------------

    def value(self, size: Any) -> int:
        """Return what a size is at the point."""
        found = value(poly(size).expr, self.point)
        assert isinstance(found, Fraction)
        assert found.denominator == 1, f"{size} is {found} at {self.point}"
        return int(found)

    def size(self) -> Any:
        """Draw a size: mostly a symbol, else a number, a product or a sum."""
        a, b = dims(f"{self.one_of(SYMBOLS)} {self.one_of(SYMBOLS)}")
        if self.related and self.chance(3):
            whole, part = dims("C A")
            return whole / part
        return self.one_of([a, b, a, 2, 3, a + 1, a * b, 2 * a, sympy.Integer(1)])

    def shape(self, rank: int | None = None, most: int = LARGEST) -> tuple[Any, ...]:
        """Draw a shape of at most so many elements."""
        out: list[Any] = []
        for _ in range(self.number(0, 3) if rank is None else rank):
            size = self.size()
            if prod(map(self.value, out)) * self.value(size) > most:
                size = sympy.Integer(1)
            out.append(size)
        return tuple(out)

    def elements(self, t: Tensor) -> int:
        """Return how many elements a tensor has at the point."""
        return prod(map(self.value, t.sizes))

    # -- tensors -------------------------------------------------------------------------------------------------

    def fresh(self, shape: Sequence[Any], dtype: str | None = None, role: str | None = None) -> Tensor:
        """Declare an input, a parameter or a buffer."""
        self._made += 1
        role = self.one_of(["input", "param", "buffer"]) if role is None else role
        name = f"{role}{self._made}"
        dtype = self.one_of(SMALL if self.chance(6) else FLOATS) if dtype is None else dtype
        t = getattr(self.graph, role)(name, tuple(shape), dtype)
        self.pool.append(t)
        return t  # type: ignore[no-any-return]  # one of three methods with one result

    def tensor(self, fits: Callable[[Tensor], bool] = lambda t: True, shape: Sequence[Any] | None = None) -> Tensor:
        """Draw a floating tensor that may be read, or declare one of a shape that `fits` takes."""
        if self.restricted:
            found = [t for t in (*self.pool, self.scores()) if t.domain is not None and fits(t)]
            if found:
                return found[-1]
        found = [t for t in self.others() if t.dtype.kind == "float" and fits(t)]
        if found and not self.chance(2):
            return self.one_of(found[-6:])
        return self.fresh(self.shape() if shape is None else shape)

    def others(self, fits: Callable[[Tensor], bool] = lambda t: True) -> list[Tensor]:
        """Return all tensors that may be read and that `fits` takes."""
        return [t for t in self.pool if (self.restricted is not False or t.domain is None) and fits(t)]

    def scores(self) -> Tensor:
        """Make scores of a causal or a windowed attention: a tensor that is restricted to a domain."""
        (window,) = (self.one_of([None, None, 2, dims("W")]),)
        self.point.setdefault("W", self.number(1, 4))
        causal = self.chance(1) or window is None
        queries = self.size()
        keys = queries if not causal or self.chance(1) else self.size()
        domain = Domain(causal, None if window is None else poly(window))
        batch = self.shape(self.one_of([1, 0]), 3)
        q = self.fresh((*batch, queries, 1), "fp32")
        k = self.fresh((keys, 1), self.one_of(["fp32", "bf16"]))
        names = "b " * len(batch)
        order = self.one_of(["s t", "t s"])
        made = einsum(q, k, f"{names}s d, t d -> {names}{order}", domain=domain, over=("s", "t"))
        self.pool.append(made)
        return made

    def drawn(self, sample: Callable[[Sketch], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Draw an op; where a restricted operand means nothing to it, which is an error, again with whole ones."""
        before = self.restricted
        self.restricted = self.chance(2) or None
        try:
            return sample(self)
        except CostGraphError as error:
            if "domain" not in str(error):
                raise
            self.restricted = False
            return sample(self)
        finally:
            self.restricted = before

    def like(self, x: Tensor) -> Tensor:
        """Return another tensor of the shape and the format of one, restricted as that is."""
        return self.fresh(x.shape, x.dtype.name) if x.domain is None else pointwise("neg", x)

    def axis(self, x: Tensor) -> int:
        """Draw an axis, of a restricted tensor mostly none of its domain."""
        free = [i for i in range(x.ndim) if x.domain is None or i not in x.domain[1:]]
        return self.one_of(free if free and not self.chance(3) else range(x.ndim))

    def partner(self, x: Tensor) -> str:
        """Draw a format that has a common one with that of another operand."""
        return self.one_of([x.dtype.name, "fp32", "bf16"])

    def made(self, *tensors: Tensor) -> None:
        """Let tensors be read from now on, and those that an op has just overwritten no more."""
        for t in tensors:
            if t.producer is not None:
                gone = overwritten_by(t.producer)
                self.pool = [p for p in self.pool if p.storage not in gone]
        self.pool += [t for t in tensors if t not in self.pool]

    @contextmanager
    def inside(self, *tensors: Tensor, changes: bool = True) -> Iterator[None]:
        """Draw the body of an op: what is made in it cannot be read outside."""
        before, could = list(self.pool), self.changes
        self.pool += tensors
        self.depth += 1
        self.changes = could and changes
        try:
            yield
        finally:
            self.depth -= 1
            self.changes = could
            self.pool = [t for t in before if t in self.pool]

    def may_change(self, t: Tensor) -> bool:
        """Whether an op may write into a tensor: it is an activation of the graph that is being drawn."""
        here = current_graph(self.graph)
        return self.changes and place_now().graph is here and t.graph is here and t.storage.role == "activation"


def together(a: DType, b: DType) -> bool:
    """Whether two floating formats have a common one: of two small ones neither holds the other."""
    return a == b or (max(a.bits, b.bits) > 8 and a.kind == b.kind == find_dtype("fp32").kind)
