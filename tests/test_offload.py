"""States, parameters and activations on the host: values, link traffic, and memory on each side."""

from itertools import combinations

import numpy as np
import pytest
from shared import load, training_step

import costgraph as cg
from costgraph import testing
from costgraph.analysis.costs import executions
from costgraph.errors import GraphError, ShapeError, SpecError, UnsupportedError

B, S, D, F, L = cg.dims("B S D F L")
SIZES = {"B": 2, "S": 3, "D": 5, "F": 7, "L": 4}
EVERY = ("optimizer", "parameters", "activations")
SETS = [what for n in range(1, 4) for what in combinations(EVERY, n)]


def model(dtype="fp32", count=L):
    with cg.Graph("g", dtype=dtype) as g:

        def layer(x):
            return x + cg.linear(cg.gelu(cg.linear(x, "b s d -> b s f", f=F, name="up")), "b s f -> b s d", d=D,
                                 name="down")  # fmt: skip

        x = cg.linear(g.input("x", (B, S, D)), "b s d -> b s e", e=D, name="in")
        g.assume("F >= D")
        g.output(cg.reduce(cg.repeat(count, layer, x, name="layers"), "b s d -> ", "mean"))
    return g


STEPS = {
    "fused": {"optimizer": cg.AdamW(implementation="fused"), "precision": "bf16-master"},
    "foreach": {"optimizer": cg.AdamW()},
    "clipped": {"optimizer": cg.SGD(momentum=0.9), "clip": 1.0},
    "again": {"optimizer": cg.Adam(implementation="fused"), "checkpoint": cg.every_block()},
    "accumulated": {"optimizer": cg.AdamW(implementation="fused"), "accumulate": 3},
    "muon": {"optimizer": cg.Muon()},
    "within": {"optimizer": cg.SGD(), "optimizer_in_backward": True},
}


def step(how="fused", **others):
    return cg.training_step(model("bf16" if how == "fused" else "fp32", **others), **STEPS[how])


def moved(graph):
    """Return the link traffic in bytes by phase and direction."""
    out = {}
    for op, times, _ in executions(graph):
        if op.kind.name == "transfer":
            x = op.operands[-1]
            out[op.phase, op.kind.to] = out.get((op.phase, op.kind.to), 0) + (x.numel * x.element_bytes() * times).expr
    return {key: n.expand() for key, n in out.items()}


