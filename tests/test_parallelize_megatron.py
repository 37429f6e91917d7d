"""Megatron's policies: gradients accumulate in persistent buffers and are reduced once, in place."""

import pytest
import sympy
from shared import load, training_step

import costgraph as cg
from costgraph import testing
from costgraph.ir.graph import known_names

B, S, DP, TP, M = cg.dims("B S DP TP M")
SMALL = {"B": 2, "S": 4, "D": 8, "H": 4, "G": 2, "K": 2, "F": 8, "L": 2, "V": 8}
TINY = SMALL | {"S": 2, "D": 4, "F": 4, "V": 4}
#: Seed of values with which Mixtral's routing is balanced although tokens choose two of four experts.
BALANCED = 2


def step(name="llama-2-13b", **options):
    options = {"precision": "megatron-bf16", "accumulate": 2, **options}
    return training_step(load(name, symbolic=True), optimizer=cg.AdamW(implementation="fused"), **options)


def megatron(whole, **degrees):
    return cg.parallelize(whole, **degrees, system="megatron", strict=True)


@pytest.mark.parametrize(
    ("options", "zero"),
    [({}, 1), ({"accumulate": 1, "clip": 1.0}, 1),
     *(pytest.param(options, zero, marks=pytest.mark.long) for options, zero in [
         ({}, 0), ({"accumulate": 1}, 0), ({"clip": 1.0}, 1), ({"precision": "bf16", "set_to_none": False}, 1),
         ({"precision": "fp16-mixed", "set_to_none": False}, 1), ({"checkpoint": cg.every_block()}, 1),
     ])],
)  # fmt: skip
def test_megatron_step_computes_single_device_values(options, zero):
    whole = step(**options)
    testing.check_sharded(whole, megatron(whole, dp=2, tp=2, zero=zero, sequence=True), **TINY)


@pytest.mark.long
@pytest.mark.parametrize(("name", "degrees", "sizes"), [
    ("mixtral-8x22b", {"dp": 2, "ep": 2}, {"Fe": 6, "E": 4, "k": 2, "B": 4}),
    ("gemma-2-27b", {"dp": 2, "tp": 2, "sequence": True}, {"W": 2}),  # its embedding is tied to its head
    ("llama-2-13b", {"dp": 2, "cp": 2}, {}),
])  # fmt: skip
def test_other_models_and_axes_compute_single_device_values(name, degrees, sizes):
    whole = step(name)
    testing.check_sharded(whole, megatron(whole, **degrees, zero=1), seed=BALANCED, **{**SMALL, **sizes})


@pytest.mark.parametrize(("name", "degrees", "sizes"), [
    ("llama-2-13b", {"dp": 2, "tp": 2, "sequence": True}, TINY),
    pytest.param("mixtral-8x22b", {"dp": 2, "ep": 2}, {"Fe": 6, "E": 4, "k": 2, "B": 4}, marks=pytest.mark.long),
    pytest.param(  # choosing all experts balances the routing
        "deepseek-v3", {"ep": 2, "tp": 2},
        {"Fe": 6, "E": 4, "k": 4, "Eg": 2, "kg": 2, "Es": 1, "Ld": 1, "C": 4, "Cq": 4, "Kn": 2, "Kr": 2, "Kv": 2},
        marks=pytest.mark.long,
    ),
])  # fmt: skip
def test_megatron_composed_layers_compute_same_values_on_ranks(name, degrees, sizes):
    model = load(name, symbolic=True, system="megatron")
    as_published = load(name, symbolic=True)
    for ask in (cg.param_count, cg.matmul_flops):
        assert sympy.expand(ask(model) - ask(as_published)) == 0
    whole = cg.training_step(model, optimizer=cg.AdamW(implementation="fused"), precision="megatron-bf16", accumulate=2)
    sizes = {n: size for n, size in {**SMALL, **sizes}.items() if n in known_names(whole)}
    testing.check_sharded(whole, megatron(whole, **degrees, zero=1), seed=BALANCED, **sizes)


def params(rank, name):
    (found,) = (t for t in rank.tensors if t.name == name and t.producer is None)
    return found.numel.expr


def test_rank_sends_fp32_gradients_once_and_bf16_parameters():
    # distrib_optimizer.md in Megatron-LM: reduce-scatter the gradient buffer, all-gather the parameter buffer; the
    # buffer has 4 bytes per parameter of a rank, whatever the number of micro-batches
    rank = megatron(step(accumulate=M), dp=DP, tp=TP, zero=1, sequence=True)
    sources = [t for t in rank.tensors if t.role == "param" and t.producer is None]
    norms = sum(t.numel.expr for t in sources if "norm" in t.name)
    others = sum(t.numel.expr for t in sources if t.requires_grad) - norms
    rows = cg.communication(rank).filter(axis="dp")
    assert not rows.filter(phase="backward", collective="all_gather").rows
    ring = (DP - 1) / DP
    scattered = rows.filter(phase="backward", collective="reduce_scatter").total()
    assert sympy.expand(scattered - 4 * (others + norms) * ring) == 0
    assert sympy.expand(rows.filter(phase="optimizer").total() - 2 * (others + norms) * ring) == 0
    # _allreduce_non_tensor_model_parallel_grads: norm gains over tp; each rank has a shard of them over dp
    along = cg.communication(rank).filter(axis="tp", phase="backward", collective="all_reduce")
    assert sympy.expand(along.total() - 2 * 4 * norms / DP * (TP - 1) / TP) == 0


