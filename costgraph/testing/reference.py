"""The same op kinds by NumPy's own whole-array functions: what the interpreter's values are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce as fold
from string import ascii_letters
from typing import Any

import numpy as np

from ..graph.op import OpKind
from ..ops.collectives import Collective
from ..ops.contraction import Einsum
from ..ops.index import Arange, Gather, Scatter
from ..ops.moves import Concat, Rearrange
from ..ops.pointwise import Pointwise
from ..ops.pooling import Pool
from ..ops.reduce import Reduce
from ..ops.stated import Transfer
from .arithmetic import erf
from .meanings import MEANINGS, Meaning, scalars
from .meetings import together
from .values import Array, At, Value

__all__ = ["REFERENCE", "collective", "whole"]


def whole(function: Callable[[At[Any]], Array], to: int = 0) -> Meaning:
    """Write a whole array into a result, where it holds anything."""

    def run(at: At[OpKind]) -> None:
        found = function(at)
        result = at.result(to)
        _put(result, np.broadcast_to(found, result.array.shape), at.sizes.held(at.op.results[to]))

    return run


def _held(v: Value) -> Array:
    held = np.zeros(v.array.shape, dtype=bool)
    for index in v.points():
        held[index] = True
    return held


def _put(v: Value, found: Array, held: Array) -> None:
    """Write where something is held."""
    v.array[held] = found[held]
    if v.buffer.held is not None:
        v.buffer.held.update(v.address(index) for index in map(tuple, np.argwhere(held).tolist()))


def _filled(v: Value, fill: float) -> Array:
    """Return the array with what holds nothing replaced."""
    return np.where(_held(v), v.array, fill)


# -- contractions ------------------------------------------------------------------------------------------------


def _windows(at: At[Einsum | Pool], i: int, letters: Mapping[str, str], fill: float) -> tuple[Array, str]:
    """Return an operand with one axis for each name, windows cut out by NumPy's indexing, and these as letters."""
    dims, shape = at.kind.pattern.operands[i], at.operands[i].array.shape
    names, places, outside = _grid(dims, at.of(at.kind.extents), shape)
    array = _filled(at.operands[i], 0.0)[tuple(places)] if places else at.operands[i].array
    return np.where(outside, fill, array), "".join(letters[n] for n in names)


def _grid(
    dims: Sequence[Any], extents: Mapping[str, int], shape: Sequence[int]
) -> tuple[list[str], list[Array], Array]:
    """Return the names of an operand, the position along each dimension at their points, and which are outside."""
    names = list(dict.fromkeys(n for d in dims for n in d.names))
    grid = dict(zip(names, np.indices([extents[n] for n in names]), strict=True)) if names else {}
    places, outside = [], np.zeros([extents[n] for n in names], dtype=bool)
    for d, size in zip(dims, shape, strict=True):
        if hasattr(d, "terms"):
            place = sum(step * grid[n] for n, step in d.terms) + d.offset
        else:
            place = fold(lambda p, n: p * extents[n] + grid[n], d.names, np.zeros_like(outside, dtype=int))
        outside |= (place < 0) | (place >= size)
        places.append(np.clip(place, 0, size - 1))
    return names, places, outside


def _einsum(at: At[Einsum]) -> Array:
    pattern, extents = at.kind.pattern, at.of(at.kind.extents)
    letters = dict(zip(extents, ascii_letters, strict=False))
    operands = [_windows(at, i, letters, 0.0) for i in range(len(pattern.operands))]
    if at.kind.domain is not None:
        domain, q, k = at.kind.domain
        seen = at.sizes.pairs(domain, extents[q], extents[k])
        operands.append((seen.astype(float), letters[q] + letters[k]))
    shape = at.result().array.shape
    names, places, outside = _grid(pattern.result, extents, shape)
    result = "".join(letters[n] for n in names)
    if at.kind.sizes is not None:  # names that stand on the right side alone: ones to multiply with
        operands += [(np.ones(extents[n]), letters[n]) for n in names]
    made = np.einsum(",".join(text for _, text in operands) + "->" + result, *(array for array, _ in operands))
    if at.kind.sizes is None:
        return np.asarray(made).reshape(shape)
    out = np.zeros(shape)
    np.add.at(out, tuple(p[~outside] for p in places), made[~outside])
    return out


