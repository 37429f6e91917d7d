"""Context parallelism: FLOPs per rank, communication, and equality of values with one device."""

from contextvars import copy_context
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import sympy
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph import testing
from costgraph.algebra.polynomial import poly
from costgraph.testing.interpreter import RANK

B, S, D, H, G, K, N, W = cg.dims("B S D H G K N W")
SPLIT = {"x": "b (s cp) d"}
#: Sizes divisible by two and three ranks.
SIZES = {"B": 2, "S": 6, "D": 3, "H": 4, "G": 2, "K": 2}


def model(rope=False, **options):
    with cg.Graph("attention", dtype="fp32") as g:
        x = g.input("x", (B, S, D))
        tables = cg.nn.rotary_tables(cg.ops.arange(S), K) if rope else None
        y = cg.nn.self_attention(x, H, K, groups=G, rope=tables, **options)
        g.output(cg.reduce(y * y, "b s d -> ", "sum"))
    return g


@cache
def step(**options):
    return cg.training_step(model(**options), optimizer=cg.SGD())


KERNELS = {
    "flash": {},
    "flash, rotated": {"rope": True},
    "flash, window": {"window": 3},
    "flash, window on both sides": {"window": 3, "causal": False},
    "flash, sinks": {"sinks": True, "softcap": 5.0},
    "flash, all keys": {"causal": False},
    "eager": {"kernel": "eager"},
    "eager, window": {"kernel": "eager", "window": 2, "rope": True},
}


@cache
def sharded(what, exchange=()):
    """Return a training step and its per-rank graph on a mesh of N ranks."""
    whole = step(**KERNELS[what])
    return whole, cg.shard(whole, cg.mesh(cp=N), SPLIT, exchange=exchange, strict=True)


def long(name):
    return pytest.param(name, marks=pytest.mark.long)


FLASH = [name for name in KERNELS if "flash" in name]

# -- FLOPs -----------------------------------------------------------------------------------------------------------


def seen(causal, window, queries, size):
    """Enumerate the (query, key) pairs visible to the given queries."""
    return {
        (s, t)
        for s, t in product(queries, range(size))
        if (t <= s or not causal) and (window is None or s - window < t < s + window)
    }


@each(("causal", "window"), [(True, None), (True, 1), (True, 4), (True, 99), (False, 1), (False, 4)])
def test_domain_counts_are_means_over_ranks(causal, window):
    for ranks, block in product((1, 2, 3, 5), (1, 2, 3, 7)):
        size = ranks * block
        pairs_by_rank = [seen(causal, window, range(r * block, (r + 1) * block), size) for r in range(ranks)]
        points = Fraction(sum(map(len, pairs_by_rank)), ranks)
        keys = Fraction(sum(len({t for _, t in pairs}) for pairs in pairs_by_rank), ranks)
        domain = cg.Domain(causal, window, (("cp", poly(ranks)),))
        sizes = poly(block), poly(size)
        assert (domain.points(*sizes).constant, domain.keys_used(*sizes).constant) == (points, keys)
        assert domain.queries_used(*sizes).constant == block
        open_ = cg.Domain(causal, window and W, (("cp", N),))
        values = {"S": size, "N": ranks} | ({"W": window} if window else {})
        for formula, number in ((open_.points, points), (open_.keys_used, keys)):
            assert cg.evaluate(formula(poly(S / N), poly(S)).expr, **values) == pytest.approx(float(number), rel=1e-15)


@each("ranks", [1, 2, 3, 5])
def test_head_tail_blocks_balance_causal_work_exactly(ranks):
    """Rank r in torch's head-tail load balancer gets blocks r and 2N - 1 - r out of 2N."""
    size = 3 * 2 * ranks
    for r in range(ranks):
        rows = [s for block in (r, 2 * ranks - 1 - r) for s in range(3 * block, 3 * block + 3)]
        domain = cg.Domain(True, None, (("cp", poly(ranks)),))
        assert domain.points(poly(6), poly(size)).constant == len(seen(True, None, rows, size))


