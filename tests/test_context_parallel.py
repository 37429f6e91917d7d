"""Attention of which each rank has a part of the sequence: what it counts, what it sends, and the same numbers."""

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
#: Sizes that two and three ranks divide.
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
    """A step, and what each of N ranks does of it."""
    whole = step(**KERNELS[what])
    return whole, cg.shard(whole, cg.mesh(cp=N), SPLIT, exchange=exchange, strict=True)


def long(name):
    return pytest.param(name, marks=pytest.mark.long)


FLASH = [name for name in KERNELS if "flash" in name]

# -- what is counted -------------------------------------------------------------------------------------------------


def seen(causal, window, queries, size):
    """Index pairs that some queries see, one by one."""
    return {
        (s, t)
        for s, t in product(queries, range(size))
        if (t <= s or not causal) and (window is None or s - window < t < s + window)
    }


@each(("causal", "window"), [(True, None), (True, 1), (True, 4), (True, 99), (False, 1), (False, 4)])
def test_a_domain_counts_the_mean_over_the_ranks(causal, window):
    for ranks, block in product((1, 2, 3, 5), (1, 2, 3, 7)):
        size = ranks * block
        found = [seen(causal, window, range(r * block, (r + 1) * block), size) for r in range(ranks)]
        points = Fraction(sum(map(len, found)), ranks)
        keys = Fraction(sum(len({t for _, t in pairs}) for pairs in found), ranks)
        domain = cg.Domain(causal, window, (("cp", poly(ranks)),))
        sizes = poly(block), poly(size)
        assert (domain.points(*sizes).constant, domain.keys_used(*sizes).constant) == (points, keys)
        assert domain.queries_used(*sizes).constant == block
        open_ = cg.Domain(causal, window and W, (("cp", N),))
        values = {"S": size, "N": ranks} | ({"W": window} if window else {})
        for formula, number in ((open_.points, points), (open_.keys_used, keys)):
            assert cg.evaluate(formula(poly(S / N), poly(S)).expr, **values) == pytest.approx(float(number), rel=1e-15)


@each("ranks", [1, 2, 3, 5])
def test_blocks_from_both_ends_of_a_causal_square_are_the_mean_on_every_rank(ranks):
    """Rank r of torch's head-tail load balancer has blocks r and 2N - 1 - r of 2N."""
    size = 3 * 2 * ranks
    for r in range(ranks):
        rows = [s for block in (r, 2 * ranks - 1 - r) for s in range(3 * block, 3 * block + 3)]
        domain = cg.Domain(True, None, (("cp", poly(ranks)),))
        assert domain.points(poly(6), poly(size)).constant == len(seen(True, None, rows, size))


@pytest.mark.parametrize("what", KERNELS)
def test_ranks_together_count_what_one_device_does(what):
    whole, rank = sharded(what)
    assert sympy.expand(cg.matmul_flops(rank) * N - cg.matmul_flops(whole)) == 0
    assert sympy.expand(cg.matmul_flops(rank, count="full") * N - cg.matmul_flops(whole, count="full")) == 0


def counted(graph, place, **sizes):
    """Index point by index point, what the rank at a place does."""

    def run():
        RANK.set(place)
        return testing.run(graph, **sizes)

    return copy_context().run(run)


@pytest.mark.parametrize("what", ["flash", "flash, window", "flash, window on both sides", "eager, window"])
def test_formulas_are_the_mean_of_what_ranks_do(what):
    rank = cg.shard(model(**KERNELS[what]), cg.mesh(cp=3), SPLIT, strict=True)
    runs = [counted(rank, {"cp": r}, **SIZES) for r in range(3)]
    for question, found in (
        (cg.matmul_flops, lambda run: run.matmul),
        (cg.flops, lambda run: run.matmul + run.pointwise + run.transcendental),
        (cg.bytes_moved, lambda run: run.bytes_moved),
    ):
        assert question(rank, **SIZES) * 3 == pytest.approx(float(sum(map(found, runs))), rel=1e-12)
    if "eager" not in what:  # which does the whole square
        assert len({run.matmul for run in runs}) > 1


@each("what", ["flash", "flash, window", "eager"])
def test_at_degree_1_the_formulas_are_the_unsharded_ones(what):
    whole, rank = sharded(what)
    assert cg.flops(rank, **SIZES, N=1) == cg.flops(whole, **SIZES)
    one = cg.shard(whole, cg.mesh(cp=1), SPLIT, strict=True)
    for question in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert question(one) == question(whole)


# -- what is sent ----------------------------------------------------------------------------------------------------


