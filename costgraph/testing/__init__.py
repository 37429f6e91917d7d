"""Test utilities for op kinds: reference semantics, graph strategies and property checks.

The library tests its own ops with these tools; use them for yours. Define an op kind's semantics at each index point
with `meaning`, a hypothesis strategy with `sample`, then check the op with `hold`.
"""

from . import (
    properties,
    semantics,
)
from .arithmetic import FUNCTIONS, Number, function, value
from .check_op import (
    hold,
    missing,
    search,
)
from .interpreter import (
    MEANINGS,
    At,
    Counted,
    Run,
    meaning,
    run,
)
from .properties import (
    LAWS,
    TRAINING,
    Lesson,
    Trial,
    check,
    check_training,
    law,
)
from .ranks import check_sharded, run_ranks
from .strategies import (
    SAMPLES,
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
    sample,
    sizes,
    spreads,
)

__all__ = [
    "At",
    "Case",
    "Counted",
    "DrawnPattern",
    "FUNCTIONS",
    "LAWS",
    "Lesson",
    "MEANINGS",
    "Number",
    "Run",
    "SAMPLES",
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
    "hold",
    "law",
    "losses",
    "meaning",
    "missing",
    "ops",
    "patterns",
    "points",
    "properties",
    "run",
    "run_ranks",
    "sample",
    "search",
    "semantics",
    "sizes",
    "spreads",
    "value",
]
