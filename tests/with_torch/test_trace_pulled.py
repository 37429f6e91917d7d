"""The library's own backward pass of a traced forward pass, executed: its values are autograd's, whatever the calls."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from traced import adamw, differences

import costgraph as cg
from costgraph.torch import lower, trace


class Net(nn.Module):
    """Sums functions applied to a layer's output."""

    def __init__(self, before, functions):
        super().__init__()
        self.before, self.functions = before, nn.ModuleList(map(Called, functions))

    def forward(self, x):
        x = self.before(x)
        return sum((y * y.sin()).mean() for y in (f(x) for f in self.functions))


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def zero(layer):
    """Return a layer with zero output for any input."""
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer


def scaled(x):
    """Return rows scaled by a detached factor."""
    with torch.no_grad():
        scale = (x * x).sum(-1, keepdim=True)
    return x / (1 + scale)


def switched(x):
    """Return rows scaled by a factor computed with gradients switched off by function calls instead of blocks."""
    torch.set_grad_enabled(False)
    scale = (x * x).sum(-1, keepdim=True)
    torch.set_grad_enabled(True)
    return x / (1 + scale)


@torch.set_grad_enabled(False)
def shifted(x):
    """Return a tensor computed without gradients, with a nested part that has them."""
    with torch.enable_grad():
        part = x.sin()
    return part * (x * x).exp()


def inferred(x):
    """Return a product with a tensor from inference mode."""
    with torch.inference_mode():
        seen = x.cos()
    return x * seen.clone()


def recomputed(x):
    """Return a checkpointed result, by torch's reentrant variant, which contains a no_grad block."""
    return checkpoint(lambda y: y.sin() * y.cos().detach(), x, use_reentrant=True, preserve_rng_state=False)


