"""A parameter keeps its identity whatever a program does to it during a run, or its gradient is refused."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.functional import linear
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, vector_to_parameters

import costgraph as cg
from costgraph.torch import trace


class Net(nn.Module):
    """Two layers; the forward pass modifies the parameters of the second."""

    def __init__(self, touch=None, use=None, prepare=None, square=False):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4 if square else 8), nn.Linear(4 if square else 8, 4)
        self.touch, self.use = touch, use
        if prepare is not None:
            prepare(self)

    def forward(self, x):
        if self.touch is not None:
            self.touch(self, x)
        h = self.a(x).relu()
        return (self.b(h) if self.use is None else self.use(self.b, h)).square().mean()


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def without_gradients(f):
    return torch.no_grad()(lambda m, x: f(m.b))


def rebound(value):
    def touch(m, x):
        m.b.weight.data = value(m)

    return touch


def assigned(value):
    def touch(m, x):
        m.b.weight = value(m)

    return touch


def swapped(m, x):
    torch.utils.swap_tensors(m.b.weight, nn.Parameter(torch.zeros(4, 8)))


def exchanged(m, x):
    m.a.weight, m.b.weight = m.b.weight, m.a.weight


def frozen(m, x):
    m.b.weight.requires_grad = False


def replaced_by_a_product(m, x):
    weight = m.b._parameters.pop("weight")
    m.b.__dict__["weight"] = weight * 1.5


def in_cache(m, x):
    with parametrize.cached():
        return m.b.weight


def loaded(assign, change=lambda v: v):
    return lambda m, x: m.b.load_state_dict({k: change(v) for k, v in m.b.state_dict().items()}, assign=assign)


def called_with(values):
    return lambda b, h: functional_call(b, values(b), (h,))


def of_parameters(change):
    return called_with(lambda b: {k: change(v) for k, v in b.named_parameters()})


def doubled(m):
    parametrize.register_parametrization(m.b, "weight", Doubled())


#: Module constructors, because traces share the tensors of their file.
made = partial(partial, Net)

#: No change, or one visible to a step: the derived backward pass has the gradients of the traced one.
SAME = {
    "to the device": made(lambda m, x: m.b.to(x.device)),
    "to the format": made(lambda m, x: m.b.to(x.dtype)),
    "to a tensor": made(lambda m, x: m.b.to(x)),
    "float": made(lambda m, x: m.b.float()),
    "float of all": made(lambda m, x: m.float()),
    "type": made(lambda m, x: m.b.type(torch.float32)),
    "cpu": made(lambda m, x: m.b.cpu()),
    "_apply": made(lambda m, x: m.b._apply(lambda t: t.contiguous())),
    "weight to": made(use=lambda b, h: linear(h, b.weight.to(h.device), b.bias.float())),
    "data of itself": made(rebound(lambda m: m.b.weight.data)),
    "data in place": made(lambda m, x: m.b.weight.data.clamp_(-1, 1)),
    "in place": made(without_gradients(lambda b: b.weight.mul_(2))),
    "copied into": made(without_gradients(lambda b: b.weight.copy_(torch.zeros(4, 8)))),
    "initialized again": made(lambda m, x: m.b.reset_parameters()),
    "loaded": made(loaded(assign=False)),
    "assigned to itself": made(assigned(lambda m: m.b.weight)),
    "requires_grad_": made(lambda m, x: m.b.requires_grad_()),
    "frozen": made(frozen),
    "frozen module": made(lambda m, x: m.b.requires_grad_(False)),
    "used without gradient": made(use=lambda b, h: linear(h, b.weight.data, b.bias)),
    "copy": made(use=lambda b, h: copy.copy(b)(h)),
    "functional_call": made(use=of_parameters(lambda v: v)),
    "functional_call, scaled": made(use=of_parameters(lambda v: v * 2)),
    "functional_call, detached": made(use=called_with(lambda b: b.state_dict())),
    "tied before": made(prepare=lambda m: setattr(m.b, "weight", m.a.weight), square=True),
    "tied inside": made(assigned(lambda m: m.a.weight), square=True),
    "exchanged": made(exchanged, square=True),
    "a product in its place": made(replaced_by_a_product),
    "parametrized": made(prepare=doubled),
    "parametrized, cached": made(in_cache, prepare=doubled),
    "weight norm": made(prepare=lambda m: parametrizations.weight_norm(m.b)),
    "spectral norm": made(prepare=lambda m: parametrizations.spectral_norm(m.b)),
    "an activation marked": made(use=lambda b, h: b(h.requires_grad_())),
}

#: Gradients of new leaves, which a traced step computes and a derived one refuses.
DERIVED = {
    "a new parameter": made(assigned(lambda m: nn.Parameter(torch.zeros(4, 8)))),
    "a parameter of a parameter": made(assigned(lambda m: nn.Parameter(m.b.weight))),
    "a parameter of its copy": made(assigned(lambda m: nn.Parameter(m.b.weight.detach().clone()))),
    "loaded by assignment": made(loaded(assign=True)),
    "loaded by assignment of copies": made(loaded(assign=True, change=torch.clone)),
    "deepcopy": made(use=lambda b, h: copy.deepcopy(b)(h)),
    "a stack of states": made(use=called_with(lambda b: {k: v[0] for k, v in stack_module_state([b])[0].items()})),
    "a leaf of zeros": made(use=lambda b, h: b(h) + torch.zeros(4, requires_grad=True)),
    "an activation cut off": made(use=lambda b, h: b(h.detach().requires_grad_())),
    "an input marked": made(lambda m, x: x.requires_grad_()),
}

#: A parameter has other data after the run than before it.
REFUSED = {
    "half": made(lambda m, x: m.b.half().float()),
    "double": made(lambda m, x: m.b.double().float()),
    "_apply to copies": made(lambda m, x: m.b._apply(torch.clone)),
    "to_empty": made(lambda m, x: m.b.to_empty(device="cpu")),
    "new data": made(rebound(lambda m: m.b.weight.data * 2)),
    "data of another": made(rebound(lambda m: m.a.weight.data), square=True),
    "swapped": made(swapped),
    "from a vector": made(lambda m, x: vector_to_parameters(parameters_to_vector(m.b.parameters()), m.b.parameters())),
    "made bfloat16 and used": made(use=lambda b, h: b.bfloat16()(h.bfloat16()).float()),
}

X, AXES = torch.zeros(2, 4), [("B", None)]


def gradients(net):
    """Return the names of parameters with gradients after a step, on a copy: some programs modify their modules
    permanently."""
    net = copy.deepcopy(net)
    parameters = dict(net.named_parameters())
    net(torch.randn(2, 4)).backward()
    return {name.replace(".", "/") for name, p in parameters.items() if p.grad is not None}


def names(graph):
    return {t.name for t in graph.gradients}


def step(net):
    return trace(net, X, dims=AXES, train=True)


@pytest.mark.parametrize("way", SAME)
def test_derived_gradients_equal_the_traced_step(way):
    net = SAME[way]()
    derived, traced = cg.backward(trace(net, X, dims=AXES)), step(net)
    assert names(derived) == names(traced) == gradients(net)
    assert cg.matmul_flops(derived) == cg.matmul_flops(traced)


@pytest.mark.parametrize("way", DERIVED)
def test_gradients_of_new_leaves_are_traced_not_derived(way):
    net = DERIVED[way]()
    forward = trace(net, X, dims=AXES)
    assert cg.matmul_flops(forward) > 0
    with pytest.raises(cg.UnsupportedError, match="during the run"):
        cg.backward(forward)
    assert names(step(net)) == gradients(net)


@pytest.mark.parametrize("way", REFUSED)
def test_parameters_with_replaced_data_have_no_gradient(way):
    net = REFUSED[way]()
    forward = trace(net, X, dims=AXES)
    assert cg.matmul_flops(forward) > 0
    with pytest.raises(cg.UnsupportedError, match=r"the data of parameter .* is replaced during the run"):
        cg.backward(forward)
    with pytest.raises(cg.UnsupportedError, match=r"the data of parameter 'b/weight' is replaced during the run"):
        step(net)
