"""Line coverage and duration per test, and the child processes that run tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:benchmark", "--assert=plain", "--tb=no"]
ARGUMENTS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
FEW_LAWS = "tests/mutation/laws_for_mutants.py"
LONG = [
    "tests/benchmarks", "tests/fuzz", "tests/mutation/test_mutants.py",
    *(f"tests/laws/test_law_{n}.py" for n in ("faults", "graphs", "layout", "ops", "order", "patterns", "transforms")),
]  # fmt: skip
TESTS = ["tests", FEW_LAWS, *(f"--ignore={path}" for path in LONG)]
# tests for modules without a same-named test file
HOMES = {
    "ops/rules": ["einsum", "conv", "attention", "index", "reduce", "stated"],
    "ir/graph": ["attention"],
    "ops/access_footprint": ["costs", "index", "layout", "transforms"],
    "ir/strides": ["pointwise"],
    "ops/axis_sizes": ["einsum"],
    "algebra/dominance": ["extremum"],
    "analysis/roofline": ["models"],
    "transforms/fuse": ["transforms"],
    "transforms/rewrite": ["transforms"],
    "transforms/unroll": ["transforms"],
    "analysis/costs": ["costs", "einsum", "reduce"],
    "analysis/params": ["nn", "repeat"],
    "analysis/memory": ["peak", "repeat"],
    "analysis/liveness": ["repeat", "peak"],
    "ops/einsum": ["einsum"],
    "algebra/polynomial": ["polynomial"],
}
# -- children ----------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], int], seconds: float = 0) -> tuple[int, str]:
    """Run a function in a fork; return its exit status, negative for a signal, and its output on descriptor 3."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        os.dup2(writing, 3)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        status = 70
        try:
            status = work()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        output = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, output


def say(text: str) -> None:
    """Send a message to the parent."""
    os.write(3, text.encode())


def quiet() -> None:
    """Discard test output."""
    null = os.open(os.environ.get("MUTLOG", os.devnull), os.O_RDWR | os.O_CREAT, 0o644)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def prepare() -> None:
    """Import heavy dependencies, and make hypothesis draw the same examples each time."""
    import einops  # noqa: F401
    import hypothesis
    import matplotlib.figure  # noqa: F401
    import networkx  # noqa: F401
    import opt_einsum  # noqa: F401
    import rich.console  # noqa: F401
    import sympy  # noqa: F401
    import torch.utils.flop_counter
    import typer.testing  # noqa: F401
    from hypothesis import HealthCheck, Phase

    torch.set_num_threads(1)
    hypothesis.settings.register_profile(
        "mutation",
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    hypothesis.settings.load_profile("mutation")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.chdir(ROOT)


# -- coverage by test --------------------------------------------------------------------------------------------------


class Reached:
    """A pytest plugin that records the lines that each test runs, and its duration."""

    def __init__(self, out: Path) -> None:
        import coverage

        self.out = out
        self.cover = coverage.Coverage(data_file=None, source=[str(ROOT / "costgraph")])
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.elsewhere: set[str] = set()  # tests that start another process, which a mutant would not reach
        start = subprocess.Popen.__init__

        def noted(*args: Any, **options: Any) -> None:
            self.elsewhere.add(self.now)
            start(*args, **options)

        subprocess.Popen.__init__ = noted  # type: ignore[method-assign]
        self.cover.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.now = item.nodeid
        self.cover.switch_context(item.nodeid)
        begin = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - begin
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.cover.stop()
        data = self.cover.get_data()
        usable = {t: s for t, s in self.seconds.items() if t not in self.elsewhere and t not in self.failed}
        lines = {
            str(Path(file).relative_to(ROOT)): {n: [t for t in ts if t in usable] for n, ts in report.items()}
            for file in data.measured_files()
            if (report := data.contexts_by_lineno(file))
        }
        imports = {
            str(Path(file).relative_to(ROOT)): [n for n, ts in data.contexts_by_lineno(file).items() if "" in ts]
            for file in data.measured_files()
        }
        report = {"tests": usable, "failed": self.failed, "lines": lines, "imports": imports}
        self.out.write_text(json.dumps(report))


def reached(out: Path, chosen: list[str]) -> dict[str, Any]:
    """Run the tests once without a mutant: all of them, or only the new ones if no code has changed."""
    code, tests = ((ROOT / part).rglob("*.py") for part in ("costgraph", "tests"))
    known: dict[str, Any] = {"tests": {}, "failed": [], "lines": {}, "imports": {}}
    todo = chosen
    if out.exists() and all(f.stat().st_mtime < out.stat().st_mtime for f in code):
        known = json.loads(out.read_text())
        newer = [str(f.relative_to(ROOT)) for f in tests if f.stat().st_mtime > out.stat().st_mtime]
        todo = [
            f for f in newer if (Path(f).name.startswith("test_") or f == FEW_LAWS) and not f.startswith(tuple(LONG))
        ]
    if todo:
        new = out.with_suffix(".new")

        def work() -> int:
            quiet()
            return int(pytest.main([*ARGUMENTS, *todo], plugins=[Reached(new)]))

        in_child(work)
        known = _joined(known, json.loads(new.read_text()), todo)
        out.write_text(json.dumps(known))
    if known["failed"]:
        print(f"left out, as they fail without a change: {known['failed']}")
    return known


def _joined(old: dict[str, Any], new: dict[str, Any], files: list[str]) -> dict[str, Any]:
    """Merge measurements; re-measured files replace their old entries."""

    def stays(test: str) -> bool:
        return test.split("::")[0] not in files

    lines: dict[str, dict[str, list[str]]] = {}
    for part, kept in ((old, stays), (new, bool)):
        for file, found in part["lines"].items():
            for n, names in found.items():
                lines.setdefault(file, {}).setdefault(n, []).extend(filter(kept, names))
    return {
        "tests": {t: s for t, s in old["tests"].items() if stays(t)} | new["tests"],
        "failed": [*filter(stays, old["failed"]), *new["failed"]],
        "lines": lines,
        "imports": old["imports"] or new["imports"],
    }


class Choice:
    """Select and order the tests for a mutant."""

    def __init__(self, module: str, found: dict[str, Any]) -> None:
        self.seconds: dict[str, float] = found["tests"]
        self.lines = {int(n): ts for n, ts in found["lines"].get(f"costgraph/{module}.py", {}).items()}
        self.imports = set(found["imports"].get(f"costgraph/{module}.py", ()))
        stem = module.rsplit("/", 1)[-1]
        self.homes = [tuple(f"tests/test_{n}.py" for n in names) for names in ((stem,), HOMES.get(module, ()))]
        self.kills: dict[str, Counter[str]] = defaultdict(Counter)

    def at_import(self, mutant: Mutant) -> bool:
        """Whether a mutant is in code that runs only at import, such as a function that fills a table."""
        reached = any(self.lines.get(n) for n in mutant.lines)
        return not mutant.function or (not reached and self.imports.issuperset(mutant.lines))

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutated line: first the killers of neighbouring mutants, then the fast ones."""
        where = self.lines if self.at_import(mutant) else mutant.lines
        tests = {t for n in where for t in self.lines.get(n, ())}
        if self.at_import(mutant):  # a test that reads a table runs no line of its module
            tests |= {t for t in self.seconds if t.startswith(self.homes[0])}
        kills = self.kills[mutant.function]

        def rank(test: str) -> tuple[object, ...]:
            return -kills[test], *(not test.startswith(home) for home in self.homes), self.seconds[test]

        return sorted(tests, key=rank)
