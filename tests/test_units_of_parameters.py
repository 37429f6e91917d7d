"""FSDP units under system policies: collectives match torch, and the step computes the same values."""

import pytest
from each import each
from test_shard import DATA, SIZES, N, over, step

import costgraph as cg
from costgraph import testing

R = cg.dims("R")
#: A four-layer fp32 llama, with two rows of 32 tokens on each of four ranks.
TORCH = {"B": 8, "S": 32, "D": 64, "H": 4, "G": 4, "K": 16, "F": 128, "L": 4, "V": 512, "N": 4}


def sharded(graph, gather, mesh=None):
    mesh = mesh or cg.mesh(dp=N)
    axes = " ".join(name for name, _ in mesh.axes if name != "rep")
    data = {name: text.replace("dp", f"rep {axes}" if "rep" in mesh else axes) for name, text in DATA.items()}
    return cg.shard(graph, mesh, {**data, **over(axes, graph)}, gather=gather, strict=True)


def rows(graph, **sizes):
    return [(m.phase, m.collective, m.axis, m.times, m.bytes) for m in cg.communication(graph, **sizes) if m.bytes > 4]


LAYER, ROOT = 164_352, 262_400  # bytes for 41,088 and 65,600 parameters
POLICIES = {
    "default": ({}, [1, 4, 0, 4]),
    "root as well": ({"reshard_root": True}, [1, 4, 1, 4]),
    "kept": ({"reshard_after_forward": False}, [1, 4, 0, 0]),
    "not ahead": ({"prefetch": False}, [1, 4, 0, 4]),
}


@pytest.mark.parametrize("name", POLICIES)
def test_unit_has_one_collective_per_direction(name):
    policy, (root, layers, again, layers_again) = POLICIES[name]
    rank = sharded(step(), cg.FullyShard("dp", **policy))
    # torch 2.13.0, fully_shard on each layer and on the model, fake group with four ranks: same byte counts
    expected = [
        ("forward", "all_gather", root, ROOT), ("forward", "all_gather", layers, LAYER),
        ("backward", "all_gather", again, ROOT), ("backward", "all_gather", layers_again, LAYER),
        ("backward", "reduce_scatter", 4, LAYER), ("backward", "reduce_scatter", 1, ROOT),
    ]  # fmt: skip
    found = [(phase, what, times, n) for phase, what, _, times, n in rows(rank, **TORCH)]
    assert found == [row for row in expected if row[2]]
    testing.check_sharded(step(), rank, **SIZES, N=2)


FORMATS = {
    "both": ({"param_dtype": "bf16", "reduce_dtype": "fp32"}, 4, 2, 4),
    "reduced as computed": ({"param_dtype": "bf16"}, 4, 2, 2),
    "kept": ({"param_dtype": "bf16", "reduce_dtype": "fp32", "reshard_after_forward": False}, 0, 2, 4),
    "reduced alone": (
        {"reduce_dtype": "bf16"},
        0,
        4,
        2,
    ),  # casts of gathered parameters are saved
}


