"""What each op kind does, index point by index point. Nothing here asks the library for a formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from math import isnan, prod
from operator import lt
from typing import Any, TypeVar

import numpy as np

from ..errors import GraphError, UnsupportedError
from ..graph.op import OpKind
from ..notation.pattern import Affine, Axes, Pattern
from ..ops.contraction import Einsum
from ..ops.index import Arange
from ..ops.moves import Concat, Expand, Rearrange, Slice
from ..ops.pointwise import Pointwise
from ..ops.pooling import Pool, Unpool, Windowed
from ..ops.reduce import Reduce
from ..ops.registry import adding
from ..ops.stated import Transfer
from ..ops.stochastic import Dropout
from .arithmetic import FUNCTIONS, Number, tally
from .values import At, Point, Value

__all__ = ["MEANINGS", "Meaning", "meaning", "scalars"]

K = TypeVar("K", bound=OpKind)
Meaning = Callable[[At[Any]], None]

#: What ops of each kind without a body do.
MEANINGS: dict[type[OpKind], Meaning] = {}


def meaning(*kinds: type[K]) -> Callable[[Callable[[At[K]], None]], Callable[[At[K]], None]]:
    """Say what an op kind does, index point by index point, so that the laws can hold it to its record.

    Parameters
    ----------
    *kinds : subclass of OpKind
        Of which ops it is said.

    Returns
    -------
    callable
        Decorator of a function of `At`: `at.kind` is the record, `at.of(at.kind.size)` puts numbers into one of its
        facts; `at.read(operand, *index)`, `at.number(operand, *index)`, `at.write(value, *index)` and `at.tally`.

    Raises
    ------
    GraphError
        If the kind has a meaning already.
    """
    return adding(MEANINGS, "a meaning", *kinds)


# -- contractions ------------------------------------------------------------------------------------------------


def _place(dim: Axes | Affine, at: Mapping[str, int], extents: Mapping[str, int]) -> int:
    """Return the position along one dimension of a tensor at an index point."""
    if isinstance(dim, Affine):
        return sum(step * at[name] for name, step in dim.terms) + dim.offset
    position = 0
    for name in dim.names:
        position = position * extents[name] + at[name]
    return position


def _index_points(extents: Mapping[str, int]) -> Iterator[dict[str, int]]:
    for point in product(*map(range, extents.values())):
        yield dict(zip(extents, point, strict=True))


def _inside(index: Point, shape: Point) -> bool:
    """Whether an element is there: a window may stand over the padding."""
    return all(map(lt, index, shape)) and (not index or min(index) >= 0)


@meaning(Einsum)
def _einsum(at: At[Einsum]) -> None:
    pattern, extents, restriction = at.kind.pattern, at.of(at.kind.extents), at.kind.domain
    overlapping = any(isinstance(d, Affine) and len(d.terms) > 1 for d in pattern.result)
    summed = overlapping or bool(set(extents) - set(pattern.result_names))
    array = at.result().array
    if restriction is None:
        array[...] = 0
    else:
        domain, q, k = restriction
        seen = at.sizes.pairs(domain, extents[q], extents[k])
    for point in _index_points(extents):
        if restriction is not None and not seen[point[q], point[k]]:
            at.tally.full += 2 if summed else 0
            continue
        out = tuple(_place(d, point, extents) for d in pattern.result)
        term = 1.0
        for i, dims in enumerate(pattern.operands):
            index = tuple(_place(d, point, extents) for d in dims)
            term = term * at.read(i, *index) if _inside(index, at.operands[i].array.shape) else 0.0
        _charge(at, summed)
        if _inside(out, array.shape):
            before = array.item(out)
            at.write(term + (0 if isnan(before) else before), *out)
    own = {d.names for d in pattern.result if isinstance(d, Axes)}
    if restriction is None or not {(n,) for n in restriction[1:]} <= own:
        _fill_unreached(at)
    if at.kind.orders is not None:
        cheapest = _cheapest([set(_names(d)) for d in pattern.operands], set(pattern.result_names), extents)
        at.tally = tally(cheapest, cheapest) if summed else tally(pointwise=cheapest)


def _fill_unreached(at: At[OpKind]) -> None:
    """Sums of no term are 0: rows of a domain that see nothing, places that no index reaches, written all the same."""
    v = at.result()
    written = at.written_at.get(v.buffer, set())
    for index in v.index():
        if v.address(index) not in written:
            at.write(0.0, *index)


def _charge(at: At[OpKind], summed: bool) -> None:
    """Count a multiply and an add for an index point, a product alone where nothing is summed."""
    if summed:
        at.tally.matmul += 2
        at.tally.full += 2
    else:
        at.tally.pointwise += 1


def _names(dims: Sequence[Axes | Affine]) -> list[str]:
    return [n for d in dims for n in d.names]


def _cheapest(operands: list[set[str]], result: set[str], extents: Mapping[str, int]) -> int:
    """Try every order of contracting in pairs and return the fewest FLOPs."""
    if len(operands) == 1:
        return 0
    found = []
    for i, j in combinations(range(len(operands)), 2):
        rest = [o for n, o in enumerate(operands) if n not in (i, j)]
        axes = operands[i] | operands[j]
        kept = axes & result.union(*rest)
        points = sum(1 for _ in _index_points({n: extents[n] for n in sorted(axes)}))
        found.append(points * (2 if axes - kept else 1) + _cheapest([*rest, kept], result, extents))
    return min(found)


def _flat(pattern: Pattern, index: Point, shape: Point) -> int:
    """Return the position of an element among those of the axes that windows slide over."""
    out = 0
    for d, i, n in zip(pattern.operands[0], index, shape, strict=True):
        out = out * n + i if isinstance(d, Affine) else out
    return out


def _shares(kind: Windowed, extents: Mapping[str, int], shape: Point) -> dict[Point, int]:
    """Return of how many elements the mean of each window is."""
    found: dict[Point, int] = {}
    for point in _index_points(extents):
        index = tuple(_place(d, point, extents) for d in kind.pattern.operands[0])
        to = tuple(_place(d, point, extents) for d in kind.pattern.result)
        found[to] = found.get(to, 0) + (not kind.inside or _inside(index, shape))
    return found


@meaning(Unpool)
def _unpool(at: At[Unpool]) -> None:
    """Give the gradient of each window to the place of its maximum, or a share of it to every element."""
    pattern, extents, largest = at.kind.pattern, at.of(at.kind.extents), at.kind.operation == "max"
    out, window = at.result().array, prod(n for name, n in extents.items() if name not in pattern.result_names)
    out[...] = 0
    shares = _shares(at.kind, extents, out.shape)
    slid = {n: extents.pop(n) for n in pattern.result_names}
    for start in _index_points(slid):
        to = tuple(_place(d, start, slid) for d in pattern.result)
        share = at.read(0, *to) / (1 if largest else shares[to])
        place = at.read(2, *to) if largest else None
        at.tally.pointwise += 1 if largest else window
        for point in _index_points(extents):
            index = tuple(_place(d, start | point, slid | extents) for d in pattern.operands[0])
            if _inside(index, out.shape) and (not largest or place == _flat(pattern, index, out.shape)):
                at.write(out[index] + share, *index)
    _fill_unreached(at)


@meaning(Pool)
def _pool(at: At[Pool]) -> None:
    pattern, extents = at.kind.pattern, at.of(at.kind.extents)
    out, shape = at.result().array, at.operands[0].array.shape
    largest, shares = at.kind.operation == "max", _shares(at.kind, extents, shape)
    for point in _index_points(extents):
        index = tuple(_place(d, point, extents) for d in pattern.operands[0])
        to = tuple(_place(d, point, extents) for d in pattern.result)
        x = at.read(0, *index) if _inside(index, shape) else (-np.inf if largest else 0.0)
        old = out[to]
        if at.kind.indices and (np.isnan(old) or x > old):
            at.write(_flat(pattern, index, shape), *to, to=1)
        new = (x if np.isnan(old) else max(old, x)) if largest else x / shares[to] + (0 if np.isnan(old) else old)
        at.write(new, *to)
        at.tally.pointwise += 1


# -- element by element ------------------------------------------------------------------------------------------


def _aligned(index: Point, shape: Point) -> Point:
    """Return where an operand of a shape is read at an index point of the result: NumPy's broadcasting."""
    tail = index[len(index) - len(shape) :]
    return tuple(0 if n == 1 else i for i, n in zip(tail, shape, strict=True))


