"""Ops that move or rename elements: rearrange, reshape, slice, expand, concat, and views with side information."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Annotated

from ..algebra.dominance import lower
from ..algebra.polynomial import ONE, ZERO, Poly, poly, total
from ..algebra.symbols import is_name, shown
from ..dtypes import DType
from ..errors import GraphError, PatternError, ShapeError
from ..ir.graph import (
    Count,
    Domain,
    Flag,
    Index,
    Length,
    Limit,
    Op,
    OpKind,
    Result,
    Room,
    Shape,
    Sizes,
    Split,
    Start,
    Tensor,
    all_of,
    apply,
    current_graph,
    is_count,
    itself,
    need,
    need_list,
    need_tensor,
    optional,
    sizes_of,
)
from ..ir.graph import sizes as sizes_by_name
from ..ir.strides import is_contiguous_in, numel, view, windows_along
from ..notation.pattern import Affine, Pattern, PatternText, parse_pattern
from ..notation.validation import Rule
from . import rules
from . import sharding_rule as splits
from .access_footprint import alike, carried, regrouped
from .axis_sizes import extents_of
from .registry import register

if TYPE_CHECKING:
    from ..algebra.dominance import Relations

__all__ = [
    "Concat",
    "Expand",
    "DomainAxes",
    "Rearrange",
    "Slice",
    "need_places",
    "need_within",
    "room",
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
    "KeepAlive",
    "StopGradient",
    "keep_alive",
    "stop_gradient",
]


# -- op kinds ----------------------------------------------------------------------------------------------------------


def _is_domain_axes(value: object) -> bool:
    return isinstance(value, tuple) and [type(v) for v in value] == [Domain, int, int] and bool(value[1] != value[2])


#: An attention domain with the indices of its query and key axes, or None.
DomainAxes = Annotated[tuple[Domain, int, int] | None, optional("a domain and two axes", _is_domain_axes), Limit(1)]


def _factor_groups(
    sizes: Sequence[Poly], factors: Sequence[Poly], equal: Callable[[Poly, Poly], bool]
) -> list[list[int]] | None:
    """Return each size's consecutive factors, or None if a size is not a product of them."""
    groups: list[list[int]] = []
    position = 0
    for size in sizes:
        group: list[int] = []
        product = ONE
        while (
            position < len(factors)
            and not (group and equal(product, size) and factors[position] != ONE)
            and (group or size != ONE or factors[position] == ONE)
        ):
            group.append(position)
            product = product * factors[position]
            position += 1
        if not equal(product, size):
            return None
        groups.append(group)
    return groups if position == len(factors) else None


def room(axis_size: Poly, start: Poly, size: Poly, step: int) -> Poly:
    """Return the number of positions after a slice."""
    return axis_size - start - (size - 1) * step - 1


def need_within(place: str, axis: int, expected: str, **values: Poly) -> None:
    """Raise ShapeError if a position on an axis is known to be negative or fractional."""
    for label, value in values.items():
        if value.constant is not None and (value.constant < 0 or not isinstance(value.constant, int)):
            raise ShapeError(f"{place}: {label} is {value} on axis {axis}, expected {expected}")


def need_places(domain: tuple[Domain, int, int] | None, sizes: Sequence[Poly]) -> None:
    """Raise ShapeError unless a domain's axes exist."""
    if domain is not None:
        restriction, query, key = domain
        need(0 <= query < len(sizes) and 0 <= key < len(sizes), f"domain over {shown([query, key])}")
        restriction.points(sizes[query], sizes[key])  # raises if it cannot be counted


