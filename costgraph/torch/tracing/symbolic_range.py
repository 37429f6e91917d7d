"""Loops over sizes: `range`, `split` and `unbind` with a symbolic count run a few iterations, each recorded."""

from __future__ import annotations

import builtins
import math
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import nn

from ...errors import CostGraphError, UnsupportedError
from ...transforms.reroll import FEWEST
from .shapes import Shapes, caller
from .state import is_a, is_program_module

__all__ = [
    "SymbolicLoop",
    "Loops",
    "Parts",
    "Range",
    "ResizeError",
    "open_integers",
]


# -- loops -------------------------------------------------------------------------------------------------------------

#: Tensor attribute: the loops around its producer, with their iterations.
_ITERATION = "_costgraph_iteration"

#: Iterations run per loop: fewer might be alike by chance, and more take time.
_MIN_ITERATIONS, _MAX_ITERATIONS, _DEFAULT_ITERATIONS = 8, 10, 8

_numbers = range


class ResizeError(CostGraphError):
    """A loop has too few or too many iterations at a size; the run must use another one."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(f"{name} = {size}")
        self.name, self.size = name, size


@dataclass(frozen=True)
class SymbolicLoop:
    """A loop over a size."""

    count: torch.SymInt
    """number of iterations"""
    iterations: int
    """number of iterations run"""
    line: str
    """line where it begins"""
    position: tuple[int, int]
    """frame and instruction that request the next iteration"""


@dataclass(frozen=True)
class ListSlice:
    """The part of a list with per-iteration results."""

    loop: int
    first: int
    last: int
    """its begin and end in the list"""
    count: Any
    """its length for all iterations of the loop"""
    reverse: bool
    """whether the result of the last iteration comes first"""


class Loops:
    """Loops over sizes in a run, with their current iterations.

    `raised` names sizes that were increased for a loop and must not decrease again; None keeps all sizes fixed.
    """

    def __init__(self, shapes: Shapes, raised: Collection[str] | None = None) -> None:
        self.shapes, self.raised = shapes, raised
        self.loops: list[SymbolicLoop] = []
        self.stack: list[tuple[int, int]] = []
        self.on = False
        """whether loops are recorded; False in training"""
        self.broken = False
        """whether a loop was left before its last iteration"""
        self.note: Callable[[tuple[tuple[int, int], ...]], None] = lambda path: None
        """Called when an iteration begins or ends, with the enclosing iterations."""

    @property
    def path(self) -> tuple[tuple[int, int], ...]:
        """Enclosing loops, with their iterations."""
        return tuple(self.stack)

    def mark(self, tensors: Iterable[Any]) -> None:
        """Tag tensors with the iteration that produced them."""
        if self.stack:
            for t in tensors:
                if isinstance(t, torch.Tensor):
                    t.__dict__[_ITERATION] = self.path

    def is_symbolic(self, count: Any) -> bool:
        """Whether a count is symbolic in named sizes that must stay symbolic."""
        if not self.on or not isinstance(count, torch.SymInt) or self.shapes.fixed:
            return False
        free = self.shapes.in_named_sizes(count.node.expr).free_symbols
        return bool(free) and free <= self.shapes.names.keys()

    def iterate(self, count: torch.SymInt) -> Iterator[int]:
        """Yield the iteration numbers."""
        frame = sys._getframe(2)
        number, done = self._begin(count, (id(frame), frame.f_lasti)), 0
        iterations = self.loops[number].iterations
        try:
            for k in _numbers(iterations):
                self._enter_iteration(number, k)
                done += 1
                yield k
        finally:
            if done < iterations:
                self.broken = True
            self._end(number)

    def _begin(self, count: torch.SymInt, position: tuple[int, int]) -> int:
        if self.stack and self.loops[self.stack[-1][0]].position == position:
            return self.stack[-1][0]  # in lockstep with a loop from the same line, as in `zip`
        iterations = self._iteration_count(count)
        self.loops.append(SymbolicLoop(count, iterations, caller(), position))
        return len(self.loops) - 1

    def _iteration_count(self, count: torch.SymInt, target: int | None = None) -> int:
        """Return how many iterations to run; ResizeError with a better size if it is unsuitable."""
        hints = self.shapes.backed_var_to_val
        expr = self.shapes.in_named_sizes(count.node.expr)

        def count_at(symbol: sympy.Symbol, size: int) -> int:
            return int(expr.xreplace({**hints, symbol: sympy.Integer(size)}))

        iterations = int(expr.xreplace(hints))
        if target or (self.raised is not None and not _MIN_ITERATIONS <= iterations <= _MAX_ITERATIONS):
            for symbol in sorted(expr.free_symbols, key=str):
                size = int(hints[symbol])
                if (
                    not target
                    and self.raised
                    and iterations > _MAX_ITERATIONS
                    and self.shapes.names[symbol] in self.raised
                ):
                    continue  # another loop would have too few iterations
                period = _period(lambda n, symbol=symbol: count_at(symbol, n), size)  # type: ignore[misc]
                if period is None:
                    continue
                candidate = size + period * ((target or _DEFAULT_ITERATIONS) - iterations)
                used = {n for s, n in hints.items() if s != symbol}
                while candidate < 2 or candidate in used:  # sizes stay in general position
                    candidate += period
                raise ResizeError(self.shapes.names[symbol], candidate)
        return iterations

    def next_sizes(self) -> dict[str, int]:
        """Return sizes that give each loop one more iteration; UnsupportedError if there are none."""
        sizes: dict[str, int] = {}
        for loop in self.loops:
            try:
                self._iteration_count(loop.count, target=loop.iterations + 1)
            except ResizeError as error:
                sizes[error.name] = max(error.size, sizes.get(error.name, 0))
            else:
                raise self.fold_error("has an iteration count that does not grow linearly with it")
        return sizes

    def _enter_iteration(self, number: int, k: int) -> None:
        if (number, k) in self.stack:
            return
        while self.stack and self.stack[-1][0] >= number:
            self.stack.pop()
        self.stack.append((number, k))
        self._notify()

    def _end(self, number: int) -> None:
        if any(n == number for n, _ in self.stack):
            while self.stack and self.stack[-1][0] >= number:
                self.stack.pop()
            self._notify()

    def _notify(self) -> None:
        late = any(k for _, k in self.stack)
        self.shapes.iteration = tuple((self.loops[number].line, k) for number, k in self.stack) if late else ()
        self.note(self.path)

    def fold_error(self, why: str) -> UnsupportedError:
        """Return the error for loops that cannot be folded."""
        lines = ", ".join(dict.fromkeys(loop.line for loop in self.loops))
        return UnsupportedError(
            f"{lines}: iterates over a size, and {why}; leave this axis unnamed (None) to keep it a number, or "
            f"trace with fixed='given'"
        )

    def find_join(self, parts: Sequence[torch.Tensor]) -> ListSlice | None:
        """Return the longest part of a list with one result per iteration of a loop; None without one."""
        path = self.path
        depth = len(path)
        tags = [t.__dict__.get(_ITERATION, ()) for t in parts]
        current = [tag[depth] if tag[:depth] == path and len(tag) > depth else (-1, -1) for tag in tags]
        # inner loops, which each iteration runs
        inner = [[iteration for _, iteration in tag[depth + 1 :]] for tag in tags]
        longest: ListSlice | None = None
        for i, (number, iteration) in enumerate(current):
            for step in (1, -1):
                j = i
                while current[j + 1 : j + 2] == [(number, iteration + step * (j + 1 - i))] and inner[j + 1] == inner[i]:
                    if not _alike(parts[i], parts[j + 1]):
                        break
                    j += 1
                if number >= 0 and j + 1 - i >= max(FEWEST, 0 if longest is None else longest.last - longest.first + 1):
                    loop = self.loops[number]
                    longest = ListSlice(number, i, j + 1, loop.count - (loop.iterations - (j + 1 - i)), step < 0)
        return longest

    @contextmanager
    def patching_range(self) -> Iterator[None]:
        """Patch `range` to accept symbolic sizes."""
        loops = self

        class Kind(type):
            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, _numbers) or type.__instancecheck__(cls, value)

        class Numbers(metaclass=Kind):
            def __new__(cls, *args: Any) -> Any:
                return loops.range(*args) if any(isinstance(a, torch.SymInt) for a in args) else _numbers(*args)

        with patch.object(builtins, "range", Numbers):
            self.on = True
            try:
                yield
            finally:
                self.on = False

    def parts(self, x: torch.Tensor, axis: int = 0, size: int | None = None, *, reverse: bool = False) -> Parts | None:
        """Return the chunks of a tensor along an axis, or its positions; None if their number is not symbolic."""
        axis %= max(x.ndim, 1)
        if not self.is_symbolic(x.shape[axis]) or (size is not None and x.shape[axis] % size != 0):
            return None
        views = Parts()
        views.loops, views.x, views.axis, views.size, views.reverse = self, x, axis, size, reverse
        return views

    def range(self, *args: Any) -> Any:
        """Return a `range` of symbolic arguments."""
        start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
        if isinstance(step, int) and step:
            length, stride = (stop - start, step) if step > 0 else (start - stop, -step)
            if stride != 1 and self.is_symbolic(length):
                length = length // stride if length % stride == 0 else (length + stride - 1) // stride
            if self.is_symbolic(length):
                return Range(self, start, step, length)
        for n in args:
            expr = self.shapes.in_named_sizes(n.node.expr) if isinstance(n, torch.SymInt) else sympy.Integer(0)
            if expr.free_symbols and expr.free_symbols <= self.shapes.names.keys():
                self.shapes.specialize(expr)  # the program itself asks for the number
        return _numbers(*args)


class Range:
    """A range of symbolic length."""

    def __init__(self, loops: Loops, start: Any, step: int, count: torch.SymInt) -> None:
        self.loops, self.start, self.step, self.count = loops, start, step, count

    def __iter__(self) -> Iterator[Any]:
        for k in self.loops.iterate(self.count):
            yield self.start + k * self.step

    def __reversed__(self) -> Iterator[Any]:
        last = self.start + (self.count - 1) * self.step
        return iter(Range(self.loops, last, -self.step, self.count))

    def __len__(self) -> int:
        return int(self.count)


class Parts(tuple[torch.Tensor, ...]):
    """Consecutive views of a tensor along an axis, one per iteration of a loop over them."""

    loops: Loops
    x: torch.Tensor
    axis: int
    size: int | None
    """length along the axis; None for views without it"""
    reverse: bool
    """whether they are in reverse order"""

    def part(self, k: Any) -> torch.Tensor:
        """Return the k-th view."""
        k = self.count - 1 - k if self.reverse else k
        if self.size is None:
            return self.x.select(self.axis, k)
        return self.x.narrow(self.axis, k * self.size, self.size)

    @property
    def count(self) -> Any:
        """Number of views."""
        return self.x.shape[self.axis] // (self.size or 1)

    def __len__(self) -> int:
        return int(self.count)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[torch.Tensor]:
        for k in self.loops.iterate(self.count):
            yield self.part(k)

    def __reversed__(self) -> Iterator[torch.Tensor]:
        return iter(self[::-1])

    def __getitem__(self, k: Any) -> Any:
        if not isinstance(k, slice):
            return self.part(k if k >= 0 else self.count + k)
        if k == slice(None, None, -1):
            return self.loops.parts(self.x, self.axis, self.size, reverse=not self.reverse)
        if self.reverse or k.step not in (None, 1):
            return tuple.__getitem__(tuple(self.part(i) for i in _numbers(len(self))), k)
        first, last = (n if n is None or self.size is None else n * self.size for n in (k.start, k.stop))
        cut = self.x[(*[slice(None)] * self.axis, slice(first, last))]
        return self.loops.parts(cut, self.axis, self.size)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _period(count: Callable[[int], int], size: int) -> int | None:
    """Return the increase of a size that adds one iteration; None if that is not constant."""
    for step in _numbers(1, 1 << 13):
        if all(count(size + k * step) == count(size) + k for k in (1, 2, 3, 5, 8, 64)):
            return step
    return None


# -- integers ----------------------------------------------------------------------------------------------------------
# `int(n)`, `float(n)` and `len(x)` keep a named size symbolic. CPython restricts their results to plain numbers, so
# these names are shadowed in the program's files during a run, where a size also passes for an `int`.

_type = type
#: torch modules that compute sizes with these functions.
_TORCH_MODULES = ("torch.nn.functional",)


class _Shadow:
    """Stands in for a builtin type: calls accept symbolic sizes, all else goes to the type."""

    def __init__(self, builtin: type, call: Callable[..., Any], symbols: type | None) -> None:
        self.__dict__.update({"_plain": builtin, "_call": call, "_symbols": symbols, "__name__": builtin.__name__})

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


def _as_int(*args: Any, **kwargs: Any) -> Any:
    """Return `int(...)`; a size is returned unchanged."""
    if len(args) == 1 and not kwargs:
        args = (_item(args[0]),)
        if is_a(args[0], torch.SymInt):
            return args[0]
        if is_a(args[0], torch.SymFloat):
            return math.trunc(args[0])
    return int(*args, **kwargs)


def _as_float(*args: Any) -> Any:
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


_INT = _Shadow(int, _as_int, torch.SymInt)
_FLOAT = _Shadow(float, _as_float, torch.SymFloat)


def _type_of(*args: Any, **kwargs: Any) -> Any:
    """Return `type(...)`, such that `type(n) is int` holds where `int` is shadowed."""
    kind = _type(*args, **kwargs)
    if len(args) == 1:
        return _INT if kind in (int, torch.SymInt) else _FLOAT if kind in (float, torch.SymFloat) else kind
    return kind


_SHADOWS: dict[str, Any] = {"int": _INT, "float": _FLOAT, "len": _length, "type": _Shadow(_type, _type_of, None)}


def _program_globals(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the globals of the program's modules."""
    namespaces = [vars(m) for m in list(sys.modules.values()) if is_a(m, types.ModuleType)]
    for kind in {cls for part in module.modules() for cls in _type(part).__mro__}:  # a file outside `sys.modules`
        namespaces += [f.__globals__ for f in vars(kind).values() if is_a(f, types.FunctionType)]
    visited = set[int]()
    for names in namespaces:
        name = names.get("__name__")
        if id(names) not in visited and (is_program_module(name) or name in _TORCH_MODULES):
            visited.add(id(names))
            yield names


def _divmod(a: Any, b: Any) -> tuple[Any, Any]:
    return a // b, a % b


def _formatted(size: torch.SymInt, spec: str) -> str:
    """Return a size as text; a format specification needs its value."""
    return format(int(size.node.hint), spec) if spec else str(size)


@contextmanager
def open_integers(module: nn.Module) -> Iterator[None]:
    """Make Python's integer functions accept symbolic sizes in a program's files."""
    methods = {"__divmod__": _divmod, "__rdivmod__": lambda a, b: _divmod(b, a), "__format__": _formatted}
    with ExitStack() as replaced:
        for name, method in methods.items():
            replaced.enter_context(patch.object(torch.SymInt, name, method, create=True))
        for names in _program_globals(module):
            for name, shadow in _SHADOWS.items():
                builtin = getattr(builtins, name)
                if names.get(name, builtin) is builtin:
                    replaced.callback(_restore, names, name, names.get(name))
                    names[name] = shadow
        yield


def _restore(names: dict[str, Any], name: str, before: Any) -> None:
    if before is None:
        names.pop(name, None)
    else:
        names[name] = before
