"""Einsum: contraction orders, the op kind with its costs, and the public function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from operator import index
from typing import Annotated, NamedTuple

from ..algebra.dominance import Relations, prune
from ..algebra.extremum import Max, Min
from ..algebra.polynomial import ONE, ZERO, Poly, atom, poly
from ..algebra.symbols import kind_of, shown
from ..dtypes import DType, promote
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, PatternError, ShapeError
from ..ir.graph import (
    Domain,
    Extents,
    Flag,
    Flops,
    Graph,
    Limit,
    Op,
    OpKind,
    Places,
    Result,
    Rooms,
    Shape,
    Split,
    Tensor,
    WorkspaceKind,
    apply,
    current_graph,
    is_amount,
    need,
    need_list,
    optional,
)
from ..ir.graph import sizes as sizes_by_name
from ..ir.strides import Sizes, windows_along
from ..notation.pattern import Affine, Axes, Pattern, parse_pattern
from . import rules
from . import sharding_rule as splits
from .axis_sizes import extents_of, need_indexed, need_plain
from .layout import rearrange
from .reduce import reduce
from .registry import register

__all__ = [
    "ContractionOrders",
    "best_orders",
    "Einsum",
    "Restricted",
    "inherited",
    "contract",
    "einsum",
]


# -- contraction order -------------------------------------------------------------------------------------------------
# Pairwise contraction order: the cheapest for all sizes, or the Min over all that may be.

# 2**n subsets, each split in two: 3,000 splits for 8 operands
_MOST_OPERANDS = 8

Path = tuple[tuple[int, int], ...]
Tree = tuple["Tree", "Tree"] | int


class ContractionOrders(NamedTuple):
    """Contraction orders that no other order dominates."""

    paths: list[Path]
    """Position pairs, as in opt_einsum."""
    flops: Poly
    """FLOPs: of the only path, or the Min over all."""
    workspace: Poly
    """Peak elements in live intermediates, the maximum over the paths that are optimal for sizes above 1."""


def best_orders(
    axes: Sequence[frozenset[str]], result: frozenset[str], extents: Mapping[str, Poly], relations: Relations
) -> ContractionOrders:
    """Find the best orders by dynamic programming over subsets, pruned by dominance.

    Raise GraphError if there are too many operands to search; the caller has to give the order.
    """
    n = len(axes)
    if n > _MOST_OPERANDS:
        raise GraphError(f"einsum of {n} operands: pass order=, as at most {_MOST_OPERANDS} operands are searched")
    all_operands = frozenset(range(n))

    def kept_axes(subset: frozenset[int]) -> frozenset[str]:
        needed = result.union(*(axes[i] for i in all_operands - subset))
        return frozenset().union(*(axes[i] for i in subset)) & needed if subset != all_operands else result

    def cost(a: frozenset[int], b: frozenset[int]) -> Poly:
        involved = (axes[min(a)] if len(a) == 1 else kept_axes(a)) | (axes[min(b)] if len(b) == 1 else kept_axes(b))
        points = prod((extents[x] for x in sorted(involved)), start=ONE)
        return 2 * points if involved - kept_axes(a | b) else points

    best: dict[frozenset[int], list[tuple[Poly, Tree]]] = {frozenset([i]): [(ZERO, i)] for i in range(n)}
    for size in range(2, n + 1):
        for subset in map(frozenset, combinations(range(n), size)):
            candidates = []
            first = min(subset)
            for k in range(size - 1):
                for others in combinations(sorted(subset - {first}), k):
                    a = frozenset((first, *others))
                    b = subset - a
                    product_cost = cost(a, b)
                    candidates += [(x + y + product_cost, (s, t)) for x, s in best[a] for y, t in best[b]]
            best[subset] = prune(candidates, relations, largest=False)
    top = best[all_operands]
    flops = top[0][0] if len(top) == 1 else atom(Min(*(p.expr for p, _ in top)))
    spaces = [_intermediate_elements(tree, axes, kept_axes, extents)[1] for tree in _optimal_above_one(top)]
    return ContractionOrders([_path(tree, n) for _, tree in top], flops, poly(Max(*(s.expr for s in spaces))))


def _optimal_above_one(orders: list[tuple[Poly, Tree]]) -> list[Tree]:
    """Drop orders that are optimal only for size 1, where an outer product is as small as any other."""
    names = {k for p, _ in orders for k in p.generators() if k[0] != "~"}
    larger = {k: Poly({((k, 1),): 1}) + 1 for k in names}
    return [tree for _, tree in prune([(p.substitute(larger), tree) for p, tree in orders], largest=False)]


def _path(tree: Tree, n: int) -> Path:
    """Return a tree as a path: each step removes a pair of positions and appends its product."""
    steps: list[tuple[int, int]] = []
    places: list[object] = list(range(n))

    def visit(node: Tree) -> Tree:
        if isinstance(node, int):
            return node
        a, b = visit(node[0]), visit(node[1])
        i, j = sorted((places.index(a), places.index(b)))
        steps.append((i, j))
        places.pop(j)
        places.pop(i)
        places.append(node)
        return node

    visit(tree)
    return tuple(steps)


def _intermediate_elements(
    tree: Tree,
    axes: Sequence[frozenset[str]],
    kept_axes: Callable[[frozenset[int]], frozenset[str]],
    extents: Mapping[str, Poly],
) -> tuple[frozenset[int], Poly]:
    """Return a tree's operands and the elements in its intermediates, without its own result."""
    if isinstance(tree, int):
        return frozenset([tree]), ZERO
    (a, x), (b, y) = (_intermediate_elements(t, axes, kept_axes, extents) for t in tree)
    intermediates = [prod((extents[n] for n in sorted(kept_axes(p))), start=ONE) for p in (a, b) if len(p) > 1]
    return a | b, sum([x, y, *intermediates], start=ZERO)


