"""The command that turns a torch module into a graph; torch is loaded in the command alone."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..algebra.symbols import is_name, read_size, shorten
from ..errors import CostGraphError, FormatError
from ..report import report, text
from . import options as opt
from .frame import command
from .terminal import say, screen
from .torch_commands import need_torch

__all__ = ["trace_command"]

_INPUT = re.compile(r"(?:([A-Za-z_]\w*)=)?([^:=]*)(?::(\w+))?\Z", re.ASCII)
#: Files that stand in the traceback of every import.
_NOT_THEIRS = {__file__, importlib.__file__, importlib.util.__file__, *(
    f"<frozen importlib._bootstrap{part}>" for part in ("", "_external")
)}  # fmt: skip
_FIRST_SIZE = 17  # sizes that nobody bound are primes from here on, so that no two are alike


# over 40 lines, as options are parameters
@command("trace")
def trace_command(
    target: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="A function without arguments that "
                      "returns a torch.nn.Module; MODULE is importable, or a file that ends in .py.")],
    sizes: opt.Sizes = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", metavar="[NAME=]SIZES[:FORMAT]",
                      help="One for each argument, such as B,S:int64 or mask=B,1,S,S: names stay symbols.")] = None,
    train: Annotated[bool, typer.Option("--train", help="The module returns a loss: trace its backward pass.")] = False,
    optimizer: Annotated[str | None, typer.Option("--optimizer", metavar="NAME[:IMPLEMENTATION]",
                         help="Of torch.optim, such as AdamW:foreach; its step is traced too.")] = None,
    fold: Annotated[list[str] | None, typer.Option("--fold", metavar="SCOPE=NAME",
                    help="Scope of repeated blocks, whose number becomes a symbol: transformer/h=L.")] = None,
    unknown: Annotated[str, typer.Option("--unknown", help="Ops without a rule: error, or symbol.")] = "error",
    fixed: Annotated[str, typer.Option("--fixed", help="Sizes that the module turns into numbers, as loops do: error, "
                     "or given.")] = "error",
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="What would run it: cpu, or cuda, of which "
                      "none is needed.")] = "cpu",
    arch: Annotated[str | None, typer.Option("--arch", metavar="NAME", help="With --device cuda: sm_80, sm_90 (as "
                    "without), sm_100 and the like.")] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Save the graph: a .json file.")] = None,
    hardware: opt.Hardware = None, depth: opt.Depth = 2, formulas: opt.Formulas = False,
) -> None:  # fmt: skip
    """Run a module once on tensors without data, and print what it costs.

    Sizes that are bound decide which way the module goes where it asks for them, and fill in the report.

    Examples
    --------
      costgraph trace models.py:make --input B,S:int64 --out model.json B=8 S=512
      costgraph trace models.py:make_loss --input B,S:int64 --input B,S:int64
        --train --optimizer AdamW:foreach
    """
    if out is not None and not out.lower().endswith(".json"):
        raise FormatError(f"--out {shorten(out)}: expected the name of a .json file")
    folds = [_pair(word) for word in fold or ()]
    given, dims = [_parsed(word) for word in inputs or ()], opt.read_sizes(sizes)
    need_torch("trace")
    from ..torch import dispatched, trace
    from ..torch.words import on_meta
    from ..torch.words import optimizer as made_optimizer

    hints = _hints(given, dims)
    tensors = [(name, on_meta(_numbers(shape, hints), dtype), shape) for name, shape, dtype in given]
    graph = trace(
        _made(target),
        *(t for name, t, _ in tensors if name is None),
        dims=[_names(shape) for name, _, shape in tensors if name is None],
        keywords={name: t for name, t, _ in tensors if name is not None},
        keyword_dims={name: _names(shape) for name, _, shape in tensors if name is not None},
        train=train, optimizer=None if optimizer is None else made_optimizer(optimizer), unknown=unknown,
        fixed=fixed, device=device, arch=arch,
    )  # fmt: skip
    for scope, name in folds:
        from ..transforms.folding.fold import fold as fold_blocks

        graph = fold_blocks(graph, scope, name)
    if out is not None:
        from ..files.write import save

        save(graph, out)
    width, color = screen()
    found = report(graph, hardware, depth=depth, **dims)  # type: ignore[arg-type]  # no size is an option
    say(text.render(found, formulas=formulas, width=width, color=color), styled=color)
    for relation in graph.relations.relations:
        say(f"holds for {relation.text}")
    for line in _chosen(dispatched(graph)):
        say(line)


def _chosen(rows: Sequence[Any]) -> Iterator[str]:
    """Yield by which rules calls are those of the device, and how many."""
    for (rule, why), count in Counter((row.rule, row.why) for row in rows).items():
        yield f"{count} {'call' if count == 1 else 'calls'} by the rule {rule}: {why}"


# -- what is traced ----------------------------------------------------------------------------------------------


@contextmanager
def _theirs(target: str, expected: str) -> Iterator[None]:
    """Run code that is not the library's: whatever it raises is told in one line, with its place."""
    try:
        yield
    except CostGraphError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in _NOT_THEIRS]
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        what = shorten(f"{type(error).__name__}: {error}", 300)
        raise FormatError(f"{shorten(target)}: raised {what}{where}, expected {expected}") from error


