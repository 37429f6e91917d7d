"""The `costgraph` command, also `python -m costgraph`.

Library errors and failed writes print one line to standard error and exit with code 2. A closed pipe is not an error.
`costgraph.interruption` handles Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import getdoc
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from .. import __version__
from ..algebra.symbols import printable
from ..errors import CostGraphError, FormatError
from ..ir.graph import Graph
from ..notation.progress import hush, waiting
from ..report.plots import check_path
from ..report.text import WIDTH
from ..text_file import write_file

if TYPE_CHECKING:
    from ..report.collect import Report

__all__ = [
    "main",
    "COMMANDS",
    "app",
    "command",
    "check_files",
    "draw_report",
    "say",
    "screen",
    "write_files",
]


# -- app ---------------------------------------------------------------------------------------------------------------

_EXTRA = 'costgraph: the command line needs typer and rich: pip install "costgraph[cli]"'

#: Exit code of a filter whose reader has closed the pipe: 128 + SIGPIPE.
_BROKEN_PIPE = 141

#: Environment variable with which a shell requests completions.
_COMPLETE = "_COSTGRAPH_COMPLETE"

_LONGEST_LINE = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments after the program name; by default those of the process.

    Returns
    -------
    int
        Exit code: 0, 2 for an invalid request or a failed write, 130 after an interruption, 141 for a closed pipe.
    """
    try:
        if sys.stdout is None:  # closed before the program started
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except CostGraphError as error:
        return _refuse(str(error))
    except OverflowError:
        return _refuse("the numbers are too large, expected sizes of a model that could run")
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _unwritten(error)


def _unwritten(error: OSError) -> int:
    """Report a failed write; stay silent if the reader closed the pipe."""
    if sys.stdout is not None:
        # Python flushes standard output at exit, and would report the error again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return _BROKEN_PIPE
    where = error.filename or "the standard output"
    return _refuse(f"{where}: {error.strerror or error}, expected a place to write to")


def _run(arguments: Sequence[str] | None) -> int:
    try:
        import rich  # noqa: F401  # an extra, as is typer
        import typer
        from typer.completion import shell_complete
        from typer.main import get_command
    except ImportError:
        sys.stderr.write(_EXTRA + "\n")
        return 2

    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    command = get_command(app)
    try:
        if asked := os.environ.get(_COMPLETE):
            return shell_complete(command, {}, "costgraph", _COMPLETE, asked)
        # not command.main, which handles broken pipes itself
        with command.make_context("costgraph", words) as context, waiting(printable(words[0])[:40]):
            command.invoke(context)
        return 0
    except SystemExit as stop:  # typer's completion and its installation end this way
        return int(stop.code or 0)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except typer.Abort:
        return 130
    except Exception as error:
        return _usage(error)


def _usage(error: Exception) -> int:
    """Report an argument error; other exceptions propagate."""
    show = getattr(error, "format_message", None)
    if show is None:
        raise error
    return _refuse(show())


def _refuse(message: str) -> int:
    line = printable(" ".join(message.split("\n")))
    if len(line) > _LONGEST_LINE:
        line = line[: _LONGEST_LINE - 3] + "..."
    with suppress(OSError, AttributeError):  # standard error is closed
        sys.stderr.write(f"costgraph: {line}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())


# -- commands ----------------------------------------------------------------------------------------------------------
# Modules are imported lazily: calling or completing a command imports only its own module.

#: The module of each command, and its short help.
COMMANDS = {
    "report": ("commands", "Costs of a model, on a device if one is named."),
    "formula": ("commands", "Closed form of one quantity of a model."),
    "crossover": ("commands", "Size at which a model becomes compute-bound."),
    "models": ("commands", "List the presets."),
    "hardware": ("commands", "List the devices, or all that is known of one."),
    "explore": ("commands", "Write a page with a slider for every size."),
    "train": ("training_commands", "Costs of a step of training."),
    "plan": ("training_commands", "What decides whether a training run is possible."),
    "search": ("training_commands", "Plans of training on several devices, fastest first."),
    "decode": ("serving_commands", "Throughput against latency of generation on a device."),
    "latency": ("serving_commands", "Time to the first token of an answer, and of those after it."),
    "calibrate": ("torch_commands", "Measure what a device attains, or fit a model of time to records."),
    "validate": ("torch_commands", "Hold predictions to measurements, of a device here or published."),
    "trace": ("torch_commands", "Turn a torch module into a graph with symbolic sizes."),
    "weights": ("commands", "Tensors of a checkpoint, and how they differ from a model."),
}

_APPS: dict[str, typer.Typer] = {}
_PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


class _Commands(TyperGroup):
    """Group that imports the module of a command when it is called or completed."""

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
    """Act as the placeholder of a command in lists."""


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, short_help=_help)(_listed)


def command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a command; its help keeps the line breaks of examples."""

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
    """Parse the options before a command."""


# -- output ------------------------------------------------------------------------------------------------------------


def say(lines: str, *, styled: bool = False) -> None:
    """Write lines to standard output, without control characters except the styles of `text.draw`.

    Characters that the encoding lacks become question marks, and rules become hyphens.
    """
    lines = lines if styled else printable(lines)
    encoding = sys.stdout.encoding or "utf-8"
    if not encoding.lower().startswith("utf"):
        lines = lines.replace("\u2500", "-").encode(encoding, "replace").decode(encoding)
    hush()
    sys.stdout.write(lines + "\n")


def screen() -> tuple[int, bool]:
    """Return the width of the output, and whether it supports colors."""
    terminal = sys.stdout.isatty()
    # a pipe has no width: use the default unless COLUMNS is set
    width = shutil.get_terminal_size().columns if terminal or "COLUMNS" in os.environ else WIDTH
    return max(width, 40), terminal and "NO_COLOR" not in os.environ


def check_files(json: str | None, csv: str | None, *plots: str | None) -> None:
    """Raise an error for files that cannot be written, before any computation."""
    if json == csv == "-":
        raise FormatError("--json - and --csv -: the standard output takes one of them, expected a file for the other")
    for path in plots:
        if path is not None:
            check_path(path)


def write_files(*files: tuple[str | None, Callable[[], str]]) -> bool:
    """Write each file; `-` is standard output. Return whether standard output was used."""
    for path, content in files:
        if path == "-":
            # DEL is valid in JSON, but `say` would strip it
            say(content().removesuffix("\n").replace("\x7f", "\\u007f"))
        elif path is not None:
            write_file(path, content())
    return any(path == "-" for path, _ in files)


def draw_report(
    graph: Graph, found: Report, dims: Mapping[str, Any], plot: str | None, memory_plot: str | None
) -> None:
    """Draw the requested plots."""
    if plot is not None:
        found.plot(plot)
    if memory_plot is not None:
        from ..analysis.memory import timeline
        from ..report.plots import plot_timeline

        room = None if found.hardware is None else float(found.hardware.capacity().value)
        arch = found.peak.arch
        line = timeline(graph, device=None if arch is None else "cuda", arch=arch, **dims)
        plot_timeline(line, memory_plot, capacity=room)
