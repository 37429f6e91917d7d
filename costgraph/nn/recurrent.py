"""Recurrent layers: scans over positions, causal convolutions, running sums, LSTM and GRU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import overload

from ..dtypes import dtype as find_dtype
from ..dtypes import promote
from ..errors import ShapeError
from ..ir.graph import Tensor, current_graph, module, need_call, need_choice, need_flag, need_tensor, positive
from ..ops.einsum import einsum
from ..ops.elementwise import cast, pointwise
from ..ops.fill import fill, pad
from ..ops.kv_cache import initial_state
from ..ops.layout import rearrange, reshape, slice_axis, split
from ..ops.loops import Carry, fused, kernel, save, scan
from ..ops.reduce import reduce
from .activations import one_kernel, sigmoid, tanh
from .conv import conv
from .linear import linear

__all__ = [
    "causal_conv",
    "cumulative_sum",
    "head_norm",
    "recurrence",
    "running",
    "scan_kernel",
    "token_shift",
    "gru",
    "lstm",
]


# -- recurrence --------------------------------------------------------------------------------------------------------


@overload
def recurrence(
    step: Callable[..., tuple[Carry, Tensor]], start: Carry, xs: Carry, *, axis: int = ..., name: str = ...
) -> Tensor: ...


@overload
def recurrence(
    step: Callable[..., tuple[Carry, tuple[Tensor, ...]]], start: Carry, xs: Carry, *, axis: int = ..., name: str = ...
) -> tuple[Tensor, ...]: ...


def recurrence(
    step: Callable[..., tuple[Carry, Carry]], start: Carry, xs: Carry, *, axis: int = 1, name: str = "time"
) -> Carry:
    """Scan over sequence positions, on any axis, carrying a state.

    If `start` comes from `initial_state`, `decode` continues from the last state with one iteration per new position.
    Inside `cg.kernel(...)` the states never reach memory.

    Parameters
    ----------
    step : callable
        `step(state, x) -> (state, y)`: `x` is one position of `xs`, a view. Both may be tuples of tensors.
    start : Tensor or tuple of Tensor
        Initial state.
    xs : Tensor or tuple of Tensor
        Inputs, with the positions on the same axis.
    axis : int
        Position axis, in `xs` and in the result.
    name : str
        Loop name.

    Returns
    -------
    Tensor or tuple of Tensor
        Outputs at all positions, stacked on that axis. FLOPs and bytes are those of `step` times the number of
        positions.

    Raises
    ------
    GraphError, ShapeError
        If an argument is not a tensor, the axis does not exist, or the results from `step` do not match its arguments.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D = cg.dims("B S D")
    >>> with cg.Graph("g") as g:
    ...     x, start = g.input("x", (B, S, D)), cg.ops.initial_state((B, D))
    ...     with cg.kernel("average"):
    ...         y = cg.nn.recurrence(lambda h, x: (h * 0.9 + x, h), start, x)
    ...     g.output(y)
    >>> y.shape, cg.flops(g), cg.bytes_moved(g)
    ((B, S, D), 2*B*D*S, 8*B*D*S + 8*B*D)
    """
    need_call(f"recurrence {name!r}: step", step)
    inputs = xs if isinstance(xs, tuple) else (xs,)
    need_tensor(f"recurrence {name!r}", *inputs)
    if not inputs:
        raise ShapeError(f"recurrence {name!r} without xs, expected a tensor with a position axis")
    slices = tuple(_move_axis(f"recurrence {name!r}", t, axis, first=True) for t in inputs)
    _, ys = scan(slices[0].sizes[0], step, start, slices if isinstance(xs, tuple) else slices[0], name=name)
    if isinstance(ys, tuple):
        return tuple(_move_axis(f"recurrence {name!r}", y, axis, first=False) for y in ys)
    return _move_axis(f"recurrence {name!r}", ys, axis, first=False)


def _move_axis(place: str, t: Tensor, axis: int, *, first: bool) -> Tensor:
    """Return a view with the position axis moved to the front, or back."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -t.ndim <= axis < t.ndim:
        raise ShapeError(f"{place}: axis {axis!r} of {t!r}, expected an integer from {-t.ndim} to {t.ndim - 1}")
    names = [f"a{i}" for i in range(t.ndim)]
    moved_names = [*names]
    moved_names.insert(0, moved_names.pop(axis % t.ndim))
    old_names, new_names = (names, moved_names) if first else (moved_names, names)
    return t if old_names == new_names else rearrange(t, f"{' '.join(old_names)} -> {' '.join(new_names)}")


