"""Sizes that pass through Python: random conversions, against torch's counter at other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from budget import drawing
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph.torch import trace

#: Conversions of a size before its use as a size.
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "int": lambda n: int(n),
    "float": lambda n: int(float(n)),
    "index": lambda n: n.__index__() if type(n) is str else n,
    "ceil": lambda n: math.ceil(n / 4) + 1,
    "floor": lambda n: math.floor(n / 3) + 2,
    "int of a quotient": lambda n: int(n / 2) + 1,
    "int of ceil": lambda n: int(math.ceil(n / 4)) * 4,  # noqa: RUF046  # as programs do
    "divmod": lambda n: sum(divmod(n, 5)) + 1,
    "round": lambda n: round(n * 2),
    "text": lambda n: {f"{n}": n}[f"{n}"],
    "format": lambda n: {f"{n:05d}": n}[f"{n:05d}"],
    "key": lambda n: {n: n + 1}[n],
    "numpy product": lambda n: int(np.prod([n, 2])),
    "instance": lambda n: n if isinstance(n, int) else -1,
    "type": lambda n: n if type(n) is int else -1,
    "types": lambda n: {int: n + 3, float: -1}[type(n)],
    "map": lambda n: next(iter(map(int, (n, 1)))),
    "generator": lambda n: sum(int(k) for k in (n, 1)),
    "length": lambda n: len(torch.zeros(n, 2)),
    "length of a range": lambda n: len(range(n)) + 1,
    "shifted": lambda n: (int(n) + 7) // 8 * 8,
}


class Converted(nn.Module):
    """A linear layer on a number of rows converted from two sizes."""

    def __init__(self, steps: list[Callable[[Any], Any]]) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(4, 3), steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = tuple(int(s) for s in x.shape)
        for step in self.steps:
            n = step(n)
        return self.linear(x.new_zeros(len(x), n, d)).reshape(b * n, -1)


def _assert_flops_match_runs(module: nn.Module, dims: list[Any], given: tuple[int, ...], **sizes: int) -> None:
    g = trace(module, torch.zeros(given), dims=[dims])
    assert {str(s) for s in cg.matmul_flops(g).free_symbols} == set(sizes)
    for factor in (1, 3):
        at = {name: size * factor for name, size in sizes.items()}
        shape = [n if name is None else at[name] for name, n in zip(dims, given, strict=True)]
        with FlopCounterMode(display=False) as counter:
            module(torch.zeros(shape))
        assert cg.matmul_flops(g, **at) == counter.get_total_flops(), at


#: Conversions that another one covers: skipped in a plain run.
LIKE_OTHERS = ("int of a quotient", "int of ceil", "shifted", "text", "generator", "type")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in LIKE_OTHERS else n for n in CONVERSIONS]
)
def test_conversion_keeps_the_size_open(name: str):
    _assert_flops_match_runs(Converted([CONVERSIONS[name]]), ["B", "S", None], (3, 16, 4), B=2, S=24)


@given(st.lists(st.sampled_from(sorted(CONVERSIONS)), min_size=2, max_size=4), st.integers(2, 40), st.integers(2, 40))
@drawing(80)
def test_conversions_one_after_the_other_keep_sizes(names: list[str], traced: int, other: int):
    _assert_flops_match_runs(Converted([CONVERSIONS[n] for n in names]), ["B", "S", None], (3, traced, 4), B=2, S=other)


class Hop(nn.Module):
    """Frames in a padded signal."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 16, stride=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = int(math.ceil(x.shape[-1] / 4))  # noqa: RUF046  # as programs do
        return self.conv(functional.pad(x, (6, 6 + frames * 4 - x.shape[-1])))


class Resized(nn.Module):
    """An image resized to a fixed width with its own scale factor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = functional.interpolate(x, scale_factor=64 / x.shape[-1], mode="bilinear", recompute_scale_factor=True)
        return self.conv(wide) + self.conv(x).mean()


def test_rounded_sizes_stay_open():
    _assert_flops_match_runs(Hop(), ["B", None, "T"], (2, 1, 64), B=3, T=50)
    _assert_flops_match_runs(Resized(), ["B", None, "R", "R"], (2, 4, 32, 32), B=3, R=16)


def test_range_values_become_a_tensor():
    class Numbers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor(range(1, x.shape[1] + 1), dtype=x.dtype)

    g = trace(Numbers(), torch.zeros(3, 8), dims=[("B", "S")])
    assert cg.flops(g, B=7, S=11) >= 77


def test_integer_branch_becomes_an_assumption():
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.T if int(x.shape[0]) > 5 else x

    g = trace(Branch(), torch.zeros(8, 4), dims=[("N", None)])
    assert cg.matmul_flops(g, N=7) == 2 * 7 * 7 * 4
    with pytest.raises(cg.CostGraphError, match="N > 5"):
        cg.matmul_flops(g, N=5)


def test_builtins_are_restored_after_a_trace():
    trace(Converted([CONVERSIONS["int"]]), torch.zeros(3, 4, 4), dims=[("B", "S", None)])
    assert not {"int", "float", "len", "type"} & (globals().keys() | vars(functional).keys())
    assert not hasattr(torch.SymInt, "__divmod__")
