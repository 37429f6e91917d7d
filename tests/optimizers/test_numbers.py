"""Updates against torch's values, step by step, in fp64."""

import numpy as np
import pytest
from each import each
from update_graphs import SHAPES, draw, states, updated, values

import costgraph as cg
from costgraph.optimizers import SGD, Adafactor, AdaGrad, Adam, AdamW, Lion, Muon, RMSProp

torch = pytest.importorskip("torch")

STEPS = 3
CASES = [
    (SGD, torch.optim.SGD, {}),
    (SGD, torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    (SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (Adam, torch.optim.Adam, {}),
    (Adam, torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (Adam, torch.optim.Adam, {"amsgrad": True, "betas": (0.5, 0.7)}),
    (AdamW, torch.optim.AdamW, {}),
    (AdamW, torch.optim.AdamW, {"weight_decay": 0, "amsgrad": True}),
    (AdaGrad, torch.optim.Adagrad, {}),
    (AdaGrad, torch.optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
    (AdaGrad, torch.optim.Adagrad, {"maximize": True}),
    (RMSProp, torch.optim.RMSprop, {}),
    (RMSProp, torch.optim.RMSprop, {"momentum": 0.9, "weight_decay": 0.1}),
    (RMSProp, torch.optim.RMSprop, {"centered": True, "maximize": True}),
    (RMSProp, torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (Adafactor, torch.optim.Adafactor, {"eps": (1e-7, 1e-3)}),
    (Adafactor, torch.optim.Adafactor, {"eps": (0.3, 1e-3), "weight_decay": 0.1, "maximize": True, "lr": 0.9}),
]
#: torch's names for states that are not per-element tensors.
SCALARS = {"step"}


def name_of(case):
    ours, _, options = case
    return f"{ours.__name__}-{'-'.join(options) or 'plain'}"


def torch_steps(theirs, options, implementation, shapes, numbers):
    """Yield the parameters, gradients and states after each torch step."""
    params = [torch.nn.Parameter(torch.tensor(numbers[f"w{i}"])) for i in range(len(shapes))]
    flags = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}[implementation]
    optimizer = theirs(params, **options, **({} if theirs is torch.optim.Muon else flags))
    for _ in range(STEPS):
        for i, p in enumerate(params):
            p.grad = torch.tensor(numbers[f"g{i}"])
        optimizer.step()
        found = {f"w{i}": p.detach().numpy().copy() for i, p in enumerate(params)}
        found |= {f"g{i}": p.grad.numpy().copy() for i, p in enumerate(params)}
        for i, p in enumerate(params):
            for key, state in optimizer.state[p].items():
                if key not in SCALARS and state is not None:
                    found[f"w{i}.{key}"] = state.numpy().copy()
        yield found


def compare(ours, options, implementation, numbers, wanted, shapes=SHAPES):
    """Compare steps after the first one, which initializes torch's states."""
    for k in range(1, len(wanted)):
        graph = updated(ours(**options, implementation=implementation, step=k + 1), shapes, "fp64")
        names = {t.name for t in graph.tensors if t.producer is None}
        before = {**{f"g{i}": numbers[f"g{i}"] for i in range(len(shapes))}}
        before |= {n: a for n, a in wanted[k - 1].items() if n in names and not n.startswith("g")}
        before |= {t.name: k for t in states(graph) if t.name.endswith(".step")}
        counted, found = values(graph, before)
        assert names == set(before)
        for name in wanted[k]:
            np.testing.assert_allclose(found[name], wanted[k][name], rtol=1e-12, atol=1e-14, err_msg=name)
        assert counted.flops == cg.flops(graph)
        assert counted.bytes_moved == cg.bytes_moved(graph)
        assert counted.peak == cg.peak_memory(graph)


@each(
    ("case", "implementation"),
    [pytest.param(c, i, id=f"{name_of(c)}-{i}") for c in CASES for i in c[0].available],
)
def test_updates_match_torch(case, implementation):
    ours, theirs, options = case
    options = {"lr": 0.03, **options}
    numbers = draw()
    wanted = list(torch_steps(theirs, options, implementation, SHAPES, numbers))
    compare(ours, options, implementation, numbers, wanted)


def test_adafactor_with_three_axes_and_default_epsilon():
    # without an explicit epsilon torch uses float64's; rows and columns are the last two axes
    shapes, numbers = ((2, 3, 5), (7,)), draw(((2, 3, 5), (7,)))
    numbers["g0"][:] *= 1e-9  # so small that the epsilon matters
    wanted = list(torch_steps(torch.optim.Adafactor, {"lr": 0.03}, "for-loop", shapes, numbers))
    compare(Adafactor, {"lr": 0.03}, "for-loop", numbers, wanted, shapes)


MUON = [
    {},
    {"nesterov": False, "weight_decay": 0, "ns_steps": 2},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5, "ns_coefficients": (2.0, -1.5, 0.5)},
    {"eps": 1e3},
]


@pytest.mark.parametrize("options", MUON, ids=lambda o: "-".join(o) or "plain")
def test_muon_matches_torch(options, monkeypatch):
    # torch iterates in bf16, the interpreter in fp64: here the conversion is a copy in both
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda t: t.clone())
    shapes = ((3, 5), (11, 2), (3, 3))
    numbers = draw(shapes)
    options = {"lr": 0.03, **options}
    wanted = list(torch_steps(torch.optim.Muon, options, "for-loop", shapes, numbers))
    compare(Muon, options, "for-loop", numbers, wanted, shapes)


def test_muon_flattens_trailing_axes(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda t: t.clone())
    shape, matrix = (3, 2, 5), (3, 10)
    numbers = draw((shape,))
    flat = {name: a.reshape(matrix) for name, a in numbers.items()}
    wanted = [
        {name: a.reshape(shape) for name, a in found.items()}
        for found in torch_steps(torch.optim.Muon, {}, "for-loop", (matrix,), flat)
    ]
    compare(Muon, {}, "for-loop", numbers, wanted, (shape,))


def test_muon_leaves_other_parameters_to_adamw(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda t: t.clone())
    # w0 is a vector, w1 an excluded matrix, w2 belongs to Muon
    numbers = draw()
    left = {name: a for name, a in numbers.items() if name[1] != "2"}
    by_adam = list(torch_steps(torch.optim.AdamW, {}, "for-loop", SHAPES[:2], left))
    mine = {name.replace("2", "0"): a for name, a in numbers.items() if name[1] == "2"}
    by_muon = list(torch_steps(torch.optim.Muon, {}, "for-loop", SHAPES[2:], mine))
    wanted = [
        {**a, **{n.replace("w0", "w2").replace("g0", "g2"): x for n, x in m.items()}}
        for a, m in zip(by_adam, by_muon, strict=True)
    ]
    options = {"takes": lambda s: s.param.name == "w2"}
    compare(Muon, options, "for-loop", numbers, wanted)


def lion(numbers, before, lr, betas, decay):
    """Algorithm 2 of Chen et al. 2023, verbatim."""
    out = {}
    for i in range(len(SHAPES)):
        theta, g, m = before[f"w{i}"], numbers[f"g{i}"], before[f"w{i}.exp_avg"]
        c = betas[0] * m + (1 - betas[0]) * g
        out[f"w{i}"] = theta - lr * (np.sign(c) + decay * theta)
        out[f"w{i}.exp_avg"] = betas[1] * m + (1 - betas[1]) * g
    return out


@each("decay", [0, 0.1])
def test_lion_matches_paper(decay):
    numbers = draw()
    rng = np.random.default_rng(1)
    first = {f"w{i}": numbers[f"w{i}"] for i in range(3)}
    first |= {f"w{i}.exp_avg": rng.normal(size=s) for i, s in enumerate(SHAPES)}
    wanted = [first, lion(numbers, first, 0.03, (0.8, 0.95), decay)]
    options = {"lr": 0.03, "betas": (0.8, 0.95), "weight_decay": decay}
    compare(Lion, options, "for-loop", numbers, wanted)


@each("implementation", ["foreach", "for-loop", "fused"])
def test_master_copies_overwrite_parameters(implementation):
    # the parameter is overwritten by the master copy; the gradient is unchanged
    numbers = draw()
    graph = updated(Adam(implementation=implementation), dtype="bf16", masters="fp32")
    given = {f"{'m' if n[0] == 'w' else 'g'}{n[1]}": a for n, a in numbers.items()}
    wanted = list(torch_steps(torch.optim.Adam, {}, implementation, SHAPES, numbers))
    for i, name in enumerate(("w0", "w1", "w2")):
        given |= {f"m{i}": wanted[0][name], **{n: a for n, a in wanted[0].items() if n.startswith(f"{name}.")}}
    given |= {t.name: 1 for t in states(graph) if t.name.endswith(".step")}
    counted, found = values(graph, given)
    for i in range(3):
        np.testing.assert_allclose(found[f"w{i}"], wanted[1][f"w{i}"], rtol=1e-12)
        np.testing.assert_allclose(found[f"m{i}"], wanted[1][f"w{i}"], rtol=1e-12)
        np.testing.assert_array_equal(found[f"g{i}"], numbers[f"g{i}"])
    assert (counted.flops, counted.bytes_moved) == (cg.flops(graph), cg.bytes_moved(graph))
    assert counted.peak == cg.peak_memory(graph)