@register
@dataclass(frozen=True, kw_only=True)
class Rearrange(OpKind):
    """Split, permuted and merged axes: a view if strides allow it, else a contiguous copy."""

    name = "rearrange"
    restricted = True
    pattern: Annotated[Pattern | None, optional("a pattern", lambda v: isinstance(v, Pattern))] = None
    """The caller's pattern; None for a reshape."""
    split: Sizes
    """Shape with all axes split."""
    order: Annotated[tuple[int, ...], Rule("a tuple of integers", all_of(is_count))]
    """Permutation of the split axes."""
    merged: Shape
    """Result shape."""
    copy: Flag = False
    """Whether to copy although a view is possible."""
    flops, reads, writes = rules.free, rules.moved_if_copied, rules.written_if_copied

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer a view or a copy."""
        rules.need_operands(self, operands, 1)
        (x,), split, merged = operands, self.split, self.merged
        need(sorted(self.order) == list(range(len(split))), f"order {shown(self.order)} of {len(split)} axes")
        ordered = tuple(split[i] for i in self.order)
        if not x.graph.same(numel(split), x.numel) or not x.graph.same(numel(merged), numel(ordered)):
            raise ShapeError(f"{x!r} has {x.numel} elements, ({', '.join(map(str, merged))}) has {numel(merged)}")
        domain = carried(x, self._axes(x))
        simplified = x.graph.simplified
        strides = view(simplified(x.sizes), simplified(x.strides), simplified(split))
        if strides is not None:
            strides = view(simplified(ordered), tuple(strides[i] for i in self.order), simplified(merged))
        if strides is None or self.copy:
            return [Result(merged, x.dtype, domain=domain)]
        return [Result(merged, x.dtype, strides, of=0, offset=x.offset, domain=domain)]

    def inverse(self, sizes: Sizes) -> Rearrange:
        """Return the rearrangement back to an operand of the given shape."""
        split = tuple(self.split[i] for i in self.order)
        return Rearrange(split=split, order=tuple(map(self.order.index, range(len(self.order)))), merged=sizes)

    def _common_factors(
        self, op: Op
    ) -> tuple[Mapping[str, Poly], list[tuple[str, ...]], list[tuple[str, ...]], set[str]]:
        """Return the factors common to operand and result."""
        x, equal = op.operands[0], op.graph.same
        names = [f"s{i}" for i in range(len(self.split))]
        groups = [_factor_groups(sizes, parts, equal) for sizes, parts in (
            (x.sizes, self.split), (self.merged, tuple(self.split[i] for i in self.order)),
        )]  # fmt: skip
        if None not in groups:
            operand_groups, result_groups = ([tuple(g) for g in group or ()] for group in groups)
            ordered_names = [names[i] for i in self.order]
            extents = dict(zip(names, self.split, strict=True))
            return (
                extents,
                [tuple(names[i] for i in g) for g in operand_groups],
                [tuple(ordered_names[i] for i in g) for g in result_groups],
                set(),
            )
        if self.order != tuple(range(len(self.split))):
            return {}, [() for _ in x.sizes], [() for _ in self.merged], set()
        return splits.refined(x.sizes, self.merged, equal)

    def placed(self, op: Op) -> Split:
        """Split the common factors."""
        extents, operand_groups, result_groups, unsplittable = self._common_factors(op)

        def local(local_sizes: Mapping[str, Poly], ranks: Mapping[str, str]) -> OpKind:
            merged = splits.local_of(result_groups, local_sizes)
            if all(f"s{i}" in local_sizes for i in range(len(self.split))) and extents:
                return replace(self, split=tuple(local_sizes[f"s{i}"] for i in range(len(self.split))), merged=merged)
            sizes = splits.local_of(operand_groups, local_sizes)
            return replace(self, pattern=None, split=sizes, order=tuple(range(len(sizes))), merged=merged)

        return Split(
            (tuple(operand_groups),),
            (tuple(result_groups),),
            extents,
            local,
            whole=frozenset(unsplittable),
            linear=True,
        )

    def _axes(self, x: Tensor) -> list[int | None]:
        """Return the operand's domain axis that each result axis is, or None."""
        places: list[int | None] = [None] * len(self.merged)
        if x.domain is not None:
            simplified, axes, order = x.graph.simplified, x.domain[1:], self.order
            split_axes = [i for i in regrouped(simplified(x.sizes), axes, simplified(self.split)) if i is not None]
            ordered = simplified(tuple(self.split[i] for i in order))
            merged_axes = regrouped(ordered, [order.index(i) for i in split_axes], simplified(self.merged))
            for axis, result_axis in zip(axes, merged_axes, strict=len(split_axes) == len(axes)):
                if result_axis is not None:
                    places[result_axis] = axis
        return places

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check the pattern against the sizes."""
        if self.pattern is None:
            return
        (x,), pattern = operands, self.pattern
        need(len(pattern.operands) == 1 and len(pattern.operands[0]) == x.ndim, "the operands of the pattern")
        need(
            not any(isinstance(a, Affine) for a in (*pattern.operands[0], *pattern.result)),
            "an affine index in the pattern",
        )
        names, text = pattern.operand_names(0), shown(str(pattern))
        need(len(names) == len(set(names)) == len(self.split), f"split {shown(self.split)} of pattern {text}")
        need(tuple(names[i] for i in self.order) == pattern.result_names, f"order {shown(self.order)}")
        sizes = dict(zip(names, self.split, strict=True))
        for dims, shape in ((pattern.operands[0], x.sizes), (pattern.result, self.merged)):
            products = [prod((sizes[n] for n in a.names), start=ONE) for a in dims]
            need(len(products) == len(shape) and all(map(x.graph.same, products, shape)), f"sizes of pattern {text}")


@register
@dataclass(frozen=True, kw_only=True)
class Slice(OpKind):
    """Positions on one axis with a step: a view."""

    name = "slice"
    restricted = True
    axis: Index
    start: Start
    size: Length
    step: Count
    room: Room | None = None
    """Positions after the last one, checked when sizes are bound."""
    split: Flag = False
    """Whether it comes from a split, whose gradients one op concatenates."""
    flops, reads, writes = rules.free, rules.nothing, rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the view."""
        rules.need_operands(self, operands, 1)
        (x,), axis, start, size, step = operands, self.axis, self.start, self.size, self.step
        need(axis < x.ndim, f"axis {axis} of {x!r}")
        remaining = room(x.sizes[axis], start, size, step)
        expected = f"start={start}, size={size}, step={step} within {x.sizes[axis]}"
        need_within(f"slice of {x!r}", axis, expected, start=start, size=size - 1, room=remaining)
        sizes = (*x.sizes[:axis], size, *x.sizes[axis + 1 :])
        strides = (*x.strides[:axis], x.strides[axis] * step, *x.strides[axis + 1 :])
        domain = carried(x, [None if i == axis else i for i in range(x.ndim)])
        return [Result(sizes, x.dtype, strides, of=0, offset=x.offset + start * x.strides[axis], domain=domain)]

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check the room against the axis."""
        remaining = room(operands[0].sizes[self.axis], self.start, self.size, self.step)
        need(self.room in (None, remaining), f"room {shown(str(self.room))}")

    def placed(self, op: Op) -> Split:
        """Split the other axes, and the sliced one if this is one of several equal blocks."""
        (x,) = op.operands
        blocks, block = x.sizes[self.axis] / self.size, self.start / self.size
        if self.step != 1 or not all(isinstance(n.constant, int) for n in (blocks, block)):
            return splits.alike(op, whole=[self.axis], linear=True)

        def local(local_sizes: Mapping[str, Poly], ranks: Mapping[str, str]) -> OpKind:
            size = local_sizes[f"a{self.axis}"]
            remaining = None if self.room is None else room(blocks * size, block * size, size, 1)
            return replace(self, start=block * size, size=size, room=remaining)

        rule = splits.alike(op, linear=True, local=local)
        return splits.in_blocks(rule, self.axis, blocks, of_operand=True)

    def span(self) -> tuple[Poly, Poly]:
        """Return where the slice begins and ends on its axis."""
        return self.start, self.start + (self.size - 1) * self.step + 1


@register
@dataclass(frozen=True, kw_only=True)
class Expand(OpKind):
    """View repeated along new axes or size-1 axes."""

    name = "expand"
    restricted = True
    sizes: Shape
    """Result shape."""
    kept: Annotated[
        tuple[int | None, ...], Rule("a tuple of integers and None", all_of(lambda v: v is None or is_count(v)))
    ]
    """Operand axis for each result axis, None for a new one."""
    domain: DomainAxes = None
    """Result domain where the expanded gradient is needed; None to keep the operand's."""
    flops, reads, writes = rules.free, rules.nothing, rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer a view with stride 0 along repeated axes."""
        rules.need_operands(self, operands, 1)
        (x,), used = operands, [i for i in self.kept if i is not None]
        need(len(self.kept) == len(self.sizes), f"kept {shown(self.kept)} of {len(self.sizes)} axes")
        need(len(set(used)) == len(used) and all(i < x.ndim for i in used), f"kept {shown(self.kept)} of {x!r}")
        strides, places = [], list[int | None]()
        for size, source in zip(self.sizes, self.kept, strict=True):
            if source is not None and x.sizes[source] != ONE and not x.graph.same(size, x.sizes[source]):
                raise ShapeError(
                    f"expand of {x!r}: axis {source} to {size}, expected its own size or an axis of size 1"
                )
            kept_axis = None if source is None or (x.sizes[source] == ONE and size != ONE) else source
            places.append(kept_axis)
            strides.append(ZERO if kept_axis is None else x.strides[kept_axis])
        domain = carried(x, places) if self.domain is None else self.domain
        return [Result(self.sizes, x.dtype, tuple(strides), of=0, offset=x.offset, domain=domain)]

    def placed(self, op: Op) -> Split:
        """Split the kept axes, and repeated axes if a consumer wants a shard."""
        (x,) = op.operands
        names = tuple((f"a{i}",) for i in range(len(self.sizes)))
        result_axis_of = {
            source: i for i, source in enumerate(self.kept) if source is not None and x.sizes[source] == self.sizes[i]
        }
        operand_labels = [tuple(names[result_axis_of[i]] if i in result_axis_of else () for i in range(x.ndim))]
        return splits.across(
            op,
            operand_labels,
            names,
            lambda extents, ranks: replace(self, sizes=splits.local_of(names, extents)),
            linear=True,
        )

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check the kept axes and the domain against the operand."""
        (x,) = operands
        only_ones_dropped = all(x.sizes[i] == ONE for i in range(x.ndim) if i not in self.kept)
        need(only_ones_dropped, f"kept {shown(self.kept)} leaves out axes of {x!r}")
        need(self.domain is None or x.domain is None, f"second domain of {x!r}")
        need_places(self.domain, self.sizes)


