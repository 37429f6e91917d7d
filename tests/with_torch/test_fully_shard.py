"""Peaks of a rank under torch's fully_shard, from the trace of the same model on one device.

The references come from torch 2.13.0+cpu (2026-11-23) on a fake process group of 2 and 4 ranks, and from two real gloo
processes: AdamW, fp32, B=2 and S=32 per rank, with each of the four layers a unit and the rest the root. Live storage
bytes were tracked from allocation to finalization, at their resized size; torch's FSDPMemTracker agrees. The root was
resharded after the forward pass too (`fully_shard(m, reshard_after_forward=True)`).
"""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

import costgraph as cg
from costgraph.torch import trace

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

D, HEADS, INNER, L, V, S = 64, 4, 128, 4, 512, 32


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return functional.rms_norm(x, (D,), self.weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, HEADS, -1).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(D, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, D, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.attn, self.n2, self.mlp = Norm(), Attention(), Norm(), Inner()

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList([Block() for _ in range(L)])
        self.norm, self.head = Norm(), nn.Linear(D, V, bias=False)

    def forward(self, t):
        x = self.embed(t)
        for b in self.layers:
            x = b(x)
        return self.head(self.norm(x))


class Train(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = Model()

    def forward(self, t, y):
        return functional.cross_entropy(self.m(t).flatten(0, 1), y.flatten())


class Cast(nn.Module):
    """A weight cast as by fully_shard under a MixedPrecisionPolicy."""

    def forward(self, weight):
        return weight.bfloat16()


@cache
def forward(ranks):
    tokens = torch.zeros(2 * ranks, S, dtype=torch.long)
    return trace(Train(), tokens, tokens.clone())


@cache
def step(ranks, mixed=False):
    tokens, module = torch.zeros(2 * ranks, S, dtype=torch.long), Train()
    for inner in [m for m in module.modules() if mixed and "weight" in dict(m.named_parameters(recurse=False))]:
        parametrize.register_parametrization(inner, "weight", Cast(), unsafe=True)
    return trace(module, tokens, tokens.clone(), train=True, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3))


def sharded(mesh, graph=None, reduce_every_microbatch=True, **policy):
    axes = [name for name, _ in mesh.axes]
    graph = step(int(mesh.devices.expr), "param_dtype" in policy) if graph is None else graph
    placements = {}
    for t in graph.tensors:
        if t.producer is None and t.role == "input":
            placements[t.name] = f"{'n ' * (t.ndim - 2)}(b {' '.join(axes)}) s"
        if t.producer is None and t.role in ("param", "state", "buffer") and t.ndim:
            placements[t.name] = f"(a {' '.join(axes)})" + " b" * (t.ndim - 1)
    gather = cg.FullyShard(axes, units=["m/layers/*"], **policy)
    return cg.shard(
        graph, mesh, placements, gather=gather, reduce_every_microbatch=reduce_every_microbatch, strict=True
    )


def sent(graph):
    rows = cg.communication(graph)
    return [
        rows.filter(phase=phase, collective=what).total()
        for phase, what in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter"))
    ]


def test_rank_peak_equals_fully_shard_to_the_byte():
    rank = sharded(cg.mesh(dp=4), reshard_root=True)
    assert sent(rank) == [689_856, 689_856, 689_856]
    assert cg.peak_memory(rank) == 2_713_956
    # units with 164,352 bytes, and the root with 262,400: as many collectives each
    whole = [m.bytes for m in cg.communication(rank).filter(phase="backward", collective="reduce_scatter")]
    assert whole == [164_352] * 4 + [262_400]


@pytest.mark.long
def test_two_rank_peak_equals_two_processes_to_the_byte():
    assert cg.peak_memory(sharded(cg.mesh(dp=2), reshard_root=True)) == 3_403_812


@pytest.mark.parametrize("count", [3, pytest.param("N", marks=pytest.mark.long)])
@pytest.mark.parametrize(("each", "peak"), [(True, 2_943_908), pytest.param(False, 3_551_332, marks=pytest.mark.long)])
def test_micro_batch_peak_equals_fully_shard_to_the_byte(count, each, peak):
    """`sharded_oracles.py`: each micro-batch is reduced, or only the last (`set_requires_gradient_sync`)."""
    times, at = (count, {}) if count == 3 else (cg.dims(count), {count: 3})
    rank = sharded(cg.mesh(dp=4), cg.training_step(forward(4), optimizer=cg.AdamW(), accumulate=times), each)
    # torch has the same tokens and targets (2 rows, int64) in each micro-batch, drops losses, and keeps 39 step
    # counters
    assert cg.peak_memory(rank, **at) == peak + 2 * 2 * (2 * S * 8) + 2 * 4 - 39 * 4
    reduced = cg.communication(rank, **at).filter(phase="backward", collective="reduce_scatter")
    assert {m.bytes for m in reduced} == {164_352, 262_400}
    assert sum(m.times for m in reduced) == 5 * (3 if each else 1)


@pytest.mark.long
def test_unresharded_peaks_are_within_a_thousandth():
    unresharded = sharded(cg.mesh(dp=4), reshard_after_forward=False)
    assert sent(unresharded) == [689_856, 0, 689_856]
    assert cg.peak_memory(unresharded) == pytest.approx(3_239_268, rel=1e-3)
    # reshard_after_forward=2: groups of two ranks keep the parameters between the passes
    partly = sharded(cg.mesh(dp=2, of=2), reshard_after_forward="of", reshard_root=True)
    assert sent(partly) == [689_856, 459_904, 689_856]
    assert cg.peak_memory(partly) == pytest.approx(3_042_020, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "policy", "peak"),
    [
        (4, {"reduce_dtype": "fp32"}, 1_860_320),
        (4, {"reduce_dtype": "fp32", "reshard_root": True}, 1_860_320),
        (4, {}, 1_836_640),
        (2, {"reduce_dtype": "fp32"}, 2_591_264),
        (2, {"reduce_dtype": "fp32", "reshard_root": True}, 2_591_264),
    ],
)
def test_mixed_precision_peaks_equal_fully_shard_to_the_byte(ranks, policy, peak):
    """MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=...), torch 2.13.0+cpu, on a fake process group."""
    assert cg.peak_memory(sharded(cg.mesh(dp=ranks), param_dtype="bf16", **policy)) == peak


@pytest.mark.long
def test_unresharded_bf16_peak_is_within_a_thousandth():
    rank = sharded(cg.mesh(dp=4), param_dtype="bf16", reduce_dtype="fp32", reshard_after_forward=False)
    assert cg.peak_memory(rank) == pytest.approx(2_115_808, rel=1e-3)
