"""Training losses: the named ones, a cross-entropy in chunks of positions, and batch norms in training mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..algebra.polynomial import Poly
from ..algebra.symbols import read_size, shorten, shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import FormatError, GraphError, ShapeError, UnsupportedError
from ..ir.graph import Graph, Op, Tensor, apply, current_graph, module, need_tensor, opened, positive
from ..nn.losses import binary_cross_entropy, cross_entropy
from ..nn.norms import over_the_batch
from ..ops.collectives import need_of_all
from ..ops.einsum import Einsum, einsum
from ..ops.elementwise import Pointwise, cast, pointwise
from ..ops.fill import fill
from ..ops.index import arange
from ..ops.layout import KeepAlive, keep_alive, rearrange
from ..ops.loops import Kernel, fused, kernel, scan
from ..ops.operators import transpose
from ..ops.reduce import reduce
from .rewrite import Rewriter

__all__ = [
    "Trained",
    "LOSSES",
    "Loss",
    "loss_title",
    "read_loss",
    "with_loss",
    "chunked_cross_entropy",
]


# -- batch norms -------------------------------------------------------------------------------------------------------


class Trained(Rewriter):
    """Copies a graph, with batch statistics in batch norms whose mode is `auto`."""

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, or replace a batch norm."""
        if not isinstance(op.kind, Kernel) or op.kind.statistics != "auto":
            super().emit(op, new, suffix)
            return
        *levels, name = op.name.split("/")
        with opened(graph=new, levels=tuple(levels), phase=op.phase):
            result = over_the_batch(*(self.tensors[t] for t in op.operands), name=name)
        self.tensors[op.results[0]] = result


# -- losses ------------------------------------------------------------------------------------------------------------


# -- named losses ------------------------------------------------------------------------------------------------------

Loss = Callable[..., Tensor]


def _targets(logits: Tensor) -> Tensor:
    """Declare the input with a class for each position."""
    return logits.graph.input("targets", [n.expr for n in logits.sizes[:-1]], dtype="int64")


def _cross_entropy(logits: Tensor) -> Tensor:
    """Return the cross-entropy against targets, declared as an input."""
    return cross_entropy(logits, _targets(logits))


def _to(logits: Tensor, dtype: DType) -> Tensor:
    """Cast logits to a dtype; logits declared in it state the request, which a precision policy follows."""
    if logits.dtype != dtype:
        return cast(logits, dtype)
    return apply(KeepAlive(requested_dtype=dtype, fixed=True), [logits], "to")[0]


def _cross_entropy_in_fp32(logits: Tensor) -> Tensor:
    """Return the cross-entropy of logits cast to fp32, as torchtitan and torchtune compute it."""
    return _cross_entropy(_to(logits, find_dtype("fp32")))


def _transformers(logits: Tensor) -> Tensor:
    """Return the loss of causal language models in transformers >= 4.49, against targets declared as an input.

    `ForCausalLMLoss` in loss/loss_utils.py casts logits to fp32, and pads and shifts the labels, not the logits. Its
    variables, and the logits of the model's `forward`, live until the loss is computed. `Trainer.compute_loss` then
    drops the model's outputs: the log-probabilities and shifted labels are saved for the backward pass, the logits are
    freed. Releases up to 4.48 also copied the logits to shift them.

    Copies with the size of the labels stand for the padded and the shifted ones: a shift along the sequence would
    gather it on the ranks of context parallelism, which get shifted labels (`shift_labels=`).
    """
    if logits.ndim < 2:
        raise ShapeError(f"loss 'transformers' of {logits!r}: expected an axis of positions and one of the vocabulary")
    labels = _targets(logits)
    with module(logits.graph, "loss"):
        wide = _to(logits, find_dtype("fp32"))
        padded = pointwise("copy", labels, name="pad")
        return keep_alive(cross_entropy(wide, pointwise("copy", padded, name="shift")), logits, wide, padded)


def _contrastive(logits: Tensor) -> Tensor:
    """Return the mean cross-entropy over rows and over columns, where row n matches column n.

    Radford et al. 2021 (arXiv 2103.00020), figure 3.
    """
    if logits.ndim != 2 or not logits.graph.same(*logits.sizes):
        raise ShapeError(f"loss 'contrastive' of {logits!r}: expected as many rows as columns")
    targets = arange(logits.sizes[0], name="targets")
    return (cross_entropy(logits, targets) + cross_entropy(transpose(logits), targets)) / 2