@pytest.mark.parametrize("name", FORMATS)
def test_unit_gathers_and_reduces_in_policy_dtypes(name):
    policy, again, gathered, reduced = FORMATS[name]
    graph = step(precision=cg.Policy("mixed", params="fp32", compute="bf16"))
    rank = sharded(graph, cg.FullyShard("dp", **policy))
    # torch 2.13.0, MixedPrecisionPolicy on four ranks: same byte counts
    expected = [
        ("forward", "all_gather", 1, ROOT * gathered // 4), ("forward", "all_gather", 4, LAYER * gathered // 4),
        ("backward", "all_gather", again, LAYER * gathered // 4),
        ("backward", "reduce_scatter", 4, LAYER * reduced // 4), ("backward", "reduce_scatter", 1, ROOT * reduced // 4),
    ]  # fmt: skip
    found = [(phase, what, times, n) for phase, what, _, times, n in rows(rank, **TORCH)]
    assert found == [row for row in expected if row[2]]
    testing.check_sharded(graph, rank, **SIZES, N=2)


def test_gather_dtype_that_no_op_reads_is_refused():
    with pytest.raises(cg.FormatError) as error:
        sharded(step(), cg.FullyShard("dp", param_dtype="bf16"))
    assert "in fp32; expected it to be read only by casts to param_dtype='bf16'" in str(error.value)


def test_hsdp_all_reduces_after_reduce_scatter():
    """HSDP, torch 2.13.0 on 2 x 4 ranks: the all-reduce covers one rank's shard of the unit."""
    rank = sharded(step(), "dp", cg.mesh(rep=R, dp=N))
    reduced = [row[1:] for row in rows(rank, **{**TORCH, "B": 16}, R=2) if row[1] == "all_reduce"]
    assert reduced == [("all_reduce", "rep", 4, LAYER // 4), ("all_reduce", "rep", 1, ROOT // 4)]
    testing.check_sharded(step(), rank, **{**SIZES, "B": 4}, N=2, R=2)


def test_reshard_after_forward_to_smaller_group():
    """torch 2.13.0, reshard_after_forward=2 on four ranks: the backward pass gathers 459,904 bytes."""
    gather = cg.FullyShard(("out", "dp"), reshard_after_forward="dp", reshard_root=True)
    rank = sharded(step(), gather, cg.mesh(out=2, dp=2))
    sizes = {name: n for name, n in TORCH.items() if name != "N"}
    sent = cg.communication(rank, **sizes)
    assert sent.filter(phase="forward", collective="all_gather").total() == 689_856
    assert sent.filter(phase="backward", collective="all_gather").total() == 459_904
    testing.check_sharded(step(), rank, **{**SIZES, "B": 4, "D": 8, "F": 8, "G": 4})


def test_micro_batches_reduce_each_layer_once():
    graph = step(accumulate=2, checkpoint=cg.every_block())
    data = {name: f"n {text}" for name, text in DATA.items()}
    rank = cg.shard(graph, cg.mesh(dp=N), {**data, **over("dp", graph)}, gather="dp", strict=True)
    found = rows(rank, **TORCH)
    assert [row[3] for row in found if row[1] == "reduce_scatter"] == [8, 2]
    testing.check_sharded(graph, rank, **SIZES, N=2)


@each(
    ("policy", "text"),
    [
        ({"axes": 3}, "FullyShard: axes=3, expected one or several names"),
        ({"axes": "dp", "units": ("a", 1)}, "FullyShard: units=('a', 1), expected one or several names"),
        ({"axes": "dp", "prefetch": 1}, "FullyShard: prefetch is 1, expected True or False"),
        (
            {"axes": "dp", "param_dtype": "int8"},
            "FullyShard: param_dtype='int8', expected a floating-point format and by_unit=True",
        ),
        (
            {"axes": "dp", "reduce_dtype": "bf16", "by_unit": False},
            "FullyShard: reduce_dtype='bf16', expected a floating-point format and by_unit=True",
        ),
        (
            {"axes": "dp", "reshard_after_forward": "tp"},
            "FullyShard: reshard_after_forward: 'tp' is not one of the axes ('dp',)",
        ),
    ],
)
def test_invalid_unit_policy_is_refused(policy, text):
    with pytest.raises(cg.CostGraphError) as error:
        cg.FullyShard(**policy)
    assert str(error.value) == text


def test_updates_in_backward_require_sharded_parameters():
    graph = step("fused", optimizer_in_backward=True)
    with pytest.raises(
        cg.UnsupportedError, match="reshard_after_forward=False keeps an unsharded copy of it; expected"
    ):
        sharded(graph, cg.FullyShard("dp", reshard_after_forward=False))
    rank = sharded(graph, "dp")
    testing.check_sharded(graph, rank, **SIZES, N=2)
