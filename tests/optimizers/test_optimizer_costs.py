"""FLOPs, bytes and state of updates, from the formulas in papers and from torch's kernels."""

import pytest
import sympy
from each import each
from update_graphs import stacked, states, updated

import costgraph as cg
from costgraph.optimizers import (
    SGD,
    Adafactor,
    AdaGrad,
    Adam,
    AdamW,
    Lion,
    Muon,
    RMSProp,
    Slot,
    clip_grad_norm,
    unscale,
    zero_grad,
)
from costgraph.testing import run

N, D, F, L = cg.dims("N D F L")


def update_of(optimizer, *sizes, dtype="fp32", grad=None):
    with cg.Graph("update", dtype) as g:
        g.assume("F >= D")
        optimizer.update([Slot(g.param("w", sizes), g.input("g", sizes, grad))])
    return g


# -- state -------------------------------------------------------------------------------------------------------


@each(
    ("optimizer", "bytes_per_element"),
    [
        (SGD(), 0),
        (SGD(momentum=0.9), 4),
        (AdaGrad(), 4),
        (RMSProp(), 4),
        (RMSProp(momentum=0.9, centered=True), 12),
        (Adam(), 8),
        (AdamW(), 8),
        (AdamW(implementation="fused", counters="host"), 8),
        (AdamW(amsgrad=True), 12),
        (Lion(), 4),
        (Muon(), 4),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, int) else str(x),
)
def test_state_bytes_per_element(optimizer, bytes_per_element):
    g = update_of(optimizer, D, F)
    taken = sum((t.storage.bytes.expr for t in states(g)), sympy.Integer(0))
    assert sympy.expand(taken - bytes_per_element * cg.param_count(g)) == 0


def test_adafactor_state_is_rows_and_columns():
    taken = sum(t.storage.bytes.expr for t in states(update_of(Adafactor(), D, F)))
    assert taken == 4 * (D + F)
    # for a batch of L matrices, as in torch: rows and columns for each
    taken = sum(t.storage.bytes.expr for t in states(update_of(Adafactor(), L, D, F)))
    assert taken == 4 * L * D + 4 * L * F
    assert sum(t.storage.bytes.expr for t in states(update_of(Adafactor(), N))) == 4 * N


def test_state_has_dtype_of_updated_tensor():
    assert [t.dtype.name for t in states(update_of(Adam(), N, dtype="bf16"))] == ["bf16", "bf16"]
    with_masters = updated(Adam(), dtype="bf16", masters="fp32")
    assert {t.dtype.name for t in states(with_masters)} == {"fp32"}


@each("ours", [Adam, AdaGrad])
def test_fused_kernels_keep_step_counters_on_device(ours):
    names = [(t.name, t.shape, t.dtype.name) for t in states(update_of(ours(implementation="fused"), N))]
    assert names[-1] == ("w.step", (), "fp32")
    assert [n for n, _, _ in names[:-1]] == [t.name for t in states(update_of(ours(), N))]
    # a separate op increments it, and then the kernel reads it
    g, host = (update_of(ours(implementation="fused", counters=c), N) for c in (None, "host"))
    assert cg.flops(g) - cg.flops(host) == 1
    assert cg.bytes_moved(g) - cg.bytes_moved(host) == 4 + 4 + 4


# -- FLOPs and bytes ---------------------------------------------------------------------------------------------


