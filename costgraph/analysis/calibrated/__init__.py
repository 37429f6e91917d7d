"""Calibrated times: what devices were seen to attain of their peaks, as terms of ops and of devices."""

from .model import Calibration, Figures, load_calibration

__all__ = ["Calibration", "Figures", "load_calibration"]
