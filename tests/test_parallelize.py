"""Zoo models parallelized by layer name: every language model, with values checked for ten families."""

import pytest
import sympy
from shared import load, training_step

import costgraph as cg
from costgraph import testing

B, S, DP, TP = cg.dims("B S DP TP")

#: One model per language-model family, with small sizes that two ranks on each axis divide.
SIZES = {
    "deepseek-v2-lite": {
        "D": 4, "H": 2, "L": 3, "Ld": 1, "V": 8, "F": 4, "Fe": 4, "E": 3, "k": 2, "Es": 2, "C": 3, "Kn": 2, "Kr": 2,
        "Kv": 2,
    },
    "falcon-7b": {"D": 8, "H": 2, "G": 1, "L": 2, "V": 8, "F": 4},
    "gemma-2-27b": {"D": 4, "H": 4, "G": 2, "K": 2, "L": 2, "V": 8, "F": 4, "W": 2},
    "gpt-oss-120b": {"D": 6, "H": 4, "G": 2, "K": 2, "Fe": 6, "E": 3, "k": 2, "L": 2, "V": 8, "W": 2},
    "gpt2": {"D": 4, "H": 2, "F": 6, "L": 2, "V": 8, "P": 5},
    "mamba-1.4b": {"D": 3, "E": 4, "N": 2, "R": 2, "L": 2, "V": 8},
    "mixtral-8x22b": {"D": 6, "H": 4, "G": 2, "K": 2, "Fe": 6, "E": 3, "k": 2, "L": 2, "V": 8},
    "olmo-2-13b": {"D": 4, "H": 2, "G": 2, "K": 2, "L": 2, "V": 8, "F": 4},
    "phi-3-medium": {"D": 4, "H": 2, "G": 2, "K": 2, "L": 2, "V": 8, "F": 4, "W": 2},
    "qwen3-0.6b": {"D": 4, "H": 4, "G": 2, "K": 2, "L": 2, "V": 8, "F": 4},
}  # fmt: skip
OTHERS = (
    "deepseek-v2", "gemma-3-1b", "linear-attention-cifar10", "llama-2-13b", "mamba2-1.3b", "qwen1.5-moe-a2.7b",
    "qwen2.5-0.5b", "qwen3-235b-a22b", "rwkv-7-0.1b", "t5-11b", "whisper-base", "xlstm-1.3b", "xlstm-7b",
)  # fmt: skip


def step(name, optimizer=None, **options):
    model = load(name, symbolic=True, dtype="fp32")
    return training_step(model, optimizer=optimizer or cg.SGD(), **options)


#: Models in the plain run: latent attention and experts, one weight for q and k, sinks, recurrences, encoder-decoder.
PLAIN = ("deepseek-v2-lite", "falcon-7b", "gpt-oss-120b", "mamba-1.4b", "rwkv-7-0.1b", "t5-11b")


@pytest.mark.parametrize(
    "name", [n if n in PLAIN else pytest.param(n, marks=pytest.mark.long) for n in (*SIZES, *OTHERS)]
)
def test_language_models_parallelize_without_resharding(name):
    whole = step(name)
    rank = cg.parallelize(whole, dp=DP, tp=TP)
    assert rank.sharding.resharded == ()  # `strict` requires this, and no replicated weights
    assert bool(rank.sharding.replicated) == name.startswith(("mamba", "rwkv", "xlstm"))
    share = sympy.cancel(cg.matmul_flops(rank) * DP / cg.matmul_flops(whole))
    assert share.subs(TP, 1) == 1
    assert share.has(TP)


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x22b", *(pytest.param(n, marks=pytest.mark.long) for n in SIZES)])
def test_parallel_step_computes_same_values(name):
    whole = step(name)
    # tp replicates Mamba's matmuls, which `strict` refuses
    rank = cg.parallelize(whole, dp=2, tp=2, strict=not name.startswith("mamba"))
    assert rank.sharding.resharded == ()
    testing.check_sharded(whole, rank, **SIZES[name], B=2, S=3)


