"""Gradient rules for fused kernels that have their own backward function in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from ...algebra.polynomial import ONE, ZERO, Poly, poly, total
from ...dtypes import DTYPES, DType
from ...ir.graph import Graph, Op, Tensor, apply, building, current_graph, phase
from ...nn.activations import one_kernel
from ...nn.recurrent import running
from ...notation.pattern import Pattern
from ...ops.einsum import Einsum
from ...ops.elementwise import Pointwise, cast, pointwise
from ...ops.fill import fill
from ...ops.fourier import real_part, view_as
from ...ops.functions import POWERS
from ...ops.index import Gather, reverse, scatter
from ...ops.layout import Expand, Rearrange, broadcast, index, keep_alive, permute, reshape
from ...ops.loops import Kernel, fused, kernel
from ...ops.reduce import Reduce, reduce
from .table import Rule, VJPContext, sum_to

__all__ = [
    "INSIDE",
    "KERNELS",
    "KernelBackward",
    "row_sums",
    "AMAX",
    "QUANTIZE",
    "SCALED_MM",
    "backward_rule",
    "quantize",
    "unscaled",
]


# -- kernels -----------------------------------------------------------------------------------------------------------

Saved = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KernelBackward:
    """Exceptions to recomputing a kernel's ops in its backward pass."""

    rebuilt: Mapping[Tensor, Callable[[Saved], Tensor]] = field(default_factory=dict)
    """inner tensors that are recomputed in another way than by their producers"""
    written: frozenset[Tensor] = frozenset()
    """inner tensors that the forward kernel writes"""
    rules: Mapping[Op, Rule[Any]] = field(default_factory=dict)
    """rules that override those of inner ops"""
    joint: frozenset[Tensor] = frozenset()
    """formals whose gradients come from a single kernel, even if only one is needed"""


#: `prepare(op, grads, saved)`: gradients of the kernel's results, and saved operands and results.
Prepare = Callable[[Op, Sequence[Tensor | None], Saved], KernelBackward]


def _rows(op: Op) -> tuple[str, str]:
    """Return patterns for the operand and for one value per row: a reduction keeps reduced axes with size 1."""
    assert op.body is not None
    pattern = next(o.kind.pattern for o in op.body.ops if isinstance(o.kind, Reduce))
    return " ".join(map(str, pattern.operands[0])), " ".join(map(str, pattern.result))


def softmax(pull: VJPContext[Kernel]) -> Sequence[Tensor | None]:
    """Return y * (g - sum(g * y)): reads only the result.

    An extra term in the sum (a sink) is an operand with probability 1 - sum(y).
    """
    g, (names, row_names) = pull.grads[0], _rows(pull.op)
    y = pull.saved(pull.op.results[0])
    assert g is not None
    sinks = pull.op.operands[1:]
    with kernel("softmax_backward", workspace=_dense_copies(g, y)) as body:
        row_dot = reduce(g * y, f"{names} -> {row_names}", "sum")
        operand_grads = [_in_format_of(pull.op.operands[0], y * (g - row_dot))]
        if sinks and pull.needs[1]:
            share = 1.0 - reduce(y, f"{names} -> {row_names}", "sum")
            operand_grads.append(sum_to(-(share * row_dot), sinks[0]))
    return [*map(body.export, operand_grads), *(None for _ in sinks[len(operand_grads) - 1 :])]


def _in_format_of(x: Tensor, gradient: Tensor) -> Tensor:
    """Cast a gradient to its operand's dtype, as torch's kernel does with `input_dtype` if it cast inside."""
    return gradient if gradient.dtype == x.dtype else cast(gradient, x.dtype)


def _dense_copies(*tensors: Tensor) -> Poly:
    """Return the bytes for the contiguous copies that torch's kernel makes."""
    return ZERO if current_graph().fused else total(t.numel * t.dtype.bytes for t in tensors if not t.is_contiguous)


def log_softmax(pull: VJPContext[Kernel]) -> tuple[Tensor | None]:
    """Return g - exp(y) * sum(g): reads only the result."""
    g, (names, row_names) = pull.grads[0], _rows(pull.op)
    y = pull.saved(pull.op.results[0])
    assert g is not None
    with kernel("log_softmax_backward", workspace=_dense_copies(g, y)) as body:
        grad = _in_format_of(pull.op.operands[0], g - pointwise("exp", y) * reduce(g, f"{names} -> {row_names}", "sum"))
    return (body.export(grad),)


