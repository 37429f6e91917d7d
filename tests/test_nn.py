import pytest
import torch
from each import each
from oracles import counted, graph_of
from sympy import expand

import costgraph as cg
from costgraph import GraphError, PatternError, ShapeError

B, S, D, F, H, K, V = cg.dims("B S D F H K V")
F32 = 4


@pytest.mark.parametrize("bias", [False, True])
def test_linear_counts_as_addmm_with_one_flop_per_bias_element(bias):
    theirs = counted(lambda x, w, b: torch.nn.functional.linear(x, w, b if bias else None), (6, 5), (7, 5), (7,))
    g, y = graph_of(lambda x: cg.linear(x, "b d -> b f", f=7, bias=bias), (6, 5))
    assert cg.matmul_flops(g) == theirs
    assert cg.flops(g) == theirs + (6 * 7 if bias else 0)
    assert cg.param_count(g) == 5 * 7 + (7 if bias else 0)
    assert cg.bytes_moved(g) == F32 * (6 * 5 + 5 * 7 + (7 if bias else 0) + 6 * 7)  # one kernel
    assert y.shape == (6, 7)


@each(
    ("pattern", "sizes", "weight", "shape"),
    [
        ("b s d -> b s h k", {"h": 2, "k": 3}, (5, 2, 3), (2, 3, 2, 3)),
        ("b s d -> b h s k", {"h": 2, "k": 3}, (5, 2, 3), (2, 2, 3, 3)),
        ("b s d -> b s (h k)", {"h": 2, "k": 3}, (5, 2, 3), (2, 3, 6)),
        ("b s (d e) -> b s f", {"d": 5, "f": 7}, (5, 1, 7), (2, 3, 7)),
        ("... d -> ... f", {"f": 7}, (5, 7), (2, 3, 7)),
    ],
)
def test_linear_contracts_axes_missing_on_the_right(pattern, sizes, weight, shape):
    g, y = graph_of(lambda x: cg.linear(x, pattern, **sizes), (2, 3, 5))
    assert y.shape == shape
    assert g.params[0].shape == weight
    count = 2 * 3
    for n in weight:
        count *= n
    assert cg.flops(g) == 2 * count


def test_tied_weight_is_one_parameter():
    with cg.Graph("g") as g:
        table = g.param("table", (V, D))
        x = cg.embedding(g.input("ids", (B,), dtype="int64"), table)
        g.output(cg.linear(x, "b d -> b v", weight=table.T, name="head"))
    assert cg.param_count(g) == V * D
    assert cg.matmul_flops(g) == 2 * B * V * D


def test_axes_may_share_argument_names():
    with cg.Graph("g") as g:
        x = g.input("x", (2, 15))
        assert cg.rearrange(x, "b (x pattern) -> x b pattern", x=3).shape == (3, 2, 5)
        assert cg.reduce(x, "b (x y) -> b y", "sum", x=3).shape == (2, 5)
        assert cg.ops.expand(x, "b d -> x b d", x=3).shape == (3, 2, 15)
        assert cg.linear(x, "b d -> b x", x=3).shape == (2, 3)


def test_softmax_is_one_kernel_with_four_flops_and_one_exp():
    for axis in (-1, 0, 1):
        g, _ = graph_of(lambda x, axis=axis: cg.softmax(x, axis), (3, 5, 7))
        total = cg.costs(g).total()
        # maximum, subtraction, sum, division
        assert (total.pointwise, total.transcendental) == (4 * 105, 105)
        assert (total.read, total.written) == (F32 * 105, F32 * 105)
        assert cg.peak_memory(g) == F32 * 2 * 105


def test_log_softmax_has_one_logarithm_per_row():
    g, _ = graph_of(cg.nn.log_softmax, (3, 5))
    total = cg.costs(g).total()
    # maximum, subtraction, sum, subtraction; exp per element, log per row
    assert (total.pointwise, total.transcendental) == (4 * 15, 15 + 3)
    assert cg.bytes_moved(g) == F32 * 30


@each(("affine", "bias", "params"), [(True, True, 2), (True, False, 1), (False, True, 0)])
def test_layer_norm_is_one_kernel(affine, bias, params):
    g, _ = graph_of(lambda x: cg.layer_norm(x, affine=affine, bias=bias), (3, 5, 7))
    total = cg.costs(g).total()
    # mean, subtraction, square, mean, product, scale, shift; per row epsilon and a root
    assert (total.pointwise, total.transcendental) == ((5 + params) * 105 + 15, 15)
    assert (total.read, total.written) == (F32 * (105 + 7 * params), F32 * 105)
    assert cg.param_count(g) == 7 * params


