"""The `costgraph` command, also `python -m costgraph`.

Library errors and failed writes print one line to standard error and exit with code 2. A closed pipe is not an error.
`costgraph.interruption` handles Ctrl-C.
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
        return _report_error(str(error))
    except OverflowError:
        return _report_error("the numbers are too large, expected the sizes of a realistic model")
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _report_write_error(error)


def _report_write_error(error: OSError) -> int:
    """Report a failed write; stay silent if the reader closed the pipe."""
    if sys.stdout is not None:
        # Python flushes standard output at exit, and would report the error again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return _BROKEN_PIPE
    target = error.filename or "the standard output"
    return _report_error(f"{target}: {error.strerror or error}, expected a writable destination")


def _run(arguments: Sequence[str] | None) -> int:
    try:
        import rich  # noqa: F401  # an extra, as is typer
        import typer
        from typer.completion import shell_complete
        from typer.main import get_command

        from .registry import app
    except ImportError:
        sys.stderr.write(_EXTRA + "\n")
        return 2

    argv = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    command = get_command(app)
    try:
        if request := os.environ.get(_COMPLETE):
            return shell_complete(command, {}, "costgraph", _COMPLETE, request)
        # not command.main, which handles broken pipes itself
        with command.make_context("costgraph", argv) as context, waiting(printable(argv[0])[:40]):
            command.invoke(context)
        return 0
    except SystemExit as stop:  # typer's completion and its installation end this way
        return int(stop.code or 0)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except typer.Abort:
        return 130
    except Exception as error:
        return _report_usage_error(error)


def _report_usage_error(error: Exception) -> int:
    """Report an argument error; other exceptions propagate."""
    show = getattr(error, "format_message", None)
    if show is None:
        raise error
    return _report_error(show())


def _report_error(message: str) -> int:
    line = printable(" ".join(message.split("\n")))
    if len(line) > _LONGEST_LINE:
        line = line[: _LONGEST_LINE - 3] + "..."
    with suppress(OSError, AttributeError):  # standard error is closed
        sys.stderr.write(f"costgraph: {line}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
