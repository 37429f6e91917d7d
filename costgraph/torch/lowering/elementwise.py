"""Lower elementwise functions, dropout, position masks and reductions."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...ir.graph import OpKind
from ...ops.elementwise import Dropout, Pointwise
from ...ops.functions import FUNCTIONS
from ...ops.reduce import Reduce
from .context import LoweringContext, lowering

__all__ = [
    "FLEXIBLE",
    "IN_PLACE",
    "KERNELS",
    "SWAPPED",
    "WITH_NUMBER",
    "fill_masked",
    "item",
    "leaf",
    "mask_of",
    "function_for",
    "masked_operand",
]


# -- functions ---------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten


def item(results: Any, i: int) -> Any:
    """Return one result of a call."""
    return results[i]


def leaf(results: Any, i: int) -> Any:
    """Return one result of a call, with nested lists flattened."""
    return torch.utils._pytree.tree_leaves(results)[i]


Number = float | int
Operand = Any  # a tensor or a number


def rdiv(x: Tensor, number: Number) -> Tensor:
    """Return number / x."""
    return torch.reciprocal(x).mul_(number)


def logical_and_number(x: Tensor, number: Number) -> Tensor:
    """Return the logical and of x and a number."""
    return torch.logical_and(x, torch.full((), bool(number), device=x.device))


def where(condition: Operand, a: Operand, b: Operand) -> Tensor:
    """Select elements; a numeric condition is true where it is nonzero."""
    if not isinstance(condition, Tensor):
        condition = torch.full((), bool(condition), device=(a if _is_tensor(a) else b).device)
    return torch.where(condition if condition.dtype == torch.bool else condition != 0, a, b)


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


def masked_fill(x: Tensor, mask: Operand) -> Tensor:
    """Return x with 0 where the mask is true."""
    if _is_tensor(mask) and mask.dtype == torch.bool and x.shape == mask.shape:
        return x.clone().masked_fill_(mask, 0)
    return where(mask, 0.0 if x.is_floating_point() else 0, x).to(x.dtype)


def fma(a: Operand, b: Operand, c: Operand) -> Tensor:
    """Return a * b + c."""
    if all(map(_is_tensor, (a, b, c))) and a.dtype == b.dtype == c.dtype:
        return torch.addcmul(c, a, b)
    result: Tensor = a * b + c
    return result


def lerp(a: Operand, b: Operand, t: Operand) -> Tensor:
    """Return a + t * (b - a)."""
    if (
        _is_tensor(a)
        and _is_tensor(b)
        and a.dtype == b.dtype
        and a.is_floating_point()
        and not (_is_tensor(t) and t.dtype != a.dtype)
    ):
        return torch.lerp(a, b, t)
    result: Tensor = a + t * (b - a)
    return result


def lerp_(a: Tensor, b: Operand, t: Operand) -> Tensor:
    """Compute a + t * (b - a) in place."""
    supported = _is_tensor(b) and a.dtype == b.dtype and not (_is_tensor(t) and t.dtype != a.dtype)
    return a.lerp_(b, t) if supported else a.copy_(lerp(a, b, t))


def masked_scale(x: Tensor, mask: Tensor, scale: Operand) -> Tensor:
    """Return x * mask * scale."""
    masked = torch.where(mask, x, 0.0) if _is_tensor(mask) and mask.dtype == torch.bool else x * mask
    return masked.mul_(scale) if not _is_tensor(scale) else masked * scale


def add_scaled(a: Operand, b: Tensor, t: Operand) -> Tensor:
    """Return a + t * b."""
    return a + t * b if _is_tensor(t) or not _is_tensor(a) else torch.add(a, b, alpha=t)


def add_scaled_(a: Tensor, b: Tensor, t: Operand) -> Tensor:
    """Compute a + t * b in place."""
    return torch.addcmul(a, b, t, out=a) if _is_tensor(t) else a.add_(b, alpha=t)


def add_product_(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute a + b * c in place."""
    return torch.addcmul(a, b, c, out=a)


