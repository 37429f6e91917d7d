"""The backward pass: added ops, saved tensors and the tensors that get gradients."""

import numpy as np
import pytest

import costgraph as cg
from costgraph.errors import GraphError, UnsupportedError
from costgraph.testing import run

B, D, F, K, L, S, V, H, N = cg.dims("B D F K L S V H N")


def mean(y):
    return cg.reduce(y, " ".join(f"a{i}" for i in range(y.ndim)) + " -> ", "mean")


def squares(y):
    return mean(y * y)


def chain():
    with cg.Graph("chain") as g:
        x = g.input("x", (B, D))
        h = x @ g.param("w1", (D, F))
        g.output(mean(cg.relu(h) @ g.param("w2", (F, K))))
    return g


def stack(count=L, shared=False, **options):
    with cg.Graph("stack") as g:
        x = g.input("x", (B, D), grad=options.get("grad", False))
        w = g.param("shared", (D, D)) if shared else None

        def layer(x):
            x = x if w is None else cg.tanh(x @ w)
            return x + cg.nn.mlp(cg.layer_norm(x), F, activation=cg.silu, bias=True)

        g.output(squares(cg.repeat(count, layer, x, name="layers")))
    return g


def test_linear_chain_matches_torch_and_skips_input_gradient():
    step = cg.backward(chain())
    added = cg.matmul_flops(step) - cg.matmul_flops(chain())
    assert added == 2 * B * D * F + 2 * (2 * B * F * K)  # dw1; dw2 and dh: 2 FLOPs per index point each
    by_torch = [op.kind.pattern for op in step.ops if op.phase == "backward" and op.kind.name == "einsum"]
    assert len(by_torch) == 3


def test_saved_tensors_are_those_backward_reads():
    # relu saves its result, which dw2 reads as well; its input dies there
    rows = {r.tensor: r for r in cg.lifetimes(cg.backward(chain()))}
    assert rows["matmul"].dies == "relu"
    assert rows["relu"].dies == "threshold_backward"
    assert rows["x"].dies is None


def test_peak_memory_matches_worked_example():
    # fp32, B=2, D=3, F=5, K=7; live bytes by hand, op by op, without parameters and x (4*(15+35+6) = 224):
    # matmul h 40 | relu h+r 80 | matmul_1 r+y 40+56 | mean r y loss 100 | ones 48 (r, loss, ones) | div r loss ones dy
    # 104 | einsum dh: r loss dy dh 140 | dw2: r loss dy dh dw2 280 | relu': r loss dh dw2 dh' 40+4+40+140+40 = 264 |
    # dw1: loss dw2 dh' dw1 4+140+40+60 = 244
    assert cg.peak_memory(cg.backward(chain()), B=2, D=3, F=5, K=7) == 224 + 280


def test_gradients_live_to_the_end_with_gradient_role():
    rows = {r.tensor: r for r in cg.lifetimes(cg.backward(chain()))}
    grads = [r for r in rows.values() if r.role == "gradient"]
    assert [r.dies for r in grads] == [None, None]
    assert sorted(str(r.bytes) for r in grads) == ["4*D*F", "4*F*K"]


def test_frozen_params_get_no_gradient_but_propagate_it():
    with cg.Graph("lora") as g:
        x = g.input("x", (B, D))
        h = x @ g.param("first", (D, D))
        w = g.param("frozen", (D, F), grad=False)
        g.output(mean(h @ w))
    step = cg.backward(g)
    assert [t.name for t in step.gradients] == ["first"]
    # dh through the frozen weight, and dfirst
    assert cg.matmul_flops(step) - cg.matmul_flops(g) == 2 * B * D * F + 2 * B * D * D


def test_inputs_can_require_gradients():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D), grad=True)
        g.output(mean(cg.tanh(x)))
    assert [t.name for t in cg.backward(g).gradients] == ["x"]


def test_tied_weight_gets_one_gradient():
    with cg.Graph("tied") as g:
        ids = g.input("ids", (B, S), dtype="int64")
        table = g.param("table", (V, D))
        x = cg.embedding(ids, table)
        g.output(cg.cross_entropy(cg.einsum(x, table, "b s d, v d -> b s v"), ids))
    step = cg.backward(g)
    assert [t.name for t in step.gradients] == ["table"]
    torch = pytest.importorskip("torch")
    sizes = {"B": 2, "S": 3, "V": 5, "D": 7}
    values = np.random.default_rng(0).normal(size=(5, 7))
    tokens = np.array([[0, 3, 1], [4, 0, 2]])
    result = run(step, {"ids": tokens, "table": values}, **sizes)
    w = torch.tensor(values, requires_grad=True)
    x = torch.nn.functional.embedding(torch.tensor(tokens), w)
    loss = torch.nn.functional.cross_entropy((x @ w.T).flatten(0, 1), torch.tensor(tokens).flatten())
    loss.backward()
    np.testing.assert_allclose(result.outputs[0], loss.item())
    np.testing.assert_allclose(result.gradients["table"], w.grad.numpy())


