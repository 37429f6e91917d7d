"""Expert parallelism: token dispatch and combine, against torch's collectives and computed values."""

import pytest
import sympy
from shared import load

import costgraph as cg
from costgraph import testing
from costgraph.transforms.shard.shard import Sharder

B, D, F, L, N, P, T = cg.dims("B D F L N P T")
#: Tokens over two mesh axes, experts over one of them, their width over a third.
PLACES = {
    "x": "(b dp ep) d", "ids": "(b dp ep) k", "w": "(b dp ep) k",
    "experts/gate_up": "(e ep) d (2 f tp)", "experts/gate_up_bias": "(e ep) (2 f tp)",
    "experts/down": "(e ep) (f tp) d", "experts/down_bias": "(e ep) d",
}  # fmt: skip


def mixture(experts=6, chosen=3, *, bias=True):
    """Build a layer whose routing choices are inputs."""
    with cg.Graph("mixture") as g:
        x, ids = g.input("x", (B, D)), g.input("ids", (B, chosen), dtype="int64")
        h = cg.linear(x, "b d -> b e", e=D, name="in")
        # 0, 1, 2, ... squared modulo 6 is 0, 1, 4, 3, 4, 1: three in each half, with different counts per expert
        y = cg.nn.experts(h, g.input("w", (B, chosen)), ids * ids, experts, F, bias=bias)
        g.output(cg.reduce(y * y, "b d -> ", "mean"))
    return cg.training_step(g, optimizer=cg.SGD())


def test_tokens_are_dispatched_and_combined_in_both_passes():
    whole = mixture(8, 2, bias=False)
    places = {name: text for name, text in PLACES.items() if "bias" not in name}
    rank = cg.shard(whole, cg.mesh(dp=N, ep=P, tp=1), places, strict=True)
    sent = cg.communication(rank).filter(collective="all_to_all")
    counts, *rows = sent
    assert {m.axis for m in sent} == {"ep"}
    assert (counts.phase, counts.bytes) == ("forward", 4 * 8)  # int32 end offsets of each expert's rows
    assert [m.phase for m in rows] == ["forward", "forward", "backward", "backward"]
    # B/(N*P) tokens per rank, 2 rows per token, D elements of 4 bytes
    assert {m.bytes for m in rows} == {8 * B * D / (N * P)}
    assert {sympy.expand(m.ring_bytes - 8 * B * D / (N * P) * (P - 1) / P) for m in rows} == {0}
    # torch 2.13.0, all_to_all_single with autograd, fake group with four ranks and 64 tokens each: 16,384 bytes each
    assert [cg.evaluate(m.bytes, B=256, D=32, N=1, P=4) for m in rows] == [16_384] * 4
    assert sympy.cancel(cg.matmul_flops(rank) * N * P / cg.matmul_flops(whole)) == 1
    experts = [t for t in rank.params if "experts" in t.name]
    assert [t.shape for t in experts] == [(8 / P, D, 2 * F), (8 / P, F, D)]


def test_expert_gradients_are_complete_on_their_ranks():
    rank = cg.shard(mixture(), cg.mesh(dp=N, ep=P, tp=1), PLACES, strict=True)
    reduced = cg.communication(rank).filter(phase="backward", collective="all_reduce")
    assert sorted({m.axis for m in reduced if "experts" in m.scope}) == ["dp"]
    assert sorted(m.axis for m in reduced if "experts" not in m.scope) == ["dp", "ep"]


@pytest.mark.parametrize("bias", [False, True])
def test_expert_parallel_step_computes_same_values(bias):
    whole = mixture(bias=bias)
    places = {name: text for name, text in PLACES.items() if bias or "bias" not in name}
    rank = cg.shard(whole, cg.mesh(dp=N, ep=P, tp=T), places, strict=True)
    testing.check_sharded(whole, rank, B=8, D=3, F=4, N=2, P=2, T=2)


def test_unbalanced_routing_is_detected():
    """The squares of 0 to 5 modulo 6 give 3 rows to the first pair of experts, 1 to the second and 2 to the third."""
    whole = mixture()
    rank = cg.shard(whole, cg.mesh(dp=1, ep=P, tp=1), PLACES, strict=True)
    text = r"merge': rank 0 has rows up to 3 for rank 0 of 3 and those before, expected 2: the routing is not balanced"
    with pytest.raises(AssertionError, match=text):
        testing.check_sharded(whole, rank, B=6, D=3, F=4, P=3)


