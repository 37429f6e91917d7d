"""Cost rules of aten ops, by family."""

from . import (  # noqa: F401  # they fill the table
    attention,
    elementwise,
    linear_algebra,
    movement,
    recurrent,
    reductions,
    vision,
)
from .counts import counts_of
from .table import RULES, Rule, rule

__all__ = ["RULES", "Rule", "counts_of", "rule"]