@each("what", [name for name in KERNELS if name != "flash, sinks"])
def test_keys_and_values_are_gathered_each_way_and_their_gradients_scattered(what):
    """K and V of all ranks are B*G*S*K elements each, of 4 bytes; what else is reduced are gradients of parameters."""
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
def test_heads_are_exchanged_for_the_sequence_four_times_each_way(what):
    """Jacobs et al. 2023 (arXiv 2309.14509), section 3: of queries, keys, values and what attention makes of them.

    Queries and the result have B*H*S*K elements, keys and values B*G*S*K; a rank has 1/N, and sends of it (N - 1)/N.
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
def test_a_flash_kernel_stays_one(exchange):
    whole, rank = sharded("flash, rotated", exchange)
    assert [op.name for op in rank.ops if op.body] == [op.name for op in whole.ops if op.body]


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", KERNELS)
def test_a_step_leaves_the_same_numbers(what):
    whole, rank = sharded(what)
    testing.check_sharded(whole, rank, **SIZES, N=3)


@pytest.mark.parametrize("what", FLASH)
def test_a_step_that_exchanges_heads_leaves_the_same_numbers(what):
    whole, rank = sharded(what, "cp")
    testing.check_sharded(whole, rank, **SIZES, N=2)


def test_a_sequence_on_two_axes_of_a_mesh_leaves_the_same_numbers():
    whole = step(rope=True)
    rank = cg.shard(whole, cg.mesh(cp=2, tp=3), {"x": "b (s cp tp) d"}, strict=True)
    testing.check_sharded(whole, rank, **SIZES)


def test_blocks_that_do_not_follow_each_other_are_put_together():
    whole = step()
    rank = cg.shard(whole, cg.mesh(cp=2), {"x": "b (3 s cp) d"})
    assert rank.sharding.resharded
    testing.check_sharded(whole, rank, **SIZES)


# -- models ----------------------------------------------------------------------------------------------------------

#: GQA; windows, sinks and experts; latent attention; relative positions of an encoder and a decoder.
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
def test_a_step_of_a_model_leaves_the_same_numbers(name):
    whole = training_step(load(name, symbolic=True, dtype="fp32"), optimizer=cg.SGD())
    rank = cg.parallelize(whole, cp=2, strict=True)
    testing.check_sharded(whole, rank, **MODELS[name], B=1, S=6)


@pytest.mark.parametrize("context", ["gather", long("all_to_all"), long("ring")])
def test_all_axes_together_leave_the_same_numbers(context):
    whole = training_step(load("llama-3-8b", symbolic=True, dtype="fp32"), optimizer=cg.SGD())
    rank = cg.parallelize(whole, dp=2, cp=2, tp=2, zero=3, sequence=True, context=context, strict=True)
    testing.check_sharded(whole, rank, B=2, S=4, D=8, H=4, G=4, K=2, L=2, V=8, F=8)


@pytest.mark.parametrize("precision", [None, long("bf16-mixed")])
def test_layers_exchange_heads_and_what_they_saved_of_them_once_more(precision):
    """Of the saved result of attention, the gradient of the weights behind it needs all heads of a rank's sequence."""
    model = load("llama-3-8b", symbolic=True, dtype="fp32")
    whole = cg.training_step(model, precision=precision, optimizer=cg.SGD())
    rank = cg.parallelize(whole, cp=N, context="all_to_all", strict=True)
    sent = cg.communication(rank)
    assert [len(sent.filter(phase=p, collective="all_to_all")) for p in ("forward", "backward")] == [4, 5]
    assert not sent.filter(collective="all_gather").rows
    testing.check_sharded(whole, rank, {"cp": 2}, **{**MODELS["llama-3-8b"], "G": 2, "H": 4}, B=1, S=4, N=2)


# -- keys and values that pass by ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [name if name == "flash, rotated" else long(name) for name in FLASH])
def test_ranks_that_pass_keys_and_values_around_compute_the_same(what):
    whole, plain = sharded(what)
    rank = cg.shard(whole, cg.mesh(cp=N), SPLIT, ring="cp", strict=True)
    assert cg.flops(rank) == cg.flops(plain)
    for n in (2, 3):
        testing.check_sharded(whole, rank, **SIZES, N=n)


def test_a_ring_sends_each_part_to_the_next_rank():
    whole, _ = sharded("flash")
    rank = cg.shard(whole, cg.mesh(cp=N), SPLIT, ring="cp", strict=True)
    part = 4 * B * G * K * S / N
    sent = [(m.phase, m.bytes, m.times) for m in cg.communication(rank).filter(collective="send")]
    # keys and values go past all ranks in each pass, and a sum for each of them goes once around
    assert sent == [("forward", part, N - 1)] * 2 + [("backward", part, N - 1)] * 2 + [("backward", part, N)] * 2
    assert not cg.communication(rank).filter(collective="all_gather").rows


def test_a_ring_has_two_parts_in_flight_of_what_goes_around():
    sizes = {"B": 2, "S": 64 * 64, "D": 3, "H": 4, "G": 2, "K": 2}
    whole, plain = sharded("flash")
    rank = cg.shard(whole, cg.mesh(cp=N), SPLIT, ring="cp", strict=True)
    part = 4 * 2 * 2 * 2 * 64  # of keys, or of values, on one of 64 ranks
    spaces = cg.timeline(rank, **sizes, N=64).workspaces
    assert spaces["attention"] == 2 * 2 * part
    assert spaces["attention/attention_backward"] == 4 * 2 * part
    # put together, keys and values of all ranks are there, and both of their gradients: 4 whole ones at the peak
    saved = cg.peak_memory(plain, **sizes, N=64) - cg.peak_memory(rank, **sizes, N=64)
    assert saved > 3 * 64 * part


