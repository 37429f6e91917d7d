"""Lazy imports of public names (PEP 562).

Importing the whole library takes as long as importing sympy, and most programs use few functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = [
    "lazy_function",
    "lazy_getattr",
]


def lazy_getattr(
    package: str, names: Mapping[str, str], entered: Callable[[Any], Any] = lambda member: member
) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package.

    `names` maps each module within the package to its public names, separated by spaces; a public submodule lists
    itself. `entered` wraps each value before it is returned.
    """
    homes = {name: module for module, member in names.items() for name in member.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes[name]}")
        member = module if name == homes[name] else entered(getattr(module, name))
        setattr(sys.modules[package], name, member)
        return member

    return find


def lazy_function(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports the named one when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call
