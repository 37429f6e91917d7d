"""Modules that tests import on first use, so that collecting tests does not import them."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


class _Lazy(ModuleType):
    """Stand-in for a module, which the first look-up of a public attribute imports."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks these up in every global of a test module
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)


def lazy_import(name: str) -> Any:
    """Return a stand-in for a module, or skip the calling test module if it is not installed.

    Use it for modules that take long to import and that no decorator or base class of the test module needs.
    """
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _Lazy(name)
