"""Rates that a device attains, measured here and written down as a specification that the roofline reads."""

from .calibration import calibrate
from .record import Calibration, Rate

__all__ = ["Calibration", "Rate", "calibrate"]
