"""Mixtures of experts: FLOPs, bytes, parameters, gradients and steps under each routing assumption."""

from fractions import Fraction
from itertools import combinations, product
from math import ceil

import numpy as np
import pytest

import costgraph as cg
from costgraph import testing
from costgraph.algebra.polynomial import poly

B, S, D, F, T, E, k = cg.dims("B S D F T E k")


def mixture(experts=8, chosen=2, grad=False, tokens=(T,), **options):
    with cg.Graph("g", dtype="bf16") as g:
        x = g.input("x", (*tokens, D), grad=grad)
        g.output(cg.nn.moe(x, experts, chosen, F, **options))
    return g


def expert_bytes(g, **dims):
    """Return the bytes that grouped matmuls read from their bf16 weights."""
    sizes = {name: poly(size) for name, size in dims.items()}
    return sum(2 * op.kind.reads(op)[1].bind(sizes).constant for op in g.walk() if op.kind.name == "grouped_matmul")


# -- balanced --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 1000])
def test_balanced_routing_touches_one_expert_per_row(tokens):
    # gate and up are one (D, 2*F) matrix, down is (F, D): 3*D*F elements per expert, 2 B each
    read = expert_bytes(mixture(), T=tokens, D=5, F=7)
    assert read == min(8, 2 * tokens) * 3 * 5 * 7 * 2


def test_matmul_flops_count_chosen_rows():
    g = mixture(E, k)
    # router 2*T*D*E; gate, up and down 2*D*F each, for k rows per token
    assert cg.matmul_flops(g) - (2 * T * D * E + 3 * 2 * D * F * k * T) == 0
    assert cg.matmul_flops(g, count="full") == cg.matmul_flops(g)


def test_dispatch_uses_no_one_hot_matmul():
    products = [op for op in mixture().walk() if op.kind.name in ("einsum", "grouped_matmul") and op.results]
    assert sorted(op.kind.name for op in products) == ["einsum", "grouped_matmul", "grouped_matmul"]


def test_dispatch_gathers_rows_and_combine_sums_them():
    g = mixture()

    def moved(op, direction):
        return sum(r.amount.expr for r in cg.costs(g) if r.op == f"moe/experts/{op}" and r.direction == direction)

    # two rows per token, 2 B per element, with an 8 B index each
    assert (moved("permute", "read") - (2 * 2 * T * D + 8 * 2 * T)).expand() == 0
    assert (moved("permute", "write") - 2 * 2 * T * D).expand() == 0
    # rows, their indices, and their fp32 weights; one row per token is written
    assert (moved("combine", "read") - (2 * 2 * T * D + (8 + 4) * 2 * T)).expand() == 0
    assert (moved("combine", "write") - 2 * T * D).expand() == 0


def test_memory_includes_all_experts():
    g = mixture()
    assert cg.param_count(g, D=5, F=7) == 8 * 3 * 5 * 7 + 8 * 5
    assert cg.peak_memory(g, T=1, D=5, F=7) > cg.param_bytes(g, D=5, F=7)
    fused = cg.bytes_moved(g, fused=True, T=1, D=5, F=7)
    # x and y, the router matrix, two experts
    assert fused == 2 * 5 * 2 + 8 * 5 * 2 + 2 * 3 * 5 * 7 * 2


# -- expected --------------------------------------------------------------------------------------------------------


def mean_touched(experts, chosen, tokens):
    """Return the mean number of distinct experts chosen, averaged over all possible choices."""
    each = [set(found) for found in combinations(range(experts), chosen)]
    found = [len(set().union(*every)) for every in product(each, repeat=tokens)]
    return Fraction(sum(found), len(found))


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(4, 2, 1), (4, 2, 3), (5, 1, 4), (3, 3, 2), (5, 4, 2)])
def test_expected_experts_match_enumeration(experts, chosen, tokens):
    g = mixture(E, k, routing="expected")
    dims = {"E": experts, "k": chosen, "T": tokens, "D": 5, "F": 7}
    assert Fraction(expert_bytes(g, **dims)) == pytest.approx(mean_touched(experts, chosen, tokens) * 3 * 5 * 7 * 2)
    assert cg.matmul_flops(g, **dims) == cg.matmul_flops(mixture(E, k), **dims)