@each(
    ("optimizer", "each"),
    [
        (SGD(), 2),  # p += -lr * g
        (SGD(momentum=0.9), 1 + 1 + 2),  # b *= mu; b += g; p += -lr * b
        (SGD(momentum=0.9, dampening=0.1), 1 + 2 + 2),  # b += (1 - dampening) * g
        (SGD(momentum=0.9, nesterov=True), 1 + 1 + 2 + 2),
        (SGD(weight_decay=0.1, maximize=True), 1 + 2 + 2),
        # m += t * (g - m); v *= beta; v += t * g * g; sqrt; / root; + eps; p += t * m / d
        (Adam(), 3 + 1 + 3 + 1 + 1 + 1 + 3),
        (Adam(weight_decay=0.1), 2 + 13),
        (Adam(amsgrad=True), 13 + 1),
        (AdamW(), 1 + 13),
        (AdamW(weight_decay=0), 13),
        # s += g * g; sqrt; + eps; then g * -lr and p += g / d as a list, p += -lr * g / d one by one
        (AdaGrad(), 2 + 1 + 1 + 1 + 2),
        (AdaGrad(implementation="for-loop"), 2 + 1 + 1 + 3),
        # s *= alpha; s += t * g * g; sqrt; + eps; p += -lr * g / d
        (RMSProp(), 1 + 3 + 1 + 1 + 3),
        # and b *= mu; b += g / d; p += -lr * b instead of the last one
        (RMSProp(momentum=0.9), 1 + 3 + 1 + 1 + 1 + 2 + 2),
        (RMSProp(centered=True), 9 + 3 + 3),
        # sign of m + t * (g - m); p += -lr * sign; m += t * (g - m)
        (Lion(), 3 + 1 + 2 + 3),
        (Lion(weight_decay=0.1), 10),
    ],
    ids=lambda x: "" if isinstance(x, int) else f"{type(x).__name__}-{x.implementation}",
)
def test_update_flops_per_element(optimizer, each):
    assert cg.flops(update_of(optimizer, N)) == each * N


@each("ours", [SGD, Adam, AdamW, AdaGrad])
@each("options", [{}, {"weight_decay": 0.1, "maximize": True}])
def test_fused_update_does_same_flops_and_touches_tensors_once(ours, options):
    loop, fused = (update_of(ours(implementation=i, counters="host", **options), N) for i in ("for-loop", "fused"))
    assert cg.flops(fused) == cg.flops(loop)
    of_kind = cg.costs(fused).filter(kind="transcendental").total().flops
    assert of_kind == cg.costs(loop).filter(kind="transcendental").total().flops
    kept = len(states(fused))
    # reads parameter, gradient and states, writes all but the gradient
    assert cg.bytes_moved(fused) == 4 * N * (2 + kept) + 4 * N * (1 + kept)
    assert cg.peak_memory(fused) == 4 * N * (2 + kept)


def test_adafactor_flops():
    # Per element: the parameter's norm 2, the gradient's along rows and columns 2 + 2, the product of the two means 2,
    # / mean, max, rsqrt, * g: 4, the update's norm 2, p += t * u 2.
    of_matrix = 2 + 2 + 2 + 2 + 4 + 2 + 2
    # per row or column: sqrt, square, / size, m += t * (x - m); per row also the mean of rows
    of_row = 1 + 1 + 1 + 3
    # both norms' roots; max and * lr, / d, max, /; the row mean: max
    scalars = 2 + 2 + 2 + 1 + 1
    g = update_of(Adafactor(), D, F)
    assert sympy.expand(cg.flops(g) - (of_matrix * D * F + of_row * (D + F) + D + scalars)) == 0
    assert cg.matmul_flops(g) == 2 * D * F
    # a vector: norm 2, g * g, lerp 3, max, rsqrt, * g, norm 2, 2
    assert cg.flops(update_of(Adafactor(), N)) == (2 + 1 + 3 + 1 + 1 + 1 + 2 + 2) * N + 2 + 5


@each("tall", [False, True])
@each("steps", [0, 1, 5])
def test_muon_flops(steps, tall):
    g = update_of(Muon(ns_steps=steps), *((F, D) if tall else (D, F)))
    # the shorter side D is on the outside: X X^T, its square, and the product with X
    assert cg.matmul_flops(g) == sympy.expand(steps * (2 * D**2 * F + 2 * D**3 + 2 * D**2 * F))
    # b G + c G^2: 3; a X + product: 2. Around it two lerps 3 + 3, norm 2, / 1, decay 1, p += t * x 2; sqrt and max
    around = (3 + 3 + 2 + 1 + 1 + 2) * D * F + 2
    assert sympy.expand(cg.flops(g) - cg.matmul_flops(g) - steps * (3 * D**2 + 2 * D * F) - around) == 0


def test_muon_multiplies_in_bf16():
    rows = [r for r in cg.costs(update_of(Muon(), D, F)) if r.kind == "matmul" and r.direction == "compute"]
    assert rows
    assert {r.dtype for r in rows} == {"bf16"}


def test_foreach_holds_all_temporaries_and_loop_only_one():
    sizes = (7, 11, 13)

    def peak(implementation):
        g = updated(RMSProp(implementation=implementation), [(n,) for n in sizes])
        return cg.peak_memory(g) - 4 * 3 * sum(sizes)  # parameters, gradients and states

    assert peak("foreach") == 4 * sum(sizes)
    assert peak("for-loop") == 4 * max(sizes)