@contextmanager
def scan_kernel(name: str, scan: str) -> Iterator[None]:
    """Open a kernel in which recurrent states stay on chip, or no kernel, so that ops write them to memory.

    Parameters
    ----------
    name : str
        Kernel name.
    scan : str
        kernel: one kernel for everything inside. ops: separate ops.

    Raises
    ------
    GraphError
        If `scan` is neither of these, or no graph is open.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D = cg.dims("B S D")
    >>> for scan in ("kernel", "ops"):
    ...     with cg.Graph("g") as g:
    ...         x, start = g.input("x", (B, S, D)), cg.ops.initial_state((B, D))
    ...         with cg.nn.scan_kernel("sums", scan):
    ...             y = cg.nn.recurrence(lambda h, x: (h + x, h), start, x)
    ...         g.output(y)
    ...     print(cg.flops(g), cg.bytes_moved(g))
    B*D*S 8*B*D*S + 8*B*D
    B*D*S 20*B*D*S + 4*B*D
    """
    need_choice(f"kernel {name!r}: scan", scan, ("kernel", "ops"))
    if scan == "ops":
        yield
        return
    with kernel(name):
        yield


def causal_conv(x: Tensor, window: int, *, bias: bool = True, name: str = "conv") -> Tensor:
    """Convolve each channel over its own and earlier positions: (b, s, d) to (b, s, d).

    Parameters
    ----------
    x : Tensor
        Shape (b, s, d).
    window : int
        Number of positions in the window; `decode` caches the last `window - 1` of `x`.
    bias : bool
        Whether to add a bias per channel.
    name : str
        Scope of the parameters.

    Returns
    -------
    Tensor
        FLOPs of kind matmul: 2*window*b*d*(s + window - 1), as torch.nn.Conv1d with `padding=window - 1` and its last
        `window - 1` results dropped.

    Raises
    ------
    GraphError, ShapeError
        If `x` does not have three axes, or the window is not a positive integer.
    """
    need_tensor(f"causal_conv {name!r}", x)
    if x.ndim != 3:
        raise ShapeError(f"causal_conv {name!r} of {x!r}, expected three axes (batch, positions, channels)")
    width = x.sizes[2]
    y = rearrange(x, "b s d -> b d s", name=f"{name}.input")
    y = conv(y, "b d s -> b e s", window=window, padding="causal", groups=width, e=width, bias=bias, name=name)
    return rearrange(y, "b d s -> b s d", name=f"{name}.output")


def token_shift(x: Tensor, *, name: str = "shift") -> Tensor:
    """Shift a sequence by one position, with zeros at the first: (b, s, d) to (b, s, d).

    `decode` caches the last position of `x`.

    Parameters
    ----------
    x : Tensor
        Sequence with positions on its second axis.
    name : str
        Name of op and cache.

    Returns
    -------
    Tensor
        No FLOPs; one read of `x`, and one write of `x` with a position of zeros before it.

    Raises
    ------
    GraphError, ShapeError
        If `x` is not a tensor, or has fewer than two axes.
    """
    need_tensor(f"token_shift {name!r}", x)
    if x.ndim < 2:
        raise ShapeError(f"token_shift of {x!r}: expected at least two axes (batch, positions)")
    padded = pad(x, 1, 1, x.sizes[1] + 1, causal=True, name=name)
    return slice_axis(padded, 1, 0, x.sizes[1], name=f"{name}.before")


