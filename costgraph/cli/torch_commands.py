"""Commands that use torch, which is imported on use: calibrate, validate and trace."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ..algebra.symbols import is_name, read_size, shorten
from ..errors import CostGraphError, FormatError, UnsupportedError
from ..report import report, text
from ..report.figures import new_figure
from ..text_file import target_of
from . import options as opt
from .output import say, screen
from .registry import command

__all__ = [
    "calibrate_command",
    "need_torch",
    "validate_command",
    "trace_command",
]


# -- calibrate and validate --------------------------------------------------------------------------------------------

_THREADS_HELP = "CPU threads; by default torch's own number."
_Threads = Annotated[str | None, typer.Option("--threads", metavar="N", help=_THREADS_HELP)]


def need_torch(command: str) -> None:
    """Raise UnsupportedError if torch is not installed."""
    if find_spec("torch") is None:  # an optional dependency, whose build the user chooses
        remedy = "pip install torch, or the build for this machine from https://pytorch.org/get-started"
        raise UnsupportedError(f"{command}: torch is not installed: {remedy}")


def _count(threads: str | None) -> int | None:
    """Return the number of threads, at most the number of cores; None if it is not set."""
    count = None if threads is None else read_size(threads, "--threads")
    cores = os.cpu_count()
    if count and cores and count > cores:
        raise FormatError(f"--threads {count}: this machine has {cores} cores, expected at most that number")
    return count


@command("calibrate")
def calibrate_command(
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Device file to write, .toml; with --records, .json.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="cpu (default), cuda, cuda:N.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes and shorter runs; with --records, skip the evaluation.")
    ] = False,
    threads: _Threads = None,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="NAME", help="Device whose data sheet applies; by default found by name."),
    ] = None,
    records: Annotated[
        list[str] | None,
        typer.Option("--records", metavar="FILE", help="Published measurements to use instead of runs (repeatable)."),
    ] = None,
) -> None:
    """Measure bandwidth, matrix rates by format and size, elementwise work and launches; write a device file.

    With --records, fit a time model to published measurements instead, and print its error on held-out ones. With
    --quick, skip the held-out evaluation.

    Examples
    --------
      costgraph calibrate --device cpu --out my-cpu.toml
      costgraph report llama-3-8b --hardware my-cpu.toml B=1 S=512
      costgraph calibrate --records published.json --out model.json
    """
    if records:
        for name, value in {"--device": device, "--threads": threads, "--like": like}.items():
            if value:
                raise FormatError(f"{name}: not used with --records, expected only --out and --quick")
        _fit(records, out, validate=not quick)
        return
    if out is None:
        raise FormatError("calibrate: no --out, expected --out FILE for the specification, or --records FILE")
    count = _count(threads)
    need_torch("calibrate")
    from ..torch.calibration import calibrate
    from ..torch.cli_args import threads as running

    target_of(out, ".toml")
    with running(count):
        calibration = calibrate(device or "cpu", quick=quick, like=like)
    calibration.save(out)
    say(f"{calibration}\nwritten to {shorten(out, 200)}")


def _fit(records: Sequence[str], out: str | None, *, validate: bool) -> None:
    """Fit a time model to published measurements, and print its accuracy."""
    from ..report.records import calibrate
    from ..report.records.show import render_calibrated

    if out is not None:
        target_of(out, ".json")
    calibration = calibrate(*records, validate=validate, say=lambda text: typer.echo(text, err=True))
    width, color = screen()
    say(render_calibrated(calibration, width, color=color), styled=color)
    if out is not None:
        calibration.save(out)
        say(f"written to {shorten(out, 200)}")


@command("validate")
def validate_command(
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Record to write: a .json file.")] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="cpu (default), cuda, cuda:N.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One cheap case of each kind, with fewer runs.")] = False,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware", metavar="NAME", help="Device or .toml file; by default the device is calibrated first."
        ),
    ] = None,
    threads: _Threads = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="TEXT", help="Only cases whose name contains TEXT.")
    ] = None,
    plots: Annotated[str | None, typer.Option("--plots", "--plot", metavar="DIR", help="Folder for plots.")] = None,
    records: Annotated[
        str | None, typer.Option("--records", metavar="FILE", help="Published measurements to use instead of runs.")
    ] = None,
) -> None:
    """Compare predictions with measurements of ops, models and training steps, run here or published.

    With --records nothing runs: each record of the file is predicted, or listed with the reason why not. The exit code
    is 1 if a limit does not hold.

    Examples
    --------
      costgraph validate --device cuda --out my-gpu.json --plots pictures
      costgraph validate --records published.json --out predictions.json
    """
    if records is not None:
        options = {"--device": device, "--quick": quick, "--hardware": hardware, "--threads": threads, "--only": only}
        for name in (name for name, value in options.items() if value):
            raise FormatError(f"{name}: not used with --records, expected only --out and --plots")
        _compare_published(records, out, plots)
    elif out is None:
        raise FormatError("validate: no --out, expected --out FILE for the record, or --records FILE")
    else:
        _run(out, device or "cpu", quick, hardware, _count(threads), only, plots)


def _compare_published(records: str, out: str | None, plots: str | None) -> None:
    """Print predictions for published measurements."""
    from ..report.records import hold
    from ..report.records.show import plot_held, render_held

    if out is not None:
        target_of(out, ".json")
    if plots is not None:
        new_figure(1, 1)  # fail early if matplotlib is missing
    comparison = hold(records)
    width, color = screen()
    say(render_held(comparison, width, color=color), styled=color)
    if out is not None:
        comparison.save(out)
        say(f"written to {shorten(out, 200)}")
    if plots is not None:
        say("\n".join(f"drawn to {shorten(str(path), 200)}" for path in plot_held(comparison, plots)))
    if not comparison.holds:
        raise typer.Exit(1)


def _run(
    out: str, device: str, quick: bool, hardware: str | None, count: int | None, only: str | None, plots: str | None
) -> None:
    """Run the suite, then print and save the measurements."""
    need_torch("validate")
    from ..report.text import render_validation
    from ..torch.cli_args import threads as running
    from ..torch.validation import (
        suite,
        validate,
    )

    target_of(out, ".json")
    if plots is not None:
        new_figure(1, 1)  # fail early if matplotlib is missing
    cases = suite("cuda" if device.startswith("cuda") else "cpu", quick=quick)
    if only is not None:
        cases = [case for case in cases if only in case.name]
    with running(count):
        validation = validate(device, cases, hardware=hardware, quick=quick)
    validation.save(out)
    width, color = screen()
    say(render_validation(validation, width, color=color), styled=color)
    say(f"written to {shorten(out, 200)}")
    if plots is not None:
        say("\n".join(f"drawn to {shorten(str(path), 200)}" for path in validation.plot(plots)))


# -- trace -------------------------------------------------------------------------------------------------------------

_INPUT = re.compile(r"(?:([A-Za-z_]\w*)=)?([^:=]*)(?::(\w+))?\Z", re.ASCII)
#: Files in the traceback of every import.
_IMPORT_FILES = {__file__, importlib.__file__, importlib.util.__file__, *(
    f"<frozen importlib._bootstrap{part}>" for part in ("", "_external")
)}  # fmt: skip
_FIRST_SIZE = 17  # unbound sizes are distinct primes from here on


# longer than 40 lines: each option is a parameter
@command("trace")
def trace_command(
    target: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="A function without arguments that "
                      "returns a torch.nn.Module; MODULE is importable, or a file that ends in .py.")],
    sizes: opt.Sizes = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", metavar="[NAME=]SIZES[:FORMAT]",
                      help="One per argument, such as B,S:int64 or mask=B,1,S,S; names stay symbolic.")] = None,
    train: Annotated[bool, typer.Option("--train", help="The module returns a loss: trace its backward pass.")] = False,
    optimizer: Annotated[str | None, typer.Option("--optimizer", metavar="NAME[:IMPLEMENTATION]",
                         help="Optimizer of torch.optim, such as AdamW:foreach; its step is traced too.")] = None,
    fold: Annotated[list[str] | None, typer.Option("--fold", metavar="SCOPE=NAME",
                    help="Scope of repeated blocks; their number becomes a symbol: transformer/h=L.")] = None,
    unknown: Annotated[str, typer.Option("--unknown", help="Ops without a rule: error, or symbol.")] = "error",
    fixed: Annotated[str, typer.Option("--fixed", help="Sizes that the module converts to Python numbers, as loops do: "
                     "error or given.")] = "error",
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="Target device: cpu or cuda; no GPU is "
                      "needed.")] = "cpu",
    arch: Annotated[str | None, typer.Option("--arch", metavar="NAME", help="With --device cuda: sm_80, sm_90 (the "
                    "default), sm_100 and so on.")] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Save the graph: a .json file.")] = None,
    hardware: opt.Hardware = None, depth: opt.Depth = 2, formulas: opt.Formulas = False,
) -> None:  # fmt: skip
    """Trace a module on tensors without data, and print its costs.

    Bound sizes decide data-dependent branches of the module, and are the sizes of the report.

    Examples
    --------
      costgraph trace models.py:make --input B,S:int64 --out model.json B=8 S=512
      costgraph trace models.py:make_loss --input B,S:int64 --input B,S:int64
        --train --optimizer AdamW:foreach
    """
    if out is not None and not out.lower().endswith(".json"):
        raise FormatError(f"--out {shorten(out)}: expected a name ending in .json")
    folds = [_parse_fold(item) for item in fold or ()]
    specifications, dims = [_parse_input(item) for item in inputs or ()], opt.read_sizes(sizes)
    need_torch("trace")
    from ..torch import (
        dispatched,
        trace,
    )
    from ..torch.cli_args import on_meta
    from ..torch.cli_args import optimizer as optimizer_factory

    hints = _hints(specifications, dims)
    tensors = [(name, on_meta(_numbers(shape, hints), dtype), shape) for name, shape, dtype in specifications]
    graph = trace(
        _call_factory(target),
        *(t for name, t, _ in tensors if name is None),
        dims=[_names(shape) for name, _, shape in tensors if name is None],
        keywords={name: t for name, t, _ in tensors if name is not None},
        keyword_dims={name: _names(shape) for name, _, shape in tensors if name is not None},
        train=train, optimizer=None if optimizer is None else optimizer_factory(optimizer), unknown=unknown,
        fixed=fixed, device=device, arch=arch,
    )  # fmt: skip
    for scope, name in folds:
        from ..transforms.reroll import fold as fold_blocks

        graph = fold_blocks(graph, scope, name)
    if out is not None:
        from ..files.graphs import save

        save(graph, out)
    width, color = screen()
    costs = report(graph, hardware, depth=depth, **dims)  # type: ignore[arg-type]  # no size is an option
    say(text.render(costs, formulas=formulas, width=width, color=color), styled=color)
    for relation in graph.relations.relations:
        say(f"holds for {relation.text}")
    for line in _rule_lines(dispatched(graph)):
        say(line)


def _rule_lines(rows: Sequence[Any]) -> Iterator[str]:
    """Yield the device rules that calls follow, and how often."""
    for (rule, why), count in Counter((row.rule, row.why) for row in rows).items():
        yield f"{count} {'call' if count == 1 else 'calls'} by the rule {rule}: {why}"


# -- traced modules ----------------------------------------------------------------------------------------------


@contextmanager
def _user_code(target: str, expected: str) -> Iterator[None]:
    """Run user code; report its exceptions in one line, with their location."""
    try:
        yield
    except CostGraphError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in _IMPORT_FILES]
        location = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        description = shorten(f"{type(error).__name__}: {error}", 300)
        raise FormatError(f"{shorten(target)}: raised {description}{location}, expected {expected}") from error


def _call_factory(target: str) -> Any:
    """Call a factory function of a module or file."""
    module_name, mark, name = target.rpartition(":")
    if not mark or not is_name(name):
        raise FormatError(f"{shorten(target)}: expected MODULE:FACTORY, such as models.py:make")
    with _user_code(module_name, "a module that can be imported"):
        module = _from_file(module_name) if module_name.endswith(".py") else _imported(module_name)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise FormatError(f"{shorten(target)}: it has no function {name!r}, expected a function without arguments")
    with _user_code(target, "a function without arguments that returns a torch.nn.Module"):
        return factory()


def _from_file(path: str) -> Any:
    if not Path(path).is_file():
        raise FormatError(f"{shorten(path)}: no such file, expected a file that defines the factory")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes look up their module by name
    spec.loader.exec_module(module)
    return module


def _imported(name: str) -> Any:
    sys.path.insert(0, "")  # as `python -m` does
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove("")


# -- inputs ------------------------------------------------------------------------------------------------------


def _parse_fold(pair: str) -> tuple[str, str]:
    scope, mark, name = pair.rpartition("=")
    if not mark or not scope or not is_name(name):
        raise FormatError(f"--fold {shorten(pair)}: expected SCOPE=NAME, such as transformer/h=L")
    return scope, name


def _parse_input(specification: str) -> tuple[str | None, list[str], str]:
    match = _INPUT.match(specification)
    shape = [size.strip() for size in match.group(2).split(",")] if match and match.group(2).strip() else []
    if match is None or not all(is_name(size) or size.isdecimal() for size in shape):
        raise FormatError(f"--input {shorten(specification)}: expected [NAME=]SIZES[:FORMAT], such as B,S:int64")
    return match.group(1), shape, match.group(3) or "float32"


def _names(shape: list[str]) -> list[str | None]:
    return [size if is_name(size) else None for size in shape]


def _hints(specifications: list[tuple[str | None, list[str], str]], dims: Mapping[str, int]) -> dict[str, int]:
    from sympy import nextprime

    out: dict[str, int] = {}
    prime = _FIRST_SIZE
    for name in dict.fromkeys(p for _, shape, _ in specifications for p in shape if is_name(p)):
        out[name] = dims.get(name, prime)
        prime = nextprime(prime)
    return out


def _numbers(shape: list[str], hints: Mapping[str, int]) -> list[int]:
    return [hints[size] if is_name(size) else read_size(size, "--input") for size in shape]
