"""Models that split an image or a sequence and reassemble it: equal sizes are recognized as equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph.torch import trace


class Unpatchify(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, _, h, w = x.shape
        y = self.linear(x.flatten(2).transpose(1, 2))
        return y.reshape(b, h, w, 1, 1, -1).permute(0, 5, 1, 3, 2, 4).reshape(b, -1, h, w).square().mean()


class Upsampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv1d(4, 4, 3, padding=1), nn.Upsample(scale_factor=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.conv(x)).square().mean()


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.deep = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, 2, 1)
        self.up = nn.Upsample(scale_factor=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.norm(self.down(x))
        return torch.cat([self.up(self.deep(a)), a], 1).square().mean()


@pytest.mark.parametrize(
    ("module", "given", "dims", "sizes"),
    [
        (Unpatchify(), (2, 4, 16, 16), ("B", None, "R", "R"), {"B": 3, "R": 20}),
        (Upsampled(), (2, 4, 12), ("B", None, "S"), {"B": 3, "S": 7}),
        (Skip(), (2, 3, 64, 64), ("B", None, "R", "R"), {"B": 2, "R": 32}),
    ],
)
def test_steps_with_open_sizes_count_as_torch_counts(module: nn.Module, given: Any, dims: Any, sizes: dict[str, int]):
    example = torch.zeros(given)
    traced, derived = trace(module, example, dims=[dims], train=True), cg.backward(trace(module, example, dims=[dims]))
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros([n if d is None else sizes[d] for n, d in zip(given, dims, strict=True)])).backward()
    for g in (traced, derived):
        assert cg.matmul_flops(g, **sizes) == counter.get_total_flops()
