"""A whole training step: dtypes, micro-batches, the optimizer, and total costs."""

import numpy as np
import pytest
from shared import load, training_step

import costgraph as cg
from costgraph.errors import GraphError
from costgraph.testing import run

B, D, F, L, M, S, V = cg.dims("B D F L M S V")


def squares(y):
    y = y * y
    return cg.reduce(y, " ".join(f"a{i}" for i in range(y.ndim)) + " -> ", "mean")


def model(dtype="fp32"):
    with cg.Graph("model", dtype=dtype) as g:
        x = cg.linear(g.input("x", (B, D)), "b d -> b e", e=D, name="first")
        shared = g.param("shared", (D, D))

        def layer(x):
            return x + cg.nn.mlp(cg.layer_norm(x @ shared), F, bias=True)

        g.output(squares(cg.repeat(L, layer, x, name="layers")))
    return g


SIZES = {"B": 2, "D": 3, "F": 5, "L": 4}
BYTES_A_PARAMETER = {
    "fp32": 4 + 4 + 8,
    "bf16": 2 + 2 + 8,
    "bf16-master": 2 + 2 + 4 + 8,
    "bf16-mixed": 4 + 4 + 8,
    "fp16-mixed": 4 + 4 + 8,
    "megatron-bf16": 2 + 4 + 4 + 8,
}
POLICIES = [None, cg.every_block(), cg.every(2), cg.selective("mlp"), cg.from_start()]


def by_role(step, **sizes):
    out = {}
    for row in cg.lifetimes(step, **sizes):
        out[row.role] = out.get(row.role, 0) + row.bytes
    return out


@pytest.mark.parametrize("precision", BYTES_A_PARAMETER)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_state_bytes_per_parameter(precision, accumulate):
    step = cg.training_step(model(), precision=precision, accumulate=accumulate)
    roles = by_role(step, **SIZES)
    state = roles["param"] + roles["gradient"] + roles["state"]
    # loss scaling adds a scale and a flag
    assert 0 <= state - BYTES_A_PARAMETER[precision] * cg.param_count(step, **SIZES) <= 8


def test_fp32_weights_with_16_bit_gradients():
    policy = cg.Policy("mine", params="fp32", compute="fp32", grads="bf16", moments="fp32")
    roles = by_role(cg.training_step(model(), precision=policy), **SIZES)
    assert roles["param"] + roles["gradient"] + roles["state"] == 14 * cg.param_count(model(), **SIZES)


def combinations():
    """Yield each mixed-precision policy, and each plain dtype; all but a few are marked long."""
    for precision in [None, *BYTES_A_PARAMETER, "fp8"]:
        for accumulate in (1, M):
            for policy, name in zip(POLICIES, ["none", "block", "every", "selective", "start"], strict=True):
                if policy is not None and precision in ("fp32", "bf16", "bf16-master"):
                    continue  # recomputation does not affect dtypes beyond the mixed policies
                alone = accumulate is M and policy is None and precision in ("bf16-master", "megatron-bf16", "fp8")
                few = (precision == "bf16-mixed" and (accumulate is M or name in ("none", "every"))) or alone
                marks = () if few or (precision is None and accumulate == 1) else pytest.mark.long
                yield pytest.param(precision, accumulate, policy, marks=marks, id=f"{name}-{accumulate}-{precision}")


@pytest.mark.parametrize(("precision", "accumulate", "policy"), list(combinations()))
def test_every_combination_matches_unrolled_graph(precision, accumulate, policy):
    step = cg.training_step(model(), precision=precision, accumulate=accumulate, checkpoint=policy)
    sizes = {**SIZES, **({"M": 3} if accumulate is M else {})}
    played = cg.unroll(step, **sizes)
    for ask in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert ask(step, **sizes) == ask(played), ask.__name__
    # the closed form holds from its stated minimum depth: with every second layer, three iterations are six layers
    peak, least = cg.peak_memory(step), cg.timeline(step).holds_from["L"]
    if least > sizes["L"]:
        sizes["L"] = least
        played = cg.unroll(step, **sizes)
    assert cg.evaluate(peak, **{s.name: sizes[s.name] for s in peak.free_symbols}) == cg.peak_memory(played)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "megatron-bf16"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"checkpoint": cg.every_block(), "accumulate": 2}])
