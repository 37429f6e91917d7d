"""Convolutions and pools, against torch."""

import pytest
import torch
from each import each
from oracles import counted, graph_of, touched

import costgraph as cg
from costgraph import GraphError, PatternError, ShapeError

B, C, H, W, O = cg.dims("B C H W O")
AXES = {1: "w", 2: "h w", 3: "t h w"}


def pattern(rank):
    return f"b c {AXES[rank]} -> b o {AXES[rank]}"


CASES = [
    # rank, size, channels, out, window, stride, padding, dilation, groups
    (1, (11,), 4, 6, (3,), 1, 0, 1, 1),
    (1, (11,), 4, 6, (2,), 3, 1, 1, 2),
    (1, (13,), 4, 4, (4,), 1, 3, 1, 4),
    (2, (11, 13), 4, 6, (3, 3), 1, 1, 1, 1),
    (2, (11, 13), 4, 6, (3, 5), (2, 3), (1, 2), (1, 2), 2),
    (2, (14, 14), 3, 5, (7, 7), 2, 3, 1, 1),
    (2, (8, 8), 3, 5, (4, 4), 4, 0, 1, 1),
    (2, (7, 7), 4, 4, (1, 1), 2, 0, 1, 4),
    (3, (5, 7, 11), 2, 3, (2, 3, 3), (1, 2, 2), (0, 1, 1), 1, 1),
    (2, (9, 9), 4, 6, (3, 3), 1, "same", 1, 1),
    (2, (9, 9), 4, 6, (2, 4), 1, "same", 2, 2),
]


@each("case", CASES)
@each("bias", [False, True])
def test_conv_matches_torch_and_reads_each_input_once(case, bias):
    rank, size, channels, out, window, stride, padding, dilation, groups = case
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    run = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]
    shapes = (2, channels, *size), (out, channels // groups, *window), (out,)
    with torch.device("meta"):
        expected = run(torch.empty(shapes[0]), torch.empty(shapes[1]), **options).shape
    theirs = counted(lambda x, w, b: run(x, w, b if bias else None, **options), *shapes)

    def build(x):
        return cg.conv(x, pattern(rank), window=window, bias=bias, o=out, **options)

    g, y = graph_of(build, shapes[0])
    assert y.shape == tuple(expected)
    assert cg.matmul_flops(g) == theirs
    count = expected.numel()
    assert cg.flops(g) == theirs + (count if bias else 0)
    each = [v if isinstance(v, tuple) else (v,) * rank for v in (stride, dilation)]
    pads = [d * (w - 1) // 2 for w, d in zip(window, each[1], strict=True)]
    pads = pads if padding == "same" else padding if isinstance(padding, tuple) else (padding,) * rank
    reached = 2 * channels
    for n, made, w, s, d, p in zip(size, expected[2:], window, *each, pads, strict=True):
        reached *= touched(n, made, w, s, d, p)
    weights = out * (channels // groups)
    for w in window:
        weights *= w
    total = cg.costs(g).total()
    assert total.read == 4 * (reached + weights + (out if bias else 0))
    assert total.written == 4 * count
    assert cg.param_count(g) == weights + (out if bias else 0)


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 3, 1), (3, 0, 2), (1, "same", 3)])
def test_symbolic_conv_sizes_match_torch_when_bound(stride, padding, dilation):
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    with cg.Graph("g") as g:
        g.output(cg.conv(g.input("x", (B, C, H, W)), pattern(2), window=(3, 5), o=O, **options))
    for h, w in ((13, 17), (14, 19), (27, 18)):
        shapes = (2, 3, h, w), (7, 3, 3, 5)
        theirs = counted(lambda x, k: torch.conv2d(x, k, **options), *shapes)
        assert cg.matmul_flops(g, B=2, C=3, H=h, W=w, O=7) == theirs


