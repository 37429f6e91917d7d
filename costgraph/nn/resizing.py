"""Images made smaller or larger: windows that divide an axis into a given number of parts, and repeated neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Annotated, Any

import sympy

from ..algebra.polynomial import ONE, Poly, poly, total
from ..errors import ShapeError
from ..graph.arguments import need_tensor, sizes_of
from ..graph.strides import Sizes
from ..graph.tensor import Tensor
from ..notation.door import READ
from ..ops.layout import expand, reshape, slice_axis
from ..ops.reduce import reduce
from ..ops.stated import opaque
from .conv import pool
from .kernels import one_kernel

__all__ = ["adaptive_pool", "upsample"]


def adaptive_pool(x: Tensor, sizes: Sequence[object], *, name: str = "adaptive_pool") -> Tensor:
    """Average windows that divide the last axes into a given number of parts, as torch.nn.AdaptiveAvgPool2d.

    Parameters
    ----------
    x : Tensor
        The axes that are divided last.
    sizes : sequence of sympy.Expr or int
        Parts of each of them. Window i of k runs from floor(i*n/k) to ceil((i + 1)*n/k), and overlaps its neighbours
        where k does not divide n.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        FLOPs: one for each element of each window. One part of each axis is a reduction, parts of a numeric axis that
        they divide are a pooling, all else is an op that states this amount.

    Raises
    ------
    ShapeError
        If there are more parts than axes, or the number of parts is a symbol and need not divide the axis.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C, R = cg.dims("B C R")
    >>> with cg.Graph("g") as g:
    ...     y = cg.nn.adaptive_pool(g.input("x", (B, C, R, R)), (3, 3))
    >>> y.shape, cg.flops(g, B=1, C=1, R=6), cg.flops(g, B=1, C=1, R=7)  # windows of 3 that share an element
    ((B, C, 3, 3), 36, 81)
    """
    need_tensor("adaptive_pool", x)
    parts = sizes_of(sizes, "adaptive_pool")
    if not 0 < len(parts) <= x.ndim:
        raise ShapeError(f"adaptive_pool of {x!r} into {len(parts)} sizes, expected 1 to {x.ndim}")
    kept, axes = x.sizes[: -len(parts)], x.sizes[-len(parts) :]
    if all(k == ONE for k in parts):
        names = [f"a{i}" for i in range(x.ndim)]
        left = [*names[: len(kept)], *("1" for _ in parts)]
        return reduce(x, f"{' '.join(names)} -> {' '.join(left)}", "mean", name=name)
    windows = [(n / k).constant for n, k in zip(axes, parts, strict=True)]
    if all(isinstance(w, int) for w in windows):
        return pool(x, "mean", window=[int(w or 0) for w in windows], name=name)
    reached = prod((_reached(x, n, k) for n, k in zip(axes, parts, strict=True)), start=prod(kept, start=ONE))
    made = prod(parts, start=prod(kept, start=ONE)) * x.element_bytes()
    # of what was pooled the gradient needs the shape alone, but torch keeps it all the same
    backward = {"flops": reached.expr, "saves": {"inputs": [0]}, "reads": [made.expr, 0]}
    out: Tensor = opaque(name, [x], ([n.expr for n in (*kept, *parts)], x.dtype), flops=reached.expr, backward=backward)
    return out


def _reached(x: Tensor, whole: Poly, parts: Poly) -> Poly:
    """Return the sizes of the windows of one axis, added up.

    Each boundary between two windows that is no whole number lies within an element which belongs to both, and
    gcd(n, k) - 1 of the k - 1 boundaries are whole.
    """
    n, k = whole.constant, parts.constant
    if isinstance(n, int) and isinstance(k, int):
        return whole + k - gcd(n, k)
    if not isinstance(k, int):
        share = whole / parts
        if all(isinstance(c, int) and all(power > 0 for _, power in m) for m, c in share.terms.items()):
            return whole
        raise ShapeError(f"adaptive_pool of {x!r}: {parts} windows over {whole} elements, expected a number of windows")
    inner = [(whole * i / k).expr for i in range(1, k)]
    return whole + total(poly(sympy.ceiling(at)) - poly(sympy.floor(at)) for at in inner)


def upsample(
    x: Tensor, factor: Annotated[int, READ] = 2, *, sizes: Sequence[object] | None = None, name: str = "upsample"
) -> Tensor:
    """Repeat each element along all axes after the first two: the nearest neighbour, in one kernel.

    Parameters
    ----------
    x : Tensor
        Shape (b, c, ...).
    factor : int
        How often along each axis.
    sizes : sequence of sympy.Expr or int, optional
        Sizes of the axes after the first two where they are not `factor` times as large but up to `factor` - 1 less:
        what an odd axis had before it was halved.
    name : str
        Name of the kernel.

    Returns
    -------
    Tensor
        No FLOPs; reads each element once. The gradient adds one for each element of `factor` times the size.

    Raises
    ------
    ShapeError
        If the factor is no integer of at least 1, or the sizes are not as many as the axes.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C, R = cg.dims("B C R")
    >>> with cg.Graph("g") as g:
    ...     y = cg.nn.upsample(g.input("x", (B, C, R, R)))
    >>> y.shape, cg.flops(g), cg.bytes_moved(g)
    ((B, C, 2*R, 2*R), 0, 20*B*C*R**2)
    """
    need_tensor("upsample", x)
    if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
        raise ShapeError(f"upsample: factor {factor!r}, expected an integer of at least 1")
    if x.ndim < 3:
        raise ShapeError(f"upsample of {x!r}: expected three axes at least, of which the first two are kept")
    large: Sizes = tuple(n * factor for n in x.sizes[2:])
    wanted = large if sizes is None else sizes_of(sizes, "upsample")
    if len(wanted) != len(large):
        raise ShapeError(f"upsample of {x!r} to {len(wanted)} sizes, expected {len(large)}")
    axes = [f"a{i}" for i in range(2, x.ndim)]
    pattern = f"b c {' '.join(f'{a} 1' for a in axes)} -> b c {' '.join(f'{a} {a}r' for a in axes)}"

    def body(x: Tensor) -> Tensor:
        apart = reshape(x, (*x.sizes[:2], *(n for size in x.sizes[2:] for n in (size, 1))))
        times: dict[str, Any] = {f"{a}r": factor for a in axes}
        repeated = expand(apart, pattern, **times)
        y = reshape(repeated, (*x.sizes[:2], *large))
        for i, (size, whole) in enumerate(zip(wanted, large, strict=True)):
            y = y if size == whole else slice_axis(y, i + 2, 0, size)
        return y

    return one_kernel(name, body, x)
