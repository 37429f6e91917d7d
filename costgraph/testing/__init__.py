"""Test utilities for op kinds: reference semantics, graph strategies and property checks.

The library tests its own ops with these tools; use them for yours. Define an op kind's values at each index point
with `reference_semantics`, how to draw one with `strategy`, then check the op with `check_op`.
"""

import warnings
from typing import Any

from . import (
    properties,
    semantics,
)
from .arithmetic import FUNCTIONS, Number, function, value
from .interpreter import (
    REFERENCE_SEMANTICS,
    At,
    Counted,
    Run,
    reference_semantics,
    run,
)
from .properties import (
    LAWS,
    TRAINING,
    Lesson,
    Trial,
    check,
    check_op,
    check_training,
    law,
    missing,
    search,
)
from .ranks import check_sharded, run_ranks
from .strategies import (
    STRATEGIES,
    Case,
    DrawnPattern,
    Sketch,
    Spread,
    dtypes,
    graphs,
    losses,
    ops,
    patterns,
    points,
    sizes,
    spreads,
    strategy,
)

__all__ = [
    "At",
    "Case",
    "Counted",
    "DrawnPattern",
    "FUNCTIONS",
    "LAWS",
    "Lesson",
    "REFERENCE_SEMANTICS",
    "Number",
    "Run",
    "STRATEGIES",
    "Sketch",
    "Spread",
    "TRAINING",
    "Trial",
    "check",
    "check_sharded",
    "check_training",
    "dtypes",
    "function",
    "graphs",
    "check_op",
    "law",
    "losses",
    "reference_semantics",
    "missing",
    "ops",
    "patterns",
    "points",
    "properties",
    "run",
    "run_ranks",
    "strategy",
    "search",
    "semantics",
    "sizes",
    "spreads",
    "value",
]


#: Earlier names, available with a DeprecationWarning until the next release.
_RENAMED = {"hold": check_op, "meaning": reference_semantics, "sample": strategy}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"testing.{name} is now testing.{_RENAMED[name].__name__}", DeprecationWarning, stacklevel=2)
    return _RENAMED[name]