# -- op kind -----------------------------------------------------------------------------------------------------------

#: A domain, with its query and key axes by name.
Restricted = tuple[Domain, str, str]


def _is_restriction(value: object) -> bool:
    return isinstance(value, tuple) and [type(v) for v in value] == [Domain, str, str] and bool(value[1] != value[2])


@register
@dataclass(frozen=True, kw_only=True)
class Einsum(WorkspaceKind):
    """Contraction over named axes."""

    name = "einsum"
    restricted = takes_complex = True
    pattern: Pattern
    extents: Extents
    """Size of every pattern axis."""
    domain: Annotated[Restricted | None, optional("None, or a domain and two axes", _is_restriction), Limit(1)] = None
    """Attention domain over two axes."""
    dtype: DType
    """Result dtype."""
    orders: Annotated[Poly | None, optional("an amount that is not negative", is_amount)] = None
    """FLOPs with three or more operands if no contraction order is optimal for all sizes."""
    rooms: Rooms = ()
    """Positions after the last window, for outputs with a given size."""
    sizes: Shape | None = None
    """Shape of a result that indices write to: zeros where nothing is written."""
    order: Places = ()
    """Operands in gradient order; () means from first to last."""
    causal: Flag = False
    """Whether windows see earlier positions only, which `decode` caches."""
    writes = rules.all_results

    @property
    def summed(self) -> bool:
        """Whether it adds: an axis is contracted, or several index points map to one element."""
        return bool(set(self.extents) - set(self.pattern.result_names)) or any(
            isinstance(a, Affine) and len(a.terms) > 1 for a in self.pattern.result
        )

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer one contiguous result."""
        pattern, extents = self.pattern, self.extents
        for i, t in enumerate(operands):
            for dim, size in zip(pattern.operands[i], t.sizes, strict=True):
                if isinstance(dim, Axes) and not t.graph.same(prod((extents[n] for n in dim.names), start=ONE), size):
                    raise ShapeError(
                        f"operand {i + 1} {t!r}: an axis of size {size} does not match {dim} in the pattern"
                    )
        _need_one_domain(pattern, operands, self.domain)
        domain = _result_domain(pattern, self.domain)
        if self.sizes is not None:
            sizes = _stated_sizes(pattern, extents, self.sizes, operands[0].graph)
        else:
            sizes = tuple(prod((extents[n] for n in a.names), start=ONE) for a in pattern.result)
        return [Result(sizes, self.dtype, domain=domain)]

    def flops(self, op: Op) -> Flops:
        """Count 2 per index point if it adds, else 1 for the product alone.

        With complex operands, count 8 and 6.
        """
        if any(t.dtype.kind == "complex" for t in op.operands):
            return self._real_flops(op) * (4 if self.summed else 6)
        return self._real_flops(op)

    def _real_flops(self, op: Op) -> Flops:
        if self.orders is not None:
            return Flops(matmul=self.orders) if self.summed else Flops(pointwise=self.orders)
        full_points = executed = prod(self.extents.values(), start=ONE)
        if self.domain is not None:
            domain, query, key = self.domain
            other_points = prod((n for name, n in self.extents.items() if name not in (query, key)), start=ONE)
            executed = other_points * domain.points(self.extents[query], self.extents[key], op.graph.root.relations)
        return Flops(matmul=2 * executed, full=2 * full_points) if self.summed else Flops(pointwise=executed)

    def least(self, op: Op) -> Poly:
        """Return the matmul FLOPs of the convolution algorithm with the fewest products, without its transforms.

        F(n, r) in Winograd 1980 (Arithmetic Complexity of Computations, theorem 5a) computes n outputs of a window of r
        with n + r - 1 products, which is optimal; so does the gradient by either operand. Here n is the whole axis,
        the limit of tiles F(m, r): F(2x2, 3x3) needs 16/36 of the products of each tile, F(4x4, 3x3) 36/144 (Lavin and
        Gray 2015, arXiv 1509.09308), and a Fourier transform more than the limit.
        """
        executed = self.flops(op).matmul
        if self.orders is not None or self.domain is not None or not executed:
            return executed
        products = dict(_window_products(self.pattern, self.extents))
        paired_names = {name for pair in products for name in pair}
        unpaired = prod((n for name, n in self.extents.items() if name not in paired_names), start=2 * ONE)
        return prod(products.values(), start=unpaired)

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the elements that index points reach in each operand."""
        return rules.reached_by_index(op, self.pattern, self.extents, self.domain)

    def placed(self, op: Op) -> Split:
        """Split axes outside affine indices; a split contracted axis gives partial sums."""
        pattern = self.pattern
        dims = [d for o in (*pattern.operands, pattern.result) for d in o]
        unsplittable = {n for d in dims if isinstance(d, Affine) for n in d.names}
        for side in (*pattern.operands, pattern.result):
            names = [n for d in side for n in d.names]
            unsplittable |= {n for n in names if names.count(n) > 1}  # diagonals
        operand_axes = {n for i in range(len(pattern.operands)) for n in pattern.operand_names(i)}
        labels = [tuple(d.names if isinstance(d, Axes) else () for d in o) for o in (*pattern.operands, pattern.result)]

        def local(extents: Mapping[str, Poly], ranks: Mapping[str, str]) -> OpKind:
            local_extents = {n: extents[n] for n in self.extents}
            local_kind = replace(self, extents=local_extents)
            if self.sizes is not None:
                result_dims = zip(labels[-1], pattern.result, self.sizes, strict=True)
                sizes = [
                    splits.local_of([names], local_extents)[0] if isinstance(d, Axes) else n
                    for names, d, n in result_dims
                ]
                local_kind = replace(local_kind, sizes=tuple(sizes))
            if self.orders is not None:
                axes = [frozenset(pattern.operand_names(i)) for i in range(len(pattern.operands))]
                orders = best_orders(axes, frozenset(pattern.result_names), local_extents, op.graph.root.relations)
                local_kind = replace(local_kind, orders=orders.flops, workspace=orders.workspace * self.dtype.bits / 8)
            return local_kind

        return Split(
            operands=tuple(labels[:-1]),
            results=(labels[-1],),
            extents=self.extents,
            local=local,
            reduced=dict.fromkeys(operand_axes - set(pattern.result_names), "sum"),
            whole=frozenset(unsplittable),
            linear=len(op.operands) == 1,
            product=len(op.operands) > 1,
        )

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check pattern, extents, domain and orders against the operands."""
        pattern, restriction, many = self.pattern, self.domain, len(operands) > 2
        need(bool(operands), "no operand")
        need((self.orders is not None) == many, f"orders of {len(operands)} operands")
        need(not self.order or sorted(self.order) == [*range(len(operands))], f"order {self.order}")
        need_indexed(operands, pattern, self.extents, self.sizes, self.rooms)
        if self.sizes is None:
            need_plain(pattern)
            operand_axes = {n for i in range(len(operands)) for n in pattern.operand_names(i)}
            need(set(pattern.result_names) <= operand_axes, f"the result of pattern {shown(str(pattern))}")
        if restriction is not None:
            domain, query, key = restriction
            need({query, key} <= set(self.extents), f"domain over {shown(query)} and {shown(key)}")
            domain.points(self.extents[query], self.extents[key])  # raises if it cannot be counted
        need(
            restriction is not None or all(t.domain is None for t in operands), "no domain although an operand has one"
        )
        if many:  # derive the FLOPs of several operands again instead of trusting the file
            affine = any(isinstance(a, Affine) for o in pattern.operands for a in o)
            need(not affine and restriction is None, f"{len(operands)} operands with an affine index or a domain")
            axes = [frozenset(pattern.operand_names(i)) for i in range(len(operands))]
            alternatives = (best_orders(axes, frozenset(pattern.result_names), self.extents, k) for k in known)
            need(any(f.flops == self.orders for f in alternatives), f"orders {shown(str(self.orders))}")


def _window_products(pattern: Pattern, extents: Mapping[str, Poly]) -> Iterator[tuple[tuple[str, str], Poly]]:
    """Yield the axis pairs of sliding windows with their minimal products; each tensor has one axis per pair."""
    tensors = [*pattern.operands, pattern.result]
    if len(tensors) != 3:
        return
    names = [{name for dim in dims for name in dim.names} for dims in tensors]
    for i, dims in enumerate(tensors):
        for dim in dims:
            if isinstance(dim, Affine) and len(dim.terms) == 2:
                pair = dim.names
                membership = sorted(tuple(name in names[j] for name in pair) for j in range(3) if j != i)
                if membership == [(False, True), (True, False)]:
                    yield (pair[0], pair[1]), _products(*((extents[name], step) for name, step in dim.terms))


def _products(output: tuple[Poly, int], window: tuple[Poly, int]) -> Poly:
    """Return the minimal products of a window; a strided one splits into one window per phase."""
    (n, stride), (r, gap) = output, window
    if stride == 1 < gap:
        (n, stride), (r, gap) = (r, gap), (n, stride)
    phases = 1
    if gap == 1 and isinstance(r.constant, int):
        phases = min(stride, r.constant)
    return n * phases + r - phases


def _stated_sizes(pattern: Pattern, extents: Mapping[str, Poly], sizes: Sizes, graph: Graph) -> Sizes:
    """Return the given shape of a result that indices write to, checked against the pattern."""
    if len(sizes) != len(pattern.result):
        raise ShapeError(f"result of {len(sizes)} axes, the pattern {pattern} has {len(pattern.result)}")
    for dim, size in zip(pattern.result, sizes, strict=True):
        if isinstance(dim, Axes) and not graph.same(prod((extents[n] for n in dim.names), start=ONE), size):
            raise ShapeError(f"result: an axis of size {size} does not match {dim} in the pattern")
    return sizes


def _result_domain(pattern: Pattern, restriction: tuple[Domain, str, str] | None) -> tuple[Domain, int, int] | None:
    if restriction is None:
        return None
    # a position made by an index differs from its axis position
    places = [a.names if isinstance(a, Axes) else None for a in pattern.result]
    domain, query, key = restriction
    if (query,) in places and (key,) in places:
        return domain, places.index((query,)), places.index((key,))
    return None


def inherited(pattern: Pattern, operands: Sequence[Tensor]) -> tuple[Domain, str, str] | None:
    """Return the domain of the first operand that has one."""
    for dims, t in zip(pattern.operands, operands, strict=True):
        if t.domain is not None:
            domain, query, key = t.domain
            names = {d.names for d in (dims[query], dims[key]) if isinstance(d, Axes)}
            if len(names) != 2 or any(len(n) != 1 for n in names):
                raise ShapeError(f"{t!r} is restricted to a domain: expected a name each for axes {query} and {key}")
            return domain, dims[query].names[0], dims[key].names[0]
    return None


def _need_one_domain(pattern: Pattern, operands: Sequence[Tensor], restriction: tuple[Domain, str, str] | None) -> None:
    """Raise ShapeError if an operand has values outside the contraction's domain."""
    for dims, t in zip(pattern.operands, operands, strict=True):
        if inherited(Pattern((dims,), ()), [t]) not in (None, restriction):
            raise ShapeError("operands restricted to two different domains, expected one")
    indices = [d for dims in pattern.operands for d in dims if isinstance(d, Affine)]
    if restriction is not None and any(set(d.names) & set(restriction[1:]) for d in indices):
        raise ShapeError(
            f"domain over {' and '.join(restriction[1:])}, one of which is in an affine index: expected plain axes"
        )


