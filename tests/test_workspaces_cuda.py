"""GPU library and kernel workspaces, and the blocks of torch's caching allocator."""

import json

import pytest
from each import each

import costgraph as cg
from costgraph.analysis.allocator import CachingAllocator
from costgraph.errors import BindingError, GraphError, SpecError
from costgraph.ops.index import sort
from costgraph.ops.loops import save
from costgraph.report import report
from costgraph.report.files import to_json

KIB, MIB = 2**10, 2**20
# two blocks of 4 MiB and eight of 16 KiB
BEFORE_HOPPER = 2 * 4 * MIB + 8 * 16 * KIB


def scores():
    """Build the mean of softmax(x W)."""
    R, D, F = cg.dims("R D F")
    with cg.Graph("scores") as g:
        x, w = g.input("x", (R, D), "bf16"), g.param("w", (D, F), "bf16")
        y = cg.nn.softmax(cg.einsum(x, w, "r d, d f -> r f"), axis=-1)
        g.output(cg.reduce(y, "r f -> ", "mean"))
    return g


@each(("arch", "each"), [("sm_80", BEFORE_HOPPER), ("sm_89", BEFORE_HOPPER), ("sm_90", 32 * MIB)])
def test_each_matmul_thread_has_a_workspace(arch, each):
    g, sizes = scores(), {"R": 11, "D": 13, "F": 17}
    # the forward pass uses one thread, wherever the peak is
    assert cg.peak_memory(g, device="cuda", arch=arch, **sizes) == cg.peak_memory(g, **sizes) + each
    step = cg.backward(g)
    line = cg.timeline(step, device="cuda", arch=arch, **sizes)
    libraries = {name: n for name, n in line.workspaces.items() if name.startswith("cuBLAS")}
    assert libraries == {"cuBLAS": each, "cuBLAS (autograd)": each}
    assert line.peak == cg.peak_memory(step, device="cuda", arch=arch, **sizes)
    assert line.peak >= cg.peak_memory(step, **sizes) + 2 * each
    assert sum(line.by_role.values()) == line.peak
    assert line.by_role["workspace"] >= 2 * each


def test_graphs_without_matmuls_have_no_workspace():
    R, D = cg.dims("R D")
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (R, D))))
    assert cg.peak_memory(g, device="cuda") == cg.peak_memory(g)
    assert cg.timeline(g, device="cuda").workspaces == {}


def test_convolution_has_no_cublas_workspace():
    N, C, H = cg.dims("N C H")
    with cg.Graph("g") as g:
        g.output(cg.conv(g.input("x", (N, C, H, H)), "n c h w -> n o h w", window=3, o=5))
    assert cg.timeline(g, device="cuda", N=2, C=3, H=7).workspaces == {}


def test_softmax_gradient_materializes_product():
    step, sizes = cg.backward(scores()), {"R": 11, "D": 2, "F": 1009}
    found = cg.timeline(step, device="cuda", **sizes).workspaces
    (name,) = [name for name in found if not name.startswith("cuBLAS")]
    assert "softmax_backward" in name
    # R*F bf16 elements for grad * output
    assert found[name] == 11 * 1009 * 2
    # the op holds y, its gradient and the result; x, w and their gradients make up the rest
    there = {m.op: m.bytes for m in cg.timeline(step, device="cuda", **sizes).moments}
    plain = {m.op: m.bytes for m in cg.timeline(step, **sizes).moments}
    assert there[name] == plain[name] + found[name] + 2 * 32 * MIB


def test_peak_with_workspaces_is_symbolic():
    step, sizes = cg.backward(scores()), {"R": 11, "D": 13, "F": 1009}
    peak = cg.peak_memory(step, device="cuda", arch="sm_80")
    assert cg.evaluate(peak, **sizes) == cg.peak_memory(step, device="cuda", arch="sm_80", **sizes)
    R, F = cg.dims("R F")
    spaces = {r.by_role["workspace"] - 2 * BEFORE_HOPPER for r in cg.regimes(peak)}
    assert 2 * R * F in spaces <= {0, 2 * R * F}