def _pool(at: At[Pool]) -> Array:
    pattern, extents = at.kind.pattern, at.of(at.kind.extents)
    largest = at.kind.operation == "max"
    fill = -np.inf if largest else np.nan if at.kind.inside else 0.0
    windows, _ = _windows(at, 0, dict(zip(extents, ascii_letters, strict=False)), fill)
    names = list(dict.fromkeys(n for d in pattern.operands[0] for n in d.names))
    axes = tuple(i for i, n in enumerate(names) if n not in pattern.result_names)
    return np.asarray(windows.max(axes) if largest else (np.nanmean if at.kind.inside else np.mean)(windows, axes))


# -- element by element ------------------------------------------------------------------------------------------


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


_NUMPY: dict[str, Callable[..., Any]] = {
    "copy": np.positive, "cast": np.positive, "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "div": np.true_divide, "maximum": np.maximum, "minimum": np.minimum,
    "pow": lambda a, b: np.where(np.less_equal(a, 0), np.exp(b * np.log(a)), np.power(a, b)),
    "eq": np.equal, "ne": np.not_equal, "less": np.less, "logical_and": np.logical_and,
    "where": lambda c, a, b: np.where(c, a, b),
    "masked_fill": lambda x, mask: np.where(mask, 0.0, x), "fma": lambda a, b, c: np.add(np.multiply(a, b), c),
    "lerp": lambda a, b, t: a + t * np.subtract(b, a), "neg": np.negative, "abs": np.abs, "sign": np.sign,
    "square": np.square, "reciprocal": np.reciprocal, "clamp": lambda x: np.clip(x, 0, 1), "round": np.round,
    "floor": np.floor, "logical_not": np.logical_not, "relu": lambda x: np.where(np.isnan(x), x, np.clip(x, 0, None)),
    "relu6": lambda x: np.clip(x, 0, 6), "relu2": lambda x: np.clip(x, 0, None) ** 2,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x), "sigmoid": _sigmoid, "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * (0.5 + 0.5 * erf(x / np.sqrt(2))), "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "softplus": lambda x: np.logaddexp(0, x), "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)), "softcap": lambda x: 30 * np.tanh(x / 30),
    "hardsigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1), "hardswish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt,
    "rsqrt": lambda x: np.reciprocal(np.sqrt(x)), "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "erf": erf,
}  # fmt: skip


_NUMPY |= {
    "less_equal": np.less_equal, "cubed": lambda x: np.power(x, 3),
    "masked_scale": lambda a, b, c: np.multiply(a, b * c),
    "threshold_backward": lambda g, y: np.where(y > 0, g, 0.0), "tanh_backward": lambda g, y: g - g * y**2,
    "sigmoid_backward": lambda g, y: g * y - g * y**2, "softcap_backward": lambda g, y: g - g * (y / 30) ** 2,
    "relu6_backward": lambda g, x: np.where((x > 0) & (x < 6), g, 0.0),
    "relu2_backward": lambda g, x: 2 * g * np.clip(x, 0, None),
    "leaky_relu_backward": lambda g, x: np.where(x > 0, g, 0.01 * g),
    "elu_backward": lambda g, x: np.where(x > 0, g, g * np.exp(x)),
    "hardsigmoid_backward": lambda g, x: np.where((x > -3) & (x < 3), g / 6, 0.0),
    "hardswish_backward": lambda g, x: np.where(x <= 3, np.where(x < -3, 0.0, g * (2 * x + 3) / 6), g),
}  # fmt: skip


def _pointwise(at: At[Pointwise]) -> Array:
    name = at.kind.function.name
    hidden = 0.0 if name == "causal_mask_backward" else np.nan
    arrays = iter([_filled(v, hidden) for v in at.operands])
    template = scalars(at)
    if at.kind.overwrites():
        at.made[0] = at.operands[0]
    given = [next(arrays) if s is None else s for s in template]
    if not name.startswith("causal_mask"):
        return np.asarray(_NUMPY[name](*given), dtype=float)
    rows, columns = given[0].shape[-2:]
    domain = at.kind.masked
    if domain is None:
        return np.asarray(given[0])
    seen = at.sizes.pairs(domain, rows, columns)
    return np.where(seen, given[0], 0.0 if name.endswith("backward") else -np.inf)


