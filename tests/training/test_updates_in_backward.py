"""Optimizer updates inside the backward pass: peak memory against torch hooks, and the final parameters."""

import numpy as np
import pytest
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph import GraphError
from costgraph.testing import run

pytest.importorskip("torch")

import torch
from hooked import hooked_peak
from test_training_memory import GPT2, LLAMA, MLP, SCALARS, angles, counters, width

B, D, F, K, L, M = cg.dims("B D F K L M")


def freed_input(name, sizes, B, S, dtype):
    """The input that a checkpoint unpacks for a linear layer is freed before torch sums its bias gradient."""
    return -sizes["D"] * width(dtype)


OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, foreach=True), cg.SGD()),
    "foreach": (lambda p: torch.optim.AdamW(p, foreach=True), cg.AdamW()),
    "for-loop": (lambda p: torch.optim.AdamW(p, foreach=False), cg.AdamW(implementation="for-loop")),
    "fused": (lambda p: torch.optim.AdamW(p, fused=True), cg.AdamW(implementation="fused")),
}
FEW = {**GPT2, "V": 13, "F": 2003, "L": 2}
FLASH = {**FEW, "D": 64, "H": 4}
CASES = [
    ("mlp", MLP, 3, 0, "foreach", {}, [counters]),
    ("mlp", MLP, 3, 0, "sgd", {}, []),
    ("mlp", {**MLP, "F": 5003}, 3, 0, "for-loop", {"dtype": "bf16"}, [counters]),
    ("mlp", MLP, 3, 0, "fused", {}, []),
    ("gpt2", FEW, 1, 7, "foreach", {}, [counters]),
    ("gpt2", FEW, 1, 7, "fused", {}, []),
    ("gpt2", FLASH, 1, 7, "fused", {"again": "layers", "kernel": "flash"}, [freed_input]),
    ("gpt2", FLASH, 1, 7, "foreach", {"again": "layers", "kernel": "flash"}, [counters]),
    ("llama-2-7b", LLAMA, 3, 59, "sgd", {}, [angles]),
]


#: transformers models take seconds each; a plain run tests one of them.
MARKED = [pytest.param(*c, marks=() if c[0] == "mlp" or c is CASES[7] else pytest.mark.long) for c in CASES]


@pytest.mark.parametrize(("name", "sizes", "B", "S", "optimizer", "more", "differences"), MARKED)
def test_peak_matches_torch_hooks_up_to_named_differences(name, sizes, B, S, optimizer, more, differences):
    theirs, ours = OPTIMIZERS[optimizer]
    dtype, again = more.get("dtype", "fp32"), more.get("again")
    model = load(name, attention=more.get("kernel", "eager"), dtype=dtype, symbolic=True)
    policy = cg.every_block() if again else None
    step = cg.training_step(model, optimizer=ours, checkpoint=policy, optimizer_in_backward=True)
    peak = cg.peak_memory(step, **sizes, B=B, **({} if name == "mlp" else {"S": S}))
    named = sum(difference(name, sizes, B, S, dtype) for difference in differences)
    assert abs(hooked_peak(theirs, name, sizes, B, S, **more) - peak - named) <= SCALARS


@pytest.fixture(scope="module")
def stack():
    """Layers, a shared parameter, a parameter that is used twice, and one outside the stack."""
    with cg.Graph("stack") as g:
        x = g.input("x", (B, D))
        shared, twice = g.param("shared", (D,)), g.param("twice", (D, D))

        def layer(h):
            return cg.relu(cg.linear(h, "b d -> b e", e=D, bias=True, name="up")) * shared

        h = cg.repeat(L, layer, x @ twice, name="layers")
        g.output(cg.reduce(cg.linear(h @ twice, "b d -> b k", k=K, name="head"), "b k -> ", "mean"))
    return g


SIZES = {"B": 2, "D": 3, "K": 5, "L": 4}


