"""Modules modified by other tools, and non-dense tensors: traced if dense data define them."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph.torch import trace

X = torch.zeros(3, 6)


def mlp():
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5))


class Calls(nn.Module):
    """A layer, and a function on it and the inputs."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.layer, self.function = layer or nn.Linear(6, 5), function

    def forward(self, *args):
        return self.function(self.layer, *args)


def quantized(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear}, dtype=dtype)


def jit(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


MLP_FLOPS = 2 * 3 * (6 * 7 + 7 * 5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.trace(mlp().eval(), X),
        lambda: torch.jit.script(mlp()),
        lambda: torch.jit.freeze(torch.jit.script(mlp().eval())),
        lambda: nn.Sequential(nn.Linear(6, 7), torch.jit.script(nn.Linear(7, 5))),
        lambda: nn.Sequential(nn.LazyLinear(7), nn.LazyBatchNorm1d(), nn.LazyLinear(5)),
    ],
    ids=["traced", "scripted", "frozen", "scripted inside", "lazy"],
)
def test_modified_modules_keep_their_matmuls(make):
    net = jit(make)
    assert cg.matmul_flops(trace(net, X)) == MLP_FLOPS
    assert cg.matmul_flops(trace(net, X, dims=[("B", None)])) == MLP_FLOPS // 3 * cg.dims("B")


def test_lazy_module_stays_lazy():
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(8))
    assert cg.param_count(trace(net, torch.zeros(2, 3, 8, 8))) == 4 * 28 + 8 * 145
    assert isinstance(net[0], nn.LazyConv2d)
    with pytest.raises(cg.UnsupportedError, match=r"parameter '0\.bias' of Sequential is lazy.*call the module once"):
        trace(net, torch.zeros(2, 8))


@pytest.mark.parametrize(("dtype", "bytes_"), [(torch.qint8, 1), (torch.float16, 2)])
def test_dynamic_quantization_keeps_matmuls_and_parameters(dtype, bytes_):
    net = quantized(dtype)
    state = copy.copy(net[0].__dict__)
    g = trace(net, X, dims=[("B", None)])
    assert cg.matmul_flops(g, B=3) == MLP_FLOPS
    assert cg.param_count(g) == cg.param_count(trace(mlp(), X))
    assert cg.param_bytes(g) == bytes_ * (6 * 7 + 7 * 5) + 4 * (7 + 5)
    assert net[0].__dict__ == state
    net(X)


@pytest.mark.parametrize("backward", [False, True], ids=["inference", "training"])
def test_profiler_references_to_parameters_are_harmless(backward):
    net = mlp()
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profile:
        loss = net(X).sum()
        if backward:
            loss.backward()
    del loss
    before = [*net.parameters()]
    assert cg.matmul_flops(trace(net, X)) == MLP_FLOPS
    g = trace(Calls(lambda layer, x: layer(x).sum(), net), X, train=True)
    assert len(g.gradients) == 4
    assert all(p is q for p, q in zip(net.parameters(), before, strict=True))
    assert profile is not None


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda f, x, v: torch.func.jvp(f, (x,), (v,)), (X, X)),
        (lambda f, x: torch.func.jacfwd(f)(x), (X[0],)),
        (lambda f, x: torch.func.jvp(lambda y: f(y).tanh(), (x,), (x,)), (X,)),
    ],
    ids=["jvp", "jacfwd", "jvp of a function"],
)
def test_forward_mode_of_a_layer_with_a_bias_is_that_of_a_run(function, given):
    net = Calls(function)
    with FlopCounterMode(display=False) as counter:
        net(*given)
    assert cg.matmul_flops(trace(net, *given)) == counter.get_total_flops()


def test_scan_runs_its_steps():
    scan = pytest.importorskip("torch._higher_order_ops.scan").scan

    def run(layer, start, rows):
        def step(carry, row):
            carry = torch.tanh(layer(carry) + row)
            return carry, carry.clone()

        return scan(step, start, rows, dim=0)

    g = trace(Calls(run, nn.Linear(6, 6)), torch.zeros(4, 6), torch.zeros(5, 4, 6))
    assert cg.matmul_flops(g) == 5 * 2 * 4 * 6 * 6
    assert [t.shape for t in g.outputs] == [(4, 6), (5, 4, 6)]


def test_varlen_attention_of_equal_lengths_counts_like_a_batch():
    """Its RNG state is uint64, and the longest sequence is given."""
    q = torch.zeros(12, 2, 16, dtype=torch.bfloat16)
    ends = torch.tensor([0, 4, 8, 12], dtype=torch.int32)

    def flops(**options):
        net = Calls(lambda _, q, k, v, ends: varlen_attn(q, k, v, ends, ends, 4, 4, **options))
        return cg.matmul_flops(trace(net, q, q, q, ends, dims=[("T", None, None)] * 3 + [None]), T=12)

    assert flops() == 3 * 2 * (2 * 2 * 4 * 4 * 16)
    assert flops(window_size=(-1, 0)) == 3 * 2 * (2 * 2 * 10 * 16)
    with pytest.raises(cg.UnsupportedError, match="a window"):
        flops(window_size=(2, 2))


SPARSE = torch.eye(6).to_sparse()
ROWS = [torch.zeros(3, 6), torch.zeros(5, 6)]


@pytest.mark.parametrize(
    ("net", "given", "text"),
    [
        (mlp(), (torch.nested.nested_tensor(ROWS, layout=torch.jagged),), "input is a nested tensor.*pad it"),
        (
            Calls(lambda f, a, b: f(torch.nested.as_nested_tensor([a, b]))),
            ROWS,
            "creates a nested tensor.*pad the rows",
        ),
        (Calls(lambda f, a: f(a @ a)), (SPARSE,), "is a tensor of layout sparse_coo.*to_dense"),
        (Calls(lambda f, a: f(a.to_sparse() @ a)), (torch.zeros(6, 6),), "uses a sparse tensor.*to_dense"),
    ],
    ids=["nested input", "nested inside", "sparse input", "sparse inside"],
)
def test_tensors_that_are_not_dense_are_refused(net, given, text):
    with pytest.raises(cg.UnsupportedError, match=text) as refused:
        trace(net, *given)
    assert len(str(refused.value).splitlines()) == 1
