"""Rotary position embeddings."""

from __future__ import annotations

from numbers import Real

from ..errors import GraphError, ShapeError
from ..graph.arguments import need_tensor, positive
from ..graph.graph import current_graph
from ..graph.scopes import module
from ..graph.tensor import Tensor
from ..ops.einsum import einsum
from ..ops.layout import concat, split
from ..ops.pointwise import cast, pointwise
from .kernels import one_kernel

__all__ = ["rotary", "rotary_tables"]


def rotary_tables(
    positions: Tensor, size: object, *, base: float = 10000.0, name: str = "rope"
) -> tuple[Tensor, Tensor]:
    """Make the cosines and sines of rotary position embeddings, once for all layers.

    Parameters
    ----------
    positions : Tensor
        Integers of shape (S,).
    size : sympy.Expr or int
        Size of a head, even.
    base : float
        Of the geometric progression of frequencies; it changes no cost.
    name : str
        Scope of the frequencies, a buffer in fp32.

    Returns
    -------
    tuple of Tensor
        Cosines and sines, (S, size/2) each, in fp32.
    """
    need_tensor("rotary_tables", positions)
    if isinstance(base, bool) or not isinstance(base, Real) or not base > 0:
        raise GraphError(f"rotary_tables: base {base!r}, expected a positive number")
    if positions.dtype.kind != "int" or positions.ndim != 1:
        raise ShapeError(f"rotary_tables: positions {positions!r}, expected integers of one axis")
    graph = current_graph(positions.graph)
    half = positive("rotary_tables: size", size) / 2
    with module(graph, name):
        frequencies = graph.buffer("inv_freq", (half,), dtype="fp32")
        angles = einsum(cast(positions, "fp32"), frequencies, "s, k -> s k", name="angles")
        return pointwise("cos", angles), pointwise("sin", angles)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, name: str = "rotary") -> Tensor:
    """Rotate pairs of the last axis by an angle for each position, in one kernel (Su et al. 2021, eq. 34).

    Parameters
    ----------
    x : Tensor
        Shape (..., S, K).
    cos, sin : Tensor
        Shape (S, R/2), from `rotary_tables`. R is K, or less for partial rotary positions: the first R elements are
        rotated and the others passed on.
    name : str
        Name of the kernel.

    Returns
    -------
    Tensor
        FLOPs: 3 for each element that is rotated (two products, and a sum or difference).

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, K, R = cg.dims("B S K R")
    >>> with cg.Graph("g") as g:
    ...     x, positions = g.input("x", (B, S, K)), g.input("positions", (S,), dtype="int64")
    ...     y = cg.nn.rotary(x, *cg.nn.rotary_tables(positions, R))
    >>> cg.costs(g).filter(scope="rotary").total().pointwise
    3*B*R*S
    """
    need_tensor("rotary", x, cos, sin)
    if x.ndim < 2:
        raise ShapeError(f"rotary of {x!r}: expected at least two axes (positions, size)")
    if cos.ndim != 2:
        raise ShapeError(f"rotary of {x!r}: cosines {cos!r}, expected two axes (positions, half of what is rotated)")
    half, whole = cos.sizes[-1], x.sizes[-1]
    passed = [] if x.graph.same(2 * half, whole) else [positive(f"rotary of {x!r}: what is left", whole - 2 * half)]

    def body(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b, *rest = split(x, (half, half, *passed), -1)
        made = [pointwise("sub", a * cos, b * sin), pointwise("add", b * cos, a * sin)]
        turned = cast(concat(made, -1), x.dtype)
        return concat([turned, *rest], -1) if rest else turned

    return one_kernel(name, body, x, cos, sin)
