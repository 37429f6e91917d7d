"""The commands of the command line on training: a step of it, and the plan of a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..algebra.symbols import read_size, shorten
from ..analysis.duration import seconds
from ..errors import FormatError
from ..graph.graph import Graph
from ..graph.sizes import known_names, of_stages
from ..optimizers import IMPLEMENTATIONS, OPTIMIZERS
from ..plan import preflight
from ..report import report, text
from ..report.amounts import show
from ..report.files import to_csv, to_json
from ..report.plan import plan_csv, plan_json, render_plan
from ..transforms.checkpoint import read_checkpoint
from ..transforms.offload import offload as on_host
from ..transforms.precision.policy import POLICIES
from ..transforms.training import training_step
from . import options as opt
from . import ranks
from .frame import command
from .loading import load_model
from .terminal import check_files, draw_report, say, screen, write_files

__all__ = ["plan_command", "train_command"]

#: Words of checkpointing; behind a colon stand a number, or names.
_POLICIES = ("none", "every-block", "from-start", "every:", "selective:", "keep:")

_Optimizer = Annotated[str, opt.choice("--optimizer", "NAME", f"{', '.join(OPTIMIZERS)}.", OPTIMIZERS)]
_Implementation = Annotated[
    str | None,
    opt.choice("--implementation", "HOW", "Of the optimizer: foreach, for-loop or fused.", IMPLEMENTATIONS),
]
_Precision = Annotated[
    str | None, opt.choice("--precision", "POLICY", f"{', '.join(POLICIES)}; as declared by default.", POLICIES)
]
_Checkpoint = Annotated[str, opt.choice("--checkpoint", "HOW",
    "none, every-block, from-start, every:K, selective:NAME,NAME or keep:NAME,NAME.", _POLICIES)]  # fmt: skip
_Accumulate = Annotated[str, typer.Option("--accumulate", metavar="N", help="Micro-batches of an update.")]
_Clip = Annotated[float | None, typer.Option("--clip", metavar="NORM", help="Largest norm of all gradients.")]
_Devices = Annotated[str, typer.Option("--devices", metavar="N", help="How many devices there are.")]
_Tokens = Annotated[str | None, typer.Option("--tokens", metavar="N", help="Tokens that are trained on, such as 15T.")]
_MFU = Annotated[float | None, typer.Option("--mfu", metavar="PART", help="Assumed; by default the roofline's.")]
_Days = Annotated[float | None, typer.Option("--days", metavar="N", help="Most days that training may take.")]


def _step(
    graph: Graph, optimizer: str, implementation: str | None, precision: str | None, checkpoint: str, accumulate: str,
    clip: float | None,
) -> Graph:  # fmt: skip
    kind = OPTIMIZERS.get(optimizer)
    if kind is None:
        raise FormatError(f"--optimizer {shorten(optimizer)}: expected one of {', '.join(OPTIMIZERS)}")
    made = kind() if implementation is None else kind(implementation=implementation)
    times = read_size(accumulate, "--accumulate")
    policy = read_checkpoint(checkpoint)
    for name in () if policy is None else policy.names:
        if not any(f"/{name}/" in f"/{op.name}/" for op in graph.walk()):
            raise FormatError(
                f"--checkpoint selective: no op is in {shorten(name)}, expected a scope, a kernel or an op"
            )
    return training_step(graph, None, made, precision, policy, times, clip=clip)


@command("train")
def train_command(
    model: opt.Model, sizes: opt.Sizes = None, hardware: opt.Hardware = None, optimizer: _Optimizer = "adamw",
    implementation: _Implementation = None, precision: _Precision = None, checkpoint: _Checkpoint = "none",
    accumulate: _Accumulate = "1", clip: _Clip = None, attention: opt.Attention = None, dtype: opt.Format = None,
    dropout: opt.Dropout = None, composed: opt.Composed = False, symbolic: opt.Symbolic = False,
    count: opt.Count = "executed",
    fallback: opt.Fallback = None, depth: opt.Depth = 2, sort: opt.Sort = "order", formulas: opt.Formulas = False,
    json: opt.Json = None, csv: opt.Csv = None, plot: opt.Plot = None, memory_plot: opt.Memory = None,
    device: opt.On = None, arch: opt.Arch = None, dp: ranks.Dp = "1", cp: ranks.Cp = "1", tp: ranks.Tp = "1",
    ep: ranks.Ep = "1", zero: ranks.Zero = 0, sequence: ranks.Sequence = False, context: ranks.Context = "gather",
    reduce_each: ranks.ReduceEach = None, buckets: ranks.Buckets = "none", system: ranks.System = "torch",
    network: ranks.Network = None, overlap: ranks.Overlap = "none", hierarchical: opt.Hierarchical = False,
    offload: ranks.Offload = "", pp: ranks.Pp = "1", schedule: ranks.Schedule = "1f1b",
    micro_batches: ranks.MicroBatches = None, virtual: ranks.Virtual = "1", layers: ranks.Layers = None,
    stage: ranks.Stage = "first",
) -> None:  # fmt: skip
    """Print what a step of training costs: state and activations apart, FLOPs by phase, and times on a device.

    With a degree of parallelism it is that of one rank; B is then the sequences of all of them. With --pp it is that of
    a stage, below the time of the whole pipeline.

    Examples
    --------
      costgraph train llama-3-8b --hardware h100-sxm --precision bf16-mixed
        --checkpoint every-block B=1 S=4096
      costgraph train llama-3-70b --hardware h100-sxm --precision bf16-master
        --dp 64 --tp 8 --zero 3 --sequence --overlap ideal B=64 S=8192
      costgraph train llama-3-70b --hardware h100-sxm --precision bf16-master
        --tp 8 --pp 4 --micro-batches 16 --schedule interleaved --virtual 5
        --stage last B=1 S=8192
    """
    check_files(json, csv, plot, memory_plot)
    dims: dict[str, Any] = dict(opt.read_sizes(sizes))  # no keyword of report, which a type checker cannot know
    graph = load_model(model, attention, dtype, dropout, composed, symbolic)
    times = ranks.micro_batches_of(accumulate, micro_batches)
    step = _step(graph, optimizer, implementation, precision, checkpoint, times, clip)
    degrees = {"dp": dp, "cp": cp, "tp": tp, "ep": ep}
    made = ranks.rank_of(
        step, degrees, zero, sequence, context, reduce_each, pp, schedule, virtual, layers, buckets, system
    )
    made = on_host(made, offload.split(",")) if offload else made
    step, dims, head = _stage(made, stage, hardware, fallback, network, dims)
    found = report(
        step, hardware, count=count, fallback=fallback, depth=depth, device=device, arch=arch, overlap=overlap,
        network=network, hierarchical=hierarchical, **dims,
    ).sorted(sort)  # fmt: skip
    draw_report(step, found, dims, plot, memory_plot)
    if not write_files((json, lambda: to_json(found)), (csv, lambda: to_csv(found))):
        width, color = screen()
        say(head + text.render(found, formulas=formulas, width=width, color=color), styled=color)


def _stage(
    made: Graph, stage: str, hardware: str | None, fallback: Any, network: str | None, dims: dict[str, Any]
) -> tuple[Graph, dict[str, Any], str]:
    """Return the graph that is reported, its sizes, and of a pipeline a line with the time of all stages."""
    step = ranks.stage_of(made, stage)
    if not made.parts:
        return step, dims, ""
    of_stages(made, dims)  # refuses what no stage has
    own = {name: n for name, n in dims.items() if name in known_names(step)}
    if hardware is None:
        return step, own, ""
    taken = seconds(made, hardware, fallback=fallback, network=network, **dims)
    if not isinstance(taken, float):  # a formula of many terms
        return step, own, ""
    return step, own, f"A step of the pipeline takes {show(taken, 's')}; below is what its {stage} stage does.\n\n"


@command("plan")
def plan_command(
    model: opt.Model, hardware: opt.Device, sizes: opt.Sizes = None, devices: _Devices = "1", tokens: _Tokens = None,
    mfu: _MFU = None, days: _Days = None, optimizer: _Optimizer = "adamw", implementation: _Implementation = None,
    precision: _Precision = None, checkpoint: _Checkpoint = "none", accumulate: _Accumulate = "1", clip: _Clip = None,
    attention: opt.Attention = None, dtype: opt.Format = None, dropout: opt.Dropout = None,
    composed: opt.Composed = False,
    symbolic: opt.Symbolic = False, fallback: opt.Fallback = None, json: opt.Json = None, csv: opt.Csv = None,
) -> None:  # fmt: skip
    """Print the list of checks before a training run, each figure beside its limit.

    Examples
    --------
      costgraph plan llama-3-8b --hardware h100-sxm --devices 1024 --tokens 15T
        --mfu 0.5 --precision bf16 --checkpoint every-block B=1 S=8192
    """
    check_files(json, csv)
    dims: dict[str, Any] = dict(opt.read_sizes(sizes))  # no keyword of preflight, which a type checker cannot know
    graph = load_model(model, attention, dtype, dropout, composed, symbolic)
    step = _step(graph, optimizer, implementation, precision, checkpoint, accumulate, clip)
    found = preflight(
        step, hardware, devices=read_size(devices, "--devices"),
        tokens=None if tokens is None else read_size(tokens, "--tokens"), mfu=mfu, most_days=days, fallback=fallback,
        **dims,
    )  # fmt: skip
    if not write_files((json, lambda: plan_json(found)), (csv, lambda: plan_csv(found))):
        width, color = screen()
        say(render_plan(found, width=width, color=color), styled=color)
