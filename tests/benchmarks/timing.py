"""Interleaved timing of functions, and how a time grows with a size.

Times are CPU seconds, so background load has little effect.
"""

import gc
from math import log
from time import process_time


def once(function):
    """Return the seconds that one call takes, after collecting earlier garbage."""
    gc.collect()
    start = process_time()
    function()
    return process_time() - start


def best(rounds, *functions):
    """Return each function's best time in seconds; interleaving spreads background load evenly."""
    for function in functions:
        function()
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, taken in zip(functions, times, strict=True):
            start = process_time()
            function()
            taken.append(process_time() - start)
    return [min(taken) for taken in times]


def growth(times):
    """Return the exponent in the best-fitting power law: least squares of log time against log size."""
    points = [(log(size), log(seconds)) for size, seconds in times.items()]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
