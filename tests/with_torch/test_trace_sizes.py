"""Sizes and views in traces against torch: formulas at numbers, and fake tensor layouts."""

from fractions import Fraction

import pytest
import sympy

torch = pytest.importorskip("torch.utils.flop_counter").torch

from budget import drawing  # noqa: E402
from hypothesis import given, settings  # noqa: E402  # torch is looked for first
from hypothesis import strategies as st  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, PythonMod  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import costgraph as cg  # noqa: E402
from costgraph.algebra.polynomial import poly  # noqa: E402
from costgraph.torch import trace  # noqa: E402
from costgraph.torch.tracing.meta_kernels import STAND_INS  # noqa: E402
from costgraph.torch.tracing.shapes import Shapes, hints  # noqa: E402
from costgraph.torch.tracing.sizes import Translator  # noqa: E402

s, t = sympy.symbols("s0 s1", positive=True, integer=True)
FORMULAS = [
    s + t, s * t - 3, FloorDiv(s, 4), FloorDiv(6 * s + 9, 3), FloorDiv(s + 15, 16), Mod(s, 7), PythonMod(-s, 16),
    s + PythonMod(16 - PythonMod(s, 16), 16), CeilDiv(s, 5), CleanDiv(4 * s * t, 2), Max(s, t), Min(s, 2 * t, 9),
    FloorDiv(FloorDiv(s, 2) - 3 + t, 2) + 1, s**2 * t, FloorDiv(-s, 8),
]  # fmt: skip


@pytest.mark.parametrize("expr", FORMULAS, ids=str)
def test_translated_size_formulas_equal_torchs(expr):
    formula = Translator({s: "S", t: "T"}).formula(expr)
    for S in (1, 2, 7, 16, 17, 31, 64):
        for T in (1, 5, 32):
            value = formula.bind({"S": poly(S), "T": poly(T)}).constant
            assert Fraction(value) == int(expr.subs({s: S, t: T}))


def test_exact_quotient_is_a_polynomial():
    formula = Translator({s: "S", t: "T"}).formula(FloorDiv(64 * s * t, 16))
    S, T = cg.dims("S T")
    assert formula.expr == 4 * S * T


def test_data_dependent_size_is_refused_or_a_symbol():
    u = sympy.Symbol("u0", integer=True)
    with pytest.raises(cg.UnsupportedError, match="size u0 depends on the values of tensors; trace with"):
        Translator({s: "S"}).formula(2 * u)
    assert Translator({s: "S"}, symbols=True).formula(2 * u).expr == 2 * cg.dims("u0")


@pytest.mark.parametrize("pad", [lambda n: (8 - n % 8) % 8, lambda n: -n % 8], ids=["twice", "negative"])
def test_padded_size_is_a_multiple_of_a_block_symbol(pad):
    shapes = Shapes()
    S = shapes.named("S", 21)
    at = Translator(shapes.names, block_counts=shapes.block_counts)
    blocks = (S + pad(S)) // 8
    assert blocks.node.expr in shapes.block_counts
    assert at.size(blocks) == at.formula(CeilDiv(S.node.expr, 8))
    for n in (1, 7, 8, 9, 16, 40, 41):
        assert at.size(pad(S)).bind({"S": poly(n)}).constant == pad(n)
    # no general query holds for one block, or for as many as another size
    few = Shapes()
    assert all(pad(few.named(n, size)).node.expr.has(Mod, PythonMod) for n, size in (("S", 5), ("T", 37)))


class Blocks(torch.nn.Module):
    """Positions padded to blocks of 4 and mixed within them, with another op if any padding remains."""

    def __init__(self, asks):
        super().__init__()
        self.mix, self.asks = torch.nn.Linear(4, 4), asks

    def forward(self, x):
        pad = -x.shape[1] % 4
        filled = torch.nn.functional.pad(x, (0, 0, 0, pad))
        blocks = filled.reshape(x.shape[0], filled.shape[1] // 4, 4, x.shape[2]).transpose(2, 3)
        mixed = self.mix(blocks).transpose(2, 3).reshape(x.shape[0], -1, x.shape[2])
        return mixed[:, : x.shape[1]].tanh() if self.asks and pad > 0 else mixed[:, : x.shape[1]]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("size", [3, 5, 13, 29])
def test_padding_programs_match_runs_at_other_sizes(size, asks):
    module = Blocks(asks)
    g = trace(module, torch.zeros(2, size, 5), dims=[("B", "S", None)])
    taken = 0
    for n in (3, 5, 7, 12, 13, 31, 32):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(torch.zeros(3, n, 5))
        try:
            flops = cg.matmul_flops(g, B=3, S=n)
        except cg.BindingError:
            assert (n % 4 == 0 and asks) or (n <= 4) != (size <= 4)  # it takes another branch there
            continue
        assert flops == counter.get_total_flops()
        taken += 1
    assert taken >= (1 if size == 3 else 4)


def padded_to_blocks(x):
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4))


def added(x):
    return padded_to_blocks(x) + x


def compared(x):
    y = padded_to_blocks(x)
    return y.reshape(y.shape[0], -1, 4, 5).sum(2) if y.shape[1] == x.shape[1] else y


