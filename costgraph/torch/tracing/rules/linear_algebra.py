"""Costs of matrix products, decompositions, solvers, Fourier transforms, distances and convolutions.

Decompositions of matrices of size n follow Golub and Van Loan, Matrix Computations, 4th edition: triangular solves
(3.1), LU (3.2), Cholesky (4.2), Householder reflections (5.1, 5.2), tables for eigenvalues (7.5, 8.3) and singular
values (8.6). Sums over steps are exact where the book states the leading term; pivoting and iterations follow the book.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Any

from ....algebra.extremum import smaller
from ....algebra.polynomial import ONE, ZERO, Poly
from ....ops.fourier import joined, transform_flops
from ..call import Call, Counts, Spec
from .elementwise import gelu_steps
from .reductions import norm_of
from .table import REDUCE, combined, is_number, per_element, product, rule, unsupported

# -- matrix products ---------------------------------------------------------------------------------------------------


def _matmul(points: Poly) -> Counts:
    return Counts(matmul=2 * points)


def _scaled_sum(call: Call, points: Poly, product_points: Poly, addend: str = "self") -> Counts:
    """Return the cost for beta * self + alpha * product: scaling by 1 is free, and a beta of 0 drops the sum."""
    steps: list[str] = []
    if call.get(addend) is not None and not is_number(call.get("beta"), 0):
        steps.append("add")
        if not is_number(call.get("beta"), 1):
            steps.append("mul")
    if not is_number(call.get("alpha"), 1):
        steps.append("mul")
    return combined(_matmul(product_points), per_element(points, *steps))


@rule("vdot")
def dot(call: Call) -> Counts:
    """Count 2 per pair of elements."""
    return _matmul(call["self"].numel)


@rule("_addmm_activation", "sspaddmm")
def add_product(call: Call) -> Counts:
    """Count the matmul, the bias, and the activation if there is one."""
    mat1: Spec = call["mat1"]
    counts = _scaled_sum(call, call.out.numel, mat1.numel * call["mat2"].sizes[-1])
    if call.name == "_addmm_activation":
        return combined(counts, per_element(call.out.numel, *(gelu_steps("none") if call["use_gelu"] else ("relu",))))
    return counts


@rule("addr")
def add_outer(call: Call) -> Counts:
    """Count 1 per product, which has no sum, and the addition of `self`."""
    sums = _scaled_sum(call, call.out.numel, call.out.numel)
    return Counts(pointwise=sums.pointwise + call.out.numel)


@rule("_scaled_mm")
def scaled(call: Call) -> Counts:
    """Count the matmul; scales are applied on load."""
    bias = per_element(call.out.numel, "add") if call.get("bias") is not None else Counts()
    return combined(_matmul(call["self"].numel * call["mat2"].sizes[-1]), bias)


@rule("_grouped_mm", "_scaled_grouped_mm")
def grouped(call: Call) -> Counts:
    """Count the matmul of each group.

    For two matrices, the contracted axis is divided into groups, each with a full result. If one operand has three
    axes, the rows or columns are divided among its matrices.
    """
    first, second = call["self"], call["mat2"]
    if len(first.sizes) == 3 and len(second.sizes) == 2:  # columns are divided among groups
        points = first.sizes[1] * first.sizes[2] * second.sizes[1]
    else:
        points = first.numel * second.sizes[-1]
    bias = per_element(call.out.numel, "add") if call.get("bias") is not None else Counts()
    return combined(_matmul(points), bias)


@rule("linear_backward", "mkldnn_linear_backward")
def linear_backward(call: Call) -> Counts:
    """Count a matmul per gradient of operand and weight, and the sum over rows for the bias."""
    grad: Spec = call["grad_output"]
    mask: Any = call["output_mask"]
    points = grad.numel * call["self"].sizes[-1]
    return combined(
        *(_matmul(points) for i in (0, 1) if mask[i]), *(Counts(pointwise=grad.numel) for _ in (2,) if mask[2])
    )


@rule("_trilinear")
def trilinear(call: Call) -> Counts:
    """Count two products: that of the first two operands, and that with the third.

    Each operand lacks the axes in its `expand` list. Axes in `sumdim` are summed in the first product if the third
    operand lacks them, else in the second.
    """
    sizes: dict[int, Poly] = {}
    operand_axes: list[set[int]] = []
    rank = len(call["i1"].sizes) + len(call["expand1"])
    for i in (1, 2, 3):
        operand: Spec = call[f"i{i}"]
        axes = [a for a in range(rank) if a not in call[f"expand{i}"]]
        sizes |= {a: n for a, n in zip(axes, operand.sizes, strict=True) if a not in sizes or n != 1}
        operand_axes.append(set(axes))
    summed = set(call["sumdim"])
    summed_first = {a for a in summed if a not in operand_axes[2]}
    first = operand_axes[0] | operand_axes[1]
    second = (first - summed_first) | operand_axes[2]
    if not summed_first <= first:
        raise unsupported(call, f"sumdim is {sorted(summed)}", "axes of an operand")
    parts = []
    for axes_read, sums in ((first, summed_first), (second, summed - summed_first)):
        points = product(sizes[a] for a in axes_read)
        parts.append(_matmul(points) if sums else per_element(points, "mul"))
    return combined(*parts)


@rule("costgraph.linear_dynamic")
def linear_dynamic(call: Call) -> Counts:
    """Count the matmul, quantizing the operand by its range, and dequantizing the result.

    The kernel accumulates in an int32 buffer (`ao/quantized/cpu/qlinear_dynamic.cpp`); fp16 weights need no such steps.
    """
    x, weight, out = call["input"], call["weight"], call.out
    biased = per_element(out.numel, "add") if call.get("bias") is not None else Counts()
    product_ = Counts(matmul=2 * x.numel * weight.sizes[0])
    if weight.dtype.kind == "float":
        return combined(product_, biased)
    steps = Counts(pointwise=x.numel * (2 + 4) + out.numel * 2, workspace=4 * out.numel)
    return combined(product_, steps, biased)


# -- decompositions ----------------------------------------------------------------------------------------------------


def _matrix(call: Call, name: str = "") -> tuple[Poly, Poly, Poly]:
    """Return batch, rows and columns of an operand, by default the first."""
    operand: Spec = call[name] if name else call.operands[0]
    *lead, rows, columns = operand.sizes
    return prod(lead, start=ONE), rows, columns


def _lu_flops(n: Poly) -> Poly:
    """Return the cost of LU: step k has k quotients and k*k multiply-subtracts, k = 1..n - 1; 2*n**3/3 in total."""
    return n * (n - 1) / 2 + n * (n - 1) * (2 * n - 1) / 3


def _householder_flops(rows: Poly, columns: Poly) -> Poly:
    """Return the cost of one-sided Householder reflections: 4 per element of the remaining submatrix.

    The submatrix is (m - n + i) x i for i = n..1; 2*n**2*(m - n/3) in total.
    """
    n, m = smaller(rows, columns), rows + columns - smaller(rows, columns)
    return 2 * (m - n) * n * (n + 1) + n * (n + 1) * (2 * n + 1) * 2 / 3


@rule("linalg_lu_factor_ex", "_linalg_det", "_linalg_slogdet", "linalg_lu")
def factored(call: Call) -> Counts:
    """Count an LU decomposition; multiplying its diagonal is a lower-order term."""
    batch, n, _ = _matrix(call)
    return Counts(pointwise=batch * _lu_flops(n))


@rule("linalg_cholesky_ex", "cholesky", "linalg_ldl_factor_ex")
def cholesky(call: Call) -> Counts:
    """Count a root, k quotients and k*(k + 1) multiply-subtracts per step; n**3/3 in total."""
    batch, n, _ = _matrix(call)
    pointwise = batch * (n * (n - 1) / 2 + (n - 1) * n * (n + 1) / 3)
    return Counts(pointwise=pointwise, transcendental=batch * n)


@rule("linalg_inv_ex", "cholesky_inverse")
def inverse(call: Call) -> Counts:
    """Count an LU decomposition and two triangular solves per column of the identity."""
    batch, n, _ = _matrix(call)
    return Counts(pointwise=batch * (_lu_flops(n) + 2 * n**3))


def _columns(right: Spec, matrix: Spec) -> Poly:
    """Return the number of right-hand sides over all batch entries."""
    return right.numel / matrix.sizes[-1]


@rule("linalg_solve_triangular", "triangular_solve")
def triangular(call: Call) -> Counts:
    """Count n**2 per right-hand side; a broadcast matrix is copied per batch entry."""
    a: Spec = call["self"] if "B" in call.arguments else call["A"]
    matrix_bytes = prod(call.out.sizes[:-2], start=ONE) * a.sizes[-1] ** 2 * a.dtype.bytes
    copied = ZERO if matrix_bytes == a.bytes else matrix_bytes
    return Counts(pointwise=_columns(call.out, a) * a.sizes[-1] ** 2, workspace=copied)


@rule("_linalg_solve_ex")
def solved(call: Call) -> Counts:
    """Count an LU decomposition and two triangular solves per right-hand side."""
    a: Spec = call["A"]
    solves = 2 * _columns(call["B"], a) * a.sizes[-1] ** 2
    batch, n, _ = _matrix(call, "A")
    return Counts(pointwise=batch * _lu_flops(n) + solves)


@rule("linalg_lu_solve", "linalg_ldl_solve", "cholesky_solve", "_cholesky_solve_helper")
def solved_from_factors(call: Call) -> Counts:
    """Count two triangular solves per right-hand side."""
    a = next(call[n] for n in ("LU", "LD", "A", "input2") if n in call.arguments)
    right = call["B"] if "B" in call.arguments else call["self"]
    return Counts(pointwise=2 * _columns(right, a) * a.sizes[-1] ** 2)


@rule("linalg_qr", "geqrf")
def orthogonal(call: Call) -> Counts:
    """Count the reflections, and as many again to form Q."""
    batch, rows, columns = _matrix(call)
    without_q = call.name == "geqrf" or call.get("mode") == "r"
    return Counts(pointwise=batch * _householder_flops(rows, columns) * (1 if without_q else 2))


@rule("linalg_householder_product", "ormqr")
def reflections(call: Call) -> Counts:
    """Count the product of reflections."""
    batch, rows, columns = _matrix(call)
    return Counts(pointwise=batch * _householder_flops(rows, columns))


@rule("_linalg_eigh")
def symmetric(call: Call) -> Counts:
    """Count 9*n**3 with vectors; without, a tridiagonal form: 4*k*k per step, 4*n**3/3 in total."""
    batch, n, _ = _matrix(call)
    return Counts(pointwise=batch * (9 * n**3 if call.get("compute_v") else (n - 1) * n * (2 * n - 1) * 2 / 3))


@rule("linalg_eig", "_linalg_eigvals")
def eigenvalues(call: Call) -> Counts:
    """Count 25*n**3 with vectors, 10*n**3 without."""
    batch, n, _ = _matrix(call)
    return Counts(pointwise=batch * n**3 * (25 if call.name == "linalg_eig" else 10))


@rule("_linalg_svd")
def singular(call: Call) -> Counts:
    """Count 4*m**2*n + 8*m*n**2 + 9*n**3 with vectors; without, two-sided reflections."""
    batch, rows, columns = _matrix(call)
    n, m = smaller(rows, columns), rows + columns - smaller(rows, columns)
    if call.get("compute_uv"):
        return Counts(pointwise=batch * (4 * m**2 * n + 8 * m * n**2 + 9 * n**3))
    # from the right, each step has one column less: 4*(m - n + i)*(i - 1), i = n..1
    return Counts(
        pointwise=batch * (_householder_flops(m, n) + 2 * (m - n) * n * (n - 1) + (n - 1) * n * (n + 1) * 4 / 3)
    )


@rule("linalg_pinv.atol_rtol_tensor")
def pseudoinverse(call: Call) -> Counts:
    """Count an SVD with vectors, their scaling by the reciprocals, and one matmul."""
    batch, rows, columns = _matrix(call)
    n, m = smaller(rows, columns), rows + columns - smaller(rows, columns)
    pointwise = batch * (4 * m**2 * n + 8 * m * n**2 + 9 * n**3 + n * columns)
    return Counts(matmul=2 * batch * rows * columns * n, pointwise=pointwise)


# -- Fourier transforms ------------------------------------------------------------------------------------------


@rule("_fft_c2c", "_fft_r2c")
def transformed(call: Call) -> Counts:
    """Count 5*n*ceil(log2(n)) per complex transform, and half for real input, whose spectrum is symmetric."""
    factor = 1 if call.name == "_fft_c2c" else Fraction(1, 2)
    return _transforms(call, call["self"], factor, joined(call["self"], _axes(call)))


@rule("_fft_c2r")
def to_real(call: Call) -> Counts:
    """Count half of a complex transform; all axes but the last are transformed first, into a temporary."""
    operand: Spec = call["self"]
    *first_axes, last_axis = _axes(call)
    extra = operand.bytes + joined(operand, first_axes) if first_axes else joined(operand, [last_axis])
    return _transforms(call, call.out, Fraction(1, 2), extra)


def _axes(call: Call) -> list[int]:
    return [d % len(call.out.sizes) for d in call["dim"]]


def _transforms(call: Call, operand: Spec, factor: Fraction | int, workspace: Poly) -> Counts:
    length = prod((operand.sizes[d] for d in call["dim"]), start=ONE)
    return Counts(pointwise=transform_flops(operand.numel, length) * factor, workspace=workspace)


# -- distances ---------------------------------------------------------------------------------------------------


def _rows(call: Call) -> Spec:
    """Return the rows whose distances are computed."""
    rows: Spec = call["x1" if "x1" in call.arguments else "self"]
    return rows


@rule("_cdist_forward", "_pdist_forward")
def distances(call: Call) -> Counts:
    """Count difference and norm per pair of rows."""
    x, pairs = _rows(call), call.out.numel
    differences = Spec((pairs, x.sizes[-1]), (x.sizes[-1], ONE), x.dtype)
    return combined(per_element(differences.numel, "sub"), norm_of(differences, call["p"], pairs))


@rule("_cdist_backward", "_pdist_backward")
def distances_backward(call: Call) -> Counts:
    """Count per pair of rows: the recomputed difference, its share of the gradient, the sums, and a quotient."""
    pairs = call["grad"].numel
    shares = ("sub", "mul", "add") if is_number(call["p"], 2) else ("sub", "abs", "pow", "sign", "mul", "mul", "add")
    sums = ("sub",) if call.name == "_pdist_backward" else ()
    return combined(per_element(pairs * _rows(call).sizes[-1], *shares, *sums), per_element(pairs, "div"))


@rule("renorm")
def renormed(call: Call) -> Counts:
    """Count the norm of each slice, a comparison and a quotient per slice, and a product per element."""
    operand: Spec = call["self"]
    slices = operand.sizes[call["dim"]]
    return combined(
        norm_of(operand, call["p"], slices),
        per_element(slices, "less", "div", "where"),
        per_element(operand.numel, "mul"),
    )


# -- convolution -------------------------------------------------------------------------------------------------------


def _points(slid: Spec, weight: Spec) -> Poly:
    """Return the multiply-adds: the elements of the weight, for each batch entry and window position.

    The weight has shape (output channels, input channels per group, *window). Window positions are those of the result
    or, if transposed, of the operand. Padding counts: kernels multiply by its zeros.
    """
    return slid.sizes[0] * prod(slid.sizes[2:], start=ONE) * weight.numel


def _forward(call: Call, operand: Spec, result: Spec, transposed: bool) -> Counts:
    matmul = Counts(matmul=2 * _points(operand if transposed else result, call["weight"]))
    return combined(matmul, per_element(result.numel, "add")) if call.get("bias") is not None else matmul


@rule("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "cudnn_convolution",
      "cudnn_convolution_transpose", "miopen_convolution", "miopen_convolution_transpose",
      "miopen_depthwise_convolution", "_slow_conv2d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d",
      "slow_conv3d_forward", "slow_conv_transpose2d", "slow_conv_transpose3d", "_conv_depthwise2d",
      "conv_depthwise3d")  # fmt: skip
def convolution(call: Call) -> Counts:
    """Count 2 per multiply-add, and the addition of a bias."""
    operand: Spec = call.get("input") or call["self"]
    transposed = bool(call.get("transposed")) or "transpose" in call.name
    return _forward(call, _batched(operand, call), _batched(call.out, call), transposed)


def _batched(t: Spec, call: Call) -> Spec:
    """Return a tensor with a batch axis, which is optional."""
    weight: Spec = call["weight"]
    return t if len(t.sizes) == len(weight.sizes) else Spec((ONE, *t.sizes), (ONE, *t.strides), t.dtype)


@rule("cudnn_convolution_relu", "cudnn_convolution_add_relu")
def with_activation(call: Call) -> Counts:
    """Count the convolution, the addition of another tensor if there is one, and the ReLU."""
    added = ("add", "mul") if "add" in call.name else ()
    return combined(convolution(call), per_element(call.out.numel, *added, "relu"))


@rule("convolution_backward", "convolution_backward_overrideable")
def convolution_backward(call: Call) -> Counts:
    """Count as many multiply-adds per gradient of operand and weight as the convolution has.

    The gradient of a bias is a sum over batch and positions.
    """
    grad, operand = call["grad_output"], call["input"]
    slid = operand if call["transposed"] else grad
    mask: Any = call["output_mask"]
    product = Counts(matmul=2 * _points(slid, call["weight"]))
    bias = per_element(grad.numel, REDUCE) if mask[2] else Counts()
    return combined(*(product for requested in mask[:2] if requested), bias)


@rule("conv_tbc")
def over_time(call: Call) -> Counts:
    """Count 2 per multiply-add: weight (window, input channels, output channels), result (time, batch, channels)."""
    positions = call.out.sizes[0] * call.out.sizes[1]
    return combined(Counts(matmul=2 * positions * call["weight"].numel), per_element(call.out.numel, "add"))
