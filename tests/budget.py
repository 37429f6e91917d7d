"""How many examples a randomised test draws: a fixed number, times what COSTGRAPH_EXAMPLES says."""

import os
import random

import pytest
from hypothesis import HealthCheck, settings

VARIABLE = "COSTGRAPH_EXAMPLES"


def multiplier() -> int:
    """The integer that the environment gives; 1 without it, so that a plain run is short and always the same."""
    text = os.environ.get(VARIABLE, "1")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{VARIABLE}={text!r}: expected a positive whole number")
    return int(text)


def examples(n: int) -> int:
    """`n` examples, times the multiplier."""
    return n * multiplier()


#: For tests that draw much: a plain run holds an eighth of the examples, a long test all of them.
SHARES = [pytest.param(8, id="some"), pytest.param(1, id="all", marks=pytest.mark.long)]


def in_part(cases, nth: int, of: int = 2) -> list:
    """Cases of which a plain run holds each `of`-th, from the `nth` on, and a long test all others."""
    marked = [c if isinstance(c, type(pytest.param())) else pytest.param(c) for c in cases]
    return [
        c if i % of == nth else pytest.param(*c.values, marks=(*c.marks, pytest.mark.long), id=c.id)
        for i, c in enumerate(marked)
    ]


def seed() -> int | None:
    """None, with which a search draws the same each time; a larger budget draws new examples."""
    return None if multiplier() == 1 else random.SystemRandom().getrandbits(32)


def drawing(n: int) -> settings:
    """Settings for drawn graphs: a plain run draws half of `n`, the same ones each time, a larger budget new ones."""
    return settings(
        max_examples=examples(n) if multiplier() > 1 else -(-n // 2),
        deadline=None,  # an interpreter is slow, and a machine may be busy
        derandomize=multiplier() == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def without_calls(graphs):
    """Drawn graphs without recorded calls of torch's ops: transforms that look inside ops refuse those."""
    return graphs.filter(lambda case: all(op.kind.name != "foreign" for op in case.graph.walk()))
