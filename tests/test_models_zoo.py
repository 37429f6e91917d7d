"""What every model of the zoo keeps: sizes as defaults, formulas, a step of training, inference, a report."""

import json

import pytest
from budget import in_part
from shared import load

import costgraph as cg
from costgraph import models
from costgraph.ir.graph import known_names
from costgraph.models import registry
from costgraph.models.registry import FAMILIES

#: What a caller brings: sequences or images, positions, positions of what a decoder reads.
OPEN = {"B": 2, "S": 7, "M": 5}


def point(g):
    """Sizes of what is left open."""
    return {k: v for k, v in OPEN.items() if k in known_names(g) and k not in g.defaults}


def bound(g):
    return {**g.defaults, **point(g)}


PARAMETERS = json.loads(registry.PARAMETERS.read_text(encoding="utf-8"))


def parameters(name):
    """As kept, which another test holds the declaration to: each worker would build all models to know it."""
    return PARAMETERS[name] if name in PARAMETERS else cg.param_count(models.load(name))


#: The smallest model of each family.
SMALLEST = [min(family.presets, key=parameters) for family in FAMILIES]


def sample(*names):
    """Return the smallest models, all but some of them marked long."""
    assert {*names} <= {*SMALLEST}
    return [pytest.param(n, marks=() if n in names else pytest.mark.long) for n in SMALLEST]


def loss_of(g):
    """What is trained: the loss that a model names, or the mean of what it returns."""
    if g.loss is not None:
        return None

    def mean(*outputs):
        names = " ".join(f"a{i}" for i in range(outputs[0].ndim))
        return cg.reduce(cg.ops.cast(outputs[0], "fp32"), f"{names} -> ", "mean")

    return mean


# -- every model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", in_part([n for n in models.names() if n not in SMALLEST], 0, 20) + in_part(SMALLEST, 0)
)
def test_sizes_are_bound_but_for_what_a_caller_brings(name):
    g = load(name)
    asked = (cg.flops(g), cg.param_count(g), cg.param_bytes(g), cg.bytes_moved(g))
    free = {s.name for formula in asked for s in getattr(formula, "free_symbols", ())}
    assert "B" in free
    assert free <= set(OPEN)
    assert cg.param_count(g) == PARAMETERS.get(name, cg.param_count(g))
    assert isinstance(cg.param_count(g), int)
    assert set(g.defaults) <= known_names(g)  # each says something
    assert name in repr(g)


def test_names_are_those_that_users_write():
    assert [n for n in models.names() if n != n.lower() or "_" in n] == []


# -- one of each family ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sample("bert-base", "mamba-130m", "mixtral-8x7b", "resnet18", "t5-small"))
def test_symbolic_is_the_same_graph_with_all_sizes_open(name):
    preset, symbolic = load(name), load(name, symbolic=True)
    assert symbolic.defaults == {}
    for question in (cg.flops, cg.bytes_moved, cg.param_count):
        assert question(symbolic, **bound(preset)) == question(preset, **point(preset))
    free = {s.name for s in cg.flops(symbolic).free_symbols | cg.param_count(symbolic).free_symbols}
    assert {"B"} < free


OPTIONS = [("flash", "fp16"), ("eager", "fp32"), ("flash", "fp8_e4m3")]


@pytest.mark.parametrize(
    ("name", "attention", "dtype"), in_part([(n, *OPTIONS[i % 3]) for i, n in enumerate(SMALLEST)], 1)
)
def test_every_option_builds_and_binds(name, attention, dtype):
    g = load(name, attention=attention, dropout=0.1, dtype=dtype)
    answers = [q(g, **point(g)) for q in (cg.flops, cg.matmul_flops, cg.bytes_moved, cg.peak_memory)]
    assert all(isinstance(a, int) and a > 0 for a in answers)
    assert cg.matmul_flops(g, count="full", **point(g)) >= cg.matmul_flops(g, **point(g))


@pytest.mark.parametrize("name", sample("alexnet", "dlrm-small", "mamba-130m", "qwen1.5-moe-a2.7b", "t5-small"))
def test_a_step_of_training(name):
    g = load(name)
    step = cg.training_step(g, loss_of(g), optimizer=cg.AdamW(), precision="bf16")
    at = {k: v for k, v in OPEN.items() if k in known_names(step) and k not in step.defaults}
    forward, whole = cg.matmul_flops(g, **at), cg.matmul_flops(step, **at)
    # a product has two in its backward pass, but for those whose operands want no gradient; kernels compute some again
    assert 2 * forward < whole < 4.1 * forward
    # weights and gradients in bf16, two moments in fp32
    state = cg.state_bytes(step, **at)
    assert state.params == cg.param_bytes(g)
    assert cg.peak_memory(step, **at) > state.total


@pytest.mark.parametrize("name", sample("alexnet", "gpt2", "lstm-ptb-small", "whisper-tiny"))
def test_a_report(name):
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
def test_a_file_says_the_same(name, tmp_path):
    g = load(name)
    cg.save(g, tmp_path / "g.json")
    again = cg.load(tmp_path / "g.json")
    assert again.defaults == g.defaults
    for question in (cg.flops, cg.bytes_moved, cg.param_count):
        assert question(again) == question(g)


# -- inference -------------------------------------------------------------------------------------------------


#: One model for each kind of cache: keys and values, windows, latent vectors, states, and an encoder's output.
ONE_OF_A_KIND = {"deepseek-v3", "gemma-3-1b", "gpt2", "mamba2-130m", "rwkv-7-0.1b", "t5-small", "xlstm-125m-7-1"}
#: What may take tokens and return logits; BERT fills in and CLIP compares.
GENERATING = [n for n in SMALLEST if not n.startswith(("bert", "clip"))]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ONE_OF_A_KIND else pytest.mark.long)
        for n in sorted({*GENERATING, "deepseek-v3", "xlstm-125m-7-1"})
    ],
)
def test_steps_of_one_token_add_up_to_the_prompt(name):
    # not absorbed, keys and values of all positions are made again at each step
    g = load(name, **({"absorbed": True} if name.startswith("deepseek") else {}))
    if "S" not in known_names(g):
        pytest.skip("takes no tokens")
    step, at = cg.decode(g), {**point(g), "S": 4}
    assert cg.param_count(step) == cg.param_count(g)
    assert cg.cache_bytes(step, **_of(step, at)) == cg.cache_bytes(cg.prefill(g), **at)
    # where nothing else runs in the prompt, such as an encoder, and no convolution has padding behind it
    if not any(getattr(op.kind, "causal", None) for op in g.walk()) and "M" not in known_names(g):
        steps = [cg.matmul_flops(step, **_of(step, {**at, "S": s})) for s in range(1, at["S"] + 1)]
        assert sum(steps) == cg.matmul_flops(g, **at)


@pytest.mark.parametrize("name", ["bert-base", "clip-vit-b-32"])
def test_what_does_not_generate_says_so(name):
    with pytest.raises(cg.GraphError, match=f"graph '{name}' keeps no state between steps"):
        cg.decode(load(name))


def _of(graph, sizes):
    return {k: v for k, v in sizes.items() if k in known_names(graph)}
