"""Bytes saved for the backward pass, after Korthikanti et al. 2022 (arXiv 2205.05198)."""

from functools import cache

import pytest
import sympy
from shared import load, training_step

import costgraph as cg

B, S, D, H, L, V, K = cg.dims("B S D H L V K")
# mean and scale of two norms in fp32, which the paper neglects
STATISTICS = 16 * B * S
SQUARES = 5 * B * H * S**2


def block(x):
    """Layer of section 4.1; comments give the bytes that each part saves, in units of B*S*D."""
    y = cg.layer_norm(x, name="attention/norm")  # 2, its input
    qkv = cg.linear(y, "b s d -> b s n h k", n=3, h=H, k=D / H, bias=True, name="attention/kqv")  # 2, its input
    q, k, v = (cg.rearrange(part, "b s 1 h k -> b h s k") for part in cg.ops.split(qkv, (1, 1, 1), 2))  # 6
    y = cg.attention(q, k, v, kernel="eager", p=0.1, name="core")  # 5*H*S/D: softmax, dropout, and its mask
    y = cg.rearrange(y, "b h s k -> b s (h k)", name="attention/merge")
    y = cg.linear(y, "b s e -> b s d", d=D, bias=True, name="attention/proj")  # 2, its input
    x = x + cg.dropout(y, 0.1)  # 1, its mask
    y = cg.layer_norm(x, name="mlp/norm")  # 2
    y = cg.linear(y, "b s d -> b s f", f=4 * D, bias=True, name="mlp/up")  # 2
    y = cg.linear(cg.gelu(y), "b s f -> b s d", d=D, bias=True, name="mlp/down")  # 8 for the input of each
    return x + cg.dropout(y, 0.1)  # 1


@cache
def gpt():
    with cg.Graph("gpt", dtype="bf16") as g:
        table = g.param("table", (V, D))
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), table)
        x = cg.layer_norm(cg.repeat(L, block, x, name="layers"), name="norm")
        g.output(cg.einsum(x, table, "b s d, v d -> b s v", name="head"))
        g.loss = "cross_entropy"
    return g


def test_layer_saved_bytes_match_equation_1():
    assert cg.saved_bytes(training_step(gpt()))["layers"] == 34 * B * S * D + SQUARES + STATISTICS


def test_step_lifetimes_agree_with_saved_bytes():
    step = training_step(gpt())
    backward = {op.name for op in step.walk() if op.phase == "backward"}

    def kept(depth):
        rows = [r for r in cg.lifetimes(step, L=depth) if r.role == "activation"]
        return sum(r.bytes for r in rows if str(r.dies).partition("[")[0] in backward)

    assert sympy.expand(kept(3) - kept(2)) == 34 * B * S * D + SQUARES + STATISTICS


def test_recomputing_attention_core_saves_quadratic_terms():
    step = training_step(gpt(), checkpoint=cg.selective("core"))
    assert cg.saved_bytes(step)["layers"] == 34 * B * S * D + STATISTICS


def test_recomputing_whole_layer_saves_only_its_input():
    step = training_step(gpt(), checkpoint=cg.every_block())
    assert cg.saved_bytes(step)["layers"] == 2 * B * S * D


def test_flops_match_equation_7_and_equation_8_overcounts():
    plain, selective = (training_step(gpt(), checkpoint=c) for c in (None, cg.selective("core")))
    model, hardware = (cg.matmul_flops(step, count="full") for step in (plain, selective))
    assert sympy.expand(model - 72 * B * L * S * D**2 * (1 + S / (6 * D) + V / (12 * D * L))) == 0
    # recomputation repeats the scores, but not their product with the values, as nothing reads its result
    assert sympy.expand(hardware - model) == 2 * B * L * D * S**2
    both = 72 * B * L * S * D**2 * (1 + 2 * S / (9 * D) + V / (12 * D * L))
    assert sympy.expand(hardware + 2 * B * L * D * S**2 - both) == 0
    # equation 8 charges twice as much for attention as equation 7; a third more is recomputed
    printed = 72 * B * L * S * D**2 * (1 + S / (3 * D) + V / (12 * D * L))
    assert sympy.expand(printed - both) == 8 * B * L * D * S**2


@pytest.mark.parametrize("checkpoint", [None, cg.every_block(), cg.every(2), cg.selective("attention/softmax", "mlp")])
@pytest.mark.parametrize(("name", "kernel"), [("gpt2", "eager"), ("llama-3-8b", "flash")])
def test_saved_bytes_match_live_activations_between_passes(name, kernel, checkpoint):
    step = training_step(load(name, attention=kernel, dropout=0.1, symbolic=True), checkpoint=checkpoint)
    found = cg.saved_bytes(step)
    times = {op.name: op.kind.count.expr for op in step.walk() if op.loop is not None}
    if checkpoint == cg.every(2):
        times["layers.group"] *= times["layers"]
    saved = found.pop("") + sum(times[loop] * size for loop, size in found.items())
    assert sympy.expand(saved - between_the_passes(step)) == 0


def between_the_passes(step):
    """Return the activation bytes at the start of the backward pass."""
    from costgraph.analysis.liveness import play

    program = play(step)
    begins = next(i for i, s in enumerate(program.steps) if s.op.phase == "backward")
    alive = [
        life.bytes.expr
        for life in program.lives
        if life.role == "activation" and life.born < begins and life.dies >= begins
    ]
    return sympy.expand(sum(alive))


def test_only_one_micro_batch_is_saved_at_a_time():
    model = load("gpt2", symbolic=True)
    once, thrice = (cg.saved_bytes(training_step(model, accumulate=n)) for n in (1, 3))
    assert thrice == {"": 0, "microbatches": once[""], "layers": once["layers"]}


def test_forward_graph_is_refused():
    with pytest.raises(cg.GraphError, match="saved_bytes: graph 'gpt2' has no backward pass"):
        cg.saved_bytes(load("gpt2"))


def test_saved_bytes_bind_sizes():
    step = training_step(gpt())
    sizes = {"B": 2, "S": 3, "D": 10, "H": 5}
    assert cg.saved_bytes(step, **sizes)["layers"] == 34 * 60 + 5 * 2 * 5 * 9 + 16 * 6
    with pytest.raises(cg.BindingError, match="X"):
        cg.saved_bytes(step, X=3)
    with pytest.raises(cg.GraphError, match="saved_bytes"):
        cg.saved_bytes("gpt2")


@pytest.mark.parametrize(("act", "held"), [(cg.tanh, True), (lambda x: -x, False)])
def test_captured_tensors_live_until_recomputed_block_ends(act, held):
    # A weak reference shows the same for torch's checkpoint: the mask dies after the forward pass if no op of the block
    # saves a tensor, as no hook then refers to the block's frame; otherwise it dies when the gradient leaves the block.
    B, D = cg.dims("B D")
    with cg.Graph("g") as g:
        with cg.scope("mask"):
            mask = cg.relu(g.input("m", (B, D)))
        x = cg.linear(g.input("x", (B, D)), "b d -> b e", e=D)
        with cg.scope("block"):
            x = act(x + mask)
        g.output(cg.reduce(x, "b d -> ", "mean"))
    step = cg.backward(g, checkpoint=cg.selective("block"))
    row = next(row for row in cg.lifetimes(step, B=3, D=5) if row.tensor == "mask/relu")
    assert next(op.phase for op in step.ops if op.name == row.dies) == ("backward" if held else "forward")