def test_unknown_device_is_refused():
    g = scores()
    with pytest.raises(GraphError, match="peak_memory: device 'tpu', expected one of cuda"):
        cg.peak_memory(g, device="tpu")
    with pytest.raises(GraphError, match="timeline: arch 'hopper', expected a compute capability"):
        cg.timeline(g, device="cuda", arch="hopper")
    with pytest.raises(GraphError, match="peak_memory: arch 'sm_80' without a device; add device='cuda'"):
        cg.peak_memory(g, arch="sm_80")


# -- blocks --------------------------------------------------------------------------------------------------------


@each(
    ("size", "taken"),
    [
        (1, 512), (513, 1024), (MIB, MIB),  # cut from a segment of 2 MiB
        (MIB + 1, MIB + 512),  # from one of 20 MiB
        (12 * MIB - 512, 12 * MIB),  # a 12 MiB segment with 512 B left
        (11 * MIB, 12 * MIB), (11 * MIB - 512, 11 * MIB - 512),  # a remainder above 1 MiB is split off
    ],
)  # fmt: skip
def test_blocks_with_small_remainder_are_not_split(size, taken):
    allocator = CachingAllocator()
    block = allocator.take(size)
    assert (block.size, allocator.taken, allocator.most) == (taken, taken, taken)
    allocator.give(block)
    assert (allocator.taken, allocator.most) == (0, taken)


