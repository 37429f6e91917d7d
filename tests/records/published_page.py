"""Write the page `docs/accuracy/published_gpus.md`: published GPU measurements and predictions.

    python tests/records/published_page.py

writes the page and its figure, which takes some minutes of CPU time.
"""

from collections import Counter
from functools import cache
from pathlib import Path

from costgraph.hardware.specs import load_hardware
from costgraph.report.records import hold
from costgraph.report.records.predictions import spread
from costgraph.report.records.show import plot_times

ROOT = Path(__file__).resolve().parents[2]
PAGE, FILE = ROOT / "docs" / "accuracy" / "published_gpus.md", ROOT / "tests" / "measured" / "published" / "gpus.json"
PICTURE = "../_static/published_times.png"
#: Ratio of measured to estimated time beyond which a record is listed, with its cause if known.
FACTOR = 3
#: Approximate launch overhead of a kernel in seconds: shorter times measure little else.
LAUNCH = 20e-6
#: Metric that torch's allocator counts exactly.
COUNTED = "max_memory_allocated"

device_of = cache(load_hardware)

HEAD = """\
# Published measurements of GPUs

`tests/measured/published/gpus.json` collects {count:,} measurements that others made on GPUs, each with the
repository, path and commit it was read from. No number was changed. This page compares them with predictions. You can
do the same with your own file:

```console
$ costgraph validate --records gpus.json --out predictions.json
```

The exit code is 0 if all limits hold. A record has `id`, `source`, `device` (a name of `costgraph hardware`),
`family`, `what`, `inputs`, `quantity`, `unit`, `value` and an optional `note`. In Python,
`costgraph.report.records.hold(path)` returns `.records`, `.rows`, `.limits` and `.save(path)`. One function per family
in `costgraph.report.records` turns a record into a graph.

## How to read the tables

- The **estimate** is the roofline's: the sum over ops of the larger of compute and memory time at datasheet peaks. It
  ignores launches, partial tiles and falling clocks.
- The **lower bound** is the busiest unit at its peak, or the fused bytes. Operands that a repeated kernel finds in L2
  need no memory traffic. A time counts as below the bound if its last printed digit leaves no doubt.
- Ratios are measured over estimated times. p10 and p90 are percentiles.

The programs:

- Training passes of llm-foundry are one device among many, without the optimizer and the network.
- Vision models run under autocast, eagerly or fused as by `torch.compile`.
- A decode step is the one in the middle of the generation, or the first if no prompt is given. On several devices it
  is the step of one rank with its collectives.
- Batched requests are prefill, then decode step by step, all starting together. If their number is not given, it is as
  many as fit with half of each answer.
- Training steps of other libraries are one rank, communication not overlapped. A host optimizer takes the time of its
  transfers only.
- Single PyTorch calls and their backward passes are traced, which needs torch.

**Peaks** were counted by PyTorch's allocator while the benchmark repeated a call: with the gradients of the previous
run, the seeds of the backward pass and the parameters of other variants, as the benchmark's code of that date creates
them, plus library workspaces, in allocator blocks. Other totals, such as reserved memory or memory of the process, are
listed without a limit.

**Oddities** that are left as they are: `llamacpp-llama-3-8b-F16-pp4096-a100-80-sxm` has 866 tokens/s where the same
source prints 5,122 for four-bit weights. Some A100 streams do not say SXM or PCIe. A vision model named after CLIP is
its image tower. Vectors shorter than a thousand elements measure a launch. Liger's peaks of embeddings (12 to 14 GB of
other allocations), of softmax and squared ReLU by `N` (kilobytes for megabytes of data), and of preference losses of
2024 (2.2 GB at any size) do not match their inputs.
"""


def line(cells):
    return f"| {' | '.join(map(str, cells))} |"


def ratio(value):
    return "" if value is None else f"{value:.2f}"


def table(found):
    """Yield a table with families by device."""
    yield line(["family", "device", "records", "predicted", "below the bound", "p10", "median", "p90"])
    yield line(["---"] * 8)
    for g in found.rows:
        amounts = (g.rows, g.predicted, g.violations, *map(ratio, (g.p10, g.median, g.p90)))
        yield line([g.family, g.device, *amounts])


def subjects(found):
    """Yield the totals over all devices."""
    groups = {}
    for row in found.records:
        if row.ratio is not None:
            groups.setdefault(row.subject, []).append(row.ratio)
    yield line(["subject", "predicted", "p10", "median", "p90", "within a factor of 2"])
    yield line(["---"] * 6)
    for name, ratios in groups.items():
        near = sum(0.5 <= r <= 2 for r in ratios) / len(ratios)
        yield line([name, len(ratios), *map(ratio, spread(ratios)), f"{near:.0%}"])


