"""What is validated: a subject at some sizes, and the program of torch that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import nn

from ...notation.door import Rule
from ...notation.records import Size, one_of

__all__ = ["Case", "Function", "Program"]

Make = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """One line of the suite: what is declared and run, at which sizes, with which settings.

    Examples
    --------
    >>> case = Case("matmul", {"M": 64, "K": 128, "N": 256}, dtype="bf16")
    >>> case.name, case.mode
    ('matmul bf16 M=64 K=128 N=256', 'kernel')
    """

    subject: str
    """which of `SUBJECTS`"""
    sizes: Annotated[Mapping[str, Size], Rule("sizes by name", bool)] = field(hash=False)
    """of every dimension"""
    dtype: str = "fp32"
    """number format that is declared"""
    mode: Annotated[str, one_of(("kernel", "forward", "step"))] = "kernel"
    """kernel, forward or step"""
    attention: str = ""
    """flash or eager, of a model that attends"""
    optimizer: str = ""
    """of a step, as the library calls it: AdamW"""
    implementation: str = ""
    """of the optimizer: for-loop, foreach or fused"""
    precision: str = ""
    """policy of a step; none keeps the format that is declared"""
    checkpoint: str = ""
    """what a step computes again; nothing by default"""
    program: str = "module"
    """what runs: a module of plain torch, or the lowered graph where torch has no such policy"""

    @property
    def name(self) -> str:
        """Words that tell the case from all others."""
        more = (self.attention, self.optimizer, self.implementation, self.precision, self.checkpoint)
        lowered = "lowered" if self.program == "lowered" else ""
        kind = "" if self.mode == "kernel" else self.mode
        words = [self.subject, kind, self.dtype, *more, lowered, *(f"{k}={v}" for k, v in self.sizes.items())]
        return " ".join(w for w in words if w)


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Call the function."""
        return self.function(*tensors)


@dataclass
class Program:
    """What torch runs: a module on inputs, or a whole step of training with it."""

    module: nn.Module
    """what is called"""
    inputs: tuple[torch.Tensor, ...]
    """what it is called with"""
    dims: Sequence[Sequence[str | None]] | None
    """names of the axes of each input for a trace; None: nothing is traced"""
    make: Make | None = None
    """makes the optimizer of a step"""
    into: Callable[[], Any] | None = None
    """the same, written into a tensor that is there: a CPU needs longer to get memory than to fill it"""

    def __post_init__(self) -> None:
        self.optimizer = None if self.make is None else self.make(list(self.module.parameters()))

    def __call__(self) -> Any:
        """Run once."""
        if self.optimizer is None:
            with torch.no_grad():
                return self.module(*self.inputs)
        loss = self.module(*self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None

    def clocked(self) -> Any:
        """Run what is held against the clock."""
        if self.into is None:
            return self()
        with torch.no_grad():
            return self.into()

    def held(self, device: torch.device) -> int:
        """Return the bytes that are there throughout: parameters, buffers, inputs, and the state of the optimizer.

        On CUDA each storage takes whole blocks of 512 B.
        """
        state = [] if self.optimizer is None else [t for s in self.optimizer.state.values() for t in s.values()]
        tensors = [*self.module.parameters(), *self.module.buffers(), *self.inputs, *state]
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in tensors
            if isinstance(t, torch.Tensor) and t.device.type == device.type
        }
        block = 512 if device.type == "cuda" else 1
        return sum(-(-n // block) * block for n in storages.values())