def test_interpreter_counts_match_formulas(precision, options):
    step = cg.training_step(model(), precision=precision, clip=1.0, **options)
    result = run(step, **SIZES)
    assert result.flops == cg.flops(step, **SIZES)
    assert result.bytes_moved == cg.bytes_moved(step, **SIZES)
    assert result.peak == cg.peak_memory(step, **SIZES)


@pytest.mark.parametrize("policy", POLICIES, ids=["none", "block", "every", "selective", "start"])
def test_micro_batch_gradients_sum_to_full_batch_gradient(policy):
    rng = np.random.default_rng(7)
    once = cg.training_step(model(), optimizer=cg.SGD(lr=0), checkpoint=policy)
    many = cg.training_step(model(), optimizer=cg.SGD(lr=0), checkpoint=policy, accumulate=M)
    x = rng.normal(size=(6, 3))
    numbers = {"B": 6, "D": 3, "F": 5, "L": 4, "M": 3}
    given = {
        t.name: rng.normal(size=[int(n.subs({s: numbers[s.name] for s in n.free_symbols})) for n in t.shape])
        for t in once.tensors
        if t.producer is None and t.role == "param"
    }
    whole = run(once, {**given, "x": x}, B=6, D=3, F=5, L=4)
    parts = run(many, {**given, "x": x.reshape(3, 2, 3)}, B=2, D=3, F=5, L=4, M=3)
    for name, grad in whole.gradients.items():
        np.testing.assert_allclose(parts.gradients[name], grad, rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(parts.outputs[0].mean(), whole.outputs[0])


def test_accumulation_runs_all_micro_batches_and_holds_one():
    once, many = cg.training_step(model()), cg.training_step(model(), accumulate=M)
    assert (cg.matmul_flops(many) - M * cg.matmul_flops(once)).expand() == 0
    sizes = {"B": 64, "D": 3, "F": 5, "L": 4}
    one, four = (cg.timeline(g, **sizes) for g in (once, cg.training_step(model(), accumulate=4)))
    assert four.by_role["activation"] == one.by_role["activation"]  # for one micro-batch
    assert four.by_role["input"] == 4 * one.by_role["input"]


def test_update_matches_torch():
    torch = pytest.importorskip("torch")
    with cg.Graph("g") as g:
        g.output(squares(cg.gelu(g.input("x", (B, D)) @ g.param("w", (D, F)))))
    step = cg.training_step(g, optimizer=cg.AdamW(lr=0.125, step=1))
    rng = np.random.default_rng(11)
    given = {"x": rng.normal(size=(2, 3)), "w": rng.normal(size=(3, 5))}
    state = {"w.exp_avg": np.zeros((3, 5)), "w.exp_avg_sq": np.zeros((3, 5))}
    result = run(step, {**given, **state}, B=2, D=3, F=5)
    w = torch.nn.Parameter(torch.tensor(given["w"]))
    optimizer = torch.optim.AdamW([w], lr=0.125)
    (torch.nn.functional.gelu(torch.tensor(given["x"]) @ w) ** 2).mean().backward()
    optimizer.step()
    (updated,) = [v.array for t, v in result.values if t.role == "param" and t.producer is None]
    np.testing.assert_allclose(updated, w.detach().numpy(), rtol=1e-9)


def test_zoo_models_name_their_loss():
    step = training_step(load("gpt2", symbolic=True))
    assert "targets" in [t.name for t in step.tensors]
    assert [t.sizes for t in step.outputs] == [()]
    assert {op.phase for op in step.walk()} == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mlp"])
@pytest.mark.parametrize(
    ("attention", "precision", "policies"),
    [("eager", None, [cg.every_block()]), ("flash", "bf16-mixed", [None]), ("flash", "fp8", [cg.every_block()])],
)
def test_zoo_models_can_be_trained(name, attention, precision, policies):
    g = load(name, attention=attention, dropout=0.1)
    sizes = {"B": 3} if name == "mlp" else {"B": 2, "S": 128}
    for policy in policies:
        step = cg.training_step(g, precision=precision, checkpoint=policy)
        assert cg.peak_memory(step, **sizes) > 12 * cg.param_count(g) - cg.param_count(g) * 4
        assert cg.matmul_flops(step, **sizes) > 2 * cg.matmul_flops(g, **sizes)


def test_invalid_steps_are_refused():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B, D)) @ g.param("w", (D, F))))
    with pytest.raises(GraphError, match=r"graph 'g' names no loss, and its outputs \(1\) are no single scalar"):
        cg.training_step(g)
    with pytest.raises(GraphError, match="loss 'mse', expected one of cross_entropy, "):
        cg.training_step(g, loss="mse")
    with cg.Graph("two") as two:
        x = two.input("x", (B, D)) @ two.param("w", (D, F))
        two.output(x, cg.relu(x))
    with pytest.raises(GraphError, match="loss 'cross_entropy' of graph 'two', which has 2 outputs, expected one, or"):
        cg.training_step(two, loss="cross_entropy")
    with pytest.raises(GraphError, match=r"the loss is relu.*, expected a scalar"):
        cg.training_step(g, loss=lambda y: y)
    with pytest.raises(GraphError, match=r"training_step: optimizer 'adamx', expected an optimizer"):
        cg.training_step(model(), optimizer="adamx")
    with pytest.raises(GraphError, match="checkpoint is 'all', expected a checkpoint"):
        cg.training_step(model(), checkpoint="all")
    with pytest.raises(cg.CostGraphError, match="accumulate"):
        cg.training_step(model(), accumulate=0)
    with cg.Graph("frozen") as g:
        g.output(squares(g.input("x", (B, D)) @ g.param("w", (D, F), grad=False)))
    with pytest.raises(GraphError, match="no parameter of graph 'frozen' requires a gradient"):
        cg.training_step(g)


