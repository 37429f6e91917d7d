"""What an op asks of a device, as numbers: how often it runs, its FLOPs and bytes, and the shape of its products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeGuard

from ...algebra.polynomial import ONE, Poly, as_poly
from ...graph.op import Op
from ...notation.pattern import Affine, Pattern
from ...ops.contraction import Einsum
from ..costs import compute_dtype, executions
from ..work import Work

__all__ = ["CLASSES", "Load", "Product", "load_of"]

#: What an op is to a device. The first that fits: two products in one kernel are attention, a product without axes of
#: its own (of experts, say) is grouped; a kernel that sums and does more is a norm.
CLASSES = (
    "attention", "grouped", "convolution", "product", "indexed", "norm", "reduction", "pointwise", "copy", "other",
)  # fmt: skip
#: Kinds whose places in memory depend on data.
_INDEXED = frozenset({"gather", "scatter", "sort", "top_k", "dispatch"})


@dataclass(frozen=True)
class Product:
    """A contraction as a product of matrices, `batch` of m by k with k by n: a convolution with its window unfolded."""

    flops: float
    """FLOPs of one run"""
    batch: float = 1.0
    m: float = 1.0
    n: float = 1.0
    k: float = 1.0
    format: str = "fp32"
    """number format of the operands"""
    windows: str = ""
    """summed: a convolution; kept: its gradient by the weight; spread: by the input; empty where there are none"""
    window: float = 1.0
    """places of a window, or positions of it where these are fewer"""
    strided: bool = False
    """whether windows lie further apart than one place"""
    fewest: float = 1.0
    """FLOPs of the algorithm that needs the fewest, over those of all index points"""


@dataclass(frozen=True)
class Load:
    """What one op asks of a device in one run of it."""

    role: str
    """one of `CLASSES`"""
    times: float
    """how often it runs"""
    flops: tuple[tuple[str, str, float], ...]
    """kind, number format and FLOPs"""
    bytes: float
    """bytes read and written"""
    read: float
    """share of them that is read"""
    bits: int
    """of an element, the widest of operands and results"""
    product: Product | None = None
    """that of most FLOPs"""
    link: str | None = None
    """the link that a transfer goes over"""


def _number(value: Poly, sizes: Mapping[str, Poly]) -> float:
    found = value.bind(sizes)
    return float(found.expr if found.constant is None else found.constant)


def load_of(work: Work, sizes: Mapping[str, Poly]) -> Load:
    """Return what an op asks of a device."""
    op, times = work.op, _number(work.times, sizes)
    inside = [(op, ONE)] if op.body is None else [(o, t) for o, t, _ in executions(op.body, moves=False)]
    products = sorted(_products(inside, sizes), key=lambda p: -p.flops)
    read = sum(_number(a * t.element_bytes(), sizes) for t, a in zip(op.operands, op.kind.reads(op), strict=False))
    written = sum(_number(a * t.element_bytes(), sizes) for t, a in zip(op.results, op.kind.writes(op), strict=False))
    return Load(
        role=_role(inside, products, work),
        times=times,
        flops=tuple((*key, _number(amount, sizes) / times) for key, amount in work.flops.items()),
        bytes=_number(work.bytes, sizes) / times,
        read=read / (read + written) if read + written else 0.0,
        bits=max((t.dtype.bits for t in (*op.operands, *op.results)), default=0),
        product=products[0] if products else None,
        link=work.link,
    )


def _role(inside: list[tuple[Op, Poly]], products: list[Product], work: Work) -> str:
    if products:
        if len(products) > 1:
            return "attention"
        if not any(isinstance(op.kind, Einsum) for op, _ in inside):
            return "grouped"
        return "convolution" if products[0].windows else "product"
    kinds = {op.kind.name for op, _ in inside}
    if kinds & _INDEXED:
        return "indexed"
    if "reduce" in kinds:
        return "norm" if "pointwise" in kinds else "reduction"
    if kinds <= {"pointwise", "rearrange"}:
        return "pointwise" if work.flops else "copy"
    return "other"


def _products(inside: list[tuple[Op, Poly]], sizes: Mapping[str, Poly]) -> Iterator[Product]:
    for op, times in inside:
        flops = op.kind.flops(op).matmul
        if flops:
            amount = _number(flops * times, sizes)
            if isinstance(op.kind, Einsum) and len(op.operands) == 2:
                yield _einsum(op, op.kind, amount, sizes)
            else:  # of rows that are sorted among matrices, or of a chain: as square as its result
                side = max(_number(op.results[0].numel, sizes), 1.0) ** 0.5
                yield Product(amount, 1.0, side, side, max(amount / (2 * side * side), 1.0), compute_dtype(op))


def _einsum(op: Op, kind: Einsum, flops: float, sizes: Mapping[str, Poly]) -> Product:
    """Return a contraction of two tensors as a product of matrices."""
    extents = {name: _number(as_poly(n), sizes) for name, n in kind.extents.items()}
    first, second = (frozenset(kind.pattern.operand_names(i)) for i in range(2))
    made = frozenset(kind.pattern.result_names)

    def points(names: frozenset[str]) -> float:
        return prod((extents[name] for name in names), start=1.0)

    m, n, k = points((first - second) & made), points((second - first) & made), points((first | second) - made)
    slid = [dim for dims in (*kind.pattern.operands, kind.pattern.result) for dim in dims if _slides(dim)]
    for dim, size in zip(kind.pattern.result, op.results[0].sizes, strict=True):
        if _slides(dim):  # many points put on one place: they are summed there
            along, across = sorted(dim.names, key=lambda name: name not in first)
            places = _number(size, sizes)
            m, n, k = m * places / extents[along], n / extents[across], k * points(frozenset(dim.names)) / places
    executed = _number(kind.flops(op).matmul, sizes)
    return Product(
        flops, points(first & second & made), m, n, k, compute_dtype(op), _windows(slid, kind.pattern, extents),
        prod((min(extents[name] for name in dim.names) for dim in slid), start=1.0),
        any(factor > 1 for dim in slid for _, factor in dim.terms),
        _number(kind.least(op), sizes) / executed if executed else 1.0,
    )  # fmt: skip


def _slides(dim: object) -> TypeGuard[Affine]:
    return isinstance(dim, Affine) and len(dim.terms) == 2


def _windows(slid: list[Affine], pattern: Pattern, extents: Mapping[str, float]) -> str:
    if not slid:
        return ""
    if any(_slides(dim) for dim in pattern.result):
        return "spread"
    # positions are a stride apart, places of a window next to each other; of two steps of one the longer is positions
    found = min((factor, extents[name], name) for dim in slid for name, factor in dim.terms)[2]
    return "kept" if found in pattern.result_names else "summed"
