"""Aten op FLOPs against torch's counter or, where it has no formula, against a count of index points."""

import re
from functools import partial
from itertools import product
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
from aten_calls import calls_of, number, spec
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph.algebra.polynomial import poly
from costgraph.errors import GraphError, UnsupportedError
from costgraph.torch import trace
from costgraph.torch.tracing.call import Call, Counts
from costgraph.torch.tracing.rules import RULES, counts_of, rule
from costgraph.torch.tracing.translations import TRANSLATIONS


def rand(*sizes, dtype=torch.float32):
    return torch.rand(sizes, dtype=dtype, requires_grad=dtype.is_floating_point)


def counted(program):
    with FlopCounterMode(display=False) as counter:
        program()
    return counter.get_total_flops()


def backward_of(function, *operands):
    """Return a function's forward and backward pass."""
    return lambda: function(*operands).sum().backward()


# -- ops with a formula in torch's counter -----------------------------------------------------------------------------

COUNTED = {
    "mm": lambda: backward_of(torch.mm, rand(3, 5), rand(5, 7)),
    "addmm": lambda: backward_of(torch.addmm, rand(7), rand(3, 5), rand(5, 7)),
    "bmm": lambda: backward_of(torch.bmm, rand(2, 3, 5), rand(2, 5, 7)),
    "baddbmm": lambda: backward_of(torch.baddbmm, rand(2, 3, 7), rand(2, 3, 5), rand(2, 5, 7)),
    "linear": lambda: backward_of(functional.linear, rand(2, 3, 5), rand(7, 5), rand(7)),
    "matmul over broadcast axes": lambda: backward_of(torch.matmul, rand(2, 1, 3, 5), rand(11, 5, 7)),
    "einsum": lambda: backward_of(scores, rand(2, 3, 5, 7), rand(2, 11, 5, 7)),
    "tensordot": lambda: backward_of(lambda a, b: torch.tensordot(a, b, 2), rand(3, 5, 7), rand(5, 7, 11)),
    "conv1d": lambda: backward_of(conv(1), rand(2, 3, 17), rand(5, 3, 3)),
    "conv2d": lambda: backward_of(conv(2, stride=2, padding=1), rand(2, 3, 11, 13), rand(5, 3, 3, 3), rand(5)),
    "conv3d": lambda: backward_of(conv(3, dilation=2), rand(2, 3, 7, 5, 11), rand(5, 3, 3, 1, 2)),
    "conv2d without a batch": lambda: lambda: functional.conv2d(rand(3, 11, 13), rand(5, 3, 3, 3)),
    "transposed": lambda: backward_of(transposed(2, stride=2, padding=1), rand(2, 3, 5, 7), rand(3, 5, 3, 3)),
    "groups forward": lambda: lambda: functional.conv2d(rand(2, 6, 11, 13), rand(9, 2, 3, 3), groups=3),
    "depthwise forward": lambda: lambda: functional.conv2d(rand(2, 7, 11, 13), rand(7, 1, 3, 3), groups=7),
    "transposed groups forward": lambda: lambda: transposed(1, groups=3)(rand(2, 6, 11), rand(6, 5, 3)),
}


def scores(q, k):
    return torch.einsum("bshk,bthk->bhst", q, k)


def conv(axes, **options):
    return partial(getattr(functional, f"conv{axes}d"), **options)


def transposed(axes, **options):
    return partial(getattr(functional, f"conv_transpose{axes}d"), **options)


@pytest.mark.parametrize("name", COUNTED)
def test_matmul_flops_equal_torchs_counter(name):
    program = COUNTED[name]()
    calls = calls_of(program)
    assert calls.total("matmul") == calls.total("full") == counted(program) > 0


def test_operands_without_gradient_cost_no_backward_flops():
    x, w = torch.rand(2, 3, 11), rand(5, 3, 3)
    program = backward_of(functional.conv1d, x, w)
    points = 2 * 9 * 5 * 3 * 3
    assert calls_of(program).total("matmul") == counted(program) == 2 * 2 * points  # x needs no gradient


# -- ops without a formula in torch's counter, or with another one -----------------------------------------------------


def pairs(queries, keys, causal):
    """Count the visible query-key pairs one by one; torch aligns a causal mask at the first position."""
    return sum(not causal or key <= query for query, key in product(range(queries), range(keys)))


@pytest.mark.parametrize(("S", "T", "causal"), [(7, 7, True), (7, 11, True), (11, 7, True), (7, 11, False)])
def test_cpu_attention_counts_visible_pairs(S, T, causal):
    B, H, K, V = 2, 3, 5, 5
    q, k, v = rand(B, H, S, K), rand(B, H, T, K), rand(B, H, T, V)
    program = backward_of(lambda *x: functional.scaled_dot_product_attention(*x, is_causal=causal), q, k, v)
    calls = calls_of(program)
    # forward: scores and values; backward: both again, and the gradients of queries, keys and values
    forward, backward = 2 * (K + V), 2 * (3 * K + 2 * V)
    assert calls.total("matmul") == B * H * (forward + backward) * pairs(S, T, causal)
    assert calls.total("full") == B * H * (forward + backward) * S * T
    assert calls.total("full") == 3.5 * (4 * B * H * S * T * K)
    assert counted(program) == 0


