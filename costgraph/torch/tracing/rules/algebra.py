"""Decompositions, solvers, transforms and distances: the steps that textbooks count.

Matrices of size n; Golub and Van Loan, Matrix Computations, 4th edition: triangular solves (3.1), LU (3.2), Cholesky
(4.2), Householder's reflections (5.1, 5.2), tables for eigenvalues (7.5, 8.3) and singular values (8.6). Sums over the
steps are exact, where the book states their leading term; pivoting and iterations up to convergence are as there.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

from ....algebra.extremum import smaller
from ....algebra.polynomial import ONE, ZERO, Poly
from ....ops.spectra import joined, transform_flops
from ..call import Call, Counts, Spec
from .amounts import each, is_number, together
from .reductions import norm_of
from .table import rule

__all__: list[str] = []  # its rules are found in RULES


def _matrix(call: Call, name: str = "") -> tuple[Poly, Poly, Poly]:
    """Return batch, rows and columns of an operand, by default the first one."""
    operand: Spec = call[name] if name else call.operands[0]
    *lead, rows, columns = operand.sizes
    return prod(lead, start=ONE), rows, columns


def _eliminated(n: Poly) -> Poly:
    """Return the cost of LU: at step k, k quotients and k*k products and differences, k = 1..n - 1; 2*n**3/3 in all."""
    return n * (n - 1) / 2 + n * (n - 1) * (2 * n - 1) / 3


def _reflected(rows: Poly, columns: Poly) -> Poly:
    """Return the cost of Householder's reflections from one side: 4 for each element of the part that is left.

    The part left is (m - n + i) x i for i = n..1; 2*n**2*(m - n/3) in all.
    """
    n, m = smaller(rows, columns), rows + columns - smaller(rows, columns)
    return 2 * (m - n) * n * (n + 1) + n * (n + 1) * (2 * n + 1) * 2 / 3


@rule("linalg_lu_factor_ex", "_linalg_det", "_linalg_slogdet", "linalg_lu")
def factored(call: Call) -> Counts:
    """Count an LU decomposition; the product of its diagonal is of lower order."""
    batch, n, _ = _matrix(call)
    return Counts(pointwise=batch * _eliminated(n))


@rule("linalg_cholesky_ex", "cholesky", "linalg_ldl_factor_ex")
def cholesky(call: Call) -> Counts:
    """Count a root, k quotients and k*(k + 1) products and differences at each step; n**3/3 in all."""
    batch, n, _ = _matrix(call)
    pointwise = batch * (n * (n - 1) / 2 + (n - 1) * n * (n + 1) / 3)
    return Counts(pointwise=pointwise, transcendental=batch * n)


@rule("linalg_inv_ex", "cholesky_inverse")
def inverse(call: Call) -> Counts:
    """Count an LU decomposition and two triangular solves for each column of a unit matrix."""
    batch, n, _ = _matrix(call)
    return Counts(pointwise=batch * (_eliminated(n) + 2 * n**3))


def _columns(right: Spec, matrix: Spec) -> Poly:
    """Return the columns of right sides, all batch entries together."""
    return right.numel / matrix.sizes[-1]


@rule("linalg_solve_triangular", "triangular_solve")
def triangular(call: Call) -> Counts:
    """Count n**2 for each column; a matrix that stands for several is copied for each of them."""
    a: Spec = call["self"] if "B" in call.arguments else call["A"]
    each_one = prod(call.out.sizes[:-2], start=ONE) * a.sizes[-1] ** 2 * a.dtype.bytes
    copied = ZERO if each_one == a.bytes else each_one
    return Counts(pointwise=_columns(call.out, a) * a.sizes[-1] ** 2, workspace=copied)


@rule("_linalg_solve_ex")
def solved(call: Call) -> Counts:
    """Count an LU decomposition and two triangular solves for each column."""
    a: Spec = call["A"]
    solves = 2 * _columns(call["B"], a) * a.sizes[-1] ** 2
    batch, n, _ = _matrix(call, "A")
    return Counts(pointwise=batch * _eliminated(n) + solves)


@rule("linalg_lu_solve", "linalg_ldl_solve", "cholesky_solve", "_cholesky_solve_helper")
def solved_again(call: Call) -> Counts:
    """Count two triangular solves for each column."""
    a = next(call[n] for n in ("LU", "LD", "A", "input2") if n in call.arguments)
    right = call["B"] if "B" in call.arguments else call["self"]
    return Counts(pointwise=2 * _columns(right, a) * a.sizes[-1] ** 2)


@rule("linalg_qr", "geqrf")
def orthogonal(call: Call) -> Counts:
    """Count reflections, and as many again where Q is made."""
    batch, rows, columns = _matrix(call)
    alone = call.name == "geqrf" or call.get("mode") == "r"
    return Counts(pointwise=batch * _reflected(rows, columns) * (1 if alone else 2))


@rule("linalg_householder_product", "ormqr")
def reflections(call: Call) -> Counts:
    """Count the product of reflections."""
    batch, rows, columns = _matrix(call)
    return Counts(pointwise=batch * _reflected(rows, columns))


@rule("_linalg_eigh")
def symmetric(call: Call) -> Counts:
    """Count 9*n**3 with vectors, without them a tridiagonal form: 4*k*k at each step, 4*n**3/3 in all."""
    batch, n, _ = _matrix(call)
    return Counts(pointwise=batch * (9 * n**3 if call.get("compute_v") else (n - 1) * n * (2 * n - 1) * 2 / 3))


@rule("linalg_eig", "_linalg_eigvals")
def eigenvalues(call: Call) -> Counts:
    """Count 25*n**3 with vectors, 10*n**3 without."""
    batch, n, _ = _matrix(call)
    return Counts(pointwise=batch * n**3 * (25 if call.name == "linalg_eig" else 10))


@rule("_linalg_svd")
def singular(call: Call) -> Counts:
    """Count 4*m**2*n + 8*m*n**2 + 9*n**3 with vectors, without them reflections from both sides."""
    batch, rows, columns = _matrix(call)
    n, m = smaller(rows, columns), rows + columns - smaller(rows, columns)
    if call.get("compute_uv"):
        return Counts(pointwise=batch * (4 * m**2 * n + 8 * m * n**2 + 9 * n**3))
    # from the right at each step one column less: 4*(m - n + i)*(i - 1), i = n..1
    return Counts(pointwise=batch * (_reflected(m, n) + 2 * (m - n) * n * (n - 1) + (n - 1) * n * (n + 1) * 4 / 3))


@rule("linalg_pinv.atol_rtol_tensor")
def pseudoinverse(call: Call) -> Counts:
    """Count singular values with their vectors, the vectors by the reciprocals, and one matrix product."""
    batch, rows, columns = _matrix(call)
    n, m = smaller(rows, columns), rows + columns - smaller(rows, columns)
    pointwise = batch * (4 * m**2 * n + 8 * m * n**2 + 9 * n**3 + n * columns)
    return Counts(matmul=2 * batch * rows * columns * n, pointwise=pointwise)


# -- Fourier transforms ------------------------------------------------------------------------------------------


@rule("_fft_c2c", "_fft_r2c")
def transformed(call: Call) -> Counts:
    """Count 5*n*ceil(log2(n)) for each complex transform; of real numbers half, as half of the spectrum is known."""
    factor = 1 if call.name == "_fft_c2c" else Fraction(1, 2)
    return _along(call, call["self"], factor, joined(call["self"], _axes(call)))


@rule("_fft_c2r")
def to_real(call: Call) -> Counts:
    """Count half of it too; the axes but the last one are transformed before, into a tensor of their own."""
    operand: Spec = call["self"]
    *before, last = _axes(call)
    extra = operand.bytes + joined(operand, before) if before else joined(operand, [last])
    return _along(call, call.out, Fraction(1, 2), extra)


def _axes(call: Call) -> list[int]:
    return [d % len(call.out.sizes) for d in call["dim"]]


def _along(call: Call, operand: Spec, factor: Fraction | int, workspace: Poly) -> Counts:
    length = prod((operand.sizes[d] for d in call["dim"]), start=ONE)
    return Counts(pointwise=transform_flops(operand.numel, length) * factor, workspace=workspace)


# -- distances ---------------------------------------------------------------------------------------------------


def _rows(call: Call) -> Spec:
    """Return the rows between which distances are: of two matrices, or of one."""
    found: Spec = call["x1" if "x1" in call.arguments else "self"]
    return found


@rule("_cdist_forward", "_pdist_forward")
def distances(call: Call) -> Counts:
    """Count difference and norm for each pair of rows."""
    x, pairs = _rows(call), call.out.numel
    seen = Spec((pairs, x.sizes[-1]), (x.sizes[-1], ONE), x.dtype)
    return together(each(seen.numel, "sub"), norm_of(seen, call["p"], pairs))


@rule("_cdist_backward", "_pdist_backward")
def distances_backward(call: Call) -> Counts:
    """Count the difference again for each pair of rows, its share and its sum, or both; a quotient for each pair."""
    pairs = call["grad"].numel
    shares = ("sub", "mul", "add") if is_number(call["p"], 2) else ("sub", "abs", "pow", "sign", "mul", "mul", "add")
    sums = ("sub",) if call.name == "_pdist_backward" else ()
    return together(each(pairs * _rows(call).sizes[-1], *shares, *sums), each(pairs, "div"))


@rule("renorm")
def renormed(call: Call) -> Counts:
    """Count the norm of each slice, a comparison and a quotient for each, and a product for each element."""
    operand: Spec = call["self"]
    slices = operand.sizes[call["dim"]]
    return together(
        norm_of(operand, call["p"], slices), each(slices, "less", "div", "where"), each(operand.numel, "mul")
    )
