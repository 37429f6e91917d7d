"""Rolling, image windows, inverted residuals, embedding bags and pairwise products, compared with NumPy."""

import numpy as np
import pytest
from each import each

import costgraph as cg
from costgraph import testing

B, C, D, E, H, N, Q, R, S, V = cg.dims("B C D E H N Q R S V")


def declared(build):
    with cg.Graph("g") as g:
        result = build(g)
        g.output(*(result if isinstance(result, tuple) else (result,)))
    return g


def ran(g, **sizes):
    """Run the graph and compare the formulas with counted costs."""
    counted = testing.run(g, **sizes)
    assert (counted.matmul, counted.flops, counted.peak) == (
        cg.matmul_flops(g, **sizes), cg.flops(g, **sizes), cg.peak_memory(g, **sizes)
    )  # fmt: skip
    return counted


def given(*shape):
    return np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)


@each("shift", [0, 1, 3, -1, -4, 7, -7])
@each("axis", [0, 1, -1])
def test_roll_matches_numpy(shift, axis):
    x = given(7, 7, 7)
    g = declared(lambda g: cg.ops.roll(g.input("x", x.shape), shift, axis) * 1)
    np.testing.assert_array_equal(testing.run(g, {"x": x}).outputs[0], np.roll(x, shift, axis))


def test_roll_reads_and_writes_each_element_once():
    g = declared(lambda g: cg.ops.roll(g.input("x", (B, S)), -1, 1))
    assert cg.flops(g) == 0
    assert cg.bytes_moved(g) == 8 * B * S  # fp32, each element read and written
    assert declared(lambda g: cg.ops.roll(g.input("x", (B, S)), S, 1)).ops == []


@pytest.mark.parametrize("shift", [8, -8])
def test_roll_beyond_the_axis_raises(shift):
    with pytest.raises(cg.ShapeError, match="expected an integer of at most 7"):
        declared(lambda g: cg.ops.roll(g.input("x", (5, 7)), shift, 1))


def test_symbolic_roll_is_checked_when_bound():
    g = declared(lambda g: cg.ops.roll(g.input("x", (B, S)), N, 1))
    assert cg.bytes_moved(g, B=2, S=5, N=3) == 80
    with pytest.raises(cg.BindingError):
        cg.bytes_moved(g, B=2, S=5, N=6)