@register
@dataclass(frozen=True, kw_only=True)
class Concat(OpKind):
    """Concatenation along an axis; stacked residuals contribute one part per iteration, in order."""

    name = "concat"
    restricted = takes_lists = True
    axis: Index
    stacked: Flag = False
    """Whether the axis is new, with one position per part."""
    reverse: Flag = False
    """Whether stacked residuals are concatenated from the last iteration to the first."""
    flops, reads, writes = rules.free, rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer one contiguous result."""
        axis, new = self.axis, int(self.stacked)
        shapes = [t.sizes[t.storage.pieces :] for t in operands]
        need(bool(operands) and axis < len(shapes[0]) + new, f"axis {axis}")
        first, shape = operands[0], shapes[0]
        for t, sizes in zip(operands[1:], shapes[1:], strict=True):
            if t.dtype != first.dtype:
                raise ShapeError(f"concat of {first!r} and {t!r}: expected the same number format")
            fits = len(sizes) == len(shape) and all(
                (i == axis and not new) or t.graph.same(a, b) for i, (a, b) in enumerate(zip(sizes, shape, strict=True))
            )
            if not fits:
                raise ShapeError(f"concat of {first!r} and {t!r}: expected equal sizes on all axes but {axis}")
        alike(operands)
        listed = any(t.storage.pieces for t in operands)
        need(first.domain is None or not (new or listed), f"{first!r} restricted to a domain")
        sizes = (*shape[:axis], total(self.extents(operands)), *shape[axis + 1 - new :])
        domain = carried(first, [None if i == axis else i for i in range(first.ndim)])
        return [Result(sizes, first.dtype, domain=domain)]

    def extents(self, operands: Sequence[Tensor]) -> list[Poly]:
        """Return the size along the axis that each operand contributes."""
        part_sizes = [ONE if self.stacked else t.sizes[t.storage.pieces :][self.axis] for t in operands]
        return [prod(t.sizes[: t.storage.pieces], start=n) for n, t in zip(part_sizes, operands, strict=True)]

    def _stacked_rule(self, op: Op) -> Split:
        """Return the rule for stacked parts: all axes but the concatenated and the iteration axes may be split."""
        labels, axis, unsplittable, operands = (
            [(f"a{i}",) for i in range(op.results[0].ndim)],
            self.axis,
            {f"a{self.axis}"},
            [],
        )
        for k, t in enumerate(op.operands):
            lead, middle = [(f"l{k}_{i}",) for i in range(t.storage.pieces)], [] if self.stacked else [(f"o{k}",)]
            unsplittable |= {name for (name,) in (*lead, *middle)}
            operands.append((*lead, *labels[:axis], *middle, *labels[axis + 1 :]))
        return splits.across(
            op, operands, tuple(labels), lambda extents, ranks: self, whole=frozenset(unsplittable), linear=True
        )

    def placed(self, op: Op) -> Split:
        """Split the other axes, and the concatenated one if all parts have the same size."""
        first = op.operands[0]
        if self.stacked or any(t.storage.pieces for t in op.operands):
            return self._stacked_rule(op)
        if any(t.sizes[self.axis] != first.sizes[self.axis] for t in op.operands):
            return splits.alike(op, whole=[self.axis], linear=True)
        rule = splits.alike(op, linear=True)
        extents = {**rule.extents, f"a{self.axis}": first.sizes[self.axis]}
        return splits.in_blocks(replace(rule, extents=extents), self.axis, poly(len(op.operands)), of_operand=False)


# -- functions ---------------------------------------------------------------------------------------------------------


def rearrange(x: Tensor, pattern: PatternText, /, *, name: str = "rearrange", **sizes: object) -> Tensor:
    """Permute, split and merge axes, as einops does.

    Parameters
    ----------
    x : Tensor
        Operand.
    pattern : str
        Such as `"b s (h k) -> b h s k"`.
    name : str
        Op name.
    **sizes : sympy.Expr or int
        Sizes of split axes.

    Returns
    -------
    Tensor
        A view if strides allow it, which is free, else a contiguous copy: one read and one write.

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
        raise PatternError(f"pattern {pattern!r}: affine index such as h*2+r, expected axis names")
    names = parsed.operand_names(0)
    if len(set(names)) != len(names) or set(names) != set(parsed.result_names):
        raise PatternError(f"pattern {pattern!r}: expected the same axes on both sides, each once")
    graph = current_graph(x.graph)
    extents = extents_of(graph, parsed, [x], sizes_by_name("rearrange", sizes))
    unused = sorted(set(extents) - set(names))
    if unused:
        raise PatternError(f"pattern {pattern!r}: size given for {unused[0]!r}, which is not one of its axes")
    kind = Rearrange(
        pattern=parsed,
        split=tuple(extents[n] for n in names),
        order=tuple(names.index(n) for n in parsed.result_names),
        merged=tuple(prod((extents[n] for n in a.names), start=ONE) for a in parsed.result),
    )
    return apply(kind, [x], name)[0]