@pytest.mark.parametrize("checkpoint", [pytest.param(None, marks=pytest.mark.long), cg.every_block()])
def test_routed_layers_compute_same_values(checkpoint):
    """If tokens choose all experts, ranks send equal numbers of rows to each, in different orders."""
    model = load("mixtral-8x22b", symbolic=True, dtype="fp32")
    whole = cg.training_step(model, optimizer=cg.SGD(), checkpoint=checkpoint)
    places = {"tokens": "(b ep) s", "targets": "(b ep) s", "layers/*/experts/*": "(e ep) d f"}
    rank = cg.shard(whole, cg.mesh(ep=P), places, strict=True)
    sent = cg.communication(rank).filter(collective="all_to_all")
    again = ["recompute"] * 2 + ["backward"] if checkpoint else []
    assert [m.phase for m in sent] == ["forward"] * 3 + again + ["backward"] * 2
    assert {m.times for m in sent} == {L}
    sizes = {"D": 6, "H": 4, "G": 2, "K": 2, "Fe": 6, "E": 4, "k": 4, "L": 2, "V": 8, "B": 2, "S": 3}
    testing.check_sharded(whole, rank, **sizes, P=2)


def test_restarted_loops_forget_the_rows_of_failed_attempts(monkeypatch):
    """The carry starts replicated and leaves the first iteration sharded, so the loop is partitioned twice."""
    sharders, run = [], Sharder.run
    monkeypatch.setattr(Sharder, "run", lambda self, *args: sharders.append(self) or run(self, *args))
    with cg.Graph("routed") as g:
        x, ids, w = g.input("x", (B, D)), g.input("ids", (B, 3), dtype="int64"), g.input("w", (B, 3))
        routed = lambda h: h + cg.nn.experts(x, w, ids * ids, 6, F)  # noqa: E731
        g.output(cg.repeat(L, routed, g.param("start", (B, D)), name="layers"))
    places = {"x": "(b ep) d", "ids": "(b ep) k", "w": "(b ep) k", "layers/experts/*": "(e ep) d f"}
    rank = cg.shard(g, cg.mesh(ep=P), places)
    rows = sharders[-1].rows
    assert {t.graph for t in (*rows.indices, *rows.ordered, *rows.ends.values())} <= {*rank.bodies()}
    testing.check_sharded(g, rank, B=4, D=3, F=4, L=2, P=2)


def test_experts_are_sharded_along_one_axis():
    whole = mixture(4, 2, bias=False)
    places = {name: text for name, text in PLACES.items() if "bias" not in name}
    text = (
        r"experts are placed as \(dp ep 4/\(N\*P\)\) _ _, but rows are sent to the ranks of their experts; expected one"
    )
    with pytest.raises(cg.UnsupportedError, match=text):
        cg.shard(whole, cg.mesh(dp=N, ep=P, tp=1), {**places, "experts/gate_up": "(e dp ep) d f"})


@pytest.mark.parametrize("routing", ["balanced", "expected"])
def test_ranks_read_as_many_experts_as_one_device(routing):
    """The expected number of experts read depends on all tokens, whichever rank holds them."""
    with cg.Graph("routed") as g:
        weights, ids = cg.nn.router(g.input("x", (B, D)), 8, 2)
        g.output(cg.nn.experts(g.tensors[0], weights, ids, 8, F, routing=routing, bias=True))
    rank = cg.shard(g, cg.mesh(ep=4), {"x": "(b ep) d", "experts/*_bias": "(e ep) f", "experts/*[np]": "(e ep) d f"})

    def read(graph):
        return sum(4 * op.kind.reads(op)[1].expr for op in graph.walk() if op.kind.name == "grouped_matmul")

    sizes = {"B": 16, "D": 3, "F": 5}
    assert cg.evaluate(read(rank) * 4, **sizes) == cg.evaluate(read(g), **sizes)
    whole, part = (cg.param_count(graph, active=True, **sizes) for graph in (g, rank))
    router = 8 * 3
    assert (part - router) * 4 == whole - router


