"""How many examples a randomised test draws: a fixed number, times what COSTGRAPH_EXAMPLES says."""

import os

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
