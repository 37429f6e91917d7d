"""Table of measured times over lower bounds, within and beyond the last-level cache: docs/howto/measure.md.

python tests/with_torch/bound_table.py > table.md

One thread. Times and device rates are in CPU seconds of the thread, so other processes affect only its cache. The
device is calibrated before and after; the faster result counts for each rate.
"""

import time
from unittest import mock

import torch
from outside_cache import elementwise, fastest, products

import costgraph as cg
from costgraph.torch.calibration import calibrate
from costgraph.torch.measurement import environment

MIB = 2**20
SETS = (MIB // 4, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
SHAPES = ((64, 64, 64), (256, 256, 256), (1024, 1024, 1024), (2053, 2053, 2053), (8192, 1, 8192), (1, 8192, 8192))


def cases():
    """Yield the row name, column name, graph and call."""
    for size in SETS:
        for name, graph, call in elementwise(size // 4096):
            yield name, f"{size / MIB:g} MiB", graph, call
    for m, k, n in SHAPES:
        for dtype in ("fp32", "bf16", "fp64"):
            for _, graph, call in products(m, k, n, dtype):
                yield f"{m} x {k} x {n}", dtype, graph, call


def print_table(corner, rows, columns, cells):
    """Write a table in Markdown, with ratios below one highlighted."""
    print(f"| {corner} | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for row in rows:
        texts = (f"**{r:.2f}**" if r < 1 else f"{r:.2f}" for r in (cells[row, column] for column in columns))
        print(f"| {row} | {' | '.join(texts)} |")
    print()


def main():
    torch.set_num_threads(1)
    with mock.patch("time.perf_counter", time.thread_time):
        before = calibrate("cpu", quick=True)
        found = [(row, column, graph, fastest(call, least=3, budget=0.1)) for row, column, graph, call in cases()]
        calibration = before.faster(calibrate("cpu", quick=True))
    hardware = calibration.hardware
    cells = {(row, column): seconds / cg.roofline(graph, hardware).lower_bound for row, column, graph, seconds in found}
    print(environment("cpu"), calibration.cache, "\n")
    print(calibration, "\n")
    for place, quantity in hardware.rows:
        if place.startswith("measured."):
            print(f"| {place} | {quantity} | {quantity.note} |")
    print()
    rows = list(dict.fromkeys(row for row, column, *_ in found if column.endswith("MiB")))
    print_table("op on rows of 1024 fp32", rows, [f"{size / MIB:g} MiB" for size in SETS], cells)
    print_table("product", [f"{m} x {k} x {n}" for m, k, n in SHAPES], ["fp32", "bf16", "fp64"], cells)


if __name__ == "__main__":
    main()
