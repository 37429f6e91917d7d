"""Windows over axes such as D/H: sizes are integers, so rounding can be dropped where it has no effect."""

from fractions import Fraction

import pytest
from budget import drawing
from each import each
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import costgraph as cg
from costgraph.algebra.polynomial import poly
from costgraph.errors import BindingError

B, C, D, H = cg.dims("B C D H")
SIZES = [D / H, 2 * D / H, D / H + 1, 3 * D / (2 * H), D * C / H - 1, D]


def windows(n, window, stride, padding, dilation):
    """Return the output length from torch's Conv2d formula."""
    return (n + 2 * padding - dilation * (window - 1) - 1) // stride + 1


@st.composite
def slid(draw, depth=3):
    """Draw a few convolutions and poolings, as functions on tensors and on lengths."""
    steps = []
    for _ in range(draw(st.integers(1, depth))):
        window, stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        padding = draw(st.integers(0, window // 2))
        if draw(st.booleans()):
            options = {"window": window, "stride": stride, "padding": padding, "dilation": dilation}
            steps.append((lambda x, o=options: cg.conv(x, "b c l -> b o l", o=C, **o), tuple(options.values())))
        else:
            options = {"window": window, "stride": stride, "padding": padding}
            steps.append((lambda x, o=options: cg.nn.pool(x, "max", **o), (*options.values(), 1)))
    return steps


@settings(parent=drawing(60))
@given(st.sampled_from(SIZES), slid(), st.integers(1, 12), st.integers(1, 4))
def test_windows_over_quotients_are_torchs_when_bound(size, steps, quotient, h):
    point = {"B": 1, "C": 2, "D": quotient * h, "H": h}
    whole = poly(size).evaluate(point.__getitem__)
    assume(Fraction(whole).denominator == 1 and whole > 0)
    lengths = [int(whole)]
    for _, (window, stride, padding, dilation) in steps:
        lengths.append(windows(lengths[-1], window, stride, padding, dilation))
    assume(min(lengths) > 0)
    with cg.Graph("g") as g:
        g.input("point", tuple(cg.dims("B C D H")))
        x = g.input("x", (B, C, size))
        made = [x]
        for step, _ in steps:
            made.append(step(made[-1]))
            if [windows(n, *steps[len(made) - 2][1]) - n for n in range(20, 26)] == [0] * 6:
                made[-1] = made[-1] + made[-2]  # same-length results can be added
        g.output(made[-1])
    sizes = [t.sizes[-1].bind({k: poly(v) for k, v in point.items()}).constant for t in made]
    assert sizes == lengths
    assert isinstance(cg.flops(g, **point), int)


@each("size", SIZES)
def test_window_of_one_keeps_size(size):
    with cg.Graph("g") as g:
        x = g.input("x", (B, C, size))
        y = cg.conv(x, "b c l -> b o l", window=1, o=C) + x
        z = cg.einsum(y, g.param("w", (1,)), "b c l+w, w -> b c l")
        g.output(cg.nn.pool(y + z, "mean", window=1, stride=1)[:, :, ::1] + x)
    assert y.sizes == x.sizes == z.sizes


def test_halving_a_known_even_axis_gives_existing_size():
    with cg.Graph("g") as g:
        x = g.input("x", (B, C, D / H))
        up = cg.nn.upsample(x, 2)
        down = cg.nn.pool(up, "max", window=2)  # ceiling(D/H - 1/2)
        g.output(cg.ops.concat([x + down, up[:, :, ::2]], 1))
    assert cg.param_count(g) == 0
    point = {"B": 2, "C": 3, "D": 12, "H": 4}
    assert g.outputs[0].sizes[-1].bind({k: poly(v) for k, v in point.items()}) == 3
    with pytest.raises(BindingError, match=r"D=9, H=2: axis 2 of 'x' has size D/H = 9/2"):
        cg.flops(g, D=9, H=2)


def test_halves_of_possibly_odd_sizes_stay_distinct():
    with cg.Graph("g") as g:
        x = g.input("x", (B, C, 2 * D / H))
        down = cg.nn.pool(x, "max", window=2)
        with pytest.raises(cg.ShapeError, match="expected equal"):
            cg.nn.upsample(down, 2) + x
        g.input("y", (D / H,))  # now it is known to be even
        g.output(cg.nn.upsample(down, 2) + x)


def test_patches_and_splits_of_quotient_sizes():
    with cg.Graph("g") as g:
        x = g.input("x", (B, C, D / H, D / H))
        y = cg.conv(x, "b c h w -> b o h w", window=3, padding=1, o=C) + x
        heads = cg.rearrange(y, "b c (n h) w -> b n c (h w)", n=2)
        back = cg.rearrange(heads, "b n c (h w) -> b c (n h) w", w=D / H) + y
        g.output(cg.nn.patch_embedding(cg.ops.slice_axis(back, 1, 0, 3), 1, 8))
    assert g.outputs[0].sizes[1] == poly(D / H) * poly(D / H)
    with pytest.raises(BindingError, match=r"D=3, H=1: axis 3 of 'rearrange' has size D\*\*2/\(2\*H\*\*2\) = 9/2"):
        cg.flops(g, D=3, H=1)
