"""Recurrent layers whose gates read the state of the position before: LSTM and GRU as torch has them."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ShapeError
from ..graph.arguments import need_flag, need_tensor, positive
from ..graph.graph import current_graph
from ..graph.scopes import module
from ..graph.tensor import Tensor
from ..ops.blocks import fused
from ..ops.cached import initial_state
from ..ops.einsum import einsum
from ..ops.layout import split
from ..ops.pointwise import pointwise
from .activations import sigmoid, tanh
from .kernels import one_kernel
from .linear import linear
from .recurrent import recurrence

__all__ = ["gru", "lstm"]


def lstm(x: Tensor, hidden: object, *, bias: bool = True, name: str = "lstm") -> Tensor:
    """Run one layer of torch.nn.LSTM: (b, s, d) to (b, s, hidden).

    Parameters
    ----------
    x : Tensor
        Shape (b, s, d).
    hidden : sympy.Expr or int
        Width of the state.
    bias : bool
        Both of torch's biases, of 4*hidden each.
    name : str
        Scope of the layer.

    Returns
    -------
    Tensor
        FLOPs of kind matmul: 2*b*s*4*hidden*(d + hidden). The product with `x` is one for all positions; each
        position multiplies its state, and updates it in one kernel.

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or an argument is none.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D, E = cg.dims("B S D E")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.lstm(g.input("x", (B, S, D)), E))
    >>> cg.param_count(g), cg.matmul_flops(g)
    (4*D*E + 4*E**2 + 8*E, 8*B*D*E*S + 8*B*E**2*S)
    """

    def cell(made: Tensor, given: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = split(made + given, (c.sizes[-1],) * 4)
        c = pointwise("fma", sigmoid(f), c, sigmoid(i) * tanh(g))
        return sigmoid(o) * tanh(c), c

    return _recurrent_layer(x, hidden, cell, gates=4, states=2, bias=bias, name=name)


def gru(x: Tensor, hidden: object, *, bias: bool = True, name: str = "gru") -> Tensor:
    """Run one layer of torch.nn.GRU: (b, s, d) to (b, s, hidden).

    Parameters
    ----------
    x, hidden, bias, name : object
        As of `lstm`; biases are of 3*hidden each.

    Returns
    -------
    Tensor
        FLOPs of kind matmul: 2*b*s*3*hidden*(d + hidden), in the same order as of `lstm`.

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or an argument is none.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D, E = cg.dims("B S D E")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.gru(g.input("x", (B, S, D)), E))
    >>> cg.param_count(g), cg.matmul_flops(g)
    (3*D*E + 3*E**2 + 6*E, 6*B*D*E*S + 6*B*E**2*S)
    """

    def cell(made: Tensor, given: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        r, z, n = split(made, (h.sizes[-1],) * 3)
        reset, update, new = split(given, (h.sizes[-1],) * 3)
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
    """Run a layer whose gates are linear in its input and its state: `cell(of the state, of the input, last state)`."""
    need_tensor(name, x)
    need_flag(name, bias=bias)
    if x.ndim != 3:
        raise ShapeError(f"{name} of {x!r}, expected three axes (batch, positions, width)")
    width = positive(f"{name}: hidden", hidden)
    graph = current_graph(x.graph)
    with module(graph, name):
        given = linear(x, "b s d -> b s f", f=gates * width, bias=bias, name="input")
        with module(graph, "state"):
            own = [graph.param("weight", (width, gates * width))]
            own += [graph.param("bias", (gates * width,))] if bias else []
        start = tuple(initial_state((x.sizes[0], width), x.dtype, name=n) for n in ("h", "c")[:states])

        def product(h: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            made = einsum(h, w, "b e, e f -> b f", name="matmul")
            return made if b is None else made + b

        def step(state: tuple[Tensor, ...], given: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            h, last = state[0], state[-1]
            made = one_kernel("addmm", product, h, *own, backward="ops") if bias else product(h, *own)
            after = fused("cell", cell, made, given, last)
            assert isinstance(after, tuple)
            return after, after[0]

        return recurrence(step, start, given)
