"""Every refusal of the library: one root, one class for each kind of mistake.

The text of an error names the place, the value that was met there and what was expected.
"""

__all__ = [
    "BindingError",
    "CostGraphError",
    "FormatError",
    "GraphError",
    "PatternError",
    "ShapeError",
    "SpecError",
    "StandInWarning",
    "UnsupportedError",
]


_LONGEST = 2000


class CostGraphError(Exception):
    """Root of all errors that the library raises on purpose."""

    def __init__(self, text: str = "") -> None:
        # a message quotes what it met, and that may be a book
        super().__init__(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 500]} ... {text[-490:]}")


class PatternError(CostGraphError):
    """A pattern, formula, assumption or binding text cannot be read."""


class ShapeError(CostGraphError):
    """Sizes, axes or number formats of operands do not fit together."""


class GraphError(CostGraphError):
    """A graph is put together or used in a way that has no meaning."""


class BindingError(CostGraphError):
    """A size is unknown, missing, not a positive integer, or against an assumption."""


class SpecError(CostGraphError):
    """A hardware specification is malformed, or lacks what is asked of it."""


class StandInWarning(UserWarning):
    """An answer rests on a rate in the place of one that the device has none of."""


class FormatError(CostGraphError):
    """A file, a number format or a command line cannot be read."""


class UnsupportedError(CostGraphError):
    """There is no rule for what is asked: nothing is silently counted as zero."""
