"""Fewer key-value heads than tensor-parallel ranks, and sizes that the ranks do not divide."""

from functools import cache

import pytest
import sympy
from each import each
from shared import load
from test_parallelize import step

import costgraph as cg
from costgraph import testing

B, D, F, G, H, K, L, S, V, R, TP = cg.dims("B D F G H K L S V R TP")
SIZES = {"B": 2, "D": 8, "F": 8, "G": 2, "H": 8, "K": 2, "L": 2, "S": 4, "V": 8, "R": 2}


@cache
def llama(tp, **options):
    return cg.parallelize(whole(), tp=tp, strict=True, **options)


@cache
def whole():
    return step("llama-2-13b")


def rows(sent, **asked):
    return sorted((m.collective, m.axis, str(m.bytes)) for m in sent.filter(**asked) if m.times == L)


def test_key_value_heads_are_replicated_over_ranks():
    rank = llama(G * R)
    heads = {t.name.split("/")[2]: t.sizes[-2] for t in rank.params if "attention/" in t.name and t.name[-8] != "j"}
    assert {n: str(heads[n]) for n in "qkv"} == {"q": "H/(G*R)", "k": "1", "v": "1"}
    # query and output matrices are sharded over all ranks; each rank has one key head and one value head
    own = 2 * D * H * K / (G * R) + 2 * D * K + 3 * D * F / (G * R) + 2 * D
    assert sympy.expand(cg.param_count(rank) - L * own - 2 * V * D / (G * R) - D) == 0
    assert sympy.expand(cg.cache_bytes(cg.parallelize(cg.decode(load("llama-2-13b", symbolic=True)), tp=G * R))
                        - L * 2 * 2 * B * S * K) == 0  # fmt: skip


def test_replicated_head_gradients_are_all_reduced():
    """Parameters sharded over all ranks reduce over all at once, as with a single mesh axis.

    Gradients of the key and value matrices are also summed over the ranks with the same head, as in vLLM's
    QKVParallelLinear (num_kv_head_replicas).
    """
    few, many = cg.communication(llama(G * R)), cg.communication(llama(TP))
    assert rows(few, phase="forward") == rows(many, phase="forward")
    copies = [("all_reduce", "replica", "4*D*K")] * 2
    assert rows(few, phase="backward") == sorted([*rows(many, phase="backward"), *copies])


def test_replicated_heads_with_sequence_parallelism():
    few, many = cg.communication(llama(G * R, sequence=True)), cg.communication(llama(TP, sequence=True))
    assert rows(few, phase="forward") == rows(many, phase="forward")
    copies = [("all_reduce", "replica", "4*D*K")] * 2
    assert rows(few, phase="backward") == sorted([*rows(many, phase="backward"), *copies])


def test_step_with_replicated_heads_computes_same_values():
    testing.check_sharded(whole(), llama(G * R, sequence=True), **SIZES)


@pytest.mark.long
def test_step_with_replicated_heads_and_zero_computes_same_values():
    testing.check_sharded(whole(), llama(G * R, dp=2, zero=3), **SIZES)


def test_inference_with_replicated_heads_computes_same_values():
    whole = cg.decode(load("qwen3-0.6b", symbolic=True, dtype="fp32"))
    testing.check_sharded(whole, cg.parallelize(whole, tp=G * R, strict=True), **SIZES)


