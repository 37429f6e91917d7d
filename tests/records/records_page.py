"""Write the page `docs/accuracy/records.md`: predictions for every raw record.

    python tests/records/records_page.py

writes the page.
"""

from pathlib import Path
from statistics import median

import predictions
from raw_records import raw_records

from costgraph.hardware.units import format_bytes, format_quantity

PAGE = Path(__file__).parents[2] / "docs" / "accuracy" / "records.md"

HEAD = """\
# Raw records

A raw record holds what PyTorch did on one device, row by row: the fastest time, the FLOPs that `FlopCounterMode`
counts and, on a GPU, the peak memory above the baseline. A script that does not import costgraph wrote each record.
This page compares every row with the prediction for it.

You find the records and the commands that wrote them in `tests/measured/`. To regenerate the page, run

```console
$ python tests/records/records_page.py
```

Tests check every row:

- **FLOPs** with `count="full"` equal the counter's exactly. On a CPU the counter ignores
  [scaled_dot_product_attention](../concepts/limits.md); only these FLOPs are subtracted.
- **Peaks** with `allocator="cuda"` and `device="cuda"` are within 2 % in the median of steps and of forward passes. No
  row exceeds 5 %, except for kernels with a workspace (below). CPU records have no peaks; there,
  `tests/records/test_records_oracle.py` compares the same declarations with PyTorch's storages, to the byte.
- **Times** are never below `lower_bound` if the last-level cache holds at most a quarter of the bytes. Between a
  quarter and the whole, the cached bytes are subtracted from the bound. Rows that fit into the cache are marked.

In the sizes, v is the vocabulary, d the width, h heads, f the MLP width, b the batch and s the sequence length.

These GPU kernels may take more than their tensors:

{workspaces}
"""


def seconds(value):
    return format_quantity(value, "s")


def facts(row):
    skipped = ("dtype", "precision", "dropout", "fused_attention", "checkpoint", "optimizer")
    sizes = " ".join(f"{k}={v}" for k, v in row.facts.items() if k not in skipped)
    words = [row.facts[k] for k in ("dtype", "optimizer", "precision") if k in row.facts]
    words += [f"dropout {row.facts['dropout']}"] if row.facts.get("dropout") else []
    words += [w for w, k in (("one kernel", "fused_attention"), ("checkpoint", "checkpoint")) if row.facts.get(k)]
    return f"{sizes}; {', '.join(words)}"


def flops(row, record):
    counted = predictions.counted(row, record.device)
    left_out = predictions.uncounted(row, record.device)
    more = f" + {left_out:,} that the counter leaves out" if left_out else ""
    return f"{row.flops:,}", ("the same" if counted == row.flops else f"{counted:,}") + more


def memory(row, record):
    if not row.memory:
        return ()
    found, wanted = predictions.peak_above(row, record.device), row.memory["peak_above_baseline"]
    return format_bytes(wanted), format_bytes(found), f"{100 * (found - wanted) / max(wanted, 512):+.2f} %"


def time(row, record):
    fastest = seconds(row.times["min_s"])
    if predictions.hardware_of(record) is None:
        return (fastest,)
    least = predictions.least(row, record)
    place = "within the cache" if least.within else "" if least.beyond else "partly in the cache"
    return fastest, seconds(least.seconds), f"{row.times['min_s'] / least.seconds:.2f}", place


def columns(record):
    headings = ["case", "sizes and settings", "FLOPs counted", "predicted"]
    headings += ["peak", "predicted", "off"] if record.device == "cuda" else []
    bounds = ["least time", "times that", "working set"] if predictions.hardware_of(record) else []
    return [*headings, "fastest run", *bounds]


def line(cells):
    return f"| {' | '.join(cells)} |"


def summary(record):
    """Summarize the rows, a sentence for each figure."""
    rows = [r for r in record.rows if r.error is None]
    equal = sum(predictions.counted(r, record.device) == r.flops for r in rows)
    yield f"FLOPs: {equal} rows equal, {len(rows) - equal} differ."
    for name, what in (("train_step", "steps"), ("forward", "forward passes")):
        shares = [100 * predictions.off(r, record.device)[0] for r in rows if r.memory and r.name == name]
        if shares:
            yield f"Peaks, {len(shares)} {what}: median error {median(shares):.2f} %, largest {max(shares):.2f} %."
    if predictions.hardware_of(record):
        bounds = [(r, predictions.least(r, record)) for r in rows]
        fast = sum(r.times["min_s"] < least.seconds for r, least in bounds)
        within = sum(r.times["min_s"] < least.seconds and least.within for r, least in bounds)
        yield f"Time: {fast} rows faster than the lower bound, {within} within the cache."


def section(record):
    at = record.environment
    yield f"\n## {record.path.stem}\n"
    where = at["device"] if record.device == "cuda" else f"CPU, {at['threads']} threads"
    yield f"{where}; torch {at['torch']}; {at['date']}.\n"
    yield "\n".join(f"- {text}" for text in summary(record)) + "\n"
    head = columns(record)
    yield line(head)
    yield f"|{'---|' * len(head)}"
    for row in record.rows:
        name = row.name.replace("_", " ")
        if row.error is not None:
            yield line([name, facts(row), row.error.replace("|", "\\|"), *[""] * (len(head) - 3)])
        else:
            yield line([name, facts(row), *flops(row, record), *memory(row, record), *time(row, record)])


def page():
    """Return the page as Markdown."""
    workspaces = "\n".join(f"- {name}: {why};" for name, why in predictions.WORKSPACES.items())
    parts = [text for record in raw_records() for text in section(record)]
    workspaces += f"\n- any result of 10 MiB or more: {predictions.WHOLE}."
    return HEAD.format(workspaces=workspaces) + "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
