"""The commands that run torch: measuring a device, and holding predictions to it. Only in them is torch loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated

import typer

from ..algebra.symbols import read_size, shorten
from ..errors import FormatError, UnsupportedError
from ..report.drawing import new_figure
from ..text_file import target_of
from .frame import command
from .terminal import say, screen

__all__ = ["calibrate_command", "need_torch", "validate_command"]

_THREADS_HELP = "Of the processor; what torch takes by default."
_Threads = Annotated[str | None, typer.Option("--threads", metavar="N", help=_THREADS_HELP)]


def need_torch(command: str) -> None:
    """Refuse a command that runs torch where there is none.

    UnsupportedError if torch is not installed.
    """
    if find_spec("torch") is None:  # an optional part of the machine, whose build the user chooses
        where = "pip install torch, or the build for this machine from https://pytorch.org/get-started"
        raise UnsupportedError(f"{command}: torch is not installed, expected it beside costgraph: {where}")


def _count(threads: str | None) -> int | None:
    """Return a number of threads that this machine has cores for; None where nothing is asked for."""
    count = None if threads is None else read_size(threads, "--threads")
    cores = os.cpu_count()
    if count and cores and count > cores:
        raise FormatError(f"--threads {count}: this machine has {cores} cores, expected no more than that")
    return count


@command("calibrate")
def calibrate_command(
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="The specification: a .toml file. Of --records: .json.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="cpu (default), cuda, cuda:N.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and shorter runs, or one fit alone.")] = False,
    threads: _Threads = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="NAME", help="Device whose data sheet is meant; by default by name.")
    ] = None,
    records: Annotated[
        list[str] | None,
        typer.Option("--records", metavar="FILE", help="Published measurements in the place of runs; repeatable."),
    ] = None,
) -> None:
    """Measure bandwidth, matrix rates by format and size, elementwise work and launches; write a device file.

    With --records nothing runs: a model of time is fitted to what others measured, and how well it predicts what it was
    not fitted to is printed. With --quick it is fitted, and not held against anything.

    Examples
    --------
      costgraph calibrate --device cpu --out my-cpu.toml
      costgraph report llama-3-8b --hardware my-cpu.toml B=1 S=512
      costgraph calibrate --records published.json --out model.json
    """
    if records:
        for name, value in {"--device": device, "--threads": threads, "--like": like}.items():
            if value:
                raise FormatError(f"{name}: nothing runs with --records, expected --out and --quick alone beside it")
        _fit(records, out, validate=not quick)
        return
    if out is None:
        raise FormatError("calibrate: no --out FILE, expected where the specification goes, or --records FILE")
    count = _count(threads)
    need_torch("calibrate")
    from ..torch.calibrating import calibrate
    from ..torch.words import threads as running

    target_of(out, ".toml")
    with running(count):
        found = calibrate(device or "cpu", quick=quick, like=like)
    found.save(out)
    say(f"{found}\nwritten to {shorten(out, 200)}")


def _fit(records: Sequence[str], out: str | None, *, validate: bool) -> None:
    """Fit a model of time to published measurements, and print how good it is."""
    from ..report.records import calibrate
    from ..report.records.text import render_calibrated

    if out is not None:
        target_of(out, ".json")
    found = calibrate(*records, validate=validate, say=lambda text: typer.echo(text, err=True))
    width, color = screen()
    say(render_calibrated(found, width, color=color), styled=color)
    if out is not None:
        found.save(out)
        say(f"written to {shorten(out, 200)}")


@command("validate")
def validate_command(
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Where the record goes: a .json file.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="cpu (default), cuda, cuda:N.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One cheap case of each kind, and fewer runs.")] = False,
    hardware: Annotated[
        str | None, typer.Option("--hardware", metavar="NAME", help="Device or .toml; calibrated first by default.")
    ] = None,
    threads: _Threads = None,
    only: Annotated[str | None, typer.Option("--only", metavar="TEXT", help="Cases whose name has this in it.")] = None,
    plots: Annotated[str | None, typer.Option("--plots", "--plot", metavar="DIR", help="Where pictures go.")] = None,
    records: Annotated[
        str | None, typer.Option("--records", metavar="FILE", help="Published measurements, in the place of runs here.")
    ] = None,
) -> None:
    """Run ops, models and training steps, or read what others measured; show predictions beside it.

    With --records nothing runs: each record of the file is predicted, or listed with the reason why not. The exit code
    is 1 where a limit does not hold.

    Examples
    --------
      costgraph validate --device cuda --out my-gpu.json --plots pictures
      costgraph validate --records published.json --out predictions.json
    """
    if records is not None:
        given = {"--device": device, "--quick": quick, "--hardware": hardware, "--threads": threads, "--only": only}
        for name in (name for name, value in given.items() if value):
            raise FormatError(f"{name}: nothing runs with --records, expected --out and --plots alone beside it")
        _hold(records, out, plots)
    elif out is None:
        raise FormatError("validate: no --out FILE, expected where the record goes, or --records FILE")
    else:
        _run(out, device or "cpu", quick, hardware, _count(threads), only, plots)


def _hold(records: str, out: str | None, plots: str | None) -> None:
    """Print predictions beside published measurements."""
    from ..report.records import hold
    from ..report.records.picture import plot_held
    from ..report.records.text import render_held

    if out is not None:
        target_of(out, ".json")
    if plots is not None:
        new_figure(1, 1)  # whether there is what draws, before anything is predicted
    found = hold(records)
    width, color = screen()
    say(render_held(found, width, color=color), styled=color)
    if out is not None:
        found.save(out)
        say(f"written to {shorten(out, 200)}")
    if plots is not None:
        say("\n".join(f"drawn to {shorten(str(path), 200)}" for path in plot_held(found, plots)))
    if not found.holds:
        raise typer.Exit(1)


def _run(
    out: str, device: str, quick: bool, hardware: str | None, count: int | None, only: str | None, plots: str | None
) -> None:
    """Run the suite, and print and write what it measured."""
    need_torch("validate")
    from ..report.validation_text import render_validation
    from ..torch.validating import suite, validate
    from ..torch.words import threads as running

    target_of(out, ".json")
    if plots is not None:
        new_figure(1, 1)  # whether there is what draws, before anything runs
    cases = suite("cuda" if device.startswith("cuda") else "cpu", quick=quick)
    if only is not None:
        cases = [case for case in cases if only in case.name]
    with running(count):
        found = validate(device, cases, hardware=hardware, quick=quick)
    found.save(out)
    width, color = screen()
    say(render_validation(found, width, color=color), styled=color)
    say(f"written to {shorten(out, 200)}")
    if plots is not None:
        say("\n".join(f"drawn to {shorten(str(path), 200)}" for path in found.plot(plots)))
