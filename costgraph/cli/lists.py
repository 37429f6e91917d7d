"""Commands that list models and devices, or print one device specification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import RenderableType

from ..errors import SpecError
from ..hardware.specs import Hardware, list_hardware, load_hardware
from ..hardware.units import Quantity, format_bytes
from ..report.formatting import show
from ..report.rich_tables import clean, draw, grid, listing, texts
from . import options as opt
from .output import say, screen
from .registry import command

__all__ = ["device", "devices", "hardware_command", "models", "models_command"]


def models() -> RenderableType:
    """Return a table of the presets: name, parameters, published sizes."""
    from ..models.registry import published

    rows = []
    for name, parameters, sizes in published():
        rows.append((name, show(parameters, "1"), " ".join(f"{k}={v}" for k, v in sizes.items())))
    columns = texts("model", "parameters", "published sizes", amounts=["parameters"])
    return listing("", columns, rows, whole=["model"])


def devices() -> RenderableType:
    """Return a table of the devices: bf16 matrix rate, memory, bandwidth and ridge point."""
    rows = []
    for name in list_hardware():
        spec = load_hardware(name)
        try:
            bf16, ridge = str(spec.rate("bf16")), f"{float(spec.ridge('bf16')):.0f}"
        except SpecError:
            bf16, ridge = "none", ""
        rows.append((name, bf16, str(spec.memory), str(spec.bandwidth), ridge))
    head = ("device", "dense bf16", "memory", "bandwidth", "ridge [FLOP/B]")
    return listing("", texts(*head, amounts=head[1:]), rows)


def device(spec: Hardware) -> Iterator[RenderableType]:
    """Yield a full specification: quantities, units, sources and disagreements between sources."""
    yield f"[bold]{clean(spec.name)}[/bold]"
    rows = [("name", clean(spec.id)), ("vendor", clean(spec.vendor))]
    rows += [] if spec.arch is None else [("arch", clean(spec.arch))]
    rows += [(f"{table} type", clean(text)) for table, text in spec.types.items()]
    yield grid(rows)
    quantities = [(path, _value(q), "; ".join(t for t in (q.source, q.note) if t)) for path, q in spec.rows]
    columns = texts("quantity", "value", "sources and notes")
    yield listing("\nquantities", columns, quantities, whole=["quantity"], wide={"sources and notes": 1})
    if spec.disagreements:
        yield "\n[bold]disagreements between sources[/bold]"
        yield grid([("-", clean(note, 2000)) for note in spec.disagreements])
    yield "\n[bold]sources[/bold]"
    yield grid([(clean(key), clean(text, 2000)) for key, text in spec.sources.items()])


def _value(q: Quantity) -> str:
    return format_bytes(q.value) if q.unit == "B" else str(q)


@command("models")
def models_command() -> None:
    """List the presets with their parameters and published sizes."""
    width, color = screen()
    say(draw([models()], {}, width, color=color), styled=color)


@command("hardware")
def hardware_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A device, or the path of a device's .toml file.",
            autocompletion=opt.one_of(opt.devices),
        ),
    ] = None,
) -> None:
    """List the devices; with a name, print every quantity with unit, sources and disagreements between sources.

    Examples
    --------
      costgraph hardware h100-sxm
    """
    width, color = screen()
    content = [devices()] if name is None else device(load_hardware(name))
    say(draw(content, {}, width, color=color), styled=color)
