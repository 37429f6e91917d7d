"""Transforming a traced module gives the costs of tracing the modified module, or an error."""

import inspect

import pytest
import torch
from public import FUNCTIONS
from torch import nn

import costgraph as cg
from costgraph import testing
from costgraph.ops.einsum import Einsum
from costgraph.torch import trace

FP32, BF16 = torch.float32, torch.bfloat16


class Net(nn.Module):
    def __init__(self, dtype=FP32, layers=5):
        super().__init__()
        self.table = nn.Embedding(11, 8, dtype=dtype)
        self.layers = nn.Sequential(*(nn.Linear(8, 8, dtype=dtype) for _ in range(layers)))
        self.head = nn.Linear(8, 11, dtype=dtype)

    def forward(self, ids):
        return self.head(torch.relu(self.layers(self.table(ids)))).mean()


def traced(dtype=FP32, **options):
    return trace(Net(dtype), torch.zeros(2, 5, dtype=torch.int64), dims=[("B", "S")], **options)


def figures(g):
    return cg.flops(g), cg.matmul_flops(g, count="full"), cg.bytes_moved(g), cg.peak_memory(g, B=3, S=7)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as PEFT runs it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.a, self.b = nn.Linear(8, 3, bias=False), nn.Linear(3, 8, bias=False)

    def forward(self, x):
        return self.layer(x) + self.b(self.a(x)) * (16 / 3)


def adapted():
    net = Net()
    net.layers = nn.Sequential(*map(Adapted, net.layers))
    return trace(net, torch.zeros(2, 5, dtype=torch.int64), dims=[("B", "S")])


class Foreign(Net):
    """A cumulative sum, which no declared kind expresses."""

    def forward(self, ids):
        return self.head(torch.logcumsumexp(self.layers(self.table(ids)), 1)).mean()


RECORDED = "'logcumsumexp' of graph 'Foreign' is a recorded call of logcumsumexp.default, expected declared ops; "
REFUSED = [
    ("apply_precision", {"policy": "bf16"}, "trace the module in these formats"),
    ("apply_precision", {"policy": "bf16-mixed"}, "trace the module in these formats"),
    ("backward", {}, "trace with train=True"),
    ("decode", {}, "trace a step with what it keeps, named in cached="),
    ("lora", {"rank": 3}, "trace the module with its adapters"),
    ("prefill", {}, "trace a step with what it keeps, named in cached="),
    ("quantize", {"weights": "int8"}, "trace the quantized module"),
    ("training_step", {}, "trace the module in these formats"),
    ("training_step", {"precision": "bf16"}, "trace the module in these formats"),
]
#: For each transform of a trace: the call, and a reference graph with its expected costs.
RIGHT = {
    "apply_precision": (lambda g: cg.apply_precision(g, "bf16"), lambda: traced(BF16)),
    "fold": (lambda g: cg.unroll(cg.fold(g, "layers", "L"), L=5), traced),
    "unroll": (cg.unroll, traced),
    "shard": (lambda g: cg.shard(g, cg.mesh(dp=1), {}), traced),
    "parallelize": (lambda g: cg.parallelize(g, zero=3), traced),
    "offload": (lambda g: cg.offload(g, ()), traced),
    "fuse": (cg.fuse, traced),  # nothing to fuse: matmuls, with one elementwise op after them
}


@pytest.mark.parametrize(("name", "options", "instead"), REFUSED)
def test_transforms_refuse_foreign_calls(name, options, instead):
    g = trace(Foreign(), torch.zeros(2, 5, dtype=torch.int64), dims=[("B", "S")])
    with pytest.raises(cg.UnsupportedError) as error:
        getattr(cg, name)(g, **options)
    place = name.replace("training_step", "apply_precision")
    assert str(error.value) == f"{place}: {RECORDED}{instead}"


@pytest.mark.parametrize("name", RIGHT)
def test_transformed_trace_equals_trace_of_modified_module(name):
    change, expected = RIGHT[name]
    assert figures(change(traced())) == figures(expected())


def test_sharded_traced_step_keeps_its_values():
    step = cg.training_step(traced(), optimizer=cg.SGD())
    batch = next(t.name for t in step.tensors if t.role == "input")
    weights = {t.name: "(o dp) i" for t in step.tensors if t.role == "param" and t.ndim == 2 and t.sizes[0] == 8}
    rank = cg.shard(step, cg.mesh(dp=2), {batch: "(b dp) s", **weights}, gather="dp", strict=True)
    assert {m.collective for m in cg.communication(rank)} == {"all_gather", "all_reduce", "reduce_scatter"}
    testing.check_sharded(step, rank, B=4, S=3)


