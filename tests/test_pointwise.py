"""Elementwise functions: result dtypes as in torch, operation counts as in their formulas."""

import ast
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from budget import drawing
from each import each
from hypothesis import given
from hypothesis import strategies as st
from oracles import graph_of, like, same_layout, strides

import costgraph as cg
from costgraph import GraphError, ShapeError, testing
from costgraph.ops.elementwise import (
    FUNCTIONS,
    Function,
)
from costgraph.ops.registry import KINDS

B, S, D = cg.dims("B S D")
FLOATS = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OTHERS = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool}
FORMATS = FLOATS | OTHERS
NAMES = {v: k for k, v in FORMATS.items()}


@each("first", FORMATS)
@each("second", FORMATS)
@each("function", ["add", "mul", "div", "maximum", "less"])
def test_result_dtype_matches_torch(first, second, function):
    shape = (2, 3)
    tensors = torch.ones(shape, dtype=FORMATS[first]), torch.ones(shape, dtype=FORMATS[second])
    run = {"add": torch.add, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum, "less": torch.less}
    expected = run[function](*tensors).dtype
    with cg.Graph("g") as g:
        y = cg.ops.pointwise(function, g.input("a", shape, dtype=first), g.input("b", shape, dtype=second))
    assert y.dtype.name == NAMES[expected]


@each("first", FORMATS)
@each("number", [2, 2.5, True])
def test_result_dtype_with_scalar_matches_torch(first, number):
    expected = (torch.ones(2, dtype=FORMATS[first]) + number).dtype
    with cg.Graph("g") as g:
        y = g.input("a", (2,), dtype=first) + number
    assert y.dtype.name == NAMES[expected]


@given(st.data())
@drawing(1600)
def test_order_of_a_results_axes_in_memory_is_torchs(data):
    shape = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    with cg.Graph("g") as g:
        mine, theirs = [], []
        for n in range(data.draw(st.integers(1, 3))):
            kept = data.draw(st.integers(0, len(shape) - 1)) if n else 0
            sizes = [1 if n and data.draw(st.booleans()) else size for size in shape[kept:]]
            order = data.draw(st.permutations(range(len(sizes))))
            t = torch.empty([sizes[i] for i in order])
            back = sorted(range(len(order)), key=order.__getitem__)
            names = "abcd"[: len(order)]
            x = cg.rearrange(like(g, t, f"x{n}"), f"{' '.join(names)} -> {' '.join(names[i] for i in back)}")
            mine, theirs = [*mine, x], [*theirs, t.permute(back)]
        if len(mine) == 1:
            y, expected = cg.relu(mine[0]), torch.relu(theirs[0])
        elif len(mine) == 2:
            y, expected = mine[0] + mine[1], theirs[0] + theirs[1]
        else:
            y, expected = cg.ops.pointwise("lerp", *mine), torch.lerp(*theirs)
    assert y.shape == tuple(expected.shape)
    assert strides(y) == expected.stride()


@each("shapes", [((3, 5), (5,)), ((3, 1), (1, 5)), ((7, 3, 5), (3, 1)), ((), (3,)), ((3, 5), ())])
def test_broadcast_operands_count_unexpanded_bytes(shapes):
    result = np.broadcast_shapes(*shapes)
    g, y = graph_of(lambda a, b: a + b, *shapes)
    assert y.shape == result
    assert cg.flops(g) == np.prod(result, dtype=int)  # one per result element
    assert cg.bytes_moved(g) == 4 * sum(int(np.prod(s)) for s in (*shapes, result))


def test_function_costs_scale_with_elements():
    for function in FUNCTIONS.values():
        with cg.Graph("g") as g:
            operands = [g.input(f"x{i}", (3, 5)) for i in range(function.arity)]
            g.output(cg.ops.pointwise(function.name, *operands))
        total = cg.costs(g).total()
        assert (total.pointwise, total.transcendental) == (15 * function.flops, 15 * function.transcendentals)


def test_user_function_has_stated_costs():
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise(Function("cube", 1, 2), g.input("x", (B, D))))
    assert cg.flops(g) == 2 * B * D