@pytest.mark.parametrize("checkpoint", [None, cg.every_block(), cg.every(2)], ids=["kept", "block", "every two"])
@pytest.mark.parametrize(
    "optimizer", [cg.SGD(momentum=0.9), cg.AdamW(), cg.AdamW(implementation="fused"), cg.Adafactor()]
)
def test_updates_in_backward_match_updates_afterwards(stack, optimizer, checkpoint):
    after, within = (
        cg.training_step(stack, optimizer=optimizer, checkpoint=checkpoint, optimizer_in_backward=flag)
        for flag in (False, True)
    )
    for ask in (cg.flops, cg.bytes_moved, cg.param_bytes):
        assert ask(within) == ask(after)
    sources = [t for t in after.tensors if t.producer is None and t.role in ("param", "state", "input")]
    at = {symbol: SIZES[symbol.name] for symbol in (B, D, K, L)}
    drawn = np.random.default_rng(1)
    numbers = {t.name: drawn.uniform(0.1, 1, [int(n.subs(at)) for n in t.shape]) for t in sources}
    first, second = (run(step, numbers, **SIZES) for step in (after, within))
    left, right = ({b.name: b.array for b in made.buffers} for made in (first, second))
    changed = [name for name in left if name.partition("[")[0] in numbers and name != "x"]
    assert len(changed) >= 9
    for name in changed:
        np.testing.assert_allclose(right[name], left[name], rtol=1e-12)
    assert second.peak == cg.peak_memory(within, **SIZES)


def test_no_gradients_remain_and_state_is_unchanged(stack):
    after, within = (cg.training_step(stack, optimizer_in_backward=flag) for flag in (False, True))
    assert within.gradients == {}
    there, gone = cg.state_bytes(after), cg.state_bytes(within)
    assert (gone.params, gone.state, gone.gradients) == (there.params, there.state, 0)
    assert cg.saved_state_bytes(within) == cg.saved_state_bytes(after)


def test_input_gradient_is_returned():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D), grad=True)
        g.output(cg.reduce(x @ g.param("w", (D, F)), "b f -> ", "mean"))
    step = cg.training_step(g, optimizer_in_backward=True)
    assert [t.name for t in step.gradients] == ["x"]


def test_only_one_layers_gradients_are_live():
    """For SGD on L layers of fp32 D*D weights, gradients of a single layer are live, whatever L is."""
    with cg.Graph("deep") as g:
        x = cg.repeat(L, lambda x: cg.relu(cg.linear(x, "b d -> b e", e=D)), g.input("x", (B, D)), name="layers")
        g.output(cg.reduce(x, "b d -> ", "mean"))
    peaks = [
        cg.peak_memory(cg.training_step(g, optimizer=cg.SGD(), optimizer_in_backward=f), B=1, D=997, L=11)
        for f in (False, True)
    ]
    weights = 4 * 997 * 997
    assert peaks[0] // weights == 22
    assert peaks[1] // weights == 12


@each(
    ("options", "text"),
    [
        ({"accumulate": 2}, "combined with accumulate, because an update needs the sum over all micro-batches"),
        ({"accumulate": M}, "combined with accumulate"),
        ({"clip": 1.0}, "combined with clip, because the total norm needs all gradients"),
        ({"set_to_none": False}, "combined with set_to_none=False, because gradients are freed"),
        ({"precision": "fp16-mixed"}, "combined with precision 'fp16-mixed', because loss scaling"),
        ({"precision": "megatron-bf16"}, "combined with precision 'megatron-bf16', whose fp32 gradients persist"),
        ({"optimizer_in_backward": 1}, "optimizer_in_backward is 1, expected True or False"),
    ],
)
def test_refused(stack, options, text):
    with pytest.raises(GraphError, match=text):
        cg.training_step(stack, **{"optimizer_in_backward": True, **options})


def test_training_step_cannot_generate():
    step = training_step(load("gpt2"), optimizer_in_backward=True)
    with pytest.raises(GraphError, match="has a backward pass, expected only a forward pass"):
        cg.decode(step)
