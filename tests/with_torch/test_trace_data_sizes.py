"""Data-dependent sizes are symbols with bounds: programs on real data against torch's counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph.torch import trace


class Chosen(nn.Module):
    """A linear layer on data-dependent rows."""

    def __init__(self, choose: Callable[..., Any]) -> None:
        super().__init__()
        self.choose, self.linear = choose, nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.linear(self.choose(x, label))


CHOICES = {
    "mask": lambda x, label: x[label == 1],
    "where": lambda x, label: x[torch.where(label == 1)[0]],
    "nonzero": lambda x, label: x[(label == 1).nonzero().squeeze(-1)],
    "nonzero, skipped where empty": lambda x, label: x[label == 1] if (label == 1).nonzero().shape[0] > 0 else x,
    "masked_select": lambda x, label: torch.masked_select(label, label == 1)[:, None] * x[:1],
    "columns": lambda x, label: torch.stack([label, label])[:, label == 1].T.to(x.dtype).repeat(1, 4),
    "unique": lambda x, label: x[torch.unique(label)],
    "unique with counts": lambda x, label: x[torch.unique(label, return_counts=True)[0]],
    "unique_consecutive": lambda x, label: x[torch.unique_consecutive(label)],
    "bincount": lambda x, label: torch.bincount(label)[:, None] * x[:1],
    "maximum": lambda x, label: x.new_zeros(int(label.max()), 8),
}  # fmt: skip
LABELS = torch.tensor([1, 1, 3, 1, 2, 3, 1, 0, 0, 5, 5])


@pytest.mark.parametrize("name", CHOICES)
def test_data_dependent_size_is_a_symbol(name: str):
    module = Chosen(CHOICES[name])
    g = trace(module, torch.zeros(7, 8), torch.zeros(7, dtype=torch.int64), dims=[("N", None), ("N",)])
    total = cg.matmul_flops(g)
    (free,) = {str(s) for s in total.free_symbols} - {"N"}
    rows = module.choose(torch.zeros(11, 8), LABELS).shape[0]
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(11, 8), LABELS)
    assert cg.matmul_flops(g, N=11, **{free: rows}) == counter.get_total_flops()
    cg.peak_memory(g, N=11, **{free: rows})


def test_data_dependent_size_bound_is_checked():
    g = trace(Chosen(CHOICES["mask"]), torch.zeros(7, 8), torch.zeros(7, dtype=torch.int64), dims=[("N", None), ("N",)])
    with pytest.raises(cg.CostGraphError, match="mask_1 <= N"):
        cg.matmul_flops(g, N=11, mask_1=12)


def test_data_sizes_error_names_the_argument():
    args = torch.zeros(7, 8), torch.zeros(7, dtype=torch.int64)
    with pytest.raises(cg.UnsupportedError, match=r"size mask_1 depends .*data_sizes='symbol'"):
        trace(Chosen(CHOICES["mask"]), *args, dims=[("N", None), ("N",)], data_sizes="error")
