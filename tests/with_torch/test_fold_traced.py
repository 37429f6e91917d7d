"""Folded traces against traces with other numbers of blocks."""

from collections import Counter
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import costgraph as cg
from costgraph.torch import trace

ASKED = (cg.flops, cg.matmul_flops, cg.bytes_moved, cg.param_count, cg.param_bytes, cg.peak_memory)
OPTIMIZERS = {
    "none": None,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
}
#: Passes of an optimizer over the parameters: one per foreach function, or one per parameter.
PASSES = {"none": 0, "sgd": 3, "foreach": 9, "fused": 2, "for-loop": 1}
POINTS = {"B": ({"B": 2}, {"B": 7}), "BS": ({"B": 1, "S": 2}, {"B": 5, "S": 31})}


def answers(g, **sizes):
    rows = Counter()
    for row in cg.costs(g, **sizes).rows:
        rows[row.kind, row.phase, row.dtype, row.direction] += row.amount
    costs = {ask.__name__: Fraction(ask(g, **sizes)) for ask in ASKED}
    costs["in blocks"] = Fraction(cg.peak_memory(g, allocator="cuda", **sizes))
    return costs | dict(rows)


def assert_fold_equals_trace(make, scope, traced, others, points):
    """Assert that one trace's fold equals the trace at any other number of blocks."""
    folded = cg.fold(make(traced), scope, "L")
    least, formula = cg.timeline(folded).holds_from.get("L", 1), cg.peak_memory(folded)
    assert "L" not in folded.defaults
    for n in others:
        plain = make(n)
        for sizes in points:
            expected = answers(plain, **sizes)
            assert answers(folded, L=n, **sizes) == expected, (n, sizes)
            if n >= least:
                assert cg.evaluate(formula, L=n, **sizes) == expected["peak_memory"]
    return folded


def loops(folded):
    return {op.name: str(op.kind.count) for op in folded.ops if op.loop is not None}


# -- plain modules -----------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self, depth, *, train=False, again=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)) for _ in range(depth))
        self.training_loss, self.again = train, again

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x.mean() if self.training_loss else x


