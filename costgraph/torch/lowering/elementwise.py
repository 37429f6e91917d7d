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
from ...ops.reduce import Reduce
from .context import LoweringContext, lowering

__all__ = [
    "FLEXIBLE",
    "IN_PLACE",
    "KERNELS",
    "SWAPPED",
    "WITH_NUMBER",
    "hidden",
    "item",
    "leaf",
    "mask_of",
    "chosen",
    "held",
]


# -- functions ---------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten


def item(made: Any, i: int) -> Any:
    """Return one result of a call."""
    return made[i]


def leaf(made: Any, i: int) -> Any:
    """Return one result of a call, with nested lists flattened."""
    return torch.utils._pytree.tree_leaves(made)[i]


Number = float | int
Operand = Any  # a tensor or a number


def over(x: Tensor, number: Number) -> Tensor:
    """Return number / x."""
    return torch.reciprocal(x).mul_(number)


def both(x: Tensor, number: Number) -> Tensor:
    """Return the logical and of x and a number."""
    return torch.logical_and(x, torch.full((), bool(number), device=x.device))


def where(condition: Operand, a: Operand, b: Operand) -> Tensor:
    """Select elements; a numeric condition is true where it is nonzero."""
    if not isinstance(condition, Tensor):
        condition = torch.full((), bool(condition), device=(a if _is(a) else b).device)
    return torch.where(condition if condition.dtype == torch.bool else condition != 0, a, b)


def _is(x: object) -> bool:
    return isinstance(x, Tensor)


def masked_fill(x: Tensor, mask: Operand) -> Tensor:
    """Return x with 0 where the mask is true."""
    if _is(mask) and mask.dtype == torch.bool and x.shape == mask.shape:
        return x.clone().masked_fill_(mask, 0)
    return where(mask, 0.0 if x.is_floating_point() else 0, x).to(x.dtype)


def fma(a: Operand, b: Operand, c: Operand) -> Tensor:
    """Return a * b + c."""
    if all(map(_is, (a, b, c))) and a.dtype == b.dtype == c.dtype:
        return torch.addcmul(c, a, b)
    made: Tensor = a * b + c
    return made


def lerp(a: Operand, b: Operand, t: Operand) -> Tensor:
    """Return a + t * (b - a)."""
    if _is(a) and _is(b) and a.dtype == b.dtype and a.is_floating_point() and not (_is(t) and t.dtype != a.dtype):
        return torch.lerp(a, b, t)
    made: Tensor = a + t * (b - a)
    return made


def lerp_(a: Tensor, b: Operand, t: Operand) -> Tensor:
    """Compute a + t * (b - a) in place."""
    same = _is(b) and a.dtype == b.dtype and not (_is(t) and t.dtype != a.dtype)
    return a.lerp_(b, t) if same else a.copy_(lerp(a, b, t))


def masked_scale(x: Tensor, mask: Tensor, scale: Operand) -> Tensor:
    """Return x * mask * scale."""
    kept = torch.where(mask, x, 0.0) if _is(mask) and mask.dtype == torch.bool else x * mask
    return kept.mul_(scale) if not _is(scale) else kept * scale


def add_scaled(a: Operand, b: Tensor, t: Operand) -> Tensor:
    """Return a + t * b."""
    return a + t * b if _is(t) or not _is(a) else torch.add(a, b, alpha=t)


def add_scaled_(a: Tensor, b: Tensor, t: Operand) -> Tensor:
    """Compute a + t * b in place."""
    return torch.addcmul(a, b, t, out=a) if _is(t) else a.add_(b, alpha=t)


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
    made: Tensor = _aten.threshold_backward(g, y, 0)
    return made


def relu6_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return g where 0 < x < 6, else 0."""
    made: Tensor = _aten.hardtanh_backward(g, x, 0, 6)
    return made


def relu2_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return g * 2 * max(x, 0)."""
    return torch.relu(x).mul_(2).mul_(g)


def leaky_relu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return g where x > 0, else 0.01 * g."""
    made: Tensor = _aten.leaky_relu_backward(g, x, 0.01, False)
    return made


def gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of GELU with erf."""
    made: Tensor = _aten.gelu_backward(g, x)
    return made


