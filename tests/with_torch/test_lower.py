"""Lowering of a graph: names, inputs, devices, errors, gradients, and cases that the strategies do not draw."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from shared import load, training_step  # noqa: E402  # as above
from torch.nn import functional  # noqa: E402

import costgraph as cg  # noqa: E402
from costgraph.errors import BindingError, GraphError, UnsupportedError  # noqa: E402
from costgraph.ir.graph import known_names  # noqa: E402
from costgraph.torch.lowering import lower, random_inputs  # noqa: E402

torch.set_num_threads(1)

SIZES = {"B": 2, "S": 7, "D": 12, "H": 4, "G": 2, "K": 4, "F": 13, "L": 3, "V": 23, "P": 11, "C": 5}
OPTIMIZERS = [
    cg.SGD(), cg.SGD(momentum=0.9, nesterov=True, weight_decay=0.1), cg.Adam(amsgrad=True, implementation="for-loop"),
    cg.AdamW(), cg.AdamW(implementation="fused"), cg.AdaGrad(), cg.RMSProp(), cg.Lion(), cg.Adafactor(), cg.Muon(),
]  # fmt: skip


def sizes_of(graph):
    return {k: v for k, v in SIZES.items() if k in known_names(graph)}


def run(graph, **dims):
    return lower(graph, **dims)(*random_inputs(graph, **dims))


# -- names and numbers -------------------------------------------------------------------------------------------


def test_lowered_tensors_keep_graph_names():
    step = training_step(load("mlp", dtype="fp32"))
    module = lower(step, **sizes_of(step))
    assert {n for n, _ in module.named_parameters()} == {
        "first.weight", "first.bias", *(f"layers.linear.weight.{i}" for i in range(3)),
        *(f"layers.linear.bias.{i}" for i in range(3)), "head.weight", "head.bias",
    }  # fmt: skip
    assert "layers.linear.weight_exp_avg_sq.2" in dict(module.named_buffers())


def test_tensor_names_may_clash_with_module_names():
    with cg.Graph("g") as g:
        a = g.param("a", (2,))
        with cg.scope("a"):
            b = g.param("b", (2,))
        with cg.scope("train"):  # also an nn.Module method
            c = g.param("float", (2,))
        g.output(a + b + c + g.param("a.b", (2,)))
    module = lower(g)
    assert sorted(module.state_dict()) == ["a", "a_b", "a_b_", "train_.float_"]
    module.load_state_dict({n: torch.full((2,), 2.0**i) for i, n in enumerate(sorted(module.state_dict()))})
    assert module().tolist() == [15.0, 15.0]


def test_model_weights_load_into_its_training_step():
    graph = load("llama-3-8b", dtype="fp32")
    step = cg.training_step(graph, optimizer=cg.SGD())
    forward, update = lower(graph, **sizes_of(graph)), lower(step, **sizes_of(step))
    assert str(update.load_state_dict(forward.state_dict())) == "<All keys matched successfully>"


def test_seed_determines_initial_values():
    graph = load("mlp", dtype="fp32")
    first, same, other = (lower(graph, seed=s, **sizes_of(graph)).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(first[k], same[k]) and not torch.equal(first[k], other[k]) for k in first)


def test_random_indices_fit_the_smallest_table():
    with cg.Graph("g") as g:
        ids = g.input("ids", (1009,), dtype="int64")
        for rows in (7, 5):
            cg.embedding(ids, g.param(f"table{rows}", (rows, 2)))
        inner = cg.repeat(2, lambda x: x + cg.ops.gather(g.param("t", (3, 2)), ids), g.input("x", (1009, 2)))
        g.output(inner)
    ids, _ = random_inputs(g)
    assert (ids.min(), ids.max()) == (0, 2)


def test_computed_indices_wrap_around():
    with cg.Graph("g") as g:
        ids = cg.ops.pointwise("mul", cg.ops.arange(5), 3)
        g.output(cg.ops.gather(g.param("table", (4,)), ids))
    module = lower(g)
    table = module.state_dict()["table"]
    assert torch.equal(module(), table[[0, 3, 2, 1, 0]])
    assert "remainder" in module.code
    with cg.Graph("g") as known:
        known.output(cg.ops.gather(known.param("table", (5,)), cg.ops.arange(5)))
    assert "remainder" not in lower(known).code


# -- inputs and errors -------------------------------------------------------------------------------------------------


def plain():
    B = cg.dims("B")
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B, 3))))
    return g


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.ones(2, 4), "input 'x' is torch.float32 (2, 4), expected torch.float32 (2, 3)"),
        (torch.ones(2, 3, dtype=torch.float64), "input 'x' is torch.float64 (2, 3), expected torch.float32 (2, 3)"),
        (torch.ones(3, 2).T, "input 'x' has strides (1, 2), expected (3, 1)"),
        ([1.0], "input 'x' is list, expected torch.float32 (2, 3)"),
    ],
)
def test_inputs_are_looked_at(given, text):
    with pytest.raises(BindingError, match=re.escape(text)):
        lower(plain(), B=2)(given)


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda: lower(plain()), BindingError, "lower of graph 'g': B not bound, expected a size for each"),
        (lambda: random_inputs(plain()), BindingError, "B not bound"),
        (lambda: lower(plain(), B=0), BindingError, "B=0: expected a positive integer"),
        (lambda: lower(plain(), "abacus", B=2), GraphError, "device 'abacus': unknown to torch"),
        (lambda: lower("g"), GraphError, "lower: got str, expected a graph"),
        (lambda: lower(cg.Graph("empty")), GraphError, "lower of graph 'empty': no output, expected at least one"),
    ],
)
def test_invalid_lower_calls_are_refused(ask, error, text):
    with pytest.raises(error, match=re.escape(text)):
        ask()


@pytest.mark.parametrize("dtype", ["int4", "fp4_e2m1", "mxfp8", "nvfp4"])
def test_dtypes_unknown_to_torch_are_refused(dtype):
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise("copy", g.input("x", (32,), dtype)))
    with pytest.raises(UnsupportedError, match=f"input 'x': torch has no tensors of {dtype}, expected one of fp64"):
        lower(g)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_tensors_are_computed_in_fp32(dtype):
    with cg.Graph("g") as g:
        x = g.input("x", (2, 2), dtype)
        g.output(cg.ops.pointwise("add", x, x), x @ x, cg.reduce(x, "a b -> a", "sum"))
    results = lower(g)(torch.ones(2, 2).to(random_inputs(g)[0].dtype))
    assert [y.float().unique().tolist() for y in results] == [[2.0], [2.0], [2.0]]
    assert {y.element_size() for y in results} == {1}


# -- user-defined functions --------------------------------------------------------------------------------------------


def own():
    with cg.Graph("g") as g:
        x = g.input("x", (3, 2))
        y = cg.opaque("sorted_rows", [x], (3, 2), flops=0)
        g.output(cg.ops.pointwise(cg.ops.functions.Function("twice", 1, 1), y))
    return g


def test_opaque_ops_call_user_functions():
    x = torch.tensor([[2.0, 1.0], [4.0, 3.0], [0.0, 5.0]])
    module = lower(own(), functions={"sorted_rows": lambda x: x.sort(-1).values, "twice": lambda x: 2 * x})
    assert module(x).tolist() == [[2, 4], [6, 8], [0, 10]]


def test_missing_or_wrong_user_functions_are_refused():
    with pytest.raises(UnsupportedError, match=re.escape("expected a torch function in functions={'sorted_rows': ")):
        lower(own())
    with pytest.raises(UnsupportedError, match=re.escape("torch has no function 'twice'")):
        lower(own(), functions={"sorted_rows": torch.sort})
    module = lower(own(), functions={"sorted_rows": lambda x: x[0], "twice": torch.square})
    with pytest.raises(UnsupportedError, match=re.escape("opaque op 'sorted_rows' returned [((2,), torch.float32)]")):
        module(torch.ones(3, 2))


# -- gradients, against torch's ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "attention", "checkpoint"),
    [
        ("mlp", "flash", None),  # without attention
        ("mlp", "flash", cg.every_block()),
        ("gpt2", "eager", None),
        ("gpt2", "flash", cg.every_block()),
        ("llama-3-8b", "flash", None),
        ("llama-3-8b", "eager", cg.every_block()),
    ],
)
def test_lowered_step_gradients_equal_autograd(name, attention, checkpoint):
    """A step of plain SGD with rate 1 subtracts the gradient, which autograd computes from the forward pass."""
    graph = load(name, dtype="fp64", attention=attention)
    loss = cg.transforms.loss.with_loss(graph)
    step = cg.training_step(graph, optimizer=cg.SGD(lr=1.0), checkpoint=checkpoint)
    dims = sizes_of(step)
    forward, update, inputs = lower(loss, **dims), lower(step, **dims), random_inputs(loss, **dims)
    before = {k: v.clone() for k, v in forward.state_dict().items()}
    update.load_state_dict(before)
    output = forward.requires_grad_()(*inputs)
    output.backward()
    torch.testing.assert_close(update(*inputs), output.detach(), rtol=1e-12, atol=0)
    for k, p in forward.named_parameters():
        torch.testing.assert_close(before[k] - update.get_parameter(k), p.grad, rtol=1e-6, atol=1e-13)


def test_lowered_adamw_equals_torchs():
    graph = load("mlp", dtype="fp32")
    loss = cg.transforms.loss.with_loss(graph)
    dims = sizes_of(loss)
    forward, inputs = lower(loss, **dims).requires_grad_(), random_inputs(loss, **dims)
    optimizer = torch.optim.AdamW(forward.parameters(), lr=0.1)
    start = {k: v.detach().clone() for k, v in forward.state_dict().items()}
    forward(*inputs).backward()
    optimizer.step()
    for implementation in ("foreach", "for-loop", "fused"):
        step = cg.training_step(graph, optimizer=cg.AdamW(lr=0.1, step=1, implementation=implementation))
        module = lower(step, **dims)
        state = {k: start.get(k, torch.zeros_like(v)) for k, v in module.state_dict().items()}
        module.load_state_dict(state)
        module(*inputs)
        for k, p in forward.named_parameters():
            torch.testing.assert_close(module.get_parameter(k), p.detach(), rtol=1e-4, atol=1e-5)


def test_convolution_and_pooling_gradients_equal_torchs():
    B, C, N = cg.dims("B C N")
    with cg.Graph("g", dtype="fp64") as g:
        y = cg.conv(g.input("x", (B, C, N, N)), "b c h w -> b o h w", window=(3, 3), padding=1, stride=2, o=4)
        y = cg.conv(y, "b c h w -> b o h w", window=(2, 2), groups=2, o=6, bias=True)
        y = cg.nn.pool(cg.nn.pool(y, "max", window=2), "mean", window=2, padding=1)
        g.output(cg.reduce(y, "b c h w -> ", "sum"))
    dims = {"B": 2, "C": 3, "N": 13}
    forward, (x,) = lower(g, **dims).requires_grad_(), random_inputs(g, **dims)
    weights = dict(forward.named_parameters())
    y = functional.conv2d(x, weights["conv.weight"], stride=2, padding=1)
    y = functional.conv2d(y, weights["conv_1.weight"], weights["conv_1.bias"], groups=2)
    expected = functional.avg_pool2d(functional.max_pool2d(y, 2), 2, padding=1).sum()
    torch.testing.assert_close(forward(x), expected)
    expected.backward()
    step = lower(cg.training_step(g, optimizer=cg.SGD(lr=1.0)), **dims)
    step.load_state_dict(forward.state_dict())
    step(x)
    for k, p in weights.items():
        torch.testing.assert_close(p.detach() - step.get_parameter(k), p.grad)


# -- step options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{type(o).__name__}-{o.implementation}")
def test_steps_with_every_optimizer_run(optimizer):
    step = training_step(load("mlp", dtype="fp32"), optimizer=optimizer)
    module = lower(step, **sizes_of(step))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    assert torch.isfinite(module(*random_inputs(step, **sizes_of(step))))
    # a small step does not change numbers near 1, such as those of vectors
    changed = {k for k, v in module.named_parameters() if not torch.equal(v, before[k])}
    assert {k for k, _ in module.named_parameters() if "weight" in k} <= changed
    assert all(torch.isfinite(v).all() for v in module.state_dict().values())


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", "bf16-master", "bf16-mixed", "fp16-mixed", "megatron-bf16", "fp8"]
)
def test_steps_in_every_precision_run(precision):
    step = training_step(load("gpt2", dtype="fp32"), precision=precision)
    assert torch.isfinite(run(step, **sizes_of(step) | {"L": 1}))


def test_micro_batch_gradients_equal_the_whole_batch():
    graph = load("mlp", dtype="fp64")
    whole = cg.training_step(graph, optimizer=cg.SGD(lr=1.0))
    parts = cg.training_step(graph, optimizer=cg.SGD(lr=1.0), accumulate=3)
    dims = sizes_of(whole)
    first, second = lower(whole, **{**dims, "B": 6}), lower(parts, **dims)
    second.load_state_dict(first.state_dict())
    x, targets = random_inputs(whole, **{**dims, "B": 6})
    first(x, targets)
    losses = second(x.view(3, 2, -1), targets.view(3, 2))
    assert losses.shape == (3,)
    for k, p in first.named_parameters():
        torch.testing.assert_close(second.get_parameter(k), p)


def test_dropout_drops_the_expected_share():
    with cg.Graph("g") as g:
        g.output(cg.dropout(g.input("x", (100, 1000)), 0.25))
    result = lower(g)(torch.ones(100, 1000))
    assert result.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    # 100,000 draws: six standard deviations are 0.0082
    assert (result == 0).float().mean().item() == pytest.approx(0.25, abs=0.0082)


# -- calls of a trace, and devices -------------------------------------------------------------------------------


def test_lowered_trace_equals_the_module():
    trace = pytest.importorskip("costgraph.torch.tracing.trace").trace
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    x = torch.randn(4, 5)
    lowered = lower(trace(module, x, dims=[("B", None)]), B=4)
    lowered.load_state_dict(module.state_dict())
    assert torch.equal(lowered(x), module(x).detach())


def test_full_size_model_runs_on_the_meta_device():
    graph = load("llama-3.2-1b")
    module = lower(graph, "meta", B=1, S=8192)
    logits = module(*random_inputs(graph, "meta", B=1, S=8192))
    assert (logits.device.type, logits.dtype, tuple(logits.shape)) == ("meta", torch.bfloat16, (1, 8192, 128256))
    assert sum(p.numel() for p in module.parameters()) == cg.param_count(graph)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gpu_step_loss_equals_the_cpu(attention, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    step = training_step(load("llama-3-8b", dtype=dtype, attention=attention))
    dims = {**sizes_of(step), "S": 64, "K": 64}
    here, there = (lower(step, d, **dims)(*random_inputs(step, d, **dims)) for d in ("cpu", "cuda"))
    torch.testing.assert_close(there.cpu(), here, rtol=1e-2 if dtype == "bf16" else 1e-4, atol=0)


@pytest.mark.parametrize("kernel", ["flash", "eager"])
def test_rank_graph_of_attention_needs_a_mesh(kernel):
    B, H, S, K = cg.dims("B H S K")
    with cg.Graph("g") as g:
        g.output(cg.attention(*(g.input(n, (B, H, S, K)) for n in "qkv"), kernel=kernel))
    rank = cg.shard(g, cg.mesh(cp=2), dict.fromkeys("qkv", "b h (s cp) k"), strict=True)
    with pytest.raises(
        cg.GraphError, match=r"the graph is partitioned over mesh\(cp=2\), expected mesh= with torch's Device"
    ):
        lower(rank, B=2, H=1, S=4, K=3)


def test_collectives_without_mesh_assume_equal_ranks():
    with cg.Graph("g") as g:
        x = g.input("x", (4, 2))
        names = ("all_reduce", "all_gather", "reduce_scatter", "send")
        g.output(*(cg.ops.collective(x, n, 2) for n in names), cg.ops.opaque.transfer(x))
    results = [y.numpy() for y in lower(g)(torch.ones(4, 2))]
    assert [(y.shape, y.flat[0]) for y in results] == [((4, 2), 2), ((8, 2), 1), ((2, 2), 2), ((4, 2), 1), ((4, 2), 1)]
    assert all(np.ptp(y) == 0 for y in results)


def test_scopes_may_be_python_keywords():
    B, D = cg.dims("B D")
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        with cg.scope("global"):
            g.output(cg.linear(x, "b d -> b e", e=D, name="lambda"))
    module = lower(g, B=2, D=3)
    assert [name for name, _ in module.named_parameters()] == ["global_.lambda_.weight"]
    assert module(torch.ones(2, 3)).shape == (2, 3)
