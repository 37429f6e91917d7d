"""Laws that every op keeps, an interpreter that counts, and strategies that draw graphs nobody chose.

What the library holds its own ops to is here for the ops of others: `meaning` says what an op kind does at each index
point, `sample` how to draw one, and `hold` checks its record against both on drawn graphs.
"""

# the laws and the meanings in them
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
