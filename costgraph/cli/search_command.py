"""The command of the command line that searches for a plan of training on several devices."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from inspect import signature
from typing import Annotated, Any

import typer

from ..algebra.symbols import read_size, shorten
from ..errors import FormatError
from ..plan.plans import Plan, Search
from ..plan.searching import search
from ..text_file import as_csv, as_json
from . import options as opt
from . import ranks
from .frame import command
from .loading import load_model
from .terminal import check_files, say, write_files

__all__ = ["SEARCH_SCHEMA", "search_command"]

SEARCH_SCHEMA = "costgraph/search/2"
"""What the JSON of this version calls itself; another number means other keys."""

_COLUMNS = (
    "dp", "tp", "pp", "cp", "ep", "zero", "sequence", "micro_batch", "accumulate", "checkpoint", "schedule", "virtual",
    "precision", "offload", "seconds", "throughput", "memory", "bound", "why",
)  # fmt: skip

_Devices = Annotated[str, typer.Option("--devices", metavar="N", help="How many devices there are.")]
_Precision = Annotated[
    list[str] | None, typer.Option("--precision", metavar="POLICY", help="As for train, several times if wanted.")
]
_Memory = Annotated[str | None, typer.Option("--memory", metavar="N", help="Bytes that a plan may take on a device.")]
_Dp = Annotated[str | None, typer.Option("--dp", metavar="N,N", help="Degrees of data parallelism to try.")]
_Tp = Annotated[str | None, typer.Option("--tp", metavar="N,N", help="Degrees of tensor parallelism to try.")]
_Pp = Annotated[str | None, typer.Option("--pp", metavar="N,N", help="Stages of a pipeline to try.")]
_Cp = Annotated[str, typer.Option("--cp", metavar="N,N", help="Degrees of context parallelism to try; 1 by default.")]
_Ep = Annotated[str | None, typer.Option("--ep", metavar="N,N", help="Degrees of expert parallelism to try.")]
_Zero = Annotated[str | None, typer.Option("--zero", metavar="N,N", help="Stages of ZeRO to try, of 0 to 3.")]
_Sequence = Annotated[str | None, typer.Option("--sequence", metavar="YES", help="Split the sequence: yes or no.")]
_Micro = Annotated[str | None, typer.Option("--micro-batch", metavar="N,N", help="Samples at once to try.")]
_Times = Annotated[str | None, typer.Option("--accumulate", metavar="N,N", help="Numbers of micro-batches to try.")]
_How = Annotated[
    list[str] | None, typer.Option("--checkpoint", metavar="HOW", help="As for train, several times if wanted.")
]
_Schedule = Annotated[
    list[str] | None, typer.Option("--schedule", metavar="NAME", help="Order of a pipeline, several times if wanted.")
]
_Virtual = Annotated[str | None, typer.Option("--virtual", metavar="N,N", help="Groups of layers of a rank to try.")]
_Offload = Annotated[
    list[str] | None,
    typer.Option("--offload", metavar="WHAT", help="On the host: none, optimizer+parameters..."),
]
_Workers = Annotated[str, typer.Option("--workers", metavar="N", help="Processes that derive side by side.")]
_Pareto = Annotated[bool, typer.Option("--pareto", help="Only those beside which none is as fast and as small.")]


def _listed(text: str | None, option: str) -> list[int] | None:
    return None if text is None else [int(word) if word == "0" else read_size(word, option) for word in text.split(",")]


def _split(text: str | None) -> bool | None:
    if text not in (None, "yes", "no"):
        raise FormatError(f"--sequence {shorten(text)}: expected yes or no")
    return None if text is None else text == "yes"


def search_records(found: Search) -> list[dict[str, Any]]:
    """Return a row for each plan, by column."""
    return [{c: getattr(p, c) for c in _COLUMNS} | {"offload": "+".join(p.offload) or "none"} for p in found.rows]


def _json(found: Search) -> str:
    def record(row: dict[str, Any], plan: Plan) -> dict[str, Any]:
        return {**row, "parts": dict(plan.parts)}

    data = {
        "graph": found.graph,
        "hardware": {"id": found.hardware.id, "name": found.hardware.name},
        "devices": found.devices,
        "limit": found.limit,
        "tried": found.tried,
        "unit": found.unit,
        "notes": list(found.notes),
        "plans": [record(*pair) for pair in zip(search_records(found), found.rows, strict=True)],
    }
    return as_json(SEARCH_SCHEMA, data)


@command("search")
def search_command(
    model: opt.Model, hardware: opt.Device, devices: _Devices, sizes: opt.Sizes = None, network: ranks.Network = None,
    precision: _Precision = None, memory: _Memory = None, overlap: ranks.Overlap | None = None,
    system: ranks.System = "torch", reduce_each: ranks.ReduceEach = None, hold: ranks.Hold = None,
    dp: _Dp = None, tp: _Tp = None, zero: _Zero = None, sequence: _Sequence = None,
    micro_batch: _Micro = None, accumulate: _Times = None, pp: _Pp = None, cp: _Cp = "1", ep: _Ep = None,
    checkpoint: _How = None, schedule: _Schedule = None, virtual: _Virtual = None, offload: _Offload = None,
    pareto: _Pareto = False, attention: opt.Attention = None, dtype: opt.Format = None, fallback: opt.Fallback = None,
    workers: _Workers = "1", json: opt.Json = None, csv: opt.Csv = None,
) -> None:  # fmt: skip
    """Print the plans that divide devices, batch and model and that fit, fastest first, and what makes each slower.

    Of plans up to 1 % behind the fastest that is left, those of fewer stages of a pipeline come first.

    B is the samples of a step, such as sequences or images, those of all devices and micro-batches.

    Examples
    --------
      costgraph search llama-3-8b --devices 64 --hardware h100-sxm
        --precision bf16 B=512 S=4096
    """
    check_files(json, csv)
    dims: dict[str, Any] = dict(opt.read_sizes(sizes))  # no keyword of search, which a type checker cannot know
    taken = sorted(dims.keys() & signature(search).parameters.keys())
    if taken:
        raise FormatError(f"{taken[0]}={dims[taken[0]]}: search has an option of this name, expected --{taken[0]}")
    graph = load_model(model, attention, dtype, None)
    many = read_size(workers, "--workers")
    with ProcessPoolExecutor(many) if many > 1 else nullcontext() as executor:
        found = search(
            graph, devices=read_size(devices, "--devices"), hardware=hardware, network=network,
            precision=precision or None, schedule=schedule or "1f1b", virtual=_listed(virtual, "--virtual"),
            offload=offload or "none",
            memory=None if memory is None else read_size(memory, "--memory"), overlap=overlap,
            system=system, reduce_each=reduce_each, hold=hold,
            dp=_listed(dp, "--dp"), tp=_listed(tp, "--tp"), pp=_listed(pp, "--pp"),
            cp=_listed(cp, "--cp"), ep=_listed(ep, "--ep"), zero=_listed(zero, "--zero"), sequence=_split(sequence),
            micro_batch=_listed(micro_batch, "--micro-batch"), accumulate=_listed(accumulate, "--accumulate"),
            checkpoint=checkpoint or None, fallback=fallback, executor=executor, **dims,
        )  # fmt: skip
    found = found.pareto() if pareto else found
    if not write_files(
        (json, lambda: _json(found)), (csv, lambda: as_csv(_COLUMNS, (row.values() for row in search_records(found))))
    ):
        say(str(found))
