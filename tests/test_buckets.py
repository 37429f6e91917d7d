"""Gradient buckets: ranks' computation and memory, communication volume and message counts."""

from itertools import product

import pytest
import sympy
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph import testing
from costgraph.hardware.links import wire

B, D, L, N = cg.dims("B D L N")
SMALL = {"B": 4, "D": 3, "L": 3, "N": 2}


def step(tied=False, **options):
    """Products before, inside and after L layers."""
    with cg.Graph("g") as g:
        w = g.param("w", (D, D))
        x = cg.relu(cg.einsum(g.input("x", (B, D)), w, "b d, d e -> b e"))
        x = cg.repeat(L, lambda x: x + cg.relu(cg.einsum(x, g.param("w", (D, D)), "b d, d e -> b e")), x, name="layers")
        x = cg.einsum(x, w if tied else g.param("head", (D, D)), "b d, d e -> b e")
        g.output(cg.reduce(x * x, "b d -> ", "mean"))
    return cg.training_step(g, optimizer=cg.AdamW(), **options)


def sharded(whole, buckets=None, **options):
    micro = "a " if next(t for t in whole.tensors if t.name == "x").ndim == 3 else ""
    return cg.shard(whole, cg.mesh(dp=N), {"x": f"{micro}(b dp) d"}, buckets=buckets, strict=True, **options)


#: For each kind of step, one case copies gradients back and one uses bucket views.
SHORT = {(1, True, True, True), (1, True, True, False), (2, False, True, True), (2, True, True, False)}


