"""Times of functions taken in turn, and how a time grows with a size.

Seconds are those of the processor: what others do on the machine is no part of them.
"""

import gc
from math import log
from time import process_time


def once(function):
    """Seconds of one call; what earlier ones left is collected before it."""
    gc.collect()
    start = process_time()
    function()
    return process_time() - start


def best(rounds, *functions):
    """Best time of each function, in seconds: a slow moment of the machine falls on all of them."""
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
    """Exponent of the power law that fits best: least squares of log time against log size."""
    points = [(log(size), log(seconds)) for size, seconds in times.items()]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
