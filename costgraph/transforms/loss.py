"""Cross-entropy in chunks: logits of a part of the positions at a time, so that never all of them are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..algebra.polynomial import Poly
from ..algebra.symbols import shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, ShapeError, UnsupportedError
from ..ir.graph import Graph, Op, Tensor, apply, current_graph, module, need_tensor, positive
from ..nn.losses import binary_cross_entropy, cross_entropy
from ..ops.collectives import need_of_all
from ..ops.einsum import Einsum, einsum
from ..ops.elementwise import Pointwise, cast, pointwise
from ..ops.fill import fill
from ..ops.index import arange
from ..ops.layout import rearrange
from ..ops.loops import Kernel, fused, kernel, scan
from ..ops.operators import transpose
from ..ops.reduce import reduce
from .statistics import Trained

__all__ = [
    "Loss",
    "with_loss",
    "chunked_cross_entropy",
]


# -- losses ------------------------------------------------------------------------------------------------------------
# Losses: what closes a forward graph that a step is made of.

Loss = Callable[..., Tensor]


def _cross_entropy(logits: Tensor) -> Tensor:
    """Return the cross-entropy against targets, which become an input."""
    targets = logits.graph.input("targets", [n.expr for n in logits.sizes[:-1]], dtype="int64")
    return cross_entropy(logits, targets)


def _contrastive(logits: Tensor) -> Tensor:
    """Return the mean of the cross-entropies of rows and of columns: the n-th row belongs to the n-th column.

    Radford et al. 2021 (arXiv 2103.00020), figure 3.
    """
    if logits.ndim != 2 or not logits.graph.same(*logits.sizes):
        raise ShapeError(f"loss 'contrastive' of {logits!r}: expected as many rows as columns")
    own = arange(logits.sizes[0], name="targets")
    return (cross_entropy(logits, own) + cross_entropy(transpose(logits), own)) / 2


def _binary_cross_entropy(p: Tensor) -> Tensor:
    """Return the cross-entropy of probabilities against targets of 0 or 1, which become an input."""
    return binary_cross_entropy(p, p.graph.input("targets", [n.expr for n in p.sizes], dtype=p.dtype))


def _mean_squared_error(made: Tensor) -> Tensor:
    """Return the mean of squared differences from targets, which become an input."""
    targets = made.graph.input("targets", [n.expr for n in made.sizes], dtype=made.dtype)
    squares = fused("mse", lambda made, targets: pointwise("square", made - targets), made, targets)
    assert isinstance(squares, Tensor)
    names = " ".join(f"a{i}" for i in range(made.ndim))
    return reduce(squares, f"{names} -> ", "mean") if made.ndim else squares


#: Losses that a model names.
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": _cross_entropy,
    "contrastive": _contrastive,
    "binary_cross_entropy": _binary_cross_entropy,
    "mean_squared_error": _mean_squared_error,
}


def with_loss(graph: Graph, loss: str | Loss | None = None) -> Graph:
    """Return the graph with its loss as its only output.

    The loss is a name such as `cross_entropy`, or a function of the outputs that returns a scalar; by default the one
    that the graph names, and none is added to a graph with one scalar output. GraphError if it has neither a scalar
    output nor a loss.
    """
    need_of_all("training_step", graph)
    named = graph.loss if loss is None else loss
    scalars = [t for t in graph.outputs if not t.sizes]
    new = Trained().run(graph)
    with new:
        new.loss = None
        if loss is not None or len(scalars) != 1 or len(graph.outputs) != 1:
            new.outputs = [_closed(new, named)]
    return new


def _closed(new: Graph, named: object) -> Tensor:
    """Add a loss, of a name or a function, to a graph that is open."""
    if named is None:
        raise GraphError(
            f"training_step: graph {new.name!r} has {len(new.outputs)} outputs and names no loss, expected one "
            f"scalar output, or loss='cross_entropy' or a function of the outputs"
        )
    function = LOSSES.get(named) if isinstance(named, str) else named
    if not callable(function):
        raise GraphError(f"training_step: loss {shown(named)}, expected one of {', '.join(LOSSES)} or a function")
    if isinstance(named, str) and len(new.outputs) != 1:
        raise GraphError(
            f"training_step: loss {named!r} of graph {new.name!r}, which has {len(new.outputs)} outputs, expected one, "
            f"or a function of the outputs"
        )
    made = function(*new.outputs)
    if not isinstance(made, Tensor) or made.sizes:
        raise GraphError(f"training_step: the loss is {made!r}, expected a scalar")
    return made


# -- chunked -----------------------------------------------------------------------------------------------------------


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
