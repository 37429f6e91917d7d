"""Peak memory of a lowered run on a CPU: the profiler's measurement against the formula."""

from unittest import mock

import pytest
from budget import drawing
from hypothesis import assume, given

torch = pytest.importorskip("torch")
from lowered import measured_peak, throughout  # noqa: E402  # it imports torch
from shared import load  # noqa: E402  # as above

import costgraph as cg  # noqa: E402
from costgraph import testing  # noqa: E402
from costgraph.ir.graph import known_names  # noqa: E402
from costgraph.torch.lowering import lower, random_inputs  # noqa: E402

torch.set_num_threads(1)

SIZES = {"B": 3, "S": 67, "D": 24, "H": 4, "G": 2, "K": 6, "F": 59, "L": 3, "V": 97, "P": 71, "C": 11}
PERCEPTRON = {"B": 211, "D": 29, "F": 59, "L": 3, "C": 11}


#: Bytes of a mean's sum and divisor, which torch stores in tensors.
NUMBER = 16


def beside(graph, **dims):
    """Return the measured and predicted bytes beyond parameters, buffers and inputs."""
    return measured_and_predicted(lower(graph, **dims), graph, **dims)


def measured_and_predicted(module, graph, **dims):
    inputs = random_inputs(graph, **dims)
    return measured_peak(module, inputs), cg.peak_memory(graph, **dims) - throughout(module, inputs)


def sizes_of(graph, name):
    sizes = PERCEPTRON if name == "mlp" else SIZES
    return {k: v for k, v in sizes.items() if k in known_names(graph)}


#: Models and attention kernels; a perceptron has no attention.
MODELS = [("mlp", "flash"), *((name, kernel) for name in ("gpt2", "llama-3-8b") for kernel in ("flash", "eager"))]


@pytest.mark.parametrize(("name", "attention"), MODELS)
def test_forward_peak_of_models(name, attention):
    graph = load(name, dtype="fp32", attention=attention)
    measured, predicted = beside(graph, **sizes_of(graph, name))
    # eager attention masks keys with a bool mask and the 4 bytes of minus infinity
    mask = SIZES["S"] ** 2 + 4 if attention == "eager" else 0
    assert measured == predicted + mask


@pytest.mark.parametrize(
    ("name", "attention", "implementation"),
    [
        ("mlp", "flash", "foreach"),
        ("mlp", "flash", "for-loop"),
        ("gpt2", "eager", "foreach"),
        ("gpt2", "flash", "for-loop"),
        ("llama-3-8b", "flash", "foreach"),
        ("llama-3-8b", "eager", "for-loop"),
    ],
)
def test_peak_of_training_steps(name, attention, implementation):
    graph = load(name, dtype="fp32", attention=attention)
    step = cg.training_step(graph, optimizer=cg.AdamW(implementation=implementation))
    measured, predicted = beside(step, **sizes_of(step, name))
    assert measured == predicted


@pytest.mark.parametrize("policy", [cg.every_block(), cg.every(3), cg.selective("attention"), cg.from_start()])
def test_peak_of_checkpointed_steps(policy):
    graph = load("gpt2", dtype="fp32", attention="flash")
    step = cg.training_step(graph, checkpoint=policy)
    measured, predicted = beside(step, **sizes_of(step, "gpt2"))
    assert measured == predicted


def test_storages_are_freed_after_their_last_use():
    """Ten layers with one matrix each: two activations live at a time, not eleven."""
    B, D, L = cg.dims("B D L")
    with cg.Graph("g") as g:
        g.output(cg.repeat(L, lambda x: cg.relu(x @ g.param("w", (D, D))), g.input("x", (B, D))))
    measured, predicted = beside(g, B=7, D=11, L=10)
    assert measured == predicted == 2 * 4 * 7 * 11


def test_stacked_results_are_written_in_place():
    B, D, T = cg.dims("B D T")
    with cg.Graph("g") as g:

        def step(h, x):
            h = cg.tanh(h + x)
            return h, cg.ops.pointwise("mul", h, 2.0)

        _, ys = cg.scan(T, step, g.input("h", (B, D)), g.input("xs", (T, B, D)))
        g.output(ys)
    measured, predicted = beside(g, B=7, D=11, T=5)
    # the stack, the state before a step, and the sum or the state after it
    assert measured == predicted == 4 * 7 * 11 * (5 + 2)


def test_in_place_ops_allocate_nothing():
    N = cg.dims("N")
    with cg.Graph("g") as g:
        y = cg.ops.pointwise("exp", g.input("x", (N,)))
        for function in ("relu", "silu", "tanh", "square"):
            y = cg.ops.pointwise(function, y, inplace=True)
        g.output(cg.ops.pointwise("lerp", y, y * y, 0.5, inplace=True))
    measured, predicted = beside(g, N=1009)
    assert measured == predicted == 2 * 4 * 1009


#: Ops with torch kernels that allocate only their results.
KINDS = ("einsum", "pointwise", "reduce", "rearrange", "slice", "expand", "concat", "repeat")


def exceptions(graph):
    """Whether an op needs more memory than the model: the causes that `lower` lists."""

    def lone(op):
        names = [set(op.kind.pattern.operand_names(i)) for i in range(len(op.operands))]
        result_axes = set(op.kind.pattern.result_names)
        alone = [n - result_axes - set().union(*(m for m in names if m is not n)) for n in names]
        repeated = any(t.touched != t.numel for t in op.operands)  # no matmul reads it without a copy
        return any(alone) or len(names) != 2 or repeated

    plain = {*KINDS, "kernel"} >= {op.kind.name for op in graph.walk()}  # a loop draws from all kinds
    products = [op for op in graph.walk() if op.kind.name == "einsum"]
    windows = any("+" in str(op.kind.pattern) or op.kind.sizes is not None for op in products)
    alone = any(map(lone, products))
    odd = any(op.kind.operation in ("any", "all", "argmax", "argmin", "prod") for op in graph.walk()
              if op.kind.name == "reduce")  # fmt: skip
    mixed = len({t.dtype.name for body in graph.bodies() for t in body.tensors}) > 1
    # torch masks keys with a bool tensor next to the scores, even if the domain is simplified away
    masks = any(t.domain is not None for body in graph.bodies() for t in body.tensors)
    masks |= any(getattr(op.kind, "masked", None) is not None for op in graph.walk())
    drawn = any(op.kind.name == "kernel" and op.name.rpartition("/")[2].startswith("fused") for op in graph.walk())
    return not plain or windows or alone or odd or mixed or masks or drawn


#: Functions with a torch kernel each that allocates only its result.
_FUNCTIONS = ["add", "sub", "mul", "maximum", "neg", "abs", "square", "exp", "log", "sqrt", "tanh", "relu", "sigmoid",
              "silu", "gelu", "gelu_tanh", "copy"]  # fmt: skip


@drawing(60)
@given(testing.graphs(kinds=KINDS))
def drawn_peaks(case):
    graph, point = case
    assume(not exceptions(graph))
    module = lower(graph, **point)
    measured, predicted = measured_and_predicted(module, graph, **point)
    assert measured >= predicted
    # axis orders that matmuls cannot read or write in place: the code shows the copy
    assume("torch.reshape(" not in module.code and "copy_(" not in module.code)
    assert measured <= predicted + NUMBER, module.code


def test_peak_of_drawn_graphs():
    plain = mock.patch.multiple("costgraph.testing.strategies", FLOATS=("fp32",), SMALL=("fp32",))
    functions = mock.patch("costgraph.testing.strategies._GENERIC_FUNCTIONS", _FUNCTIONS)
    with plain, functions:
        drawn_peaks()
