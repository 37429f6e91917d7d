"""Write the page `docs/accuracy/zoo.md`: parameters and matmul FLOPs of every model and of its public torch module.

    PYTHONPATH=tests python tests/with_torch/zoo_page.py [NAME ...]

traces the named modules, by default all, stores their counts in `tests/with_torch/zoo_counts.json` and their parameters
in `costgraph/models/parameters.json`, and rewrites the page. The modules have their published sizes, on fake tensors.
"""

import importlib
import json
import sys
import time
from pathlib import Path

from shared import load

import costgraph as cg
from costgraph.models.registry import PARAMETERS

HERE = Path(__file__).parent
COUNTS = HERE / "zoo_counts.json"
PAGE = HERE.parents[1] / "docs" / "accuracy" / "zoo.md"

HEAD = """\
# Model zoo

{equal} of {all} models agree with their public module in parameters and matmul FLOPs, to the last digit.{apart}

You can look up a model below. FLOPs are those of one forward pass at the sizes in the last column, with `count="full"`
as PyTorch counts (B batch, S sequence length). The modules were built at their published sizes on fake tensors and
traced with `costgraph.torch.trace`, using torch {torch} and transformers {transformers}. If a module is not in
transformers, `tests/with_torch/` has a line-by-line transcription.

`PYTHONPATH=tests python tests/with_torch/zoo_page.py` traces all modules and writes this page. A test compares the
declarations with it on each run, and a slow test traces some modules again. Small configurations, with each field
varied, are compared with PyTorch's counts in `tests/with_torch/recorded/counts.json`;
`python tests/with_torch/recorded_counts.py` records them.

| model | module | parameters | module's | matmul FLOPs | module's | at |
|---|---|---|---|---|---|---|
"""


def references():
    """Return the reference of each model that has one, by name."""
    by_name = {}
    for path in sorted(HERE.glob("zoo_*.py")):
        module = importlib.import_module(path.stem)
        by_name |= getattr(module, "REFERENCES", {})
    return by_name


def counted():
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    for name, parameters in json.loads(PARAMETERS.read_text(encoding="utf-8")).items():
        if name in counts["models"]:  # a public module's counts
            counts["models"][name]["parameters"] = parameters
    return counts


def keep(kept):
    parameters = {name: row["parameters"] for name, row in kept["models"].items()}
    alone = [name for name in cg.models.names() if name not in parameters]
    parameters |= {name: cg.param_count(load(name)) for name in alone}
    rows = {name: {k: v for k, v in row.items() if k != "parameters"} for name, row in kept["models"].items()}
    for path, data in ((COUNTS, kept | {"models": rows}), (PARAMETERS, parameters)):
        path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def count(names):
    """Trace modules and store their counts."""
    import torch
    import transformers
    from zoo_reference import described, traced

    kept = counted()
    kept |= {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    for name, make in sorted(references().items()):
        if names and name not in names:
            continue
        start = time.time()
        reference = make()
        parameters, matmul = traced(reference)
        row = {"module": described(reference), "parameters": parameters, "matmul": matmul, "sizes": reference.sizes}
        kept["models"][name] = row | ({"options": reference.options} if reference.options else {})
        print(f"{name}: {parameters:,} parameters, {matmul:,} FLOPs, {time.time() - start:.1f} s", flush=True)
        keep(kept)


def declared(name, row):
    """Return the parameters and matmul FLOPs of a model's declaration."""
    g = load(name, **row.get("options", {}))
    return cg.param_count(g), cg.matmul_flops(g, count="full", **row["sizes"])


def page(asked=declared):
    counts = counted()
    lines, equal, apart = [], 0, []
    for name in cg.models.names():
        row = counts["models"].get(name)
        if row is None:
            lines.append(f"| `{name}` | none is public | {cg.param_count(cg.models.load(name)):,} | | | | |")
            continue
        parameters, matmul = asked(name, row)
        same = (parameters, matmul) == (row["parameters"], row["matmul"])
        equal += same
        apart += [] if same else [name]
        at = ", ".join(f"{k}={v}" for k, v in row["sizes"].items())
        lines.append(
            f"| `{name}` | {row['module']} | {parameters:,} | {row['parameters']:,} | {matmul:,} | {row['matmul']:,} "
            f"| {at} |"
        )
    text = f" The others: {', '.join(apart)}." if apart else ""
    versions = {k: counts.get(k, "") for k in ("torch", "transformers")}
    return HEAD.format(equal=equal, all=len(counts["models"]), apart=text, **versions) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    count(sys.argv[1:])
    PAGE.write_text(page(), encoding="utf-8")
