"""Kernels of `fuse` beside those that torch's inductor makes of the same programs."""

import json
from collections import defaultdict

import pytest
import torch
from inductor_programs import PROGRAMS, RECORD, program

import costgraph as cg
from costgraph.torch import lower, trace

FOUND = json.loads(RECORD.read_text())["bytes of each kernel"]


def loops(g):
    """Bytes of each kernel that is no product, in program order."""
    products = {
        op.name for op in g.ops if {"einsum"} & {op.kind.name, *(i.kind.name for i in (op.body.ops if op.body else ()))}
    }
    moved = defaultdict(int)
    for row in cg.costs(g).rows:
        if row.direction != "compute":
            moved[row.op] += row.amount.constant
    return [amount for op, amount in moved.items() if op not in products]


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_and_their_bytes_are_those_of_inductor(name):
    module, operands = program(name)
    with torch.no_grad():
        g = cg.fuse(trace(module, *operands))
    assert sorted(loops(g)) == sorted(FOUND[name])


@pytest.mark.parametrize("epilogues", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fused_trace_computes_what_the_program_does(name, epilogues):
    """Of the same parameters, in place or not."""
    module, operands = program(name)
    with torch.no_grad():
        g = trace(module, *operands)
        expected, made = (lower(graph)(*operands) for graph in (g, cg.fuse(g, epilogues=epilogues)))
    torch.testing.assert_close(made, expected)
