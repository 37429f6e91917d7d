"""Decoders with experts against small transformers modules: FLOPs, parameters, steps, values."""

import inspect
from functools import cache

import pytest
import torch
from lazy import lazy_import
from recorded_counts import counts_of
from shared import load
from torch.utils.flop_counter import FlopCounterMode
from zoo_moe import CONFIGS, SIZES, Logits, config, tokens

import costgraph as cg
from costgraph.torch import lower, trace

transformers = lazy_import("transformers")
torch.set_num_threads(1)

B, S = SIZES["B"], SIZES["S"]
MIXTRAL, QWEN2, QWEN3, GPT, SECOND, THIRD = CONFIGS
#: Two query heads share a KV head; a token meets 2 of 5 experts.
SMALL = {
    "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 23,
    "num_hidden_layers": 3, "vocab_size": 29, "num_experts_per_tok": 2,
}  # fmt: skip
LOCAL = {**SMALL, "num_local_experts": 5}
QWEN = {**SMALL, "num_experts": 5, "moe_intermediate_size": 7}
SHARED = {**QWEN, "shared_expert_intermediate_size": 11}
LATENT = {
    "hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 23,
    "num_hidden_layers": 3, "vocab_size": 29, "num_experts_per_tok": 3, "moe_intermediate_size": 7,
    "n_routed_experts": 6, "n_shared_experts": 2, "kv_lora_rank": 10, "q_lora_rank": 11, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6, "v_head_dim": 7, "first_k_dense_replace": 1,
}  # fmt: skip
GROUPS = {"n_group": 3, "topk_group": 2}
LIMITED = {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
FULL, SLIDING = "full_attention", "sliding_attention"
TIED = {"tie_word_embeddings": True}

VARIANTS = {
    "mixtral": (MIXTRAL, LOCAL),
    "mixtral heads": (MIXTRAL, {**LOCAL, "head_dim": 10, "num_key_value_heads": 4, **TIED}),
    "mixtral window": (MIXTRAL, {**LOCAL, "sliding_window": 5, "hidden_act": "gelu"}),
    "mixtral all experts": (MIXTRAL, {**LOCAL, "num_experts_per_tok": 5}),
    "mixtral one expert": (MIXTRAL, {**LOCAL, "num_experts_per_tok": 1, "num_local_experts": 1}),
    "qwen2": (QWEN2, SHARED),
    "qwen2 biases": (QWEN2, {**SHARED, "qkv_bias": False, "norm_topk_prob": True, **TIED}),
    "qwen2 every other": (QWEN2, {**SHARED, "decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "qwen3": (QWEN3, QWEN),
    "qwen3 heads": (QWEN3, {**QWEN, "head_dim": 10, "attention_bias": True, "norm_topk_prob": True}),
    "qwen3 first dense": (QWEN3, {**QWEN, "mlp_only_layers": [0], **TIED}),
    "qwen3 some dense": (QWEN3, {**QWEN, "num_hidden_layers": 5, "mlp_only_layers": [3], "decoder_sparse_step": 2}),
    "qwen3 window": (QWEN3, {**QWEN, "use_sliding_window": True, "sliding_window": 5}),
    "gpt-oss": (GPT, {**LOCAL, "sliding_window": 5, "head_dim": 6}),
    "gpt-oss even": (GPT, {**LOCAL, "num_hidden_layers": 4, "head_dim": 6, "attention_bias": False, **TIED}),
    "gpt-oss pattern": (GPT, {**LOCAL, "head_dim": 6, "layer_types": [FULL, SLIDING, SLIDING]}),
    "gpt-oss full": (GPT, {**LOCAL, "head_dim": 6, "layer_types": [FULL] * 3}),
    "deepseek-v2": (SECOND, {**LATENT, **LIMITED}),
    "deepseek-v2 lite": (SECOND, {**LATENT, "q_lora_rank": None}),
    "deepseek-v2 biases": (SECOND, {**LATENT, "attention_bias": True, "first_k_dense_replace": 2, **TIED}),
    "deepseek-v2 none dense": (SECOND, {**LATENT, "first_k_dense_replace": 0, "num_hidden_layers": 2}),
    "deepseek-v3": (THIRD, {**LATENT, **GROUPS}),
    "deepseek-v3 lite": (THIRD, {**LATENT, **GROUPS, "q_lora_rank": None, "norm_topk_prob": False}),
    "deepseek-v3 one group": (THIRD, {**LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False}),
}  # fmt: skip


def made(name, implementation="grouped_mm"):
    classes, fields = VARIANTS[name]
    settings = config(classes, **fields)
    settings._experts_implementation = implementation
    return settings


@cache
def graph_of(name, **options):
    return cg.models.from_config(made(name).to_dict(), **options)


# -- forward ---------------------------------------------------------------------------------------------------------


#: One of each family, for tests slower than counting.
STEPS = ["mixtral", "qwen2 every other", "qwen3 heads", "gpt-oss", "deepseek-v2", "deepseek-v3"]


def counted(name):
    """Return torch's counts of a module that loops over its experts, T*k rows in all: parameters and matmul FLOPs."""
    torch.manual_seed(0)
    looped = getattr(transformers, made(name).architectures[0])(made(name, "eager")).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        looped(*tokens())
    return sum(p.numel() for p in looped.parameters()), counter.get_total_flops()


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_small_moe_config_counts_equal_the_module(name):
    g = graph_of(name, attention="eager")
    counts = cg.param_count(g), cg.matmul_flops(g, count="full", **SIZES)
    assert counts == counts_of("moe", name, counted, live=name in STEPS)


@pytest.mark.long
def test_moe_module_counts_equal_the_record():
    for name in VARIANTS:
        assert counted(name) == counts_of("moe", name, counted, live=False), name


@pytest.mark.parametrize("name", STEPS)
def test_small_moe_config_counts_equal_the_trace(name):
    """Traced with a grouped matmul for all experts, which torch's counter does not know."""
    seen = trace(Logits(made(name)).eval(), *tokens())
    g = graph_of(name, attention="flash")
    assert cg.param_count(g) == cg.param_count(seen)
    assert cg.matmul_flops(g, count="full", **SIZES) == cg.matmul_flops(seen, count="full")


@pytest.mark.parametrize(
    "name", ["mixtral window", "qwen2", "qwen3 some dense", "gpt-oss", "deepseek-v2", "deepseek-v3"]
)
def test_saved_moe_config_loads_the_same_graph(name, tmp_path):
    """transformers omits the fields that have the default of their class."""
    made(name).save_pretrained(tmp_path)
    g, same = cg.models.from_config(tmp_path), graph_of(name)
    assert g.defaults == same.defaults
    assert cg.flops(g) == cg.flops(same)
    assert cg.param_count(g) == cg.param_count(same)


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_moe_step_matmul_flops_equal_autograd(name):
    torch.manual_seed(0)
    reference = getattr(transformers, made(name).architectures[0])(made(name, "eager")).train()
    with FlopCounterMode(display=False) as counter:
        logits = reference(*tokens()).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(B * S, dtype=torch.int64)).backward()
    g = graph_of(name, attention="eager")
    step = cg.training_step(g, optimizer=cg.SGD())
    assert cg.matmul_flops(step, count="full", **SIZES) == counter.get_total_flops()


# -- inference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "new"),
    [("mixtral", 3), ("qwen3 some dense", 1), ("gpt-oss full", 3), ("deepseek-v2 lite", 3), ("deepseek-v3", 1)],
)
def test_moe_decode_step_counts_equal_the_cached_module(name, new):
    torch.manual_seed(0)
    reference = getattr(transformers, made(name).architectures[0])(made(name, "eager")).eval()
    ids = tokens()[0]
    with torch.no_grad():
        cache = reference(ids[:, : S - new], use_cache=True).past_key_values
        # transformers 5.24 renamed the argument, and warns about the old name
        known = inspect.signature(reference.forward).parameters
        given = {"cache" if "cache" in known else "past_key_values": cache}
        with FlopCounterMode(display=False) as counter:
            reference(ids[:, S - new :], **given, use_cache=True)
    step = cg.decode(graph_of(name, attention="eager"), new)
    assert cg.matmul_flops(step, count="full", **SIZES) == counter.get_total_flops()
    held = sum(t.numel() for layer in cache.layers for t in (layer.keys, layer.values))
    assert cg.cache_bytes(step, **SIZES) == 2 * held  # the graph is in bf16


# -- values ------------------------------------------------------------------------------------------------------------


def test_lowered_mixture_equals_the_module():
    torch.manual_seed(0)
    settings = made("mixtral", "eager")
    block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(settings).eval()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.5)
    D = settings.hidden_size
    with cg.Graph("g") as g:
        x = g.input("x", (B, S, D))
        g.output(
            cg.nn.moe(
                x, settings.num_local_experts, settings.num_experts_per_tok, settings.intermediate_size, normalize=True
            )
        )
    module = lower(g)
    given = {
        "moe.router.gate.weight": block.gate.weight.t(),
        "moe.experts.gate_up": block.experts.gate_up_proj.transpose(1, 2),
        "moe.experts.down": block.experts.down_proj.transpose(1, 2),
    }
    state = module.state_dict()
    assert state.keys() == given.keys()
    for name, t in state.items():
        t.copy_(given[name].detach())
    inputs = torch.randn(B, S, D)
    with torch.no_grad():
        torch.testing.assert_close(module(inputs.clone()), block(inputs))


