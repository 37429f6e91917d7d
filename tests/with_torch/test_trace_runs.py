"""Small modules, traced and run: peaks against the allocator, matmul FLOPs against torch's counter."""

from functools import reduce

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from traced import differences, held_by, real_peak, stepper

import costgraph as cg
from costgraph.torch import lower, trace

B, S, D, H = 7, 31, 52, 4
#: Bytes of scalars, channel statistics and masks; every other tensor here is far larger.
NEAR = 4096


class Program(nn.Module):
    """A function of tensors and modules; with `train` its result is a scalar, and gradients are dropped after each
    run."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, *tensors):
        return self.function(*tensors, *self.parts)


class Loss(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *tensors):
        return self.module(*tensors).sum()


def rand(*sizes, grad=False):
    return torch.randn(sizes).requires_grad_(grad)


def peak_error(module, inputs, train=False):
    """Return the bytes by which the real peak exceeds the trace's."""
    module.train(train)
    if not train:
        return real_peak(stepper(module, inputs), *held_by(module, inputs)) - cg.peak_memory(trace(module, *inputs))
    module = Loss(module)

    def step():
        module(*inputs).backward()
        for t in (*module.parameters(), *inputs):
            t.grad = None

    graph = trace(module, *inputs, train=True)
    return real_peak(step, *held_by(module, inputs)) - cg.peak_memory(graph)


# -- layers with a fused inference op ----------------------------------------------------------------------------------

HIDDEN = torch.arange(S).expand(B, S) > 23
CAUSAL = torch.ones(S, S).triu(1).bool()


def attention(heads=H, bias=True, batch_first=True, **options):
    return Program(
        lambda x, m: m(x, x, x, **options)[0], nn.MultiheadAttention(D, heads, 0.0, bias, batch_first=batch_first)
    )


def layer(inner=97, **options):
    return nn.TransformerEncoderLayer(D, H, inner, **{"batch_first": True} | options)


def masked(function, module):
    return Program(lambda x, mask, m: function(x, mask, m), module)


ATTENTION = nn.MultiheadAttention(D, H, batch_first=True)
WHOLE = {
    "attention and its weights": lambda: (attention(),),
    "attention and the weights of each head": lambda: (attention(average_attn_weights=False),),
    "attention without weights": lambda: (attention(need_weights=False),),
    "attention, padded": lambda: (masked(lambda x, k, m: m(x, x, x, k)[0], ATTENTION), HIDDEN),
    "attention, causal": lambda: (masked(lambda x, k, m: m(x, x, x, None, False, k)[0], ATTENTION), CAUSAL),
    "attention, padded and causal": lambda: (
        Program(lambda x, k, c, m: m(x, x, x, k, attn_mask=c)[0], ATTENTION), HIDDEN, CAUSAL
    ),
    "attention, a mask of numbers": lambda: (
        masked(lambda x, k, m: m(x, x, x, attn_mask=k)[0], ATTENTION), torch.zeros(S, S)
    ),
    "attention of an odd number of heads": lambda: (attention(13),),
    "attention, positions first": lambda: (attention(batch_first=False),),
    "attention without biases": lambda: (attention(bias=False),),
    "attention to something else": lambda: (Program(lambda x, m: m(x, x[:, :23], x[:, :23])[0], ATTENTION),),
    "layer": lambda: (layer(),),
    "layer of wide products": lambda: (layer(1009, activation="gelu"),),
    "layer, norms first": lambda: (layer(norm_first=True),),
    "layer, padded": lambda: (masked(lambda x, k, m: m(x, src_key_padding_mask=k), layer()), HIDDEN),
    "encoder": lambda: (nn.TransformerEncoder(layer(), 3, norm=nn.LayerNorm(D)),),
    "encoder, causal": lambda: (
        masked(lambda x, k, m: m(x, mask=k, is_causal=True), nn.TransformerEncoder(layer(), 2)), CAUSAL
    ),
    "encoder, padded": lambda: (
        masked(
            lambda x, k, m: m(x, src_key_padding_mask=k), nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)
        ),
        HIDDEN,
    ),
    "decoder": lambda: (
        Program(lambda x, m: m(x, x), nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 97, batch_first=True), 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_fused_layers_match_the_allocator(name):
    module, *masks = WHOLE[name]()
    assert abs(peak_error(module, (rand(B, S, D), *masks))) <= NEAR


def test_fused_layer_matches_its_decomposition():
    module, x = layer().eval(), rand(B, S, D)
    g = trace(module, x, dims=[("B", "S", None)])
    run = lower(g, B=B, S=S)
    run.load_state_dict(module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x))
    b, s = cg.dims("B S")
    # four projections, two attention matmuls, two MLP matmuls
    assert cg.matmul_flops(g) == 2 * (4 * D * D + 2 * D * 97) * b * s + 2 * 2 * D * b * s**2
    assert differences(g, module, (x,), B=B, S=S)[0] == 0


