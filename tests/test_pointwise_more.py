"""The table of elementwise functions against its own formulas: their operations are counted in the syntax tree."""

import ast

import pytest

import costgraph as cg
from costgraph.ops.pointwise import FUNCTIONS

TRANSCENDENTAL = {"exp", "log", "sqrt", "sin", "cos", "tanh", "erf"}
# single functions of a library, and those whose formula is a sentence: (FLOPs, transcendentals)
BY_HAND = {
    "cast": (0, 0), "causal_mask": (1, 0), "abs": (1, 0), "round": (1, 0), "floor": (1, 0),
    "expm1": (0, 1), "log1p": (0, 1), "rsqrt": (0, 1),
}  # fmt: skip


def counted(formula):
    """Operations on what is not known beforehand: one each, a choice between two values as well."""
    plain = special = 0
    for node in ast.walk(ast.parse(formula, mode="eval")):
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
    if name in ("cast", "causal_mask"):  # ops of their own
        return
    with cg.Graph("g") as g:
        g.output(cg.pointwise(name, *(g.input(f"x{i}", (3, 5)) for i in range(function.arity))))
    total = cg.costs(g).total()
    assert (total.pointwise, total.transcendental, total.matmul) == (15 * plain, 15 * special, 0)
    assert g.outputs[0].dtype.name == ("bool" if name in ("eq", "less", "logical_and", "logical_not") else "fp32")


def test_a_function_takes_as_many_operands_as_its_formula_names():
    arity = {"where": 3, "fma": 3, "lerp": 3, "masked_fill": 2}
    two = {"add", "sub", "mul", "div", "maximum", "minimum", "pow", "eq", "less", "logical_and"}
    for name, function in FUNCTIONS.items():
        assert function.arity == arity.get(name, 2 if name in two else 1), name
