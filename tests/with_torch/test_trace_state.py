"""Program state behaves in a trace as in a real run, and is unchanged afterwards."""

import functools
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from traced import real_peak

import costgraph as cg
from costgraph.torch import trace

EVERYWHERE = {}


@functools.lru_cache
def positions(count):
    return torch.arange(count) * 1.0


class Cache:
    """A plain object, like a KV cache."""

    def __init__(self):
        self.seen = 3


class Keeps(nn.Module):
    """Stores its results in every kind of place that a program has."""

    of_all: ClassVar = []

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 5)
        self.list, self.dict, self.cache, self.named = [], {"a": 1}, Cache(), SimpleNamespace(made=None)

    def forward(self, x):
        y = self.up(x) + positions(x.shape[1]) + positions(x.shape[0])[:, None]
        self.list.append(y)
        self.dict["b"] = self.cache.seen = self.cache.new = self.named.made = self.made = y
        EVERYWHERE["y"] = y
        self.of_all.append(x.shape[0])
        Keeps.last = y
        return y.relu()


def test_trace_restores_program_state():
    net, x = Keeps(), torch.zeros(3, 5)
    trace(net, x, dims=[("B", None)])
    assert (net.list, net.dict, vars(net.cache), vars(net.named)) == ([], {"a": 1}, {"seen": 3}, {"made": None})
    assert (EVERYWHERE, Keeps.of_all) == ({}, [])
    assert not hasattr(Keeps, "last")
    assert not hasattr(net, "made")
    assert type(positions(5)) is torch.Tensor  # 5 was an argument of the trace too


def test_open_sizes_may_be_cache_keys():
    B = cg.dims("B")
    g = trace(Keeps(), torch.zeros(3, 5), dims=[("B", None)])
    assert cg.matmul_flops(g) == 2 * B * 5 * 5


def test_modeling_file_cache_works_after_a_trace():
    transformers = pytest.importorskip("transformers")
    config = transformers.BeitConfig(
        hidden_size=20, intermediate_size=28, num_hidden_layers=1, num_attention_heads=5, image_size=24, patch_size=8,
        use_relative_position_bias=True,
    )  # fmt: skip
    net, x = transformers.BeitModel(config, add_pooling_layer=False), torch.zeros(2, 3, 24, 24)
    trace(net, x, dims=[("B", None, None, None)])
    assert type(net(x).last_hidden_state) is torch.Tensor


class Views(nn.Module):
    """Holds a parameter, two views on it, and a row from a larger tensor."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(31, 31, bias=False)
        self.turned, self.listed = self.up.weight.detach().t(), [self.up.weight.detach()]
        self.row = torch.zeros(37, 31)[5]

    def forward(self, x):
        return self.up(x) @ self.turned @ self.listed[0] + self.row


def test_view_attributes_share_their_base_storage():
    net, x = Views(), torch.zeros(7, 31)
    g = trace(net, x, dims=[("B", None)])
    assert cg.param_count(g) == 31 * 31

    def run():
        with torch.no_grad():
            net(x)

    assert real_peak(run, net.up.weight, net.row, x) == cg.peak_memory(g, B=7)


# -- training ----------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(131, 67), nn.ReLU(), nn.Linear(67, 53))

    def forward(self, x):
        return self.net(x).square().mean()


X = torch.zeros(17, 131)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_in_backward_matches_a_real_run(make):
    net = Loss()
    optimizers = {p: make([p], lr=0.1) for p in net.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    g = trace(net, X, dims=[("B", None)], train=True)
    assert not any(o.state for o in optimizers.values())
    net(X).backward()
    state = [v for o in optimizers.values() for s in o.state.values() for v in s.values()]
    real = real_peak(lambda: net(X).backward(), *net.parameters(), X, *state)
    assert abs(real - cg.peak_memory(g, B=17)) <= 64  # loss and optimizer scalars
    again = trace(net, X, dims=[("B", None)], train=True)  # with the current state
    assert cg.peak_memory(again, B=17) == cg.peak_memory(g, B=17)


def test_tensor_hooks_change_gradients():
    net = Loss()
    before = cg.flops(trace(net, X, dims=[("B", None)], train=True))
    net.net[0].weight.register_hook(lambda grad: grad * 2)
    assert cg.flops(trace(net, X, dims=[("B", None)], train=True)) - before == 131 * 67


def test_existing_gradients_are_accumulated():
    net = Loss()
    net(X).backward()
    g = trace(net, X, dims=[("B", None)], train=True)
    real = real_peak(lambda: net(X).backward(), *net.parameters(), X, *(p.grad for p in net.parameters()))
    assert abs(real - cg.peak_memory(g, B=17)) <= 64
    assert all(type(p.grad) is torch.Tensor for p in net.parameters())


def test_compiled_module_is_traced_uncompiled():
    class Outer(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.inner = wrap(nn.Linear(131, 7))

        def forward(self, x):
            return self.inner(x).sum()

    def facts(g):
        return cg.flops(g), [p.name for p in g.params], {op.scope for op in g.ops}

    plain, inside, outside = (
        trace(net, X, dims=[("B", None)])
        for net in (Outer(lambda m: m), Outer(torch.compile), torch.compile(Outer(lambda m: m)))
    )
    assert facts(plain) == facts(inside) == facts(outside)
    assert plain.name == outside.name


def test_empty_parameters_are_traced():
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.none, self.up = nn.Parameter(torch.zeros(0, 131)), nn.Linear(131, 7)

        def forward(self, x):
            return self.up(torch.cat([x, self.none])).sum()

    g = trace(Empty(), X, dims=[("B", None)], train=True)
    assert cg.param_count(g) == 131 * 7 + 7


class Casts(nn.Module):
    """A router with a dtype of its own for its parameters, like Switch's."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(131, 5, bias=False)

    def forward(self, x):
        self.route = self.route.to(torch.float64)
        return self.route(x.double()).softmax(-1).to(x.dtype).sum()


def test_module_that_casts_its_parameters_is_restored():
    net = Casts()
    g = trace(net, X, dims=[("B", None)])
    assert net.route.weight.dtype == torch.float32
    assert cg.matmul_flops(g) == 2 * cg.dims("B") * 131 * 5


def test_trace_clears_the_autocast_cache():
    net = Loss()
    with torch.autocast("cpu", torch.bfloat16):
        g = trace(net, X, dims=[("B", None)], train=True)
        assert all(type(p) is nn.Parameter for p in net.parameters())
        assert type(net(X)) is torch.Tensor
    assert any("_to_copy" in (op.call.target if op.call else "") for op in g.ops)
