"""Convolution, transposed convolution, pooling, resizing, and blocks of convolutional networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Annotated, Any

import sympy

from ..algebra.polynomial import ONE, Poly, poly, total
from ..algebra.symbols import shown
from ..errors import PatternError, ShapeError
from ..ir.graph import (
    Tensor,
    apply,
    current_graph,
    module,
    named,
    need_choice,
    need_flag,
    need_tensor,
    positive,
    scope,
    sizes_of,
)
from ..ir.strides import Sizes, windows_along
from ..notation.pattern import Affine, Axes, Pattern, PatternText, parse_pattern
from ..notation.validation import READ
from ..ops.einsum import Einsum
from ..ops.elementwise import dropout, pointwise
from ..ops.fill import fill
from ..ops.functions import FUNCTIONS
from ..ops.layout import expand, reshape, slice_axis
from ..ops.opaque import opaque
from ..ops.reduce import Pool, reduce
from .activations import one_kernel
from .linear import linear
from .norms import batch_norm

__all__ = [
    "conv",
    "convolved",
    "each_axis",
    "pool",
    "pooling",
    "conv_transpose",
    "spread",
    "adaptive_pool",
    "upsample",
    "inverted_residual",
    "squeeze_excitation",
    "stochastic_depth",
]


# -- convolution -------------------------------------------------------------------------------------------------------


# -- convolution and pooling -------------------------------------------------------------------------------------------

#: One number for all window axes, or one per axis.
Extents = Annotated[int | Sequence[int], READ]


def each_axis(value: object, rank: int, label: str, minimum: int) -> tuple[int, ...]:
    """Return one number per window axis; a single number applies to all."""
    values: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,) * rank
    if len(values) != rank or any(isinstance(v, bool) or not isinstance(v, int) or v < minimum for v in values):
        raise ShapeError(f"{label}={shown(value)}: expected an integer of at least {minimum}, or {rank} of them")
    return values


def _sliding_indices(
    x: Tensor, window: tuple[int, ...], stride: object, padding: object, dilation: object
) -> tuple[list[Affine], list[Poly]]:
    """Return the window indices of the last axes and the output sizes (torch's formula for Conv2d)."""
    rank = len(window)
    steps, gaps = each_axis(stride, rank, "stride", 1), each_axis(dilation, rank, "dilation", 1)
    same = isinstance(padding, str) and padding == "same"
    causal = isinstance(padding, str) and padding == "causal"
    if (same or causal) and steps != (1,) * rank:
        raise ShapeError(f"padding={padding!r} with stride={stride!r}, expected a stride of 1")
    if causal and rank != 1:
        raise ShapeError(f"padding='causal' of a window over {rank} axes, expected the position axis only")
    reach = tuple(g * (w - 1) for g, w in zip(gaps, window, strict=True))
    pads = reach if causal else tuple(n // 2 for n in reach) if same else each_axis(padding, rank, "padding", 0)
    indices, sizes = [], []
    for i, (w, s, g, p) in enumerate(zip(window, steps, gaps, pads, strict=True)):
        size = x.sizes[x.ndim - rank + i]
        # floor((n - 1)/s) + 1 equals ceiling(n/s) for integers: one atom instead of a sum
        out_size = size if same else windows_along(size, g * (w - 1) - 2 * p, s)
        if out_size.constant is not None and out_size.constant < 1:
            raise ShapeError(
                f"window of {w} on axis {x.ndim - rank + i} of {x!r}: larger than the padded axis, expected a "
                "smaller one"
            )
        indices.append(Affine(((f"o{i}", s), (f"w{i}", g)), -p))
        sizes.append(out_size)
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
    """Convolve: contract a window and a group's input channels.

    Parameters
    ----------
    x : Tensor
        Batch and channels first, then one to three sliding axes.
    pattern : str
        Axes before and after: `"b c h w -> b o h w"`. The axis missing on the right is the input channel, the added one
        the output channel.
    window : int or sequence of int
        Window size per sliding axis; an integer applies to all.
    stride, padding, dilation : int or sequence of int
        As in torch.nn.Conv2d; `padding="same"` keeps the size. `padding="causal"`, over one axis, sees no later
        positions: torch.nn.Conv1d with `padding=dilation*(window - 1)`, cut to the first positions. `decode` then
        caches the last `dilation*(window - 1)` inputs.
    groups : sympy.Expr or int
        Number of channel groups; the number of channels for a depthwise convolution.
    bias : bool
        Whether to add a bias per output channel, in the same kernel.
    name : str
        Scope of the parameters and op.
    **sizes : sympy.Expr or int
        Number of output channels.

    Returns
    -------
    Tensor
        FLOPs: 2 * output points * window * input channels per group. Padded positions count, as in torch.

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
    channel_axis, spans, out_channels = _channel(x, pattern, window, name, sizes)
    group_count, channels = positive(f"conv {name!r}: groups", groups), x.sizes[channel_axis]
    _check_groups(f"conv {name!r}", group_count, input=channels, output=out_channels)

    def product(x: Tensor, *params: Tensor) -> Tensor:
        return convolved(x, *params, stride=stride, padding=padding, dilation=dilation, groups=group_count)

    with module(graph, name):
        weight = graph.param("weight", (out_channels, channels / group_count, *spans))
        if bias:
            y = one_kernel("conv", product, x, weight, graph.param("bias", (out_channels,)), backward="ops")
        else:
            y = product(x, weight)
        # drop the trailing positions that come from padding
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
    """Convolve with weights of shape (out, in / groups, *window), and add a bias if given."""
    out_channels, share, *window = weight.sizes
    spans, channel_axis = tuple(int(w.constant or 0) for w in window), x.ndim - len(window) - 1
    indices, out_sizes = _sliding_indices(x, spans, stride, padding, dilation)
    extents = {
        "g": groups,
        "c": share,
        "o": out_channels / groups,
        **_extents(x.sizes[:channel_axis], out_sizes, spans),
    }
    causal = isinstance(padding, str) and padding == "causal"
    kind = Einsum(pattern=_contraction(channel_axis, indices), extents=extents, dtype=x.dtype, causal=causal)
    (y,) = apply(kind, [x, weight], "conv")
    return y if bias is None else y + reshape(bias, (out_channels, *(1,) * len(spans)))


def _check_groups(place: str, groups: Poly, **channels: Poly) -> None:
    for side, size in channels.items():
        share = (size / groups).constant
        if share is not None and (not isinstance(share, int) or share < 1):
            raise ShapeError(f"{place}: {size} {side} channels in {groups} groups, expected a multiple of the groups")


def _channel(
    x: Tensor, pattern: str, window: int | Sequence[int], name: str, sizes: Mapping[str, object]
) -> tuple[int, tuple[int, ...], Poly]:
    """Return the index of the channel axis, the window sizes of the axes after it, and the output channels."""
    parsed = parse_pattern(pattern, (x.ndim,))
    if any(len(a.names) != 1 or isinstance(a, Affine) for a in (*parsed.operands[0], *parsed.result)):
        raise PatternError(f"conv {name!r}: pattern {pattern!r}, expected single named axes")
    names_in, names_out = parsed.operand_names(0), parsed.result_names
    changed = [i for i, (a, b) in enumerate(zip(names_in, names_out, strict=False)) if a != b]
    if x.ndim != len(names_in):
        raise ShapeError(f"conv {name!r}: {x!r} has {x.ndim} axes, the pattern {pattern!r} has {len(names_in)}")
    if len(names_in) != len(names_out) or len(changed) != 1 or changed[0] == len(names_in) - 1:
        raise PatternError(
            f"conv {name!r}: pattern {pattern!r}, expected one channel axis replaced by another in its place, "
            f"followed by the sliding axes"
        )
    channel_axis, out_name = changed[0], names_out[changed[0]]
    spans = each_axis(window, len(names_in) - channel_axis - 1, "window", 1)
    if set(sizes) != {out_name}:
        raise ShapeError(f"conv {name!r}: sizes given for {sorted(sizes)}, expected {out_name}=...")
    return channel_axis, spans, positive(f"conv {name!r}: size of {out_name!r}", sizes[out_name])


def _extents(unchanged: Sequence[Poly], out_sizes: Sequence[Poly], window: Sequence[int]) -> dict[str, Poly]:
    """Return the sizes of unchanged axes, output axes and window axes, by name."""
    return {
        **{f"n{i}": size for i, size in enumerate(unchanged)},
        **{f"o{i}": size for i, size in enumerate(out_sizes)},
        **{f"w{i}": poly(w) for i, w in enumerate(window)},
    }


def _contraction(channel_axis: int, indices: Sequence[Affine]) -> Pattern:
    """Return the convolution pattern: batch axes, grouped channels, then sliding axes."""
    batch = [Axes((f"n{i}",)) for i in range(channel_axis)]
    taps = [Axes((f"w{i}",)) for i in range(len(indices))]
    outputs = [Axes((f"o{i}",)) for i in range(len(indices))]
    return Pattern(
        ((*batch, Axes(("g", "c")), *indices), (Axes(("g", "o")), Axes(("c",)), *taps)),
        (*batch, Axes(("g", "o")), *outputs),
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
    """Take the maximum or mean of windows over the last axes.

    Parameters
    ----------
    x : Tensor
        Sliding axes last.
    operation : str
        max or mean.
    window : int or sequence of int
        Window size per sliding axis; an integer applies to all axes after the first two.
    stride, padding : int or sequence of int
        As in torch.nn.MaxPool2d; the stride is the window by default.
    name : str
        Op name.

    Returns
    -------
    Tensor
        FLOPs: one per element in each window.

    Raises
    ------
    GraphError, ShapeError
        If the operation is unknown or the window does not fit.
    """
    need_tensor("pool", x)
    need_choice("pool: operation", operation, ("max", "mean"))
    # an integer applies to all axes after batch and channel
    spans = each_axis(window, len(window) if isinstance(window, list | tuple) else max(x.ndim - 2, 1), "window", 1)
    if not spans:
        raise ShapeError(f"window={window!r}: expected at least one axis")
    for span, pad in zip(spans, each_axis(padding, len(spans), "padding", 0), strict=True):
        if 2 * pad > span:  # a window could consist of padding only
            raise ShapeError(f"pool: padding {pad}, expected at most half of the window of {span}")
    graph = current_graph(x.graph)
    x = graph.adopt(x)
    if x.ndim < len(spans):
        raise ShapeError(f"pool of {x!r} with a window of {len(spans)} axes, expected at least as many")
    kind = pooling(x, operation, spans, spans if stride is None else stride, padding)
    return apply(kind, [x], named(name, f"{operation}_pool"))[0]


def pooling(
    x: Tensor,
    operation: str,
    spans: tuple[int, ...],
    stride: Extents,
    padding: Extents,
    *,
    exclude_padding: bool = False,
) -> Pool:
    """Return the op kind for pooling over the last axes."""
    indices, out_sizes = _sliding_indices(x, spans, stride, padding, 1)
    unchanged = tuple(Axes((f"n{i}",)) for i in range(x.ndim - len(spans)))
    pattern = Pattern(((*unchanged, *indices),), (*unchanged, *(Axes((f"o{i}",)) for i in range(len(spans)))))
    return Pool(
        pattern=pattern,
        extents=_extents(x.sizes[: len(unchanged)], out_sizes, spans),
        operation=operation,
        exclude_padding=exclude_padding,
    )


# -- transposed convolution --------------------------------------------------------------------------------------------

_TRANSPOSED = "conv_transpose"


def conv_transpose(
    x: Tensor,
    pattern: PatternText,
    /,
    *,
    window: Extents,
    stride: Extents = 1,
    padding: Extents = 0,
    output_padding: Extents = 0,
    dilation: Extents = 1,
    groups: object = 1,
    bias: bool = False,
    name: str = "conv_transpose",
    **sizes: object,
) -> Tensor:
    """Apply a transposed convolution, the gradient of a convolution, as in image decoders.

    Parameters
    ----------
    x : Tensor
        Batch and channels first, sliding axes last.
    pattern : str
        Axes before and after, as in `conv`: `"b c h w -> b o h w"`.
    window : int or sequence of int
        As in `conv`.
    stride, padding, output_padding, dilation : int or sequence of int
        As in torch.nn.ConvTranspose2d: an axis of n becomes `(n - 1)*stride - 2*padding + dilation*(window - 1) +
        output_padding + 1`.
    groups, bias, name, **sizes : object
        As in `conv`.

    Returns
    -------
    Tensor
        FLOPs: 2 * input points * window * input channels per group * output channels, including cropped positions.

    Raises
    ------
    PatternError, ShapeError
        If the pattern or a size does not fit.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C, H, O = cg.dims("B C H O")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, C, H))
    ...     y = cg.nn.conv_transpose(x, "b c h -> b o h", window=4, stride=2, padding=1, o=O)
    >>> y.shape, cg.matmul_flops(g)
    ((B, O, 2*H), 8*B*C*H*O)
    """
    need_tensor("conv_transpose", x)
    need_flag("conv_transpose", bias=bias)
    graph = current_graph(x.graph)
    x = graph.adopt(x)
    channel_axis, out_name = _channels(x, pattern)
    spans = each_axis(window, x.ndim - channel_axis - 1, "window", 1)
    if set(sizes) != {out_name}:
        raise ShapeError(f"conv_transpose {name!r}: sizes given for {sorted(sizes)}, expected {out_name}=...")
    group_count = positive(f"conv_transpose {name!r}: groups", groups)
    channels, out_channels = (
        x.sizes[channel_axis],
        positive(f"conv_transpose {name!r}: size of {out_name!r}", sizes[out_name]),
    )
    facts: Any = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}

    def product(x: Tensor, *params: Tensor) -> Tensor:
        return spread(x, *params, groups=group_count, **facts)

    with module(graph, name):
        weight = graph.param("weight", (channels, out_channels / group_count, *spans))
        if not bias:
            return product(x, weight)
        return one_kernel(_TRANSPOSED, product, x, weight, graph.param("bias", (out_channels,)), backward="ops")


def spread(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Extents = 1,
    padding: Extents = 0,
    output_padding: Extents = 0,
    dilation: Extents = 1,
    groups: Poly = ONE,
) -> Tensor:
    """Apply a transposed convolution with weights of shape (in, out / groups, *window), and add a bias if given."""
    channels, share, *window = weight.sizes
    spans, channel_axis, out_channels = (
        tuple(int(w.constant or 0) for w in window),
        x.ndim - len(window) - 1,
        share * groups,
    )
    indices, out_sizes = _output_indices(x, spans, stride, padding, output_padding, dilation)
    leading, sliding = x.sizes[:channel_axis], x.sizes[channel_axis + 1 :]
    extents = {"g": groups, "c": channels / groups, "o": share, **{f"n{i}": size for i, size in enumerate(leading)}}
    for i, (size, span) in enumerate(zip(sliding, spans, strict=True)):
        extents |= {f"o{i}": size, f"w{i}": poly(span)}
    pattern = _transposed_contraction(channel_axis, indices)
    (y,) = apply(
        Einsum(pattern=pattern, extents=extents, dtype=x.dtype, sizes=(*leading, out_channels, *out_sizes)),
        [x, weight],
        _TRANSPOSED,
    )
    return y if bias is None else y + reshape(bias, (out_channels, *(1,) * len(spans)))


def _channels(x: Tensor, pattern: PatternText) -> tuple[int, str]:
    """Return the index of the channel axis and the name of the output channel."""
    parsed = parse_pattern(pattern, (x.ndim,))
    single_names = all(isinstance(a, Axes) and len(a.names) == 1 for a in (*parsed.operands[0], *parsed.result))
    names_in, names_out = parsed.operand_names(0), parsed.result_names
    changed = [i for i, (a, b) in enumerate(zip(names_in, names_out, strict=False)) if a != b]
    if not single_names or len(names_in) != len(names_out) or len(changed) != 1 or changed[0] + 1 >= x.ndim:
        raise PatternError(f"conv_transpose {pattern!r}: expected one renamed axis, followed by the axes of the window")
    return changed[0], names_out[changed[0]]


def _output_indices(
    x: Tensor, spans: tuple[int, ...], stride: object, padding: object, output_padding: object, dilation: object
) -> tuple[list[Affine], list[Poly]]:
    """Return the output indices for window elements on the last axes, and the output sizes."""
    rank = len(spans)
    steps, gaps = each_axis(stride, rank, "stride", 1), each_axis(dilation, rank, "dilation", 1)
    pads, extra = each_axis(padding, rank, "padding", 0), each_axis(output_padding, rank, "output_padding", 0)
    indices, sizes = [], []
    for i, (n, w) in enumerate(zip(x.sizes[x.ndim - rank :], spans, strict=True)):
        if extra[i] >= max(steps[i], gaps[i]):
            raise ShapeError(f"output_padding={output_padding!r}: expected less than the stride or the dilation")
        size = (n - 1) * steps[i] - 2 * pads[i] + gaps[i] * (w - 1) + extra[i] + 1
        if size.constant is not None and size.constant < 1:
            raise ShapeError(f"padding={padding!r} leaves {size} positions of axis {i + x.ndim - rank} of {x!r}")
        indices.append(Affine(((f"o{i}", steps[i]), (f"w{i}", gaps[i])), -pads[i]))
        sizes.append(size)
    return indices, sizes


def _transposed_contraction(channel_axis: int, indices: list[Affine]) -> Pattern:
    lead = tuple(Axes((f"n{i}",)) for i in range(channel_axis))
    points = tuple(Axes((f"o{i}",)) for i in range(len(indices)))
    window = tuple(Axes((f"w{i}",)) for i in range(len(indices)))
    inputs, outputs = Axes(("g", "c")), Axes(("g", "o"))
    return Pattern(((*lead, inputs, *points), (inputs, Axes(("o",)), *window)), (*lead, outputs, *indices))


# -- resizing ----------------------------------------------------------------------------------------------------------


def adaptive_pool(x: Tensor, sizes: Sequence[object], *, name: str = "adaptive_pool") -> Tensor:
    """Average the last axes over a given number of windows, as torch.nn.AdaptiveAvgPool2d.

    Parameters
    ----------
    x : Tensor
        Pooled axes last.
    sizes : sequence of sympy.Expr or int
        Number of windows per axis. Window i of k runs from floor(i*n/k) to ceil((i + 1)*n/k); windows overlap if k does
        not divide n.
    name : str
        Op name.

    Returns
    -------
    Tensor
        FLOPs: one per element in each window. A single window per axis is a reduction, windows that divide a numeric
        axis are a pooling, all else is an opaque op with these FLOPs.

    Raises
    ------
    ShapeError
        If there are more sizes than axes, or a symbolic number of windows may not divide the axis.

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
    out_sizes = sizes_of(sizes, "adaptive_pool")
    if not 0 < len(out_sizes) <= x.ndim:
        raise ShapeError(f"adaptive_pool of {x!r} into {len(out_sizes)} sizes, expected 1 to {x.ndim}")
    unchanged, axes = x.sizes[: -len(out_sizes)], x.sizes[-len(out_sizes) :]
    if all(k == ONE for k in out_sizes):
        names = [f"a{i}" for i in range(x.ndim)]
        reduced = [*names[: len(unchanged)], *("1" for _ in out_sizes)]
        return reduce(x, f"{' '.join(names)} -> {' '.join(reduced)}", "mean", name=name)
    windows = [(n / k).constant for n, k in zip(axes, out_sizes, strict=True)]
    if all(isinstance(w, int) for w in windows):
        return pool(x, "mean", window=[int(w or 0) for w in windows], name=name)
    reached = prod(
        (_total_window_size(x, n, k) for n, k in zip(axes, out_sizes, strict=True)), start=prod(unchanged, start=ONE)
    )
    out_bytes = prod(out_sizes, start=prod(unchanged, start=ONE)) * x.element_bytes()
    # the gradient needs only the input shape, but torch saves all of it
    backward = {"flops": reached.expr, "saves": {"inputs": [0]}, "reads": [out_bytes.expr, 0]}
    result: Tensor = opaque(
        name, [x], ([n.expr for n in (*unchanged, *out_sizes)], x.dtype), flops=reached.expr, backward=backward
    )
    return result


