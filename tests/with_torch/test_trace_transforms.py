"""What transforms do with a traced module: the figure that the changed module has when it is traced, or an error."""

import inspect

import pytest
import torch
from public import FUNCTIONS
from torch import nn

import costgraph as cg
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


RECORDED = "of graph 'Net' is a recorded call of embedding.default, expected declared ops; "
REFUSED = [
    ("apply_precision", {"policy": "bf16"}, "trace the module in these formats"),
    ("apply_precision", {"policy": "bf16-mixed"}, "trace the module in these formats"),
    ("backward", {}, "trace with train=True"),
    ("decode", {}, "trace the call with what it keeps"),
    ("fuse", {}, "name what is one kernel with scope="),
    ("prefill", {}, "trace the call with what it keeps"),
    ("quantize", {"weights": "int8"}, "trace the quantized module"),
    ("training_step", {}, "trace with train=True and optimizer="),
    ("training_step", {"precision": "bf16"}, "trace with train=True and optimizer="),
]
#: Of what is right on a trace: the call, and a graph with the figures that it has to have.
RIGHT = {
    "apply_precision": (lambda g: cg.apply_precision(g, None), traced),
    "fold": (lambda g: cg.unroll(cg.fold(g, "layers", "L"), L=5), traced),
    "unroll": (cg.unroll, traced),
}


@pytest.mark.parametrize(("name", "options", "instead"), REFUSED)
def test_a_transform_that_looks_inside_refuses_recorded_calls(name, options, instead):
    place = f"{name}: 'table/embedding' {RECORDED}{instead}"
    with pytest.raises(cg.UnsupportedError) as error:
        getattr(cg, name)(traced(), **options)
    assert str(error.value) == place
    nested = cg.fold(traced(), "layers", "L")  # the calls stand in a body as well
    with pytest.raises(cg.UnsupportedError, match=f"{name}: "):
        getattr(cg, name)(nested, **options)


@pytest.mark.parametrize("name", RIGHT)
def test_a_transform_that_does_not_gives_the_figures_of_a_trace(name):
    change, expected = RIGHT[name]
    assert figures(change(traced())) == figures(expected())


def test_a_scope_of_recorded_calls_is_one_kernel():
    """It reads its input and the five weights and biases, and writes one result: calls outside are as they were."""
    g = traced()
    made = cg.fuse(g, "layers")
    B, S = cg.dims("B S")
    assert cg.flops(made) == cg.flops(g)
    assert cg.costs(made).filter(scope="layers").total().bytes == 4 * (2 * 8 * B * S + 5 * (8 * 8 + 8))


def test_every_public_transform_is_looked_at():
    """A function that makes a graph of a graph is in one of the tables above."""
    found = set()
    for name, function in FUNCTIONS.items():
        signature = inspect.signature(function)
        first = next(iter(signature.parameters.values()), None)
        if signature.return_annotation == "Graph" and first is not None and first.annotation == "Graph":
            found.add(name)
    assert found == {name for name, *_ in REFUSED} | RIGHT.keys()


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_the_module_in_other_formats_is_traced_itself(precision):
    """What a trace retyped was before: 8 bytes too many an element that stayed, products in fp32."""
    if precision == "bf16":
        g = traced(BF16)
    else:
        with torch.autocast("cpu", BF16):
            g = traced()
    products = [op for op in g.walk() if getattr(op.kind, "matmul", None)]
    assert {t.dtype.name for op in products for t in op.results} == {"bf16"}
