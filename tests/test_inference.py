"""Prefill and decode: hand-derived counts, brute force, and laws relating steps to one full pass."""

import pytest
from budget import drawing
from each import each
from hypothesis import given
from hypothesis import strategies as st

import costgraph as cg
from costgraph import testing
from costgraph.errors import GraphError, ShapeError, UnsupportedError
from costgraph.files.graphs import (
    load,
    save,
)
from costgraph.ops.kv_cache import append

B, S, D, H, G, K, F, L, M, V, W = cg.dims("B S D H G K F L M V W")
SIZES = {"B": 2, "D": 6, "H": 4, "G": 2, "K": 3, "L": 2, "V": 7}


def decoder(dtype="bf16", **attention):
    with cg.Graph("decoder", dtype=dtype) as g:
        x = cg.embedding(g.input("ids", (B, S), "int64"), g.param("table", (V, D)))
        rope = cg.nn.rotary_tables(cg.ops.arange(S), 2 * K)

        def block(x):
            return x + cg.nn.self_attention(cg.rms_norm(x), H, 2 * K, groups=G, rope=rope, **attention)

        x = cg.repeat(L, block, x, name="layers")
        g.output(cg.linear(x, "b s d -> b s v", v=V, name="head"))
    return g


def recurrence():
    with cg.Graph("recurrence") as g:
        x = g.input("x", (B, S, D))

        def block(x):
            xs = cg.rearrange(cg.linear(x, "b s d -> b s e", e=D), "b s d -> s b d")

            def step(state, x):
                state = 0.5 * state + x
                return state, cg.tanh(state)

            _, y = cg.scan(S, step, cg.ops.initial_state((B, D)), xs)
            return x + cg.rearrange(y, "s b d -> b s d")

        g.output(cg.repeat(L, block, x, name="layers"))
    return g


# -- one new token, by hand ------------------------------------------------------------------------------------


def test_decode_step_reads_weights_and_cache_once():
    step = cg.decode(decoder())
    # q and proj with H heads, k and v with G, the LM head: 2 per weight and sequence; scores and values: 2*2K per head
    weights = L * (2 * D * H * 2 * K + 2 * D * G * 2 * K) + D * V
    assert cg.matmul_flops(step).equals(2 * B * weights + 2 * 2 * B * H * 2 * K * S * L)
    assert cg.matmul_flops(step, count="full") == cg.matmul_flops(step)  # one query sees the whole cache


def test_cache_holds_keys_and_values_per_layer():
    step = cg.decode(decoder())
    assert cg.cache_bytes(step).equals(2 * 2 * B * S * G * 2 * K * L)
    assert cg.cache_bytes(cg.decode(decoder("fp32"))).equals(2 * cg.cache_bytes(step))
    assert cg.cache_bytes(cg.prefill(decoder())) == cg.cache_bytes(step)
    assert cg.cache_bytes(decoder()) == 0


def test_cache_bytes_for_mqa_and_mha():
    each = cg.cache_bytes(cg.decode(decoder()), **SIZES, S=1)
    with_all = cg.cache_bytes(cg.decode(decoder()), **{**SIZES, "G": 4}, S=1)
    with_one = cg.cache_bytes(cg.decode(decoder()), **{**SIZES, "G": 1}, S=1)
    assert (with_one, each, with_all) == (1 * with_one, 2 * with_one, 4 * with_one)


def test_cache_lives_throughout_and_is_read_whole():
    step = cg.decode(decoder())
    rows = [r for r in cg.lifetimes(step, **SIZES, S=11) if r.tensor.endswith(".kept")]
    assert [r.bytes for r in rows] == 2 * [2 * 2 * 2 * 11 * 2 * 3 * 2]  # L*B*G*S*2K two-byte elements
    assert {(r.role, r.born, r.dies) for r in rows} == {("cache", None, None)}
    fused = cg.bytes_moved(step, fused=True, **SIZES, S=11) - cg.bytes_moved(step, fused=True, **SIZES, S=10)
    assert fused == cg.cache_bytes(step, **SIZES, S=1)  # one more position is read
    declared = cg.bytes_moved(step, **SIZES, S=11) - cg.bytes_moved(step, **SIZES, S=10)
    assert declared == fused
    peak = cg.peak_memory(step, **SIZES, S=1001) - cg.peak_memory(step, **SIZES, S=1000)
    assert peak == fused


