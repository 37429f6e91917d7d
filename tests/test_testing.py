"""The public test kit for ops: its refusals and its own counts."""

from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pytest
import torch
from each import each
from shared import load

import costgraph as cg
from costgraph import testing
from costgraph.ir.graph import (
    OpKind,
    Repeat,
    Result,
    apply,
)
from costgraph.ops import registry, rules
from costgraph.ops.elementwise import FUNCTIONS
from costgraph.ops.layout import Slice
from costgraph.ops.reduce import Reduce

A, B, D, L = cg.dims("A B D L")


@pytest.fixture
def twice(monkeypatch):
    """Register a user-defined op kind for the test; failures are shrunk with few attempts."""
    monkeypatch.setattr(import_module("costgraph.testing.properties"), "TRIES", 8)
    monkeypatch.delitem(registry._kinds, "twice", raising=False)

    @registry.register
    @dataclass(frozen=True, kw_only=True)
    class Twice(OpKind):
        name = "twice"
        flops, reads, writes = rules.per_element_reduced, rules.whole, rules.all_results

        def infer(self, operands):
            return [Result(operands[0].sizes, operands[0].dtype)]

    yield Twice
    for table in (registry._kinds, testing.REFERENCE_SEMANTICS, testing.STRATEGIES):
        for name in [n for n in table if n == "twice" or (isinstance(n, type) and issubclass(n, Twice))]:
            del table[name]


def means_twice(at):
    for index in at.operands[0].points():
        at.write(2 * at.number(0, *index), *index)


def draws_twice(kind):
    return lambda s: [apply(kind(), [s.tensor()], "twice")[0]]


def test_user_defined_op_is_checked_against_laws(twice):
    with pytest.raises(cg.UnsupportedError, match="'twice' has no reference semantics, expected one from"):
        testing.check_op("twice")
    testing.reference_semantics(twice)(means_twice)
    with pytest.raises(cg.UnsupportedError, match="'twice' has no strategy, expected one from"):
        testing.check_op("twice")
    testing.strategy(twice)(draws_twice(twice))
    testing.check_op("twice", examples=5)
    with pytest.raises(cg.GraphError, match="'twice' already has reference semantics, expected a new name"):
        testing.reference_semantics(twice)(means_twice)
    with pytest.raises(cg.GraphError, match="'twice' already has a strategy, expected a new name"):
        testing.strategy(twice)(draws_twice(twice))


@pytest.mark.parametrize(
    ("field", "rule", "law"),
    [
        ("flops", rules.free, "flops_of_each_kind_are_what_the_interpreter_counts"),
        ("reads", rules.nothing, "bytes_moved_are_the_elements_that_are_touched"),
        ("infer", lambda kind, operands: [Result(operands[0].sizes, cg.dtype("fp64"))], None),
    ],
)
def test_wrong_user_defined_record_is_detected(twice, field, rule, law):
    testing.reference_semantics(twice)(means_twice)
    testing.strategy(twice)(draws_twice(twice))
    setattr(twice, field, rule)
    if law is None:  # a different dtype makes a different op, with a correct record
        testing.check_op("twice", examples=5)
        return
    with pytest.raises(AssertionError, match=law):
        testing.check_op("twice", examples=5)


def test_missing_parts_of_a_kind_are_named(monkeypatch, twice):
    assert testing.missing(twice) == testing.missing("twice") == ("reference_semantics", "strategy", "vjp")
    testing.reference_semantics(twice)(means_twice)
    testing.strategy(twice)(draws_twice(twice))
    assert testing.missing(twice, lowering=()) == ("vjp", "lowering")
    assert testing.missing(twice, lowering=[twice]) == ("vjp",)

    class Bare(OpKind):
        name = "bare"

    with pytest.raises(cg.UnsupportedError, match="missing: op kind 'bare' is not registered, expected one of"):
        testing.missing(Bare)
    monkeypatch.setitem(registry._kinds, "bare", Bare)
    assert testing.missing(Bare) == ("infer", "flops", "reads", "writes", "reference_semantics", "strategy", "vjp")


