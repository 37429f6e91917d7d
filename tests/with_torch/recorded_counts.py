"""Parameters and matmul FLOPs of small reference modules, counted by torch and recorded with its version.

    python tests/with_torch/recorded_counts.py

builds every module, runs it under torch's FlopCounterMode, and rewrites `recorded/counts.json`. A plain test run
compares declarations with these numbers, and counts a sample of each family again; a long run counts all modules again,
as do runs with another version of torch or transformers.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "recorded" / "counts.json"
#: Module families, and the test modules whose `counted` counts their `VARIANTS` with torch.
FAMILIES = {"dense": "test_zoo_dense", "moe": "test_zoo_moe"}

Counts = tuple[int, int]


def versions() -> dict[str, str]:
    """Return the versions that the counts depend on; builds of one version count the same."""
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers")}


@cache
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def counts_of(family: str, name: str, counted: Callable[[str], Counts], *, live: bool) -> Counts:
    """Return the counts of a module: recorded ones, or torch's own for a sample and for other versions."""
    if live or record()["versions"] != versions():
        return counted(name)
    parameters, flops = record()[family][name]
    return parameters, flops


def main() -> None:
    made: dict[str, Any] = {"versions": versions()}
    for family, tests in FAMILIES.items():
        module = import_module(tests)
        made[family] = {name: module.counted(name) for name in sorted(module.VARIANTS)}
    RECORD.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    main()
