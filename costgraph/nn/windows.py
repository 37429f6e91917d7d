"""Attention within windows of an image: cutting and shifting windows, what is added to their scores, merging."""

from __future__ import annotations

from ..algebra.polynomial import ZERO, Poly, poly
from ..errors import ShapeError
from ..graph.arguments import need_tensor, positive
from ..graph.graph import current_graph
from ..graph.scopes import module, scope
from ..graph.strides import windows_along
from ..graph.tensor import Tensor
from ..ops.fill import pad
from ..ops.index import gather
from ..ops.layout import expand, rearrange, roll, slice_axis
from .kernels import one_kernel
from .linear import linear
from .norms import layer_norm

__all__ = ["patch_merging", "window_bias", "window_merge", "window_partition"]


def _padded(x: Tensor, multiple: Poly, name: str) -> Tensor:
    """Append zeros to rows and columns of (b, h, w, c) up to a multiple, in one kernel; a copy where there are none."""
    sizes = [multiple * windows_along(size, 0, multiple) for size in x.sizes[1:3]]
    return one_kernel(name, lambda x: pad(pad(x, 1, 0, sizes[0]), 2, 0, sizes[1]), x)


def _window(place: str, x: Tensor, side: object, shift: object) -> tuple[Poly, Poly]:
    need_tensor(place, x)
    size, by = positive(f"{place}: side", side), poly(shift)
    if by.constant is not None and (not isinstance(by.constant, int) or by.constant < 0):
        raise ShapeError(f"{place}: shift {by}, expected a whole number of at least 0")
    return size, by


def window_partition(x: Tensor, side: object, shift: object = 0, *, name: str = "windows") -> Tensor:
    """Cut images into square windows, for attention within each (Liu et al. 2021, arXiv 2103.14030, section 3.2).

    Parameters
    ----------
    x : Tensor
        Shape (b, h, w, c). Rows and columns are padded with zeros up to a multiple of `side`: a copy, as torch's `pad`
        makes one even where nothing is added.
    side : sympy.Expr or int
        Rows and columns of a window.
    shift : sympy.Expr or int
        Rows and columns by which the image is rolled towards its start before.
    name : str
        Scope of the ops.

    Returns
    -------
    Tensor
        Shape (b*n, side*side, c) with n = ceiling(h/side)*ceiling(w/side). No FLOPs: the image is read and written once
        for padding, once an axis for a shift, and once to put the positions of a window side by side.

    Raises
    ------
    GraphError, ShapeError
        If `x` has another number of axes, or a size is none.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C = cg.dims("B C")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.window_partition(g.input("x", (B, 56, 56, C)), 7, 3))
    >>> g.outputs[0].shape
    (64*B, 49, C)
    """
    size, by = _window("window_partition", x, side, shift)
    if x.ndim != 4:
        raise ShapeError(f"window_partition of {x!r}: expected four axes (batch, rows, columns, channels)")
    with scope(name):
        x = _padded(x, size, "pad")
        if by != ZERO:
            x = roll(roll(x, x.sizes[1] - by, 1), x.sizes[2] - by, 2)
        return rearrange(x, "b (n i) (m j) c -> (b n m) (i j) c", i=size, j=size, name="partition")


def window_merge(y: Tensor, like: Tensor, side: object, shift: object = 0, *, name: str = "merge") -> Tensor:
    """Put windows together again: the reverse of `window_partition`.

    Parameters
    ----------
    y : Tensor
        Windows, shape (b*n, side*side, c).
    like : Tensor
        What was partitioned, shape (b, h, w, c) but for its channels.
    side, shift : sympy.Expr or int
        As they were there.
    name : str
        Scope of the ops.

    Returns
    -------
    Tensor
        Shape (b, h, w, c), a view without what was padded. No FLOPs.

    Raises
    ------
    GraphError, ShapeError
        If sizes do not fit.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C, R = cg.dims("B C R")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, R, R, C))
    ...     y = cg.nn.window_merge(cg.nn.window_partition(x, 7, 3), x, 7, 3)
    >>> y.shape, cg.flops(g)
    ((B, R, R, C), 0)
    """
    size, by = _window("window_merge", y, side, shift)
    need_tensor("window_merge", like)
    if y.ndim != 3 or like.ndim != 4:
        raise ShapeError(f"window_merge of {y!r} like {like!r}: expected windows of three axes and images of four")
    batch, rows, columns = like.sizes[:3]
    down, across = (windows_along(n, 0, size) for n in (rows, columns))
    with scope(name):
        x = rearrange(
            y, "(b n m) (i j) c -> b (n i) (m j) c", b=batch, n=down, m=across, i=size, j=size, name="positions"
        )
        if by != ZERO:
            x = roll(roll(x, by, 1), by, 2)
        return slice_axis(slice_axis(x, 1, 0, rows), 2, 0, columns)


