"""Cross-entropy in chunks: logits of a part of the positions at a time, so that never all of them are there."""

from __future__ import annotations

from collections.abc import Callable

from ..algebra.polynomial import Poly
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import UnsupportedError
from ..graph.arguments import need_tensor, positive
from ..graph.graph import apply, current_graph
from ..graph.op import Op
from ..graph.scopes import module
from ..graph.tensor import Tensor
from ..nn.losses import cross_entropy
from ..ops.blocks import Kernel, kernel, scan
from ..ops.contraction import Einsum
from ..ops.einsum import einsum
from ..ops.fill import fill
from ..ops.layout import rearrange
from ..ops.pointwise import Pointwise, cast, pointwise

__all__ = ["chunked_cross_entropy"]


def chunked_cross_entropy(chunks: object, *, dtype: str | DType | None = None) -> Callable[..., Tensor]:
    """Return a loss for `training_step` that makes logits, and what becomes of them, for some positions at a time.

    The layer that makes logits is moved into a loop over equal parts of the last axis of positions, with the
    cross-entropy of each part behind it: torchtune's `LinearCrossEntropyLoss`, and `CEWithChunkedOutputLoss` of
    earlier versions. What a part keeps for its backward pass is there for all parts at once; computed again, as
    `checkpoint=selective("chunk")` says, it is there for one of them, as in Liger's kernel, which has the gradient of
    a part made at once instead and needs no product again.

    Parameters
    ----------
    chunks : sympy.Expr or int
        Parts; they divide the number of positions.
    dtype : str or DType, optional
        Format that logits are converted to before the loss, such as `fp32`; by default their own.

    Returns
    -------
    callable
        Of the logits (..., S, V), which have to be made of activations by one product with a parameter; pointwise
        ops, such as a bias or a cap, may follow. It returns the mean over all positions, and declares targets.

    Raises
    ------
    ShapeError
        If there is no such number of chunks; or, by the loss, if there is no axis of positions.
    UnsupportedError
        By the loss, if logits are made otherwise, or something else reads them.

    Examples
    --------
    >>> import costgraph as cg
    >>> model = cg.models.load("llama-3.2-1b")
    >>> for loss in (None, cg.chunked_cross_entropy(8)):
    ...     step = cg.training_step(model, loss, checkpoint=cg.every_block())
    ...     print(f"{cg.peak_memory(step, B=2, S=4096) / 1e9:.2f} GB")
    14.32 GB
    12.36 GB
    """
    count = positive("chunked_cross_entropy: chunks", chunks)
    wanted = None if dtype is None else find_dtype(dtype)

    def loss(*outputs: Tensor) -> Tensor:
        need_tensor("chunked_cross_entropy", *outputs)
        if len(outputs) != 1:
            raise UnsupportedError(f"chunked_cross_entropy of {len(outputs)} outputs, expected logits alone")
        return _looped(outputs[0], count, wanted)

    return loss


def _looped(logits: Tensor, count: Poly, wanted: DType | None) -> Tensor:
    """Return the mean over positions, by a loop over parts of them; what made the logits is gone."""
    chain, x = _made_by(logits)
    graph = logits.graph
    targets = graph.input("targets", [n.expr for n in logits.sizes[:-1]], dtype="int64")
    names = [f"a{i}" for i in range(logits.ndim - 2)]
    before, after = f"{' '.join(names)} (n s)", f"n {' '.join(names)} s"
    parts = tuple(
        rearrange(t, f"{before}{end} -> {after}{end}", name="parts", n=count.expr)
        for t, end in ((x, " d"), (targets, ""))
    )
    assert len(parts) == 2

    def body(total: Tensor, part: tuple[Tensor, ...]) -> tuple[Tensor, tuple[()]]:
        with module(current_graph(), "chunk"):
            made = {x: part[0]}
            for op in chain:
                _again(op, made)
            logits_of = made[logits]
            own = logits_of if wanted is None else cast(logits_of, wanted)
            return total + cross_entropy(own, part[1]), ()

    kind = logits.dtype if wanted is None else wanted
    total, _ = scan(count, body, fill((), dtype=kind, name="no_loss"), parts, name="chunks")
    assert isinstance(total, Tensor)
    graph.remove_nodes_from([n for op in chain for n in (*op.results, op)])
    return pointwise("div", total, int(count.constant) if count.constant is not None else count, name="mean_of_chunks")


def _made_by(logits: Tensor) -> tuple[list[Op], Tensor]:
    """Return the ops that make logits of activations, the product first, and these activations."""
    chain: list[Op] = []
    t = logits
    while True:
        op = t.producer
        inputs = [] if op is None else [each for each in op.operands if each.storage.role != "param"]
        readers = [] if t is logits else list(t.graph.successors(t))
        if (
            op is None
            or len(inputs) != 1
            or len(op.results) != 1
            or len(readers) > 1
            or inputs[0].ndim != max(t.ndim, 2)
        ):
            raise UnsupportedError(
                f"chunked_cross_entropy of {logits!r}: {t!r} is expected one product with a parameter and pointwise "
                f"ops behind it, which nothing else reads"
            )
        chain.insert(0, op)
        (t,) = inputs
        inner = list(op.body.walk()) if isinstance(op.kind, Kernel) and op.body is not None else [op]
        if any(isinstance(each.kind, Einsum) for each in inner):
            return chain, t
        if not all(isinstance(each.kind, Pointwise) for each in inner):
            logits = t  # refused in the next turn


def _again(op: Op, made: dict[Tensor, Tensor]) -> None:
    """Add an op once more, for other positions: sizes follow from what it reads."""
    operands = [made.get(t, t) for t in op.operands]
    name = op.name.rpartition("/")[2]
    if isinstance(op.kind, Kernel):
        assert op.body is not None
        with kernel(name) as body:
            inside = dict(zip(op.body.formals, operands, strict=True))
            for inner in op.body.ops:
                _again(inner, inside)
        made[op.results[0]] = body.export(inside[op.body.outputs[0]])
    elif isinstance(op.kind, Einsum):
        made[op.results[0]] = einsum(*operands, str(op.kind.pattern), dtype=op.kind.dtype, name=name)
    else:
        (made[op.results[0]],) = apply(op.kind, operands, name)
