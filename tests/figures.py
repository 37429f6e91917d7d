"""Write what the library computes, one figure per line, to check that a restructuring changes no number.

    python tests/figures.py OUT [NAME ...] [--subset zoo|net] [--workers N] [--seconds S]
    python tests/figures.py --diff A B

The first form writes `name <tab> figure <tab> value`, sorted. The second prints the lines that differ between two such
files, and exits with 1 if there are any. The script uses public names only, so that modules may move.

The subset `zoo`, the default, has every model of the zoo: the forward pass, a training step with AdamW in the declared
formats, one decoding step and prefill, with open sizes and at two points.

The subset `net` takes about six minutes on one core. On twelve models it has activation checkpointing, optimizers,
formats, micro-batches, offload, LoRA, quantized and fused graphs, sharding, pipelines, timelines and times on hardware.
It also has searches, serving, devices, files, traces, lowered programs, and the signature of every public name
(`figures_signatures.py`). Name a model or a part, such as `gpt2` or `planning`, to run it alone.

Formulas are written in a canonical order of terms; a value of more than 2000 characters becomes its hash. Tables are
digests. `ops` has amounts alone and `named ops` the names and kinds of ops as well, so that a renamed op changes only
the latter. A refusal is the type of its error: its text may change. `unexpected` marks an error that is not costgraph's
own.

The zoo subset leaves out eager attention, dropout, composed declarations and structures other than the published
ones, which have tests of their own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import figures_parts
import figures_signatures
import figures_variants
import figures_zoo
from figures_text import asked, canonical

import costgraph as cg

__all__ = ["canonical", "differing", "main", "read", "write"]

#: Default limit for one graph, in seconds of processor time: about ten times the slowest graph.
SECONDS = 400.0


def _names(subset: str) -> list[str]:
    """Return the models and parts in a subset."""
    if subset == "zoo":
        return cg.models.names()
    return [*figures_variants.MODELS, *figures_parts.PARTS, "signature"]


def _figures(name: str, subset: str, seconds: float) -> Mapping[str, str]:
    """Return the figures for a model or a part by key."""
    if name == "signature":
        return asked("", seconds, figures_signatures.lines)
    if name in figures_parts.PARTS:
        return figures_parts.figures(name, seconds)
    makers: list[Callable[[str, float], dict[str, str]]] = [figures_zoo.figures]
    if subset == "net":
        makers.append(figures_variants.figures)
    return {key: value for make in makers for key, value in make(name, seconds).items()}


def _timed(name: str, subset: str, seconds: float) -> tuple[str, Mapping[str, str], float]:
    start = time.process_time()
    return name, _figures(name, subset, seconds), time.process_time() - start


# -- files -----------------------------------------------------------------------------------------------------


def write(path: Path, names: list[str], subset: str = "zoo", workers: int = 1, seconds: float = SECONDS) -> None:
    """Write the figures for models and parts to a file."""
    task, spent, lines = partial(_timed, subset=subset, seconds=seconds), 0.0, []
    with multiprocessing.get_context("spawn").Pool(workers) if workers > 1 else _Serial() as pool:
        for name, found, took in pool.imap_unordered(task, names):
            lines += [f"{name}\t{key}\t{value}\n" for key, value in found.items()]
            spent += took
            print(f"{name}: {len(found)} figures, {took:.1f} s", file=sys.stderr, flush=True)
    path.write_text("".join(sorted(lines)), encoding="utf-8")
    print(f"{len(lines)} figures of {len(names)} names, {spent:.0f} s of processor time", file=sys.stderr)
    for line in lines:
        if "\tunexpected " in line or "\ttoo slow" in line:
            print(line, end="", file=sys.stderr)


class _Serial:
    """Runs tasks in this process, with the interface of a pool."""

    imap_unordered = staticmethod(map)

    def __enter__(self) -> _Serial:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def read(path: Path) -> dict[str, str]:
    """Read a file that `write` made: values by name and key."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return {key: value for key, _, value in (line.rpartition("\t") for line in lines if line)}


def differing(before: Path, after: Path) -> list[str]:
    """Return the figures that differ between two files, as lines."""
    a, b = read(before), read(after)
    changed = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
    marked = ((sign, key, side.get(key)) for key in changed for sign, side in (("-", a), ("+", b)))
    return [f"{sign} {key}\t{value}" for sign, key, value in marked if value is not None]


def main(words: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", help="file to write")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models or parts of the subset, by default all")
    parser.add_argument("--subset", choices=("zoo", "net"), default="zoo", help="zoo: all models; net: all features")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of processor time for one graph")
    parser.add_argument("--diff", type=Path, nargs=2, metavar=("A", "B"), help="files to compare")
    given = parser.parse_args(words)
    if given.diff:
        lines = differing(*given.diff)
        print("\n".join([*lines, f"{len(lines)} lines differ"]))
        return 1 if lines else 0
    if given.out is None:
        parser.error("expected a file to write, or --diff A B")
    names = _names(given.subset)
    if unknown := sorted(set(given.names) - set(names)):
        parser.error(f"{', '.join(unknown)}: not in the subset {given.subset!r}, no model of the zoo or part")
    write(given.out, given.names or names, given.subset, given.workers, given.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
