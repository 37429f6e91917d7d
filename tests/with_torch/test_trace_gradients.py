"""Gradient kernels as declared ops: run in place of torch's calls, they reproduce autograd's values."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import costgraph as cg
from costgraph.torch import lower, trace
from costgraph.transforms.rewrite import Rewriter


class Declared(Rewriter):
    """Copies a traced graph without the recorded calls, so that the declared ops run."""

    replays = False


class Net(nn.Module):
    """A layer between two others, whose inputs and parameters need gradients."""

    def __init__(self, layer, before=None):
        super().__init__()
        self.before, self.layer = before, layer

    def forward(self, x, *more):
        x = x if self.before is None else self.before(x)
        made = self.layer(x, *more)
        return made if not made.ndim else (made * made.sin()).mean()


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def attend(**options):
    def run(x):
        q, k, v = (x * n for n in (1.0, 2.0, 0.5))
        return functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True, **options)

    return Function(run)


def entropy(**options):
    return Function(lambda x, y: functional.cross_entropy(x, y, **options))


def images():
    return nn.Conv2d(3, 6, 1)


class Experts(nn.Module):
    """Multiplies each row by one of three expert matrices."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 20, 16))

    def forward(self, x, ends):
        return functional.grouped_mm(x, self.weights.transpose(1, 2), offs=ends)


X, ROWS = (2, 3, 8, 10), (7, 5)
TARGETS = torch.tensor([1, 4, 0, 2, 2, 3, 0])
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)


def cases():
    """Return layers, their preceding layers and their inputs; new ones, as traces share the tensors of their file."""
    return {
    "convolution": (nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(3, 3, 1), [X]),
    "convolution of groups": (nn.Conv2d(6, 4, (1, 2), dilation=2, groups=2, bias=False), images(), [X]),
    "convolution of data": (nn.Conv1d(3, 4, 3), None, [(2, 3, 8)]),
    "layer norm": (nn.LayerNorm((3, 5)), nn.Linear(5, 5), [(7, 3, 5)]),
    "layer norm of data": (nn.LayerNorm(5), None, [ROWS]),
    "layer norm without parameters": (nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 5), [ROWS]),
    "layer norm without a shift": (nn.LayerNorm(5, bias=False), nn.Linear(5, 5), [ROWS]),
    "group norm": (nn.GroupNorm(3, 6), images(), [X]),
    "batch norm": (nn.BatchNorm2d(6), images(), [X]),
    "batch norm by running statistics": (nn.BatchNorm2d(6).eval(), images(), [X]),
    "softmax": (nn.Softmax(1), nn.Linear(5, 5), [ROWS]),
    "log_softmax": (nn.LogSoftmax(0), nn.Linear(5, 5), [ROWS]),
    "cross entropy": (entropy(), nn.Linear(5, 5), [ROWS, TARGETS]),
    "sum of cross entropies": (entropy(reduction="sum"), nn.Linear(5, 5), [ROWS, TARGETS]),
    "cross entropy without a class": (entropy(ignore_index=2), nn.Linear(5, 5), [ROWS, TARGETS]),
    "largest of windows": (nn.MaxPool2d(3, 2, 1), images(), [X]),
    "mean of windows": (nn.AvgPool2d(3, 2, 1), images(), [X]),
    "mean of parts": (nn.AdaptiveAvgPool2d((4, 2)), images(), [X]),
    "attention": (attend(), nn.Linear(10, 10), [X]),
    "causal attention": (attend(is_causal=True, scale=0.3), nn.Linear(10, 10), [X]),
    "experts": (Experts(), nn.Linear(16, 16), [(7, 16), ENDS]),
    "lookup": (Function(lambda x, y: x[y]), nn.Linear(5, 5), [ROWS, TARGETS]),
    "lookup in the last axis": (Function(lambda x, y: x[:, y[None, :3]]), nn.Linear(5, 5), [ROWS, TARGETS]),
    "lookup in two axes": (
        Function(lambda x, y: x[:, y[:4, None], y[None, :2]]), nn.Linear(10, 10), [(2, 5, 10), TARGETS],
    ),
    "written over": (
        Function(lambda x, y: torch.index_put(x, (y[:2], y[1:3]), x[2, :2])), nn.Linear(5, 5), [ROWS, TARGETS],
    ),
    "picked": (Function(lambda x, y: x.gather(0, y[:5].expand(3, 5))), nn.Linear(5, 5), [ROWS, TARGETS]),
    "largest": (Function(lambda x: x.topk(2)[0]), nn.Linear(5, 5), [ROWS]),
    "in order": (Function(lambda x: x.sort(descending=True)[0]), nn.Linear(5, 5), [ROWS]),
    "added to rows": (
        Function(lambda x, y: torch.zeros(5, 5).index_add(0, y, x)), nn.Linear(5, 5), [ROWS, TARGETS],
    ),
    "parts": (Function(lambda x: torch.mul(*x.view(7, 2, 2).unbind(1))), nn.Linear(5, 4), [ROWS]),
    "padded": (Function(lambda x: functional.pad(x, (1, 2, 0, 3), value=-0.5)), nn.Linear(5, 5), [ROWS]),
    "padded by nothing": (Function(lambda x: functional.pad(x, (0, 0))), nn.Linear(5, 5), [ROWS]),
    "cut and padded": (Function(lambda x: functional.pad(x, (-1, 2, -2, -1))), nn.Linear(5, 5), [ROWS]),
    "repeated": (Function(lambda x: x.repeat(2, 1, 3)), nn.Linear(5, 5), [ROWS]),
    "cut into all and nothing": (
        Function(lambda x: torch.cat([x[:, :5].sin(), x[:, 5:].cos()], 1)), nn.Linear(5, 5), [ROWS],
    ),
    "rolled": (Function(lambda x: x.roll((-3, 2), (2, 3))), images(), [X]),
    "blocks of pixels": (nn.PixelShuffle(2), nn.Conv2d(3, 8, 1), [X]),
    "pixels of blocks": (nn.PixelUnshuffle(2), images(), [X]),
    "below a diagonal": (Function(lambda x: x.tril(-1) + x.triu(2)), nn.Linear(5, 5), [ROWS]),
    "mean of windows without padding": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), images(), [X]),
    "grown": (nn.UpsamplingNearest2d(scale_factor=2), images(), [X]),
    "squares": (Function(lambda x: functional.mse_loss(x, torch.ones_like(x))), nn.Linear(5, 5), [ROWS]),
    "repeated once": (Function(lambda x: x.repeat(1, 1)), nn.Linear(5, 5), [ROWS]),
}  # fmt: skip


