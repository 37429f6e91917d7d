"""Rules for torch kernels give the same costs as the library's declarations."""

import math
import re

import pytest

pytest.importorskip("torch")

import torch
from aten_calls import Calls, calls_of, number, spec
from torch.nn import functional

import costgraph as cg
from costgraph.ops.functions import ATEN, FUNCTIONS, LOSSES
from costgraph.torch.tracing.call import Call
from costgraph.torch.tracing.rules import counts_of

KINDS = ("matmul", "pointwise", "transcendental")
R, N = 7, 11


def declared(build, *phases):
    """Return a declared graph's FLOPs by kind in some phases, or in the scope `kernel`."""
    with cg.Graph("g") as g:
        with cg.scope("kernel"):
            result = build(g)
        g.output(result if not result.shape else cg.reduce(result, f"{_names(result)} -> ", "sum"))
    rows = cg.costs(cg.backward(g)).rows
    selected = [r for r in rows if r.direction == "compute" and r.phase in phases and r.scope.startswith("kernel")]
    return tuple(int(sum(r.amount.constant for r in selected if r.kind == kind)) for kind in KINDS)


def _names(t):
    return " ".join(f"a{i}" for i in range(len(t.shape)))


def traced(program, *names):
    """Return the FLOPs by kind in a program's named aten ops."""
    with Calls() as calls:
        program()
    calls.seen = [s for s in calls.seen if s.call.name in names]
    assert calls.seen
    return tuple(calls.total(kind) for kind in KINDS)


def kinds(counts):
    return tuple(number(getattr(counts, kind)) for kind in KINDS)


def rand(*sizes):
    return torch.rand(sizes, requires_grad=True)


# -- softmax, norms, losses ----------------------------------------------------------------------------------------

