"""Per-rank graphs on two and four real gloo processes, against the graph of all ranks."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from sharded_steps import CASES, MORE  # noqa: E402  # after torch is known to be there

import costgraph as cg  # noqa: E402  # after torch is known to be there
from costgraph.algebra.polynomial import poly  # noqa: E402
from costgraph.ir.graph import apply  # noqa: E402
from costgraph.ops.collectives import Collective  # noqa: E402
from costgraph.torch import lower, random_inputs  # noqa: E402

PROGRAM = Path(__file__).parent / "gloo_worlds.py"
pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and hasattr(os, "fork")),
    reason="no gloo, or no fork",
)


def run_world(folder, *arguments):
    """Return the results from the real ranks and the per-rank graphs."""
    paths = [str(Path(cg.__file__).parent.parent), str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *arguments], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    read = [json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("derived", *range(4))]
    return read[0], read[1:]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return run_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def large_world(tmp_path_factory):
    return run_world(tmp_path_factory.mktemp("large_world"), "long", "1000")


def assert_ranks_agree(derived, ranks, name, columns=3):
    """Assert that every rank has its shard of the unsharded values, with as many collectives and about as many
    bytes."""
    reports = [rank[name] for rank in ranks if name in rank]
    assert len(reports) >= 2
    assert all(rank["error"] < 1e-9 for rank in reports), reports
    expected = Counter()
    for *row, times in derived[name]:
        expected[tuple(row[:columns])] += times
    for rank in reports:
        assert Counter(tuple(row[:columns]) for row in rank["collectives"]) == expected


@pytest.mark.parametrize("name", CASES)
def test_ranks_match_their_shards_and_derived_collectives(name, world):
    assert_ranks_agree(*world, name)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_ranks_of_larger_steps_match_their_shards(name, large_world):
    assert_ranks_agree(*large_world, name)


@pytest.mark.long
def test_ranks_of_random_graphs_match_their_shards(large_world):
    names = [name for name in large_world[0] if name.startswith("drawn")]
    assert len(names) > 50
    for name in names:
        assert_ranks_agree(*large_world, name, columns=2)  # all dtypes run in fp64, which has other sizes


# -- errors ------------------------------------------------------------------------------------------------------------


def sharded():
    B, D, F = cg.dims("B D F")
    with cg.Graph("mlp") as g:
        h = cg.relu(cg.einsum(g.input("x", (B, D)), g.param("up", (D, F)), "b d, d f -> b f"))
        g.output(cg.einsum(h, g.param("down", (F, D)), "b f, f d -> b d"))
    return cg.shard(g, cg.mesh(tp=2), {"up": "d (f tp)", "down": "(f tp) d"}, strict=True)


@pytest.fixture
def mesh():
    """Make meshes in a fake world with four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield lambda *shape, names: init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.distributed.destroy_process_group()


SIZES = {"B": 3, "D": 5, "F": 14}
PLACE = "lower of graph 'mlp'"


def test_rank_graph_needs_a_mesh():
    with pytest.raises(cg.GraphError) as refused:
        lower(sharded(), **SIZES)
    assert (
        str(refused.value)
        == f"{PLACE}: the graph is partitioned over mesh(tp=2), expected mesh= with torch's DeviceMesh"
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda mesh: 2, "mesh has no axis names (int), expected a DeviceMesh or process groups by name with 'tp'"),
        (lambda mesh: mesh(4, names=None),
         "mesh has no axis names (DeviceMesh), expected a DeviceMesh or process groups by name with 'tp'"),
        (lambda mesh: mesh(2, 2, names=("dp", "cp")),
         "mesh has axes ['dp', 'cp'], expected a DeviceMesh or process groups by name with 'tp'"),
        (lambda mesh: mesh(4, names=("tp",)), "mesh has 4 ranks along 'tp', expected 2"),
        (lambda mesh: {"tp": 2}, "mesh has int along 'tp', expected a process group"),
    ],
)  # fmt: skip
def test_a_mesh_has_the_axes_and_degrees_of_the_graph(given, text, mesh):
    with pytest.raises(cg.GraphError) as refused:
        lower(sharded(), mesh=given(mesh), **SIZES)
    assert str(refused.value) == f"{PLACE}: {text}"


def test_mesh_without_this_process_is_refused(mesh):
    mesh(4, names=("all",))
    apart = torch.distributed.device_mesh.DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("tp",))
    with pytest.raises(cg.GraphError, match="mesh has no process group along 'tp' for this process"):
        lower(sharded(), mesh=apart, **SIZES)


def test_process_groups_may_be_given_by_axis_name(mesh):
    groups = {"tp": mesh(2, 2, names=("dp", "tp"))["tp"].get_group()}
    module = lower(sharded(), mesh=groups, **SIZES)
    # the last rank has the second half of the columns, and fake collectives return nothing
    assert module.up.shape == (5, 7)
    assert module(torch.ones(3, 5)).shape == (3, 5)


def test_send_without_destination_is_refused(mesh):
    with cg.Graph("sent") as g:
        g.output(apply(Collective(collective="send", ranks=poly(2), axis="tp"), [g.input("x", (4,))], "send")[0])
    with pytest.raises(
        cg.UnsupportedError, match="lower 'send': send has no destination rank, expected a collective over all"
    ):
        lower(g, mesh=mesh(2, 2, names=("dp", "tp")))


def test_random_indices_cover_rows_of_all_ranks():
    case = CASES["lookups"]()
    columns = dict(zip([t.name for t in case.sharded.tensors if t.role == "input"],
                       random_inputs(case.sharded, **case.sizes), strict=True))["columns"]  # fmt: skip
    assert case.sizes["V"] / 2 <= columns.max() < case.sizes["V"]


def test_rank_graph_runs_on_the_meta_device(mesh):
    module = lower(sharded(), "meta", mesh=mesh(2, 2, names=("dp", "tp")), **SIZES)
    assert module(torch.empty(3, 5, device="meta")).shape == (3, 5)


def test_mesh_axis_of_one_rank_needs_no_mesh():
    B, D = cg.dims("B D")
    with cg.Graph("alone") as g:
        g.output(cg.relu(g.input("x", (B, D))))
    rank = cg.shard(g, cg.mesh(dp=1), {"x": "(b dp) d"})
    assert lower(rank, B=2, D=3)(torch.ones(2, 3)).shape == (2, 3)
