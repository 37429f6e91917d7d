"""Implicit resharding: it is reported by name, and refused under `strict`."""

import pytest
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph import testing

B, D, F, L = cg.dims("B D F L")


def graph(build):
    with cg.Graph("g") as g:
        g.output(build(g))
    return g


CASES = {
    "made": (
        lambda g: cg.relu(g.input("a", (B, D))) + cg.relu(g.input("b", (B, D))),
        {"a": "(b x) d", "b": "b (d x)"},
        "'add': 'relu_1' is redistributed along x: 'relu' is sharded along it differently",
        ["all_to_all"],
    ),
    "both stated": (
        lambda g: g.input("a", (B, D)) + g.input("b", (B, D)),
        {"a": "(b x) d", "b": "b (d x)"},
        "'add': 'b' is redistributed along x: 'a' is sharded along it differently",
        ["all_to_all"],
    ),
    "product": (
        lambda g: cg.einsum(g.input("a", (B, D)), cg.relu(g.input("b", (B, D))), "b d, b d -> b") + g.input("c", (B,)),
        {"a": "b (d x)", "b": "(b x) d", "c": "(b x)"},
        "'einsum': 'a' is redistributed along x: 'relu' is sharded along it differently",
        ["all_to_all"],
    ),
    "slices": (
        lambda g: cg.scan(L, lambda c, x: (c + x, c), g.input("z", (B,)), g.input("xs", (L, B)))[1],
        {"xs": "(l x) b"},
        "'xs' is redistributed along x: iterations read it in slices",
        ["all_gather"],
    ),
    "handed on": (
        lambda g: cg.repeat(L, lambda c: cg.relu(cg.rearrange(c, "a b -> b a")), g.input("a", (B, B)), name="turn"),
        {"a": "(b x) d"},
        "'turn': 'turn/contiguous' is redistributed along x: the next iteration reads it with another placement",
        ["all_to_all"],
    ),
}


@each("what", CASES)
def test_conflicts_are_reported_and_refused_under_strict(what):
    build, places, text, sent = CASES[what]
    whole = graph(build)
    rank = cg.shard(whole, cg.mesh(x=2), places)
    assert rank.sharding.resharded == (text,)
    assert [m.collective for m in cg.communication(rank)] == sent
    testing.check_sharded(whole, rank, B=2, D=4, L=3 if what == "handed on" else 4)
    with pytest.raises(cg.UnsupportedError) as refused:
        cg.shard(whole, cg.mesh(x=2), places, strict=True)
    assert str(refused.value) == f"shard: {text}, expected placements that every op can keep"


STATED = {
    # activations move to the parameters, which stay: a sharded sequence is gathered for a sharded width
    "parameter": (
        lambda g: cg.einsum(cg.relu(g.input("a", (B, D))), g.param("w", (D, F)), "b d, d f -> b f"),
        {"a": "(b x) d", "w": "d (f x)"},
        ["all_gather"],
    ),
    # for a matmul of two activations, one lacks the axis that the other is sharded along, as keys lack query positions
    "product": (
        lambda g: cg.einsum(cg.relu(g.input("a", (B,))), cg.relu(g.input("b", (D,))), "b, d -> b d"),
        {"a": "(b x)", "b": "(d x)"},
        ["all_gather"],
    ),
}


@pytest.mark.parametrize("what", STATED)
def test_explicit_resharding_is_no_conflict(what):
    build, places, sent = STATED[what]
    whole = graph(build)
    rank = cg.shard(whole, cg.mesh(x=2), places, strict=True)
    assert rank.sharding.resharded == ()
    assert [m.collective for m in cg.communication(rank)] == sent
    testing.check_sharded(whole, rank, B=2, D=4, F=6)


# -- broadcast tensors -----------------------------------------------------------------------------------------------

H, S, K = cg.dims("H S K")


def test_broadcast_tensors_are_moved_before_expansion():
    """One key (b, s, k) shared by all heads, beside sharded heads: gather 4*B*S*K bytes, not H times as many."""
    whole = graph(
        lambda g: (
            cg.relu(g.input("keys", (B, H, S, K)))
            + cg.ops.expand(cg.relu(g.input("shared", (B, 1, S, K))), "b 1 s k -> b h s k", h=H)
        )
    )
    rank = cg.shard(whole, cg.mesh(x=2), {"keys": "b (h x) s k", "shared": "b one (s x) k"}, strict=True)
    assert [(m.collective, m.bytes) for m in cg.communication(rank)] == [("all_gather", 4 * B * S * K)]
    testing.check_sharded(whole, rank, B=2, H=4, S=6, K=3)


def test_latent_attention_gathers_shared_rotary_key_once():
    """Megatron's MLASelfAttention gathers k_pos_emb, one head of Kr, from the sequence-parallel region."""
    sizes = {"D": 4, "H": 2, "L": 3, "Ld": 1, "V": 8, "F": 4, "Fe": 4, "E": 3, "k": 2, "Es": 2, "C": 4, "Kn": 2}
    whole = training_step(load("deepseek-v2-lite", symbolic=True, dtype="fp32"), optimizer=cg.SGD())
    rank = cg.parallelize(whole, tp=2, sequence=True, strict=True)
    width = cg.dims("Kr")
    sent = [m for m in cg.communication(rank).filter(phase="forward", scope="layers/attention") if "rotated" in m.op]
    assert [(m.collective, m.bytes) for m in sent] == [("all_gather", 4 * B * width * S)]
    testing.check_sharded(whole, rank, **sizes, Kr=2, Kv=2, B=2, S=4)
