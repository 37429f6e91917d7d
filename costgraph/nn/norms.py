"""Normalization: layer norm, RMS norm, batch norm and group norm."""

from __future__ import annotations

from collections.abc import Sequence

from ..algebra.polynomial import Poly
from ..dtypes import dtype as find_dtype
from ..dtypes import promote
from ..errors import ShapeError
from ..ir.graph import (
    Tensor,
    current_graph,
    module,
    need_choice,
    need_flag,
    need_tensor,
    positive,
)
from ..ops.elementwise import (
    cast,
    pointwise,
)
from ..ops.layout import reshape
from ..ops.loops import (
    fused,
    save,
)
from ..ops.reduce import reduce
from .activations import along, one_kernel

__all__ = [
    "batch_norm", "group_norm", "layer_norm", "normalised", "of_groups", "of_root", "of_running", "of_the_batch",
    "over_the_batch", "rms_norm",
]  # fmt: skip


def _to_statistics_dtype(x: Tensor) -> Tensor:
    """Return x cast to the dtype of statistics: kernels compute in fp32 at least."""
    return cast(x, promote(x.dtype, find_dtype("fp32"))) if x.dtype.kind == "float" else x


def layer_norm(x: Tensor, *, affine: bool = True, bias: bool = True, name: str = "layer_norm") -> Tensor:
    """Normalize the last axis to mean 0 and variance 1, then scale and shift by parameters, in one kernel.

    Parameters
    ----------
    x : Tensor
        Normalized along the last axis.
    affine, bias : bool
        Whether there is a scale, and with it a shift, along the last axis.
    name : str
        Scope of the parameters, and kernel name.

    Returns
    -------
    Tensor
        FLOPs per element: mean, subtraction, square, mean, product, and one each for scale and shift.

    Raises
    ------
    ShapeError
        If `x` is a scalar.
    """
    names, row = along(x, -1)
    need_flag("layer_norm", affine=affine, bias=bias)
    graph = current_graph(x.graph)

    def body(x: Tensor, *params: Tensor) -> Tensor:
        return normalised(x, f"{names} -> {row}", *params)[0]

    with module(graph, name):
        params = [graph.param("weight", x.sizes[-1:])] if affine else []
        params += [graph.param("bias", x.sizes[-1:])] if affine and bias else []
        return one_kernel("norm", body, x, *params)


