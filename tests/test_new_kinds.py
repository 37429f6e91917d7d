"""Layout, lookup and sorting ops: costs by hand count, values against torch."""

import numpy as np
import pytest
import torch
from each import each
from torch.nn import functional

import costgraph as cg
from costgraph import testing

B, S, K, D, E, N, C, O, H, W = cg.dims("B S K D E N C O H W")


def values(declare, **arrays):
    """Return the outputs of a graph as the interpreter computes them, and as NumPy does."""
    with cg.Graph("g", dtype="fp64") as g:
        kinds = {"f": None, "i": "int64", "b": "bool"}
        given = {n: g.input(n, a.shape, kinds[np.asarray(a).dtype.kind]) for n, a in arrays.items()}
        made = declare(**given)
        g.output(*(made if isinstance(made, tuple) else (made,)))
    return testing.run(g, {n: np.asarray(a, dtype=float) for n, a in arrays.items()}).outputs


@pytest.fixture
def rng():
    return np.random.default_rng(7)


# -- lookups with a batch ----------------------------------------------------------------------------------------------


def test_batched_lookup_selects_within_each_sequence(rng):
    x, ids = rng.normal(size=(2, 5, 3)), rng.integers(0, 5, (2, 4))
    (mine,) = values(lambda x, ids: cg.ops.gather(x, ids, batch=1), x=x, ids=ids)
    assert np.allclose(mine, np.stack([x[b][ids[b]] for b in range(2)]))


def test_lookup_bytes_count_rows_and_indices():
    with cg.Graph("g", dtype="bf16") as g:
        y = cg.ops.gather(g.input("x", (B, S, D)), g.input("ids", (B, K), "int64"), batch=1)
    assert y.shape == (B, K, D)
    # one row of D elements read and written for each of B*K int64 indices
    assert cg.bytes_moved(g) == 2 * 2 * B * K * D + 8 * B * K
    assert cg.flops(g) == 0


@pytest.mark.parametrize("mode", ["add", "max", "set"])
@pytest.mark.parametrize("batch", [0, 1])
def test_scatter_matches_torch(rng, mode, batch):
    shape = (5, 3) if batch == 0 else (2, 5, 3)
    x = rng.normal(size=shape)
    many = (7,) if batch == 0 else (2, 7)
    # torch leaves the result undefined for duplicate indices
    ids = np.broadcast_to(rng.permutation(5), (*many[:-1], 5)) if mode == "set" else rng.integers(0, 5, many)
    updates = rng.normal(size=(*ids.shape, 3))
    (mine,) = values(lambda x, i, u: cg.ops.scatter(x, i, u, mode, inplace=False, batch=batch), x=x, i=ids, u=updates)
    places = torch.tensor(ids)[..., None].expand(*updates.shape)
    how = {"add": "sum", "max": "amax"}
    theirs = torch.tensor(x)
    if mode == "set":
        theirs = theirs.scatter(batch, places, torch.tensor(updates))
    else:
        theirs = theirs.scatter_reduce(batch, places, torch.tensor(updates), how[mode])
    assert np.allclose(mine, theirs.numpy())


def test_scatter_max_costs_one_comparison_per_element():
    with cg.Graph("g") as g:
        cg.ops.scatter(g.input("x", (N, D)), g.input("ids", (E,), "int64"), g.input("u", (E, D)), "max", inplace=False)
    assert cg.flops(g) == E * D
    # copies the target and compares E rows with it: target read and written whole, updates and indices read
    assert cg.bytes_moved(g) == 2 * 4 * N * D + 4 * E * D + 8 * E


