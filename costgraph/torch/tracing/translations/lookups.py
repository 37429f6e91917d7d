"""Lookups by index, and what adds to rows."""

from __future__ import annotations

from ....graph.tensor import Tensor
from ....ops.fill import fill
from ....ops.index import gather, scatter, take_along
from ..call import Call
from .table import translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS


@translation("embedding")
def embedding(call: Call) -> Tensor:
    """Rows of a table."""
    return gather(call["weight"], call["indices"])


@translation("embedding_dense_backward")
def embedding_backward(call: Call) -> Tensor | None:
    """Gradients added to rows of zeros."""
    if call["scale_grad_by_freq"]:
        return None
    grad: Tensor = call["grad_output"]
    return scatter(fill(call.out.sizes, 0, grad.dtype), call["indices"], grad)


@translation("index_select")
def selected(call: Call) -> Tensor | None:
    """Rows of the first axis."""
    return gather(call["self"], call["index"]) if call["dim"] == 0 and call["index"].ndim else None


@translation("index")
def indexed(call: Call) -> Tensor | None:
    """Rows of the first axis by one tensor of integers."""
    indices = [t for t in call["indices"] if t is not None]
    if len(indices) != 1 or call["indices"][0] is None or indices[0].dtype.kind != "int":
        return None
    return gather(call["self"], indices[0])


@translation("gather")
def picked(call: Call) -> Tensor | None:
    """Elements along the last axis."""
    x, ids = call["self"], call["index"]
    last = x.ndim > 0 and call["dim"] % x.ndim == x.ndim - 1
    return take_along(x, ids) if last and x.sizes[:-1] == ids.sizes[:-1] else None
