"""nn.Module -> Graph, from one eager run on tensors that hold no data."""

from .dispatched import Dispatched, dispatched
from .trace import trace

__all__ = ["Dispatched", "dispatched", "trace"]
