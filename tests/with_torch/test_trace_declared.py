"""Translating traced models to declared kinds: coverage and costs, against traces of torch's calls."""

from functools import cache

import pytest
import sympy
import torch
from lazy import lazy_import
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph.torch import lower, trace
from costgraph.torch.tracing.call import Counts
from costgraph.torch.tracing.rules import RULES
from costgraph.torch.tracing.translations import TRANSLATIONS

transformers = lazy_import("transformers")
SMALL = {"num_hidden_layers": 1, "hidden_size": 40, "intermediate_size": 52, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
#: Each model's config and class; image sizes in place of tokens.
MODELS = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {
        "n_layer": 1, "n_embd": 44, "n_head": 4, "vocab_size": 97, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SMALL | {"num_key_value_heads": 2, "vocab_size": 97}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", SMALL | {
        "num_key_value_heads": 2, "vocab_size": 97, "num_local_experts": 5,
    }),
    "bert": ("BertConfig", "BertForMaskedLM", SMALL | NO_DROPOUT | {"vocab_size": 97}),
    "vit": ("ViTConfig", "ViTForImageClassification", SMALL | NO_DROPOUT | {"image_size": 28, "patch_size": 7}),
    "resnet": ("ResNetConfig", "ResNetForImageClassification", {
        "embedding_size": 11, "hidden_sizes": [11, 13], "depths": [1, 1], "layer_type": "basic",
    }),
}  # fmt: skip


#: Models of a plain run: attention with experts, and convolutions; the other models have similar layers.
SOME = [n if n in ("mixtral", "resnet") else pytest.param(n, marks=pytest.mark.long) for n in MODELS]