class Patches(nn.Module):
    """A vision transformer: patch embedding, class token, pre-norm blocks."""

    def __init__(self, depth, *, train=False):
        super().__init__()
        self.embed = nn.Conv2d(3, 14, 4, 4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 14)), nn.Parameter(torch.zeros(1, 5, 14))
        self.blocks = nn.ModuleList(Attention() for _ in range(depth))
        self.head = nn.Linear(14, 11)
        self.training_loss = train

    def forward(self, images):
        x = self.embed(images).flatten(2).mT
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, 0])
        return logits.logsumexp(-1).mean() if self.training_loss else logits


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(14), nn.Linear(14, 42), nn.Linear(14, 14)
        self.mlp = nn.Sequential(nn.LayerNorm(14), nn.Linear(14, 29), nn.GELU(), nn.Linear(29, 14))

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 2, 7)).permute(2, 0, 3, 1, 4)
        x = x + self.out(((q @ k.mT * 7**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def perceptron(depth, **more):
    optimizer = more.pop("optimizer", None)
    train = more.get("train", False)
    return trace(Perceptron(depth, **more), torch.zeros(2, 5), dims=[("B", None)], train=train, optimizer=optimizer)


def patches(depth, optimizer=None, *, train=False):
    images = torch.zeros(2, 3, 8, 8)
    dims = [("B", None, None, None)]
    return trace(Patches(depth, train=train), images, dims=dims, train=train, optimizer=optimizer)


def test_folded_perceptron_equals_other_depths():
    # torch holds a block's input while the block runs: the caller holds the first, and nothing holds the second once
    # the third block begins
    assert loops(assert_fold_equals_trace(perceptron, "layers", 6, (3, 4, 9), POINTS["B"])) == {"layers": "L - 2"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_folded_perceptron_step_equals_other_depths(name):
    folded = assert_fold_equals_trace(
        lambda n: perceptron(n, train=True, optimizer=OPTIMIZERS[name]), "layers", 5, (3,), POINTS["B"]
    )
    # the input needs no gradient, so the first block's backward pass differs from the others
    folded_loops = loops(folded)
    updates = [loop for loop in folded_loops if loop.startswith("layers.optimizer")]
    assert folded_loops == dict.fromkeys(("layers", "layers.backward", *updates), "L - 2")
    assert len(updates) == PASSES[name]


def test_checkpointed_blocks_are_folded():
    folded = assert_fold_equals_trace(
        lambda n: perceptron(n, train=True, again=True, optimizer=OPTIMIZERS["sgd"]), "layers", 5, (7,),
        POINTS["B"],
    )  # fmt: skip
    assert any(op.phase == "recompute" for op in folded.walk())


def test_folded_vision_transformer_equals_other_depths():
    assert_fold_equals_trace(patches, "blocks", 5, (3,), POINTS["B"])


@pytest.mark.parametrize("name", ["none", *(pytest.param(n, marks=pytest.mark.long) for n in ("foreach", "for-loop"))])
def test_folded_vision_transformer_step_equals_other_depths(name):
    assert_fold_equals_trace(lambda n: patches(n, OPTIMIZERS[name], train=True), "blocks", 5, (3,), POINTS["B"])


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.long)])
def test_blocks_of_a_top_level_sequential_are_folded(train):
    class Mean(nn.Sequential):
        def forward(self, x):
            return super().forward(x).mean()

    def stack(n):
        kind, optimizer = (Mean, OPTIMIZERS["foreach"]) if train else (nn.Sequential, None)
        blocks = kind(*(Attention() for _ in range(n)))
        return trace(blocks, torch.zeros(2, 5, 14), dims=[("B", "S", None)], train=train, optimizer=optimizer)

    folded = assert_fold_equals_trace(stack, "", 5, (6,), POINTS["BS"])
    assert {t.name for t in folded.tensors if t.role == "param"} >= {"0/qkv/weight"}
    states = [t for t in folded.tensors if t.role == "state" and t.producer is None]
    assert all(t.name.startswith("optimizer/") and "//" not in t.name for t in states)
    block_loops = [loop for loop in loops(folded) if not loop.startswith("blocks.optimizer")]
    assert block_loops == (["blocks", "blocks.backward"] if train else ["blocks"])
    assert len(loops(folded)) - len(block_loops) == (PASSES["foreach"] if train else 0)


class Alternating(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) if i % 2 else nn.Tanh() for i in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_alternating_blocks_are_folded_in_pairs():
    def traced(count):
        return trace(Alternating(count), torch.zeros(2, 5), dims=[("B", None)])

    folded = cg.fold(traced(8), "layers", "L")
    for count in (8, 12):
        assert answers(folded, L=count, B=3) == answers(traced(count), B=3)


def test_folded_trace_survives_save_and_load(tmp_path):
    folded = cg.fold(perceptron(5, train=True, optimizer=OPTIMIZERS["foreach"]), "layers", "L")
    cg.save(folded, tmp_path / "g.json")
    assert answers(cg.load(tmp_path / "g.json"), L=7, B=3) == answers(folded, L=7, B=3)


# -- transformers models -----------------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, y=None):
        logits = self.model(ids, use_cache=False).logits
        return logits if y is None else nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def built(name, depth):
    transformers = pytest.importorskip("transformers")
    ends = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if name == "gpt2":
        drop = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
        config = transformers.GPT2Config(n_layer=depth, n_embd=14, n_head=2, n_positions=64, **drop, **ends)
        kind = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=depth, hidden_size=12, intermediate_size=22, num_attention_heads=2,
            num_key_value_heads=1, **ends,
        )  # fmt: skip
        kind = transformers.LlamaForCausalLM
    config._attn_implementation = "eager"
    return kind(config)


SCOPES = {"gpt2": "model/transformer/h", "llama": "model/model/layers"}
IDS = torch.zeros(3, 17, dtype=torch.long)


def test_folded_language_model_equals_other_depths():
    """Rotary tables and masks are computed once, before the blocks."""
    name = "llama"

    @cache
    def forward(n):
        return trace(Loss(built(name, n).eval()), IDS, dims=[("B", "S")])

    folded = assert_fold_equals_trace(forward, SCOPES[name], 4, (5,), POINTS["BS"])
    found = cg.fold(forward(4))  # by the trace's paths
    for question in (cg.flops, cg.bytes_moved, cg.param_count):
        assert question(found) == question(folded)
    assert cg.peak_memory(found, L=5, **POINTS["BS"][0]) == cg.peak_memory(folded, L=5, **POINTS["BS"][0])


@pytest.mark.long
@pytest.mark.parametrize(("name", "optimizer"), [("gpt2", "foreach"), ("llama", "for-loop")])
def test_folded_language_model_step_equals_other_depths(name, optimizer):
    def step(n):
        dims = [("B", "S")] * 2
        return trace(Loss(built(name, n)), IDS, IDS, dims=dims, train=True, optimizer=OPTIMIZERS[optimizer])

    folded = assert_fold_equals_trace(step, SCOPES[name], 4, (6,), POINTS["BS"])
    assert {SCOPES[name], SCOPES[name] + ".backward"} <= loops(folded).keys()
    assert len(folded.gradients) == len(folded.params)
