"""What models are written with. Everything here is made of the ops below it; no cost is stated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from ..dtypes import dtype as find_dtype
from ..dtypes import promote
from ..errors import PatternError, ShapeError
from ..graph.arguments import need_call, need_choice, need_flag, need_tensor, positive
from ..graph.arguments import sizes as sizes_by_name
from ..graph.graph import current_graph
from ..graph.scopes import module
from ..graph.tensor import Tensor
from ..notation.door import READ
from ..notation.pattern import Affine, PatternText, parse_pattern
from ..ops.blocks import fused, save
from ..ops.einsum import einsum
from ..ops.extents import extents_of
from ..ops.layout import split
from ..ops.pointwise import cast, pointwise
from ..ops.reduce import reduce
from ..ops.stochastic import dropout

__all__ = [
    "gated_mlp", "gelu", "layer_norm", "linear", "log_softmax", "mlp", "relu",
    "rms_norm", "sigmoid", "silu", "softmax", "tanh",
]  # fmt: skip


def relu(x: Tensor, *, inplace: bool = False) -> Tensor:
    """max(x, 0): 1 FLOP an element."""
    return pointwise("relu", x, inplace=inplace)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU: 5 FLOPs an element with erf, 9 with `approximate="tanh"`, one of them transcendental."""
    need_choice("gelu: approximate", approximate, ("none", "tanh"))
    return pointwise("gelu" if approximate == "none" else "gelu_tanh", x)


def silu(x: Tensor, *, inplace: bool = False) -> Tensor:
    """X / (1 + exp(-x)): 4 FLOPs an element, one of them transcendental."""
    return pointwise("silu", x, inplace=inplace)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)): 4 FLOPs an element, one of them transcendental."""
    return pointwise("sigmoid", x)


def tanh(x: Tensor) -> Tensor:
    """tanh(x): one transcendental an element."""
    return pointwise("tanh", x)


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
    """Multiply by a weight: axes that the right side leaves out are contracted, those that it adds are new.

    Parameters
    ----------
    x : Tensor
        Activations.
    pattern : str
        Axes before and after: `"b s d -> b s f"`, or with heads apart `"b s d -> b s h k"`.
    bias : bool
        Add a parameter of the new axes, in the same kernel as the product.
    weight : Tensor, optional
        A tied weight, with the contracted axes first and the new ones last; by default a new parameter.
    name : str
        Scope of the parameters and of the op.
    **sizes : sympy.Expr or int
        Sizes of the new axes.

    Returns
    -------
    Tensor
        FLOPs: 2 for each index point of the pattern, and 1 for each element of the result with a bias.

    Raises
    ------
    PatternError, ShapeError
        If nothing is contracted or new, or sizes do not fit.

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
    before, after = parsed.operand_names(0), parsed.result_names
    if any(isinstance(a, Affine) for a in parsed.operands[0]):
        raise PatternError(f"linear {name!r}: pattern {pattern!r} has an index such as h*2+r, expected conv for that")
    contracted = [n for n in before if n not in after]
    new = [n for n in after if n not in before]
    if not contracted or not new:
        raise PatternError(f"linear {name!r}: pattern {pattern!r} contracts {contracted} and adds {new}, expected both")
    graph = current_graph(x.graph)
    extents = extents_of(graph, parsed, [graph.adopt(x)], sizes_by_name(f"linear {name!r}", sizes))
    unused = sorted(set(extents) - {*before, *after})
    if unused:
        raise PatternError(f"linear {name!r}: size given for {unused[0]!r}, which is no axis of {pattern!r}")
    if weight is not None and weight.ndim == len(contracted) + len(new):
        extents |= {n: size for n, size in zip(contracted + new, weight.sizes, strict=True) if n not in extents}
    missing = [n for n in new if n not in extents]
    if missing:
        raise ShapeError(f"linear {name!r}: size of new axis {missing[0]!r} is not given, expected {missing[0]}=...")
    left = " ".join(map(str, parsed.operands[0]))
    text = f"{left}, {' '.join(contracted + new)} -> {' '.join(map(str, parsed.result))}"
    given: dict[str, Any] = {n: extents[n] for n in contracted}
    with module(graph, name):
        if weight is None:
            weight = graph.param("weight", [extents[n] for n in contracted + new])
        if not bias:
            return einsum(x, weight, text, name="matmul", **given)
        if after[len(after) - len(new) :] != tuple(new) or any(len(a.names) != 1 for a in parsed.result):
            raise PatternError(
                f"linear {name!r}: pattern {pattern!r} with a bias, expected the new axes last and unmerged"
            )
        b = graph.param("bias", [extents[n] for n in new])

        def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return einsum(x, w, text, name="matmul", **given) + b

        return _one(fused("addmm", product, x, weight, b, backward="ops"))


def _one(made: Tensor | tuple[Tensor, ...]) -> Tensor:
    assert isinstance(made, Tensor)
    return made


def _last(x: Tensor, axis: int) -> tuple[str, str]:
    """Patterns that reduce one axis and keep it with size 1."""
    need_tensor("softmax or norm", x)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"axis {axis!r} of {x!r}: expected an integer from {-x.ndim} to {x.ndim - 1}")
    names = [f"a{i}" for i in range(x.ndim)]
    kept = [*names]
    kept[axis % x.ndim] = "1"
    return " ".join(names), " ".join(kept)