def test_joint_mesh_axis_name():
    mesh = cg.mesh(kv=G, replica=R, tp=("kv", "replica"))
    assert str(mesh) == "mesh(kv=G, replica=R, tp=(kv, replica))"
    with cg.Graph("g") as g:
        h = cg.relu(cg.einsum(g.input("x", (B, D)), g.param("up", (D, F)), "b d, d f -> b f"))
        g.output(cg.einsum(h, g.param("down", (F, D)), "b f, f d -> b d"))
    for places, collective in (
        ({"x": "(b tp) d"}, None),
        ({"up": "d (f tp)", "down": "(f tp) d"}, "all_reduce"),
        ({"x": "(b tp) d", "up": "d (f tp)", "down": "(f tp) d"}, "all_gather"),
    ):
        rank = cg.shard(g, mesh, places)
        first = [(m.collective, m.axis, m.ring_bytes) for m in cg.communication(rank)][:1]
        once = 4 * B * D * (G * R - 1) / (G * R)  # one ring over all ranks
        found = [] if collective is None else [(collective, "tp", once * (1 + (collective == "all_reduce")))]
        assert [(c, axis, sympy.expand(n)) for c, axis, n in first] == [(c, a, sympy.expand(n)) for c, a, n in found]
        testing.check_sharded(g, rank, B=4, D=4, F=8, G=2, R=2)
    for wrong in (("kv",), ("replica", "kv"), ("dp", "kv"), (), ("kv", 3)):
        with pytest.raises(cg.GraphError, match=r"mesh: tp is .*, expected neighbouring axes among kv, replica"):
            cg.mesh(kv=2, replica=2, tp=wrong)


def test_known_sizes_decide_head_replication():
    model = load("llama-3-70b")  # 64 query heads, 8 key-value heads
    assert [*cg.parallelize(model, tp=8).sharding.mesh] == ["tp"]
    rank = cg.parallelize(model, tp=16, strict=True)
    assert [*rank.sharding.mesh] == ["kv", "replica"]
    layer = 2 * 8192 * 64 * 128 // 16 + 2 * 8192 * 128 + 3 * 8192 * 28672 // 16 + 2 * 8192
    assert cg.param_count(rank) == 80 * layer + 2 * 128256 * 8192 // 16 + 8192
    assert cg.cache_bytes(cg.parallelize(cg.decode(model), tp=16), B=1, S=1) == 80 * 2 * 128 * 2
    # another number of heads, as long as it divides the ranks
    assert cg.param_count(rank, G=4) == cg.param_count(rank)
    with pytest.raises(cg.BindingError, match=r"G=3: axis 'replica' of the mesh has size 16/G = 16/3, expected"):
        cg.param_count(rank, G=3)


def test_unevenly_replicated_heads_are_refused():
    def attention(heads, groups):
        with cg.Graph("g") as g:
            g.output(cg.nn.self_attention(g.input("x", (2, 3, 16)), heads, 2, groups=groups))
        return g

    wrong = "parallelize: 3 KV heads on tp=4 ranks; expected tp to be a multiple or a divisor of the heads"
    with pytest.raises(cg.ShapeError, match=wrong):
        cg.parallelize(attention(12, 3), tp=4)
    with pytest.raises(
        cg.ShapeError, match=r"'d \(h tp\) k' of .*: \(h tp\) splits size 6 into parts of 3/2; expected"
    ):
        cg.parallelize(attention(6, 6), tp=4)
    with cg.Graph("two") as g:
        x = g.input("x", (2, 3, 16))
        y = cg.nn.self_attention(x, 8, 2, groups=2)
        with cg.scope("other"):
            g.output(cg.nn.self_attention(y, 8, 2, groups=4))
    with pytest.raises(cg.GraphError, match="layers have 2 and 4 KV heads, fewer than tp=8"):
        cg.parallelize(g, tp=8)


UNEVEN = {"B": 2, "S": 3, "D": 8, "H": 6, "G": 6, "K": 2, "F": 8, "L": 2, "V": 8}
TEXT = "H=6, TP=4: axis [0-9] of 'layers/attention/q.*' has size H/TP = 3/2, expected a positive integer"


@each(
    "question",
    [
        cg.flops, cg.matmul_flops, cg.bytes_moved, cg.param_count, cg.param_bytes, cg.peak_memory, cg.saved_bytes,
        cg.communication, cg.timeline, cg.state_bytes, lambda g, **sizes: cg.evaluate(cg.peak_memory(g), **sizes),
    ],
)  # fmt: skip
def test_indivisible_heads_are_refused_at_binding(question):
    with pytest.raises(cg.BindingError, match=TEXT):
        question(llama(TP), **UNEVEN, TP=4)
