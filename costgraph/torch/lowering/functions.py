"""Elementwise functions: torch's kernel where it has one, else a few calls, in place where that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FLEXIBLE", "IN_PLACE", "KERNELS", "SWAPPED", "WITH_NUMBER", "hidden", "item", "leaf", "mask_of"]

_aten = torch.ops.aten


def item(made: Any, i: int) -> Any:
    """Return one of several results of a call."""
    return made[i]


def leaf(made: Any, i: int) -> Any:
    """Return one of the results of a call, those of lists among them counted one by one."""
    return torch.utils._pytree.tree_leaves(made)[i]


Number = float | int
Operand = Any  # a tensor or a number


def over(x: Tensor, number: Number) -> Tensor:
    """Number / x."""
    return torch.reciprocal(x).mul_(number)


def both(x: Tensor, number: Number) -> Tensor:
    """X and a number that is true or false."""
    return torch.logical_and(x, torch.full((), bool(number), device=x.device))


def where(condition: Operand, a: Operand, b: Operand) -> Tensor:
    """Select; a condition of numbers is true where it is not 0."""
    if not isinstance(condition, Tensor):
        condition = torch.full((), bool(condition), device=(a if _is(a) else b).device)
    return torch.where(condition if condition.dtype == torch.bool else condition != 0, a, b)


def _is(x: object) -> bool:
    return isinstance(x, Tensor)


def masked_fill(x: Tensor, mask: Operand) -> Tensor:
    """X, 0 where the mask is true."""
    if _is(mask) and mask.dtype == torch.bool and x.shape == mask.shape:
        return x.clone().masked_fill_(mask, 0)
    return where(mask, 0.0 if x.is_floating_point() else 0, x).to(x.dtype)


def fma(a: Operand, b: Operand, c: Operand) -> Tensor:
    """A * b + c."""
    if all(map(_is, (a, b, c))) and a.dtype == b.dtype == c.dtype:
        return torch.addcmul(c, a, b)
    made: Tensor = a * b + c
    return made


def lerp(a: Operand, b: Operand, t: Operand) -> Tensor:
    """A + t * (b - a)."""
    if _is(a) and _is(b) and a.dtype == b.dtype and a.is_floating_point() and not (_is(t) and t.dtype != a.dtype):
        return torch.lerp(a, b, t)
    made: Tensor = a + t * (b - a)
    return made


def lerp_(a: Tensor, b: Operand, t: Operand) -> Tensor:
    """A + t * (b - a), into a."""
    same = _is(b) and a.dtype == b.dtype and not (_is(t) and t.dtype != a.dtype)
    return a.lerp_(b, t) if same else a.copy_(lerp(a, b, t))


def masked_scale(x: Tensor, mask: Tensor, scale: Operand) -> Tensor:
    """X * mask * scale."""
    kept = torch.where(mask, x, 0.0) if _is(mask) and mask.dtype == torch.bool else x * mask
    return kept.mul_(scale) if not _is(scale) else kept * scale


def add_scaled(a: Operand, b: Tensor, t: Operand) -> Tensor:
    """A + t * b."""
    return a + t * b if _is(t) or not _is(a) else torch.add(a, b, alpha=t)


def add_scaled_(a: Tensor, b: Tensor, t: Operand) -> Tensor:
    """A + t * b, into a."""
    return torch.addcmul(a, b, t, out=a) if _is(t) else a.add_(b, alpha=t)


def add_product_(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A + b * c, into a."""
    return torch.addcmul(a, b, c, out=a)


