"""Graphs that many tests ask of: declared and derived once in a process, as nothing changes a finished graph."""

from functools import lru_cache

import costgraph as cg

__all__ = ["load", "parallelize", "training_step"]

#: As `cg.models.load`, once for the same arguments.
load = lru_cache(maxsize=None)(cg.models.load)

#: As `cg.training_step`, once for the same graph and arguments.
training_step = lru_cache(maxsize=128)(cg.training_step)

#: As `cg.parallelize`, once for the same graph and arguments.
parallelize = lru_cache(maxsize=64)(cg.parallelize)