def cut(x, side, shift):
    """Cut (b, h, w, c) into windows like `window_partition` in transformers' Swin, after padding and rolling."""
    down, across = (-(-n // side) for n in x.shape[1:3])
    x = np.pad(x, ((0, 0), (0, down * side - x.shape[1]), (0, across * side - x.shape[2]), (0, 0)))
    x = np.roll(x, (-shift, -shift), (1, 2))
    b, _, _, c = x.shape
    return x.reshape(b, down, side, across, side, c).transpose(0, 1, 3, 2, 4, 5).reshape(-1, side * side, c)


@each(("shape", "side", "shift"), [((2, 6, 6, 3), 3, 1), ((2, 5, 7, 1), 3, 1), ((1, 2, 4, 2), 4, 0)])
def test_window_partition_round_trips(shape, side, shift):
    x = given(*shape)

    def build(g):
        images = g.input("x", shape)
        windows = cg.nn.window_partition(images, side, shift)
        return windows * 1, cg.nn.window_merge(windows, images, side, shift) * 1

    windows, back = testing.run(declared(build), {"x": x}).outputs
    np.testing.assert_array_equal(windows, cut(x, side, shift))
    np.testing.assert_array_equal(back, x)


def test_gradients_flow_through_windows():
    x, w = given(1, 5, 5, 2), given(4, 9, 2) ** 0.5

    def build(g):
        windows = cg.nn.window_partition(g.input("x", x.shape, grad=True), 3, 1) * g.input("w", w.shape)
        return cg.reduce(windows, "n s c -> ", "sum")

    counted = testing.run(cg.backward(declared(build)), {"x": x, "w": w})
    # each position's factor, scattered back to its origin
    back = w.reshape(1, 2, 2, 3, 3, 2).transpose(0, 1, 3, 2, 4, 5).reshape(1, 6, 6, 2)
    np.testing.assert_allclose(counted.gradients["x"], np.roll(back, (1, 1), (1, 2))[:, :5, :5])


def test_window_partition_bytes():
    g = declared(lambda g: cg.nn.window_partition(g.input("x", (B, 7, 7, C)), 4, 2))
    # fp32: 49 read and 64 written for padding; 64 read and written for the row roll, the column roll and the cut
    assert cg.bytes_moved(g).expand() == 4 * B * C * (49 + 64 + 3 * (64 + 64))
    assert g.outputs[0].shape == (4 * B, 16, C)


def test_window_bias_costs():
    g = declared(lambda g: cg.nn.window_bias(3, H, images=B, masks=4))
    assert g.outputs[0].shape == (4 * B, H, 9, 9)
    assert cg.param_count(g) == 25 * H  # (2*3 - 1)**2 distances
    assert cg.flops(g).expand() == 4 * B * H * 81  # each bias plus each mask
    assert cg.flops(declared(lambda g: cg.nn.window_bias(3, H))) == 0


def test_patch_merging_concatenates_neighbours():
    g = declared(lambda g: cg.nn.patch_merging(g.input("x", (B, 5, 3, C))))
    assert g.outputs[0].shape == (B, 3, 2, 2 * C)
    assert cg.param_count(g).expand() == 4 * C * 2 * C + 8 * C  # a linear layer without bias, and a norm over 4*C
    assert cg.matmul_flops(g).expand() == 2 * B * 6 * 4 * C * 2 * C


def test_stochastic_depth_flops():
    free = declared(lambda g: cg.nn.stochastic_depth(g.input("x", (B, C)), 0))
    assert free.ops == []
    g = declared(lambda g: cg.nn.stochastic_depth(g.input("x", (B, C, R)), 0.5))
    assert cg.flops(g).expand() == B * C * R + 2 * B  # each element times its sample's factor
    with pytest.raises(cg.GraphError, match="expected a number from 0 to below 1"):
        declared(lambda g: cg.nn.stochastic_depth(g.input("x", (B, C)), 1.5))


def test_squeeze_and_excitation_costs():
    g = declared(lambda g: cg.nn.squeeze_excitation(g.input("x", (B, C, R, R)), Q))
    counted = ran(g, B=2, C=3, Q=5, R=7)
    assert counted.matmul == 2 * 2 * 3 * 5 * 2
    # mean, both biases, ReLU and sigmoid (3 pointwise), product
    assert counted.pointwise == 2 * 3 * 49 + 2 * (5 + 3) + 2 * 5 + 3 * 2 * 3 + 2 * 3 * 49
    with pytest.raises(cg.ShapeError, match="expected four axes"):
        declared(lambda g: cg.nn.squeeze_excitation(g.input("x", (B, C, R)), Q))
    with pytest.raises(cg.GraphError, match="squeeze_excitation: gate"):
        declared(lambda g: cg.nn.squeeze_excitation(g.input("x", (B, C, R, R)), Q, gate="gated"))


@each(("stride", "dilation", "side"), [(1, 1, 7), (2, 1, 4), (1, 2, 7), (3, 1, 3)])
def test_inverted_residual_shape_params_and_flops(stride, dilation, side):
    def build(g):
        x = g.input("x", (B, C, 7, 7))
        return cg.nn.inverted_residual(x, E, D, window=5, stride=stride, dilation=dilation, squeezed=Q)

    g = declared(build)
    assert g.outputs[0].shape == (B, D, side, side)
    # three bias-free convolutions with scale and shift, two linear layers with bias
    assert cg.param_count(g).expand() == C * E + 25 * E + E * D + 2 * (2 * E + D) + 2 * E * Q + Q + E
    macs = 49 * C * E + side**2 * (25 * E + E * D) + 2 * E * Q
    assert (cg.matmul_flops(g) - 2 * B * macs).expand() == 0


def test_invalid_inverted_residual_raises():
    with pytest.raises(cg.ShapeError, match="window=4, expected an odd integer"):
        declared(lambda g: cg.nn.inverted_residual(g.input("x", (B, C, 7, 7)), E, C, window=4))
    with pytest.raises(cg.ShapeError):
        declared(lambda g: cg.nn.inverted_residual(g.input("x", (B, C, 7, 7)), E, D, residual=True))


@each(("mode", "meaning"), [("sum", np.sum), ("mean", np.mean), ("max", np.max)])
def test_embedding_bag_matches_numpy(mode, meaning):
    table, ids = given(5, 3), np.array([[0, 1], [4, 4], [2, 3]])
    g = declared(lambda g: cg.nn.embedding_bag(g.input("ids", (3, 2), "int64"), g.param("table", (5, 3)), mode=mode))
    (made,) = testing.run(g, {"ids": ids, "table": table}).outputs
    np.testing.assert_allclose(made, meaning(table[ids], axis=1))


def test_embedding_bag_reads_only_indexed_rows():
    g = declared(lambda g: cg.nn.embedding_bag(g.input("ids", (B, N), "int64"), g.param("table", (V, D))))
    assert cg.bytes_moved(g).expand() == 8 * B * N + 4 * B * N * D + 4 * B * D  # indices, rows, the result
    assert cg.peak_memory(g).expand() == 8 * B * N + 4 * V * D + 4 * B * D  # the whole table, no copy of its rows
    with pytest.raises(cg.ShapeError, match=r"expected indices \(b, n\) and a table \(v, d\)"):
        declared(lambda g: cg.nn.embedding_bag(g.input("ids", (B,), "int64"), g.param("table", (V, D))))


def test_embedding_bag_gradient():
    ids, w = np.array([[0, 1], [4, 4], [2, 0]]), given(3, 3)

    def build(g):
        bag = cg.nn.embedding_bag(g.input("ids", ids.shape, "int64"), g.param("table", (5, 3)))
        return cg.reduce(bag * g.input("w", w.shape), "b d -> ", "sum")

    expected = np.zeros((5, 3))
    np.add.at(expected, ids, w[:, None])
    counted = testing.run(cg.backward(declared(build)), {"ids": ids, "w": w})
    np.testing.assert_allclose(counted.gradients["table"], expected)


def test_embedding_bag_gradient_is_dense():
    def build(g):
        bag = cg.nn.embedding_bag(g.input("ids", (B, N), "int64"), g.param("table", (V, D)))
        return cg.reduce(bag, "b d -> ", "mean")

    step = cg.training_step(declared(build), optimizer=cg.SGD())
    rows = [row for row in cg.lifetimes(step, B=2, N=3, V=1009, D=5) if row.role == "gradient"]
    assert [row.bytes for row in rows] == [4 * 1009 * 5]


@pytest.mark.parametrize("itself", [False, True])
def test_pairwise_products_match_numpy(itself):
    x = given(2, 5, 3)
    below = np.tril_indices(5, 0 if itself else -1)
    g = declared(lambda g: cg.nn.dot_interaction(g.input("x", x.shape), itself=itself))
    places = (below[0] * 5 + below[1]).astype(np.int64)
    (made,) = testing.run(g, {"x": x, "interaction/pairs": places}).outputs
    np.testing.assert_allclose(made, (x @ x.transpose(0, 2, 1))[:, *below])


def test_pairwise_products_of_one_vector():
    with pytest.raises(cg.ShapeError, match="expected at least two vectors"):
        declared(lambda g: cg.nn.dot_interaction(g.input("x", (B, 1, D))))
    assert declared(lambda g: cg.nn.dot_interaction(g.input("x", (B, 1, D)), itself=True)).outputs[0].shape == (B, 1)


def test_binary_cross_entropy_matches_numpy():
    p, t = np.array([[0.25], [0.5], [0.9]]), np.array([[0.0], [1.0], [1.0]])
    g = declared(lambda g: cg.nn.binary_cross_entropy(g.input("p", (3, 1)), g.input("t", (3, 1))))
    (made,) = testing.run(g, {"p": p, "t": t}).outputs
    np.testing.assert_allclose(made, -np.mean(t * np.log(p) + (1 - t) * np.log(1 - p)))
    assert cg.bytes_moved(g) == 4 * (3 + 3 + 1)
    with pytest.raises(cg.ShapeError, match="expected equal shapes"):
        declared(lambda g: cg.nn.binary_cross_entropy(g.input("p", (B,)), g.input("t", (B, 1))))
