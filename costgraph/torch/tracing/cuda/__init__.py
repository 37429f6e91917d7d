"""What a GPU runs where torch chooses by the device: known without one, by torch's own conditions."""

from .device import KERNELS, on_cuda
from .table import RULES, SOURCES, Here

__all__ = ["KERNELS", "RULES", "SOURCES", "Here", "on_cuda"]