def test_step_with_all_parallelisms_computes_same_values():
    whole = step("llama-2-13b", cg.AdamW(), precision="bf16-master", accumulate=2, checkpoint=cg.every_block())
    rank = cg.parallelize(whole, dp=2, tp=2, zero=3, sequence=True, strict=True)
    assert {m.collective for m in cg.communication(rank)} == {"all_gather", "all_reduce", "reduce_scatter"}
    testing.check_sharded(whole, rank, B=2, S=2, D=4, H=4, G=2, K=2, F=4, L=2, V=4)


def test_llama_3_70b_peak_closed_form():
    whole = training_step(load("llama-3-70b"), precision="bf16-master")
    rank = cg.parallelize(whole, dp=DP, tp=TP, zero=3, sequence=True, strict=True)
    box = {"B": (64, 1024), "S": (2048, 8192), "DP": (8, 512), "TP": (2, 8)}
    peak = cg.peak_memory(rank, within=box)
    assert len(cg.regimes(peak)) <= 8
    sizes = {"B": 512, "S": 4096, "DP": 64, "TP": 8}
    numbers = cg.parallelize(whole, dp=64, tp=8, zero=3, sequence=True)
    assert cg.evaluate(peak, **sizes) == cg.peak_memory(rank, **sizes) == cg.peak_memory(numbers, B=512, S=4096)


def test_unit_degrees_change_nothing():
    whole = step("gpt2")
    rank = cg.parallelize(whole, zero=3, sequence=True)
    assert cg.peak_memory(rank) == cg.peak_memory(whole)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_shard_states_gradients_and_parameters(stage):
    whole = step("llama-2-13b", cg.AdamW(implementation="fused"))
    rank = cg.parallelize(whole, dp=DP, zero=stage, strict=True)

    def kept(graph, *roles):
        sources = [t for t in graph.tensors if t.producer is None and t.role in roles and t.ndim > t.storage.pieces]
        return sum(t.storage.bytes.expr for t in sources)  # step counters are scalars

    assert sympy.expand(kept(rank, "state") * DP - kept(whole, "state")) == 0
    params = kept(whole, "param") / (DP if stage == 3 else 1)
    assert sympy.expand(kept(rank, "param") - params) == 0
    gradients, split = (  # gradients in a unit are views of one buffer
        sum(storage.bytes.expr for storage in {g.storage for g in graph.gradients.values()}) for graph in (whole, rank)
    )
    assert sympy.expand(split * (DP if stage >= 2 else 1) - gradients) == 0


