"""Times, matmul FLOPs and peak bytes of a call, as they are on the machine that this runs on."""

from .clock import Times, timed
from .environment import environment
from .measurement import Measurement, measure
from .progress import progressing

__all__ = ["Measurement", "Times", "environment", "measure", "progressing", "timed"]
