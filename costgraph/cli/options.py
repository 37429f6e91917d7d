"""Arguments and options shared by several commands, and how they select a graph."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from inspect import signature
from typing import Annotated, Any

import typer

from .. import models
from ..algebra.symbols import is_name, read_size, shorten, size_or_name
from ..dtypes import DTYPES
from ..errors import BindingError, CostGraphError, FormatError, UnsupportedError
from ..files.graphs import load
from ..ir.graph import Graph
from ..models.registry import is_known
from ..report.formatting import symbolic
from ..text_file import read_text
from ..transforms.offload import OFFLOADED
from ..transforms.pipeline_schedules import SCHEDULES
from ..transforms.pipeline_stages import micro_batches_of as micro_batches
from ..transforms.shard.grad_reduction import Buckets as Policy
from ..transforms.shard.parallelize import CONTEXTS, SYSTEMS, parallelize

__all__ = [
    "Arch",
    "Attention",
    "Composed",
    "Count",
    "Csv",
    "Depth",
    "Device",
    "Dropout",
    "Fallback",
    "Format",
    "Formulas",
    "Hardware",
    "Json",
    "Memory",
    "Model",
    "On",
    "Plot",
    "Sizes",
    "Sort",
    "Symbolic",
    "choice",
    "devices",
    "one_of",
    "presets",
    "read_sizes",
    "load_model",
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


# -- options -----------------------------------------------------------------------------------------------------------


def one_of(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion function for some words."""

    def matching(incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return matching


def choice(option: str, metavar: str, help: str, words: Iterable[str]) -> Any:
    """Return an option with shell completion for some words."""
    return typer.Option(option, metavar=metavar, help=help, autocompletion=one_of(lambda: words))


def presets() -> list[str]:
    """Return the names of presets; the shell completes files."""
    from .. import models

    return models.names()


def devices() -> list[str]:
    """Return the names of devices."""
    from ..hardware.specs import list_hardware

    return list_hardware()


_FLOATS = one_of(lambda: [name for name, kind in DTYPES.items() if kind.kind == "float"])
_DEVICES = one_of(devices)

_MODEL_HELP = (
    "A preset (costgraph models), a config.json, weights beside one, a GGUF file, OWNER/NAME of the Hub, or a saved "
    "graph."
)
_DEVICE_HELP = "Device (costgraph hardware), or the .toml file of one."
_FALLBACK_HELP = "Format whose rate stands in for one that the device lacks."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, autocompletion=one_of(presets))]
Sizes = Annotated[list[str] | None, typer.Argument(metavar="NAME=SIZE", help="Sizes: 8192, 8Ki, 1.5M, 70B.")]
Hardware = Annotated[str | None, typer.Option("--hardware", metavar="NAME", help=_DEVICE_HELP, autocompletion=_DEVICES)]
Device = Annotated[str, typer.Option("--hardware", metavar="NAME", help=_DEVICE_HELP, autocompletion=_DEVICES)]
On = Annotated[str | None, choice("--device", "NAME", "cuda: memory with libraries' workspaces.", ("cuda",))]
Arch = Annotated[str | None, typer.Option("--arch", metavar="NAME", help="With --device cuda, where not that of the "
                 "hardware: sm_80, sm_90 and the like.")]  # fmt: skip
Attention = Annotated[str | None, choice("--attention", "KERNEL", "flash (the default) or eager.", ("flash", "eager"))]
Format = Annotated[
    str | None, typer.Option("--dtype", metavar="FORMAT", help="Of the model; bf16 by default.", autocompletion=_FLOATS)
]
Dropout = Annotated[float | None, typer.Option("--dropout", metavar="P", help="Probability; 0 by default.")]
Composed = Annotated[bool, typer.Option("--composed", help="As eager code runs it, op for op.")]
Symbolic = Annotated[bool, typer.Option("--symbolic", help="Drop the preset's default sizes.")]
Count = Annotated[str, choice("--count", "HOW", "Matmul FLOPs of the tables: executed, or full.", ("executed", "full"))]
Fallback = Annotated[
    str | None, typer.Option("--fallback", metavar="FORMAT", help=_FALLBACK_HELP, autocompletion=_FLOATS)
]
Hierarchical = Annotated[
    bool, typer.Option("--hierarchical", help="Times take each level of memory into account, caches too.")
]
Depth = Annotated[int, typer.Option("--depth", min=1, metavar="N", help="Levels of module scope in the table.")]
Sort = Annotated[
    str, choice("--sort", "BY", "Rows of the table: order, time, flops or bytes.", ("order", "time", "flops", "bytes"))
]
Formulas = Annotated[bool, typer.Option("--formulas", help="Add the closed forms.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is the standard output.")]
Csv = Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write CSV; - is the standard output.")]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw the roofline: .png, .svg or .pdf.")]
Memory = Annotated[str | None, typer.Option("--memory-plot", metavar="FILE", help="Draw live memory over steps.")]

