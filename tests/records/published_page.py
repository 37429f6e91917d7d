"""The page `docs/published_gpus.md`: what others measured on GPUs, and predictions beside it.

    python tests/records/published_page.py

writes it anew with its picture, which takes some minutes of the processor.
"""

from collections import Counter
from pathlib import Path

from costgraph.hardware.specs import list_hardware, load_hardware
from costgraph.report.records import hold
from costgraph.report.records.predictions import spread
from costgraph.report.records.show import plot_times

ROOT = Path(__file__).resolve().parents[2]
PAGE, FILE = ROOT / "docs" / "published_gpus.md", ROOT / "tests" / "measured" / "published" / "gpus.json"
PICTURE = "_static/published_times.png"
#: Measured over estimated times beyond which a record is listed, with its cause where one is known.
FACTOR = 3
#: Seconds that a kernel takes to start and to end, of the order of: what is shorter measures little else.
LAUNCH = 20e-6
#: What torch's allocator counts to the byte.
COUNTED = "max_memory_allocated"
DEVICES = {name: load_hardware(name) for name in list_hardware()}

HEAD = """\
# Published measurements of GPUs

`tests/measured/published/gpus.json` has {count:,} measurements that others made on GPUs and published, each with the
repository, path and commit, or the address, that it was read in. No number of theirs is changed. This page is what

```console
$ costgraph validate --records gpus.json --out predictions.json
```

says of them. Every record is predicted, or listed below with the reason why not; the exit code is 0 where all limits
hold. Any file of that form can be asked: a list of records with `id`, `source`, `device` (a name of
`costgraph hardware`), `family`, `what`, `inputs`, `quantity`, `unit`, `value`, and a `note` if there is one.

A family's record becomes a graph by one function, in `costgraph.report.records`; a new family is one more of them. In
Python, `costgraph.report.records.hold(path)` answers with `.records`, `.rows`, `.limits` and `.save(path)`.

**The estimate** is the roofline's: the sum over ops, as declared, of the larger of compute and memory time at the peaks
of the data sheet. It knows of no launch, no tile that is cut off, no clock that falls. **The lower bound** is the
busiest unit at its peak, or the bytes that no fusion avoids; what a kernel that is run again finds in the L2 needs no
memory. A time counts as below the bound where its last printed digit leaves no doubt. Rates of products count two for
each index point, those of streams the bytes read and written, those of attention the pairs that are seen.

Passes of training by llm-foundry are forward and backward pass of one device among many: the optimizer's update is
spread over all, and a network is not predicted. Vision models run under autocast, in eager mode or fused as
`torch.compile` does. A step of generation is that in the middle of what was generated, the first one where no prompt
is stated; on several devices it is that of one rank (`costgraph.parallelize`), with what it sends. Requests that are
served together are their prompts, and then step by step their answers, all begun at once; where their number is not
stated, as many as memory holds with half of an answer each. Whole steps of other libraries are those of one rank too,
with all it sends, nothing of it at the same time as other work; an optimizer on the host takes the time of its
transfers alone. Single calls of plain torch, with their backward passes, are traced, which needs torch.

**Peaks of memory** are those that torch's allocator counted while a benchmark ran such a call again: with the gradients
of the run before, those that the backward pass starts from, and the parameters of other forms of the program, where the
benchmark of that date made them; with what libraries keep for the compute capability of the device, in blocks as they
are handed out. What ran on a date is that of the benchmark's repository. Other totals of memory, of what is reserved or
of a whole process, are listed with what is derived for them; nothing is asked of these.

**What looks odd** in the file, and is left as it is: `llamacpp-llama-3-8b-F16-pp4096-a100-80-sxm` has 866 tokens/s
where the same source prints 5,122 for four-bit weights on the same device; streams of A100 boards come from files that
do not say SXM or PCIe; a vision model named after CLIP is its image tower alone, while the zoo's has both; times of
vector lengths below a thousand are those of a launch. Liger's peaks of embeddings (12 to 14 GB of other allocations),
of softmax and squared ReLU by `N` (kilobytes where a matrix has megabytes), and of losses of preferences of 2024
(2.2 GB that are in no program, whatever the size) are of something else than their inputs say.
"""


def line(cells):
    return f"| {' | '.join(map(str, cells))} |"


def ratio(value):
    return "" if value is None else f"{value:.2f}"


def table(found):
    """Families by device."""
    yield line(["family", "device", "records", "predicted", "below the bound", "p10", "median", "p90"])
    yield line(["---"] * 8)
    for g in found.rows:
        amounts = (g.rows, g.predicted, g.violations, *map(ratio, (g.p10, g.median, g.p90)))
        yield line([g.family, g.device, *amounts])


def subjects(found):
    """What all devices together come to."""
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
    """Tiles of 128 by 128 of the result of a product, or of one that a convolution is, and how full; else None."""
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
    found = -(-rows // 128) * -(-columns // 128)
    return found, rows * columns / (found * 128**2)


def cause(row):
    """Why a measured time is far from the estimate, where something that can be computed says so."""
    given, tables = row.record.inputs, DEVICES[row.record.device].tables
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
    vector = DEVICES[row.record.device].vector.get("fp32")
    if given.get("dtype") == "int8" and vector is not None:
        rate = 2 * given["M"] * given["N"] * given["K"] / row.seconds if "M" in given else 0
        if 0 < rate < 4 * float(vector):
            return "no faster than four-way dot products on CUDA cores: tensor cores are not used"
    return ""


def outliers(found):
    """Records that are off by more than the factor: how many for each cause, and those without one by name."""
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
    """Predicted peaks that are off by more than 4 KiB."""
    yield line(["record", "device", "measured bytes", "predicted"])
    yield line(["---"] * 4)
    for row in found.records:
        if row.peak is not None and row.record.quantity == COUNTED and abs(row.peak - row.bytes) > 4096:
            yield line([f"`{row.record.id}`", row.record.device, f"{row.bytes:,}", f"{row.peak:,}"])


def totals(found):
    """Totals of memory that were not counted by an allocator, beside what is derived."""
    yield line(["record", "device", "what", "measured GB", "derived GB", "deviation"])
    yield line(["---"] * 6)
    for row in found.records:
        if row.peak is not None and row.record.quantity != COUNTED:
            off = f"{row.peak / row.bytes - 1:+.1%}"
            cells = (row.record.device, row.record.quantity, f"{row.bytes / 1e9:.2f}", f"{row.peak / 1e9:.2f}", off)
            yield line([f"`{row.record.id}`", *cells])


def page(found):
    """Return the text of the page."""
    below = [row for row in found.records if row.violated]
    parts = [HEAD.format(count=len(found.records)), "\n## What is asked\n"]
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
