"""`fuse`'s kernels against torch inductor's for the same programs."""

import json
from collections import defaultdict

import pytest
import torch
from inductor_programs import PROGRAMS, RECORD, program

import costgraph as cg
from costgraph.torch import lower, trace

LOSS = "gradient of a loss"
TRACED = [name for name in PROGRAMS if name != LOSS]  # its scatter is a custom call in a trace
FOUND = json.loads(RECORD.read_text())["bytes of each kernel"]


def loops(g):
    """Return the bytes of each kernel other than matmuls, in program order."""
    products = {
        op.name for op in g.ops if {"einsum"} & {op.kind.name, *(i.kind.name for i in (op.body.ops if op.body else ()))}
    }
    moved = defaultdict(int)
    for row in cg.costs(g).rows:
        if row.direction != "compute":
            moved[row.op] += row.amount.constant
    return [amount for op, amount in moved.items() if op not in products]


@pytest.mark.parametrize("name", TRACED)
def test_fused_kernels_and_bytes_equal_inductors(name):
    module, operands = program(name)
    with torch.no_grad():
        g = cg.fuse(trace(module, *operands))
    assert sorted(loops(g)) == sorted(FOUND[name])


@pytest.mark.parametrize("epilogues", [False, True])
@pytest.mark.parametrize("name", TRACED)
def test_fused_trace_computes_the_programs_values(name, epilogues):
    """For the same parameters, in place or not."""
    module, operands = program(name)
    with torch.no_grad():
        g = trace(module, *operands)
        expected, made = (lower(graph)(*operands) for graph in (g, cg.fuse(g, epilogues=epilogues)))
    torch.testing.assert_close(made, expected)


def test_loss_and_logits_gradients_fuse_into_one_kernel():
    """One element per row is scattered into zeros: as an index comparison, the zeros are never stored."""
    N, C = 37, 61
    with cg.Graph("g") as g:
        logits = g.input("logits", (N, C), dtype="fp32", grad=True)
        g.output(cg.cross_entropy(logits, g.input("targets", (N,), dtype="int64")))
    rows = [r for r in cg.costs(cg.fuse(cg.backward(g))).rows if r.direction != "compute" and r.phase == "backward"]
    moved = defaultdict(int)
    for row in rows:
        moved[row.op] += row.amount.constant
    ones, kernel = sorted(moved.values())
    assert [kernel - ones] == FOUND[LOSS]  # it also reads the gradient of the loss, which inductor inlines
