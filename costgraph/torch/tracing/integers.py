"""Python's integer functions on sizes: `int(n)`, `float(n)` and `len(x)` keep a named size symbolic.

CPython lets `int`, `len` and `float` return plain numbers only, so these names are shadowed in the program's files
during a run. There a size looks like an `int`, as in an eager run.
"""

from __future__ import annotations

import builtins
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from .counted import Parts, Range
from .state import is_a, is_theirs

__all__ = ["open_integers"]

_type = type
#: Files of torch that compute sizes with Python's functions.
_OF_TORCH = ("torch.nn.functional",)


class _Shadow:
    """Stands in for a builtin type: calls accept sizes, and everything else goes to the type itself."""

    def __init__(self, plain: type, call: Callable[..., Any], symbols: type | None) -> None:
        self.__dict__.update({"_plain": plain, "_call": call, "_symbols": symbols, "__name__": plain.__name__})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self._plain) or (self._symbols is not None and is_a(value, self._symbols))

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, self._plain)

    def __mro_entries__(self, bases: Any) -> tuple[type]:
        return (self._plain,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __or__(self, other: Any) -> Any:
        return self._plain | (other._plain if is_a(other, _Shadow) else other)

    def __ror__(self, other: Any) -> Any:
        return other | self._plain

    def __getitem__(self, item: Any) -> Any:
        return self._plain[item]

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._plain

    def __hash__(self) -> int:
        return hash(self._plain)

    def __repr__(self) -> str:
        return repr(self._plain)


def _item(value: Any) -> Any:
    """Return the number in a tensor with one element, and other values unchanged."""
    return value.item() if is_a(value, torch.Tensor) and value.numel() == 1 else value


def _whole(*args: Any, **kwargs: Any) -> Any:
    """Return `int(...)`; a size is returned unchanged."""
    if len(args) == 1 and not kwargs:
        args = (_item(args[0]),)
        if is_a(args[0], torch.SymInt):
            return args[0]
        if is_a(args[0], torch.SymFloat):
            return math.trunc(args[0])
    return int(*args, **kwargs)


def _real(*args: Any) -> Any:
    """Return `float(...)`; a size stays symbolic."""
    args = tuple(map(_item, args))
    if len(args) == 1 and is_a(args[0], torch.SymInt | torch.SymFloat):
        return torch.sym_float(args[0])  # type: ignore[no-untyped-call]  # torch has no types for it
    return float(*args)


def _length(value: Any) -> Any:
    """Return `len(...)`; for a tensor, its first size."""
    if is_a(value, torch.Tensor) and type(value).__len__ is torch.Tensor.__len__ and value.ndim:
        return value.shape[0]
    return value.count if is_a(value, (Parts, Range)) else len(value)


_INT = _Shadow(int, _whole, torch.SymInt)
_FLOAT = _Shadow(float, _real, torch.SymFloat)


def _kind(*args: Any, **kwargs: Any) -> Any:
    """Return `type(...)`, such that `type(n) is int` holds where `int` is shadowed."""
    made = _type(*args, **kwargs)
    if len(args) == 1:
        return _INT if made in (int, torch.SymInt) else _FLOAT if made in (float, torch.SymFloat) else made
    return made


_SHADOWS: dict[str, Any] = {"int": _INT, "float": _FLOAT, "len": _length, "type": _Shadow(_type, _kind, None)}


def _files(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the globals of the program's files."""
    found = [vars(m) for m in list(sys.modules.values()) if is_a(m, types.ModuleType)]
    for kind in {cls for part in module.modules() for cls in _type(part).__mro__}:  # a file that is no module
        found += [f.__globals__ for f in vars(kind).values() if is_a(f, types.FunctionType)]
    seen = set[int]()
    for names in found:
        name = names.get("__name__")
        if id(names) not in seen and (is_theirs(name) or name in _OF_TORCH):
            seen.add(id(names))
            yield names


def _divided(a: Any, b: Any) -> tuple[Any, Any]:
    return a // b, a % b


def _written(size: torch.SymInt, how: str) -> str:
    """Return a size as text. With a format specification it is a number."""
    return format(int(size.node.hint), how) if how else str(size)


@contextmanager
def open_integers(module: nn.Module) -> Iterator[None]:
    """Let Python's integer functions accept sizes in a program's files."""
    methods = {"__divmod__": _divided, "__rdivmod__": lambda a, b: _divided(b, a), "__format__": _written}
    with ExitStack() as replaced:
        for name, method in methods.items():
            replaced.enter_context(patch.object(torch.SymInt, name, method, create=True))
        for names in _files(module):
            for name, shadow in _SHADOWS.items():
                plain = getattr(builtins, name)
                if names.get(name, plain) is plain:
                    replaced.callback(_restore, names, name, names.get(name))
                    names[name] = shadow
        yield


def _restore(names: dict[str, Any], name: str, before: Any) -> None:
    if before is None:
        names.pop(name, None)
    else:
        names[name] = before
