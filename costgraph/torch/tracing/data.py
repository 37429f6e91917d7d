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
_QUERIES = (aten._local_scalar_dense.default, aten.equal.default)
#: Ops that fill a new tensor shaped like their operand, whose values are not needed, and the fill value.
_FILL_VALUES: dict[Any, int | float] = {
    aten.ones_like.default: 1, aten.new_ones.default: 1, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
}  # fmt: skip
#: Ops whose result has the same values as their operand, in another format or place.
_VALUE_PRESERVING = (aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default)
_PRODUCER_ATTRIBUTE = "_costgraph_producer"  # tensor attribute with the producer's name
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MAX_ELEMENTS = 1 << 24  # most elements to evaluate
_VALUE_ATTRIBUTE = "_costgraph_value"  # fake-tensor attribute with its `_Value`
#: Sizes at which an answer is checked again, since it may depend on them, as `positions.max() > 2048` does.
_OTHER_SIZES = (2, 3, 5, 8, 13, 64, 257, 1 << 10, 1 << 13, 1 << 17)


def _elements(args: Any) -> Any:
    return args[0].numel()


def _masked(args: Any) -> Any:
    """Return the element count of the mask in an index."""
    return next((t.numel() for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)), None)


#: Ops with data-dependent sizes: the size's name stem, and its upper bound.
_DATA_DEPENDENT_SIZES: dict[Any, tuple[str, Callable[[Any], Any]]] = {
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
    index: int | None = None
    """index among the op's results, if it has several"""
    from_input: bool = False
    """whether the values derive from an input"""
    version: int = 0
    """version counter of the tensor when noted"""


class Data:
    """Known tensor values in a run."""

    def __init__(self, shapes: Shapes, choose: Mapping[str, float] = MappingProxyType({})) -> None:
        self.shapes, self.choose = shapes, choose
        self.real_data: Callable[[torch.Tensor], torch.Tensor | None] = lambda t: None
        """Returns the real data of a borrowed tensor."""

    def declare(self, t: torch.Tensor, real: torch.Tensor) -> None:
        """Register an input's values, if it is integer or boolean."""
        borrowed_data = self.real_data(real)  # the program's files may hold it too
        real = real if borrowed_data is None else borrowed_data
        if not t.is_floating_point() and not t.is_complex() and _has_data(real):
            t.__dict__[_VALUE_ATTRIBUTE] = _Value(None, real, None, tuple(map(_formula, t.shape)), from_input=True)

    def note(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Derive the values of an op's results, if its operands' values are known."""
        is_sequence = isinstance(out, tuple | list)
        if op in _FILL_VALUES:
            dtype_argument = {k: kwargs[k] for k in ("dtype",) if k in kwargs} or {"dtype": args[0].dtype}
            op, args, kwargs = aten.full.default, (out.shape, _FILL_VALUES[op]), dtype_argument
        tensors = list(_flat((args, kwargs)))
        values = [self._value_of(t) for t in tensors]
        if None in values or not (tensors or _is_constructor(op)) or op._schema.is_mutable or _is_random(op):
            return
        from_input = any(v.from_input for v in values if v is not None)
        values_by_id = {id(t): v for t, v in zip(tensors, values, strict=True)}
        args, kwargs = _mapped((args, kwargs), lambda t: values_by_id[id(t)])
        for index, t in enumerate(out if is_sequence else [out]):
            if isinstance(t, FakeTensor) and not t.is_inference() and t.constant is None:
                shape = tuple(map(_formula, t.shape))
                t.__dict__[_VALUE_ATTRIBUTE] = _Value(
                    op, args, kwargs, shape, index if is_sequence else None, from_input, t._version
                )

    def answer(self, op: Any, args: Any) -> Any:
        """Return the number or boolean that a program reads; None if unknown."""
        if op not in _QUERIES:
            return None
        value = self._known_answer(op, args)
        name = "equal" if op is aten.equal.default else self.producer_of(args[0])
        return self.choose.get(name) if value is None else value

    def note_producer(self, op: Any, args: Any, out: Any) -> None:
        """Note the producer of a tensor, which views and casts keep, and name its data-dependent sizes."""
        tensors = [t for t in _flat(args) if _PRODUCER_ATTRIBUTE in t.__dict__]
        keeps_producer = op.is_view or op in _VALUE_PRESERVING
        name = op._schema.name.removeprefix("aten::").strip("_")
        producer = tensors[0].__dict__[_PRODUCER_ATTRIBUTE] if keeps_producer and tensors else name
        stem, upper_bound = _DATA_DEPENDENT_SIZES.get(op, ("", None))
        for t in _flat(out):
            t.__dict__[_PRODUCER_ATTRIBUTE] = producer
            if upper_bound is not None:
                self.shapes.name_data_sizes(stem, t.shape, upper_bound(args))

    def note_read(self, t: torch.Tensor, number: Any) -> None:
        """Note the producer of the tensor from which a program reads an unknown number."""
        for symbol in number.node.expr.free_symbols if isinstance(number, _NUMBERS) else ():
            self.shapes.read_numbers.setdefault(symbol, self.producer_of(t))
        self.shapes.name_data_sizes(self.producer_of(t), [number])

    def producer_of(self, t: torch.Tensor) -> str:
        """Return the name of the op that produced a tensor, or `item` without one."""
        return str(t.__dict__.get(_PRODUCER_ATTRIBUTE, "item"))

    def _known_answer(self, op: Any, args: Any) -> Any:
        """Answer an op that reads data, before `choose`; None if it is unknown."""
        if op is aten.equal.default:
            a, b = args
            if a is b or (
                _same_memory(a, b) and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
            ):
                return True
            if a.shape != b.shape:
                return False
        values = [self._value_of(t) for t in _flat(args)]
        if None in values:
            return None
        query = _Value(op, tuple(values), {}, (), from_input=any(v.from_input for v in values if v is not None))
        try:
            result = self._evaluate(query, self.shapes.backed_var_to_val)
        except (_UnknownError, RecursionError):
            return None
        if query.from_input and not isinstance(result, bool):
            return None  # numbers derived from an input do not specialize the trace
        for size in sorted(_sizes(query, self.shapes), key=str):
            if any(other != result for other in self._answers_at_other_sizes(query, size)):
                self.shapes.specialize(size)
        return result

    def _answers_at_other_sizes(self, query: _Value, size: sympy.Symbol) -> Iterator[Any]:
        """Yield the answers at other sizes."""
        hints = self.shapes.backed_var_to_val
        for other in dict.fromkeys((*_OTHER_SIZES, hints[size] - 1, hints[size] + 1, 2 * hints[size])):
            try:
                yield self._evaluate(query, {**hints, size: sympy.Integer(other)})
            except (_UnknownError, RuntimeError, IndexError, ValueError):
                continue  # the size is invalid, or the values are unknown

    def _value_of(self, t: torch.Tensor) -> _Value | None:
        value = t.__dict__.get(_VALUE_ATTRIBUTE)
        if value is not None:
            return value if value.version == t._version else None
        real = self.real_data(t) if isinstance(t, FakeTensor) else t
        if real is None and isinstance(t, FakeTensor):
            real = t.constant
        elif real is None or isinstance(real, nn.Parameter) or t._version > (0 if real is not t else t._version):
            return None
        return None if real is None or not _has_data(real) else _Value(None, real, None, tuple(real.shape))

    def _evaluate(self, value: _Value, sizes: Mapping[sympy.Symbol, Any]) -> Any:
        """Evaluate a value at the given sizes."""
        evaluated: dict[int, Any] = {}

        def number(size: Any) -> Any:
            expr = self.shapes.in_named_sizes(size).xreplace(dict(sizes))
            return int(expr) if expr.is_integer else bool(expr) if expr.is_Boolean else float(expr)

        def evaluate(v: _Value) -> Any:
            if id(v) not in evaluated:
                shape = [number(n) if isinstance(n, sympy.Basic) else n for n in v.shape]
                if sympy.prod(shape) > _MAX_ELEMENTS:
                    raise _UnknownError
                if v.op is None:
                    evaluated[id(v)] = _extended(v.args, shape)
                else:
                    args, kwargs = _mapped((v.args, v.kwargs), evaluate, number)
                    evaluated[id(v)] = v.op(
                        *args, **{k: a for k, a in kwargs.items() if k not in ("device", "pin_memory")}
                    )
            return evaluated[id(v)] if v.index is None else evaluated[id(v)][v.index]

        with _disable_current_modes(), torch.no_grad():
            return evaluate(value)

    @contextmanager
    def hide_fake_tensors(self) -> Iterator[None]:
        """Hide from `isinstance` that tensors are fake, except integer and boolean ones with unknown values."""

        class Kind(type):
            def __instancecheck__(cls, value: object) -> bool:
                if not isinstance(value, FakeTensor) or sys._getframe(1).f_code.co_filename.startswith(TORCH):
                    return isinstance(value, FakeTensor)
                return not value.is_floating_point() and self._value_of(value) is None

        original = torch._subclasses.FakeTensor
        torch._subclasses.FakeTensor = Kind("FakeTensor", (), {})  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            torch._subclasses.FakeTensor = original  # type: ignore[misc]


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return bool(same and a.storage_offset() == b.storage_offset())


def _has_data(t: torch.Tensor) -> bool:
    return t.device.type != "meta" and not isinstance(t, FakeTensor) and t.layout is torch.strided


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _is_constructor(op: Any) -> bool:
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
    visited: set[int] = set()
    stack: list[Any] = [value]
    while stack:
        v = stack.pop()
        if isinstance(v, _Value):
            if id(v) not in visited:
                visited.add(id(v))
                stack += [v.args, v.kwargs, v.shape]
        elif isinstance(v, tuple | list):
            stack += v
        elif isinstance(v, dict):
            stack += v.values()
        elif isinstance(v, sympy.Basic):
            out |= shapes.in_named_sizes(v).free_symbols
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
