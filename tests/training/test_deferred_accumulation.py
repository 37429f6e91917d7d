"""Gradient accumulation deferred until after the backward pass, against a torch program that defers it."""

import warnings
from collections import Counter

import numpy as np
import pytest
from shared import load

import costgraph as cg
from costgraph import GraphError
from costgraph.testing import run

pytest.importorskip("torch")

import plain_models
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from tracked import setting

MLP = {"D": 31, "F": 53, "L": 5, "C": 11}
WIDE = {"D": 131, "F": 1031, "L": 7, "C": 13}


class Accumulator:
    """Accumulate bf16 gradients in fp32 and update fp32 copies, like nanotron's `FP32GradientAccumulator`.

    It accumulates after the backward pass; with `at_once`, a hook per parameter accumulates as gradients are computed.
    """

    def __init__(self, module, at_once):
        self.halves = [*module.parameters()]
        many = sum(p.numel() for p in self.halves)
        self.sums, copies = torch.zeros(many), torch.zeros(many)
        sizes = [p.numel() for p in self.halves]
        self.parts = [s.view_as(p) for s, p in zip(self.sums.split(sizes), self.halves, strict=True)]
        self.wide = [s.view_as(p) for s, p in zip(copies.split(sizes), self.halves, strict=True)]
        for w, part in zip(self.wide, self.parts, strict=True):
            w.requires_grad = True
            w.grad = part
        self.at_once = at_once
        for half, part in zip(self.halves, self.parts, strict=True) if at_once else ():
            half.register_post_accumulate_grad_hook(lambda p, part=part: self.add(p, part))

    def add(self, half, part):
        part.add_(half.grad)
        half.grad = None

    def backward(self, loss):
        loss.backward()
        if not self.at_once:
            for half, part in zip(self.halves, self.parts, strict=True):
                self.add(half, part)

    def step(self, optimizer):
        optimizer.step()
        with torch.inference_mode():
            for half, w in zip(self.halves, self.wide, strict=True):
                half.copy_(w)
        self.sums.zero_()


def tracked_peak(sizes, B, times, at_once):
    """Return the peak bytes of the second step from MemTracker on fake tensors."""
    with FakeTensorMode():
        module, _, ids, targets = setting("mlp", sizes, B * times, 0, "bf16", "foreach")
        sums = Accumulator(module, at_once)
        optimizer = torch.optim.AdamW(sums.wide, fused=True)

        def step():
            for x, y in zip(ids.split(B), targets.split(B), strict=True):
                tracker.reset_mod_stats()  # a module runs several times
                loss = plain_models.loss_of(module, x, y)
                sums.backward(loss if times == 1 else loss / times)
                del loss
            sums.step(optimizer)

        tracker = MemTracker()
        tracker.track_external(module, ids, targets, sums.sums, *sums.wide, optimizer)
        with tracker, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Expected a tensor or a traceable wrapper-subclass", UserWarning)
            step()
            step()
        (found,) = tracker.get_tracker_snapshot("peak").values()
    return found["Total"]


def declared(times, defer, implementation="fused", **options):
    return cg.training_step(
        load("mlp", symbolic=True), optimizer=cg.AdamW(implementation=implementation),
        precision="megatron-bf16", accumulate=times, defer_accumulation=defer, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("times", "defer"), [(1, True), pytest.param(1, False, marks=pytest.mark.long), (3, True), (3, False)]
)
@pytest.mark.parametrize(
    ("sizes", "B"),
    [pytest.param(MLP, 3, marks=pytest.mark.long), (WIDE, 2), pytest.param(MLP, 997, marks=pytest.mark.long)],
)
def test_deferred_peak_matches_torch_accumulator(sizes, B, defer, times):
    peak = cg.peak_memory(declared(times, defer), **sizes, B=B)
    assert tracked_peak(sizes, B, times, at_once=not defer) == peak + (2 if times == 1 else 0)  # its loss


def test_deferred_gradients_are_live_beside_accumulators():
    late, soon = (cg.peak_memory(declared(3, defer), **WIDE, B=2) for defer in (True, False))
    layers, inner = WIDE["L"], WIDE["F"]
    # immediate accumulation holds at most one layer's gradients, plus intermediates
    assert late - soon > 2 * (layers - 1) * inner * inner


B, D, F, K, L = cg.dims("B D F K L")


@pytest.fixture(scope="module")
def stack():
    """Layers, a shared parameter, a parameter that is used twice, and one outside the stack."""
    with cg.Graph("stack", dtype="bf16") as g:
        x = g.input("x", (B, D))
        shared, twice = g.param("shared", (D,)), g.param("twice", (D, D))

        def layer(h):
            return cg.relu(cg.linear(h, "b d -> b e", e=D, bias=True, name="up")) * shared

        h = cg.repeat(L, layer, x @ twice, name="layers")
        g.output(cg.reduce(cg.linear(h @ twice, "b d -> b k", k=K, name="head"), "b k -> ", "mean"))
    return g


SIZES = {"B": 2, "D": 3, "K": 5, "L": 4}


@pytest.mark.parametrize("checkpoint", [None, cg.every_block()], ids=["kept", "block"])
@pytest.mark.parametrize("times", [1, 3])
def test_deferred_accumulation_matches_immediate_accumulation(stack, times, checkpoint):
    soon, late = (
        cg.training_step(
            stack, precision="megatron-bf16", accumulate=times, checkpoint=checkpoint, defer_accumulation=flag
        )
        for flag in (False, True)
    )
    for ask in (cg.flops, cg.bytes_moved, cg.param_bytes):
        assert ask(late) == ask(soon)
    sources = [t for t in soon.tensors if t.producer is None and t.role in ("param", "state", "input")]
    at = {symbol: SIZES[symbol.name] for symbol in (B, D, K, L)}
    drawn = np.random.default_rng(1)
    numbers = {t.name: drawn.uniform(0.1, 1, [int(n.subs(at)) for n in t.shape]) for t in sources}
    first, second = (run(step, numbers, **SIZES) for step in (soon, late))
    left, right = ({b.name: b.array for b in made.buffers} for made in (first, second))
    changed = [name for name in left if name.partition("[")[0] in numbers and name != "x"]
    assert len(changed) >= 9
    for name in changed:
        np.testing.assert_allclose(right[name], left[name], rtol=1e-12)
    assert second.peak == cg.peak_memory(late, **SIZES)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("times", [1, 3])
def test_ranks_reduce_accumulated_gradients_once(times, zero):
    """Ranks send the same messages: fp32 sums, one per parameter and layer, after the last pass."""
    sums = []
    for defer in (False, True):
        step = declared(times, defer)
        rank = cg.parallelize(step, dp=2, zero=zero, reduce_every_microbatch=False)
        sums.append(Counter((m.collective, m.axis, m.times, m.bytes) for m in cg.communication(rank)))
    assert sums[0] == sums[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"defer_accumulation": 1}, "defer_accumulation is 1, expected True or False"),
        (
            {"defer_accumulation": True, "precision": "bf16"},
            (
                "training_step: defer_accumulation needs gradients in a wider format than they are computed in, which "
                "precision 'bf16' does not keep; expected a policy such as megatron-bf16"
            ),
        ),
    ],
)
def test_unsupported_deferred_accumulation_is_refused(stack, options, text):
    with pytest.raises(GraphError, match=text):
        cg.training_step(stack, **options)
