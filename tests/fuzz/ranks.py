"""Invariants of random `parallelize` chains: degree-1 axes, sums over ranks, ZeRO stages, early size binding.

Per-rank graphs compute the same values as the unsharded step.
"""

from __future__ import annotations

import random

import costgraph as cg
from costgraph import testing
from costgraph.ir.graph import apply
from costgraph.ops.index import Gather

B, S, D, F, L = cg.dims("B S D F L")
SIZES = {"B": 8, "S": 8, "D": 32, "F": 64, "L": 4}
FEW = {"B": 4, "S": 2, "D": 8, "F": 8, "L": 4}
VOCABULARY = 8


def model(kinds: int, *, gated: bool, fused: bool, post_norm: bool = False, padding_idx: int | None = None) -> cg.Graph:
    """Declare layers with unknown names, and the mean of their output.

    With a norm at the end of each layer, all elements of the first gradient of the backward pass are equal. With a
    padding index, the layers read token embeddings.
    """
    with cg.Graph("drawn", dtype="bf16") as g:
        if padding_idx is None:
            x = g.input("x", (B, S, D))
        else:
            table, tokens = g.param("tokens/table", (VOCABULARY, D)), g.input("tokens", (B, S), dtype="int64")
            (x,) = apply(Gather(padding_idx=padding_idx), [table, tokens], "gather")

        def block(x: cg.Tensor) -> cg.Tensor:
            h = cg.rms_norm(x)
            if fused:
                mixed = cg.linear(h, "b s d -> b s f", f=2 * F, name="one")
                left, right = cg.ops.split(mixed, (F, F), -1)
                h = cg.silu(left) * right
            else:
                h = cg.silu(cg.linear(h, "b s d -> b s f", f=F, name="one"))
                h = h * cg.linear(x, "b s d -> b s f", f=F, name="other") if gated else h
            x = x + cg.linear(h, "b s f -> b s d", d=D, name="two")
            return cg.nn.layer_norm(x, name="last") if post_norm else x

        names = [f"kind{i}" for i in range(kinds)]
        x = cg.nn.layers(L, dict.fromkeys(names, block), x, names)
        g.output(cg.reduce(x, "b s d ->", "mean"))
    return g


def numbers(g: cg.Graph, **sizes: int) -> tuple[object, ...]:
    return cg.flops(g, **sizes), cg.bytes_moved(g, **sizes), cg.peak_memory(g, **sizes)


def check(rng: random.Random) -> None:
    """Draw one configuration and assert the invariants of every configuration."""
    gated, fused, post_norm = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.5
    kinds = rng.choice((1, 2))
    accumulate, checkpoint = rng.choice((1, 2)), rng.choice((None, cg.every_block()))
    optimizer = rng.choice((cg.SGD(), cg.AdamW(implementation="fused")))
    padding_idx = rng.choice((None, 0, VOCABULARY - 1))
    step = cg.training_step(
        model(kinds, gated=gated, fused=fused, post_norm=post_norm, padding_idx=padding_idx),
        optimizer=optimizer,
        checkpoint=checkpoint,
        accumulate=accumulate,
    )
    dp, tp = rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
    assert numbers(cg.parallelize(step, dp=1, tp=1, zero=rng.randrange(4)), **SIZES) == numbers(step, **SIZES)
    options = {"reduce_every_microbatch": False} if accumulate > 1 and rng.random() < 0.7 else {}
    testing.check_sharded(step, cg.parallelize(step, dp=dp, tp=tp, zero=rng.randrange(4), **options), **FEW)
    whole = cg.state_bytes(step, **SIZES)
    ranks = [cg.parallelize(step, dp=dp, tp=tp, zero=stage) for stage in range(4)]
    held = [cg.state_bytes(rank, **SIZES) for rank in ranks]
    for less, more in zip(held[1:], held, strict=False):
        for name in ("params", "gradients", "state"):
            assert getattr(less, name) <= getattr(more, name), (name, held)
    # the ranks of ZeRO stage 3 together hold each parameter once; norms are replicated along tp
    assert held[3].params * dp * tp >= whole.params, (held, whole)
    assert held[3].params * dp == held[0].params, (held, whole)
    counters = 4 * 32 * dp  # every rank keeps a step counter per parameter
    assert 0 <= held[3].state * dp - held[0].state <= counters, (held, whole)
    rank = ranks[0]
    assert cg.matmul_flops(rank, **SIZES) * dp * tp == cg.matmul_flops(step, **SIZES)
    degrees = {"dp": cg.dims("DP"), "tp": cg.dims("TP")}
    early = cg.parallelize(step, dp=dp, tp=tp, zero=3) if dp > 1 and tp > 1 else None
    if early is not None:
        late = cg.parallelize(step, **degrees, zero=3)
        assert numbers(late, **SIZES, DP=dp, TP=tp) == numbers(early, **SIZES)
    gathers = [m for m in cg.communication(ranks[3], **SIZES) if m.collective == "all_gather" and m.axis == "dp"]
    layers = [m for m in gathers if "layers" in str(m.op) and m.phase == "forward"]
    if dp > 1 and (kinds == 1 or step.layers):
        expected = SIZES["L"] * accumulate * len({m.bytes for m in layers})
        assert sum(m.times for m in layers) == expected, (layers, expected)
