import pytest
from each import each

import costgraph as cg
from costgraph.transforms.precision import word

SIZES = {"B": 2, "C": 3, "R": 5}  # 3*25*2 = 150 elements
B, C, R = cg.dims("B C R")


def normed(norm, shape=(B, C, R, R), dtype="fp32", **options):
    with cg.Graph("g", dtype=dtype) as g:
        g.output(norm(g.input("x", shape), **options))
    return g


def scored(statistics="auto", dtype="fp32"):
    """A convolution, a norm and a ReLU, and the mean as a loss."""
    with cg.Graph("g", dtype=dtype) as g:
        x = cg.conv(g.input("x", (B, C, R, R)), "b c h w -> b o h w", window=3, padding=1, o=C)
        x = cg.relu(cg.nn.batch_norm(x, statistics=statistics))
        g.output(cg.reduce(x, "b c h w -> ", "mean"))
    return g


def kernels(graph, phase="forward"):
    return [op for op in graph.walk() if op.kind.name == "kernel" and op.phase == phase and "batch_norm" in op.name]


# -- batch norm: forward ---------------------------------------------------------------------------------------------


def test_running_statistics_scale_and_shift():
    g = normed(cg.nn.batch_norm)
    # subtract, multiply, scale and shift an element; eps and reciprocal root a channel
    assert cg.flops(g, **SIZES) == 4 * 150 + 2 * 3
    # x and y once, and five vectors: weight, bias, mean, variance (of which each is read once)
    assert cg.bytes_moved(g, **SIZES) == 2 * 4 * 150 + 4 * 4 * 3
    assert cg.param_count(g, **SIZES) == 2 * 3


def test_statistics_of_the_batch():
    g = normed(cg.nn.batch_norm, statistics="batch")
    # mean, subtract, square, mean, multiply, scale and shift an element; 2 a channel, and a + t*(b - a) for each buffer
    assert cg.flops(g, **SIZES) == 7 * 150 + 2 * 3 + 2 * 3 * 3
    # the vectors are read, and running ones written
    assert cg.bytes_moved(g, **SIZES) == 2 * 4 * 150 + 6 * 4 * 3


@each("statistics", ["auto", "batch", "running"])
def test_buffers_are_fp32_and_no_parameters(statistics):
    g = normed(cg.nn.batch_norm, dtype="bf16", statistics=statistics)
    held = {life.tensor: life.bytes for life in cg.lifetimes(g, **SIZES) if life.role == "buffer"}
    assert sum(held.values()) == 2 * 4 * 3 + 8  # mean and variance, and a count of batches in int64
    assert cg.param_bytes(g, **SIZES) == 2 * 2 * 3
    assert g.outputs[0].dtype.name == "bf16"


def test_without_scale_and_shift():
    g = normed(cg.nn.batch_norm, affine=False)
    assert cg.flops(g, **SIZES) == 2 * 150 + 2 * 3
    assert cg.param_count(g, **SIZES) == 0


@each("shape", [(B, C), (B, C, R), (B, C, R, R, R)])
def test_any_number_of_axes_after_the_channels(shape):
    elements = 2 * 3 * 5 ** (len(shape) - 2)
    dims = {k: SIZES[k] for k in ("B", "C", "R") if cg.dims(k) in shape}
    assert cg.flops(normed(cg.nn.batch_norm, shape), **dims) == 4 * elements + 6
    assert cg.flops(normed(cg.nn.batch_norm, shape, statistics="batch"), **dims) == 7 * elements + 24


# -- batch norm: training ----------------------------------------------------------------------------------------------


def test_a_training_step_takes_statistics_of_the_batch_unless_told_otherwise():
    auto, batch, running = (cg.training_step(scored(s)) for s in ("auto", "batch", "running"))
    assert cg.flops(auto, **SIZES) == cg.flops(batch, **SIZES) > cg.flops(running, **SIZES)
    assert cg.peak_memory(auto, **SIZES) == cg.peak_memory(batch, **SIZES)
    (kernel,) = kernels(auto)
    assert not kernel.kind.statistics
    assert kernel.scope == kernels(running)[0].scope == "batch_norm/batch_norm"


def test_the_graph_that_a_step_is_made_of_stays_as_it_is():
    g = scored()
    before = cg.flops(g, **SIZES)
    cg.training_step(g)
    assert cg.flops(g, **SIZES) == before
    assert kernels(g)[0].kind.statistics == "auto"


def test_gradients_alone_are_of_what_is_declared():
    assert cg.flops(cg.backward(scored()), **SIZES) == cg.flops(cg.backward(scored("running")), **SIZES)


def test_what_the_backward_pass_keeps():
    """The input of the norm, mean and reciprocal deviation of each channel in fp32; ReLU keeps its result."""
    activations = {
        life.tensor.rpartition("/")[2]: life.bytes
        for life in cg.lifetimes(cg.training_step(scored(dtype="bf16")), **SIZES)
        if life.role == "activation" and "backward" not in life.tensor
    }
    assert activations["conv"] == activations["relu"] == 2 * 150
    assert activations["mean_2"] == activations["rsqrt_1"] == 4 * 3


