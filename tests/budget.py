"""How many examples a randomised test draws: a share of what it says in a plain run, all or more in a long one."""

import os
import random
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import HealthCheck, settings

VARIABLE = "COSTGRAPH_EXAMPLES"

#: What a plain run draws, the same examples each time.
PLAIN = Fraction(1, 20)


def is_plain() -> bool:
    """Whether the environment asks for no number of examples: each run is the same then."""
    return VARIABLE not in os.environ


def multiplier() -> Fraction | int:
    """The integer that the environment gives, or the share of a plain run."""
    if is_plain():
        return PLAIN
    text = os.environ[VARIABLE]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{VARIABLE}={text!r}: expected a positive whole number")
    return int(text)


def examples(n: int) -> int:
    """`n` examples, times the multiplier; one at least."""
    return ceil(n * multiplier())


def in_part(cases, nth: int, of: int = 2) -> list:
    """Cases of which a plain run holds each `of`-th, from the `nth` on, and a long test all others."""
    given = [c if type(c) is tuple else (c,) for c in cases]  # a tuple has a value for each name
    marked = [pytest.param(*c) if not hasattr(c[0], "marks") else c[0] for c in given]
    return [
        c if i % of == nth else pytest.param(*c.values, marks=(*c.marks, pytest.mark.long), id=c.id)
        for i, c in enumerate(marked)
    ]


def seed() -> int | None:
    """None, with which a search draws the same each time; a run of all examples draws new ones."""
    return None if is_plain() else random.SystemRandom().getrandbits(32)


def drawing(n: int) -> settings:
    """Settings for drawn graphs: in a plain run the same ones each time."""
    return settings(
        max_examples=examples(n),
        deadline=None,  # an interpreter is slow, and a machine may be busy
        derandomize=is_plain(),
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def without_calls(graphs):
    """Drawn graphs without recorded calls of torch's ops: transforms that look inside ops refuse those."""
    return graphs.filter(lambda case: all(op.kind.name != "foreign" for op in case.graph.walk()))
