"""Elementwise gradients: finite differences, and torch's values, saved tensors and kernels."""

import numpy as np
import pytest
from pulls import check, gradients

import costgraph as cg
from costgraph.ops.elementwise import pointwise
from costgraph.ops.functions import FUNCTIONS, Function

SMOOTH = np.array([0.3, 0.7, 1.3, 2.2, 5.1])
WIDE = np.array([-4.1, -2.3, -0.4, 0.6, 2.9, 3.7, 7.2])
POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "pow", "reciprocal", "div")
STATED = sorted(n for n, f in FUNCTIONS.items() if f.grad is not None)
DIFFERENTIABLE = [n for n in STATED if any(e is not None for e in FUNCTIONS[n].grad) and n != "causal_mask"]
UNARY = [n for n in DIFFERENTIABLE if FUNCTIONS[n].arity == 1]


def numbers(name, shape, shift=0.0):
    """Return numbers away from kinks, positive if the function requires it."""
    pool = (SMOOTH if name in POSITIVE else WIDE) + shift
    return np.resize(pool, shape).astype(float)


def operands(name):
    """Return operands that broadcast in different ways; conditions are 0 and 1."""
    shapes = [(2, 3), (3,), (2, 1)]
    out = [numbers(name, shapes[i], 0.11 * i) for i in range(FUNCTIONS[name].arity)]
    mask = {"where": 0, "masked_fill": 1, "masked_scale": 1}.get(name)
    if mask is not None:
        out[mask] = np.resize([1.0, 0.0, 1.0], out[mask].shape)
    return out, {} if mask is None else {mask: "bool"}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_match_finite_differences(name):
    arrays, dtypes = operands(name)
    if name == "cast":
        check(lambda x: cg.ops.cast(x, "fp32"), *arrays)
    else:
        check(lambda *xs: pointwise(name, *xs), *arrays, dtypes=dtypes)


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if FUNCTIONS[n].arity == 2 and n != "masked_fill"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("number", [0, 1, 2.5])
def test_gradient_with_scalar_operand(name, place, number):
    if (name, place, number) in {("div", 1, 0), ("pow", 0, 0)}:
        pytest.skip("no number")
    x = numbers(name, (2, 3), 0.07)
    check(lambda t: pointwise(name, *((number, t) if place == 0 else (t, number))), x)


@pytest.mark.parametrize("name", ["relu", "exp", "tanh", "sigmoid", "sqrt"])
def test_in_place_gradients_use_the_result(name):
    """The gradient reads only the result, as the operand is overwritten."""
    if name in ("exp", "sqrt", "tanh", "sigmoid"):
        assert FUNCTIONS[name].result == "float"
    check(lambda t: pointwise(name, pointwise("copy", t), inplace=True), numbers("sqrt", (2, 3)))


@pytest.mark.parametrize("name", sorted(set(STATED) - set(DIFFERENTIABLE) - {"causal_mask"}))
def test_step_functions_have_no_gradient(name):
    arrays = [numbers(name, (3,), 0.1 * i) for i in range(FUNCTIONS[name].arity)]
    with cg.Graph("g", dtype="fp64") as g:
        xs = [g.input(f"x{i}", a.shape) for i, a in enumerate(arrays)]
        y = pointwise(name, *xs)
        pull = cg.transforms.vjp.table.VJPContext(y.producer, (g.input("g", (3,)),), (True,) * len(xs), lambda t: t)
        from costgraph.transforms.vjp.table import rule_of

        assert list(rule_of(y.producer)(pull)) == [None] * len(xs)


def test_custom_function_without_gradient_raises():
    cubic = Function("cubic", 1, 2, formula="x*x*x")
    with pytest.raises(cg.UnsupportedError, match="function 'cubic' declares no gradient, expected 1 expressions"):
        gradients(lambda x: pointwise(cubic, x), [np.ones(2)])


def test_custom_function_with_gradient():
    """y = x*x*x under a custom name: dy = g * 3 * x*x."""
    cubed = Function("cubed", 1, 2, formula="x*x*x", grad=(("mul", "g", ("mul", 3, ("square", "a"))),))
    _, ops = check(lambda x: pointwise(cubed, x), WIDE)
    assert [op.kind.function.name for op in ops] == ["square", "mul", "mul"]


def test_attention_masks_zero_gradients():
    from costgraph.ir.graph import Domain, apply
    from costgraph.ops.elementwise import Pointwise

    def masked(x):
        masked_scores = apply(Pointwise(function=FUNCTIONS["causal_mask"], masked=Domain(True, None)), [x], "mask")[0]
        return pointwise("exp", masked_scores)

    check(masked, numbers("x", (2, 3, 3)))


# -- torch -------------------------------------------------------------------------------------------------------