def normalised(
    x: Tensor, rows: str, weight: Tensor | None = None, shift: Tensor | None = None, *, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize rows to mean 0 and variance 1, then scale and shift; also return mean and reciprocal deviation.

    `rows` is the pattern that reduces a row to size 1.
    """
    wide = _to_statistics_dtype(x)
    mean = save(reduce(wide, rows, "mean"))
    centred = wide - mean
    scale = save(pointwise("rsqrt", reduce(pointwise("square", centred), rows, "mean") + epsilon))
    y = centred * scale
    y = y if weight is None else y * weight
    return cast(y if shift is None else y + shift, x.dtype), mean, scale


def rms_norm(x: Tensor, *, affine: bool = True, name: str = "rms_norm") -> Tensor:
    """Divide by the root mean square of the last axis, then scale by a parameter, in one kernel.

    Parameters
    ----------
    x : Tensor
        Normalized along the last axis.
    affine : bool
        Whether there is a scale along the last axis.
    name : str
        Scope of the parameter, and kernel name.

    Returns
    -------
    Tensor
        FLOPs per element: square, mean, product, and one for the scale.

    Raises
    ------
    ShapeError
        If `x` is a scalar.
    """
    names, row = along(x, -1)
    need_flag("rms_norm", affine=affine)
    graph = current_graph(x.graph)

    def body(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return of_root(x, f"{names} -> {row}", weight)[0]

    with module(graph, name):
        params = [graph.param("weight", x.sizes[-1:])] if affine else []
        return one_kernel("norm", body, x, *params)


def of_root(x: Tensor, rows: str, weight: Tensor | None = None, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Divide rows by their root mean square and scale; also return its reciprocal. `rows` reduces a row to size 1."""
    wide = _to_statistics_dtype(x)
    scale = save(pointwise("rsqrt", reduce(pointwise("square", wide), rows, "mean") + epsilon))
    y = wide * scale
    return cast(y if weight is None else y * weight, x.dtype), scale


def batch_norm(x: Tensor, *, affine: bool = True, statistics: str = "auto", name: str = "batch_norm") -> Tensor:
    """Normalize each channel to mean 0 and variance 1, then scale and shift by parameters, in one kernel.

    Parameters
    ----------
    x : Tensor
        Shape (b, c, ...): channels on the second axis; statistics are over all other axes.
    affine : bool
        Whether there are a scale and a shift per channel.
    statistics : str
        Source of mean and variance. running: the buffers, as a torch module after `eval()`. batch: `x` itself, and the
        buffers are then updated, as after `train()`. auto: running in the declared graph, batch in a `training_step`
        derived from it; use `running` for a norm that stays frozen in training.
    name : str
        Scope of the parameters and buffers.

    Returns
    -------
    Tensor
        Shape of `x`. FLOPs per element: subtraction and product, one each for scale and shift, and with batch
        statistics mean, square and mean. FLOPs per channel: addition and reciprocal root, and 3 for each of the two
        updates. Statistics and buffers are fp32. A third buffer counts the batches in int64; its increment is not
        counted.

    Raises
    ------
    GraphError, ShapeError
        If `x` has fewer than two axes, or an argument is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C, R = cg.dims("B C R")
    >>> with cg.Graph("g") as g:
    ...     y = cg.nn.batch_norm(g.input("x", (B, C, R, R)))
    >>> cg.param_count(g), cg.flops(g)
    (2*C, 4*B*C*R**2 + 2*C)
    """
    need_tensor("batch_norm", x)
    need_flag("batch_norm", affine=affine)
    need_choice("batch_norm: statistics", statistics, ("auto", "batch", "running"))
    _need_channels("batch_norm", x)
    graph = current_graph(x.graph)

    def body(*operands: Tensor) -> Tensor:
        # in the order of the kernel's operands
        x, mean, variance, *params = map(current_graph(graph).adopt, operands)
        return of_running(x, mean, variance, params)

    with module(graph, name):
        params = [graph.param(param_name, x.sizes[1:2]) for param_name in ("weight", "bias")] if affine else []
        running = [graph.buffer(f"running_{param_name}", x.sizes[1:2], "fp32") for param_name in ("mean", "var")]
        graph.buffer("num_batches_tracked", (), "int64")
        if statistics == "batch":
            return over_the_batch(x, *running, *params)
        y = one_kernel("batch_norm", body, x, *running, *params)
        if statistics == "auto" and y.producer is not None:
            y.producer.state(statistics="auto")
        return y


def over_the_batch(x: Tensor, mean: Tensor, variance: Tensor, *params: Tensor, name: str = "batch_norm") -> Tensor:
    """Normalize (b, c, ...) with batch statistics, in a kernel that also returns the new running statistics.

    Running statistics, and scale and shift if given, have shape (c,). The buffers are not overwritten, as a recomputed
    pass reads them again.
    """

    def body(x: Tensor, mean: Tensor, variance: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        y, batch_mean, batch_variance, _ = of_the_batch(x, params)
        return y, *(pointwise("lerp", old, new, 0.1) for old, new in ((mean, batch_mean), (variance, batch_variance)))

    results = fused(name, body, x, mean, variance, *params)
    return results[0] if isinstance(results, tuple) else results


def of_the_batch(x: Tensor, params: Sequence[Tensor | None], *, epsilon: float = 1e-5) -> tuple[Tensor, ...]:
    """Normalize channels with batch statistics, scale and shift; also return mean, variance, reciprocal deviation."""
    pattern = f"{' '.join(f'a{i}' for i in range(x.ndim))} -> a1"
    wide = _to_statistics_dtype(x)
    mean = save(reduce(wide, pattern, "mean"))
    centred = wide - _along_channels(mean, x)
    variance = reduce(pointwise("square", centred), pattern, "mean")
    scale = save(pointwise("rsqrt", variance + epsilon))
    return _affine(centred * _along_channels(scale, x), params, x), mean, variance, scale


def of_running(
    x: Tensor, mean: Tensor, variance: Tensor, params: Sequence[Tensor | None], *, epsilon: float = 1e-5
) -> Tensor:
    """Normalize channels with given statistics, scale and shift."""
    centred = _to_statistics_dtype(x) - _along_channels(mean, x)
    scale = pointwise("rsqrt", variance + epsilon)
    return _affine(centred * _along_channels(scale, x), params, x)


def group_norm(x: Tensor, groups: object, *, affine: bool = True, name: str = "group_norm") -> Tensor:
    """Normalize groups of channels per sample, then scale and shift each channel, in one kernel.

    Parameters
    ----------
    x : Tensor
        Shape (b, c, ...): channels on the second axis.
    groups : sympy.Expr or int
        Number of groups, with c/groups channels each.
    affine : bool
        Whether there are a scale and a shift per channel.
    name : str
        Scope of the parameters, and kernel name.

    Returns
    -------
    Tensor
        Shape of `x`. FLOPs per element: mean, subtraction, square, mean, product, and one each for scale and shift;
        FLOPs per group: addition and reciprocal root. Statistics are fp32 at least.

    Raises
    ------
    GraphError, ShapeError
        If `x` has fewer than two axes, or its channels cannot be divided into such groups.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C, R, G = cg.dims("B C R G")
    >>> with cg.Graph("g") as g:
    ...     y = cg.nn.group_norm(g.input("x", (B, C, R)), G)
    >>> cg.param_count(g), cg.flops(g)
    (2*C, 7*B*C*R + 2*B*G)
    """
    need_tensor("group_norm", x)
    need_flag("group_norm", affine=affine)
    _need_channels("group_norm", x)
    graph, group_count = current_graph(x.graph), positive("group_norm: groups", groups)
    share = (x.sizes[1] / group_count).constant
    if share is not None and (not isinstance(share, int) or share < 1):
        raise ShapeError(
            f"group_norm of {x!r}: {x.sizes[1]} channels in {group_count} groups, expected a multiple of the groups"
        )

    def body(x: Tensor, *params: Tensor) -> Tensor:
        return of_groups(x, group_count, params)[0]

    with module(graph, name):
        params = [graph.param(param_name, x.sizes[1:2]) for param_name in ("weight", "bias")] if affine else []
        return one_kernel("norm", body, x, *params)


def of_groups(
    x: Tensor, groups: Poly, params: Sequence[Tensor | None], *, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize groups, then scale and shift by channel; also return mean and reciprocal deviation."""
    rows = f"{' '.join(f'a{i}' for i in range(x.ndim + 1))} -> a0 a1"
    group_shape = (x.sizes[0], groups, *(1,) * (x.ndim - 1))
    wide = reshape(_to_statistics_dtype(x), (x.sizes[0], groups, x.sizes[1] / groups, *x.sizes[2:]))
    mean = save(reduce(wide, rows, "mean"))
    centred = wide - reshape(mean, group_shape)
    scale = save(pointwise("rsqrt", reduce(pointwise("square", centred), rows, "mean") + epsilon))
    return _affine(reshape(centred * reshape(scale, group_shape), x.sizes), params, x), mean, scale


def _need_channels(place: str, x: Tensor) -> None:
    if x.ndim < 2:
        raise ShapeError(f"{place} of {x!r}: expected at least two axes, channels second")


def _along_channels(t: Tensor, x: Tensor) -> Tensor:
    """Reshape per-channel values to (c, 1, ...), to broadcast with (b, c, ...)."""
    return reshape(t, (t.sizes[0], *(1,) * (x.ndim - 2)))


def _affine(y: Tensor, params: Sequence[Tensor | None], x: Tensor) -> Tensor:
    """Scale and shift each channel, and cast back to the input's dtype."""
    weight, shift = params or (None, None)
    y = y if weight is None else y * _along_channels(weight, x)
    return cast(y if shift is None else y + _along_channels(shift, x), x.dtype)
