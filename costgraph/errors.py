"""Exceptions, one class per kind of mistake.

Messages name the place, the value, and the expected value.
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
    """Base class for all errors that the library raises on purpose."""

    def __init__(self, text: str = "") -> None:
        # messages quote input, which may be very long
        super().__init__(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 500]} ... {text[-490:]}")


class PatternError(CostGraphError):
    """A pattern, formula, assumption or binding cannot be parsed."""


class ShapeError(CostGraphError):
    """Sizes, axes or number formats of operands do not match."""


class GraphError(CostGraphError):
    """A graph is built or used in an invalid way."""


class BindingError(CostGraphError):
    """A size is unknown, missing, not a positive integer, or violates an assumption."""


class SpecError(CostGraphError):
    """A hardware specification is malformed or incomplete."""


class StandInWarning(UserWarning):
    """A missing rate of a device was replaced by another one."""


class FormatError(CostGraphError):
    """A file, number format or command line cannot be read."""


class UnsupportedError(CostGraphError):
    """The request has no rule; nothing is silently counted as zero."""
