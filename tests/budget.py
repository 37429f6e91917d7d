"""Number of examples in randomised tests: a fraction in plain runs, all or more in long runs."""

import os
import random
from fractions import Fraction
from math import ceil

from hypothesis import HealthCheck, settings

VARIABLE = "COSTGRAPH_EXAMPLES"

#: Fraction of the examples that a plain run draws, always the same ones.
PLAIN = Fraction(1, 20)


def is_plain() -> bool:
    """Return whether the environment sets no number of examples, so that every run is the same."""
    return VARIABLE not in os.environ


def multiplier() -> Fraction | int:
    """Return the integer from the environment, or the fraction of a plain run."""
    if is_plain():
        return PLAIN
    text = os.environ[VARIABLE]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{VARIABLE}={text!r}: expected a positive integer")
    return int(text)


def examples(n: int) -> int:
    """Return `n` times the multiplier, at least 1."""
    return ceil(n * multiplier())


def seed() -> int | None:
    """Return None, which makes every search draw the same examples; full runs draw new ones."""
    return None if is_plain() else random.SystemRandom().getrandbits(32)


def drawing(n: int) -> settings:
    """Return hypothesis settings for drawn graphs, deterministic in a plain run."""
    return settings(
        max_examples=examples(n),
        deadline=None,  # the interpreter is slow, and the machine may be busy
        derandomize=is_plain(),
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def without_calls(graphs):
    """Filter out graphs with recorded torch calls, as transforms that look inside ops refuse them."""
    return graphs.filter(lambda case: all(op.kind.name != "custom_call" for op in case.graph.walk()))