def test_loss_may_be_a_function():
    with cg.Graph("g") as g:
        g.output(g.input("x", (B, D)) @ g.param("w", (D, F)))
    step = cg.training_step(g, loss=squares, optimizer=cg.SGD())
    assert cg.matmul_flops(step) == 4 * B * D * F  # the matmul, and dw


@pytest.mark.parametrize("options", [{}, {"precision": "megatron-bf16"}, {"accumulate": 3}, {"set_to_none": False}])
def test_no_gradient_is_copied(options):
    step = training_step(load("gpt2"), **options)
    assert [op.name for op in step.walk() if op.name.rpartition("/")[2].startswith("own")] == []


def test_gradients_may_be_kept():
    step = cg.training_step(model(), set_to_none=False)
    assert [op.name for op in step.walk() if op.kind.name == "zero_grad"]
    rows = {r.tensor: (r.born, r.dies) for r in cg.lifetimes(step) if r.role == "gradient"}
    assert rows["shared.grad"] == (None, None)


def test_best_checkpoint_interval():
    with cg.Graph("g") as g:
        x = cg.linear(g.input("x", (B, D)), "b d -> b e", e=D)
        g.output(squares(cg.repeat(L, lambda x: x + cg.tanh(cg.linear(x, "b d -> b e", e=D)), x, name="layers")))
    # a layer saves its input and the result of tanh: 8*B*D*k; a group saves its input: 4*B*D*L/k
    assert (cg.plan.best_interval(g) ** 2 - L / 2).simplify() == 0
    with cg.Graph("flat") as flat:
        flat.output(squares(flat.input("x", (B, D)) @ flat.param("w", (D, F))))
    with pytest.raises(GraphError, match="graph 'flat' has no stack of layers that can be split"):
        cg.plan.best_interval(flat)