def cumulative_sum(x: Tensor, axis: int = -1, *, name: str = "cumulative_sum") -> Tensor:
    """Return the cumulative sum along an axis, in one kernel.

    Parameters
    ----------
    x : Tensor
        Any shape.
    axis : int
        Axis to sum along.
    name : str
        Kernel name.

    Returns
    -------
    Tensor
        Same shape: one FLOP per element, one read and one write.

    Raises
    ------
    GraphError, ShapeError
        If `x` is not a tensor, or the axis does not exist.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.cumulative_sum(g.input("x", (B, S))))
    >>> cg.flops(g), cg.bytes_moved(g)
    (B*S, 8*B*S)
    """
    need_tensor("cumulative_sum", x)

    return running(x, axis, "add", 0, name, backward="cumulative_sum")


def running(x: Tensor, axis: int, function: str, first: float, name: str, backward: str = "") -> Tensor:
    """Accumulate a binary function along an axis in one kernel, starting from `first`."""

    def body(x: Tensor) -> Tensor:
        start = fill(_move_axis(name, x, axis, first=True).shape[1:], first, dtype=x.dtype)

        def step(so_far: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            total = pointwise(function, so_far, x)
            return total, total

        return recurrence(step, start, x, axis=axis, name="sum" if function == "add" else function)

    return one_kernel(name, body, x, backward=backward)


def head_norm(x: Tensor, *, bias: bool = False, name: str = "head_norm") -> Tensor:
    """Normalize each head to mean 0 and variance 1, then scale by parameters: (..., h, k) to (..., h*k).

    Parameters
    ----------
    x : Tensor
        Heads and their elements on the last two axes.
    bias : bool
        Whether there is a shift too.
    name : str
        Scope of the parameters, h*k each, and kernel name.

    Returns
    -------
    Tensor
        FLOPs per element: mean, subtraction, square, mean, product, and one each for scale and shift.

    Raises
    ------
    GraphError, ShapeError
        If `x` is not a tensor, or has fewer than two axes.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, H, K = cg.dims("B S H K")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.head_norm(g.input("x", (B, S, H, K))))
    >>> cg.param_count(g), cg.bytes_moved(g)
    (H*K, 8*B*H*K*S + 4*H*K)
    """
    need_tensor(f"head_norm {name!r}", x)
    need_flag(f"head_norm {name!r}", bias=bias)
    if x.ndim < 2:
        raise ShapeError(f"head_norm of {x!r}: expected at least two axes (heads, size)")
    graph = current_graph(x.graph)
    merged_shape = (*x.sizes[:-2], x.sizes[-2] * x.sizes[-1])
    names = " ".join(f"a{i}" for i in range(x.ndim - 1))

    def body(x: Tensor, weight: Tensor, shift: Tensor | None = None) -> Tensor:
        wide = cast(x, promote(x.dtype, find_dtype("fp32")))
        centred = wide - save(reduce(wide, f"{names} k -> {names} 1", "mean"))
        variance = reduce(pointwise("square", centred), f"{names} k -> {names} 1", "mean")
        y = reshape(centred * save(pointwise("rsqrt", variance + 1e-5)), merged_shape) * weight
        return cast(y if shift is None else y + shift, x.dtype)

    with module(graph, name):
        params = [graph.param(n, merged_shape[-1:]) for n in (("weight", "bias") if bias else ("weight",))]
        return one_kernel("norm", body, x, *params)


# -- LSTM and GRU ------------------------------------------------------------------------------------------------------


def lstm(x: Tensor, hidden: object, *, bias: bool = True, name: str = "lstm") -> Tensor:
    """Run one layer of torch.nn.LSTM: (b, s, d) to (b, s, hidden).

    Parameters
    ----------
    x : Tensor
        Shape (b, s, d).
    hidden : sympy.Expr or int
        State width.
    bias : bool
        Whether there are both torch biases, 4*hidden each.
    name : str
        Layer scope.

    Returns
    -------
    Tensor
        FLOPs of kind matmul: 2*b*s*4*hidden*(d + hidden). One matmul covers the inputs at all positions; each position
        then multiplies its state and updates it in one kernel.

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or an argument is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D, E = cg.dims("B S D E")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.lstm(g.input("x", (B, S, D)), E))
    >>> cg.param_count(g), cg.matmul_flops(g)
    (4*D*E + 4*E**2 + 8*E, 8*B*D*E*S + 8*B*E**2*S)
    """

    def cell(state_gates: Tensor, input_gates: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = split(state_gates + input_gates, (c.sizes[-1],) * 4)
        c = pointwise("fma", sigmoid(f), c, sigmoid(i) * tanh(g))
        return sigmoid(o) * tanh(c), c

    return _recurrent_layer(x, hidden, cell, gates=4, states=2, bias=bias, name=name)


def gru(x: Tensor, hidden: object, *, bias: bool = True, name: str = "gru") -> Tensor:
    """Run one layer of torch.nn.GRU: (b, s, d) to (b, s, hidden).

    Parameters
    ----------
    x, hidden, bias, name : object
        As in `lstm`; biases have 3*hidden elements each.

    Returns
    -------
    Tensor
        FLOPs of kind matmul: 2*b*s*3*hidden*(d + hidden), in the same order as in `lstm`.

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or an argument is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D, E = cg.dims("B S D E")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.gru(g.input("x", (B, S, D)), E))
    >>> cg.param_count(g), cg.matmul_flops(g)
    (3*D*E + 3*E**2 + 6*E, 6*B*D*E*S + 6*B*E**2*S)
    """

    def cell(state_gates: Tensor, input_gates: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        r, z, n = split(state_gates, (h.sizes[-1],) * 3)
        reset, update, new = split(input_gates, (h.sizes[-1],) * 3)
        n = tanh(pointwise("fma", sigmoid(reset + r), n, new))
        return (pointwise("fma", sigmoid(update + z), h - n, n),)

    return _recurrent_layer(x, hidden, cell, gates=3, states=1, bias=bias, name=name)


def _recurrent_layer(
    x: Tensor,
    hidden: object,
    cell: Callable[..., tuple[Tensor, ...]],
    *,
    gates: int,
    states: int,
    bias: bool,
    name: str,
) -> Tensor:
    """Run a layer whose gates are linear in input and state; `cell` takes (state gates, input gates, last state)."""
    need_tensor(name, x)
    need_flag(name, bias=bias)
    if x.ndim != 3:
        raise ShapeError(f"{name} of {x!r}, expected three axes (batch, positions, width)")
    width = positive(f"{name}: hidden", hidden)
    graph = current_graph(x.graph)
    with module(graph, name):
        input_gates = linear(x, "b s d -> b s f", f=gates * width, bias=bias, name="input")
        with module(graph, "state"):
            weights = [graph.param("weight", (width, gates * width))]
            weights += [graph.param("bias", (gates * width,))] if bias else []
        start = tuple(initial_state((x.sizes[0], width), x.dtype, name=n) for n in ("h", "c")[:states])

        def product(h: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            state_gates = einsum(h, w, "b e, e f -> b f", name="matmul")
            return state_gates if b is None else state_gates + b

        def step(state: tuple[Tensor, ...], input_gates: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            h, last = state[0], state[-1]
            state_gates = one_kernel("addmm", product, h, *weights, backward="ops") if bias else product(h, *weights)
            next_state = fused("cell", cell, state_gates, input_gates, last)
            assert isinstance(next_state, tuple)
            return next_state, next_state[0]

        return recurrence(step, start, input_gates)