def test_each_stacked_layer_saves_one_storage():
    step = cg.backward(stack(grad=True))
    rows = [r for r in cg.lifetimes(step, L=7) if r.tensor.startswith("layers/mlp/silu[")]
    # iterations 0, 1, 5 and 6 are played out, 2 to 4 share one row
    assert [r.tensor.removeprefix("layers/mlp/silu") for r in rows] == ["[0]", "[1]", "[5]", "[6]", "[2..4]"]
    assert [r.bytes for r in rows] == [4 * B * F] * 4 + [3 * 4 * B * F]
    forward = next(op for op in step.ops if op.kind.name == "repeat")
    assert {t.storage.pieces for t in forward.results[1:]} == {1}


@pytest.mark.parametrize(("shared", "grad"), [(False, True), (True, False)])
@pytest.mark.parametrize("policy", [None, cg.every_block(), cg.selective("mlp"), cg.from_start()])
def test_symbolic_depth_matches_unrolled_graph(shared, grad, policy):
    step = cg.backward(stack(shared=shared, grad=grad), checkpoint=policy)
    peak = cg.peak_memory(step)
    least = cg.timeline(step).holds_from["L"]
    for layers in (1, 2, 3, 4, 5, 7):
        sizes = {"B": 2, "D": 3, "F": 5, "L": layers}
        played = cg.unroll(step, **sizes)
        assert cg.flops(played) == cg.flops(step, **sizes)
        assert cg.bytes_moved(played) == cg.bytes_moved(step, **sizes)
        assert cg.peak_memory(played) == cg.peak_memory(step, **sizes)
        if layers >= least:
            assert cg.evaluate(peak, **sizes) == cg.peak_memory(played)
    # the first layer differs if x needs no gradient, and closed forms hold from a minimum count on
    assert least <= 3 + (not grad) + 2 * (policy == cg.from_start())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_backward_of_unrolled_graph_matches_loop(shared, grad):
    g = stack(shared=shared, grad=grad)
    for layers in (1, 2, 3, 6):
        sizes = {"B": 2, "D": 3, "F": 5, "L": layers}
        step, played = cg.backward(g), cg.backward(cg.unroll(g, **sizes))
        for ask in (cg.flops, cg.bytes_moved, cg.peak_memory):
            assert ask(step, **sizes) == ask(played), (ask.__name__, layers)


@pytest.mark.parametrize(
    "policy", [None, cg.every_block(), cg.every(2), cg.selective("mlp", "layer_norm"), cg.from_start()]
)
def test_stack_gradients_match_torch(policy):
    torch = pytest.importorskip("torch")
    sizes = {"B": 2, "D": 3, "F": 5, "L": 4}
    step = cg.backward(stack(shared=True, grad=True), checkpoint=policy)
    rng = np.random.default_rng(3)
    sources = [t for t in step.tensors if t.producer is None]
    given = {t.name: rng.normal(size=[int(n.subs({B: 2, D: 3, F: 5, L: 4})) for n in t.shape]) for t in sources}
    result = run(step, given, **sizes)
    leaves = {n: torch.tensor(v, requires_grad=True) for n, v in given.items()}
    x = leaves["x"]
    layers = {}
    for t in (t for t in sources if t.storage.pieces):
        name, depth = t.name.removeprefix("layers/").removesuffix(".last"), t.storage.pieces
        groups = leaves[t.name].unflatten(0, (-1, 1)) if depth == 1 else leaves[t.name]
        # the last layer of a recomputed group has its own parameters
        layers[name] = torch.cat([layers[name], groups], 1) if name in layers else groups
    layers = {name: t.flatten(0, 1) for name, t in layers.items()}
    for i in range(4):
        w = {n: t[i] for n, t in layers.items()}
        x = torch.tanh(x @ leaves["shared"])
        h = torch.nn.functional.layer_norm(x, (3,), w["layer_norm/weight"], w["layer_norm/bias"], eps=1e-5)
        h = torch.nn.functional.silu(h @ w["mlp/up/weight"] + w["mlp/up/bias"])
        x = x + h @ w["mlp/down/weight"] + w["mlp/down/bias"]
    (x * x).mean().backward()
    for name, grad in result.gradients.items():
        np.testing.assert_allclose(grad, leaves[name].grad.numpy(), rtol=1e-9, atol=1e-12, err_msg=name)


