"""Lower a graph with bound sizes to a torch.fx.GraphModule: one torch call per op, storages freed at their last use."""

# imported for their rules, which are found in LOWERINGS
from . import (  # noqa: F401
    collectives,
    contraction,
    elementwise,
    indexing,
    kernels,
    layout,
)
from .context import (
    LOWERINGS,
    lowering,
)
from .module import lower, random_inputs

__all__ = ["LOWERINGS", "lower", "lowering", "random_inputs"]