def gelu_tanh_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of GELU with tanh."""
    made: Tensor = _aten.gelu_backward(g, x, approximate="tanh")
    return made


def quick_gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return g * s * (1 + 1.702 * x * (1 - s)), with s the sigmoid of 1.702 * x."""
    s = torch.mul(x, 1.702).sigmoid_()
    return torch.rsub(s, 1).mul_(x).mul_(1.702).add_(1).mul_(s).mul_(g)


def softplus_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of softplus."""
    made: Tensor = _aten.softplus_backward(g, x, 1, 20)
    return made


def elu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return g where x > 0, else g * exp(x)."""
    made: Tensor = _aten.elu_backward(g, 1, 1, 1, False, x)
    return made


def softcap_backward(g: Tensor, y: Tensor) -> Tensor:
    """Return g * (1 - (y / 30)**2)."""
    return torch.div(y, 30).square_().neg_().add_(1).mul_(g)


#: Torch function of each elementwise function on tensors; scalar operands are below.
KERNELS: dict[str, Callable[..., Any]] = {
    "copy": torch.clone, "cast": torch.clone, "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "maximum": torch.maximum, "minimum": torch.minimum, "pow": torch.pow, "eq": torch.eq, "ne": torch.ne,
    "less": torch.lt, "less_equal": torch.le, "logical_and": torch.logical_and, "where": where,
    "masked_fill": masked_fill, "fma": fma,
    "lerp": lerp, "masked_scale": masked_scale, "neg": torch.neg, "abs": torch.abs, "sign": torch.sgn,
    "square": torch.square, "reciprocal": torch.reciprocal, "clamp": clamp, "round": torch.round,
    "floor": torch.floor, "logical_not": torch.logical_not, "exp": torch.exp, "expm1": torch.expm1, "log": torch.log,
    "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sin": torch.sin, "cos": torch.cos,
    "tanh": torch.tanh, "erf": torch.erf, "cubed": cubed, "relu": relu, "relu6": torch.nn.functional.relu6,
    "relu2": relu2, "leaky_relu": _aten.leaky_relu, "sigmoid": torch.sigmoid, "silu": _aten.silu, "gelu": gelu,
    "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu, "softplus": _aten.softplus, "mish": _aten.mish,
    "elu": _aten.elu, "softcap": softcap, "hardsigmoid": _aten.hardsigmoid, "hardswish": _aten.hardswish,
    "threshold_backward": threshold_backward, "relu6_backward": relu6_backward, "relu2_backward": relu2_backward,
    "leaky_relu_backward": leaky_relu_backward, "tanh_backward": _aten.tanh_backward,
    "sigmoid_backward": _aten.sigmoid_backward, "silu_backward": _aten.silu_backward, "gelu_backward": gelu_backward,
    "gelu_tanh_backward": gelu_tanh_backward, "quick_gelu_backward": quick_gelu_backward,
    "softplus_backward": softplus_backward, "mish_backward": _aten.mish_backward, "elu_backward": elu_backward,
    "softcap_backward": softcap_backward, "hardsigmoid_backward": _aten.hardsigmoid_backward,
    "hardswish_backward": _aten.hardswish_backward, "add_scaled": add_scaled, "add_product": torch.addcmul,
    "add_quotient": torch.addcdiv, "add_scaled_product": add_scaled_product,
    "add_scaled_quotient": add_scaled_quotient, "non_finite": non_finite,
}  # fmt: skip

#: Functions of a tensor and a number, if torch's function on tensors takes no number.
WITH_NUMBER: dict[str, Callable[..., Any]] = {
    "maximum": torch.clamp_min, "minimum": torch.clamp_max,
    "logical_and": both,
}  # fmt: skip

