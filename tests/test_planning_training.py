"""FLOPs, utilization and memory of training steps, against hand counts, brute force and torch's counter."""

import copy
import pickle
from fractions import Fraction
from functools import cache

import pytest
import sympy
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph.analysis.training import main_format

B, S, D, F, H, K, L, V = cg.dims("B S D F H K L V")
TINY = {"B": 2, "S": 7, "D": 12, "H": 3, "F": 11, "L": 5, "V": 13, "P": 17}


@cache
def layers():
    with cg.Graph("layers") as g:
        x = cg.linear(g.input("x", (B, D)), "b d -> b e", e=F, name="first")
        x = cg.repeat(L, lambda y: y + cg.relu(cg.linear(y, "b e -> b c", c=F, name="inner")), x, name="stack")
        g.output(cg.reduce(x, "b e -> ", "mean"))
    return g


def attention():
    with cg.Graph("attention") as g:
        x = g.input("x", (B, S, D))
        q, k, v = (cg.linear(x, "b s d -> b h s k", h=H, k=K, name=n) for n in "qkv")
        g.output(cg.reduce(cg.attention(q, k, v, causal=True, kernel="flash"), "b h s k -> ", "mean"))
    return g


def gpt(**options):
    return training_step(load("gpt2", symbolic=True), **options)


# -- model and hardware FLOPs ----------------------------------------------------------------------------------------


def test_linear_layer_flops_match_hand_count():
    step = training_step(layers())
    # forward 2*B*D*F + L*2*B*F*F; each layer costs twice that backward, but x needs no gradient
    expected = 3 * (2 * B * D * F + 2 * L * B * F**2) - 2 * B * D * F
    assert sympy.expand(cg.model_flops(step) - expected) == 0
    assert sympy.expand(cg.hardware_flops(step) - expected) == 0


def test_checkpoint_recomputation_is_no_model_flop():
    kept, again = cg.training_step(layers()), cg.training_step(layers(), checkpoint=cg.every_block())
    assert cg.model_flops(again) == cg.model_flops(kept)
    recomputed = cg.costs(again).filter(kind="matmul", phase="recompute").total().matmul
    assert recomputed != 0
    assert sympy.expand(cg.hardware_flops(again) - cg.model_flops(again) - recomputed) == 0


def test_flash_recomputation_is_no_model_flop():
    step = cg.training_step(attention())
    pairs = S * (S + 1) / 2
    one = 2 * B * H * K * pairs  # one matmul over the pairs of the causal mask
    projections = 3 * 2 * B * S * D * H * K
    # Two matmuls forward and four backward (plus the recomputed scores); projections need only weight gradients.
    assert sympy.expand(cg.model_flops(step) - 6 * one - 2 * projections) == 0
    assert sympy.expand(cg.hardware_flops(step) - 7 * one - 2 * projections) == 0
    assert sympy.expand(cg.model_flops(step, "full") - 12 * B * H * K * S**2 - 2 * projections) == 0


def test_kernels_inside_checkpoint_are_excluded_once():
    with_scores = gpt(checkpoint=cg.selective("attention"))
    assert cg.model_flops(with_scores, **TINY) == cg.model_flops(gpt(), **TINY)
    assert cg.hardware_flops(with_scores, **TINY) > cg.hardware_flops(gpt(), **TINY)


def test_accumulation_multiplies_both_counts():
    one, five = gpt(), gpt(accumulate=5)
    assert cg.model_flops(five, **TINY) == 5 * cg.model_flops(one, **TINY)
    assert cg.hardware_flops(five, **TINY) == 5 * cg.hardware_flops(one, **TINY)
    assert cg.step_tokens(five, B=2, S=7) == 5 * 2 * 7


def test_optimizer_matmuls_are_hardware_flops_only():
    g = load("gpt2")  # Muon must know which side of a matrix is longer
    plain, muon = training_step(g), training_step(g, optimizer=cg.Muon())
    assert cg.model_flops(muon) == cg.model_flops(plain)
    own = cg.costs(muon, B=2, S=7).filter(kind="matmul", phase="optimizer").total().matmul
    assert own > 0
    assert cg.hardware_flops(muon, B=2, S=7) == cg.hardware_flops(plain, B=2, S=7) + own


def test_forward_graph_model_flops_are_its_matmul_flops():
    g = load("gpt2", symbolic=True)
    for count in ("executed", "full"):
        assert cg.model_flops(g, count) == cg.matmul_flops(g, count)
        assert cg.hardware_flops(g, count) == cg.matmul_flops(g, count)


