"""Hypothesis strategies for sizes, patterns, meshes, op kinds and whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple, TypeVar

import sympy
from hypothesis import strategies as st

from ..algebra.polynomial import ZERO, poly
from ..algebra.symbols import dims
from ..dtypes import DTYPES, DType
from ..dtypes import dtype as find_dtype
from ..errors import CostGraphError, UnsupportedError
from ..ir.graph import (
    BodyKind,
    Domain,
    Graph,
    Mesh,
    OpKind,
    Repeat,
    Tensor,
    apply,
    current_graph,
    known_names,
    overwritten_by,
)
from ..ir.graph import here as place_now
from ..nn.activations import log_softmax, softmax
from ..nn.attention import attention
from ..nn.conv import conv, pool
from ..nn.linear import linear
from ..nn.losses import cross_entropy
from ..nn.norms import layer_norm, rms_norm
from ..notation.pattern import parse_pattern
from ..ops.collectives import COLLECTIVES, Collective, LocalShard, Pack, Unshard, collective
from ..ops.einsum import Einsum, contract, einsum
from ..ops.elementwise import FUNCTIONS, Dropout, Pointwise, cast, dropout, pointwise
from ..ops.fill import Assign, Pad, SliceUpdate, fill
from ..ops.index import Arange, Gather, Scatter, arange
from ..ops.layout import (
    Concat,
    Expand,
    Rearrange,
    Slice,
    concat,
    contiguous_copy,
    expand,
    index,
    rearrange,
    reshape,
    slice_axis,
)
from ..ops.loops import Empty, Kernel, kernel, repeat, scan
from ..ops.opaque import CustomCall, Opaque, Transfer, opaque, transfer
from ..ops.reduce import REDUCTIONS, Pool, Reduce, reduce
from ..ops.registry import KINDS, adding
from ..transforms.shard.fsdp_policy import FullyShard
from ..transforms.shard.shard import mesh
from .arithmetic import value
from .interpreter import Sizes

__all__ = [
    "Named",
    "kind_of",
    "Case",
    "Sketch",
    "DrawnPattern",
    "dtypes",
    "patterns",
    "points",
    "sizes",
    "Spread",
    "spreads",
    "contraction",
    "merged",
    "names_of",
    "STRATEGIES",
    "Sample",
    "strategy",
    "graphs",
    "ops",
    "losses",
]


# -- op kinds ----------------------------------------------------------------------------------------------------------

Named = type[OpKind] | str


def kind_of(place: str, kind: Named) -> type[OpKind]:
    """Return a registered op kind, given as class or name; raise UnsupportedError for others."""
    name = kind if isinstance(kind, str) else kind.name
    registered = KINDS.get(name)
    if registered is None or (registered is not kind and not isinstance(kind, str)):
        raise UnsupportedError(f"{place}: op kind {name!r} is not registered, expected one of {', '.join(KINDS)}")
    return registered


# -- graph builder -----------------------------------------------------------------------------------------------------

T = TypeVar("T")

#: Limits on tensor elements and on index points per op.
LARGEST, MOST_POINTS = 72, 700
PRIMES = (2, 3, 5)
SYMBOLS = ("A", "B", "C", "D")
FLOATS = ("fp32", "bf16", "fp16", "fp64")
SMALL = ("fp8_e4m3", "mxfp8", "mxfp6", "nvfp4", "fp4_e2m1")


class Case(NamedTuple):
    """A graph with a size for each dimension."""

    graph: Graph
    """the drawn graph"""
    point: dict[str, int]
    """small primes and their products"""


class Sketch:
    """Builds a random graph op by op; samples draw sizes and operands from it.

    Parameters
    ----------
    draw : callable
        The `draw` function of a composite strategy.
    graph : Graph
        The open graph to add ops to.
    """

    trained = False
    """whether the graph will be differentiated"""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], graph: Graph) -> None:
        self._draw = draw
        self.graph = graph
        self.pool: list[Tensor] = []
        self.point: dict[str, int] = {name: self.one_of(PRIMES) for name in SYMBOLS}
        self.related = self.chance(5)
        if self.related:  # sizes that divide each other, like head width and model width
            graph.assume("C == A*B")
            self.point["C"] = self.point["A"] * self.point["B"]
        self.kinds: Sequence[type[OpKind]] = ()
        """op kinds drawn in bodies, by default all with a sample"""
        self.functions: Sequence[str] = ()
        """elementwise functions to draw, by default all"""
        self.depth = 0
        self.changes = True  # whether to draw ops in place
        # False: draw no tensors with a domain, True: draw one wherever it fits, None: either
        self.restricted: bool | None = None
        self._made = 0

    # -- drawing -------------------------------------------------------------------------------------------------

    def one_of(self, choices: Sequence[T]) -> T:
        """Draw one item."""
        return self._draw(st.sampled_from(list(choices)))  # type: ignore[no-any-return]  # one of them

    def number(self, low: int, high: int) -> int:
        """Draw an integer."""
        return int(self._draw(st.integers(low, high)))

    def chance(self, of: int = 2) -> bool:
        """Draw True about once in `of + 1`; hypothesis shrinks to False."""
        return self.number(0, of) == of

    def some(self, items: Sequence[T], least: int = 0) -> list[T]:
        """Draw a subsequence."""
        chosen = [x for x in items if self.chance(1)]
        return chosen if len(chosen) >= least else list(items[:least])

    def order(self, items: Sequence[T]) -> list[T]:
        """Draw a permutation."""
        return list(self._draw(st.permutations(list(items))))

    # -- sizes ---------------------------------------------------------------------------------------------------

    def value(self, size: Any) -> int:
        """Return the value of a size at the point."""
        exact = value(poly(size).expr, self.point)
        assert isinstance(exact, Fraction)
        assert exact.denominator == 1, f"{size} is {exact} at {self.point}"
        return int(exact)

    def size(self) -> Any:
        """Draw a size: mostly a symbol, else a number, a product or a sum."""
        a, b = dims(f"{self.one_of(SYMBOLS)} {self.one_of(SYMBOLS)}")
        if self.related and self.chance(3):
            product, factor = dims("C A")
            return product / factor
        return self.one_of([a, b, a, 2, 3, a + 1, a * b, 2 * a, sympy.Integer(1)])

    def shape(self, rank: int | None = None, most: int = LARGEST) -> tuple[Any, ...]:
        """Draw a shape with at most `most` elements."""
        shape: list[Any] = []
        for _ in range(self.number(0, 3) if rank is None else rank):
            size = self.size()
            if prod(map(self.value, shape)) * self.value(size) > most:
                size = sympy.Integer(1)
            shape.append(size)
        return tuple(shape)

    def elements(self, t: Tensor) -> int:
        """Return a tensor's number of elements at the point."""
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
        """Draw a readable floating-point tensor that satisfies `fits`, or declare one."""
        if self.restricted:
            candidates = [t for t in (*self.pool, self.scores()) if t.domain is not None and fits(t)]
            if candidates:
                return candidates[-1]
        candidates = [t for t in self.others() if t.dtype.kind == "float" and fits(t)]
        if candidates and not self.chance(2):
            return self.one_of(candidates[-6:])
        return self.fresh(self.shape() if shape is None else shape)

    def others(self, fits: Callable[[Tensor], bool] = lambda t: True) -> list[Tensor]:
        """Return all readable tensors that satisfy `fits`."""
        return [t for t in self.pool if (self.restricted is not False or t.domain is None) and fits(t)]

    def scores(self) -> Tensor:
        """Compute causal or windowed attention scores, which are restricted to a domain."""
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
        restricted = einsum(q, k, f"{names}s d, t d -> {names}{order}", domain=domain, over=("s", "t"))
        self.pool.append(restricted)
        return restricted

    def drawn(self, sample: Callable[[Sketch], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Draw an op, again with unrestricted operands if it rejects a domain."""
        previous = self.restricted
        self.restricted = self.chance(2) or None
        try:
            return sample(self)
        except CostGraphError as error:
            if "domain" not in str(error):
                raise
            self.restricted = False
            return sample(self)
        finally:
            self.restricted = previous

    def like(self, x: Tensor) -> Tensor:
        """Return another tensor with the same shape, format and domain."""
        return self.fresh(x.shape, x.dtype.name) if x.domain is None else pointwise("neg", x)

    def axis(self, x: Tensor) -> int:
        """Draw an axis, usually outside the domain."""
        unrestricted = [i for i in range(x.ndim) if x.domain is None or i not in x.domain[1:]]
        return self.one_of(unrestricted if unrestricted and not self.chance(3) else range(x.ndim))

    def partner(self, x: Tensor) -> str:
        """Draw a format that promotes with another operand's format."""
        return self.one_of([x.dtype.name, "fp32", "bf16"])

    def made(self, *tensors: Tensor) -> None:
        """Make tensors readable, and overwritten ones unreadable."""
        for t in tensors:
            if t.producer is not None:
                overwritten = overwritten_by(t.producer)
                self.pool = [p for p in self.pool if p.storage not in overwritten]
        self.pool += [t for t in tensors if t not in self.pool]

    @contextmanager
    def inside(self, *tensors: Tensor, changes: bool = True) -> Iterator[None]:
        """Draw a body, whose tensors are not readable outside."""
        pool_before, changes_before = list(self.pool), self.changes
        self.pool += tensors
        self.depth += 1
        self.changes = changes_before and changes
        try:
            yield
        finally:
            self.depth -= 1
            self.changes = changes_before
            self.pool = [t for t in pool_before if t in self.pool]

    def may_change(self, t: Tensor) -> bool:
        """Whether an op may write a tensor in place: it is an activation of the current graph."""
        current = current_graph(self.graph)
        return self.changes and place_now().graph is current and t.graph is current and t.storage.role == "activation"


def together(a: DType, b: DType) -> bool:
    """Whether two floating-point formats promote to a common one, which two small formats do not."""
    return a == b or (max(a.bits, b.bits) > 8 and a.kind == b.kind == find_dtype("fp32").kind)


# -- sizes and patterns ------------------------------------------------------------------------------------------------

_PRIMES = (2, 3, 5, 7)


class DrawnPattern(NamedTuple):
    """A pattern with a size for each axis."""

    text: str
    """such as `b (h k), k d -> b d`"""
    extents: dict[str, int]
    """small primes, or 1"""
    shapes: tuple[tuple[int, ...], ...]
    """operand shapes"""
    result: tuple[int, ...]
    """result shape"""


def sizes(names: Sequence[str] = ("A", "B", "C")) -> st.SearchStrategy[sympy.Expr]:
    """Draw a size: a product of symbols and small integers, or a sum of two.

    Parameters
    ----------
    names : sequence of str
        Symbols to use.

    Returns
    -------
    strategy of sympy.Expr
        Expressions that are positive integers at every point.
    """
    return _sizes(tuple(names))


@st.composite
def _sizes(draw: Callable[[Any], Any], names: Sequence[str]) -> sympy.Expr:
    symbols = [dims(n) for n in names]
    factors = draw(st.lists(st.sampled_from(symbols), max_size=3))
    expr = sympy.Mul(draw(st.sampled_from([1, 1, 2, 3])), *factors)
    return expr + draw(st.sampled_from([0, 0, 1, *symbols]))


def points(names: Sequence[str]) -> st.SearchStrategy[dict[str, int]]:
    """Draw a small prime for each name.

    Parameters
    ----------
    names : sequence of str
        Symbols.

    Returns
    -------
    strategy of dict
        Primes by name.
    """
    return st.fixed_dictionaries({n: st.sampled_from(_PRIMES) for n in names})


def dtypes(kind: str | None = None) -> st.SearchStrategy[DType]:
    """Draw a data type.

    Parameters
    ----------
    kind : str, optional
        "float", "int" or "bool"; any by default.

    Returns
    -------
    strategy of DType
        One of `costgraph.DTYPES`.
    """
    return st.sampled_from([d for d in DTYPES.values() if kind in (None, d.kind)])


def patterns(operands: int = 1) -> st.SearchStrategy[DrawnPattern]:
    """Draw a pattern: a rearrangement for one operand, a contraction for several.

    Parameters
    ----------
    operands : int
        Number of operands.

    Returns
    -------
    strategy of DrawnPattern
        A pattern text with matching sizes and shapes.
    """
    return _patterns(operands)


@st.composite
def _patterns(draw: Callable[[Any], Any], operands: int) -> DrawnPattern:
    letters = draw(st.lists(st.sampled_from("abhkst"), min_size=1, max_size=5))
    names = [f"{letter}{i}" for i, letter in enumerate(letters)]
    extents = {n: draw(st.sampled_from([1, 2, 2, 3, 5])) for n in names}
    operand_axes = [list(names)] if operands == 1 else [draw(_subset(names)) for _ in range(operands)]
    all_axes = list(dict.fromkeys(n for axes in operand_axes for n in axes))
    result_axes = draw(st.permutations(all_axes if operands == 1 else draw(_subset(all_axes))))
    sides = [draw(_bracketed(draw(st.permutations(axes)))) for axes in (*operand_axes, result_axes)]
    texts = [" ".join(f"({' '.join(g)})" if len(g) != 1 else g[0] for g in side) for side in sides]
    shapes = [tuple(prod(extents[n] for n in g) for g in side) for side in sides]
    text = f"{', '.join(texts[:-1])} -> {texts[-1]}"
    return DrawnPattern(text, {n: extents[n] for n in all_axes}, tuple(shapes[:-1]), shapes[-1])


def _subset(names: Sequence[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(list(names)), unique=True) if names else st.just([])


@st.composite
def _bracketed(draw: Callable[[Any], Any], names: Sequence[str]) -> list[list[str]]:
    """Bracket some neighbouring axes, or insert empty brackets (an axis of size 1)."""
    groups: list[list[str]] = []
    for n in names:
        if groups and groups[-1] and draw(st.booleans()):
            groups[-1].append(n)
        else:
            groups += [[n]] if draw(st.integers(0, 5)) else [[], [n]]
    return groups


# -- meshes and placements ---------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """A mesh, and placements of a graph's sources on it."""

    mesh: Mesh
    """degrees are symbols or numbers"""
    degrees: dict[str, int]
    """degrees by axis"""
    sizes: dict[str, int]
    """values of symbolic degrees"""
    placements: dict[str, str]
    """placements by source"""
    gather: FullyShard
    """axes along which parameters are all-gathered, and how"""


def spreads(graph: Graph, point: Mapping[str, int]) -> st.SearchStrategy[Spread]:
    """Draw a mesh with two to six ranks, and a placement for each source.

    Parameters
    ----------
    graph : Graph
        The graph to shard.
    point : mapping of str to int
        A size for every dimension. Axes are only sharded if their size at this point is divisible.

    Returns
    -------
    strategy of Spread
        Arguments for `costgraph.shard`.
    """
    return _spreads(graph, dict(point))


@st.composite
def _spreads(draw: Callable[[Any], Any], graph: Graph, point: dict[str, int]) -> Spread:
    degrees = draw(st.sampled_from([{"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}]))
    symbols = draw(st.booleans())
    named = {axis: f"ranks_{axis}" for axis in degrees}
    sizes, placements = Sizes({**graph.defaults, **point}), {}
    for t in (t for g in graph.bodies() for t in g.tensors if t.producer is None and t.role != "formal"):
        shape = t.sizes[t.storage.pieces :]
        local_sizes = [int(sizes(n)) for n in shape]
        axes = [[f"n{i}"] for i in range(len(shape))]
        for axis, ranks in degrees.items():
            fits = [i for i, n in enumerate(local_sizes) if n % ranks == 0]
            dim = draw(st.sampled_from([None, *fits, *fits]))
            if dim is not None:
                axes[dim].append(axis)
                local_sizes[dim] //= ranks
        placements[t.name] = " ".join(f"({' '.join(names)})" if len(names) > 1 else names[0] for names in axes)
    device_mesh = mesh(**{axis: dims(named[axis]) if symbols else n for axis, n in degrees.items()})
    gathered = tuple(axis for axis in degrees if draw(st.booleans()))
    reshard = draw(st.sampled_from([True, False, *gathered]))
    flags = {name: draw(st.booleans()) for name in ("reshard_root", "prefetch", "by_unit")}
    gather = FullyShard(gathered, reshard_after_forward=reshard, **flags)
    return Spread(
        device_mesh, degrees, {named[a]: n for a, n in degrees.items()} if symbols else {}, placements, gather
    )


# -- contractions ------------------------------------------------------------------------------------------------------


def contraction(s: Sketch) -> Sequence[Tensor]:
    """Draw a contraction."""
    return s.one_of([_product, _product, _product, _windows, _restricted, _convolution, _spread])(s)


def names_of(count: int, first: str = "a") -> list[str]:
    """Return axis names."""
    return [f"{first}{i}" for i in range(count)]


def _product(s: Sketch) -> Sequence[Tensor]:
    """Draw a contraction of two or three operands with shared, permuted, merged and split axes."""
    operands = [s.tensor(lambda t: s.elements(t) <= 30)]
    extents: dict[str, Any] = {}
    patterns = [_pick_names(s, operands[0], extents)]
    for _ in range(s.one_of([1, 1, 1, 2])):
        fits = s.others(lambda t: all(together(t.dtype, o.dtype) for o in operands))
        shared = s.some(list(extents), 0)[:2]
        shape = (*(extents[n] for n in shared), *s.shape(s.number(0, 1), 6))
        narrowest = min(operands, key=lambda o: o.dtype.bits)
        operand = s.one_of(fits) if fits and s.chance(1) else s.fresh(shape, s.partner(narrowest))
        previous = dict(extents)
        pattern = _pick_names(s, operand, extents, shared)
        if prod(map(s.value, extents.values())) > MOST_POINTS:
            extents.clear()
            extents.update(previous)
            continue
        operands.append(operand)
        patterns.append(pattern)
    if len(operands) == 1:
        operands.append(s.fresh((), s.partner(operands[0])))
        patterns.append([])
    result_names = s.some(list(extents))
    while prod(s.value(extents[n]) for n in result_names) > LARGEST:
        result_names.pop()
    result = merged(s, s.order(result_names))
    return [einsum(*operands, f"{', '.join(' '.join(p) for p in patterns)} -> {' '.join(result)}")]


def _pick_names(s: Sketch, t: Tensor, extents: dict[str, Any], shared: Sequence[str] = ()) -> list[str]:
    """Name a tensor's axes, reusing names of equal size or adding new ones."""
    names: list[str] = []
    for size in t.sizes:
        candidates = [n for n, k in extents.items() if poly(k) == size and (n not in names or s.chance(4))]
        preferred = [n for n in candidates if n in shared]
        name = s.one_of(preferred or candidates) if candidates and (preferred or s.chance(1)) else f"a{len(extents)}"
        extents.setdefault(name, size)
        names.append(name)
    return names


def merged(s: Sketch, names: Sequence[str]) -> list[str]:
    """Sometimes merge two neighbouring axes."""
    if len(names) > 1 and s.chance(2):
        position = s.number(0, len(names) - 2)
        return [*names[:position], f"({names[position]} {names[position + 1]})", *names[position + 2 :]]
    return list(names)


def _windows(s: Sketch) -> Sequence[Tensor]:
    """Draw a sliding window along one axis, with an index such as a*2+r*3-1."""
    width, stride, dilation = s.number(1, 4), s.number(1, 3), s.number(1, 3)
    reach = (width - 1) * dilation
    padding = s.number(0, reach)
    batch, length = s.shape(s.number(0, 1), 5), s.size()
    if s.value(length) + 2 * padding - reach < 1:
        length = poly(length).expr + reach
    x = s.fresh((*batch, length), s.one_of(["fp32", "bf16"]))
    if x.ndim == 2 and s.chance(1):
        x = rearrange(rearrange(x, "a b -> b a"), "b a -> a b")
    w = s.fresh((width,), "fp32")
    window_index = "+".join(s.order([f"o*{stride}", f"r*{dilation}"])) + (f"-{padding}" if padding else "")
    names = names_of(len(batch))
    result_names = s.order([*names, "o"]) if s.chance(1) else names
    return [einsum(x, w, f"{' '.join([*names, window_index])}, r -> {' '.join(result_names)}")]


def _convolution(s: Sketch) -> Sequence[Tensor]:
    width, padding = s.number(1, 3), s.number(0, 1)
    groups = s.one_of([1, 1, 2])
    shape = (s.size(), groups * s.number(1, 2), *(s.number(width, width + 2) for _ in range(s.number(1, 2))))
    spread = "h w"[: 2 * len(shape) - 5]
    if s.value(shape[0]) * prod(shape[1:]) > LARGEST:
        shape = (1, *shape[1:])
    x = s.fresh(shape, "fp32", "input")
    y = conv(
        x,
        f"b c {spread} -> b o {spread}",
        window=(width,) * (len(shape) - 2),
        stride=s.number(1, 2),
        padding=min(padding, width),
        groups=groups,
        bias=s.chance(2),
        o=2 * groups,
    )
    return [y]


def _spread(s: Sketch) -> Sequence[Tensor]:
    """Draw the gradient of a window or a diagonal: an affine index or a repeated name in the result."""
    x, w = s.fresh((s.size(), s.size()), "fp32"), s.fresh((s.number(1, 3),), s.one_of(["fp32", "bf16"]))
    extents = dict(zip("nor", (*x.sizes, *w.sizes), strict=True))
    stride, dilation, padding, tail = s.number(1, 3), s.number(1, 2), s.number(0, 2), s.number(0, 2)
    padded = x.sizes[1] * stride + w.sizes[0] * dilation + tail
    index = f"o*{stride}+r*{dilation}" + (f"-{padding}" if padding else "")
    text, sizes = s.one_of([
        (f"n o, r -> n {index}", (x.sizes[0], padded)), (f"n o, r -> {index}", (padded,)),
        ("n o, r -> n n o", (x.sizes[0], *x.sizes)),
        (f"n o, r -> (n r) o*{stride + 1}", (x.sizes[0] * w.sizes[0], x.sizes[1] * (stride + 1) + tail)),
    ])  # fmt: skip
    kind = Einsum(pattern=parse_pattern(text, scattered=True), extents=extents, dtype=x.dtype, sizes=sizes)
    return [contract([x, w], kind)]


def _restricted(s: Sketch) -> Sequence[Tensor]:
    """Draw causal or windowed attention scores and their consumers."""
    scores = s.scores()
    tensors = [scores]
    if s.chance(1):
        tensors.append(pointwise(s.one_of(["exp", "gelu", "square"]), tensors[-1]))
    if s.chance(1):
        assert scores.domain is not None
        names = names_of(scores.ndim)
        key = names[scores.domain[2]]
        v = s.fresh((scores.shape[scores.domain[2]], 2), "fp32")
        tensors.append(
            einsum(tensors[-1], v, f"{' '.join(names)}, {key} d -> {' '.join(n for n in names if n != key)} d")
        )
    elif s.chance(1):
        tensors.append(
            reduce(tensors[-1], s.one_of(["... a b -> ... a", "... a b -> ... b"]), s.one_of(["sum", "max"]))
        )
    return tensors


# -- samples -----------------------------------------------------------------------------------------------------------

Sample = Callable[[Sketch], Sequence[Tensor]]

#: Sample of each op kind.
STRATEGIES: dict[type[OpKind], Sample] = {}


def strategy(kind: type[OpKind]) -> Callable[[Sample], Sample]:
    """Define how to draw an op of a kind, for checks on random graphs.

    Parameters
    ----------
    kind : subclass of OpKind
        The op kind.

    Returns
    -------
    callable
        Decorator of a function that takes a `Sketch`, adds one op to the open graph and returns its readable results.

    Raises
    ------
    GraphError
        If the kind already has a strategy.
    """
    return adding(STRATEGIES, "a strategy", kind)


# -- contractions: samples ---------------------------------------------------------------------------------------------


strategy(Einsum)(contraction)


@strategy(Pool)
def _pool(s: Sketch) -> Sequence[Tensor]:
    width = s.number(1, 3)
    x = s.tensor(lambda t: t.ndim >= 1 and s.value(t.sizes[-1]) >= width, (*s.shape(1, 6), s.number(width, 5)))
    operation = s.one_of(["max", "mean"])
    padding = s.number(0, width // 2)
    pooled = pool(x, operation, window=(width,), stride=s.number(1, 3), padding=padding)
    maker = pooled.producer
    if maker is not None and operation == "mean" and padding and width % 2:
        assert isinstance(maker.kind, Pool)
        return apply(replace(maker.kind, exclude_padding=True), maker.operands, "mean_pool")
    if operation == "mean" or maker is None or s.chance(1):
        return [pooled]
    assert isinstance(maker.kind, Pool)
    return apply(replace(maker.kind, indices=True), maker.operands, "max_pool")[:1]


# -- elementwise -------------------------------------------------------------------------------------------------------

_GENERIC_FUNCTIONS = sorted(name for name, f in FUNCTIONS.items() if name not in ("cast", "where", "masked_fill"))


@strategy(Pointwise)
def _pointwise(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor()
    if s.chance(6):
        return [cast(x, s.one_of([n for n in ("fp32", "bf16", "fp64", "int64") if n != x.dtype.name]))]
    if s.chance(6):
        mask = s.fresh(x.shape, "bool")
        return [pointwise("masked_fill", x, mask) if s.chance(1) else pointwise("where", mask, x, 0.0)]
    function = FUNCTIONS[s.one_of(s.functions or _GENERIC_FUNCTIONS)]
    if function.name.startswith("causal_mask") and x.ndim < 2:
        function = FUNCTIONS["relu"]
    operands: list[Any] = [x]
    for _ in range(function.arity - 1):
        operands.append(s.one_of([2, 0.5, -1.5]) if s.chance(2) else _second_operand(s, x))
    tensors = [t for t in operands if isinstance(t, Tensor)]
    changes = s.may_change(x) and function.result == "same" and x.touched == x.numel
    if changes and s.chance(1) and all(t.dtype == x.dtype and t.sizes == x.sizes for t in tensors):
        return [pointwise(function, *operands, inplace=True)]
    return [pointwise(function, *s.order(operands))]


def _second_operand(s: Sketch, x: Tensor) -> Tensor:
    """Draw a second operand with the same shape or a broadcastable one."""
    candidates = s.others(lambda t: t.sizes == x.sizes and together(t.dtype, x.dtype))
    if candidates and s.chance(1):
        return s.one_of(candidates)
    if s.chance(6) and 3 * s.elements(x) <= LARGEST:
        return s.fresh((s.number(1, 3), *x.shape), s.partner(x))  # broadcast x itself
    shape = [n if s.chance(2) else 1 for n in x.shape[s.number(0, x.ndim) :]]
    return s.fresh(shape if s.chance(1) else x.shape, s.partner(x))


@strategy(Dropout)
def _dropout(s: Sketch) -> Sequence[Tensor]:
    return [dropout(s.tensor(), s.one_of([0.1, 0.5]), mask=s.one_of(["bool", "fp32"]))]


@strategy(Reduce)
def _reduce(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1, s.shape(s.number(1, 3)))
    names = names_of(x.ndim)
    reduced = s.some(names, 1)
    result_names = s.order([n for n in names if n not in reduced])
    if s.chance(1):
        result_names.insert(s.number(0, len(result_names)), "1")
    operation = s.one_of([r for r in REDUCTIONS if len(reduced) == 1 or not r.startswith("arg")])
    return [reduce(x, f"{' '.join(names)} -> {' '.join(result_names)}", operation)]


# -- data movement -----------------------------------------------------------------------------------------------------


@strategy(Rearrange)
def _rearrange(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1, s.shape(s.number(1, 3)))
    if s.chance(4):
        return [contiguous_copy(x)]
    if s.chance(4):
        return [reshape(x, s.one_of([(x.numel,), (*x.sizes, 1), (1, *x.sizes), x.sizes]))]
    operand_names, result_names, extents = [], [], {}
    for i, size in enumerate(x.sizes):
        factor = next((f for f in (2, 3, *dims("A B C D")) if _divides(f, size)), None)
        if factor is None or s.chance(1):
            operand_names.append(f"a{i}")
            result_names.append(f"a{i}")
        else:
            operand_names.append(f"(a{i} b{i})")
            result_names += [f"a{i}", f"b{i}"]
            extents[f"b{i}"] = factor
    result_names = merged(s, s.order(result_names) if s.chance(1) else result_names)
    return [rearrange(x, f"{' '.join(operand_names)} -> {' '.join(result_names)}", **extents)]


def _divides(factor: Any, size: Any) -> bool:
    quotient = poly(size) / poly(factor)
    integral = all(isinstance(c, int) and all(e > 0 for _, e in m) for m, c in quotient.terms.items())
    return integral and quotient != 1


@strategy(Slice)
def _slice(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1, s.shape(s.number(1, 3)))
    axis = s.axis(x)
    length = s.value(x.sizes[axis])
    if s.chance(2):
        return [index(x, (slice(None),) * axis + (s.one_of([0, -1, slice(None, None, 2), None, slice(1)]),))]
    if s.chance(1) and x.sizes[axis].constant is None and length > 2:  # a symbolic size of 1 changes the layout
        return [slice_axis(x, axis, s.number(0, 1), x.sizes[axis] - 1)]
    start = s.number(0, length - 1)
    step = s.number(1, 2)
    return [slice_axis(x, axis, start, s.number(1, (length - 1 - start) // step + 1), step)]


@strategy(Expand)
def _expand(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim <= 2 and s.elements(t) <= 24, s.shape(s.number(0, 2), 12))
    names = names_of(x.ndim)
    repeats = s.one_of([2, 3, *dims("A B")])
    position = s.number(0, x.ndim)
    extents = {"n": repeats} | {n: repeats for n, size in zip(names, x.sizes, strict=True) if size == 1 and s.chance(1)}
    if s.elements(x) * s.value(repeats) ** len(extents) > LARGEST:
        extents = {"n": 1}
    return [expand(x, f"{' '.join(names)} -> {' '.join([*names[:position], 'n', *names[position:]])}", **extents)]


@strategy(Concat)
def _concat(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1 and s.elements(t) <= 24, s.shape(s.number(1, 3), 24))
    axis = s.axis(x)
    candidates = s.others(lambda t: t.dtype == x.dtype and t.sizes == x.sizes)
    shape = (*x.shape[:axis], s.one_of([1, 2, dims("A")]), *x.shape[axis + 1 :])
    second = s.like(x) if x.domain is not None else s.fresh(shape, x.dtype.name)
    operands = [x, s.one_of(candidates) if candidates and s.chance(1) else second]
    return [concat(s.order(operands), axis)]


@strategy(Transfer)
def _transfer(s: Sketch) -> Sequence[Tensor]:
    return [transfer(s.tensor())]


@strategy(Empty)
def _empty(s: Sketch) -> Sequence[Tensor]:
    apply(Empty(sizes=tuple(map(poly, s.shape())), dtype=s.fresh(()).dtype), [], "empty")
    return []  # uninitialized: not readable


# -- gather and scatter ------------------------------------------------------------------------------------------------


def _ids(s: Sketch, rows: int, *lead: Any) -> Tensor:
    """Draw indices 0, 1, 2, ..., distinct if there are enough rows."""
    fitting = [n for n in (2, 3, *dims("A B")) if s.value(n) <= rows]
    shape = (s.one_of(fitting),) if fitting and not s.chance(3) else s.one_of([(1,), (2, 2)])
    return s.fresh((*lead, *shape) if lead else shape, s.one_of(["int64", "int32"]), "input")


def _indexed(s: Sketch) -> tuple[Tensor, list[Tensor], int]:
    """Draw a table, indices, and their number of common leading axes."""
    x = s.tensor(lambda t: t.ndim >= 1 and s.elements(t) <= 36, s.shape(s.number(1, 3), 36))
    batch = s.one_of([0, 0, x.ndim - 1, s.number(0, x.ndim - 1)])
    if not batch:
        ids = _ids(s, s.value(x.sizes[0]))
        return x, [ids, *(s.fresh(ids.shape, "int64", "input") for _ in range(s.one_of([0, 0, x.ndim - 1])))], 0
    return x, [s.fresh((*x.shape[:batch], s.number(1, s.value(x.sizes[batch]))), "int64", "input")], batch


def _padding_idx(s: Sketch, x: Tensor, ids: Sequence[Tensor], batch: int) -> int | None:
    """Draw the row that receives no gradient; finite differences give it one."""
    return None if s.trained or len(ids) > 1 or s.chance(1) else s.number(0, s.value(x.sizes[batch]) - 1)


@strategy(Gather)
def _gather(s: Sketch) -> Sequence[Tensor]:
    x, ids, batch = _indexed(s)
    return apply(Gather(batch=batch, padding_idx=_padding_idx(s, x, ids, batch)), [x, *ids], "gather")


@strategy(Scatter)
def _scatter(s: Sketch) -> Sequence[Tensor]:
    x, ids, batch = _indexed(s)
    updates = s.fresh((*ids[0].shape, *x.shape[batch + len(ids) :]), x.dtype.name)
    changes = s.may_change(x) and x.touched == x.numel and s.chance(1)
    mode = s.one_of(["add", "set", *(["max"] if len(ids) == 1 else [])])
    if s.trained and ((mode == "set" and s.elements(ids[0]) > s.value(x.sizes[0])) or (mode == "max" and changes)):
        mode = "add"  # autograd has no gradient for rows set twice, nor for a maximum in place
    padding_idx = _padding_idx(s, x, ids, batch) if mode == "add" else None
    return apply(
        Scatter(mode=mode, inplace=changes, batch=batch, padding_idx=padding_idx), [x, *ids, updates], "scatter"
    )


@strategy(Arange)
def _arange(s: Sketch) -> Sequence[Tensor]:
    integers = arange(s.size(), s.one_of(["int64", "int32", "fp32"]))
    return [integers if integers.dtype.kind == "float" else cast(integers, "fp32")]


@strategy(Opaque)
def _opaque(s: Sketch) -> Sequence[Tensor]:
    x, size = s.tensor(), s.size()
    amounts: dict[str, Any] = {} if s.chance(1) else dict.fromkeys(("reads", "writes"), 8 * size)
    amounts["flops"] = s.one_of([0, 5 * size, {"matmul": 2 * size, "transcendental": 3}])
    return [opaque("stated", [x], (size,), workspace=s.one_of([0, 64, 16 * size]), **amounts)]


@strategy(CustomCall)
def _custom_call(s: Sketch) -> Sequence[Tensor]:
    x, n = s.tensor(), poly(s.size())
    kind = CustomCall(
        outputs=(((n,), x.dtype, None, None, ZERO),),
        matmul=n,
        full=2 * n,
        pointwise=n,
        transcendental=n,
        bytes_read=s.one_of([None, (8 * n,)]),
        workspace=poly(8),
    )
    return apply(kind, [x], "relu")


def _dim(s: Sketch, ranks: Any, blocks: int, *others: Any) -> Tensor:
    """Return a tensor with an axis that can be sharded blockwise."""
    return s.fresh((*others, ranks * blocks * s.one_of([1, dims("B")]), *s.shape(1, 4)))


@strategy(Collective)
def _collective(s: Sketch) -> Sequence[Tensor]:
    kind = s.one_of(sorted(COLLECTIVES))
    ranks: Any = s.one_of([2, 3, dims("A")])
    if s.chance(1):
        rows = (ranks * s.one_of([1, dims("B")]), *s.shape(1, 4)) if kind == "reduce_scatter" else None
        x = s.tensor(lambda t: s.elements(t) <= 20, s.shape(1, 20)) if rows is None else s.fresh(rows)
        return [collective(x, kind, ranks)]
    kind = s.one_of(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
    blocks, dim = s.number(1, 2), s.number(0, 1)
    x = _dim(s, ranks, blocks, *[2] * dim)
    source = x.ndim - 1 if kind == "all_to_all" and x.ndim - 1 != dim else None
    full_kind = Collective(
        collective=kind, ranks=poly(ranks), axis="x", dim=dim, blocks=poly(blocks),
        operation=s.one_of(["sum", "mean", "max", "min"]), source=source,
    )  # fmt: skip
    return apply(full_kind, [x], kind)


@strategy(Unshard)
def _unshard(s: Sketch) -> Sequence[Tensor]:
    ranks: Any = s.one_of([2, 3, dims("A")])
    dim = s.number(0, 1)
    shard = apply(LocalShard(ranks=poly(ranks), axis="x", dim=dim), [_dim(s, ranks, 1, *[2] * dim)], "local_shard")
    return apply(Unshard(ranks=poly(ranks), axis="x", dim=dim), shard, "unshard")


@strategy(Pack)
def _pack(s: Sketch) -> Sequence[Tensor]:
    head = s.fresh(s.shape(s.number(1, 2), 6))
    tensors = [head, *(s.fresh(s.shape(s.number(1, 2), 6), head.dtype.name) for _ in range(s.number(0, 2)))]
    room = sum(t.numel.expr for t in tensors)
    return apply(Pack(), [fill((room,), dtype=tensors[0].dtype), *tensors], "pack")


@strategy(LocalShard)
def _local_shard(s: Sketch) -> Sequence[Tensor]:
    ranks: Any = s.one_of([2, 3, dims("A")])
    blocks, dim = s.number(1, 2), s.number(0, 1)
    return apply(
        LocalShard(ranks=poly(ranks), axis="x", dim=dim, blocks=poly(blocks)),
        [_dim(s, ranks, blocks, *[2] * dim)],
        "local_shard",
    )


# -- bodies and whole graphs -------------------------------------------------------------------------------------------

#: Op kinds in fused kernels.
_FUSED = (Einsum, Pointwise, Reduce, Rearrange, Slice, Expand, Concat, Gather, Dropout, Pool)
_MAX_DEPTH = 2


def _grow(s: Sketch, kinds: Sequence[type[OpKind]], low: int, high: int) -> list[Tensor]:
    """Draw some ops and return their results."""
    results: list[Tensor] = []
    for _ in range(s.number(low, high)):
        drawn = s.drawn(STRATEGIES[s.one_of(kinds)])
        s.made(*drawn)
        results += drawn
    return [t for t in results if t in s.pool]


@strategy(Kernel)
def _kernel(s: Sketch) -> Sequence[Tensor]:
    return s.one_of([_drawn_kernel, _layer, _attention])(s)


def _layer(s: Sketch) -> Sequence[Tensor]:
    """Draw a layer that is one kernel."""
    x = s.tensor(lambda t: t.ndim >= 1, s.shape(s.number(1, 3)))
    name = s.one_of(["softmax", "log_softmax", "layer_norm", "rms_norm", "linear"])
    if name == "linear" and x.dtype.bits >= 16:
        return [linear(x, "... i -> ... o", o=2, bias=True)]
    if name.endswith("softmax"):
        return [(softmax if name == "softmax" else log_softmax)(x, s.number(0, x.ndim - 1))]
    small = x.dtype.bits < 16  # norm parameters have the graph's format, which must promote with that of x
    norm = layer_norm if name == "layer_norm" else rms_norm
    return [norm(cast(x, "bf16") if small else x, affine=s.chance(1))]


def _attention(s: Sketch) -> Sequence[Tensor]:
    """Draw fused or eager attention, with grouped-query heads and masks."""
    groups, share = s.number(1, 2), s.number(1, 2)
    queries = s.one_of([2, 3, dims("A")])
    window = s.one_of([None, 2, dims("W")])
    s.point.setdefault("W", s.number(1, 4))
    causal = s.chance(1)
    keys = s.one_of([queries, 5]) if causal or window is None else queries
    q = s.fresh((1, groups * share, queries, 2), "fp32")
    k, v = (s.fresh((1, groups, keys, 2), "fp32") for _ in "kv")
    kernel_ = s.one_of(["flash", "eager"])
    return [attention(q, k, v, causal, window, kernel_, softcap=s.one_of([None, 30.0]), p=s.one_of([0, 0.5]))]


def _drawn_kernel(s: Sketch) -> Sequence[Tensor]:
    s.tensor()
    space = s.one_of([0, 0, 96, 8 * dims("A")])
    with kernel("fused", workspace=space) as body, s.inside(changes=False):
        results: list[Tensor] = []
        while not results:
            results = [t for t in _grow(s, _FUSED, 1, 3) if t.graph is body and t.producer is not None]
    # the kernel needs a consumer outside
    exported = [body.export(t) for t in s.some(results, 1)]
    return [t for t in exported if t.dtype.kind == "float"]


def _count(s: Sketch) -> Any:
    s.point.setdefault("L", s.number(1, 4))
    s.point.setdefault("T", s.number(1, 3))
    return s.one_of([dims("L"), dims("T"), 1, 2, 3])


def _default_kinds() -> tuple[type[OpKind], ...]:
    """Return all kinds with a sample, except `SliceUpdate`, which only traces produce."""
    return tuple(k for k in STRATEGIES if k is not SliceUpdate)


def _kinds(s: Sketch) -> Sequence[type[OpKind]]:
    return [k for k in s.kinds or _default_kinds() if s.depth < _MAX_DEPTH or not issubclass(k, BodyKind)]


def _next_carry(s: Sketch, x: Tensor, candidates: Sequence[Tensor]) -> Tensor:
    """Derive a tensor with a carry's shape and format from a body's results."""
    fits = [t for t in candidates if t.sizes == x.sizes and t.dtype == x.dtype and t.domain is None]
    if fits and s.chance(1):
        return s.one_of(fits)
    floats = [t for t in candidates if t.dtype.kind == "float" and t.dtype.bits >= 16 and t.domain is None]
    if floats and s.chance(1):
        y = floats[-1]
        names = " ".join(f"a{i}" for i in range(y.ndim))
        y = reduce(y, f"{names} -> ", "sum") if y.ndim else y
        return cast(pointwise("add", x, y), x.dtype)
    if x.ndim and s.value(x.sizes[-1]) <= 5 and x.dtype.bits >= 16 and s.chance(1):
        w = s.fresh((x.sizes[-1].expr, x.sizes[-1].expr), x.dtype.name, "param")
        return einsum(x, w, "... i, i j -> ... j")
    return s.one_of([x, pointwise("relu", x), pointwise("neg", x)])


@strategy(Repeat)
def _repeat(s: Sketch) -> Sequence[Tensor]:
    carry_count = s.one_of([1, 1, 2])
    carries = tuple(s.tensor(lambda t: s.elements(t) <= 20, s.shape(s.number(0, 2), 20)) for _ in range(carry_count))
    carries = tuple(t if t.dtype.block is None else cast(t, "bf16") for t in carries)
    count = _count(s)
    stacked = s.chance(1)
    xs = tuple(s.fresh((count, *s.shape(1, 6)), "fp32") for _ in range(s.number(0, 1))) if stacked else ()

    def body(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        with s.inside(*tensors):
            # views of tensors with block scales are costed differently, see docs/deviations.md
            s.pool = [t for t in s.pool if t.dtype.block is None]
            results = _grow(s, _kinds(s), 0, 3)
            # slices of block formats have scales of their own; outputs are never restricted to a domain
            stackable = [
                t for t in results if t.graph is current_graph() and t.dtype.block is None and t.domain is None
            ]
            next_carries = [_next_carry(s, x, results) for x in tensors[: len(carries)]]
        if (
            len(next_carries) == 2
            and next_carries[0].sizes == next_carries[1].sizes
            and next_carries[0].dtype == next_carries[1].dtype
            and s.chance(1)
        ):
            next_carries.reverse()
        return next_carries, s.some(stackable[-2:])

    if not stacked:
        finals = repeat(count, lambda *t: tuple(body(*t)[0]), carries)
        return list(finals)

    def step(carry: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        next_carries, ys = body(*carry, *x)
        return tuple(next_carries), tuple(ys)

    state, ys = scan(count, step, carries, xs)
    return [*_tuple(state), *_tuple(ys)]


def _tuple(tensors: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)


def _finish(s: Sketch) -> Case:
    """Declare outputs: all unread tensors, and some that have consumers."""
    graph = s.graph
    computed = [t for t in s.pool if t.producer is not None]
    unread = [t for t in computed if t in graph and not graph.out_degree(t)]
    for t in dict.fromkeys([*s.some(unread, 1), *s.some(computed[-3:])]):
        graph.output(t)
    if not graph.outputs:
        graph.output(pointwise("relu", s.fresh((2,), "fp32")))
    return Case(graph, {name: s.point[name] for name in sorted(known_names(graph))})


def _case(draw: Callable[[Any], Any], kinds: Sequence[type[OpKind]], must: type[OpKind] | None, max_ops: int) -> Case:
    with Graph("drawn", dtype="fp32") as graph:
        s = Sketch(draw, graph)
        _grow(s, kinds, 0 if must else 1, max_ops)
        if must:
            s.made(*s.drawn(STRATEGIES[must]))
            _grow(s, (Pointwise, Rearrange), 0, 1)
        return _finish(s)


@st.composite
def _drawn(draw: Callable[[Any], Any], kinds: Sequence[type[OpKind]], must: type[OpKind] | None, max_ops: int) -> Case:
    return _case(draw, kinds, must, max_ops)


def ops(kind: Named) -> st.SearchStrategy[Case]:
    """Draw graphs around an op of one kind, with views before it and sometimes a consumer after it.

    Parameters
    ----------
    kind : subclass of OpKind or str
        An op kind with a sample, or its name.

    Returns
    -------
    strategy of Case
        (graph, point): every dimension of the graph has a size in `point`.
    """
    return _drawn((Rearrange, Slice, Expand, Pointwise), kind_of("ops", kind), 2)


def graphs(most: int = 6, kinds: Sequence[Named] = ()) -> st.SearchStrategy[Case]:
    """Draw whole graphs: views, fan-out, ops in place, kernels, nested loops, domains, lookups.

    Parameters
    ----------
    most : int
        Maximum number of ops at the top level.
    kinds : sequence of subclasses of OpKind or str
        Op kinds or names, by default all with a sample except `slice_update`.

    Returns
    -------
    strategy of Case
        (graph, point): every dimension of the graph has a size in `point`.
    """
    return _drawn([kind_of("graphs", k) for k in kinds] or _default_kinds(), None, most)


# -- losses ------------------------------------------------------------------------------------------------------------

#: Differentiable op kinds.
_KINDS: tuple[type[OpKind], ...] = (
    Einsum, Einsum, Pointwise, Pointwise, Pointwise, Reduce, Rearrange, Slice, Expand, Concat, Gather, Scatter, Dropout,
    Pool, Pad, Assign, Kernel, Repeat, Repeat, Transfer,
)  # fmt: skip
#: Elementwise functions defined for both signs and differentiable almost everywhere.
_FUNCTIONS = (
    "add", "sub", "mul", "div", "fma", "lerp", "neg", "abs", "square", "exp", "sin", "cos", "tanh", "erf", "maximum",
    "minimum", "relu", "leaky_relu", "relu2", "sigmoid", "silu", "gelu", "gelu_tanh", "softplus", "elu", "softcap",
    "hardswish", "mish", "copy", "clamp",
)  # fmt: skip
_MIN_BITS = 16


class _Trained(Sketch):
    """Sketch whose floating-point sources mostly require gradients."""

    trained = True

    def fresh(self, shape: Sequence[Any], dtype: str | None = None, role: str | None = None) -> Tensor:
        dtype = self.one_of(["fp32", "fp32", "fp32", "bf16", "fp64"]) if dtype is None else dtype
        if role is None:
            role = self.one_of(["param", "param", "input", "buffer"])
        self._made += 1
        name = f"{role}{self._made}"
        options = {"grad": self.chance(1)} if role == "input" and dtype.startswith(("fp", "bf")) else {}
        t: Tensor = getattr(self.graph, role)(name, tuple(shape), dtype, **options)
        self.pool.append(t)
        return t


def _scalar(s: Sketch, t: Tensor) -> Tensor:
    """Reduce a tensor to a scalar."""
    wide = t if t.dtype.bits > _MIN_BITS else cast(t, "fp32")
    if t.ndim == 2 and t.domain is None and s.value(t.sizes[0]) <= s.value(t.sizes[1]) and s.chance(3):
        return cross_entropy(wide, s.fresh(t.shape[:1], "int64", "input"))
    names = " ".join(f"a{i}" for i in range(t.ndim))
    return reduce(wide, f"{names} -> ", s.one_of(["sum", "mean"])) if t.ndim else wide


def _is_last(t: Tensor) -> bool:
    """Whether a tensor is the final carry of a loop, which needs no consumer."""
    op = t.producer
    return op is not None and op.loop is not None and t in op.loop.lasts


def _loss(s: Sketch) -> Tensor:
    """Sum all unread tensors, and some that have consumers, to a scalar."""
    floats = [t for t in s.pool if t in s.graph and t.dtype.kind == "float" and t.dtype.bits >= _MIN_BITS]
    computed = [t for t in floats if t.producer is not None]
    unread = [t for t in computed if not s.graph.out_degree(t) and not (_is_last(t) and s.chance(1))]
    terms = [_scalar(s, t) for t in dict.fromkeys([*unread, *s.some(computed[-2:])])]
    terms = terms or [_scalar(s, s.fresh((2,), "fp32", "param"))]
    loss = terms[0]
    for term in terms[1:]:
        loss = pointwise("add", loss, term)
    return cast(loss, "fp32") if loss.dtype.name != "fp32" else loss


@st.composite
def _draw_loss_graph(
    draw: Callable[[Any], Any], max_ops: int, kinds: Sequence[type[OpKind]], must: type[OpKind] | None
) -> Case:
    with Graph("drawn", dtype="fp32") as graph:
        s = _Trained(draw, graph)
        s.kinds, s.functions = kinds, [n for n in _FUNCTIONS if n in FUNCTIONS]
        s.fresh(s.shape(s.number(1, 3), 30), "fp32", "param")
        _grow(s, kinds, 0 if must else 1, max_ops)
        if must:
            _grow(s, (must,), 1, 1)
        graph.output(_loss(s))
    return Case(graph, {name: s.point[name] for name in sorted(known_names(graph))})


def losses(most: int = 5, kinds: Sequence[Named] = (), *, around: Named | None = None) -> st.SearchStrategy[Case]:
    """Draw graphs with one scalar output, in which parameters and some inputs require gradients.

    Parameters
    ----------
    most : int
        Maximum number of ops at the top level, without the loss.
    kinds : sequence of subclasses of OpKind or str
        Op kinds or names, by default the differentiable ones: contractions, elementwise functions, reductions, views,
        lookups, windows, kernels and loops, also in place.
    around : subclass of OpKind or str, optional
        An op kind that occurs at least once.

    Returns
    -------
    strategy of Case
        (graph, point): every dimension of the graph has a size in `point`. `costgraph.backward` may still raise, for
        example if an op in place overwrites a residual.
    """
    must = None if around is None else kind_of("losses", around)
    return _draw_loss_graph(most, [kind_of("losses", k) for k in kinds] or _KINDS, must)