def _binary_cross_entropy(p: Tensor) -> Tensor:
    """Return the cross-entropy of probabilities against targets of 0 or 1, declared as an input."""
    return binary_cross_entropy(p, p.graph.input("targets", [n.expr for n in p.sizes], dtype=p.dtype))


def _mean_squared_error(predictions: Tensor) -> Tensor:
    """Return the mean squared difference from targets, declared as an input."""
    targets = predictions.graph.input("targets", [n.expr for n in predictions.sizes], dtype=predictions.dtype)
    squares = fused(
        "mse", lambda predictions, targets: pointwise("square", predictions - targets), predictions, targets
    )
    assert isinstance(squares, Tensor)
    names = " ".join(f"a{i}" for i in range(predictions.ndim))
    return reduce(squares, f"{names} -> ", "mean") if predictions.ndim else squares


#: Losses by the names that models use.
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": _cross_entropy,
    "fp32": _cross_entropy_in_fp32,
    "transformers": _transformers,
    "contrastive": _contrastive,
    "binary_cross_entropy": _binary_cross_entropy,
    "mean_squared_error": _mean_squared_error,
}


#: Titles in reports, for names that do not say enough.
_TITLES = {"fp32": "cross-entropy of fp32 logits", "transformers": "transformers >= 4.49 (fp32 logits)"}


def loss_title(name: str) -> str:
    """Return the title in reports of a loss that a graph names."""
    return _TITLES.get(name, name)


def read_loss(text: str) -> str | Loss:
    """Parse a loss from the command line: a name, or `chunked:N` for a cross-entropy over N chunks of positions.

    Raises FormatError for other texts.

    Examples
    --------
    >>> read_loss("transformers")
    'transformers'
    """
    name, colon, argument = text.partition(":")
    if name == "chunked" and colon:
        return chunked_cross_entropy(read_size(argument, "--loss chunked"))
    if text not in LOSSES:
        raise FormatError(f"--loss {shorten(text)}: expected {', '.join(LOSSES)} or chunked:N")
    return text


def with_loss(graph: Graph, loss: str | Loss | None = None) -> Graph:
    """Return the graph with its loss as the only output, and the name of an added loss.

    The loss is a name such as `cross_entropy`, or a function of the outputs that returns a scalar. Default: the loss
    that the graph names, or its only output if that is a scalar. Raises GraphError if there is neither.
    """
    need_of_all("training_step", graph)
    named = graph.loss if loss is None else loss
    scalars = [t for t in graph.outputs if not t.sizes]
    new = Trained().run(graph)
    with new:
        new.loss = None  # a scalar output is a loss without a name
        if loss is not None or len(scalars) != 1 or len(graph.outputs) != 1:
            new.outputs = [_apply_loss(new, named)]
            name = named if isinstance(named, str) else getattr(named, "__name__", None)
            new.loss = name if isinstance(name, str) else None
    return new


def _apply_loss(new: Graph, loss: object) -> Tensor:
    """Add a loss, given by name or as a function, to the open graph."""
    if loss is None:
        raise GraphError(
            f"training_step: graph {new.name!r} names no loss, and its outputs ({len(new.outputs)}) are no single "
            f"scalar; expected one scalar output, loss='cross_entropy', or a function of the outputs"
        )
    function = LOSSES.get(loss) if isinstance(loss, str) else loss
    if not callable(function):
        raise GraphError(f"training_step: loss {shown(loss)}, expected one of {', '.join(LOSSES)} or a function")
    if isinstance(loss, str) and len(new.outputs) != 1:
        raise GraphError(
            f"training_step: loss {loss!r} of graph {new.name!r}, which has {len(new.outputs)} outputs, expected one, "
            f"or a function of the outputs"
        )
    value = function(*new.outputs)
    if not isinstance(value, Tensor) or value.sizes:
        raise GraphError(f"training_step: the loss is {value!r}, expected a scalar")
    return value


# -- chunked cross-entropy ---------------------------------------------------------------------------------------------