def test_bf16_relu_moves_four_bytes_per_flop():
    g, _ = graph_of(cg.relu, (B, D), dtype="bf16")
    assert cg.bytes_moved(g) == 2 * B * D + 2 * B * D
    assert cg.intensity(g) == 0.25


def test_operators_are_pointwise_ops():
    with cg.Graph("g") as g:
        x, y = g.input("x", (3,)), g.input("y", (3,))
        made = [x + y, x - y, x * y, x / y, x**2, -x, 1 + x, 1 - x, 2 * x, 1 / x, np.float64(2) * x, x + np.float32(1)]
    assert [t.producer.kind.function.name for t in made] == [
        "add", "sub", "mul", "div", "pow", "neg", "add", "sub", "mul", "div", "mul", "add",
    ]  # fmt: skip
    assert all(t.shape == (3,) for t in made)


def test_numpy_array_operands_are_refused():
    with cg.Graph("g") as g:
        x = g.input("x", (3,))
        with pytest.raises(GraphError, match="expected tensors and numbers"):
            np.ones(3) + x


def test_scalar_operands_are_free_to_read():
    g, _ = graph_of(lambda x: x * 2.5, (3, 5))
    assert cg.bytes_moved(g) == 4 * 15 + 4 * 15


def test_cast_moves_bytes_of_both_dtypes_and_identity_is_free():
    g, _ = graph_of(lambda x: cg.ops.cast(x, "bf16"), (3, 5))
    assert cg.bytes_moved(g) == 4 * 15 + 2 * 15
    assert cg.flops(g) == 0
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        assert cg.ops.cast(x, "fp32") is x


def test_in_place_op_writes_to_operand_storage():
    with cg.Graph("g") as g:
        h = cg.gelu(g.input("x", (3, 5)))
        y = cg.relu(h, inplace=True)
        g.output(y)
    assert y.is_view
    assert cg.bytes_moved(g) == 4 * (4 * 15)  # x, h; h again, y
    assert cg.peak_memory(g) == 4 * (2 * 15)  # x, and one storage for h and y


def test_in_place_op_keeps_operand_strides():
    base = torch.empty(3, 5)
    with cg.Graph("g") as g:
        y = cg.relu(g.input("x", (3, 5)).T, inplace=True)
    same_layout(y, torch.relu_(base.T), base)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda h: (cg.relu(h, inplace=True), h + 1), "op 'add': reads 'gelu', which 'relu' has overwritten in place"),
        (lambda h: (h.T, cg.relu(h, inplace=True), h), "output 'gelu', which 'relu' has overwritten in place"),
    ],
)
def test_reading_an_overwritten_tensor_is_refused(make, text):
    def build():
        with cg.Graph("g") as g:
            g.output(make(cg.gelu(g.input("x", (3, 5))))[-1])

    with pytest.raises(GraphError, match=text):
        build()


def test_reading_a_view_of_an_overwritten_tensor_is_refused():
    g = cg.Graph("g")
    h = cg.gelu(g.input("x", (3, 5)))
    view = h.T
    cg.relu(h, inplace=True)
    g.output(cg.tanh(view))
    with pytest.raises(GraphError, match="op 'tanh': reads 'transpose', which 'relu' has overwritten"):
        g.validate()