@pytest.mark.parametrize("what", KERNELS)
def test_total_matmul_flops_over_ranks_match_one_device(what):
    whole, rank = sharded(what)
    assert sympy.expand(cg.matmul_flops(rank) * N - cg.matmul_flops(whole)) == 0
    assert sympy.expand(cg.matmul_flops(rank, count="full") * N - cg.matmul_flops(whole, count="full")) == 0


def counted(graph, place, **sizes):
    """Run the rank at a mesh coordinate, counting index point by index point."""

    def run():
        RANK.set(place)
        return testing.run(graph, **sizes)

    return copy_context().run(run)


@pytest.mark.parametrize("what", ["flash", "flash, window", "flash, window on both sides", "eager, window"])
def test_rank_formulas_are_means_over_interpreted_ranks(what):
    rank = cg.shard(model(**KERNELS[what]), cg.mesh(cp=3), SPLIT, strict=True)
    runs = [counted(rank, {"cp": r}, **SIZES) for r in range(3)]
    for question, found in (
        (cg.matmul_flops, lambda run: run.matmul),
        (cg.flops, lambda run: run.matmul + run.pointwise + run.transcendental),
        (cg.bytes_moved, lambda run: run.bytes_moved),
    ):
        assert question(rank, **SIZES) * 3 == pytest.approx(float(sum(map(found, runs))), rel=1e-12)
    if "eager" not in what:  # eager attention computes the full square on every rank
        assert len({run.matmul for run in runs}) > 1


@each("what", ["flash", "flash, window", "eager"])
def test_degree_one_matches_unsharded_costs(what):
    whole, rank = sharded(what)
    assert cg.flops(rank, **SIZES, N=1) == cg.flops(whole, **SIZES)
    one = cg.shard(whole, cg.mesh(cp=1), SPLIT, strict=True)
    for question in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert question(one) == question(whole)


# -- communication ---------------------------------------------------------------------------------------------------


@each("what", [name for name in KERNELS if name != "flash, sinks"])
def test_keys_and_values_are_gathered_and_gradients_reduce_scattered(what):
    """Gathered K and V have B*G*S*K elements each, 4 bytes wide; all-reduces carry parameter gradients only."""
    whole, rank = sharded(what)
    sent = cg.communication(rank)
    both = 2 * 4 * B * G * S * K * (N - 1) / N
    for phase, collective in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")):
        rows = sent.filter(phase=phase, collective=collective)
        assert len(rows) == 2
        assert sympy.expand(rows.total() - both) == 0
    reduced = sent.filter(phase="backward", collective="all_reduce").total()
    assert sympy.expand(reduced - 2 * cg.param_bytes(whole) * (N - 1) / N) == 0


@pytest.mark.parametrize("what", FLASH)
def test_ulysses_runs_four_all_to_alls_per_pass(what):
    """DeepSpeed Ulysses exchanges queries, keys, values and the attention output.

    Jacobs et al. 2023 (arXiv 2309.14509), section 3. Queries and the output have B*H*S*K elements, keys and values
    B*G*S*K; each rank holds 1/N and sends (N - 1)/N.
    """
    whole, rank = sharded(what, "cp")
    assert sympy.expand(cg.matmul_flops(rank) * N - cg.matmul_flops(whole)) == 0
    sent = cg.communication(rank)
    each = 4 * B * S * K * (2 * H + 2 * G) * (N - 1) / N**2
    for phase in ("forward", "backward"):
        rows = sent.filter(phase=phase, collective="all_to_all")
        assert len(rows) == 4
        assert sympy.expand(rows.total() - each) == 0
    assert not sent.filter(phase="forward", collective="all_gather").rows
    assert not sent.filter(collective="reduce_scatter").rows


@pytest.mark.parametrize("exchange", [(), "cp"])
def test_flash_kernel_stays_fused_when_sharded(exchange):
    whole, rank = sharded("flash, rotated", exchange)
    assert [op.name for op in rank.ops if op.body] == [op.name for op in whole.ops if op.body]


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", KERNELS)
def test_context_parallel_step_matches_one_device(what):
    whole, rank = sharded(what)
    testing.check_sharded(whole, rank, **SIZES, N=3)


