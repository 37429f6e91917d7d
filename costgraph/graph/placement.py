"""Where the parts of a tensor lie on a mesh of devices: which axes of the mesh split which of its axes, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from ..algebra.polynomial import ONE, ZERO, Poly
from ..errors import ShapeError
from .strides import Sizes, is_integral, numel

if TYPE_CHECKING:
    from .op import OpKind

__all__ = [
    "Factor",
    "Factors",
    "Held",
    "Mesh",
    "Placement",
    "Sharding",
    "Split",
    "Waiting",
    "agree",
    "blocks",
    "distributed",
    "seen",
    "size_of",
    "tidy",
]

#: A part of an axis of a tensor: a size, or the axis of a mesh whose ranks each have one of as many blocks.
Factor = Poly | str
#: An axis of a tensor as its parts, the slowest first; nothing where no axis of a mesh splits it.
Factors = tuple[Factor, ...]


@dataclass(frozen=True)
class Mesh:
    """Devices in a grid with named axes, the outermost first; made by `costgraph.mesh`."""

    axes: tuple[tuple[str, Poly], ...]
    """Name and number of ranks of each."""
    joint: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names for several neighbouring axes together: what is done along all of them is one collective."""

    def __getitem__(self, axis: str) -> Poly:
        sizes = dict(self.axes)
        return prod((sizes[a] for a in self.parts(axis)), start=ONE)

    def parts(self, axis: str) -> tuple[str, ...]:
        """Return the axes that a name stands for."""
        return dict(self.joint).get(axis, (axis,))

    def together(self, axes: Sequence[str]) -> str | None:
        """Return the name of some axes together, None where they have none."""
        return axes[0] if len(axes) == 1 else next((n for n, parts in self.joint if parts == tuple(axes)), None)

    def beside(self, axis: str) -> frozenset[str]:
        """Return the others that have a name together with an axis."""
        return frozenset(a for _, parts in self.joint if axis in parts for a in parts) - {axis}

    def begins(self, axes: Sequence[str]) -> bool:
        """Whether some axes are the first ones of several that have a name together."""
        return any(parts[: len(axes)] == tuple(axes) for _, parts in self.joint)

    def __iter__(self) -> Iterator[str]:
        return iter(name for name, _ in self.axes)

    def __contains__(self, axis: object) -> bool:
        return any(axis == name for name, _ in (*self.axes, *self.joint))

    @property
    def devices(self) -> Poly:
        """How many devices there are."""
        return prod((n for _, n in self.axes), start=ONE)

    def __str__(self) -> str:
        joint = (f"{name}=({', '.join(parts)})" for name, parts in self.joint)
        return f"mesh({', '.join([*(f'{name}={n}' for name, n in self.axes), *joint])})"


def tidy(factors: Iterable[Factor]) -> Factors:
    """Return parts with neighbouring sizes multiplied, nothing where no axis of a mesh is among them."""
    out: list[Factor] = []
    for f in factors:
        if isinstance(f, str) or not out or isinstance(out[-1], str):
            if f != ONE:
                out.append(f)
        else:
            out[-1] = out[-1] * f
    return tuple(out) if any(isinstance(f, str) for f in out) else ()


#: How many wait beside the micro-batch that runs, for their backward pass and for gradients of weights alone: groups of
#: layers, and the same of what there is before the layers of a model, and of what there is behind them. The last one is
#: 1 where all gradients of the one that runs are made at once, though a pass makes those of weights apart.
Held = tuple[Poly, Poly, Poly, Poly, Poly, Poly, Poly]


#: Order of the passes of a pipeline that does not go back, as in inference.
FORWARD = "forward"


