"""A call of an aten op as cost rules and translations see it: arguments by schema name, sizes as formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...algebra.polynomial import ZERO, Poly
from ...dtypes import DType
from ...dtypes import dtype as find_dtype
from ...errors import CostGraphError, FormatError, UnsupportedError
from ...ir.strides import Sizes, distinct, numel
from ...ops.rules import Flops
from .sizes import Translator

__all__ = [
    "Call",
    "Counts",
    "Spec",
    "Values",
    "format_of",
    "number_of",
]


# -- call --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A tensor's shape, strides and dtype."""

    sizes: Sizes
    """shape"""
    strides: Sizes
    """strides in elements"""
    dtype: DType
    """number format"""

    @property
    def numel(self) -> Poly:
        """Number of index points."""
        return numel(self.sizes)

    @property
    def touched(self) -> Poly:
        """Number of distinct elements: expanded axes repeat theirs."""
        return distinct(self.sizes, self.strides)

    @property
    def bytes(self) -> Poly:
        """Bytes of the distinct elements."""
        return self.touched * self.dtype.bytes


@dataclass(frozen=True)
class Call:
    """One call of an aten op."""

    name: str
    """Name without overload and in-place underscore, such as `add` for `aten.add_.Tensor`."""
    overload: str
    """Name of the overload, such as `Tensor`."""
    inplace: bool
    """Whether it writes into an operand."""
    arguments: Mapping[str, Any]
    """Arguments by schema name, defaults included: tensors as Spec, sizes as Poly or int."""
    results: tuple[Spec, ...]
    """Returned tensors, with lists flattened."""
    device: str = "cpu"
    """Device type, which decides kernel workspaces."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """Return an argument, None if the schema has none of that name."""
        return self.arguments.get(name)

    @property
    def operands(self) -> tuple[Spec, ...]:
        """Tensor arguments in schema order, with lists flattened."""
        return tuple(_specs(self.arguments.values()))

    @property
    def out(self) -> Spec:
        """The first result."""
        return self.results[0]


def _specs(values: Any) -> Iterator[Spec]:
    for value in values:
        if isinstance(value, Spec):
            yield value
        elif isinstance(value, tuple | list):
            yield from _specs(value)


@dataclass
class Counts(Flops):
    """Costs of a call: `costgraph.ops.rules.Flops`, and bytes where tensors are not accessed whole."""

    reads: Sequence[Poly] | None = None
    """bytes read per tensor argument, in the order of `Call.operands`; None if each is read whole"""
    writes: Sequence[Poly] | None = None
    """bytes written per result or, for an op that returns none, per nonempty tensor that its schema writes; None if
    each is written whole"""
    workspace: Poly = ZERO
    """temporary bytes in the kernel"""


# -- values ------------------------------------------------------------------------------------------------------------
# Convert torch's arguments: sizes to formulas, dtypes to the library's, tensors by a given function.

_FORMATS: dict[torch.dtype, DType] = {}


def format_of(dtype: torch.dtype) -> DType:
    """Return the number format for a torch dtype."""
    number_format = _FORMATS.get(dtype)
    if number_format is None:
        try:
            number_format = _FORMATS[dtype] = find_dtype(str(dtype).removeprefix("torch."))
        except FormatError:
            raise UnsupportedError(f"number format {dtype} is not supported") from None
    return number_format


class Values:
    """Converts call arguments."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator

    def spec(self, t: torch.Tensor) -> Spec:
        """Return a tensor's spec."""
        return Spec(*self.translator.layout(t), format_of(t.dtype))

    def convert(self, value: Any, tensor: Callable[[torch.Tensor], Any]) -> Any:
        """Convert an argument; `tensor` converts the tensors in it."""
        if isinstance(value, torch.Tensor):
            return tensor(value)
        if isinstance(value, torch.SymInt):
            return self.translator.size(value)
        if isinstance(value, tuple | list):
            return tuple(self.convert(v, tensor) for v in value)
        if isinstance(value, torch.dtype):
            return format_of(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            return self._symbolic_number(value)
        if isinstance(value, torch.device):
            return {"torch": "device"}
        if isinstance(value, torch.memory_format | torch.layout):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, complex):
            return {"torch": f"{value.real!r} {value.imag!r}"}  # `number_of` reads it
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Generator):
            return None
        raise UnsupportedError(f"argument {value!r} of type {type(value).__name__} is neither a tensor nor a number")

    def _symbolic_number(self, value: torch.SymFloat | torch.SymBool) -> Any:
        """Return a number as a formula of sizes, else its value in the run, on which no cost depends."""
        if not value.node.has_hint():
            return {"torch": "data"}
        if isinstance(value, torch.SymFloat):
            with suppress(CostGraphError):
                return self.translator.formula(value.node.expr)
        return value.node.hint


def number_of(value: Any) -> Any:
    """Decode a complex number; other arguments are returned unchanged."""
    parts = value.get("torch", "").split() if isinstance(value, dict) else ()
    return complex(*map(float, parts)) if len(parts) == 2 else value
