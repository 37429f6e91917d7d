"""Measurements that others published, and predictions beside them."""

from .calibrating import Calibrated, calibrate
from .held import Held, hold
from .record import Record, read_records

__all__ = ["Calibrated", "Held", "Record", "calibrate", "hold", "read_records"]