def test_kernels_work_while_a_ring_sends():
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


def test_attention_of_several_ops_puts_keys_and_values_together():
    whole, plain = sharded("eager")
    rank = cg.shard(whole, cg.mesh(cp=N), SPLIT, ring="cp", strict=True)
    assert cg.communication(rank).rows == cg.communication(plain).rows


# -- what is refused -------------------------------------------------------------------------------------------------


def test_ranks_of_a_domain_are_pairs_and_there_is_a_key_for_each_query():
    with pytest.raises(cg.ShapeError, match=r"domain: ranks 'cp', expected pairs \(mesh axis, number of ranks\)"):
        cg.Domain(True, None, "cp")
    with pytest.raises(cg.ShapeError, match="domain: cp: 0, expected a positive integer"):
        cg.Domain(True, None, (("cp", 0),))
    domain = cg.Domain(True, None, (("cp", 2),))
    with pytest.raises(cg.ShapeError, match="3 queries on each of 2 ranks, expected 7 in total, one per key"):
        domain.points(poly(3), poly(7))


def test_an_axis_that_the_mesh_does_not_have_is_refused():
    with pytest.raises(cg.GraphError, match=r"shard: exchange: unknown axis 'dp', expected axes of mesh\(cp=2\)"):
        cg.shard(model(), cg.mesh(cp=2), SPLIT, exchange="dp")
    with pytest.raises(cg.GraphError, match=r"shard: ring: unknown axis 'dp', expected axes of mesh\(cp=2\)"):
        cg.shard(model(), cg.mesh(cp=2), SPLIT, ring="dp")
    with pytest.raises(cg.GraphError, match="parallelize: context is 'round', expected gather or all_to_all or ring"):
        cg.parallelize(model(), cp=2, context="round")


def test_the_graph_of_one_rank_is_saved_and_loaded(tmp_path):
    _, rank = sharded("flash, window")
    cg.save(rank, tmp_path / "rank.json")
    loaded = cg.load(tmp_path / "rank.json")
    assert cg.flops(loaded) == cg.flops(rank)
    assert cg.bytes_moved(loaded) == cg.bytes_moved(rank)
    assert cg.flops(cg.unroll(loaded), **SIZES, N=3) == cg.flops(rank, **SIZES, N=3)


@each("pattern", ["b s t ->", "b s t -> b", "b s t -> b s"])
def test_a_mean_over_queries_that_see_other_numbers_of_keys_is_none_of_means(pattern):
    with cg.Graph("scores") as g:
        q, k = g.input("q", (2, S, 3)), g.input("k", (2, S, 3))
        seen = cg.einsum(q, k, "b s d, b t d -> b s t", domain=cg.Domain(causal=True), over=("s", "t"))
        g.output(cg.reduce(seen, pattern, "mean"))
    rank = cg.shard(g, cg.mesh(cp=N), {"q": "b (s cp) d", "k": "b (s cp) d"})
    testing.check_sharded(g, rank, S=6, N=3)  # ranks have 3, 7 and 11 of the 21 points


@pytest.mark.parametrize(
    ("placements", "collectives"),
    [
        # each query has a part of its keys on every rank: their largest score, the sum of the exponentials and that of
        # the values are put together, as in decoding over a split cache
        ({"k": "b h (t cp) k", "v": "b h (t cp) k"}, ["all_reduce"] * 3),
        ({"k": "b h (t cp) k"}, ["all_reduce"] * 3),
        ({"v": "b h (t cp) k"}, ["all_reduce"]),
        # scores lie along one axis of the mesh, and values along the other
        (
            {"k": "b h (t cp) k", "v": "b h (t x) k"},
            ["all_reduce", "all_reduce", "all_gather", "all_reduce", "all_reduce"],
        ),
    ],
)
def test_keys_may_be_split_beside_whole_queries(placements, collectives):
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
def test_queries_of_a_domain_that_two_axes_of_a_mesh_split(q, k, v, window):
    """The innermost axis is put together first: what is left on a rank is one block of queries at every step."""
    B, H, S, K = cg.dims("B H S K")
    with cg.Graph("g", dtype="fp64") as g:
        y = cg.attention(*(g.param(name, (B, H, S, K)) for name in "qkv"), causal=True, window=window)
        g.output(cg.reduce(y * y, "b h s k ->", "mean"))
    whole = cg.backward(g)
    rank = cg.shard(whole, cg.mesh(x=2, y=2), {"q": q, "k": k, "v": v})
    testing.check_sharded(whole, rank, B=2, H=2, S=8, K=2)
