"""Options of commands about several devices: mesh degrees, placements and schedules."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..algebra.symbols import is_name, read_size, shorten, size_or_name
from ..errors import FormatError
from ..ir.graph import Graph
from ..transforms.offload import OFFLOADED
from ..transforms.pipeline_schedules import SCHEDULES
from ..transforms.pipeline_stages import micro_batches_of as micro_batches
from ..transforms.shard.grad_reduction import Buckets as Policy
from ..transforms.shard.parallelize import CONTEXTS, SYSTEMS, parallelize
from .options import choice

__all__ = [
    "Buckets",
    "Context",
    "Cp",
    "Dp",
    "Ep",
    "KeepGathered",
    "Layers",
    "MicroBatches",
    "Network",
    "Offload",
    "Overlap",
    "Pp",
    "ReduceEach",
    "Schedule",
    "Sequence",
    "Stage",
    "System",
    "Tp",
    "Virtual",
    "Zero",
    "micro_batches_of",
    "rank_of",
    "stage_of",
]


#: How gradients are reduced: separately, or in buckets as in torch's DistributedDataParallel.
BUCKETS = {"none": None, "copy": Policy(("dp", "ep", "cp")), "view": Policy(("dp", "ep", "cp"), view=True)}


#: Descriptions of symbolic degrees.
_LEGEND = {
    "dp": "data-parallel ranks", "cp": "context-parallel ranks", "tp": "tensor-parallel ranks",
    "ep": "expert-parallel ranks", "pp": "pipeline stages", "virtual_stages": "virtual pipeline stages per rank",
}  # fmt: skip


def _degree(option: str, kind: str) -> Any:
    return typer.Option(
        option, metavar="N", help=f"Degree of {kind} parallelism: a number, or a name that stays symbolic."
    )


def _choice(option: str, metavar: str, description: str, choices: tuple[str, ...]) -> Any:
    return choice(option, metavar, f"{description}: {', or '.join(choices)}.", choices)


Dp = Annotated[str, _degree("--dp", "data")]
Cp = Annotated[str, _degree("--cp", "context")]
Tp = Annotated[str, _degree("--tp", "tensor")]
Ep = Annotated[str, _degree("--ep", "expert")]
Pp = Annotated[
    str, typer.Option("--pp", metavar="N", help="Number of pipeline stages: a number, or a name that stays symbolic.")
]
Schedule = Annotated[str, _choice("--schedule", "NAME", "Pipeline schedule", tuple(SCHEDULES))]
MicroBatches = Annotated[
    str | None,
    typer.Option("--micro-batches", metavar="N", help="Micro-batches per step of a pipeline; same as --accumulate."),
]
Virtual = Annotated[str, typer.Option("--virtual-stages", metavar="N", help="Virtual pipeline stages per rank.")]
Layers = Annotated[str | None, typer.Option("--layers", metavar="N,N", help="Number of layers in each pipeline stage.")]
Stage = Annotated[str, typer.Option("--stage", metavar="NAME", help="Pipeline stage to report, such as middle.")]
Zero = Annotated[int, typer.Option("--zero", metavar="N", min=0, max=3, help="ZeRO stage over dp and cp.")]
Sequence = Annotated[bool, typer.Option("--sequence", help="Sequence parallelism over tp.")]
Context = Annotated[str, _choice("--context", "ALGORITHM", "Attention algorithm over cp", CONTEXTS)]
ReduceEach = Annotated[
    bool | None,
    typer.Option(
        "--reduce-every-microbatch/--no-reduce-every-microbatch", help="Reduce gradients after each micro-batch."
    ),
]
System = Annotated[str, _choice("--system", "NAME", "System whose policies apply", SYSTEMS)]
KeepGathered = Annotated[
    bool | None,
    typer.Option(
        "--keep-gathered/--no-keep-gathered",
        help="Keep gathered activations of sequence parallelism for the backward pass.",
    ),
]
Buckets = Annotated[str, _choice("--buckets", "KIND", "Gradient buckets", tuple(BUCKETS))]
Offload = Annotated[
    str, typer.Option("--offload", metavar="ROLE,ROLE", help=f"Tensors to keep in host memory: {', '.join(OFFLOADED)}.")
]
Network = Annotated[str | None, typer.Option("--network", metavar="NAME", help="Network between domains of devices.")]
Overlap = Annotated[
    str, typer.Option("--overlap", metavar="MODEL", help="Overlap of collectives with compute: none, ideal or streams.")
]


def micro_batches_of(accumulate: str, micro_batches: str | None) -> str:
    """Return the number of micro-batches, which either option sets.

    Raise FormatError if the options disagree.
    """
    if micro_batches is None or accumulate in ("1", micro_batches):
        return accumulate if micro_batches is None else micro_batches
    raise FormatError(
        f"--micro-batches {shorten(micro_batches)}: expected {shorten(accumulate)}, the value of --accumulate"
    )


def stage_of(rank: Graph, name: str) -> Graph:
    """Return a pipeline stage's graph by the end of its name; without a pipeline, the graph itself.

    Raise FormatError if there is no such stage.
    """
    names: dict[str, Graph] = {g.name.rpartition(".")[2]: g for g in rank.stages}
    if not rank.parts:
        return rank
    if name not in names:
        raise FormatError(f"--stage {shorten(name)}: expected one of {', '.join(names)}")
    return names[name]


def rank_of(
    step: Graph, degrees: dict[str, str], zero: int, sequence: bool, context: str, reduce_every_microbatch: bool | None,
    pp: str = "1", schedule: str = "1f1b", virtual_stages: str = "1", layers: str | None = None, buckets: str = "none",
    system: str = "torch",
) -> Graph:  # fmt: skip
    """Return the per-rank graph of a step, or the step itself without parallelism.

    Arguments are command-line text: `degrees` by mesh axis; `context` is the attention algorithm along cp; `buckets` is
    none, copy or view; `system` is torch or megatron. Raise an error if a degree is neither a size nor a name, a word
    is unknown, or an axis splits nothing.
    """
    checked = {"--context": (context, CONTEXTS), "--buckets": (buckets, tuple(BUCKETS)), "--system": (system, SYSTEMS)}
    for option, (value, choices) in checked.items():
        if value not in choices:
            raise FormatError(f"{option} {shorten(value)}: expected {' or '.join(choices)}")
    if {*degrees.values(), pp} == {"1"} and not (zero or sequence):
        return step
    sizes = {**degrees, "pp": pp, "virtual_stages": virtual_stages}
    step.legend = {n: text for axis, text in _LEGEND.items() if is_name(n := sizes[axis])} | step.legend
    degrees_and_schedule: dict[str, Any] = {axis: size_or_name(n, f"--{axis}") for axis, n in degrees.items()}
    if pp != "1":
        pieces = None if layers is None else tuple(read_size(n, "--layers") for n in layers.split(","))
        degrees_and_schedule |= {
            "pp": size_or_name(pp, "--pp"), "schedule": schedule,
            "virtual_stages": size_or_name(virtual_stages, "--virtual-stages"),
            "layers": pieces, "micro_batches": micro_batches(step),
        }  # fmt: skip
    return parallelize(
        step, **degrees_and_schedule, zero=zero, sequence=sequence, context=context, buckets=BUCKETS[buckets],
        system=system, reduce_every_microbatch=reduce_every_microbatch,
    )  # fmt: skip