def _common(at: At[OpKind], result: Value) -> Iterator[Point]:
    """Yield the index points of the result at which every operand holds something."""
    partial = [v for v in at.operands if not v.whole]
    for index in result.index():
        if all(v.holds(_aligned(index, v.array.shape)) for v in partial):
            yield index


def _like(at: At[OpKind]) -> Any:
    """Let NumPy lay out the result of its own elementwise functions on these operands.

    Where two operands have their axes in different orders, NumPy prefers that of C, and torch, which the library
    follows, that of the first.
    """
    arrays = [v.array for v in at.operands]
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    whole = [a for a in arrays if a.shape == shape and 0 not in a.strides]
    if whole and (whole[0] is arrays[0] or len({np.empty_like(a).strides for a in whole}) > 1):
        arrays = whole[:1]
    flags: Any = [["readonly"]] * len(arrays) + [["writeonly", "allocate"]]
    return np.nditer([*arrays, None], op_flags=flags, order="K").operands[-1]


def scalars(at: At[Pointwise]) -> tuple[Any, ...]:
    """Return the numbers of an elementwise op, None where an operand stands."""
    number = float if at.kind.numbers == "float" else lambda n: n
    return tuple(n if n is None else number(n) for n in at.of(at.kind.scalars) or (None,) * len(at.operands))