def test_foreach_groups_by_dtype():
    # as in torch: temporaries in one dtype are freed before those in the next
    with cg.Graph("g") as g:
        made = [
            (g.param(f"w{i}", (n,), t), g.input(f"g{i}", (n,), t))
            for i, (n, t) in enumerate([(101, "fp32"), (211, "bf16"), (103, "fp32")])
        ]
        RMSProp().update([Slot(*pair) for pair in made])
    kept = 3 * (4 * 101 + 2 * 211 + 4 * 103)
    assert cg.peak_memory(g) - kept == max(4 * (101 + 103), 2 * 211)


def test_foreach_masters_cast_all_gradients_first():
    # 7 + 15 + 22 elements: fp32 gradients, and SGD allocates nothing else
    g = updated(SGD(), dtype="bf16", masters="fp32")
    kept = (2 + 2 + 4) * 44
    assert cg.peak_memory(g) - kept == 4 * 44
    # per element: gradient 2 -> 4, p 4 and g 4 -> 4, copy 4 -> 2
    assert cg.bytes_moved(g) == (2 + 4 + 4 + 4 + 4 + 4 + 2) * 44
    fused = updated(SGD(implementation="fused"), dtype="bf16", masters="fp32")
    assert cg.peak_memory(fused) == kept
    assert cg.bytes_moved(fused) == (4 + 2 + 4 + 4 + 2) * 44


def test_update_ops_are_in_optimizer_phase_and_scope():
    g = update_of(AdamW(), N)
    assert {op.phase for op in g.walk()} == {"optimizer"}
    assert {op.scope for op in g.walk()} == {"adamw"}


# -- stacks of layers --------------------------------------------------------------------------------------------

EVERY = [
    SGD(momentum=0.9, nesterov=True),
    AdamW(),
    AdamW(implementation="for-loop"),
    AdamW(implementation="fused"),
    Adafactor(),
    Adafactor(implementation="foreach"),
    Muon(ns_steps=1),
    Lion(),
]


def whole_step(slots):
    _, slots = unscale(slots)
    _, slots = clip_grad_norm(slots, 1.0)
    return zero_grad(slots, set_to_none=False)


@pytest.mark.parametrize("optimizer", EVERY, ids=lambda o: f"{type(o).__name__}-{o.implementation}")
def test_stacked_update_costs_match_separate_layers(optimizer):
    shapes = ((3, 5), (3,), (5, 3))
    g, alone = (stacked(optimizer, n, shapes, whole_step, family) for n, family in ((L, True), (2, False)))
    counted = run(g, L=2)
    assert cg.flops(g, L=2) == cg.flops(alone) == counted.flops
    assert cg.bytes_moved(g, L=2) == cg.bytes_moved(alone) == counted.bytes_moved
    assert counted.peak == cg.peak_memory(g, L=2)
    assert cg.peak_memory(g, L=2) == cg.peak_memory(alone)
    assert [(t.name, t.storage.pieces) for t in states(g)][-1][1] == 1


def test_nested_stacks():
    with cg.Graph("g") as g:
        p, q = g.param("w", (L, 3, N)), g.input("g", (L, 3, N))
        p.storage.pieces = q.storage.pieces = 2
        _, slots = clip_grad_norm([Slot(p, q)], 1.0)
        Adam(implementation="fused").update(slots)
    assert [t.shape for t in states(g)] == [(L, 3, N), (L, 3, N), (L, 3)]
    counted = run(g, L=2, N=5)
    assert (counted.flops, counted.bytes_moved) == (cg.flops(g, L=2, N=5), cg.bytes_moved(g, L=2, N=5))
    assert counted.peak == cg.peak_memory(g, L=2, N=5)


# -- op kinds ----------------------------------------------------------------------------------------------------


def test_update_survives_save_and_load(tmp_path):
    with cg.Graph("g") as g:
        slots = [Slot(g.param("w", (D, N)), g.input("g", (D, N)))]
        Adam(implementation="fused", amsgrad=True, maximize=True).update(whole_step(slots))
    cg.save(g, tmp_path / "g.json")
    back = cg.load(tmp_path / "g.json")
    for question in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert question(back) == question(g)