@pytest.mark.parametrize("stage", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_gradient_buffers_inherit_parameter_placement(stage):
    whole = step("llama-2-13b", precision="megatron-bf16", accumulate=2)
    rank = cg.parallelize(whole, dp=2, tp=2, zero=stage, sequence=True, strict=True)
    split = {"dp", "tp"} if stage > 1 else {"tp"}
    assert rank.sharding.places["layers/mlp/up/weight.grad"].axes == split
    testing.check_sharded(whole, rank, B=2, S=2, D=4, H=4, G=2, K=2, F=4, L=2, V=4)


@pytest.mark.parametrize("stage", [3, 0, 1, 2])
def test_accumulated_gradients_are_reduced_once(stage):
    whole = step("llama-2-13b", cg.AdamW(), precision="bf16-master", accumulate=3)
    each, once = (
        cg.communication(cg.parallelize(whole, dp=DP, tp=2, zero=stage, reduce_every_microbatch=each, strict=True))
        for each in (True, False)
    )
    reduced = [rows.filter(axis="dp", phase="backward") for rows in (each, once)]
    sums = [sum(m.ring_bytes for m in rows if m.collective != "all_gather") for rows in reduced]
    assert sympy.cancel(sums[0] / sums[1]) == 3
    # activations are reduced along tp in each micro-batch
    assert sympy.expand(each.filter(axis="tp").total() - once.filter(axis="tp").total()) == 0
    if stage < 3:  # otherwise by unit, as the last micro-batch has them
        assert any(m.op == "layers/mlp/up/weight.grad." + m.collective for m in once)
    rank = cg.parallelize(whole, dp=2, tp=2, zero=stage, sequence=True, reduce_every_microbatch=False, strict=True)
    testing.check_sharded(whole, rank, B=2, S=2, D=4, H=4, G=2, K=2, F=4, L=2, V=4)


def test_partial_sums_are_reduced_in_accumulation_dtype():
    whole = step("llama-2-13b", accumulate=2, precision="bf16")
    policy = cg.FullyShard("dp", reduce_dtype="fp32")
    split = {t.name: "(b dp)" + " c" * (t.ndim - 1) for t in whole.tensors if t.name == "norm/weight"}
    with pytest.raises(cg.UnsupportedError, match="reduce_dtype='fp32'; expected gradients to be reduced in the"):
        cg.shard(whole, cg.mesh(dp=2), split, gather=policy, reduce_every_microbatch=False)


@pytest.mark.parametrize("count", [2, "N"])
def test_last_micro_batch_reduces_accumulated_gradients_by_unit(count):
    """HSDP in mixed precision: gather in bf16, accumulate and reduce in fp32, one scatter and all-reduce per unit."""
    times, n = (count, {}) if count == 2 else (cg.dims(count), {count: 3})
    mixed = cg.Policy("mixed", params="fp32", compute="bf16")
    whole = cg.training_step(load("llama-3-8b", symbolic=True), optimizer=cg.AdamW(), precision=mixed, accumulate=times)
    split = {t.name: "n (b rep own) s" for t in whole.tensors if t.role == "input"}
    for t in whole.tensors:
        if t.producer is None and t.role in ("param", "state") and t.ndim > t.storage.pieces:
            split[t.name] = " ".join(["(a own)", *(f"b{i}" for i in range(t.ndim - t.storage.pieces - 1))])
    policy = cg.FullyShard("own", param_dtype="bf16", reduce_dtype="fp32")
    rank = cg.shard(whole, cg.mesh(rep=2, own=2), split, gather=policy, reduce_every_microbatch=False, strict=True)
    sizes = {"B": 4, "S": 2, "D": 4, "F": 4, "H": 2, "G": 2, "K": 2, "L": 3, "V": 4, **n}
    testing.check_sharded(whole, rank, **sizes)
    layer = 2 * 4 + 4 * (4 * 4) + 3 * (4 * 4)  # norms, q, k, v and proj, gate, up and down
    root = 4 * 4 + 4 + 4 * 4
    rows = [m for m in cg.communication(rank, **sizes).filter(phase="backward") if m.collective != "all_gather"]
    assert [(m.collective, m.bytes, m.times) for m in rows] == [
        ("reduce_scatter", 4 * layer, 3), ("all_reduce", 4 * layer / 2, 3),
        ("reduce_scatter", 4 * root, 1), ("all_reduce", 4 * root / 2, 1),
    ]  # fmt: skip


def test_last_layer_is_prefetched_before_root_backward():
    """torch's FSDPParamGroup does the same in `_pre_backward`, whether the root is still gathered or not."""
    rank = cg.parallelize(training_step(load("llama-3-8b")), dp=2, zero=3, strict=True)
    names = [op.name for op in rank.ops]
    (buffer,) = (op for op in rank.ops if op.kind.name == "empty" and op.name.startswith("layers.backward"))
    first = next(i for i, op in enumerate(rank.ops) if op.phase == "backward" and op.name.startswith("head"))
    assert names.index(buffer.name) < first < names.index("layers.backward")
    assert [op.name for op in rank.successors(buffer.results[0])] == ["layers.backward"]


def test_divisible_axis_is_sharded_before_longer_one():
    """GPT-2 has 50,257 tokens, a prime number."""
    whole = training_step(load("gpt2"), optimizer=cg.SGD())
    rank = cg.parallelize(whole, dp=4, zero=3)
    assert rank.sharding.places["tokens/table"].dim("dp") == 1
    assert cg.param_count(rank) * 4 == cg.param_count(whole)


def test_expert_gradient_buffers_inherit_expert_placement():
    whole = step("mixtral-8x22b", cg.AdamW(), precision="megatron-bf16", accumulate=2)
    rank = cg.parallelize(whole, ep=4, zero=1, strict=True)
    sources = {t.name: t for t in rank.tensors if t.producer is None}
    for name in ("layers/moe/experts/gate_up", "layers/moe/experts/down"):
        assert {sources[name + end].sizes for end in ("", ".grad", ".exp_avg")} == {sources[name].sizes}
        assert "ep" in rank.sharding.places[name + ".grad"].axes


def test_reduced_states_are_sharded_along_other_axis():
    whole = step("llama-2-13b", cg.Adafactor())
    rank = cg.parallelize(whole, dp=2, zero=3, strict=True)
    testing.check_sharded(whole, rank, B=2, S=2, D=4, H=4, G=2, K=2, F=4, L=2, V=8)


@pytest.mark.parametrize("system", ["torch", "megatron"])
def test_residual_gradient_of_sharded_head_is_reduced_first(system):
    B, S, D, F, V, L = cg.dims("B S D F V L")
    with cg.Graph("plain") as g:

        def block(x):
            h = cg.relu(cg.linear(x, "b s d -> b s f", f=F, name="up"))
            return x + cg.linear(h, "b s f -> b s d", d=D, name="down")

        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), g.param("table", (V, D)))
        g.output(cg.linear(cg.repeat(L, block, x, name="layers"), "b s d -> b s v", v=V, name="head"))
        g.loss = "cross_entropy"
    whole = cg.training_step(g)
    rank = cg.parallelize(whole, tp=2, system=system)
    rows = [(r.op, r.bytes, r.times) for r in cg.communication(rank) if r.phase == "backward"]
    # the stream that the head reads, and each layer's input to its column-parallel and row-parallel matmuls
    assert rows == [("head/einsum.all_reduce", 4 * B * D * S, 1), ("layers/up/keep_alive.all_reduce", 4 * B * D * S, L)]
    testing.check_sharded(whole, rank, B=3, S=5, D=2, F=8, V=6, L=3)


