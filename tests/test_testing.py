"""The public kit that checks ops: what it refuses, and what it counts by itself."""

import numpy as np
import pytest
import torch

import costgraph as cg
from costgraph import rules, testing
from costgraph.graph import apply
from costgraph.op import OpKind, Result
from costgraph.ops import registry
from costgraph.ops.pointwise import FUNCTIONS

A, B, D, L = cg.dims("A B D L")


@pytest.fixture
def twice(monkeypatch):
    """An op kind of one's own, which is forgotten afterwards."""
    for table in (registry._kinds, testing.MEANINGS, testing.SAMPLES):
        for name in list(table):
            monkeypatch.setitem(table, name, table[name])
    kind = OpKind(
        "twice",
        infer=lambda operands, attrs: [Result(operands[0].sizes, operands[0].dtype)],
        flops=lambda op: rules.Flops(pointwise=rules.points(op.operands[0])),
        reads=rules.whole,
        writes=rules.all_results,
    )
    registry.register(kind)
    yield kind
    for table in (registry._kinds, testing.MEANINGS, testing.SAMPLES):
        table.pop("twice", None)


def means_twice(at):
    for index in at.operands[0].points():
        at.write(2 * at.number(0, *index), *index)


def draws_twice(kind):
    return lambda s: [apply(kind, [s.tensor()], {}, "twice")[0]]


def test_an_op_of_ones_own_is_held_to_the_laws(twice):
    with pytest.raises(cg.UnsupportedError, match="'twice' has no meaning, expected one from"):
        testing.hold("twice")
    testing.meaning("twice")(means_twice)
    with pytest.raises(cg.UnsupportedError, match="'twice' has no sample, expected one from"):
        testing.hold("twice")
    testing.sample("twice")(draws_twice(twice))
    testing.hold("twice", examples=10)
    with pytest.raises(cg.GraphError, match="'twice' has a meaning already, expected a new name"):
        testing.meaning("twice")(means_twice)
    with pytest.raises(cg.GraphError, match="'twice' has a sample already, expected a new name"):
        testing.sample("twice")(draws_twice(twice))


@pytest.mark.parametrize(
    ("field", "rule", "law"),
    [
        ("flops", rules.free, "flops_of_each_kind_are_what_the_interpreter_counts"),
        ("reads", rules.nothing, "bytes_moved_are_the_elements_that_are_touched"),
        ("infer", lambda operands, attrs: [Result(operands[0].sizes, cg.dtype("fp64"))], None),
    ],
)
def test_a_wrong_record_of_ones_own_is_noticed(twice, field, rule, law):
    testing.meaning("twice")(means_twice)
    testing.sample("twice")(draws_twice(twice))
    object.__setattr__(twice, field, rule)
    if law is None:  # another format is another op, and a right record of it
        testing.hold("twice", examples=10)
        return
    with pytest.raises(AssertionError, match=law):
        testing.hold("twice", examples=20)


def test_an_op_without_a_meaning_is_refused_where_it_stands(twice):
    with cg.Graph("g") as g:
        g.output(apply(twice, [g.input("x", (A,))], {}, "doubled")[0])
    with pytest.raises(cg.UnsupportedError, match="op kind 'twice' of 'doubled' has no meaning"):
        testing.run(g, A=2)


def test_a_function_of_ones_own_needs_a_meaning(monkeypatch):
    for name in list(testing.FUNCTIONS):
        monkeypatch.setitem(testing.FUNCTIONS, name, testing.FUNCTIONS[name])
    cube = type(FUNCTIONS["relu"])("cube", 1, 2)
    with cg.Graph("g") as g:
        g.output(cg.pointwise(cube, g.input("x", (A,))))
    with pytest.raises(cg.UnsupportedError, match="function 'cube' has no meaning, expected one from"):
        testing.run(g, A=3)
    try:
        testing.function("cube")(lambda x: x * x * x)
        testing.check(g, A=3)
        with pytest.raises(cg.GraphError, match="function 'cube' has a meaning already"):
            testing.function("cube")(lambda x: x)
    finally:
        testing.FUNCTIONS.pop("cube", None)


