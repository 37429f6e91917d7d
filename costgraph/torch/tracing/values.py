"""What torch's arguments are in a rule and in a graph: sizes as formulas, tensors by their place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ...dtypes import DType
from ...dtypes import dtype as find_dtype
from ...errors import CostGraphError, FormatError, UnsupportedError
from .call import Spec
from .sizes import Translator

__all__ = ["Values", "format_of", "number_of"]

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