#: Cases whose rule another case covers.
ALIKE = (
    "layer norm of data", "layer norm without parameters", "layer norm without a shift", "log_softmax",
    "sum of cross entropies", "mean of windows without padding", "attention", "lookup in the last axis",
    "padded by nothing", "cut and padded", "repeated once", "pixels of blocks", "convolution of data",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in cases()]
)
def test_declared_gradient_kernels_equal_autograd(name):
    layer, before, given = cases()[name]
    torch.manual_seed(3)
    net = Net(layer, before)
    inputs = [torch.randn(g) if isinstance(g, tuple) else g for g in given]
    if before is None:
        inputs[0].requires_grad_()
    g = trace(net, *inputs, train=True)
    assert not [op for op in g.walk() if op.kind.name == "custom_call"]
    declared = Declared().run(g)
    with declared:
        declared.outputs.extend(declared.gradients.values())
    low = lower(declared)
    low.load_state_dict(net.state_dict(), strict=False)
    with torch.no_grad():
        loss, *gradients = low(*(x.clone() for x in inputs))
    expected = net(*inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    wanted = {n.replace(".", "/"): p.grad for n, p in net.named_parameters()}
    assert {t.name for t in g.gradients} == wanted.keys()
    for t, gradient in zip(g.gradients, gradients, strict=True):
        torch.testing.assert_close(gradient, wanted[t.name], rtol=1e-4, atol=1e-5)


class InPlace(nn.Module):
    """Overwrites tensors saved for gradients: torch keeps a copy, the library's backward pass writes elsewhere."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        h = self.first(x) + 9
        h /= h.sum(1, keepdim=True)
        h = functional.silu(h, inplace=True)
        return self.last(h.mul_(2.0)).mean()


def test_overwritten_operands_are_saved_for_gradients():
    net, x = InPlace(), torch.randn(11, 5)
    derived = cg.backward(trace(net, x))
    assert cg.matmul_flops(derived) == cg.matmul_flops(trace(net, x, train=True))
    with derived:
        derived.outputs.extend(derived.gradients.values())
    low = lower(derived)
    low.load_state_dict(net.state_dict())
    with torch.no_grad():
        _, *gradients = low(x)
    net(x).backward()
    for gradient, (_, p) in zip(gradients, net.named_parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad)


#: Functions with other constants than the library's: two that it can express, and others that it cannot.
NUMBERS = {
    "relu6": (functional.relu6, True),
    "masked": (lambda x: x.masked_fill(x > 0, -7.0), True),
    "leaky_relu": (lambda x: functional.leaky_relu(x, 0.2), False),
    "elu": (lambda x: functional.elu(x, 0.5), False),
    "softplus": (lambda x: functional.softplus(x, 2.0), False),
    "hardtanh": (lambda x: functional.hardtanh(x, -2.0, 3.0), False),
    "in place": (lambda x: (x + 0).masked_fill_(x > 0, -7.0), False),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_call_constants_are_kept_or_refused(name):
    function, kept = NUMBERS[name]
    x = torch.linspace(-9, 9, 23)
    g = trace(Function(function), x)
    torch.testing.assert_close(lower(g)(x), function(x))
    declared = Declared().run(g)
    if kept:
        torch.testing.assert_close(lower(declared)(x), function(x))
    else:
        with pytest.raises(cg.UnsupportedError, match="torch has no function"):
            lower(declared)


def test_running_statistics_are_updated_in_place():
    """Two more reads and writes per channel (5) than a batch norm without running statistics."""
    norm, x = nn.BatchNorm1d(5), torch.randn(7, 5)
    g = trace(norm, x)
    (op,) = (op for op in g.ops if op.kind.name == "kernel")
    assert [op.operands[i].name for i in op.kind.overwrites()] == ["running_mean", "running_var"]
    low = lower(g)
    low.load_state_dict(norm.state_dict())
    torch.testing.assert_close(low(x), norm(x))
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(low.state_dict()[name], norm.state_dict()[name])


class Dropping(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7, dtype=dtype), nn.Linear(7, 3, dtype=dtype)

    def forward(self, x):
        return self.last(functional.dropout(self.first(x), 0.1)).mean()


def test_dropout_masks_have_no_gradient_and_the_operand_dtype():
    x = torch.randn(11, 5)
    g, seen = trace(Dropping(), x), trace(Dropping(), x, train=True)
    derived = cg.backward(g)
    assert cg.flops(derived) == cg.flops(seen)
    assert abs(cg.peak_memory(derived) - cg.peak_memory(seen)) <= 4
    low, narrow = cg.apply_precision(g, "bf16"), trace(Dropping(torch.bfloat16), x.bfloat16())
    for count in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert count(low) == count(narrow)


class MaskedAttention(nn.Module):
    """An embedding of a mask that depends on an attention, which no gradient reaches."""

    def __init__(self):
        super().__init__()
        self.inner, self.embed = nn.Linear(8, 8), nn.Embedding(5, 8)

    def forward(self, x):
        heads = self.inner(x).unflatten(-1, (2, -1)).transpose(1, 2)
        x = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
        return self.embed((x[..., 0] > 0).long()).sum()


def test_statistics_of_gradient_free_attention_have_no_memory_format():
    derived = cg.backward(trace(MaskedAttention(), torch.zeros(3, 5, 8)))
    pulled = trace(MaskedAttention(), torch.zeros(3, 5, 8), train=True)
    assert abs(cg.peak_memory(derived) - cg.peak_memory(pulled)) < 64


class WrittenView(nn.Module):
    """Reads a view and its base after an in-place write into the view."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        x = self.inner(x) * 1
        view = x[0]
        view.mul_(2.0)
        return x[0].sin().sum() + x.sum() + view.sum()


def test_gradients_of_written_views_reach_their_base_in_its_full_size():
    derived = cg.backward(trace(WrittenView(), torch.zeros(2, 64, 16)))
    pulled = trace(WrittenView(), torch.zeros(2, 64, 16), train=True)
    assert abs(cg.peak_memory(derived) - cg.peak_memory(pulled)) < 64
