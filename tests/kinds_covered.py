"""List the tests for each op kind: `PYTHONPATH=tests python -m pytest -q -n 2 -p kinds_covered` writes the page.

This pytest plugin records op kinds in graphs that reach one of five places: the cost laws, the training laws and
finite-difference comparisons, the per-rank comparison with one device, the lowering to torch, and the tracer. For each
kind and place the page names the fastest test and counts the others.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent / "vjp"))  # as its conftest.py does, but later

PAGE = Path(__file__).parents[1] / "docs" / "accuracy" / "kinds.md"
PLACES = ("cost law", "gradient law", "sharding law", "lowering", "trace")
HEAD = """# Tests of each op kind

For each op kind, this table names the fastest test that exercises it, and counts the others. If you change a rule, run
these tests first.

- **Cost law**: the interpreter counts the FLOPs and bytes of graphs with this kind.
- **Gradient law**: gradients equal finite differences.
- **Sharding law**: ranks compute the same numbers as one device.
- **Lowering**: PyTorch runs it.
- **Trace**: a traced program contains it.

An empty cell has its reason in `tests/test_every_kind.py`, or only a transform creates the kind. To regenerate the
page, run `PYTHONPATH=tests python -m pytest -q -n 2 -p kinds_covered`.

"""

Found = dict[tuple[str, str], dict[str, float]]  # (kind, place) -> seconds of tests by name


class KindsCovered:
    """Record kinds while tests run, and write the page at the end."""

    def __init__(self) -> None:
        self.now: set[tuple[str, str]] = set()
        self.found: Found = defaultdict(dict)
        self.seconds: dict[str, float] = defaultdict(float)

    def note(self, place: str, kinds: Iterable[str]) -> None:
        self.now.update((kind, place) for kind in kinds)

    def of_graph(self, place: str, call: Callable[..., Any], which: Callable[..., Any]) -> Callable[..., Any]:
        """Record the kinds in a graph that a call receives or returns."""

        def noted(*args: Any, **options: Any) -> Any:
            made = call(*args, **options)
            self.note(place, {op.kind.name for op in which(made, *args).walk()})
            return made

        return noted

    def watch(self) -> None:
        import pulls

        import costgraph.torch
        from costgraph.testing import (
            properties,
            ranks,
        )
        from costgraph.torch.lowering import context as lowering

        first = self.of_graph("cost law", properties.Trial.__init__, lambda _, trial, graph, *rest: graph)
        properties.Trial.__init__ = first  # type: ignore[method-assign,assignment]
        check = self.of_graph("gradient law", properties.check_training, lambda _, graph, *rest: graph)
        properties.check_training = costgraph.testing.check_training = check  # type: ignore[assignment]
        pulls.gradients = self.of_graph("gradient law", pulls.gradients, lambda made, *rest: made[2])
        ranks._mesh = self.of_graph("sharding law", ranks._mesh, lambda _, graph, *rest: graph)
        costgraph.torch.trace = self.of_graph("trace", costgraph.torch.trace, lambda made, *rest: made)  # type: ignore[assignment]
        for kind, run in lowering._lowerings.items():
            lowering._lowerings[kind] = self.lowered(kind.name, run)

    def lowered(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.note("lowering", [name])
            return run(*args, **options)

        return noted

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.now.clear()
        result = yield
        for place in self.now:
            self.found[place][item.nodeid] = self.seconds[item.nodeid]
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            rows = [[*place, tests] for place, tests in self.found.items()]
            session.config.workeroutput["kinds"] = json.dumps(rows)
        elif self.found:
            PAGE.write_text(HEAD + table(self.found), encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Merge the records from a pytest-xdist worker."""
        for kind, place, tests in json.loads(node.workeroutput.get("kinds", "[]")):
            self.found[kind, place] |= tests


def table(found: Found) -> str:
    """Return one row per op kind in the library."""
    from costgraph.ops.registry import KINDS

    rows = [["op kind", *PLACES], ["---"] * (1 + len(PLACES))]
    for name, kind in sorted(KINDS.items()):
        if kind.__module__.startswith("costgraph."):
            rows.append([f"`{name}`", *(cell(found.get((name, place), {})) for place in PLACES)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def cell(tests: dict[str, float]) -> str:
    """Return the fastest test and the number of others."""
    if not tests:
        return ""
    name = min(tests, key=lambda t: (round(tests[t], 2), t)).removeprefix("tests/").replace("|", "/")
    return f"`{name}`" + (f" + {len(tests) - 1}" if len(tests) > 1 else "")


def pytest_configure(config: pytest.Config) -> None:
    plugin = KindsCovered()
    plugin.watch()
    config.pluginmanager.register(plugin)