@each(
    ("call", "error", "text"),
    [
        (lambda x, y: cg.ops.pointwise("tan", x), GraphError, "function 'tan', expected one of copy, cast, add"),
        (lambda x, y: cg.ops.pointwise(None, x), GraphError, "function None, expected one of"),
        (lambda x, y: cg.ops.pointwise("add", x), ShapeError, "add of 1 operands, expected 2"),
        (lambda x, y: cg.ops.pointwise("add", 1, 2), GraphError, "expected tensors and numbers, at least one tensor"),
        (lambda x, y: x + "1", GraphError, "expected tensors and numbers"),
        (lambda x, y: x + None, GraphError, "expected tensors and numbers"),
        (lambda x, y: x + y, ShapeError, "axis -1 has sizes 5 and 7 in x.* and y.*, expected equal sizes or 1"),
        (lambda x, y: cg.relu(x, inplace=1), GraphError, "relu: inplace is 1, expected True or False"),
        (lambda x, y: cg.ops.pointwise("sub", 1, x, inplace=True), GraphError,
         "in place into 1, expected a tensor first"),
        (lambda x, y: cg.ops.pointwise("add", x[:1], x, inplace=True), ShapeError,
         "in place into slice.*: expected an operand"),
        (lambda x, y: cg.ops.pointwise("less", x, x, inplace=True), ShapeError, "of the result's shape and format"),
        (lambda x, y: cg.relu(cg.ops.expand(x, "a b -> c a b", c=2), inplace=True), ShapeError, "not expanded"),
        (lambda x, y: cg.ops.cast(None, "fp32"), GraphError, "cast: x is None, expected a tensor"),
        (lambda x, y: cg.ops.pointwise("relu", x, dtype=3), cg.FormatError, "3"),
        (lambda x, y: cg.ops.pointwise("relu", x, name="a b"), GraphError, "name 'a b', expected text without spaces"),
        (lambda x, y: cg.ops.pointwise("relu", x, name=None), GraphError, "name is None, expected text"),
        (lambda x, y: cg.gelu(x, approximate="erf"), GraphError, "approximate 'erf', expected one of none, tanh"),
        (lambda x, y: x @ 3, GraphError, "@ of Tensor and int, expected two tensors"),
        (lambda x, y: cg.ops.matmul(x, cg.reduce(x, "a b -> ", "sum")), ShapeError, "expected at least one axis each"),
        (lambda x, y: cg.dropout(x, 1), GraphError, "p=1, expected a number from 0 to below 1"),
        (lambda x, y: cg.dropout(x, -0.1), GraphError, "p=-0.1"),
        (lambda x, y: cg.dropout(x, None), GraphError, "dropout: p is None, expected a number"),
        (lambda x, y: cg.dropout(x, float("nan")), GraphError, "dropout: p is nan, expected a number"),
    ],
)  # fmt: skip
def test_refusals_name_place_value_and_expectation(call, error, text):
    g = cg.Graph("g")
    with pytest.raises(error, match=text):
        call(g.input("x", (3, 5)), g.input("y", (3, 7)))


@each(
    ("a", "b"),
    [((3, 5), (5, 7)), ((2, 3, 5), (5, 7)), ((2, 3, 5), (2, 5, 7)), ((11, 1, 3, 5), (2, 5, 7)), ((5,), (5, 7)),
     ((3, 5), (5,)), ((5,), (5,)), ((1, 3, 5), (2, 5, 7)), ((2, 3, 5), (1, 5, 7))],
)  # fmt: skip
def test_matmul_shapes_match_numpy_and_flops_count_all_operations(a, b):
    result = np.matmul(np.ones(a), np.ones(b))
    g, y = graph_of(lambda x, w: x @ w, a, b)
    assert y.shape == np.shape(result)
    assert cg.flops(g) == 2 * np.size(result) * 5


def test_dropout_writes_mask_and_is_free_at_zero_probability():
    g, _ = graph_of(lambda x: cg.dropout(x, 0.1), (3, 5), dtype="bf16")
    assert cg.flops(g) == 2 * 15
    assert cg.bytes_moved(g) == 2 * 15 + 2 * 15 + 15  # x, y, and a one-byte mask
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        assert cg.dropout(x, 0) is x


TRANSCENDENTAL = {"exp", "log", "sqrt", "sin", "cos", "tanh", "erf"}
# library functions, and functions whose formula is prose: (FLOPs, transcendentals)
BY_HAND = {
    "cast": (0, 0), "causal_mask": (1, 0), "causal_mask_backward": (1, 0), "abs": (1, 0), "round": (1, 0),
    "floor": (1, 0), "expm1": (0, 1), "log1p": (0, 1), "rsqrt": (0, 1),
}  # fmt: skip


