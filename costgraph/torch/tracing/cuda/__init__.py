"""What a GPU runs where torch chooses by the device: known without one, by torch's own conditions."""

from .device import KERNELS, on_cuda
from .results import CUDA_STATISTICS
from .table import RULES, SOURCES, Here

__all__ = ["CUDA_STATISTICS", "KERNELS", "RULES", "SOURCES", "Here", "on_cuda"]
