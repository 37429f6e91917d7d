"""The zoo's declarations against transformers modules with the same config: values and peaks.

Modules are traced once with symbolic sizes, with weights on the meta device, so that widths are the published ones.
"""

import re
from functools import cache

import pytest
import torch
from lazy import lazy_import
from shared import load

import costgraph as cg
from costgraph.torch import lower, trace

transformers = lazy_import("transformers")

GPT2 = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GROUPED = {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
#: A reduced vocabulary size: the full one would determine a shallow model's peak.
FEW = 1009
MODELS = {
    "gpt2": {**GPT2, "n_positions": 2048}, "gpt2 of few words": {**GPT2, "n_positions": 2048, "vocab_size": FEW},
    "llama-2-7b": {}, "llama-3-8b": GROUPED,
}  # fmt: skip
#: The tests do not depend on the depth, unless a test says so.
SHALLOW = 2
SIZES = [(1, 128), (2, 513), (8, 1024), (4, 2048)]
OPTIMIZERS = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "for-loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
}
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Loss(torch.nn.Module):
    """A language model that returns logits, or the loss if targets are given."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, targets=None):
        logits = self.model(ids, use_cache=False).logits
        return logits if targets is None else torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def reference(name, options, dtype=torch.float32):
    if name.startswith("gpt2"):
        config, model = transformers.GPT2Config, transformers.GPT2LMHeadModel
    else:
        config, model = transformers.LlamaConfig, transformers.LlamaForCausalLM
    return model._from_config(config(**options, attn_implementation="eager"), dtype=dtype)


@cache
def traced(name, optimizer=None, dtype="fp32", layers=SHALLOW):
    with torch.device("meta"):
        module = Loss(reference(name, {**MODELS[name], "num_hidden_layers": layers}, FORMATS[dtype]))
    ids = torch.zeros(3, 17, dtype=torch.long)
    if optimizer is None:
        return trace(module, ids, dims=[("B", "S")])
    return trace(module, ids, ids, dims=[("B", "S")] * 2, train=True, optimizer=OPTIMIZERS[optimizer])


def declared(name, optimizer=None, dtype="fp32", layers=SHALLOW):
    g = cg.models.load(name.split()[0], attention="eager", dtype=dtype, eager_ops=True)  # it is modified
    sizes = {"L": layers} | ({"P": 2048} if name.startswith("gpt2") else {}) | ({"V": FEW} if "few" in name else {})
    with g:
        g.defaults.update(sizes)
    return g if optimizer is None else cg.training_step(g, optimizer=cg.AdamW(implementation=optimizer))


def counters(name, layers=SHALLOW):
    """Return the bytes of the optimizer's step counters: 4 per parameter tensor."""
    return 4 * (12 * layers + 4 if name.startswith("gpt2") else 9 * layers + 3)


# -- peaks -------------------------------------------------------------------------------------------------------


FORWARD = [("llama-3-8b", "bf16")]
OTHERS = [("gpt2", "fp32"), ("gpt2", "bf16"), ("llama-2-7b", "fp32"), ("llama-2-7b", "bf16"), ("llama-3-8b", "fp32")]


@pytest.mark.parametrize(("name", "dtype"), FORWARD + [pytest.param(*c, marks=pytest.mark.long) for c in OTHERS])
def test_forward_peak_equals_the_traced_module(name, dtype):
    g, d = traced(name, dtype=dtype), declared(name, dtype=dtype)
    assert cg.param_count(d) == cg.param_count(g)
    for B, S in SIZES:
        assert cg.matmul_flops(d, count="full", B=B, S=S) == cg.matmul_flops(g, count="full", B=B, S=S)
        assert cg.peak_memory(d, B=B, S=S) == cg.peak_memory(g, B=B, S=S)


