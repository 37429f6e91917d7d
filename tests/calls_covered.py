"""Choose the cases that a plain run leaves out: `PYTHONPATH=tests python -m pytest -q -n 2 -p calls_covered`.

A pytest plugin. It notes the calls inside the library (line of the caller and function called) and the CPU time of each
test. From the slowest on, it lists cases in `long_cases.txt` if other tests make all of their calls, as long as each
test function keeps a case, or the function is slow enough to move as a whole. Cases listed before stay under the same
condition, however fast they are. The tests run several times slower. A run of selected tests writes nothing.

Use `@pytest.mark.long` for a test that is slow by nature, such as one that starts processes or trains a large model.
Use `long_cases.txt` for a case whose checks other, faster tests repeat.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

LONG_CASES = Path(__file__).with_name("long_cases.txt")
LIBRARY = str(Path(__file__).parents[1] / "costgraph") + "/"
SLOW_CASE = 0.15  # seconds
SLOW_FUNCTION = 1.8
#: Tests that read the source, or draw their cases: calls do not tell them apart.
KEPT = ("fuzz/", "laws/", "mutation/", "records/", "test_docs", "test_imports", "test_spellings", "test_text_file")

Call = str
Test = tuple[str, float, frozenset[Call]]


def describe(code: CodeType | None, line: int = 0) -> str:
    """Return the position of a function of the library, or nothing for other functions."""
    if code is None or not code.co_filename.startswith(LIBRARY):
        return ""
    return f"{code.co_filename.removeprefix(LIBRARY)}:{line or code.co_firstlineno}:{code.co_qualname}"


class CallsCovered:
    """Record the calls of each test, and write the list at the end."""

    def __init__(self) -> None:
        self.calls: set[tuple[CodeType, CodeType | None, int]] = set()
        self.tests: list[Test] = []

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            caller = frame.f_back
            self.calls.add((frame.f_code, caller and caller.f_code, caller.f_lineno if caller else 0))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.calls.clear()
        start = time.process_time()
        sys.setprofile(self.note)
        yield
        sys.setprofile(None)
        seconds = time.process_time() - start
        calls = frozenset(f"{describe(caller, line)} > {describe(called)}" for called, caller, line in self.calls)
        self.tests.append((item.nodeid, seconds, calls))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            rows = [[name, seconds, sorted(calls)] for name, seconds, calls in self.tests]
            session.config.workeroutput["calls"] = json.dumps(rows)
        elif session.config.args == session.config.getini("testpaths"):  # other tests may make the calls of a part
            listed = {*LONG_CASES.read_text(encoding="utf-8").splitlines()}
            LONG_CASES.write_text("".join(f"{name}\n" for name in left_out(self.tests, listed)), encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Merge the records from a pytest-xdist worker."""
        for name, seconds, calls in json.loads(node.workeroutput.get("calls", "[]")):
            self.tests.append((name, seconds, frozenset(calls)))


def left_out(tests: list[Test], listed: Set[str]) -> list[str]:
    """Return the slow or listed cases without which every call is still made by another test."""
    times = Counter(call for _, _, calls in tests for call in calls)
    cases = Counter(name.partition("[")[0] for name, _, _ in tests)
    slowest = sorted(tests, key=lambda test: (-test[1], test[0]))
    chosen: list[str] = []

    def leave_out(name: str, calls: frozenset[Call]) -> None:
        if all(times[call] > 1 for call in calls):
            times.subtract(calls)
            cases[name.partition("[")[0]] -= 1
            chosen.append(name)

    for name, seconds, calls in slowest:
        if (seconds >= SLOW_CASE or name in listed) and cases[name.partition("[")[0]] > 1:
            leave_out(name, calls)
    for name, seconds, calls in slowest:
        if seconds >= SLOW_FUNCTION and name not in chosen and not name.removeprefix("tests/").startswith(KEPT):
            leave_out(name, calls)
    return sorted(chosen)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CallsCovered())
