"""The cost table and the dtypes in which ops compute."""

import pytest
from each import each

import costgraph as cg
from costgraph import BindingError, GraphError

B, S, D, F, L, W = cg.dims("B S D F L W")


@pytest.fixture
def model():
    with cg.Graph("model", dtype="bf16") as g:
        x = g.input("x", (B, D))

        def block(x):
            with cg.scope("mlp"):
                return x + cg.linear(
                    cg.gelu(cg.linear(x, "b d -> b f", f=F, name="up")), "b f -> b d", d=D, name="down"
                )

        x = cg.repeat(L, block, x, name="layers")
        g.output(cg.ops.cast(cg.softmax(x), "fp32"))
    return g


SIZES = {"B": 3, "D": 5, "F": 7, "L": 11}


def test_rows_sum_to_totals(model):
    table = cg.costs(model)
    assert len(table) == len(list(table))
    for question, total in (
        (cg.flops, table.total().flops),
        (cg.bytes_moved, table.total().bytes),
        (cg.matmul_flops, table.total().matmul),
    ):
        assert question(model, **SIZES) == cg.evaluate(total, **SIZES)


def test_filters_by_kind_scope_direction_and_format(model):
    table = cg.costs(model, **SIZES)
    assert table.filter(kind="matmul").total().flops == 11 * 2 * (2 * 3 * 5 * 7)
    assert table.filter(scope="layers/mlp/up").total().flops == 11 * 2 * 3 * 5 * 7
    assert table.filter(scope="layers").total().matmul == 11 * 2 * (2 * 3 * 5 * 7)
    assert table.filter(scope="lay").total().flops == 0  # a scope filter is no text prefix
    assert table.filter(dtype="fp32", direction="write").total().written == 4 * 15
    assert table.filter(op="cast").total().bytes == 2 * 15 + 4 * 15
    assert table.filter(kind=lambda k: k != "matmul", direction="compute").total().flops == 11 * (5 * 21 + 15) + 5 * 15


def test_kernel_bytes_join_the_flops_of_its_body(model):
    softmax = cg.costs(model, **SIZES).filter(scope="softmax").total()
    assert softmax.flops == 5 * 15
    assert softmax.bytes == 2 * 2 * 15


def test_groups_partition_the_table(model):
    table = cg.costs(model, **SIZES)
    by_kind = table.group("kind").total()
    assert sum(c.flops for c in by_kind.values()) == table.total().flops
    assert set(table.group("scope", 1)) == {"layers", "softmax", ""}
    assert set(table.group("scope", 2)) == {"layers/mlp", "softmax", ""}
    assert set(table.group("phase")) == {"forward"}
    assert table.group("direction")["read"].total().read == table.total().read


def test_binding_a_table_matches_querying_with_sizes(model):
    assert cg.costs(model).bind(**SIZES).total() == cg.costs(model, **SIZES).total()
    assert cg.costs(model).group("kind").bind(**SIZES).total() == cg.costs(model, **SIZES).group("kind").total()
    partly = cg.costs(model).bind(L=11).bind(B=3, D=5, F=7)
    assert partly.total() == cg.costs(model, **SIZES).total()


def test_costs_are_additive():
    a, b = cg.analysis.costs.Cost(1, 2, 3, 4, 5), cg.analysis.costs.Cost(10, 20, 30, 40, 50)
    assert a + b == cg.analysis.costs.Cost(11, 22, 33, 44, 55)
    assert ((a + b).flops, (a + b).bytes) == (66, 99)


def test_fully_bound_rows_hold_numbers(model):
    assert all(isinstance(row.value, int) for row in cg.costs(model, **SIZES))
    assert {row.direction for row in cg.costs(model)} == {"compute", "read", "write"}


def test_bound_answers_are_ints_or_floats(model):
    assert type(cg.flops(model, **SIZES)) is int
    assert type(cg.intensity(model, **SIZES)) is float
    assert cg.intensity(model, **SIZES) == cg.flops(model, **SIZES) / cg.bytes_moved(model, **SIZES)


def test_repeated_queries_give_the_same_answers(model):
    first = cg.flops(model), cg.bytes_moved(model), cg.peak_memory(model)
    assert (cg.flops(model), cg.bytes_moved(model), cg.peak_memory(model)) == first
    with model:
        model.output(cg.relu(model.outputs[0]))
    assert cg.flops(model, **SIZES) == cg.evaluate(first[0], **SIZES) + 15


