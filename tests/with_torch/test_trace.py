"""Traces of small modules with costs derived by hand."""

import pytest
import torch
from torch import nn
from traced import adamw, differences

import costgraph as cg
from costgraph.torch import lower, trace


class Net(nn.Module):
    """Linear, ReLU, linear; returns a loss if targets are given."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x, y=None):
        out = self.down(torch.relu(self.up(x)))
        return out if y is None else nn.functional.cross_entropy(out, y)


def inputs(rows=2):
    return torch.randn(rows, 5), torch.randint(0, 3, (rows,))


def step(**more):
    return trace(Net(), *inputs(), dims=[("B", None), ("B",)], train=True, optimizer=adamw, **more)


def test_perceptron_costs_by_hand():
    g = trace(Net(), torch.zeros(2, 5), dims=[("B", None)])
    B = cg.dims("B")
    assert cg.matmul_flops(g) == 2 * B * 5 * 7 + 2 * B * 7 * 3  # multiply + add per index point
    assert cg.flops(g) == cg.matmul_flops(g) + 7 * B + 3 * B + 7 * B  # biases, and max(x, 0)
    assert cg.param_count(g) == 5 * 7 + 7 + 7 * 3 + 3
    # during relu: parameters, the model input, its operand and its result, in fp32
    assert cg.peak_memory(g) == 4 * (66 + 5 * B + 7 * B + 7 * B)


def test_tensor_roles_and_names_follow_the_module():
    net = Net()
    net.register_buffer("scale", torch.ones(3))
    net.forward = lambda x: net.down(net.up(x)) * net.scale
    g = trace(net, torch.zeros(2, 5), dims=[("B", None)])
    roles = {t.name: t.role for t in g.tensors if t.producer is None}
    assert roles == {
        "up/weight": "param", "up/bias": "param", "down/weight": "param", "down/bias": "param",
        "scale": "buffer", "x": "input",
    }  # fmt: skip
    assert {op.scope for op in g.ops} == {"up", "down", ""}


def test_phases_and_scopes_of_a_step():
    g = step()
    matmuls = [
        (op.phase, op.scope)
        for op in g.ops
        if op.call is not None and op.call.target in ("mm.default", "addmm.default")
    ]
    # no dX of the first layer: the input needs no gradient
    assert matmuls == [("forward", "up"), ("forward", "down"), *[("backward", "down")] * 2, ("backward", "up")]
    updates = {op.scope for op in g.ops if op.phase == "optimizer"}
    assert updates == {""}
    assert {t.name for t in g.gradients} == {"up/weight", "up/bias", "down/weight", "down/bias"}
    state = sorted(t.name for t in g.tensors if t.role == "state" and t.producer is None)
    assert state[:3] == [f"optimizer/down/bias/{k}" for k in ("exp_avg", "exp_avg_sq", "step")]


def test_traced_step_costs_equal_a_real_step():
    g = step()
    for rows in (2, 5, 131):
        net, data = Net(), inputs(rows)
        peak, flops = differences(g, net, data, adamw(net.parameters()), B=rows)
        assert abs(peak) <= 64  # loss and optimizer scalars
        assert flops == 0


def test_trace_leaves_the_module_unchanged():
    net, data = Net(), inputs()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state = {id(m): dict(m.__dict__) for m in net.modules()}
    trace(net, *data, dims=[("B", None), ("B",)], train=True, optimizer=adamw)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert {id(m): dict(m.__dict__) for m in net.modules()} == state
    assert all(p.grad is None and type(p) is nn.Parameter for p in net.parameters())


def test_parameters_need_no_memory():
    with torch.device("meta"):
        net = nn.Linear(2**20, 2**20)
    g = trace(net, torch.zeros(2, 2**20, device="meta"), dims=[("B", None)])
    assert cg.param_count(g) == 2**40 + 2**20
    assert cg.matmul_flops(g, B=3) == 2 * 3 * 2**40


def test_module_and_parameter_keys_may_be_any_text(tmp_path):
    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"0_first": nn.Linear(5, 5), "one-more": nn.Linear(5, 5)})
            self.factors = nn.ParameterDict({key: nn.Parameter(torch.ones(5)) for key in ("a-b", "a_b", "a b", "1e5")})

        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x)
            for factor in self.factors.values():
                x = x * factor
            return x.sum()

    g = trace(Keyed(), torch.zeros(3, 5), dims=[("B", None)], train=True, optimizer=torch.optim.SGD)
    weights = ["layers/_0_first/weight", "layers/_0_first/bias", "layers/one_more/weight", "layers/one_more/bias"]
    factors = [f"factors/{key}" for key in ("_1e5", "a_b", "a_b_", "a_b__")]
    assert [t.name for t in g.params] == [*weights, *factors]
    cg.save(g, tmp_path / "keyed.json")
    assert cg.flops(cg.load(tmp_path / "keyed.json")) == cg.flops(g)


def test_tied_parameters_are_one_tensor():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    g = trace(Tied(), torch.zeros(2, dtype=torch.int64), dims=[("B",)])
    assert cg.param_count(g) == 55
    assert [t.name for t in g.params] == ["embed/weight"]


class InPlace(nn.Module):
    def forward(self, x):
        y = x @ x.mT
        y.add_(1).mul_(2)
        return y[:, ::2].relu_()


def test_views_and_in_place_ops_share_storage():
    g = trace(InPlace(), torch.zeros(3, 5), dims=[("N", None)])
    N = cg.dims("N")
    assert cg.peak_memory(g) == 4 * (5 * N + N * N)
    assert len({t.storage for t in g.tensors}) == 2


def test_python_variables_keep_tensors_alive():
    class Held(nn.Module):
        def __init__(self, forget):
            super().__init__()
            self.forget = forget

        def forward(self, x):
            first = x + 1
            second = first * 2
            if self.forget:
                del first
            return second.exp()

    B = cg.dims("B")
    peaks = [cg.peak_memory(trace(Held(forget), torch.zeros(5), dims=[("B",)])) for forget in (True, False)]
    # x, second, exp; and first, which is unused but still referenced by its name
    assert peaks == [4 * 3 * B, 4 * 4 * B]


def test_equal_names_are_equal_sizes():
    class Add(nn.Module):
        def forward(self, x, y):
            return x + y

    g = trace(Add(), torch.zeros(7), torch.zeros(7), dims=[("N",), ("N",)])
    assert cg.flops(g) == cg.dims("N")
    with pytest.raises(cg.ShapeError, match="N is 7, but 5 in y; equal names must denote equal sizes"):
        trace(Add(), torch.zeros(7), torch.zeros(5), dims=[("N",), ("N",)])


def test_size_guards_become_assumptions():
    class Asks(nn.Module):
        def forward(self, x):
            return x.relu() if x.shape[0] <= 100 else x.exp().exp()

    g = trace(Asks(), torch.zeros(7), dims=[("N",)])
    assert [r.text for r in g.relations.relations] == ["N <= 100"]
    assert cg.flops(g, N=100) == 100
    with pytest.raises(cg.BindingError, match="against the assumption 'N <= 100'"):
        cg.flops(g, N=101)


def test_example_sizes_of_one_are_not_specialized():
    g = trace(Net(), torch.zeros(1, 5), dims=[("B", None)])
    assert g.relations.relations == ()
    assert cg.matmul_flops(g, B=1) == 2 * 5 * 7 + 2 * 7 * 3


def test_sizes_that_are_quotients():
    net = nn.Sequential(nn.Conv1d(5, 7, 3, stride=2), nn.ReLU())
    g = trace(net, torch.zeros(2, 5, 17), dims=[("B", None, "S")])
    for size in (16, 17, 18, 31):
        outputs = (size - 3) // 2 + 1
        # 2 for each output position, window position and input channel
        assert cg.matmul_flops(g, B=3, S=size) == 2 * 3 * 7 * outputs * 3 * 5
        assert lower(g, B=3, S=size)(torch.zeros(3, 5, size)).shape == (3, 7, outputs)


def test_keyword_and_non_tensor_arguments():
    class Scaled(nn.Module):
        def forward(self, x, factor=1.0, *, shift=None, flip=False):
            out = x * factor if shift is None else x * factor + shift
            return out.flip(0) if flip else out

    g = trace(
        Scaled(), torch.zeros(3, 5), 2.0, dims=[("B", None), None], keywords={"shift": torch.zeros(5), "flip": True}
    )
    assert cg.flops(g) == 10 * cg.dims("B")
    assert [t.name for t in g.tensors if t.role == "input"] == ["x", "shift"]
    shift = {"shift": torch.zeros(5)}
    named = trace(Scaled(), torch.zeros(3, 5), dims=[("B", "D")], keywords=shift, keyword_dims={"shift": ("D",)})
    B, D = cg.dims("B D")
    assert cg.flops(named) == 2 * B * D


def test_traced_step_survives_save_and_load(tmp_path):
    g = step()
    cg.save(g, tmp_path / "step.json")
    again = cg.load(tmp_path / "step.json")
    for question in (cg.flops, cg.bytes_moved, cg.peak_memory, cg.param_count):
        assert question(again) == question(g)


def test_a_trace_runs_again():
    net = Net()
    g = trace(net, torch.zeros(2, 5), dims=[("B", None)])
    module = lower(g, B=13)
    module.load_state_dict(net.state_dict(), strict=False)
    x = torch.randn(13, 5)
    assert torch.equal(module(x), net(x))


def test_strided_parameter_runs_in_the_lowered_trace():
    net = nn.Linear(5, 7, bias=False)
    net.weight = nn.Parameter(torch.randn(5, 7).T)
    g = trace(net, torch.zeros(2, 5), dims=[("B", None)])
    module, x = lower(g, B=3), torch.randn(3, 5)
    module.load_state_dict(net.state_dict())
    assert cg.param_count(g) == 35
    torch.testing.assert_close(module(x), net(x))


def test_dropout_follows_the_training_mode():
    net = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
    names = []
    for training in (True, False):
        g = trace(net.train(training), torch.zeros(2, 5), dims=[("B", None)])
        names.append({op.call.name for op in g.ops if op.call is not None})
    assert names[0] > names[1] == {"t", "addmm"}


def test_recomputation_has_its_own_phase():
    class Again(Net):
        def forward(self, x, y):
            hidden = torch.utils.checkpoint.checkpoint(lambda x: torch.relu(self.up(x)), x, use_reentrant=False)
            return nn.functional.cross_entropy(self.down(hidden), y)

    g = trace(Again(), *inputs(), dims=[("B", None), ("B",)], train=True)
    again = [op.call.target for op in g.ops if op.phase == "recompute" and op.call is not None]
    assert "addmm.default" in again


def test_empty_tensors_cost_nothing():
    class Cache(nn.Module):
        def forward(self, x):
            return torch.cat([torch.empty(0, 5), x])

    g = trace(Cache(), torch.zeros(3, 5), dims=[("B", None)])
    assert cg.peak_memory(g) == 2 * 4 * 5 * cg.dims("B")


# -- errors ------------------------------------------------------------------------------------------------------------


class Numbers(nn.Module):
    def forward(self, x):
        return x * len([0] * x.shape[0])


class Indexed(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Item(nn.Module):
    def forward(self, x):
        return x * x.sum().item() if x.sum().item() > 1 else x


class Broken(nn.Module):
    def forward(self, x):
        return x @ x


X = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: trace(Numbers(), X, dims=[("B", None)]), cg.UnsupportedError,
         r"test_trace\.py:\d+, in forward, .*len\(\[0\] \* x\.shape\[0\]\)': converts the size B to the number 3, but"),
        (lambda: trace(Indexed(), X, dims=[("B", None)], data_sizes="error"), cg.UnsupportedError,
         r"test_trace\.py:\d+, in forward, 'return x\[x > 0\]': .*depends on the values"),
        (lambda: trace(Item(), X, dims=[("B", None)]), cg.UnsupportedError,
         r"test_trace\.py:\d+, in forward, .*branches on the values of a tensor, which are unknown; "),
        (lambda: trace(Broken(), X, dims=[("B", None)]), cg.UnsupportedError,
         r"test_trace\.py:\d+, in forward, 'return x @ x': .*the program must run on tensors"),
        (lambda: trace(lambda x: x, X), cg.GraphError, "trace: got function, expected a torch.nn.Module"),
        (lambda: trace(Net(), X, dims=[("B",)]), cg.ShapeError,
         r"names \('B',\) for x, which has 2 axes; expected a name, or None, per axis"),
        (lambda: trace(Net(), X, dims=[("B", None)] * 2), cg.ShapeError, "for 1 inputs; expected axis names"),
        (lambda: trace(Net(), X, dims=[("a b", None)]), cg.ShapeError, "axis name 'a b' of x is not an identifier"),
        (lambda: trace(Net(), [X]), cg.GraphError, "x contains tensors; pass each tensor as a separate argument"),
        (lambda: trace(Net(), X, keyword_dims={"y": ("B",)}), cg.ShapeError, "names axes of 'y', which is not in k"),
        (lambda: trace(Net(), X, optimizer=adamw), cg.GraphError, "an optimizer requires train=True, since its step"),
        (lambda: trace(Net(), X, train=True), cg.GraphError, "Net returns .* with train=True; expected one scalar"),
        (lambda: trace(Net(), X, unknown="zero"), cg.GraphError, "unknown"),
    ],
)  # fmt: skip
def test_invalid_traces_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_op_without_rule_is_an_error_or_a_symbol():
    @torch.library.custom_op("costgraph_tests::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    mystery.register_fake(torch.empty_like)

    class Odd(nn.Module):
        def forward(self, x):
            return mystery(x)

    with pytest.raises(cg.UnsupportedError, match=r"test_trace\.py:\d+, in forward, 'return mystery\(x\)': .*mystery"):
        trace(Odd(), X, dims=[("B", None)])
    g = trace(Odd(), X, dims=[("B", None)], unknown="symbol")
    kinds = {
        "matmul": cg.matmul_flops,
        "pointwise": lambda g: cg.costs(g).filter(kind="pointwise", direction="compute").total().flops,
        "transcendental": lambda g: cg.costs(g).filter(kind="transcendental", direction="compute").total().flops,
    }
    counts = {kind: cg.dims(f"{kind}_flops_costgraph_tests_mystery") for kind in kinds}
    assert {kind: total(g) for kind, total in kinds.items()} == counts  # no total omits it
    assert cg.flops(g) == sum(counts.values())
    assert cg.peak_memory(g) == 2 * 4 * 5 * cg.dims("B")


def test_data_dependent_rows_may_be_cast():
    class Chosen(nn.Module):
        def __init__(self, cast):
            super().__init__()
            self.cast = cast

        def forward(self, x):
            return self.cast(x[x[:, 0] > 0]).square().sum()

    asked, plain = (trace(Chosen(cast), X, dims=[("B", None)]) for cast in (torch.Tensor.float, torch.Tensor.sin))
    (rows,) = {s for s in cg.flops(asked).free_symbols if str(s) != "B"}
    B = cg.dims("B")
    assert cg.flops(asked) == B + 2 * X.shape[1] * rows
    assert cg.flops(plain) == B + 3 * X.shape[1] * rows
