"""Mutation testing: which small wrong changes of the library do its tests detect?

    python tests/mutation/run.py rules domain analysis/costs
    python tests/mutation/run.py --worth --tests tests/test_dominance.py tests/test_conditions.py -- algebra/dominance

Nothing on disk changes. The parent imports heavy dependencies and collects the tests once; each mutant runs in a fork
in which the code of one function is replaced. For code that runs at import (tables, defaults), the fork imports the
mutated module in a parent that has not imported the library. A mutant meets the tests that reach its line, those of its
own module first, until one fails or its time limit (--limit) is spent. With --worth it meets all of them: each record
has the set of failing tests, and a table shows how many mutants each test kills, and how many it alone kills. Results
go to --out as JSON, one file per module.
"""

from __future__ import annotations

import argparse
import gc
import importlib.machinery
import json
import os
import resource
import signal
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import _lru_cache_wrapper
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from mutants import Mutant, mutants, mutated
from reached import ARGUMENTS, ROOT, TESTS, Choice, in_child, prepare, quiet, reached, say

MOST = 1000  # tests for a mutant in code that runs at import
SURVIVORS = Path(__file__).with_name("survivors.toml")


# -- mutants in functions: replace the code object ---------------------------------------------------------------------


def codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Return the code objects of a module by name and line."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {(code.co_qualname, code.co_firstlineno): code} | {k: v for c in inner for k, v in codes(c).items()}


class Exchange:
    """The functions of a module that exist in memory, including wrapped ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        gc.unfreeze()  # conftest freezes live objects, which gc would not list
        things = gc.get_objects()  # isinstance would access some objects' `__class__`
        self.functions = [f for f in things if type(f) is FunctionType and f.__code__.co_filename == str(path)]
        self.caches = [f for f in things if type(f) is _lru_cache_wrapper and f.__module__.startswith("costgraph")]

    def __call__(self, mutant: Mutant) -> bool:
        """Give every function named in the mutant its new code, and clear caches."""
        new = codes(compile(mutated(self.path.read_text(), mutant), str(self.path), "exec", dont_inherit=True))
        for cache in self.caches:
            cache.cache_clear()
        matching = [f for f in self.functions if f.__code__.co_qualname == mutant.function]
        for f in matching:
            f.__code__ = new[mutant.function, f.__code__.co_firstlineno]
        return bool(matching)


class Exchanging:
    """A pytest plugin that runs mutants instead of tests."""

    def __init__(
        self, module: str, todo: list[Mutant], choice: Choice, limit: float, done: Callable[..., None], *, worth: bool
    ) -> None:
        self.worth = worth
        self.path = ROOT / "costgraph" / f"{module}.py"
        self.todo, self.choice, self.limit, self.done = todo, choice, limit, done

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        expected = pytest.skip.Exception, pytest.xfail.Exception
        if call.excinfo is not None and not isinstance(call.excinfo.value, expected):
            say(f"{item.nodeid}\n")
            self.failed = True
            if not self.worth:
                os._exit(1)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.exchange = Exchange(self.path)
        gc.collect()
        gc.freeze()  # so that a fork does not copy unchanged pages
        for mutant in self.todo:
            chosen = [items[t] for t in self.choice.of(mutant) if t in items]
            status, by = in_child(lambda m=mutant, c=chosen: self.meet(m, c), self.limit)
            self.done(mutant, status, by, len(chosen))
            if status == 1:
                self.choice.kills[mutant.function].update(by.splitlines())
        return True

    def meet(self, mutant: Mutant, items: list[pytest.Item]) -> int:
        """Run a mutant's tests."""
        if not self.exchange(mutant):
            return 4
        until = time.perf_counter() + self.limit
        self.failed = False
        for item in items:
            expected = self.choice.seconds[item.nodeid]
            if time.perf_counter() + expected > until:
                return 1 if self.failed else 5
            signal.setitimer(signal.ITIMER_REAL, 3 + 10 * expected)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return int(self.failed)


# -- mutants at import: the fork imports the library with the mutant ---------------------------------------------------


