"""The table of elementwise functions against its own formulas: their operations are counted in the syntax tree."""

import ast
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import costgraph as cg
from costgraph import testing
from costgraph.ops.pointwise import FUNCTIONS
from costgraph.ops.registry import KINDS

TRANSCENDENTAL = {"exp", "log", "sqrt", "sin", "cos", "tanh", "erf"}
# single functions of a library, and those whose formula is a sentence: (FLOPs, transcendentals)
BY_HAND = {
    "cast": (0, 0), "causal_mask": (1, 0), "causal_mask_backward": (1, 0), "abs": (1, 0), "round": (1, 0),
    "floor": (1, 0), "expm1": (0, 1), "log1p": (0, 1), "rsqrt": (0, 1),
}  # fmt: skip


def counted(formula):
    """Operations on what is not known beforehand: one each, a choice between two values as well."""
    # what a formula uses twice has a name, and stands behind it: "g * s, s = ..."
    parts = (
        [p.partition(" = ")[2] or p for p in formula.split(", ")] if ", " in formula and " = " in formula else [formula]
    )
    plain = special = 0
    for node in (n for p in parts for n in ast.walk(ast.parse(p, mode="eval"))):
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - TRANSCENDENTAL
        if not names:  # a number such as sqrt(1/2)
            continue
        if isinstance(node, ast.Call) and node.func.id in TRANSCENDENTAL:
            special += 1
        elif isinstance(node, ast.Call | ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp | ast.IfExp):
            plain += 1
    return plain, special


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_charges_the_operations_of_its_formula_for_each_element(name):
    function = FUNCTIONS[name]
    plain, special = BY_HAND.get(name) or counted(function.formula)
    assert (function.name, function.flops, function.transcendentals) == (name, plain, special)
    if name in ("cast", "causal_mask", "causal_mask_backward"):  # ops of their own
        return
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise(name, *(g.input(f"x{i}", (3, 5)) for i in range(function.arity))))
    total = cg.costs(g).total()
    assert (total.pointwise, total.transcendental, total.matmul) == (15 * plain, 15 * special, 0)
    assert g.outputs[0].dtype.name == ("bool" if name in BOOL else "fp32")


def test_a_function_takes_as_many_operands_as_its_formula_names():
    arity = {"where": 3, "fma": 3, "lerp": 3, "masked_fill": 2, "masked_scale": 3}
    two = {"add", "sub", "mul", "div", "maximum", "minimum", "pow", "eq", "ne", "less", "less_equal", "logical_and"}
    two |= set(BACKWARD)  # the gradient, and the operand or the result
    for name, function in FUNCTIONS.items():
        assert function.arity == arity.get(name, 2 if name in two else 1), name


# what each function gives of integers: float where a quotient, a root or a transcendental is in it, as in torch
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
# gradients have the format of what flows through them
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


def test_the_table_has_these_functions():
    assert sorted(FUNCTIONS) == sorted([*FLOAT, *BOOL, *SAME, "cast"])
    assert KINDS["pointwise"].name == "pointwise"


@pytest.mark.parametrize("name", [*FLOAT, *BOOL, *SAME])
def test_the_format_of_a_function_of_integers(name):
    if name.startswith("causal_mask"):
        return  # an op of its own
    with cg.Graph("g") as g:
        y = cg.ops.pointwise(name, *(g.input(f"x{i}", (3, 5), dtype="int32") for i in range(FUNCTIONS[name].arity)))
    assert y.dtype.name == ("fp32" if name in FLOAT else "bool" if name in BOOL else "int32")


@pytest.mark.parametrize("name", ["reciprocal", "sigmoid", "exp", "sqrt", "tanh", "neg", "abs", "square", "relu"])
@pytest.mark.parametrize("dtype", ["int32", "bf16", "fp64"])
def test_formats_of_functions_are_torchs(name, dtype):
    formats = {"int32": torch.int32, "bf16": torch.bfloat16, "fp64": torch.float64, "fp32": torch.float32}
    with cg.Graph("g") as g:
        y = cg.ops.pointwise(name, g.input("x", (3, 5), dtype=dtype))
    assert formats[y.dtype.name] == getattr(torch, name)(torch.ones(3, 5, dtype=formats[dtype])).dtype


@pytest.mark.parametrize("condition", ["bool", "int64", "fp64"])
def test_a_condition_has_no_say_in_the_format_but_both_choices_have(condition):
    with cg.Graph("g") as g:
        c = g.input("c", (3,), dtype=condition)
        half, single = g.input("h", (3,), dtype="bf16"), g.input("s", (3,), dtype="fp32")
        found = [
            cg.ops.pointwise("where", c, a, b).dtype.name for a, b in ((half, single), (single, half), (half, half))
        ]
    assert found == ["fp32", "fp32", "bf16"]


@pytest.mark.parametrize("dtype", ["int32", "bool", "bf16"])
def test_what_fills_a_mask_has_no_say(dtype):
    formats = {"int32": torch.int32, "bool": torch.bool, "bf16": torch.bfloat16}
    expected = torch.ones(3).to(formats[dtype]).masked_fill(torch.ones(3, dtype=torch.bool), 0.5).dtype
    with cg.Graph("g") as g:
        x = g.input("x", (3,), dtype=dtype)
        # by the interpreter's order: what is filled, the mask, and the number in the record alone
        y = cg.ops.pointwise("masked_fill", x, 0.5)
    assert formats[y.dtype.name] == expected


@pytest.mark.parametrize("dtype", ["bool", "int32", "bf16"])
@pytest.mark.parametrize("number", [True, np.True_, 3, np.int64(3), 0.5, np.float32(0.5), Fraction(1, 2)])
def test_numbers_have_the_say_that_torch_gives_them(dtype, number):
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
    assert type(kept) is type(plain)  # one of Python's own, which a file can hold
    assert np.allclose(testing.run(g, {"x": [1.0, 0.0, 1.0]}).outputs[0], np.array([1.0, 0.0, 1.0]) * plain)


def test_without_numbers_nothing_is_said_of_them():
    with cg.Graph("g") as g:
        x = g.input("x", (3,), dtype="bool")
        y = cg.ops.pointwise("mul", x, x)
    assert set(y.producer.kind.stated()) == {"function"}
    assert y.dtype.name == "bool"
    with pytest.raises(cg.GraphError, match="expected tensors and numbers, one tensor"), cg.Graph("g") as g:
        cg.ops.pointwise("mul", g.input("x", (3,)), Decimal(1))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_domain_of_a_sum_is_that_of_the_operand_that_has_one(order):
    causal = cg.Domain(causal=True)
    with cg.Graph("g") as g:
        q, k = g.input("q", (7, 3)), g.input("k", (7, 3))
        scores = cg.einsum(q, k, "s d, t d -> s t", domain=causal, over=("s", "t"))
        small = g.input("small", (7,))
        other = g.input("other", (2, 7, 7))
        summed = cg.ops.pointwise("add", *((scores, small)[i] for i in order))
        larger = cg.ops.pointwise("add", *((scores, other)[i] for i in order))
        g.output(summed, larger)
    # 7 * 8 / 2 pairs are seen, in each of the two squares that the scores are repeated for
    assert summed.domain == scores.domain
    assert larger.domain == (causal, 1, 2)
    table = cg.costs(g)
    assert table.filter(op="add").total().pointwise == 28
    assert table.filter(op="add_1").total().pointwise == 2 * 28