def test_gpu_attention_kernels_count_like_the_cpu_kernel():
    q, k, v = spec(2, 3, 7, 5), spec(2, 3, 11, 5), spec(2, 3, 11, 5)
    arguments = {"query": q, "key": k, "value": v, "dropout_p": 0.0, "is_causal": True}
    names = [n for n in RULES if n.startswith("_scaled_dot_product") and not n.endswith("backward")]
    flops = {counts_of(Call(n, "", False, arguments, (q,))).matmul for n in names}
    assert len(names) == 5
    assert flops == {poly(2 * 3 * 4 * 5 * pairs(7, 11, True))}


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_grouped_convolution_gradients_cost_twice_the_forward(groups):
    C, n = 16, 9
    x, w = rand(2, C, n, n), rand(C, C // groups, 3, 3)
    program = backward_of(lambda x, w: functional.conv2d(x, w, padding=1, groups=groups), x, w)
    # index points: batch, output positions, output channels, input channels of a group, window
    points = sum(1 for _ in product(range(2), range(n * n), range(C), range(C // groups), range(9)))
    assert calls_of(program).total("matmul") == 3 * 2 * points
    assert (counted(program) == 3 * 2 * points) == (groups == 1)


@pytest.mark.parametrize("groups", [1, 3])
def test_transposed_convolution_gradients_cost_twice_the_forward(groups):
    x, w = rand(2, 6, 5), rand(6, 4, 3)
    program = backward_of(lambda x, w: functional.conv_transpose1d(x, w, stride=2, groups=groups), x, w)
    points = 2 * 5 * 6 * 4 * 3  # batch, input positions, input channels, output channels of a group, window
    assert calls_of(program).total("matmul") == 3 * 2 * points


UNCOUNTED = {
    "mv": (lambda: torch.mv(rand(3, 5), rand(5)), 2 * 3 * 5, 0),
    "dot": (lambda: torch.dot(rand(5), rand(5)), 2 * 5, 0),
    "vdot": (lambda: torch.vdot(rand(5), rand(5)), 2 * 5, 0),
    "outer": (lambda: torch.outer(rand(3), rand(5)), 0, 3 * 5),  # no sum
    "addmv": (lambda: torch.addmv(rand(3), rand(3, 5), rand(5)), 2 * 3 * 5, 3),
    "addr": (lambda: torch.addr(rand(3, 5), rand(3), rand(5)), 0, 2 * 3 * 5),
    "addbmm": (lambda: torch.addbmm(rand(3, 7), rand(2, 3, 5), rand(2, 5, 7)), 2 * 2 * 3 * 5 * 7, 3 * 7),
    # x1 times the weight, 2 FLOPs per (n, o, i, j); the result times x2, 2 per (n, o, j)
    "bilinear": (
        lambda: functional.bilinear(rand(3, 5), rand(3, 7), rand(2, 5, 7)),
        2 * 3 * 2 * 5 * 7 + 2 * 3 * 2 * 7,
        0,
    ),
    "affine grid": (
        lambda: functional.affine_grid(rand(2, 2, 3), (2, 1, 5, 7), align_corners=False),
        2 * 2 * 5 * 7 * 2 * 3,
        0,
    ),
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_matmuls_missing_in_torchs_counter_are_counted(name):
    program, matmul, pointwise = UNCOUNTED[name]
    calls = calls_of(program)
    assert (calls.total("matmul"), calls.total("pointwise")) == (matmul, pointwise)
    assert counted(program) in (0, matmul)  # some decompose into ops with formulas


def test_addmm_counts_the_addition_and_scales():
    def flops(**scales):
        return calls_of(lambda: torch.addmm(rand(3, 7), rand(3, 5), rand(5, 7), **scales)).total("pointwise")

    assert (flops(), flops(beta=2), flops(alpha=2), flops(beta=0), flops(beta=2, alpha=2)) == (21, 42, 42, 0, 63)


def test_low_precision_products():
    a, b, scale = spec(32, 16, dtype="fp8_e4m3"), spec(16, 48, dtype="fp8_e4m3"), spec()
    call = Call("_scaled_mm", "", False, {"self": a, "mat2": b, "scale_a": scale, "scale_b": scale}, (spec(32, 48),))
    with FlopCounterMode(display=False) as counter:
        x, y = (torch.rand(n).to(torch.float8_e4m3fn) for n in ((32, 16), (48, 16)))
        torch._scaled_mm(x, y.T, torch.ones(()), torch.ones(()), out_dtype=torch.bfloat16)
    assert counts_of(call).matmul == counter.get_total_flops() == 2 * 32 * 16 * 48


def test_grouped_mm_counts_each_row_once():
    x, w = rand(11, 16).bfloat16(), rand(3, 16, 8).bfloat16()
    offsets = torch.tensor([2, 7, 11], dtype=torch.int32)
    points = sum(16 * 8 for group in (2, 5, 4) for _ in range(group))
    assert calls_of(lambda: torch._grouped_mm(x, w, offs=offsets)).total("matmul") == 2 * points


def test_grouped_mm_over_contracted_axis_counts_each_position_once():
    x, y = rand(8, 16).bfloat16(), rand(16, 24).bfloat16()
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    points = 8 * 24 * 16  # each position of the contracted axis belongs to one group
    assert calls_of(lambda: torch._grouped_mm(x, y, offs=offsets)).total("matmul") == 2 * points


# -- the table -----------------------------------------------------------------------------------------------------


def test_op_without_rule_is_named_in_the_error():
    with pytest.raises(UnsupportedError) as error:
        counts_of(Call("frobnicate", "default", False, {"self": spec(3)}, (spec(3),)))
    assert str(error.value) == (
        f"aten::frobnicate.default: no cost rule; expected one of {len(RULES)} ops with a rule, or "
        f"register one under 'frobnicate' with costgraph.torch.tracing.rules.rule"
    )


def test_untranslatable_op_error_states_cause_and_line():
    with pytest.raises(UnsupportedError) as error:
        counts_of(Call("mm", "default", False, {"self": spec(3, 5), "mat2": spec(7, 2)}, (spec(3, 2),)))
    text = r"aten::mm.default: no op kind accepts these operands \(axis 'k' .* 5 .* 7 .*\), and there is no cost rule"
    assert re.match(text, str(error.value))
    net = torch.nn.Linear(5, 7, bias=False)
    net.forward = lambda x: x @ net.weight.T  # the line in the error
    with (
        mock.patch.dict(TRANSLATIONS, {"mm": lambda call: cg.ops.arange(-3)}),
        pytest.raises(
            UnsupportedError, match=r"test_aten_rules.py:\d+, in <lambda>, 'net.forward = .*: aten::mm.default: "
        ),
    ):
        trace(net, torch.rand(3, 5))


def test_data_dependent_ops_count_each_input_element():
    calls = calls_of(lambda: torch.nonzero(torch.ones(3)))
    assert calls.total("pointwise") == 6


def test_pointwise_tagged_ops_count_one_flop_per_element():
    assert calls_of(lambda: torch.nextafter(torch.rand(3, 5), torch.rand(5))).total("pointwise") == 15
    assert "nextafter" not in RULES


def test_every_rule_belongs_to_an_existing_torch_op():
    import torch.nn.attention.varlen  # registers its own ops

    schemas = torch._C._jit_get_all_schemas()
    known = {s.name.removeprefix("aten::").removesuffix("_") for s in schemas if s.name.startswith("aten::")}
    known |= {f"{s.name.removeprefix('aten::').removesuffix('_')}.{s.overload_name}" for s in schemas}
    known |= {s.name.replace("::", ".") for s in schemas}
    # torchvision's schemas have their own test, and the library registers its own op lazily
    elsewhere = {name for name in RULES if name.startswith(("torchvision.", "costgraph."))}
    assert sorted(set(RULES) - known - elsewhere) == []


def test_rules_can_be_registered_only_once():
    @rule("frobnicate", "frobnicate.twice")
    def frobnicate(call):
        return Counts(pointwise=call.out.numel * (2 if call.overload == "twice" else 1))

    try:
        flops = [counts_of(Call("frobnicate", o, False, {}, (spec(3),))).pointwise for o in ("default", "twice")]
        assert flops == [3, 6]
        with pytest.raises(GraphError, match=r"^op of torch 'frobnicate' already has a rule, expected a new name$"):
            rule("frobnicate")(frobnicate)
    finally:
        del RULES["frobnicate"], RULES["frobnicate.twice"]


def test_out_arguments_are_not_read():
    out = torch.empty(3, 7)
    seen = calls_of(lambda: torch.mm(torch.rand(3, 5), torch.rand(5, 7), out=out)).of("mm")
    assert [number(n) for n in seen.counts.reads] == [4 * 15, 4 * 35, 0]


def test_sizes_may_be_symbols():
    B, H, S, K = map(poly, cg.dims("B H S K"))
    q = spec(B, H, S, K)
    call = Call(
        "_scaled_dot_product_flash_attention", "", False,
        {"query": q, "key": q, "value": q, "dropout_p": 0.0, "is_causal": True}, (q,),
    )  # fmt: skip
    counts = counts_of(call)
    assert counts.matmul == 2 * B * H * K * S * (S + 1)
    assert counts.full == 4 * B * H * K * S * S
