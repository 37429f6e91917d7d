"""Matrix products, and what is added to them."""

from __future__ import annotations

from ....graph.graph import apply
from ....graph.tensor import Tensor
from ....ops.contraction import Einsum
from ....ops.einsum import einsum
from ....ops.grouped import Grouped, grouped_outer
from ....ops.layout import permute
from ....ops.pointwise import pointwise
from ..call import Call
from ..rules.amounts import is_number
from .table import translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS

_PATTERNS = {
    "mm": "m k, k n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "addmm": "m k, k n -> m n",
    "_int_mm": "m k, k n -> m n",
    "baddbmm": "b m k, b k n -> b m n",
    "addbmm": "b m k, b k n -> m n",
    "mv": "m k, k -> m",
    "addmv": "m k, k -> m",
    "dot": "k, k -> ",
    "vdot": "k, k -> ",
}


@translation("mm", "bmm", "mv", "dot", "vdot", "_int_mm")
def multiply(call: Call) -> Tensor | None:
    """A product of two matrices, of a batch of them, or of vectors, of which the first would be conjugate."""
    second = {"mv": "vec", "dot": "tensor", "vdot": "other"}.get(call.name, "mat2")
    if call.name == "vdot" and call["self"].dtype.kind == "complex":
        return None
    made = einsum(call["self"], call[second], _PATTERNS[call.name])
    if call.name in ("mm", "bmm") and made.producer is not None and isinstance(made.producer.kind, Einsum):
        made.producer.state(order=(1, 0))  # autograd computes gradients by the names of arguments, mat2 before self
    return made


_FACTORS = {
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "addbmm": ("batch1", "batch2"),
    "addmv": ("mat", "vec"),
}


@translation(*_FACTORS)
def add_product(call: Call) -> Tensor:
    """A product, scaled perhaps, and what is added to it."""
    first, second = (call[n] for n in _FACTORS[call.name])
    made = einsum(first, second, _PATTERNS[call.name])
    if not is_number(call["alpha"], 1):
        made = made * call["alpha"]
    if is_number(call["beta"], 0):
        return made
    added: Tensor = call["self"] if is_number(call["beta"], 1) else call["self"] * call["beta"]
    return pointwise("add", made, added, inplace=False)


@translation("linear", "mkldnn_linear")
def linear(call: Call) -> Tensor:
    """Rows by the rows of a weight, and a bias."""
    x, w = call.get("input") or call["self"], call["weight"]
    names = " ".join(f"b{i}" for i in range(x.ndim - 1))
    made = einsum(x, w, f"{names} k, n k -> {names} n")
    return made if call.get("bias") is None else made + call["bias"]


@translation("_grouped_mm")
def grouped(call: Call) -> Tensor | None:
    """Rows, or columns, by the matrix of their group; or the rows of each group by those of another operand."""
    x, y, ends = call["self"], call["mat2"], call.get("offs")
    if call.get("bias") is not None or call.get("out_dtype") is not None:
        return None
    if ends is None:
        return einsum(x, y, _PATTERNS["bmm"])
    if (x.ndim, y.ndim) == (2, 2):
        return grouped_outer(permute(x, (1, 0)), y, ends)
    every = Grouped(routing="capacity", chosen=ends.sizes[0])  # where rows go is data: all weights are read
    if x.ndim == 2:
        return apply(every, [x, y, ends], "grouped")[0]
    rows = apply(every, [permute(y, (1, 0)), permute(x, (0, 2, 1)), ends], "grouped")[0]
    return permute(rows, (1, 0))


@translation("addr")
def add_outer(call: Call) -> Tensor:
    """The products of all pairs of two vectors, scaled perhaps, and what is added to them."""
    made = einsum(call["vec1"], call["vec2"], "m, n -> m n")
    made = made if is_number(call["alpha"], 1) else made * call["alpha"]
    if is_number(call["beta"], 0):
        return made
    return pointwise("add", made, call["self"] if is_number(call["beta"], 1) else call["self"] * call["beta"])
