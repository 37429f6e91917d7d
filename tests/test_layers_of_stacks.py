"""Layers of a stack are recomputed, adapted, frozen or quantized in loops, unrolled loops and numbered scopes."""

from functools import cache

import pytest
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph import GraphError, UnsupportedError

B, S, D, F = cg.dims("B S D F")
SIZES = {"B": 2, "S": 64}
ASKED = (cg.flops, cg.matmul_flops, cg.bytes_moved, cg.peak_memory, cg.param_bytes)


def answers(graph, **sizes):
    return [ask(graph, **(sizes or SIZES)) for ask in ASKED]


SGD = cg.SGD()
#: Cache of loaded models; nothing modifies these graphs.
unrolled = cache(cg.unroll)


@cache
def loaded(name, layers):
    graph = cg.models.load(name)
    graph.defaults = graph.defaults | {"L": layers}
    return graph


def step(graph, checkpoint=None, **more):
    return training_step(graph, precision="bf16", optimizer=SGD, checkpoint=checkpoint, **more)


def numbered(layers=4, stack="h"):
    """Return a program that declares its layers in scopes `h/0`, `h/1`, ..., without a loop."""
    with cg.Graph("g") as g:
        x = cg.linear(g.input("x", (B, D)), "b d -> b e", e=D, name="first")
        for i in range(layers):
            with cg.scope(f"{stack}/{i}"):
                x = x + cg.nn.mlp(x, F)
        g.output(cg.reduce(x, "b d -> ", "mean"))
    return g


def looped(layers=4):
    with cg.Graph("g") as g:
        x = cg.linear(g.input("x", (B, D)), "b d -> b e", e=D, name="first")
        x = cg.repeat(layers, lambda x: x + cg.nn.mlp(x, F), x, name="h")
        g.output(cg.reduce(x, "b d -> ", "mean"))
    return g


# -- checkpoints -------------------------------------------------------------------------------------------------


UNROLLED = [
    cg.every_block(), cg.selective("attention"), cg.every_block(early_stop=False), cg.every(2),
    cg.every(2, inside=cg.every_block()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "micro_batches", "policy"),
    [
        # alternating layers, and micro-batches
        ("gemma-2-2b", 1, UNROLLED[4]), ("llama-3.2-1b", 4, UNROLLED[1]), ("llama-3.2-1b", 4, UNROLLED[2]),
        *(pytest.param("gemma-2-2b", 1, UNROLLED[i], marks=pytest.mark.long) for i in (0, 1)),
        *(pytest.param("llama-3.2-1b", 4, UNROLLED[i], marks=pytest.mark.long) for i in (0, 3, 4)),
    ],
)  # fmt: skip
def test_recomputation_of_unrolled_model_matches_loop(name, micro_batches, policy):
    model = loaded(name, 4)
    wanted = step(model, policy, accumulate=micro_batches)
    recomputed = step(unrolled(model), policy, accumulate=micro_batches)
    assert answers(recomputed) == answers(wanted)
    assert cg.costs(recomputed, **SIZES).filter(phase="recompute").total().matmul > 0


@pytest.mark.parametrize("policy", [None, cg.every_block(), cg.every(2), cg.every_block(early_stop=False)])
def test_numbered_scopes_count_as_layers(policy):
    sizes = {"B": 8, "D": 4, "F": 16}
    made, wanted = (cg.training_step(g, checkpoint=policy) for g in (numbered(), looped()))
    assert cg.peak_memory(made, **sizes) == cg.peak_memory(wanted, **sizes)


def test_outer_stack_defines_layers_unless_its_children_differ():
    def graph(widths, parts):
        with cg.Graph("g") as g:
            x = g.input("x", (B, D), grad=True)
            for i, width in enumerate(widths):
                for j in range(parts):
                    with cg.scope(f"stages/{i}/blocks/{j}"):
                        x = cg.relu(cg.linear(x, "b d -> b e", e=width * D))
            g.output(cg.reduce(x, "b d -> ", "mean"))
        return g

    def runs(g):
        return [{op.scope.split("/linear")[0] for op in run} for run in cg.every_block().runs(g.ops)]

    assert len(runs(graph((1, 1), 2))) == 2  # equal stages
    assert len(runs(graph((2, 3, 5), 2))) == 6  # a hierarchy


