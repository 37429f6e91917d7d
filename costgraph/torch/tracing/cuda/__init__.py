"""What a GPU runs where torch chooses by the device: known without one, by torch's own conditions."""

from .arch import DEFAULT, Arch, arch_of
from .device import KERNELS, on_cuda
from .table import RULES, SOURCES, Here

__all__ = ["DEFAULT", "KERNELS", "RULES", "SOURCES", "Arch", "Here", "arch_of", "on_cuda"]
