"""The script that writes `docs/accuracy/benchmarks.md`."""

import re
import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = runpy.run_path(str(HERE / "table.py"))
RECORD = {
    "datetime": "2026-11-20T19:00:00+00:00",
    "machine_info": {
        "system": "Linux",
        "release": "6.1",
        "python_version": "3.11.7",
        "cpu": {"brand_raw": "Some CPU", "count": 2},
        "versions": {"sympy": "1.14.0"},
        "load": 1.25,
    },
    "benchmarks": [
        {"name": "test_depth_costs_nothing", "extra_info": {"ratio": 1.0123, "points": 1000000, "bytes": 12345.6}}
    ],
}


def test_record_becomes_a_page():
    page = SCRIPT["page"](RECORD)
    assert "2026-11-20, on Some CPU, 2 cores, Linux 6.1, Python 3.11.7; sympy 1.14.0." in " ".join(page.split())
    assert "its load was 1.2 when the run began" in page
    assert "## depth costs nothing" in page
    assert "| ratio | 1.01 |\n| points | 1,000,000 |\n| bytes | 12,346 |" in page
    assert max(map(len, page.splitlines())) <= 120


def test_unknown_benchmarks_are_refused():
    with pytest.raises(SystemExit, match="nothing is known of test_new"):
        SCRIPT["page"]({**RECORD, "benchmarks": [{"name": "test_new", "extra_info": {}}]})


def test_page_has_every_benchmark():
    text = "".join(path.read_text() for path in HERE.glob("bench_*.py"))
    there_are = set(re.findall(r"def (test_\w+)\(benchmark", text))
    assert {name.partition("[")[0] for name in SCRIPT["ABOUT"]} == there_are
    page = (HERE.parents[1] / "docs" / "accuracy" / "benchmarks.md").read_text()
    titles = re.findall(r"^## (.*)$", page, re.M)
    assert titles == [name.removeprefix("test_").replace("_", " ") for name in SCRIPT["ABOUT"]]
