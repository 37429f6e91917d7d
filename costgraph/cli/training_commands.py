"""Training commands: step costs, preflight checks, and strategy search."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from inspect import signature
from typing import Annotated, Any

import typer

from ..algebra.symbols import read_size, shorten
from ..analysis.step_time import seconds
from ..errors import FormatError
from ..ir.graph import Graph, known_names, of_stages
from ..optimizers import IMPLEMENTATIONS, OPTIMIZERS
from ..plan import preflight
from ..plan.strategy_search import Plan, Search, search
from ..report import report, text
from ..report.files import to_csv, to_json
from ..report.formatting import show
from ..report.text import plan_csv, plan_json, render_plan
from ..text_file import as_csv, as_json
from ..transforms.checkpoint import read_checkpoint
from ..transforms.loss import LOSSES, read_loss
from ..transforms.offload import offload as on_host
from ..transforms.precision import POLICIES
from ..transforms.training import training_step
from . import options as opt
from . import parallelism as ranks
from .loading import load_model
from .output import check_files, draw_report, say, screen, write_files
from .registry import command

__all__ = [
    "plan_command",
    "train_command",
    "SEARCH_SCHEMA",
    "search_command",
]


# -- train and plan ----------------------------------------------------------------------------------------------------

#: Checkpointing policies; a number or names follow the colon.
_POLICIES = ("none", "every-block", "from-start", "every:", "selective:", "keep:")

_Optimizer = Annotated[str, opt.choice("--optimizer", "NAME", f"{', '.join(OPTIMIZERS)}.", OPTIMIZERS)]
_Implementation = Annotated[
    str | None,
    opt.choice(
        "--implementation", "NAME", "Implementation of the optimizer: foreach, for-loop or fused.", IMPLEMENTATIONS
    ),
]
_Precision = Annotated[
    str | None,
    opt.choice("--precision", "POLICY", f"{', '.join(POLICIES)}; by default, the model's own formats.", POLICIES),
]
_Checkpoint = Annotated[str, opt.choice("--checkpoint", "POLICY",
    "none, every-block, from-start, every:K, selective:NAME,NAME or keep:NAME,NAME.", _POLICIES)]  # fmt: skip
_Loss = Annotated[str | None, opt.choice("--loss", "NAME",
    "transformers, fp32, chunked:N or another loss; by default that of the model.", (*LOSSES, "chunked:"))]  # fmt: skip
_Accumulate = Annotated[str, typer.Option("--accumulate", metavar="N", help="Micro-batches per update.")]
_Clip = Annotated[float | None, typer.Option("--clip", metavar="NORM", help="Maximum norm of all gradients.")]
_Devices = Annotated[str, typer.Option("--devices", metavar="N", help="Number of devices.")]
_Tokens = Annotated[str | None, typer.Option("--tokens", metavar="N", help="Number of training tokens, such as 15T.")]
_MFU = Annotated[
    float | None, typer.Option("--mfu", metavar="FRACTION", help="Assumed MFU; by default that of the roofline.")
]
_Days = Annotated[float | None, typer.Option("--days", metavar="N", help="Maximum number of training days.")]


def _step(
    graph: Graph, optimizer: str, implementation: str | None, precision: str | None, checkpoint: str, accumulate: str,
    clip: float | None, loss: str | None,
) -> Graph:  # fmt: skip
    kind = OPTIMIZERS.get(optimizer)
    if kind is None:
        raise FormatError(f"--optimizer {shorten(optimizer)}: expected one of {', '.join(OPTIMIZERS)}")
    instance = kind() if implementation is None else kind(implementation=implementation)
    micro_batches = read_size(accumulate, "--accumulate")
    policy = read_checkpoint(checkpoint)
    for name in () if policy is None else policy.names:
        if not any(f"/{name}/" in f"/{op.name}/" for op in graph.walk()):
            raise FormatError(f"--checkpoint: no op is in {shorten(name)}, expected a scope, a kernel or an op")
    function = None if loss is None else read_loss(loss)
    return training_step(graph, function, instance, precision, policy, micro_batches, clip=clip)


@command("train")
def train_command(
    model: opt.Model, sizes: opt.Sizes = None, hardware: opt.Hardware = None, optimizer: _Optimizer = "adamw",
    implementation: _Implementation = None, precision: _Precision = None, checkpoint: _Checkpoint = "none",
    accumulate: _Accumulate = "1", clip: _Clip = None, loss: _Loss = None, attention: opt.Attention = None,
    dtype: opt.Format = None, dropout: opt.Dropout = None, eager_ops: opt.EagerOps = False,
    symbolic: opt.Symbolic = False, count: opt.Count = "executed",
    fallback: opt.Fallback = None, depth: opt.Depth = 2, sort: opt.Sort = "order", formulas: opt.Formulas = False,
    json: opt.Json = None, csv: opt.Csv = None, plot: opt.Plot = None, memory_plot: opt.Memory = None,
    device: opt.TargetDevice = None, arch: opt.Arch = None, dp: ranks.Dp = "1", cp: ranks.Cp = "1", tp: ranks.Tp = "1",
    ep: ranks.Ep = "1", zero: ranks.Zero = 0, sequence: ranks.Sequence = False, context: ranks.Context = "gather",
    reduce_every_microbatch: ranks.ReduceEach = None, buckets: ranks.Buckets = "none", system: ranks.System = "torch",
    network: ranks.Network = None, overlap: ranks.Overlap = "none", hierarchical: opt.Hierarchical = False,
    offload: ranks.Offload = "", pp: ranks.Pp = "1", schedule: ranks.Schedule = "1f1b",
    micro_batches: ranks.MicroBatches = None, virtual_stages: ranks.Virtual = "1", layers: ranks.Layers = None,
    stage: ranks.Stage = "first",
) -> None:  # fmt: skip
    """Print the costs of a training step: state and activation memory, FLOPs by phase, and times on a device.

    With parallelism, they are the costs of one rank; B is then the number of sequences on all ranks. With --pp, the
    time of the whole pipeline precedes the costs of one stage.

    Examples
    --------
      costgraph train llama-3-8b --hardware h100-sxm --precision bf16-mixed
        --checkpoint every-block B=1 S=4096
      costgraph train llama-3-70b --hardware h100-sxm --precision bf16-master
        --dp 64 --tp 8 --zero 3 --sequence --overlap ideal B=64 S=8192
      costgraph train llama-3-70b --hardware h100-sxm --precision bf16-master
        --tp 8 --pp 4 --micro-batches 16 --schedule interleaved --virtual-stages 5
        --stage last B=1 S=8192
    """
    check_files(json, csv, plot, memory_plot)
    dims: dict[str, Any] = dict(opt.read_sizes(sizes))  # Any: passed together with keywords of other types
    graph = load_model(model, attention, dtype, dropout, eager_ops, symbolic)
    steps = ranks.micro_batches_of(accumulate, micro_batches)
    step = _step(graph, optimizer, implementation, precision, checkpoint, steps, clip, loss)
    degrees = {"dp": dp, "cp": cp, "tp": tp, "ep": ep}
    rank = ranks.rank_of(
        step,
        degrees,
        zero,
        sequence,
        context,
        reduce_every_microbatch,
        pp,
        schedule,
        virtual_stages,
        layers,
        buckets,
        system,
    )
    rank = on_host(rank, offload.split(",")) if offload else rank
    step, dims, head = _stage(rank, stage, hardware, fallback, network, dims)
    result = report(
        step, hardware, count=count, fallback=fallback, depth=depth, device=device, arch=arch, overlap=overlap,
        network=network, hierarchical=hierarchical, **dims,
    ).sorted(sort)  # fmt: skip
    draw_report(step, result, dims, plot, memory_plot)
    if not write_files((json, lambda: to_json(result)), (csv, lambda: to_csv(result))):
        width, color = screen()
        say(head + text.render(result, formulas=formulas, width=width, color=color), styled=color)


def _stage(
    rank: Graph, stage: str, hardware: str | None, fallback: Any, network: str | None, dims: dict[str, Any]
) -> tuple[Graph, dict[str, Any], str]:
    """Return the reported graph, its sizes, and for a pipeline a line with the time of all stages."""
    step = ranks.stage_of(rank, stage)
    if not rank.parts:
        return step, dims, ""
    of_stages(rank, dims)  # raises an error for sizes that no stage has
    stage_dims = {name: n for name, n in dims.items() if name in known_names(step)}
    if hardware is None:
        return step, stage_dims, ""
    step_seconds = seconds(rank, hardware, fallback=fallback, network=network, **dims)
    if not isinstance(step_seconds, float):  # a long formula
        return step, stage_dims, ""
    return (
        step,
        stage_dims,
        f"A step of the pipeline takes {show(step_seconds, 's')}; below is what its {stage} stage does.\n\n",
    )


@command("plan")
def plan_command(
    model: opt.Model, hardware: opt.Device, sizes: opt.Sizes = None, devices: _Devices = "1", tokens: _Tokens = None,
    mfu: _MFU = None, days: _Days = None, optimizer: _Optimizer = "adamw", implementation: _Implementation = None,
    precision: _Precision = None, checkpoint: _Checkpoint = "none", accumulate: _Accumulate = "1", clip: _Clip = None,
    loss: _Loss = None, attention: opt.Attention = None, dtype: opt.Format = None, dropout: opt.Dropout = None,
    eager_ops: opt.EagerOps = False,
    symbolic: opt.Symbolic = False, fallback: opt.Fallback = None, json: opt.Json = None, csv: opt.Csv = None,
) -> None:  # fmt: skip
    """Print preflight checks of a training run: each figure with its limit.

    Examples
    --------
      costgraph plan llama-3-8b --hardware h100-sxm --devices 1024 --tokens 15T
        --mfu 0.5 --precision bf16 --checkpoint every-block B=1 S=8192
    """
    check_files(json, csv)
    dims: dict[str, Any] = dict(opt.read_sizes(sizes))  # Any: passed together with keywords of other types
    graph = load_model(model, attention, dtype, dropout, eager_ops, symbolic)
    step = _step(graph, optimizer, implementation, precision, checkpoint, accumulate, clip, loss)
    checks = preflight(
        step, hardware, devices=read_size(devices, "--devices"),
        tokens=None if tokens is None else read_size(tokens, "--tokens"), mfu=mfu, most_days=days, fallback=fallback,
        **dims,
    )  # fmt: skip
    if not write_files((json, lambda: plan_json(checks)), (csv, lambda: plan_csv(checks))):
        width, color = screen()
        say(render_plan(checks, width=width, color=color), styled=color)


# -- search ------------------------------------------------------------------------------------------------------------

SEARCH_SCHEMA = "costgraph/search/2"
"""Schema of the JSON output; the number changes with the keys."""

_COLUMNS = (
    "dp", "tp", "pp", "cp", "ep", "zero", "sequence", "micro_batch", "accumulate", "checkpoint", "schedule",
    "virtual_stages", "precision", "offload", "seconds", "throughput", "memory", "bound", "why",
)  # fmt: skip

_Precisions = Annotated[
    list[str] | None, typer.Option("--precision", metavar="POLICY", help="As for train (repeatable).")
]
_Memory = Annotated[str | None, typer.Option("--memory", metavar="N", help="Memory limit per device in bytes.")]
_Dp = Annotated[str | None, typer.Option("--dp", metavar="N,N", help="Degrees of data parallelism to try.")]
_Tp = Annotated[str | None, typer.Option("--tp", metavar="N,N", help="Degrees of tensor parallelism to try.")]
_Pp = Annotated[str | None, typer.Option("--pp", metavar="N,N", help="Numbers of pipeline stages to try.")]
_Cp = Annotated[str, typer.Option("--cp", metavar="N,N", help="Degrees of context parallelism to try; 1 by default.")]
_Ep = Annotated[str | None, typer.Option("--ep", metavar="N,N", help="Degrees of expert parallelism to try.")]
_Zero = Annotated[str | None, typer.Option("--zero", metavar="N,N", help="ZeRO stages to try, from 0 to 3.")]
_Sequence = Annotated[str | None, typer.Option("--sequence", metavar="YES", help="Sequence parallelism: yes or no.")]
_MicroBatch = Annotated[str | None, typer.Option("--micro-batch", metavar="N,N", help="Micro-batch sizes to try.")]
_Accumulations = Annotated[
    str | None, typer.Option("--accumulate", metavar="N,N", help="Numbers of micro-batches to try.")
]
_Checkpoints = Annotated[
    list[str] | None, typer.Option("--checkpoint", metavar="POLICY", help="As for train (repeatable).")
]
_Schedule = Annotated[
    list[str] | None, typer.Option("--schedule", metavar="NAME", help="Pipeline schedule (repeatable).")
]
_Virtual = Annotated[
    str | None, typer.Option("--virtual-stages", metavar="N,N", help="Numbers of virtual stages per rank to try.")
]
_Offload = Annotated[
    list[str] | None,
    typer.Option(
        "--offload", metavar="ROLES", help="Tensors in host memory: none, optimizer+parameters and so on (repeatable)."
    ),
]
_Workers = Annotated[str, typer.Option("--workers", metavar="N", help="Number of parallel processes.")]
_Pareto = Annotated[bool, typer.Option("--pareto", help="Print only the Pareto front of time and memory.")]


def _parse_sizes(text: str | None, option: str) -> list[int] | None:
    return None if text is None else [int(item) if item == "0" else read_size(item, option) for item in text.split(",")]


def _parse_sequence(text: str | None) -> bool | None:
    if text not in (None, "yes", "no"):
        raise FormatError(f"--sequence {shorten(text)}: expected yes or no")
    return None if text is None else text == "yes"


def search_records(result: Search) -> list[dict[str, Any]]:
    """Return a row for each plan, by column."""
    return [{c: getattr(p, c) for c in _COLUMNS} | {"offload": "+".join(p.offload) or "none"} for p in result.rows]


def _json(result: Search) -> str:
    def record(row: dict[str, Any], plan: Plan) -> dict[str, Any]:
        return {**row, "parts": dict(plan.parts)}

    data = {
        "graph": result.graph,
        "hardware": {"id": result.hardware.id, "name": result.hardware.name},
        "devices": result.devices,
        "limit": result.limit,
        "tried": result.tried,
        "unit": result.unit,
        "notes": list(result.notes),
        "plans": [record(*pair) for pair in zip(search_records(result), result.rows, strict=True)],
    }
    return as_json(SEARCH_SCHEMA, data)


@command("search")
def search_command(
    model: opt.Model, hardware: opt.Device, devices: _Devices, sizes: opt.Sizes = None, network: ranks.Network = None,
    precision: _Precisions = None, memory: _Memory = None, overlap: ranks.Overlap | None = None,
    system: ranks.System = "torch", reduce_every_microbatch: ranks.ReduceEach = None,
    keep_gathered: ranks.KeepGathered = None,
    dp: _Dp = None, tp: _Tp = None, zero: _Zero = None, sequence: _Sequence = None,
    micro_batch: _MicroBatch = None, accumulate: _Accumulations = None, pp: _Pp = None, cp: _Cp = "1", ep: _Ep = None,
    checkpoint: _Checkpoints = None, schedule: _Schedule = None, virtual_stages: _Virtual = None,
    offload: _Offload = None, loss: _Loss = None,
    pareto: _Pareto = False, attention: opt.Attention = None, dtype: opt.Format = None, fallback: opt.Fallback = None,
    workers: _Workers = "1", json: opt.Json = None, csv: opt.Csv = None,
) -> None:  # fmt: skip
    """Print the training plans that fit, fastest first, and why each is slower than the one before.

    Plans within 1 % of the fastest remaining plan tie; among them, fewer pipeline stages come first.

    B is the number of samples of a step, such as sequences or images, on all devices and in all micro-batches.

    Examples
    --------
      costgraph search llama-3-8b --devices 64 --hardware h100-sxm
        --precision bf16 B=512 S=4096
    """
    check_files(json, csv)
    dims: dict[str, Any] = dict(opt.read_sizes(sizes))  # Any: passed together with keywords of other types
    reserved = sorted(dims.keys() & signature(search).parameters.keys())
    if reserved:
        raise FormatError(
            f"{reserved[0]}={dims[reserved[0]]}: search has an option with this name, expected --{reserved[0]}"
        )
    graph = load_model(model, attention, dtype, None)
    processes = read_size(workers, "--workers")
    with ProcessPoolExecutor(processes) if processes > 1 else nullcontext() as executor:
        result = search(
            graph, devices=read_size(devices, "--devices"), hardware=hardware, network=network,
            loss=None if loss is None else read_loss(loss), precision=precision or None, schedule=schedule or "1f1b",
            virtual_stages=_parse_sizes(virtual_stages, "--virtual-stages"), offload=offload or "none",
            memory=None if memory is None else read_size(memory, "--memory"), overlap=overlap,
            system=system, reduce_every_microbatch=reduce_every_microbatch, keep_gathered=keep_gathered,
            dp=_parse_sizes(dp, "--dp"), tp=_parse_sizes(tp, "--tp"), pp=_parse_sizes(pp, "--pp"),
            cp=_parse_sizes(cp, "--cp"), ep=_parse_sizes(ep, "--ep"), zero=_parse_sizes(zero, "--zero"),
            sequence=_parse_sequence(sequence),
            micro_batch=_parse_sizes(micro_batch, "--micro-batch"), accumulate=_parse_sizes(accumulate, "--accumulate"),
            checkpoint=checkpoint or None, fallback=fallback, executor=executor, **dims,
        )  # fmt: skip
    result = result.pareto() if pareto else result
    if not write_files(
        (json, lambda: _json(result)), (csv, lambda: as_csv(_COLUMNS, (row.values() for row in search_records(result))))
    ):
        say(str(result))
