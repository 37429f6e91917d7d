"""What all commands stand in: their names, and the module that each is imported from once it is asked for.

A word on the command line, or a key that completes it, waits for its own command alone.
"""

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

#: The module of each command, and what the list of commands says of it.
COMMANDS = {
    "report": ("commands", "Costs of a model, on a device if one is named."),
    "formula": ("commands", "Closed form of one quantity of a model."),
    "crossover": ("commands", "Size at which a model becomes compute-bound."),
    "models": ("lists", "List the presets."),
    "hardware": ("lists", "List the devices, or all that is known of one."),
    "explore": ("explore_command", "Write a page with a slider for every size."),
    "train": ("training_commands", "Costs of a step of training."),
    "plan": ("training_commands", "What decides whether a training run is possible."),
    "search": ("search_command", "Plans of training on several devices, fastest first."),
    "decode": ("serving_commands", "Throughput against latency of generation on a device."),
    "latency": ("serving_commands", "Time to the first token of an answer, and of those after it."),
    "calibrate": ("torch_commands", "Measure what a device attains, or fit a model of time to records."),
    "validate": ("torch_commands", "Hold predictions to measurements, of a device here or published."),
    "trace": ("trace_command", "Turn a torch module into a graph with symbolic sizes."),
    "weights": ("weights_command", "Tensors of a checkpoint, and how they differ from a model."),
}

_APPS: dict[str, typer.Typer] = {}
_PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


class _Commands(TyperGroup):
    """Commands whose modules are imported when one of theirs is called, or its arguments are completed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        if name is None or listed is None:
            return name, listed, rest
        import_module(f"{__package__}.{COMMANDS[name][0]}")
        return name, get_command(_APPS[name]), rest


app = typer.Typer(
    name="costgraph",
    cls=_Commands,
    **_PLAIN,
    help="Symbolic costs of models: FLOPs, bytes moved, peak memory and roofline.\n\n"
    "\b\nExamples:\n"
    "  costgraph report llama-3-8b --hardware h100-sxm B=1 S=8192\n"
    "  costgraph formula llama-3-8b peak-memory\n"
    "  costgraph hardware h100-sxm",
)


def _listed() -> None:
    """Stand for a command in lists."""


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, short_help=_help)(_listed)


def command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a function a command; the lines of its examples stay lines."""

    def declared(function: Callable[..., None]) -> Callable[..., None]:
        text = re.sub(r"^Examples\n-+$", "\b\nExamples:", getdoc(function) or "", flags=re.MULTILINE)
        _APPS[name] = typer.Typer(add_completion=False, **_PLAIN)
        return _APPS[name].command(name, short_help=COMMANDS[name][1], help=text)(function)

    return declared


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"costgraph {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take what stands before a command."""