def test_torch_counter_agrees_forward_and_backward():
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {"B": 3, "D": 5, "F": 7, "L": 2}
    first = torch.nn.Linear(sizes["D"], sizes["F"], bias=False)
    stack = [torch.nn.Linear(sizes["F"], sizes["F"], bias=False) for _ in range(sizes["L"])]
    with FlopCounterMode(display=False) as counter:
        x = first(torch.zeros(sizes["B"], sizes["D"]))
        for layer in stack:
            x = x + layer(x).relu()
        x.mean().backward()
    assert cg.model_flops(cg.training_step(layers()), **sizes) == counter.get_total_flops()


def test_token_count_uses_integer_inputs():
    assert cg.step_tokens(gpt()) == B * S
    assert cg.step_tokens(training_step(load("mlp")), B=3) == 3
    with pytest.raises(cg.GraphError, match="are none; expected tokens or targets"):
        cg.step_tokens(cg.training_step(layers()))
    with cg.Graph("two") as g:
        g.input("a", (B,), dtype="int64")
        g.input("b", (S,), dtype="int64")
    with pytest.raises(cg.GraphError, match="'a' with B, 'b' with S, expected tokens"):
        cg.step_tokens(g)


# -- utilization -----------------------------------------------------------------------------------------------------


def test_measured_matmul_utilization():
    assert cg.mfu(5.4e13, 0.1, 670e12) == pytest.approx(5.4 / 6.7)
    assert round(cg.mfu(5.4e13, 0.1, 670e12), 3) == 0.806
    assert cg.mfu(5.4e13, Fraction(1, 10), 670 * 10**12) == cg.mfu(5.4e13, 0.1, 670e12)


def test_utilizations_are_symbolic():
    step = cg.training_step(layers(), precision="bf16", checkpoint=cg.every_block())
    t = sympy.Symbol("t", positive=True)
    rate = 989_400_000_000_000  # dense bf16 on the H100
    sizes = {"B": 3, "D": 5, "F": 7, "L": 2}
    found = cg.mfu(step, t, "h100-sxm", devices=4)
    assert sympy.simplify(found - cg.model_flops(step) / (4 * t * rate)) == 0
    number = cg.mfu(step, 0.25, "h100-sxm", devices=4, **sizes)
    assert number == pytest.approx(cg.model_flops(step, **sizes) / (0.25 * 4 * rate))
    assert cg.hfu(step, 0.25, "h100-sxm", devices=4, **sizes) == pytest.approx(cg.hardware_flops(step, **sizes) / rate)
    assert float(found.subs({cg.dims(k): v for k, v in sizes.items()} | {t: 0.25})) == pytest.approx(number)


def test_dominant_matmul_dtype_selects_peak_rate():
    B, D, F = cg.dims("B D F")
    with cg.Graph("two formats") as g:
        for i, dtype in enumerate(("bf16", "fp8_e4m3")):
            x, w = g.input(f"x{i}", (B, D), dtype), g.param(f"w{i}", (D, F**i), dtype)
            g.output(cg.einsum(x, w, "b d, d f -> b f"))
    with pytest.raises(cg.BindingError, match=r"matmuls in bf16, fp8_e4m3: expected all sizes, or dtype="):
        main_format(g)
    assert [main_format(g, B=3, D=5, F=n) for n in (1, 2)] == ["bf16", "fp8_e4m3"]


@each(
    ("words", "options", "error", "text"),
    [
        ((5e13, 0, 1e15), {}, cg.BindingError, "mfu: seconds: 0, expected a positive number or a formula"),
        ((5e13, -1, 1e15), {}, cg.BindingError, "mfu: seconds: -1, expected"),
        ((5e13, float("nan"), 1e15), {}, cg.BindingError, "mfu: seconds: nan, expected"),
        ((5e13, "1", 1e15), {}, cg.BindingError, "mfu: seconds: '1', expected"),
        ((5e13, 1, True), {}, cg.BindingError, "mfu: rate: True, expected"),
        ((5e13, 1, 1e15), {"devices": 0}, cg.BindingError, "mfu: devices: 0, expected"),
        ((True, 1, 1e15), {}, cg.BindingError, "mfu: FLOPs: True, expected"),
        (
            (5e13, 1, 1e15),
            {"B": 3},
            cg.BindingError,
            "mfu: sizes B with a number of FLOPs; expected a graph, or no sizes",
        ),
        ((5e13, 1, "h100-sxm"), {}, cg.BindingError, "mfu: dtype=None, expected a number format such as bf16"),
        ((5e13, 1, "h1000"), {"dtype": "bf16"}, cg.SpecError, "hardware 'h1000' is unknown"),
    ],
)
def test_zero_amount_utilizations_are_refused(words, options, error, text):
    with pytest.raises(error) as caught:
        cg.mfu(*words, **options)
    assert text in str(caught.value)


