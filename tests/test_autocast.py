"""torch.autocast: dtypes and casts per op against torch on a CPU, weight casts, dtypes of loop carries."""

from collections import Counter
from dataclasses import dataclass

import pytest
from autocast_models import SIZES, gpt2_graph, gpt2_rows, in_order, llama_graph, llama_rows, rows
from each import each

import costgraph as cg
from costgraph.ir.graph import (
    OpKind,
    Result,
    apply,
)
from costgraph.ops import rules
from costgraph.transforms.precision import (
    WORDS,
    Policy,
    apply_precision,
    autocast_list,
    word,
)
from costgraph.transforms.reverse_mode import hoist

B, D, L = cg.dims("B D L")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_op_dtypes_match_torch_autocast(family):
    """Compare op, dtype and element count in torch's order, casts included; weights are cast once."""
    torch = pytest.importorskip("torch")
    theirs = {"gpt2": gpt2_rows, "llama": llama_rows}[family](torch)
    graph = {"gpt2": gpt2_graph, "llama": llama_graph}[family]("bf16")
    mixed = apply_precision(graph, "bf16-mixed", autocast_device="cpu")
    assert in_order(rows(cg.unroll(mixed, **SIZES))) == in_order(theirs)
    assert {fmt for _, fmt, _ in theirs} == {"fp32", "bf16"}


#: Ops with a casting kernel registered in torch. The excluded names do not exist as torch ops, run as one of
#: these in torch, or are on its promote-to-widest list.
TORCH = {
    "matmul": "matmul", "addmm": "addmm", "conv": "conv2d", "attention": "scaled_dot_product_attention",
    "softmax": "softmax.int", "log_softmax": "log_softmax.int", "norm": "layer_norm", "nll": "nll_loss",
    "sum": "sum.dim_IntList", "prod": "prod.dim_int", "pow": "pow.Tensor_Scalar", "square": "pow.Tensor_Scalar",
    "relu2": "pow.Tensor_Scalar", "mean": "mean.dim", "max": "amax", "min": "amin", "any": "any", "all": "all",
    "argmax": "argmax", "argmin": "argmin", "max_pool1d": "max_pool1d", "max_pool2d": "max_pool2d",
    "max_pool3d": "max_pool3d", "mean_pool1d": "avg_pool1d", "mean_pool2d": "avg_pool2d", "mean_pool3d": "avg_pool3d",
    "dropout": "dropout", "gather": "embedding", "gelu_tanh": "gelu", "add": "add.Tensor", "sub": "sub.Tensor",
    "mul": "mul.Tensor", "div": "div.Tensor",
}  # fmt: skip
SAME_NAME = [
    "maximum", "minimum", "neg", "abs", "sign", "reciprocal", "clamp", "round", "floor", "exp", "expm1", "log",
    "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "relu", "relu6", "leaky_relu", "sigmoid", "silu", "gelu",
    "softplus", "mish", "elu", "hardsigmoid", "hardswish", "lerp", "where", "masked_fill",
]  # fmt: skip


@each("device", ["cuda", "cpu"])
def test_autocast_op_lists_match_torch_registrations(device):
    torch = pytest.importorskip("torch")
    key = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}[device]
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    listed = autocast_list(device, "bf16")
    for name, theirs in (TORCH | {n: n for n in SAME_NAME}).items():
        assert name in WORDS
        assert (name in listed) == (f"aten::{theirs}" in registered), name
    # on a GPU the loss runs log_softmax and nll_loss; a CPU has its own entry
    assert ("aten::cross_entropy_loss" in registered) == (device == "cpu")
    assert listed["cross_entropy"] == "fp32"


def test_cpu_softmax_and_exp_keep_input_dtype():
    """CUDA runs softmax in fp32 after a cast from bf16; from fp16 the kernel converts itself."""
    g = gpt2_graph()

    def softmaxes(policy, device):
        mixed = apply_precision(g, policy, autocast_device=device)
        (op,) = [op for op in mixed.walk() if op.body is not None and word(op) == "softmax"]
        return op.operands[0].dtype.name, op.results[0].dtype.name

    assert softmaxes("bf16-mixed", "cpu") == ("bf16", "bf16")
    assert softmaxes("bf16-mixed", "cuda") == ("fp32", "fp32")
    assert softmaxes("fp16-mixed", "cuda") == ("fp16", "fp32")


# -- casts -------------------------------------------------------------------------------------------------------


