"""Peaks in the library's own backward pass for a traced forward pass, against a real torch run."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from traced import real_peak

import costgraph as cg
from costgraph.torch import trace


class Beside(nn.Module):
    """Rows, and a parameter outside of all layers."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function, self.w = nn.Linear(6, 67), function, nn.Parameter(torch.rand(67))

    def forward(self, x):
        return self.function(self.layer(x), self.w).mean()


def windows(x, w):
    """Return windowed rows whose weights get no gradient."""
    weights = torch.ones(1, 1, 3)
    x = functional.conv1d((x * w)[:, None].sin() + 1, weights, padding=1)
    return functional.conv1d(x.sin() * w + 2, weights, padding=1)


def attention(x, w):
    """Return self-attention over rows."""
    x = x[None, None]
    return functional.scaled_dot_product_attention(x, x, x)


def written(x, w):
    """Return rows with a slice added to itself in place."""
    y = x.clone()
    y[:, 1:].add_(x[:, 1:])
    return y


#: Tensors that torch saves or creates although the formula does not need them.
def without_autograd(x, w):
    y = x * w
    x = y.exp().cos()
    with torch.no_grad():
        y = y.sin()
    return x.flip(0).tanh().exp() + y.cos()


BESIDE = {
    "sums along an axis are turned round twice": lambda x, w: (x * w).cumsum(1),
    "products along an axis as well": lambda x, w: x.sin().cumprod(0) * w,
    "sums over what was repeated wait for all gradients": lambda x, w: x[:, None] / (w[:, None] * w),
    "the gradient of the last operand comes first": lambda x, w: torch.maximum(x.sin(), w).neg(),
    "a power keeps its result": lambda x, w: (x.exp() ** x.detach().abs()).tril() * w,
    "a softmax makes what lies strided dense": lambda x, w: (x[:, :, None] * w).mT.softmax(-1).mT * w,
    "a logarithm of sums makes two tensors": lambda x, w: (x[:, :, None] * w).logsumexp(1),
    "a window keeps its rows": windows,
    "an operand that stands for three arguments has a gradient for each": attention,
    "the gradient of what was written in part is copied": written,
    "nothing is saved without autograd": without_autograd,
    "a mask keeps what its gradient would read": lambda x, w: (x.exp().cos().exp() > 0) * x * w,
    "a product is multiplied by its factor": lambda x, w: torch.addcmul(x, x, x),
    "elements along an axis keep their tensor": lambda x, w: (x * w).gather(0, torch.zeros(71, 67).long()).sin(),
    "rows that are added are kept, and no gradient is copied": lambda x, w: (
        x.index_add(0, torch.tensor([0, 1]), x[:2]) * w
    ).sin(),
    "a mean loss lies where those of elements were": lambda x, w: (
        functional.mse_loss(x, w.expand_as(x)) * functional.smooth_l1_loss(x.sin(), x.detach()) * w
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_extra_saved_tensors_of_torch_are_in_the_peak(name):
    net, x = Beside(BESIDE[name]), torch.randn(71, 6)
    derived = cg.backward(trace(net, torch.zeros(5, 6), dims=[("B", None)]))
    if BESIDE[name] in (windows, attention):  # these runs have library or thread workspaces
        real = cg.peak_memory(trace(net, x, train=True))
    else:
        real = real_peak(lambda: (net(x).backward(), net.zero_grad()), *net.parameters(), x)
    assert abs(cg.peak_memory(derived, B=71) - real) < 100


@pytest.mark.parametrize("uses", [2, 3])
def test_view_gradients_accumulate_out_of_place(uses):
    """torch makes a new one, and accumulates into it afterwards."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(67, 67)

        def forward(self, x):
            for _ in range(uses):
                x = self.layer(x)
            return x.mean()

    net, x = Shared(), torch.randn(5, 67)
    derived = cg.backward(trace(net, x))
    assert (
        abs(cg.peak_memory(derived) - real_peak(lambda: (net(x).backward(), net.zero_grad()), *net.parameters(), x))
        < 100
    )


@pytest.mark.parametrize("function", [lambda x, w: (x * w).amax(1), lambda x, w: (x * w).amin(0, keepdim=True)])
def test_maximum_gradient_is_divided_among_ties(function):
    forward, seen = (
        trace(Beside(function), torch.zeros(5, 6), dims=[("B", None)], train=train) for train in (False, True)
    )
    assert cg.flops(cg.backward(forward)) == cg.flops(seen)


LOSSES = ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss", "l1_loss"]


@pytest.mark.parametrize("name", LOSSES)
def test_elementwise_temporaries_of_losses_are_in_the_peak(name):
    """Some of them have an elementwise result before the reduction."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 67)

        def forward(self, x):
            y = self.layer(x)
            return getattr(functional, name)(y, y.detach() * 2) * 1  # frees the loss storage

    net, x = Loss(), torch.randn(71, 6)
    forward, step = (trace(net, torch.zeros(5, 6), dims=[("B", None)], train=train) for train in (False, True))
    trained = real_peak(lambda: (net(x).backward(), net.zero_grad()), *net.parameters(), x)
    with torch.no_grad():
        ran = real_peak(lambda: net(x), *net.parameters(), x)
    for graph, real in [(forward, ran), (step, trained), (cg.backward(forward), trained)]:
        assert abs(cg.peak_memory(graph, B=71) - real) < 100