@pytest.mark.parametrize("counts", ["ends", "additions"])
@pytest.mark.parametrize("ranks", [{"N": 2, "P": 1}, {"N": 2, "P": 2}])
def test_load_balancing_losses_are_reduced_over_ranks(counts, ranks):
    """Fedus et al. 2021 (arXiv 2101.03961), equation 4: rows per expert times the mean of its scores."""
    experts, chosen = 6, 3
    with cg.Graph("balanced") as g:
        x, ids = g.input("x", (B, D)), g.input("ids", (B, chosen), dtype="int64")
        scores = cg.nn.softmax(cg.linear(x, "b d -> b e", e=experts, name="router"))
        owners, weights = ids * ids, cg.ops.top_k(scores, chosen)[0]
        y = cg.nn.experts(x * 1.0, weights, owners, experts, F)
        if counts == "ends":  # all but the first expert
            ends = cg.ops.cast(next(op for op in g.ops if op.kind.name == "dispatch").results[1], "fp32")
            parts = (cg.ops.slice_axis(ends, 0, start, experts - 1) for start in (1, 0))
            found, scores = next(parts) - next(parts), cg.ops.slice_axis(scores, 1, 1, experts - 1)
        else:
            ones = cg.ops.full((B * chosen,), 1.0, dtype="fp32")
            zeros = cg.ops.zeros((experts,), dtype="fp32")
            found = cg.ops.scatter(zeros, cg.rearrange(owners, "b k -> (b k)"), ones)
        loss = cg.reduce(found * cg.reduce(scores, "b e -> e", "mean"), "e -> ", "sum")
        g.output(cg.reduce(y * y, "b d -> ", "mean") + loss)
    step = cg.training_step(g, optimizer=cg.SGD())
    places = {"x": "(b dp ep) d", "ids": "(b dp ep) k", "experts/*": "(e ep) d f"}
    rank = cg.shard(step, cg.mesh(dp=N, ep=P), places, strict=True)
    summed = [m.bytes for m in cg.communication(rank).filter(phase="forward", collective="all_reduce")]
    assert 4 * (experts - (counts == "ends")) in summed
    testing.check_sharded(step, rank, B=8, D=3, F=4, **ranks)


def test_tokens_are_gathered_for_sharded_expert_width():
    """With sequence parallelism over the tensor-parallel axis, rows come from all sequence shards."""
    places = {name: text.replace("dp ep", "ep tp") for name, text in PLACES.items() if "bias" not in name}
    whole = mixture(bias=False)
    rank = cg.shard(whole, cg.mesh(ep=P, tp=T), places, strict=True)
    sent = cg.communication(rank)
    gathered = [m for m in sent if (m.axis, m.phase, m.collective) == ("tp", "forward", "all_gather")]
    # int64 choices, tokens, and the weights for combining rows
    assert [m.bytes for m in gathered] == [8 * 3 * B / P, 4 * B * D / P]
    assert [m.collective for m in sent if m.axis == "ep"].count("all_to_all") == 5
    testing.check_sharded(whole, rank, B=8, D=3, F=4, P=2, T=2)


def test_sharded_token_width_is_gathered():
    with cg.Graph("turned") as g:
        x, ids = g.input("x", (B, D)), g.input("ids", (B, 2), dtype="int64")
        sent = cg.ops.dispatch(ids, 4)
        weights = cg.rearrange(g.param("w", (4, F, D)), "e f d -> e d f")
        y = cg.ops.grouped_matmul(cg.ops.gather(x, sent.tokens), weights, sent.ends, 2)
        g.output(cg.reduce(cg.ops.gather(y, sent.places), "b k f -> b f", "sum"))
    places = {"x": "(b tp) d", "ids": "(b tp) k", "w": "e (f tp) d"}
    text = "'grouped_matmul': 'rearrange' is redistributed along tp: rows are sharded along it"
    with pytest.raises(cg.UnsupportedError, match=text):
        cg.shard(g, cg.mesh(tp=T), places, strict=True)
    testing.check_sharded(g, cg.shard(g, cg.mesh(tp=T), places), B=4, D=3, F=4, T=2)


# -- models of the zoo -------------------------------------------------------------------------------------------

