"""Measurements that others published, and predictions beside them."""

from .held import Held, hold
from .record import Record, read_records

__all__ = ["Held", "Record", "hold", "read_records"]
