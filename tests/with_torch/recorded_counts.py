"""Parameters and matmul FLOPs of small reference modules, as torch says them, recorded by torch's version.

    python tests/with_torch/recorded_counts.py

builds every module, runs it under torch's FlopCounterMode, and writes `recorded/counts.json` anew. A plain run of the
tests compares declarations with these numbers, and with modules that are built and counted for a sample of each
family; a long run counts all modules again. With another version of torch or transformers all are counted.
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
#: Families of modules, and the tests whose `counted` asks torch about each of their `VARIANTS`.
FAMILIES = {"dense": "test_zoo_dense", "moe": "test_zoo_moe"}

Counts = tuple[int, int]


def versions() -> dict[str, str]:
    """Versions that the numbers depend on; the builds of one version count the same."""
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
