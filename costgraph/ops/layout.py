"""Ops that move or rename elements: rearrange, reshape, slice, expand, concat. A view is free, a copy is not."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..algebra.dominance import lower
from ..algebra.polynomial import ONE, ZERO, Poly, poly, total
from ..algebra.symbols import is_name
from ..errors import GraphError, PatternError, ShapeError
from ..graph.arguments import need_list, need_tensor
from ..graph.arguments import sizes as sizes_by_name
from ..graph.graph import apply, current_graph, sizes_of
from ..graph.strides import is_contiguous_in, windows_along
from ..graph.tensor import Tensor
from ..notation.pattern import Affine, PatternText, parse_pattern
from .extents import extents_of
from .moves import Concat, Expand, Rearrange, Slice, room

__all__ = [
    "axis_of",
    "broadcast",
    "concat",
    "contiguous_copy",
    "copied_into",
    "expand",
    "index",
    "permute",
    "rearrange",
    "reshape",
    "roll",
    "slice_axis",
    "split",
    "stack",
]


def rearrange(x: Tensor, pattern: PatternText, /, *, name: str = "rearrange", **sizes: object) -> Tensor:
    """Permute, split and merge axes, as einops does.

    Parameters
    ----------
    x : Tensor
        What is rearranged.
    pattern : str
        Such as `"b s (h k) -> b h s k"`.
    name : str
        Name of the op.
    **sizes : sympy.Expr or int
        Sizes of split axes.

    Returns
    -------
    Tensor
        A view where strides allow it, which costs nothing, else a dense copy, which is one read and one write.

    Raises
    ------
    PatternError, ShapeError
        If the pattern does not fit.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, H, K = cg.dims("B S H K")
    >>> with cg.Graph("g") as g:
    ...     heads = cg.rearrange(g.input("x", (B, S, H*K)), "b s (h k) -> b h s k", h=H)
    ...     back = cg.rearrange(heads, "b h s k -> b h (s k)")
    >>> heads.shape, heads.is_view, back.is_view
    ((B, H, S, K), True, False)
    """
    need_tensor("rearrange", x)
    parsed = parse_pattern(pattern, (x.ndim,))
    if any(isinstance(a, Affine) for a in (*parsed.operands[0], *parsed.result)):
        raise PatternError(f"pattern {pattern!r}: an index such as h*2+r, expected names")
    names = parsed.operand_names(0)
    if len(set(names)) != len(names) or set(names) != set(parsed.result_names):
        raise PatternError(f"pattern {pattern!r}: expected the same axes on both sides, each once")
    graph = current_graph(x.graph)
    extents = extents_of(graph, parsed, [x], sizes_by_name("rearrange", sizes))
    unused = sorted(set(extents) - set(names))
    if unused:
        raise PatternError(f"pattern {pattern!r}: size given for {unused[0]!r}, which is no axis of it")
    kind = Rearrange(
        pattern=parsed,
        split=tuple(extents[n] for n in names),
        order=tuple(names.index(n) for n in parsed.result_names),
        merged=tuple(prod((extents[n] for n in a.names), start=ONE) for a in parsed.result),
    )
    return apply(kind, [x], name)[0]


def reshape(x: Tensor, shape: Sequence[object], *, name: str = "reshape") -> Tensor:
    """Give a tensor another shape with as many elements: a view where strides allow it, else a copy."""
    need_tensor("reshape", x)
    sizes = sizes_of(shape, f"reshape of {x!r}")
    return apply(Rearrange(split=x.sizes, order=tuple(range(x.ndim)), merged=sizes), [x], name)[0]


def permute(x: Tensor, order: Sequence[int], *, name: str = "permute") -> Tensor:
    """Give a tensor its axes in another order: a view."""
    places = tuple(i % x.ndim for i in order)
    return apply(Rearrange(split=x.sizes, order=places, merged=tuple(x.sizes[i] for i in places)), [x], name)[0]


def contiguous_copy(x: Tensor, *, name: str = "contiguous") -> Tensor:
    """Return the tensor itself if it is dense in the order of its axes, else such a copy."""
    need_tensor("contiguous", x)
    if x.is_contiguous:
        return x
    kind = Rearrange(split=x.sizes, order=tuple(range(x.ndim)), merged=x.sizes, copy=True)
    return apply(kind, [x], name)[0]


def copied_into(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return a dense tensor with its axes in an order, from the slowest to the fastest: a copy if x lies otherwise."""
    if is_contiguous_in(x.sizes, x.strides, order):
        return x
    moved = contiguous_copy(x if list(order) == [*range(x.ndim)] else permute(x, order))
    return moved if list(order) == [*range(x.ndim)] else permute(moved, [order.index(i) for i in range(x.ndim)])


