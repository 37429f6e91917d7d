"""The model zoo: symbolic graphs with the sizes of published models as default bindings."""

from .registry import from_config, load, names

__all__ = ["from_config", "load", "names"]