def add_quotient_(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute a + b / c in place."""
    return torch.addcdiv(a, b, c, out=a)


def add_scaled_product(a: Tensor, b: Tensor, c: Tensor, t: Number) -> Tensor:
    """Return a + t * b * c."""
    return torch.addcmul(a, b, c, value=t)


def add_scaled_product_(a: Tensor, b: Tensor, c: Tensor, t: Number) -> Tensor:
    """Compute a + t * b * c in place."""
    return torch.addcmul(a, b, c, value=t, out=a)


def add_scaled_quotient(a: Tensor, b: Tensor, c: Tensor, t: Number) -> Tensor:
    """Return a + t * b / c."""
    return torch.addcdiv(a, b, c, value=t)


def add_scaled_quotient_(a: Tensor, b: Tensor, c: Tensor, t: Number) -> Tensor:
    """Compute a + t * b / c in place."""
    return torch.addcdiv(a, b, c, value=t, out=a)


def non_finite(x: Tensor) -> Tensor:
    """Return 1 where x is infinite or NaN."""
    return torch.isfinite(x).logical_not_().to(x.dtype)


def cubed(x: Tensor) -> Tensor:
    """Return x**3."""
    return torch.pow(x, 3)


def clamp(x: Tensor) -> Tensor:
    """Return x clamped to [0, 1], the interpreter's limits."""
    return torch.clamp(x, 0, 1)


def relu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return max(x, 0); torch.relu has no `out=`."""
    return torch.clamp_min(x, 0, out=out)


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0)**2."""
    return torch.relu(x).square_()


def quick_gelu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-1.702 * x))."""
    return torch.mul(x, 1.702).sigmoid_().mul_(x)


def softcap(x: Tensor) -> Tensor:
    """Return 30 * tanh(x / 30)."""
    return torch.div(x, 30).tanh_().mul_(30)


def gelu(x: Tensor) -> Tensor:
    """Return GELU with erf."""
    return torch.nn.functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU with tanh."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def threshold_backward(g: Tensor, y: Tensor) -> Tensor:
    """Return g where y > 0, else 0."""
    grads: Tensor = _aten.threshold_backward(g, y, 0)
    return grads


def relu6_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return g where 0 < x < 6, else 0."""
    grads: Tensor = _aten.hardtanh_backward(g, x, 0, 6)
    return grads


def relu2_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return g * 2 * max(x, 0)."""
    return torch.relu(x).mul_(2).mul_(g)


def leaky_relu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return g where x > 0, else 0.01 * g."""
    grads: Tensor = _aten.leaky_relu_backward(g, x, 0.01, False)
    return grads


def gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of GELU with erf."""
    grads: Tensor = _aten.gelu_backward(g, x)
    return grads


def gelu_tanh_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of GELU with tanh."""
    grads: Tensor = _aten.gelu_backward(g, x, approximate="tanh")
    return grads


def quick_gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return g * s * (1 + 1.702 * x * (1 - s)), with s the sigmoid of 1.702 * x."""
    s = torch.mul(x, 1.702).sigmoid_()
    return torch.rsub(s, 1).mul_(x).mul_(1.702).add_(1).mul_(s).mul_(g)


def softplus_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of softplus."""
    grads: Tensor = _aten.softplus_backward(g, x, 1, 20)
    return grads