def reshape(x: Tensor, shape: Sequence[object], *, name: str = "reshape") -> Tensor:
    """Give a tensor another shape with as many elements: a view if strides allow it, else a copy."""
    need_tensor("reshape", x)
    sizes = sizes_of(shape, f"reshape of {x!r}")
    return apply(Rearrange(split=x.sizes, order=tuple(range(x.ndim)), merged=sizes), [x], name)[0]


def permute(x: Tensor, order: Sequence[int], *, name: str = "permute") -> Tensor:
    """Permute axes: a view."""
    places = tuple(i % x.ndim for i in order)
    return apply(Rearrange(split=x.sizes, order=places, merged=tuple(x.sizes[i] for i in places)), [x], name)[0]


def contiguous_copy(x: Tensor, *, name: str = "contiguous") -> Tensor:
    """Return the tensor itself if it is contiguous, else a contiguous copy."""
    need_tensor("contiguous", x)
    if x.is_contiguous:
        return x
    kind = Rearrange(split=x.sizes, order=tuple(range(x.ndim)), merged=x.sizes, copy=True)
    return apply(kind, [x], name)[0]


def copied_into(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return a tensor that is dense in an axis order, from slowest to fastest: a copy unless `x` already is."""
    if is_contiguous_in(x.sizes, x.strides, order):
        return x
    copied = contiguous_copy(x if list(order) == [*range(x.ndim)] else permute(x, order))
    return copied if list(order) == [*range(x.ndim)] else permute(copied, [order.index(i) for i in range(x.ndim)])


def axis_of(x: Tensor, axis: int) -> int:
    """Return the index of an axis, which may be negative."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"axis {axis!r} of {x!r}: expected an integer from {-x.ndim} to {x.ndim - 1}")
    return axis % x.ndim


def slice_axis(x: Tensor, axis: int, start: object, size: object, step: int = 1, *, name: str = "slice") -> Tensor:
    """Take `size` positions on one axis, from `start` in steps of `step`: a view.

    Raises
    ------
    ShapeError
        If positions are known to be out of bounds.
    """
    need_tensor("slice", x)
    return _add_slice(x, axis, start, size, step, name)


def _add_slice(
    x: Tensor, axis: int, start: object, size: object, step: int, name: str, *, split: bool = False
) -> Tensor:
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ShapeError(f"slice of {x!r}: step {step!r}, expected a positive integer")
    dim, offset, count = axis_of(x, axis), poly(start), poly(size)
    # start and room are checked again when sizes are bound
    remaining = room(x.sizes[dim], offset, count, step)
    return apply(Slice(axis=dim, start=offset, size=count, step=step, room=remaining, split=split), [x], name)[0]


def split(x: Tensor, sizes: Sequence[object], axis: int = -1, *, name: str = "split") -> tuple[Tensor, ...]:
    """Split one axis into consecutive parts: views.

    Raises
    ------
    ShapeError
        If the sizes do not add up.
    """
    need_tensor("split", x)
    part_sizes = sizes_of(sizes, f"split of {x!r}")
    dim = axis_of(x, axis)
    if not current_graph(x.graph).same(total(part_sizes), x.sizes[dim]):
        raise ShapeError(
            f"split of {x!r}: parts {list(part_sizes)} add up to {total(part_sizes)}, expected {x.sizes[dim]}"
        )
    # flagged as one split, so that one op concatenates their gradients
    starts = [total(part_sizes[:i]) for i in range(len(part_sizes))]
    return tuple(
        _add_slice(x, dim, start, part_size, 1, name, split=True)
        for start, part_size in zip(starts, part_sizes, strict=True)
    )


def roll(x: Tensor, shift: object, axis: int = -1, *, name: str = "roll") -> Tensor:
    """Roll elements along an axis, as `numpy.roll`.

    Parameters
    ----------
    x : Tensor
        Operand.
    shift : sympy.Expr or int
        Positions towards the end of the axis, at most its size; negative towards its start.
    axis : int
        Axis to roll along.
    name : str
        Op name.

    Returns
    -------
    Tensor
        Contiguous, with the shape of `x`. No FLOPs: one read of `x` and one write; a shift of 0 or a full turn is free.

    Raises
    ------
    GraphError, ShapeError
        If `x` is not a tensor, or the shift is known to be larger than the axis.

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
    dim, offset = axis_of(x, axis), poly(shift)
    size = x.sizes[dim]
    lower_bound = lower(-offset)
    forward = size + offset if lower_bound is not None and lower_bound > 0 else offset  # towards the end
    if forward in (ZERO, size):
        return x
    if any(
        n.constant is not None and (n.constant < 0 or not isinstance(n.constant, int)) for n in (forward, size - offset)
    ):
        raise ShapeError(f"roll of {x!r}: shift {offset} on axis {dim}, expected an integer of at most {size}")
    head, tail = split(x, (size - forward, forward), dim, name=f"{name}_parts")
    return concat((tail, head), dim, name=name)


def expand(x: Tensor, pattern: PatternText, /, *, name: str = "expand", **sizes: object) -> Tensor:
    """Repeat along new axes or size-1 axes, as a view: `expand(x, "s d -> b s d", b=B)`.

    Raises
    ------
    PatternError, ShapeError
        If the pattern merges or drops axes.
    """
    need_tensor("expand", x)
    parsed = parse_pattern(pattern, (x.ndim,))
    operand_names = [a.names for a in parsed.operands[0]]
    result_names = [a.names for a in parsed.result]
    extents = sizes_by_name("expand", sizes)
    names = [n for n in operand_names if n]
    if (
        any(len(n) > 1 for n in operand_names + result_names)
        or any(n not in result_names for n in names)
        or len(set(names)) < len(names)
    ):
        raise PatternError(f"pattern {pattern!r}: expected unmerged axes, each once, with all operand axes kept")
    if len(operand_names) != x.ndim:
        raise ShapeError(f"{x!r} has {x.ndim} axes, the pattern {pattern!r} has {len(operand_names)}")
    for i, (axis, axis_size) in enumerate(zip(operand_names, x.sizes, strict=True)):
        if not axis and axis_size != ONE:
            raise ShapeError(f"{x!r}: axis {i} has size {axis_size}, the pattern {pattern!r} has 1 there")
    if any(not is_name(k) or (k,) not in result_names for k in extents):
        raise PatternError(f"pattern {pattern!r}: sizes for {sorted(extents)}, expected axes of the result")
    kept = tuple(operand_names.index(n) if n and n in operand_names else None for n in result_names)
    shape = []
    for n, source in zip(result_names, kept, strict=True):
        size = extents.get(n[0]) if n else ONE
        if size is None and source is None:
            raise PatternError(f"pattern {pattern!r}: size of new axis {n[0]!r} is not given")
        shape.append(size if size is not None else x.sizes[source])  # type: ignore[index]  # at is known here
    return apply(Expand(sizes=tuple(shape), kept=kept), [x], name)[0]


def broadcast(x: Tensor, sizes: Sequence[Poly], *, name: str = "expand") -> Tensor:
    """Broadcast a tensor along new leading axes and size-1 axes, as a view."""
    kept = (*(None for _ in range(len(sizes) - x.ndim)), *range(x.ndim))
    return apply(Expand(sizes=tuple(sizes), kept=kept), [x], name)[0]


def concat(tensors: Sequence[Tensor], axis: int = -1, *, name: str = "concat") -> Tensor:
    """Concatenate tensors along an axis: one read per operand, and one write of the result.

    Raises
    ------
    GraphError, ShapeError
        If there is no tensor, or shapes or dtypes differ.
    """
    need_tensor("concat", *need_list("concat", tensors))
    if not tensors:
        raise GraphError("concat: got no tensor, expected at least one")
    return apply(Concat(axis=axis_of(tensors[0], axis)), tensors, name)[0]


def stack(tensors: Sequence[Tensor], *, name: str = "stack") -> Tensor:
    """Stack tensors along a new first axis."""
    need_tensor("stack", *need_list("stack", tensors))
    return concat([reshape(t, (1, *t.sizes)) for t in tensors], 0, name=name)


def index(x: Tensor, key: object) -> Tensor:
    """Apply basic indexing, `x[...]`, with integers, slices, None and Ellipsis: all views."""
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    consumed = sum(k is not None and k is not Ellipsis for k in keys)
    if consumed > x.ndim or len(dots) > 1:
        raise ShapeError(f"index {key!r} of {x!r}: {consumed} axes, expected at most {x.ndim} and '...' once")
    ellipsis_position = dots[0] if dots else len(keys)
    keys[ellipsis_position : ellipsis_position + 1] = [slice(None)] * (x.ndim - consumed)
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
        lower_bound = lower(-value)
        return value + size if lower_bound is not None and lower_bound > 0 else value
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


# -- views with side information ---------------------------------------------------------------------------------------


@register
@dataclass(frozen=True, kw_only=True)
class KeepAlive(OpKind):
    """View of its first operand that keeps the others alive until here."""

    name = "keep_alive"
    restricted = crosses = takes_lists = True
    requested_dtype: Annotated[DType | None, optional("a number format", lambda v: isinstance(v, DType))] = None
    """Dtype that the program requests here, equal to that of the first operand: another dtype would be cast."""
    fixed: Flag = False
    """Whether it is requested independently of the model's dtype."""
    custom_grad: Annotated[str, optional("the name of a function", lambda v: isinstance(v, str))] = ""
    """Function of the program that defines the operand's gradient, or the reason why it is an autograd leaf."""
    leaf: Flag = False
    """Whether it is an autograd leaf whose gradient belongs to no parameter of the graph."""
    rebased: Flag = False
    """Whether it is a view whose base, the second operand, was written in place: autograd then takes the view of the
    base again with `as_strided`."""
    flops, reads, writes = rules.free, rules.nothing, rules.nothing
    placed = splits.as_it_is

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the first operand itself."""
        if not operands:
            raise GraphError("keep_alive without operands, expected at least one")
        x = operands[0]
        need(self.requested_dtype in (None, x.dtype), f"requested format {self.requested_dtype} of {x!r} in {x.dtype}")
        need(self.requested_dtype is not None or not self.fixed, "a fixed format without a requested one")
        return [itself(x)]


@register
@dataclass(frozen=True, kw_only=True)
class StopGradient(OpKind):
    """View that blocks gradients."""

    name = "stop_gradient"
    restricted = True
    passes_gradients = False
    flops, reads, writes = rules.free, rules.nothing, rules.nothing
    placed = splits.as_it_is

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the operand itself."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        return [itself(x)]


def keep_alive(x: Tensor, *others: Tensor, name: str = "keep_alive") -> Tensor:
    """Keep other tensors alive until here, as program variables do.

    A tensor dies after its last reader. In eager code a variable, or an argument of a pending call, can keep it alive
    longer: put `keep_alive` where the last reference is dropped.

    Parameters
    ----------
    x : Tensor
        Tensor to return.
    *others : Tensor
        Tensors that stay alive at least until `x` exists.
    name : str
        Op name.

    Returns
    -------
    Tensor
        A view of `x`, without FLOPs or bytes. Gradients pass to `x` only.

    Raises
    ------
    GraphError
        If an argument is not a tensor.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> def peak(hold):
    ...     with cg.Graph("g") as g:
    ...         residual = cg.relu(g.input("x", (B, D)))
    ...         y = cg.tanh(cg.tanh(residual))
    ...         g.output(cg.ops.keep_alive(y, residual) if hold else y)
    ...     return cg.peak_memory(g)
    >>> peak(False), peak(True)
    (12*B*D, 16*B*D)
    """
    need_tensor("keep_alive", x, *others)
    return apply(KeepAlive(), [x, *others], name)[0]


def stop_gradient(x: Tensor, *, name: str = "stop_gradient") -> Tensor:
    """Stop gradients: `x.detach()` in torch, `stop_gradient` in JAX.

    Parameters
    ----------
    x : Tensor
        Tensor to treat as a constant.
    name : str
        Op name.

    Returns
    -------
    Tensor
        A view of `x`, without FLOPs or bytes. Ops whose operands are all constant get no backward pass.

    Raises
    ------
    GraphError
        If `x` is not a tensor.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> def step(target):
    ...     with cg.Graph("g") as g:
    ...         x = g.input("x", (B, D))
    ...         y = cg.linear(x, "b d -> b f", f=F)
    ...         d = y - target(cg.linear(x, "b d -> b f", f=F, name="teacher"))
    ...         g.output(cg.reduce(d * d, "b f -> ", "mean"))
    ...     return cg.matmul_flops(cg.backward(g))
    >>> step(lambda t: t), step(cg.ops.stop_gradient)
    (8*B*D*F, 6*B*D*F)
    """
    need_tensor("stop_gradient", x)
    return apply(StopGradient(), [x], name)[0]