class Doubled(torch.autograd.Function):
    """States a gradient that is twice the true one."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def written(x, places, values):
    """Return a copy with some elements overwritten."""
    y = x * 1
    y[places] = values
    return y


def gated(x):
    """Return a copy with one half multiplied by the other, and by itself."""
    y = x * 1
    y[:, :3].mul_(x[:, 3:])
    y[:, :3].square_()
    return y


def numbered(x):
    """Return a copy with some columns set to constants."""
    y = x * 1
    y[:, 1], y[:, 2:4] = 2.0, 3
    y[:, 5].zero_()
    return y.cos() + y


def drawn(x):
    """Return a copy with one random column."""
    y = x * 1
    y[:, 1].uniform_(0.5, 0.5)
    return y


def padded(x):
    """Return rows of a computed table with a padding row, which has no gradient."""
    return functional.embedding(3 - torch.arange(4).view(2, 2), x, padding_idx=2)


def picked():
    """Return two positions in reverse order."""
    return 3 - torch.arange(2)


ROWS, IMAGES = (7, 6), (2, 3, 8, 10)
INSIDE = {"padding": 1, "count_include_pad": False}


def cases():
    """Return a layer, its input, and functions on its output; new ones, as traces share all tensors in their file."""
    return {
    "angles": (nn.Linear(6, 6), ROWS, [
        torch.tan, torch.atan, lambda x: (0.9 * x.tanh()).acos(), lambda x: (0.9 * x.tanh()).asin(),
        lambda x: torch.atan2(x, x * x + 1),
    ]),
    "powers and logarithms": (nn.Linear(6, 6), ROWS, [
        torch.exp2, torch.erfc, lambda x: (x * x + 1).log2(), lambda x: (x * x + 1).log10(),
        lambda x: x.sigmoid().logit(), lambda x: (x * x + 1) ** -2,
    ]),
    "bounds": (nn.Linear(6, 6), ROWS, [
        lambda x: x.clamp(-0.3, 0.5), lambda x: x + x.ceil() * x.trunc(), lambda x: torch.remainder(x, 0.7),
        lambda x: torch.fmod(x, 0.7) + torch.div(x, 0.3, rounding_mode="floor"), nn.PReLU(),
    ]),
    "bounds that are met": (zero(nn.Linear(6, 6)), ROWS, [
        lambda x: x.clamp(min=0) + 1, lambda x: x.clamp(max=0) + 2, lambda x: x.clamp_min(0) + 3,
        lambda x: x.clamp(0, 1) + 4, lambda x: x.clamp_max(0) + 5, lambda x: x.clamp(min=2 * x) + 6,
        lambda x: torch.maximum(x, 2 * x) + 7,
    ]),
    "what is let go": (nn.Linear(6, 6), ROWS, [
        lambda x: x + (x.round() - x).detach(), lambda x: (x.sin() - x.roll(1, 0).detach()).square(),
        lambda x: x * x.detach()[:, :1], lambda x: x.data * x, scaled,
        lambda x: x.detach().clone().add_(1) * x + x.detach().mul(2),
        switched, lambda x: x + shifted(x), inferred,
    ]),
    "what is computed again": (nn.Linear(6, 6), ROWS, [recomputed]),
    "gates": (nn.Linear(6, 6), ROWS, [
        functional.hardswish, functional.hardsigmoid, functional.mish,
        lambda x: functional.hardswish(x + 1, inplace=True),
    ]),
    "bends with numbers of their own": (nn.Linear(6, 6), ROWS, [
        lambda x: functional.leaky_relu(x, 0.2), lambda x: functional.elu(x, 0.5), lambda x: functional.celu(x, 0.5),
        functional.selu, lambda x: functional.softplus(x, 2.0, 10.0), lambda x: functional.hardtanh(x, -0.2, 0.3),
        lambda x: functional.softplus(x, 3.0, 0.2),
        lambda x: functional.hardshrink(x, 0.1), lambda x: functional.softshrink(x, 0.2),
        lambda x: functional.threshold(x, 0.1, 0.2), functional.glu, functional.elu, functional.leaky_relu,
    ]),
    "shares of sums": (nn.Linear(6, 6), ROWS, [
        lambda x: x.logsumexp(-1), lambda x: x.logsumexp((0, 1), keepdim=True) * x, lambda x: x.logsumexp(0) + 1,
        lambda x: torch.vdot(x[0], x[1]) * x,
        lambda x: torch._weight_norm(x, x[:, :1].exp(), 0), lambda x: torch._weight_norm(x, x[:1], 1),
    ]),
    "other functions": (nn.Linear(6, 6), ROWS, [
        torch.asinh, lambda x: (x.exp() + 1).acosh(), lambda x: (0.9 * x.tanh()).atanh(), lambda x: x.frac(),
        lambda x: torch.hypot(x, x + 1), lambda x: torch.logaddexp(x, x * x), lambda x: torch.xlogy(x, x * x + 1),
        torch.nan_to_num, lambda x: torch.special.entr(x.exp()),
    ]),
    "functions in other steps": (nn.Linear(6, 6), ROWS, [
        torch.sinc, torch.sinh, torch.cosh, lambda x: (0.9 * x.tanh()).erfinv(), lambda x: torch.copysign(x, x.cos()),
    ]),
    "norms": (nn.Linear(6, 6), ROWS, [
        lambda x: x.norm(dim=-1), lambda x: x.norm(dim=0, keepdim=True), lambda x: torch.norm(x) * x,
        lambda x: functional.normalize(x, dim=0), lambda x: functional.pairwise_distance(x, x.roll(1, 0)),
        *(lambda x, n=n: torch.linalg.vector_norm(x, n, dim=1) for n in (1, 3, 1.5, 0.5, torch.inf, -torch.inf)),
        lambda x: torch.linalg.vector_norm(x, torch.inf) * x, lambda x: torch.linalg.vector_norm(x, 4) * x,
    ]),
    "products and extrema": (nn.Linear(6, 6), ROWS, [
        lambda x: x.prod(-1), lambda x: x.prod(0, keepdim=True) * x, lambda x: x.prod() + x, lambda x: x.max() * x,
        lambda x: x.min() - x, lambda x: x.amax((0, 1)), lambda x: x.max(0)[0], lambda x: x.mT.sort(0)[0],
        lambda x: x.round().max() * x, lambda x: x * torch.ones_like(x.mT).mT,
    ]),
    "norms of nothing": (zero(nn.Linear(6, 6)), ROWS, [
        lambda x: x.norm(dim=-1) + 1, lambda x: torch.linalg.vector_norm(x, dim=(0, 1)) + 2,
    ]),
    "softmax of hidden rows": (nn.Linear(6, 6), ROWS, [
        lambda x: torch._safe_softmax(torch.where(torch.arange(7)[:, None] % 3 == 0, -torch.inf, x), -1),
    ]),
    "powers": (nn.Linear(6, 6), ROWS, [
        lambda x: x**2, lambda x: x**3, *(lambda x, n=n: (x * x + 1) ** n for n in (-2, -1, -0.5, 0.5, 4)),
    ]),
    "scaled sums": (nn.Linear(6, 6), ROWS, [
        lambda x: torch.add(x, x.sin(), alpha=0.3), lambda x: torch.sub(x, x.cos(), alpha=2),
        lambda x: torch.addcmul(x, x.sin(), x.cos()), lambda x: torch.addcmul(x, x.sin(), x.cos(), value=0.3),
        lambda x: torch.addcdiv(x, x, x * x + 1), lambda x: torch.addcdiv(x, x, x * x + 1, value=0.3),
    ]),
    "losses": (nn.Linear(6, 6), ROWS, [
        lambda x: functional.mse_loss(x, torch.ones_like(x)),
        lambda x: functional.mse_loss(x, torch.ones_like(x), reduction="none"),
        lambda x: functional.smooth_l1_loss(x, torch.ones_like(x), beta=0.4),
        lambda x: functional.huber_loss(x, torch.ones_like(x), delta=0.4, reduction="sum"),
        lambda x: functional.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3)),
        lambda x: functional.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.3)),
        lambda x: functional.binary_cross_entropy(x.sigmoid(), x.cos().square()),
        lambda x: functional.binary_cross_entropy_with_logits(x, x.cos().square()),
        functional.logsigmoid, functional.glu,
    ]),
    "classes": (nn.Linear(6, 6), ROWS, [
        lambda x: functional.cross_entropy(x, torch.arange(7) % 6, reduction="none"),
        lambda x: functional.cross_entropy(x, torch.arange(7) % 6, reduction="sum"),
        lambda x: functional.cross_entropy(x[None, :, :5], torch.arange(5)[None] + 1),
        lambda x: functional.cross_entropy(x, torch.arange(7) % 6, weight=torch.arange(6) + 0.5),
        lambda x: functional.cross_entropy(x, torch.arange(7) % 6, ignore_index=2),
    ]),
    "turned": (nn.Linear(6, 6), ROWS, [
        lambda x: x.flip(0) * x, lambda x: x.flip(0, 1) * x, lambda x: x.rot90(1, (0, 1)).T * x.rot90(2, (0, 1)),
        lambda x: x.rot90(3, (0, 1)), lambda x: x.diag_embed() * 2,
        lambda x: functional.channel_shuffle(x[..., None, None], 2),
    ]),
    "variances": (nn.Linear(6, 6), ROWS, [
        lambda x: x.var(-1), lambda x: x.std(0, keepdim=True), lambda x: torch.var(x, dim=(0, 1), correction=0),
        lambda x: torch.std(x, dim=1, correction=2), lambda x: torch.stack(torch.var_mean(x, dim=0)),
        lambda x: torch.var_mean(x, dim=1)[1], lambda x: torch.std_mean(x, dim=1, keepdim=True)[0],
    ]),
    "running products": (nn.Linear(6, 6), ROWS, [lambda x: x.cumprod(0), lambda x: torch.cumprod(x, 1),
        lambda x: torch.addr(x, x[:, 0], x[1], alpha=2),
    ]),
    "odds": (nn.Linear(6, 6), ROWS, [
        lambda x: functional.soft_margin_loss(x, x.detach().sign()), nn.PReLU(6),
        lambda x: functional.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3), weight=torch.full_like(x, 2)),
        lambda x: functional.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.3), pos_weight=x.new_ones(6) * 3),
    ]),
    "triangles": (nn.Linear(6, 6), ROWS, [lambda x: x.tril(-1), lambda x: x.triu(2), lambda x: (x + 1).tril_()]),
    "orders": (nn.Linear(6, 6), ROWS, [
        lambda x: x.max(0).values, lambda x: x.sort(0).values, lambda x: x.topk(3, 0).values,
        lambda x: x.sort(1, descending=True).values, lambda x: x.min(0).values + x.min(1, keepdim=True).values,
        lambda x: x.topk(3, 0, largest=False).values + x.gather(0, x.argmin(0, keepdim=True)),
    ]),
    "rows": (nn.Linear(6, 6), ROWS, [
        lambda x: x.index_add(1, picked(), x[:, 2:4] * 2), lambda x: x.index_add(0, picked(), x[2:4], alpha=3),
        lambda x: x.index_copy(1, picked(), x[:, 2:4] * 2), lambda x: x.index_fill(1, picked(), 2.0),
        lambda x: written(x, (slice(None), picked()), x[:, 2:4] * 2), lambda x: written(x, picked(), x[2:4].sin()),
        lambda x: written(x, slice(2, 5), x[:3].sin()), padded,
    ]),
    "what is written over": (nn.Linear(6, 6), ROWS, [gated, numbered]),
    "places": (nn.Conv2d(3, 8, 1), IMAGES, [
        lambda x: x.roll((-3, 2), (2, 3)), nn.PixelShuffle(2), nn.PixelUnshuffle(2),
        nn.ReflectionPad2d((1, 2, 3, 0)), nn.ReplicationPad2d((1, 2, 3, 0)), nn.UpsamplingNearest2d(scale_factor=2),
    ]),
    "windows": (nn.Conv2d(3, 3, 1), IMAGES, [
        nn.Unfold((3, 2), padding=(1, 0), stride=(1, 2), dilation=(2, 1)), nn.Unfold(2, stride=2),
        nn.AvgPool2d(3, 1, **INSIDE), nn.AvgPool2d(3, 2, **INSIDE),
    ]),
}  # fmt: skip


#: Cases with as many FLOPs as a step that torch runs.
AS_MANY = {
    "bends with numbers of their own", "shares of sums", "other functions", "bounds that are met", "gates", "norms",
    "norms of nothing", "orders", "powers", "rows", "softmax of hidden rows", "turned", "variances",
    "what is let go",
}  # fmt: skip


def pulled(g, net, x):
    """Return the graph with its backward pass, after a comparison of its values with autograd's."""
    derived = cg.backward(g)
    with derived:
        derived.outputs.extend(derived.gradients.values())
    low = lower(derived)
    low.load_state_dict(net.state_dict(), strict=False)
    with torch.no_grad():
        loss, *gradients = low(x)
    expected = net(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    wanted = {n.replace(".", "/"): p.grad for n, p in net.named_parameters()}
    assert {t.name for t in derived.gradients} == wanted.keys()
    for t, gradient in zip(derived.gradients, gradients, strict=True):
        torch.testing.assert_close(gradient, wanted[t.name], rtol=1e-4, atol=1e-5)
    return derived


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # correct for a checkpoint
@pytest.mark.parametrize("name", list(cases()))
def test_derived_gradients_of_a_trace_equal_autograd(name):
    before, sizes, functions = cases()[name]
    torch.manual_seed(3)
    net, x = Net(before, functions), torch.randn(sizes)
    g = trace(net, x)
    assert not [op.name for op in g.walk() if op.kind.name == "custom_call"]
    derived = pulled(g, net, x)
    net.zero_grad()
    seen = trace(net, x, train=True)
    assert cg.matmul_flops(derived, count="full") == cg.matmul_flops(seen, count="full")
    if name in AS_MANY:
        assert cg.flops(derived) == cg.flops(seen)


class Parts(nn.Module):
    """Writes slices of tensors, as DeepSeek does for heads, and reads them whole."""

    def __init__(self):
        super().__init__()
        self.plain, self.turned = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x):
        a, b = self.plain(x), self.turned(x)
        heads = a.new_empty(*x.shape[:-1], 7)
        heads[..., :4] = a
        heads[..., 4:] = b
        rows = torch.zeros_like(heads)
        rows[:, 1] = heads[:, 0]
        rows[:, 2:4] = heads[:, 1:3] * 2
        rows[:, 2:4] = rows[:, 2:4] * 0.5
        every = heads * 1.5
        every[..., ::2].mul_(2.0)
        return (heads.sin() * heads + rows.cos() + every.sin()).mean()