def test_expected_experts_follow_documented_formula():
    g = mixture(E, k, routing="expected", tokens=(B, S))
    read = cg.bytes_moved(g, fused=True)
    stated = 6 * D * F * E * (1 - (1 - k / E) ** (B * S)) + 2 * D * E + 4 * B * S * D
    assert (read - stated).expand() == 0
    # 8 of 128 experts: 8 are read for one token, all but (15/16)**64 of them for 64
    assert cg.evaluate(E * (1 - (1 - k / E) ** T), E=128, k=8, T=64) == pytest.approx(128 * (1 - (15 / 16) ** 64))


def test_expected_bytes_do_not_exceed_balanced():
    for tokens in (1, 2, 7, 100):
        dims = {"T": tokens, "D": 3, "F": 5}
        assert expert_bytes(mixture(routing="expected"), **dims) <= expert_bytes(mixture(), **dims)


# -- capacity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 1.25, 1.1, Fraction(3, 2), 0.5])
@pytest.mark.parametrize("tokens", [3, 11, 16])
def test_capacity_slots_are_computed_even_if_empty(factor, tokens):
    g = mixture(routing="capacity", capacity=factor)
    room = ceil(Fraction(str(factor)) * tokens * 2 / 8)
    dims = {"T": tokens, "D": 5, "F": 7}
    assert cg.matmul_flops(g, **dims) == 2 * tokens * 5 * 8 + 3 * 2 * 5 * 7 * 8 * room
    assert expert_bytes(g, **dims) == 8 * 3 * 5 * 7 * 2


def test_capacity_may_be_symbolic():
    c = cg.dims("c")
    g = mixture(E, k, routing="capacity", capacity=c)
    dims = {"E": 4, "k": 2, "T": 6, "D": 5, "F": 7}
    assert cg.matmul_flops(g, **dims, c=2) - cg.matmul_flops(g, **dims, c=1) == 6 * 5 * 7 * 4 * 3


# -- parameters ------------------------------------------------------------------------------------------------------


def test_active_parameters_count_chosen_experts():
    g = mixture(E, k, bias=True, router_bias=True)
    idle = cg.param_count(g) - cg.param_count(g, active=True)
    # three matrices, and biases of 2*F and D elements, for each expert that a token does not choose
    assert (idle - (E - k) * (3 * D * F + 2 * F + D)).expand() == 0


def test_active_parameters_follow_casts_and_loops():
    L = cg.dims("L")
    with cg.Graph("g", dtype="bf16") as g:
        x = g.input("x", (T, D))
        g.output(
            cg.repeat(L, lambda x: x + cg.nn.moe(x, 8, 2, F) + cg.nn.gated_mlp(x, F, name="shared"), x, name="layers")
        )
    assert (cg.param_count(g, active=True) - L * (8 * D + 2 * 3 * D * F + 3 * D * F)).expand() == 0
    assert cg.param_count(cg.apply_precision(g, "bf16-mixed"), active=True, T=2, D=3, F=5, L=7) == 7 * (24 + 135)


def test_active_option_must_be_boolean():
    with pytest.raises(cg.GraphError, match="param_count: active is 1, expected True or False"):
        cg.param_count(mixture(), active=1)


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"routing": "expected"}, {"routing": "capacity", "capacity": 1.25}])
def test_training_step_has_three_times_forward_matmuls(options):
    g = mixture(grad=True, **options)
    with g:
        g.output(cg.reduce(g.outputs.pop(), "t d -> ", "mean"))
    step = cg.backward(g)
    dims = {"T": 12, "D": 5, "F": 7}
    forward = cg.matmul_flops(g, **dims)
    assert cg.matmul_flops(step, **dims) == 3 * forward
    sizes = {t.name: grad.shape for t, grad in step.gradients.items() if t.role == "param"}
    assert sizes["moe/experts/gate_up"] == (8, D, 2 * F)
    assert sizes["moe/experts/down"] == (8, F, D)
    assert sizes["moe/router/gate/weight"] == (D, 8)