def test_conv_flops_match_closed_form():
    with cg.Graph("g") as g:
        y = cg.conv(g.input("x", (B, C, H, W)), pattern(2), window=3, padding=1, o=O)
        g.output(y)
    assert y.shape == (B, O, H, W)
    assert cg.matmul_flops(g) == 2 * (B * O * H * W) * (3 * 3) * C
    assert cg.bytes_moved(g) == 4 * (B * C * H * W + 9 * C * O + B * O * H * W)


def test_depthwise_convolution_with_symbolic_groups():
    with cg.Graph("g") as g:
        g.output(cg.conv(g.input("x", (B, C, W)), pattern(1), window=4, padding=3, groups=C, o=C))
    assert cg.matmul_flops(g, B=2, C=5, W=7) == 2 * (2 * 5 * (7 + 3)) * 4  # one input channel a group
    assert cg.param_count(g) == 4 * C


@each(
    ("rank", "size", "window", "stride", "padding"),
    [(1, (11,), 3, None, 0), (2, (11, 13), (2, 3), (1, 2), 1), (2, (14, 14), 3, 2, 1), (3, (5, 7, 9), 2, None, 0)],
)
@each("operation", ["max", "mean"])
def test_pooling_matches_torch_shapes_with_one_flop_per_window_element(operation, rank, size, window, stride, padding):
    name = {"max": "max_pool", "mean": "avg_pool"}[operation]
    run = getattr(torch.nn.functional, f"{name}{rank}d")
    expected = run(torch.ones(2, 3, *size), window, stride=stride, padding=padding).shape
    g, y = graph_of(lambda x: cg.nn.pool(x, operation, window=window, stride=stride, padding=padding), (2, 3, *size))
    assert y.shape == tuple(expected)
    taps = 1
    for w in window if isinstance(window, tuple) else (window,) * rank:
        taps *= w
    assert cg.flops(g) == expected.numel() * taps
    assert cg.matmul_flops(g) == 0


@each(
    ("call", "error", "text"),
    [
        (lambda x: cg.conv(3, "b c h w -> b o h w", window=3, o=5), GraphError, "conv: x is 3, expected a tensor"),
        (lambda x: cg.conv(x, "b c h w -> b c h w", window=3, o=5), PatternError, "expected one channel axis replaced"),
        (lambda x: cg.conv(x, "b c h w -> b o w h", window=3, o=5), PatternError, "expected one channel axis replaced"),
        (lambda x: cg.conv(x, "b c (h w) -> b o (h w)", window=3, o=5), PatternError, "expected single named axes"),
        (lambda x: cg.conv(x, "b c h -> b o h", window=3, o=5), ShapeError, "has 4 axes, the pattern .* has 3"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3), ShapeError, r"sizes given for \[\], expected o=..."),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, o=5, q=3), ShapeError, "expected o=..."),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, o=0), ShapeError, "size of 'o': 0, expected a positive"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, groups=3, o=6), ShapeError,
         "4 input channels in 3 groups"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, groups=2, o=5), ShapeError,
         "5 output channels in 2 groups"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, groups=-1, o=5), ShapeError,
         "groups: -1, expected a positive"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=(3, 3, 3), o=5), ShapeError,
         r"window=\(3, 3, 3\): expected"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=0, o=5), ShapeError,
         "window=0: expected an integer of at least 1"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window="3", o=5), ShapeError, "window='3': expected an integer"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, stride=0, o=5), ShapeError, "stride=0: expected"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, dilation=None, o=5), ShapeError,
         "dilation=None: expected"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, padding=-1, o=5), ShapeError, "padding=-1: expected"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, padding="valid", o=5), ShapeError,
         "padding='valid': expected"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, padding="same", stride=2, o=5), ShapeError,
         "expected a stride of 1"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=11, o=5), ShapeError,
         "window of 11 on axis 2 .*: larger than the padded axis"),
        (lambda x: cg.conv(x, "b c h w -> b o h w", window=3, bias=None, o=5), GraphError,
         "bias is None, expected True or False"),
        (lambda x: cg.nn.pool(x, "sum", window=2), GraphError, "operation 'sum', expected one of max, mean"),
        (lambda x: cg.nn.pool(3, "max", window=2), GraphError, "pool: x is 3, expected a tensor"),
        (lambda x: cg.nn.pool(x, "max", window=()), ShapeError, "expected at least one axis"),
        (lambda x: cg.nn.pool(x, "max", window=11), ShapeError, "larger than the padded axis, expected a smaller one"),
        (lambda x: cg.nn.pool(x, "max", window=2, padding=2), ShapeError,
         "padding 2, expected at most half of the window of 2"),
        (lambda x: cg.nn.pool(x, "max", window=(1,) * 5), ShapeError, "window of 5 axes, expected at least as many"),
    ],
)  # fmt: skip
def test_errors_name_place_value_and_expectation(call, error, text):
    with cg.Graph("g") as g:
        x = g.input("x", (2, 4, 9, 9))
        with pytest.raises(error, match=text):
            call(x)