def test_weights_are_cast_per_iteration_and_shared_ones_once():
    """Each iteration has its own w and reads it twice; t is shared and read in the loop and after it."""
    with cg.Graph("g") as g:
        t = g.param("t", (D, D))

        def layer(x):
            w = g.param("w", (D, D))
            return (x @ w) @ w @ t

        x = cg.repeat(L, layer, g.input("x", (B, D)), name="layers")
        g.output(x @ t)
    mixed = apply_precision(g, "bf16-mixed")
    casts = [(op.name, op.graph.name) for op in mixed.walk() if word(op) == "cast"]
    # the carry settles on bf16, so the cast of x precedes the loop
    assert casts == [("layers/cast", "g"), ("t.cast", "g"), ("layers/w.cast", "layers")]
    (loop,) = [op for op in mixed.ops if op.body is not None]
    assert [t.name for t in loop.operands] == ["layers/cast", "t.cast"]
    # read 4 and write 2 bytes per element: D*D for t, L*D*D for w, B*D for x; 3 products in each of L iterations and
    # one more, each reading B*D and D*D and writing B*D in bf16
    expected = 6 * (D * D + L * D * D + B * D) + (3 * L + 1) * 2 * (2 * B * D + D * D)
    assert cg.bytes_moved(mixed) == expected.expand()


def test_nested_loops_share_one_captured_cast():
    with cg.Graph("g") as g:
        t = g.param("t", (D, D))

        def layers(x):
            return cg.repeat(3, lambda y: y + y @ t, x, name="inner")

        g.output(cg.repeat(L, layers, g.input("x", (B, D)), name="outer"))
    mixed = apply_precision(g, "bf16-mixed")
    assert Counter(op.name for op in mixed.walk() if word(op) == "cast") == {"t.cast": 1, "outer/inner/cast": 1}
    assert cg.matmul_flops(cg.unroll(mixed, L=2)) == cg.matmul_flops(g, L=2)


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp8"])
def test_hoisted_parameters_are_cast_per_iteration(policy):
    """Hoisted parameters are stored per iteration, so costs do not change."""
    g = gpt2_graph("bf16")
    hoisted, plain = apply_precision(hoist(g), policy), apply_precision(g, policy)
    assert cg.bytes_moved(hoisted) == cg.bytes_moved(plain)
    assert cg.peak_memory(hoisted, **SIZES) == cg.peak_memory(plain, **SIZES)
    assert [op.name for op in hoisted.walk()] == [op.name for op in plain.walk()]


def test_frozen_weights_are_cast_at_each_use():
    with cg.Graph("g") as g:
        w = g.param("w", (D, D), grad=False)
        g.output(g.input("x", (B, D)) @ w @ w)
    mixed = apply_precision(g, "bf16-mixed")
    assert [word(op) for op in mixed.ops] == ["cast", "cast", "matmul", "cast", "matmul"]


def test_each_param_is_cast_once_without_autocast():
    """Without autocast, each parameter is cast once to the activation dtype."""
    mixed = apply_precision(gpt2_graph(), Policy("p", params="fp32", compute="bf16"))
    assert cg.param_bytes(mixed) == 4 * cg.param_count(mixed)
    casts = [op for op in mixed.walk() if word(op) == "cast" and not op.graph.fused]
    each = [op.results[0].numel.expr * (L if op.graph.parent else 1) for op in casts]
    assert sum(each).expand() == cg.param_count(mixed)
    assert mixed.outputs[0].dtype.name == "bf16"


def test_gpu_sum_converts_without_a_cast():
    """The kernel reads B*D in bf16 and writes one fp32 scalar: no cast is launched."""
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.reduce(g.input("x", (B, D)), "b d -> ", "sum"))
    mixed = apply_precision(g, {"sum": "fp32"})
    assert [op.kind.name for op in mixed.ops] == ["kernel"]
    assert cg.bytes_moved(mixed) == 2 * B * D + 4
    on_cpu = apply_precision(g, {"sum": "fp32"}, autocast_device="cpu")
    assert cg.bytes_moved(on_cpu) == (2 + 4) * B * D + 4 * B * D + 4
    assert cg.flops(mixed) == cg.flops(g) == B * D


def test_concat_promotes_to_widest_dtype():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        g.output(cg.ops.concat([x, x @ g.param("w", (D, D))]))
    mixed = apply_precision(g, "bf16-mixed")
    assert mixed.outputs[0].dtype.name == "fp32"
    (joined,) = [op for op in mixed.ops if op.body is not None]
    assert [t.dtype.name for t in joined.operands] == ["fp32", "bf16"]
    on_cpu = apply_precision(g, "bf16-mixed", autocast_device="cpu")
    assert [word(op) for op in on_cpu.ops] == ["cast", "cast", "matmul", "cast", "concat"]


def test_custom_kernels_fuse_their_casts():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D)) @ g.param("w", (D, D))
        with cg.kernel("gate"):
            y = pointwise_exp(x) + 1
        g.output(y)
    mixed = apply_precision(g, "bf16-mixed")
    (op,) = [op for op in mixed.ops if op.body is not None]
    assert (op.operands[0].dtype.name, op.results[0].dtype.name) == ("bf16", "fp32")
    assert [word(o) for o in op.body.ops] == ["cast", "exp", "add"]
    named = apply_precision(g, {"gate": "fp16"})
    assert [t.dtype.name for o in named.ops for t in o.results] == ["fp32", "fp16", "fp16"]


