"""What aten ops cost: a rule for each, by family."""

from . import (  # noqa: F401  # they fill the table
    algebra,
    attention,
    contraction,
    convolution,
    copies,
    lookups,
    losses,
    norms,
    pointwise,
    pooling,
    recurrent,
    reductions,
    resampling,
    vision,
)
from .counts import counts_of
from .table import RULES, Rule, rule

__all__ = ["RULES", "Rule", "counts_of", "rule"]