def assert_peak_equals_trace(name, optimizer, dtype, layers, most=0, statistics=0, sizes=SIZES):
    """Compare a step's peak with the trace's: up to `most` bytes below it, some above it per row."""
    g, d = traced(name, optimizer, dtype, layers), declared(name, optimizer, dtype, layers)
    assert cg.param_count(d) == cg.param_count(g)
    for B, S in sizes:
        assert cg.matmul_flops(d, count="full", B=B, S=S) == cg.matmul_flops(g, count="full", B=B, S=S)
        missing = cg.peak_memory(g, B=B, S=S) + statistics * B * S - cg.peak_memory(d, B=B, S=S)
        # besides counters, backward() starts from the gradient of the loss, at most 4 bytes
        assert counters(name, layers) <= missing <= counters(name, layers) + 4 + most


@pytest.mark.parametrize("name", [pytest.param("llama-2-7b", marks=pytest.mark.long), "llama-3-8b"])
def test_step_peak_equals_the_traced_module(name):
    assert_peak_equals_trace(name, "foreach", "fp32", SHALLOW)


@pytest.mark.long
def test_tied_embedding_step_peak_equals_the_module():
    assert_peak_equals_trace("gpt2 of few words", "foreach", "fp32", SHALLOW)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "llama-3-8b"])
def test_for_loop_optimizer_step_peak_equals_the_module(name):
    # a loop variable holds the previous parameter's denominator: at the head, a norm's
    assert_peak_equals_trace(name, "for-loop", "fp32", SHALLOW, most=0 if name == "gpt2" else 4 * 4096)


@pytest.mark.long
def test_bf16_step_peak_equals_the_module():
    assert_peak_equals_trace("llama-3-8b", "foreach", "bf16", SHALLOW)


def test_declared_norm_statistics_are_fp32_unlike_on_a_cpu():
    # mean and reciprocal standard deviation per row: 4 bytes each, not 2
    norms = 2 + 1
    assert_peak_equals_trace("gpt2", "for-loop", "bf16", 1, statistics=4 * norms, sizes=SIZES[1:])
    assert_peak_equals_trace("gpt2", "for-loop", "bf16", 1, sizes=SIZES[:1])  # the update determines the peak


def test_tied_embedding_gradients_accumulate_out_of_place():
    # the head's gradient is a view whose base autograd holds, so it cannot accumulate in place
    B, S = 1, 128
    g, d = (cg.timeline(make("gpt2", "foreach"), B=B, S=S) for make in (traced, declared))
    assert re.fullmatch(r"model/transformer/add_\d+", g.op)
    table, gradient = 4 * 50257 * 768, 4 * B * S * 768
    # both gradients are live, and that of the looked-up rows
    before = [m.bytes for m in d.moments if m.phase == "backward"][-1]
    assert g.peak - (before + table - gradient) in (counters("gpt2"), counters("gpt2") + 4)
    assert g.peak > d.peak


# -- checkpointed layers -----------------------------------------------------------------------------------------------

STATE = 5056  # bytes of a CPU's RNG state, which a checkpoint saves
#: Layers, and RNG states of checkpoints at the peak that a declaration lacks.
AGAIN = {"llama-2-7b": (2, 1), "llama-3-8b": (2, 2)}


@pytest.mark.long  # 3 s
@pytest.mark.parametrize("name", AGAIN)
def test_checkpointed_step_peak_equals_the_module(name):
    layers, states = AGAIN[name]
    with torch.device("meta"):
        model = reference(name, {**MODELS[name], "num_hidden_layers": layers})
        model.activation_checkpointing_enable()
        module = Loss(model.train())
    ids = torch.zeros(3, 17, dtype=torch.long)
    dims = [("B", "S")] * 2
    g = trace(module, ids, ids, dims=dims, train=True, optimizer=OPTIMIZERS["foreach"])
    d = cg.models.load(name, attention="eager", dtype="fp32", eager_ops=True)
    with d:
        d.defaults["L"] = layers
    d = cg.training_step(d, optimizer=cg.AdamW(implementation="foreach"), checkpoint=cg.every_block())
    for B, S in [(8, 1024), (4, 2048)]:
        assert cg.matmul_flops(d, count="full", B=B, S=S) == cg.matmul_flops(g, count="full", B=B, S=S)
        missing = cg.peak_memory(g, B=B, S=S) - cg.peak_memory(d, B=B, S=S)
        assert missing == counters(name, layers) + 4 + states * STATE + 8 * S  # positions, which no layer reads
    for B, S in [(1, 128), (2, 513)]:  # the update determines the peak
        assert cg.peak_memory(g, B=B, S=S) - cg.peak_memory(d, B=B, S=S) == counters(name, layers)