def test_derived_backward_of_a_trace_equals_torchs():
    """FLOPs by kind; torch materializes the gradient of a mean, which the library broadcasts: 4 bytes."""
    derived, seen = cg.backward(traced()), traced(train=True)
    for count in ("executed", "full"):
        assert cg.matmul_flops(derived, count=count) == cg.matmul_flops(seen, count=count)
    assert cg.flops(derived) == cg.flops(seen)
    assert {t.name for t in derived.gradients} == {t.name for t in seen.gradients}
    assert abs(cg.peak_memory(derived, B=3, S=7) - cg.peak_memory(seen, B=3, S=7)) <= 4


def test_lora_of_a_trace_equals_the_adapted_module():
    """FLOPs and bytes are equal; the module's frames keep a layer's input alive while it runs, one (B, S, 8) in
    fp32."""
    adapted_graph, seen = cg.lora(traced(), 3, "layers/*"), adapted()
    assert figures(adapted_graph)[:3] == figures(seen)[:3]
    assert figures(seen)[3] - figures(adapted_graph)[3] == 3 * 7 * 8 * 4


def test_mixed_precision_runs_matmuls_in_bf16():
    """Equal to the module's trace under autocast, to the last matmul FLOP and byte."""
    converted = cg.apply_precision(traced(), "bf16-mixed")
    with torch.autocast("cpu", BF16):
        seen = traced()
    assert cg.matmul_flops(converted) == cg.matmul_flops(seen)
    for g in (converted, seen):
        products = [op for op in g.walk() if isinstance(op.kind, Einsum)]
        assert {t.dtype.name for op in products for t in op.results} == {"bf16"}


def test_traced_weights_are_quantized():
    """Five layers of 8 by 8 in int8, with a 2-byte scale per column; the head keeps its dtype, as in declared
    models."""
    quantized = cg.quantize(traced(), "int8", scale="fp16")
    assert cg.param_bytes(traced()) - cg.param_bytes(quantized) == 5 * (3 * 8 * 8 - 2 * 8)
    assert cg.matmul_flops(quantized) == cg.matmul_flops(traced())


def test_traced_training_step_has_optimizer_updates():
    """AdamW updates each weight, as in a traced step with torch's; matmul FLOPs are equal."""
    step = cg.training_step(traced(), optimizer=cg.AdamW())
    seen = traced(train=True, optimizer=lambda p: torch.optim.AdamW(p, fused=True))
    assert cg.matmul_flops(step) == cg.matmul_flops(seen)
    states = [
        sum(t.numel.constant for t in g.tensors if t.role == "state" and t.producer is None and t.ndim)
        for g in (step, seen)
    ]
    assert states[0] == states[1] == 2 * cg.param_count(traced())


def test_traced_graph_survives_save_and_load(tmp_path):
    g = traced()
    cg.save(g, tmp_path / "net.json")
    again = cg.load(tmp_path / "net.json")
    assert figures(again) == figures(g)
    assert [op.call for op in again.walk()] == [op.call for op in g.walk()]


class Packed(nn.Module):
    """Attention on a packed QKV tensor: its kernel reads views with a storage offset."""

    def forward(self, x):
        q, k, v = x.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_packed_attention_survives_save_and_load(tmp_path):
    g = trace(Packed(), torch.zeros(2, 5, 48), dims=[("B", "S", None)])
    cg.save(g, tmp_path / "packed.json")
    assert figures(cg.load(tmp_path / "packed.json")) == figures(g)


def test_fused_scope_of_a_trace_is_one_kernel():
    """It reads its input and the five weights and biases, and writes one result; calls outside are unchanged."""
    g = traced()
    fused = cg.fuse(g, "layers")
    B, S = cg.dims("B S")
    assert cg.flops(fused) == cg.flops(g)
    assert cg.costs(fused).filter(scope="layers").total().bytes == 4 * (2 * 8 * B * S + 5 * (8 * 8 + 8))


def test_every_public_transform_is_tested():
    """Every function from graph to graph is in one of the tables above."""
    transforms = set()
    for name, function in FUNCTIONS.items():
        signature = inspect.signature(function)
        first = next(iter(signature.parameters.values()), None)
        if signature.return_annotation == "Graph" and first is not None and first.annotation == "Graph":
            transforms.add(name)
    assert transforms == {name for name, *_ in REFUSED} | RIGHT.keys()
