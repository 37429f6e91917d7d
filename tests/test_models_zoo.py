"""Properties of every zoo model: default sizes, formulas, training steps, inference, and reports."""

import json

import pytest
from shared import load

import costgraph as cg
from costgraph import models
from costgraph.ir.graph import known_names
from costgraph.models import registry
from costgraph.models.registry import FAMILIES

#: Dimensions the caller chooses: batch, input length, and decoder length.
OPEN = {"B": 2, "S": 7, "M": 5}


def point(g):
    """Return values for the open dimensions."""
    return {k: v for k, v in OPEN.items() if k in known_names(g) and k not in g.defaults}


def bound(g):
    return {**g.defaults, **point(g)}


PARAMETERS = json.loads(registry.PARAMETERS.read_text(encoding="utf-8"))


def parameters(name):
    """Return the recorded count, which another test checks; otherwise each worker would build every model."""
    return PARAMETERS[name] if name in PARAMETERS else cg.param_count(models.load(name))


#: The smallest model of each family.
SMALLEST = [min(family.presets, key=parameters) for family in FAMILIES]


def sample(*names):
    """Return the smallest models, most of them marked long."""
    assert {*names} <= {*SMALLEST}
    return [pytest.param(n, marks=() if n in names else pytest.mark.long) for n in SMALLEST]


def loss_of(g):
    """Return the loss that a model names, or else the mean of its output."""
    if g.loss is not None:
        return None

    def mean(*outputs):
        names = " ".join(f"a{i}" for i in range(outputs[0].ndim))
        return cg.reduce(cg.ops.cast(outputs[0], "fp32"), f"{names} -> ", "mean")

    return mean


# -- every model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*(n for n in models.names() if n not in SMALLEST), *SMALLEST])
def test_defaults_bind_all_but_caller_dimensions(name):
    g = load(name)
    asked = (cg.flops(g), cg.param_count(g), cg.param_bytes(g), cg.bytes_moved(g))
    free = {s.name for formula in asked for s in getattr(formula, "free_symbols", ())}
    assert "B" in free
    assert free <= set(OPEN)
    assert cg.param_count(g) == PARAMETERS.get(name, cg.param_count(g))
    assert isinstance(cg.param_count(g), int)
    assert set(g.defaults) <= known_names(g)  # each one is used
    assert g.legend.keys() == known_names(g)
    assert name in repr(g)


def test_model_names_follow_naming_rules():
    assert [n for n in models.names() if n != n.lower() or "_" in n] == []


# -- one of each family ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sample("bert-base", "mamba-130m", "mixtral-8x7b", "resnet18", "t5-small"))
def test_symbolic_model_binds_to_same_costs(name):
    preset, symbolic = load(name), load(name, symbolic=True)
    assert symbolic.defaults == {}
    for question in (cg.flops, cg.bytes_moved, cg.param_count):
        assert question(symbolic, **bound(preset)) == question(preset, **point(preset))
    free = {s.name for s in cg.flops(symbolic).free_symbols | cg.param_count(symbolic).free_symbols}
    assert {"B"} < free


OPTIONS = [("flash", "fp16"), ("eager", "fp32"), ("flash", "fp8_e4m3")]


@pytest.mark.parametrize(("name", "attention", "dtype"), [(n, *OPTIONS[i % 3]) for i, n in enumerate(SMALLEST)])
def test_every_option_builds_and_binds(name, attention, dtype):
    g = load(name, attention=attention, dropout=0.1, dtype=dtype)
    answers = [q(g, **point(g)) for q in (cg.flops, cg.matmul_flops, cg.bytes_moved, cg.peak_memory)]
    assert all(isinstance(a, int) and a > 0 for a in answers)
    assert cg.matmul_flops(g, count="full", **point(g)) >= cg.matmul_flops(g, **point(g))


@pytest.mark.parametrize("name", sample("alexnet", "dlrm-small", "mamba-130m", "qwen1.5-moe-a2.7b", "t5-small"))
def test_training_step_flops_and_state(name):
    g = load(name)
    step = cg.training_step(g, loss_of(g), optimizer=cg.AdamW(), precision="bf16")
    at = {k: v for k, v in OPEN.items() if k in known_names(step) and k not in step.defaults}
    forward, whole = cg.matmul_flops(g, **at), cg.matmul_flops(step, **at)
    # Each matmul has two in the backward pass, unless an operand needs no gradient; kernels recompute some.
    assert 2 * forward < whole < 4.1 * forward
    # bf16 weights and gradients, two fp32 moments
    state = cg.state_bytes(step, **at)
    assert state.params == cg.param_bytes(g)
    assert cg.peak_memory(step, **at) > state.total


@pytest.mark.parametrize("name", sample("alexnet", "gpt2", "lstm-ptb-small", "whisper-tiny"))
def test_report_is_consistent(name):
    g = load(name)
    text = str(cg.report(g, "h100-sxm", **point(g)))
    assert "parameters" in text
    assert f"{cg.param_count(g):,}" in text


@pytest.mark.parametrize("name", sample("mlp"))
def test_plots(name, tmp_path):
    g = load(name)
    cg.roofline(g, "h100-sxm", **point(g)).plot(tmp_path / "roofline.svg")
    cg.timeline(g, **point(g)).plot(tmp_path / "timeline.svg")
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", sample("dlrm-small", "gemma-3-1b", "lstm-ptb-small", "resnet18"))
def test_costs_survive_save_and_load(name, tmp_path):
    g = load(name)
    cg.save(g, tmp_path / "g.json")
    again = cg.load(tmp_path / "g.json")
    assert again.defaults == g.defaults
    for question in (cg.flops, cg.bytes_moved, cg.param_count):
        assert question(again) == question(g)


# -- inference -------------------------------------------------------------------------------------------------


#: One model per cache type: keys and values, windows, latent vectors, recurrent states, and encoder output.
ONE_OF_A_KIND = {"deepseek-v3", "gemma-3-1b", "gpt2", "mamba2-130m", "rwkv-7-0.1b", "t5-small", "xlstm-125m-7-1"}
#: Models that may accept tokens and return logits; BERT fills masks and CLIP compares.
GENERATING = [n for n in SMALLEST if not n.startswith(("bert", "clip"))]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ONE_OF_A_KIND else pytest.mark.long)
        for n in sorted({*GENERATING, "deepseek-v3", "xlstm-125m-7-1"})
    ],
)
def test_single_token_steps_add_up_to_prefill(name):
    # without absorption, each step recomputes keys and values of all positions
    g = load(name, **({"absorbed": True} if name.startswith("deepseek") else {}))
    if "S" not in known_names(g):
        pytest.skip("takes no tokens")
    step, at = cg.decode(g), {**point(g), "S": 4}
    assert cg.param_count(step) == cg.param_count(g)
    assert cg.cache_bytes(step, **_of(step, at)) == cg.cache_bytes(cg.prefill(g), **at)
    # holds where the prompt runs nothing else, such as an encoder, and no convolution pads its end
    if not any(getattr(op.kind, "causal", None) for op in g.walk()) and "M" not in known_names(g):
        steps = [cg.matmul_flops(step, **_of(step, {**at, "S": s})) for s in range(1, at["S"] + 1)]
        assert sum(steps) == cg.matmul_flops(g, **at)


@pytest.mark.parametrize("name", ["bert-base", "clip-vit-b-32"])
def test_models_without_generation_are_refused(name):
    with pytest.raises(cg.GraphError, match=f"graph '{name}' keeps no state between steps"):
        cg.decode(load(name))


def _of(graph, sizes):
    return {k: v for k, v in sizes.items() if k in known_names(graph)}
