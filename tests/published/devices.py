"""Write the page `docs/accuracy/published_devices.md`: measured runs on many devices next to the graph of one rank.

    PYTHONPATH=tests python tests/published/devices.py

writes the page.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from shared import load

import costgraph as cg
from costgraph.hardware.units import Quantity
from costgraph.ir.graph import known_names

ROWS = json.loads(Path(__file__).with_name("devices.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "accuracy" / "published_devices.md"
UNITS = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20}
#: What a layer of Llama keeps where every other product of it is kept: torchtitan counts them in the order of the
#: program (q, k, v, back, gate, up, down), keeps the odd ones, and attention.
KEPT = ("q/matmul", "v/matmul", "layers/attention", "gate/matmul", "down/matmul")
POLICIES = {"products": cg.every_block(keep=KEPT), "blocks": cg.every_block(), None: None}
#: torchtitan's products in float8 are those of all layers but the head (torchtitan/float8.py @9dec370), over parameters
#: in fp32 of which each rank has a part; in a pipeline ranks add up gradients of micro-batches in fp32.
FLOAT8 = cg.Policy(
    "float8", params="bf16", compute="bf16", master="fp32", moments="fp32", matmul="fp8_e4m3", grad_matmul="fp8_e5m2",
    scopes={"head": "bf16"},
)  # fmt: skip
PRECISIONS = {"float8": FLOAT8, "float8-fp32-gradients": replace(FLOAT8, grads="fp32")}

#: Bytes a second and direction, and seconds of a step of a ring, of a reduce-scatter over the NVLink of the B200 that
#: SimuMax's rows ran on: 67.31 % of 900 GB/s (an all-gather 67.35 %), 8.03 us (9.18 us).
NCCL = (0.6731 * 900e9, 8.0325e-6)
NCCL_SOURCE = "MooreThreads/SimuMax configs/system/b200_bf16_ceperm.json @4dcaae5"

HEAD = """\
# Published training runs on many devices

Benchmarks of Megatron-LM, torchtitan, torchao and others report memory and throughput for one device among many. This
page compares them with the graph of one rank: `costgraph.parallelize` of a training step, with degrees and sizes from
the source. You can reproduce each row with `PYTHONPATH=tests python tests/published/devices.py`; a test compares its
output with this page.

- Memory that an allocator reserves or a compiler creates is not in the graph. For a pipeline, the row is the largest
  stage or the last one.
- Rows of Megatron-LM use `system="megatron"` for `load` and `parallelize` (megatron/core at 23e00ed, core_r0.14.0):
  gradients are reduced once and in place, a gated activation is one kernel that saves gate and up, expert weights are
  applied inside it, and values of latent attention are copied. The loss and elementwise chains are fused if there
  are no stages. Context parallelism uses all-to-alls.
- One layer of each DeepSeek is dense (simu_tools/megatron_scripts/scripts/run_pretrain_deepseekv2.sh of the source).
- Two facts are left out and nearly cancel on the row with 131,072 tokens: TransformerEngine 2.11 writes the gradient
  of the logits over them (-3.9 GiB), and saves attention outputs on both sides of the all-to-all (+3.0 GiB).

The rows with their sources are in `tests/published/devices.json`. GB is 10^9 bytes, GiB is 2^30.

| id | program | measured | derived | deviation | cause |
|---|---|---|---|---|---|
"""


TIMES = """
## Time of a step

The derived time is the [calibrated time](calibration.md) of the same graph. No row below was used for fitting, except
the single-device passes of llm-foundry; for the B200, only matmuls and attention that SimuMax timed one by one.

Collectives follow all other work, except with FSDP, whose all-gathers and reduce-scatters run on their own streams
(`overlap="streams"`). They run at datasheet rates; on the NVLink of the B200 at the rate that its NCCL runs reached,
67 % of 900 GB/s and 8 us per ring step (SimuMax configs/system/b200_bf16_ceperm.json @4dcaae5). Tokens per second and
device are the tokens of a rank over this time.

| id | program | measured | derived | deviation | cause |
|---|---|---|---|---|---|
"""


def loss(logits):
    """Cross-entropy of logits that are made fp32 first, as torchtitan does (train.py, loss_fn)."""
    targets = logits.graph.input("targets", [n.expr for n in logits.sizes[:-1]], dtype="int64")
    return cg.cross_entropy(cg.ops.cast(logits, "fp32"), targets)


@cache
def step(model, precision, accumulate, checkpoint, wide, system):
    structure = {} if system == "torch" else {"system": system}
    return cg.training_step(
        load(model, **structure), loss if wide else None, accumulate=accumulate,
        precision=PRECISIONS.get(precision, precision),
        optimizer=cg.AdamW(implementation="fused"), checkpoint=POLICIES[checkpoint],
    )  # fmt: skip


def rank(program):
    """Return the graph of one rank."""
    how = program["precision"], program.get("accumulate", 1), program.get("checkpoint"), "loss" in program
    how = *how, program.get("system", "torch")
    whole = step(program["model"], *how)
    options = (
        "dp", "cp", "tp", "ep", "zero", "sequence", "context", "pp", "layers", "system", "reduce_every_microbatch",
        "placements", "offload",
    )  # fmt: skip
    asked = {key: program[key] for key in options if key in program}
    asked |= {"micro_batches": program["accumulate"]} if "pp" in program else {}
    made = cg.parallelize(whole, **asked, strict=True)
    return cg.fuse(made) if "fused" in program else made


def device(row):
    """Return the devices of a row, with what their links were measured to reach where a row says so."""
    spec = cg.load_hardware(row["device"])
    if row.get("links") != "NCCL":
        return spec
    links = {"per_direction": Quantity(NCCL[0], "B/s", NCCL_SOURCE), "latency": Quantity(NCCL[1], "s", NCCL_SOURCE)}
    return replace(spec, tables={**spec.tables, "interconnect": {**spec.tables["interconnect"], **links}})


def derived(row):
    """What the graph says, in the unit of what was measured: bytes at the peak, or the calibrated time of a step."""
    graph, sizes = rank(row["program"]), row["program"]["sizes"]
    if "stage" in row:  # of this stage alone, which may have fewer sizes
        graph = graph.stages[row["stage"]]
        sizes = {name: n for name, n in sizes.items() if name in known_names(graph)}
    if "device" not in row:
        return cg.peak_memory(graph, **sizes) / UNITS[row["unit"]]
    seconds = cg.seconds(graph, device(row), "calibrated", overlap=row.get("overlap", "none"), **sizes)
    # ranks of tp, and stages, have the same tokens
    tokens = cg.step_tokens(graph, **sizes) / row["program"].get("tp", 1) / row["program"].get("pp", 1)
    return 1e3 * seconds if row["unit"] == "ms" else tokens / seconds


def deviation(row):
    """How much more the graph says than was measured, as a share of that."""
    return derived(row) / row["value"] - 1


def line(row):
    measured = f"| {row['id']} | {row['what']} | {row['value']:,} {row['unit']} |"
    if "why" in row:
        return f"{measured} | | not derived: {row['why']} |"
    found = derived(row)
    return f"{measured} {found:,.1f} {row['unit']} | {found / row['value'] - 1:+.1%} | {row.get('note', '')} |"


def page():
    """Return the text of the page."""
    sources = sorted({row["source"] for row in ROWS})
    memory, times = ("\n".join(line(r) for r in ROWS if ("device" in r) == timed) for timed in (False, True))
    return HEAD + memory + "\n" + TIMES + times + "\n\nSources: " + "; ".join(sources) + ".\n"


if __name__ == "__main__":
    PAGE.write_text(page())
