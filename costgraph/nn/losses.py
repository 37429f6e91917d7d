"""Training losses."""

from __future__ import annotations

from ..errors import ShapeError
from ..ir.graph import Tensor, current_graph, module, need_tensor
from ..ops.elementwise import pointwise
from ..ops.index import take_along
from ..ops.layout import reshape
from ..ops.reduce import reduce
from .activations import log_softmax, one_kernel

__all__ = ["binary_cross_entropy", "cross_entropy"]


def binary_cross_entropy(p: Tensor, targets: Tensor, *, name: str = "binary_cross_entropy") -> Tensor:
    """Return the mean binary cross-entropy in one kernel, as torch.nn.BCELoss.

    Parameters
    ----------
    p : Tensor
        Probabilities of class 1, any shape.
    targets : Tensor
        Targets, same shape.
    name : str
        Kernel name.

    Returns
    -------
    Tensor
        A scalar. FLOPs per element: 2 logarithms and 7 others, including the mean.

    Raises
    ------
    ShapeError
        If shapes differ.

    Examples
    --------
    >>> import costgraph as cg
    >>> B = cg.dims("B")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.binary_cross_entropy(g.input("p", (B,)), g.input("targets", (B,))))
    >>> g.outputs[0].shape, cg.bytes_moved(g)
    ((), 8*B + 4)
    """
    need_tensor("binary_cross_entropy", p, targets)
    if p.ndim != targets.ndim or not all(map(p.graph.same, p.sizes, targets.sizes)):
        raise ShapeError(f"binary_cross_entropy of {p!r} and {targets!r}: expected equal shapes")

    def body(p: Tensor, targets: Tensor) -> Tensor:
        losses = (targets - 1) * pointwise("log", 1 - p) - targets * pointwise("log", p)
        names = " ".join(f"a{i}" for i in range(p.ndim))
        return reduce(losses, f"{names} -> ", "mean")

    return one_kernel(name, body, p, targets)


def cross_entropy(logits: Tensor, targets: Tensor, *, name: str = "cross_entropy") -> Tensor:
    """Return the mean cross-entropy over all positions.

    Parameters
    ----------
    logits : Tensor
        Shape (..., V).
    targets : Tensor
        Integers, shape (...); they are not shifted.
    name : str
        Scope of the two kernels.

    Returns
    -------
    Tensor
        A scalar. As in torch, one kernel writes the log-probabilities, as large as the logits, and a second one selects
        and averages those of the targets.

    Raises
    ------
    ShapeError
        If shapes do not fit, or the targets are not integers.
    """
    need_tensor("cross_entropy", logits, targets)
    with module(current_graph(logits.graph), name):
        log_p = log_softmax(logits)
        ids = reshape(targets, (*targets.sizes, 1), name="targets")

        def body(log_p: Tensor, ids: Tensor) -> Tensor:
            picked = take_along(log_p, ids)
            names = " ".join(f"a{i}" for i in range(picked.ndim))
            return -reduce(picked, f"{names} -> ", "mean")

        return one_kernel("nll", body, log_p, ids)