def test_graph_without_matmuls_has_no_peak_rate():
    with cg.Graph("g") as g:
        g.output(cg.reduce(cg.relu(g.param("w", (B,))), "b -> ", "mean"))
    with pytest.raises(cg.GraphError, match="'g' has no matmul, expected one"):
        cg.mfu(cg.training_step(g), 1, "h100-sxm")
    with pytest.raises(cg.GraphError, match="model_flops: count 'half', expected one of executed, full"):
        cg.model_flops(g, "half")


# -- state -----------------------------------------------------------------------------------------------------------

#: Bytes per parameter for weight, gradient, moments, and master copy.
STATES = {
    "fp32": (4, 4, 8, 0),
    "bf16": (2, 2, 8, 0),
    "bf16-master": (2, 2, 8, 4),
    "bf16-mixed": (4, 4, 8, 0),
    "megatron-bf16": (2, 4, 8, 4),
    "fp8": (2, 2, 8, 0),
}


@pytest.mark.parametrize("precision", STATES)
def test_adam_bytes_per_parameter(precision):
    weight, grad, moments, master = STATES[precision]
    for model, accumulate in ((load("gpt2", symbolic=True), cg.dims("A")), (layers(), 1), (layers(), 3)):
        step = training_step(model, precision=precision, accumulate=accumulate)
        assert cg.bytes_per_param(step) == weight + grad + moments + master, (model.name, accumulate)
        n = cg.param_count(step)
        state = cg.state_bytes(step)
        assert sympy.expand(state.params - weight * n) == 0
        assert sympy.expand(state.gradients - grad * n) == 0
        assert sympy.expand(state.state - (moments + master) * n) == 0
        assert sympy.expand(cg.saved_state_bytes(step) - (weight + moments + master) * n) == 0


def test_declared_dtypes_are_kept():
    assert cg.bytes_per_param(gpt()) == 2 + 2 + 4  # everything in bf16, including moments


def test_loss_scale_is_amortized_over_parameters():
    step = gpt(precision="fp16-mixed")
    n = cg.param_count(step)
    assert sympy.simplify(cg.bytes_per_param(step) - 16 - 4 / n) == 0
    sizes = {k: v for k, v in TINY.items() if k not in "BS"}
    count = cg.param_count(step, **sizes)
    assert cg.bytes_per_param(step, **sizes) == pytest.approx(16 + 4 / count)


@pytest.mark.parametrize(
    ("optimizer", "each"),
    [(cg.SGD(), 8), (cg.SGD(momentum=0.9), 12), (cg.Lion(), 12), (cg.RMSProp(), 12), (cg.AdaGrad(), 12)],
    ids=lambda o: repr(o)[:12],
)
def test_state_bytes_follow_optimizer(optimizer, each):
    assert cg.bytes_per_param(gpt(precision="fp32", optimizer=optimizer)) == each


def test_counters_on_the_device_are_state():
    step = cg.training_step(layers(), optimizer=cg.AdamW(implementation="fused"))
    # one counter per parameter tensor: the first layer's, and the stack's
    n = cg.param_count(step)
    assert sympy.expand(cg.state_bytes(step).state - 8 * n - 4 * (1 + L)) == 0


def test_textbook_70b_model_state():
    step = training_step(load("llama-2-70b"), precision="bf16")
    n = cg.param_count(step)
    assert n == 68_976_648_192  # called 70B
    state = cg.state_bytes(step)
    assert (state.params, state.gradients, state.state, state.total) == (2 * n, 2 * n, 8 * n, 12 * n)
    assert cg.state_bytes(training_step(load("llama-2-70b"), precision="fp32")).total == 16 * n
    # the round number, with the same bytes per parameter
    assert [70e9 * part / n for part in (state.params, state.gradients, state.state)] == [140e9, 140e9, 560e9]
    assert 70e9 * cg.bytes_per_param(cg.training_step(layers(), precision="fp32")) == 1.12e12


def test_forward_graph_has_no_state():
    for ask in (cg.state_bytes, cg.saved_state_bytes, cg.bytes_per_param):
        with pytest.raises(
            cg.GraphError, match="graph 'layers' has no gradients; expected the result of training_step"
        ):
            ask(layers())


# -- activations -----------------------------------------------------------------------------------------------------