@pytest.mark.parametrize("what", FLASH)
def test_ulysses_step_matches_one_device(what):
    whole, rank = sharded(what, "cp")
    testing.check_sharded(whole, rank, **SIZES, N=2)


def test_sequence_on_two_mesh_axes_matches_one_device():
    whole = step(rope=True)
    rank = cg.shard(whole, cg.mesh(cp=2, tp=3), {"x": "b (s cp tp) d"}, strict=True)
    testing.check_sharded(whole, rank, **SIZES)


def test_non_contiguous_sequence_blocks_are_gathered():
    whole = step()
    rank = cg.shard(whole, cg.mesh(cp=2), {"x": "b (3 s cp) d"})
    assert rank.sharding.resharded
    testing.check_sharded(whole, rank, **SIZES)


# -- models ----------------------------------------------------------------------------------------------------------

#: GQA; windows, sinks and experts; latent attention; relative positions in an encoder and a decoder.
MODELS = {
    "llama-3-8b": {"D": 4, "H": 2, "G": 1, "K": 2, "L": 2, "V": 8, "F": 4},
    "gpt-oss-120b": {"D": 6, "H": 4, "G": 2, "K": 2, "Fe": 6, "E": 3, "k": 2, "L": 2, "V": 8, "W": 2},
    "deepseek-v2-lite": {
        "D": 4, "H": 2, "L": 3, "Ld": 1, "V": 8, "F": 4, "Fe": 4, "E": 3, "k": 2, "Es": 2, "C": 3, "Kn": 2, "Kr": 2,
        "Kv": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["gpt-oss-120b", *(long(n) for n in (*MODELS, "gemma-2-27b", "t5-11b", "whisper-base"))]
)
def test_language_models_keep_their_placements(name):
    whole = training_step(load(name, symbolic=True), optimizer=cg.SGD())
    rank = cg.parallelize(whole, dp=2, cp=N, tp=2, strict=True)
    assert all(m.collective != "all_to_all" for m in cg.communication(rank))


@pytest.mark.parametrize("name", [*map(long, MODELS)])
def test_model_step_matches_one_device(name):
    whole = training_step(load(name, symbolic=True, dtype="fp32"), optimizer=cg.SGD())
    rank = cg.parallelize(whole, cp=2, strict=True)
    testing.check_sharded(whole, rank, **MODELS[name], B=1, S=6)


@pytest.mark.parametrize("context", ["gather", long("all_to_all"), long("ring")])
def test_all_mesh_axes_together_match_one_device(context):
    whole = training_step(load("llama-3-8b", symbolic=True, dtype="fp32"), optimizer=cg.SGD())
    rank = cg.parallelize(whole, dp=2, cp=2, tp=2, zero=3, sequence=True, context=context, strict=True)
    testing.check_sharded(whole, rank, B=2, S=4, D=8, H=4, G=4, K=2, L=2, V=8, F=8)


@pytest.mark.parametrize("precision", [None, long("bf16-mixed")])
def test_layers_repeat_head_exchange_for_saved_attention_output(precision):
    """The weight gradient after attention needs the saved output with all heads for the rank's sequence shard."""
    model = load("llama-3-8b", symbolic=True, dtype="fp32")
    whole = cg.training_step(model, precision=precision, optimizer=cg.SGD())
    rank = cg.parallelize(whole, cp=N, context="all_to_all", strict=True)
    sent = cg.communication(rank)
    assert [len(sent.filter(phase=p, collective="all_to_all")) for p in ("forward", "backward")] == [4, 5]
    assert not sent.filter(collective="all_gather").rows
    testing.check_sharded(whole, rank, {"cp": 2}, **{**MODELS["llama-3-8b"], "G": 2, "H": 4}, B=1, S=4, N=2)


# -- ring attention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [name if name == "flash, rotated" else long(name) for name in FLASH])
def test_ring_attention_matches_one_device(what):
    whole, plain = sharded(what)
    rank = cg.shard(whole, cg.mesh(cp=N), SPLIT, ring="cp", strict=True)
    assert cg.flops(rank) == cg.flops(plain)
    for n in (2, 3):
        testing.check_sharded(whole, rank, **SIZES, N=n)


def test_ring_sends_each_shard_to_next_rank():
    whole, _ = sharded("flash")
    rank = cg.shard(whole, cg.mesh(cp=N), SPLIT, ring="cp", strict=True)
    part = 4 * B * G * K * S / N
    sent = [(m.phase, m.bytes, m.times) for m in cg.communication(rank).filter(collective="send")]
    # keys and values pass all ranks in each pass, and each one's gradient sum goes around once
    assert sent == [("forward", part, N - 1)] * 2 + [("backward", part, N - 1)] * 2 + [("backward", part, N)] * 2
    assert not cg.communication(rank).filter(collective="all_gather").rows


def test_ring_holds_two_shards_in_flight():
    sizes = {"B": 2, "S": 64 * 64, "D": 3, "H": 4, "G": 2, "K": 2}
    whole, plain = sharded("flash")
    rank = cg.shard(whole, cg.mesh(cp=N), SPLIT, ring="cp", strict=True)
    part = 4 * 2 * 2 * 2 * 64  # one shard of the keys, or the values, on one of 64 ranks
    spaces = cg.timeline(rank, **sizes, N=64).workspaces
    assert spaces["attention"] == 2 * 2 * part
    assert spaces["attention/attention_backward"] == 4 * 2 * part
    # gathered: all keys and values, and both gradients: 4 full tensors at the peak
    saved = cg.peak_memory(plain, **sizes, N=64) - cg.peak_memory(rank, **sizes, N=64)
    assert saved > 3 * 64 * part


def test_ring_communication_overlaps_kernels():
    sizes = {"B": 1, "S": 65536, "D": 1024, "H": 16, "G": 16, "K": 64, "N": 8}
    whole, plain = sharded("flash")
    rank = cg.shard(whole, cg.mesh(cp=N), SPLIT, ring="cp", strict=True)
    rows = {row.op: row for row in cg.roofline(rank, "h100-sxm", **sizes).rows}
    link = rows["attention"].links_s["interconnect"]
    part = 4 * 16 * 64 * 65536 // 8
    assert link == pytest.approx(2 * 7 * (3.4e-6 + part / 450e9))
    assert rows["attention"].bound == "compute"
    assert rows["attention"].seconds == rows["attention"].compute_s > link
    times = [cg.seconds(rank, "h100-sxm", which, **sizes) for which in ("lower", "estimate")]
    assert times[0] <= times[1] < cg.seconds(plain, "h100-sxm", **sizes)


def test_unfused_attention_gathers_keys_and_values():
    whole, plain = sharded("eager")
    rank = cg.shard(whole, cg.mesh(cp=N), SPLIT, ring="cp", strict=True)
    assert cg.communication(rank).rows == cg.communication(plain).rows


# -- errors ----------------------------------------------------------------------------------------------------------


def test_invalid_domain_ranks_raise():
    with pytest.raises(cg.ShapeError, match=r"domain: ranks 'cp', expected pairs \(mesh axis, number of ranks\)"):
        cg.Domain(True, None, "cp")
    with pytest.raises(cg.ShapeError, match="domain: cp: 0, expected a positive integer"):
        cg.Domain(True, None, (("cp", 0),))
    domain = cg.Domain(True, None, (("cp", 2),))
    with pytest.raises(cg.ShapeError, match="3 queries on each of 2 ranks, expected 7 in total, one per key"):
        domain.points(poly(3), poly(7))


def test_unknown_mesh_axis_raises():
    with pytest.raises(cg.GraphError, match=r"shard: exchange: unknown axis 'dp', expected axes of mesh\(cp=2\)"):
        cg.shard(model(), cg.mesh(cp=2), SPLIT, exchange="dp")
    with pytest.raises(cg.GraphError, match=r"shard: ring: unknown axis 'dp', expected axes of mesh\(cp=2\)"):
        cg.shard(model(), cg.mesh(cp=2), SPLIT, ring="dp")
    with pytest.raises(cg.GraphError, match="parallelize: context is 'round', expected gather or all_to_all or ring"):
        cg.parallelize(model(), cp=2, context="round")


def test_rank_graph_survives_a_file(tmp_path):
    _, rank = sharded("flash, window")
    cg.save(rank, tmp_path / "rank.json")
    loaded = cg.load(tmp_path / "rank.json")
    assert cg.flops(loaded) == cg.flops(rank)
    assert cg.bytes_moved(loaded) == cg.bytes_moved(rank)
    assert cg.flops(cg.unroll(loaded), **SIZES, N=3) == cg.flops(rank, **SIZES, N=3)


@each("pattern", ["b s t ->", "b s t -> b", "b s t -> b s"])
def test_mean_over_unequal_domain_rows_is_not_a_mean_of_means(pattern):
    with cg.Graph("scores") as g:
        q, k = g.input("q", (2, S, 3)), g.input("k", (2, S, 3))
        seen = cg.einsum(q, k, "b s d, b t d -> b s t", domain=cg.Domain(causal=True), over=("s", "t"))
        g.output(cg.reduce(seen, pattern, "mean"))
    rank = cg.shard(g, cg.mesh(cp=N), {"q": "b (s cp) d", "k": "b (s cp) d"})
    testing.check_sharded(g, rank, S=6, N=3)  # ranks have 3, 7 and 11 of the 21 points


@pytest.mark.parametrize(
    ("placements", "collectives"),
    [
        # each query sees a shard of its keys on every rank: the maximum score, the sum of exponentials and the weighted
        # sum of values are reduced, as in decoding over a sharded cache
        ({"k": "b h (t cp) k", "v": "b h (t cp) k"}, ["all_reduce"] * 3),
        ({"k": "b h (t cp) k"}, ["all_reduce"] * 3),
        ({"v": "b h (t cp) k"}, ["all_reduce"]),
        # scores are sharded along one mesh axis, and values along the other
        (
            {"k": "b h (t cp) k", "v": "b h (t x) k"},
            ["all_reduce", "all_reduce", "all_gather", "all_reduce", "all_reduce"],
        ),
    ],
)
def test_sharded_keys_with_replicated_queries(placements, collectives):
    with cg.Graph("decode") as g:
        q, k, v = (g.input(n, (B, H, t, K)) for n, t in (("q", S), ("k", W), ("v", W)))
        g.output(cg.attention(q, k, v, causal=False))
    rank = cg.shard(g, cg.mesh(cp=N, x=2), placements)
    assert [m.collective for m in cg.communication(rank)] == collectives
    testing.check_sharded(g, rank, {"x": 2}, B=3, S=1, W=6, H=2, K=5, N=3)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ("b h (s x y) k", "b h (s x y) k", "b h (s y) k"),
        ("b h (s x y) k", "b h (s y) k", "b (h x) (s y) k"),
        ("b h (s y x) k", "b (h x) (s y) k", "b h s (k y)"),
        ("b h (s x y) k", "(b x) h (s y) k", "b h (s y x) k"),
    ],
)
def test_domain_queries_sharded_over_two_mesh_axes(q, k, v, window):
    """The innermost axis is gathered first, so that a rank holds one contiguous query block at every step."""
    B, H, S, K = cg.dims("B H S K")
    with cg.Graph("g", dtype="fp64") as g:
        y = cg.attention(*(g.param(name, (B, H, S, K)) for name in "qkv"), causal=True, window=window)
        g.output(cg.reduce(y * y, "b h s k ->", "mean"))
    whole = cg.backward(g)
    rank = cg.shard(whole, cg.mesh(x=2, y=2), {"q": q, "k": k, "v": v})
    testing.check_sharded(whole, rank, B=2, H=2, S=8, K=2)
