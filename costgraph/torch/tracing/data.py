"""Known values in a run on fake tensors: buffers, integer and boolean inputs, and tensors computed from them.

Programs read such values, for instance whether a mask hides anything, or a window length stored in a buffer. Values
are evaluated lazily: only when one is read does its expression run on real tensors, at the given sizes and at others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .shapes import TORCH, Shapes

__all__ = ["Data"]

aten = torch.ops.aten
#: Ops that return a Python number.
_ASKING = (aten._local_scalar_dense.default, aten.equal.default)
#: Ops that fill a new tensor shaped like their operand, whose values are not needed, and the fill value.
_FILLED: dict[Any, int | float] = {
    aten.ones_like.default: 1, aten.new_ones.default: 1, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
}  # fmt: skip
#: Ops whose result has the same values as their operand, in another format or place.
_FOLLOWING = (aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default)
_MAKER = "_costgraph_maker"  # tensor attribute with the producer's name
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MOST = 1 << 24  # most elements to evaluate
_NAME = "_costgraph_value"  # fake-tensor attribute with its `_Value`
#: Sizes at which an answer is checked again, since it may depend on them, as `positions.max() > 2048` does.
_ELSEWHERE = (2, 3, 5, 8, 13, 64, 257, 1 << 10, 1 << 13, 1 << 17)


def _elements(args: Any) -> Any:
    return args[0].numel()


def _masked(args: Any) -> Any:
    """Return the element count of the mask in an index."""
    return next((t.numel() for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)), None)


#: Ops with data-dependent sizes: the size's name stem, and its upper bound.
_SIZED: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    aten.nonzero.default: ("mask", _elements),
    aten.index.Tensor: ("mask", _masked),
    aten.masked_select.default: ("mask", _elements),
    aten._unique2.default: ("unique", _elements),
    aten.unique_dim.default: ("unique", lambda args: args[0].shape[args[1]]),
    aten.unique_consecutive.default: ("unique", _elements),
    aten.bincount.default: ("bincount", lambda args: None),
    aten.repeat_interleave.Tensor: ("repeated", lambda args: None),
}


class _UnknownError(Exception):
    """Values are unknown, or too many to evaluate."""


@dataclass(eq=False)
class _Value:
    """A tensor's values: real data, or an op on other values."""

    op: Callable[..., Any] | None
    args: Any
    kwargs: Any
    shape: tuple[Any, ...]
    """sizes; torch's expressions where symbolic"""
    place: int | None = None
    """index among the op's results, if it has several"""
    given: bool = False
    """whether the values derive from an input"""
    version: int = 0
    """version counter of the tensor when noted"""


