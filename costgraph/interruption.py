"""Let Ctrl-C end the command line at once, without a traceback, while the library is imported.

`python -m costgraph` and the script `costgraph` import the package before `costgraph.cli` runs, which takes most of a
second. This module is therefore imported first. It has no effect in other programs.
"""

import os
import signal
import sys
from contextlib import suppress

__all__: list[str] = []


def _is_command_line() -> bool:
    program = (getattr(sys, "argv", None) or [""])[0]
    # while Python resolves the module after -m, argv[0] is "-m"
    as_module = program == "-m" and "costgraph" in sys.orig_argv
    return as_module or os.path.basename(program).removesuffix(".exe") == "costgraph"


# keep an ignored signal, as set by nohup
if _is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    with suppress(ValueError):  # not in the main thread: another program
        signal.signal(signal.SIGINT, signal.SIG_DFL)
