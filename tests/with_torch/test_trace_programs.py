"""Programs with special kernels or queries: peaks and FLOPs against real runs, values against torch's."""

import pytest
import sympy
import torch
from checked_programs import checked_by_assert, checked_by_raise
from torch import nn
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode
from traced import differences, real_peak

import costgraph as cg
from costgraph import testing
from costgraph.errors import UnsupportedError
from costgraph.torch import lower, trace

# bytes for Python scalars and an FFT plan in a real run
SLACK = 4096


class Program(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def rotated(x):
    turn = torch.polar(torch.ones(x.shape[1], 8), torch.rand(x.shape[1], 8))
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], 8, 2)) * turn[:, None]
    return torch.view_as_real(z).flatten(3)


def spectrum(x):
    return torch.stft(x, 31, 7, 23, torch.hann_window(23, periodic=False), normalized=True, return_complex=True)


def there_and_back(x):
    window = torch.hann_window(31, periodic=False)
    return torch.istft(
        torch.stft(x, 31, 7, window=window, return_complex=True), 31, 7, window=window, length=x.shape[1]
    )


class Strided(nn.Module):
    """A convolution over a sequence with its padding sizes in buffers, like EnCodec's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.tensor(5))
        self.register_buffer("stride", torch.tensor(2, dtype=torch.int64))
        self.weight = nn.Parameter(torch.rand(1, 7, 13))

    def forward(self, x):
        whole = functional.pad(x, (0, 0, int(self.total), 0))
        return (whole * self.weight[:, :1])[:, :: self.stride.item()].exp()


def relative(score, b, h, i, j):
    return score + (i - j)


#: A function, its operands' axis names and dtypes, and two sets of sizes.
PROGRAMS = {
    "distribution": (lambda x: torch.distributions.Normal(x, x.exp()).log_prob(x), "B 13", {"B": (101, 211)}),
    "categorical": (lambda x: torch.distributions.Categorical(logits=x).entropy(), "B 13", {"B": (101, 211)}),
    "checked by torch": (lambda x: torch._check_tensor_all(x > -100) or x.exp(), "B 13", {"B": (101, 211)}),
    "assert": (checked_by_assert, "B 13", {"B": (101, 211)}),
    "raise": (checked_by_raise, "B 13", {"B": (101, 211)}),
    "masked_scatter": (
        lambda x, s: x.masked_scatter(x[..., :1] > 0, s), "B S 13; B S 13", {"B": (3, 5), "S": (61, 47)},
    ),
    "triangular": (
        lambda a, b: torch.linalg.solve_triangular(a.tril(-1) + torch.eye(a.shape[-1]), b, upper=False),
        "B N N; B N K", {"B": (3, 2), "N": (31, 41), "K": (17, 5)},
    ),
    "triangular from the right": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True, left=False, unitriangular=True),
        "N N; B K N", {"B": (3, 2), "N": (31, 41), "K": (17, 5)},
    ),
    "unfold": (
        lambda x: functional.unfold(x, (3, 2), padding=(1, 0)),
        "B 5 H W", {"B": (2, 3), "H": (31, 29), "W": (37, 23)},
    ),
    "fold": (
        lambda x: functional.fold(functional.unfold(x, 3, stride=2), x.shape[2:], 3, stride=2),
        "B 5 H W", {"B": (2, 3), "H": (31, 29), "W": (37, 23)},
    ),
    "three operands": (
        lambda a, b, c: torch.einsum("bij,bjk,bkl->bil", a, b, c),
        "B I J; B J K; B K 5", {"B": (3, 2), "I": (31, 37), "J": (17, 29), "K": (23, 19)},
    ),
    "nearest 1d": (lambda x: functional.interpolate(x, scale_factor=2), "B 5 S", {"B": (3, 2), "S": (101, 211)}),
    "nearest 3d": (
        lambda x: functional.interpolate(x, size=[2 * n for n in x.shape[2:]], mode="nearest-exact"),
        "B 2 D H W", {"B": (2, 3), "D": (5, 7), "H": (7, 5), "W": (11, 13)},
    ),
    "fft": (lambda x: torch.fft.fft(x.mT).real, "B S 31", {"B": (3, 2), "S": (61, 127)}),
    "fft2": (lambda x: torch.fft.fft2(x).abs(), "B S 31", {"B": (3, 2), "S": (61, 127)}),
    "two ffts": (
        lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real, "B S 31", {"B": (3, 2), "S": (61, 127)},
    ),
    "rfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x), n=x.shape[-1]), "B S", {"B": (11, 5), "S": (101, 211)}),
    "stft": (spectrum, "B T", {"B": (3, 2), "T": (401, 701)}),
    "istft": (there_and_back, "B T", {"B": (3, 2), "T": (401, 701)}),
    "polar": (rotated, "B S 3 16", {"B": (3, 2), "S": (61, 127)}),
    "conj": (lambda x: (torch.fft.rfft(x).conj() * torch.fft.rfft(x)).real, "B 63", {"B": (31, 61)}),
    "half a spectrum of an axis between others": (
        lambda x: torch.fft.rfft(x, dim=1).abs(), "B S 7", {"B": (3, 2), "S": (61, 127)},
    ),
    "real by complex": (lambda x: (x * torch.fft.fft(x)).abs(), "B 63", {"B": (31, 61)}),
    "spectrum of rows that are one": (
        lambda x: torch.fft.fft(x[:1].to(torch.complex64).expand(x.shape)).real, "B 63", {"B": (31, 61)},
    ),
    "complex product": (lambda x: (torch.fft.fft(x) @ torch.fft.fft(x).mH).abs(), "B 63", {"B": (31, 61)}),
    "branch by a size": (
        lambda x: torch.cond(x.shape[0] > 7, torch.exp, lambda x: x * 2 + 1, (x,)), "B 13", {"B": (101, 211)},
    ),
    "pinv": (torch.linalg.pinv, "11 7", {}),
    "padded with a number": (
        lambda x: functional.pad(x, (1, 2, 0, 3), value=-100.0), "B S 13", {"B": (3, 5), "S": (61, 47)},
    ),
    "cut": (lambda x: functional.pad(x, (-3, 1, -5, -1)), "B S 13", {"B": (3, 5), "S": (61, 47)}),
    "repeated": (lambda x: x.repeat(1, x.shape[1], 3), "B S 13", {"B": (3, 5), "S": (61, 47)}),
}  # fmt: skip


def given(axes, sizes):
    """Return the operands and the names of their axes."""
    rows = [operand.split() for operand in axes.split(";")]
    torch.manual_seed(0)
    tensors = [torch.rand([int(sizes.get(n, n)) for n in row]) for row in rows]
    return tensors, [[None if n.isdigit() else n for n in row] for row in rows]


def test_buffer_values_are_known():
    """Queries of buffers are answered, and no size depends on them."""
    g = trace(Strided(), torch.rand(3, 61, 13), dims=[("B", "S", None)])
    for B, S in ((3, 61), (5, 48)):
        peak, flops = differences(g, Strided(), [torch.rand(B, S, 13)], B=B, S=S)
        assert abs(peak) <= SLACK
        assert flops == 0
    B, S = cg.dims("B S")
    half = sympy.floor((S + 6) / 2)  # every second one of S + 5 positions
    assert sympy.simplify(cg.flops(g) - 13 * B * (S + 5 + half)) == 0


class Asked(nn.Module):
    """A transformers model with image and text inputs."""

    def __init__(self, model, result):
        super().__init__()
        self.model, self.result = model, result

    def forward(self, ids, pixels):
        outputs = self.model(input_ids=ids, pixel_values=pixels, return_dict=True)
        return getattr(outputs, self.result)


def small(**more):
    return {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4} | more


def pali_gemma(transformers):
    text = small(num_key_value_heads=2, vocab_size=101, pad_token_id=1, head_dim=8, use_cache=False)
    seen = small(image_size=32, patch_size=8, projection_dim=32)
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**seen), text_config=transformers.GemmaConfig(**text),
        image_token_index=99, image_token_id=99, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return Asked(transformers.PaliGemmaForConditionalGeneration(config), "logits")


def group_vit(transformers):
    text = small(vocab_size=101, max_position_embeddings=64, eos_token_id=2)
    groups = {key: [8, 4, 0] for key in ("num_group_tokens", "num_output_groups")}
    seen = small(image_size=32, patch_size=8) | {"num_hidden_layers": 4, "depths": [2, 1, 1]} | groups
    config = transformers.GroupViTConfig(
        text_config=text, vision_config=seen, projection_dim=16, projection_intermediate_dim=24
    )
    return Asked(transformers.GroupViTModel(config), "logits_per_image")


@pytest.mark.long
@pytest.mark.parametrize("make", [pali_gemma, group_vit])
def test_multimodal_models_match_real_runs(make):
    """`masked_scatter` writes image features to their tokens' positions, with its caller's data checks."""
    module = make(pytest.importorskip("transformers")).eval()

    def inputs(B, S):
        ids = torch.randint(3, 90, (B, S))
        ids[:, 2:18] = 99  # a token for each of 4 by 4 patches
        return ids, torch.rand(B, 3, 32, 32)

    g = trace(module, *inputs(2, 23), dims=[("B", "S"), ("B", None, None, None)])
    for B, S in ((2, 23), (3, 29)):
        peak, flops = differences(g, module, inputs(B, S), B=B, S=S)
        assert abs(peak) <= SLACK
        assert flops == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    function, axes, sizes = PROGRAMS[name]
    module = Program(function)
    first, second = ({n: v[i] for n, v in sizes.items()} for i in (0, 1))
    operands, names = given(axes, first)
    g = trace(module, *operands, dims=names)
    for size in (first, second):
        peak, flops = differences(g, module, given(axes, size)[0], **size)
        assert abs(peak) <= SLACK, size
        assert flops == DIFFERENT.get(name, lambda **_: 0)(**size)


#: Excess of torch's counter: it counts a complex matmul as a real one, and skips pinv.
DIFFERENT = {"complex product": lambda B: -6 * B * B * 63, "pinv": lambda: -2 * 11 * 7 * 7}


@pytest.mark.parametrize("score", [None, relative])
def test_flex_attention_matches_its_eager_kernel(score, monkeypatch):
    # torch's own switch: a real run would compile the kernel, and then run the same one
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    module = Program(lambda q: flex_attention.flex_attention(q, q, q, score_mod=score))
    g = trace(module, torch.rand(3, 2, 17, 8), dims=[("B", None, "S", None)])
    B, S = cg.dims("B S")
    assert cg.matmul_flops(g) == 2 * (B * 2) * (S * S * 8) * 2  # scores and values
    q = torch.rand(2, 2, 29, 8)
    assert abs(real_peak(lambda: module(q), q) - cg.peak_memory(g, B=2, S=29)) <= SLACK


def test_flex_attention_gradients_are_refused():
    module = Program(lambda q: flex_attention.flex_attention(q, q, q).sum())
    with pytest.raises(UnsupportedError, match="FlexAttention does not support backward on CPU"):
        trace(module, torch.rand(3, 2, 17, 8, requires_grad=True), train=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: torch.cond(x.sum() > 0, torch.exp, torch.sin, (x,)),
        lambda x: x * 2 if bool(x.max() > 0) else x,
        lambda x: torch.ops.higher_order.while_loop(lambda x: x.sum() > 0, lambda x: (x - 1,), (x,), ())[0],
    ],
)
def test_data_dependent_branch_is_refused_with_its_line(function):
    with pytest.raises(UnsupportedError, match=r"test_trace_programs.py:\d+, in .*branches on the values of a tensor"):
        trace(Program(function), torch.rand(3, 5), dims=[("B", None)])


def test_lowered_programs_equal_torchs_values():
    for name in ("stft", "istft", "three operands", "fft2", "fold", "conj", "triangular", "masked_scatter"):
        function, axes, sizes = PROGRAMS[name]
        first = {n: v[0] for n, v in sizes.items()}
        operands, names = given(axes, first)
        module = Program(function)
        result = lower(trace(module, *operands, dims=names), **first)(*operands)
        torch.testing.assert_close(result, module(*operands))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 67), nn.Linear(67, 61, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["ASGD", "Adafactor"])
def test_optimizers_with_scalar_queries_match_real_steps(name, foreach):
    def make(parameters):
        return getattr(torch.optim, name)(parameters, foreach=foreach)

    module = Net()
    g = trace(module, torch.rand(5, 7), dims=[("B", None)], train=True, optimizer=make)
    peak, flops = differences(g, module, [torch.rand(13, 7)], make(module.parameters()), B=13)
    assert flops == 0
    assert abs(peak) <= 16  # Python scalars


#: FLOPs per element: products and sums of the real and imaginary parts.
COMPLEX = {
    "add": (torch.add, 2, 0),
    "mul": (torch.mul, 6, 0),  # four products, two sums
    "div": (torch.div, 11, 0),  # by the conjugate, and both parts by the squared modulus
    "abs": (lambda a, b: a.abs(), 3, 1),
    "exp": (lambda a, b: a.exp(), 2, 3),
    "sum": (lambda a, b: a.sum(), 2, 0),
    "square": (lambda a, b: a**2, 6, 0),
    "mm": (lambda a, b: a @ b.T, 8 * 5, 0),  # a 7-element row times five rows
    "conj": (lambda a, b: a.conj().resolve_conj(), 0, 0),  # a copy
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_arithmetic_flops(name):
    function, flops, transcendental = COMPLEX[name]
    a, b = (torch.rand(5, 7, dtype=torch.complex64) for _ in "ab")
    g = trace(Program(function), a, b, dims=[("B", None)] * 2)
    total = cg.costs(g, B=5).total()
    assert (total.matmul + total.pointwise, total.transcendental) == (flops * 35, transcendental * 35)


def test_declared_complex_ops_cost_the_same():
    B, D = cg.dims("B D")
    with cg.Graph("g") as g:
        x, y = (g.input(n, (B, D), dtype="complex64") for n in "xy")
        g.output(cg.ops.pointwise("abs", x * y))
    assert g.outputs[0].dtype.name == "fp32"
    assert cg.flops(g) == B * D * (6 + 4)
    assert cg.bytes_moved(g) == B * D * (8 * (2 + 1) + 8 + 4)


def test_complex_ops_without_rule_are_refused():
    text = r"test_trace_programs.py.*aten::tanh.default: complex numbers, of which no rule says what they cost"
    with pytest.raises(UnsupportedError, match=text):
        trace(Program(torch.tanh), torch.rand(3, 5, dtype=torch.complex64))
    with cg.Graph("g") as g:
        x = g.input("x", (3, 5), dtype="complex64")
        with pytest.raises(UnsupportedError, match=r"max of complex numbers has no cost rule, expected a sum"):
            cg.reduce(x, "a b -> a", "max")
        with pytest.raises(UnsupportedError, match="tanh of complex numbers has no cost rule"):
            cg.tanh(x)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 64, 101])
def test_fft_counts_five_flops_per_point_and_stage(n):
    """FFTW's convention, https://www.fftw.org/speed/: 5*N*log2(N), half for real inputs; stages are rounded up."""
    stages = 0
    while 2**stages < n:
        stages += 1
    for x, share in ((torch.rand(3, n, dtype=torch.complex64), 1), (torch.rand(3, n), 0.5)):
        g = trace(Program(lambda x: torch.fft.fft(x)), x, dims=[("B", "N") if n > 1 else ("B", None)])
        assert cg.flops(g, **({"B": 3, "N": n} if n > 1 else {"B": 3})) == 3 * 5 * n * stages * share


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:2].as_strided((4, 5), (5, 1), 3).exp(),
        lambda x: (x * 2)[:2].as_strided((4, 5), (5, 1), 3).exp(),
        lambda x: (x * 2)[4:].as_strided((4, 5), (5, 1), 0).exp(),
    ],
)
def test_reads_beyond_a_slice_keep_the_laws(function):
    class Beyond(nn.Module):
        def forward(self, x):
            return function(x)

    x = torch.randn(7, 5)
    g = trace(Beyond(), x)
    torch.testing.assert_close(lower(g)(x), function(x))
    testing.check(g)


def test_encodec_encoder_is_traced_at_a_fixed_length():
    transformers = pytest.importorskip("transformers")
    config = transformers.EncodecConfig(
        num_filters=4, hidden_size=8, codebook_size=16, codebook_dim=8, upsampling_ratios=[4, 2], num_lstm_layers=1
    )
    encoder, x = transformers.EncodecModel(config).encoder.eval(), torch.zeros(2, 1, 96)
    g = trace(encoder, x, dims=[("B", None, None)])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(x)
    # torch's counter skips LSTMs: 12 steps with 2 rows, four gates of width 16 for input and state
    assert cg.matmul_flops(g, count="full", B=2) == counter.get_total_flops() + 2 * 2 * 12 * 4 * 16 * (16 + 16)
    # the padding depends on the length of a tensor
    with pytest.raises(
        UnsupportedError, match=r"in _pad1d, 'if length <= max_pad:': converts the size T to the number"
    ):
        trace(encoder, x, dims=[("B", None, "T")])