def norm(pull: VJPContext[Kernel]) -> tuple[Tensor | None]:
    """Return g * x / norm, or the formula for another order, and 0 at a norm of 0: torch's `norm_backward`."""
    x, y, g = _broadcast_rows(pull)
    assert pull.op.body is not None
    steps = {o.kind.function.name: o.kind for o in reversed(pull.op.body.ops) if isinstance(o.kind, Pointwise)}
    if "square" in steps:
        return (g * pointwise("masked_fill", x / y, pointwise("eq", y, 0.0)),)
    if "pow" in steps:
        return (_power_norm(x, y, g, steps["pow"].scalars[1]),)
    if next(o.kind.operation for o in pull.op.body.ops if isinstance(o.kind, Reduce)) == "sum":
        return (pointwise("sign", x) * g,)
    modulus = pointwise("abs", x)
    # torch's `logical_or`: they are never both true
    is_largest = pointwise("ne", pointwise("eq", modulus, y), pointwise("ne", modulus, modulus))
    shares, *temporaries = _share_among(g, is_largest, x)
    return (_keep_until_return(pointwise("sign", x) * shares, *temporaries, modulus, is_largest),)


def _power_norm(x: Tensor, y: Tensor, g: Tensor, order: Any) -> Tensor:
    """Return the gradient of the root of a sum of powers, in steps that depend on the order."""
    inplace = not current_graph().fused
    modulus = pointwise("abs", x)
    if order > 2:
        scaled = x * _power(modulus, order - 2, inplace=inplace)
    else:
        power = _power(modulus, order - 1, inplace=inplace)
        zeros = pointwise("eq", x, 0) if order < 1 else None
        if zeros is not None:
            power = pointwise("masked_fill", power, zeros, inplace=inplace)
        scaled = _keep_until_return(pointwise("sign", x) * power, *() if zeros is None else (zeros,))
    if order < 1:
        return _keep_until_return(scaled * g * _power(y, 1 - order), scaled)
    share = g / _power(y, order - 1)
    return scaled * pointwise("masked_fill", share, pointwise("eq", y, 0), inplace=inplace)


def _power(x: Tensor, exponent: float, *, inplace: bool = False) -> Tensor:
    """Return a power, in the steps of torch's kernel."""
    for step in POWERS.get(exponent, ("pow",)):
        x = pointwise(step, x, *((exponent,) if step == "pow" else ()), inplace=inplace)
    return x


def _keep_until_return(result: Tensor, *temporaries: Tensor) -> Tensor:
    """Keep the local variables of torch's function alive until it returns."""
    return result if current_graph().fused else keep_alive(result, *temporaries)


def _count_true(mask: Tensor, row_sizes: Sequence[Poly], extra_bytes: Poly = ZERO) -> Tensor:
    """Count the true elements of a mask, keeping reduced axes with size 1; a CPU casts the mask to int64 first."""
    names = [f"n{i}" for i in range(mask.ndim)]
    axes = " ".join("1" if n == ONE else name for n, name in zip(row_sizes, names, strict=True))

    def body(mask: Tensor) -> Tensor:
        return reduce(mask, f"{' '.join(names)} -> {axes}", "sum")

    return _with_copies("sum", body, mask, bytes_=8 * mask.numel + extra_bytes)


def extremum(pull: VJPContext[Kernel]) -> tuple[Tensor | None]:
    """Share the gradient among tied elements: torch's `scale_grad_by_count` on a CPU.

    A full reduction uses `evenly_distribute_backward`, which allocates zeros before it counts.
    """
    x, y, g = _broadcast_rows(pull)
    ties = pointwise("eq", y, x)
    if not pull.op.results[0].ndim and x.ndim:
        count = _count_true(ties, y.sizes, extra_bytes=x.numel * x.dtype.bytes)
        return (_keep_until_return(pointwise("where", ties, g / count, 0), ties),)
    return (_keep_until_return(*_share_among(g, ties, x)),)


