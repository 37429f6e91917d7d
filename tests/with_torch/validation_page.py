"""Write the page `docs/accuracy/validation.md`: the suite and its records.

    python tests/with_torch/validation_page.py

writes the page.
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
PAGE, FOLDER = ROOT / "docs" / "accuracy" / "validation.md", ROOT / "tests" / "measured"

HEAD = """\
# Validation on your machine

Run the validation suite on your own CPU or GPU. It executes ops, models and training steps with PyTorch, and compares
predicted matmul FLOPs, peak memory and time with what it measures:

```console
$ costgraph validate --device cuda --out my-gpu.json --plots plots
$ costgraph validate --device cpu --threads 1 --out my-cpu.json
```

The suite takes a few minutes; `--quick` runs one cheap case of each kind. You need torch and the extras `cli` and
`plot`. In Python, call `costgraph.torch.validate("cuda")`; the result has `.rows`, `.table()`, `.plot(directory)` and
`.save(path)`.

This page shows the recorded runs. To predict the [measurements of others](published_gpus.md) without running anything,
pass `--records` and a file.

## How to read the tables

Each case exists twice: as a graph with symbolic sizes and as a plain PyTorch program that does not use costgraph.
Modules are also traced, so there are two predictions, *declared* and *traced*. If PyTorch has no program for a policy
(scaled fp8, fp32 master weights, Lion, Muon), the graph is lowered and runs op by op.

- **FLOPs** count contractions with `count="full"`, as `FlopCounterMode` does. On a CPU, the counter ignores
  `scaled_dot_product_attention`; (*) marks these cases, and the other FLOPs are compared.
- **Peaks** cover parameters, buffers, inputs, optimizer state and everything that the call allocates: the profiler's
  allocations on a CPU, `max_memory_allocated` on CUDA, in blocks of 512 B. Differences up to 4 KiB are in bytes,
  larger ones in percent.
- **Times** are the fastest run. The lower bound uses datasheet peaks or, without a datasheet, the rates that
  `costgraph calibrate` finds. A ratio in parentheses means that the last-level cache holds more than a quarter of the
  bytes, so the bound need not hold.
- **Follows** says which resource explains the time within a factor of {follows:g}: `memory`, `compute` or `both`.
  `overhead` means slower than either (launches, threads, page faults), and `faster` means that operands came from a
  cache. (!) marks an op that follows a resource other than the roofline predicts. The vector rate of a datasheet
  counts fused multiply-adds, so ops full of transcendentals may be compute-bound where the roofline says memory.

In case names, B is the batch, S the sequence length, D the width, H heads, G KV heads, K the head size, F the MLP
width, L layers, V the vocabulary, C and O channels, and X the image side.

## Causes of differences

If a peak is off by more than 4 KiB, one of these causes applies. The last column names it.

{causes}

[Workspaces](workspaces.md) lists the memory that single CPU kernels take. See [limits](../concepts/limits.md) for
other differences.
"""


def records():
    """Return all records of the suite, sorted by name."""
    paths = sorted(p for p in FOLDER.glob("*.json") if f'"{SCHEMA}"' in p.read_text())
    return {path.stem: Validation.load(path) for path in paths}


def line(cells):
    return f"| {' | '.join(cells)} |"


def differences(found):
    """Yield the rows whose declared or traced peak is off by more than 4 KiB, with their causes."""
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
        link = "[recomputed groups of layers](../concepts/training_rules.md#recomputation)"
        yield f"\nMatmul FLOPs that differ, by {link}:\n"
        for row in wrong:
            yield f"- {row.case.name}: counted {row.measured.flops:,}, declared {row.declared.flops:,}"
    untraced = [row for row in found.rows if row.untraced and row.case.program == "module"]
    if untraced:
        yield "\nNot traced:\n"
        yield from (f"- {row.case.name}: {' '.join(row.untraced.split())}" for row in untraced)


def page():
    """Return the page as Markdown."""
    listed = "\n".join(f"- **{name}**: {text}." for name, text in CAUSES.items())
    parts = [text for name, found in records().items() for text in section(name, found)]
    return HEAD.format(causes=listed, follows=FOLLOWS) + "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