@pytest.mark.parametrize("checkpoint", [cg.every_block(), cg.every(2), cg.selective("batch_norm"), cg.from_start()])
def test_norms_inside_a_stack_of_layers(checkpoint):
    with cg.Graph("g") as g:
        x = g.input("x", (B, C, R, R))

        def block(x):
            y = cg.conv(x, "b c h w -> b o h w", window=3, padding=1, o=C)
            return cg.relu(x + cg.nn.batch_norm(y))

        x = cg.repeat(cg.dims("L"), block, x, name="layers")
        g.output(cg.reduce(x, "b c h w -> ", "mean"))
    kept = cg.training_step(g)
    again = cg.training_step(g, checkpoint=checkpoint)
    dims = SIZES | {"L": 4}
    assert cg.param_count(kept, **dims) == cg.param_count(again, **dims) == 4 * (9 * 3 * 3 + 2 * 3)
    assert cg.flops(kept, **dims) < cg.flops(again, **dims)
    assert cg.flops(cg.training_step(g, accumulate=7), **dims) > 6 * cg.flops(kept, **dims)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_leaves_batch_norms_alone(device):
    """torch has it in neither list: x and y are of the lower precision, parameters and statistics fp32."""
    for statistics in ("batch", "running"):
        mixed = cg.apply_precision(scored(statistics), "bf16-mixed")
        (kernel,) = kernels(mixed)
        assert word(kernel) == "batch_norm"
        assert [t.dtype.name for t in kernel.operands] == ["bf16", "fp32", "fp32", "fp32", "fp32"]
        assert kernel.results[0].dtype.name == "bf16"
        assert {t.dtype.name for t in kernel.results[1:]} <= {"fp32"}
    step = cg.training_step(scored(), precision="bf16-mixed", autocast_device=device)
    (backward,) = kernels(step, "backward")
    assert backward.results[0].dtype.name == "bf16"


def test_group_norms_are_among_those_that_autocast_widens():
    with cg.Graph("g") as g:
        x = cg.conv(g.input("x", (B, C, R, R)), "b c h w -> b o h w", window=3, padding=1, o=C)
        g.output(cg.nn.group_norm(x, 3))
    (kernel,) = [op for op in cg.apply_precision(g, "bf16-mixed").ops if op.kind.name == "kernel"]
    assert {t.dtype.name for t in kernel.operands} == {"fp32"}


def test_a_file_keeps_what_a_step_will_do(tmp_path):
    g = scored()
    cg.save(g, tmp_path / "g.json")
    again = cg.load(tmp_path / "g.json")
    assert cg.flops(again, **SIZES) == cg.flops(g, **SIZES)
    assert cg.flops(cg.training_step(again), **SIZES) == cg.flops(cg.training_step(g), **SIZES)


# -- group norm --------------------------------------------------------------------------------------------------------


def test_group_norm_is_a_layer_norm_of_each_group():
    g = normed(cg.nn.group_norm, (B, 6, R, R), groups=3)
    # 7 an element, and eps and reciprocal root for each of 2*3 groups
    assert cg.flops(g, B=2, R=5) == 7 * 300 + 2 * 2 * 3
    assert cg.param_count(g) == 2 * 6
    assert cg.bytes_moved(g, B=2, R=5) == 2 * 4 * 300 + 2 * 4 * 6


def test_group_norm_in_a_step_keeps_its_input_and_two_numbers_a_group():
    with cg.Graph("g", dtype="bf16") as g:
        x = cg.linear(g.input("x", (B, R, C)), "b r c -> b r d", d=6, name="up")
        x = cg.nn.group_norm(cg.rearrange(x, "b r c -> b c r"), 3)
        g.output(cg.reduce(cg.relu(x), "b c r -> ", "mean"))
    step = cg.training_step(g)
    kept = [
        life for life in cg.lifetimes(step, B=2, R=5, C=7) if life.tensor.rpartition("/")[2] in ("mean_2", "rsqrt_1")
    ]
    assert [life.bytes for life in kept] == [4 * 2 * 3] * 2


# -- refusals ----------------------------------------------------------------------------------------------------------


@each(
    ("call", "error", "text"),
    [
        (lambda x: cg.nn.batch_norm(cg.reduce(x, "b c h w -> b", "sum")), cg.ShapeError, "expected at least two axes"),
        (lambda x: cg.nn.batch_norm(x, statistics="eval"), cg.GraphError, "statistics"),
        (lambda x: cg.nn.batch_norm(x, affine=1), cg.GraphError, "affine"),
        (lambda x: cg.nn.batch_norm(3), cg.GraphError, "expected a tensor"),
        (lambda x: cg.nn.group_norm(x, 4), cg.ShapeError, "6 channels in 4 groups, expected a multiple"),
        (lambda x: cg.nn.group_norm(x, 0), cg.ShapeError, "groups"),
        (lambda x: cg.nn.group_norm(x, 7), cg.ShapeError, "6 channels in 7 groups, expected a multiple"),
        (
            lambda x: cg.nn.group_norm(cg.reduce(x, "b c h w -> b", "sum"), 1),
            cg.ShapeError,
            "expected at least two axes",
        ),
        (lambda x: cg.nn.group_norm(None, 1), cg.GraphError, "expected a tensor"),
    ],
)
def test_refusals(call, error, text):
    with cg.Graph("g") as g:
        x = g.input("x", (B, 6, R, R))
        with pytest.raises(error, match=text):
            call(x)
