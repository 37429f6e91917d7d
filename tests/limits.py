"""CPU-time limits for calls, independent of other load on the machine."""

import signal
from contextlib import contextmanager

#: At least ten times the CPU time of any tested call, so that only a hang or superlinear growth reaches it.
SECONDS = 20.0
#: Wall-clock seconds per CPU second, after which a blocked call is interrupted.
CLOCK = 30
#: Wall-clock timeout in seconds for a subprocess, imports included; guards against hangs only.
PROCESS = 600


class TooSlowError(BaseException):
    """Not a subclass of `Exception`, so that no handler in between mistakes it for a refusal."""


@contextmanager
def limited(seconds=SECONDS):
    """Interrupt code that exceeds its CPU time or blocks; main thread only, as signals arrive there."""

    def stop(number, frame):
        kind = "of the processor" if number == signal.SIGPROF else f"times {CLOCK} of the clock"
        raise TooSlowError(f"more than {seconds} s {kind}")

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, CLOCK * seconds))
    before = [(timer, number, signal.signal(number, stop), signal.setitimer(timer, most))
              for timer, number, most in timers]  # fmt: skip
    try:
        yield
    finally:
        for timer, number, handler, left in before:
            signal.setitimer(timer, *left)
            signal.signal(number, handler)
