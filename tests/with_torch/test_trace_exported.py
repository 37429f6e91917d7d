"""torch.export programs cost the same as their modules."""

import pytest
import torch
from torch import nn

import costgraph as cg
from costgraph.torch import trace


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.register_buffer("scale", torch.ones(12))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_exported_program_costs_the_same_as_its_module(dynamic):
    module, x = nn.Sequential(Block(), Block()), torch.zeros(3, 12)
    shapes = ({0: torch.export.Dim("batch", min=2)},) if dynamic else None
    program = torch.export.export(module, (x,), dynamic_shapes=shapes)
    dims = [("B", None)] if dynamic else None
    here, there = trace(module, x, dims=dims), trace(program, x, dims=dims)
    for ask in (cg.flops, cg.matmul_flops, cg.param_count, cg.param_bytes):
        assert ask(there) == ask(here)
    names = [
        {t.name.replace("/", ".") for t in g.tensors if t.producer is None and t.role != "input"} for g in (here, there)
    ]
    known = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
    assert names == [known, known]


def test_neither_module_nor_exported_program_is_refused():
    with pytest.raises(cg.GraphError, match=r"trace: got int, expected a torch\.nn\.Module, or an exported program"):
        trace(3)