def test_tensors_written_in_slices_are_read_whole(tmp_path):
    torch.manual_seed(3)
    net, x = Parts(), torch.randn(5, 4, 6)
    g = trace(net, x)
    assert not [op.name for op in g.walk() if op.kind.name == "custom_call"]
    cg.save(g, tmp_path / "parts.json")
    assert cg.peak_memory(cg.load(tmp_path / "parts.json")) == cg.peak_memory(g)
    derived = pulled(g, net, x)
    assert cg.matmul_flops(derived) == cg.matmul_flops(trace(net, x, train=True))
    named = trace(net, x, dims=[("B", None, None)])
    assert cg.bytes_moved(cg.apply_precision(named, "bf16")) == cg.bytes_moved(
        trace(net.bfloat16(), x.bfloat16(), dims=[("B", None, None)])
    )


class Beside(nn.Module):
    """Two halves named before either is written: neither aliases the other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x) * 2
        low, high = y[:, :3], y[:, 3:]
        low.mul_(3.0)
        high.sin_()
        return (low * high).mean() + y.cos().mean()


def test_writes_do_not_alias_adjacent_slices():
    torch.manual_seed(3)
    net, x = Beside(), torch.randn(5, 6)
    g = trace(net, x, dims=[("B", None)])
    low = lower(g, B=5)
    low.load_state_dict(net.state_dict())
    torch.testing.assert_close(low(x), net(x))


def test_custom_autograd_functions_are_refused_in_backward():
    """A forward pass does not reveal it; there is no error if no gradient arrives, or none passes."""
    refused = "backward: 'Doubled' of graph 'Net' has a gradient that Doubled of the program defines, expected declared"
    g = trace(Net(nn.Linear(6, 6), [Doubled.apply]), torch.zeros(ROWS))
    with pytest.raises(cg.UnsupportedError, match=refused):
        cg.backward(g)
    assert cg.param_bytes(cg.apply_precision(g, "bf16")) == cg.param_bytes(g) / 2
    torch.manual_seed(3)
    net, x = (
        Net(nn.Linear(6, 6), [lambda x: x * Doubled.apply(x).detach(), lambda x: x * scaled(Doubled.apply(x))]),
        ROWS,
    )
    with pytest.raises(cg.UnsupportedError, match=refused):
        cg.backward(trace(net, torch.zeros(x)))
    net, x = Net(nn.Linear(6, 6), [lambda x: x * Doubled.apply(x).detach()]), torch.randn(ROWS)
    pulled(trace(net, x), net, x)


class Cell(nn.Module):
    """Three steps of a cell with gates written in place into adjacent slices."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(5, 7)

    def forward(self, x):
        state = None
        for _ in range(3):
            state = self.cell(x, state)
        h, c = state if isinstance(state, tuple) else (state, state)
        return (h * c.sin()).mean()


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_in_place_gates_match_a_traced_step(kind):
    torch.manual_seed(3)
    net, x = Cell(kind), torch.randn(3, 5)
    derived = pulled(trace(net, x), net, x)
    net.zero_grad()
    assert cg.flops(derived) == cg.flops(trace(net, x, train=True))
    named = trace(net, x, dims=[("B", None)])
    assert not [op.name for op in named.walk() if op.kind.name == "custom_call"]
    assert cg.flops(cg.backward(named), B=3) == cg.flops(derived)


