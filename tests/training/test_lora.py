"""LoRA: parameters and FLOPs by hand, and memory and FLOPs of a step against modules built as in PEFT."""

import pytest
from shared import load

import costgraph as cg
from costgraph import GraphError, ShapeError, UnsupportedError

B, S, D, F, R = 3, 11, 13, 17, 5


def layer():
    b, s, d = cg.dims("B S D")
    with cg.Graph("layer") as g:
        x = cg.linear(g.input("x", (b, s, d)), "b s d -> b s f", f=F, bias=True, name="first")
        g.output(cg.reduce(cg.linear(x, "b s f -> b s d", d=D, name="second"), "b s d -> ", "mean"))
    return g


def test_lora_adds_two_matmuls_and_frozen_weights_have_no_gradient():
    g = cg.lora(layer(), R)
    sizes = {"B": B, "S": S, "D": D}
    assert cg.param_count(g, **sizes) == 2 * D * F + F + 2 * R * (D + F)
    whole, thin = 2 * B * S * D * F, 2 * B * S * R * (D + F)
    assert cg.matmul_flops(g, **sizes) == 2 * (whole + thin)
    step = cg.training_step(g, optimizer=cg.SGD())
    # Frozen layers only need the input gradient through the second weight, which leads to a trained one; adapters need
    # both gradients, except the first input's.
    assert cg.matmul_flops(step, **sizes) == 3 * whole + 2 * thin + 2 * thin + thin + 2 * B * S * R * F
    assert {t.name for t in step.gradients} == {f"{n}/lora_{m}" for n in ("first", "second") for m in "ab"}


def test_target_modules_and_additional_trained_parameters():
    g = cg.lora(layer(), R, "first", trainable="second")
    assert {t.name for t in g.params if "lora" in t.name} == {"first/lora_a", "first/lora_b"}
    assert {t.name for t in g.params if t.requires_grad} == {"first/lora_a", "first/lora_b", "second/weight"}
    dropped = cg.lora(layer(), R, dropout=0.1)
    assert sum(op.kind.name == "dropout" for op in dropped.walk()) == 2


def test_base_weights_are_quantized_but_adapters_are_not():
    made = cg.lora(load("llama-3-8b"), 8)
    g = cg.quantize(made, "nf4_double", skip=["head", "lora_a", "lora_b"])
    thin = 8 * 32 * (4 * 4096 + 2 * (4096 + 1024) + 2 * 4096 - 4096 * 2 + 3 * (4096 + 14336))
    assert cg.param_count(made) - 8_030_261_248 == thin
    assert {t.dtype.name for t in g.params if "lora" in t.name} == {"bf16"}
    step = cg.training_step(g, optimizer=cg.AdamW())
    assert cg.state_bytes(step).state == 2 * 2 * thin  # two moments in bf16


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: cg.lora(layer(), R, "third"), GraphError, "on 'third' matches no parameter or scope, expected some"),
        (lambda: cg.lora(layer(), R, trainable=["x"]), GraphError, "lora: trainable 'x' matches no parameter or scope"),
        (lambda: cg.lora(layer(), 0), ShapeError, "lora: rank: 0, expected a positive integer"),
        (lambda: cg.lora(layer(), R, dropout=1), GraphError, "dropout is 1, expected a number of at least 0"),
        (lambda: cg.lora(layer(), R, alpha=0), GraphError, "alpha is 0, expected a number above 0"),
        (lambda: cg.lora(load("alexnet"), R, "features*"), GraphError, "lora: on 'features"),
    ],
)  # fmt: skip
def test_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_kernel_with_other_ops_is_refused():
    b, d = cg.dims("B D")
    with cg.Graph("g") as g:
        x, w = g.input("x", (b, d)), g.param("w", (d, 7))
        with cg.kernel("both"):
            y = cg.relu(cg.einsum(x, w, "b d, d f -> b f"))
        g.output(y)
    with pytest.raises(UnsupportedError, match="is in a kernel that does more than add to its result"):
        cg.lora(g)


# -- against torch ---------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")
from test_training_memory import LLAMA, MLP, angles  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from tracked import setting, step  # noqa: E402


class Adapted(torch.nn.Module):
    """A linear layer that runs as peft.tuners.lora.Linear does (layer.py, forward)."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Linear(base.in_features, R, bias=False)
        self.b = torch.nn.Linear(R, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * (16 / R)


def adapted(name, sizes, chosen):
    module, _, ids, targets = setting(name, sizes, B, 59, "fp32", "foreach")
    module.requires_grad_(False)
    for key, linear in [(k, m) for k, m in module.named_modules() if isinstance(m, torch.nn.Linear) and chosen(k)]:
        parent, _, own = key.rpartition(".")
        setattr(module.get_submodule(parent), own, Adapted(linear))
    kept = [p for p in module.parameters() if p.requires_grad]
    return module, torch.optim.AdamW(kept, foreach=True), ids, targets


#: Model, sizes, our options, and the selection of torch linear layers with adapters.
CASES = {
    "mlp": ("mlp", MLP, "layers", lambda name: name.startswith("layers")),
    "llama": ("llama-2-7b", {**LLAMA, "L": 2}, ["*/attention/[qv]", "*/mlp/down"],
              lambda name: name.endswith((".q", ".v", "down"))),
}  # fmt: skip


def declared(case):
    name, sizes, on, _ = CASES[case]
    made = cg.lora(load(name, attention="eager", dtype="fp32", symbolic=True), R, on)
    dims = {**sizes, "B": B, **({} if name == "mlp" else {"S": 59})}
    return cg.training_step(made, optimizer=cg.AdamW(implementation="foreach")), dims


@pytest.mark.parametrize("case", CASES)
def test_lora_parameters_and_flops_match_torch(case):
    name, sizes, _, chosen = CASES[case]
    graph, dims = declared(case)
    with FakeTensorMode():
        parts = adapted(name, sizes, chosen)
        with FlopCounterMode(display=False) as counter:
            step(*parts)
    assert cg.param_count(graph, **dims) == sum(p.numel() for p in parts[0].parameters())
    assert cg.matmul_flops(graph, **dims) == counter.get_total_flops()


@pytest.mark.parametrize("case", ["mlp", pytest.param("llama", marks=pytest.mark.long)])  # a real step
def test_lora_peak_matches_torch(case):
    name, sizes, _, chosen = CASES[case]
    parts = adapted(name, sizes, chosen)
    step(*parts)  # creates the optimizer state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(*parts)
    live = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        live += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, live)
    graph, dims = declared(case)
    line = cg.timeline(graph, **dims)
    there = sum(line.by_role.get(role, 0) for role in ("param", "state", "input", "buffer"))
    more = angles(name, sizes, B, 59, "fp32") if name != "mlp" else 0
    trained = sum(p.requires_grad for p in parts[0].parameters())
    assert abs(most - (line.peak - there) - more) <= 20 + 4 * trained  # transient scalars, one per tensor