KERNELS = {
    "softmax": (
        lambda g: cg.softmax(g.param("x", (R, N))),
        lambda: functional.softmax(rand(R, N), -1).sum().backward(),
        "_softmax",
    ),
    "layer_norm": (
        lambda g: cg.layer_norm(g.param("x", (R, N))),
        lambda: functional.layer_norm(rand(R, N), (N,), rand(N), rand(N)).sum().backward(),
        "native_layer_norm",
    ),
    "layer_norm without parameters": (
        lambda g: cg.layer_norm(g.param("x", (R, N)), affine=False),
        lambda: functional.layer_norm(rand(R, N), (N,)).sum().backward(),
        "native_layer_norm",
    ),
    "layer_norm without a shift": (
        lambda g: cg.layer_norm(g.param("x", (R, N)), bias=False),
        lambda: functional.layer_norm(rand(R, N), (N,), rand(N)).sum().backward(),
        "native_layer_norm",
    ),
    "layer_norm of data": (
        lambda g: cg.layer_norm(g.input("x", (R, N))),
        lambda: functional.layer_norm(torch.rand(R, N), (N,), rand(N), rand(N)).sum().backward(),
        "native_layer_norm",
    ),
    "group_norm": (
        lambda g: cg.nn.group_norm(g.param("x", (2, 15, 7)), 3),
        lambda: functional.group_norm(rand(2, 15, 7), 3, rand(15), rand(15)).sum().backward(),
        "native_group_norm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_forward_and_backward(name):
    build, program, op = KERNELS[name]
    gradient = f"{op}_backward_data" if op.endswith("softmax") else f"{op}_backward"
    assert traced(program, op) == declared(build, "forward")
    assert traced(program, gradient) == declared(build, "backward")


def test_cross_entropy():
    def build(g):
        return cg.cross_entropy(g.param("x", (R, N)), g.input("t", (R,), dtype="int64"))

    def program():
        functional.cross_entropy(rand(R, N), torch.zeros(R, dtype=torch.int64)).backward()

    assert traced(program, "_log_softmax", "nll_loss_forward") == declared(build, "forward")
    assert traced(program, "_log_softmax_backward_data", "nll_loss_backward") == declared(build, "backward")


def test_fused_rms_norm_costs_the_same_as_declared():
    x, w = spec(R, N), spec(N)  # a CPU has no such kernel
    forward = {"input": x, "normalized_shape": (N,), "weight": w, "eps": 1e-6}
    backward = {"grad_out": x, **forward, "rstd": spec(R, 1), "output_mask": (True, True)}

    def build(g):
        return cg.rms_norm(g.param("x", (R, N)))

    call = Call("_fused_rms_norm", "", False, forward, (x, spec(R, 1)))
    assert kinds(counts_of(call)) == declared(build, "forward")
    gradients = Call("_fused_rms_norm_backward", "", False, backward, (x, w))
    assert kinds(counts_of(gradients)) == declared(build, "backward")
    of_data = Call("_fused_rms_norm_backward", "", False, backward | {"output_mask": (False, True)}, (w,))
    assert kinds(counts_of(of_data)) == declared(lambda g: cg.rms_norm(g.input("x", (R, N))), "backward")


def test_flash_attention():
    B, H, S, K = 2, 3, 5, 7

    def build(g):
        q, k, v = (g.param(n, (B, H, S, K)) for n in "qkv")
        return cg.attention(q, k, v, causal=True)

    def program():
        q, k, v = (rand(B, H, S, K) for _ in range(3))
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert traced(program, name) == declared(build, "forward")
    assert traced(program, f"{name}_backward") == declared(build, "backward")


def test_shared_heads():
    def build(g):
        q = g.input("q", (2, 6, 5, 7))
        k, v = (g.param(n, (2, 3, 5, 7)) for n in "kv")
        return cg.attention(q, k, v, causal=False)

    def program():
        q, k, v = rand(2, 6, 5, 7), rand(2, 3, 5, 7), rand(2, 3, 5, 7)
        functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    # includes the log-sum-exp for the backward pass, which torch always writes
    assert traced(program, "_scaled_dot_product_flash_attention_for_cpu") == declared(build, "forward")


# -- elementwise functions -----------------------------------------------------------------------------------------

#: For each library function, a program that runs it in torch with a = b = c.
FUNCTION_CALLS = {
    **{
        name: (lambda op: lambda x: op(x))(getattr(torch, name))
        for name in (
            "abs", "neg", "sign", "square", "reciprocal", "round", "floor", "logical_not", "exp", "expm1", "log",
            "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "relu", "sigmoid",
        )
    },
    **{
        name: (lambda op: lambda x: op(x, x))(getattr(torch, name))
        for name in (
            "add", "sub", "mul", "div", "maximum", "minimum", "pow", "eq", "ne", "less", "less_equal", "logical_and",
        )
    },
    **{
        name: (lambda op: lambda x: op(x))(getattr(functional, name))
        for name in ("relu6", "leaky_relu", "silu", "gelu", "softplus", "mish", "elu", "hardsigmoid", "hardswish")
    },
    "where": lambda x: torch.where(x > 2, x, x),
    "masked_fill": lambda x: x.masked_fill(x > 2, 0.0),
    "lerp": lambda x: torch.lerp(x, x, x),
    "clamp": lambda x: x.clamp(0, 1),
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "cubed": lambda x: x**3,
    "copy": lambda x: x.clone(),
    "cast": lambda x: x.double(),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTION_CALLS)
def test_function_costs_match_the_table(name):
    x = torch.rand(3, 5)
    function = FUNCTIONS[name]
    seen = calls_of(lambda: FUNCTION_CALLS[name](x)).seen[-1].counts  # a mask is made before it
    assert (seen.pointwise, seen.transcendental) == (15 * function.flops, 15 * function.transcendentals)


@pytest.mark.parametrize("name", sorted(n for n in FUNCTIONS if n.endswith("_backward")))
def test_activation_gradient_costs_match_the_table(name):
    plain = {
        "threshold": functional.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "gelu_tanh": FUNCTION_CALLS["gelu_tanh"],
    }
    base = name.removesuffix("_backward")
    op = plain.get(base) or getattr(functional, base, None)
    if op is None:
        pytest.skip("no kernel of torch")
    x = rand(3, 5)
    y = op(x)
    calls = calls_of(lambda: y.backward(torch.ones(3, 5)))
    (backward_counts,) = (s.counts for s in calls.seen if "backward" in s.call.name)
    function = FUNCTIONS[name]
    assert (backward_counts.pointwise, backward_counts.transcendental) == (
        15 * function.flops,
        15 * function.transcendentals,
    )


#: Python's functions for the calls in formulas, and torch's usual parameters.
NAMES = {
    **vars(math), "sign": lambda x: math.copysign(1, x), "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0), "log2p1": lambda x: math.log2(1 + x), "copysign": math.copysign,
    "lambd": 0.5, "beta": 1, "delta": 1,
}  # fmt: skip


@pytest.mark.parametrize("definition", [
    "remainder(a, b)", "fmod(a, b)", "floor_divide(a, b)", "frac(x)", "trunc(x)", "ceil(x)", "copysign(a, b)",
    "hypot(a, b)", "special_xlog1py(a, b)", "logaddexp(a, b)", "logaddexp2(a, b)", "sinc(x)", "softshrink(x)",
    "hardshrink(x)", "log_sigmoid_forward(x)", "_prelu_kernel(x, w)", "_add_relu(a, b)", "polar(r, angle)",
    "softshrink_backward(g, x)", "hardshrink_backward(g, x)", "atan2(a, b)",
    "binary_cross_entropy_with_logits(x, t)", "soft_margin_loss(x, t)",
])  # fmt: skip
def test_formulas_have_the_values_of_torch(definition):
    name, _, operands = definition.rstrip(")").partition("(")
    (formula, *named) = re.split(r", (?=\w+ = )", (ATEN | LOSSES)[name].formula)
    for numbers in ((-2.375, 0.625), (1.75, 0.25), (0.125, 0.75), (-0.25, 0.5)):
        values = dict(zip(operands.split(", "), numbers, strict=False))
        for variable, value in reversed([n.split(" = ", 1) for n in named]):
            values[variable] = eval(value, NAMES, values)
        result = torch.as_tensor(eval(formula, NAMES, values))
        arguments = [torch.tensor([n]) for n in numbers[: len(operands.split(", "))]]
        extra = [0.5] if name.startswith(("softshrink_", "hardshrink_")) else []
        found = getattr(torch.ops.aten, name)(*arguments, *extra)
        found = found[0] if isinstance(found, tuple) else found
        found = torch.view_as_real(found)[0] if found.is_complex() else found
        torch.testing.assert_close(found.flatten(), result.float().flatten())


# -- optimizers ----------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": (lambda **o: cg.AdamW(**o), lambda p, **o: torch.optim.AdamW(p, **o), {}),
    "adam": (lambda **o: cg.Adam(**o), lambda p, **o: torch.optim.Adam(p, **o), {}),
    "adam with decay and amsgrad": (
        lambda **o: cg.Adam(**o), lambda p, **o: torch.optim.Adam(p, **o), {"weight_decay": 0.1, "amsgrad": True},
    ),
    "sgd": (lambda **o: cg.SGD(**o), lambda p, **o: torch.optim.SGD(p, lr=0.1, **o), {}),
    "sgd with momentum": (
        lambda **o: cg.SGD(**o), lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ),
    "adagrad": (lambda **o: cg.AdaGrad(**o), lambda p, **o: torch.optim.Adagrad(p, **o), {}),
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(name, implementation):
    ours, theirs, options = OPTIMIZERS[name]
    shapes = [(3, 5), (7,)]
    with cg.Graph("g") as g:
        parts = [cg.reduce(g.param(f"p{i}", s), f"{' '.join('ab'[: len(s)])} -> ", "sum") for i, s in enumerate(shapes)]
        g.output(parts[0] + parts[1])
    step = cg.training_step(g, optimizer=ours(implementation=implementation, **options))
    rows = [r for r in cg.costs(step).rows if r.direction == "compute" and r.phase == "optimizer"]
    # the step counters of fused optimizers, one number per parameter; torch keeps them for the others too
    rows = [r for r in rows if not r.op.rpartition("/")[2].startswith("step")]
    params = [torch.nn.Parameter(torch.rand(s)) for s in shapes]
    optimizer = theirs(params, **{implementation: True}, **options)
    for _ in range(2):  # the second step has state
        for p in params:
            p.grad = torch.ones_like(p)
        calls = calls_of(optimizer.step)
    counters = len(shapes) if name.startswith("ada") else 0
    assert calls.total("pointwise") - counters == sum(r.amount.constant for r in rows if r.kind == "pointwise")
    assert calls.total("transcendental") == sum(r.amount.constant for r in rows if r.kind == "transcendental")