class Largest(nn.Module):
    """Maxima along an axis other than the last, whose gradients are scattered into zeros."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 7)

    def forward(self, x):
        y = self.layer(x)
        y[:, 2:4] = y[:, :2] * 2
        return (y.max(1).values * y.cummax(1).values[:, 0]).square().mean()


class Rendered(nn.Module):
    """Weights of points along rays by transmittance, in both directions, as in NeRF."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        seen = self.layer(x).sigmoid().squeeze(-1)
        through = torch.cumprod(1 - seen + 1e-6, 1)
        return ((seen * through).flip(1) * through).sum(1).square().mean()


@pytest.mark.parametrize(("kind", "length"), [(Largest, 13), (Rendered, 113)])
def test_gradients_along_an_open_inner_axis_match_a_step(kind, length):
    net = kind()
    step = trace(net, torch.zeros(3, 11, 5), dims=[("B", "S", None)], train=True, optimizer=adamw)
    peak, flops = differences(step, net, [torch.randn(2, length, 5)], adamw(net.parameters()), B=2, S=length)
    assert flops == 0
    assert abs(peak) < 100


class Shifted(nn.Module):
    """Indexes from the end by an open size, after some leading positions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        y = self.layer(x)
        before = torch.cat([y.new_zeros(x.shape[0], 2, 5), y], 1)
        return (before[:, -x.shape[1] :].sin() * before[:, : x.shape[1]]).mean()


def test_open_indexes_from_the_end_match_a_step():
    net = Shifted()
    step = trace(net, torch.zeros(3, 11, 5), dims=[("B", "S", None)], train=True, optimizer=adamw)
    x = torch.randn(2, 13, 5)
    peak, flops = differences(step, net, [x], adamw(net.parameters()), B=2, S=13)
    assert flops == 0
    assert abs(peak) < 100


def test_size_dependent_slope_has_no_derived_gradient():
    """Its slope differs at each size and has no library function."""
    net = Net(nn.Linear(6, 6), [lambda x: functional.leaky_relu(x, 1 / x.shape[0])])
    g = trace(net, torch.zeros(ROWS), dims=[("N", None)])
    low, x = lower(g, N=5), torch.randn(5, 6)
    low.load_state_dict(net.state_dict(), strict=False)
    torch.testing.assert_close(low(x), net(x))
    with pytest.raises(cg.UnsupportedError, match=r"function 'leaky_relu_negative_slope_.*' declares no gradient"):
        cg.backward(g)


def test_cumprod_in_enable_grad_equals_autograd():
    """The stand-in of torch's function is not attributed to the program."""

    def inside(x):
        with torch.enable_grad():
            return x.requires_grad_().cumprod(1) * x

    net, x = Net(nn.Linear(6, 6), [inside]), torch.randn(ROWS)
    pulled(trace(net, x), net, x)


