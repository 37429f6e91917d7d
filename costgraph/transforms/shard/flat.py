"""Flat buffers for collectives over several tensors, with a row for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from ...algebra.polynomial import ONE, ZERO, Poly
from ...dtypes import DType
from ...ir.graph import (
    Factors,
    Graph,
    Mesh,
    OpKind,
    Placement,
    Tensor,
)
from ...ir.strides import numel
from ...ops.elementwise import (
    FUNCTIONS,
    Pointwise,
)
from ...ops.layout import (
    Concat,
    Rearrange,
    Slice,
)
from ...ops.loops import Kernel

__all__ = ["add_op", "cast_to", "from_rows", "in_rows", "joined", "pieces"]


def add_op(graph: Graph, kind: OpKind, operands: Sequence[Tensor], name: str, phase: str) -> Tensor:
    """Add an op with one result; the prefix of its name is its scope."""
    op = graph.add_op(kind, operands, name, phase)
    op.scope = name.rpartition("/")[0]
    return op.results[0]


def cast_to(graph: Graph, t: Tensor, dtype: DType, name: str, phase: str) -> Tensor:
    """Return a tensor in a format, without a cast if it has it already."""
    return (
        t if t.dtype == dtype else add_op(graph, Pointwise(function=FUNCTIONS["cast"], dtype=dtype), [t], name, phase)
    )


def joined(graph: Graph, rows: Sequence[Tensor], dtype: DType, name: str, phase: str) -> Tensor:
    """Concatenate rows in one buffer, cast if necessary."""
    kind = Concat(axis=rows[0].ndim - 1)
    if all(row.dtype == dtype for row in rows):
        return add_op(graph, kind, rows, name, phase)
    body = graph.start_body("copy_in", fused=True)
    inner = [cast_to(body, body.adopt(row), dtype, f"{name}/cast", phase) for row in rows]
    body.outputs.append(add_op(body, kind, inner, f"{name}/concat", phase))
    return add_op(graph, Kernel(body=body, backward="ops"), body.captured, name, phase)


def _parts(dim: Factors, size: Poly, axes: Sequence[str]) -> list[str | Poly]:
    """Return the factors of an axis after it is gathered along some mesh axes."""
    return [f for f in dim if not isinstance(f, str) or f in axes] or [size]


def in_rows(graph: Graph, t: Tensor, placement: Placement, axes: Sequence[str], mesh: Mesh, phase: str) -> Tensor:
    """Return a tensor as one row per rank along `axes`, which holds the shard of that rank."""
    flat = [f for dim, n in zip(placement.dims, t.sizes, strict=True) for f in _parts(dim, n, axes)]
    local_dims = [i for i, f in enumerate(flat) if not isinstance(f, str)]
    split = tuple(mesh[f] if isinstance(f, str) else f for f in flat)
    merged = (*(mesh[a] for a in axes), numel([split[i] for i in local_dims]))
    kind = Rearrange(split=split, order=(*(flat.index(a) for a in axes), *local_dims), merged=merged)
    return add_op(graph, kind, [t], f"{t.name}.rows", phase)


def pieces(graph: Graph, rows: Tensor, sizes: Sequence[Poly], name: str, phase: str) -> list[Tensor]:
    """Slice rows into pieces, one for each tensor."""
    start, out = ZERO, []
    for size in sizes:
        kind = Slice(axis=rows.ndim - 1, start=start, size=size, step=1)
        out.append(add_op(graph, kind, [rows], f"{name}.piece", phase))
        start = start + size
    return out


def from_rows(
    graph: Graph, rows: Tensor, placement: Placement, sizes: Sequence[Poly], axes: Sequence[str], mesh: Mesh, name: str,
    phase: str, *, full: bool,
) -> Tensor:  # fmt: skip
    """Return a tensor from its rows: all of it as a copy if `full`, else one rank's shard."""
    dims = [_parts(dim, n, axes) for dim, n in zip(placement.dims, sizes, strict=True)]
    local_factors = [f for dim in dims for f in dim if not isinstance(f, str)]
    positions = iter(range(len(axes), len(axes) + len(local_factors)))
    order: list[int] = [] if full else list(range(len(axes)))
    merged = []
    for dim in dims:
        factors = [f for f in dim if full or not isinstance(f, str)]
        order += [axes.index(f) if isinstance(f, str) else next(positions) for f in factors]
        merged.append(numel([mesh[f] if isinstance(f, str) else f for f in factors]))
    split = (*(mesh[a] if full else ONE for a in axes), *local_factors)
    return add_op(
        graph, Rearrange(split=split, order=tuple(order), merged=tuple(merged), copy=full), [rows], name, phase
    )