def small():
    with cg.Graph("g") as g:
        g.assume("B >= A")
        g.output(g.input("x", (A, B)) @ g.param("w", (B, D)))
    return g


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda g: testing.run(g, A=2, B=3), cg.BindingError, "run of graph 'g': D not bound, expected a size"),
        (lambda g: testing.run(g, A=2, B=3, C=5), cg.BindingError, "'C' is no dimension of graph 'g'"),
        (lambda g: testing.run(g, A=3, B=2, D=5), cg.BindingError, "B >= A"),
        (lambda g: testing.run(g, A=0, B=2, D=5), cg.BindingError, "A=0: expected a positive integer"),
        (lambda g: testing.run(g, {"y": 0}, A=2, B=3, D=5), cg.GraphError, "value for 'y', expected one of w, x"),
        (lambda g: testing.run(g, {"x": [1.0]}, A=2, B=3, D=5), cg.BindingError, r"'x' has shape \(1,\), expected"),
        (lambda g: testing.run("g"), cg.GraphError, "run: got str, expected a graph"),
        (lambda g: testing.check(g, ["gravity"], A=2, B=3, D=5), cg.UnsupportedError, "law 'gravity', expected one of"),
        (lambda g: testing.hold("gravity"), cg.UnsupportedError, "op kind 'gravity' is not registered"),
        (lambda g: testing.value(cg.dims("A") ** cg.dims("B"), {"A": 4, "B": 2}), None, None),
    ],
)  # fmt: skip
def test_refusals_name_the_place_the_value_and_what_was_expected(call, error, text):
    if error is None:
        assert call(small()) == 16
        return
    with pytest.raises(error, match=text):
        call(small())


def test_the_interpreter_counts_by_hand():
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.repeat(L, lambda x: cg.relu(cg.linear(x, "b d -> b e", e=D)), g.input("x", (B, D))))
    counted = testing.run(g, B=2, D=3, L=5)
    assert counted.matmul == counted.full == 5 * (2 * 2 * 3 * 3)  # multiply + add for each b, d, e
    assert counted.pointwise == 5 * (2 * 3)
    assert counted.params == 5 * 9
    assert counted.bytes_moved == 2 * 5 * ((6 + 9 + 6) + (6 + 6))
    assert counted.peak == 2 * (6 + 5 * 9) + 2 * (6 + 6)  # x and all weights; what relu reads, and what it writes


# conditions and formats have tests of their own, as gradients have in tests/vjp
OTHERWISE = ("cast", "where", "masked_fill", "masked_scale", "causal_mask")


@pytest.mark.parametrize("name", sorted(n for n in FUNCTIONS if n not in OTHERWISE and "backward" not in n))
def test_functions_compute_what_torch_does(name):
    """The meaning whose arithmetic is counted is the function that the name stands for."""
    x = np.array([-2.5, -0.6, 0.3, 0.7, 1.9])
    y = np.array([1.5, 0.3, 2.0, 0.7, -0.4])
    f = torch.nn.functional
    theirs = {
        "copy": torch.clone, "reciprocal": torch.reciprocal, "fma": lambda a, b, c: a * b + c,
        "less": torch.lt, "clamp": lambda a: a.clamp(0, 1), "softcap": lambda a: 30 * torch.tanh(a / 30),
        "relu2": lambda a: f.relu(a) ** 2, "relu": f.relu, "relu6": f.relu6, "leaky_relu": f.leaky_relu, "silu": f.silu,
        "gelu": f.gelu, "gelu_tanh": lambda a: f.gelu(a, approximate="tanh"), "softplus": f.softplus, "mish": f.mish,
        "quick_gelu": lambda a: a * torch.sigmoid(1.702 * a), "elu": f.elu, "hardsigmoid": f.hardsigmoid,
        "hardswish": f.hardswish, "cubed": lambda a: a**3,
    }.get(name) or getattr(torch, name)  # fmt: skip
    if name == "pow":
        x = np.abs(x)
    arrays = [x, y, x + y][: FUNCTIONS[name].arity]
    with cg.Graph("g", dtype="fp64") as g:
        g.output(cg.pointwise(name, *(g.input(f"x{i}", a.shape) for i, a in enumerate(arrays))))
    (mine,) = testing.run(g, {f"x{i}": a for i, a in enumerate(arrays)}).outputs
    expected = theirs(*map(torch.tensor, arrays)).double().numpy()
    assert np.allclose(mine, expected, equal_nan=True)