def test_plain_data_parallelism_all_reduces_one_buffer():
    # without the distributed optimizer: one all-reduce of the buffer
    rank = megatron(step(accumulate=M), dp=DP)
    reduced = cg.communication(rank).filter(phase="backward")
    assert {m.collective for m in reduced} == {"all_reduce"}
    total = 4 * cg.param_count(rank)
    assert sympy.expand(reduced.total() - 2 * total * (DP - 1) / DP) == 0


def test_in_place_reduction_takes_no_memory():
    # The 12 bytes per parameter are master weights and moments, which are sharded; for equal token counts, everything
    # else matches one device.
    whole = step(accumulate=M)
    sizes = {"B": 1, "S": 128, "D": 256, "H": 8, "G": 8, "K": 32, "F": 512, "L": 4, "V": 1024, "M": 4}
    alone = cg.peak_memory(whole, **sizes)
    rank = cg.parallelize(whole, dp=4, zero=1, reduce_every_microbatch=False, strict=True)
    peak = cg.peak_memory(rank, **{**sizes, "B": 4})
    spared = 12 * cg.param_count(whole, **{n: s for n, s in sizes.items() if n not in "BSM"}) * 3 / 4
    counters = 4 * 12 * sizes["L"]  # step counters for at most 12 parameters per layer are scalars
    assert abs(alone - peak - spared) <= counters


def test_weight_gradient_matmuls_accumulate_into_buffers():
    # gradient_accumulation_fusion: the bf16 result of a matmul is neither written nor read, 2 bytes each; autograd
    # instead receives one placeholder per weight shape (get_dummy_wgrad in TransformerEngine).
    whole = step(accumulate=M)
    fused, apart = megatron(whole, tp=TP), cg.parallelize(whole, tp=TP, reduce_every_microbatch=False, strict=True)
    D, F, H, G, K, L = cg.dims("D F H G K L")
    layer = 2 * D * H * K + 2 * D * G * K + 3 * D * F
    assert sympy.expand(cg.bytes_moved(apart) - cg.bytes_moved(fused) - 4 * M * L * layer / TP) == 0
    assert sympy.expand(cg.matmul_flops(apart) - cg.matmul_flops(fused)) == 0
    handed = [t for t in fused.tensors if t.name.startswith("gradients.handed")]
    shapes = [D * F, F * D, D * H * K, D * G * K, H * K * D]  # k and v share one shape, as do gate and up
    assert sympy.expand(sum(t.storage.bytes.expr for t in handed) - 2 * sum(shapes) / TP) == 0


def test_sharded_buffers_accumulate_complete_sums():
    # The table's rows are on different ranks: each rank gathers the gradients of all positions and accumulates its own
    # rows, as _ReduceScatterToSequenceParallelRegion does.
    rank = megatron(step(), dp=2, tp=2, sequence=True)
    assert str(rank.sharding.places["tokens/table.grad"]) == "(tp V/2) _ + sum over dp"
    of_table = [m for m in cg.communication(rank).filter(axis="tp", phase="backward") if m.bytes.has(cg.dims("V"))]
    assert not of_table


def test_non_contiguous_shards_are_reduced_whole():
    B, D, F = cg.dims("B D F")
    with cg.Graph("two") as g:
        x = cg.einsum(g.input("x", (B, D)), g.param("w", (D, 2 * F)), "b d, d f -> b f")
        g.output(cg.reduce(x * x, "b f -> ", "mean"))
    whole = cg.training_step(g, optimizer=cg.SGD(), accumulate=2, set_to_none=False)
    halves = {"x": "m (b dp) d", "w": "d (2 f tp dp)", "w.grad": "d (2 f tp)"}  # a rank has a shard of each half
    rank = cg.shard(whole, cg.mesh(dp=2, tp=2), halves, gather="dp", reduce_every_microbatch=False)
    assert [m.collective for m in cg.communication(rank).filter(axis="dp", op="w.grad.all_reduce")] == ["all_reduce"]
    testing.check_sharded(whole, rank, B=2, D=3, F=4)


def test_other_systems_policies_are_refused():
    whole = step()
    with pytest.raises(cg.UnsupportedError) as refused:
        megatron(whole, dp=2, zero=3)
    assert str(refused.value) == (
        "parallelize: zero=3 with system='megatron', whose distributed optimizer shards optimizer states only; "
        "expected 0 or 1"
    )
    with pytest.raises(cg.GraphError, match="parallelize: system is 'deepspeed', expected torch or megatron"):
        cg.parallelize(whole, dp=2, system="deepspeed")


def test_one_rank_equals_one_device():
    whole = step()
    rank = megatron(whole, zero=1, sequence=True)
    assert len(cg.communication(rank)) == 0
    assert (cg.matmul_flops(rank), cg.param_bytes(rank)) == (cg.matmul_flops(whole), cg.param_bytes(whole))
    once = cg.parallelize(whole, zero=1, sequence=True, reduce_every_microbatch=False, strict=True)
    assert cg.peak_memory(once) == cg.peak_memory(whole)