def test_both_forms_of_latent_attention_are_equal():
    torch.manual_seed(0)

    def layer(absorbed, kernel):
        with cg.Graph("g") as g:
            x = g.input("x", (B, S, 20))
            rope = cg.nn.rotary_tables(cg.ops.arange(S), 6)
            y = cg.nn.latent_attention(
                x, 4, latent=9, nope=5, rotated=6, value=7, rope=rope, query_latent=11, absorbed=absorbed, kernel=kernel
            )
            g.output(y)
        return lower(g)

    modules = [layer(absorbed, kernel) for absorbed in (False, True) for kernel in ("flash", "eager")]
    state = {n: torch.randn(t.shape) * 0.3 for n, t in modules[0].state_dict().items()}
    inputs = torch.randn(B, S, 20)
    results = []
    for module in modules:
        for n, t in module.state_dict().items():
            t.copy_(state[n])
        results.append(module(inputs.clone()))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-5)


# -- full size: test_zoo_page.py traces the modules --------------------------------------------------------------------


#: One preset for each set of config fields: the others differ only in numbers.
WRITTEN = {(c, *sorted(fields)): (c, name) for c, published in CONFIGS.items() for name, fields in published.items()}


@pytest.mark.parametrize(("classes", "name"), sorted(WRITTEN.values()))
def test_moe_preset_equals_its_published_config(classes, name):
    g, preset = cg.models.from_config(config(classes, **CONFIGS[classes][name]).to_dict()), load(name)
    assert g.defaults == preset.defaults
    assert cg.param_count(g) == cg.param_count(preset)
    assert cg.flops(g) == cg.flops(preset)