SIZES = {
    "deepseek-v2-lite": {
        "D": 4, "H": 2, "L": 3, "Ld": 1, "V": 8, "F": 4, "Fe": 4, "E": 4, "k": 4, "Es": 2, "C": 3, "Kn": 2, "Kr": 2,
        "Kv": 2,
    },
    "gpt-oss-120b": {"D": 6, "H": 4, "G": 2, "K": 2, "Fe": 6, "E": 2, "k": 2, "L": 2, "V": 8, "W": 2},
    "mixtral-8x22b": {"D": 8, "H": 4, "G": 2, "K": 2, "Fe": 6, "E": 2, "k": 2, "L": 2, "V": 8},
}  # fmt: skip
OTHERS = (
    "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "mixtral-8x22b", "qwen1.5-moe-a2.7b", "qwen3-235b-a22b",
)  # fmt: skip


def step_of(name, optimizer=None, **options):
    model = load(name, symbolic=True, dtype="fp32")
    return cg.training_step(model, optimizer=optimizer or cg.SGD(), **options)


@pytest.mark.parametrize("name", ["gpt-oss-120b", *(pytest.param(n, marks=pytest.mark.long) for n in OTHERS)])
def test_zoo_mixtures_support_expert_parallelism(name):
    whole = step_of(name)
    rank = cg.parallelize(whole, dp=N, ep=P, tp=T, strict=True)
    experts = [t for g in rank.bodies() for t in g.params if "experts" in t.name]
    assert experts
    assert all(rank.sharding.places[t.name].dims[t.storage.pieces][0] == "ep" for t in experts)
    sent = cg.communication(rank).filter(collective="all_to_all")
    blocks = sum(op.kind.name == "dispatch" for op in rank.walk())
    assert [sum(m.phase == phase for m in sent) for phase in ("forward", "backward")] == [3 * blocks, 2 * blocks]
    share = sympy.cancel(cg.matmul_flops(rank) * N * P / cg.matmul_flops(whole))
    assert share.subs(T, 1) == 1


@pytest.mark.parametrize("name", ["mixtral-8x22b", *(pytest.param(n, marks=pytest.mark.long) for n in SIZES)])
def test_zoo_mixture_step_computes_same_values(name):
    whole = step_of(name)
    rank = cg.parallelize(whole, dp=2, ep=2, tp=2, strict=True)
    testing.check_sharded(whole, rank, **SIZES[name], B=4, S=3)


