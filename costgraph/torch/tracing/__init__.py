"""nn.Module -> Graph, from one eager run on tensors that hold no data."""

from .trace import trace

__all__ = ["trace"]
