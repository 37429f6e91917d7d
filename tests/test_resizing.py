from fractions import Fraction
from math import ceil, floor

import pytest
from each import each

import costgraph as cg

B, C, R = cg.dims("B C R")


def made(function, shape, *args, **options):
    with cg.Graph("g") as g:
        g.output(function(g.input("x", shape, grad=True), *args, **options))
    return g


def windows(n, k):
    """Return the total size of the windows in torch's adaptive pooling."""
    return sum(ceil(Fraction((i + 1) * n, k)) - floor(Fraction(i * n, k)) for i in range(k))


# -- adaptive pooling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [(6, 6), (7, 3), (2, 1)])
def test_adaptive_pooling_counts_every_window_element(parts):
    open_sizes = made(cg.nn.adaptive_pool, (B, C, R, R), parts)
    for side in (1, 2, 5, 6, 7, 12, 13, 31):
        expected = 2 * 3 * windows(side, parts[0]) * windows(side, parts[1])
        assert cg.flops(open_sizes, B=2, C=3, R=side) == expected, side
        numbers = made(cg.nn.adaptive_pool, (2, 3, side, side), parts)
        assert cg.flops(numbers) == expected, side
        assert numbers.outputs[0].shape == (2, 3, *parts)
        assert cg.bytes_moved(open_sizes, B=2, C=3, R=side) == 4 * 6 * (side**2 + parts[0] * parts[1]), side


def test_divisible_adaptive_pooling_is_plain_pooling():
    assert [op.kind.name for op in made(cg.nn.adaptive_pool, (2, 3, 12, 8), (6, 4)).ops] == ["pool"]
    assert [op.kind.name for op in made(cg.nn.adaptive_pool, (B, C, R, R), (1, 1)).ops] == ["reduce"]
    assert [op.kind.name for op in made(cg.nn.adaptive_pool, (B, C, R, R), (1, 2)).ops] == ["opaque"]


def test_symbolic_output_size_must_divide_input():
    g = made(cg.nn.adaptive_pool, (B, C, 4 * R), (R,))
    assert cg.flops(g, B=2, C=3, R=5) == 2 * 3 * 20
    with pytest.raises(cg.ShapeError, match="R windows over 4\\*C elements, expected an integer number of windows"):
        made(cg.nn.adaptive_pool, (B, C, 4 * C), (R,))


def test_adaptive_pooling_gradient_costs():
    with cg.Graph("g") as g:
        y = cg.nn.adaptive_pool(g.input("x", (B, C, R, R), grad=True), (3, 3))
        g.output(cg.reduce(y, "b c h w -> ", "sum"))
    back = cg.costs(cg.backward(g), B=2, C=3, R=7).filter(phase="backward").group("op").total()
    (row,) = [cost for op, cost in back.items() if op.startswith("adaptive_pool")]
    assert row.flops == 2 * 3 * 9 * 9  # windows of 3 elements that share one at each boundary
    assert row.bytes == 4 * 2 * 3 * (9 + 49)  # only the shape of the operand is used


# -- nearest neighbours ------------------------------------------------------------------------------------------------


@each(("factor", "rank"), [(2, 1), (2, 2), (3, 2), (2, 3), (1, 2)])
def test_upsample_costs(factor, rank):
    g = made(cg.nn.upsample, (B, C, *[R] * rank), factor)
    assert g.outputs[0].shape == (B, C, *[factor * R] * rank)
    assert cg.flops(g) == 0
    assert cg.bytes_moved(g, B=2, C=3, R=5) == 4 * 6 * (5**rank + (factor * 5) ** rank)


@each("side", [8, 9, 13])
def test_upsample_to_odd_size(side):
    with cg.Graph("g") as g:
        x = g.input("x", (B, C, R, R))
        y = cg.conv(x, "b c h w -> b o h w", window=3, stride=2, padding=1, o=C)
        y = cg.nn.upsample(y, sizes=x.shape[2:])
        g.output(x + y)
    assert g.outputs[0].shape == (B, C, R, R)
    half = ceil(side / 2)
    moved = cg.costs(g, B=2, C=3, R=side).filter(scope="upsample").total()
    assert moved.bytes == 4 * 6 * (half**2 + side**2)


def test_upsample_gradient_adds_each_element_once():
    with cg.Graph("g") as g:
        y = cg.nn.upsample(g.input("x", (B, C, R, R), grad=True))
        g.output(cg.reduce(y, "b c h w -> ", "sum"))
    back = cg.costs(cg.backward(g), B=2, C=3, R=5).filter(phase="backward", scope="upsample").total()
    assert back.flops == 2 * 3 * 10 * 10


@each(
    ("call", "text"),
    [
        (lambda x: cg.nn.upsample(x, 0), "factor 0, expected an integer of at least 1"),
        (lambda x: cg.nn.upsample(x, 1.5), "factor 1.5"),
        (lambda x: cg.nn.upsample(x, True), "factor True"),
        (lambda x: cg.nn.upsample(x, sizes=(3,)), "to 1 sizes, expected 2"),
        (lambda x: cg.nn.upsample(cg.reduce(x, "b c h w -> b c", "sum")), "expected at least three axes"),
        (lambda x: cg.nn.adaptive_pool(x, ()), "into 0 sizes, expected 1 to 4"),
        (lambda x: cg.nn.adaptive_pool(x, (1,) * 5), "into 5 sizes, expected 1 to 4"),
        (lambda x: cg.nn.adaptive_pool(x, (0, 1)), "expected"),
    ],
)
def test_invalid_resizing_is_refused(call, text):
    with cg.Graph("g") as g:
        x = g.input("x", (B, C, R, R))
        with pytest.raises(cg.ShapeError, match=text):
            call(x)


# -- sizes and values --------------------------------------------------------------------------------------------------


def test_halving_twice_is_one_ceiling():
    with cg.Graph("g") as g:
        x = g.input("x", (B, C, R, R))
        for _ in range(5):
            x = cg.nn.pool(x, "max", window=3, stride=2, padding=1)
    assert str(x.shape[2]) == "ceiling(R/32)"
    for side in (1, 31, 32, 33, 224):
        n = side
        for _ in range(5):
            n = (n + 2 - 3) // 2 + 1
        assert x.shape[2].subs(R, side) == n