@each(
    ("call", "error", "text"),
    [
        (lambda g: cg.costs(g).filter(colour="red"), GraphError, "column 'colour', expected one of op, scope, phase"),
        (lambda g: cg.costs(g).filter(amount=3), GraphError, "column 'amount', expected one of"),
        (lambda g: cg.costs(g).filter(kind="matmuls"), GraphError, "kind 'matmuls', expected one of matmul, pointwise"),
        (lambda g: cg.costs(g).filter(direction="out"), GraphError,
         "direction 'out', expected one of compute, read, write"),
        (lambda g: cg.costs(g).filter(phase="fwd"), GraphError, "phase 'fwd', expected one of forward"),
        (lambda g: cg.costs(g).filter(scope=3), GraphError, "scope: got int, expected a function"),
        (lambda g: cg.costs(g).group("amount"), GraphError, "column 'amount', expected one of"),
        (lambda g: cg.costs(g).group(None), GraphError, "column is None, expected text"),
        (lambda g: cg.costs(g).group("scope", 0), GraphError, "depth 0, expected a positive integer"),
        (lambda g: cg.costs(g).bind(Q=3), BindingError, "'Q' is no dimension, expected one of B, D, F, L"),
        (lambda g: cg.costs(g).bind(B=0), BindingError, "B=0: expected a positive integer"),
        (lambda g: cg.costs(g, count="half"), GraphError, "count 'half', expected one of executed, full"),
        (lambda g: cg.matmul_flops(g, "half"), GraphError, "count 'half', expected one of executed, full"),
        (lambda g: cg.matmul_flops(g, []), GraphError, "matmul_flops: count is .*, expected text"),
        (lambda g: cg.bytes_moved(g, 1), GraphError, "bytes_moved: fused is 1, expected True or False"),
        (lambda g: cg.flops(g, Q=3), BindingError, "'Q' is not a dimension of graph 'model'"),
    ],
)  # fmt: skip
def test_errors_name_place_value_and_expectation(model, call, error, text):
    with pytest.raises(error, match=text):
        call(model)


def formats(g, op, direction):
    return {row.dtype for row in cg.costs(g).filter(op=op, direction=direction)}


@pytest.mark.parametrize(
    ("left", "right", "result", "computed"),
    [
        ("bf16", "bf16", "fp32", "bf16"),  # from the operands, not the result
        ("bf16", "fp32", "bf16", "fp32"),  # the common one
        ("fp32", "bf16", "bf16", "fp32"),
        ("int8", "bf16", "fp32", "bf16"),  # floats win over integers
        ("int8", "int8", "int32", "int8"),  # no floats: the operand dtype counts, although sums are wider
    ],
)
def test_op_computes_in_promoted_float_operand_dtype(left, right, result, computed):
    with cg.Graph("g") as g:
        x, w = g.input("x", (B, D), dtype=left), g.input("w", (D, F), dtype=right)
        g.output(cg.einsum(x, w, "b d, d f -> b f", dtype=result, name="up"))
    assert formats(g, "up", "compute") == {computed}
    assert formats(g, "up", "read") == {left, right}
    assert formats(g, "up", "write") == {result}


def test_op_without_float_operands_computes_in_result_dtype():
    with cg.Graph("g") as g:
        ids = g.input("ids", (7,), dtype="int32")
        g.output(*cg.opaque("op", [ids], [((3,), "int32"), ((5,), "fp32")], flops=11))
    assert formats(g, "op", "compute") == {"int32"}
    assert formats(g, "op", "write") == {"int32", "fp32"}


def test_mixed_operands_promote_result_dtype():
    with cg.Graph("g", dtype="bf16") as g:
        x, w, v = g.input("x", (3, 5)), g.input("w", (5, 7), dtype="fp32"), g.input("v", (7, 2))
        assert cg.einsum(x, w, "b d, d f -> b f").dtype.name == "fp32"
        assert cg.einsum(w, v, "d f, f k -> d k").dtype.name == "fp32"
        assert cg.einsum(x, w, v, "b d, d f, f k -> b k").dtype.name == "fp32"


def test_bytes_are_attributed_to_first_flop_kind_of_op():
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
    assert kinds["exp"] == {"transcendental"}  # one exp per element only
    assert kinds["gelu"] == kinds["softmax"] == {"pointwise"}
    assert kinds["flash"] == kinds["matmul"] == {"matmul"}  # including the work fused into it


def test_free_ops_have_no_row():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (2, 3)).T))
    assert {(row.op, row.direction) for row in cg.costs(g)} == {("relu", d) for d in ("compute", "read", "write")}


# -- intensity ---------------------------------------------------------------------------------------------------------


def test_intensity_cancels_common_sizes():
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.relu(cg.relu(g.input("x", (B, D)))))
    assert cg.intensity(g) == 0.25  # two FLOPs; two reads and two writes, two bytes each
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
def test_intensity_is_flops_per_byte_for_complex_formulas(build, fused):
    g, sizes = build()
    expected = cg.flops(g, **sizes) / cg.bytes_moved(g, fused, **sizes)
    assert cg.intensity(g, fused, **sizes) == pytest.approx(expected, rel=1e-15)
    symbolic = cg.intensity(g, fused)
    assert cg.evaluate(symbolic, **sizes) == pytest.approx(expected, rel=1e-12)


# -- contraction orders ------------------------------------------------------------------------------------------------


def test_eight_operand_einsum_needs_no_order():
    with cg.Graph("g") as g:
        g.output(
            cg.einsum(*(g.input(f"x{i}", (3, 3)) for i in range(8)), "a b, b c, c d, d e, e f, f g, g h, h i -> a i")
        )
    assert cg.flops(g) == 7 * 2 * 3**3  # any order needs seven 3-by-3 products


def test_affine_index_with_plain_axes_needs_second_operand():
    with cg.Graph("g") as g:
        x = g.input("x", (7, 5))
        with pytest.raises(cg.PatternError, match="needs a second operand"):
            cg.einsum(x, "h*2+r c -> h r c", r=3)
