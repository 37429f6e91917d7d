"""Decode steps from traces with marked caches, against real steps and the declared model."""

from functools import cache

import pytest
import torch
from lazy import lazy_import
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from traced import held_by, real_peak

import costgraph as cg
from costgraph.torch import lower, trace

transformers = lazy_import("transformers")
LAYERS, GROUPS, WIDTH, KEPT = 2, 2, 10, 11
FACTS = {
    "num_hidden_layers": LAYERS, "hidden_size": 40, "intermediate_size": 52, "num_attention_heads": 4,
    "num_key_value_heads": GROUPS, "vocab_size": 97, "tie_word_embeddings": False,
}  # fmt: skip


class Step(nn.Module):
    def __init__(self, attention="eager"):
        super().__init__()
        config = transformers.LlamaConfig(**FACTS)
        config._attn_implementation = attention
        self.model = transformers.LlamaForCausalLM(config).eval()

    def forward(self, ids, kept):
        return self.model(ids, cache=kept, use_cache=True).logits


def dynamic(batch=3, dtype=torch.float32):
    kept = transformers.DynamicCache()
    for i in range(LAYERS):
        kept.update(*(torch.randn(batch, GROUPS, KEPT, WIDTH, dtype=dtype) for _ in range(2)), i)
    return kept


def static(length):
    config = transformers.LlamaConfig(**FACTS)
    kept = transformers.StaticCache(config=config, max_cache_len=length)
    kept.early_initialization(batch_size=3, num_heads=GROUPS, head_dim=WIDTH, dtype=torch.float32, device="cpu")
    return kept


def ids(tokens):
    return torch.zeros(3, tokens, dtype=torch.int64)


def step(module, tokens, name=None, kept=None):
    names = ("B", None, "P", None)
    kept = dynamic() if kept is None else kept
    return trace(module, ids(tokens), kept, dims=[("B", name), names], cached=["kept"])


@cache
def traced(attention, tokens, name=None):
    return step(Step(attention), tokens, name)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_decode_step_equals_real_and_declared_steps(attention):
    module, kept = Step(attention), dynamic()
    g = step(module, 1, kept=kept)
    decoded = cg.decode(g)
    assert type(kept.layers[0].keys) is torch.Tensor
    assert kept.get_seq_length() == KEPT
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Step("eager")(ids(1), dynamic())  # torch counts no FLOPs of fused attention on a CPU
    assert cg.matmul_flops(decoded, B=3, P=KEPT, count="full") == counter.get_total_flops()
    declared = cg.decode(cg.models.from_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **FACTS}))
    B, P, S = cg.dims("B P S")
    assert (cg.matmul_flops(declared).subs(S, P + 1) - cg.matmul_flops(decoded)).expand() == 0
    # four-byte keys and values at the previous positions
    assert cg.cache_bytes(decoded) == 4 * 2 * LAYERS * GROUPS * WIDTH * B * P
    assert {t.name for t in decoded.tensors if t.role == "cache"} == {
        f"kept/layers/{i}/{part}" for i in range(LAYERS) for part in ("keys", "values")
    }


@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.long)])
def test_decoding_several_tokens_equals_their_trace(attention):
    g, seen, S = traced(attention, 5, "N"), traced(attention, 2), KEPT + 2
    for tokens, sizes in ((2, {}), ("n", {"n": 2})):
        decoded = cg.decode(g, tokens)
        for question in (cg.flops, cg.bytes_moved, cg.peak_memory, cg.cache_bytes):
            assert question(decoded, B=3, N=S, **sizes) == question(seen, B=3, P=KEPT)
    with pytest.raises(cg.BindingError, match="against the assumption"):
        cg.flops(cg.decode(g, 2), B=3, N=3)


class Attends(nn.Module):
    """Returns the next step's inputs, as in programs without a cache class."""

    def __init__(self):
        super().__init__()
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, keys, values):
        q, k, v = self.packed(x).chunk(3, -1)
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        return torch.softmax(q @ keys.mT, -1) @ values, keys, values


def test_cached_keys_and_values_may_be_tensors():
    module = Attends()
    given = [torch.randn(3, 1, WIDTH), *(torch.randn(3, KEPT, WIDTH) for _ in range(2))]
    names = ("B", "P", None)
    g = trace(module, *given, dims=[("B", None, None), names, names], cached=("keys", "values"))
    decoded = cg.decode(g)
    B, P = cg.dims("B P")
    assert cg.matmul_flops(decoded) == (2 * B * (3 * WIDTH**2 + 2 * WIDTH * (P + 1))).expand()
    assert cg.cache_bytes(decoded) == 4 * 2 * WIDTH * B * P

    def run():
        with torch.no_grad():
            return module(*given)

    assert abs(real_peak(run, *held_by(module, given)) - cg.peak_memory(decoded, B=3, P=KEPT)) <= 64
    with torch.no_grad():
        low = lower(decoded, B=3, P=KEPT)
    assert low(given[0])[1].shape == (3, KEPT + 1, WIDTH)


def test_static_cache_is_read_in_full():
    module, length = Step(), KEPT + 1
    kept = static(length)
    g = trace(module, ids(1), kept, dims=[("B", None), ("B", None, None, None)], cached=["kept"])
    assert cg.cache_bytes(cg.decode(g), B=3) >= 4 * 2 * LAYERS * 3 * GROUPS * WIDTH * length
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(ids(1), static(length))
    assert cg.matmul_flops(cg.decode(g), B=3, count="full") == counter.get_total_flops()


def test_cache_follows_the_model_dtype():
    low = Step().bfloat16()
    seen = step(low, 1, kept=dynamic(dtype=torch.bfloat16))
    converted = cg.apply_precision(traced("eager", 1), "bf16")
    for question in (cg.flops, cg.bytes_moved, cg.peak_memory, cg.cache_bytes):
        assert question(converted, B=3, P=KEPT) == question(seen, B=3, P=KEPT)


class Reads(nn.Module):
    def forward(self, x, keys):
        return x.mean((0, 1)) + keys.mean(0)


REFUSED = {
    "one of several": (lambda: cg.decode(traced("eager", 5, "N")), "tokens=1 of graph 'Step'"),
    "a number of positions": (lambda: cg.decode(traced("eager", 1), 2), "whose new positions have no name"),
    "the last logits": (lambda: cg.decode(traced("eager", 1), logits="last"), "logits='last' of a trace"),
    "a step twice": (lambda: cg.decode(cg.decode(traced("eager", 1))), "is a step already"),
    "no cache": (
        lambda: cg.decode(trace(nn.Linear(3, 3), torch.zeros(2, 3), dims=[("B", None)])),
        "keeps no state between steps",
    ),
    "two new sizes": (
        lambda: cg.decode(
            trace(
                Reads(), torch.zeros(3, 2, WIDTH), torch.zeros(5, WIDTH),
                dims=[("A", "N", None), ("P", None)], cached=["keys"],
            ),
            2,
        ),
        "have open sizes ['A', 'N'] that no cache has",
    ),
    "no such argument": (
        lambda: trace(nn.Linear(3, 3), torch.zeros(2, 3), cached=["past"]),
        "cached is ['past']; expected names of arguments among ['input']",
    ),
    "an empty cache": (
        lambda: trace(
            Step(), ids(1), transformers.DynamicCache(), dims=[None, ("B", None, "P", None)], cached=["kept"]
        ),
        "of type DynamicCache contains no tensors with 4 axes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_decode_traces_are_refused(case):
    ask, text = REFUSED[case]
    with pytest.raises(cg.CostGraphError) as error:
        ask()
    assert text in str(error.value)
