"""Graphs shared by many tests, declared and derived once per process, as nothing modifies a finished graph."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import costgraph as cg

__all__ = ["load", "parallelize", "training_step"]

F = TypeVar("F", bound=Callable)


def _once(function: F, most: int | None) -> F:
    """Return a function that caches its results, except for unhashable arguments such as lists."""
    kept = lru_cache(maxsize=most, typed=True)(function)

    @wraps(function)
    def asked(*args, **kwargs):
        try:
            hash((args, *kwargs.values()))
        except TypeError:
            return function(*args, **kwargs)
        return kept(*args, **kwargs)

    return asked


#: `cg.models.load`, cached by arguments.
load = _once(cg.models.load, None)

#: `cg.training_step`, cached by graph and arguments.
training_step = _once(cg.training_step, 128)

#: `cg.parallelize`, cached by graph and arguments.
parallelize = _once(cg.parallelize, 64)
