"""Every transform preserves a graph's facts: assumptions, default sizes, the loss and layer scopes."""

from __future__ import annotations

import inspect

import pytest

import costgraph as cg
from costgraph.ir.graph import FACTS, known_names

B, S, D, L = cg.dims("B S D L")


def model():
    """Return alternating layers with two kinds, and one fact of each type."""
    bodies = {"narrow": lambda x: block(x, D), "wide": lambda x: block(x, 2 * D)}
    with cg.Graph("g", dtype="bf16") as g:
        x = cg.linear(g.input("x", (B, S, D)), "b s d -> b s e", e=D, name="first")
        x = cg.nn.layers(L, bodies, x, ("narrow", "wide"))
        g.output(cg.linear(x, "b s d -> b s v", v=2 * D, name="head"))
        g.loss = "cross_entropy"
    g.assume("S <= 4096")
    g.defaults = {"L": 6, "D": 8}
    g.legend = {"B": "batch size", "S": "sequence length"}
    return g


def block(x, width):
    with cg.scope("attention"):
        q, k, v = (cg.linear(x, "b s d -> b s e", e=D, name=name) for name in "qkv")
        q, k, v = (cg.rearrange(t, "b s (h k) -> b h s k", h=1) for t in (q, k, v))
        k, v = (cg.ops.cache(t, "b h s k", along="s") for t in (k, v))
        x = x + cg.rearrange(cg.attention(q, k, v, causal=True), "b h s k -> b s (h k)")
    return x + cg.nn.mlp(x, width)


def step(graph, **more):
    return cg.training_step(graph, optimizer=cg.SGD(), **more)


#: Every public graph-to-graph function, with arguments for each of its modes.
TRANSFORMS = {
    "apply_precision": [lambda g: cg.apply_precision(g, "bf16-mixed")],
    "backward": [lambda g: cg.backward(cg.apply_precision(scalar(g), "bf16"))],
    "decode": [cg.decode],
    "fold": [lambda g: cg.fold(cg.unroll(g, L=6), "layers", "N", default=True)],
    "fuse": [cg.fuse, lambda g: cg.fuse(g, epilogues=True), lambda g: cg.fuse(step(g))],
    "lora": [lambda g: cg.lora(g, 4), lambda g: cg.lora(g, 4, ["layers[2:]/*/q"])],
    "offload": [lambda g: cg.offload(step(g), "activations"), lambda g: cg.offload(piped(g), "optimizer")],
    "parallelize": [lambda g: cg.parallelize(step(g), dp=2, zero=1), lambda g: piped(g)],
    "prefill": [cg.prefill, lambda g: cg.prefill(g, logits="last")],
    "quantize": [lambda g: cg.quantize(g, "int8"), lambda g: cg.quantize(g, "int8", skip=["layers[:2]"])],
    "shard": [lambda g: cg.shard(step(g), cg.mesh(dp=2), {"x": "(b dp) s d", "targets": "(b dp) s"})],
    "training_step": [step, lambda g: step(g, accumulate=4), lambda g: step(g, freeze="layers[:2]"),
                      lambda g: step(g, precision="bf16-mixed", checkpoint=cg.every_block())],
    "unroll": [lambda g: cg.unroll(g, L=6), lambda g: cg.unroll(step(g), L=6)],
}  # fmt: skip

#: Facts that a transform drops, with the reason.
DROPPED = {
    ("loss", "training_step"): "its output is the loss",
    ("loss", "offload"): "of a step, whose output is the loss",
    ("loss", "parallelize"): "of a step, whose output is the loss",
    ("loss", "shard"): "of a step, whose output is the loss",
}


def scalar(graph):
    with cg.unroll(graph, L=6) as out:
        out.outputs = [cg.reduce(out.outputs[0], "b s v -> ", "mean")]
    return out


def piped(graph):
    return cg.parallelize(step(graph, accumulate=4), pp=3, micro_batches=4)


def test_all_public_transforms_are_covered():
    def first(name):
        called = getattr(cg, name)
        if not inspect.isfunction(called):
            return ""
        parameters = [p.annotation for p in inspect.signature(called).parameters.values()]
        returned = inspect.signature(called).return_annotation
        return parameters[0] if parameters and returned in ("Graph", cg.Graph) else ""

    assert {name for name in cg.__all__ if first(name) in ("Graph", cg.Graph)} == set(TRANSFORMS)


@pytest.mark.parametrize(("name", "way"), [(n, i) for n, ways in TRANSFORMS.items() for i in range(len(ways))])
def test_transform_preserves_every_fact(name, way):
    graph = model()
    new = TRANSFORMS[name][way](graph)
    facts = {
        "relations": {r.text for r in graph.relations.relations} <= {r.text for r in new.relations.relations},
        # a size that is absent from the new graph has no default there
        "defaults": all(new.defaults.get(n, size) == size for n, size in graph.defaults.items())
        and {"D"} <= set(new.defaults),
        "loss": new.loss == graph.loss or (name in ("fuse", "unroll") and bool(new.gradients)),
        "layers": graph.layers <= new.layers,
        "legend": new.legend == graph.legend != {},
        "matmul_dtype": new.matmul_dtype == graph.matmul_dtype
        or name in ("apply_precision", "backward", "training_step"),
        "waiting": new.waiting == graph.waiting or bool(new.parts),
    }
    assert set(facts) == set(FACTS)
    lost = {fact for fact, kept in facts.items() if not kept and (fact, name) not in DROPPED}
    assert not lost
    assert known_names(new)


BEFORE = ["lora", "qlora", "fuse", "apply_precision", "unroll"]


@pytest.mark.parametrize(("before", "micro_batches"), [(b, m) for m in (1, 4) for b in BEFORE])
def test_layers_are_recomputed_after_any_transform(before, micro_batches):
    ways = {name: found[0] for name, found in TRANSFORMS.items()}
    ways["qlora"] = lambda g: cg.quantize(cg.lora(g, 4), "int8", skip=["head", "lora_a", "lora_b"])
    plain, transformed = model(), ways[before](model())
    again = [
        cg.costs(step(g, checkpoint=cg.every_block(), accumulate=micro_batches), B=2, S=8).filter(phase="recompute")
        for g in (plain, transformed)
    ]
    scopes = [{scope.partition("/lora")[0] for scope in rows.group("scope")} for rows in again]
    assert all(any(kind in scope for scope in scopes[1]) for kind in ("narrow", "wide"))
    if before == "unroll":
        assert again[0].total().matmul == again[1].total().matmul > 0