def test_sliding_window_bounds_the_cache():
    step = cg.decode(decoder(window=W))
    assert cg.cache_bytes(step, **SIZES, S=5, W=8) == cg.cache_bytes(cg.decode(decoder()), **SIZES, S=5)
    assert cg.cache_bytes(step, **SIZES, S=50, W=8) == cg.cache_bytes(cg.decode(decoder()), **SIZES, S=8)
    several = cg.decode(decoder(window=W), 3)  # the first of three sees 7 cached positions
    assert cg.cache_bytes(several, **SIZES, S=50, W=8) == cg.cache_bytes(cg.decode(decoder()), **SIZES, S=10)
    whole = cg.prefill(decoder(window=W))
    assert cg.cache_bytes(whole, **SIZES, S=50, W=8) == cg.cache_bytes(step, **SIZES, S=50, W=8)


def test_prefill_computes_last_logits_only():
    g = decoder()
    saved = cg.matmul_flops(cg.prefill(g)) - cg.matmul_flops(cg.prefill(g, logits="last"))
    assert saved.equals(2 * B * (S - 1) * D * V)
    assert [t.shape for t in cg.prefill(g, logits="last").outputs] == [(B, 1, V)]
    assert [t.shape for t in cg.decode(g, 4, logits="last").outputs] == [(B, 1, V)]


def test_softcap_does_not_hide_the_head():
    with cg.Graph("g") as g:
        x = cg.ops.cache(g.input("x", (B, S, D)), "b s d", along="s")
        g.output(cg.ops.pointwise("softcap", cg.linear(x, "b s d -> b s v", v=V, bias=True)))
    assert cg.matmul_flops(cg.prefill(g, logits="last")) == 2 * B * D * V


# -- brute force -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"kernel": "eager"}, {"window": 3}, {"window": 3, "kernel": "eager"}])
def test_decode_step_matches_interpreter_counts(tokens, options):
    sizes = {"B": 2, "S": 5, "D": 3, "H": 2, "G": 1, "K": 1, "L": 2, "V": 7}
    check_step(cg.decode(decoder("fp32", **options), tokens), sizes)


@pytest.mark.parametrize("tokens", [1, 2])
def test_recurrent_step_matches_interpreter_counts(tokens):
    check_step(cg.decode(recurrence(), tokens), {"B": 2, "D": 3, "L": 2, "S": 5})
    check_step(cg.prefill(recurrence()), {"B": 2, "D": 3, "L": 2, "S": 5})


def check_step(graph, sizes):
    counted = testing.run(graph, **sizes)
    assert cg.matmul_flops(graph, **sizes) == counted.matmul
    assert cg.flops(graph, **sizes) == counted.matmul + counted.pointwise + counted.transcendental
    assert cg.bytes_moved(graph, **sizes) == counted.bytes_moved
    assert cg.peak_memory(graph, **sizes) == counted.peak


# -- laws ------------------------------------------------------------------------------------------------------


@drawing(120)
@given(
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 9),
    groups=st.sampled_from([1, 2, 4]),
)
def test_chunks_add_up_to_the_whole_prompt(steps, window, groups):
    """Every pair of a query and a key that it sees is computed once, in whatever chunks the prompt is taken."""
    g = decoder(window=window)
    sizes = {**SIZES, "G": groups}
    at = total = 0
    for new in steps:
        at += new
        total += cg.matmul_flops(cg.decode(g, new), **sizes, S=at)
    assert total == cg.matmul_flops(g, **sizes, S=at)


def test_symbolic_token_count_matches_numbers():
    g = decoder(window=W)
    open_ = cg.decode(g, "T")
    for new in (1, 2, 7):
        for question in (cg.flops, cg.bytes_moved, cg.peak_memory, cg.cache_bytes):
            assert question(open_, T=new, S=9, W=4, **SIZES) == question(cg.decode(g, new), S=9, W=4, **SIZES)


def test_prefill_is_a_step_from_an_empty_cache():
    g = decoder()
    for question in (cg.flops, cg.param_count):
        assert question(cg.prefill(g)) == question(g)
    assert cg.flops(cg.decode(g, "T"), T=9, S=9, **SIZES) == cg.flops(g, S=9, **SIZES)
    assert cg.flops(cg.prefill(g, "T"), T=4, S=9, **SIZES) == cg.flops(cg.decode(g, "T"), T=4, S=9, **SIZES)


def test_inference_graphs_survive_a_file(tmp_path):
    for made in (cg.decode(decoder()), cg.prefill(recurrence()), cg.decode(recurrence(), "T")):
        save(made, tmp_path / "step.json")
        again = load(tmp_path / "step.json")
        assert cg.peak_memory(again) == cg.peak_memory(made)
        assert cg.bytes_moved(again) == cg.bytes_moved(made)


