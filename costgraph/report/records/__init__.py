"""Published measurements, compared with predictions."""

from .fitting import (
    Calibrated,
    calibrate,
)
from .predictions import (
    Held,
    hold,
)
from .record import Record, read_records

__all__ = ["Calibrated", "Held", "Record", "calibrate", "hold", "read_records"]