@each(
    ("call", "text"),
    [
        (lambda g: cg.ops.gather(g.input("x", (3, 5)), g.input("i", (2, 4), "int64"), batch=1), "first 1 axes of both"),
        (lambda g: cg.ops.gather(g.input("x", (3,)), g.input("i", (3, 4), "int64"), batch=1), "at least 2 axes"),
        (lambda g: cg.ops.gather(g.input("x", (3, 5)), g.input("i", (), "int64"), batch=1), "first 1 axes of both"),
        (lambda g: cg.ops.gather(g.input("x", (3, 5)), g.input("i", (3,), "int64"), batch=-1), "batch -1, expected"),
        (lambda g: cg.ops.scatter(g.input("x", (3,)), g.input("i", (2,), "int64"), g.input("u", (2,)), "min"), "mode"),
        (lambda g: cg.ops.sort(g.input("x", ())), "expected at least one axis"),
        (lambda g: cg.ops.stop_gradient(3), "expected a tensor"),
    ],
)
def test_mismatched_operands_are_refused(call, text):
    with cg.Graph("g") as g, pytest.raises(cg.CostGraphError, match=text):
        call(g)


# -- stop-gradient -----------------------------------------------------------------------------------------------------


def test_stop_gradient_has_no_backward_flops():
    """The teacher's matmul has no backward FLOPs and its parameter no gradient; the student's has 2*B*D*F."""

    def declare(stop):
        with cg.Graph("g") as g:
            x = g.input("x", (B, D))
            teacher = cg.linear(x, "b d -> b f", f=O, name="teacher")
            y = cg.linear(x, "b d -> b f", f=O) - (cg.ops.stop_gradient(teacher) if stop else teacher)
            g.output(cg.reduce(y * y, "b f -> ", "mean"))
        return cg.backward(g)

    stopped, both = declare(True), declare(False)
    assert cg.matmul_flops(both) - cg.matmul_flops(stopped) == 2 * B * D * O
    assert {t.name for t in stopped.gradients} == {"linear/weight"}
    assert cg.bytes_moved(both) > cg.bytes_moved(stopped)


def test_stop_gradient_is_a_view():
    with cg.Graph("g") as g:
        x = cg.relu(g.input("x", (B, D)))
        y = cg.ops.stop_gradient(x)
        g.output(y)
    assert y.is_view
    assert (cg.flops(g), cg.peak_memory(g)) == (B * D, 8 * B * D)


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("descending", [False, True])
def test_sort_matches_torch(rng, descending):
    x = rng.normal(size=(2, 7))
    mine, ids = values(lambda x: cg.ops.sort(x, descending=descending), x=x)
    theirs, places = torch.sort(torch.tensor(x), descending=descending)
    assert np.allclose(mine, theirs.numpy())
    assert (ids == places.numpy()).all()


# -- elementwise -------------------------------------------------------------------------------------------------------


@each(
    ("mine", "theirs"),
    [
        (lambda a, b: a < b, torch.lt), (lambda a, b: a <= b, torch.le), (lambda a, b: a > b, torch.gt),
        (lambda a, b: a >= b, torch.ge), (cg.ops.equal, torch.eq), (cg.ops.less, torch.lt),
        (cg.ops.less_equal, torch.le), (cg.ops.greater, torch.gt), (cg.ops.greater_equal, torch.ge),
        (cg.ops.maximum, torch.maximum), (cg.ops.minimum, torch.minimum),
        (lambda a, b: cg.ops.where(a > b, a, b), lambda a, b: torch.where(a > b, a, b)),
        (lambda a, b: cg.ops.exp(a) + cg.ops.sqrt(b) + cg.ops.log(b), lambda a, b: a.exp() + b.sqrt() + b.log()),
    ],
)  # fmt: skip
def test_elementwise_functions_match_torch(rng, mine, theirs):
    a, b = rng.integers(0, 3, (3, 5)) * 1.0, rng.integers(1, 3, (3, 5)) * 1.0
    (found,) = values(mine, a=a, b=b)
    assert np.allclose(found, theirs(torch.tensor(a), torch.tensor(b)).double().numpy())


def test_scalar_operand_on_either_side():
    with cg.Graph("g") as g:
        x = g.input("x", (B,))
        for made in (x > 0, x > 0, cg.ops.greater(x, 0), cg.ops.less(0, x)):
            assert made.producer.kind.function.name == "less"
            assert made.producer.kind.scalars == (0, None)


def test_constant_tensors():
    with cg.Graph("g", dtype="bf16") as g:
        a, b = cg.ops.zeros((B, D)), cg.ops.full((B,), 2.5, "fp32")
    assert (a.dtype.name, b.dtype.name) == ("bf16", "fp32")
    assert (cg.flops(g), cg.bytes_moved(g)) == (0, 2 * B * D + 4 * B)


