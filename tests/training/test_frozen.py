"""Frozen parameters in zoo models: memory and FLOPs of a step against torch with `requires_grad_(False)`."""

import pytest
from shared import load, training_step

import costgraph as cg
from costgraph import GraphError

pytest.importorskip("torch")

import torch
from test_training_memory import GPT2, LLAMA, MLP, angles
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tracked import setting, step

FEW = {**GPT2, "L": 2}


def mask_and_copied_values(name, sizes, B, S, dtype):
    """torch stores the mask as a tensor, and its batched matmul copies the values; both live in the forward pass."""
    return 4 * S * S + 4 * B * S * sizes["D"]


def first_norm(name, sizes, B, S, dtype):
    """torch saves the first norm's input and statistics, though the bias gradient reads neither."""
    return 4 * B * S * sizes["D"] + 2 * 4 * B * S


# model, sizes, batch, length, our options, the selection of trained torch parameters, torch's extra bytes
CASES = {
    "head": ("mlp", MLP, 3, 0, {"trainable": "head"}, lambda n: n.startswith("head"), []),
    "first": ("mlp", MLP, 3, 0, {"trainable": "first"}, lambda n: n.startswith("first"), []),
    "layers": ("mlp", MLP, 101, 0, {"freeze": "layers/*"}, lambda n: not n.startswith("layers"), []),
    "biases": ("gpt2", FEW, 3, 59, {"trainable": ["layers/*bias"]}, lambda n: n[:6] == "layers" and n[-4:] == "bias",
               [first_norm]),
    "norm": ("gpt2", FEW, 3, 59, {"trainable": "norm"}, lambda n: n.startswith("norm"), [mask_and_copied_values]),
    "perceptrons": ("llama-2-7b", {**LLAMA, "L": 2}, 3, 59, {"freeze": ["layers/mlp", "tokens", "head"]},
                    lambda n: not any(part in n for part in ("mlp", "tokens", "head")), [angles]),
}  # fmt: skip
# Transient scalars: the backward seed, a loss weight, one in the optimizer.
SCALARS = 20


def frozen(name, sizes, B, S, trained):
    """Build a module with some trained parameters, and their optimizer."""
    module, _, ids, targets = setting(name, sizes, B, S, "fp32", "foreach")
    for key, p in module.named_parameters():
        p.requires_grad_(trained(key))
    kept = [p for p in module.parameters() if p.requires_grad]
    return module, torch.optim.AdamW(kept, foreach=True), ids, targets


def declared(name, sizes, B, S, options):
    graph = training_step(load(name, attention="eager", dtype="fp32", symbolic=True), **options)
    return graph, {**sizes, "B": B, **({} if name == "mlp" else {"S": S})}


#: A real transformer step takes seconds, so those cases are long.
MARKED = [pytest.param(case, marks=() if CASES[case][0] == "mlp" else pytest.mark.long) for case in CASES]


@pytest.mark.parametrize("case", MARKED)
def test_frozen_peak_matches_torch_up_to_named_differences(case):
    name, sizes, B, S, options, trained, differences = CASES[case]
    parts = frozen(name, sizes, B, S, trained)
    step(*parts)  # creates the optimizer state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(*parts)
    live = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        live += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, live)
    graph, dims = declared(name, sizes, B, S, options)
    line = cg.timeline(graph, **dims)
    there = sum(line.by_role.get(role, 0) for role in ("param", "state", "input", "buffer"))
    named = sum(difference(name, sizes, B, S, "fp32") for difference in differences)
    assert abs(most - (line.peak - there) - named) <= SCALARS


@pytest.mark.parametrize("case", CASES)
def test_frozen_flops_match_torch(case):
    name, sizes, B, S, options, trained, _ = CASES[case]
    with FakeTensorMode():
        parts = frozen(name, sizes, B, S, trained)
        with FlopCounterMode(display=False) as counter:
            step(*parts)
    graph, dims = declared(name, sizes, B, S, options)
    assert cg.matmul_flops(graph, **dims) == counter.get_total_flops()


def test_frozen_parameters_have_no_gradients_or_state():
    model = load("gpt2")
    step = cg.training_step(model, trainable="layers/*/ffw1")
    trained = 12 * (768 * 3072 + 3072)
    each = cg.state_bytes(step)
    # zoo models are in bf16, as are gradients and both moments
    assert (each.params, each.gradients, each.state) == (2 * cg.param_count(model), 2 * trained, 4 * trained)
    assert {t.name.split("/")[2] for t in step.gradients} == {"ffw1"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"freeze": "layer/*"}, r"freeze 'layer/\*' matches no parameter or scope, expected some of tokens/table"),
        ({"trainable": ["norm", "head"]}, "trainable 'head' matches no parameter or scope"),
        ({"trainable": "norm", "freeze": "layers"}, "freeze together with trainable, expected only one of them"),
        ({"freeze": []}, r"freeze \[\], expected names or scopes"),
        ({"freeze": 3}, "freeze is 3|freeze 3, expected names or scopes"),
        ({"freeze": [""]}, "expected names or scopes"),
        ({"freeze": "*"}, "no parameter of graph 'gpt2' requires a gradient; expected at least one"),
    ],
)
def test_refused(options, text):
    with pytest.raises(GraphError, match=text):
        training_step(load("gpt2"), **options)