def add_quotient_(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A + b / c, into a."""
    return torch.addcdiv(a, b, c, out=a)


def add_scaled_product(a: Tensor, b: Tensor, c: Tensor, t: Number) -> Tensor:
    """A + t * b * c."""
    return torch.addcmul(a, b, c, value=t)


def add_scaled_product_(a: Tensor, b: Tensor, c: Tensor, t: Number) -> Tensor:
    """A + t * b * c, into a."""
    return torch.addcmul(a, b, c, value=t, out=a)


def add_scaled_quotient(a: Tensor, b: Tensor, c: Tensor, t: Number) -> Tensor:
    """A + t * b / c."""
    return torch.addcdiv(a, b, c, value=t)


def add_scaled_quotient_(a: Tensor, b: Tensor, c: Tensor, t: Number) -> Tensor:
    """A + t * b / c, into a."""
    return torch.addcdiv(a, b, c, value=t, out=a)


def non_finite(x: Tensor) -> Tensor:
    """1 where x is infinite or no number."""
    return torch.isfinite(x).logical_not_().to(x.dtype)


def cubed(x: Tensor) -> Tensor:
    """X * x * x."""
    return torch.pow(x, 3)


def clamp(x: Tensor) -> Tensor:
    """X between 0 and 1, the limits that the interpreter of graphs has."""
    return torch.clamp(x, 0, 1)


def relu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """max(x, 0): torch.relu cannot write to a place."""
    return torch.clamp_min(x, 0, out=out)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)**2."""
    return torch.relu(x).square_()


def quick_gelu(x: Tensor) -> Tensor:
    """X / (1 + exp(-1.702 * x))."""
    return torch.mul(x, 1.702).sigmoid_().mul_(x)


def softcap(x: Tensor) -> Tensor:
    """30 * tanh(x / 30)."""
    return torch.div(x, 30).tanh_().mul_(30)


def gelu(x: Tensor) -> Tensor:
    """GELU with erf."""
    return torch.nn.functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with tanh."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def threshold_backward(g: Tensor, y: Tensor) -> Tensor:
    """G where y > 0, else 0."""
    made: Tensor = _aten.threshold_backward(g, y, 0)
    return made


def relu6_backward(g: Tensor, x: Tensor) -> Tensor:
    """G between 0 and 6, else 0."""
    made: Tensor = _aten.hardtanh_backward(g, x, 0, 6)
    return made


def relu2_backward(g: Tensor, x: Tensor) -> Tensor:
    """G * 2 * max(x, 0)."""
    return torch.relu(x).mul_(2).mul_(g)


def leaky_relu_backward(g: Tensor, x: Tensor) -> Tensor:
    """G where x > 0, else a hundredth of it."""
    made: Tensor = _aten.leaky_relu_backward(g, x, 0.01, False)
    return made


def gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of GELU with erf."""
    made: Tensor = _aten.gelu_backward(g, x)
    return made


def gelu_tanh_backward(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of GELU with tanh."""
    made: Tensor = _aten.gelu_backward(g, x, approximate="tanh")
    return made


def quick_gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    """G * s * (1 + 1.702 * x * (1 - s))."""
    s = torch.mul(x, 1.702).sigmoid_()
    return torch.rsub(s, 1).mul_(x).mul_(1.702).add_(1).mul_(s).mul_(g)


def softplus_backward(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of softplus."""
    made: Tensor = _aten.softplus_backward(g, x, 1, 20)
    return made


def elu_backward(g: Tensor, x: Tensor) -> Tensor:
    """G where x > 0, else g * exp(x)."""
    made: Tensor = _aten.elu_backward(g, 1, 1, 1, False, x)
    return made


def softcap_backward(g: Tensor, y: Tensor) -> Tensor:
    """G * (1 - (y / 30)**2)."""
    return torch.div(y, 30).square_().neg_().add_(1).mul_(g)


#: torch's function of each elementwise function of tensors, for those with fewer kinds of operands below.
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

#: Functions of a tensor and then a number, where torch.add and the like do not take one.
WITH_NUMBER: dict[str, Callable[..., Any]] = {
    "maximum": torch.clamp_min, "minimum": torch.clamp_max,
    "logical_and": both,
}  # fmt: skip

#: The same functions with the number first: they are called with the tensor first.
SWAPPED: dict[str, Callable[..., Any]] = {
    "add": torch.add, "mul": torch.mul, "eq": torch.eq, "ne": torch.ne, "sub": torch.rsub, "div": over,
    "less": torch.gt, "less_equal": torch.ge, "maximum": torch.clamp_min, "minimum": torch.clamp_max,
    "logical_and": both,
}  # fmt: skip

#: What takes numbers in any place, broadcasts, and takes integers: torch's own kernels of gradients do not.
FLEXIBLE = frozenset(SWAPPED) | {
    "copy", "cast", "pow", "where", "masked_fill", "fma", "lerp", "neg", "abs", "sign", "square", "clamp", "round",
    "floor", "logical_not", "cubed", "relu", "add_scaled", "masked_scale",
}  # fmt: skip

#: How a function writes into its first operand, where torch's has neither `out=` nor a name with an underscore.
IN_PLACE: dict[str, Callable[..., Any]] = {
    "lerp": lerp_, "add_scaled": add_scaled_, "add_product": add_product_, "add_quotient": add_quotient_,
    "add_scaled_product": add_scaled_product_, "add_scaled_quotient": add_scaled_quotient_,
    "relu": torch.relu_, "silu": _aten.silu_, "leaky_relu": _aten.leaky_relu_, "hardswish": _aten.hardswish_,
    "elu": _aten.elu_, "mish": _aten.mish_, "hardsigmoid": _aten.hardsigmoid_,
}  # fmt: skip


def mask_of(queries: int, keys: int, causal: bool, window: int | None, first: int, device: torch.device) -> Tensor:
    """Which key positions a query position sees, the first query at the position `first`: True where it does."""
    own = torch.arange(first, first + queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    seen = key <= own if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    if window is not None:
        seen &= key > own - window
        if not causal:
            seen &= key < own + window
    return seen


def hidden(x: Tensor, query: int, key: int, causal: bool, window: int | None, first: int, fill: Number) -> Tensor:
    """X, with another number where the position along one axis does not see that along another."""
    seen = mask_of(x.shape[query], x.shape[key], causal, window, first, x.device)
    shape = [n if i in (query, key) else 1 for i, n in enumerate(x.shape)]
    return torch.where((seen if query < key else seen.T).reshape(shape), x, fill)