@meaning(Pointwise)
def _pointwise(at: At[Pointwise]) -> None:
    name = at.kind.function.name
    if at.kind.overwrites():
        at.made[0] = at.operands[0]
    if name in ("causal_mask", "causal_mask_backward"):
        _mask(at, 0.0 if name.endswith("backward") else -np.inf)
        return
    if name not in FUNCTIONS:
        raise UnsupportedError(f"function {name!r} has no meaning, expected one from costgraph.testing.function")
    result = at.result(like=_like(at))
    template = scalars(at)
    for index in _common(at, result):
        given, operands = [], iter(enumerate(at.operands))
        for scalar in template:
            if scalar is None:
                i, v = next(operands)
                given.append(at.number(i, *_aligned(index, v.array.shape)))
            else:
                given.append(Number(scalar, at.tally))
        at.write(FUNCTIONS[name](*given), *index)


def _mask(at: At[Pointwise], hidden: float) -> None:
    domain = at.kind.masked
    result = at.result(like=_like(at))
    seen = None if domain is None else at.sizes.pairs(domain, *result.array.shape[-2:])
    backward = hidden == 0  # which has zeros where a restricted operand holds nothing
    for index in list(result.index() if backward else _common(at, result)):
        x = at.number(0, *index) if at.operands[0].holds(index) else Number(hidden, at.tally)
        at.write(x.once(x.value if seen is None or seen[index[-2:]] else hidden), *index)


@meaning(Dropout)
def _dropout(at: At[Dropout]) -> None:
    p = at.kind.p
    like = _like(at)
    result, _ = at.result(0, like), at.result(1, like)
    draw = np.random.default_rng(0)
    for index in _common(at, result):
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


@meaning(Reduce)
def _reduce(at: At[Reduce]) -> None:
    pattern, operation = at.kind.pattern, at.kind.operation
    names = [d.names[0] if d.names else None for d in pattern.operands[0]]
    places = [names.index(d.names[0]) if d.names else None for d in pattern.result]
    gone = [i for i in range(len(names)) if i not in places]
    kept: dict[Point, dict[Point, Any]] = {}
    for index in at.operands[0].points():
        out = tuple(0 if p is None else index[p] for p in places)
        kept.setdefault(out, {})[tuple(index[i] for i in gone)] = at.read(0, *index)
        at.tally.pointwise += 1  # the division of a mean is part of its last addition
    for out in at.result().index():
        # a row that holds nothing has a result all the same
        if out in kept or at.op.results[0].domain is None:
            at.write(_reduced(operation, kept.get(out, {})), *out)


