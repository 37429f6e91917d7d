"""Matrix products: 2 for every index point, and what is added to them."""

from __future__ import annotations

from typing import Any

from ....algebra.polynomial import Poly
from ..call import Call, Counts, Spec
from .amounts import each, is_number, product, together, unsupported
from .pointwise import gelu_steps
from .table import rule

__all__: list[str] = []  # its rules are found in RULES


def _multiplied(points: Poly) -> Counts:
    return Counts(matmul=2 * points)


def _scaled_sum(call: Call, points: Poly, product_points: Poly, given: str = "self") -> Counts:
    """Return beta * self + alpha * product: what is not scaled by 1 costs a product, and a beta of 0 leaves no sum."""
    steps: list[str] = []
    if call.get(given) is not None and not is_number(call.get("beta"), 0):
        steps.append("add")
        if not is_number(call.get("beta"), 1):
            steps.append("mul")
    if not is_number(call.get("alpha"), 1):
        steps.append("mul")
    return together(_multiplied(product_points), each(points, *steps))


@rule("vdot")
def dot(call: Call) -> Counts:
    """Count 2 for each pair of elements."""
    return _multiplied(call["self"].numel)


@rule("_addmm_activation", "sspaddmm")
def add_product(call: Call) -> Counts:
    """Count the product, its sum with a bias, and the activation where there is one."""
    mat1: Spec = call["mat1"]
    counts = _scaled_sum(call, call.out.numel, mat1.numel * call["mat2"].sizes[-1])
    if call.name == "_addmm_activation":
        return together(counts, each(call.out.numel, *(gelu_steps("none") if call["use_gelu"] else ("relu",))))
    return counts


@rule("addr")
def add_outer(call: Call) -> Counts:
    """Count 1 for each product, which sums nothing, and the sum with what is there."""
    sums = _scaled_sum(call, call.out.numel, call.out.numel)
    return Counts(pointwise=sums.pointwise + call.out.numel)


@rule("_scaled_mm")
def scaled(call: Call) -> Counts:
    """Count the product; scales are part of how an operand is read."""
    bias = each(call.out.numel, "add") if call.get("bias") is not None else Counts()
    return together(_multiplied(call["self"].numel * call["mat2"].sizes[-1]), bias)


@rule("_grouped_mm", "_scaled_grouped_mm")
def grouped(call: Call) -> Counts:
    """Count the product of each group: rows by the matrix of their group.

    Of two operands with two axes the contracted axis is cut into groups, so that each group's result is whole; where
    one has three axes it is the rows, or columns, that are divided among the groups.
    """
    first, second = call["self"], call["mat2"]
    if len(first.sizes) == 3 and len(second.sizes) == 2:  # columns are divided
        points = first.sizes[1] * first.sizes[2] * second.sizes[1]
    else:
        points = first.numel * second.sizes[-1]
    bias = each(call.out.numel, "add") if call.get("bias") is not None else Counts()
    return together(_multiplied(points), bias)


@rule("linear_backward", "mkldnn_linear_backward")
def linear_backward(call: Call) -> Counts:
    """Count a product for each of the gradients of operand and weight, and the sum over rows for that of the bias."""
    grad: Spec = call["grad_output"]
    wanted: Any = call["output_mask"]
    points = grad.numel * call["self"].sizes[-1]
    return together(
        *(_multiplied(points) for i in (0, 1) if wanted[i]), *(Counts(pointwise=grad.numel) for _ in (2,) if wanted[2])
    )


@rule("_trilinear")
def trilinear(call: Call) -> Counts:
    """Count two products: of the first two operands, with the third.

    Each operand lacks the axes of its list `expand`; an axis of `sumdim` is summed in the first product where the third
    operand lacks it, else in the second.
    """
    sizes: dict[int, Poly] = {}
    has: list[set[int]] = []
    rank = len(call["i1"].sizes) + len(call["expand1"])
    for i in (1, 2, 3):
        operand: Spec = call[f"i{i}"]
        axes = [a for a in range(rank) if a not in call[f"expand{i}"]]
        sizes |= {a: n for a, n in zip(axes, operand.sizes, strict=True) if a not in sizes or n != 1}
        has.append(set(axes))
    summed = set(call["sumdim"])
    early = {a for a in summed if a not in has[2]}
    first = has[0] | has[1]
    second = (first - early) | has[2]
    if not early <= first:
        raise unsupported(call, f"sumdim {sorted(summed)}", "axes that an operand has")
    parts = []
    for reached, sums in ((first, early), (second, summed - early)):
        points = product(sizes[a] for a in reached)
        parts.append(_multiplied(points) if sums else each(points, "mul"))
    return together(*parts)


@rule("costgraph.linear_dynamic")
def linear_dynamic(call: Call) -> Counts:
    """Count the product, and around it the range of the operand, its quantization, and that of the result undone.

    The kernel adds up in a buffer of int32 (`ao/quantized/cpu/qlinear_dynamic.cpp`); one of fp16 has no such steps.
    """
    x, weight, made = call["input"], call["weight"], call.out
    biased = each(made.numel, "add") if call.get("bias") is not None else Counts()
    product_ = Counts(matmul=2 * x.numel * weight.sizes[0])
    if weight.dtype.kind == "float":
        return together(product_, biased)
    steps = Counts(pointwise=x.numel * (2 + 4) + made.numel * 2, workspace=4 * made.numel)
    return together(product_, steps, biased)