# -- functions ---------------------------------------------------------------------------------------------------------


def _slide(pattern: Pattern, operands: Sequence[Tensor], extents: dict[str, Poly]) -> tuple[Poly, ...]:
    """Infer the extents of outputs that occur in an affine index only, as many windows as fit after padding both sides.

    Return the positions that remain for outputs with a given size, checked again when sizes are bound.
    """
    rooms = []
    for i, t in enumerate(operands):
        for dim, size in zip(pattern.operands[i], t.sizes, strict=True):
            if not isinstance(dim, Affine):
                continue
            location = f"operand {i + 1} {t!r}, index {dim}"
            unknown = [(n, step) for n, step in dim.terms if n not in extents]
            if len(unknown) > 1:
                names = " and ".join(n for n, _ in unknown)
                raise ShapeError(f"{location}: sizes of {names} are unknown, expected at most one unknown size")
            last_position = sum((step * (extents[n] - 1) for n, step in dim.terms if n in extents), start=poly(0))
            # a negative offset pads both sides, a positive one skips positions at the start only
            room = size - 1 - last_position - (2 if dim.offset < 0 else 1) * dim.offset
            if unknown:
                name, step = unknown[0]
                extents[name] = windows_along(room + 1, 0, step)
                room = poly(0)
            elif room.constant is None:
                rooms.append(room)
            extent = extents[unknown[0][0]] if unknown else room + 1
            if extent.constant is not None and extent.constant < 1:
                raise ShapeError(
                    f"{location}: reaches beyond an axis of size {size}, expected a smaller window or more padding"
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
        For three or more operands, the pairs to contract, as in opt_einsum: positions in the list of remaining
        operands, with each product appended. By default the order that is cheapest for all sizes, or else one op with
        the Min over the orders as its FLOPs.
    domain : Domain, optional
        Position pairs to compute on two axes, such as `costgraph.Domain(causal=True)`.
    over : pair of str
        The two axes, queries first: `over=("s", "t")`.
    dtype : str or DType, optional
        Result dtype, by default promoted from the operands.
    name : str
        Op name.
    **sizes : sympy.Expr or int
        Sizes that shapes do not determine: for split axes and for outputs in affine indices.

    Returns
    -------
    Tensor
        Contiguous, with the axes of the pattern's right side. FLOPs: 2 per index point if an axis is summed, else 1
        (derived: one multiply and one add per point).

    Raises
    ------
    PatternError, ShapeError, GraphError
        If the pattern is invalid, sizes disagree, or an operand is not a tensor.

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
        raise GraphError("einsum: order= of fewer than three operands, expected three or more")
    return apply(kind, tensors, name)[0]


def contract(tensors: Sequence[Tensor], kind: Einsum, *, name: str = "einsum") -> Tensor:
    """Contract tensors by a pattern with affine indices, diagonals or new axes on its right side.

    With `sizes`, the result is zero where no index point lands, and sums points that land on one element.
    """
    pattern, extents = kind.pattern, kind.extents
    if len(tensors) <= 2:
        # a gradient may have a domain although its primal has none
        return apply(replace(kind, domain=kind.domain or inherited(pattern, tensors)), tensors, name)[0]
    graph = current_graph(tensors[0].graph)
    names = tuple(dict.fromkeys(n for i in range(len(tensors)) for n in pattern.operand_names(i)))
    kept_axes = tuple(Axes((n,)) for n in names if n in pattern.result_names)
    if kind.sizes is None:
        return _chain(graph, list(tensors), kind, None, name)
    contracted_extents = {n: extents[n] for n in names}
    contraction = replace(kind, pattern=Pattern(pattern.operands, kept_axes), extents=contracted_extents, sizes=None)
    contracted = _chain(graph, list(tensors), contraction, None, name)
    result_extents = {n: extents[n] for n in pattern.result_names}
    return apply(
        replace(kind, pattern=Pattern((kept_axes,), pattern.result), extents=result_extents), [contracted], name
    )[0]


def _single(x: Tensor, pattern: Pattern, text: str, name: str) -> Tensor:
    # no product: a sum or a view
    if any(isinstance(a, Affine) for a in pattern.operands[0]):
        raise PatternError(f"pattern {text!r}: an index such as h*2+r needs a second operand")
    if len(set(pattern.operand_names(0))) < len(pattern.operand_names(0)):
        raise PatternError(f"pattern {text!r}: the diagonal of a single operand, expected each axis once")
    summed = set(pattern.operand_names(0)) - set(pattern.result_names)
    return reduce(x, text, "sum", name=name) if summed else rearrange(x, text, name=name)


def _check_axes(pattern: Pattern, extents: dict[str, Poly], text: str) -> None:
    operand_axes = {n for i in range(len(pattern.operands)) for n in pattern.operand_names(i)}
    for n in pattern.result_names:
        if n not in operand_axes:
            raise PatternError(f"pattern {text!r}: axis {n!r} of the result is in no operand")
    unused = sorted(set(extents) - operand_axes)
    if unused:
        raise PatternError(f"pattern {text!r}: size given for {unused[0]!r}, which is not one of its axes")


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
    domain.points(extents[over[0]], extents[over[1]])  # raises if it cannot be counted
    return domain, over[0], over[1]


def _format(tensors: Sequence[Tensor], dtype: object) -> DType:
    if dtype is not None:
        return find_dtype(dtype)
    common = tensors[0].dtype
    for t in tensors[1:]:
        common = promote(common, t.dtype)
    return common


def _chain(
    graph: Graph, tensors: list[Tensor], kind: Einsum, order: Sequence[Sequence[int]] | None, name: str
) -> Tensor:
    """Contract three or more operands pairwise."""
    pattern, extents = kind.pattern, kind.extents
    axes = [frozenset(pattern.operand_names(i)) for i in range(len(tensors))]
    result = frozenset(pattern.result_names)
    if any(isinstance(d, Affine) for o in pattern.operands for d in o) or kind.domain is not None:
        raise GraphError("einsum of three or more operands with an affine index or a domain, expected two operands")
    if order is None:
        best = best_orders(axes, result, extents, graph.root.relations)
        if len(best.paths) > 1:
            space = best.workspace * kind.dtype.bits / 8  # in bytes
            return apply(replace(kind, orders=best.flops, workspace=space), tensors, name)[0]
        order = best.paths[0]
    need_list("einsum: order", order)
    remaining = list(
        zip(tensors, (pattern.operand_names(i) for i in range(len(tensors))), pattern.operands, strict=True)
    )
    for step, pair in enumerate(order):
        try:
            i, j = sorted(map(index, pair), reverse=True)
            if not 0 <= j < i:
                raise IndexError
            (b, b_names, b_dims), (a, a_names, a_dims) = remaining.pop(i), remaining.pop(j)
        except (ValueError, IndexError, TypeError):
            raise GraphError(
                f"einsum: order {order!r}, step {step + 1}: expected two positions among the remaining operands"
            ) from None
        needed = result.union(*(names for _, names, _ in remaining))
        kept_names = tuple(n for n in dict.fromkeys((*a_names, *b_names)) if n in needed)
        dims = tuple(Axes((n,)) for n in kept_names) if remaining else pattern.result
        pair_extents = {n: extents[n] for n in (*a_names, *b_names)}
        product = apply(replace(kind, pattern=Pattern((a_dims, b_dims), dims), extents=pair_extents), [a, b], name)[0]
        remaining.append((product, kept_names, dims))
    if len(remaining) != 1:
        raise GraphError(f"einsum: order {order!r} leaves {len(remaining)} tensors, expected pairs until one is left")
    return remaining[0][0]