def test_rms_norm_is_one_kernel():
    g, _ = graph_of(cg.rms_norm, (3, 5, 7))
    total = cg.costs(g).total()
    # square, mean, product, scale; per row epsilon and a root
    assert (total.pointwise, total.transcendental) == (4 * 105 + 15, 15)
    assert (total.read, total.written) == (F32 * (105 + 7), F32 * 105)


def test_rotary_costs_three_flops_per_element_with_shared_tables():
    with cg.Graph("g", dtype="bf16") as g:
        cos, sin = cg.nn.rotary_tables(cg.ops.arange(5), 6)
        y = cg.nn.rotary(g.input("q", (2, 3, 5, 6)), cos, sin)
        g.output(y)
    assert (cos.shape, y.shape, y.dtype.name) == ((5, 3), (2, 3, 5, 6), "bf16")
    rotation = cg.costs(g).filter(op="rotary").total()
    # two multiplications and one addition or subtraction
    assert rotation.flops == 3 * 2 * 3 * 5 * 6
    assert rotation.read == 2 * 2 * 3 * 5 * 6 + 4 * 2 * (5 * 3)
    assert rotation.written == 2 * 2 * 3 * 5 * 6
    # one angle per position and frequency, with its cosine and sine
    assert cg.costs(g).filter(scope="rope").total().flops == 3 * 5 * 3


def test_cross_entropy_materializes_log_probabilities():
    with cg.Graph("g") as g:
        loss = cg.cross_entropy(g.input("logits", (2, 3, 7)), g.input("targets", (2, 3), dtype="int64"))
        g.output(loss)
    assert loss.shape == ()
    total = cg.costs(g).total()
    rows, cells = 6, 42
    # log_softmax as above; the mean over rows and the negation
    assert (total.pointwise, total.transcendental) == (4 * cells + rows + 1, cells + rows)
    assert total.read == F32 * cells + F32 * rows + 8 * rows
    assert total.written == F32 * cells + F32
    assert cg.peak_memory(g) == 8 * rows + F32 * (2 * cells + 1)


@pytest.mark.parametrize("bias", [False, True])
def test_mlp_has_two_matmuls_and_gated_mlp_three(bias):
    extra = F + D if bias else 0
    g, y = graph_of(lambda x: cg.nn.mlp(x, F, bias=bias), (B, S, D))
    assert y.shape == (B, S, D)
    assert cg.matmul_flops(g) == 2 * 2 * B * S * D * F
    assert cg.param_count(g) == 2 * D * F + extra
    g, y = graph_of(lambda x: cg.nn.gated_mlp(x, F, bias=bias), (B, S, D))
    assert y.shape == (B, S, D)
    assert cg.matmul_flops(g) == 3 * 2 * B * S * D * F
    assert cg.param_count(g) == 3 * D * F + extra + (F if bias else 0)
    # silu: three FLOPs and one exp; the product of gate and up
    activation = (4 + 1) * B * S * F
    rest = cg.flops(g) - cg.matmul_flops(g) - activation
    assert expand(rest - (B * S * (2 * F + D) if bias else 0)) == 0


@each(
    ("function", "flops"),
    [
        (cg.relu, 1),
        (cg.gelu, 5),
        (cg.silu, 4),
        (cg.sigmoid, 4),
        (cg.tanh, 1),
        (lambda x: cg.gelu(x, approximate="tanh"), 9),
    ],
)
def test_activation_costs_match_docstrings(function, flops):
    g, _ = graph_of(function, (B, D))
    assert cg.flops(g) == flops * B * D


