"""Loops over an open size: one trace, against runs of the program at other sizes."""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.flop_counter import FlopCounterMode
from traced import real_peak

import costgraph as cg
from costgraph import testing
from costgraph.torch import lower, trace
from costgraph.torch.tracing.recorder import Recorder

B = 3


class Recurrent(nn.Module):
    """Appends each result to a list, and writes it into a tensor."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(5, 5)

    def forward(self, x):
        h, outs, y = torch.zeros_like(x[:, 0]), [], torch.zeros_like(x)
        for i in range(x.shape[1]):
            h = torch.tanh(self.w(h) + x[:, i])
            outs.append(h)
            y[:, i] = h * 2
        return torch.stack(outs, dim=1) + y


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Recurrent() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class BothWays(nn.Module):
    """The second loop runs backwards, and its list is reversed."""

    def __init__(self):
        super().__init__()
        self.ahead, self.back = nn.RNNCell(5, 5), nn.RNNCell(5, 5)

    def forward(self, x):
        h = g = torch.zeros_like(x[:, 0])
        ahead, back = [], []
        for i in range(x.shape[1]):
            h = self.ahead(x[:, i], h)
            ahead.append(h)
        for i in range(x.shape[1] - 1, -1, -1):
            g = self.back(x[:, i], g)
            back.append(g)
        return torch.cat([torch.stack(ahead, 1), torch.stack(back[::-1], 1), torch.stack(back, 1)], -1)


class Chunks(nn.Module):
    """Linear attention in chunks of four positions, with a carried state."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(5, 15)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        out, state = torch.zeros_like(v), x.new_zeros(x.shape[0], 5, 5)
        for i in range(0, x.shape[1], 4):
            a, b, c = q[:, i : i + 4], k[:, i : i + 4], v[:, i : i + 4]
            out[:, i : i + 4] = (a @ b.mT).tril() @ c + a @ state
            state = state + b.mT @ c
        return out


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(5, 5)

    def forward(self, x):
        rows = []
        for i in range(x.shape[1]):
            h, row = torch.zeros_like(x[:, 0, 0]), []
            for j in range(x.shape[2]):
                h = torch.tanh(self.w(h) + x[:, i, j])
                row.append(h)
            rows.append(torch.stack(row, 1))
        return torch.stack(rows, 1)


class SideBySide(nn.Module):
    """Iterates over positions by `unbind`, of two tensors at once, with a counter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(5, 5)

    def forward(self, x):
        h, outs = torch.zeros_like(x[:, 0]), []
        for a, (_, b) in zip(x.unbind(1), enumerate(torch.relu(x).unbind(1)), strict=False):
            h = torch.tanh(self.w(h) + a * b)
            outs.append(h.unsqueeze(1))
        return torch.cat(outs, 1)


class Rows(nn.Module):
    """Iterates over a tensor itself, from a non-tensor initial value."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(5, 5)

    def forward(self, x):
        h, outs = 0, []
        for t in x.transpose(0, 1):
            h = torch.tanh(self.w(t) + h)
            outs.append(h)
        return torch.stack(outs).transpose(0, 1)


class Selective(nn.Module):
    """A state space model's scan."""

    def __init__(self):
        super().__init__()
        self.a, self.dt, self.bc = nn.Parameter(torch.randn(5, 3)), nn.Linear(5, 5), nn.Linear(5, 6)

    def forward(self, x):
        dt, (b, c) = F.softplus(self.dt(x)), self.bc(x).chunk(2, -1)
        decay, given = torch.exp(dt.unsqueeze(-1) * self.a), (dt * x).unsqueeze(-1) * b.unsqueeze(2)
        h, ys = x.new_zeros(x.shape[0], 5, 3), []
        for i in range(x.shape[1]):
            h = decay[:, i] * h + given[:, i]
            ys.append((h @ c[:, i, :, None]).squeeze(-1))
        return torch.stack(ys, 1)


class Neighbours(nn.Module):
    """The first position is separate, the others also read the previous one."""

    def forward(self, x):
        outs = [x[:, 0]]
        for i in range(1, x.shape[1]):
            outs.append(x[:, i] * 0.9 + x[:, i - 1] * 0.1)
        return torch.stack(outs, 1)


