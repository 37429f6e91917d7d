"""Run the most hostile inputs in one process with bounded memory; print every outcome but results and errors."""

import resource
import sys
import tempfile
from pathlib import Path

MOST = 3 * 2**30  # bytes of address space: the libraries take a part of it
resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))

from guard import outcome  # noqa: E402  # after the limit
from hostile import FORMULAS, TEXTS  # noqa: E402
from test_fuzz_texts import READERS  # noqa: E402

import costgraph as cg  # noqa: E402
from costgraph.notation.grammar import parse_formula  # noqa: E402


def main():
    """Exit with 1 if any input gives something other than a result or a library error, including MemoryError."""
    wrong = 0
    for reader, text in [(parse_formula, f) for f in FORMULAS] + [(r, t) for r in READERS.values() for t in TEXTS]:
        try:
            outcome(reader, text)
        except AssertionError as error:
            wrong += 1
            print(str(error)[:300])
    with tempfile.TemporaryDirectory() as folder:
        big = Path(folder, "big.json")
        with big.open("wb") as file:
            file.truncate(2**34)
        for path in (big, Path("/dev/zero"), big.rename(Path(folder, "big.toml"))):
            outcome(cg.load, path)
            outcome(cg.load_hardware, path)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
