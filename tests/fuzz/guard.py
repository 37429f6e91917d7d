"""Contract of every fuzzer: a result or a library error, within the time limit."""

import sys

from limits import TooSlowError, limited

from costgraph import CostGraphError

#: Seconds of CPU time after which a call counts as hung.
SECONDS = 10.0
#: Longest error text in characters; errors must be readable.
LONGEST_TEXT = 2100


def show(given):
    try:
        text = repr(given)
    except ValueError:  # Python refuses to print huge integers
        text = f"<{type(given).__name__} without a text>"
    return text if len(text) <= 3000 else f"{text[:3000]}... ({len(text)} characters)"


def outcome(call, *given, about=None, **named):
    """Return the result or the library error; any other exception fails with the input that caused it."""
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
    result = outcome(call, *given, **named)
    assert isinstance(result, CostGraphError), f"{show(given)} was taken: {str(result)[:300]}"
    return result
