"""The model zoo: symbolic graphs with the sizes of published models as default bindings."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["from_config", "load", "names"]

if TYPE_CHECKING:
    from .registry import from_config, load, names
else:

    def __getattr__(name):
        # forty modules take a seventh of the import time: load them when a model is first requested
        if name not in (*__all__, "registry"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        registry = import_module(f"{__name__}.registry")
        globals().update({function: getattr(registry, function) for function in __all__})
        return registry if name == "registry" else globals()[name]

    def __dir__():
        return list(__all__)