@pytest.mark.parametrize("window", [(1, 1), (2, 2), (2, 4), (4, 3), (3, 6), (5, 5)])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_same_padding_keeps_the_size(window, dilation):
    shapes = (2, 3, 11, 13), (5, 3, *window)
    options = {"padding": "same", "dilation": dilation}
    theirs = counted(lambda x, w: torch.conv2d(x, w, **options), *shapes)
    g, y = graph_of(lambda x: cg.conv(x, "b c h w -> b o h w", window=window, o=5, **options), shapes[0])
    assert y.shape == (2, 5, 11, 13)
    assert cg.matmul_flops(g) == theirs
    # every input position is inside a window, next to padding at most
    assert cg.costs(g).filter(direction="read").total().read <= 4 * (2 * 3 * 11 * 13 + 5 * 3 * window[0] * window[1])


@pytest.mark.parametrize(
    ("size", "window", "padding", "stride"), [(9, 9, 0, 1), (7, 9, 1, 1), (9, 9, 0, 5), (1, 1, 0, 1)]
)
def test_window_spanning_its_axis_has_one_position(size, window, padding, stride):
    options = {"stride": stride, "padding": padding}
    expected = torch.conv1d(torch.ones(2, 3, size), torch.ones(5, 3, window), **options).shape
    g, y = graph_of(lambda x: cg.conv(x, "b c w -> b o w", window=window, o=5, **options), (2, 3, size))
    assert y.shape == tuple(expected) == (2, 5, 1)
    reached = touched(size, 1, window, stride, 1, padding)
    assert cg.costs(g).total().read == 4 * (2 * 3 * reached + 5 * 3 * window)


@pytest.mark.parametrize(
    "pattern", ["b h w c -> b h w o", "h w c -> h w o", "c -> o", "b c h w -> b o h", "b c h -> b o h w"]
)
def test_channel_without_a_spatial_axis_raises(pattern):
    shape = tuple(range(7, 7 + len(pattern.split("->")[0].split())))
    with cg.Graph("g") as g, pytest.raises(PatternError, match="expected one channel axis replaced"):
        cg.conv(g.input("x", shape), pattern, window=3, o=5)


@pytest.mark.parametrize("shape", [(9, 9), (3, 9, 9), (2, 3, 9, 9)])
@pytest.mark.parametrize("operation", ["max", "mean"])
def test_pool_over_window_axes_only(shape, operation):
    run = {"max": torch.max_pool2d, "mean": torch.nn.functional.avg_pool2d}[operation]
    expected = run(torch.ones(1, *shape) if len(shape) == 2 else torch.ones(shape), 2).shape[-len(shape) :]
    g, y = graph_of(lambda x: cg.nn.pool(x, operation, window=(2, 2)), shape)
    assert y.shape == tuple(expected)
    assert cg.flops(g) == expected.numel() * 4


def test_bias_adds_one_flop_per_output():
    g, _ = graph_of(lambda x: cg.conv(x, "b c w -> b o w", window=3, o=5, bias=True), (2, 3, 11))
    assert cg.flops(g) - cg.matmul_flops(g) == 2 * 5 * 9
