"""Trace an `nn.Module` into a graph, from one eager run on fake tensors."""

from .cuda import Dispatched, dispatched
from .trace import trace

__all__ = ["Dispatched", "dispatched", "trace"]
