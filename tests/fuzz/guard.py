"""What every fuzzer asks: a result or a refusal of the library, in time, and nothing else."""

import sys

from limits import TooSlowError, limited

from costgraph import CostGraphError

#: Of the processor: a hang to whoever waits.
SECONDS = 10.0
#: Error texts are for people: none is a page.
LONGEST_TEXT = 2100


def show(given):
    try:
        text = repr(given)
    except ValueError:  # an integer that Python refuses to print
        text = f"<{type(given).__name__} without a text>"
    return text if len(text) <= 3000 else f"{text[:3000]}... ({len(text)} characters)"


def outcome(call, *given, about=None, **named):
    """The result, or the refusal; anything else fails with the input that caused it."""
    try:
        with limited(SECONDS):
            return call(*given, **named)
    except CostGraphError as error:
        text = str(error)
        assert text.strip(), f"an error without a text for {show(about or given)}"
        assert len(text) <= LONGEST_TEXT, f"an error of {len(text)} characters for {show(about or given)}"
        return error
    except (Exception, TooSlowError) as error:
        message = f"{type(error).__name__}: {str(error)[:300]} for {show(about or given or named)}"
        sys.stderr.write(message + "\n")
        raise AssertionError(message) from error


def refused(call, *given, **named):
    found = outcome(call, *given, **named)
    assert isinstance(found, CostGraphError), f"{show(given)} was taken: {str(found)[:300]}"
    return found