def test_kinds_are_given_by_class_or_name(twice):
    testing.reference_semantics(twice)(means_twice)
    testing.strategy(twice)(draws_twice(twice))
    testing.check_op(twice, examples=3)

    class Other(twice):
        pass

    with pytest.raises(cg.UnsupportedError, match="check_op: op kind 'twice' is not registered"):
        testing.check_op(Other)

    seen = set()

    def note(case):
        seen.update(type(op.kind) for op in case.graph.walk())

    testing.search(testing.graphs(2, [Slice, "twice"]), note, 9)
    assert {Slice, twice} <= seen
    assert not {Reduce, Repeat} & seen
    for call in (testing.ops, lambda kind: testing.graphs(kinds=[kind]), lambda kind: testing.losses(kinds=[kind])):
        with pytest.raises(cg.UnsupportedError, match="op kind 'gravity' is not registered, expected one of"):
            call("gravity")


def test_op_without_numpy_semantics_is_refused_with_its_location(twice):
    with cg.Graph("g") as g:
        g.output(apply(twice(), [g.input("x", (A,))], "doubled")[0])
    with pytest.raises(cg.UnsupportedError, match="op kind 'twice' of 'doubled' has no reference semantics"):
        testing.run(g, A=2)


def test_user_function_needs_numpy_semantics(monkeypatch):
    for name in list(testing.FUNCTIONS):
        monkeypatch.setitem(testing.FUNCTIONS, name, testing.FUNCTIONS[name])
    cube = type(FUNCTIONS["relu"])("cube", 1, 2)
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise(cube, g.input("x", (A,))))
    with pytest.raises(cg.UnsupportedError, match="function 'cube' has no reference semantics, expected one from"):
        testing.run(g, A=3)
    try:
        testing.function("cube")(lambda x: x * x * x)
        testing.check(g, A=3)
        with pytest.raises(cg.GraphError, match="function 'cube' already has reference semantics"):
            testing.function("cube")(lambda x: x)
    finally:
        testing.FUNCTIONS.pop("cube", None)


def small():
    with cg.Graph("g") as g:
        g.assume("B >= A")
        g.output(g.input("x", (A, B)) @ g.param("w", (B, D)))
    return g


@each(
    ("call", "error", "text"),
    [
        (lambda g: testing.run(g, A=2, B=3), cg.BindingError, "run of graph 'g': D not bound, expected a size"),
        (lambda g: testing.run(g, A=2, B=3, C=5), cg.BindingError, "'C' is not a dimension of graph 'g'"),
        (lambda g: testing.run(g, A=3, B=2, D=5), cg.BindingError, "B >= A"),
        (lambda g: testing.run(g, A=0, B=2, D=5), cg.BindingError, "A=0: expected a positive integer"),
        (lambda g: testing.run(g, {"y": 0}, A=2, B=3, D=5), cg.GraphError, "value for 'y', expected one of w, x"),
        (lambda g: testing.run(g, {"x": [1.0]}, A=2, B=3, D=5), cg.BindingError, r"'x' has shape \(1,\), expected"),
        (lambda g: testing.run("g"), cg.GraphError, "run: got str, expected a graph"),
        (lambda g: testing.check(g, ["gravity"], A=2, B=3, D=5), cg.UnsupportedError, "law 'gravity', expected one of"),
        (lambda g: testing.check_op("gravity"), cg.UnsupportedError, "op kind 'gravity' is not registered"),
        (lambda g: testing.value(cg.dims("A") ** cg.dims("B"), {"A": 4, "B": 2}), None, None),
    ],
)  # fmt: skip
def test_refusals_name_place_value_and_expectation(call, error, text):
    if error is None:
        assert call(small()) == 16
        return
    with pytest.raises(error, match=text):
        call(small())


def test_interpreter_counts_match_hand_counts():
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.repeat(L, lambda x: cg.relu(cg.linear(x, "b d -> b e", e=D)), g.input("x", (B, D))))
    counted = testing.run(g, B=2, D=3, L=5)
    assert counted.matmul == counted.full == 5 * (2 * 2 * 3 * 3)  # multiply + add for each b, d, e
    assert counted.pointwise == 5 * (2 * 3)
    assert counted.params == 5 * 9
    assert counted.bytes_moved == 2 * 5 * ((6 + 9 + 6) + (6 + 6))
    assert counted.peak == 2 * (6 + 5 * 9) + 2 * (6 + 6)  # x and all weights; the operand and the result of relu


# conditions and dtypes have their own tests, gradients are tested in tests/vjp
OTHERWISE = ("cast", "where", "masked_fill", "masked_scale", "causal_mask")


