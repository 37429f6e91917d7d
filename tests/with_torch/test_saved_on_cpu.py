"""Activations offloaded to the host: the bytes that `save_on_cpu` copies, against torch's saved-tensor hooks."""

import torch
from torch import nn

import costgraph as cg
from costgraph.analysis.costs import executions
from costgraph.torch import trace


class Block(nn.Module):
    """A residual block whose ops save operands, results and statistics."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 14), nn.Linear(14, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def test_offloaded_bytes_equal_torchs_packed_activations():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 6), Block(), Block()), torch.randn(10, 6)
    packed = {}
    there = {x.untyped_storage().data_ptr(), *(p.untyped_storage().data_ptr() for p in module.parameters())}

    def pack(t):
        if t.untyped_storage().data_ptr() not in there:  # save_on_cpu copies parameters as well
            packed[t.untyped_storage().data_ptr(), t.shape] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x).square().sum().backward()
    torchs = sum(t.nbytes for t in packed.values())

    traced = trace(module, x)

    def loss(y):
        return cg.reduce(y * y, "b d -> ", "sum")

    away = cg.offload(cg.training_step(traced, loss, optimizer=cg.SGD()), "activations")
    ours = {"host": 0, "device": 0}
    for op, times, _ in executions(away):
        if op.kind.name == "transfer":
            t = op.operands[-1]
            ours[op.kind.to] += (t.numel * t.element_bytes() * times).constant
    assert ours == {"host": torchs, "device": torchs}