def _reduced(operation: str, elements: dict[Point, Any]) -> Any:
    """Reduce what a row holds, by its positions: that of the largest is counted from where the row begins."""
    if operation in ("argmax", "argmin"):
        return max(elements, key=lambda i: elements[i] * (1 if operation == "argmax" else -1), default=(0,))[0]
    start, step = _STEPS[operation]
    for x in elements.values():
        start = step(start, x)
    return start / len(elements) if operation == "mean" and elements else start


# -- moving elements ---------------------------------------------------------------------------------------------


@meaning(Rearrange)
def _rearrange(at: At[Rearrange]) -> None:
    """Move axes; what is no view of the operand is copied element by element."""
    split, order, merged = at.of(at.kind.split), at.kind.order, at.of(at.kind.merged)

    def moved(array: Any) -> Any:
        return array.reshape(split).transpose(order).reshape(merged)

    result, v = at.view(moved, copy=at.kind.copy), at.operands[0]
    if result.buffer is v.buffer:
        return
    where = np.empty(v.array.shape, dtype=object)
    for index in v.index():
        where[index] = index
    where = moved(where)
    for index in result.index():
        if v.holds(where[index]):
            at.write(at.read(0, *where[index]), *index)


@meaning(Slice)
def _slice(at: At[Slice]) -> None:
    axis, start, size, step = at.kind.axis, at.of(at.kind.start), at.of(at.kind.size), at.kind.step
    array = at.operands[0].array
    if not 0 <= start <= start + max(size - 1, 0) * step < array.shape[axis] + (not size):
        raise GraphError(f"slice {at.op.name!r} of {array.shape}: {size} from {start} by {step} lie outside")
    # none where a loop has no iteration left between its ends
    key = (slice(None),) * axis + (slice(start, start + (size - 1) * step + 1 if size else start, step),)
    at.view(lambda array: array[key])


@meaning(Expand)
def _expand(at: At[Expand]) -> None:
    kept, sizes, domain = at.kind.kept, at.of(at.kind.sizes), at.kind.domain
    places = [k for k in kept if k is not None]
    index = tuple(None if k is None else slice(None) for k in kept)

    def repeated(array: Any) -> Any:
        # an axis of size 1 that is made longer is none that is kept
        array = np.squeeze(array, tuple(i for i in range(array.ndim) if i not in places))
        array = array.transpose([sorted(places).index(k) for k in places])[index]
        # as NumPy's broadcast_to, which would not let an op in place write where only axes of size 1 are new
        strides = [0 if n == 1 else s for n, s in zip(array.shape, array.strides, strict=True)]
        return np.lib.stride_tricks.as_strided(array, sizes, strides)

    made = at.view(repeated)
    if domain is not None:  # a gradient of which a part is wanted
        at.made[0] = Value(made.array, made.buffer, at.sizes.seen(domain, sizes))


@meaning(Concat)
def _concat(at: At[Concat]) -> None:
    axis, new, done = at.kind.axis, at.kind.stacked, 0
    for i, v in enumerate(at.operands):
        for index in v.points():
            at.write(at.read(i, *index), *index[:axis], done + (0 if new else index[axis]), *index[axis + 1 - new :])
        done += 1 if new else v.array.shape[axis]


@meaning(Transfer)
def _transfer(at: At[Transfer]) -> None:
    if at.kind.into:
        at.made[0] = at.operands[0]
    for index in at.operands[-1].points():
        at.write(at.read(len(at.operands) - 1, *index), *index)


@meaning(Arange)
def _arange(at: At[Arange]) -> None:
    for i in range(at.of(at.kind.size)):
        at.write(at.of(at.kind.start) + (-i if at.kind.back else i), i)