class Whole(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.forward = run


@pytest.mark.parametrize("run", [added, compared])
@pytest.mark.parametrize("size", [12, 24])
def test_sizes_without_padding_must_fill_whole_blocks(run, size):
    B, S = cg.dims("B S")
    g = trace(Whole(run), torch.zeros(2, size, 5), dims=[("B", "S", None)])
    assert cg.flops(g) == 5 * B * S
    with pytest.raises(cg.BindingError, match=r"S=17: against the assumption 'S - 4\*floor\(S/4\) == 0'"):
        cg.flops(g, B=2, S=17)


def test_size_hints_are_distinct_and_larger_than_one():
    assert hints({"B": 8, "S": 128}) == {"B": 8, "S": 128}
    chosen = hints({"B": 1, "S": 4, "T": 4, "U": 0})
    assert len(set(chosen.values())) == 4
    assert min(chosen.values()) > 1
    assert chosen["S"] == 4


# -- views ---------------------------------------------------------------------------------------------------------

aten = torch.ops.aten


def layouts(made):
    # an axis of size 1 may have any stride, and torch's ops differ
    return [
        (
            tuple(map(str, v.shape)),
            tuple("" if str(n) == "1" else str(s) for n, s in zip(v.shape, v.stride(), strict=True)),
            str(v.storage_offset()),
            v.dtype,
        )
        for v in (made if isinstance(made, list | tuple) else [made])
    ]


@st.composite
def calls(draw, sizes):
    """Return a view op and a tensor for it."""
    shape = draw(st.lists(st.sampled_from([*sizes, 1, 2, 3, 12]), min_size=2, max_size=4))
    x = torch.empty(shape)
    if draw(st.booleans()):
        x = x.transpose(0, 1)
    a, b = draw(st.integers(0, x.ndim - 1)), draw(st.integers(-x.ndim, x.ndim - 1))
    op = draw(st.sampled_from(["transpose", "unsqueeze", "detach", "select", "expand", "view"]))
    if op == "expand":
        lead = draw(st.lists(st.sampled_from([*sizes, 1, 5]), max_size=2))
        return aten.expand.default, (x, [*lead, *(draw(st.sampled_from([n, -1])) for n in x.shape)])
    if op == "view":
        return aten.view.default, (x, [x.shape[0] * x.shape[1], *x.shape[2:]])
    return {
        "transpose": (aten.transpose.int, (x, a, b)), "unsqueeze": (aten.unsqueeze.default, (x, b)),
        "detach": (aten.detach.default, (x,)), "select": (aten.select.int, (x, a, 0)),
    }[op]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_views_are_those_of_fake_tensors(data):
    shapes = Shapes()
    with FakeTensorMode(shape_env=shapes):
        op, args = data.draw(calls([shapes.named("B", 7), shapes.named("S", 17)]))
        try:
            expected = op(*args)
        except (RuntimeError, ValueError):
            return  # the view would be a copy
        made = STAND_INS[op](*args)
        assert layouts(made) == layouts(expected)
        assert made.untyped_storage()._cdata == args[0].untyped_storage()._cdata


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten._grouped_mm.default, lambda B: (torch.empty(B, 5, dtype=torch.bfloat16),
                                              torch.empty(3, 5, 7, dtype=torch.bfloat16), torch.empty(3))),
        (aten.baddbmm.default, lambda B: (torch.empty(B, 3, 7), torch.empty(B, 3, 5), torch.empty(B, 5, 7))),
        (aten.constant_pad_nd.default, lambda B: (torch.empty(B, 5), [1, 2, 0, 3])),
    ],
)  # fmt: skip
def test_placeholder_results_have_real_shapes(op, arguments):
    shapes = Shapes()
    with FakeTensorMode(shape_env=shapes):
        result = STAND_INS[op](*arguments(shapes.named("B", 11)))
    real = {aten._grouped_mm.default: (11, 7), aten.baddbmm.default: (11, 3, 7), aten.constant_pad_nd.default: (14, 8)}
    at = Translator(shapes.names)
    assert tuple(at.size(n).bind({"B": poly(11)}).constant for n in result.shape) == real[op]


class Patches(torch.nn.Module):
    """Patches of an image with divisible sides: for other images it fails or takes another branch."""

    def __init__(self, size: int, *, pads: bool) -> None:
        super().__init__()
        self.size, self.pads = size, pads
        self.conv = torch.nn.Conv2d(1, 2, size, stride=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.shape[-2] % self.size == 0 and x.shape[-1] % self.size == 0
        assert whole or self.pads
        return self.conv(x if whole else torch.nn.functional.pad(x, (0, self.size, 0, self.size)))


@given(st.sampled_from([2, 3, 4, 7, 8, 12, 16]), st.integers(1, 4), st.integers(1, 4), st.booleans())
@drawing(100)
def test_a_square_image_is_traced_with_two_names_where_the_program_takes_multiples(
    size: int, times: int, other: int, pads: bool
):
    side = size * times
    g = trace(Patches(size, pads=pads), torch.zeros(2, 1, side, side), dims=[("B", None, "H", "W")])
    expected = 2 * 3 * 2 * size * size * (times + 1) * other
    assert cg.matmul_flops(g, B=3, H=size * (times + 1), W=size * other) == expected
