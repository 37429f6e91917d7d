"""List the calls of a graph that a device-specific rule selected."""

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
    """A call selected by a device-specific rule."""

    op: str
    """name of the op in the graph"""
    call: str
    """torch op with its overload"""
    rule: str
    """name of the rule"""
    why: str
    """conditions that decided it"""
    source: str
    """location of the rule in torch's sources; empty for a rule unknown to this version"""


def dispatched(graph: Graph) -> list[Dispatched]:
    """Return the calls of a trace that a device-specific rule selected, in program order.

    Parameters
    ----------
    graph : Graph
        Graph from `trace(..., device="cuda")`; other graphs have no such calls.

    Returns
    -------
    list of Dispatched
        One row per op whose call depends on the device.

    Raises
    ------
    GraphError
        If `graph` is not a graph.

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
    calls = ((op, op.call) for op in graph.walk())
    return [
        Dispatched(op.name, call.target, call.rule, call.why, SOURCES.get(call.rule, ""))
        for op, call in calls
        if call is not None and call.rule
    ]