class Only:
    """A pytest plugin that selects tests and orders them."""

    def __init__(self, wanted: list[str]) -> None:
        self.wanted = {t: i for i, t in enumerate(wanted)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.wanted), key=lambda i: self.wanted[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            say(f"{report.nodeid}\n")
            os._exit(1)


def imported(path: Path, mutant: Mutant, tests: list[str]) -> int:
    """Import the library with one changed module, and run tests."""
    quiet()
    loader = importlib.machinery.SourceFileLoader
    plain = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if Path(self.path) != path:
            return plain(self, name)
        return compile(mutated(path.read_text(), mutant), str(path), "exec", dont_inherit=True)

    loader.get_code = get_code  # type: ignore[method-assign,assignment]
    files = sorted({t.split("::")[0] for t in tests})
    return int(pytest.main([*ARGUMENTS, "-x", *files], plugins=[Only(tests)]))


# -- runs --------------------------------------------------------------------------------------------------------------


def outcome(status: int) -> str:
    """Name a mutant's outcome."""
    if status in (0, 5):  # 5: no test failed within the time limit
        return "survived" if status == 0 else "survived the limit"
    return "timeout" if status == -signal.SIGALRM else "not run" if status == 4 else "killed"


def run(
    module: str, todo: list[Mutant], found: dict[str, Any], limit: float, tests: list[str], *, worth: bool
) -> list[dict[str, Any]]:
    """Run the tests on mutants; return a record for each."""
    choice = Choice(module, found)
    path = ROOT / "costgraph" / f"{module}.py"
    records: list[dict[str, Any]] = []

    def note(mutant: Mutant, status: int, by: str, met: int) -> None:
        record = {"line": mutant.lines[1], "code": mutant.code, "change": mutant.change, "function": mutant.function}
        say(json.dumps(record | {"outcome": outcome(status), "by": by.splitlines(), "tests": met}) + "\n")

    def functions() -> int:
        quiet()
        inside = [m for m in todo if not choice.at_import(m)]
        plugin = Exchanging(module, inside, choice, limit, note, worth=worth)
        return int(pytest.main([*ARGUMENTS, *tests], plugins=[plugin]))

    def at_import() -> int:
        for m in todo:
            if choice.at_import(m):
                tests = choice.of(m)[:MOST]
                status, by = in_child(lambda m=m, tests=tests: imported(path, m, tests), limit + 10)
                note(m, status, by, len(tests))
        return 0

    for work in (functions, at_import):
        _, said = in_child(work)
        records += map(json.loads, said.splitlines())
    return sorted(records, key=lambda r: r["line"])


def key_of(record: Any) -> tuple[str, str]:
    """Return a mutant's key, independent of its line number."""
    return (record.code, record.change) if isinstance(record, Mutant) else (record["code"], record["change"])


def accepted(module: str) -> set[tuple[str, str]]:
    """Return the surviving mutants of a module with a documented reason."""
    reasons = tomllib.loads(SURVIVORS.read_text()) if SURVIVORS.exists() else {}
    return {(s["code"], s["change"]) for s in reasons.get(module, ())}


def summary(module: str, records: list[dict[str, Any]], every: int) -> str:
    """Return a row of the score table: mutants, killed, survived with a reason, survived without, sampled."""
    left = [r for r in records if r["outcome"].startswith(("survived", "not run"))]
    known = sum(key_of(r) in accepted(module) for r in left)
    killed = len(records) - len(left)
    share = 100 * killed / len(records) if records else 100
    return f"{module:22} {len(records):5} {killed:5} {share:5.1f}% {known:4} {len(left) - known:4}  1/{every}"


def worth_of(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line per killing test: the mutants that it kills, and those that it alone kills."""
    kills, alone = Counter[str](), Counter[str]()
    for record in records:
        kills.update(record["by"])
        alone.update(record["by"] if len(record["by"]) == 1 else ())
    for test, count in sorted(kills.items(), key=lambda row: (-alone[row[0]], -row[1], row[0])):
        yield f"{count:6} {alone[test]:6}  {test}"


def main() -> None:
    """Run the given modules' mutants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", help="as in `rules` or `analysis/costs`")
    parser.add_argument("--every", type=int, default=1, help="each n-th mutant alone")
    parser.add_argument("--limit", type=float, default=8, help="seconds of tests for a mutant")
    parser.add_argument("--again", action="store_true", help="meet what survived without a reason again")
    parser.add_argument("--worth", action="store_true", help="meet all tests, and say what each of them is worth")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files of tests, in place of all")
    parser.add_argument("--out", type=Path, default=Path("/tmp/mutation"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    coverage = reached(options.out / "reached.json", options.tests)
    for module in options.modules:
        file = options.out / f"{module.replace('/', '.')}.json"
        all_of_it = mutants((ROOT / "costgraph" / f"{module}.py").read_text())
        todo = all_of_it[:: options.every]
        unchanged: list[dict[str, Any]] = []
        if options.again:
            before, there = json.loads(file.read_text()), {key_of(m) for m in all_of_it}
            again = {key_of(r) for r in before if r["outcome"].startswith("survived")} - accepted(module)
            unchanged = [r for r in before if key_of(r) not in again and key_of(r) in there]
            todo = [m for m in all_of_it if key_of(m) in again]
        records = unchanged + run(module, todo, coverage, options.limit, options.tests, worth=options.worth)
        file.write_text(json.dumps(records, indent=1))
        print(summary(module, records, options.every), flush=True)
        for line in worth_of(records) if options.worth else ():
            print(line)


if __name__ == "__main__":
    main()