@each(
    ("policy", "text"),
    [
        (cg.every_block(), "graph 'flat' has no layers to recompute"),
        (cg.every(2), "graph 'flat' has no layers to recompute"),
        (cg.from_start(), "graph 'flat' has no loop to recompute"),
        (cg.selective("inside"), "'inside' of graph 'flat' is inside a kernel"),
        (cg.selective("nowhere"), "'nowhere' matches no scope or op"),
    ],
)
def test_policy_without_a_match_raises(policy, text):
    with cg.Graph("flat") as g:
        x = g.input("x", (B, D)) @ g.param("w", (D, D))
        with cg.kernel("fused"), cg.scope("inside"):
            x = cg.relu(2 * x)
        g.output(cg.reduce(x, "b d -> ", "mean"))
    with pytest.raises(GraphError, match=text):
        cg.training_step(g, checkpoint=policy)


def test_layer_count_not_divisible_by_k_raises():
    with pytest.raises(GraphError, match="every 3 of the 4 layers in 'h': expected a divisor"):
        cg.training_step(numbered(), checkpoint=cg.every(3))


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "olmo-2-1b", "mixtral-8x7b"])
def test_outer_views_do_not_split_a_recomputed_region(name):
    model = load(name)
    plain, part = (cg.saved_bytes(step(model, policy), **SIZES) for policy in (None, cg.selective("attention")))
    assert part["layers"] < plain["layers"]
    if name == "llama-3-8b":  # inputs of both halves, three 14336-wide MLP tensors, its norm and its statistics
        tokens, hidden, wide = 2 * 64, 4096, 14336
        assert part["layers"] == tokens * (2 * (3 * hidden + 4 * wide) + 4)


def test_checkpoint_without_early_stop_recomputes_whole_layers():
    sizes = {"B": 4, "D": 32, "F": 64}
    stops, whole = (cg.training_step(looped(3), checkpoint=cg.every_block(early_stop=early)) for early in (True, False))
    forward = cg.costs(looped(3), **sizes).filter(scope="h").total().matmul
    again = [cg.costs(s, **sizes).filter(phase="recompute").total().matmul for s in (stops, whole)]
    assert again == [forward // 2, forward]


# -- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [pytest.param(cg.selective("attention"), marks=pytest.mark.long), cg.selective("v_cache"),
     cg.every_block(keep=["matmul"])],
)  # fmt: skip
def test_recomputed_kernel_survives_a_file(tmp_path, policy):
    recomputed = step(loaded("gemma-2-2b", 2), policy)
    cg.save(recomputed, tmp_path / "g.json")
    assert answers(cg.load(tmp_path / "g.json")) == answers(recomputed)


# -- layer selection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [("layers[3:]/*/q", 1), ("layers[:3]/attention/q", 3), ("layers[1:3]/*/q", 2), ("layers[-1]/*/q", 1),
     ("layers/2/attention/q", 1), ("layers[2]/*/q", 1), ("*/attention/q", 4), ("layers[:]/*/q", 4)],
)  # fmt: skip
def test_lora_on_selected_layers(pattern, layers):
    model = loaded("llama-3.2-1b", 4)
    rank, hidden = 8, 2048
    adapted = [cg.lora(g, rank, [pattern]) for g in (model, unrolled(model))]
    assert [cg.param_count(g) - cg.param_count(model) for g in adapted] == [layers * rank * 2 * hidden] * 2
    assert answers(adapted[0]) == answers(adapted[1])


@pytest.mark.parametrize("pattern", ["layers[1:]/mlp", "layers[:2]", "layers/3", "*/norm"])
def test_freezing_selected_layers(pattern):
    model = loaded("llama-3.2-1b", 4)
    frozen = [step(g, cg.every_block(), freeze=pattern) for g in (model, unrolled(model))]
    assert answers(frozen[0]) == answers(frozen[1])
    assert answers(frozen[0]) != answers(step(model, cg.every_block()))


@pytest.mark.parametrize("name", ["layers[:2]", "layers/3", "layers[1:]/mlp", "q", "attention"])
def test_quantization_skips_selected_layers(name):
    model = loaded("llama-3.2-1b", 4)
    quantized = [cg.quantize(g, "int8", skip=[name]) for g in (model, unrolled(model))]
    assert answers(quantized[0]) == answers(quantized[1])
    assert cg.param_bytes(quantized[0]) > cg.param_bytes(cg.quantize(model, "int8"))


