"""Transposed convolution: each element is spread over a window, and what lands on one place is added up."""

from __future__ import annotations

from typing import Any

from ..algebra.polynomial import ONE, Poly, poly
from ..errors import PatternError, ShapeError
from ..graph.arguments import need_flag, need_tensor, positive
from ..graph.graph import apply, current_graph
from ..graph.scopes import module
from ..graph.tensor import Tensor
from ..notation.pattern import Affine, Axes, Pattern, PatternText, parse_pattern
from ..ops.contraction import Einsum
from ..ops.layout import reshape
from .conv import Extents, each_axis
from .kernels import one_kernel

__all__ = ["conv_transpose", "spread"]

_NAME = "conv_transpose"


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
    """Convolve the other way round: the map that the gradient of a convolution is, as in decoders of images.

    Parameters
    ----------
    x : Tensor
        Batch and channels first, the axes that the window slides over last.
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
        FLOPs: 2 * input points * window * input channels of a group * output channels, what falls on padding included.

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
    place, new = _channels(x, pattern)
    spans = each_axis(window, x.ndim - place - 1, "window", 1)
    if set(sizes) != {new}:
        raise ShapeError(f"conv_transpose {name!r}: sizes given for {sorted(sizes)}, expected {new}=...")
    many = positive(f"conv_transpose {name!r}: groups", groups)
    channels, made = x.sizes[place], positive(f"conv_transpose {name!r}: size of {new!r}", sizes[new])
    facts: Any = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}

    def product(x: Tensor, *own: Tensor) -> Tensor:
        return spread(x, *own, groups=many, **facts)

    with module(graph, name):
        weight = graph.param("weight", (channels, made / many, *spans))
        if not bias:
            return product(x, weight)
        return one_kernel(_NAME, product, x, weight, graph.param("bias", (made,)), backward="ops")


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
    """Return what weights of shape (in, out / groups, *window) spread a tensor over, and what is added to it."""
    channels, share, *window = weight.sizes
    spans, place, made = tuple(int(w.constant or 0) for w in window), x.ndim - len(window) - 1, share * groups
    indices, out = _spread(x, spans, stride, padding, output_padding, dilation)
    lead, after = x.sizes[:place], x.sizes[place + 1 :]
    extents = {"g": groups, "c": channels / groups, "o": share, **{f"n{i}": size for i, size in enumerate(lead)}}
    for i, (size, span) in enumerate(zip(after, spans, strict=True)):
        extents |= {f"o{i}": size, f"w{i}": poly(span)}
    pattern = _contraction(place, indices)
    (y,) = apply(Einsum(pattern=pattern, extents=extents, dtype=x.dtype, sizes=(*lead, made, *out)), [x, weight], _NAME)
    return y if bias is None else y + reshape(bias, (made, *(1,) * len(spans)))


def _channels(x: Tensor, pattern: PatternText) -> tuple[int, str]:
    """Return the place of the channels, and the name of those that come out."""
    parsed = parse_pattern(pattern, (x.ndim,))
    plain = all(isinstance(a, Axes) and len(a.names) == 1 for a in (*parsed.operands[0], *parsed.result))
    before, after = parsed.operand_names(0), parsed.result_names
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if not plain or len(before) != len(after) or len(changed) != 1 or changed[0] + 1 >= x.ndim:
        raise PatternError(
            f"conv_transpose {pattern!r}: expected one other name, with the axes of the window behind it"
        )
    return changed[0], after[changed[0]]


def _spread(
    x: Tensor, spans: tuple[int, ...], stride: object, padding: object, more: object, dilation: object
) -> tuple[list[Affine], list[Poly]]:
    """Return where each element of a window lands on the last axes, and their sizes."""
    rank = len(spans)
    steps, gaps = each_axis(stride, rank, "stride", 1), each_axis(dilation, rank, "dilation", 1)
    pads, rests = each_axis(padding, rank, "padding", 0), each_axis(more, rank, "output_padding", 0)
    indices, sizes = [], []
    for i, (n, w) in enumerate(zip(x.sizes[x.ndim - rank :], spans, strict=True)):
        if rests[i] >= max(steps[i], gaps[i]):
            raise ShapeError(f"output_padding={more!r}: expected less than the stride or the dilation")
        size = (n - 1) * steps[i] - 2 * pads[i] + gaps[i] * (w - 1) + rests[i] + 1
        if size.constant is not None and size.constant < 1:
            raise ShapeError(f"padding={padding!r} leaves {size} positions of axis {i + x.ndim - rank} of {x!r}")
        indices.append(Affine(((f"o{i}", steps[i]), (f"w{i}", gaps[i])), -pads[i]))
        sizes.append(size)
    return indices, sizes


def _contraction(place: int, indices: list[Affine]) -> Pattern:
    lead = tuple(Axes((f"n{i}",)) for i in range(place))
    points = tuple(Axes((f"o{i}",)) for i in range(len(indices)))
    window = tuple(Axes((f"w{i}",)) for i in range(len(indices)))
    inputs, outputs = Axes(("g", "c")), Axes(("g", "o"))
    return Pattern(((*lead, inputs, *points), (inputs, Axes(("o",)), *window)), (*lead, outputs, *indices))