# -- transposed convolution --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"window": 4, "stride": 2, "padding": 1}, {"window": (3, 2), "stride": (2, 3), "dilation": 2},
        {"window": 3, "stride": 2, "padding": 1, "output_padding": 1}, {"window": 1}, {"window": 3, "groups": 2},
        {"window": 2, "stride": 3}, {"window": 3, "bias": True},
    ],
)  # fmt: skip
def test_transposed_convolution_matches_torch(rng, options):
    x = rng.normal(size=(2, 4, 5, 3))
    with cg.Graph("g", dtype="fp64") as g:
        y = cg.nn.conv_transpose(g.input("x", x.shape), "b c h w -> b o h w", o=6, **options)
        g.output(y)
    module = torch.nn.ConvTranspose2d(
        4, 6, options["window"], **{"bias": False} | {k: v for k, v in options.items() if k != "window"}
    ).double()
    theirs = module(torch.tensor(x))
    assert tuple(theirs.shape) == tuple(map(int, y.shape))
    arrays = {f"conv_transpose/{n}": p.detach().numpy() for n, p in module.named_parameters()}
    (mine,) = testing.run(g, {"x": x, **arrays}).outputs
    assert np.allclose(mine, theirs.detach().numpy())
    # 2 for each element of x, window position, and output channel of the group
    window = options["window"] if isinstance(options["window"], tuple) else (options["window"],) * 2
    assert cg.matmul_flops(g) == 2 * x.size * window[0] * window[1] * 6 // options.get("groups", 1)


def test_transposed_convolution_gradients_match_torch():
    with cg.Graph("g", dtype="fp64") as g:
        x = g.input("x", (B, C, H), grad=True)
        y = cg.nn.conv_transpose(x, "b c h -> b o h", window=3, stride=2, padding=1, o=O)
        g.output(cg.reduce(y * y, "b o h -> ", "mean"))
    assert cg.matmul_flops(cg.backward(g)) == 3 * cg.matmul_flops(g)
    testing.check_training(g, B=2, C=3, H=4, O=2)


@each(
    ("call", "text"),
    [
        (lambda x: cg.nn.conv_transpose(x, "b c h w -> b o h w", window=3, output_padding=1, o=2), "output_padding=1"),
        (lambda x: cg.nn.conv_transpose(x, "b c h w -> b o h w", window=3, p=2), "expected o="),
        (lambda x: cg.nn.conv_transpose(x, "b c h w -> b c h w", window=3, c=2), "expected one renamed axis"),
        (lambda x: cg.nn.conv_transpose(x, "b c h w -> b o h w", window=(3,), o=2), "window"),
        (lambda x: cg.nn.conv_transpose(x, "b c h w -> b o h w", window=1, padding=3, o=2), "leaves -1 positions"),
    ],
)
def test_invalid_transposed_convolution_is_refused(call, text):
    with cg.Graph("g") as g:
        x = g.input("x", (1, 2, 5, 5))
        with pytest.raises(cg.CostGraphError, match=text):
            call(x)


# -- segments ----------------------------------------------------------------------------------------------------------


def test_segment_softmax_matches_torch(rng):
    x, ends = rng.normal(size=(9, 2)), rng.integers(0, 4, 9)
    (mine,) = values(lambda x, ends: cg.nn.segment_softmax(x, ends, 4), x=x, ends=ends)
    for node in range(4):
        rows = torch.tensor(x[ends == node])
        assert np.allclose(mine[ends == node], functional.softmax(rows, 0).numpy())


def test_segment_softmax_gradient_matches_torch():
    with cg.Graph("g", dtype="fp64") as g:
        x = cg.linear(g.input("x", (E, D)), "e d -> e h", h=2)
        p = cg.nn.segment_softmax(x, g.input("ends", (E,), "int64"), N)
        g.output(cg.reduce(p * p, "e h -> ", "mean"))
    testing.check_training(g, E=5, D=3, N=2)