def counted(formula):
    """Return operations on runtime values: one each, a select included."""
    # a repeated subexpression has a name, defined after the formula: "g * s, s = ..."
    parts = (
        [p.partition(" = ")[2] or p for p in formula.split(", ")] if ", " in formula and " = " in formula else [formula]
    )
    plain = special = 0
    for node in (n for p in parts for n in ast.walk(ast.parse(p, mode="eval"))):
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - TRANSCENDENTAL
        if not names:  # a constant such as sqrt(1/2)
            continue
        if isinstance(node, ast.Call) and node.func.id in TRANSCENDENTAL:
            special += 1
        elif isinstance(node, ast.Call | ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp | ast.IfExp):
            plain += 1
    return plain, special


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_costs_match_formula_per_element(name):
    function = FUNCTIONS[name]
    plain, special = BY_HAND.get(name) or counted(function.formula)
    assert (function.name, function.flops, function.transcendentals) == (name, plain, special)
    if name in ("cast", "causal_mask", "causal_mask_backward"):  # separate op kinds
        return
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise(name, *(g.input(f"x{i}", (3, 5)) for i in range(function.arity))))
    total = cg.costs(g).total()
    assert (total.pointwise, total.transcendental, total.matmul) == (15 * plain, 15 * special, 0)
    assert g.outputs[0].dtype.name == ("bool" if name in BOOL else "fp32")


def test_function_arity_matches_formula():
    arity = {"where": 3, "fma": 3, "lerp": 3, "masked_fill": 2, "masked_scale": 3}
    two = {"add", "sub", "mul", "div", "maximum", "minimum", "pow", "eq", "ne", "less", "less_equal", "logical_and"}
    two |= set(BACKWARD)  # the gradient, and the operand or the result
    for name, function in FUNCTIONS.items():
        assert function.arity == arity.get(name, 2 if name in two else 1), name


# Result dtypes for integer operands: float if the formula has a quotient, a root or a transcendental, as in torch.
FLOAT = [
    "div",
    "pow",
    "reciprocal",
    "exp",
    "expm1",
    "log",
    "log1p",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tanh",
    "erf",
    "sigmoid",
    "silu",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "softplus",
    "mish",
    "elu",
    "softcap",
]
BOOL = ["eq", "ne", "less", "less_equal", "logical_and", "logical_not"]
# gradients have the dtype of the values that they belong to
BACKWARD = [
    "threshold_backward", "relu6_backward", "relu2_backward", "leaky_relu_backward", "tanh_backward",
    "sigmoid_backward", "silu_backward", "gelu_backward", "gelu_tanh_backward", "quick_gelu_backward",
    "softplus_backward", "mish_backward", "elu_backward", "softcap_backward", "hardsigmoid_backward",
    "hardswish_backward",
]  # fmt: skip
SAME = [
    "copy",
    "add",
    "sub",
    "mul",
    "maximum",
    "minimum",
    "where",
    "masked_fill",
    "causal_mask",
    "causal_mask_backward",
    "masked_scale",
    "cubed",
    *BACKWARD,
    "fma",
    "lerp",
    "neg",
    "abs",
    "sign",
    "square",
    "clamp",
    "round",
    "floor",
    "relu",
    "relu6",
    "relu2",
    "leaky_relu",
    "hardsigmoid",
    "hardswish",
]


def test_function_table_is_complete():
    assert sorted(FUNCTIONS) == sorted([*FLOAT, *BOOL, *SAME, "cast"])
    assert KINDS["pointwise"].name == "pointwise"


@pytest.mark.parametrize("name", [*FLOAT, *BOOL, *SAME])
def test_result_dtype_for_integer_operands(name):
    if name.startswith("causal_mask"):
        return  # a separate op kind
    with cg.Graph("g") as g:
        y = cg.ops.pointwise(name, *(g.input(f"x{i}", (3, 5), dtype="int32") for i in range(FUNCTIONS[name].arity)))
    assert y.dtype.name == ("fp32" if name in FLOAT else "bool" if name in BOOL else "int32")


@pytest.mark.parametrize("name", ["reciprocal", "sigmoid", "exp", "sqrt", "tanh", "neg", "abs", "square", "relu"])
@pytest.mark.parametrize("dtype", ["int32", "bf16", "fp64"])
def test_function_dtypes_match_torch(name, dtype):
    formats = {"int32": torch.int32, "bf16": torch.bfloat16, "fp64": torch.float64, "fp32": torch.float32}
    with cg.Graph("g") as g:
        y = cg.ops.pointwise(name, g.input("x", (3, 5), dtype=dtype))
    assert formats[y.dtype.name] == getattr(torch, name)(torch.ones(3, 5, dtype=formats[dtype])).dtype


