"""Contractions with named axes: products, sums, convolutions, attention scores."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any

from ..algebra.polynomial import ONE, Poly, poly
from ..algebra.symbols import kind_of
from ..dtypes import dtype as find_dtype
from ..dtypes import promote
from ..errors import GraphError, PatternError, ShapeError
from ..graph.arguments import need_list
from ..graph.arguments import sizes as sizes_by_name
from ..graph.domain import Domain
from ..graph.graph import Graph, apply, current_graph
from ..graph.op import Attrs, OpKind, Result
from ..graph.strides import Sizes, windows_along
from ..graph.tensor import Tensor
from ..notation.pattern import Affine, Axes, Pattern, parse_pattern
from . import rules
from .extents import extents_of
from .layout import rearrange
from .order import best_orders
from .reduce import reduce
from .registry import register

__all__ = ["EINSUM", "contract", "einsum"]


def _slide(pattern: Pattern, operands: Sequence[Tensor], extents: dict[str, Poly]) -> tuple[Poly, ...]:
    """Find the extents of outputs that only an affine index names: as many windows as fit, padding on both sides.

    Returns what stated outputs leave over of each axis: looked at again when sizes are bound.
    """
    rooms = []
    for i, t in enumerate(operands):
        for dim, size in zip(pattern.operands[i], t.sizes, strict=True):
            if not isinstance(dim, Affine):
                continue
            where = f"operand {i + 1} {t!r}, index {dim}"
            unknown = [(n, step) for n, step in dim.terms if n not in extents]
            if len(unknown) > 1:
                names = " and ".join(n for n, _ in unknown)
                raise ShapeError(f"{where}: sizes of {names} are not known, expected all but one")
            last = sum((step * (extents[n] - 1) for n, step in dim.terms if n in extents), start=poly(0))
            # padding is on both sides, positions that an index skips are at the start alone
            room = size - 1 - last - (2 if dim.offset < 0 else 1) * dim.offset
            if unknown:
                name, step = unknown[0]
                extents[name] = windows_along(room + 1, 0, step)
                room = poly(0)
            elif room.constant is None:
                rooms.append(room)
            known = extents[unknown[0][0]] if unknown else room + 1
            if known.constant is not None and known.constant < 1:
                raise ShapeError(
                    f"{where}: reaches beyond an axis of size {size}, expected a smaller window or more padding"
                )
    return tuple(rooms)


def _infer(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    pattern, extents = attrs["pattern"], attrs["extents"]
    for i, t in enumerate(operands):
        for dim, size in zip(pattern.operands[i], t.sizes, strict=True):
            if isinstance(dim, Axes) and not t.graph.same(prod((extents[n] for n in dim.names), start=ONE), size):
                raise ShapeError(f"operand {i + 1} {t!r}: an axis of size {size} where the pattern {dim} makes another")
    _need_one_domain(pattern, operands, attrs.get("domain"))
    domain = _result_domain(pattern, attrs.get("domain"))
    if "sizes" in attrs:
        return [
            Result(_stated_sizes(pattern, extents, attrs["sizes"], operands[0].graph), attrs["dtype"], domain=domain)
        ]
    sizes = tuple(prod((extents[n] for n in a.names), start=ONE) for a in pattern.result)
    return [Result(sizes, attrs["dtype"], domain=domain)]


def _stated_sizes(pattern: Pattern, extents: dict[str, Poly], sizes: Sizes, graph: Graph) -> Sizes:
    """Return the sizes of a result whose indices alone do not tell them: they stay where nothing lands, as zeros."""
    if len(sizes) != len(pattern.result):
        raise ShapeError(f"result of {len(sizes)} axes, the pattern {pattern} has {len(pattern.result)}")
    for dim, size in zip(pattern.result, sizes, strict=True):
        if isinstance(dim, Axes) and not graph.same(prod((extents[n] for n in dim.names), start=ONE), size):
            raise ShapeError(f"result: an axis of size {size} where the pattern {dim} makes another")
    return sizes


def _result_domain(pattern: Pattern, restriction: tuple[Domain, str, str] | None) -> tuple[Domain, int, int] | None:
    if restriction is None:
        return None
    # a place that an index makes is another position than that of its axis
    places = [a.names if isinstance(a, Axes) else None for a in pattern.result]
    domain, query, key = restriction
    if (query,) in places and (key,) in places:
        return domain, places.index((query,)), places.index((key,))
    return None


def _inherited(pattern: Pattern, operands: Sequence[Tensor]) -> tuple[Domain, str, str] | None:
    """Return the restriction of the first operand that has one."""
    for dims, t in zip(pattern.operands, operands, strict=True):
        if t.domain is not None:
            domain, query, key = t.domain
            names = {d.names for d in (dims[query], dims[key]) if isinstance(d, Axes)}
            if len(names) != 2 or any(len(n) != 1 for n in names):
                raise ShapeError(f"{t!r} is restricted to a domain: expected a name each for axes {query} and {key}")
            return domain, dims[query].names[0], dims[key].names[0]
    return None


def _need_one_domain(pattern: Pattern, operands: Sequence[Tensor], restriction: tuple[Domain, str, str] | None) -> None:
    """Refuse operands that hold something elsewhere than at the index points of the contraction."""
    for dims, t in zip(pattern.operands, operands, strict=True):
        if _inherited(Pattern((dims,), ()), [t]) not in (None, restriction):
            raise ShapeError("operands restricted to two different domains, expected one")
    indices = [d for dims in pattern.operands for d in dims if isinstance(d, Affine)]
    if restriction is not None and any(set(d.names) & set(restriction[1:]) for d in indices):
        raise ShapeError(f"domain over {' and '.join(restriction[1:])}, one of which is in an index: expected axes")


EINSUM = register(
    OpKind(
        name="einsum",
        infer=_infer,
        flops=rules.multiply_add,
        reads=rules.reached_by_index,
        writes=rules.all_results,
        restricted=True,
    )
)


def einsum(
    *args: Tensor | str,
    order: Sequence[Sequence[int]] | None = None,
    domain: Domain | None = None,
    over: Sequence[str] = (),
    dtype: object = None,
    name: str = "einsum",
    **sizes: object,
) -> Tensor:
    """Contract tensors over named axes.

    Parameters
    ----------
    *args : Tensor, then str
        Operands first, the pattern last, as in einops: `einsum(x, w, "b s d, d f -> b s f")`. An axis may be merged
        or split in brackets, or be an index such as `h*2+r-1` (a convolution with stride 2 and padding 1).
    order : sequence of pairs, optional
        For three operands or more, which two to contract next, as in opt_einsum: positions in the list of what is
        left, the result appended at its end. By default the order that is cheapest for all sizes, and if there is
        none, one op whose FLOPs are the Min over the orders.
    domain : Domain, optional
        Which pairs of two axes are computed, such as `costgraph.Domain(causal=True)`.
    over : pair of str
        The two axes, queries first: `over=("s", "t")`.
    dtype : str or DType, optional
        Number format of the result, by default the common one of the operands.
    name : str
        Name of the op.
    **sizes : sympy.Expr or int
        Sizes that the shapes do not tell: of split axes and of outputs of affine indices.

    Returns
    -------
    Tensor
        Dense, with the axes of the pattern's right side. FLOPs: 2 for every index point where an axis is summed, 1
        where none is (derived: one multiply and one add for each point).

    Raises
    ------
    PatternError, ShapeError, GraphError
        If the pattern cannot be read, sizes disagree, or something else than tensors is given.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g") as g:
    ...     y = cg.einsum(g.input("x", (B, D)), g.param("w", (D, F)), "b d, d f -> b f")
    >>> y.shape, cg.flops(g)
    ((B, F), 2*B*D*F)
    """
    *operands, text = args or ("",)
    if not isinstance(text, str) or not operands or not all(isinstance(t, Tensor) for t in operands):
        kinds = ", ".join(map(kind_of, args))
        raise GraphError(f"einsum: got ({kinds}), expected tensors first and the pattern last")
    tensors: list[Tensor] = list(operands)  # type: ignore[arg-type]  # checked above
    pattern = parse_pattern(text, tuple(t.ndim for t in tensors))
    graph = current_graph(tensors[0].graph)
    extents = extents_of(graph, pattern, tensors, sizes_by_name("einsum", sizes))
    rooms = _slide(pattern, tensors, extents)
    _check_axes(pattern, extents, text)
    attrs: dict[str, Any] = {
        "pattern": pattern,
        "extents": extents,
        "domain": _domain(domain, over, extents) or _inherited(pattern, tensors),
        "dtype": _format(tensors, dtype),
    }
    if rooms:
        attrs["rooms"] = rooms
    if len(tensors) == 1 and attrs["domain"] is None:
        return _single(tensors[0], pattern, text, name)
    if len(tensors) > 2:
        return _chain(graph, tensors, pattern, extents, order, attrs, name)
    if order is not None:
        raise GraphError("einsum: order of two operands or less, expected three or more")
    return apply(EINSUM, tensors, attrs, name)[0]


def contract(
    tensors: Sequence[Tensor], pattern: Pattern, extents: dict[str, Poly], attrs: Attrs, *, name: str = "einsum"
) -> Tensor:
    """Contract tensors by a pattern that may have indices, diagonals and axes of its own on the right side.

    Parameters
    ----------
    tensors : sequence of Tensor
        Operands.
    pattern : Pattern
        Of the operands and the result.
    extents : dict of str to Poly
        Size of every axis of the pattern.
    attrs : mapping
        What else the op has: `domain`, `dtype`, and where they are needed `sizes` of the result and `rooms`.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        As `einsum`; with `sizes`, zero where no index point lands, and the sum of those that land on one place.
    """
    whole: dict[str, Any] = {**attrs, "pattern": pattern, "extents": extents}
    if len(tensors) <= 2:
        # a gradient can be restricted where what it is of is not
        whole["domain"] = attrs["domain"] or _inherited(pattern, tensors)
        return apply(EINSUM, tensors, whole, name)[0]
    graph = current_graph(tensors[0].graph)
    names = tuple(dict.fromkeys(n for i in range(len(tensors)) for n in pattern.operand_names(i)))
    kept = tuple(Axes((n,)) for n in names if n in pattern.result_names)
    if "sizes" not in attrs:
        return _chain(graph, list(tensors), pattern, extents, None, whole, name)
    used = {n: extents[n] for n in names}
    plain = {k: v for k, v in attrs.items() if k != "sizes"}
    made = _chain(graph, list(tensors), Pattern(pattern.operands, kept), used, None, {**plain, "extents": used}, name)
    last = {n: extents[n] for n in pattern.result_names}
    return apply(EINSUM, [made], {**attrs, "pattern": Pattern((kept,), pattern.result), "extents": last}, name)[0]


def _single(x: Tensor, pattern: Pattern, text: str, name: str) -> Tensor:
    # nothing is multiplied: a sum or a view
    if any(isinstance(a, Affine) for a in pattern.operands[0]):
        raise PatternError(f"pattern {text!r}: an index such as h*2+r needs a second operand")
    if len(set(pattern.operand_names(0))) < len(pattern.operand_names(0)):
        raise PatternError(f"pattern {text!r}: the diagonal of a single operand, expected each axis once")
    summed = set(pattern.operand_names(0)) - set(pattern.result_names)
    return reduce(x, text, "sum", name=name) if summed else rearrange(x, text, name=name)


def _check_axes(pattern: Pattern, extents: dict[str, Poly], text: str) -> None:
    known = {n for i in range(len(pattern.operands)) for n in pattern.operand_names(i)}
    for n in pattern.result_names:
        if n not in known:
            raise PatternError(f"pattern {text!r}: axis {n!r} of the result is in no operand")
    unused = sorted(set(extents) - known)
    if unused:
        raise PatternError(f"pattern {text!r}: size given for {unused[0]!r}, which is no axis of it")


def _domain(domain: Domain | None, over: Sequence[str], extents: dict[str, Poly]) -> tuple[Domain, str, str] | None:
    if domain is None and isinstance(over, list | tuple) and not over:
        return None
    if (
        not isinstance(domain, Domain)
        or not isinstance(over, list | tuple)
        or len(over) != 2
        or over[0] == over[1]
        or any(not isinstance(a, str) or a not in extents for a in over)
    ):
        raise PatternError(
            f"einsum: domain={domain!r} over {over!r}, expected a Domain and two axes of the pattern such as ('s', 't')"
        )
    domain.points(extents[over[0]], extents[over[1]])  # refuses what it cannot count
    return domain, over[0], over[1]


def _format(tensors: Sequence[Tensor], wanted: object) -> Any:
    if wanted is not None:
        return find_dtype(wanted)
    out = tensors[0].dtype
    for t in tensors[1:]:
        out = promote(out, t.dtype)
    return out


def _chain(
    graph: Graph,
    tensors: list[Tensor],
    pattern: Pattern,
    extents: dict[str, Poly],
    order: Sequence[Sequence[int]] | None,
    attrs: dict[str, Any],
    name: str,
) -> Tensor:
    """Contract three operands or more in pairs."""
    axes = [frozenset(pattern.operand_names(i)) for i in range(len(tensors))]
    result = frozenset(pattern.result_names)
    if any(isinstance(d, Affine) for o in pattern.operands for d in o) or attrs["domain"] is not None:
        raise GraphError("einsum: three operands with an affine index or a domain, expected it on two operands")
    if order is None:
        found = best_orders(axes, result, extents, graph.root.relations)
        if len(found.paths) > 1:
            space = found.workspace * attrs["dtype"].bits / 8  # bytes of the elements
            whole = {**attrs, "pattern": pattern, "orders": found.flops, "workspace": space}
            return apply(EINSUM, tensors, whole, name)[0]
        order = found.paths[0]
    need_list("einsum: order", order)
    left = list(zip(tensors, (pattern.operand_names(i) for i in range(len(tensors))), pattern.operands, strict=True))
    for step, pair in enumerate(order):
        try:
            i, j = sorted(map(index, pair), reverse=True)
            if not 0 <= j < i:
                raise IndexError
            (b, b_names, b_dims), (a, a_names, a_dims) = left.pop(i), left.pop(j)
        except (ValueError, IndexError, TypeError):
            raise GraphError(
                f"einsum: order {order!r}, step {step + 1}: expected two positions of what is left"
            ) from None
        needed = result.union(*(names for _, names, _ in left))
        last = not left
        kept = tuple(n for n in dict.fromkeys((*a_names, *b_names)) if n in needed)
        dims = pattern.result if last else tuple(Axes((n,)) for n in kept)
        pair_pattern = Pattern((a_dims, b_dims), dims)
        used = {n: extents[n] for n in (*a_names, *b_names)}
        made = apply(EINSUM, [a, b], {**attrs, "pattern": pair_pattern, "extents": used}, name)[0]
        left.append((made, kept, dims))
    if len(left) != 1:
        raise GraphError(f"einsum: order {order!r} leaves {len(left)} tensors, expected pairs until one is left")
    return left[0][0]
