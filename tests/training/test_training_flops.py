"""FLOPs of a step: exact agreement with torch's counter, and 6ND as the leading term."""

import pytest
import sympy
from shared import load, training_step

import costgraph as cg
from costgraph import models

FAMILIES = {
    "gpt2": [
        {"D": 35, "H": 5, "F": 53, "L": 3, "V": 101, "P": 23},
        {"D": 77, "H": 11, "F": 19, "L": 1, "V": 13, "P": 47},
        {"D": 39, "H": 3, "F": 127, "L": 2, "V": 59, "P": 19},
    ],
    "llama-2-7b": [
        {"D": 37, "H": 6, "G": 3, "K": 14, "F": 53, "L": 3, "V": 101},
        {"D": 41, "H": 5, "G": 1, "K": 6, "F": 97, "L": 1, "V": 17},
        {"D": 31, "H": 7, "G": 7, "K": 10, "F": 11, "L": 2, "V": 59},
    ],
    "mlp": [
        {"D": 31, "F": 53, "L": 3, "C": 11},
        {"D": 7, "F": 101, "L": 1, "C": 2},
        {"D": 97, "F": 5, "L": 4, "C": 13},
    ],
}
CORE_OPS = [f"attention/{op}" for op in ("scores", "scale", "mask", "softmax", "reduce")]
CASES = [(name, sizes) for name, rows in FAMILIES.items() for sizes in rows]
BATCHES = [(2, 17), (5, 13), (1, 19)]