# -- values ------------------------------------------------------------------------------------------------------

TINY_GPT2 = {"n_embd": 12, "n_head": 3, "n_inner": 20, "n_layer": 2, "n_positions": 7, "vocab_size": 11}
TINY_LLAMA = {
    "hidden_size": 12, "num_attention_heads": 6, "head_dim": 4, "intermediate_size": 20, "num_hidden_layers": 2,
    "vocab_size": 11,
}  # fmt: skip
TINY = {
    "gpt2": ({**GPT2, **TINY_GPT2}, {"D": 12, "H": 3, "F": 20, "L": 2, "P": 7, "V": 11}),
    "llama-2-7b": (
        {**TINY_LLAMA, "num_key_value_heads": 6},
        {"D": 12, "H": 6, "K": 4, "F": 20, "L": 2, "V": 11},
    ),
    "llama-3-8b": (
        {**TINY_LLAMA, "num_key_value_heads": 3},
        {"D": 12, "H": 6, "G": 3, "K": 4, "F": 20, "L": 2, "V": 11},
    ),
}
#: Names of the reference's modules and the declaration's; Llama's linear layers are transposed.
NAMES = {
    "transformer.wte": "tokens.table", "transformer.wpe": "positions.table", "transformer.ln_f": "norm",
    "ln_1": "attention.norm", "attn.c_attn": "attention.kqv", "attn.c_proj": "attention.proj", "ln_2": "mlp.norm",
    "mlp.c_fc": "mlp.ffw1", "mlp.c_proj": "mlp.ffw2",
    "model.embed_tokens": "tokens.table", "model.norm": "norm", "lm_head": "head", "input_layernorm": "attention.norm",
    "self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.proj", "post_attention_layernorm": "mlp.norm", "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down", "model.rotary_emb": "rope",
}  # fmt: skip


def renamed(name):
    """Return the declared name of a reference tensor."""
    module, _, what = name.rpartition(".")
    layer = re.fullmatch(r"(?:transformer\.h|model\.layers)\.(\d+)\.(.*)", module)
    own = f"layers.{NAMES[layer[2]]}" if layer else NAMES[module]
    return own + ("" if own.endswith("table") else f".{what}") + (f".{layer[1]}" if layer else "")


def numbers(model):
    """Return the reference's tensors in the declaration's layout."""
    out = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        turned = (t.ndim == 2 and "_proj" in name and "c_proj" not in name) or name == "lm_head.weight"
        out[renamed(name)] = t.detach().T if turned else t.detach()
    return out


@pytest.mark.parametrize("name", sorted(TINY))
def test_composed_model_computes_the_modules_values(name):
    options, sizes = TINY[name]
    torch.manual_seed(5)
    model = reference(name, options)
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 1.0  # the score scale is declared as 1, which does not affect the cost
    ids = torch.randint(0, 11, (2, 5))
    graph = load(name, symbolic=True, attention="eager", dtype="fp32", eager_ops=True)
    run = lower(graph, B=2, S=5, **sizes)
    given = numbers(model)
    assert given.keys() == run.state_dict().keys()
    run.load_state_dict({k: given[k].reshape(t.shape) for k, t in run.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(run(ids), model(ids, use_cache=False).logits)
