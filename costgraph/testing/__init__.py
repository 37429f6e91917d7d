"""Laws that every op keeps, an interpreter that counts, and strategies that draw graphs nobody chose.

What the library holds its own ops to is here for the ops of others: `meaning` says what an op kind does at each index
point, `sample` how to draw one, and `hold` checks its record against both on drawn graphs.
"""

# the laws and the meanings in them
from . import cached, formulas, gradients, grouped, hops, identity, lookups, meetings, refusals, sums, times, updates
from .arithmetic import FUNCTIONS, Number, function, value
from .bodies import graphs, ops
from .hold import hold, missing, search
from .interpreter import Counted, Run, run
from .laws import LAWS, Trial, check, law
from .losses import losses
from .meanings import MEANINGS, meaning
from .ranks import check_sharded, run_ranks
from .samples import SAMPLES, sample
from .sketch import Case, Sketch
from .spreads import Spread, spreads
from .strategies import DrawnPattern, dtypes, patterns, points, sizes
from .training import TRAINING, Lesson, check_training
from .values import At

__all__ = [
    "FUNCTIONS", "LAWS", "MEANINGS", "SAMPLES", "TRAINING", "At", "Case", "Counted", "DrawnPattern", "Lesson",
    "Number", "Run", "Sketch", "Spread", "Trial", "cached", "check", "check_sharded", "check_training", "dtypes",
    "formulas", "function", "gradients", "graphs", "grouped", "hold", "hops", "identity", "law", "lookups", "losses",
    "meaning", "meetings", "missing", "ops", "patterns", "points", "refusals", "run", "run_ranks", "sample", "search",
    "sizes", "spreads", "sums", "times", "updates", "value",
]  # fmt: skip