def torch_functions(torch):
    f = torch.nn.functional
    return {
        "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"), "gelu": f.gelu, "silu": f.silu, "relu": f.relu,
        "relu6": f.relu6, "leaky_relu": f.leaky_relu, "sigmoid": torch.sigmoid, "softplus": f.softplus,
        "mish": f.mish, "elu": f.elu, "hardsigmoid": f.hardsigmoid, "hardswish": f.hardswish,
        "clamp": lambda x: torch.clamp(x, 0, 1), "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "softcap": lambda x: 30 * torch.tanh(x / 30), "relu2": lambda x: torch.relu(x) ** 2,
        "copy": torch.clone, "cubed": lambda x: x**3, "cast": lambda x: x.to(torch.float32),
    }  # fmt: skip


#: One kernel here, several ops in torch: only the values are comparable.
COMPOSED = ("quick_gelu", "softcap", "relu2")
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "pow", "lerp", "fma", "where", "masked_fill"]


def torch_function(torch, name):
    table = torch_functions(torch)
    if name == "fma":
        return lambda a, b, c: torch.addcmul(c, a, b)
    if name == "masked_fill":
        return lambda x, mask: x.masked_fill(mask, 0)
    return table.get(name) or getattr(torch, name)


@pytest.mark.parametrize("name", UNARY + BINARY)
def test_gradients_match_torch(name):
    torch = pytest.importorskip("torch")
    arrays, dtypes = operands(name)
    build = (lambda x: cg.ops.cast(x, "fp32")) if name == "cast" else (lambda *xs: pointwise(name, *xs))
    mine, _, _, _ = gradients(build, arrays, dtypes=dtypes, seed=1)
    xs = [torch.tensor(a, dtype=torch.bool if i in dtypes else torch.float64) for i, a in enumerate(arrays)]
    floats = [x.requires_grad_() for x in xs if x.dtype == torch.float64]
    y = torch_function(torch, name)(*xs)
    seed = np.random.default_rng(1).uniform(0.5, 1.5, y.shape)  # drawn like the driver's seed
    y.backward(torch.tensor(seed, dtype=y.dtype))
    tolerance = {"cast": 1e-6, "hardsigmoid": 1e-7}.get(name, 1e-10)  # torch divides by a single-precision 6
    for a, x in zip(mine, floats, strict=True):
        assert np.allclose(a, x.grad.numpy(), rtol=tolerance, atol=tolerance)


def kernels_of_torch(torch, run):
    """Return the ops that torch's autograd runs, without views and bookkeeping."""
    from torch.utils._python_dispatch import TorchDispatchMode

    views = {
        "view",
        "expand",
        "unsqueeze",
        "squeeze",
        "detach",
        "_unsafe_view",
        "t",
        "transpose",
        "permute",
        "alias",
        "scalar_tensor",
    }
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name not in views:
                seen.append(name)
            return func(*args, **(kwargs or {}))

    with Mode():
        run()
    return seen


@pytest.mark.parametrize("name", [n for n in UNARY if n not in COMPOSED and n not in ("cubed", "cast")] + BINARY[:4])
def test_kernel_counts_match_torch(name):
    """The number of byte-moving ops matches torch's kernel count, for operands with equal shapes."""
    torch = pytest.importorskip("torch")
    x = numbers(name, (2, 3))
    arrays = [x + 0.1 * i for i in range(FUNCTIONS[name].arity)]
    _, _, _, ops = gradients(lambda *xs: pointwise(name, *xs), arrays)
    mine = [op.kind.function.name for op in ops]
    xs = [torch.tensor(a, requires_grad=True) for a in arrays]
    y = torch_function(torch, name)(*xs)
    seed = torch.ones_like(y)
    theirs = kernels_of_torch(torch, lambda: torch.autograd.grad(y, xs, seed))
    assert len(mine) == len(theirs), f"{mine}, torch runs {theirs}"


@pytest.mark.parametrize(
    "name", [n for n in UNARY if n not in COMPOSED and n not in ("cubed", "cast", "copy")] + BINARY[:7]
)
def test_saved_tensors_match_torch(name):
    torch = pytest.importorskip("torch")
    x = numbers(name, (2, 3))
    arrays = [x + 0.1 * i for i in range(FUNCTIONS[name].arity)]
    asked = set()

    def saved(t):
        asked.add("y" if t.producer is not None else "abc"[int(t.name[1:])])
        return t

    gradients(lambda *xs: pointwise(name, *xs), arrays, saved=saved)
    xs = [torch.tensor(a, requires_grad=True) for a in arrays]
    y = torch_function(torch, name)(*xs)
    saved_tensors = [getattr(y.grad_fn, n) for n in dir(y.grad_fn) if n.startswith("_saved_")]
    places = {t.data_ptr(): n for t, n in zip([*xs, y], [*"abc"[: len(xs)], "y"], strict=True)}
    theirs = {places[t.data_ptr()] for t in saved_tensors if isinstance(t, torch.Tensor) and t.data_ptr() in places}
    assert asked == theirs
