"""Families that are read and not predicted, each with the reason why not."""

from __future__ import annotations

from ...errors import UnsupportedError
from .case import Case, family
from .record import Record

_REASONS = {
    "training-memory": "what a recipe shards, offloads and keeps, and what an allocator reserves, is not stated",
    "training-speed": "recipes with float8, shards or parts computed again that their words do not state in full",
    "stas-zero3": "an optimizer on the host has no time",
}


@family(*_REASONS, subject="")
def refused(record: Record) -> Case:
    """Say why there is no prediction.

    Raises
    ------
    UnsupportedError
        Always.
    """
    raise UnsupportedError(_REASONS[record.family])
