"""Rates that a device attains, measured here and written down as a specification that the roofline reads."""

from .calibration import Calibration, Rate, calibrate, check_target

__all__ = ["Calibration", "Rate", "calibrate", "check_target"]