def pointwise_exp(x):
    return cg.ops.pointwise("exp", x)


def test_in_place_target_keeps_its_dtype():
    with cg.Graph("g") as g:
        y = g.input("x", (B, D)) @ g.param("w", (D, D))
        y = cg.ops.pointwise("add", y, g.input("z", (B, D)), inplace=True)
        g.output(cg.ops.pointwise("exp", y, inplace=True))
    mixed = apply_precision(g, "bf16-mixed")
    assert mixed.outputs[0].dtype.name == "bf16"
    assert mixed.outputs[0].storage is next(op for op in mixed.ops if word(op) == "matmul").results[0].storage


# -- loops -------------------------------------------------------------------------------------------------------


def test_carry_takes_dtype_the_body_settles_on():
    """relu(x @ w) returns bf16 for any input; x + (x @ w) keeps fp32."""
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))

        def layer(x):
            return cg.relu(cg.linear(x, "b d -> b e", e=D))

        g.output(cg.repeat(L, layer, x, name="a"), cg.repeat(L, lambda x: x + layer(x), x, name="b"))
    mixed = apply_precision(g, "bf16-mixed")
    assert [t.dtype.name for t in mixed.outputs] == ["bf16", "fp32"]
    assert cg.flops(mixed) == cg.flops(g)


def test_swapped_carries_promote_to_wider_dtype():
    """(a, b) -> (b @ w, a): the product is bf16, the other carry keeps its dtype."""
    with cg.Graph("g") as g:
        w = g.param("w", (D, D))
        x, y = g.input("x", (B, D)), g.input("y", (B, D))
        a, b = cg.repeat(L, lambda a, b: (b @ w, a), (x, y), name="layers")
        g.output(a, b)
    mixed = apply_precision(g, "bf16-mixed")
    (loop,) = [op for op in mixed.ops if op.body is not None]
    assert [t.dtype.name for t in loop.results] == ["bf16", "bf16"]
    assert [f.dtype.name for f in loop.body.formals[:2]] == [t.dtype.name for t in loop.body.outputs]


def test_purely_swapped_carries_use_wider_dtype():
    """x is fp32 and y a bf16 product: each iteration swaps them."""
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        y = x @ g.param("w", (D, D))
        a, b = cg.repeat(L, lambda a, b: (cg.relu(b), cg.relu(a)), (x, y), name="layers")
        g.output(a, b)
    mixed = apply_precision(g, "bf16-mixed")
    assert [t.dtype.name for t in mixed.outputs] == ["fp32", "fp32"]
    (loop,) = [op for op in mixed.ops if op.body is not None]
    assert [op.name for op in mixed.ops if word(op) == "cast"] == ["cast", "w.cast", "layers/cast"]
    assert not [op for op in loop.body.ops if word(op) == "cast"]


def test_body_without_stable_dtype_casts_at_its_end():
    """bf16 becomes fp16, fp16 and fp32 become bf16: every iteration gets fp32, which holds both."""
    after = {"fp64": "fp64", "bf16": "fp16", "fp16": "bf16", "fp32": "bf16"}

    @dataclass(frozen=True, kw_only=True)
    class Flip(OpKind):
        name = "flip"
        flops, reads, writes = rules.free, rules.whole, rules.all_results

        def infer(self, operands):
            return [Result(operands[0].sizes, cg.dtype(after[operands[0].dtype.name]))]

    with cg.Graph("g", dtype="fp64") as g:
        g.output(cg.repeat(L, lambda x: apply(Flip(), [x], "flip")[0], g.input("x", (B, D)), name="layers"))
    mixed = apply_precision(g, Policy("p", compute="bf16"))
    (cast, loop) = mixed.ops
    assert (word(cast), cast.results[0].dtype.name) == ("cast", "fp32")
    assert [word(op) for op in loop.body.ops] == ["flip", "cast"]
    assert mixed.outputs[0].dtype.name == "fp32"


def test_scan_slices_keep_their_dtypes():
    T = cg.dims("T")
    with cg.Graph("g") as g:
        w = g.param("w", (D, D))

        def step(state, x):
            y = x @ w
            return state + y, y

        state, ys = cg.scan(T, step, g.input("s", (B, D)), g.input("x", (T, B, D)))
        g.output(state, ys)
    mixed = apply_precision(g, "bf16-mixed")
    assert [t.dtype.name for t in mixed.outputs] == ["fp32", "bf16"]
    assert cg.flops(cg.unroll(mixed, T=3)) == cg.flops(g, T=3)
