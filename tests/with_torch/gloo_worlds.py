"""Sharded steps on real processes, as a script: four gloo ranks, each compared with its shard of the unsharded step.

`python gloo_worlds.py FOLDER` writes a file per rank: by case the largest error, the number of tensors, and the
collectives that torch's dispatcher saw; and `derived.json` with the derived collectives. `FOLDER long 300` runs further
cases and 300 random graphs on meshes of up to four ranks.
"""

import json
import os
import re
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_steps import CASES, MORE
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import costgraph as cg
from costgraph.torch.lowering import lower, random_inputs
from costgraph.torch.lowering.context import ConcreteSizes, Leaves

RANKS = 4
KINDS = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
         "all_gather_into_tensor_out": "all_gather", "all_to_all_single": "all_to_all"}  # fmt: skip


class Log(TorchDispatchMode):
    """Collectives by name, axis and bytes: the larger of a rank's input and output."""

    def __init__(self, axes):
        super().__init__()
        self.axes, self.rows = axes, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if space == "_c10d_functional" and name in KINDS:
            sent = name == "all_to_all_single" and 0 in args[2]  # all of it to one peer: a ring pass
            size = max(t.nbytes for t in (args[0], outputs))
            self.rows.append(("send" if sent else KINDS[name], self.axes[args[-1]], size))
        return outputs


def part(array, dims, numbers, degrees, rank):
    """Return a rank's shard; an axis is split into (n0, mesh axis, n1, ...), and a rank has one index along the mesh
    axis."""
    for i, factors in enumerate(dims):
        if factors:
            shape = [degrees[f] if isinstance(f, str) else numbers(f) for f in factors]
            at = tuple(rank[f] if isinstance(f, str) else slice(None) for f in factors)
            split = array.reshape(*array.shape[:i], *shape, *array.shape[i + 1 :])
            array = split[(slice(None),) * i + at].reshape(*array.shape[:i], -1, *array.shape[i + 1 :])
    return array.contiguous()


def places(sharded, module):
    """Return each tensor's placement in a module, by its torch name."""
    found, names = {}, Leaves(sharded)._names
    for t in (t for g in sharded.bodies() for t in g.tensors if t.name in names and t.producer is None):
        dims = sharded.sharding.places[t.name].dims[t.storage.pieces :]
        layers = [n for n in module.state_dict() if re.fullmatch(re.escape(names[t.name]) + r"(\.\d+)*", n)]
        found |= dict.fromkeys(layers, dims)
    return found


def flat(made):
    """Yield the outputs, loop iterations one by one, with the placement of each."""
    for i, y in enumerate(made if isinstance(made, tuple) else (made,)):
        yield from ((i, y) for y in (y if isinstance(y, tuple) else (y,)))


def whole(case):
    """The inputs, outputs and final state of the unsharded step."""
    module, inputs = lower(case.graph, **case.sizes), random_inputs(case.graph, **case.sizes)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    outputs = [(i, y.clone()) for i, y in flat(module(*(x.clone() for x in inputs)))]
    return inputs, before, outputs, module.state_dict()


def error(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    away = (found.double() - expected.double()).abs() / (1e-3 + expected.double().abs())
    return away.max().item()


def run(case, mesh, expected):
    """Run one rank's step and compare it with its shard of the unsharded one."""
    inputs, before, made, after = expected
    sharded, sharding = case.sharded, case.sharded.sharding
    module = lower(sharded, mesh=mesh, **case.sizes, **case.symbols)
    rank = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    numbers = ConcreteSizes(sharded, case.sizes | case.symbols)

    def own(array, dims):
        return part(array, dims, numbers, case.degrees, rank)

    at = places(sharded, module)
    # buffers that only ranks have are written before they are read
    module.load_state_dict(
        {n: own(before[n], at[n]) if n in before else t * torch.nan for n, t in module.state_dict().items()}
    )
    names = [t.name for t in case.graph.tensors if t.producer is None and t.role == "input"]
    given = [own(x, sharding.places[n].dims) for n, x in zip(names, inputs, strict=True)]
    with Log({mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names}) as log:
        outputs = list(flat(module(*given)))
    errors = []
    for (i, y), (_, y0) in zip(outputs, made, strict=True):
        dims = sharding.outputs[i].dims
        errors.append(error(y, own(y0, dims[len(dims) - y0.ndim :])))
    errors += [error(t, own(after[n], at[n])) for n, t in module.state_dict().items() if n in after]
    return {"error": max(errors), "tensors": len(errors), "collectives": log.rows}


def work(rank, folder, cases, expected):
    """Run all cases on one rank; smaller meshes leave the last ranks out."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=1))
    meshes, found = {}, {}
    for name, case in cases.items():
        axes, shape = tuple(case.degrees), tuple(case.degrees.values())
        if (axes, shape) not in meshes:
            ranks = torch.arange(torch.tensor(shape).prod()).reshape(shape)
            meshes[axes, shape] = DeviceMesh("cpu", ranks, mesh_dim_names=axes)
        if meshes[axes, shape].get_coordinate() is not None:
            found[name] = run(case, meshes[axes, shape], expected[name])
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def derived(case):
    """Return the collectives over mesh axes (a rank simulates the others alone): kind, axis, bytes and count."""
    rows = cg.communication(case.sharded, **case.sizes, **case.symbols)
    return [[m.collective, m.axis, m.bytes, m.times] for m in rows if m.axis in case.degrees]


def spawned(folder, cases, expected):
    """Run all ranks; forked processes inherit the derived results."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            try:
                work(rank, folder, cases, expected)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    states = [os.waitpid(child, 0)[1] for child in children]
    return any(states)


def run_cases(folder, cases):
    """Run the unsharded step and all ranks of each case; return whether any failed."""
    expected = {name: whole(case) for name, case in cases.items()}
    derived_calls = {name: derived(case) for name, case in cases.items()}
    (folder / "derived.json").write_text(json.dumps(derived_calls), encoding="utf-8")
    return spawned(folder, cases, expected)


def main(folder, which="", examples=""):
    torch.set_num_threads(1)
    if not which:
        return run_cases(Path(folder), {name: made() for name, made in CASES.items()})
    from drawn_steps import drawn
    from lowered import exact

    with exact():  # random graphs use all dtypes
        return run_cases(Path(folder), {name: made() for name, made in MORE.items()} | drawn(int(examples)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
