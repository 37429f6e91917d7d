"""The page `docs/published_devices.md`: what was measured on many devices, beside the graph of one rank.

    python tests/published/devices.py

writes it anew.
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
PAGE = Path(__file__).parents[2] / "docs" / "published_devices.md"
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
# Memory and times that were measured on many devices

What benchmarks of training report of one device among many, and the peak of the graph of one rank of the same program:
`costgraph.parallelize` of a step, with degrees and sizes as the source states them. What is reserved by an allocator,
made by a compiler or computed in float8 is not in the graph. Of a pipeline it is the largest stage, or the last one.
Rows of Megatron-LM have its policies (`system="megatron"` of `load` and `parallelize`): gradients reduced once and in
place, which products add to themselves; what TransformerEngine hands to autograd instead is in the peak; a gated
activation is one kernel that keeps gate and up alone, with the weights of experts in it, whose results then need not be
kept; values of latent attention are copied (megatron/core at 23e00ed, core_r0.14.0). Their loss, and what a layer does
between products, are fused there, and here where there are no stages; context parallelism is by all-to-alls. One layer
of each DeepSeek is dense (simu_tools/megatron_scripts/scripts/run_pretrain_deepseekv2.sh of the source). Two facts are
left out, which nearly cancel on the row of 131,072 tokens: TransformerEngine 2.11 writes the gradient of the logits
over them (-3.9 GiB), and keeps what attention makes on both sides of its all-to-all (+3.0 GiB).

The rows with their sources are in `tests/published/devices.json`; `python tests/published/devices.py` makes this page
of them and a test compares the two. GB is 10^9 bytes, GiB is 2^30.

| id | what ran | measured | derived | deviation | why |
|---|---|---|---|---|---|
"""


TIMES = """
## Time of a step

The calibrated time of the same graphs: ops as devices were seen to run them ([calibration](calibration.md)), one set of
terms for each device, with no row from below among what was fitted but for llm-foundry's passes of one device; of the
B200 these are products and attention that SimuMax timed one by one, and none of its steps. Collectives follow all else,
but with FSDP, whose parameters are gathered and gradients reduced on streams of their own (`overlap="streams"`): at the
rates of data sheets, over the NVLink of the B200 at what its runs of NCCL reached, 67 % of 900 GB/s and 8 us for a step
of a ring (SimuMax configs/system/b200_bf16_ceperm.json @4dcaae5). Tokens a second of one
device are the tokens of a rank over this time.

| id | what ran | measured | derived | deviation | why |
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
        "dp", "cp", "tp", "ep", "zero", "sequence", "context", "pp", "layers", "system", "reduce_each", "placements",
        "offload",
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