@pytest.mark.parametrize("condition", ["bool", "int64", "fp64"])
def test_where_dtype_depends_on_choices_not_condition(condition):
    with cg.Graph("g") as g:
        c = g.input("c", (3,), dtype=condition)
        half, single = g.input("h", (3,), dtype="bf16"), g.input("s", (3,), dtype="fp32")
        found = [
            cg.ops.pointwise("where", c, a, b).dtype.name for a, b in ((half, single), (single, half), (half, half))
        ]
    assert found == ["fp32", "fp32", "bf16"]


@pytest.mark.parametrize("dtype", ["int32", "bool", "bf16"])
def test_fill_value_does_not_affect_dtype(dtype):
    formats = {"int32": torch.int32, "bool": torch.bool, "bf16": torch.bfloat16}
    expected = torch.ones(3).to(formats[dtype]).masked_fill(torch.ones(3, dtype=torch.bool), 0.5).dtype
    with cg.Graph("g") as g:
        x = g.input("x", (3,), dtype=dtype)
        # in interpreter order: the filled tensor, the mask, and only the number in the record
        y = cg.ops.pointwise("masked_fill", x, 0.5)
    assert formats[y.dtype.name] == expected


@pytest.mark.parametrize("dtype", ["bool", "int32", "bf16"])
@pytest.mark.parametrize("number", [True, np.True_, 3, np.int64(3), 0.5, np.float32(0.5), Fraction(1, 2)])
def test_scalar_promotion_matches_torch(dtype, number):
    formats = {"int32": torch.int32, "bool": torch.bool, "bf16": torch.bfloat16, "fp32": torch.float32}
    formats["int64"] = torch.int64
    plain = number.item() if isinstance(number, np.generic) else 0.5 if isinstance(number, Fraction) else number
    expected = (torch.ones(3).to(formats[dtype]) * plain).dtype
    with cg.Graph("g") as g:
        y = cg.ops.pointwise("mul", g.input("x", (3,), dtype=dtype), number)
        g.output(y)
    assert formats[y.dtype.name] == expected
    (kept,) = [n for n in y.producer.kind.scalars if n is not None]
    assert kept == plain
    assert y.producer.kind.numbers == type(plain).__name__
    assert type(kept) is type(plain)  # a plain Python number, which a file can store
    assert np.allclose(testing.run(g, {"x": [1.0, 0.0, 1.0]}).outputs[0], np.array([1.0, 0.0, 1.0]) * plain)


def test_ops_without_scalars_record_none():
    with cg.Graph("g") as g:
        x = g.input("x", (3,), dtype="bool")
        y = cg.ops.pointwise("mul", x, x)
    assert set(y.producer.kind.stated()) == {"function"}
    assert y.dtype.name == "bool"
    with pytest.raises(cg.GraphError, match="expected tensors and numbers, at least one tensor"), cg.Graph("g") as g:
        cg.ops.pointwise("mul", g.input("x", (3,)), Decimal(1))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_sum_inherits_domain_of_masked_operand(order):
    causal = cg.Domain(causal=True)
    with cg.Graph("g") as g:
        q, k = g.input("q", (7, 3)), g.input("k", (7, 3))
        scores = cg.einsum(q, k, "s d, t d -> s t", domain=causal, over=("s", "t"))
        small = g.input("small", (7,))
        other = g.input("other", (2, 7, 7))
        summed = cg.ops.pointwise("add", *((scores, small)[i] for i in order))
        larger = cg.ops.pointwise("add", *((scores, other)[i] for i in order))
        g.output(summed, larger)
    # 7 * 8 / 2 pairs are visible, in each of the two squares that repeat the scores
    assert summed.domain == scores.domain
    assert larger.domain == (causal, 1, 2)
    table = cg.costs(g)
    assert table.filter(op="add").total().pointwise == 28
    assert table.filter(op="add_1").total().pointwise == 2 * 28