@each("name", sorted(n for n in FUNCTIONS if n not in OTHERWISE and "backward" not in n))
def test_functions_compute_torch_values(name):
    """The instrumented function computes the same values as the torch function of that name."""
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
        g.output(cg.ops.pointwise(name, *(g.input(f"x{i}", a.shape) for i, a in enumerate(arrays))))
    (mine,) = testing.run(g, {f"x{i}": a for i, a in enumerate(arrays)}).outputs
    expected = theirs(*map(torch.tensor, arrays)).double().numpy()
    assert np.allclose(mine, expected, equal_nan=True)


def test_full_flops_default_to_executed_flops(twice):
    """A record that states its matmuls once has them in both counts; a smaller total is inconsistent."""

    class Product(twice):
        def flops(self, op):
            return rules.Flops(matmul=2 * rules.points(op.operands[0]))

    with cg.Graph("own") as g:
        g.output(apply(Product(), [g.input("x", (B, D))], "twice")[0])
    assert cg.matmul_flops(g, count="full") == cg.matmul_flops(g) == 2 * B * D

    class Fewer(twice):
        def flops(self, op):
            return rules.Flops(matmul=2 * rules.points(op.operands[0]), full=rules.ZERO)

    @testing.reference_semantics(Fewer)
    def _twice(at):
        for index in at.operands[0].points():
            at.write(2 * at.read(0, *index), *index)
            at.tally.matmul += 2

    with cg.Graph("own") as g:
        g.output(apply(Fewer(), [g.input("x", (B, D))], "twice")[0])
    with pytest.raises(AssertionError, match="matmul FLOPs of 'twice', domains ignored, are 0: fewer than run"):
        testing.check(g, B=2, D=3)


def heads(how):
    """Projections to heads of D/H, scores, and a convolution with a remainder."""
    S, H, K = cg.dims("S H K")
    with cg.Graph("g") as g:
        if how == "assumed":
            g.assume("D == H*K")
        k = K if how == "assumed" else D / H
        x = g.input("x", (B, S, D))
        for _ in range(2):
            q = cg.rearrange(cg.linear(x, "b s d -> b s e", e=D), "b s (h k) -> b h s k", h=H, k=k)
            x = x + cg.rearrange(cg.attention(q, q, q, causal=True), "b h s k -> b s (h k)")
        if how == "strided":
            x = cg.conv(cg.rearrange(x, "b s d -> b d s"), "b c s -> b o s", window=(3,), stride=2, padding=1, o=A)
        g.output(x)
    return g


@pytest.mark.parametrize("how", ["divided", "assumed", "strided"])
def test_sampled_sizes_satisfy_graph_constraints(how):
    point = {"B": 2, "S": 2, "D": 4, "H": 2}
    testing.check(heads(how), **point, **{"assumed": {"K": 2}, "strided": {"A": 2}}.get(how, {}))


def test_sampled_sizes_grow_for_models_with_fixed_head_width():
    point = {"B": 2, "D": 6, "F": 7, "H": 3, "L": 2, "P": 4, "S": 3, "V": 5}
    testing.check(load("gpt2", symbolic=True), ["costs_grow_with_every_size"], **point)


def test_preset_laws_are_checked_at_other_sizes():
    testing.check(load("gpt2"), B=1, S=2, L=2, D=2, H=2, F=3, V=5, P=3)


def test_two_failures_are_reported_in_one_line(monkeypatch):
    monkeypatch.setattr(import_module("costgraph.testing.properties"), "TRIES", 12)
    calls = []

    def holds(case):
        calls.append(case)
        size = sum(1 for _ in case.graph.walk())
        assert size < 2, f"law 'small': {size} derived, 1 counted"
        raise ValueError("another")

    with pytest.raises((AssertionError, ValueError)) as caught:
        testing.search(testing.ops("einsum"), holds, 30)
    assert len(str(caught.value).splitlines()) == 1
    assert not getattr(caught.value, "__notes__", [])
    assert len(calls) <= 12 + 1


def test_violation_report_names_op_law_sizes_and_counts(twice):
    testing.reference_semantics(twice)(means_twice)
    testing.strategy(twice)(draws_twice(twice))
    twice.flops = lambda kind, op: rules.Flops(pointwise=3 * rules.points(op.operands[0]))
    text = r"^law 'flops_of_each.*' at {.*}: pointwise FLOPs of '.*twice': \d+ derived, \d+ counted$"
    with pytest.raises(AssertionError, match=text) as caught:
        testing.check_op("twice", examples=5)
    assert len(str(caught.value).splitlines()) == 1