def softmax(x: Tensor, axis: Annotated[int, READ] = -1, *, name: str = "softmax") -> Tensor:
    """Exponentials that add up to 1, in one kernel.

    Parameters
    ----------
    x : Tensor
        Any shape.
    axis : int
        Axis along which they add up to 1.
    name : str
        Name of the kernel.

    Returns
    -------
    Tensor
        FLOPs an element: maximum, subtraction, sum and division, and one exp (derived from the ops inside).

    Raises
    ------
    ShapeError
        If there is no such axis.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     p = cg.softmax(g.input("x", (B, S)), -1)
    >>> cg.flops(g), cg.bytes_moved(g)
    (5*B*S, 8*B*S)
    """
    names, kept = _last(x, axis)

    def body(x: Tensor) -> Tensor:
        e = pointwise("exp", x - reduce(x, f"{names} -> {kept}", "max"))
        return e / reduce(e, f"{names} -> {kept}", "sum")

    return _one(fused(name, body, x, backward="softmax"))


def log_softmax(x: Tensor, axis: Annotated[int, READ] = -1, *, name: str = "log_softmax") -> Tensor:
    """Logarithm of the softmax, in one kernel."""
    names, kept = _last(x, axis)

    def body(x: Tensor) -> Tensor:
        shifted = x - reduce(x, f"{names} -> {kept}", "max")
        return shifted - pointwise("log", reduce(pointwise("exp", shifted), f"{names} -> {kept}", "sum"))

    return _one(fused(name, body, x, backward="log_softmax"))


def _wide(x: Tensor) -> Tensor:
    """Return what statistics are taken of: a kernel calculates in fp32 at least."""
    return cast(x, promote(x.dtype, find_dtype("fp32"))) if x.dtype.kind == "float" else x


def layer_norm(x: Tensor, *, affine: bool = True, bias: bool = True, name: str = "layer_norm") -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift by parameters, in one kernel.

    Parameters
    ----------
    x : Tensor
        The last axis is normalised.
    affine, bias : bool
        Whether there is a scale, and with it a shift, of the size of the last axis.
    name : str
        Scope of the parameters, and name of the kernel.

    Returns
    -------
    Tensor
        FLOPs an element: mean, subtraction, square, mean, product, and one each for scale and shift.

    Raises
    ------
    ShapeError
        If `x` is a scalar.
    """
    names, kept = _last(x, -1)
    need_flag("layer_norm", affine=affine, bias=bias)
    graph = current_graph(x.graph)

    def body(x: Tensor, weight: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        wide = _wide(x)
        centred = wide - save(reduce(wide, f"{names} -> {kept}", "mean"))
        variance = reduce(pointwise("square", centred), f"{names} -> {kept}", "mean")
        y = centred * save(pointwise("rsqrt", variance + 1e-5))
        y = y if weight is None else y * weight
        return cast(y if shift is None else y + shift, x.dtype)

    with module(graph, name):
        params = [graph.param("weight", x.sizes[-1:])] if affine else []
        params += [graph.param("bias", x.sizes[-1:])] if affine and bias else []
        return _one(fused("norm", body, x, *params))


def rms_norm(x: Tensor, *, affine: bool = True, name: str = "rms_norm") -> Tensor:
    """Divide by the root mean square of the last axis, then scale by a parameter, in one kernel.

    Parameters
    ----------
    x : Tensor
        The last axis is normalised.
    affine : bool
        Whether there is a scale of the size of the last axis.
    name : str
        Scope of the parameter, and name of the kernel.

    Returns
    -------
    Tensor
        FLOPs an element: square, mean, product, and one for the scale.

    Raises
    ------
    ShapeError
        If `x` is a scalar.
    """
    names, kept = _last(x, -1)
    need_flag("rms_norm", affine=affine)
    graph = current_graph(x.graph)

    def body(x: Tensor, weight: Tensor | None = None) -> Tensor:
        wide = _wide(x)
        power = reduce(pointwise("square", wide), f"{names} -> {kept}", "mean")
        y = wide * save(pointwise("rsqrt", power + 1e-6))
        return cast(y if weight is None else y * weight, x.dtype)

    with module(graph, name):
        params = [graph.param("weight", x.sizes[-1:])] if affine else []
        return _one(fused("norm", body, x, *params))


def mlp(
    x: Tensor,
    f: object,
    *,
    activation: Callable[[Tensor], Tensor] = gelu,
    bias: bool = False,
    p: float = 0,
    name: str = "mlp",
) -> Tensor:
    """Two linear layers with an activation between them: (b, s, d) to (b, s, f) and back."""
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
    name: str = "mlp",
) -> Tensor:
    """Gated linear unit (Shazeer 2020): down(activation(gate(x)) * up(x)).

    Parameters
    ----------
    x : Tensor
        Shape (..., d).
    f : sympy.Expr or int
        Elements of the gate, and of what it is multiplied with.
    activation : callable
        What the gate goes through.
    bias : bool
        Biases of all layers.
    packed : bool
        One linear layer makes gate and up, of which both are views.
    name : str
        Scope of the layers.

    Returns
    -------
    Tensor
        Shape (..., d).

    Raises
    ------
    GraphError, ShapeError
        If a size or an argument is none.

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
    need_flag("gated_mlp", packed=packed)
    with module(current_graph(x.graph), name):
        if packed:
            size = positive("gated_mlp: f", f)
            both = linear(x, "... d -> ... f", f=2 * size, bias=bias, name="gate_up")
            gate, up = split(both, (size, size), -1)
            gate = activation(gate)
        else:
            gate = activation(linear(x, "... d -> ... f", f=f, bias=bias, name="gate"))
            up = linear(x, "... d -> ... f", f=f, bias=bias, name="up")
        return linear(gate * up, "... f -> ... d", d=x.sizes[-1], bias=bias, name="down")
