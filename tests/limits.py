"""Limits on what a call may take, in seconds of the processor: what else runs on the machine is no part of them."""

import signal
from contextlib import contextmanager

#: Ten times and more what any tested call needs, so that only a hang or a power law reaches it.
SECONDS = 20.0
#: Seconds of the clock for each of the processor, after which a call that does not run at all is given up.
CLOCK = 30
#: Seconds of the clock for a process of its own, imports included; a limit against hangs alone.
PROCESS = 600


class TooSlowError(BaseException):
    """No Exception, so that no handler on the way takes it for a refusal."""


@contextmanager
def limited(seconds=SECONDS):
    """Stop what takes more of the processor, or what waits for ever; only in the main thread, where signals arrive."""

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
