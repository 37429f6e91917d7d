"""Ctrl-C ends the command line at once and without a traceback, from the first import of the library on.

`python -m costgraph` and the script `costgraph` import the package before a line of `costgraph.cli` runs, which takes
most of a second: so this stands before all other imports. It changes nothing where another program imports the library.
"""

import os
import signal
import sys
from contextlib import suppress

__all__: list[str] = []


def _is_command_line() -> bool:
    program = (getattr(sys, "argv", None) or [""])[0]
    # while Python looks for the module that -m names, "-m" stands in its place
    as_module = program == "-m" and "costgraph" in sys.orig_argv
    return as_module or os.path.basename(program).removesuffix(".exe") == "costgraph"


# whoever started the program with the signal ignored, as nohup does, wants that
if _is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    with suppress(ValueError):  # not in the main thread: a program of its own after all
        signal.signal(signal.SIGINT, signal.SIG_DFL)
