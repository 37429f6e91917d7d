"""The page `docs/validation.md`: what the suite is, and every record of it.

    python tests/with_torch/validation_page.py

writes it anew.
"""

from pathlib import Path

from validation_causes import CAUSES, causes

from costgraph.torch.measurement import counted
from costgraph.torch.validation import (
    FOLLOWS,
    SCHEMA,
    Validation,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE, FOLDER = ROOT / "docs" / "validation.md", ROOT / "tests" / "measured"

HEAD = """\
# Validation

`costgraph validate` runs a suite of ops, models and training steps with torch, and holds predictions to what they
took: matmul FLOPs, bytes at the peak, and time. It needs torch, and the extras `cli` and `plot`.

```console
$ costgraph validate --device cuda --out my-gpu.json --plots pictures      # on a GPU, some minutes
$ costgraph validate --device cpu --threads 1 --out my-cpu.json            # --quick: one cheap case of each kind
```

What others have measured on GPUs and published is predicted without running anything:
[published measurements of GPUs](published_gpus.md) has the table by family and device, from

```console
$ costgraph validate --records tests/measured/published/gpus.json --out predictions.json --plot pictures
```

![times that others measured against estimates, a colour a family, dashed a factor of two](_static/published_times.png)

A model of time that is fitted to these, and how well it predicts what it was not fitted to, is in
[calibrated times](calibration.md).

In Python: `costgraph.torch.validate("cuda")`, whose answer has `.rows`, `.table()`, `.plot(directory)`,
`.save(path)`. The suite of a GPU is the same as that of a processor with larger sizes; tests build all of its
declarations and programs on `meta` tensors, where nothing is allocated.

Each case is declared as a graph with symbolic sizes, and written a second time as a program of plain torch, which
knows nothing of the library. Models are those of the zoo (GPT-2, Llama, a perceptron) and a stack of convolutions.
Where torch has no program for a policy (fp8 with scales, fp32 master copies, Lion, Muon, recomputation from the
start) the graph is lowered to torch, and run op by op. Modules are traced as well: their graph is the second
prediction, from what autograd and Python really keep.

**FLOPs** are those of contractions, with `count="full"`, beside FlopCounterMode's. On a CPU the counter has none for
`scaled_dot_product_attention`: (*) marks cases with it, whose other FLOPs are compared.

**Peaks** are bytes of all that is there: parameters, buffers, inputs, optimizer state, and what the call adds at its
peak, by the profiler's allocations on a CPU and by `max_memory_allocated` on CUDA, where predictions count whole
blocks of 512 B. Differences up to 4 KiB are shown in bytes, larger ones as a part of the peak.

**Times** are those of the fastest run. The lower bound is the roofline's with the device's own peaks: a data sheet's
where there is one, else the rates that `costgraph calibrate` finds. Ratios to it stand in parentheses where the
last-level cache holds more than a quarter of the bytes: there the bound need not hold. An op with an `out=` is timed
with it, as a CPU needs longer to get memory from the system than to fill it.

**What a time follows.** Bytes moved over the measured bandwidth is one time, FLOPs over the measured peaks another
(for transcendentals, the fastest that calibration found). An op follows `memory` or `compute` if its time is within a
factor of {follows:g} of that one, `both` if of both, as near the ridge point. `overhead` is a time above both by
more: launches, threads that wait, memory that is fetched from the system, or a rate that this op does not reach.
`faster` is a time below: operands came from a cache. The first three are held to what the roofline says bounds the
op; of the other two nothing can be said.

## Known differences

A prediction may be off by more than 4 KiB for these causes alone; those of each case stand in its row's line below.

{causes}

What kernels take on a CPU, one by one, is listed in [workspaces](workspaces.md); other differences of the model from
what runs are in [deviations](deviations.md). The vector rate of a data sheet is one of fused multiply-adds, so that
ops full of transcendentals are bound by compute where the roofline says memory: (!) marks an op that follows another
one than it says.
"""


def records():
    """All records of the suite, by name."""
    paths = sorted(p for p in FOLDER.glob("*.json") if f'"{SCHEMA}"' in p.read_text())
    return {path.stem: Validation.load(path) for path in paths}


def line(cells):
    return f"| {' | '.join(cells)} |"


def differences(found):
    """Rows whose declared or traced peak is off by more than 4 KiB, each with its causes."""
    device = found.environment["device"]
    for row in found.rows:
        for which in ("declared", "traced"):
            off = row.off(which)
            if off is not None and abs(off) > 4096:
                yield row, which, off, causes(row.case, device, which)


def section(name, found):
    of = found.environment
    yield f"\n## {name}\n"
    threads = f", {counted(of['threads'])}" if of["device"] == "cpu" else ""
    yield f"{of['name']}{threads}; torch {of['torch']}; {of['date']}; `{of['command']}`.\n"
    yield found.table()
    yield "Off by more than 4 KiB:\n"
    yield line(["case", "prediction", "off", "of the peak", "causes"])
    yield line(["---"] * 5)
    for row, which, off, why in differences(found):
        share = f"{100 * off / row.measured.peak:+.2f} %"
        yield line([row.case.name, which, f"{off:+,d} B", share, ", ".join(why)])
    wrong = [row for row in found.rows if row.counted() is False]
    if wrong:
        yield "\nMatmul FLOPs that differ, by [groups of layers computed again](deviations.md):\n"
        for row in wrong:
            yield f"- {row.case.name}: counted {row.measured.flops:,}, declared {row.declared.flops:,}"
    untraced = [row for row in found.rows if row.untraced and row.case.program == "module"]
    if untraced:
        yield "\nNot traced:\n"
        yield from (f"- {row.case.name}: {' '.join(row.untraced.split())}" for row in untraced)


def page():
    """Return the text of the page."""
    listed = "\n".join(f"- **{name}**: {text}." for name, text in CAUSES.items())
    parts = [text for name, found in records().items() for text in section(name, found)]
    return HEAD.format(causes=listed, follows=FOLLOWS) + "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
