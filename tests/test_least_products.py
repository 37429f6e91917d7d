"""Lower bound for convolutions: minimal multiplication counts of fast algorithms, and clocks above the peak's."""

from fractions import Fraction

import pytest
from each import each

import costgraph as cg
from costgraph.analysis.work import works

B, C, O, N, M = cg.dims("B C O N M")


def least(**options):
    """Return the matmul FLOPs that a convolution's bound counts, and the executed ones."""
    with cg.Graph("g", dtype="fp32") as g:
        g.output(cg.conv(g.input("x", (B, C, N)), "b c n -> b o n", o=O, **options))
    (work,) = works(g)
    return work.least["matmul", "fp32"].expr, cg.matmul_flops(g)


def products_of_polynomials(n, r):
    """Count the multiplications to multiply polynomials with n and r coefficients by evaluation at points.

    Winograd's F(n, r) is the transpose of this map, and transposition preserves the multiplication count.
    """
    a, b = [Fraction(3 * i * i - 7) for i in range(n)], [Fraction(2 * i + 5) for i in range(r)]
    points = range(n + r - 1)
    values = [sum(c * x**i for i, c in enumerate(a)) * sum(c * x**i for i, c in enumerate(b)) for x in points]
    direct = [sum(a[i] * b[k - i] for i in range(n) if 0 <= k - i < r) for k in range(n + r - 1)]
    # a polynomial is determined by its values at as many points as it has coefficients
    assert values == [sum(c * x**k for k, c in enumerate(direct)) for x in points]
    return len(values)


@each(("n", "r"), [(2, 3), (4, 3), (7, 5), (1, 3), (11, 1)])
def test_window_needs_one_product_per_position(n, r):
    found, executed = least(window=r)
    place = {N: n + r - 1}  # n outputs
    assert found.subs(place) == 2 * B * C * O * products_of_polynomials(n, r)
    assert executed.subs(place) == 2 * B * C * O * n * r


def test_winograd_tiles_match_published_counts():
    with cg.Graph("g", dtype="fp16") as g:
        g.output(cg.conv(g.input("x", (B, C, N, M)), "b c n m -> b o n m", o=O, window=3))
    (work,) = works(g)
    products = work.least["matmul", "fp16"].expr
    # Lavin and Gray 2015, section 4.1: F(2x2, 3x3) has 16 products instead of 36, F(4x4, 3x3) 36 instead of 144
    assert products.subs({N: 4, M: 4}) == 2 * B * C * O * 16
    assert products.subs({N: 6, M: 6}) == 2 * B * C * O * 36


def test_stride_splits_window_into_phases():
    found, executed = least(window=3, stride=2)
    n = 7  # n outputs: taps 0 and 2 slide over the even positions, F(n, 2), and tap 1 over the odd ones, F(n, 1)
    assert found.subs({N: 2 * n + 1}) == 2 * B * C * O * ((n + 1) + n)
    assert executed.subs({N: 2 * n + 1}) == 2 * B * C * O * 3 * n
    # taps that never share a position save nothing
    assert least(window=2, stride=3)[0] == least(window=2, stride=3)[1]


def test_convolution_gradients_have_the_same_bound():
    n, r = 13, 3
    with cg.Graph("g", dtype="fp32") as g:
        x, w = g.param("x", (B, C, n + r - 1)), g.param("w", (O, C, r))
        g.output(cg.reduce(cg.einsum(x, w, "b c n+r, o c r -> b o n", n=n), "b o n -> ", "sum"))
    bounds = [w.least for w in works(cg.backward(g)) if ("matmul", "fp32") in w.least]
    assert [each["matmul", "fp32"].expr for each in bounds] == [2 * B * C * O * (n + r - 1)] * 3


def test_matmul_and_attention_bounds_are_unchanged():
    with cg.Graph("g", dtype="fp16") as g:
        q = g.input("q", (2, 3, 61, 16))
        y = cg.attention(q, q, q, kernel="eager")
        g.output(cg.einsum(y, g.param("w", (16, 7)), "b h s k, k f -> b h s f"))
    assert all(work.least == work.flops for work in works(g))


def test_estimate_uses_direct_convolution():
    with cg.Graph("g", dtype="fp16") as g:
        g.output(cg.conv(g.input("x", (17, 2039, 29, 31)), "b c h w -> b o h w", o=2053, window=3, padding=1))
    times, rate = cg.roofline(g, "h100-sxm"), float(cg.load_hardware("h100-sxm").rate("fp16"))
    assert times.estimate == pytest.approx(2 * 17 * 2039 * 2053 * 9 * 29 * 31 / rate)
    assert times.lower_bound == pytest.approx(2 * 17 * 2039 * 2053 * (29 + 2) * (31 + 2) / rate)


def test_boost_clock_lowers_only_the_bound():
    with cg.Graph("g", dtype="bf16") as g:
        g.output(g.input("a", (8191, 8191)) @ g.input("b", (8191, 8191)))
    device = cg.load_hardware("rtx5090")
    times, direct = cg.roofline(g, device), 2 * 8191**3 / float(device.rate("bf16"))
    assert times.estimate == pytest.approx(direct)
    # logged clock 2,932 MHz; the peaks assume 2,407 MHz
    assert times.lower_bound == pytest.approx(direct * 2407 / 2932)
    assert cg.seconds(g, device, "lower") == times.lower_bound
