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
    """Build a convolution, a norm and a ReLU, with the mean as a loss."""
    with cg.Graph("g", dtype=dtype) as g:
        x = cg.conv(g.input("x", (B, C, R, R)), "b c h w -> b o h w", window=3, padding=1, o=C)
        x = cg.relu(cg.nn.batch_norm(x, statistics=statistics))
        g.output(cg.reduce(x, "b c h w -> ", "mean"))
    return g


def kernels(graph, phase="forward"):
    return [op for op in graph.walk() if op.kind.name == "kernel" and op.phase == phase and "batch_norm" in op.name]


# -- batch norm: forward ---------------------------------------------------------------------------------------------


def test_inference_batch_norm_scales_and_shifts():
    g = normed(cg.nn.batch_norm)
    # subtract, multiply, scale and shift per element; eps and reciprocal root per channel
    assert cg.flops(g, **SIZES) == 4 * 150 + 2 * 3
    # x and y once, and five vectors: weight, bias, mean and variance are read once each
    assert cg.bytes_moved(g, **SIZES) == 2 * 4 * 150 + 4 * 4 * 3
    assert cg.param_count(g, **SIZES) == 2 * 3


def test_batch_statistics_costs():
    g = normed(cg.nn.batch_norm, statistics="batch")
    # mean, subtract, square, mean, multiply, scale and shift per element; 2 per channel, and a + t*(b - a) per buffer
    assert cg.flops(g, **SIZES) == 7 * 150 + 2 * 3 + 2 * 3 * 3
    # all vectors are read, and running statistics are also written
    assert cg.bytes_moved(g, **SIZES) == 2 * 4 * 150 + 6 * 4 * 3


@each("statistics", ["auto", "batch", "running"])
def test_running_statistics_are_fp32_buffers(statistics):
    g = normed(cg.nn.batch_norm, dtype="bf16", statistics=statistics)
    held = {life.tensor: life.bytes for life in cg.lifetimes(g, **SIZES) if life.role == "buffer"}
    assert sum(held.values()) == 2 * 4 * 3 + 8  # mean and variance, and an int64 batch counter
    assert cg.param_bytes(g, **SIZES) == 2 * 2 * 3
    assert g.outputs[0].dtype.name == "bf16"


def test_batch_norm_without_affine_parameters():
    g = normed(cg.nn.batch_norm, affine=False)
    assert cg.flops(g, **SIZES) == 2 * 150 + 2 * 3
    assert cg.param_count(g, **SIZES) == 0


@each("shape", [(B, C), (B, C, R), (B, C, R, R, R)])
def test_batch_norm_accepts_any_trailing_axes(shape):
    elements = 2 * 3 * 5 ** (len(shape) - 2)
    dims = {k: SIZES[k] for k in ("B", "C", "R") if cg.dims(k) in shape}
    assert cg.flops(normed(cg.nn.batch_norm, shape), **dims) == 4 * elements + 6
    assert cg.flops(normed(cg.nn.batch_norm, shape, statistics="batch"), **dims) == 7 * elements + 24


# -- batch norm: training ----------------------------------------------------------------------------------------------


def test_training_step_uses_batch_statistics_by_default():
    auto, batch, running = (cg.training_step(scored(s)) for s in ("auto", "batch", "running"))
    assert cg.flops(auto, **SIZES) == cg.flops(batch, **SIZES) > cg.flops(running, **SIZES)
    assert cg.peak_memory(auto, **SIZES) == cg.peak_memory(batch, **SIZES)
    (kernel,) = kernels(auto)
    assert not kernel.kind.statistics
    assert kernel.scope == kernels(running)[0].scope == "batch_norm/batch_norm"


def test_training_step_does_not_modify_forward_graph():
    g = scored()
    before = cg.flops(g, **SIZES)
    cg.training_step(g)
    assert cg.flops(g, **SIZES) == before
    assert kernels(g)[0].kind.statistics == "auto"


def test_backward_alone_keeps_declared_statistics():
    assert cg.flops(cg.backward(scored()), **SIZES) == cg.flops(cg.backward(scored("running")), **SIZES)


def test_batch_norm_saved_tensors():
    """Saves the norm's input, and the fp32 mean and reciprocal deviation per channel; ReLU saves its result."""
    activations = {
        life.tensor.rpartition("/")[2]: life.bytes
        for life in cg.lifetimes(cg.training_step(scored(dtype="bf16")), **SIZES)
        if life.role == "activation" and "backward" not in life.tensor
    }
    assert activations["conv"] == activations["relu"] == 2 * 150
    assert activations["mean_2"] == activations["rsqrt_1"] == 4 * 3


@pytest.mark.parametrize("checkpoint", [cg.every_block(), cg.every(2), cg.selective("batch_norm"), cg.from_start()])
def test_batch_norm_inside_layer_stack(checkpoint):
    with cg.Graph("g") as g:
        x = g.input("x", (B, C, R, R))

        def block(x):
            y = cg.conv(x, "b c h w -> b o h w", window=3, padding=1, o=C)
            return cg.relu(x + cg.nn.batch_norm(y))

        x = cg.repeat(cg.dims("L"), block, x, name="layers")
        g.output(cg.reduce(x, "b c h w -> ", "mean"))
    step = cg.training_step(g)
    again = cg.training_step(g, checkpoint=checkpoint)
    dims = SIZES | {"L": 4}
    assert cg.param_count(step, **dims) == cg.param_count(again, **dims) == 4 * (9 * 3 * 3 + 2 * 3)
    assert cg.flops(step, **dims) < cg.flops(again, **dims)
    assert cg.flops(cg.training_step(g, accumulate=7), **dims) > 6 * cg.flops(step, **dims)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_keeps_batch_norm_dtype(device):
    """torch autocast does not list batch norm: x and y stay in low precision, parameters and statistics stay fp32."""
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


def test_autocast_runs_group_norm_in_fp32():
    with cg.Graph("g") as g:
        x = cg.conv(g.input("x", (B, C, R, R)), "b c h w -> b o h w", window=3, padding=1, o=C)
        g.output(cg.nn.group_norm(x, 3))
    (kernel,) = [op for op in cg.apply_precision(g, "bf16-mixed").ops if op.kind.name == "kernel"]
    assert {t.dtype.name for t in kernel.operands} == {"fp32"}


def test_statistics_mode_survives_save_and_load(tmp_path):
    g = scored()
    cg.save(g, tmp_path / "g.json")
    again = cg.load(tmp_path / "g.json")
    assert cg.flops(again, **SIZES) == cg.flops(g, **SIZES)
    assert cg.flops(cg.training_step(again), **SIZES) == cg.flops(cg.training_step(g), **SIZES)


# -- group norm --------------------------------------------------------------------------------------------------------


def test_group_norm_costs_as_layer_norm_per_group():
    g = normed(cg.nn.group_norm, (B, 6, R, R), groups=3)
    # 7 per element, and eps and reciprocal root for each of 2*3 groups
    assert cg.flops(g, B=2, R=5) == 7 * 300 + 2 * 2 * 3
    assert cg.param_count(g) == 2 * 6
    assert cg.bytes_moved(g, B=2, R=5) == 2 * 4 * 300 + 2 * 4 * 6


def test_group_norm_saves_input_and_two_statistics_per_group():
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
def test_invalid_norms_are_refused(call, error, text):
    with cg.Graph("g") as g:
        x = g.input("x", (B, 6, R, R))
        with pytest.raises(error, match=text):
            call(x)
