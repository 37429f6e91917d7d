"""Contractions with named axes: products, sums, convolutions, attention scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index

from ..algebra.polynomial import Poly, poly
from ..algebra.symbols import kind_of
from ..dtypes import DType, promote
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, PatternError, ShapeError
from ..graph.arguments import need_list
from ..graph.arguments import sizes as sizes_by_name
from ..graph.domain import Domain
from ..graph.graph import Graph, apply, current_graph
from ..graph.strides import windows_along
from ..graph.tensor import Tensor
from ..notation.pattern import Affine, Axes, Pattern, parse_pattern
from .contraction import Einsum, inherited
from .extents import extents_of
from .layout import rearrange
from .order import best_orders
from .reduce import reduce

__all__ = ["contract", "einsum"]


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
    kind = Einsum(
        pattern=pattern,
        extents=extents,
        domain=_domain(domain, over, extents) or inherited(pattern, tensors),
        dtype=_format(tensors, dtype),
        rooms=rooms,
    )
    if len(tensors) == 1 and kind.domain is None:
        return _single(tensors[0], pattern, text, name)
    if len(tensors) > 2:
        return _chain(graph, tensors, kind, order, name)
    if order is not None:
        raise GraphError("einsum: order of two operands or less, expected three or more")
    return apply(kind, tensors, name)[0]


def contract(tensors: Sequence[Tensor], kind: Einsum, *, name: str = "einsum") -> Tensor:
    """Contract tensors by a pattern that may have indices, diagonals and axes of its own on the right side.

    With `sizes` of the result it is zero where no index point lands, and the sum of those that land on one place.
    """
    pattern, extents = kind.pattern, kind.extents
    if len(tensors) <= 2:
        # a gradient can be restricted where what it is of is not
        return apply(replace(kind, domain=kind.domain or inherited(pattern, tensors)), tensors, name)[0]
    graph = current_graph(tensors[0].graph)
    names = tuple(dict.fromkeys(n for i in range(len(tensors)) for n in pattern.operand_names(i)))
    kept = tuple(Axes((n,)) for n in names if n in pattern.result_names)
    if kind.sizes is None:
        return _chain(graph, list(tensors), kind, None, name)
    used = {n: extents[n] for n in names}
    inner = replace(kind, pattern=Pattern(pattern.operands, kept), extents=used, sizes=None)
    made = _chain(graph, list(tensors), inner, None, name)
    last = {n: extents[n] for n in pattern.result_names}
    return apply(replace(kind, pattern=Pattern((kept,), pattern.result), extents=last), [made], name)[0]


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


def _format(tensors: Sequence[Tensor], wanted: object) -> DType:
    if wanted is not None:
        return find_dtype(wanted)
    out = tensors[0].dtype
    for t in tensors[1:]:
        out = promote(out, t.dtype)
    return out


def _chain(
    graph: Graph, tensors: list[Tensor], kind: Einsum, order: Sequence[Sequence[int]] | None, name: str
) -> Tensor:
    """Contract three operands or more in pairs."""
    pattern, extents = kind.pattern, kind.extents
    axes = [frozenset(pattern.operand_names(i)) for i in range(len(tensors))]
    result = frozenset(pattern.result_names)
    if any(isinstance(d, Affine) for o in pattern.operands for d in o) or kind.domain is not None:
        raise GraphError("einsum: three operands with an affine index or a domain, expected it on two operands")
    if order is None:
        found = best_orders(axes, result, extents, graph.root.relations)
        if len(found.paths) > 1:
            space = found.workspace * kind.dtype.bits / 8  # bytes of the elements
            return apply(replace(kind, orders=found.flops, workspace=space), tensors, name)[0]
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
        kept = tuple(n for n in dict.fromkeys((*a_names, *b_names)) if n in needed)
        dims = tuple(Axes((n,)) for n in kept) if left else pattern.result
        used = {n: extents[n] for n in (*a_names, *b_names)}
        made = apply(replace(kind, pattern=Pattern((a_dims, b_dims), dims), extents=used), [a, b], name)[0]
        left.append((made, kept, dims))
    if len(left) != 1:
        raise GraphError(f"einsum: order {order!r} leaves {len(left)} tensors, expected pairs until one is left")
    return left[0][0]
