"""Which calls of a graph are what a device runs by a rule."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.graph import (
    Graph,
    need_graph,
)
from .cuda import SOURCES

__all__ = ["Dispatched", "dispatched"]


@dataclass(frozen=True)
class Dispatched:
    """A call that a rule has led to."""

    op: str
    """name of the op in the graph"""
    call: str
    """op of torch, with its overload"""
    rule: str
    """name of the rule"""
    why: str
    """what it went by"""
    source: str
    """where torch's sources say so; empty for a rule that this version does not know"""


def dispatched(graph: Graph) -> list[Dispatched]:
    """Return the calls of a trace that are what a device runs by a rule, in program order.

    Parameters
    ----------
    graph : Graph
        Of `trace(..., device="cuda")`; of any other graph there are none.

    Returns
    -------
    list of Dispatched
        A row for each op whose call follows from a choice that torch makes by the device.

    Raises
    ------
    GraphError
        If it is no graph.

    Examples
    --------
    >>> import torch
    >>> from costgraph.torch import dispatched, trace
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> x = torch.zeros(2, 3, 5, 64, dtype=torch.bfloat16)
    >>> for arch in "sm_90", "sm_80", "sm_75":
    ...     g = trace(Attention(), x, dims=[("B", None, "S", None)], device="cuda", arch=arch)
    ...     for row in dispatched(g)[:1]:
    ...         print(f"{row.rule} ({row.why})")
    attention: cuDNN (the first in torch's order on sm_90)
    attention: flash (not cuDNN: sm_80)
    attention: math (not cuDNN: sm_75; not flash: sm_75; not efficient: bfloat16 on sm_75)
    """
    need_graph("dispatched", graph)
    called = ((op, op.call) for op in graph.walk())
    return [
        Dispatched(op.name, call.target, call.rule, call.why, SOURCES.get(call.rule, ""))
        for op, call in called
        if call is not None and call.rule
    ]