@each(
    ("call", "error", "text"),
    [
        (lambda x, i: cg.linear(x, "b d -> d b"), PatternError, r"contracts \[\] and adds \[\], expected both"),
        (lambda x, i: cg.linear(x, "b d -> b"), PatternError, r"contracts \['d'\] and adds \[\]"),
        (lambda x, i: cg.linear(x, "b d -> b f"), ShapeError, "size of new axis 'f' is not given, expected f=..."),
        (lambda x, i: cg.linear(x, "b d*2 -> b f", f=3), PatternError, "use conv for windows"),
        (lambda x, i: cg.linear(x, "b d -> f b", f=3, bias=True), PatternError,
         "expected the new axes last and unmerged"),
        (lambda x, i: cg.linear(x, "b d -> b f", f=3, q=3), PatternError,
         "size given for 'q', which is not an axis of 'b d -> b f'"),
        (lambda x, i: cg.linear(x, "b d -> b f", f=0), ShapeError, "size of 'f': 0, expected a positive integer"),
        (lambda x, i: cg.linear(x, "b d -> b f", f=3, bias=1), GraphError, "linear: bias is 1, expected True or False"),
        (lambda x, i: cg.linear(x, "b d -> b f", f=3, weight=3), GraphError, "linear: weight is 3, expected a tensor"),
        (lambda x, i: cg.linear(x, "b d -> b f", f=3, weight=x), ShapeError, "axis 'd' has size 5"),
        (lambda x, i: cg.linear(x, "b d -> b f", f=3, name="a b"), GraphError, "scope 'a b': expected identifiers"),
        (lambda x, i: cg.linear(None, "b d -> b f", f=3), GraphError, "linear: x is None, expected a tensor"),
        (lambda x, i: cg.softmax(x, 2), ShapeError, "axis 2 of .*: expected an integer from -2 to 1"),
        (lambda x, i: cg.softmax(x, None), ShapeError, "axis None of"),
        (lambda x, i: cg.softmax(3), GraphError, "softmax: x is 3, expected a tensor"),
        (lambda x, i: cg.softmax(x, name="a b"), GraphError, "kernel 'a b': expected an identifier"),
        (lambda x, i: cg.layer_norm(cg.reduce(x, "a b -> ", "sum")), ShapeError, "axis -1 of"),
        (lambda x, i: cg.layer_norm(x, affine=None), GraphError, "affine is None, expected True or False"),
        (lambda x, i: cg.rms_norm(x, affine=3), GraphError, "rms_norm: affine is 3, expected True or False"),
        (lambda x, i: cg.embedding(x, x), ShapeError, "expected an integer format"),
        (lambda x, i: cg.nn.rotary_tables(x, 6), ShapeError, "expected integers with one axis"),
        (lambda x, i: cg.nn.rotary_tables(i, 5), ShapeError, "5/2, expected a positive integer"),
        (lambda x, i: cg.nn.rotary_tables(i, 6, base=0), GraphError, "base 0, expected a positive number"),
        (lambda x, i: cg.nn.rotary(x, x, x), ShapeError, "size that is not rotated: -5, expected a positive integer"),
        (lambda x, i: cg.nn.rotary(x[0], x, x), ShapeError, "expected at least two axes"),
        (lambda x, i: cg.nn.mlp(x, 4, activation=3), GraphError, "mlp: activation is 3, expected a function"),
        (lambda x, i: cg.nn.gated_mlp(x, 4, activation=x), GraphError,
         "gated_mlp: activation is .*, expected a function"),
        (lambda x, i: cg.nn.mlp(3, 4), GraphError, "mlp: x is 3, expected a tensor"),
        (lambda x, i: cg.cross_entropy(x, x), ShapeError, "expected an integer format"),
        (lambda x, i: cg.cross_entropy(x, None), GraphError, "cross_entropy: targets is None, expected a tensor"),
        (lambda x, i: cg.cross_entropy(x, cg.ops.arange(7)), ShapeError, "expected the same axes except the last"),
    ],
)  # fmt: skip
def test_refusals_name_place_value_and_expectation(call, error, text):
    g = cg.Graph("g")
    with g, pytest.raises(error, match=text):
        call(g.input("x", (3, 5)), g.input("ids", (3,), dtype="int64"))
    assert cg.flops(g) >= 0


def test_layers_without_names_are_numbered():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        for _ in range(2):
            x = cg.nn.mlp(cg.rms_norm(x), F)
            x = cg.linear(x, "b d -> b e", e=D)
        for _ in range(2):
            x = cg.repeat(3, lambda x: cg.layer_norm(x), x)
        g.output(x)
    names = [t.name for t in g.params]
    assert len(set(names)) == len(names) == 12
    assert {"rms_norm/weight", "rms_norm_1/weight", "mlp_1/up/weight", "linear_1/weight"} <= set(names)
    assert {"repeat/layer_norm/bias", "repeat_1/layer_norm/bias"} <= set(names)
    # rows follow name order
    assert {"mlp/up", "mlp_1/up"} <= {r.scope for r in cg.costs(g)}
