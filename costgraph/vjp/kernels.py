"""Rules of fused kernels that have one of their own, as torch has a function for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..op import Op
from ..ops.blocks import kernel
from ..ops.pointwise import cast, pointwise
from ..ops.reduce import reduce
from ..scopes import building
from ..tensor import Tensor
from .table import Pull, Rule

__all__ = ["KERNELS", "REBUILD"]

Made = Callable[[Callable[[Tensor], Tensor]], Tensor]
Rebuild = Callable[[Op], tuple[Mapping[Tensor, Made], set[Tensor]]]


def _rows(op: Op) -> tuple[str, str]:
    """Return patterns of what a kernel runs over and of one number a row: its body reduces some axes to size 1."""
    assert op.body is not None
    inner = next(o for o in op.body.ops if o.kind.name == "reduce")
    pattern = inner.attrs["pattern"]
    return " ".join(map(str, pattern.operands[0])), " ".join(map(str, pattern.result))


def softmax(pull: Pull) -> tuple[Tensor | None]:
    """Return y * (g - sum(g * y)): reads the result alone."""
    g, (names, kept) = pull.grads[0], _rows(pull.op)
    y = pull.saved(pull.op.results[0])
    assert g is not None
    with kernel("softmax_backward") as body:
        along = reduce(g * y, f"{names} -> {kept}", "sum")
        made = y * (g - along)
    return (body.export(made),)


def log_softmax(pull: Pull) -> tuple[Tensor | None]:
    """Return g - exp(y) * sum(g): reads the result alone."""
    g, (names, kept) = pull.grads[0], _rows(pull.op)
    y = pull.saved(pull.op.results[0])
    assert g is not None
    with kernel("log_softmax_backward") as body:
        made = g - pointwise("exp", y) * reduce(g, f"{names} -> {kept}", "sum")
    return (body.export(made),)


def _flash(op: Op) -> tuple[Mapping[Tensor, Made], set[Tensor]]:
    """Let the forward kernel write the logarithm of each row's sum, from which the probabilities come back."""
    assert op.body is not None
    probabilities = next(o for o in op.body.ops if o.attrs.get("backward") == "softmax")
    inner = probabilities.body
    assert inner is not None
    scores = probabilities.operands[0]
    largest = next(o.results[0] for o in inner.ops if o.attrs.get("operation") == "max")
    sums = next(o.results[0] for o in inner.ops if o.attrs.get("operation") == "sum")
    with building(inner):
        made = cast(largest + pointwise("log", sums), "fp32" if scores.dtype.bits < 32 else scores.dtype)
    statistic = inner.export(made)

    def rebuilt(saved: Callable[[Tensor], Tensor]) -> Tensor:
        return cast(pointwise("exp", saved(scores) - saved(statistic)), scores.dtype)

    return {probabilities.results[0]: rebuilt}, {statistic}


#: Rules of kernels by the name in their attribute `backward`.
KERNELS: dict[str, Rule] = {"softmax": softmax, "log_softmax": log_softmax}
#: How to get tensors inside a kernel back without computing again all that made them, and what is saved for that.
REBUILD: dict[str, Rebuild] = {"flash": _flash}