#: Functions of a number and a tensor, called with the tensor first.
SWAPPED: dict[str, Callable[..., Any]] = {
    "add": torch.add, "mul": torch.mul, "eq": torch.eq, "ne": torch.ne, "sub": torch.rsub, "div": over,
    "less": torch.gt, "less_equal": torch.ge, "maximum": torch.clamp_min, "minimum": torch.clamp_max,
    "logical_and": both,
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
    own = torch.arange(first, first + queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    seen = key <= own if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    if window is not None:
        seen &= key > own - window
        if not causal:
            seen &= key < own + window
    return seen


def hidden(x: Tensor, query: int, key: int, causal: bool, window: int | None, first: int, fill: Number) -> Tensor:
    """Return x with `fill` at the pairs of query and key positions that are masked."""
    seen = mask_of(x.shape[query], x.shape[key], causal, window, first, x.device)
    shape = [n if i in (query, key) else 1 for i, n in enumerate(x.shape)]
    return torch.where((seen if query < key else seen.T).reshape(shape), x, fill)


# -- elementwise ops ---------------------------------------------------------------------------------------------------


def held(site: LoweringContext[OpKind], i: int, fill: float) -> Any:
    """Return an operand with `fill` outside its domain."""
    t, x = site.op.operands[i], site.operands[i]
    if t.domain is None:
        return x
    domain, query, key = t.domain
    sizes = site.sizes(t)
    return site.call(hidden, x, query, key, *site.seen(domain, sizes[query], sizes[key]), fill)


@lowering(Pointwise)
def _pointwise(site: LoweringContext[Pointwise]) -> None:
    record, name = site.kind.function, site.kind.function.name
    if name.startswith("causal_mask"):
        _masked(site, 0.0 if name.endswith("backward") else float("-inf"))
        return
    operands = iter(site.operands)
    template = site.of(site.kind.scalars) or (None,) * len(site.operands)
    number = float if site.kind.numbers == "float" else _as_it_is  # a float even if D/H is an integer
    given = [next(operands) if s is None else number(s) for s in template]
    if name in site.shared.functions:
        _place(site, name, site.shared.functions[name], given)
    elif name == "cast":
        _cast(site, given[0])
    elif name not in KERNELS:
        raise UnsupportedError(
            f"lower {site.op.name!r}: torch has no function {name!r} ({record.formula or 'no formula'}), expected one "
            f"in functions="
        )
    else:
        function, given = chosen(name, _taken(site, name, given))
        _place(site, name, function, given)


def _as_it_is(number: Any) -> Any:
    return number


def _cast(site: LoweringContext[Pointwise], x: Any) -> None:
    if site.kind.overwrites():
        site.alias(site.call(torch.Tensor.copy_, site.operands[0], x))
    else:
        site.own(torch.ops.aten._to_copy, x, dtype=site.dtype(site.op.results[0]))


def _masked(site: LoweringContext[Pointwise], fill: float) -> None:
    x, old = site.operands[0], site.op.operands[0]
    # a gradient is zero outside the domain of its operand
    domain = old.domain[0] if site.kind.masked is None and old.domain is not None and not fill else site.kind.masked
    if domain is None:
        function, given = KERNELS["copy"], [x]
    else:
        query, key = old.domain[1:] if old.domain is not None else (old.ndim - 2, old.ndim - 1)
        sizes = site.sizes(old)
        function, given = hidden, [x, query, key, *site.seen(domain, sizes[query], sizes[key]), fill]
    _place(site, "causal_mask", function, given)


def _place(site: LoweringContext[OpKind], name: str, function: Callable[..., Any], given: list[Any]) -> None:
    if not site.kind.overwrites():
        site.own(function, *given)
        return
    target = site.operands[0]
    if name in IN_PLACE and given[0] is target:
        site.alias(site.call(IN_PLACE[name], *given))
        return
    written = site.into(target, function, *given)
    if written is None:
        written = site.call(torch.Tensor.copy_, target, site.call(function, *given))
    site.alias(written)


def chosen(name: str, given: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return torch's function for these tensors and numbers, and its arguments in order."""
    numbers = [isinstance(v, int | float | complex) for v in given]
    if numbers == [True, False] and name in SWAPPED:
        return SWAPPED[name], given[::-1]
    if numbers == [False, True] and name in WITH_NUMBER:
        return WITH_NUMBER[name], given
    return KERNELS[name], given


def _taken(site: LoweringContext[OpKind], name: str, given: list[Any]) -> list[Any]:
    """Return operands in a dtype that torch's kernel supports, expanded if it does not broadcast."""
    result = site.dtype(site.op.results[0])
    shadows = [None if isinstance(v, int | float | complex) else site.shadow(v) for v in given]
    formats = [s.dtype for s in shadows if s is not None]
    wide = _format_for(name, formats, result)
    if wide is not None:
        first = 1 if name == "where" else 0
        given = [
            v if s is None or i < first else site.cast(v, wide)
            for i, (v, s) in enumerate(zip(given, shadows, strict=True))
        ]
    if name in FLEXIBLE or len(given) == 1:
        return given
    dtype = wide or torch.result_type(*[torch.empty((), dtype=f, device="meta") for f in (formats * 2)[:2]])
    sizes = site.sizes(site.op.results[0])
    return [_full(site, v, sizes, dtype) for v in given] if name.endswith("_backward") else given


def _full(site: LoweringContext[OpKind], v: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> Any:
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


def dropped(x: torch.Tensor, p: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero elements at random and scale the others; also return the mask of kept elements."""
    if x.is_cuda and dtype == torch.bool:
        return torch.native_dropout(x, p, True)
    mask = torch.empty_like(x, dtype=dtype).bernoulli_(1 - p)
    made = torch.mul(x, 1 / (1 - p))
    if dtype != torch.bool:
        return made.mul_(mask), mask
    # in place, where torch's own function would create a float mask
    made.masked_fill_(mask.logical_not_(), 0)
    return made, mask.logical_not_()


@lowering(Dropout)
def _dropout(site: LoweringContext[Dropout]) -> None:
    x, p = site.operands[0], site.kind.p
    mask = site.dtype(site.op.results[1])
    shadow = site.shadow(x)
    if shadow.dtype.itemsize == 1:
        x = site.cast(x, torch.float32)
    both = site.call(dropped, x, p, mask)
    for i in range(2):
        site.settle(site.call(item, both, i), i)


# -- reductions --------------------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin, "any": torch.any, "all": torch.all,
}  # fmt: skip
#: Functions along one axis.
_LAST: dict[str, Callable[..., Any]] = {"prod": torch.prod, "argmax": torch.argmax, "argmin": torch.argmin}
#: Value of elements outside a domain.
_NOTHING = {"sum": 0.0, "mean": 0.0, "max": -inf, "min": inf, "prod": 1.0, "any": 0.0, "all": 1.0}


@lowering(Reduce)
def _reduce(site: LoweringContext[Reduce]) -> None:
    pattern, operation = site.kind.pattern, site.kind.operation
    names = [a.names[0] if a.names else None for a in pattern.operands[0]]
    kept = [a.names[0] for a in pattern.result if a.names]
    gone = [i for i, n in enumerate(names) if n is None or n not in kept]
    sizes = site.sizes(site.op.operands[0])
    x = held(site, 0, _NOTHING.get(operation, 0.0))
    if site.shadow(x).dtype.itemsize == 1 and site.shadow(x).dtype.is_floating_point:
        x = site.cast(x, torch.float32)
    # kept axes first, in the order of the result, so that torch's result is contiguous
    order = [names.index(n) for n in kept] + gone
    if order != sorted(order) or operation in _LAST:
        x = site.permuted(x, order)
        gone = list(range(len(kept), len(names)))
    shape = tuple(sizes[i] for i in order[: len(kept)])
    if operation in _LAST:
        flat = site.shaped(x, (*shape, prod(sizes[i] for i in order[len(kept) :])))
        site.own(_LAST[operation], flat, -1, shape=shape)
    elif operation == "mean" and site.op.operands[0].domain is not None:
        domain, *axes = site.op.operands[0].domain
        site.own(
            mean_of_held,
            x,
            gone,
            *(order.index(i) if order != sorted(order) else i for i in axes),
            *site.seen(domain, *(sizes[i] for i in axes)),
            shape=shape,
        )
    elif gone:
        site.own(_FUNCTIONS[operation], x, gone, shape=shape)
    else:
        site.own(torch.clone, x, shape=shape)


def mean_of_held(
    x: torch.Tensor, axes: list[int], query: int, key: int, causal: bool, window: int | None, first: int
) -> torch.Tensor:
    """Return the mean over a domain of a tensor that is 0 outside it."""
    count = hidden(torch.ones_like(x), query, key, causal, window, first, 0.0).sum(axes)
    return torch.sum(x, axes).div_(count.clamp_(min=1))