def test_expert_gradients_are_written_whole():
    g = mixture()
    with g:
        g.output(cg.reduce(g.outputs.pop(), "t d -> ", "mean"))
    made = [op for op in cg.backward(g).ops if op.kind.name == "grouped_outer"]
    written = [cg.evaluate(op.kind.writes(op)[0].expr, D=5, F=7) for op in made]
    assert sorted(written) == [8 * 5 * 7, 8 * 2 * 5 * 7]


def stacked(**options):
    """Build two layers with a residual mixture each, and their gradients."""
    with cg.Graph("g") as g:
        x = g.input("x", (T, D), grad=True)
        y = cg.repeat(2, lambda x: x + cg.nn.moe(x, 4, k, F, **options), x, name="layers")
        g.output(cg.reduce(y * y, "t d -> ", "mean"))
    return cg.backward(g)


@pytest.mark.parametrize("options", [{}, {"gated": False}, {"routing": "capacity", "capacity": 0.75}])
def test_weighting_inside_experts_saves_less(options):
    outside, inside = stacked(**options), stacked(weigh="inside", **options)
    one, other = (testing.run(g, T=5, D=3, F=7, k=2) for g in (outside, inside))
    assert other.gradients.keys() == one.gradients.keys()
    for name, found in one.gradients.items():
        np.testing.assert_allclose(other.gradients[name], found, rtol=1e-12, err_msg=name)
    assert one.matmul == other.matmul
    if not options:
        # k rows per token: fp32 expert outputs with D elements, and silu of the gate with F elements
        spared = cg.saved_bytes(outside)["layers"] - cg.saved_bytes(inside)["layers"]
        assert (spared - 4 * k * T * (D + F)).expand() == 0


# -- inference -------------------------------------------------------------------------------------------------------


def decoder(**options):
    with cg.Graph("g", dtype="bf16") as g:
        x = g.input("x", (B, S, D))
        x = x + cg.nn.self_attention(x, 4, 8)
        g.output(x + cg.nn.moe(x, 8, 2, F, **options))
    return g


@pytest.mark.parametrize("new", [1, 3])
def test_decode_step_touches_experts_of_new_tokens(new):
    step = cg.decode(decoder(), new)
    for batch in (1, 2, 5):
        dims = {"B": batch, "S": 17, "D": 5, "F": 7}
        assert expert_bytes(step, **dims) == min(8, 2 * batch * new) * 3 * 5 * 7 * 2
    grouped = sum(op.kind.flops(op).matmul.bind({}).expr for op in step.walk() if op.kind.name == "grouped_matmul")
    assert (grouped - 3 * 2 * D * F * 2 * B * new).expand() == 0


@pytest.mark.parametrize("options", [{"routing": "expected"}, {"routing": "capacity", "capacity": 2}])
def test_routing_assumptions_follow_step_tokens(options):
    g, dims = decoder(**options), {"B": 3, "D": 5, "F": 7}
    step, one = cg.decode(g), cg.prefill(g)
    assert expert_bytes(step, S=17, **dims) == expert_bytes(one, S=1, **dims)


# -- laws ------------------------------------------------------------------------------------------------------------

SMALL = {"T": 3, "D": 2, "F": 3}
OPTIONS = {
    "balanced": {},
    "expected": {"routing": "expected"},
    "capacity": {"routing": "capacity", "capacity": 1.25},
    "biases": {"bias": True, "router_bias": True, "score": "chosen"},
    "not gated": {"gated": False},
    "groups": {"groups": 2, "kept_groups": 1},
    "corrected": {"score": "sigmoid", "correction": True, "groups": 2, "kept_groups": 1, "normalize": True},
    "fp32": {"fp32": True, "scale": 2.5},
    "inside": {"weigh": "inside", "normalize": True},
}


