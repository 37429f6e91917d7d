"""Mixed-dtype operands, which a CPU casts before the computation, and masked writes."""

import re

import pytest
import torch
from torch import nn
from traced import differences, real_peak

import costgraph as cg
from costgraph.dtypes import ALIASES
from costgraph.torch import lower, trace


class Rows(nn.Module):
    """A function of rows, after an optional layer."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.Sequential(*layers)

    def forward(self, x):
        return self.function(self.layers(x))


def places(x):
    """Return as many integers as there are elements."""
    return x.argsort(-1)


CASTS = {
    "a product with a mask": lambda x: x * (x > 0),
    "a product in place": lambda x: x.sin().mul_(x > 0),
    "a sum with whole numbers": lambda x: x + places(x),
    "a quotient of whole numbers": lambda x: places(x) / places(x),
    "a root of whole numbers": lambda x: places(x).sqrt(),
    "whole numbers by half": lambda x: places(x) * 0.5,
    "a comparison": lambda x: x > places(x),
    "a choice": lambda x: torch.where(x > 0, x, places(x)),
    "whole numbers of two widths": lambda x: places(x) == places(x).int(),
    "floats of two widths": lambda x: x + x.bfloat16(),
    "how many there are": lambda x: (x > 0).sum(-1),
    "a running count": lambda x: (x > 0).cumsum(-1),
    "a mean of those that count": lambda x: (x * (x > 0)).sum(-1) / (x > 0).sum(-1),
    "nothing to cast": lambda x: (x > 0) & (x < 1),
}


@pytest.mark.parametrize("name", CASTS)
def test_cpu_operand_casts_are_in_the_peak(name):
    net, x = Rows(CASTS[name]), torch.randn(71, 67)
    peak, _ = differences(trace(net, torch.zeros(5, 67), dims=[("B", None)]), net, [x], B=71)
    assert abs(peak) < 16


#: Ops whose backward formula casts as well.
BACK = {
    "a mask that is a factor": lambda x: (x > 0) * x * 2,
    "a mask far from the loss": lambda x: torch.sin((x > 0) * x.exp())[:, None],
    "whole numbers that divide": lambda x: x.sin() / (1 + places(x)),
}


@pytest.mark.parametrize("name", BACK)
def test_cpu_operand_casts_are_in_the_backward_peak(name):
    net, x = Rows(lambda x: BACK[name](x).mean(), nn.Linear(6, 67)), torch.randn(71, 6)
    real = real_peak(lambda: (net(x).backward(), net.zero_grad()), *net.parameters(), x)
    seen = trace(net, torch.zeros(5, 6), dims=[("B", None)], train=True)
    derived = cg.backward(trace(net, torch.zeros(5, 6), dims=[("B", None)]))
    for graph in (seen, derived):
        assert abs(cg.peak_memory(graph, B=71) - real) < 16


def test_gpu_kernels_cast_operands_without_a_copy():
    on = [trace(Rows(CASTS["a product with a mask"]), torch.zeros(5, 67), device=d) for d in ("cpu", "cuda")]
    assert cg.peak_memory(on[0]) - cg.peak_memory(on[1]) == 5 * 67 * 4


def test_fused_kernel_casts_without_a_copy():
    """One kernel reads the rows and writes the sums."""
    net = Rows(lambda x: (x * (x.sin() > 0) * 2).sum(-1))
    g = cg.fuse(trace(net, torch.zeros(5, 67), dims=[("B", None)]))
    assert len(list(g.ops)) == 1
    assert cg.bytes_moved(g, B=71) == (71 * 67 + 71) * 4 == cg.peak_memory(g, B=71)


def masked(x):
    y = x.clone()
    y[x > 0] = 0.0
    y[torch.arange(x.shape[0]) % 3 > 1] = -1.5
    return y.sin()


def test_masked_assignment_matches_masked_fill():
    """Like `masked_fill`, which torch runs for it: gradients pass where the mask is false."""
    net, x = Rows(masked, nn.Linear(6, 67)), torch.randn(13, 6)
    forward = trace(net, torch.zeros(5, 6), dims=[("B", None)])
    peak, flops = differences(forward, net, [x], B=13)
    assert abs(peak) < 100
    assert flops == 0
    low = lower(forward, B=13)
    low.load_state_dict(net.state_dict())
    torch.testing.assert_close(low(x), net(x))

    loss = Rows(lambda x: masked(x).mean(), nn.Linear(6, 67))
    made, seen = (trace(loss, torch.zeros(5, 6), dims=[("B", None)], train=train) for train in (False, True))
    made = cg.backward(made)
    assert cg.flops(made) == cg.flops(seen)
    assert abs(cg.peak_memory(made, B=13) - cg.peak_memory(seen, B=13)) < 16
    with made:
        made.outputs.extend(made.gradients.values())
    low = lower(made, B=13)
    low.load_state_dict(loss.state_dict())
    _, *found = low(x)
    loss(x).backward()
    for t, grad in zip(made.gradients, found, strict=True):
        torch.testing.assert_close(grad, loss.get_parameter(t.name.replace("/", ".")).grad)


def test_torch_dtypes_are_accepted():
    sub_byte = re.compile(r"(?:u?int|bits)[1-7](?!\d)|float4")
    formats = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]
    known = [d for d in formats if str(d).removeprefix("torch.") in {*cg.DTYPES, *ALIASES}]
    assert len(known) >= 20
    for given in known:
        name = str(given).removeprefix("torch.")
        assert cg.dtype(given) == cg.dtype(name)
        assert sub_byte.match(name) or cg.dtype(given).bits == 8 * given.itemsize, name
    with pytest.raises(cg.FormatError, match="'qint8' is unknown"):
        cg.dtype(torch.qint8)
    assert cg.models.load("gpt2", dtype=torch.bfloat16).dtype == cg.dtype("bf16")
