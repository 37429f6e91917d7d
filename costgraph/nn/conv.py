"""Convolution and pooling: windows that slide over named axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from ..algebra.polynomial import ONE, Poly, poly
from ..algebra.symbols import shown
from ..errors import PatternError, ShapeError
from ..graph.arguments import named, need_choice, need_flag, need_tensor, positive
from ..graph.graph import apply, current_graph
from ..graph.scopes import module
from ..graph.strides import windows_along
from ..graph.tensor import Tensor
from ..notation.door import READ
from ..notation.pattern import Affine, Axes, Pattern, PatternText, parse_pattern
from ..ops.contraction import Einsum
from ..ops.layout import reshape, slice_axis
from ..ops.pooling import Pool
from .kernels import one_kernel

__all__ = ["conv", "convolved", "each_axis", "pool", "pooling"]

#: One number for all axes of a window, or one for each.
Extents = Annotated[int | Sequence[int], READ]


def each_axis(value: object, rank: int, what: str, least: int) -> tuple[int, ...]:
    """Return a number for each axis of a window, of which one stands for all."""
    values: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,) * rank
    if len(values) != rank or any(isinstance(v, bool) or not isinstance(v, int) or v < least for v in values):
        raise ShapeError(f"{what}={shown(value)}: expected an integer of at least {least}, or {rank} of them")
    return values


def _slid(
    x: Tensor, window: tuple[int, ...], stride: object, padding: object, dilation: object
) -> tuple[list[Affine], list[Poly]]:
    """Return the indices of the last axes and the sizes that they make (torch's formula for Conv2d)."""
    rank = len(window)
    steps, gaps = each_axis(stride, rank, "stride", 1), each_axis(dilation, rank, "dilation", 1)
    same = isinstance(padding, str) and padding == "same"
    causal = isinstance(padding, str) and padding == "causal"
    if (same or causal) and steps != (1,) * rank:
        raise ShapeError(f"padding={padding!r} with stride={stride!r}, expected a stride of 1")
    if causal and rank != 1:
        raise ShapeError(f"padding='causal' of a window over {rank} axes, expected one axis, that of positions")
    reach = tuple(g * (w - 1) for g, w in zip(gaps, window, strict=True))
    pads = reach if causal else tuple(n // 2 for n in reach) if same else each_axis(padding, rank, "padding", 0)
    indices, sizes = [], []
    for i, (w, s, g, p) in enumerate(zip(window, steps, gaps, pads, strict=True)):
        size = x.sizes[x.ndim - rank + i]
        # floor((n - 1)/s) + 1 is ceiling(n/s) for whole n: one atom instead of a sum
        made = size if same else windows_along(size, g * (w - 1) - 2 * p, s)
        if made.constant is not None and made.constant < 1:
            raise ShapeError(
                f"window of {w} on axis {x.ndim - rank + i} of {x!r}: expected it to fit, padding included"
            )
        indices.append(Affine(((f"o{i}", s), (f"w{i}", g)), -p))
        sizes.append(made)
    return indices, sizes


def conv(
    x: Tensor,
    pattern: PatternText,
    /,
    *,
    window: Extents,
    stride: Extents = 1,
    padding: Extents | str = 0,
    dilation: Extents = 1,
    groups: object = 1,
    bias: bool = False,
    name: str = "conv",
    **sizes: object,
) -> Tensor:
    """Convolve: a contraction over a window and the input channels of a group.

    Parameters
    ----------
    x : Tensor
        Batch and channels first, the axes that the window slides over last, one to three of them.
    pattern : str
        Axes before and after: `"b c h w -> b o h w"`. The one that the right side leaves out is the input channel,
        the one that it adds the output channel.
    window : int or sequence of int
        Size of the window along each sliding axis; an integer is for all of them.
    stride, padding, dilation : int or sequence of int
        As in torch.nn.Conv2d; `padding="same"` keeps the size. `padding="causal"`, over one axis, sees no later
        positions: as torch.nn.Conv1d with `padding=dilation*(window - 1)`, of whose result the first positions are
        taken. `decode` then keeps the last `dilation*(window - 1)` inputs.
    groups : sympy.Expr or int
        Groups of channels that do not mix; as many as channels for a depthwise convolution.
    bias : bool
        Add a parameter of the output channels, in the same kernel.
    name : str
        Scope of the parameters and of the op.
    **sizes : sympy.Expr or int
        Size of the output channel.

    Returns
    -------
    Tensor
        FLOPs: 2 * output points * window * input channels of a group. Padded positions count, as torch counts them.

    Raises
    ------
    PatternError, ShapeError
        If the pattern or a size does not fit.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C, H, W, O = cg.dims("B C H W O")
    >>> with cg.Graph("g") as g:
    ...     y = cg.conv(g.input("x", (B, C, H, W)), "b c h w -> b o h w", window=(3, 3), padding=1, o=O)
    >>> y.shape, cg.matmul_flops(g)
    ((B, O, H, W), 18*B*C*H*O*W)
    """
    need_tensor("conv", x)
    need_flag("conv", bias=bias)
    graph = current_graph(x.graph)
    x = graph.adopt(x)
    place, spans, made = _channel(x, pattern, window, name, sizes)
    many, channels = positive(f"conv {name!r}: groups", groups), x.sizes[place]
    _check_groups(f"conv {name!r}", many, input=channels, output=made)

    def product(x: Tensor, *params: Tensor) -> Tensor:
        return convolved(x, *params, stride=stride, padding=padding, dilation=dilation, groups=many)

    with module(graph, name):
        weight = graph.param("weight", (made, channels / many, *spans))
        if bias:
            y = one_kernel("conv", product, x, weight, graph.param("bias", (made,)), backward="ops")
        else:
            y = product(x, weight)
        # behind the positions of x lie those that its padding makes
        return slice_axis(y, -1, 0, x.sizes[-1], name="seen") if padding == "causal" else y


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Extents = 1,
    padding: Extents | str = 0,
    dilation: Extents = 1,
    groups: Poly = ONE,
) -> Tensor:
    """Return the convolution of a tensor with weights of shape (out, in / groups, *window), and what is added to it."""
    made, share, *window = weight.sizes
    spans, place = tuple(int(w.constant or 0) for w in window), x.ndim - len(window) - 1
    indices, out = _slid(x, spans, stride, padding, dilation)
    extents = {"g": groups, "c": share, "o": made / groups, **_extents(x.sizes[:place], out, spans)}
    causal = isinstance(padding, str) and padding == "causal"
    kind = Einsum(pattern=_contraction(place, indices), extents=extents, dtype=x.dtype, causal=causal)
    (y,) = apply(kind, [x, weight], "conv")
    return y if bias is None else y + reshape(bias, (made, *(1,) * len(spans)))


def _check_groups(place: str, groups: Poly, **channels: Poly) -> None:
    for what, size in channels.items():
        share = (size / groups).constant
        if share is not None and (not isinstance(share, int) or share < 1):
            raise ShapeError(f"{place}: {size} {what} channels in {groups} groups, expected a multiple")


def _channel(
    x: Tensor, pattern: str, window: int | Sequence[int], name: str, sizes: Mapping[str, object]
) -> tuple[int, tuple[int, ...], Poly]:
    """Return the place of the channel, the window of the axes after it, and how many channels are made."""
    parsed = parse_pattern(pattern, (x.ndim,))
    if any(len(a.names) != 1 or isinstance(a, Affine) for a in (*parsed.operands[0], *parsed.result)):
        raise PatternError(f"conv {name!r}: pattern {pattern!r}, expected single named axes")
    before, after = parsed.operand_names(0), parsed.result_names
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if x.ndim != len(before):
        raise ShapeError(f"conv {name!r}: {x!r} has {x.ndim} axes, the pattern {pattern!r} has {len(before)}")
    if len(before) != len(after) or len(changed) != 1 or changed[0] == len(before) - 1:
        raise PatternError(
            f"conv {name!r}: pattern {pattern!r}, expected one channel replaced by another in its place and "
            f"the sliding axes after it"
        )
    place, new = changed[0], after[changed[0]]
    spans = each_axis(window, len(before) - place - 1, "window", 1)
    if set(sizes) != {new}:
        raise ShapeError(f"conv {name!r}: sizes given for {sorted(sizes)}, expected {new}=...")
    return place, spans, positive(f"conv {name!r}: size of {new!r}", sizes[new])


def _extents(kept: Sequence[Poly], out: Sequence[Poly], window: Sequence[int]) -> dict[str, Poly]:
    """Return the sizes of axes that stay, of those that a window makes, and of the window's own."""
    return {
        **{f"n{i}": size for i, size in enumerate(kept)},
        **{f"o{i}": size for i, size in enumerate(out)},
        **{f"w{i}": poly(w) for i, w in enumerate(window)},
    }


def _contraction(place: int, indices: Sequence[Affine]) -> Pattern:
    """Return the pattern of a convolution: batch axes, channels in groups, then the sliding axes."""
    batch = [Axes((f"n{i}",)) for i in range(place)]
    taps = [Axes((f"w{i}",)) for i in range(len(indices))]
    out = [Axes((f"o{i}",)) for i in range(len(indices))]
    return Pattern(
        ((*batch, Axes(("g", "c")), *indices), (Axes(("g", "o")), Axes(("c",)), *taps)),
        (*batch, Axes(("g", "o")), *out),
    )


def pool(
    x: Tensor,
    operation: str,
    *,
    window: Extents,
    stride: Extents | None = None,
    padding: Extents = 0,
    name: str = "",
) -> Tensor:
    """Reduce windows of the last axes to their maximum or mean.

    Parameters
    ----------
    x : Tensor
        Sliding axes last.
    operation : str
        max or mean.
    window : int or sequence of int
        Size of the window along each sliding axis; an integer is for all axes after the first two.
    stride, padding : int or sequence of int
        As in torch.nn.MaxPool2d; the stride is the window by default.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        FLOPs: one for each element of each window.

    Raises
    ------
    GraphError, ShapeError
        If the operation is unknown or the window does not fit.
    """
    need_tensor("pool", x)
    need_choice("pool: operation", operation, ("max", "mean"))
    # an integer is for all axes after batch and channel
    spans = each_axis(window, len(window) if isinstance(window, list | tuple) else max(x.ndim - 2, 1), "window", 1)
    if not spans:
        raise ShapeError(f"window={window!r}: expected one axis at least")
    for span, pad in zip(spans, each_axis(padding, len(spans), "padding", 0), strict=True):
        if 2 * pad > span:  # a window could lie in the padding alone
            raise ShapeError(f"pool: padding {pad}, expected at most half of the window of {span}")
    graph = current_graph(x.graph)
    x = graph.adopt(x)
    if x.ndim < len(spans):
        raise ShapeError(f"pool of {x!r} with a window of {len(spans)} axes, expected at least as many")
    kind = pooling(x, operation, spans, spans if stride is None else stride, padding)
    return apply(kind, [x], named(name, f"{operation}_pool"))[0]


def pooling(
    x: Tensor, operation: str, spans: tuple[int, ...], stride: Extents, padding: Extents, *, inside: bool = False
) -> Pool:
    """Return the record of a pooling of windows of the last axes."""
    indices, out = _slid(x, spans, stride, padding, 1)
    kept = tuple(Axes((f"n{i}",)) for i in range(x.ndim - len(spans)))
    pattern = Pattern(((*kept, *indices),), (*kept, *(Axes((f"o{i}",)) for i in range(len(spans)))))
    return Pool(pattern=pattern, extents=_extents(x.sizes[: len(kept)], out, spans), operation=operation, inside=inside)
