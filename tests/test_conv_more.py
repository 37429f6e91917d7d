"""Convolutions and pools at their edges, against torch."""

import pytest
import torch
from oracles import counted, graph_of, touched

import costgraph as cg
from costgraph import PatternError


@pytest.mark.parametrize("window", [(1, 1), (2, 2), (2, 4), (4, 3), (3, 6), (5, 5)])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_same_keeps_the_size_with_windows_of_any_size(window, dilation):
    shapes = (2, 3, 11, 13), (5, 3, *window)
    options = {"padding": "same", "dilation": dilation}
    theirs = counted(lambda x, w: torch.conv2d(x, w, **options), *shapes)
    g, y = graph_of(lambda x: cg.conv(x, "b c h w -> b o h w", window=window, o=5, **options), shapes[0])
    assert y.shape == (2, 5, 11, 13)
    assert cg.matmul_flops(g) == theirs
    # every position is within a window, or beside one in the padding
    assert cg.costs(g).filter(direction="read").total().read <= 4 * (2 * 3 * 11 * 13 + 5 * 3 * window[0] * window[1])


@pytest.mark.parametrize(
    ("size", "window", "padding", "stride"), [(9, 9, 0, 1), (7, 9, 1, 1), (9, 9, 0, 5), (1, 1, 0, 1)]
)
def test_a_window_as_large_as_its_axis_has_one_place(size, window, padding, stride):
    options = {"stride": stride, "padding": padding}
    expected = torch.conv1d(torch.ones(2, 3, size), torch.ones(5, 3, window), **options).shape
    g, y = graph_of(lambda x: cg.conv(x, "b c w -> b o w", window=window, o=5, **options), (2, 3, size))
    assert y.shape == tuple(expected) == (2, 5, 1)
    reached = touched(size, 1, window, stride, 1, padding)
    assert cg.costs(g).total().read == 4 * (2 * 3 * reached + 5 * 3 * window)


@pytest.mark.parametrize(
    "pattern", ["b h w c -> b h w o", "h w c -> h w o", "c -> o", "b c h w -> b o h", "b c h -> b o h w"]
)
def test_a_channel_that_no_axis_follows_is_refused(pattern):
    shape = tuple(range(7, 7 + len(pattern.split("->")[0].split())))
    with cg.Graph("g") as g, pytest.raises(PatternError, match="expected one channel replaced"):
        cg.conv(g.input("x", shape), pattern, window=3, o=5)


@pytest.mark.parametrize("shape", [(9, 9), (3, 9, 9), (2, 3, 9, 9)])
@pytest.mark.parametrize("operation", ["max", "mean"])
def test_a_pool_needs_no_other_axes_than_those_of_its_window(shape, operation):
    run = {"max": torch.max_pool2d, "mean": torch.nn.functional.avg_pool2d}[operation]
    expected = run(torch.ones(1, *shape) if len(shape) == 2 else torch.ones(shape), 2).shape[-len(shape) :]
    g, y = graph_of(lambda x: cg.nn.pool(x, operation, window=(2, 2)), shape)
    assert y.shape == tuple(expected)
    assert cg.flops(g) == expected.numel() * 4


def test_a_bias_is_added_once_for_each_output():
    g, _ = graph_of(lambda x: cg.conv(x, "b c w -> b o w", window=3, o=5, bias=True), (2, 3, 11))
    assert cg.flops(g) - cg.matmul_flops(g) == 2 * 5 * 9
