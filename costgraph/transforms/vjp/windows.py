"""Gradient of pooling."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UnsupportedError
from ...graph.graph import apply
from ...graph.tensor import Tensor
from ...ops.pooling import Pool, Unpool
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES


@vjp(Pool)
def _pool(pull: Pull[Pool]) -> Sequence[Tensor | None]:
    """Give each window's gradient to its elements; torch keeps the input of the pooling for its shape."""
    g, op, kind = pull.grads[0], pull.op, pull.kind
    if g is None or not pull.needs[0]:
        return [None]
    operands = [g, pull.saved(op.operands[0])]
    if kind.operation == "max":
        if len(op.results) < 2:
            raise UnsupportedError(
                f"backward of {op.name!r}: the pooling does not keep where its maxima stand, expected attribute "
                f"'indices'"
            )
        operands.append(pull.saved(op.results[1]))
    back = Unpool(pattern=kind.pattern, extents=kind.extents, operation=kind.operation, inside=kind.inside)
    return apply(back, operands, "unpool")