class Scored(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        return self.model(x, labels=labels).loss


@cache
def traced(name, train=False, dtype=torch.float32):
    torch.manual_seed(0)
    config, model, facts = MODELS[name]
    config = getattr(transformers, config)(**facts)
    config._attn_implementation, config.use_cache = "eager", False
    module = Scored(getattr(transformers, model)(config)).to(dtype).train()
    if name in ("vit", "resnet"):
        given = torch.zeros(3, 3, 28, 28, dtype=dtype), torch.zeros(3, dtype=torch.int64)
        return trace(module, *given, dims=[("B", None, None, None), ("B",)], train=train)
    ids = torch.zeros(3, 7, dtype=torch.int64)
    return trace(module, ids, ids, dims=[("B", "S")] * 2, train=train)


def sizes(name):
    return {"B": 3} if name in ("vit", "resnet") else {"B": 3, "S": 11}


@pytest.mark.parametrize("name", SOME)
def test_most_calls_are_translated_to_declared_ops(name):
    calls = custom_calls = 0
    for train in (False, True):
        ops = [op for op in traced(name, train).ops if op.kind.name != "keep_alive"]
        calls += len(ops)
        custom_calls += sum(op.kind.name == "custom_call" for op in ops)
    assert custom_calls <= 0.05 * calls


@pytest.mark.parametrize("name", SOME)
def test_derived_backward_of_a_trace_equals_the_traced_step(name):
    derived, seen, bound = cg.backward(traced(name)), traced(name, train=True), sizes(name)
    for count in ("executed", "full"):
        assert cg.matmul_flops(derived, count=count) == cg.matmul_flops(seen, count=count)
    assert cg.flops(derived, **bound) == cg.flops(seen, **bound)
    assert len(derived.gradients) == len(seen.gradients)
    # torch's variables keep tensors that its backward pass no longer needs, and it copies operands that the library
    # reads as strided, and vice versa
    for question in (cg.peak_memory, cg.bytes_moved):
        assert abs(question(derived, **bound) - question(seen, **bound)) <= 0.03 * question(seen, **bound)


@pytest.mark.parametrize("name", SOME)
def test_apply_precision_equals_tracing_in_that_dtype(name):
    """To the byte, even with casts to fp32, which are no-ops in an fp32 model."""
    converted, seen, bound = cg.apply_precision(traced(name), "bf16"), traced(name, dtype=torch.bfloat16), sizes(name)
    assert cg.flops(converted) == cg.flops(seen)
    assert cg.param_bytes(converted) == cg.param_bytes(seen)
    assert cg.bytes_moved(converted) == cg.bytes_moved(seen)
    assert cg.peak_memory(converted, **bound) == cg.peak_memory(seen, **bound)


class Formats(nn.Module):
    """States dtypes in each way: by name, by another tensor's, for created tensors and for integers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("frequencies", torch.ones(8))

    def forward(self, x):
        before = x.dtype
        places = torch.arange(x.shape[0])
        angles = places[:, None].float() * self.frequencies.float()
        follows = torch.zeros(x.shape[0], 1, dtype=x.dtype) + places[:, None].to(x)
        table = torch.full((x.shape[0], 1), 2.0) + torch.arange(x.shape[0], dtype=torch.float32)[:, None]
        wide = x.to(torch.float32)
        wide = wide - wide.mean(-1, keepdim=True)
        shares = torch.softmax(x + follows, -1, dtype=torch.float32)
        own = nn.functional.softmax(x, -1, dtype=before)
        return (wide + shares + table).to(before) * self.scale + own * angles.cos().type_as(x)


def test_explicit_dtypes_stay_and_others_follow_the_model():
    given, low = (torch.zeros(5, 8, dtype=d) for d in (torch.float32, torch.bfloat16))
    g = trace(Formats(), given, dims=[("N", None)])
    converted, seen = cg.apply_precision(g, "bf16"), trace(Formats().bfloat16(), low, dims=[("N", None)])
    formats = [
        [t.dtype.name for op in h.ops if op.kind.name != "keep_alive" for t in op.results] for h in (converted, seen)
    ]
    assert formats[0] == formats[1]
    for question in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert question(converted) == question(seen)
    assert cg.bytes_moved(g) == cg.bytes_moved(cg.apply_precision(g, "fp32"))  # no-op casts have no cost
    low_again = lower(converted, N=5)
    low_again.load_state_dict(Formats().bfloat16().state_dict())
    torch.testing.assert_close(low_again(low), Formats().bfloat16()(low), check_stride=False)


def test_dtype_dependent_branch_traces_the_given_dtype():
    class Chooses(nn.Module):
        def forward(self, x):
            return x.float() * 2 if x.dtype == torch.float32 else x + 1

    g = trace(Chooses(), torch.zeros(3, 5), dims=[("N", None)])
    assert [op.name for op in g.ops] == ["mul"]


def test_in_place_write_through_a_no_op_cast_is_visible():
    class Writes(nn.Module):
        def forward(self, x):
            h = x * 2
            y = h.float()
            y -= 1.0
            return h + y

    g, x = trace(Writes(), torch.zeros(3, 5), dims=[("N", None)]), torch.randn(3, 5)
    torch.testing.assert_close(lower(g, N=3)(x), Writes()(x))


def test_second_dtype_run_leaves_the_module_unchanged():
    module = Formats()
    before = {name: (id(t), t.dtype) for name, t in module.state_dict(keep_vars=True).items()}
    trace(module, torch.zeros(5, 8), dims=[("N", None)])
    assert {name: (id(t), t.dtype) for name, t in module.state_dict(keep_vars=True).items()} == before
    assert module(torch.zeros(5, 8)).shape == (5, 8)


class Attends(nn.Module):
    def __init__(self, causal, masked):
        super().__init__()
        self.packed, self.causal, self.masked = nn.Linear(10, 30), causal, masked

    def forward(self, x):
        q, k, v = self.packed(x).view(*x.shape[:2], 3, 2, 5).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1]) if self.masked else None
        output = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return output.transpose(1, 2).reshape(x.shape).square().mean()


@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, False), (False, True)])
def test_fused_attention_is_translated(causal, masked):
    """Pairs below the mask, two matmuls forward and five backward (Dao et al. 2022); values equal a real run's."""
    module, x = Attends(causal, masked), torch.randn(3, 7, 10)
    g = trace(module, x, dims=[("B", "S", None)])
    seen = trace(module, x, dims=[("B", "S", None)], train=True)
    assert all(op.kind.name != "custom_call" for op in g.ops)
    derived = cg.backward(g)
    for count in ("executed", "full"):
        assert cg.matmul_flops(derived, count=count) == cg.matmul_flops(seen, count=count)
    B, S = cg.dims("B S")
    pairs = S * (S + 1) / 2 if causal else S**2
    assert (cg.matmul_flops(g) - 2 * B * S * 10 * 30 - 2 * B * 2 * (5 + 5) * pairs).expand() == 0
    low = lower(g, B=3, S=7)
    low.load_state_dict(module.state_dict())
    torch.testing.assert_close(low(x), module(x), check_stride=False)


class Grows(nn.Module):
    def __init__(self, groups, bias):
        super().__init__()
        self.grow = nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1, groups=groups, bias=bias)

    def forward(self, x):
        return self.grow(x).relu().square().mean()