class Pieces(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(5, 5)

    def forward(self, x):
        return torch.cat([F.softmax(self.w(t), 1) for t in x.split(4, 1)], 1)


class Decoder(nn.Module):
    """Each step attends to all positions."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(10, 5), nn.Linear(5, 11)

    def forward(self, x):
        h, logits = x.mean(1), []
        c = torch.zeros_like(h)
        for t in range(x.shape[1]):
            weights = torch.softmax((x @ h.unsqueeze(-1)).squeeze(-1), -1)
            h, c = self.cell(torch.cat([x[:, t], (weights.unsqueeze(1) @ x).squeeze(1)], -1), (h, c))
            logits.append(self.head(h))
        return torch.stack(logits, 1)


class Two(nn.Module):
    """One loop over positions, and one over every other position, after it and nested in another."""

    def forward(self, x):
        total = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            total = total + x[:, i]
        for i in range(0, x.shape[1], 2):
            total = total * x[:, i]
        rows = []
        for i in range(x.shape[0]):
            row = x[i, 0]
            for j in range(0, x.shape[1], 2):
                row = torch.tanh(row + x[i, j])
            rows.append(row)
        return total + torch.stack(rows)


class Earlier(nn.Module):
    """Each chunk reads the state before it, and the last state is the result."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(5, 5)

    def forward(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            states.append(state)
            state = torch.tanh(self.w(x[:, t]) + state)
        return torch.stack(states, 1) * x + state[:, None]


class Listed(nn.Module):
    """Reads lists of loop results element by element: in parallel, backwards, pairwise, and by `sum`."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        a = [self.w(x[:, t]) for t in range(x.shape[1])]
        b = [torch.tanh(self.u(x[:, t])) for t in range(x.shape[1])]
        total = 0
        for p, q in zip(a, b, strict=True):
            total = total + (p * q).sum(-1, keepdim=True)
        h = torch.zeros_like(x[:, 0])
        for q in reversed(b):
            h = torch.tanh(self.w(q) + h)
        for p, q in pairwise(a):
            h = h + (q - p).abs()
        return h * total + sum(a) + torch.stack(b, 1).sum(1)


class Each(nn.Module):
    """Loops over samples, and over the positions of each."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(5, 5)

    def forward(self, x):
        rows = []
        for b in range(x.shape[0]):
            h = torch.zeros_like(x[0, 0])
            for t in range(x.shape[1]):
                h = torch.tanh(self.w(x[b, t]) + h)
            rows.append(h)
        return torch.stack(rows)


class Strided(nn.Module):
    def forward(self, x):
        return torch.stack([torch.relu(x[:, i]) for i in range(0, x.shape[1], 2)], 1)


class Summed(nn.Module):
    """A sum in place, without a result per position."""

    def forward(self, x):
        total = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            total += x[:, i]
        return total


SOON = [Recurrent, Chunks, Neighbours, BothWays]
LATER = [Layers, Two, Earlier, Listed, Each, Nested, SideBySide, Rows, Selective, Pieces, Decoder, Strided, Summed]


def shaped(make, S):  # the size's name
    return (B, S, S + 1, 5) if make is Nested else (B, S, 5)


def sizes(make, S):
    return dict(zip("BST", shaped(make, S)[:-1], strict=False))


def transposed(x):
    """Return the same values with the first two axes swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def traced(make, module, S=12, layout=torch.Tensor.contiguous):
    return trace(module, layout(torch.zeros(shaped(make, S))), dims=[(*"BST"[: len(shaped(make, S)) - 1], None)])


#: Each program with positions contiguous, one of them also with samples contiguous; the rest takes long.
LAYOUTS = [
    *(pytest.param(make, torch.Tensor.contiguous, id=make.__name__) for make in SOON),
    pytest.param(Recurrent, transposed, id="Recurrent, transposed"),
    *(pytest.param(make, transposed, marks=pytest.mark.long) for make in SOON[1:] + LATER),
    *(pytest.param(make, torch.Tensor.contiguous, marks=pytest.mark.long) for make in LATER),
]


@pytest.mark.parametrize(("make", "layout"), LAYOUTS)
def test_loop_trace_matches_runs_at_other_sizes(make, layout):
    torch.manual_seed(1)
    module = make().eval()
    g = traced(make, module, layout=layout)
    assert not any(op.kind.name == "custom_call" for op in g.walk())
    assert [op.loop.count.names() for op in g.ops if op.loop is not None]
    for S in (8, 20):
        x, bound_sizes = layout(torch.randn(shaped(make, S))), sizes(make, S)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            wanted = module(x)
        assert cg.matmul_flops(g, **bound_sizes) == counter.get_total_flops()
        with torch.no_grad():
            assert cg.peak_memory(g, **bound_sizes) == real_peak(lambda x=x: module(x), x, *module.parameters())
        again = lower(g, **bound_sizes)
        named = {n.replace(".", "/"): p for n, p in module.named_parameters()}
        with torch.no_grad():
            for n, p in again.named_parameters():
                p.copy_(named[n.replace(".", "/")])
            assert torch.equal(again(x), wanted)


@pytest.mark.parametrize(
    "make", [Recurrent, *(pytest.param(make, marks=pytest.mark.long) for make in SOON[1:] + LATER)]
)
def test_loops_cost_the_same_as_their_unrolled_iterations(make):
    module = make().eval()
    g = traced(make, module)
    bound_sizes = sizes(make, 8)
    counts = {n for op in g.walk() if op.loop is not None for n in op.loop.count.names()}
    apart = cg.unroll(g, **{n: bound_sizes[n] for n in counts})
    for cost in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert cost(apart, **{n: bound_sizes[n] for n in bound_sizes.keys() - counts}) == cost(g, **bound_sizes)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("make", [
    lambda: nn.GRU(5, 7, batch_first=True),
    *(pytest.param(make, marks=pytest.mark.long) for make in (
        lambda: nn.GRU(5, 7, 2, bidirectional=True), lambda: nn.RNN(5, 7, batch_first=True),
        lambda: nn.RNN(5, 7, nonlinearity="relu", bidirectional=True), lambda: nn.LSTM(5, 7, proj_size=3))),
])  # fmt: skip
def test_stepwise_recurrent_layers_have_an_open_length(make):
    layer = make().eval()
    g = trace(layer, torch.zeros(B, 6, 5), dims=[("B", "S", None)])
    for S in (8, 20):
        x = torch.randn(B, S, 5)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            layer(x)
        assert cg.matmul_flops(g, B=B, S=S) == counter.get_total_flops()
        with torch.no_grad():
            peak = real_peak(lambda x=x: layer(x), x, *layer.parameters())
        assert cg.peak_memory(g, B=B, S=S) == peak


def events(make, S):
    """Return how many ops torch dispatches in a trace: a noise-free measure for its time."""
    count, usual = 0, Recorder._dispatched

    def counting(*args):
        nonlocal count
        count += 1
        return usual(*args)

    with patch.object(Recorder, "_dispatched", counting):
        trace(make().eval(), torch.zeros(B, S, 5), dims=[("B", "S", None)])
    return count


@pytest.mark.parametrize("make", [
    lambda: nn.LSTM(5, 7, batch_first=True),
    *(pytest.param(make, marks=pytest.mark.long) for make in (
        Recurrent, lambda: nn.GRU(5, 7, batch_first=True), lambda: nn.RNN(5, 7, batch_first=True))),
])  # fmt: skip
def test_trace_time_is_independent_of_example_length(make):
    assert events(make, 250) < 1.5 * events(make, 16)


def rows(layer, x):
    """Write twice into each row."""
    y = x.clone()
    for i in range(x.shape[0]):
        y[i] += layer(x[i])
    return y


def without_gradients(layer, x):
    outs = []
    for i in range(x.shape[1]):
        with torch.no_grad():
            outs.append(layer(x[:, i]))
    return torch.stack(outs, 1)


def last(layer, x):
    outs = [layer(x[:, i]) for i in range(x.shape[1])]
    return outs[-1]


class Lists(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run, self.layer = run, nn.Linear(5, 5)

    def forward(self, x):
        return self.run(self.layer, x)


@pytest.mark.parametrize("run", [rows, without_gradients, last])
def test_overwritten_rows_pass_no_gradient(run):
    module = Lists(run).eval()
    g = traced(Lists, module, 7)
    for b, S in ((3, 8), (5, 11)):
        x = torch.randn(b, S, 5)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(x)
        assert cg.matmul_flops(g, B=b, S=S) == counter.get_total_flops()
        with torch.no_grad():
            peak = real_peak(lambda x=x: module(x), x, *module.parameters())
        assert cg.peak_memory(g, B=b, S=S) == peak


@pytest.mark.parametrize("make", [
    Neighbours, *(pytest.param(m, marks=pytest.mark.long) for m in (Recurrent, BothWays, Chunks, Nested, Selective)),
])  # fmt: skip
def test_loop_traces_keep_the_laws(make):
    for layout in (torch.Tensor.contiguous, transposed):
        testing.check(traced(make, make().eval(), layout=layout), **sizes(make, 8))


@pytest.mark.parametrize("make", [Selective, pytest.param(Recurrent, marks=pytest.mark.long)])
def test_joined_lists_inherit_the_placement_of_elements(make):
    graph = traced(make, make().eval(), layout=transposed)
    local = cg.parallelize(graph, dp=3)
    testing.check_sharded(graph, local, B=3, S=8)
    assert not any("all_gather" in op.name for op in local.walk())


class Loss(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x).pow(2).mean()


@pytest.mark.parametrize("make", [Recurrent, *(pytest.param(m, marks=pytest.mark.long) for m in (
    Chunks, Layers, Nested, SideBySide, Rows, Selective, Pieces, Decoder))])  # fmt: skip
def test_derived_loop_step_has_torchs_matmuls(make):
    loss = Loss(make())
    step = cg.training_step(traced(make, loss))
    for S in (12, 20):
        x = torch.randn(shaped(make, S))
        with FlopCounterMode(display=False) as counter:
            loss(x).backward()
        assert cg.matmul_flops(step, **sizes(make, S)) == counter.get_total_flops()


class Turns(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x):
        return self.run(x)


def left(x):
    total = torch.zeros_like(x[:, 0])
    for i in range(x.shape[1]):
        total = total + x[:, i]
        if i == 3:
            break
    return total


def numbered(x):
    return torch.stack([x[:, i] * (i + 1) for i in range(x.shape[1])], 1)


def counted(x):
    outs = [x[:, i] * 2 for i in range(x.shape[1])]
    return torch.stack(outs, 1) / len(outs)


def growing(x):
    return torch.stack([x[:, : i + 1].sum(1) for i in range(x.shape[1])], 1)


def handed(x):
    y = torch.zeros_like(x)
    for i in range(1, x.shape[1]):
        y[:, i] = y[:, i - 1] * 0.5 + x[:, i]
    return y


def by_length(layer, x):
    """Take another branch for few positions, such as the sizes at which loops are detected."""
    h = torch.zeros_like(x[:, 0])
    for i in range(x.shape[1]):
        h = torch.tanh(x[:, i] + h)
    return layer(h) if x.shape[1] > 9 else h


def test_branches_follow_the_example_sizes():
    long, short = (traced(Lists, Lists(by_length).eval(), S) for S in (11, 7))
    assert (cg.matmul_flops(long, B=B, S=13), cg.matmul_flops(short, B=B, S=7)) == (B * 2 * 5 * 5, 0)
    for g, S in ((long, 7), (short, 13)):
        with pytest.raises(cg.BindingError, match="against the assumption 'S"):
            cg.flops(g, B=B, S=S)


def halfway(layer, x):
    """Query the length in all iterations but the first."""
    h = layer(x[:, 0])
    for i in range(x.shape[1]):
        h = h + x[:, i]
        if i:
            h = h * 2 if x.shape[1] > 5 else h
    return h


def test_size_guards_of_later_iterations_are_assumed():
    g = traced(Lists, Lists(halfway).eval(), 12)
    assert [r.text for r in g.relations.relations] == ["S > 5"]
    with pytest.raises(cg.BindingError, match="against the assumption 'S > 5'"):
        cg.flops(g, B=B, S=4)


def test_loop_detection_adds_no_assumptions():
    for b in (8, 9, 16):
        g = trace(Recurrent().eval(), torch.zeros(b, 12, 5), dims=[("B", "S", None)])
        assert not g.relations.relations


def by_chunks(layer, x):
    """Loop over chunks if there are few."""
    total = layer(x[:, 0])
    for i in range(0, x.shape[1] if x.shape[1] < 9 else 0, 4):
        total = total + x[:, i]
    return total


def test_loops_with_too_few_iterations_are_refused():
    with pytest.raises(
        cg.UnsupportedError, match=r"and has too few iterations at the given sizes .2., expected at least 3"
    ):
        traced(Lists, Lists(by_chunks).eval(), 8)


def thirds(x):
    outs = []
    for i in range(x.shape[1]):
        outs.append(torch.tanh(x[:, i]))
    return torch.stack(outs[::3], 1).sum(1)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (left, "iterates over a size, and is left before its last iteration; leave this axis unnamed"),
        (numbered, r"'mul.i\d' has scalars \(None, \d\), 'mul.i\d' has"),
        (counted, "its iterations differ at other sizes: 'div' has scalars"),
        (thirds, "'stack' reads .* of one block"),
        (growing, "expected at least 3 consecutive equal blocks"),
        (handed, "'select.*' reads 'zeros_like', parts of which other iterations have written"),
    ],
)
def test_differing_iterations_are_refused(run, why):
    with pytest.raises(cg.UnsupportedError, match=rf"test_trace_loops\.py:\d+, in .*for i in range.*{why}"):
        traced(Turns, Turns(run), 7)
