"""Graph and sizes -> torch.fx.GraphModule: one call of torch for each op, storages freed at their last use."""

# imported for their rules, which are found in LOWERINGS
from . import (  # noqa: F401
    collectives,
    contraction,
    elementwise,
    grouped,
    kernels,
    lookups,
    reductions,
    shapes,
    spectra,
    stated,
    updates,
    windows,
)  # fmt: skip
from .module import lower, random_inputs
from .table import LOWERINGS, lowering

__all__ = ["LOWERINGS", "lower", "lowering", "random_inputs"]
