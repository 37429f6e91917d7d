"""Options of commands about several devices: mesh degrees, placements and schedules."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..algebra.symbols import read_size, shorten, size_or_name
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
    "Hold",
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


def _degree(option: str, of: str) -> Any:
    return typer.Option(option, metavar="N", help=f"Degree of {of} parallelism: a number, or a name that stays open.")


def _choice(option: str, of: str, what: str, words: tuple[str, ...]) -> Any:
    return choice(option, of, f"{what}: {', or '.join(words)}.", words)


Dp = Annotated[str, _degree("--dp", "data")]
Cp = Annotated[str, _degree("--cp", "context")]
Tp = Annotated[str, _degree("--tp", "tensor")]
Ep = Annotated[str, _degree("--ep", "expert")]
Pp = Annotated[
    str, typer.Option("--pp", metavar="N", help="Stages of a pipeline: a number, or a name that stays open.")
]
Schedule = Annotated[str, _choice("--schedule", "NAME", "Order of a pipeline", tuple(SCHEDULES))]
MicroBatches = Annotated[
    str | None, typer.Option("--micro-batches", metavar="N", help="Of a step, as --accumulate: a pipeline's.")
]
Virtual = Annotated[str, typer.Option("--virtual", metavar="N", help="Groups of layers of a rank of a pipeline.")]
Layers = Annotated[str | None, typer.Option("--layers", metavar="N,N", help="Layers of each stage of a pipeline.")]
Stage = Annotated[str, typer.Option("--stage", metavar="NAME", help="Stage that is reported, such as middle.")]
Zero = Annotated[int, typer.Option("--zero", metavar="N", min=0, max=3, help="Stage of ZeRO over dp and cp.")]
Sequence = Annotated[bool, typer.Option("--sequence", help="Split the sequence between products over tp.")]
Context = Annotated[str, _choice("--context", "HOW", "Attention over cp", CONTEXTS)]
ReduceEach = Annotated[
    bool | None, typer.Option("--reduce-each/--no-reduce-each", help="Reduce gradients of each micro-batch.")
]
System = Annotated[str, _choice("--system", "NAME", "Whose policies where systems differ", SYSTEMS)]
Hold = Annotated[bool | None, typer.Option("--hold/--no-hold", help="Keep what a split sequence has gathered.")]
Buckets = Annotated[str, _choice("--buckets", "HOW", "Gradients in buckets", tuple(BUCKETS))]
Offload = Annotated[
    str, typer.Option("--offload", metavar="WHAT,WHAT", help=f"What lies on the host, of {', '.join(OFFLOADED)}.")
]
Network = Annotated[str | None, typer.Option("--network", metavar="NAME", help="Between domains of devices.")]
Overlap = Annotated[str, typer.Option("--overlap", metavar="HOW", help="Of collectives: none, ideal or streams.")]


def micro_batches_of(accumulate: str, micro_batches: str | None) -> str:
    """Return the number of micro-batches, which either option sets.

    Raise FormatError if the options disagree.
    """
    if micro_batches is None or accumulate in ("1", micro_batches):
        return accumulate if micro_batches is None else micro_batches
    raise FormatError(f"--micro-batches {shorten(micro_batches)}: expected {shorten(accumulate)}, as --accumulate has")


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
    step: Graph, degrees: dict[str, str], zero: int, sequence: bool, context: str, reduce_each: bool | None,
    pp: str = "1", schedule: str = "1f1b", virtual: str = "1", layers: str | None = None, buckets: str = "none",
    system: str = "torch",
) -> Graph:  # fmt: skip
    """Return the per-rank graph of a step, or the step itself without parallelism.

    Arguments are command-line text: `degrees` by mesh axis; `context` is the attention algorithm along cp; `buckets` is
    none, copy or view; `system` is torch or megatron. Raise an error if a degree is neither a size nor a name, a word
    is unknown, or an axis splits nothing.
    """
    words = {"--context": (context, CONTEXTS), "--buckets": (buckets, tuple(BUCKETS)), "--system": (system, SYSTEMS)}
    for option, (word, known) in words.items():
        if word not in known:
            raise FormatError(f"{option} {shorten(word)}: expected {' or '.join(known)}")
    if {*degrees.values(), pp} == {"1"} and not (zero or sequence):
        return step
    given: dict[str, Any] = {axis: size_or_name(n, f"--{axis}") for axis, n in degrees.items()}
    if pp != "1":
        pieces = None if layers is None else tuple(read_size(n, "--layers") for n in layers.split(","))
        given |= {
            "pp": size_or_name(pp, "--pp"), "schedule": schedule, "virtual": size_or_name(virtual, "--virtual"),
            "layers": pieces, "micro_batches": micro_batches(step),
        }  # fmt: skip
    return parallelize(
        step, **given, zero=zero, sequence=sequence, context=context, buckets=BUCKETS[buckets], system=system,
        reduce_each=reduce_each,
    )  # fmt: skip