@dataclass(frozen=True)
class Waiting:
    """What a rank of a pipeline knows of the others, and the micro-batches that wait for their backward pass."""

    first: tuple[Held, ...]
    """what it holds while the first one of all runs, at different times"""
    later: tuple[Held, ...]
    """while one runs behind which gradients are there already"""
    schedule: str
    """order of forward and backward passes, `FORWARD` where there are none that go back"""
    stages: Poly
    """ranks of the whole pipeline"""
    micro_batches: Poly
    """of a step"""
    alike: Poly
    """ranks that do the same, this one included"""
    groups: Poly = ONE
    """groups of layers of a rank"""
    asked: tuple[tuple[Poly, str, int], ...] = ()
    """what has to be a whole number, in words, and its least value"""
    ranks: tuple[tuple[Poly, Poly], ...] = ()
    """the first and the last of those neighbours that do the same"""
    handed: bool = False
    """whether what is handed on lies in buffers of all micro-batches, and stays where it was sent, as under torch"""
    ends: tuple[Poly, Poly] = (ZERO, ZERO)
    """micro-batches that wait at the last forward in a group that receives nothing, and in one that sends nothing"""


@dataclass(frozen=True)
class Split:
    """How the axes of an op's operands and results belong together: its rule of placement, by names of its own.

    A name that stands on both sides may be split, each rank doing its part; one of operands alone may be where
    `reduced` says how the results of the ranks are put together. All others have to be whole.
    """

    operands: tuple[tuple[tuple[str, ...], ...] | None, ...]
    """Of each operand the names that make up each axis, the slowest first; None of one that is taken as it lies."""
    results: tuple[tuple[tuple[str, ...], ...], ...]
    """The same of each result."""
    extents: Mapping[str, Poly]
    """Size of each name."""
    local: Callable[[Mapping[str, Poly], Mapping[str, str]], OpKind]
    """Makes the record of one rank, of the sizes there and of the axis of the mesh that splits a name."""
    reduced: Mapping[str, str] = field(default_factory=dict)
    """Names that results leave out: sum, mean, max or min; own where the result has a part for each part of them."""
    whole: frozenset[str] = frozenset()
    """Names that cannot be split."""
    fixed: Mapping[str, Factors] = field(default_factory=dict)
    """Names whose parts are known: rows that each rank has ordered for itself, and what its own indices name."""
    paired: frozenset[str] = frozenset()
    """Names that are split along the axes of those, index by index."""
    once: frozenset[str] = frozenset()
    """Names that one axis of a mesh at most can split."""
    consecutive: frozenset[str] = frozenset()
    """Names of which every rank has elements that follow each other."""
    linear: bool = False
    """Whether sums that are pending in all of its operands may be so in its results."""
    product: bool = False
    """Whether it is linear in each operand while the others stay as they are."""
    scaled: bool = False
    """Whether a sum that is pending in one operand may be so in the results: a kernel multiplies it by a number."""
    into: int | None = None
    """The operand that what is reduced is added to: it has to hold nothing, or a part of a sum itself."""


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on a mesh: DTensor's Shard, Replicate and Partial for each axis of the mesh.

    A split axis is a product of parts, in the order of its elements: (tp, F/tp) is F in consecutive blocks, one for
    each rank of tp; (B, tp, H/tp) is what merging B with a split H makes, as DTensor's strided shard.
    """

    dims: tuple[Factors, ...]
    """Of each axis of the tensor its parts, nothing where it is whole on every rank."""
    partial: tuple[tuple[str, str], ...] = ()
    """Axes of the mesh over which the values of the ranks are yet to be reduced, and how: sum, mean, max, min."""

    @property
    def axes(self) -> frozenset[str]:
        """Axes of the mesh that split it."""
        return frozenset(f for dim in self.dims for f in dim if isinstance(f, str))

    @property
    def pending(self) -> dict[str, str]:
        """How it is to be reduced, by axis of the mesh."""
        return dict(self.partial)

    def dim(self, axis: str) -> int | None:
        """Return which axis of the tensor an axis of the mesh splits."""
        return next((i for i, dim in enumerate(self.dims) if axis in dim), None)

    def local(self, sizes: Sizes) -> Sizes:
        """Return the sizes on one rank."""
        return tuple(size_of(dim, n) for dim, n in zip(self.dims, sizes, strict=True))

    def without(self, axes: Iterable[str], mesh: Mesh) -> Placement:
        """Return where it lies once it is whole along some axes of the mesh."""
        gone = set(axes)
        dims = tuple(tidy(mesh[f] if f in gone and isinstance(f, str) else f for f in dim) for dim in self.dims)
        return Placement(dims, tuple(p for p in self.partial if p[0] not in gone))

    def with_dims(self, dims: Sequence[Factors]) -> Placement:
        """Return the same for other axes."""
        return replace(self, dims=tuple(dims))

    def __str__(self) -> str:
        dims = " ".join(f"({' '.join(map(str, dim))})" if dim else "_" for dim in self.dims)
        return dims + "".join(f" + {how} over {axis}" for axis, how in self.partial)


@dataclass(frozen=True)
class Sharding:
    """What a graph of one rank says of the others."""

    mesh: Mesh
    places: Mapping[str, Placement]
    """Where sources lie, by name."""
    outputs: tuple[Placement, ...]
    """Where outputs lie."""
    gradients: Mapping[str, Placement]
    """Where gradients lie, by name of what they are of."""
    replicated: tuple[str, ...] = field(default=(), kw_only=True)
    """Weights of products that tensor parallelism leaves whole on every rank."""
    resharded: tuple[str, ...] = ()
    """What was put together although nobody asked for it, in words."""
    own: tuple[str, ...] = ()
    """Sources that the graph of all devices does not have."""


def size_of(factors: Factors, whole: Poly) -> Poly:
    """Return the size on one rank of an axis."""
    return prod((f for f in factors if not isinstance(f, str)), start=ONE) if factors else whole


def blocks(factors: Factors, axis: str) -> Poly:
    """Return how many blocks of every rank stand before a rank's own on its part of an axis."""
    return prod((f for f in factors[: factors.index(axis)] if not isinstance(f, str)), start=ONE)


