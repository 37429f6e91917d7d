"""Attention with sinks against torch: concatenated to the scores, included in the softmax, and dropped."""

import pytest
import torch

import costgraph as cg
from costgraph.torch import lower

B, H, G, S, K = cg.dims("B H G S K")
DIMS = {"B": 2, "H": 6, "G": 3, "S": 5, "K": 4}


def graph(kernel):
    with cg.Graph("g") as g:
        q = g.input("q", (B, H, S, K), grad=True)
        k, v = (g.input(n, (B, G, S, K), grad=True) for n in "kv")
        y = cg.attention(q, k, v, sinks=g.param("sinks", (H,)), kernel=kernel)
        g.output(cg.reduce(cg.ops.pointwise("square", y), "b h s k -> ", "sum"))
    step = cg.backward(g)
    with step:
        step.output(*step.gradients.values())
    return step


def joined(q, k, v, sinks):
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2)  # a declared scale is 1
    scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), float("-inf"))
    both = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(2, -1, 5, -1)], -1)
    return (both.softmax(-1)[..., :-1] @ v).square().sum()


@pytest.mark.parametrize("kernel", ["flash", "eager"])
def test_attention_sink_values_and_gradients_equal_torchs(kernel):
    torch.manual_seed(0)
    given = [torch.randn(2, 6, 5, 4), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), torch.randn(6)]
    module = lower(graph(kernel), **DIMS)
    module.state_dict()["sinks"].copy_(given[3])
    outputs = module(*(t.clone() for t in given[:3]))
    leaves = [t.clone().requires_grad_() for t in given]
    expected = joined(*leaves)
    expected.backward()
    for mine, theirs in zip(outputs, [expected.detach(), *(t.grad for t in leaves)], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
