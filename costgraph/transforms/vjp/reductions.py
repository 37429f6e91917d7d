"""Gradients of reductions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...algebra.polynomial import ONE, Poly
from ...errors import UnsupportedError
from ...graph.tensor import Tensor
from ...ops.pointwise import pointwise
from ...ops.reduce import Reduce, reduce
from .common import expanded
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES


@vjp(Reduce)
def _reduce(pull: Pull[Reduce]) -> Sequence[Tensor | None]:
    (g,), op = pull.grads, pull.op
    (x,), operation = op.operands, pull.kind.operation
    if g is None or not pull.needs[0] or operation in ("any", "all", "argmax", "argmin"):
        return [None]
    if operation == "sum":
        return [_spread(pull, g)]
    if operation == "mean":
        return [pointwise("div", _spread(pull, g), _count(pull))]
    if operation == "prod":
        product = _spread(pull, pointwise("mul", g, pull.saved(op.results[0])))
        return [pointwise("div", product, pull.saved(x))]
    names = [f"n{i}" for i in range(x.ndim)]
    ties = pointwise("eq", pull.saved(x), _spread(pull, pull.saved(op.results[0])))
    gone = _reduced(pull)
    many = reduce(ties, f"{' '.join(names)} -> {' '.join('1' if i in gone else n for i, n in enumerate(names))}", "sum")
    share = pointwise("div", expanded(g, many.sizes, _places(pull)), many)  # torch's `scale_grad_by_count`
    return [pointwise("mul", share, ties, dtype=x.dtype)]


def _reduced(pull: Pull[Reduce]) -> list[int]:
    """Return the places of the axes that are reduced."""
    pattern = pull.kind.pattern
    return [i for i, n in enumerate(pattern.operand_names(0)) if n not in pattern.result_names]


def _spread(pull: Pull[Reduce], t: Tensor) -> Tensor:
    """Return something of the shape of the result as a view of the shape of the operand."""
    (x,) = pull.op.operands
    return expanded(t, x.sizes, _places(pull), x)


def _places(pull: Pull[Reduce]) -> list[int | None]:
    """Return which axis of the result each one of the operand is, None of those that are reduced."""
    pattern = pull.kind.pattern
    places = [a.names for a in pattern.result]
    return [places.index(a.names) if a.names in places else None for a in pattern.operands[0]]


def _count(pull: Pull[Reduce]) -> Poly | int:
    """Return how many elements there are to a mean."""
    (x,) = pull.op.operands
    if x.domain is not None:
        raise UnsupportedError(f"backward of {pull.op.name!r}: mean of {x!r}, expected one that is whole")
    count = prod((x.sizes[i] for i in _reduced(pull)), start=ONE)
    return count if count.constant is None else int(count.constant)
