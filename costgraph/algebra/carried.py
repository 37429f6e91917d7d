"""Expressions that carry what they hold for.

A question answers with a sympy expression while a size is open. Where its graph asks something of sizes, the
expression is of a subclass of its own class that has one thing more, `held`; in all else, comparison and printing
included, it is the plain expression. Its operators and methods hand on what it holds for. sympy's own functions are
given the plain one (`sympify` returns it), so that nothing of it is kept in their caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from inspect import getattr_static
from operator import attrgetter
from types import FunctionType, MemberDescriptorType
from typing import Any

import sympy

from ..errors import ShapeError
from .conditions import Validity
from .polynomial import Poly, poly

__all__ = ["conditioned", "held_by", "plain"]


def plain(value: Any) -> Any:
    """Return an expression without what it holds for, anything else as it is."""
    return value._plain if isinstance(value, _Conditioned) else value


def held_by(*values: object) -> tuple[Validity, ...]:
    """Return what some values hold for together; empty for plain expressions and for what is none."""
    return tuple(dict.fromkeys(v for value in values if isinstance(value, _Conditioned) for v in value.held))


def conditioned(value: Any, held: Iterable[Validity]) -> Any:
    """Return a formula that holds for this; itself where that says nothing, or where it is no formula in symbols."""
    held = tuple(v for v in held if v.names or v.values)
    if not held or not isinstance(value, sympy.Expr) or not value.free_symbols:
        return plain(value)
    kind: Any = type(plain(value))
    out: Any = object.__new__(_class_of(kind))
    out._plain, out.held = plain(value), held
    return out


@cache
def _class_of(base: Any) -> Any:
    """Return the subclass of a class of expressions that carries what they hold for.

    All but what `_Conditioned` defines is asked of the plain expression: sympy puts numbers into expressions to find
    out about them, which is nobody's binding.
    """
    # printers and the order of terms go by the name
    space: dict[str, Any] = {"__slots__": ("_plain", "held"), "__module__": base.__module__, "__doc__": base.__doc__}
    for name in dir(base):
        own = name.startswith("__") or hasattr(_Conditioned, name)
        if not own and isinstance(getattr_static(base, name), FunctionType | property | MemberDescriptorType):
            space[name] = property(attrgetter(f"_plain.{name}"))
    return type(base)(base.__name__, (_Conditioned, base), space)


class _Conditioned:
    """Common part of the classes of expressions that carry what they hold for."""

    __slots__ = ()
    _plain: sympy.Expr
    held: tuple[Validity, ...]
    _op_priority = 10.01  # numbers and plain expressions leave an operation to this class
    __sympy__ = None  # sympify() asks _sympy_

    def _sympy_(self) -> sympy.Expr:
        return self._plain

    def __eq__(self, other: object) -> bool:
        return bool(self._plain == plain(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._plain)

    @property
    def func(self) -> Any:
        """What rebuilds the plain expression."""
        return self._plain.func

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return conditioned, (self._plain, self.held)


def _carrying(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("subs"):  # sizes at which evalf is asked
            self.subs(kwargs["subs"])
        out = getattr(self._plain, name)(*map(plain, args), **kwargs)
        return conditioned(out, held_by(self, *args))

    return method


def _replacing(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = _each(lambda value: value, args)  # what can be gone through once, such as zip(), is a list then
        bare = _each(plain, args)

        def changed(p: Poly) -> Poly | None:
            try:
                return p if p.constant is not None else poly(getattr(p.expr, name)(*bare, **kwargs))
            except ShapeError:  # floats and symbols of other origin: nothing is known of these
                return None

        put: list[Any] = []
        _each(put.append, args)  # formulas, which hold for something themselves
        held = [v.bound(changed, v.names) for v in self.held]
        return conditioned(getattr(self._plain, name)(*bare, **kwargs), [*held, *held_by(*put)])

    return method


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to what stands in lists, tuples, sets and mappings."""
    if isinstance(value, Mapping):
        return {k: _each(change, v) for k, v in value.items()}
    if isinstance(value, Iterator):
        value = list(value)
    return type(value)(_each(change, v) for v in value) if type(value) in (list, tuple, set) else change(value)


_OPERATORS = [
    f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow") for side in ("", "r")
]
_METHODS = (
    "__neg__", "__pos__", "__abs__", "apart", "cancel", "collect", "diff", "doit", "evalf", "expand", "factor",
    "integrate", "n", "normal", "nsimplify", "powsimp", "radsimp", "ratsimp", "rewrite", "simplify",
    "together",
)  # fmt: skip
for _name in (*_OPERATORS, *_METHODS):
    setattr(_Conditioned, _name, _carrying(_name))
for _name in ("subs", "xreplace", "replace"):
    setattr(_Conditioned, _name, _replacing(_name))
