"""Sizes that turn out not to be whole numbers once they are bound, and long formulas."""

import pytest

import costgraph as cg
from costgraph import BindingError
from costgraph.notation.grammar import parse_formula

B, H, L, S, W = cg.dims("B H L S W")


def test_a_count_that_is_no_whole_number_is_refused_by_the_name_of_its_loop():
    with cg.Graph("g") as g:
        g.output(cg.repeat(L / 2, cg.relu, g.input("x", (B,)), name="layers"))
    assert cg.flops(g, L=6, B=5) == 3 * 5
    with pytest.raises(BindingError, match=r"L=7: count of 'layers' has size L/2 = 7/2, expected a positive whole"):
        cg.flops(g, L=7, B=5)


@pytest.mark.parametrize(
    ("size", "good", "bad", "becomes"),
    [
        (S - 2, 3, 2, "0"),
        (S - 5, 6, 3, "-2"),
        (S / 3, 6, 7, "7/3"),
        (S * (S - 1) / 6, 3, 2, "1/3"),
    ],
)
def test_an_axis_without_a_positive_whole_size_is_refused(size, good, bad, becomes):
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (size, B))))
    assert cg.flops(g, S=good, B=7) == int(size.subs(S, good)) * 7
    with pytest.raises(
        BindingError, match=f"S={bad}: axis 0 of 'x' has size .* = {becomes}, expected a positive whole"
    ):
        cg.flops(g, S=bad, B=7)


def test_a_rounded_size_is_looked_at_too():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (S, B))[1::2]))
    assert cg.flops(g, S=6, B=7) == 3 * 7
    with pytest.raises(BindingError, match="S=1"):
        cg.flops(g, S=1, B=7)


def test_a_slice_that_ends_beyond_its_axis_is_refused_when_it_is_bound():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (S, 3))[:W]))
    assert cg.flops(g, S=7, W=7) == 21
    with pytest.raises(BindingError, match="expected a whole number that is not negative"):
        cg.flops(g, S=7, W=11)


def test_names_are_known_wherever_they_stand():
    with cg.Graph("g") as g:
        q, k, v = (g.input(n, (2, 3, S, 5)) for n in "qkv")
        y = cg.attention(q, k, v, causal=True, window=W)  # in a domain alone
        y = cg.repeat(L, cg.relu, y)  # in a count
        (z,) = cg.opaque("op", [y], [((7,), "fp32")], flops=H)  # in a formula that is stated
        g.output(z)
    for name in "SWLH":
        assert cg.flops(g, **{name: 11}) != cg.flops(g)
    with pytest.raises(BindingError, match="'B' is no dimension of graph 'g', expected one of H, L, S, W"):
        cg.flops(g, B=3)


def test_a_sum_of_many_powers_is_read():
    text = " + ".join(["A**2", "(B**2)**3", "2**C"] * 70)
    assert parse_formula(text) == parse_formula("70*A**2 + 70*B**6 + 70*2**C")
    many = "*".join(["A**2"] * 100)
    assert parse_formula(many) == parse_formula("A**200")
