"""Pooling FLOPs with ceil_mode: window elements, counted by brute force."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import costgraph as cg
from costgraph.torch import trace


def reached(n, out, window, stride, padding, dilation):
    """Count the in-bounds elements in windows that start before the padding ends."""
    return sum(i * stride + j * dilation < n + 2 * padding for i, j in product(range(out), range(window)))


@given(
    n=st.integers(5, 13), window=st.integers(1, 4), stride=st.integers(1, 4), dilation=st.integers(1, 2),
    ceil=st.booleans(), largest=st.booleans(), data=st.data(),
)  # fmt: skip
def test_windows_that_hang_over_the_edge_count_in_part(n, window, stride, dilation, ceil, largest, data):
    padding = data.draw(st.integers(0, window // 2))
    dilation = dilation if largest and (window - 1) * dilation < n else 1
    facts = {"kernel_size": window, "stride": stride, "padding": padding, "ceil_mode": ceil}
    module = torch.nn.MaxPool2d(**facts, dilation=dilation) if largest else torch.nn.AvgPool2d(**facts)
    x = torch.zeros(2, 3, n, n + 1)
    high, wide = module(x).shape[-2:]
    along = [reached(m, out, window, stride, padding, dilation) for m, out in ((n, high), (n + 1, wide))]
    assert cg.flops(trace(module, x)) == 2 * 3 * along[0] * along[1]


@pytest.mark.parametrize("size", [8, 9, 11, 30])
def test_open_image_size_counts_like_a_fixed_one(size):
    module = torch.nn.AvgPool2d(3, 2, ceil_mode=True)
    formula = cg.flops(trace(module, torch.zeros(1, 2, 8, 8), dims=[("B", None, "R", "R")]))
    assert cg.evaluate(formula, B=3, R=size) == cg.flops(trace(module, torch.zeros(3, 2, size, size)))
