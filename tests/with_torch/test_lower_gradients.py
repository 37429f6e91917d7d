"""Gradients of random losses: the graph's own backward pass against autograd through the forward pass."""

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

torch = pytest.importorskip("torch")
from lowered import exact  # noqa: E402  # it imports torch

import costgraph as cg  # noqa: E402
from costgraph import testing  # noqa: E402
from costgraph.errors import CostGraphError  # noqa: E402
from costgraph.torch import trace  # noqa: E402
from costgraph.torch.lowering import lower, random_inputs  # noqa: E402

torch.set_num_threads(1)


def autograd_gradients(module, names, inputs):
    """Return autograd's gradients of the named inputs and parameters; for a stack, in layer order."""
    module.requires_grad_()
    for x in inputs.values():
        x.requires_grad_(x.is_floating_point())
    try:
        module(*inputs.values()).backward()
    except RuntimeError as refused:  # torch has no gradients for indices or freed tensors
        texts = ("out=", "does not require grad", "modified by an inplace operation")
        assume(not any(text in str(refused) for text in texts))
        raise
    params, out = dict(module.named_parameters()), {}
    for name in names:
        dotted = name.replace(".", "_").replace("/", ".")
        layers = [params[k] for k in params if k.rpartition(".")[0] == dotted] or [params.get(dotted)]
        out[name] = [inputs[name]] if name in inputs else layers
    return out


@settings(
    max_examples=25,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(testing.losses())
def test_gradients_of_drawn_losses(case):
    graph, point = case
    assume(all(op.kind.name not in ("dropout", "custom_call") for op in graph.walk()))
    try:
        back = cg.backward(graph)
    except CostGraphError:
        assume(False)
    assume(back.gradients)  # otherwise no gradient has contributions
    with back:
        back.outputs.extend(back.gradients.values())
    with exact():
        forward, module = lower(graph, **point), lower(back, **point)
        inputs = random_inputs(graph, **point)
    # the backward pass of a loop with a distinct first iteration declares its parameters separately
    assume(forward.state_dict().keys() == module.state_dict().keys())
    forward.load_state_dict(module.state_dict())
    _, *made = module(*(x.clone() for x in inputs))
    names = [t.name for t in graph.tensors if t.producer is None and t.role == "input"]
    wanted = autograd_gradients(forward, [t.name for t in back.gradients], dict(zip(names, inputs, strict=True)))
    for (name, sources), found in zip(wanted.items(), made, strict=True):
        layers = found if isinstance(found, tuple) else (found,)
        assert len(layers) == len(sources), name
        for p, gradient in zip(sources, layers, strict=True):
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(
    ("reduction", "none"), [(way, none) for way in ("mean", "sum", "none") for none in (-100, -1, 2)]
)
def test_ignored_targets_have_no_gradient(reduction, none):
    class Classes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.nn.Linear(5, 7)

        def forward(self, x, targets):
            options = {"reduction": reduction, "ignore_index": none}
            each = torch.nn.functional.cross_entropy(self.last(x), targets, **options)
            return each.square().sum() if reduction == "none" else each

    if reduction == "none" and none >= 0:  # a custom call, which has no gradient here
        return
    net, x, targets = Classes(), torch.randn(11, 5), torch.arange(11) % 7
    targets[::3] = none
    traced = trace(net, x, targets, dims=[("N", None), ("N",)])
    for forward in traced, cg.apply_precision(traced, "fp32"):  # with torch's calls, and with declared ops only
        back = cg.backward(forward)
        with back:
            back.outputs.extend(back.gradients.values())
        module = lower(back, N=11)
        module.load_state_dict(net.state_dict())
        loss = net(x, targets)
        wanted = [loss, *torch.autograd.grad(loss, list(net.parameters()))]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(module(x, targets), wanted, strict=True))
