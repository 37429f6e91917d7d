"""Products of 8 bits: how a tensor is quantized, and the rules of the kernels that do it and multiply.

A tensor is read once for its largest magnitude and once to be scaled, clamped and cast. A gradient passes that as if
nothing had been rounded, and none passes a scale. The products of the backward pass read the narrow copies and a
narrow copy of the incoming gradient, each with a scale for the tensor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ...dtypes import DTYPES, DType
from ...graph.graph import apply
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...notation.pattern import Pattern
from ...ops.blocks import Kernel, fused, kernel
from ...ops.contraction import Einsum
from ...ops.pointwise import cast, pointwise
from ...ops.reduce import reduce
from .kernels import KERNELS
from .table import Pull

__all__ = ["AMAX", "QUANTIZE", "SCALED_MM", "backward_rule", "quantize", "unscaled"]

#: Kernel that finds the largest magnitude of a tensor.
AMAX = "amax"
#: Kernel that scales, clamps and casts a tensor: operands are the tensor and its scale.
QUANTIZE = "quantize"
#: Kernel that multiplies quantized operands and divides by their scales.
SCALED_MM = "scaled_mm"


def quantize(x: Tensor, wanted: DType) -> tuple[Tensor, Tensor]:
    """Return a narrow copy of a tensor and the scale that it was multiplied by, a scalar in fp32."""
    axes = " ".join(f"a{i}" for i in range(x.ndim))

    def largest(x: Tensor) -> Tensor:
        return cast(reduce(pointwise("abs", x), f"{axes} -> ", "max"), "fp32")

    def narrow(x: Tensor, scale: Tensor) -> Tensor:
        return cast(pointwise("clamp", pointwise("mul", x, scale)), wanted)

    amax: Any = fused(AMAX, largest, x)
    scale = pointwise("div", float(wanted.max), amax, name="scale")
    made: Any = fused(QUANTIZE, narrow, x, scale, backward=QUANTIZE)
    return made, scale


def unscaled(y: Tensor, first: Tensor, second: Tensor, wanted: DType) -> Tensor:
    """Divide a product by the scales of its operands: a multiplication of scalars, and one FLOP an element."""
    return cast(pointwise("div", y, pointwise("mul", first, second, name="scales"), name="unscale"), wanted)


def backward_rule(wanted: str) -> str:
    """Return the name of the rule of products whose incoming gradient is quantized to a format."""
    return f"{SCALED_MM}_{wanted}"


def _straight(pull: Pull[Kernel]) -> tuple[Tensor | None, None]:
    return pull.grads[0], None


def _scaled_mm(wanted: DType, pull: Pull[Kernel]) -> list[Tensor | None]:
    op, body, grad = pull.op, pull.kind.body, pull.grads[0]
    assert grad is not None
    outer = dict(zip(body.formals, op.operands, strict=True))
    needs = dict(zip(body.formals, pull.needs, strict=True))
    product = next(o for o in body.ops if isinstance(o.kind, Einsum))
    scales = next(o for o in body.ops if o.name.rpartition("/")[2].startswith("scales")).operands
    made: dict[Tensor, Tensor] = {}
    narrow: tuple[Tensor, Tensor] | None = None
    for i, f in enumerate(product.operands):
        if needs[f]:
            narrow = narrow or quantize(grad, wanted)
            other, scale = (pull.saved(outer[t]) for t in (product.operands[1 - i], scales[1 - i]))
            made[f] = _product(product, i, narrow, (other, scale), grad.dtype)
    for f in body.formals:
        if needs[f] and f not in product.operands and f not in scales:
            made[f] = _summed(grad, f)
    return [made.get(f) for f in body.formals]


def _product(product: Op, i: int, grad: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], wanted: DType) -> Tensor:
    """Add the product that makes the gradient of an operand."""
    assert isinstance(product.kind, Einsum)
    forward = product.kind.pattern
    pattern = Pattern((forward.result, forward.operands[1 - i]), forward.operands[i])
    kind = Einsum(pattern=pattern, extents=product.kind.extents, dtype=DTYPES["fp32"])
    with kernel(SCALED_MM) as body:
        y = apply(kind, [grad[0], other[0]], "matmul")[0]
        y = unscaled(y, grad[1], other[1], wanted)
    return body.export(y)


def _summed(grad: Tensor, bias: Tensor) -> Tensor:
    """Add up the gradient of what was added along leading axes."""
    lead = grad.ndim - bias.ndim
    names = [f"a{i}" for i in range(grad.ndim)]
    return reduce(grad, f"{' '.join(names)} -> {' '.join(names[lead:])}", "sum") if lead else grad


KERNELS[QUANTIZE] = _straight
for _format in DTYPES.values():
    if _format.kind == "float" and _format.bits <= 8 and not (_format.scale or _format.codes):
        KERNELS[backward_rule(_format.name)] = partial(_scaled_mm, _format)