def _share_among(g: Tensor, where: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divide a gradient among the true elements of a mask; also return the intermediate results.

    A CPU casts the count before the division, and the mask before the multiplication.
    """
    count = _count_true(where, g.sizes)
    share = _with_copies("div", lambda g, n: pointwise("div", g, n), g, count, bytes_=count.numel * g.dtype.bytes)
    product = _with_copies(
        "mul", lambda s, t: pointwise("mul", s, t, dtype=x.dtype), share, where, bytes_=where.numel * x.dtype.bytes
    )
    return product, count, share


def product(pull: VJPContext[Kernel]) -> tuple[Tensor | None]:
    """Return g * (y / x): torch's `prod_backward` without zeros, for which it checks first."""
    x, y, g = _broadcast_rows(pull)
    zeros = pointwise("eq", x, 0)
    if not pull.op.results[0].ndim:
        reduce(zeros, f"{' '.join(f'n{i}' for i in range(x.ndim))} -> ", "any")
        return (g * (y / x),)
    count = _count_true(zeros, y.sizes)
    return (_keep_until_return(g * (y / x), zeros, count),)


def _with_copies(name: str, function: Callable[..., Tensor], *operands: Tensor, bytes_: Poly) -> Tensor:
    """Run a function that first copies its operands for a cast."""
    if current_graph().fused:
        return function(*operands)
    with kernel(name, workspace=bytes_) as body:
        result = function(*operands)
    return body.export(result)


def polar(pull: VJPContext[Kernel]) -> tuple[Tensor | None, ...]:
    """Return the real parts of conj(g) * sgn(y) and conj(g) * i*y: torch's `polar_backward`.

    Multiplication resolves a conjugate first. The second gradient is the imaginary part of g * conj(y).
    """
    (g,), y = pull.grads, pull.saved(pull.op.results[0])
    assert g is not None

    def multiply(first: Tensor, second: Tensor) -> Tensor:
        return _with_copies("mul", lambda a, b: pointwise("mul", a, b), first, second, bytes_=g.numel * g.dtype.bytes)

    signs = pointwise("sign", y)
    modulus_grad = _keep_until_return(multiply(view_as(g, "conjugate"), signs), signs)
    rotated = pointwise("mul", view_as(y, "conjugate"), 1.0)
    angle_grad = _keep_until_return(multiply(g, rotated), modulus_grad, rotated)
    return real_part(modulus_grad), index(view_as(angle_grad, "real"), (..., 1))


def logsumexp(pull: VJPContext[Kernel]) -> tuple[Tensor | None]:
    """Return g * exp(x - y), the share of each element; the difference stays alive until then, as in C++."""
    x, y, g = _broadcast_rows(pull)
    shifted = x - y
    grad = g * pointwise("exp", shifted)
    return (_keep_until_return(grad, shifted),)


def weight_norm(pull: VJPContext[Kernel]) -> tuple[Tensor | None, ...]:
    """Return s/n * (g - v * d/n**2) and d/n, where d sums g * v along a row of length n, the second result.

    Salimans and Kingma 2016, arXiv 1602.07868, eq. 3.
    """
    g, (names, row_names) = pull.grads[0], _rows(pull.op)
    assert g is not None
    v, scale, length = map(pull.saved, (*pull.op.operands, pull.op.results[1]))
    with kernel("weight_norm_backward") as body:
        row_dot = reduce(g * v, f"{names} -> {row_names}", "sum")
        operand_grads = [scale / length * (g - v * (row_dot / pointwise("square", length))), row_dot / length]
    return tuple(body.export(t) if needed else None for t, needed in zip(operand_grads, pull.needs, strict=True))


def _broadcast_rows(pull: VJPContext[Kernel]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a kernel's operand, and its result and gradient in shapes that broadcast against it."""
    (g,), x, body = pull.grads, pull.saved(pull.op.operands[0]), pull.op.body
    assert g is not None
    assert body is not None
    pattern = next(o.kind.pattern for o in reversed(body.ops) if isinstance(o.kind, Reduce))
    result_names = pattern.result_names
    row_sizes = [n if a.names[0] in result_names else ONE for a, n in zip(pattern.operands[0], x.sizes, strict=True)]
    y, g = (reshape(t, row_sizes) for t in (pull.saved(pull.op.results[0]), g))
    return x, y, g


def variance(pull: VJPContext[Kernel]) -> tuple[Tensor | None]:
    """Return 2 * g * (x - mean) / n, plus the gradient of the mean: torch's `var_backward` and `std_backward`."""
    (g, *means), x, body = pull.grads, pull.saved(pull.op.operands[0]), pull.op.body
    assert body is not None
    pattern = next(o.kind.pattern for o in body.ops if isinstance(o.kind, Reduce))
    row_sizes = [ONE if str(a) == "1" else n for a, n in zip(pattern.result, x.sizes, strict=True)]
    count = x.numel / prod(row_sizes, start=ONE)
    divisor: Any = (
        o.kind.scalars[1] for o in body.ops if isinstance(o.kind, Pointwise) and o.kind.function.name == "div"
    )
    grad = None
    if g is not None:
        g = reshape(g, row_sizes)
        if any(isinstance(o.kind, Pointwise) and o.kind.function.name == "sqrt" for o in body.ops):
            y = reshape(pull.saved(pull.op.results[0]), row_sizes)
            g = pointwise("masked_fill", g / (y * 2.0), pointwise("eq", y, 0.0))
        share = pointwise("mul", g, poly(2) / next(divisor, count))
        grad = share * (x - reduce(x, str(pattern), "mean"))
    if means and means[0] is not None:
        share = broadcast(reshape(means[0], row_sizes), x.sizes) / count
        grad = share if grad is None else grad + share
    return (grad,)


def order(pull: VJPContext[Kernel]) -> tuple[Tensor | None]:
    """Scatter the gradients of the values to their original positions, along an axis that is not the last."""
    (x,), g, body = pull.op.operands, pull.grads[0], pull.op.body
    if g is None or not pull.needs[0]:
        return (None,)
    assert body is not None
    axis_order = next(o.kind.order for o in body.ops if isinstance(o.kind, Rearrange))  # moves the axis to the end
    positions, values = (permute(t, axis_order) for t in (pull.saved(pull.op.results[1]), g))
    zeros = permute(fill(x.sizes, 0, x.dtype), axis_order)
    return (
        permute(scatter(zeros, positions, values, "set", along=True), [axis_order.index(i) for i in range(x.ndim)]),
    )


def flip(pull: VJPContext[Kernel]) -> tuple[Tensor | None]:
    """Flip the gradient back."""
    (g,), body = pull.grads, pull.op.body
    assert g is not None
    assert body is not None
    moves = (o.operands[0].producer for o in body.ops if isinstance(o.kind, Gather))
    axes = [t.kind.order[0] if t is not None and isinstance(t.kind, Rearrange) else 0 for t in moves]
    flipped = fused("flip_backward", reverse, g, axes=axes)
    return (flipped if isinstance(flipped, Tensor) else flipped[0],)


def cumulative_sum(pull: VJPContext[Kernel]) -> tuple[Tensor | None]:
    """Return the reversed cumulative sum of the gradient: torch's `cumsum_backward`."""
    (g,) = pull.grads
    assert g is not None
    return (_reverse_cumulative_sum(g, pull.op),)


def cumulative_product(pull: VJPContext[Kernel]) -> tuple[Tensor | None]:
    """Return the reversed cumulative sum of g * y, over x: torch's `cumprod_backward` after its check for zeros."""
    (g,), (x, y) = pull.grads, map(pull.saved, (*pull.op.operands, *pull.op.results))
    assert g is not None
    shares, zeros = y * g, pointwise("eq", x, 0)
    names = " ".join(f"n{i}" for i in range(x.ndim))
    any_zero = reduce(zeros, f"{names} -> ", "any")
    return (keep_alive(_reverse_cumulative_sum(shares, pull.op) / x, shares, zeros, any_zero),)


def _reverse_cumulative_sum(x: Tensor, op: Op) -> Tensor:
    """Flip an axis, accumulate and flip back; intermediate results stay alive until the end, as in C++."""
    assert op.body is not None
    moves = (o.kind.order[0] for o in op.body.ops if isinstance(o.kind, Rearrange))
    axis = next(moves, 0)  # moved to the front unless it is the first
    flipped = one_kernel("flip", reverse, x, backward="flip", axes=[axis])
    running_sum = running(flipped, axis, "add", 0, "cumulative_sum", backward="cumulative_sum")
    return keep_alive(one_kernel("flip", reverse, running_sum, backward="flip", axes=[axis]), flipped)


def _flash(op: Op, grads: Sequence[Tensor | None], saved: Saved) -> KernelBackward:
    """Let the forward kernel write the log-sum-exp of each row, from which the probabilities are recomputed.

    The sum of gradient times probability along a row equals that of gradient times output, which is much shorter (Dao
    et al. 2022, arXiv 2205.14135, section B.4).
    """
    probabilities, statistic = row_sums(op)
    scores = probabilities.operands[0]

    def recompute_probabilities(inner_saved: Saved) -> Tensor:
        return cast(pointwise("exp", inner_saved(scores) - inner_saved(statistic)), scores.dtype)

    def rule(pull: VJPContext[Kernel]) -> Sequence[Tensor | None]:
        grad, out = pull.grads[0], grads[0]
        assert grad is not None
        assert out is not None
        row_dot = _along_rows(op, out * saved(op.results[0]))
        sinks = probabilities.operands[1:]
        operand_grads: list[Tensor | None] = [pull.saved(probabilities.results[0]) * (grad - row_dot)]
        for t, needed in zip(sinks, pull.needs[1:], strict=True):
            share = pointwise("exp", pull.saved(t) - pull.saved(statistic))
            operand_grads.append(sum_to(-(share * row_dot), t) if needed else None)
        return operand_grads

    body = op.body
    assert body is not None
    factors = {_source(t) for o in body.ops if isinstance(o.kind, Einsum) for t in o.operands}
    joint = frozenset(t for t in factors if t.producer is None)
    return KernelBackward(
        {probabilities.results[0]: recompute_probabilities}, frozenset({statistic}), {probabilities: rule}, joint
    )


def _source(t: Tensor) -> Tensor:
    """Follow views, casts and scalings back to their source."""
    while t.producer is not None and isinstance(t.producer.kind, Rearrange | Expand | Pointwise):
        t = t.producer.operands[0]
    return t


def row_sums(op: Op) -> tuple[Op, Tensor]:
    """Return the softmax in an attention kernel, and the log-sum-exp of its rows."""
    assert op.body is not None
    probabilities = next(o for o in op.body.ops if isinstance(o.kind, Kernel) and o.kind.backward == "softmax")
    inner = probabilities.body
    assert inner is not None
    if len(probabilities.results) > 1:  # already requested
        return probabilities, probabilities.results[1]
    scores = probabilities.operands[0]
    largest, sums = (_second_operand(inner, function) for function in ("sub", "div"))
    with building(inner), phase(op.phase):
        log_sum_exp = cast(largest + pointwise("log", sums), "fp32" if scores.dtype.bits < 32 else scores.dtype)
    return probabilities, inner.export(log_sum_exp)


def _second_operand(body: Graph, function: str) -> Tensor:
    """Return the second operand of `sub` or `div` in a softmax."""
    matching = (o for o in body.ops if isinstance(o.kind, Pointwise) and o.kind.function.name == function)
    return next(o.operands[1] for o in matching if o.operands[0].sizes == o.results[0].sizes)


def _along_rows(op: Op, product: Tensor) -> Tensor:
    """Sum over the result axes that the probabilities lack, and reorder the others to match."""
    assert op.body is not None
    pattern = next(o.kind.pattern for o in reversed(op.body.ops) if isinstance(o.kind, Einsum))
    names, rows = list(pattern.result_names), pattern.operand_names(0)
    row_names = [n for n in rows if n in names]
    total = reduce(product, f"{' '.join(names)} -> {' '.join(row_names)}", "sum")
    return reshape(total, [product.sizes[names.index(n)] if n in names else 1 for n in rows])


#: Rules by the kernel field `backward`.
KERNELS: dict[str, Rule[Kernel]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "norm": norm,
    "cumulative_sum": cumulative_sum,
    "cumulative_product": cumulative_product,
    "extremum": extremum,
    "product": product,
    "order": order,
    "flip": flip,
    "variance": variance,
    "logsumexp": logsumexp,
    "polar": polar,
    "weight_norm": weight_norm,
}
#: Kernels whose backward pass differs from recomputing and differentiating the ops inside.
INSIDE: dict[str, Prepare] = {"flash": _flash}


# -- 8-bit matmuls -----------------------------------------------------------------------------------------------------
# Quantization of operands with per-tensor scales, and the gradient rules of these kernels.
#
# A tensor is read once for its absolute maximum and once to be scaled, clamped and cast. Gradients pass straight
# through the rounding, scales get none. The backward matmuls read quantized operands and a quantized incoming gradient.

#: Kernel that computes a tensor's absolute maximum.
AMAX = "amax"
#: Kernel that scales, clamps and casts: its operands are a tensor and a scale.
QUANTIZE = "quantize"
#: Kernel that multiplies quantized operands and divides by their scales.
SCALED_MM = "scaled_mm"


def quantize(x: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Return a quantized copy of a tensor, and its scale, an fp32 scalar."""
    axes = " ".join(f"a{i}" for i in range(x.ndim))

    def largest(x: Tensor) -> Tensor:
        return cast(reduce(pointwise("abs", x), f"{axes} -> ", "max"), "fp32")

    def narrow(x: Tensor, scale: Tensor) -> Tensor:
        return cast(pointwise("clamp", pointwise("mul", x, scale)), dtype)

    amax: Any = fused(AMAX, largest, x)
    scale = pointwise("div", float(dtype.max), amax, name="scale")
    quantized: Any = fused(QUANTIZE, narrow, x, scale, backward=QUANTIZE)
    return quantized, scale


def unscaled(y: Tensor, first: Tensor, second: Tensor, dtype: DType) -> Tensor:
    """Divide a matmul result by the scales of its operands: one scalar product, and one FLOP per element."""
    return cast(pointwise("div", y, pointwise("mul", first, second, name="scales"), name="unscale"), dtype)


def backward_rule(dtype_name: str) -> str:
    """Return the rule name for matmuls whose incoming gradient is quantized to a format."""
    return f"{SCALED_MM}_{dtype_name}"


def _straight(pull: VJPContext[Kernel]) -> tuple[Tensor | None, None]:
    return pull.grads[0], None


def _scaled_mm(dtype: DType, pull: VJPContext[Kernel]) -> list[Tensor | None]:
    op, body, grad = pull.op, pull.kind.body, pull.grads[0]
    assert grad is not None
    outer = dict(zip(body.formals, op.operands, strict=True))
    needs = dict(zip(body.formals, pull.needs, strict=True))
    product = next(o for o in body.ops if isinstance(o.kind, Einsum))
    scales = next(o for o in body.ops if o.name.rpartition("/")[2].startswith("scales")).operands
    operand_grads: dict[Tensor, Tensor] = {}
    quantized_grad: tuple[Tensor, Tensor] | None = None
    for i, f in enumerate(product.operands):
        if needs[f]:
            quantized_grad = quantized_grad or quantize(grad, dtype)
            other, scale = (pull.saved(outer[t]) for t in (product.operands[1 - i], scales[1 - i]))
            operand_grads[f] = _grad_matmul(product, i, quantized_grad, (other, scale), grad.dtype)
    for f in body.formals:
        if needs[f] and f not in product.operands and f not in scales:
            operand_grads[f] = _bias_grad(grad, f)
    return [operand_grads.get(f) for f in body.formals]


def _grad_matmul(
    product: Op, i: int, grad: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], dtype: DType
) -> Tensor:
    """Add the matmul for an operand's gradient."""
    assert isinstance(product.kind, Einsum)
    forward = product.kind.pattern
    pattern = Pattern((forward.result, forward.operands[1 - i]), forward.operands[i])
    kind = Einsum(pattern=pattern, extents=product.kind.extents, dtype=DTYPES["fp32"])
    with kernel(SCALED_MM) as body:
        y = apply(kind, [grad[0], other[0]], "matmul")[0]
        y = unscaled(y, grad[1], other[1], dtype)
    return body.export(y)


def _bias_grad(grad: Tensor, bias: Tensor) -> Tensor:
    """Sum the gradient of a bias over leading axes."""
    lead = grad.ndim - bias.ndim
    names = [f"a{i}" for i in range(grad.ndim)]
    return reduce(grad, f"{' '.join(names)} -> {' '.join(names[lead:])}", "sum") if lead else grad


KERNELS[QUANTIZE] = _straight
for _format in DTYPES.values():
    if _format.kind == "float" and _format.bits <= 8 and not (_format.scale or _format.codes):
        KERNELS[backward_rule(_format.name)] = partial(_scaled_mm, _format)