@pytest.mark.parametrize(("groups", "bias"), [(1, True), (2, False)])
def test_transposed_convolution_is_translated(groups, bias):
    """Each element in a 5 x 7 map is spread over 3 x 3 positions per channel pair in a group; so are gradients."""
    module, x = Grows(groups, bias), torch.randn(2, 6, 5, 7)
    g = trace(module, x, dims=[("B", None, None, None)])
    seen = trace(module, x, dims=[("B", None, None, None)], train=True)
    assert all(op.kind.name != "custom_call" for op in (*g.ops, *seen.ops))
    B = cg.dims("B")
    assert cg.matmul_flops(g) == 2 * B * 5 * 7 * 6 * 4 // groups * 9
    assert cg.matmul_flops(seen) == 2 * cg.matmul_flops(g)  # the input needs no gradient
    assert cg.flops(cg.backward(g)) == cg.flops(seen)
    low = lower(g, B=2)
    low.load_state_dict(module.state_dict())
    torch.testing.assert_close(low(x), module(x))


def test_strided_convolutions_equal_declared_ones():
    # the second length is floor(floor((T - 1)/2 + 1)/2 - 5/2) + 1 in the trace, ceiling(T/4) - 2 in the declaration
    layers = [nn.Conv1d(8, 16, 3, stride=2, padding=1, bias=False), nn.ReLU(), nn.Conv1d(16, 32, 5, 2, bias=False)]
    traced = trace(nn.Sequential(*layers).eval(), torch.zeros(2, 8, 101), dims=[("B", None, "T")])
    B, T = cg.dims("B T")
    with cg.Graph("declared", dtype="fp32") as declared:
        y = cg.conv(declared.input("x", (B, 8, T)), "b c t -> b o t", window=(3,), stride=2, padding=1, o=16)
        declared.output(cg.conv(cg.relu(y), "b c t -> b o t", window=(5,), stride=2, padding=0, o=32))
    assert traced.outputs[0].sizes == declared.outputs[0].sizes
    rows = cg.compare(traced, declared).rows
    assert [row.difference for row in rows] == [0] * 6
    assert any(row.first.has(sympy.ceiling) for row in rows)
    peaks = [{r.formula for r in cg.regimes(cg.peak_memory(g))} for g in (traced, declared)]
    assert peaks[0] == peaks[1]


def test_concatenating_a_single_tensor_is_a_copy():
    class Joined(nn.Module):
        def forward(self, x):
            return torch.stack([x], 1), torch.cat([x])

    g = trace(Joined(), torch.zeros(3, 5), dims=[("B", None)])
    assert all(op.kind.name != "custom_call" for op in g.ops)
    assert cg.bytes_moved(g) == 2 * 2 * 4 * 5 * cg.dims("B")
    assert [t.shape[1:] for t in g.outputs] == [(1, 5), (5,)]


#: Reductions, and FLOPs for 7-element rows: per element, and per result after the sums.
REDUCING = {
    "vector norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), 2 * 7 + 1),
    "norm of absolute values": (lambda x: x.norm(p=1, dim=-1, keepdim=True), 2 * 7),
    "largest": (lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1), 2 * 7),
    "variance": (lambda x: x.var(-1), 4 * 7 + 1),
    "deviation": (lambda x: x.std(-1, unbiased=False), 4 * 7 + 1),
    "both": (lambda x: torch.var_mean(x, -1, keepdim=True)[0], 4 * 7 + 1),
    "logarithm of sums": (lambda x: torch.logsumexp(x, -1), 4 * 7 + 2),
    "running sums": (lambda x: x.cumsum(-1), 7),
    "running counts": (lambda x: (x > 0).cumsum(1) * x, 3 * 7),
}


#: Lookups and former custom calls, and FLOPs for 7-element rows; indices are constants.
LOOKING = {
    "largest of an axis": (lambda x: x.max(-1)[0], 7),
    "largest of a middle axis": (lambda x: x.max(1, keepdim=True)[0] * x, 2 * 7),
    "its place": (lambda x: x.argmax(-1, keepdim=True) * x, 2 * 7),
    "a number at places": (lambda x: torch.zeros_like(x).scatter_(-1, x.topk(2, -1)[1], 1.0) * x, 2 * 7),
    "a number of the program": (lambda x: x * torch.tensor(3.0, dtype=x.dtype), 7),
    # a softmax has 5 per element, and rows of minus infinity are detected and replaced
    "a softmax of hidden rows": (lambda x: torch._safe_softmax(x, -1), 5 * 7 + 3 * 7),
}


class Reduces(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.randn(7, dtype=torch.float64))

    def forward(self, x):
        return self.function(x * self.scale)


class Summed(Reduces):
    def forward(self, x):
        return super().forward(x).square().sum()


