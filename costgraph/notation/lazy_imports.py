"""Names that a package hands out, and whose modules are imported when one of them is first asked for (PEP 562).

An import of the whole library takes as long as that of sympy; most programs ask one or two questions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = [
    "later",
]


def later(
    package: str, names: Mapping[str, str], entered: Callable[[Any], Any] = lambda found: found
) -> Callable[[str], Any]:
    """Return a package's `__getattr__`.

    `names` are what each module has, separated by spaces, by its name within the package; a module of the package that
    is handed out has itself. `entered` says what each name becomes before it is handed out.
    """
    homes = {name: module for module, found in names.items() for name in found.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes[name]}")
        found = module if name == homes[name] else entered(getattr(module, name))
        setattr(sys.modules[package], name, found)
        return found

    return find
