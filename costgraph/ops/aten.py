"""Calls of torch's own ops, as a trace of a run records them: shapes, layouts and costs are stated for each call."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UnsupportedError
from ..graph.graph import Graph
from ..graph.op import Attrs, Op, OpKind, Result
from ..graph.tensor import Tensor
from . import rules
from .registry import register
from .rules import Flops

__all__ = ["ATEN", "need_declared"]


def _results(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    pieces = attrs.get("pieces") or (0,) * len(attrs["outputs"])
    return [
        Result(sizes, dtype, strides, of=of, offset=offset, pieces=own)
        for (sizes, dtype, strides, of, offset), own in zip(attrs["outputs"], pieces, strict=True)
    ]


def _flops(op: Op) -> Flops:
    a = op.attrs
    return Flops(a["matmul"], a["full"], a["pointwise"], a["transcendental"])


#: One call: `target` names the op as `torch.ops.aten` does, `arguments` and `keywords` are what it was called with,
#: `{"operand": i}` standing for tensors; `outputs` says of each result its shape, number format, strides, the operand
#: whose storage it shares or None, and its offset there. FLOPs and bytes come from the rule for that op. Where an
#: element of a list stands for a tensor of each layer of a stack, `pieces` says which results do.
ATEN = register(OpKind("aten", _results, _flops, rules.stated_reads, rules.stated_writes))


def need_declared(place: str, graph: Graph, instead: str) -> None:
    """Refuse recorded calls: what they state holds for the call as it was, so a transform that looks inside cannot.

    Parameters
    ----------
    place : str
        What is asked.
    graph : Graph
        What it is asked of, bodies included.
    instead : str
        What to do with a traced module.

    Raises
    ------
    UnsupportedError
        If there is a recorded call: the text names it.
    """
    found = next((op for op in graph.walk() if op.kind is ATEN), None)
    if found is not None:
        raise UnsupportedError(
            f"{place}: {found.name!r} of graph {graph.name!r} is a recorded call of {found.attrs['target']}, expected "
            f"declared ops; {instead}"
        )