CHAINS = {
    "adapted and not quantized": (
        "bert-base", 4, lambda g: cg.quantize(cg.lora(g, 4, "layers[-1]"), "int8", skip=["layers[2:]"]),
    ),
    "adapters not quantized": ("bert-base", 2, lambda g: cg.quantize(cg.lora(g, 4), "int8", skip=["lora_a", "tokens"])),
    "quantized and kept": (
        "mixtral-8x7b", 3, lambda g: step(cg.quantize(g, "int4"), cg.every_block(keep=["matmul"]), freeze="layers[:2]"),
    ),
    "offloaded": ("gpt2", 2, lambda g: cg.offload(step(g, cg.selective("mlp"), accumulate=3), "parameters")),
    "offloaded with accumulation": (
        "gpt2", 2, lambda g: cg.offload(training_step(g, precision="bf16", accumulate=3), "optimizer"),
    ),
    "clipped": ("gpt2", 4, lambda g: step(g, cg.every(2), clip=1.0)),
    "offloaded in groups": ("gpt2", 4, lambda g: cg.offload(step(g, cg.every(2)), "optimizer")),
    "cast in groups": (
        "llama-3.2-1b",
        4,
        lambda g: cg.training_step(cg.quantize(g, "nf4"), precision="bf16-mixed", checkpoint=UNROLLED[-1]),
    ),
    "orthogonal": ("gpt2", 2, lambda g: cg.training_step(g, optimizer=cg.Muon(ns_steps=1))),
}  # fmt: skip


#: Transform chains also covered by other tests or shorter chains.
LARGER = ("quantized and kept", "offloaded in groups", "cast in groups")


@pytest.mark.parametrize("chain", [pytest.param(c, marks=pytest.mark.long) if c in LARGER else c for c in CHAINS])
def test_transforms_of_unrolled_model_match_loop(chain):
    name, layers, applied = CHAINS[chain]
    made, written_out = (applied(g) for g in (loaded(name, layers), unrolled(loaded(name, layers))))
    assert answers(made) == answers(written_out)


@pytest.mark.parametrize("policy", [None, cg.every_block(), cg.every_block(keep=["matmul"])])
def test_recomputed_recurrent_layers_match_loop(policy):
    steps = [step(g, policy) for g in (loaded("lstm-ptb-small", 2), unrolled(loaded("lstm-ptb-small", 2), S=5))]
    for ask in (cg.flops, cg.matmul_flops, cg.peak_memory):
        assert ask(steps[0], B=2, S=5) == ask(steps[1], B=2)


def test_layer_ranges_work_for_symbolic_depth():
    model = load("llama-3.2-1b", symbolic=True)
    adapted = cg.lora(cg.lora(model, 8, ["layers[4:]/*/q"]), 8, ["layers[-2:]/*/k"], trainable=["*/lora_a", "*/lora_b"])
    D, G, K, H, L = cg.dims("D G K H L")
    grown = cg.param_count(adapted) - cg.param_count(model)
    assert (grown - (8 * (D + H * K) * (L - 4) + 16 * (D + G * K))).expand() == 0


@each(
    ("pattern", "error", "text"),
    [
        ("layers[40:]", GraphError, r"'layers\[40:\]' of 4 layers in 'layers': expected at most 4"),
        ("blocks[1:]", GraphError, r"'blocks\[1:\]' matches no parameter or scope"),
        ("layers[1:]", UnsupportedError, "'layers' has 2 alternating layers per iteration, expected a multiple of 2"),
    ],
)
def test_invalid_layer_ranges_raise(pattern, error, text):
    with pytest.raises(error, match=text):
        cg.lora(loaded("gemma-2-2b", 4), 8, [pattern])


def test_unrolled_alternating_layers_are_selected_individually():
    model = cg.unroll(loaded("gemma-2-2b", 4))
    sizes = [cg.param_count(cg.lora(model, 8, [p])) for p in ("layers[1:]", "layers/0", "layers[:]")]
    assert sizes[0] + sizes[1] - cg.param_count(model) == sizes[2]


# -- scales ------------------------------------------------------------------------------------------------------


STORED = [("fp8_e4m3", {}), ("int4", {"group": 32}), ("mxfp4", {})]
SCALED = [(n, *stored) for n in ("lstm-ptb-small", "llama-3.2-1b", "mixtral-8x7b") for stored in STORED]


@pytest.mark.parametrize(("name", "weights", "more"), SCALED)
def test_loop_reads_per_iteration_scales(name, weights, more):
    decoding = cg.decode(cg.quantize(loaded(name, 2), weights, **more))
    sizes = {"B": 2} if name.startswith("lstm") else SIZES
    assert answers(decoding, **sizes) == answers(cg.unroll(decoding), **sizes)
