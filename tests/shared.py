"""Graphs that many tests ask of: declared and derived once in a process, as nothing changes a finished graph."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import costgraph as cg

__all__ = ["load", "parallelize", "training_step"]

F = TypeVar("F", bound=Callable)


def _once(function: F, most: int | None) -> F:
    """Return a function that keeps its answers; of arguments without a hash, such as lists, it keeps none."""
    kept = lru_cache(maxsize=most, typed=True)(function)

    @wraps(function)
    def asked(*args, **kwargs):
        try:
            hash((args, *kwargs.values()))
        except TypeError:
            return function(*args, **kwargs)
        return kept(*args, **kwargs)

    return asked


#: As `cg.models.load`, once for the same arguments.
load = _once(cg.models.load, None)

#: As `cg.training_step`, once for the same graph and arguments.
training_step = _once(cg.training_step, 128)

#: As `cg.parallelize`, once for the same graph and arguments.
parallelize = _once(cg.parallelize, 64)