def test_two_layer_activations_match_hand_count():
    with cg.Graph("two") as g:
        h = cg.relu(g.input("x", (B, D)) @ g.param("w", (D, F)))
        g.output(cg.reduce(h, "b f -> ", "mean"))
    # at the gradient of relu: its saved operand, the incoming gradient of the mean, and its result
    assert cg.activation_memory(cg.training_step(g), B=3, D=5, F=7) == 3 * (4 * 3 * 7)
    # forward: the matmul and its relu
    assert cg.activation_memory(g, B=3, D=5, F=7) == 2 * (4 * 3 * 7)


@pytest.mark.parametrize("options", [{}, {"checkpoint": cg.every_block()}, {"precision": "bf16-mixed"}], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_activation_bytes_match_timeline(options, depth):
    step = gpt(**options)
    sizes = {**TINY, "L": depth}
    line = cg.timeline(step, **sizes)
    roles = [line.roles.get(r, (0,) * len(line.moments)) for r in ("activation", "temporary", "workspace")]
    live = [sum(at) for at in zip(*roles, strict=True)]
    most = max(v for v, m in zip(live, line.moments, strict=True) if m.phase != "optimizer")
    assert cg.activation_memory(step, **sizes) == most
    if depth == 5:
        free = cg.activation_memory(step)
        assert cg.evaluate(free, **{s.name: sizes[s.name] for s in free.free_symbols}) == most


def test_accumulated_gradients_are_no_activations():
    one, many = gpt(precision="bf16-mixed"), gpt(precision="bf16-mixed", accumulate=3)
    assert cg.activation_memory(many, **TINY) == cg.activation_memory(one, **TINY)


def test_timeline_roles_sum_to_moments():
    step = gpt(precision="bf16-mixed", checkpoint=cg.every_block(), accumulate=2)
    line = cg.timeline(step, **TINY)
    assert [sum(at) for at in zip(*line.roles.values(), strict=True)] == [m.bytes for m in line.moments]
    at = max(range(len(line.moments)), key=lambda i: line.moments[i].bytes)
    assert {role: held[at] for role, held in line.roles.items() if held[at]} == {
        role: amount for role, amount in line.by_role.items() if amount
    }


@pytest.mark.parametrize(
    "policy",
    [cg.every(2), cg.from_start(), cg.selective("mlp"), cg.every_block(inside=cg.selective("attention"))],
    ids=["every 2", "from start", "mlp", "inside"],
)
def test_model_flops_do_not_depend_on_checkpoint_policy(policy):
    sizes = {**TINY, "L": 4}
    kept, again = gpt(), gpt(checkpoint=policy)
    assert cg.model_flops(again, **sizes) == cg.model_flops(kept, **sizes)
    assert cg.model_flops(again, "full", **sizes) == cg.model_flops(kept, "full", **sizes)
    recomputed = cg.costs(again, **sizes).filter(kind="matmul", phase="recompute").total().matmul
    assert cg.hardware_flops(again, **sizes) == cg.hardware_flops(kept, **sizes) + recomputed


# -- which peak rate counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "wanted", "models"),
    [
        ("bf16-mixed", "bf16", ("gpt-oss-20b",)), ("fp16-mixed", "fp16", ("mamba-130m",)),
        ("fp8", "fp8_e4m3", ("mamba-130m",)), ("bf16", "bf16", ("mamba-130m",)),
        *(pytest.param(*c, marks=pytest.mark.long) for c in [
            ("bf16-mixed", "bf16", ("mamba-130m",)), ("fp8", "fp8_e4m3", ("gpt-oss-20b",)),
            ("fp32", "fp32", ("mamba-130m",)),
        ]),
    ],
)  # fmt: skip
def test_utilization_uses_peak_rate_of_precision_policy(policy, wanted, models):
    """Grouped matmuls and scans run in fp32 under autocast, and dominate the FLOPs of these two models."""
    for name in models:
        step = training_step(load(name), precision=policy)
        found = cg.mfu(step, 1, "h100-sxm", B=1, S=64)
        assert (found.dtype, found.rate) == (wanted, float(cg.load_hardware("h100-sxm").rate(wanted)))
        assert found == pytest.approx(cg.model_flops(step, B=1, S=64) / found.rate)
        formats = {
            row.dtype for row in cg.costs(step, B=1, S=64) if row.kind == "matmul" and row.direction == "compute"
        }
        assert found.others.keys() == formats - {wanted}
        for made in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
            assert (made, made.dtype, made.rate, made.others) == (found, found.dtype, found.rate, found.others)
        assert cg.mfu(step, 1, "h100-sxm", dtype="fp32", B=1, S=64).dtype == "fp32"
    run = cg.plan.run(step, "h100-sxm", 1e9, B=1, S=64)
    assert (run.dtype, run.others) == (found.dtype, found.others)