def _made(target: str) -> Any:
    """Call a factory that stands in a module, or in a file."""
    place, mark, name = target.rpartition(":")
    if not mark or not is_name(name):
        raise FormatError(f"{shorten(target)}: expected MODULE:FACTORY, such as models.py:make")
    with _theirs(place, "a module that can be imported"):
        module = _from_file(place) if place.endswith(".py") else _imported(place)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise FormatError(f"{shorten(target)}: {name!r} is no function of it, expected one without arguments")
    with _theirs(target, "a function without arguments that returns a torch.nn.Module"):
        return factory()


def _from_file(place: str) -> Any:
    if not Path(place).is_file():
        raise FormatError(f"{shorten(place)}: no such file, expected one with a factory in it")
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes look up their module by its name
    spec.loader.exec_module(module)
    return module


def _imported(place: str) -> Any:
    sys.path.insert(0, "")  # as `python -m` does
    try:
        return importlib.import_module(place)
    finally:
        sys.path.remove("")


# -- inputs ------------------------------------------------------------------------------------------------------


def _pair(word: str) -> tuple[str, str]:
    scope, mark, name = word.rpartition("=")
    if not mark or not scope or not is_name(name):
        raise FormatError(f"--fold {shorten(word)}: expected SCOPE=NAME, such as transformer/h=L")
    return scope, name


def _parsed(word: str) -> tuple[str | None, list[str], str]:
    match = _INPUT.match(word)
    shape = [part.strip() for part in match.group(2).split(",")] if match and match.group(2).strip() else []
    if match is None or not all(is_name(part) or part.isdecimal() for part in shape):
        raise FormatError(f"--input {shorten(word)}: expected [NAME=]SIZES[:FORMAT], such as B,S:int64")
    return match.group(1), shape, match.group(3) or "float32"


def _names(shape: list[str]) -> list[str | None]:
    return [part if is_name(part) else None for part in shape]


def _hints(given: list[tuple[str | None, list[str], str]], dims: Mapping[str, int]) -> dict[str, int]:
    from sympy import nextprime

    out: dict[str, int] = {}
    prime = _FIRST_SIZE
    for part in dict.fromkeys(p for _, shape, _ in given for p in shape if is_name(p)):
        out[part] = dims.get(part, prime)
        prime = nextprime(prime)
    return out


def _numbers(shape: list[str], hints: Mapping[str, int]) -> list[int]:
    return [hints[part] if is_name(part) else read_size(part, "--input") for part in shape]