def test_scan_backpropagates_through_time():
    with cg.Graph("rnn") as g:
        xs, h = g.input("xs", (S, B, D)), g.input("h", (B, F))
        wx, wh = g.param("wx", (D, F)), g.param("wh", (F, F))

        def cell(h, x):
            h = cg.tanh(x @ wx + h @ wh)
            return h, h

        _, ys = cg.scan(S, cell, h, xs, name="time")
        g.output(squares(ys))
    torch = pytest.importorskip("torch")
    sizes = {"B": 2, "D": 3, "F": 5, "S": 6}
    rng = np.random.default_rng(5)
    shapes = {"xs": (6, 2, 3), "h": (2, 5), "wx": (3, 5), "wh": (5, 5)}
    given = {n: rng.normal(size=s) for n, s in shapes.items()}
    result = run(cg.backward(g), given, **sizes)
    leaves = {n: torch.tensor(v, requires_grad=n.startswith("w")) for n, v in given.items()}
    state, states = leaves["h"], []
    for x in leaves["xs"]:
        state = torch.tanh(x @ leaves["wx"] + state @ leaves["wh"])
        states.append(state)
    (torch.stack(states) ** 2).mean().backward()
    for name in ("wx", "wh"):
        np.testing.assert_allclose(result.gradients[name], leaves[name].grad.numpy(), rtol=1e-9)


def test_flash_backward_computes_five_matmuls_and_saves_logsumexp():
    with cg.Graph("g") as g:
        q, k, v = (g.input(n, (B, H, S, K), grad=True) for n in "qkv")
        g.output(squares(cg.attention(q, k, v, causal=True)))
    step = cg.backward(g)
    whole = 2 * B * H * S**2 * K  # one product over the full square
    assert cg.matmul_flops(g, count="full") == 2 * whole
    assert cg.costs(step, count="full").filter(phase="backward", kind="matmul").total().flops.equals(5 * whole)
    rows = [r for r in cg.lifetimes(step) if r.bytes == 4 * B * H * S]  # the logsumexp of each row, in fp32
    assert len(rows) == 1
    assert rows[0].dies.startswith("attention/attention_backward")


def test_norms_save_input_and_fp32_statistics():
    with cg.Graph("g", dtype="bf16") as g:
        x = g.input("x", (B, S, D))
        y = cg.layer_norm(cg.linear(x, "b s d -> b s e", e=D))
        g.output(squares(cg.linear(y, "b s d -> b s f", f=F)))
    saved = {r.tensor: r.bytes for r in cg.lifetimes(cg.backward(g)) if r.dies and r.dies.endswith("norm_backward")}
    assert sorted(map(str, saved.values())) == sorted(["2*B*D*S", "4*B*S", "4*B*S", "2*B*D*S"])  # x, mean, 1/std, dy


def test_non_differentiable_ops_raise():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D), grad=True)
        g.output(mean(cg.opaque("fft", [x], (B, D), flops=5 * B * D)))
    with pytest.raises(UnsupportedError, match="fft"):
        cg.backward(g)


def test_graph_without_loss_raises():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B, D), grad=True)))
    with pytest.raises(GraphError, match="backward of graph 'g': 0 scalar outputs, expected one, the loss"):
        cg.backward(g)
    with cg.Graph("g") as g:
        g.output(mean(cg.relu(g.input("x", (B, D)))))
    with pytest.raises(GraphError, match="nothing requires a gradient, expected a trainable parameter"):
        cg.backward(g)
    with pytest.raises(GraphError, match=r"backward: checkpoint is 'all', expected a checkpoint"):
        cg.backward(chain(), checkpoint="all")


def test_convnet_gradients_match_torch():
    torch = pytest.importorskip("torch")
    with cg.Graph("cnn") as g:
        x = g.input("x", (2, 3, 9, 7))
        y = cg.conv(x, "b c h w -> b o h w", window=3, padding=1, bias=True, o=5, name="one")
        y = cg.nn.pool(cg.relu(y), "max", window=2, stride=2)
        y = cg.conv(y, "b c h w -> b o h w", window=(2, 3), stride=2, groups=5, o=5, name="two")
        y = cg.nn.pool(y, "mean", window=(2, 1))
        g.output(squares(cg.linear(cg.rearrange(y, "b c h w -> b (c h w)"), "b d -> b e", e=11, name="head")))
    step = cg.backward(g)
    rng = np.random.default_rng(2)
    given = {t.name: rng.normal(size=[int(n) for n in t.shape]) for t in step.tensors if t.producer is None}
    result = run(step, given)
    w = {n: torch.tensor(v, requires_grad=n != "x") for n, v in given.items()}
    y = torch.nn.functional.conv2d(w["x"], w["one/weight"], w["one/bias"], padding=1)
    y = torch.nn.functional.max_pool2d(torch.relu(y), 2, 2)
    y = torch.nn.functional.conv2d(y, w["two/weight"], stride=2, groups=5)
    y = torch.nn.functional.avg_pool2d(y, (2, 1))
    ((y.flatten(1) @ w["head/weight"]) ** 2).mean().backward()
    for name, grad in result.gradients.items():
        np.testing.assert_allclose(grad, w[name].grad.numpy(), rtol=1e-9, atol=1e-12, err_msg=name)
    positions = [r for r in cg.lifetimes(step) if r.tensor.endswith(".places")]
    assert [r.bytes for r in positions] == [8 * 2 * 5 * 4 * 3]  # the argmax positions, as int64