@pytest.mark.parametrize("name", [*REDUCING, *LOOKING])
def test_reductions_scans_and_lookups_are_translated(name):
    """Values equal a real run's where ops are translated, including gradients."""
    (function, each), x = (REDUCING | LOOKING)[name], torch.randn(3, 5, 7, dtype=torch.float64)
    g = trace(Reduces(function), x, dims=[("B", "S", None)])
    assert all(op.kind.name != "custom_call" for op in g.ops)
    B, S = cg.dims("B S")
    assert cg.flops(g) == B * S * (7 + each)  # plus the product with the scale
    module = Summed(function)
    step = cg.backward(trace(module, x, dims=[("B", "S", None)]))
    with step:
        step.outputs.extend(step.gradients.values())
    low = lower(step, B=3, S=5)
    low.load_state_dict(module.state_dict())
    made, gradient = low(x)
    module(x).backward()
    torch.testing.assert_close(made, module(x))
    torch.testing.assert_close(gradient, module.scale.grad)


class Dense(nn.Module):
    """Queries with heads before positions in memory, such as concatenated ones."""

    def __init__(self):
        super().__init__()
        self.packed = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.packed(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q.contiguous() * 2, k, v).square().mean()


def test_dense_query_attention_saves_the_log_sum_exp():
    """Two matmuls forward and five backward: with the log-sum-exp, the result is not recomputed."""
    module, x = Dense(), torch.randn(3, 5, 8)
    derived, seen = (
        cg.backward(trace(module, x, dims=[("B", "S", None)])),
        trace(module, x, dims=[("B", "S", None)], train=True),
    )
    B, S = cg.dims("B S")
    linear = 2 * B * S * 8 * 24
    assert cg.matmul_flops(derived) == (2 * linear + 7 * 2 * B * 2 * S**2 * 4).expand() == cg.matmul_flops(seen)
    with derived:
        derived.outputs.extend(derived.gradients.values())
    low = lower(derived, B=3, S=5)
    low.load_state_dict(module.state_dict())
    loss, *gradients = low(x)
    module(x).backward()
    torch.testing.assert_close(loss, module(x))
    for gradient, p in zip(gradients, module.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_failed_translation_falls_back_to_the_rule(monkeypatch):
    def failing(call):
        return call["no such argument"]

    x = torch.zeros(3, 5)
    monkeypatch.setitem(TRANSLATIONS, "tril", failing)
    monkeypatch.setitem(RULES, "tril", lambda call: Counts(pointwise=call.out.numel))
    g = trace(Function(torch.tril), x)
    assert [op.kind.name for op in g.ops] == ["custom_call"]
    assert cg.flops(g) == 3 * 5


def test_failed_translation_or_rule_is_named(monkeypatch):
    x = torch.zeros(3, 5)
    monkeypatch.delitem(RULES, "tril", raising=False)
    monkeypatch.setitem(TRANSLATIONS, "tril", lambda call: call["no such argument"])
    text = r"aten::tril.default: its translation failed on these arguments with KeyError: .*no such argument"
    with pytest.raises(cg.UnsupportedError, match=text):
        trace(Function(torch.tril), x)
    monkeypatch.setitem(RULES, "tril", lambda call: Counts(pointwise=call.out.sizes[2]))
    with pytest.raises(
        cg.UnsupportedError, match=r"aten::tril.default: its cost rule failed on these arguments with IndexError"
    ):
        trace(Function(torch.tril), x)


#: Functions of empty tensors with non-empty results.
EMPTY = {
    "padded": lambda x, e: nn.functional.pad(e, (1, 4)) + x,
    "summed": lambda x, e: e.sum(1, keepdim=True) + x,
    "multiplied": lambda x, e: e @ e.T + x.sum(),
    "added at no row": lambda x, e: x.index_add(0, torch.zeros(0, dtype=torch.int64), x[:0]),
    "picked from nowhere": lambda x, e: x[torch.zeros(0, dtype=torch.int64)].sum() + x,
    "scattered": lambda x, e: x.scatter_add(0, torch.zeros(0, 5, dtype=torch.int64), x[:0]),
    "written": lambda x, e: x.slice_scatter(e, 1, 5, 5),
    "any": lambda x, e: (e > 0).any(1, keepdim=True) * x,
    "attended": lambda x, e: nn.functional.scaled_dot_product_attention(x[None], x[None, :0], x[None, :0]) + x,
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_tensors_are_counted_and_run(name):
    torch.manual_seed(5)
    layer = nn.Linear(5, 5)
    module = nn.Sequential(layer, Function(lambda x: EMPTY[name](x, x[:, 5:]).sin().sum()))
    x = torch.randn(3, 5)
    g = trace(module, x, train=True)
    with FlopCounterMode(display=False) as counter:
        expected = module(x)
        expected.backward()
    assert cg.matmul_flops(g, count="full") == counter.get_total_flops()
    low = lower(g)
    low.load_state_dict(module.state_dict(), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(low(x), expected.detach())
    graph = trace(module, x, train=True, dims=[("B", None)])
    assert cg.matmul_flops(graph, B=3) == cg.matmul_flops(g)