class Data:
    """Known tensor values in a run."""

    def __init__(self, shapes: Shapes, choose: Mapping[str, float] = MappingProxyType({})) -> None:
        self.shapes, self.choose = shapes, choose
        self.held: Callable[[torch.Tensor], torch.Tensor | None] = lambda t: None
        """Returns the real data of a borrowed tensor."""

    def declare(self, t: torch.Tensor, real: torch.Tensor) -> None:
        """Register an input's values, if it is integer or boolean."""
        held = self.held(real)  # the program's files may hold it too
        real = real if held is None else held
        if not t.is_floating_point() and not t.is_complex() and _has_data(real):
            t.__dict__[_NAME] = _Value(None, real, None, tuple(map(_formula, t.shape)), given=True)

    def note(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Derive the values of an op's results, if its operands' values are known."""
        many = isinstance(out, tuple | list)
        if op in _FILLED:
            like = {k: kwargs[k] for k in ("dtype",) if k in kwargs} or {"dtype": args[0].dtype}
            op, args, kwargs = aten.full.default, (out.shape, _FILLED[op]), like
        tensors = list(_flat((args, kwargs)))
        values = [self._of(t) for t in tensors]
        if None in values or not (tensors or _is_maker(op)) or op._schema.is_mutable or _is_random(op):
            return
        given = any(v.given for v in values if v is not None)
        inside = {id(t): v for t, v in zip(tensors, values, strict=True)}
        args, kwargs = _mapped((args, kwargs), lambda t: inside[id(t)])
        for place, t in enumerate(out if many else [out]):
            if isinstance(t, FakeTensor) and not t.is_inference() and t.constant is None:
                shape = tuple(map(_formula, t.shape))
                t.__dict__[_NAME] = _Value(op, args, kwargs, shape, place if many else None, given, t._version)

    def answer(self, op: Any, args: Any) -> Any:
        """Return the number or boolean that a program reads; None if unknown."""
        if op not in _ASKING:
            return None
        found = self._known(op, args)
        name = "equal" if op is aten.equal.default else self.maker(args[0])
        return self.choose.get(name) if found is None else found

    def made(self, op: Any, args: Any, out: Any) -> None:
        """Note the producer of a tensor, which views and casts keep, and name its data-dependent sizes."""
        tensors = [t for t in _flat(args) if _MAKER in t.__dict__]
        follows = op.is_view or op in _FOLLOWING
        name = op._schema.name.removeprefix("aten::").strip("_")
        made = tensors[0].__dict__[_MAKER] if follows and tensors else name
        word, most = _SIZED.get(op, ("", None))
        for t in _flat(out):
            t.__dict__[_MAKER] = made
            if most is not None:
                self.shapes.choosing(word, t.shape, most(args))

    def read(self, t: torch.Tensor, number: Any) -> None:
        """Note the producer of the tensor from which a program reads an unknown number."""
        for free in number.node.expr.free_symbols if isinstance(number, _NUMBERS) else ():
            self.shapes.read.setdefault(free, self.maker(t))
        self.shapes.choosing(self.maker(t), [number])

    def maker(self, t: torch.Tensor) -> str:
        """Return the name of the op that produced a tensor, or `item` without one."""
        return str(t.__dict__.get(_MAKER, "item"))

    def _known(self, op: Any, args: Any) -> Any:
        """Answer an op that reads data, before `choose`; None if it is unknown."""
        if op is aten.equal.default:
            a, b = args
            if a is b or (_same_place(a, b) and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()):
                return True
            if a.shape != b.shape:
                return False
        values = [self._of(t) for t in _flat(args)]
        if None in values:
            return None
        asked = _Value(op, tuple(values), {}, (), given=any(v.given for v in values if v is not None))
        try:
            found = self._at(asked, self.shapes.backed_var_to_val)
        except (_UnknownError, RecursionError):
            return None
        if asked.given and not isinstance(found, bool):
            return None  # numbers derived from an input do not specialize the trace
        for size in sorted(_sizes(asked, self.shapes), key=str):
            if any(other != found for other in self._elsewhere(asked, size)):
                self.shapes.fix(size)
        return found

    def _elsewhere(self, asked: _Value, size: sympy.Symbol) -> Iterator[Any]:
        """Yield the answers at other sizes."""
        now = self.shapes.backed_var_to_val
        for other in dict.fromkeys((*_ELSEWHERE, now[size] - 1, now[size] + 1, 2 * now[size])):
            try:
                yield self._at(asked, {**now, size: sympy.Integer(other)})
            except (_UnknownError, RuntimeError, IndexError, ValueError):
                continue  # the size is invalid, or the values are unknown

    def _of(self, t: torch.Tensor) -> _Value | None:
        found = t.__dict__.get(_NAME)
        if found is not None:
            return found if found.version == t._version else None
        real = self.held(t) if isinstance(t, FakeTensor) else t
        if real is None and isinstance(t, FakeTensor):
            real = t.constant
        elif real is None or isinstance(real, nn.Parameter) or t._version > (0 if real is not t else t._version):
            return None
        return None if real is None or not _has_data(real) else _Value(None, real, None, tuple(real.shape))

    def _at(self, value: _Value, sizes: Mapping[sympy.Symbol, Any]) -> Any:
        """Evaluate a value at the given sizes."""
        known: dict[int, Any] = {}

        def number(size: Any) -> Any:
            free = self.shapes.plain(size).xreplace(dict(sizes))
            return int(free) if free.is_integer else bool(free) if free.is_Boolean else float(free)

        def made(v: _Value) -> Any:
            if id(v) not in known:
                shape = [number(n) if isinstance(n, sympy.Basic) else n for n in v.shape]
                if sympy.prod(shape) > _MOST:
                    raise _UnknownError
                if v.op is None:
                    known[id(v)] = _extended(v.args, shape)
                else:
                    args, kwargs = _mapped((v.args, v.kwargs), made, number)
                    known[id(v)] = v.op(*args, **{k: a for k, a in kwargs.items() if k not in ("device", "pin_memory")})
            return known[id(v)] if v.place is None else known[id(v)][v.place]

        with _disable_current_modes(), torch.no_grad():
            return made(value)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Hide from `isinstance` that tensors are fake, except integer and boolean ones with unknown values."""

        class Kind(type):
            def __instancecheck__(cls, value: object) -> bool:
                if not isinstance(value, FakeTensor) or sys._getframe(1).f_code.co_filename.startswith(TORCH):
                    return isinstance(value, FakeTensor)
                return not value.is_floating_point() and self._of(value) is None

        before = torch._subclasses.FakeTensor
        torch._subclasses.FakeTensor = Kind("FakeTensor", (), {})  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            torch._subclasses.FakeTensor = before  # type: ignore[misc]


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return bool(same and a.storage_offset() == b.storage_offset())


def _has_data(t: torch.Tensor) -> bool:
    return t.device.type != "meta" and not isinstance(t, FakeTensor) and t.layout is torch.strided


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _is_maker(op: Any) -> bool:
    """Whether an op creates a tensor with known values without tensor operands."""
    return op.namespace == "aten" and not op._schema.name.startswith("aten::empty")


def _formula(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


def _flat(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _flat(v)
    elif isinstance(value, dict):
        yield from _flat(tuple(value.values()))


def _mapped(value: Any, tensor: Callable[[Any], Any], size: Callable[[Any], Any] = _formula) -> Any:
    """Map the tensors and sizes in arguments."""
    if isinstance(value, torch.Tensor | _Value):
        return tensor(value)
    if isinstance(value, tuple | list):
        return [_mapped(v, tensor, size) for v in value]
    if isinstance(value, dict):
        return {k: _mapped(v, tensor, size) for k, v in value.items()}
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | sympy.Basic):
        return size(value)
    return value


def _sizes(value: _Value, shapes: Shapes) -> set[sympy.Symbol]:
    """Return the named sizes that a value may depend on."""
    out: set[sympy.Symbol] = set()
    seen: set[int] = set()
    left: list[Any] = [value]
    while left:
        v = left.pop()
        if isinstance(v, _Value):
            if id(v) not in seen:
                seen.add(id(v))
                left += [v.args, v.kwargs, v.shape]
        elif isinstance(v, tuple | list):
            left += v
        elif isinstance(v, dict):
            left += v.values()
        elif isinstance(v, sympy.Basic):
            out |= shapes.plain(v).free_symbols
    return out & shapes.names.keys()


def _extended(t: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return values at another size, if they are constant along each axis that changes."""
    for axis, size in enumerate(shape):
        if t.shape[axis] != size:
            first = t.narrow(axis, 0, min(1, t.shape[axis]))
            if not t.shape[axis] or not torch.equal(t, first.expand_as(t)):
                raise _UnknownError
            t = first.expand(*t.shape[:axis], size, *t.shape[axis + 1 :])
    return t