def _computes_the_same(how, what):
    whole, sizes = step(how), SIZES
    away = cg.offload(whole, what)
    one, other = (testing.run(g, seed=3, **sizes) for g in (whole, away))
    for a, b in zip(one.outputs, other.outputs, strict=True):
        np.testing.assert_array_equal(a, b)
    for name, a in one.gradients.items():
        np.testing.assert_array_equal(a, other.gradients[name])
    states = [{b.name: b.array for b in run.buffers} for run in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name, a in states[0].items():
        np.testing.assert_array_equal(a, states[1][name])
    # the interpreter tracks buffers, the formula holds for any depth, and the unrolled graph has one op per layer
    peak = cg.peak_memory(away, **sizes)
    unrolled = cg.unroll(away, L=sizes["L"])
    assert peak == other.peak == cg.evaluate(cg.peak_memory(away), **sizes)
    rest = {name: n for name, n in sizes.items() if name != "L"}
    for side in ("device", "host"):
        assert cg.peak_memory(away, side=side, **sizes) == cg.peak_memory(unrolled, side=side, **rest)


@pytest.mark.parametrize("what", [pytest.param(s, marks=pytest.mark.long) if len(s) == 2 else s for s in SETS])
def test_offload_preserves_step_values(what):
    _computes_the_same("fused", what)


@pytest.mark.long
@pytest.mark.parametrize("what", SETS)
@pytest.mark.parametrize("how", [how for how in STEPS if how != "fused"])
def test_offload_preserves_values_for_all_step_variants(how, what):
    _computes_the_same(how, what)


def test_empty_offload_returns_equal_graph():
    whole = step()
    same = cg.offload(whole, ())
    for ask in (cg.peak_memory, cg.flops, cg.bytes_moved, cg.param_bytes):
        assert ask(same) == ask(whole)
    assert cg.peak_memory(same, side="host") == 0
    assert [op.name for op in same.walk()] == [op.name for op in whole.walk()]


# weights of two bytes: one matrix of D*D, and two of D*F per layer
P = 2 * D * D + 4 * D * F * L


def test_optimizer_offload_moves_gradients_out_and_parameters_in():
    # ZeRO-Offload (arXiv 2101.06840, section 4.1): 2M over the link each way for M parameters in 16 bits
    assert moved(cg.offload(step(), "optimizer")) == {("backward", "host"): P, ("optimizer", "device"): P}


def test_offloaded_parameters_are_fetched_in_each_pass():
    # both passes read a layer's parameters; the first layer, "in", needs no input gradient
    found = moved(cg.offload(step(), ("optimizer", "parameters")))
    assert found == {("forward", "device"): P, ("backward", "device"): 4 * D * F * L, ("backward", "host"): P}


def test_offloaded_activations_cross_link_once_per_direction():
    whole = step()
    layer = 2 * B * S * D + 2 * 2 * B * S * F  # the input of up, and the input and result of gelu
    assert cg.saved_bytes(whole)["layers"] == layer
    # the first layer's input is the result of "in"; peeling the first layer puts it into two loops
    assert moved(cg.offload(whole, "activations")) == {
        ("forward", "host"): (L * layer).expand(), ("backward", "device"): (L * layer).expand()
    }  # fmt: skip


def test_checkpointed_layers_offload_only_their_inputs():
    found = moved(cg.offload(step("again"), "activations"))
    assert found["forward", "host"] == 4 * B * S * D * L
    assert found["recompute", "device"] == 4 * B * S * D * L


def test_host_bytes_by_role():
    sizes = {"B": 2, "S": 3, "D": 5, "F": 7, "L": 4}
    away = cg.offload(step(), ("optimizer", "parameters"))
    n = 5 * 5 + 4 * 2 * 5 * 7
    held = cg.timeline(away, side="host", **sizes).by_role
    assert held["param"] == 2 * n
    assert held["state"] == 12 * n + 4 * 9  # master copy, two moments; nine step counters
    assert held["gradient"] == 2 * n
    assert {"param", "state"}.isdisjoint(cg.timeline(away, **sizes).by_role)


def test_transfer_time_is_bytes_over_link_bandwidth():
    with cg.Graph("g", dtype="fp32") as g:
        there = cg.ops.transfer(g.input("x", (1 << 20,)), to="host")
        g.output(cg.ops.transfer(there))
    # 4 MiB each way over 63 GB/s; both directions are busy at once, and no run is faster
    assert cg.seconds(g, "h100-sxm") == pytest.approx(2 * (4 << 20) / 63e9)
    assert cg.seconds(g, "h100-sxm", "lower") == pytest.approx((4 << 20) / 63e9)
    rows = cg.roofline(g, "h100-sxm").rows
    assert [(row.bound, row.seconds) for row in rows] == [("link", pytest.approx((4 << 20) / 63e9))] * 2


def test_host_update_time_follows_host_memory_bandwidth():
    sizes = {"B": 8, "S": 128, "D": 512, "F": 2048, "L": 6}
    away = cg.offload(step(), "optimizer")
    n = 512 * 512 + 6 * 2 * 512 * 2048
    rows = [row for row in cg.roofline(away, "h100-sxm", **sizes).rows if row.bound == "host"]
    # The gradient is read, three states are read and written; the cast back reads 4 bytes and writes 2. Each of 13
    # weights has a step counter that is read and written, and read again by the update.
    moved = n * (2 + 2 * 12 + 4 + 2) + 13 * (4 + 4 + 4)
    assert sum(row.bytes for row in rows) == moved
    assert sum(row.seconds for row in rows) == pytest.approx(moved / 76.8e9)


def test_device_without_host_data_has_no_time():
    away = cg.offload(step(), "optimizer")
    with pytest.raises(SpecError, match=r"hardware b200: host.bandwidth is missing; add it to table"):
        cg.seconds(away, "b200", **SIZES)


def test_transfers_overlap_with_compute():
    sizes = {"B": 8, "S": 512, "D": 1024, "F": 4096, "L": 8}
    away = cg.offload(step(), "activations")
    none, streams, ideal = (cg.seconds(away, "h100-sxm", overlap=how, **sizes) for how in ("none", "streams", "ideal"))
    assert ideal <= streams < none
    assert cg.seconds(away, "h100-sxm", "lower", **sizes) <= ideal


@pytest.mark.long
@pytest.mark.parametrize("what", SETS)
def test_offload_preserves_rank_collectives(what):
    whole = cg.training_step(
        load("llama-2-7b", symbolic=True), optimizer=cg.AdamW(implementation="fused"), precision="bf16-master"
    )
    sizes = {"B": 4, "S": 4, "D": 8, "F": 8, "H": 4, "K": 2, "L": 3, "V": 16, "G": 4}
    rank = cg.parallelize(whole, dp=2, zero=3, offload=what)
    testing.check_sharded(whole, rank, **sizes)
    plain = cg.parallelize(whole, dp=2, zero=3)
    assert cg.communication(rank, **sizes).total() == cg.communication(plain, **sizes).total()
    assert cg.peak_memory(rank, **sizes) < cg.peak_memory(plain, **sizes)


def test_inference_fetches_one_layer_at_a_time():
    llama = cg.decode(load("llama-2-7b"))
    away = cg.offload(llama, "parameters")
    sizes = {"B": 1, "S": 128}
    assert cg.peak_memory(away, side="host", **sizes) == cg.param_bytes(llama)
    # a table of 32,000 rows of 4,096, here read whole, or the head, and one token's activations
    table = 2 * 32_000 * 4_096
    assert table < cg.peak_memory(away, **sizes) - cg.cache_bytes(llama, **sizes) < 1.01 * table
    assert cg.seconds(away, "h100-sxm", **sizes) > cg.param_bytes(llama) / 63e9


def test_pipeline_in_flight_activations_stay_on_host():
    whole = cg.training_step(model(), optimizer=cg.SGD(), accumulate=5)
    sizes = {"B": 64, "S": 64, "D": 8, "F": 16, "L": 8}
    placed = {"pp": 4, "micro_batches": 5}
    plain, away = (cg.parallelize(whole, **placed, offload=what).stages[0] for what in ((), "activations"))
    # three micro-batches are in flight beside a running one, each with two layers' activations; some of the running
    # one's are on the device
    whole = cg.offload(cg.parallelize(whole, **placed), "activations")
    assert cg.peak_memory(whole.stages[0], **sizes) == cg.peak_memory(away, **sizes)
    waits = 3 * 2 * cg.saved_bytes(plain, **sizes)["layers"]
    assert cg.peak_memory(plain, **sizes) - cg.peak_memory(away, **sizes) >= waits


def test_offloaded_graph_survives_save_and_load(tmp_path):
    away = cg.offload(step(), EVERY)
    cg.save(away, tmp_path / "g.json")
    again = cg.load(tmp_path / "g.json")
    for side in ("device", "host"):
        assert cg.peak_memory(again, side=side) == cg.peak_memory(away, side=side)
    assert moved(again) == moved(away)


def test_refusals():
    whole = step()
    with pytest.raises(GraphError, match=r"offload: 'states', expected one of optimizer, parameters, activations"):
        cg.offload(whole, "states")
    with pytest.raises(GraphError, match=r"parallelize: offload: 'disk', expected one of optimizer, parameters"):
        cg.parallelize(whole, offload="disk")
    away = cg.offload(whole, "optimizer")
    with pytest.raises(UnsupportedError, match=r"offload: graph 'g' already has tensors on the host"):
        cg.offload(away, "activations")
    llama = training_step(load("llama-2-7b"), precision="bf16-master")
    with pytest.raises(UnsupportedError, match=r"assembles a parameter on the host from the shards of all ranks"):
        cg.parallelize(llama, dp=2, zero=1, offload="parameters")
    with pytest.raises(GraphError, match=r"timeline: side 'disk', expected one of device, host"):
        cg.timeline(away, side="disk")
    with pytest.raises(GraphError, match=r"peak_memory: device 'cuda' with side 'host'; expected only one of them"):
        cg.peak_memory(away, device="cuda", side="host")


def test_op_operands_share_one_memory():
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5))
        there = cg.ops.transfer(x, to="host")
        with pytest.raises(GraphError, match=r"pointwise of transfer\(3, 5; fp32\) on the host and x\(3, 5; fp32\) on"):
            cg.relu(there + x)
        y = cg.relu(there)  # runs on the host
        g.output(cg.ops.transfer(y))
    assert cg.peak_memory(g) == 2 * 60
    assert cg.peak_memory(g, side="host") == 2 * 60
    with pytest.raises(GraphError, match=r"transfer: to 'disk', expected one of device, host"), cg.Graph("h") as h:
        cg.ops.transfer(h.input("x", (3, 5)), to="disk")


def test_transfer_can_write_into_existing_tensor():
    from costgraph.ir.graph import apply
    from costgraph.ops.opaque import Transfer

    with (
        cg.Graph("g") as g,
        pytest.raises(ShapeError, match=r"into y\(3; fp32\), expected a tensor of the same shape and format"),
    ):
        apply(Transfer(link="pcie", into=True), [g.input("y", (3,)), g.input("x", (5,))], "t")


@pytest.mark.parametrize("optimizer", [cg.SGD(), cg.AdaGrad(lr=0.01)])
def test_stacked_gradient_buffers_return_from_host_updates(optimizer):
    def traffic(g):
        whole = cg.training_step(g, optimizer=optimizer, precision="megatron-bf16", clip=1.0)
        return cg.bytes_moved(cg.offload(whole, "optimizer"), B=2, S=3, D=5, F=7)

    layers = model("bf16", count=4)
    assert traffic(layers) == traffic(cg.unroll(layers))
