"""Python operators on tensors."""

from __future__ import annotations

from ..algebra.symbols import kind_of
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    OPERATORS,
    Tensor,
    need_tensor,
    transactional,
)
from .einsum import einsum
from .elementwise import pointwise
from .layout import index, rearrange

__all__ = ["matmul", "transpose"]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices along the last two axes, as `numpy.matmul`; the other axes broadcast.

    Parameters
    ----------
    a, b : Tensor
        At least one axis each; a tensor with a single axis is a vector.

    Returns
    -------
    Tensor
        Result of an einsum.

    Raises
    ------
    GraphError, ShapeError
        If an operand is a scalar or not a tensor, or sizes do not fit.
    """
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise GraphError(f"@ of {kind_of(a)} and {kind_of(b)}, expected two tensors")
    if not a.ndim or not b.ndim:
        raise ShapeError(f"@ of {a!r} and {b!r}: expected at least one axis each")
    batch = [f"b{i}" for i in range(max(a.ndim, b.ndim) - 2)][::-1]
    a_names = [*batch[len(batch) - (a.ndim - 2) :], "i", "k"] if a.ndim > 1 else ["k"]
    b_names = [*batch[len(batch) - (b.ndim - 2) :], "k", "j"] if b.ndim > 1 else ["k"]
    result_names = [*batch, *(["i"] if a.ndim > 1 else []), *(["j"] if b.ndim > 1 else [])]
    for t, names in ((a, a_names), (b, b_names)):
        for i, n in enumerate(names[: max(t.ndim - 2, 0)]):
            # broadcast a batch axis of size 1
            other = b if t is a else a
            if (
                t.sizes[i] == 1
                and n in (b_names if t is a else a_names)
                and other.sizes[(b_names if t is a else a_names).index(n)] != 1
            ):
                names[i] = "1"
    return einsum(a, b, f"{' '.join(a_names)}, {' '.join(b_names)} -> {' '.join(result_names)}", name="matmul")


def transpose(x: Tensor) -> Tensor:
    """Transpose the last two axes: a view."""
    need_tensor("transpose", x)
    if x.ndim < 2:
        raise ShapeError(f"transpose of {x!r}: expected at least two axes")
    return rearrange(x, "... i j -> ... j i", name="transpose")


def _binary(function: str) -> None:
    def operator(a: object, b: object) -> Tensor:
        return pointwise(function, a, b)  # raises if an operand is not a number

    OPERATORS[function] = operator


for _function in ("add", "sub", "mul", "div", "pow", "less", "less_equal"):
    _binary(_function)
OPERATORS["neg"] = lambda x: pointwise("neg", x)
OPERATORS["matmul"] = matmul
OPERATORS["index"] = index
OPERATORS["transpose"] = transpose
OPERATORS.update({name: transactional(function, name) for name, function in OPERATORS.items()})
