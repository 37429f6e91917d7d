"""Find number formats that a program fixes, as opposed to those that follow the model's.

In fp32, a cast to fp32 is a no-op, and a table created in fp32 is indistinguishable from one in the model's format. A
second run in another format separates them: tensors that are fp32 there too have a fixed format.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn import functional

from .recorder import FormatAssertion, Recorder
from .state import swap

__all__ = ["Formats", "narrowed"]

_CASTS = frozenset({
    Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as,
})  # fmt: skip
#: Functions that cast their operand to a given dtype first.
_CASTING = frozenset({
    torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax, functional.softmax, functional.log_softmax,
})  # fmt: skip
#: Model format in which casts are tracked, and the format of the second run.
_WIDE, _NARROW = torch.float32, torch.bfloat16
#: Frames between `Module._apply` and its casts.
_FRAMES = 12


@dataclass(eq=False)
class Formats:
    """Number formats stated in a run, call by call; the recorder notes the events."""

    recorder: Recorder
    calls: list[tuple[str, torch.dtype | None]] = field(default_factory=list)
    """each call that states a format, and the dtype of its result"""
    casts: list[tuple[int, FormatAssertion]] = field(default_factory=list)
    """recorded casts, with the index of their call"""
    replaced: bool = False
    """whether a function was replaced, since it does not accept symbolic sizes"""

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function."""
        if func in _CASTS:
            return self._cast(func, args, kwargs)
        if func in _CASTING:
            dtype = next((v for v in (*args[1:], *kwargs.values()) if isinstance(v, torch.dtype)), None)
            if dtype is not None and args and args[0].is_floating_point():
                args = (self._record_cast(func, args[0], dtype), *args[1:])
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.is_floating_point() and not _reads_floats(args, kwargs):
            self._record_new(func, out)
        return out

    def _cast(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        x = args[0]
        if func in (Tensor.to, Tensor.type) and not _states(args[1:], kwargs):
            return out
        if not x.is_floating_point():
            self._record_new(func, out)
            return out
        return self._record_cast(func, x, out.dtype) if out is x else self._record_call(func, out)

    def _record_call(self, func: Any, out: Any) -> Any:
        self.calls.append((func.__name__, out.dtype if isinstance(out, Tensor) else None))
        return out

    def _record_cast(self, func: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Record a cast to `dtype`; a no-op cast returns a separate tensor of the same layout.

        Tensors with a gradient are returned as they are, since a separate tensor would have none. So are the parameters
        and buffers of a module that is converted as a whole, which must stay the same objects.
        """
        self.calls.append((func.__name__, dtype))
        if x.dtype != dtype or dtype != _WIDE or _is_empty(x) or (x.requires_grad and torch.is_grad_enabled()):
            return x
        if _converts_a_module():
            return x
        separate = self._separate_storage(x)
        self.casts.append((len(self.calls) - 1, self.recorder.record_cast(x, separate)))
        return separate

    def _separate_storage(self, x: Tensor) -> Tensor:
        """Return a tensor of the same layout in a storage of its own."""
        offset = x.storage_offset()
        numel = offset + sum(((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)), start=1)
        with self.recorder.pausing():
            out = x.new_empty([numel]).as_strided(x.shape, x.stride(), offset)
        self.recorder.data.note(torch.ops.aten.clone.default, (x,), {}, out)
        return out

    def _record_new(self, func: Any, out: Tensor) -> None:
        self._record_call(func, out)
        if out.dtype == _WIDE and not _is_empty(out):
            self.casts.append((len(self.calls) - 1, self.recorder.record_cast(out, out)))

    def settle(self, other: Formats) -> bool:
        """Decide which casts have a fixed format, by the run in another one; return False if its calls differ."""
        if [name for name, _ in self.calls] != [name for name, _ in other.calls]:
            return False
        for number, event in self.casts:
            event.fixed = other.calls[number][1] == _WIDE
        return True


def narrowed(tensors: Iterable[Tensor], arguments: Mapping[str, object]) -> dict[str, object]:
    """Convert fake tensors to the other format in place; return the converted arguments."""

    def narrow(value: Any) -> Any:
        return value.to(_NARROW) if isinstance(value, Tensor) and value.dtype == _WIDE else value

    for t in tensors:
        converted = narrow(t)
        if converted is not t:
            swap(
                t, nn.Parameter(converted, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else converted
            )
    return {name: narrow(value) for name, value in arguments.items()}


def _converts_a_module() -> bool:
    """Whether the cast comes from `Module.to` or another conversion of a module."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code is nn.Module._apply.__code__:
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def _is_empty(x: Tensor) -> bool:
    """Whether a tensor is known to be empty; unknown for data-dependent sizes."""
    return bool(guard_or_false(x.numel() == 0))


def _states(args: Any, kwargs: Any) -> bool:
    """Whether an argument states a format, by itself or as a tensor of that format."""
    return any(isinstance(v, torch.dtype | str | Tensor) for v in (*args, *kwargs.values()) if not _is_device(v))


def _is_device(value: object) -> bool:
    return isinstance(value, str) and not value.startswith("torch.")


def _reads_floats(args: Any, kwargs: Any) -> bool:
    return any(t.is_floating_point() or t.is_complex() for t in _tensors((*args, *kwargs.values())))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
