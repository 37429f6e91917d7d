"""A program is told that its tensors are on a GPU, and torch's functions do what they do there.

A build of torch for CPUs makes no node of a backward pass for a tensor of another device, so that the tensors are
those of a CPU below: what torch itself asks the device in C++ is told by the rules here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

from ....errors import UnsupportedError
from . import attention, layers, recurrent, transformer  # noqa: F401  # they fill the table
from .table import RULES, Here

__all__ = ["KERNELS", "on_cuda"]

#: Ops that torch composes for a CPU alone: CUDA has a kernel for them (`CompositeImplicitAutograd` beside `CUDA` and
#: without `CPU` in native_functions.yaml).
KERNELS = frozenset({torch.ops.aten._fused_rms_norm.default})

_HOST = torch.device("cpu")
_SHOWN = torch.device("cuda", 0)
#: What a tensor says of where it is.
_FACTS: dict[Any, Any] = {
    torch.Tensor.device.__get__: _SHOWN,
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]  # torch has no types for it
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]  # torch has no types for it
    torch.Tensor.get_device: 0,
}
#: What asks whether its tensors are special ones, by the file of torch's functions.
_ASKING = (
    (functional, "has_torch_function"), (functional, "has_torch_function_unary"),
    (functional, "has_torch_function_variadic"), (torch._tensor, "has_torch_function_unary"),
    (torch.autograd, "has_torch_function"),
)  # fmt: skip
_TENSORS_WITHOUT_DATA = str(Path(torch.__file__).parent / "_subclasses")


class OnCuda(TorchFunctionMode):
    """Lets functions of torch do what they do on a GPU."""

    unseen = True

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self._again = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            return _FACTS[func]
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple(_below(a, func is torch.Tensor.to) for a in args)
        kwargs = {k: _below(v, k == "device") for k, v in kwargs.items()}
        if torch.is_autocast_enabled("cuda"):
            raise UnsupportedError(
                'torch.autocast("cuda"), whose casts torch makes by the device of a tensor, expected a module in its '
                "formats; trace the module in fp32 and cast the graph with apply_precision"
            )
        found = RULES.get(func)
        made = None if found is None else found(self.here, *args, **kwargs)
        if made is not None:
            return made
        if func in _BACKWARD or _is_functional(func):
            self._again = True  # it asks whether its tensors are special, and would hand itself over to this once more
            with self:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def asking(self, plain: Callable[..., bool]) -> Callable[..., bool]:
        """Return what tells a function of torch that runs again that nothing about its tensors is special."""

        def asked(*tensors: Any) -> bool:
            if self._again:
                self._again = False
                return False
            return plain(*tensors)

        return asked


#: What runs the program again, where it computes something twice.
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _is_functional(func: Any) -> bool:
    """Whether a function consists of others that the rules are asked for; `interpolate` is replaced as a whole."""
    if func is functional.interpolate:
        return False
    return isinstance(func, FunctionType) and func.__module__ == functional.__name__


def _device(plain: property) -> property:
    """Return the property of tensors without data that says where they are: below the recorder, on a CPU."""

    def device(self: FakeTensor) -> Any:
        assert plain.fget is not None
        return plain.fget(self) if torch._C._is_torch_function_all_disabled() else _SHOWN

    return property(device)


def _below(value: Any, name: bool) -> Any:
    """Return an argument as tensors without data have it: where a device stands, that of a CPU."""
    if isinstance(value, torch.device):
        return _HOST if value.type == "cuda" else value
    return _HOST if name and isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _available(plain: Callable[[], bool]) -> Callable[[], bool]:
    def asked() -> bool:
        inside = sys._getframe(1).f_code.co_filename.startswith(_TENSORS_WITHOUT_DATA)
        return plain() if inside else True

    return asked


@contextmanager
def on_cuda(here: Here) -> Iterator[None]:
    """Let a program run as on a GPU."""
    mode = OnCuda(here)
    arch = here.arch
    answers: dict[str, Callable[..., Any]] = {
        "is_available": _available(torch.cuda.is_available),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or arch.major >= 8,
        "get_device_capability": lambda device=None: (arch.major, arch.minor),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    with ExitStack() as replaced:
        for name, answer in answers.items():
            replaced.enter_context(patch.object(torch.cuda, name, answer))
        for place, name in _ASKING:
            replaced.enter_context(patch.object(place, name, mode.asking(getattr(place, name))))
        replaced.enter_context(patch.object(FakeTensor, "device", _device(vars(FakeTensor)["device"])))
        # an optimizer goes by lists of tensors where all of them are ordinary ones on a GPU
        kinds = [*optimizers._foreach_supported_types, FakeTensor]
        replaced.enter_context(patch.object(optimizers, "_foreach_supported_types", kinds))
        replaced.enter_context(mode)
        yield