# -- recurrent layers ------------------------------------------------------------------------------------------------


def outputs(module):
    return Program(lambda x, m: m(x)[0], module)


RECURRENT = {
    "LSTM": lambda: nn.LSTM(D, 61),
    "LSTM in a state of whole lines": lambda: nn.LSTM(48, 64),
    "LSTM of two layers, both ways": lambda: nn.LSTM(D, 67, 2, bidirectional=True),
    "LSTM without biases, with dropout": lambda: nn.LSTM(D, 17, 2, bias=False, dropout=0.5),
    "LSTM, projected": lambda: nn.LSTM(D, 61, proj_size=23),
    "GRU": lambda: nn.GRU(D, 61),
    "GRU of two layers, both ways": lambda: nn.GRU(D, 23, 2, bidirectional=True, dropout=0.5),
    "RNN": lambda: nn.RNN(D, 61),
}
# the CPU's instruction set determines oneDNN's kernels, and with them the blocks of packed weights
AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"


#: Layers for which a plain run tests a training step; for the others it tests the forward pass.
TRAINED = ("LSTM in a state of whole lines", "LSTM of two layers, both ways", "LSTM, projected", "RNN")


@pytest.mark.parametrize(
    ("name", "train"),
    [
        pytest.param(name, train, marks=() if (name in TRAINED) == train else pytest.mark.long)
        for name in RECURRENT
        for train in (False, True)
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")  # it says that they run step by step
def test_recurrent_layers(name, train):
    if "LSTM" in name and not AVX2:
        pytest.skip("workspaces are those of a processor with AVX2")
    module = RECURRENT[name]()
    assert abs(peak_error(outputs(module), (rand(3, B, module.input_size),), train)) <= NEAR


@pytest.mark.parametrize(
    "sizes",
    [(2, 3, 5, 7), (31, 7, 52, 61), (31, 131, 52, 61), (3, 7, 500, 131), (13, 31, 128, 256)],
)
def test_lstm_saved_bytes_equal_onednns(sizes):
    steps, batch, inner, size = sizes
    module, x = nn.LSTM(inner, size), rand(steps, batch, inner)
    state = torch.zeros(1, batch, size)
    flags = (False, [], 2, size, 1, True, False, False, True)
    *_, saved = torch.ops.aten.mkldnn_rnn_layer(x, *module.all_weights[0], state, state, *flags)
    g = trace(Loss(outputs(module)), x, dims=[("T", "B", None)], train=True)
    (workspace,) = (op.results[3] for op in g.ops if (op.call.target if op.call else "") == "mkldnn_rnn_layer.default")
    assert workspace.sizes[0].expr.subs({cg.dims("T"): steps, cg.dims("B"): batch}) == saved.numel()


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("name", "dims", "train"),
    [
        pytest.param("LSTM", ("T", "B", None), False, marks=pytest.mark.long),
        pytest.param("LSTM", ("T", "B", None), True, marks=pytest.mark.long),
        ("LSTM of two layers, both ways", ("T", "B", None), True),
        ("LSTM without biases, with dropout", ("T", "B", None), False),
        ("LSTM, projected", (None, "B", None), True),
        pytest.param("GRU", (None, "B", None), True, marks=pytest.mark.long),
        ("GRU of two layers, both ways", (None, "B", None), False),
    ],
)
def test_recurrent_layers_with_open_sizes_match_fixed_sizes(name, dims, train):
    torch.manual_seed(0)
    module, x = outputs(RECURRENT[name]()).train(train), rand(3, B, D)
    module = Loss(module) if train else module
    named, plain = (trace(module, x, dims=[names], train=train) for names in (dims, None))
    sizes = {n: k for n, k in zip(dims, x.shape, strict=True) if n}
    for question in (cg.matmul_flops, cg.flops, cg.bytes_moved, cg.peak_memory):
        assert question(named, **sizes) == question(plain)


def test_lstm_accepts_batch_first_and_initial_state():
    module = nn.LSTM(5, 7, batch_first=True)
    net = Program(lambda x, h, c, m: m(x, (h, c))[0], module)
    given = rand(3, 11, 5), rand(1, 3, 7), rand(1, 3, 7)
    g = trace(net, *given, dims=[("B", "T", None), (None, "B", None), (None, "B", None)])
    assert cg.matmul_flops(g) == 2 * 4 * 7 * (5 + 7) * cg.dims("B") * cg.dims("T")
    run = lower(g, B=3, T=11)
    run.load_state_dict(net.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(run(*given), net(*given))


# -- side effects ------------------------------------------------------------------------------------------------------


def test_full_slices_are_no_ops_with_open_sizes():
    def parts(y, m):
        y = m(y)
        return (y[:, 1:] * y[:, :-1, :]).sum() + y[..., None, :2].sum() + y.flatten(0, 1)[:, None].sum()

    net, x = Program(parts, nn.Linear(D, D)), rand(B, S, D)
    named, plain = (trace(net, x, dims=[dims], train=True) for dims in (("B", "S", None), None))
    for g in (named, plain):
        backward = [op for op in g.ops if (op.call.target if op.call else "") == "slice_backward.default"]
        assert len(backward) == 3  # one for each partial slice
    for question in (cg.bytes_moved, cg.peak_memory):
        assert question(named, B=B, S=S) == question(plain)
    assert not named.relations.relations


def again(module, x, reentrant):
    return checkpoint(module, x, use_reentrant=reentrant)


@pytest.mark.parametrize(("reentrant", "train"), [(False, False), (False, True), (True, True)])
def test_checkpoints_save_the_rng_state(reentrant, train):
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)) for _ in range(3)]
    net = Program(lambda x, *blocks: reduce(lambda h, m: again(m, h, reentrant), blocks, x), *blocks)
    x = rand(2, 3, grad=True)
    assert 0 <= peak_error(net, (x,), train) <= 64  # three RNG states with 5,056 bytes each, and loss scalars
    without = Program(lambda x, *blocks: reduce(lambda h, m: m(h), blocks, x), *blocks)
    state = torch.get_rng_state().numel()
    names = [cg.peak_memory(trace(Loss(m.train()), x, train=True)) for m in (net, without)]
    assert names[0] - names[1] > 2 * state


