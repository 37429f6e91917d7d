"""Tests have no wall-clock timeouts: a slow machine must not look like a broken library."""

import ast
import re
import signal
import time
from pathlib import Path

import pytest
from each import each
from limits import TooSlowError, limited

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns"}
#: Every clock use contains one of these words.
WORDS = re.compile(r"\b(?:time|alarm|ITIMER_REAL|timeout|deadline)\b")
#: Tools that are run by hand, with a duration given by the user.
TOOLS = {"fuzz/__main__.py", "laws/hunt.py", "mutation/run.py", "mutation/reached.py", "with_torch/zoo_page.py"}


def clocks(tree):
    """Yield clock reads and clock-based limits, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("time"), attr=name)) if name in CLOCKS:
                yield node.lineno, f"time.{name}"
            case ast.ImportFrom(module="time", names=names) if CLOCKS & {n.name for n in names}:
                yield node.lineno, "from time import"
            case ast.Attribute(attr="ITIMER_REAL") | ast.Attribute(attr="alarm"):
                yield node.lineno, node.attr
            case ast.keyword(arg="timeout" | "deadline", value=ast.Constant(value=int() | float() as seconds)):
                yield node.value.lineno, f"{node.arg}={seconds}"


def clocks_of(text):
    """Return the clocks in a file; parse it only if it contains one of the words."""
    return clocks(ast.parse(text)) if WORDS.search(text) else ()


def test_no_test_reads_the_clock():
    uses = {
        f"{path.relative_to(TESTS)}:{line} {what}"
        for path in TESTS.rglob("*.py")
        if str(path.relative_to(TESTS)) not in TOOLS | {"limits.py"}
        for line, what in clocks_of(path.read_text(encoding="utf-8"))
    }
    assert not uses


@each(
    "text",
    ["import time\nassert time.monotonic() - start < 5", "from time import perf_counter", "run(timeout=60)",
     "signal.setitimer(signal.ITIMER_REAL, 8)", "settings(deadline=200)", "signal.alarm(5)"],
)  # fmt: skip
def test_clock_uses_are_detected(text):
    assert list(clocks_of(text))


def spin():
    while True:
        pass


# -- limits --------------------------------------------------------------------------------------------------------


def test_cpu_limit_stops_busy_loops_but_not_waits():
    with pytest.raises(TooSlowError, match=r"more than 0\.05 s of the processor"), limited(0.05):
        spin()
    with limited(0.05):
        time.sleep(0.1)


def test_endless_wait_is_stopped():
    with pytest.raises(TooSlowError, match=r"more than 0\.02 s times 30 of the clock"), limited(0.02):
        time.sleep(100)


def inside_another():
    with limited(5):
        pass
    spin()


def test_nested_limit_keeps_the_outer_one():
    with pytest.raises(TooSlowError, match=r"0\.05"), limited(0.05):
        inside_another()
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
