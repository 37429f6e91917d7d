"""Times, matmul FLOPs and peak bytes of a call, as they are on the machine that this runs on."""

from ...notation.progress import progressing
from .clock import Times, timed
from .environment import environment
from .measurement import Measurement, measure

__all__ = ["Measurement", "Times", "environment", "measure", "progressing", "timed"]
