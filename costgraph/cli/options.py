"""Arguments and options shared by several commands, and how they select a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from .. import models
from ..algebra.symbols import is_name, read_size, shorten
from ..dtypes import DTYPES
from ..errors import BindingError

__all__ = [
    "Arch",
    "Attention",
    "EagerOps",
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
    "TargetDevice",
    "Plot",
    "Sizes",
    "Sort",
    "Symbolic",
    "choice",
    "devices",
    "one_of",
    "presets",
    "read_sizes",
]


# -- options -----------------------------------------------------------------------------------------------------------


def one_of(choices: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion function for some words."""

    def matching(incomplete: str) -> list[str]:
        return [candidate for candidate in choices() if candidate.startswith(incomplete)]

    return matching


def choice(option: str, metavar: str, help: str, choices: Iterable[str]) -> Any:
    """Return an option with shell completion for some words."""
    return typer.Option(option, metavar=metavar, help=help, autocompletion=one_of(lambda: choices))


def presets() -> list[str]:
    """Return the names of presets; the shell completes files."""
    return models.names()


def devices() -> list[str]:
    """Return the names of devices."""
    from ..hardware.specs import list_hardware

    return list_hardware()


_FLOATS = one_of(lambda: [name for name, kind in DTYPES.items() if kind.kind == "float"])
_DEVICES = one_of(devices)

_MODEL_HELP = (
    "A preset (costgraph models), a config.json, weights next to one, a GGUF file, OWNER/NAME on the Hub, or a saved "
    "graph."
)
_DEVICE_HELP = "Device (costgraph hardware), or the path of its .toml file."
_FALLBACK_HELP = "Format whose rate replaces that of a format which the device does not list."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, autocompletion=one_of(presets))]
Sizes = Annotated[list[str] | None, typer.Argument(metavar="NAME=SIZE", help="Sizes: 8192, 8Ki, 1.5M, 70B.")]
Hardware = Annotated[str | None, typer.Option("--hardware", metavar="NAME", help=_DEVICE_HELP, autocompletion=_DEVICES)]
Device = Annotated[str, typer.Option("--hardware", metavar="NAME", help=_DEVICE_HELP, autocompletion=_DEVICES)]
TargetDevice = Annotated[
    str | None, choice("--device", "NAME", "cuda: include the workspaces of CUDA libraries in memory.", ("cuda",))
]
Arch = Annotated[str | None, typer.Option("--arch", metavar="NAME", help="With --device cuda, another "
                 "architecture than the hardware's, such as sm_80 or sm_90.")]  # fmt: skip
Attention = Annotated[str | None, choice("--attention", "KERNEL", "flash (the default) or eager.", ("flash", "eager"))]
Format = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="FORMAT", help="Number format of the model; bf16 by default.", autocompletion=_FLOATS
    ),
]
Dropout = Annotated[float | None, typer.Option("--dropout", metavar="P", help="Dropout probability; 0 by default.")]
EagerOps = Annotated[bool, typer.Option("--eager-ops", help="Use the ops that eager code runs, without fusion.")]
Symbolic = Annotated[bool, typer.Option("--symbolic", help="Leave the preset's default sizes unbound.")]
Count = Annotated[
    str, choice("--count", "COUNT", "Matmul FLOPs in the tables: executed or full.", ("executed", "full"))
]
Fallback = Annotated[
    str | None, typer.Option("--fallback", metavar="FORMAT", help=_FALLBACK_HELP, autocompletion=_FLOATS)
]
Hierarchical = Annotated[
    bool, typer.Option("--hierarchical", help="Include every memory level, caches too, in the times.")
]
Depth = Annotated[int, typer.Option("--depth", min=1, metavar="N", help="Number of scope levels in the table.")]
Sort = Annotated[
    str, choice("--sort", "BY", "Sort the table by order, time, flops or bytes.", ("order", "time", "flops", "bytes"))
]
Formulas = Annotated[bool, typer.Option("--formulas", help="Also print the closed forms.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is standard output.")]
Csv = Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write CSV; - is standard output.")]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw the roofline: .png, .svg or .pdf.")]
Memory = Annotated[str | None, typer.Option("--memory-plot", metavar="FILE", help="Plot live memory over the ops.")]

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


def read_sizes(texts: list[str] | None) -> dict[str, int]:
    """Parse NAME=SIZE arguments.

    Raise BindingError for a malformed argument or a repeated name.

    Examples
    --------
    >>> read_sizes(["B=1", "S=8Ki"])
    {'B': 1, 'S': 8192}
    """
    out: dict[str, int] = {}
    for text in texts or ():
        name, mark, size = text.partition("=")
        if not mark or not is_name(name):
            raise BindingError(f"{shorten(text)}: expected NAME=SIZE, such as B=1 or S=8Ki")
        if name in out:
            raise BindingError(f"{name}: given twice, expected one size")
        if name in _RESERVED:
            raise BindingError(f"{name}={shorten(size)}: the name is reserved, expected a dimension with another name")
        out[name] = read_size(size, name)
    return out