@pytest.mark.parametrize(
    "name",
    # other cases cover their options
    [pytest.param(n, marks=pytest.mark.long) if n in ("balanced", "groups") else n for n in sorted(OPTIONS)],
)
def test_mixture_satisfies_laws(name):
    testing.check(mixture(4, 2, **OPTIONS[name]), **SMALL)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_mixture_survives_save_and_load(name, tmp_path):
    g = mixture(4, 2, **OPTIONS[name])
    cg.save(g, tmp_path / "g.json")
    again = cg.load(tmp_path / "g.json")
    for ask in (cg.flops, cg.bytes_moved, cg.param_count, cg.peak_memory):
        assert ask(again, **SMALL) == ask(g, **SMALL)
    assert cg.param_count(again, active=True) == cg.param_count(g, active=True)


def test_expert_gradients_survive_save_and_load(tmp_path):
    g = mixture(4, 2)
    with g:
        g.output(cg.reduce(g.outputs.pop(), "t d -> ", "mean"))
    step = cg.training_step(g, optimizer=cg.AdamW())
    cg.save(step, tmp_path / "step.json")
    again = cg.load(tmp_path / "step.json")
    assert "grouped_outer" in {op.kind.name for op in again.walk()}
    for ask in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert ask(again, **SMALL) == ask(step, **SMALL)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"routing": "even"}, "routing 'even', expected one of balanced, expected, capacity"),
        ({"routing": "capacity"}, "expected a capacity factor with routing='capacity' only"),
        ({"capacity": 1.25}, "expected a capacity factor with routing='capacity' only"),
        ({"routing": "capacity", "capacity": 0}, "capacity 0, expected a number above 0"),
        ({"routing": "capacity", "capacity": "much"}, "capacity 'much', expected a number above 0"),
        ({"score": "top"}, "score 'top', expected one of softmax, sigmoid, chosen"),
        ({"groups": 2}, "groups=2 and kept_groups=None, expected both or neither"),
        ({"groups": 3, "kept_groups": 1}, "8 experts in 3 groups, expected equal groups of at least 1"),
        ({"groups": 8, "kept_groups": 1, "correction": True}, "expected equal groups of at least 2"),
        ({"score": "chosen", "normalize": True}, "expected none of them"),
        ({"scale": "1"}, "scale '1', expected a number"),
        ({"weigh": "rows"}, "weigh 'rows', expected one of results, inside"),
        ({"weigh": "inside", "bias": True}, "weigh='inside' with bias=True, expected only one of them"),
        ({"gated": 1}, "gated is 1, expected True or False"),
        ({"activation": "silu"}, "activation is 'silu', expected a function"),
    ],
)
def test_invalid_mixtures_are_refused(options, text):
    with pytest.raises(cg.CostGraphError, match=r"router|experts|dispatch|moe") as error:
        mixture(**options)
    assert text in str(error.value)


def test_choosing_more_experts_than_exist_is_refused():
    with pytest.raises(cg.ShapeError, match=r"top 9 of .* expected a last axis of at least 9"):
        mixture(8, 9)
    g = mixture(E, k)
    with pytest.raises(cg.BindingError, match="E - k = -1, expected a nonnegative integer"):
        cg.flops(g, E=8, k=9, T=1, D=1, F=1)


def test_mismatched_shapes_are_named():
    with cg.Graph("g") as g:
        x, ids = g.input("x", (T, D)), g.input("ids", (T, 2), dtype="int64")
        w = g.input("w", (8, D, F))
        with pytest.raises(cg.ShapeError, match="expected expert indices"):
            cg.ops.dispatch(x, 8)
        with pytest.raises(cg.ShapeError, match=r"expected \(rows, d\), \(experts, d, f\) and integers \(experts,\)"):
            cg.ops.grouped_matmul(x, w, ids, 2)
        with pytest.raises(cg.ShapeError, match=r"expected experts .* for each token"):
            cg.nn.experts(g.input("y", (F, D)), ids, ids, 8, F)
        with pytest.raises(cg.GraphError, match="top_k: x is 'x', expected a tensor"):
            cg.ops.top_k("x", 2)