@pytest.mark.parametrize(
    ("parts", "each", "none", "view"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
        for case in product((1, 2), (True, False), (True, False), (True, False))
        if case != (2, True, True, True)  # raises, see below
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_bucketed_ranks_compute_same_values_as_one_device(parts, each, none, view, tied):
    """Buckets are uninitialized when a step begins, so every element read was written before."""
    whole = step(tied, accumulate=parts, set_to_none=none)
    rank = sharded(whole, cg.Buckets(view=view), reduce_every_microbatch=each)
    testing.check_sharded(whole, rank, **SMALL)
    plain = sharded(whole, reduce_every_microbatch=each)
    assert cg.communication(rank).total() == cg.communication(plain).total()


def test_gradient_with_other_readers_is_copied_before_reduction():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        a, b = g.param("a", (D,)), g.param("b", (D,))
        y = x * a + b
        g.output(cg.reduce(y * y, "b d -> ", "mean"))
    whole = cg.training_step(g)
    testing.check_sharded(whole, sharded(whole, cg.Buckets()), B=4, D=3, N=2)


def test_buckets_stay_allocated_and_copied_gradients_add_memory():
    """The backward pass of two products ends with both gradients live; the SGD update needs no more memory."""
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        for name in "uv":
            x = cg.einsum(x, g.param(name, (D, D)), "b d, d e -> b e")
        g.output(cg.reduce(x, "b d -> ", "sum"))
    whole = cg.training_step(g, optimizer=cg.SGD(implementation="for-loop"))
    copied, viewed = (
        cg.timeline(sharded(whole, cg.Buckets(view=view)), B=4, D=101, N=2).by_role for view in (False, True)
    )
    bytes_ = 2 * 4 * 101 * 101  # parameters; gradients and buckets are equally large
    assert copied["param"] == viewed["param"] == bytes_
    assert copied["gradient"] == 2 * bytes_
    assert viewed["gradient"] == bytes_
    rows = [r for r in cg.lifetimes(sharded(whole, cg.Buckets()), B=4, D=101, N=2) if r.tensor.endswith(".bucket")]
    assert sum(r.bytes for r in rows) == bytes_


def test_bucket_views_add_no_memory_to_kept_gradients():
    whole = step(set_to_none=False)
    plain, viewed = (
        sharded(whole, buckets, reduce_every_microbatch=False) for buckets in (None, cg.Buckets(view=True))
    )
    assert cg.peak_memory(plain, **SMALL) == cg.peak_memory(viewed, **SMALL)
    copied = sharded(whole, cg.Buckets(), reduce_every_microbatch=False)
    assert cg.peak_memory(copied, **SMALL) == cg.peak_memory(plain, **SMALL) + 4 * 3 * 3 * (3 + 2)


# -- messages --------------------------------------------------------------------------------------------------------


def messages(rank, **sizes):
    return [(m.op.rpartition("/")[2], m.messages) for m in cg.communication(rank, **sizes).filter(phase="backward")]


def test_full_bucket_is_sent_as_one_message():
    """Matrices have 4 * 5 * 5 = 100 B. Gradients arrive as head, five layers, w; a 250 B bucket takes three."""
    rank = sharded(step(), cg.Buckets(cap=250))
    collectives = cg.communication(rank, B=4, D=5, L=5, N=2).filter(phase="backward")
    # head + 2 layers, 3 layers, w
    assert [m.messages for m in collectives] == [0, 2, 1]
    assert [m.times for m in collectives] == [1, 5, 1]
    assert [m.messages for m in cg.communication(rank, D=5, N=2).filter(phase="backward")] == [None] * 3
    sent = cg.communication(rank).filter(phase="backward").total()
    assert sympy.expand(sent - 4 * D**2 * (L + 2) * 2 * (N - 1) / N) == 0


def test_first_bucket_has_smaller_capacity():
    """Matrices have 4 * 520 * 520 = 1,081,600 B, more than 1 MiB; 25 of them, 27,040,000 B, exceed 25 MiB."""
    rank = sharded(step(), cg.Buckets())
    sizes = {"B": 4, "D": 520, "N": 2}
    for layers, count in {23: 2, 24: 2, 25: 3}.items():  # head alone, then 25 gradients from layers and w
        assert sum(n for _, n in messages(rank, **sizes, L=layers)) == count
    assert sum(n for _, n in messages(sharded(step(accumulate=3), cg.Buckets()), **sizes, L=25)) == 3 * 3
    once = sharded(step(accumulate=3), cg.Buckets(), reduce_every_microbatch=False)
    assert sum(n for _, n in messages(once, **sizes, L=25)) == 3


def test_each_dtype_has_its_own_buckets():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        for name, dtype in {"u": "fp32", "v": "bf16", "w": "fp32"}.items():
            x = cg.einsum(cg.ops.cast(x, dtype), g.param(name, (D, D), dtype=dtype), "b d, d e -> b e")
        g.output(cg.reduce(x, "b d -> ", "sum"))
    rank = sharded(cg.training_step(g), cg.Buckets())
    assert [n for _, n in messages(rank, B=4, D=5, N=2)] == [0, 1, 1]  # w waits for u


def test_each_message_costs_one_latency():
    """Three messages replace seven, which saves four latencies on each link."""
    sizes = {"B": 4, "D": 5, "L": 5, "N": 2}
    link = wire(cg.load_hardware("h100-sxm"), "interconnect")
    times = [
        sum(
            m.seconds
            for m in cg.communication(sharded(step(), buckets), hardware="h100-sxm", **sizes).filter(phase="backward")
        )
        for buckets in (None, cg.Buckets(cap=250))
    ]
    latency, bandwidth = (float(p.constant) for p in (link.latency, link.bandwidth))
    moved = 7 * 100 * 2 * (1 / 2) / bandwidth
    assert times[0] == pytest.approx(7 * 2 * latency + moved)
    assert times[1] == pytest.approx(3 * 2 * latency + moved)
    both = [cg.seconds(sharded(step(), b), "h100-sxm", overlap="streams", **sizes) for b in (None, cg.Buckets(cap=250))]
    assert both[1] < both[0]


def test_time_is_a_formula_in_the_batch_size():
    rank = sharded(step(), cg.Buckets())
    formula = cg.seconds(rank, "h100-sxm", D=512, L=8)
    assert {str(s) for s in formula.free_symbols} == {"B", "N"}
    assert cg.evaluate(formula, B=64, N=8) == pytest.approx(cg.seconds(rank, "h100-sxm", B=64, N=8, D=512, L=8))


# -- errors ----------------------------------------------------------------------------------------------------------


def test_message_count_requires_bound_parameter_sizes():
    with pytest.raises(cg.BindingError) as refused:
        cg.seconds(sharded(step(), cg.Buckets()), "h100-sxm", B=4, N=2)
    assert str(refused.value) == (
        "messages of 'einsum_3.all_reduce': 4*D**2 bytes, expected a number; bind the sizes of all "
        "parameters, since a bucket is a number of bytes"
    )


def test_bucket_views_reject_reduce_each_micro_batch():
    with pytest.raises(cg.UnsupportedError) as refused:
        sharded(step(accumulate=2), cg.Buckets(view=True))
    assert str(refused.value) == (
        "shard: buckets with view=True cannot hold the gradient of 'w', because micro-batches accumulate into "
        "it; expected reduce_every_microbatch=False, a step with set_to_none=False, or view=False"
    )


def test_reduce_scattered_gradients_use_no_bucket():
    with pytest.raises(cg.UnsupportedError) as refused:
        cg.parallelize(training_step(load("gpt2")), dp=2, zero=2, buckets=cg.Buckets())
    assert str(refused.value).startswith("shard: buckets cannot be combined with ")
    assert str(refused.value).endswith("; expected gradients that are replicated on all ranks")


@each(
    ("options", "text"),
    [
        ({"axes": (1,)}, "Buckets: axes=(1,), expected one or several names"),
        ({"cap": 0}, "Buckets: cap is 0, expected bytes, at least 1"),
        ({"view": 1}, "Buckets: view is 1, expected True or False"),
    ],
)
def test_invalid_bucket_policy_raises(options, text):
    with pytest.raises(cg.GraphError) as refused:
        cg.Buckets(**options)
    assert str(refused.value) == text


def test_bucket_axes_must_be_mesh_axes():
    with pytest.raises(cg.GraphError, match="shard: buckets: unknown axis 'tp', expected axes of"):
        sharded(step(), cg.Buckets("tp"))