def axis_of(x: Tensor, axis: int) -> int:
    """Return the place of an axis, which may be counted from the end."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"axis {axis!r} of {x!r}: expected an integer from {-x.ndim} to {x.ndim - 1}")
    return axis % x.ndim


def slice_axis(x: Tensor, axis: int, start: object, size: object, step: int = 1, *, name: str = "slice") -> Tensor:
    """Take `size` positions of one axis from `start` on, every `step`-th: a view.

    Raises
    ------
    ShapeError
        If the positions are known to lie outside.
    """
    need_tensor("slice", x)
    return _cut(x, axis, start, size, step, name)


def _cut(x: Tensor, axis: int, start: object, size: object, step: int, name: str, *, split: bool = False) -> Tensor:
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ShapeError(f"slice of {x!r}: step {step!r}, expected a positive integer")
    at, first, count = axis_of(x, axis), poly(start), poly(size)
    # the room is looked at again when sizes are bound, as is the start
    left = room(x.sizes[at], first, count, step)
    return apply(Slice(axis=at, start=first, size=count, step=step, room=left, split=split), [x], name)[0]


def split(x: Tensor, sizes: Sequence[object], axis: int = -1, *, name: str = "split") -> tuple[Tensor, ...]:
    """Cut one axis into consecutive parts: views.

    Raises
    ------
    ShapeError
        If the sizes do not add up.
    """
    need_tensor("split", x)
    parts = sizes_of(sizes, f"split of {x!r}")
    at = axis_of(x, axis)
    if not current_graph(x.graph).same(total(parts), x.sizes[at]):
        raise ShapeError(f"split of {x!r}: parts {list(parts)} add up to {total(parts)}, expected {x.sizes[at]}")
    # parts of one split: their gradients are joined by one op
    starts = [total(parts[:i]) for i in range(len(parts))]
    return tuple(_cut(x, at, start, part, 1, name, split=True) for start, part in zip(starts, parts, strict=True))


def roll(x: Tensor, shift: object, axis: int = -1, *, name: str = "roll") -> Tensor:
    """Move the elements along an axis, and what leaves it at one end in at the other, as `numpy.roll`.

    Parameters
    ----------
    x : Tensor
        What is rolled.
    shift : sympy.Expr or int
        Positions towards the end of the axis, at most its size; negative towards its start.
    axis : int
        Axis that is rolled.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        Shape of `x`, dense. No FLOPs: one read of `x` and one write; a shift of 0 or of the whole axis is `x`.

    Raises
    ------
    GraphError, ShapeError
        If it is no tensor, or the shift is known to be larger than the axis.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     y = cg.ops.roll(g.input("x", (B, S)), -1, 1)
    >>> y.shape, cg.flops(g), cg.bytes_moved(g)
    ((B, S), 0, 8*B*S)
    """
    need_tensor("roll", x)
    at, by = axis_of(x, axis), poly(shift)
    whole = x.sizes[at]
    least = lower(-by)
    moved = whole + by if least is not None and least > 0 else by  # towards the end
    if moved in (ZERO, whole):
        return x
    if any(n.constant is not None and (n.constant < 0 or not isinstance(n.constant, int)) for n in (moved, whole - by)):
        raise ShapeError(f"roll of {x!r}: shift {by} on axis {at}, expected a whole number of at most {whole}")
    head, tail = split(x, (whole - moved, moved), at, name=f"{name}_parts")
    return concat((tail, head), at, name=name)


def expand(x: Tensor, pattern: PatternText, /, *, name: str = "expand", **sizes: object) -> Tensor:
    """Repeat along new axes or axes of size 1, without a copy: `expand(x, "s d -> b s d", b=B)`.

    Raises
    ------
    PatternError, ShapeError
        If the pattern merges axes, or leaves one out.
    """
    need_tensor("expand", x)
    parsed = parse_pattern(pattern, (x.ndim,))
    left = [a.names for a in parsed.operands[0]]
    right = [a.names for a in parsed.result]
    given = sizes_by_name("expand", sizes)
    names = [n for n in left if n]
    if any(len(n) > 1 for n in left + right) or any(n not in right for n in names) or len(set(names)) < len(names):
        raise PatternError(f"pattern {pattern!r}: expected single axes, each once, all of the operand's kept")
    if len(left) != x.ndim:
        raise ShapeError(f"{x!r} has {x.ndim} axes, the pattern {pattern!r} has {len(left)}")
    for i, (axis, long) in enumerate(zip(left, x.sizes, strict=True)):
        if not axis and long != ONE:
            raise ShapeError(f"{x!r}: axis {i} has size {long}, the pattern {pattern!r} has 1 there")
    if any(not is_name(k) or (k,) not in right for k in given):
        raise PatternError(f"pattern {pattern!r}: sizes for {sorted(given)}, expected axes of the result")
    kept = tuple(left.index(n) if n and n in left else None for n in right)
    out = []
    for n, at in zip(right, kept, strict=True):
        size = given.get(n[0]) if n else ONE
        if size is None and at is None:
            raise PatternError(f"pattern {pattern!r}: size of new axis {n[0]!r} is not given")
        out.append(size if size is not None else x.sizes[at])  # type: ignore[index]  # at is known here
    return apply(Expand(sizes=tuple(out), kept=kept), [x], name)[0]


def broadcast(x: Tensor, sizes: Sequence[Poly], *, name: str = "expand") -> Tensor:
    """Repeat a tensor along new leading axes, and along axes of size 1, without a copy."""
    kept = (*(None for _ in range(len(sizes) - x.ndim)), *range(x.ndim))
    return apply(Expand(sizes=tuple(sizes), kept=kept), [x], name)[0]


def concat(tensors: Sequence[Tensor], axis: int = -1, *, name: str = "concat") -> Tensor:
    """Join tensors along an axis: one read of each and one write of the result.

    Raises
    ------
    GraphError, ShapeError
        If there is no tensor, or shapes or formats differ.
    """
    need_tensor("concat", *need_list("concat", tensors))
    if not tensors:
        raise GraphError("concat: got no tensor, expected one at least")
    return apply(Concat(axis=axis_of(tensors[0], axis)), tensors, name)[0]


def stack(tensors: Sequence[Tensor], *, name: str = "stack") -> Tensor:
    """Join tensors along a new first axis."""
    need_tensor("stack", *need_list("stack", tensors))
    return concat([reshape(t, (1, *t.sizes)) for t in tensors], 0, name=name)


def index(x: Tensor, key: object) -> Tensor:
    """Apply what stands in `x[...]`: integers, slices, None and Ellipsis, all of them views."""
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > x.ndim or len(dots) > 1:
        raise ShapeError(f"index {key!r} of {x!r}: {used} axes, expected at most {x.ndim} and '...' once")
    at = dots[0] if dots else len(keys)
    keys[at : at + 1] = [slice(None)] * (x.ndim - used)
    shape: list[Poly] = []
    axis = 0
    for k in keys:
        if k is None:
            shape.append(ONE)
            continue
        if isinstance(k, slice):
            x = _slice(x, axis, k)
            shape.append(x.sizes[axis])
        else:
            start = _position(x, k, x.sizes[axis])
            x = slice_axis(x, axis, start, ONE, name="index")
        axis += 1
    return x if tuple(shape) == x.sizes else reshape(x, shape, name="index")


def _position(x: Tensor, k: object, size: Poly) -> Poly:
    if isinstance(k, Tensor):
        raise ShapeError(f"index {k!r} of {x!r}: expected integers and slices, or costgraph.ops.gather for a tensor")
    value = poly(k)
    if value.constant is None:  # -T counts from the end, as -2 does
        least = lower(-value)
        return value + size if least is not None and least > 0 else value
    if not isinstance(value.constant, int):
        raise ShapeError(f"index {value} of {x!r}: expected an integer")
    return value + size if value.constant < 0 else value


def _slice(x: Tensor, axis: int, k: slice) -> Tensor:
    size = x.sizes[axis]
    step = 1 if k.step is None else k.step
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ShapeError(f"slice of {x!r}: step {step!r}, expected a positive integer")
    start = ZERO if k.start is None else _position(x, k.start, size)
    stop = size if k.stop is None else _position(x, k.stop, size)
    if start == ZERO and stop == size and step == 1:
        return x
    return slice_axis(x, axis, start, windows_along(stop - start, 0, step), step)