def test_explicit_placements_take_precedence():
    whole = step("gpt2")
    rank = cg.parallelize(whole, tp=TP, placements={"tokens/table": "v d"}, strict=True)
    assert rank.sharding.places["tokens/table"].axes == frozenset()
    assert rank.sharding.places["layers/mlp/ffw1/weight"].axes == {"tp"}


def test_unknown_layer_names_are_refused():
    with cg.Graph("other") as g:
        g.output(cg.relu(g.input("x", (B, 4)) * g.param("w", (4,))))
    with pytest.raises(cg.GraphError, match="tp splits no parameter of graph 'other'"):
        cg.parallelize(g, tp=2)
    with pytest.raises(cg.GraphError, match="parallelize: zero is 4, expected 0, 1, 2 or 3"):
        cg.parallelize(g, dp=2, zero=4)
    with pytest.raises(cg.ShapeError, match="parallelize: dp: 0, expected a positive integer"):
        cg.parallelize(g, dp=0)


@pytest.mark.parametrize("options", [{}, {"checkpoint": cg.every_block()}], ids=["saved", "recomputed"])
def test_sequence_parallel_inputs_are_saved_or_gathered_again(options):
    whole = training_step(load("llama-3-8b", symbolic=True, dtype="fp32"), **options)
    again = cg.parallelize(whole, tp=2, sequence=True, keep_gathered=False, strict=True)
    held = cg.parallelize(whole, tp=2, sequence=True, strict=True)
    sizes = {"B": 2, "S": 2, "D": 4, "H": 2, "G": 2, "K": 2, "F": 4, "L": 2, "V": 4}
    testing.check_sharded(whole, held, **sizes)
    both = [cg.communication(g).filter(phase="backward", collective="all_gather").rows for g in (again, held)]
    # Each of two matmuls in a layer, and the head, saves its gathered input; gradients of scattered tensors remain.
    assert [len(rows) for rows in both] == [6, 3]
    x = 4 * 2 * 2 * 4  # B*S*D elements of 4 bytes
    more = {scope: f - cg.saved_bytes(again)[scope] for scope, f in cg.saved_bytes(held).items()}
    # the other half of the matmul inputs, two per layer and one for the head
    at = {cg.dims(name): n for name, n in sizes.items()}
    root, layer = (sympy.sympify(more[scope]).subs(at) for scope in ("", "layers"))
    assert (root, layer) == (x // 2, 0 if options else 2 * x // 2)  # a recomputed layer saves neither


# -- recomputed layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True])
def test_reduced_activations_are_saved_or_recomputed(sequence):
    """In fp32 Llama, a layer saves its input, 4*B*D*S, or also the results of two matmuls, but no third partial sum.

    With sequence parallelism a rank saves its shard, and the backward pass gathers the rest again.
    """
    B, S, D = cg.dims("B S D")
    model = load("llama-3-8b", symbolic=True, dtype="fp32")
    sums = "reduce_scatter" if sequence else "all_reduce"
    for communication, kept, again in ((True, 1, 1), (False, 3, 0)):
        checkpoint = cg.every_block(communication=communication)
        whole = cg.training_step(model, optimizer=cg.SGD(), checkpoint=checkpoint)
        rank = cg.parallelize(whole, tp=2, sequence=sequence, strict=True)
        sent = [(m.phase, m.collective) for m in cg.communication(rank) if m.scope.startswith("layers")]
        assert [row for row in sent if row[0] == "forward" and "reduce" in row[1]] == [("forward", sums)] * 2
        assert [row for row in sent if row[0] == "recompute" and "reduce" in row[1]] == [("recompute", sums)] * again
        assert cg.saved_bytes(rank)["layers"] == kept * 4 * B * D * S / (2 if sequence else 1)
        testing.check_sharded(whole, rank, B=2, S=2, D=4, H=2, G=2, K=2, L=2, V=4, F=4)


def test_saving_reduced_activations_requires_known_names():
    B, D, L = cg.dims("B D L")
    with cg.Graph("plain") as g:
        y = cg.repeat(L, lambda x: x + cg.relu(cg.linear(x, "b d -> b e", e=D)), g.input("x", (B, D)), name="layers")
        g.output(cg.reduce(y, "b d -> ", "sum"))
    with pytest.raises(cg.GraphError, match="communication=False of graph 'plain': no matmul has the name of a layer"):
        cg.training_step(g, checkpoint=cg.every_block(communication=False))


def test_quantized_weights_are_not_communicated():
    # activations are gathered to the weight shards in the matmul dtype
    found, sizes = [], {"B": 3, "S": 26, "L": 2}
    for precision in ("bf16", "fp8"):
        step = training_step(load("llama-3-8b"), precision=precision)
        rank = cg.parallelize(step, dp=3, tp=2, sequence=True, strict=True)
        assert 6 * cg.matmul_flops(rank, **sizes) == cg.matmul_flops(step, **sizes)
        sent = dict.fromkeys([("dp", "all_reduce"), ("tp", "reduce_scatter"), ("tp", "all_gather")], 0)
        for m in cg.communication(rank, **sizes):
            if m.bytes > 4:  # the absolute maximum of a tensor
                sent[m.axis, m.collective] = sent.get((m.axis, m.collective), 0) + m.bytes
        found.append(sent)
    plain, narrow = found
    assert {key for key in plain if plain[key] != narrow[key]} == {("tp", "all_gather")}
    assert narrow["tp", "all_gather"] < plain["tp", "all_gather"]