def elu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return g where x > 0, else g * exp(x)."""
    grads: Tensor = _aten.elu_backward(g, 1, 1, 1, False, x)
    return grads


def softcap_backward(g: Tensor, y: Tensor) -> Tensor:
    """Return g * (1 - (y / 30)**2)."""
    return torch.div(y, 30).square_().neg_().add_(1).mul_(g)


#: Torch functions of elementwise functions on tensors, where torch has none with the same name and arguments.
_OTHER_KERNELS: dict[str, Callable[..., Any]] = {
    "copy": torch.clone, "cast": torch.clone, "less": torch.lt, "less_equal": torch.le, "where": where,
    "masked_fill": masked_fill, "fma": fma, "lerp": lerp, "masked_scale": masked_scale, "sign": torch.sgn,
    "clamp": clamp, "cubed": cubed, "relu": relu, "relu6": torch.nn.functional.relu6, "relu2": relu2, "gelu": gelu,
    "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu, "softcap": softcap, "threshold_backward": threshold_backward,
    "relu6_backward": relu6_backward, "relu2_backward": relu2_backward, "leaky_relu_backward": leaky_relu_backward,
    "gelu_backward": gelu_backward, "gelu_tanh_backward": gelu_tanh_backward,
    "quick_gelu_backward": quick_gelu_backward, "softplus_backward": softplus_backward, "elu_backward": elu_backward,
    "softcap_backward": softcap_backward, "add_scaled": add_scaled, "add_product": torch.addcmul,
    "add_quotient": torch.addcdiv, "add_scaled_product": add_scaled_product,
    "add_scaled_quotient": add_scaled_quotient, "non_finite": non_finite,
}  # fmt: skip

#: Torch function of each elementwise function on tensors; scalar operands are below.
KERNELS: dict[str, Callable[..., Any]] = {
    **{n: getattr(m, n) for m in (_aten, torch) for n in FUNCTIONS if hasattr(m, n)}, **_OTHER_KERNELS,
}  # fmt: skip

#: Functions of a tensor and a number, if torch's function on tensors takes no number.
WITH_NUMBER: dict[str, Callable[..., Any]] = {
    "maximum": torch.clamp_min, "minimum": torch.clamp_max,
    "logical_and": logical_and_number,
}  # fmt: skip

#: Functions of a number and a tensor, called with the tensor first.
SWAPPED: dict[str, Callable[..., Any]] = {
    "add": torch.add, "mul": torch.mul, "eq": torch.eq, "ne": torch.ne, "sub": torch.rsub, "div": rdiv,
    "less": torch.gt, "less_equal": torch.ge, "maximum": torch.clamp_min, "minimum": torch.clamp_max,
    "logical_and": logical_and_number,
}  # fmt: skip

#: Functions that broadcast and take numbers and integers; torch's gradient kernels do not.
FLEXIBLE = frozenset(SWAPPED) | {
    "copy", "cast", "pow", "where", "masked_fill", "fma", "lerp", "neg", "abs", "sign", "square", "clamp", "round",
    "floor", "logical_not", "cubed", "relu", "add_scaled", "masked_scale",
}  # fmt: skip

#: In-place variants, where torch's function has neither `out=` nor an in-place form.
IN_PLACE: dict[str, Callable[..., Any]] = {
    "lerp": lerp_, "add_scaled": add_scaled_, "add_product": add_product_, "add_quotient": add_quotient_,
    "add_scaled_product": add_scaled_product_, "add_scaled_quotient": add_scaled_quotient_,
    "relu": torch.relu_, "silu": _aten.silu_, "leaky_relu": _aten.leaky_relu_, "hardswish": _aten.hardswish_,
    "elu": _aten.elu_, "mish": _aten.mish_, "hardsigmoid": _aten.hardsigmoid_,
}  # fmt: skip


def mask_of(queries: int, keys: int, causal: bool, window: int | None, first: int, device: torch.device) -> Tensor:
    """Return the boolean mask of attended keys per query, with the first query at position `first`."""
    query = torch.arange(first, first + queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    attended = key <= query if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    if window is not None:
        attended &= key > query - window
        if not causal:
            attended &= key < query + window
    return attended


def fill_masked(x: Tensor, query: int, key: int, causal: bool, window: int | None, first: int, fill: Number) -> Tensor:
    """Return x with `fill` at the pairs of query and key positions that are masked."""
    attended = mask_of(x.shape[query], x.shape[key], causal, window, first, x.device)
    shape = [n if i in (query, key) else 1 for i, n in enumerate(x.shape)]
    return torch.where((attended if query < key else attended.T).reshape(shape), x, fill)


# -- elementwise ops ---------------------------------------------------------------------------------------------------


def masked_operand(site: LoweringContext[OpKind], i: int, fill: float) -> Any:
    """Return an operand with `fill` outside its domain."""
    t, x = site.op.operands[i], site.operands[i]
    if t.domain is None:
        return x
    domain, query, key = t.domain
    sizes = site.sizes(t)
    return site.call(fill_masked, x, query, key, *site.mask_arguments(domain, sizes[query], sizes[key]), fill)


@lowering(Pointwise)
def _pointwise(site: LoweringContext[Pointwise]) -> None:
    record, name = site.kind.function, site.kind.function.name
    if name.startswith("causal_mask"):
        _masked(site, 0.0 if name.endswith("backward") else float("-inf"))
        return
    operands = iter(site.operands)
    template = site.of(site.kind.scalars) or (None,) * len(site.operands)
    number = float if site.kind.numbers == "float" else _unchanged  # a float even if D/H is an integer
    arguments = [next(operands) if s is None else number(s) for s in template]
    if name in site.shared.functions:
        _set_result(site, name, site.shared.functions[name], arguments)
    elif name == "cast":
        _cast(site, arguments[0])
    elif name not in KERNELS:
        raise UnsupportedError(
            f"lower {site.op.name!r}: torch has no function {name!r} ({record.formula or 'no formula'}), expected one "
            f"in functions="
        )
    else:
        function, arguments = function_for(name, _supported_arguments(site, name, arguments))
        _set_result(site, name, function, arguments)


def _unchanged(number: Any) -> Any:
    return number


def _cast(site: LoweringContext[Pointwise], x: Any) -> None:
    if site.kind.overwrites():
        site.alias(site.call(torch.Tensor.copy_, site.operands[0], x))
    else:
        site.own(torch.ops.aten._to_copy, x, dtype=site.dtype(site.op.results[0]))


def _masked(site: LoweringContext[Pointwise], fill: float) -> None:
    x, operand = site.operands[0], site.op.operands[0]
    # a gradient is zero outside the domain of its operand
    domain = (
        operand.domain[0] if site.kind.masked is None and operand.domain is not None and not fill else site.kind.masked
    )
    if domain is None:
        function, arguments = KERNELS["copy"], [x]
    else:
        query, key = operand.domain[1:] if operand.domain is not None else (operand.ndim - 2, operand.ndim - 1)
        sizes = site.sizes(operand)
        function, arguments = fill_masked, [x, query, key, *site.mask_arguments(domain, sizes[query], sizes[key]), fill]
    _set_result(site, "causal_mask", function, arguments)


def _set_result(site: LoweringContext[OpKind], name: str, function: Callable[..., Any], arguments: list[Any]) -> None:
    if not site.kind.overwrites():
        site.own(function, *arguments)
        return
    target = site.operands[0]
    if name in IN_PLACE and arguments[0] is target:
        site.alias(site.call(IN_PLACE[name], *arguments))
        return
    written = site.into(target, function, *arguments)
    if written is None:
        written = site.call(torch.Tensor.copy_, target, site.call(function, *arguments))
    site.alias(written)


def function_for(name: str, arguments: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return torch's function for these tensors and numbers, and its arguments in order."""
    numbers = [isinstance(v, int | float | complex) for v in arguments]
    if numbers == [True, False] and name in SWAPPED:
        return SWAPPED[name], arguments[::-1]
    if numbers == [False, True] and name in WITH_NUMBER:
        return WITH_NUMBER[name], arguments
    return KERNELS[name], arguments