def chunked_cross_entropy(chunks: object, *, dtype: str | DType | None = None) -> Callable[..., Tensor]:
    """Return a loss for `training_step` that computes the logits for a chunk of positions at a time.

    The output layer is moved into a loop over equal chunks of the last position axis, followed by the cross-entropy of
    each chunk, as in torchtune's `LinearCrossEntropyLoss` and the earlier `CEWithChunkedOutputLoss`. The residuals of
    all chunks are saved for the backward pass. With `checkpoint=selective("chunk")` they are recomputed, so that only
    one chunk is in memory, as in Liger's kernel, which computes the gradient of a chunk at once and needs no recomputed
    matmul.

    Parameters
    ----------
    chunks : sympy.Expr or int
        Number of chunks; it must divide the number of positions.
    dtype : str or DType, optional
        Dtype that logits are cast to before the loss, such as `fp32`. Default: no cast.

    Returns
    -------
    callable
        Takes logits (..., S, V) and returns the mean loss over all positions; it declares the targets. The logits must
        come from one matmul of activations with a parameter, possibly followed by pointwise ops such as a bias or a
        cap.

    Raises
    ------
    ShapeError
        If `chunks` is not a size; when the loss is called, if there is no axis of positions.
    UnsupportedError
        When the loss is called, if the logits come from other ops, or have another reader.

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
    return _ChunkedCrossEntropy(count, None if dtype is None else find_dtype(dtype))


@dataclass(frozen=True)
class _ChunkedCrossEntropy:
    """Loss over chunks of positions; unlike a nested function it can be sent to other processes."""

    count: Poly
    dtype: DType | None

    @property
    def __name__(self) -> str:
        cast_text = "" if self.dtype is None else f", dtype={self.dtype.name}"
        return f"chunked_cross_entropy({self.count}{cast_text})"

    def __call__(self, *outputs: Tensor) -> Tensor:
        need_tensor("chunked_cross_entropy", *outputs)
        if len(outputs) != 1:
            raise UnsupportedError(f"chunked_cross_entropy of {len(outputs)} outputs, expected only logits")
        return _chunked_loss(outputs[0], self.count, self.dtype)


def _chunked_loss(logits: Tensor, count: Poly, logits_dtype: DType | None) -> Tensor:
    """Return the mean loss over positions from a loop over chunks; the ops that computed the logits are removed."""
    chain, x = _logits_chain(logits)
    graph, targets = logits.graph, _targets(logits)
    names = [f"a{i}" for i in range(logits.ndim - 2)]
    before, after = f"{' '.join(names)} (n s)", f"n {' '.join(names)} s"
    parts = tuple(
        rearrange(t, f"{before}{end} -> {after}{end}", name="parts", n=count.expr)
        for t, end in ((x, " d"), (targets, ""))
    )
    assert len(parts) == 2

    def body(total: Tensor, part: tuple[Tensor, ...]) -> tuple[Tensor, tuple[()]]:
        with module(current_graph(), "chunk"):
            chunk_tensors = {x: part[0]}
            for op in chain:
                _replay(op, chunk_tensors)
            chunk_logits = chunk_tensors[logits]
            cast_logits = chunk_logits if logits_dtype is None else _to(chunk_logits, logits_dtype)
            return total + cross_entropy(cast_logits, part[1]), ()

    dtype = logits.dtype if logits_dtype is None else logits_dtype
    total, _ = scan(count, body, fill((), dtype=dtype, name="no_loss"), parts, name="chunks")
    assert isinstance(total, Tensor)
    graph.remove_nodes_from([n for op in chain for n in (*op.results, op)])
    return pointwise("div", total, int(count.constant) if count.constant is not None else count, name="mean_of_chunks")


def _logits_chain(logits: Tensor) -> tuple[list[Op], Tensor]:
    """Return the ops that compute the logits, starting with the matmul, and the activations it reads."""
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
                f"chunked_cross_entropy of {logits!r}: {t!r} does not come from one matmul with a parameter, "
                f"followed by pointwise ops without other readers"
            )
        chain.insert(0, op)
        (t,) = inputs
        inner = list(op.body.walk()) if isinstance(op.kind, Kernel) and op.body is not None else [op]
        if any(isinstance(each.kind, Einsum) for each in inner):
            return chain, t
        if not all(isinstance(each.kind, Pointwise) for each in inner):
            logits = t  # rejected in the next iteration


def _replay(op: Op, new_tensors: dict[Tensor, Tensor]) -> None:
    """Add an op again for other positions: sizes follow from its operands."""
    operands = [new_tensors.get(t, t) for t in op.operands]
    name = op.name.rpartition("/")[2]
    if isinstance(op.kind, Kernel):
        assert op.body is not None
        with kernel(name) as body:
            inner_tensors = dict(zip(op.body.formals, operands, strict=True))
            for inner in op.body.ops:
                _replay(inner, inner_tensors)
        new_tensors[op.results[0]] = body.export(inner_tensors[op.body.outputs[0]])
    elif isinstance(op.kind, Einsum):
        new_tensors[op.results[0]] = einsum(*operands, str(op.kind.pattern), dtype=op.kind.dtype, name=name)
    else:
        (new_tensors[op.results[0]],) = apply(op.kind, operands, name)