#: Keywords of library functions: dimensions with these names cannot be bound on the command line.
_RESERVED = (
    "allocator",
    "arch",
    "count",
    "depth",
    "device",
    "devices",
    "dtype",
    "fallback",
    "fused",
    "hardware",
    "hierarchical",
    "mfu",
    "most_days",
    "tokens",
)


def read_sizes(words: list[str] | None) -> dict[str, int]:
    """Parse NAME=SIZE arguments.

    Raise BindingError for a malformed argument or a repeated name.

    Examples
    --------
    >>> read_sizes(["B=1", "S=8Ki"])
    {'B': 1, 'S': 8192}
    """
    out: dict[str, int] = {}
    for word in words or ():
        name, mark, size = word.partition("=")
        if not mark or not is_name(name):
            raise BindingError(f"{shorten(word)}: expected NAME=SIZE, such as B=1 or S=8Ki")
        if name in out:
            raise BindingError(f"{name}: given twice, expected one size")
        if name in _RESERVED:
            raise BindingError(f"{name}={shorten(size)}: a word of the library, expected a dimension of another name")
        out[name] = read_size(size, name)
    return out


# -- loading -----------------------------------------------------------------------------------------------------------
# A model argument is a preset, a saved graph, a configuration, weights, or a model of the Hugging Face Hub.

#: Largest file in bytes that is parsed as a configuration; they have a few thousand.
_LARGEST_CONFIG = 2**20
#: Timeout in seconds for requests to the Hub.
_PATIENCE = 10


def load_model(
    model: str,
    attention: str | None,
    dtype: str | None,
    dropout: float | None,
    composed: bool = False,
    symbolic_: bool = False,
) -> Graph:
    """Load a preset, a saved graph, or the model of a config.json.

    The content decides the type of a file. Safetensors and GGUF files use the config.json in their folder; a GGUF file
    without one describes the model itself. OWNER/NAME is a model of the Hub unless it is a path. Options are those of
    `costgraph.models.load`; `composed` applies to presets only, and a saved graph accepts none. Raise an error if there
    is no such file or model, a file has another type, or an option does not apply.
    """
    given = {"attention": attention, "dtype": dtype, "dropout": dropout, "composed": composed or None}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if model not in models.names():
        model = _config_of(model)
    is_file = model not in models.names() and (os.path.exists(model) or model.lower().endswith((".json", ".gguf")))
    is_config = is_file and (os.path.isdir(model) or model.lower().endswith(".gguf") or _is_config(model))
    read = (_configured(model) if is_config else load) if is_file else models.load
    for name in options if is_file else ():
        if name not in signature(read).parameters or name == "composed":
            kind = "a config.json" if is_config else "a saved graph"
            raise FormatError(f"--{name}: {shorten(model)} is {kind}, expected a preset for that")
    graph = read(model, **options)
    return symbolic(graph) if symbolic_ else graph


def _configured(path: str) -> Callable[..., Graph]:
    """Return the function that loads a configuration: the model's declaration, else a trace of transformers."""
    if is_known(path) or any(find_spec(name) is None for name in ("torch", "transformers")):
        return models.from_config  # its error lists unknown fields
    from ..torch import from_config

    return from_config


def _config_of(model: str) -> str:
    """Return the configuration for weights or a Hub model; return other arguments unchanged."""
    if model.lower().endswith((".safetensors", ".safetensors.index.json", ".gguf")):
        beside = os.path.join(os.path.dirname(model), "config.json")
        if os.path.exists(beside) or model.lower().endswith(".gguf"):
            return beside if os.path.exists(beside) else model
        raise FormatError(f"{shorten(model)}: weights without their model, expected a config.json beside them")
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model, re.ASCII) and not model.lower().endswith(".json")
    return _from_hub(model) if is_id and not os.path.exists(model) else model


def _from_hub(name: str) -> str:
    """Return the path of a Hub model's config.json, from the cache or the network."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    except ImportError:
        raise UnsupportedError(
            f"{shorten(name)}: no such path, and huggingface_hub is not installed, expected it for a model of the Hub: "
            f"pip install huggingface_hub"
        ) from None
    try:
        kept = try_to_load_from_cache(name, "config.json")
        if not isinstance(kept, str):
            # without a network, a download would retry five times and log each attempt
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_PATIENCE)
            kept = hf_hub_download(name, "config.json")
        return kept
    except Exception as error:  # the exception types depend on the version of the HTTP client
        said = str(error).strip().partition("\n")[0]
        raise FormatError(
            f"{shorten(name)}: no such path, and no config.json of it from the Hub: {type(error).__name__}: "
            f"{shorten(said, 300)}, expected one in the cache or on the network"
        ) from None


def _is_config(path: str) -> bool:
    try:
        fields = json.loads(read_text(path, path, _LARGEST_CONFIG))
    except (CostGraphError, ValueError, RecursionError):  # loading it as a graph reports the error
        return False
    return isinstance(fields, dict) and not fields.keys().isdisjoint({"architectures", "model_type"})


# -- parallelism -------------------------------------------------------------------------------------------------------

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
