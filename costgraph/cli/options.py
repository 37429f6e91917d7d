"""Arguments and options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

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
]

_MODEL_HELP = "A preset (costgraph models), a config.json, or the file of a saved graph."
_DEVICE_HELP = "Device (costgraph hardware), or the .toml file of one."
_FALLBACK_HELP = "Format whose rate stands in for one that the device lacks."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
Sizes = Annotated[list[str] | None, typer.Argument(metavar="NAME=SIZE", help="Sizes: 8192, 8Ki, 1.5M, 70B.")]
Hardware = Annotated[str | None, typer.Option("--hardware", metavar="NAME", help=_DEVICE_HELP)]
Device = Annotated[str, typer.Option("--hardware", metavar="NAME", help=_DEVICE_HELP)]
On = Annotated[str | None, typer.Option("--device", metavar="NAME", help="cuda: memory with libraries' workspaces.")]
Arch = Annotated[str | None, typer.Option("--arch", metavar="NAME", help="With --device cuda, where not that of the "
                 "hardware: sm_80, sm_90 and the like.")]  # fmt: skip
Attention = Annotated[str | None, typer.Option("--attention", metavar="KERNEL", help="flash (the default) or eager.")]
Format = Annotated[str | None, typer.Option("--dtype", metavar="FORMAT", help="Of the model; bf16 by default.")]
Dropout = Annotated[float | None, typer.Option("--dropout", metavar="P", help="Probability; 0 by default.")]
Composed = Annotated[bool, typer.Option("--composed", help="As eager code runs it, op for op.")]
Symbolic = Annotated[bool, typer.Option("--symbolic", help="Drop the preset's default sizes.")]
Count = Annotated[str, typer.Option("--count", metavar="HOW", help="Matmul FLOPs of the tables: executed, or full.")]
Fallback = Annotated[str | None, typer.Option("--fallback", metavar="FORMAT", help=_FALLBACK_HELP)]
Depth = Annotated[int, typer.Option("--depth", min=1, metavar="N", help="Levels of module scope in the table.")]
Sort = Annotated[str, typer.Option("--sort", metavar="BY", help="Rows of the table: order, time, flops or bytes.")]
Formulas = Annotated[bool, typer.Option("--formulas", help="Add the closed forms.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is the standard output.")]
Csv = Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write CSV; - is the standard output.")]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw the roofline: .png, .svg or .pdf.")]
Memory = Annotated[str | None, typer.Option("--memory-plot", metavar="FILE", help="Draw live memory over steps.")]