def counted(name, sizes, B, S, again=None):
    """Return forward and backward FLOPs from torch's counter on meta tensors, with optional recomputation."""
    torch = pytest.importorskip("torch")
    import plain_models
    from torch.utils.flop_counter import FlopCounterMode

    plain = {"gpt2": plain_models.GPT2, "llama-2-7b": plain_models.Llama, "mlp": plain_models.Perceptron}[name]
    with torch.device("meta"), plain_models.checkpointed(again):
        module = plain(**sizes)
        ids = torch.zeros((B, S), dtype=torch.int64) if name != "mlp" else torch.zeros((B, sizes["D"]))
        targets = torch.zeros((B, S) if name != "mlp" else (B,), dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            loss = plain_models.loss_of(module, ids, targets)
            forward = counter.get_total_flops()
            loss.backward()
    return forward, counter.get_total_flops() - forward


def bound(sizes, B, S):
    return {**sizes, "B": B} if "C" in sizes else {**sizes, "B": B, "S": S}


def matmuls(step, phase, count, sizes):
    return cg.costs(step, count=count, **sizes).filter(kind="matmul", phase=phase).total().matmul


@pytest.mark.parametrize(
    ("name", "sizes", "B", "S"), [(*case, *BATCHES[i % len(BATCHES)]) for i, case in enumerate(CASES)]
)
def test_matmul_flops_match_torch_counter(name, sizes, B, S):
    step = training_step(load(name, attention="eager", symbolic=True))
    derived = [matmuls(step, phase, "full", bound(sizes, B, S)) for phase in ("forward", "backward")]
    assert tuple(derived) == counted(name, sizes, B, S)
    assert sum(derived) == cg.matmul_flops(step, count="full", **bound(sizes, B, S))


@pytest.mark.parametrize(("name", "sizes"), [(n, sizes) for n in ("gpt2", "llama-2-7b") for sizes in FAMILIES[n][:2]])
@pytest.mark.parametrize(
    ("again", "policy"), [("layers", cg.every_block()), ("core", cg.selective(*CORE_OPS))], ids=["layers", "core"]
)
def test_recomputed_matmuls_match_torch_checkpoint(name, sizes, again, policy):
    step = training_step(load(name, attention="eager", symbolic=True), checkpoint=policy)
    B, S = 2, 17
    derived = [matmuls(step, phase, "full", bound(sizes, B, S)) for phase in ("forward", "recompute", "backward")]
    forward, rest = counted(name, sizes, B, S, again)
    assert (derived[0], derived[1] + derived[2]) == (forward, rest)
    assert derived[1] > 0


@pytest.mark.parametrize(("H", "G"), [(5, 5), (6, 2), (7, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_kernel_flops_match_torch_formula(H, G, causal):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    B, S, K = 3, 31, 8
    with cg.Graph("g", dtype="bf16") as g:
        q = g.param("q", (B, H, S, K))
        k, v = (g.param(name, (B, G, S, K)) for name in "kv")
        g.output(cg.reduce(cg.attention(q, k, v, causal=causal), "b h s k -> ", "sum"))
    step = cg.training_step(g)
    forward, backward = (matmuls(step, phase, "full", {}) for phase in ("forward", "backward"))
    # torch's kernel takes equal numbers of key and query heads
    shape = (B, H, S, K)
    q, k, v = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for _ in range(3))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    with FlopCounterMode(display=False) as counter:
        out, lse, cq, ck, mq, mk, *rng, _ = flash(q, k, v, 0.0, causal)
        theirs = counter.get_total_flops()
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, lse, cq, ck, mq, mk, 0.0, causal, *rng
        )
    assert forward == theirs
    assert backward == counter.get_total_flops() - theirs
    assert 2 * backward == 5 * forward


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b"])
@pytest.mark.parametrize("count", ["full", "executed"])
def test_flash_backward_recomputes_attention_scores(name, count):
    flash, eager = (training_step(load(name, attention=a, symbolic=True)) for a in ("flash", "eager"))
    assert matmuls(flash, "forward", "full", {}) == matmuls(eager, "forward", "full", {})
    pairs = sum(
        cg.costs(flash, count=count).filter(phase="forward", kind="matmul", scope=s).total().matmul for s in CORE
    )
    rest = matmuls(flash, "forward", count, {}) - pairs
    assert sympy.expand(matmuls(flash, "backward", count, {}) - 2 * rest - sympy.Rational(5, 2) * pairs) == 0


# both matmuls of attention
CORE = ("layers/attention/scores", "layers/attention/reduce")


def size_of(graph, wanted):
    """Return the number of selected parameters, counting each once per layer that has it."""
    depth = next(op for op in graph.ops if op.loop is not None)
    counts = {depth.body: depth.kind.count.expr}
    return sum(counts.get(t.graph, 1) * sympy.prod(t.shape) for t in graph.params if wanted(t.name))


def is_vector(name):
    return name.endswith(("bias", "norm/weight"))


@pytest.mark.parametrize("kernel", ["eager", "flash"])
def test_6nd_is_leading_term_for_gpt2(kernel):
    B, S, D, L, P = cg.dims("B S D L P")
    model = load("gpt2", attention=kernel, symbolic=True)
    step = training_step(model)
    # parameters that multiply tokens: no positions, which are looked up, and no gains or biases
    N = size_of(model, lambda name: name != "positions/table" and not is_vector(name))
    assert sympy.expand(cg.param_count(model) - N - D * P - size_of(model, is_vector)) == 0
    # attention: S*S pairs in two matmuls, once forward and twice backward; flash recomputes the scores
    full = {"eager": 12, "flash": 14}[kernel]
    assert cg.matmul_flops(step, count="full") == sympy.expand(6 * N * B * S + full * B * L * D * S**2)
    if kernel == "flash":  # half of the pairs are visible, plus the diagonal
        assert cg.matmul_flops(step) == sympy.expand(6 * N * B * S + 7 * B * L * D * S * (S + 1))
    assert sympy.limit(cg.matmul_flops(step) / (6 * N * B * S), D, sympy.oo) == 1


@pytest.mark.parametrize("kernel", ["eager", "flash"])
def test_6nd_is_leading_term_for_llama(kernel):
    B, S, D, H, K, L, V = cg.dims("B S D H K L V")
    model = load("llama-3-8b", attention=kernel, symbolic=True)
    step = training_step(model)
    # the embedding is looked up, and the head is a separate table
    N = size_of(model, lambda name: name != "tokens/table" and not is_vector(name))
    assert cg.param_count(model) == sympy.expand(N + D * V + 2 * L * D + D)
    full = {"eager": 12, "flash": 14}[kernel]
    assert cg.matmul_flops(step, count="full") == sympy.expand(6 * N * B * S + full * B * L * H * K * S**2)
    if kernel == "flash":
        assert cg.matmul_flops(step) == sympy.expand(6 * N * B * S + 7 * B * L * H * K * S * (S + 1))


def test_6nd_error_for_llama_3_8b():
    model = load("llama-3-8b")
    S = 8192
    exact, rule = cg.matmul_flops(training_step(model), B=1, S=S), 6 * cg.param_count(model) * S
    # per token, 7*L*H*K*(S + 1) more for attention and 6*D*V less for the embedding lookup
    assert exact - rule == S * (7 * 32 * 32 * 128 * (S + 1) - 6 * 4096 * 128256 - 6 * (2 * 32 + 1) * 4096)
    assert exact / rule == pytest.approx(1.0906, abs=1e-4)


@pytest.mark.parametrize("depth", [2, 3])
def test_alternating_layers_are_each_recomputed(depth):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    fields = {
        "hidden_size": 21, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 19,
        "num_hidden_layers": depth, "vocab_size": 11, "sliding_window": 3, "use_cache": False,
    }  # fmt: skip
    config = transformers.Gemma2Config(**fields, attn_implementation="eager")
    module = transformers.Gemma2ForCausalLM(config).train()
    module.activation_checkpointing_enable()
    ids = torch.zeros((2, 7), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        module(ids, labels=ids).loss.backward()
    model = models.from_config({**config.to_dict(), "architectures": ["Gemma2ForCausalLM"]}, attention="eager")
    step = cg.training_step(model, checkpoint=cg.every_block())
    assert cg.matmul_flops(step, count="full", B=2, S=7) == counter.get_total_flops()