def test_trace_restores_torch_functions():
    before = torch.get_rng_state, torch.set_rng_state, torch.overrides.has_torch_function
    x = rand(3)
    state = torch.get_rng_state()
    trace(Program(lambda x, m: again(m, x, False), nn.Dropout()), x)
    assert before == (torch.get_rng_state, torch.set_rng_state, torch.overrides.has_torch_function)
    assert torch.equal(torch.get_rng_state(), state)


# -- non-dense operands ------------------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda: rand(B, 59, 61).mT,
    "a part": lambda: rand(B, 61, 60)[..., 1:],
    "repeated": lambda: rand(1, 61, 59).expand(B, 61, 59),
}
#: Kernels with index operands.
LOOKUPS = ("cross entropy", "lookup that is written into", "rows")
KERNELS = {
    "softmax": lambda: Program(lambda x: x.softmax(-1) ** 2),
    "softmax along another axis": lambda: Program(lambda x: x.softmax(1) ** 2),
    "log_softmax": lambda: Program(lambda x: x.log_softmax(-1)),
    "layer norm": lambda: nn.LayerNorm(59),
    "batch norm": lambda: nn.BatchNorm1d(61),
    "cross entropy": lambda: Program(lambda x, t: functional.cross_entropy(x.flatten(0, 1), t.flatten())),
    "linear": lambda: nn.Linear(59, 97),
    "products of matrices": lambda: Program(lambda x: x @ x.mT),
    "maximum of windows": lambda: Program(lambda x: functional.max_pool2d(x[:, None], 2)),
    "mean of windows": lambda: Program(lambda x: functional.avg_pool2d(x[:, None], 2)),
    "log of a sum of exponentials": lambda: Program(lambda x: x.logsumexp(-1)),
    "lookup that is written into": lambda: Program(lambda x, t: x.gather(2, t[..., None])),
    "largest": lambda: Program(lambda x: x.topk(3)[0]),
    "rows": lambda: Program(lambda x, t: x[:, t[0]]),
}


class Leaf(nn.Module):
    """Passes a program a strided view of a parameter."""

    def __init__(self, program, layout):
        super().__init__()
        self.program, self.operand = program, nn.Parameter(layout)

    def forward(self, one, *targets):
        return self.program(self.operand, *targets) * one


#: A plain run tests each kernel in one layout, and each layout with several kernels.
CASES = [(kernel, layout, train) for train in (True, False) for kernel in KERNELS for layout in LAYOUTS]
PLAIN = [(kernel, [*LAYOUTS][i % 3], True) for i, kernel in enumerate(KERNELS)]


@pytest.mark.parametrize(
    ("kernel", "layout", "train"), [c if c in PLAIN else pytest.param(*c, marks=pytest.mark.long) for c in CASES]
)
def test_kernels_copy_non_dense_operands(kernel, layout, train):
    torch.manual_seed(0)
    targets = [torch.randint(0, 59, (B, 61))] if kernel in LOOKUPS else []
    assert abs(peak_error(Leaf(KERNELS[kernel](), LAYOUTS[layout]()), (torch.ones(1), *targets), train)) <= NEAR
