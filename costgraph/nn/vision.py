"""Blocks of convolutional image networks: stochastic depth, squeeze-and-excitation, inverted residuals."""

from __future__ import annotations

from ..errors import ShapeError
from ..ir.graph import (
    Tensor,
    current_graph,
    module,
    need_choice,
    need_flag,
    need_tensor,
    positive,
    scope,
)
from ..ops.elementwise import dropout, pointwise
from ..ops.fill import fill
from ..ops.functions import FUNCTIONS
from ..ops.layout import reshape
from ..ops.reduce import reduce
from .conv import conv
from .linear import linear
from .norms import batch_norm

__all__ = ["inverted_residual", "squeeze_excitation", "stochastic_depth"]


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
