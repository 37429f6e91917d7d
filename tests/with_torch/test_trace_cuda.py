"""GPU kernels traced without a GPU, against torch's CUDA registrations and its FLOP counter."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own habit
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph.torch import dispatched, lower, random_inputs, trace

aten = torch.ops.aten
B, S = 3, 17
AXES = [("B", None, "S", None)] * 3


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options)


class Loss(nn.Module):
    def __init__(self, inner, first=True):
        super().__init__()
        self.inner, self.scale, self.first = inner, nn.Parameter(torch.ones(())), first

    def forward(self, x, *others):
        output = self.inner(x * self.scale.to(x.dtype) if x.is_floating_point() else x, *others)
        return (output[0] if isinstance(output, tuple) else output).float().sum()


def heads(dtype, size, groups=4, value=None):
    shapes = [(B, 4, S, size), (B, groups, S, size), (B, groups, S, value or size)]
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def attended(dtype, size, *, arch="sm_90", groups=4, mask=None, train=False, value=None, **options):
    inner = Attention(**options, **({"enable_gqa": True} if groups != 4 else {}))
    module = Loss(inner) if train else inner
    inputs, dims = heads(dtype, size, groups, value), list(AXES)
    if mask is not None:
        inputs, dims = [*inputs, torch.zeros(S, S, dtype=mask)], [*dims, ("S", "S")]
    return trace(module, *inputs, dims=dims, train=train, device="cuda", arch=arch)


def sized(size):
    return cg.evaluate(size.expr, **{str(n): {"B": B, "S": S}[str(n)] for n in size.expr.free_symbols})


def called(graph):
    return [op.call.target.removesuffix(".default") for op in graph.ops if op.call is not None]


def dispatch_rules(graph):
    return {row.rule for row in dispatched(graph)}


fp16, bf16, fp32, fp64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# by the conditions of sdp_utils.cpp in torch 2.13: cuDNN first on sm_90 and sm_100, flash for 16-bit dtypes without a
# mask, efficient for aligned heads, math for everything
CHOSEN = [
    ("cuDNN", bf16, 64, {}),
    ("cuDNN", fp16, 80, {"is_causal": True}),
    ("cuDNN", bf16, 128, {"mask": torch.bool}),
    ("cuDNN", bf16, 256, {"train": True}),
    ("cuDNN", bf16, 64, {"groups": 2}),
    ("cuDNN", bf16, 64, {"dropout_p": 0.125}),
    ("flash", bf16, 64, {"dropout_p": 0.1}),  # not a multiple of 1/16
    ("flash", fp16, 77, {}),  # which flash pads to 80
    ("flash", bf16, 256, {"arch": "sm_100"}),
    ("cuDNN", bf16, 192, {"arch": "sm_100", "value": 128}),
    ("flash", bf16, 64, {"arch": "sm_80"}),
    ("flash", bf16, 64, {"arch": "sm_80", "groups": 2}),
    ("efficient", bf16, 64, {"arch": "sm_80", "mask": torch.bool}),
    ("efficient", bf16, 64, {"arch": "sm_80", "mask": bf16}),
    ("math", bf16, 77, {"arch": "sm_80", "mask": bf16}),  # 77 is not a multiple of 8
    ("flash", bf16, 256, {"arch": "sm_86"}),
    ("flash", bf16, 256, {"arch": "sm_86", "train": True}),
    ("efficient", bf16, 200, {"arch": "sm_86", "train": True}),  # in (192, 224]
    ("efficient", bf16, 256, {"arch": "sm_120", "train": True, "dropout_p": 0.1}),
    ("efficient", fp32, 64, {}),
    ("efficient", fp32, 80, {"is_causal": True, "train": True}),
    ("efficient", fp32, 64, {"mask": torch.bool}),
    ("math", fp32, 77, {}),  # not a multiple of 4
    ("math", fp32, 64, {"groups": 2}),
    ("math", fp64, 64, {}),
    ("efficient", fp16, 64, {"arch": "sm_75"}),
    ("math", bf16, 64, {"arch": "sm_75"}),
]


@pytest.mark.parametrize(("kernel", "dtype", "size", "options"), CHOSEN)
def test_attention_dispatches_like_torch(kernel, dtype, size, options):
    graph = attended(dtype, size, **options)
    assert dispatch_rules(graph) == {f"attention: {kernel}"}
    name = {"cuDNN": "_cudnn", "flash": "_flash", "efficient": "_efficient", "math": "_math"}[kernel]
    fused = [target for target in called(graph) if target.startswith("_scaled_dot_product")]
    expected = [
        f"_scaled_dot_product{name}_attention{way}" for way in ("", "_backward")[: 1 + options.get("train", False)]
    ]
    assert fused == ([] if kernel == "math" else expected)


@pytest.mark.parametrize(
    ("dtype", "arch", "size"),
    [(fp16, "sm_80", 64), (bf16, "sm_80", 80), (fp16, "sm_90", 80), (bf16, "sm_90", 256), (fp32, "sm_90", 64)],
)
def test_saved_attention_tensors_and_flops_equal_torchs(dtype, arch, size):
    graph = attended(dtype, size, arch=arch, train=True)
    op = next(op for op in graph.ops if op.call is not None and op.call.target.startswith("_scaled_dot_product"))
    q, k, v = (torch.zeros_like(t, device="meta", requires_grad=True) for t in heads(dtype, size))
    keeps = {"_scaled_dot_product_flash_attention": (0.0, False, False)}.get(op.call.name, (None, True, 0.0, False))
    with FlopCounterMode(display=False) as counter:
        outputs = getattr(aten, op.call.name)(q, k, v, *keeps)
        outputs[0].float().sum().backward()
    saved = [t for t in outputs if isinstance(t, torch.Tensor) and t.numel()]
    whole = [tuple(sized(n) for n in t.sizes) for t in op.results]
    assert whole == [tuple(t.shape) for t in saved]
    # a seed takes eight bytes, as in torch's uint64
    assert [int(t.dtype.bytes) for t in op.results] == [t.element_size() for t in saved]
    assert cg.matmul_flops(graph, count="full", B=B, S=S) == counter.get_total_flops()


def test_flash_attention_step_peaks_in_the_gradient():
    graph = attended(bf16, 64, arch="sm_80", train=True, is_causal=True)
    elements = B * 4 * S * 64
    # the caller holds q, k, v; scaled queries and the result are saved for the gradient, with the fp32 log-sum-exp; the
    # result and all three have gradients; scale, its copy and loss have one element
    fixed = elements * 2 * (3 + 2 + 1 + 3) + 4 * B * 4 * S + 16 + 8
    # the kernel accumulates the gradient of queries in fp32: rows padded to 128, and the sum per row
    workspace = 4 * B * 4 * 128 * (64 + 1)
    assert 0 <= cg.peak_memory(graph, B=B, S=S) - fixed - workspace < 64


def test_padded_heads_keep_the_original_scale():
    graph = attended(fp16, 77)
    (op,) = (op for op in graph.ops if op.call is not None and "flash" in op.call.target)
    assert op.call.keywords["scale"] == pytest.approx(77**-0.5)
    assert called(graph)[:3] == ["constant_pad_nd"] * 3
    assert cg.evaluate(graph.outputs[0].sizes[-1].expr) == 77


def test_grouped_query_flash_gradient_needs_more_workspace():
    graphs = {g: attended(bf16, 64, arch="sm_80", groups=g, train=True) for g in (2, 4)}
    kinds = {
        g: next(op for op in graph.ops if op.call is not None and "flash_attention_backward" in op.call.target).kind
        for g, graph in graphs.items()
    }
    # gradients of keys and values per query head, before their sum: mha_bwd, dk_expanded and dv_expanded
    more = kinds[2].workspace - kinds[4].workspace
    assert sized(more) == 2 * B * 4 * S * 64 * 2


@pytest.mark.parametrize(("length", "padded"), [(17, True), (16, False)])
def test_attention_mask_is_padded_to_its_alignment(length, padded):
    inputs = [torch.zeros(2, 4, length, 64) for _ in range(3)]
    mask = torch.zeros(length, length, dtype=torch.bool)
    graph = trace(Attention(), *inputs, mask, dims=[*AXES, ("S", "S")], device="cuda")
    assert ("constant_pad_nd" in called(graph)) is padded
    with pytest.raises(cg.BindingError, match="against the assumption"):
        cg.flops(graph, B=2, S=33 - length)


# -- other layers ------------------------------------------------------------------------------------------------


def step(module, *inputs, dims, **options):
    return trace(Loss(module), *inputs, dims=dims, train=True, device="cuda", **options)


def test_dropout_is_one_kernel_with_a_bool_mask():
    graph = step(nn.Dropout(0.1), torch.zeros(3, 5), dims=[("B", None)])
    assert [t for t in called(graph) if "drop" in t] == ["native_dropout", "native_dropout_backward"]
    (op,) = (op for op in graph.ops if op.call is not None and op.call.target.startswith("native_dropout.d"))
    assert [t.dtype.name for t in op.results] == ["fp32", "bool"]
    assert not dispatched(trace(nn.Dropout(0.1).eval(), torch.zeros(3, 5), dims=[("B", None)], device="cuda"))


@pytest.mark.parametrize(("dtype", "cudnn"), [(fp32, True), (bf16, False)])
@pytest.mark.parametrize("train", [False, True])
def test_batch_norm_uses_cudnn_for_supported_dtypes(dtype, cudnn, train):
    module = nn.BatchNorm2d(5, dtype=dtype).train(train)
    x, dims = torch.zeros(3, 5, 7, 11, dtype=dtype), [("B", None, None, None)]
    graphs = [trace(Loss(module) if train else module, x, dims=dims, train=train, device=d) for d in ("cpu", "cuda")]
    names = [t for t in called(graphs[1]) if "batch_norm" in t]
    assert all(("cudnn" in name) is cudnn for name in names)
    assert len(names) == 1 + train or not cudnn  # torch's own gradient has only declared ops
    assert cg.flops(graphs[1]) == cg.flops(graphs[0])


@pytest.mark.parametrize(
    ("norm", "dtype"), [("layer", fp16), ("layer", fp64), ("group", bf16), ("group", fp32), ("batch", bf16)]
)  # other dtypes use cuDNN
def test_norm_statistics_have_the_accumulation_dtype(norm, dtype):
    # torch's registrations for non-CPU devices say so
    module = {"layer": nn.LayerNorm(5), "batch": nn.BatchNorm1d(6), "group": nn.GroupNorm(3, 6)}[norm].to(dtype)
    x, dims = torch.zeros(3, 6, 5, dtype=dtype), [("B", None, None)]
    p = torch.zeros(6, dtype=dtype, device="meta")
    references = {
        "layer": lambda t: aten.native_layer_norm(t, [5], p[:5], p[:5], 1e-5),
        "batch": lambda t: aten.native_batch_norm(t, p, p, p, p, True, 0.1, 1e-5),
        "group": lambda t: aten.native_group_norm(t, p, p, 3, 6, 5, 3, 1e-5),
    }[norm](x.to("meta"))
    graphs = [trace(Loss(module), x, dims=dims, train=True, device=d) for d in ("cpu", "cuda")]
    (op,) = (op for op in graphs[1].ops if f"{norm}_norm" in op.name and op.phase == "forward")
    made = [int(t.dtype.bytes) for t in op.results if t.storage not in {x.storage for x in op.operands}]
    assert made == [t.element_size() for t in references]
    assert cg.flops(graphs[1]) == cg.flops(graphs[0])
    assert not [op for op in graphs[1].walk() if op.kind.name == "custom_call"]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_rms_norm_is_one_kernel_per_direction():
    graph = step(nn.RMSNorm(7), torch.zeros(3, 7, dtype=fp32), dims=[("B", None)])
    assert [t for t in called(graph) if "rms" in t] == ["_fused_rms_norm", "_fused_rms_norm_backward"]
    (op,) = (op for op in graph.ops if op.call is not None and op.call.target.startswith("_fused_rms_norm.d"))
    assert [[str(n) for n in t.sizes] for t in op.results] == [["B", "7"], ["B", "1"]]
    mixed = trace(nn.RMSNorm(7), torch.zeros(3, 7, dtype=bf16), dims=[("B", None)], device="cuda")
    assert not dispatched(mixed)  # an fp32 scale: torch decomposes the norm


def test_softmax_fuses_the_fp16_to_fp32_cast():
    class Wide(nn.Module):
        def forward(self, x):
            return F.softmax(x, -1, dtype=torch.float32)

    assert called(trace(Wide(), torch.zeros(3, 5, dtype=fp16), dims=[("B", None)], device="cuda")) == ["_softmax"]
    assert called(trace(Wide(), torch.zeros(3, 5, dtype=bf16), dims=[("B", None)], device="cuda")) == [
        "_to_copy",
        "_softmax",
    ]


def test_encoder_fast_path_uses_fused_attention():
    # torch's fast path needs an even number of heads
    layer = nn.TransformerEncoderLayer(48, 6, 29, batch_first=True).eval()
    graph = trace(layer, torch.zeros(3, 17, 48), dims=[("B", "S", None)], device="cuda")
    plain = trace(layer, torch.zeros(3, 17, 48), dims=[("B", "S", None)])
    fused = [t for t in called(graph) if t.startswith("_scaled_dot_product")]
    assert fused == ["_scaled_dot_product_efficient_attention"]
    assert "bmm" in called(plain)
    assert cg.matmul_flops(graph) == cg.matmul_flops(plain)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_one_cudnn_call(kind, gates):
    module = kind(5, 7, num_layers=2, bidirectional=True)
    graph = step(module, torch.zeros(11, 3, 5), dims=[("T", "B", None)])
    assert [t for t in called(graph) if "rnn" in t] == ["_cudnn_rnn", "_cudnn_rnn_backward"]
    # both weights multiply at each step, layer and direction; twice as many products in backward
    weights = gates * 7 * (2 * (5 + 7) + 2 * (14 + 7))
    assert cg.matmul_flops(graph, T=11, B=3) == 3 * 2 * 11 * 3 * weights


@pytest.mark.parametrize(("kind", "name", "gates"), [(nn.LSTMCell, "lstm", 4), (nn.GRUCell, "gru", 3)])
def test_recurrent_cells_are_two_matmuls_and_a_kernel(kind, name, gates):
    graph = step(kind(5, 7), torch.zeros(3, 5), dims=[("B", None)])
    assert next(t for t in called(graph) if "thnn" in t) == f"_thnn_fused_{name}_cell"
    # both products; twice in backward, except for the previous state, which no parameter affects
    assert cg.matmul_flops(graph, B=3) == 2 * 3 * gates * 7 * (3 * 5 + 2 * 7)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_default_to_foreach(kind):
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 11))
    graphs = [
        step(net, torch.zeros(3, 5), dims=[("B", None)], optimizer=lambda ps, o=o: kind(ps, lr=0.1, **o))
        for o in ({}, {"foreach": True}, {"foreach": False})
    ]
    lists = [[t for t in called(g) if t.startswith("_foreach")] for g in graphs]
    assert lists[0] == lists[1] != []
    assert lists[2] == []


@pytest.mark.parametrize("dtype", [pytest.param(fp32, marks=pytest.mark.long), bf16])
def test_llama_attention_kernel_depends_on_dtype(dtype):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=97, num_hidden_layers=1, **sizes)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    ids, dims = torch.zeros(3, 17, dtype=torch.int64), [("B", "S")]
    graphs = [trace(model, ids, dims=dims, keywords={"use_cache": False}, device=device) for device in ("cpu", "cuda")]
    # shared KV heads: cuDNN supports them, but no fp32 kernel does
    assert dispatch_rules(graphs[1]) == {"attention: math" if dtype == fp32 else "attention: cuDNN"}
    counts = [cg.matmul_flops(g, count="full", B=3, S=17) for g in graphs]
    assert counts[0] == counts[1]


# -- visible device ----------------------------------------------------------------------------------------------------


class Asking(nn.Module):
    def forward(self, x):
        print(x.device, x.is_cuda, x.is_cpu, torch.cuda.is_available(), torch.cuda.get_device_capability())
        more = torch.ones(x.shape[0], device=x.device) + torch.arange(x.shape[0], device="cuda")
        return x.to("cuda:0").cuda() * more


def test_program_sees_a_gpu(capsys):
    before = torch.cuda.is_available()
    trace(Asking(), torch.zeros(3), dims=[("N",)], device="cuda", arch="sm_86")
    assert capsys.readouterr().out == "cuda:0 True False True (8, 6)\n"
    assert torch.cuda.is_available() == before
    assert torch.zeros(3).device.type == "cpu"


def test_recomputation_uses_gpu_kernels():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            return checkpoint(lambda y: F.dropout(self.linear(y), 0.1).relu(), x, use_reentrant=False)

    graph = step(Block(), torch.zeros(3, 5), dims=[("B", None)])
    phases = [op.phase for op in graph.ops if op.call is not None and op.call.target.startswith("native_dropout.d")]
    assert phases == ["forward", "recompute"]


# -- transforms and files ----------------------------------------------------------------------------------------------


def test_dispatch_reasons_are_reported_and_saved(tmp_path):
    graph = attended(bf16, 64, arch="sm_80", train=True)
    rows = dispatched(graph)
    assert [row.call for row in rows] == [
        "_scaled_dot_product_flash_attention.default",
        "_scaled_dot_product_flash_attention_backward.default",
    ]
    assert {row.why for row in rows} == {"not cuDNN: sm_80"}
    assert all("sdp_utils.cpp, can_use_flash_attention" in row.source for row in rows)
    cg.save(graph, tmp_path / "g.json")
    assert dispatched(cg.load(tmp_path / "g.json")) == rows
    assert dispatched(attended(fp32, 64)) != []
    assert dispatched(trace(Attention(), *heads(bf16, 64), dims=AXES)) == []


def test_lowering_to_cpu_refuses_cuda_only_kernels():
    graph = attended(fp32, 64, is_causal=True)
    inputs = random_inputs(graph, B=2, S=5)
    outputs = lower(graph, B=2, S=5)(*inputs)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(outputs[0] if isinstance(outputs, tuple) else outputs, expected)
    layer = trace(nn.LSTM(5, 7), torch.zeros(11, 3, 5), dims=[("T", "B", None)], device="cuda")
    with pytest.raises(cg.UnsupportedError, match=r"_cudnn_rnn\.default only for CUDA"):
        lower(layer, T=3, B=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "tpu"}, "trace: device 'tpu'"),
        ({"device": "cuda:1"}, "trace: device 'cuda:1'"),
        ({"device": "cuda", "arch": "hopper"}, "arch 'hopper', expected a compute capability from sm_50 to sm_121"),
        ({"device": "cuda", "arch": "sm_200"}, "arch 'sm_200', expected a compute capability"),
        ({"device": "cuda", "arch": 90}, "arch 90, expected a compute capability"),
        ({"arch": "sm_90"}, "arch 'sm_90' requires device='cuda'"),
    ],
)
def test_invalid_devices_are_refused(options, text):
    with pytest.raises(cg.CostGraphError, match=text):
        trace(nn.ReLU(), torch.zeros(3), dims=[("N",)], **options)


def test_packed_sequence_is_refused():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(5, 7)

        def forward(self, x, lengths):
            return self.layer(nn.utils.rnn.PackedSequence(x, lengths))[0].data

    with pytest.raises(cg.UnsupportedError, match="batch_sizes should always be on CPU"):
        trace(Packed(), torch.zeros(5, 5), torch.tensor([3, 2]), device="cuda")


def test_autocast_on_a_gpu_is_refused_by_name():
    class Cast(nn.Module):
        def forward(self, x):
            with torch.autocast("cuda"):
                return x @ x.T

    with pytest.raises(cg.UnsupportedError, match=r'torch.autocast\("cuda"\) cannot be traced'):
        trace(Cast(), torch.zeros(3, 5), dims=[("N", None)], device="cuda")
    assert not torch.is_autocast_enabled("cuda")


def test_recurrent_layer_with_unsupported_dtype_is_refused():
    with pytest.raises(cg.UnsupportedError, match=r"cuDNN has no recurrent layers in torch.bfloat16; expected fp32"):
        trace(nn.LSTM(5, 7, dtype=bf16), torch.zeros(3, 2, 5, dtype=bf16), dims=[("T", "B", None)], device="cuda")


def test_gpu_kernels_have_workspaces():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 12, bias=False), nn.GroupNorm(3, 12)

        def forward(self, x):
            return self.norm(torch.softmax(self.layer(x), -1).transpose(1, 2)).square().mean()

    g = trace(Scores(), torch.zeros(2, 5, 8), dims=[("B", "S", None)], train=True, device="cuda", arch="sm_80")
    workspaces = cg.timeline(g, device="cuda", arch="sm_80", B=7, S=11).workspaces
    # in the forward pass, and in the gradient of the weights
    libraries = {"cuBLAS": (2 * 4096 + 8 * 16) * 1024, "cuBLAS (autograd)": (2 * 4096 + 8 * 16) * 1024}
    # a copy of the transposed grad, and grad * output; sums per channel and factors per group
    kernels = {
        "_softmax_backward_data": 2 * 7 * 11 * 12 * 4,
        "norm/native_group_norm_backward": (3 * 7 * 12 + 2 * 7 * 3) * 4,
    }
    assert workspaces == {**libraries, **kernels}


def test_explicit_autograd_grad_is_a_backward_phase():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 5, bias=False)

        def forward(self, x):
            with torch.enable_grad():
                y = self.layer(x.requires_grad_()).sum()
                return torch.autograd.grad(y, x)[0]

    g = trace(Penalty(), torch.zeros(7, 3), dims=[("B", None)])
    costs = cg.costs(g, B=7)
    # each of the two matmuls has 7 x 3 x 5 points
    assert [costs.filter(phase=p).total().matmul for p in ("forward", "backward")] == [2 * 7 * 3 * 5] * 2


def test_histc_accepts_integers_on_a_gpu():
    class Counts(nn.Module):
        """Count the rows per expert, as transformers does on a GPU; a CPU's histc rejects integers."""

        def forward(self, x):
            return torch.histc(x.argmax(-1).int(), bins=5, min=0, max=4)

    g = trace(Counts(), torch.zeros(7, 5), dims=[("N", None)], device="cuda")
    assert (g.outputs[0].sizes[0], g.outputs[0].dtype.name) == (5, "int32")