def _total_window_size(x: Tensor, size: Poly, window_count: Poly) -> Poly:
    """Return the total window size on one axis.

    A boundary between windows that is not an integer lies within an element shared by both. gcd(n, k) - 1 of the k - 1
    boundaries are integers.
    """
    n, k = size.constant, window_count.constant
    if isinstance(n, int) and isinstance(k, int):
        return size + k - gcd(n, k)
    if not isinstance(k, int):
        share = size / window_count
        if all(isinstance(c, int) and all(power > 0 for _, power in m) for m, c in share.terms.items()):
            return size
        raise ShapeError(
            f"adaptive_pool of {x!r}: {window_count} windows over {size} elements, expected an integer number of "
            "windows"
        )
    boundaries = [(size * i / k).expr for i in range(1, k)]
    return size + total(poly(sympy.ceiling(boundary)) - poly(sympy.floor(boundary)) for boundary in boundaries)


def upsample(
    x: Tensor, factor: Annotated[int, READ] = 2, *, sizes: Sequence[object] | None = None, name: str = "upsample"
) -> Tensor:
    """Upsample all axes after the first two by nearest neighbour, in one kernel.

    Parameters
    ----------
    x : Tensor
        Shape (b, c, ...).
    factor : int
        Scale factor for each axis.
    sizes : sequence of sympy.Expr or int, optional
        Sizes of all axes after the first two, if they are up to `factor` - 1 less than `factor` times the input: an odd
        axis before it was halved.
    name : str
        Kernel name.

    Returns
    -------
    Tensor
        No FLOPs; reads each element once. The gradient adds one FLOP per upsampled element.

    Raises
    ------
    ShapeError
        If the factor is not a positive integer, or there is not one size per axis.

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
        raise ShapeError(f"upsample of {x!r}: expected at least three axes, batch and channels first")
    large: Sizes = tuple(n * factor for n in x.sizes[2:])
    out_sizes = large if sizes is None else sizes_of(sizes, "upsample")
    if len(out_sizes) != len(large):
        raise ShapeError(f"upsample of {x!r} to {len(out_sizes)} sizes, expected {len(large)}")
    axes = [f"a{i}" for i in range(2, x.ndim)]
    pattern = f"b c {' '.join(f'{a} 1' for a in axes)} -> b c {' '.join(f'{a} {a}r' for a in axes)}"

    def body(x: Tensor) -> Tensor:
        spaced = reshape(x, (*x.sizes[:2], *(n for size in x.sizes[2:] for n in (size, 1))))
        times: dict[str, Any] = {f"{a}r": factor for a in axes}
        repeated = expand(spaced, pattern, **times)
        y = reshape(repeated, (*x.sizes[:2], *large))
        for i, (size, full_size) in enumerate(zip(out_sizes, large, strict=True)):
            y = y if size == full_size else slice_axis(y, i + 2, 0, size)
        return y

    return one_kernel(name, body, x)


# -- blocks ------------------------------------------------------------------------------------------------------------


def stochastic_depth(x: Tensor, p: float, *, name: str = "stochastic_depth") -> Tensor:
    """Drop whole samples at random and scale the others (Huang et al. 2016, arXiv 1603.09382); free with `p=0`.

    Parameters
    ----------
    x : Tensor
        Residual branch of a block, with samples along the first axis.
    p : float
        Probability that a sample is dropped, 0 <= p < 1; costs do not depend on it.
    name : str
        Scope of the ops.

    Returns
    -------
    Tensor
        Shape of `x`. FLOPs: 1 per element, and those of `dropout` for one number per sample.

    Raises
    ------
    GraphError, ShapeError
        If `p` is not a probability, or `x` has no axis.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C = cg.dims("B C")
    >>> with cg.Graph("g") as g:
    ...     y = cg.nn.stochastic_depth(g.input("x", (B, C)), 0.1)
    >>> cg.flops(g)
    B*C + 2*B
    """
    need_tensor("stochastic_depth", x)
    if x.ndim == 0:
        raise ShapeError(f"stochastic_depth of {x!r}: expected samples along a first axis")
    if p == 0:
        return x
    with scope(name):
        ones = fill((x.sizes[0], *(1,) * (x.ndim - 1)), 1.0, x.dtype, name="ones")
        return x * dropout(ones, p, name="kept")


def squeeze_excitation(
    x: Tensor,
    squeezed: object,
    *,
    activation: str = "relu",
    gate: str = "sigmoid",
    name: str = "squeeze_excitation",
) -> Tensor:
    """Squeeze and excite: scale channels by a two-layer MLP of their means (Hu et al. 2018, arXiv 1709.01507).

    Parameters
    ----------
    x : Tensor
        Images, shape (b, c, h, w).
    squeezed : sympy.Expr or int
        Hidden channels.
    activation, gate : str
        Elementwise functions from `costgraph.ops.elementwise`, after the first and the second layer.
    name : str
        Scope of the parameters and ops.

    Returns
    -------
    Tensor
        Shape of `x`. FLOPs of kind matmul: 4 * b * c * squeezed; one more per element for each of mean and product.

    Raises
    ------
    GraphError, ShapeError
        If `x` has another number of axes, a size is invalid, or a function is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C, Q, R = cg.dims("B C Q R")
    >>> with cg.Graph("g") as g:
    ...     y = cg.nn.squeeze_excitation(g.input("x", (B, C, R, R)), Q)
    >>> cg.param_count(g), cg.matmul_flops(g)
    (2*C*Q + C + Q, 4*B*C*Q)
    """
    need_tensor("squeeze_excitation", x)
    need_choice("squeeze_excitation: activation", activation, FUNCTIONS)
    need_choice("squeeze_excitation: gate", gate, FUNCTIONS)
    if x.ndim != 4:
        raise ShapeError(f"squeeze_excitation of {x!r}: expected four axes (batch, channels, height, width)")
    hidden = positive("squeeze_excitation: squeezed", squeezed)
    with module(current_graph(x.graph), name):
        y = reduce(x, "b c h w -> b c", "mean", name="mean")
        y = pointwise(activation, linear(y, "b c -> b q", q=hidden, bias=True, name="squeeze"))
        y = pointwise(gate, linear(y, "b q -> b c", c=x.sizes[1], bias=True, name="excite"))
        return x * reshape(y, (*y.sizes, 1, 1), name="scales")


def inverted_residual(
    x: Tensor,
    expanded: object,
    out: object,
    *,
    window: int = 3,
    stride: int = 1,
    dilation: int = 1,
    activation: str = "relu6",
    squeezed: object = None,
    squeeze_activation: str = "relu",
    gate: str = "sigmoid",
    expand: bool = True,
    residual: bool = False,
    p: float = 0,
    name: str = "block",
) -> Tensor:
    """Apply an inverted residual, the block of MobileNet V2, V3 and EfficientNet: expand, depthwise convolve, project.

    Sandler et al. 2018 (arXiv 1801.04381), figure 3; Howard et al. 2019 (arXiv 1905.02244), figure 4, with
    squeeze-and-excitation after the depthwise convolution.

    Parameters
    ----------
    x : Tensor
        Images, shape (b, c, h, w).
    expanded, out : sympy.Expr or int
        Hidden and output channels.
    window, stride, dilation : int
        As in `conv`, for the depthwise convolution, which is padded so that the output is the input over the stride,
        rounded up. The window is odd.
    activation : str
        Elementwise function from `costgraph.ops.elementwise`, after expansion and depthwise convolution.
    squeezed : sympy.Expr or int, optional
        Hidden channels of squeeze-and-excitation, which is omitted by default.
    squeeze_activation, gate : str
        As in `squeeze_excitation`.
    expand : bool
        False if the block starts with the depthwise convolution; `expanded` must then equal the channels of `x`.
    residual : bool
        Whether to add `x` to the result; shapes must match.
    p : float
        Stochastic depth of the residual branch.
    name : str
        Scope of the parameters and ops.

    Returns
    -------
    Tensor
        Shape (b, out, ceiling(h/stride), ceiling(w/stride)); a batch norm follows every convolution.

    Raises
    ------
    GraphError, ShapeError
        If a size or another argument does not fit.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C, E, R = cg.dims("B C E R")
    >>> with cg.Graph("g") as g:
    ...     y = cg.nn.inverted_residual(g.input("x", (B, C, R, R)), E, C, residual=True)
    >>> cg.matmul_flops(g), cg.param_count(g)
    (4*B*C*E*R**2 + 18*B*E*R**2, 2*C*E + 2*C + 13*E)
    """
    need_tensor("inverted_residual", x)
    need_choice("inverted_residual: activation", activation, FUNCTIONS)
    need_flag("inverted_residual", expand=expand, residual=residual)
    if isinstance(window, bool) or not isinstance(window, int) or window % 2 == 0:
        raise ShapeError(f"inverted_residual {name!r}: window={window!r}, expected an odd integer")
    hidden = positive(f"inverted_residual {name!r}: expanded", expanded)

    def normed(x: Tensor, channels: object, name: str, **options: object) -> Tensor:
        y = conv(x, "b c h w -> b o h w", o=channels, name=name, **options)  # type: ignore[arg-type]  # checked there
        return batch_norm(y, name=f"{name}/norm")

    with module(current_graph(x.graph), name):
        y = pointwise(activation, normed(x, hidden, "expand", window=1)) if expand else x
        padding = dilation * (window - 1) // 2
        y = normed(
            y, hidden, "depthwise", window=window, stride=stride, padding=padding, dilation=dilation, groups=hidden
        )
        y = pointwise(activation, y)
        if squeezed is not None:
            y = squeeze_excitation(y, squeezed, activation=squeeze_activation, gate=gate)
        y = normed(y, out, "project", window=1)
        return x + stochastic_depth(y, p) if residual else y
