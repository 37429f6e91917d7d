"""What a rule for an aten op sees of one call: its arguments by the names of torch's schema, with symbolic sizes."""

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
    """A tensor as a rule sees it."""

    sizes: Sizes
    """shape"""
    strides: Sizes
    """elements between neighbours along each axis"""
    dtype: DType
    """number format"""

    @property
    def numel(self) -> Poly:
        """Number of index points."""
        return numel(self.sizes)

    @property
    def touched(self) -> Poly:
        """Different elements: an expanded axis repeats the same ones."""
        return distinct(self.sizes, self.strides)

    @property
    def bytes(self) -> Poly:
        """Bytes of the different elements."""
        return self.touched * self.dtype.bytes


@dataclass(frozen=True)
class Call:
    """One call of an aten op."""

    name: str
    """Name without overload and without the underscore of an op in place, such as `add` for `aten.add_.Tensor`."""
    overload: str
    """Name of the overload, such as `Tensor`."""
    inplace: bool
    """Whether it writes into an operand."""
    arguments: Mapping[str, Any]
    """Arguments by the names of torch's schema, defaults filled in: tensors as Spec, sizes as Poly or int."""
    results: tuple[Spec, ...]
    """The tensors that it returns, those of lists one by one."""
    device: str = "cpu"
    """What it runs on: kernels take their workspace by it."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """Return an argument, None where the schema has none of that name."""
        return self.arguments.get(name)

    @property
    def operands(self) -> tuple[Spec, ...]:
        """Tensor arguments in the order of the schema, those of lists one by one."""
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
    """What one call costs: `costgraph.ops.rules.Flops`, and bytes where they are not those of whole tensors."""

    reads: Sequence[Poly] | None = None
    """bytes read of each tensor argument, as `Call.operands` lists them, None for each of them whole"""
    writes: Sequence[Poly] | None = None
    """bytes written of each result, or, of an op that returns none, of each tensor that its schema says it writes and
    that holds anything; None for each of them whole"""
    workspace: Poly = ZERO
    """bytes that the kernel needs while it runs, beside operands and results"""


# -- values ------------------------------------------------------------------------------------------------------------
# What torch's arguments are in a rule and in a graph: sizes as formulas, tensors by their place.

_FORMATS: dict[torch.dtype, DType] = {}


def format_of(dtype: torch.dtype) -> DType:
    """Return the number format of torch's dtype."""
    found = _FORMATS.get(dtype)
    if found is None:
        try:
            found = _FORMATS[dtype] = find_dtype(str(dtype).removeprefix("torch."))
        except FormatError:
            raise UnsupportedError(f"{dtype}: the library has no such number format, expected another one") from None
    return found


class Values:
    """Converts arguments of calls."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator

    def spec(self, t: torch.Tensor) -> Spec:
        """Return what a rule sees of a tensor."""
        return Spec(*self.translator.layout(t), format_of(t.dtype))

    def seen(self, value: Any, tensor: Callable[[torch.Tensor], Any]) -> Any:
        """Return an argument with sizes as formulas, number formats as the library's, and tensors as they are told."""
        if isinstance(value, torch.Tensor):
            return tensor(value)
        if isinstance(value, torch.SymInt):
            return self.translator.size(value)
        if isinstance(value, tuple | list):
            return tuple(self.seen(v, tensor) for v in value)
        if isinstance(value, torch.dtype):
            return format_of(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            return self._number(value)
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
        raise UnsupportedError(f"argument {value!r} of type {type(value).__name__}: expected a tensor or a number")

    def _number(self, value: torch.SymFloat | torch.SymBool) -> Any:
        """Return a factor as a formula of sizes, else as it was in the run: nothing that costs depends on its value."""
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