def _function(at: At[Pointwise]) -> None:
    # of a function of one's own NumPy knows nothing
    name = at.kind.function.name
    (whole(_pointwise) if name in _NUMPY or name.startswith("causal_mask") else MEANINGS[Pointwise])(at)


def _reduce(at: At[Reduce]) -> Array:
    pattern, operation = at.kind.pattern, at.kind.operation
    names = [d.names[0] if d.names else None for d in pattern.operands[0]]
    kept = [d.names[0] for d in pattern.result if d.names]
    axes = tuple(i for i, n in enumerate(names) if n not in kept)
    fill = {"max": -np.inf, "min": np.inf, "prod": 1.0, "all": 1.0, "argmax": -np.inf, "argmin": np.inf}
    array = _filled(at.operands[0], fill.get(operation, 0.0))
    if operation in ("argmax", "argmin"):
        found = getattr(np, operation)(array, axis=axes[0])
    elif operation == "mean":
        found = array.sum(axis=axes) / np.maximum(_held(at.operands[0]).sum(axis=axes), 1)
    else:
        found = getattr(np, operation)(array, axis=axes)
    order = [n for n in names if n in kept]
    found = np.transpose(found, [order.index(n) for n in kept])
    return np.asarray(found, dtype=float).reshape(at.result().array.shape)


# -- moving elements ---------------------------------------------------------------------------------------------


def _rearrange(at: At[Rearrange]) -> None:
    x, split, order, merged = at.operands[0], at.of(at.kind.split), at.kind.order, at.of(at.kind.merged)

    def moved(array: Array) -> Array:
        return array.reshape(split).transpose(order).reshape(merged)

    result = at.view(moved, copy=at.kind.copy)
    if result.buffer is not x.buffer:
        _put(result, moved(x.array), moved(_held(x)))


def _places(at: At[Gather | Scatter]) -> tuple[Array, ...]:
    """Return where the row of each index is, as NumPy's advanced indexing has it."""
    table, *ids = (v.array for v in at.operands[: len(at.operands) - at.kind.after])
    lead = np.indices(ids[0].shape)[: at.kind.batch]
    return (*lead, *(t.astype(int) % n for t, n in zip(ids, table.shape[at.kind.batch :], strict=False)))


def _gather(at: At[Gather]) -> Array:
    found: Array = at.operands[0].array[_places(at)]
    return found


def _scatter(at: At[Scatter]) -> Array:
    target, *_, updates = (v.array for v in at.operands)
    if at.kind.overwrites():
        at.made[0] = at.operands[0]
    out = np.array(target)
    if at.kind.mode == "set":
        out[_places(at)] = updates
    else:
        (np.add if at.kind.mode == "add" else np.maximum).at(out, _places(at), updates)
    return out


def collective(at: At[Collective]) -> Array:
    """Let all ranks bring the same; the first one looks."""
    return together(at, [at.operands[0].array] * at.of(at.kind.ranks), 0)


def _arange(at: At[Arange]) -> Array:
    return np.asarray(at.of(at.kind.start) + (-1) ** at.kind.back * np.arange(at.of(at.kind.size), dtype=float))


def _concat(at: At[Concat]) -> Array:
    return (np.stack if at.kind.stacked else np.concatenate)([v.array for v in at.operands], at.kind.axis)


#: What op kinds do, by NumPy's whole-array functions; of others the interpreter's own meaning stands.
REFERENCE: dict[type[OpKind], Meaning] = {
    Einsum: whole(_einsum),
    # where the maxima are, NumPy does not say
    Pool: lambda at: (MEANINGS[Pool] if at.kind.indices else whole(_pool))(at),
    Pointwise: _function,
    Reduce: whole(_reduce),
    Rearrange: _rearrange,
    Concat: whole(_concat),
    Transfer: lambda at: (MEANINGS[Transfer] if at.kind.into else whole(lambda at: at.operands[0].array))(at),
    Arange: whole(_arange),
    Gather: whole(_gather),
    Scatter: whole(_scatter),
    Collective: whole(collective),
}
