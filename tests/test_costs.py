import pytest

import costgraph as cg
from costgraph import BindingError, GraphError

B, S, D, F, L = cg.dims("B S D F L")


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


def test_rows_add_up_to_the_totals(model):
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
    assert table.filter(scope="lay").total().flops == 0  # a prefix of text is no scope
    assert table.filter(dtype="fp32", direction="write").total().written == 4 * 15
    assert table.filter(op="cast").total().bytes == 2 * 15 + 4 * 15
    assert table.filter(kind=lambda k: k != "matmul", direction="compute").total().flops == 11 * (5 * 21 + 15) + 5 * 15


def test_bytes_of_a_kernel_stand_beside_the_flops_of_its_body(model):
    softmax = cg.costs(model, **SIZES).filter(scope="softmax").total()
    assert softmax.flops == 5 * 15
    assert softmax.bytes == 2 * 2 * 15


def test_groups_split_the_table(model):
    table = cg.costs(model, **SIZES)
    by_kind = table.group("kind").total()
    assert sum(c.flops for c in by_kind.values()) == table.total().flops
    assert set(table.group("scope", 1)) == {"layers", "softmax", ""}
    assert set(table.group("scope", 2)) == {"layers/mlp", "softmax", ""}
    assert set(table.group("phase")) == {"forward"}
    assert table.group("direction")["read"].total().read == table.total().read


def test_binding_a_table_is_asking_with_sizes(model):
    assert cg.costs(model).bind(**SIZES).total() == cg.costs(model, **SIZES).total()
    assert cg.costs(model).group("kind").bind(**SIZES).total() == cg.costs(model, **SIZES).group("kind").total()
    partly = cg.costs(model).bind(L=11).bind(B=3, D=5, F=7)
    assert partly.total() == cg.costs(model, **SIZES).total()


def test_costs_are_additive():
    a, b = cg.analysis.table.Cost(1, 2, 3, 4, 5), cg.analysis.table.Cost(10, 20, 30, 40, 50)
    assert a + b == cg.analysis.table.Cost(11, 22, 33, 44, 55)
    assert ((a + b).flops, (a + b).bytes) == (66, 99)


def test_rows_hold_numbers_once_all_is_bound(model):
    assert all(isinstance(row.value, int) for row in cg.costs(model, **SIZES))
    assert {row.direction for row in cg.costs(model)} == {"compute", "read", "write"}


def test_answers_are_ints_or_floats_once_bound(model):
    assert type(cg.flops(model, **SIZES)) is int
    assert type(cg.intensity(model, **SIZES)) is float
    assert cg.intensity(model, **SIZES) == cg.flops(model, **SIZES) / cg.bytes_moved(model, **SIZES)


def test_asking_twice_and_in_any_order_gives_the_same(model):
    first = cg.flops(model), cg.bytes_moved(model), cg.peak_memory(model)
    assert (cg.flops(model), cg.bytes_moved(model), cg.peak_memory(model)) == first
    with model:
        model.output(cg.relu(model.outputs[0]))
    assert cg.flops(model, **SIZES) == cg.evaluate(first[0], **SIZES) + 15


@pytest.mark.parametrize(
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
        (lambda g: cg.flops(g, Q=3), BindingError, "'Q' is no dimension of graph 'model'"),
    ],
)  # fmt: skip
def test_refusals_name_the_place_the_value_and_what_was_expected(model, call, error, text):
    with pytest.raises(error, match=text):
        call(model)