def test_cheapest_fitting_checkpoint_policy():
    g = load("gpt2", attention="eager")
    sizes = {"B": 4, "S": 256, "L": 2}
    plain = cg.peak_memory(cg.training_step(g), **sizes)
    assert cg.plan.checkpoint_for(g, memory=plain, **sizes) is None
    chosen = cg.plan.checkpoint_for(g, memory=plain - 1, **sizes)
    step = cg.training_step(g, checkpoint=chosen)
    assert cg.peak_memory(step, **sizes) < plain
    with pytest.raises(
        cg.BindingError, match=r"checkpoint_for: the smallest peak is [0-9]+ bytes, expected at most 1000"
    ):
        cg.plan.checkpoint_for(g, memory=1000, **sizes)
    with pytest.raises(cg.BindingError, match="expected exactly one limit, hardware= or memory="):
        cg.plan.checkpoint_for(g, **sizes)


def test_allocation_granularity_rounds_up_storages():
    step = cg.training_step(model(), accumulate=2)
    played = cg.unroll(step, **SIZES)
    # every storage at these sizes is smaller than one block
    live, most = 0, 0
    rows = cg.lifetimes(played)
    names = [op.name for op in played.ops]
    born = [-1 if r.born is None else names.index(r.born) for r in rows]
    dies = [len(names) if r.dies is None else names.index(r.dies) for r in rows]
    for i in range(len(names)):
        live = sum(512 * -(-r.bytes // 512) for r, b, d in zip(rows, born, dies, strict=True) if b <= i <= d)
        most = max(most, live)
    assert cg.peak_memory(step, allocator="cuda", **SIZES) == most
    assert cg.peak_memory(step, allocator="cuda", **{**SIZES, "L": 9}) > most
    with pytest.raises(cg.BindingError, match="peak in blocks of an allocator"):
        cg.peak_memory(step, allocator="cuda", B=2)
    with pytest.raises(GraphError, match="peak_memory: allocator"):
        cg.peak_memory(step, allocator="mine", **SIZES)


def test_policy_without_matches_is_refused():
    with pytest.raises(GraphError, match=r"selective: 'atention' matches no scope or op, .* such as .*layer_norm"):
        cg.training_step(model(), checkpoint=cg.selective("atention"))
    with pytest.raises(GraphError, match=r"keep: 'atention' matches no op, expected one such as .*matmul"):
        cg.training_step(model(), checkpoint=cg.every_block(keep=["atention"]))
    with pytest.raises(GraphError, match=r"graph 'model' already has a backward pass"):
        cg.training_step(cg.training_step(model()))
    with pytest.raises(GraphError, match=r"saved_bytes: graph 'model' has no backward pass"):
        cg.saved_bytes(model())


def test_input_gradients_of_micro_batches_are_stacked():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D), grad=True)
        g.output(squares(x @ g.param("w", (D, F))))
    step = cg.training_step(g, accumulate=M)
    found = {t.name: made.shape for t, made in step.gradients.items()}
    assert found == {"w": (D, F), "x": (M, B, D)}


@pytest.mark.parametrize("policy", POLICIES[1:], ids=["block", "every", "selective", "start"])
def test_step_survives_save_and_load(policy, tmp_path):
    step = cg.training_step(model(), precision="bf16-mixed", checkpoint=policy, accumulate=2)
    cg.save(step, tmp_path / "step.json")
    again = cg.load(tmp_path / "step.json")
    for ask in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert ask(again, **SIZES) == ask(step, **SIZES)


def test_peeled_first_layer_may_be_the_only_one():
    """The first layer has no input gradient, so the others form a loop of L - 1, as do their updates."""
    B, D, L = cg.dims("B D L")

    def layer(x):
        return cg.gelu(cg.linear(x, "b d -> b e", e=D, name="own"))

    with cg.Graph("g") as g:
        y = cg.repeat(L, layer, g.input("x", (B, D)), name="layers")
        g.output(cg.reduce(y, "b d ->", "mean"))
    step = cg.training_step(g, optimizer=cg.SGD(momentum=0.9))
    assert {str(op.loop.count) for op in step.ops if op.phase == "optimizer"} == {"1", "L - 1"}
    one = cg.unroll(step, L=1)
    assert cg.peak_memory(step, B=2, D=3, L=1) == cg.peak_memory(one, B=2, D=3)
    assert cg.flops(step, B=2, D=3, L=1) == cg.flops(one, B=2, D=3)
