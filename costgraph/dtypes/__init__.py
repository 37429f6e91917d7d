"""Number formats: what an element takes, what elements share, and what comes of two formats."""

from .known import ALIASES, DTYPES
from .naming import bits_per_element, dtype, promote
from .record import BlockScale, DType

__all__ = ["ALIASES", "DTYPES", "BlockScale", "DType", "bits_per_element", "dtype", "promote"]