def test_free_blocks_are_merged_and_reused():
    allocator = CachingAllocator()
    first, second = allocator.take(3 * MIB), allocator.take(5 * MIB)
    assert (first.segment, first.at, second.segment, second.at) == (0, 0, 0, 3 * MIB)
    allocator.give(first)
    # 12 MiB are free after it and 3 MiB before: best fit takes the smaller one
    again = allocator.take(2 * MIB + MIB // 2)
    assert (again.at, again.size) == (0, 3 * MIB)  # half a MiB is left
    allocator.give(again)
    allocator.give(second)
    whole = allocator.take(19 * MIB + MIB // 2)  # the whole segment, merged again
    assert (whole.segment, whole.at, whole.size) == (0, 0, 20 * MIB)
    small = allocator.take(7)
    assert small.segment == 1


def test_block_peak_matches_allocations():
    R = cg.dims("R")
    with cg.Graph("g") as g:
        x = g.input("x", (R,), "fp32")
        g.output(cg.relu(cg.relu(x)))
    # 11 MiB each from 12 MiB segments: x and both results
    elements = 11 * MIB // 4
    assert cg.peak_memory(g, R=elements) == 3 * 11 * MIB
    assert cg.peak_memory(g, allocator="cuda", R=elements) == 3 * 12 * MIB
    assert cg.peak_memory(g, allocator=True, R=elements) == cg.peak_memory(g, allocator="cuda", R=elements)
    assert cg.peak_memory(g, allocator=False, R=elements) == cg.peak_memory(g, R=elements)
    with pytest.raises(BindingError, match="peak in blocks of an allocator"):
        cg.peak_memory(g, allocator=True)


@each(("rows", "length", "extra"), [(128, 4096, 0), (127, 4099, 0), (131, 4099, 131 * 4099 * 20)])
def test_long_row_sort_allocates_indices_and_radix_buffers(rows, length, extra):
    """int64 indices, 4-byte elements, and indices for a radix sort pass."""
    R, V = cg.dims("R V")
    with cg.Graph("g") as g:
        values, places = sort(g.input("x", (R, V)))
        g.output(values)
        g.output(places)
    # x, the sorted elements, and the indices
    assert cg.peak_memory(g, device="cuda", R=rows, V=length) == rows * length * (4 + 4 + 8) + extra


def test_row_statistics_are_not_group_statistics():
    B, S, D = cg.dims("B S D")
    with cg.Graph("norms") as g:
        h = cg.einsum(g.input("x", (B, S, D)), g.param("w", (D, D)), "b s d, d e -> b s e")
        with cg.kernel("norm"):
            mean = save(cg.reduce(h, "b s d -> b s", "mean"))
            scale = save(cg.reduce(h * h, "b s d -> b s", "mean"))
            y = (h - cg.rearrange(mean, "b s -> b s 1")) / cg.rearrange(scale, "b s -> b s 1")
        g.output(cg.reduce(y * y, "b s d -> ", "mean"))
    step = cg.backward(g)
    (gradient,) = [op for op in step.ops if op.phase == "backward" and op.scope.startswith("norm") and op.body]
    assert [t.sizes for t in gradient.operands].count(gradient.operands[-1].sizes) == 2  # both of (B, S)
    assert all(name.startswith("cuBLAS") for name in cg.timeline(step, device="cuda").workspaces)


# -- other questions -----------------------------------------------------------------------------------------------


def test_lifetimes_list_workspaces():
    step, sizes = cg.backward(scores()), {"R": 11, "D": 2, "F": 1009}
    plain = cg.lifetimes(step, **sizes)
    lifetimes = cg.lifetimes(step, device="cuda", arch="sm_80", **sizes)
    spaces = [r for r in lifetimes if r.role == "workspace"]
    assert {r.tensor: r.bytes for r in spaces} == cg.timeline(step, device="cuda", arch="sm_80", **sizes).workspaces
    assert [r for r in lifetimes if r.role != "workspace"] == list(plain)
    assert {(r.born, r.dies) for r in spaces if r.tensor.startswith("cuBLAS")} == {(None, None)}
    assert all(r.born == r.dies == r.tensor for r in spaces if not r.tensor.startswith("cuBLAS"))


@each(
    ("hardware", "arch", "each"),
    [
        ("h100-sxm", None, 32 * MIB), ("a100-80-sxm", None, BEFORE_HOPPER), (None, None, 32 * MIB),
        ("h100-sxm", "sm_80", BEFORE_HOPPER), ("mi300x", "sm_80", BEFORE_HOPPER),
    ],
)  # fmt: skip
def test_report_uses_hardware_architecture(hardware, arch, each):
    g, sizes = scores(), {"R": 11, "D": 13, "F": 17}
    plain, found = report(g, hardware, **sizes), report(g, hardware, device="cuda", arch=arch, **sizes)
    assert found.peak.value == plain.peak.value + each == cg.evaluate(found.peak.formula[0].formula, **sizes)
    assert found.peak.by_role["workspace"] == each
    assert plain.peak.arch is None
    assert f"of CUDA's libraries and kernels on {found.peak.arch}" in str(found)
    assert json.loads(to_json(found))["peak_memory"]["arch"] == found.peak.arch


def test_report_requires_known_architecture():
    g = scores()
    with pytest.raises(SpecError, match="report: mi300x has no arch, expected arch=, such as 'sm_90', with device="):
        report(g, "mi300x", device="cuda")
    with pytest.raises(GraphError, match="report: arch 'sm_80' without a device; add device='cuda'"):
        report(g, "h100-sxm", arch="sm_80")
    with pytest.raises(GraphError, match="lifetimes: device 'tpu', expected one of cuda"):
        cg.lifetimes(g, device="tpu")


@pytest.mark.parametrize("command", ["report", "train"])
def test_commands_count_workspaces_on_request(command, capsys):
    main = pytest.importorskip("costgraph.cli.app").main

    def peak(*words):
        assert main([command, "mlp", "--dtype", "bf16", "--json", "-", "B=2", *words]) == 0
        return json.loads(capsys.readouterr().out)["peak_memory"]

    plain, found = peak("--hardware", "a100-80-sxm"), peak("--hardware", "a100-80-sxm", "--device", "cuda")
    threads = {"report": 1, "train": 2}[command]
    assert found["by_role"]["workspace"]["value"] == threads * BEFORE_HOPPER
    assert found["value"] >= plain["value"] + BEFORE_HOPPER
    assert (plain["arch"], found["arch"]) == (None, "sm_80")
    assert peak("--device", "cuda", "--arch", "sm_90")["by_role"]["workspace"]["value"] == threads * 32 * MIB