def _supported_arguments(site: LoweringContext[OpKind], name: str, arguments: list[Any]) -> list[Any]:
    """Return operands in a dtype that torch's kernel supports, expanded if it does not broadcast."""
    result = site.dtype(site.op.results[0])
    shadows = [None if isinstance(v, int | float | complex) else site.shadow(v) for v in arguments]
    formats = [s.dtype for s in shadows if s is not None]
    wide = _format_for(name, formats, result)
    if wide is not None:
        first = 1 if name == "where" else 0
        arguments = [
            v if s is None or i < first else site.cast(v, wide)
            for i, (v, s) in enumerate(zip(arguments, shadows, strict=True))
        ]
    if name in FLEXIBLE or len(arguments) == 1:
        return arguments
    dtype = wide or torch.result_type(*[torch.empty((), dtype=f, device="meta") for f in (formats * 2)[:2]])
    sizes = site.sizes(site.op.results[0])
    return [_broadcast(site, v, sizes, dtype) for v in arguments] if name.endswith("_backward") else arguments


def _broadcast(site: LoweringContext[OpKind], v: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> Any:
    if isinstance(v, int | float | complex):
        v = site.call(torch.full, (), v, dtype=dtype, device=site.emitter.device)
    v = site.cast(v, dtype)
    return v if tuple(site.shadow(v).shape) == sizes else site.call(torch.broadcast_to, v, sizes)


_ARITHMETIC = FLEXIBLE - {"copy", "cast", "where", "masked_fill", "logical_and", "logical_not", "eq"}


def _format_for(name: str, formats: list[torch.dtype], result: torch.dtype) -> torch.dtype | None:
    """Return the dtype to compute in, None for the operands' own."""
    if all(f == torch.bool for f in formats) and name in _ARITHMETIC:
        return torch.uint8
    if any(f.is_floating_point and f.itemsize == 1 for f in (*formats, result)):
        return torch.float32  # torch only stores these
    if name not in FLEXIBLE and not any(f.is_floating_point or f.is_complex for f in formats):
        return result if result.is_floating_point else torch.float64
    return None


# -- random numbers ----------------------------------------------------------------------------------------------


def dropout_with_mask(x: torch.Tensor, p: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero elements at random and scale the others; also return the mask of kept elements."""
    if x.is_cuda and dtype == torch.bool:
        return torch.native_dropout(x, p, True)
    mask = torch.empty_like(x, dtype=dtype).bernoulli_(1 - p)
    scaled = torch.mul(x, 1 / (1 - p))
    if dtype != torch.bool:
        return scaled.mul_(mask), mask
    # in place, where torch's own function would create a float mask
    scaled.masked_fill_(mask.logical_not_(), 0)
    return scaled, mask.logical_not_()


@lowering(Dropout)
def _dropout(site: LoweringContext[Dropout]) -> None:
    x, p = site.operands[0], site.kind.p
    mask = site.dtype(site.op.results[1])
    shadow = site.shadow(x)
    if shadow.dtype.itemsize == 1:
        x = site.cast(x, torch.float32)
    scaled_and_mask = site.call(dropout_with_mask, x, p, mask)
    for i in range(2):
        site.settle(site.call(item, scaled_and_mask, i), i)


# -- reductions --------------------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin, "any": torch.any, "all": torch.all,
}  # fmt: skip
#: Functions along one axis.
_SINGLE_AXIS: dict[str, Callable[..., Any]] = {"prod": torch.prod, "argmax": torch.argmax, "argmin": torch.argmin}
#: Value of elements outside a domain.
_NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -inf, "min": inf, "prod": 1.0, "any": 0.0, "all": 1.0}


@lowering(Reduce)
def _reduce(site: LoweringContext[Reduce]) -> None:
    pattern, operation = site.kind.pattern, site.kind.operation
    names = [a.names[0] if a.names else None for a in pattern.operands[0]]
    kept_names = [a.names[0] for a in pattern.result if a.names]
    reduced = [i for i, n in enumerate(names) if n is None or n not in kept_names]
    sizes = site.sizes(site.op.operands[0])
    x = masked_operand(site, 0, _NEUTRAL.get(operation, 0.0))
    if site.shadow(x).dtype.itemsize == 1 and site.shadow(x).dtype.is_floating_point:
        x = site.cast(x, torch.float32)
    # kept axes first, in the order of the result, so that torch's result is contiguous
    order = [names.index(n) for n in kept_names] + reduced
    if order != sorted(order) or operation in _SINGLE_AXIS:
        x = site.permuted(x, order)
        reduced = list(range(len(kept_names), len(names)))
    shape = tuple(sizes[i] for i in order[: len(kept_names)])
    if operation in _SINGLE_AXIS:
        flat = site.shaped(x, (*shape, prod(sizes[i] for i in order[len(kept_names) :])))
        site.own(_SINGLE_AXIS[operation], flat, -1, shape=shape)
    elif operation == "mean" and site.op.operands[0].domain is not None:
        domain, *axes = site.op.operands[0].domain
        site.own(
            masked_mean,
            x,
            reduced,
            *(order.index(i) if order != sorted(order) else i for i in axes),
            *site.mask_arguments(domain, *(sizes[i] for i in axes)),
            shape=shape,
        )
    elif reduced:
        site.own(_FUNCTIONS[operation], x, reduced, shape=shape)
    else:
        site.own(torch.clone, x, shape=shape)


def masked_mean(
    x: torch.Tensor, axes: list[int], query: int, key: int, causal: bool, window: int | None, first: int
) -> torch.Tensor:
    """Return the mean over a domain of a tensor that is 0 outside it."""
    count = fill_masked(torch.ones_like(x), query, key, causal, window, first, 0.0).sum(axes)
    return torch.sum(x, axes).div_(count.clamp_(min=1))
