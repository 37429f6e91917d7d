"""Linear layers and MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..algebra.polynomial import Poly
from ..errors import PatternError, ShapeError
from ..ir.graph import (
    Tensor,
    current_graph,
    module,
    need_call,
    need_flag,
    need_tensor,
    positive,
)
from ..ir.graph import sizes as sizes_by_name
from ..notation.pattern import Affine, Pattern, PatternText, parse_pattern
from ..ops.axis_sizes import extents_of
from ..ops.einsum import einsum
from ..ops.elementwise import dropout
from ..ops.layout import split
from .activations import gelu, one_kernel, silu

__all__ = ["gated_mlp", "linear", "mlp"]


def linear(
    x: Tensor,
    pattern: PatternText,
    /,
    *,
    bias: bool = False,
    weight: Tensor | None = None,
    name: str = "linear",
    **sizes: object,
) -> Tensor:
    """Apply a linear layer: axes missing on the right side are contracted with a weight, added ones are new.

    Parameters
    ----------
    x : Tensor
        Activations.
    pattern : str
        Axes before and after: `"b s d -> b s f"`, or with separate heads `"b s d -> b s h k"`.
    bias : bool
        Whether to add a bias over the new axes, in the same kernel.
    weight : Tensor, optional
        Tied weight, contracted axes first and new ones last; by default a new parameter.
    name : str
        Scope of the parameters and op.
    **sizes : sympy.Expr or int
        Sizes of the new axes.

    Returns
    -------
    Tensor
        FLOPs: 2 per index point of the pattern, and with a bias 1 per element of the result.

    Raises
    ------
    PatternError, ShapeError
        If no axis is contracted or none is new, or sizes do not fit.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D, F = cg.dims("B S D F")
    >>> with cg.Graph("g") as g:
    ...     y = cg.linear(g.input("x", (B, S, D)), "b s d -> b s f", f=F, bias=True, name="up")
    >>> cg.param_count(g), cg.matmul_flops(g)
    (D*F + F, 2*B*D*F*S)
    """
    need_tensor("linear", x, *(() if weight is None else (weight,)))
    need_flag("linear", bias=bias)
    parsed = parse_pattern(pattern, (x.ndim,))
    contracted, new = _axes(f"linear {name!r}", pattern, parsed)
    graph = current_graph(x.graph)
    given_sizes = sizes_by_name(f"linear {name!r}", sizes)
    extents = _extents(f"linear {name!r}", pattern, graph.adopt(x), parsed, contracted + new, weight, given_sizes)
    operand_text = " ".join(map(str, parsed.operands[0]))
    text = f"{operand_text}, {' '.join(contracted + new)} -> {' '.join(map(str, parsed.result))}"
    contracted_sizes: dict[str, Any] = {n: extents[n] for n in contracted}
    with module(graph, name):
        if weight is None:
            weight = graph.param("weight", [extents[n] for n in contracted + new])
        if not bias:
            return einsum(x, weight, text, name="matmul", **contracted_sizes)
        result_names = parsed.result_names
        if result_names[len(result_names) - len(new) :] != tuple(new) or any(len(a.names) != 1 for a in parsed.result):
            raise PatternError(
                f"linear {name!r}: pattern {pattern!r} with a bias, expected the new axes last and unmerged"
            )
        b = graph.param("bias", [extents[n] for n in new])

        def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return einsum(x, w, text, name="matmul", **contracted_sizes) + b

        return one_kernel("addmm", product, x, weight, b, backward="ops")


def _axes(place: str, pattern: str, parsed: Pattern) -> tuple[list[str], list[str]]:
    """Return the contracted and the new axes."""
    operand_names, result_names = parsed.operand_names(0), parsed.result_names
    if any(isinstance(a, Affine) for a in parsed.operands[0]):
        raise PatternError(f"{place}: pattern {pattern!r} has an affine index such as h*2+r; use conv for windows")
    contracted = [n for n in operand_names if n not in result_names]
    new = [n for n in result_names if n not in operand_names]
    if not contracted or not new:
        raise PatternError(f"{place}: pattern {pattern!r} contracts {contracted} and adds {new}, expected both")
    return contracted, new


def _extents(
    place: str,
    pattern: str,
    x: Tensor,
    parsed: Pattern,
    axes: list[str],
    weight: Tensor | None,
    given_sizes: dict[str, Poly],
) -> dict[str, Poly]:
    """Return the sizes of all axes, including those of the weight."""
    extents = extents_of(x.graph, parsed, [x], given_sizes)
    unused = sorted(set(extents) - {*parsed.operand_names(0), *parsed.result_names})
    if unused:
        raise PatternError(f"{place}: size given for {unused[0]!r}, which is not an axis of {pattern!r}")
    if weight is not None and weight.ndim == len(axes):
        extents |= {n: size for n, size in zip(axes, weight.sizes, strict=True) if n not in extents}
    missing = [n for n in axes if n not in extents]
    if missing:
        raise ShapeError(f"{place}: size of new axis {missing[0]!r} is not given, expected {missing[0]}=...")
    return extents


def mlp(
    x: Tensor,
    f: object,
    *,
    activation: Callable[[Tensor], Tensor] = gelu,
    bias: bool = False,
    p: float = 0,
    name: str = "mlp",
) -> Tensor:
    """Apply two linear layers with an activation in between: (b, s, d) to (b, s, f) and back."""
    need_tensor("mlp", x)
    need_call("mlp: activation", activation)
    with module(current_graph(x.graph), name):
        h = activation(linear(x, "... d -> ... f", f=f, bias=bias, name="up"))
        return dropout(linear(h, "... f -> ... d", d=x.sizes[-1], bias=bias, name="down"), p)


def gated_mlp(
    x: Tensor,
    f: object,
    *,
    activation: Callable[[Tensor], Tensor] = silu,
    bias: bool = False,
    packed: bool = False,
    fused: bool = False,
    name: str = "mlp",
) -> Tensor:
    """Apply a gated MLP (Shazeer 2020): down(activation(gate(x)) * up(x)).

    Parameters
    ----------
    x : Tensor
        Shape (..., d).
    f : sympy.Expr or int
        Hidden width.
    activation : callable
        Activation of the gate.
    bias : bool
        Whether the layers have biases.
    packed : bool
        Whether one linear layer computes gate and up, which are views of its result.
    fused : bool
        Whether activation(gate) * up is one kernel whose backward pass recomputes intermediates: only gate and up are
        saved, as by `SwiGLUFunction` of Megatron-LM (megatron/core/fusions/fused_bias_swiglu.py). By default
        activation(gate) is saved as well.
    name : str
        Scope of the layers.

    Returns
    -------
    Tensor
        Shape (..., d).

    Raises
    ------
    GraphError, ShapeError
        If an argument is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.gated_mlp(g.input("x", (B, D)), F))
    >>> cg.param_count(g), cg.matmul_flops(g)
    (3*D*F, 6*B*D*F)
    """
    need_tensor("gated_mlp", x)
    need_call("gated_mlp: activation", activation)
    need_flag("gated_mlp", packed=packed, fused=fused)
    with module(current_graph(x.graph), name):
        if packed:
            size = positive("gated_mlp: f", f)
            gate_up = linear(x, "... d -> ... f", f=2 * size, bias=bias, name="gate_up")
            gate, up = split(gate_up, (size, size), -1)
        else:
            gate = linear(x, "... d -> ... f", f=f, bias=bias, name="gate")
            gate = gate if fused else activation(gate)
            up = linear(x, "... d -> ... f", f=f, bias=bias, name="up")
        if fused:
            hidden = one_kernel("gated", lambda gate, up: activation(gate) * up, gate, up)
        else:
            hidden = (activation(gate) if packed else gate) * up
        return linear(hidden, "... f -> ... d", d=x.sizes[-1], bias=bias, name="down")
