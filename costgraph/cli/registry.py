"""Commands by name; the module of a command is imported when it is called or its arguments are completed."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from .. import __version__

__all__ = ["COMMANDS", "app", "command"]

# Modules are imported lazily: calling or completing a command imports only its own module.

#: The module of each command, and its short help.
COMMANDS = {
    "report": ("commands", "Costs of a model, optionally on a device."),
    "formula": ("commands", "Closed form of one quantity of a model."),
    "crossover": ("commands", "Size at which a model becomes compute-bound."),
    "models": ("lists", "List the presets."),
    "hardware": ("lists", "List the devices, or print the specification of one."),
    "explore": ("commands", "Write a page with a slider for every size."),
    "train": ("training_commands", "Costs of a training step."),
    "plan": ("training_commands", "Preflight checks of a training run."),
    "search": ("training_commands", "Training plans on several devices, fastest first."),
    "decode": ("serving_commands", "Throughput and latency of decoding on a device."),
    "latency": ("serving_commands", "Time to first token, and time per output token."),
    "calibrate": ("torch_commands", "Measure a device, or fit a time model to records."),
    "validate": ("torch_commands", "Compare predictions with measurements, run here or published."),
    "trace": ("torch_commands", "Turn a torch module into a graph with symbolic sizes."),
    "weights": ("commands", "Tensors of a checkpoint, and their differences from a model."),
}

_APPS: dict[str, typer.Typer] = {}
_PLAIN_TEXT: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


class _Commands(TyperGroup):
    """Group that imports the module of a command when it is called or completed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, placeholder, remaining = super().resolve_command(ctx, args)
        if name is None or placeholder is None:
            return name, placeholder, remaining
        import_module(f"{__package__}.{COMMANDS[name][0]}")
        return name, get_command(_APPS[name]), remaining


app = typer.Typer(
    name="costgraph",
    cls=_Commands,
    **_PLAIN_TEXT,
    help="Symbolic costs of models: FLOPs, bytes moved, peak memory and roofline.\n\n"
    "\b\nExamples:\n"
    "  costgraph report llama-3-8b --hardware h100-sxm B=1 S=8192\n"
    "  costgraph formula llama-3-8b peak-memory\n"
    "  costgraph hardware h100-sxm",
)


def _placeholder() -> None:
    """Act as the placeholder of a command in lists."""


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, short_help=_help)(_placeholder)


def command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a command; its help keeps the line breaks of examples."""

    def declared(function: Callable[..., None]) -> Callable[..., None]:
        text = re.sub(r"^Examples\n-+$", "\b\nExamples:", getdoc(function) or "", flags=re.MULTILINE)
        _APPS[name] = typer.Typer(add_completion=False, **_PLAIN_TEXT)
        return _APPS[name].command(name, short_help=COMMANDS[name][1], help=text)(function)

    return declared


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"costgraph {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Parse the options before a command."""
