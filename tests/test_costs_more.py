"""Rows of the table of costs: in which format an op calculates, and of which kind its bytes are."""

import pytest

import costgraph as cg

B, D, F, S, W = cg.dims("B D F S W")


def formats(g, op, direction):
    return {row.dtype for row in cg.costs(g).filter(op=op, direction=direction)}


@pytest.mark.parametrize(
    ("left", "right", "result", "computed"),
    [
        ("bf16", "bf16", "fp32", "bf16"),  # the operands', not the result's
        ("bf16", "fp32", "bf16", "fp32"),  # the common one
        ("fp32", "bf16", "bf16", "fp32"),
        ("int8", "bf16", "fp32", "bf16"),  # whole numbers have no say beside floats
        ("int8", "int8", "int32", "int8"),  # no floats: sums are wider than what the unit takes
    ],
)
def test_an_op_calculates_in_the_common_format_of_its_floating_operands(left, right, result, computed):
    with cg.Graph("g") as g:
        x, w = g.input("x", (B, D), dtype=left), g.input("w", (D, F), dtype=right)
        g.output(cg.einsum(x, w, "b d, d f -> b f", dtype=result, name="up"))
    assert formats(g, "up", "compute") == {computed}
    assert formats(g, "up", "read") == {left, right}
    assert formats(g, "up", "write") == {result}


def test_without_floating_operands_the_first_result_has_the_format():
    with cg.Graph("g") as g:
        ids = g.input("ids", (7,), dtype="int32")
        g.output(*cg.opaque("op", [ids], [((3,), "int32"), ((5,), "fp32")], flops=11))
    assert formats(g, "op", "compute") == {"int32"}
    assert formats(g, "op", "write") == {"int32", "fp32"}


def test_the_result_of_mixed_operands_has_their_common_format():
    with cg.Graph("g", dtype="bf16") as g:
        x, w, v = g.input("x", (3, 5)), g.input("w", (5, 7), dtype="fp32"), g.input("v", (7, 2))
        assert cg.einsum(x, w, "b d, d f -> b f").dtype.name == "fp32"
        assert cg.einsum(w, v, "d f, f k -> d k").dtype.name == "fp32"
        assert cg.einsum(x, w, v, "b d, d f, f k -> b k").dtype.name == "fp32"


def test_bytes_have_the_first_kind_of_flops_that_their_op_has():
    with cg.Graph("g") as g:
        q, k, v = (g.input(n, (2, 3, 5, 7)) for n in "qkv")
        y = cg.attention(q, k, v, causal=True, kernel="flash", name="flash")
        y = cg.ops.concat([cg.ops.pointwise("exp", y), cg.gelu(y)], 0)
        y = cg.softmax(cg.ops.cast(y, "bf16"))
        g.output(cg.linear(y, "b h s k -> b h s e", e=11, name="up"))
    kinds = {}
    for row in cg.costs(g):
        if row.direction != "compute":
            kinds.setdefault(row.op.split("/")[-1], set()).add(row.kind)
            assert row.value > 0
    assert kinds["concat"] == kinds["cast"] == {"data"}
    assert kinds["exp"] == {"transcendental"}  # one exp for each element, and nothing else
    assert kinds["gelu"] == kinds["softmax"] == {"pointwise"}
    assert kinds["flash"] == kinds["matmul"] == {"matmul"}  # of what is fused into it, too


def test_what_is_free_has_no_row():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (2, 3)).T))
    assert {(row.op, row.direction) for row in cg.costs(g)} == {("relu", d) for d in ("compute", "read", "write")}


# -- intensity ---------------------------------------------------------------------------------------------------------


def test_intensity_is_free_of_sizes_that_cancel():
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.relu(cg.relu(g.input("x", (B, D)))))
    assert cg.intensity(g) == 0.25  # two FLOPs for two reads and two writes of two bytes
    assert cg.intensity(g, fused=True) == 0.5


def convolution():
    with cg.Graph("g") as g:
        g.output(cg.conv(g.input("x", (B, D, W)), "b c w -> b o w", window=3, stride=2, padding=1, o=F))
    return g, {"B": 2, "D": 3, "W": 11, "F": 5}


def product():
    with cg.Graph("g") as g:
        g.output(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F))
    return g, {"B": 2, "D": 3, "F": 5}


def many_terms():
    with cg.Graph("g") as g:
        shapes = [(a, b) for a in (B, D, F, S, W) for b in (B, D, F, S, W) if a != b]
        inputs = [g.input(f"x{i}", s) for i, s in enumerate(shapes)]
        g.output(*(cg.linear(x, "a b -> a c", c=7 + i) for i, x in enumerate(inputs)))
    return g, {"B": 2, "D": 3, "F": 5, "S": 7, "W": 11}


@pytest.mark.parametrize("build", [convolution, product, many_terms])
@pytest.mark.parametrize("fused", [False, True])
def test_intensity_is_flops_for_each_byte_with_floors_and_with_many_terms(build, fused):
    g, sizes = build()
    expected = cg.flops(g, **sizes) / cg.bytes_moved(g, fused, **sizes)
    assert cg.intensity(g, fused, **sizes) == pytest.approx(expected, rel=1e-15)
    symbolic = cg.intensity(g, fused)
    assert cg.evaluate(symbolic, **sizes) == pytest.approx(expected, rel=1e-12)


# -- contraction orders ------------------------------------------------------------------------------------------------


def test_eight_operands_need_no_order():
    with cg.Graph("g") as g:
        g.output(
            cg.einsum(*(g.input(f"x{i}", (3, 3)) for i in range(8)), "a b, b c, c d, d e, e f, f g, g h, h i -> a i")
        )
    assert cg.flops(g) == 7 * 2 * 3**3  # any order of seven products of 3 by 3


def test_an_index_beside_plain_axes_needs_a_second_operand_too():
    with cg.Graph("g") as g:
        x = g.input("x", (7, 5))
        with pytest.raises(cg.PatternError, match="needs a second operand"):
            cg.einsum(x, "h*2+r c -> h r c", r=3)
