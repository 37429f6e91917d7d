"""Predictions beside measurements: a suite of ops, models and training steps, its record, table and plots."""

from .case import Case
from .record import SCHEMA, Validation
from .rows import Row
from .run import validate
from .subjects import SUBJECTS
from .suite import suite

__all__ = ["SCHEMA", "SUBJECTS", "Case", "Row", "Validation", "suite", "validate"]
