"""In-place writes to views: peaks and gradients of the derived backward pass equal those of torch."""

import random

import pytest
import torch
from budget import drawing
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from traced import real_peak

import costgraph as cg
from costgraph.torch import trace
from costgraph.torch.lowering import lower
from tests.fuzz.writes import drawn_writes

READS = ("{}.sum()", "{}.sin().sum()", "({0} * {0}.detach().cos()).sum()", "{}.mT.exp().sum()")
STARTS = ("x = self.a(x)", "x = self.a(x) * 1", "x = self.a(x).sin()", "x = self.a(x).mT.contiguous().mT")


def drawn(rng):
    """Return the body of a forward pass that writes into views, and reads some of them."""
    lines, views = drawn_writes(rng)
    reads = [rng.choice(READS).format(rng.choice(["x", *views])) for _ in range(rng.randint(1, 3))]
    return ["w = self.a(x) * 1", rng.choice(STARTS), *lines, "return " + " + ".join(reads)]


class Written(nn.Module):
    def __init__(self, lines):
        super().__init__()
        self.a = nn.Linear(16, 16)
        text = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in lines)
        scope = {"torch": torch}
        exec(compile(text, "<program>", "exec"), scope)
        self.run = scope["forward"]

    def forward(self, x):
        return self.run(self, x)


def step(net, x):
    """Run a training step; False for a program that torch refuses, as it writes to a saved tensor."""
    try:
        net(x).backward()
    except (RuntimeError, IndexError):
        return False
    return True


def check_peak_and_gradients(lines):
    """Compare with torch; return whether torch runs the program and the library models it."""
    torch.manual_seed(0)
    net, x = Written(lines), torch.randn(5, 26, 16)
    if not step(net, x):
        return False
    net.zero_grad()
    try:
        graph = cg.backward(trace(net, torch.zeros(3, 13, 16), dims=[("B", "S", None)]))
    except cg.UnsupportedError as error:
        # a view as large and in the same layout as its base cannot be told from it
        assert "recorded call of as_strided" in str(error)  # noqa: PT017
        return False
    real = real_peak(lambda: (step(net, x), net.zero_grad()), *net.parameters(), x)
    assert float(cg.peak_memory(graph, B=5, S=26)) == pytest.approx(real, rel=0.005, abs=256)
    with graph:
        graph.outputs.extend(graph.gradients.values())
    module = lower(graph, B=5, S=26)
    module.load_state_dict(net.state_dict())
    step(net, x)
    for gradient, parameter in zip(module(x)[1:], graph.gradients, strict=True):
        expected = net.get_parameter(parameter.name.replace("/", ".")).grad
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)
    return True


@drawing(400)
@given(st.integers(0, 10**6))
def test_written_views_have_the_peak_and_the_gradients_of_torch(seed):
    check_peak_and_gradients(drawn(random.Random(seed)))


@pytest.mark.parametrize("read", ["z.sum()", "z.sin().sum()", "x.sin().sum()", "z.sin().sum() + x.sin().sum()"])
def test_base_of_a_written_slice_gets_its_gradient(read):
    assert check_peak_and_gradients(["x = self.a(x) * 1", "z = x[:, 1:]", "z.mul_(2)", f"return {read}"])