def test_inference_keeps_defaults_and_assumptions():
    step = cg.decode(cg.models.load("gpt2"))
    assert step.defaults == cg.models.load("gpt2").defaults
    with pytest.raises(cg.BindingError, match="S <= P"):
        cg.flops(step, B=1, S=1025)
    with pytest.raises(cg.BindingError, match="S >= 4"):
        cg.flops(cg.decode(cg.models.load("gpt2"), 4), B=1, S=3)


def test_cache_bytes_per_position_match_published():
    # 2*G*K*L two-byte elements: 2*32*128*32 and 2*8*128*80
    for name, expected in (("llama-2-7b", 524_288), ("llama-3-70b", 327_680)):
        assert cg.cache_bytes(cg.decode(cg.models.load(name)), B=1, S=1) == expected


# -- errors ----------------------------------------------------------------------------------------------------


def test_graph_without_cache_raises():
    with cg.Graph("plain") as g:
        g.output(cg.relu(g.input("x", (B, S))))
    with pytest.raises(GraphError, match=r"decode: graph 'plain' keeps no state between steps, expected costgraph"):
        cg.decode(g)


def test_training_step_cannot_be_decoded():
    step = cg.training_step(decoder(), loss="cross_entropy")
    with pytest.raises(GraphError, match="prefill: graph 'decoder' has a backward pass, expected only a forward pass"):
        cg.prefill(step)


@each(
    ("tokens", "error", "text"),
    [
        (0, ShapeError, "decode: tokens: 0, expected a positive integer"),
        ("D", GraphError, "decode: tokens D is a dimension of graph 'decoder', expected another name"),
        (2 * B, ShapeError, r"decode: tokens 2\*B, expected an integer or one symbol"),
    ],
)
def test_invalid_token_counts_raise(tokens, error, text):
    with pytest.raises(error, match=text):
        cg.decode(decoder(), tokens)


def test_unmarked_keys_raise():
    with cg.Graph("g") as g:
        x = g.input("x", (B, S, D))
        k = cg.ops.cache(cg.linear(x, "b s d -> b s e", e=D), "b t d", along="t")
        scores = cg.einsum(x, k, "b s d, b t d -> b s t")
        positions = cg.ops.arange(S, "fp32")
        g.output(scores + cg.ops.expand(positions, "t -> 1 1 t"))
    with pytest.raises(UnsupportedError, match=r"positions of keys with arange\(context=True\)"):
        cg.decode(g)


def test_opaque_op_without_positional_costs_raises():
    with cg.Graph("g") as g:
        x = cg.ops.cache(g.input("x", (B, S, D)), "b s d", along="s")
        g.output(cg.opaque("sort", [x], (B, S, D), flops=B * S * D))
    with pytest.raises(UnsupportedError, match="op 'sort' states its sizes or costs in S and reads cached tensors"):
        cg.decode(g)


def test_two_sequence_lengths_raise():
    with cg.Graph("g") as g:
        x = cg.ops.cache(g.input("x", (B, S, D)), "b s d", along="s")
        y = cg.ops.cache(g.input("y", (B, M, D)), "b m d", along="m")
        g.output(cg.einsum(x, y, "b s d, b m d -> b s m"))
    with pytest.raises(UnsupportedError, match="runs over M and S, expected one open size"):
        cg.decode(g)


def test_last_logits_without_a_head_raise():
    with cg.Graph("g") as g:
        x = cg.ops.cache(g.input("x", (B, S, D)), "b s d", along="s")
        g.output(cg.tanh(x))
    with pytest.raises(UnsupportedError, match="has no head that computes its output"):
        cg.prefill(g, logits="last")


@each(
    ("arguments", "text"),
    [
        (("b s",), "expected a name for each axis"),
        (("b s s",), "axis 's' twice"),
        (("b s (d e)",), "expected a name for each axis"),
    ],
)
def test_marks_name_every_axis(arguments, text):
    with cg.Graph("g") as g, pytest.raises(cg.CostGraphError, match=text):
        cg.ops.cache(g.input("x", (B, S, D)), *arguments)


def test_invalid_cache_marks_raise():
    with cg.Graph("g") as g:
        x = g.input("x", (B, S, D))
        with pytest.raises(cg.PatternError, match="along='t', expected an axis of 'b s d'"):
            cg.ops.cache(x, "b s d", along="t")
        with pytest.raises(cg.PatternError, match=r"window=4 without along="):
            cg.ops.cache(x, "b s d", window=4)
        with pytest.raises(ShapeError, match="expected equal sizes on all axes but 1"):
            append(x, g.input("y", (B, S, F)), 1)
