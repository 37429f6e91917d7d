"""The command line: `costgraph`, also `python -m costgraph`.

Every refusal of the library is one line on the standard error and exit code 2, as is an output that takes nothing; a
reader that goes away is no error. `costgraph.interruption` has what Ctrl-C does.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from ..algebra.symbols import printable
from ..errors import CostGraphError
from ..notation.progress import waiting

__all__ = ["main"]

_EXTRA = 'costgraph: the command line needs typer and rich: pip install "costgraph[cli]"'

#: What a shell reports for a filter whose reader went away: 128 + SIGPIPE.
_BROKEN_PIPE = 141

#: Where a shell says that it wants words completed.
_COMPLETE = "_COSTGRAPH_COMPLETE"

_LONGEST_LINE = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Words after the name of the program; those of the process by default.

    Returns
    -------
    int
        Exit code: 0, 2 for a mistake in what was asked or an output that cannot be written, 130 after an
        interruption, 141 where the reader went away.
    """
    try:
        if sys.stdout is None:  # closed before the program began
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
    """Report an output that cannot be written; one whose reader went away is left in silence."""
    if sys.stdout is not None:
        # Python flushes once more at its end, and would complain then
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
    from .frame import app

    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    command = get_command(app)
    try:
        if asked := os.environ.get(_COMPLETE):
            return shell_complete(command, {}, "costgraph", _COMPLETE, asked)
        # not command.main, which has an answer of its own to a broken pipe
        with command.make_context("costgraph", words) as context, waiting(printable(words[0])[:40]):
            command.invoke(context)
        return 0
    except SystemExit as stop:  # how typer ends what completes, and what installs that
        return int(stop.code or 0)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except typer.Abort:
        return 130
    except Exception as error:
        return _usage(error)


def _usage(error: Exception) -> int:
    """Report what the parser of arguments refuses; anything else keeps its traceback or is met above."""
    show = getattr(error, "format_message", None)
    if show is None:
        raise error
    return _refuse(show())


def _refuse(message: str) -> int:
    line = printable(" ".join(message.split("\n")))
    if len(line) > _LONGEST_LINE:
        line = line[: _LONGEST_LINE - 3] + "..."
    with suppress(OSError, AttributeError):  # nobody listens: the pipe is broken, or it was closed
        sys.stderr.write(f"costgraph: {line}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
