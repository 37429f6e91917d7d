"""Buckets against torch's DistributedDataParallel on two processes: their sizes, and the peak, to the byte.

`RECORDED` is the output of `ddp_worlds.py` with torch 2.13.0+cpu (2026-11-24); a long test runs it again.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from ddp_worlds import CASES, SIZES, Train  # noqa: E402  # after torch is known to be there
from shared import load, training_step  # noqa: E402  # as above

import costgraph as cg  # noqa: E402  # after torch is known to be there
from costgraph.analysis.collective_time import bucketed  # noqa: E402
from costgraph.ir.graph import bindings  # noqa: E402  # after torch is known to be there
from costgraph.torch import trace  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

#: Each case's peak, and the number of buckets per size in a step.
RECORDED = {
    "copied": (5_308_836, {919_808: 1}),
    "viewed": (5_308_836, {919_808: 1}),
    "copied, short": (4_861_724, {919_808: 1}),
    "viewed, short": (3_983_428, {919_808: 1}),
    "small buckets": (5_308_836, {262_656: 1, 328_448: 1, 328_704: 1}),
    "each": (6_228_644, {919_808: 3}),
    "last": (6_228_644, {919_808: 1}),
    "last, viewed": (6_228_644, {919_808: 1}),
    "tied": (4_784_544, {131_328: 1, 328_704: 2}),
    "frozen": (4_898_976, {131_584: 1, 328_448: 1, 328_704: 1}),
    "bf16": (2_805_664, {106_880: 2, 114_816: 1, 131_328: 1}),
    "lora": (2_245_960, {16_384: 1}),
}
#: Additional bytes of the derived step. Short: the mean of both ranks' losses, another scalar. Three micro-batches: the
#: tokens and targets of all are live, 2 * 2 * 512 B more, and three losses, 8 B more; a declared AdamW lacks the 4 B
#: counters of 39 parameters.
MORE = {"copied, short": 4} | dict.fromkeys(["each", "last", "last, viewed"], 2048 + 8 - 39 * 4)
SHORT = ("copied, short", "viewed, short")


@cache
def step_of(kind, length, parts):
    """Return a traced step, or a derived one for micro-batches."""
    tokens = torch.zeros(2 * SIZES["B"], length, dtype=torch.long)
    if parts == 1:
        optimizer = {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3)}
        return trace(Train(kind), tokens, tokens.clone(), train=True, **optimizer)
    return cg.training_step(trace(Train(kind), tokens, tokens.clone()), optimizer=cg.AdamW(), accumulate=parts)


def rank_of(kind, length, parts, each, options):
    """Return one rank's graph for a step."""
    step = step_of(kind, length, parts)
    inputs = [t.name for t in step.tensors if t.producer is None and t.role == "input"]
    places = dict.fromkeys(inputs, ("m " if parts > 1 else "") + "(b dp) s")
    cap = int(options["bucket_cap_mb"] * 2**20) if "bucket_cap_mb" in options else None
    buckets = cg.Buckets(view=options.get("gradient_as_bucket_view", False), cap=cap)
    return cg.shard(step, cg.mesh(dp=2), places, buckets=buckets, reduce_every_microbatch=each, strict=True)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in CASES])
def test_ddp_buckets_and_peak_equal_torchs(name):
    kind, length, parts, each, options = CASES[name]
    rank = rank_of(kind, length, parts, each, options)
    peak, sizes = RECORDED[name]
    assert cg.peak_memory(rank) == peak + MORE.get(name, 0)
    held = Counter()
    for found in bucketed(rank, {}).values():
        held.update(found.parts)
    assert {size: held[size] // size for size in held} == {n: k // (parts if each else 1) for n, k in sizes.items()}
    sent = cg.communication(rank).filter(phase="backward")
    assert sum(m.messages for m in sent) == sum(sizes.values())
    # in a ring with two ranks, each rank sends the buffer's bytes
    assert sent.total() == sum(size * times for size, times in sizes.items())


def test_bucket_assignment_equals_torchs():
    """In the order of completed gradients, by torch's own function: the first bucket has 1 MiB, all others 25."""
    step = training_step(load("gpt2"), optimizer=cg.SGD())
    rank = cg.parallelize(step, dp=2, buckets=cg.Buckets())
    rows = list(cg.communication(rank, B=2, S=64).filter(phase="backward"))
    head, layer, tables = rows[:2], [m for m in rows if m.scope.startswith("layers")], rows[-2:]
    order = [*head, *(m for _ in range(12) for m in layer), *tables]
    sizes = [torch.empty(m.bytes, dtype=torch.uint8) for m in order]
    assigned, _ = torch.distributed._compute_bucket_assignment_by_size(sizes, [2**20, 25 * 2**20])
    assert sum(m.messages for m in rows) == len(assigned)
    held = Counter()
    for found in bucketed(rank, bindings(rank, {"B": 2, "S": 64})).values():
        held.update(found.parts)
    expected = Counter(sum(order[i].bytes for i in members) for members in assigned)
    assert {size: held[size] // size for size in held} == expected


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_recorded_ddp_results_match_installed_torch(tmp_path):
    program = Path(__file__).parent / "ddp_worlds.py"
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path / "found.json")], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert {name: (row["peak"], dict(row["buckets"])) for name, row in results.items()} == RECORDED