@pytest.mark.parametrize("function", [torch.square, torch.cos, torch.erf, lambda x: (x * x + 1) ** -2])
def test_backward_temporaries_live_like_in_autograd(function):
    net, x = Net(nn.Linear(6, 67), [lambda x: function(x).mean()]), torch.zeros(5, 6)
    derived = cg.backward(trace(net, x, dims=[("B", None)]))
    seen = trace(net, x, dims=[("B", None)], train=True)
    assert abs(cg.peak_memory(derived, B=71) - cg.peak_memory(seen, B=71)) < 100


def test_tensor_literals_are_kept_in_the_lowered_graph():
    net = Net(nn.Linear(6, 6), [lambda x: x * torch.tensor([2.0, 3, 5, 7, 11, 13])])
    x = torch.randn(ROWS)
    pulled(trace(net, x), net, x)


def test_random_columns_have_no_gradient():
    net, x = Net(nn.Linear(6, 6), [drawn]), torch.randn(ROWS)
    pulled(trace(net, x), net, x)


class Bounded(nn.Module):
    """Weights and states that are modified in place without autograd's knowledge: gradients pass unchanged."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
            self.weight[0].mul_(0.9)
        self.weight.data.mul_(0.9)
        y = self.layer(x) * 1
        y.data.clamp_(min=0.1)
        z = y @ self.weight
        z.detach()[:, :2].zero_()
        with torch.no_grad():
            z[:, 2:4] = 3 - z[:, 4:].tanh()
            self.mean.lerp_(y.mean(0), 0.1)
        return z.sin().mean() + (self.layer(x) * self.mean).mean()


def test_no_grad_writes_leave_gradients_unchanged():
    torch.manual_seed(3)
    net, x = Bounded(), torch.randn(5, 6)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    g = trace(net, x, dims=[("B", None)])
    assert cg.flops(cg.backward(g)) == cg.flops(trace(net, x, dims=[("B", None)], train=True))
    low = lower(with_gradients := cg.backward(trace(net, x)))
    assert len(with_gradients.gradients) == 3
    pulled(trace(net, x), net, x)
    net.load_state_dict(before)
    low.load_state_dict(before)
    torch.testing.assert_close(low(x), net(x))
    torch.testing.assert_close(low.state_dict()["weight"], net.weight.detach())


class Coded(nn.Module):
    """A vector-quantized autoencoder: each position of an image is replaced by the nearest code and decoded."""

    def __init__(self):
        super().__init__()
        self.down, self.codes, self.up = nn.Conv2d(3, 5, 4, 2, 1), nn.Embedding(7, 5), nn.ConvTranspose2d(5, 3, 4, 2, 1)

    def forward(self, x):
        y = self.down(x).permute(0, 2, 3, 1)
        codes = self.codes((y.reshape(-1, 5) @ self.codes.weight.T).argmin(1)).view(y.shape)
        return functional.mse_loss(self.up(codes.permute(0, 3, 1, 2)), x) + functional.mse_loss(codes, y.detach())


def test_losses_of_always_equal_sizes_are_declared():
    net, x = Coded(), torch.randn(2, 3, 8, 12)
    g = trace(net, x, dims=[("B", None, "H", "W")])
    assert not [op.name for op in g.walk() if op.kind.name == "custom_call"]
