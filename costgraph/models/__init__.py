"""The model zoo: symbolic graphs with the sizes of published models as default bindings."""

from .registry import load, names

__all__ = ["load", "names"]
