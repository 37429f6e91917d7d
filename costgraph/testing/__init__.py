"""Laws that every op keeps, an interpreter that counts, and strategies that draw graphs nobody chose.

What the library holds its own ops to is here for the ops of others: `meaning` says what an op kind does at each index
point, `sample` how to draw one, and `hold` checks its record against both on drawn graphs.
"""

from . import identity, lookups  # the laws and the meanings in them
from .arithmetic import FUNCTIONS, Number, Tally, function, value
from .bodies import graphs, ops
from .hold import hold
from .interpreter import Counted, Run, run
from .laws import LAWS, Trial, check, law
from .meanings import MEANINGS, meaning
from .samples import SAMPLES, sample
from .sketch import Case, Sketch
from .strategies import DrawnPattern, dtypes, patterns, points, sizes
from .values import At

__all__ = [
    "FUNCTIONS", "LAWS", "MEANINGS", "SAMPLES", "At", "Case", "Counted", "DrawnPattern", "Number", "Run", "Sketch",
    "Tally", "Trial", "check", "dtypes", "function", "graphs", "hold", "identity", "law", "lookups", "meaning", "ops",
    "patterns", "points", "run", "sample", "sizes", "value",
]  # fmt: skip