def window_bias(
    side: object, heads: object, *, images: object = 1, masks: object = None, name: str = "window_bias"
) -> Tensor:
    """Make what is added to the scores of attention within windows (Liu et al. 2021, arXiv 2103.14030, equation 4).

    Parameters
    ----------
    side : sympy.Expr or int
        Rows and columns of a window.
    heads : sympy.Expr or int
        Heads of queries.
    images : sympy.Expr or int
        Number of images; asked for with `masks` alone.
    masks : sympy.Expr or int, optional
        Windows of an image where it was shifted: a buffer hides from each other positions that the shift brought
        together, (masks, side*side, side*side) numbers of the graph's format.
    name : str
        Scope of the parameter, the buffers and the ops.

    Returns
    -------
    Tensor
        Shape (1, heads, side*side, side*side), with masks (images*masks, heads, side*side, side*side): a learned number
        for each head and each of (2*side-1)**2 distances, looked up by a buffer of indices. FLOPs: 1 for each
        element of the sum with the masks.

    Raises
    ------
    GraphError, ShapeError
        If no graph is open, or a size is none.

    Examples
    --------
    >>> import costgraph as cg
    >>> H = cg.dims("H")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.window_bias(7, H))
    >>> g.outputs[0].shape, cg.param_count(g)
    ((1, H, 49, 49), 169*H)
    """
    size = positive("window_bias: side", side)
    area = size * size
    graph = current_graph()
    with module(graph, name):
        table = graph.param("table", ((2 * size - 1) * (2 * size - 1), heads))
        places = graph.buffer("index", (area, area), "int64")
        bias = rearrange(gather(table, places, name="lookup"), "s t h -> 1 h s t", name="heads")
        if masks is None:
            return bias
        mask = graph.buffer("mask", (masks, area, area))
        each = expand(mask, "n s t -> b n 1 s t", b=images, name="images")
        return bias + rearrange(each, "b n 1 s t -> (b n) 1 s t", name="masks")


def patch_merging(x: Tensor, *, name: str = "downsample") -> Tensor:
    """Halve the sides of images and double their channels (Liu et al. 2021, arXiv 2103.14030, section 3.1).

    Parameters
    ----------
    x : Tensor
        Shape (b, h, w, c). Odd rows and columns are padded with zeros; the copy is made in any case.
    name : str
        Scope of the parameters and of the ops.

    Returns
    -------
    Tensor
        Shape (b, ceiling(h/2), ceiling(w/2), 2*c): four neighbours side by side, LayerNorm, a linear layer without
        bias. FLOPs of kind matmul: 16 * b * c**2 for each position of the result.

    Raises
    ------
    ShapeError
        If `x` has another number of axes.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C = cg.dims("B C")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.patch_merging(g.input("x", (B, 7, 7, C))))
    >>> g.outputs[0].shape, cg.param_count(g)
    ((B, 4, 4, 2*C), 8*C**2 + 8*C)
    """
    need_tensor("patch_merging", x)
    if x.ndim != 4:
        raise ShapeError(f"patch_merging of {x!r}: expected four axes (batch, rows, columns, channels)")
    with module(current_graph(x.graph), name):
        y = rearrange(_padded(x, poly(2), "pad"), "b (h i) (w j) c -> b h w (j i c)", i=2, j=2, name="neighbours")
        return linear(layer_norm(y), "... c -> ... d", d=2 * x.sizes[3], name="reduction")