def tiles(given):
    """Return the 128 x 128 tiles in a matmul result, or in a convolution's implicit matmul, and how full they are;
    else None."""
    if given.get("op") == "gemm" and "M" in given:
        rows, columns = given["M"], given["N"]
    elif given.get("op") == "conv":
        pixels, taps = given["N"] * given["out_h"] * given["out_w"], given["C"] * given["R"] * given["S"]
        inputs = given["N"] * given["H"] * given["W"]
        rows, columns = {
            "forward": (pixels, given["K"]), "backward-inputs": (inputs, given["C"]),
            "backward-weights": (given["K"], taps),
        }[given["direction"]]  # fmt: skip
    else:
        return None
    count = -(-rows // 128) * -(-columns // 128)
    return count, rows * columns / (count * 128**2)


def cause(row):
    """Return the reason for a large time ratio if it is computable."""
    given, tables = row.record.inputs, device_of(row.record.device).tables
    if row.ratio > 1 and row.estimate / row.ops < LAUNCH:
        return f"ops of less than {LAUNCH * 1e6:g} us each by the estimate: launches, and what barely starts"
    steps = given.get("stride_w", 1) * given.get("stride_h", 1)
    if given.get("direction") == "backward-inputs" and steps > 1 and row.ratio <= 2 * steps:
        return "a gradient by inputs with strides: a kernel that runs over all pixels multiplies by zeros as often"
    found, cores = tiles(given), tables.get("cores", {}).get("count")
    if found is not None and cores is not None and found[0] < float(cores):
        return "fewer tiles of 128 by 128 than the device has cores: the others are idle, or share sums"
    if found is not None and found[1] <= 0.5 and row.ratio * found[1] <= 2:
        return "tiles of 128 by 128 are half full at most, and their work explains the time"
    if given.get("op") == "conv" and min(given["C"], given["K"]) < 64:
        return "fewer than 64 channels: tiles of a product are mostly empty"
    vector = device_of(row.record.device).vector.get("fp32")
    if given.get("dtype") == "int8" and vector is not None:
        rate = 2 * given["M"] * given["N"] * given["K"] / row.seconds if "M" in given else 0
        if 0 < rate < 4 * float(vector):
            return "no faster than four-way dot products on CUDA cores: tensor cores are not used"
    return ""


def outliers(found):
    """Yield the records beyond the factor: counts by cause, and the names of unexplained ones."""
    far = [row for row in found.records if row.ratio and not 1 / FACTOR <= row.ratio <= FACTOR]
    causes = {row.record.id: cause(row) for row in far}
    counts = Counter((row.record.family, causes[row.record.id]) for row in far)
    yield line(["family", "records", "cause"])
    yield line(["---"] * 3)
    for (family, why), n in sorted(counts.items()):
        yield line([family, n, why or "unexplained, listed below"])
    yield "\n| unexplained | device | measured over estimate |\n| --- | --- | --- |"
    for row in far:
        if not causes[row.record.id]:
            yield line([f"`{row.record.id}`", row.record.device, ratio(row.ratio)])


def peaks(found):
    """Yield the predicted peaks that are off by more than 4 KiB."""
    yield line(["record", "device", "measured bytes", "predicted"])
    yield line(["---"] * 4)
    for row in found.records:
        if row.peak is not None and row.record.quantity == COUNTED and abs(row.peak - row.bytes) > 4096:
            yield line([f"`{row.record.id}`", row.record.device, f"{row.bytes:,}", f"{row.peak:,}"])


def totals(found):
    """Yield memory totals that no allocator counted, with the derived ones."""
    yield line(["record", "device", "what", "measured GB", "derived GB", "deviation"])
    yield line(["---"] * 6)
    for row in found.records:
        if row.peak is not None and row.record.quantity != COUNTED:
            off = f"{row.peak / row.bytes - 1:+.1%}"
            cells = (row.record.device, row.record.quantity, f"{row.bytes / 1e9:.2f}", f"{row.peak / 1e9:.2f}", off)
            yield line([f"`{row.record.id}`", *cells])


def page(found):
    """Return the page as Markdown."""
    below = [row for row in found.records if row.violated]
    parts = [HEAD.format(count=len(found.records)), "\n## Limits\n"]
    parts += [f"- {'holds' if limit.holds else '**fails**'}: {limit}." for limit in found.limits]
    parts += ["\n## By subject\n", *subjects(found)]
    parts += [f"\n![measured against estimated times, a colour a family, dashed a factor of two]({PICTURE})"]
    parts += ["\n## By family and device\n", *table(found)]
    parts += ["\n## Not predicted\n", line(["family", "records", "reason"]), line(["---"] * 3)]
    parts += [line([f, n, why.replace("|", "/")[:200]]) for (f, why), n in sorted(found.reasons.items())]
    parts += [f"\n## Off by more than a factor of {FACTOR}\n", *outliers(found)]
    parts += ["\n## Peaks that are off by more than 4 KiB\n", *peaks(found)]
    parts += ["\n## Other totals of memory\n", *totals(found)]
    parts += ["\n## Below the bound\n", line(["record", "device", "measured over bound"]), line(["---"] * 3)]
    parts += [line([f"`{r.record.id}`", r.record.device, f"{r.seconds / r.bound:.3f}"]) for r in below]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    HELD = hold(FILE)
    PAGE.write_text(page(HELD), encoding="utf-8")
    plot_times(HELD, PAGE.parent / PICTURE)