def seen(dim: Factors, axes: frozenset[str], mesh: Mesh) -> Factors:
    """Return the parts of an axis if only some axes of the mesh split it."""
    return tidy(mesh[f] if isinstance(f, str) and f not in axes else f for f in dim)


def agree(a: Factors, b: Factors, mesh: Mesh) -> bool:
    """Whether the axes of the mesh that split both do so in the same way."""
    both = frozenset(f for f in a if isinstance(f, str) and f in b)
    return seen(a, both, mesh) == seen(b, both, mesh)


def distributed(factors: Factors, sizes: Sequence[Poly], mesh: Mesh) -> tuple[Factors, ...] | None:
    """Return the parts of the axes that an axis is made of, None where a part lies across two of them.

    (tp, H*K/tp) as an axis of heads and one within heads is (tp, H/tp) and K: what has to be whole, H/tp here, is
    looked at when sizes are bound.
    """
    if len(sizes) == 1:
        return (factors,)
    if not factors:
        return ((),) * len(sizes)
    out: list[Factors] = []
    rest = list(factors)
    for at, size in enumerate(sizes):
        mine: list[Factor] = []
        left = size
        while left != ONE and rest:
            first = rest.pop(0)
            if isinstance(first, str):
                mine.append(first)
                rest_of = _divided(left, mesh[first])
                if rest_of is None:
                    return None
                left = rest_of
                continue
            if at == len(sizes) - 1 or first == left:
                mine.append(first)
                left = ONE if first == left else left
                continue
            more, less = _divided(first, left), _divided(left, first)
            behind = numel(sizes[at + 1 :]) / prod((mesh[f] if isinstance(f, str) else f for f in rest), start=ONE)
            if more is not None and (is_integral(more) or more == behind):
                mine.append(left)
                rest.insert(0, more)
                left = ONE
            elif less is not None and is_integral(less):
                mine.append(first)
                left = less
            else:
                return None
        out.append(tidy(mine))
    return None if any(isinstance(f, str) for f in rest) else tuple(out)


def _divided(a: Poly, b: Poly) -> Poly | None:
    """Return a quotient that can be a size."""
    if len(b.terms) != 1 and a != b:
        return None
    try:
        ratio = a / b
    except ShapeError:
        return None
    known = ratio.constant
    return ratio if known is None or (isinstance(known, int) and known >= 1) else None
