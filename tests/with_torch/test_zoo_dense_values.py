"""Declared decoders run on the weights of transformers modules and compute the same logits."""

import re
from itertools import chain, groupby

import pytest
import torch
from lazy import lazy_import
from test_zoo_dense import VARIANTS
from zoo_dense import SIZES, config

import costgraph as cg
from costgraph.torch import lower

transformers = lazy_import("transformers")

SEVERAL = [
    "gpt2 inner untied", "llama biases", "mistral", "qwen2 window", "qwen3 biases", "gemma2", "gemma2 odd",
    "gemma3 rest", "gemma3 pairs", "phi3 all heads", "phi3 partial", "falcon", "falcon new biases", "falcon in turn",
    "olmo2 heads",
]  # fmt: skip
#: Reference modules by the scopes of the declarations.
NAMES = {
    "input_layernorm": "attention.norm", "ln_attn": "attention.norm", "ln_1": "attention.norm",
    "pre_feedforward_layernorm": "mlp.norm", "ln_mlp": "mlp.norm", "ln_2": "mlp.norm",
    "post_feedforward_layernorm": "mlp.norm_after",
    "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm",
    "self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v",
    "self_attn.qkv_proj": "attention.qkv", "self_attention.query_key_value": "attention.qkv",
    "attn.c_attn": "attention.kqv", "self_attn.o_proj": "attention.proj", "self_attention.dense": "attention.proj",
    "attn.c_proj": "attention.proj", "mlp.gate_up_proj": "mlp.gate_up", "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down", "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down", "mlp.c_fc": "mlp.ffw1", "mlp.c_proj": "mlp.ffw2",
}  # fmt: skip
OUTSIDE = {
    "model.embed_tokens": "tokens.table", "transformer.word_embeddings": "tokens.table",
    "transformer.wte": "tokens.table",
    "transformer.wpe": "positions.table", "model.norm": "norm", "transformer.ln_f": "norm", "lm_head": "head",
    "model.rotary_emb": "rope", "transformer.rotary_emb": "rope",
}  # fmt: skip


def places(kinds, rest, depth):
    """Return the locations of a pattern's layers in the declaration: scope prefixes and index suffixes."""

    def run(kinds, scopes, index):
        for kind, group in groupby(kinds):
            times, own = len(list(group)), f"{scopes}.{kind}{'_' if kind == 'global' else ''}"
            yield from [(own, index)] if times == 1 else [(own, (*index, i)) for i in range(times)]

    if len(set(kinds)) == 1:
        return [("layers", (i,)) for i in range(depth)]
    periods = [run(kinds, "layers", (i,)) for i in range((depth - rest) // len(kinds))]
    return [*chain(*periods), *run(kinds[:rest], "layers_rest", ())]


def unpacked(weight, settings):
    """Return Falcon's QKV rows with queries first, divided by the root that scales the scores."""
    H, K = settings.num_attention_heads, settings.head_dim
    if settings.new_decoder_architecture:
        G = settings.num_kv_heads
        parts = weight.unflatten(0, (G, H // G + 2, K))
        q, k, v = parts[:, :-2].flatten(0, 2), parts[:, -2].flatten(0, 1), parts[:, -1].flatten(0, 1)
    else:
        q, k, v = weight.split((H * K, K, K))
    return torch.cat([q / K**0.5, k, v])


def numbers(model, where):
    """Return the reference's tensors by declared name, with transposed matrices."""
    after = any("post_feedforward" in name for name, _ in model.named_modules())
    names = {**NAMES, "post_attention_layernorm": "attention.norm_after" if after else "mlp.norm"}
    gemma = model.config.model_type.startswith("gemma")
    out = {}
    for name, t in model.named_parameters():
        module, _, what = name.rpartition(".")
        layer = re.fullmatch(r"(?:transformer\.h|model\.layers)\.(\d+)\.(.*)", module)
        scopes, index = where[int(layer[1])] if layer else ("", ())
        own = f"{scopes}.{names[layer[2]]}" if layer else OUTSIDE[module]
        t = unpacked(t, model.config) if "query_key_value" in name else t
        t = t + 1 if gemma and "norm" in module else t
        turned = t.ndim == 2 and model.config.model_type != "gpt2" and not own.endswith("table")
        turned = turned or module == "lm_head"
        out[".".join([own, *([] if own.endswith("table") else [what]), *map(str, index)])] = t.T if turned else t
    return out


def tables(model):
    """Return the rotary frequencies, with local layers first."""
    buffers = [
        t for name, t in sorted(model.named_buffers(), reverse=True) if re.search(r"(?<!original_)inv_freq", name)
    ]
    return {f"rope{'' if i == 0 else f'_{i}'}.inv_freq": t for i, t in enumerate(buffers)}


@pytest.mark.parametrize("name", SEVERAL)
def test_declared_decoder_computes_the_modules_logits(name):
    classes, fields = VARIANTS[name]
    # constants without an effect on cost have one declared value: for norms, for soft caps, and 1 for factors
    constants = {"layer_norm_epsilon": 1e-5} if "GPT2" in classes or "Falcon" in classes else {"rms_norm_eps": 1e-6}
    constants |= {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0} if "Gemma2" in classes else {}
    settings = config(classes, **fields, **constants)
    torch.manual_seed(7)
    model = getattr(transformers, classes.split()[1])(settings).eval()
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 1.0
        if hasattr(module, "embed_scale"):
            module.embed_scale.fill_(1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    g = cg.models.from_config(settings.to_dict(), attention="eager", dtype="fp32")
    run = lower(g, **SIZES)
    words = getattr(settings, "layer_types", None) or ["full_attention"] * settings.num_hidden_layers
    kinds = ["global" if word == "full_attention" else "local" for word in words]
    period = next(n for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    given = numbers(model, places(kinds[:period], len(kinds) % period, len(kinds))) | tables(model)
    assert given.keys() == run.state_dict().keys()
    run.load_state_dict({k: given[k].reshape(t.shape) for k, t in run.state_dict().items()})
    ids = torch.randint(0, 29, (SIZES["B"], SIZES["S"]))
    with torch.no_grad():
        torch.testing.assert_close(run(ids), model(ids).logits, rtol=1e-4, atol=1e-5)