@pytest.mark.parametrize("stage", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_zero_shards_non_expert_parameters_over_both_axes(stage):
    whole = step_of("mixtral-8x22b", cg.AdamW(implementation="fused"))
    rank = cg.parallelize(whole, dp=2, ep=2, zero=stage, strict=True)
    places = rank.sharding.places
    assert places["layers/moe/experts/down.exp_avg"].axes == {"dp", "ep"}
    assert places["head/weight.exp_avg"].axes == {"dp", "ep"}
    testing.check_sharded(whole, rank, **SIZES["mixtral-8x22b"], B=4, S=2)


@pytest.mark.long
@pytest.mark.parametrize("name", [*SIZES])
def test_sequence_parallel_mixture_computes_same_values(name):
    whole = step_of(name)
    rank = cg.parallelize(whole, ep=2, tp=2, sequence=True, strict=True)
    assert not [m for m in cg.communication(rank).filter(axis="tp", collective="all_gather") if "down" in m.op]
    testing.check_sharded(whole, rank, **SIZES[name], B=4, S=4)


def test_model_without_experts_is_refused():
    text = "parallelize: ep splits no parameter of graph 'gpt2', expected layers of costgraph.nn or of transformers"
    with pytest.raises(cg.GraphError, match=text):
        cg.parallelize(load("gpt2"), ep=2)


# -- GShard: products with masks (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2) ----------------------------


def gshard(g, x, mask, experts, width):
    rows = cg.einsum(mask, x, "g s e c, g s m -> g e c m")
    up, down = (g.param(n, (experts, *sizes)) for n, sizes in (("up", (D, width)), ("down", (width, D))))
    rows = cg.einsum(cg.relu(cg.einsum(rows, up, "g e c m, e m f -> g e c f")), down, "g e c f, e f m -> g e c m")
    return cg.einsum(mask, rows, "g s e c, g e c m -> g s m")


def test_one_hot_dispatch_exchanges_twice_per_direction():
    groups, tokens, experts, room = 8, 16, 8, 4
    with cg.Graph("gshard") as g:
        x, mask = g.input("x", (groups, tokens, D)), g.input("mask", (groups, tokens, experts, room))
        y = gshard(g, cg.linear(x, "g s m -> g s n", n=D, name="in"), mask, experts, F)
        g.output(cg.reduce(y * y, "g s m -> ", "sum"))
    step = cg.training_step(g, optimizer=cg.SGD())
    places = {"x": "(g ep) s m", "mask": "(g ep) s e c", "up": "(e ep) m f", "down": "(e ep) f m"}
    rank = cg.shard(step, cg.mesh(ep=P), places, strict=True)
    sent = cg.communication(rank, D=32, F=64, P=4).filter(collective="all_to_all")
    # torch 2.13.0, the same with DTensor on four ranks of a fake group: two with 8,192 bytes each way
    assert [(m.phase, m.bytes) for m in sent] == [("forward", 8_192)] * 2 + [("backward", 8_192)] * 2
    testing.check_sharded(step, rank, D=3, F=5, P=4)


def test_exchanged_tokens_are_saved_for_backward():
    with cg.Graph("gshard") as g:
        mask = g.input("mask", (4, 3, 4, 2))
        x = cg.linear(g.input("x", (4, 3, D)), "g s m -> g s n", n=D, name="in")
        x = cg.repeat(L, lambda x: x + gshard(g, x, mask, 4, F), x, name="layers")
        g.output(cg.reduce(x * x, "g s m -> ", "sum"))
    step = cg.training_step(g, optimizer=cg.SGD())
    places = {"x": "(g ep) s m", "mask": "(g ep) s e c", "layers/up": "(e ep) m f", "layers/down": "(e ep) f m"}
    rank = cg.shard(step, cg.mesh(ep=P), places, strict=True)
    sent = cg.communication(rank).filter(collective="all_to_all")
    assert [(m.phase, m.times) for m in sent] == [("forward", L)] * 2 + [("backward", L)] * 2
    testing.check_sharded(step, rank, D=3, F=5, P=2, L=2)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [("llama-3-8b", {"tp": 2}), *(("mixtral-8x7b", d) for d in ({"tp": 2}, {"ep": 2}, {"dp": 2, "ep": 2, "tp": 2}))],
    ids=str,
)
def test_quantizing_before_or_after_sharding_is_equivalent(name, degrees):
    graph, sizes = cg.decode(load(name)), {"B": 12, "S": 26, "L": 3}
    for how in ({"weights": "int4", "group": 128, "zero": True}, {"weights": "int8"}):
        rank = cg.parallelize(cg.quantize(graph, **how), **degrees, strict=True)
        other = cg.quantize(cg.parallelize(graph, **degrees), **how)
        assert cg.flops(rank, **sizes) == cg.flops(other, **sizes)
        assert cg.param_bytes(rank) == cg.param_bytes(other)
        sent = ([(m.collective, m.axis, m.bytes, m.times) for m in cg.communication(r, **sizes)] for r in (rank, other))
        assert next(sent) == next(sent)
        # int32 end offsets for 8 experts once more: each rank's own, and those received
        assert cg.peak_memory(rank, **sizes) - cg.peak_memory(other, **sizes) in (0, 8 * 4)


def test_group_scaled_experts_compute_same_values():
    narrow = cg.quantize(load("mixtral-8x7b"), "int4", group=2, zero=True)
    sizes = {"D": 4, "H": 2, "G": 2, "K": 2, "Fe": 4, "E": 4, "k": 2, "V": 6, "B": 4, "S": 3, "L": 2}
    testing.check_sharded(narrow, cg.parallelize(narrow, dp=2, ep=2, tp=2, strict=True), **sizes)
    with cg.Graph("one", dtype="bf16") as g:
        g.output(cg.nn.moe(g.input("x", (B, D)), 3, 2, F))
    testing.check(cg.quantize(g, "int4", group=2, zero=True), B=3, D=4, F=2)
