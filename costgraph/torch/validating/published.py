"""Programs of plain torch whose times and peaks of memory others have published, traced with symbolic sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedError
from ...graph.graph import Graph
from ..tracing import trace
from .losses import LOSSES
from .program import FORMATS, Program, axes_of, joined, made_of, names_of
from .programs import LAYERS

__all__ = ["UNTRACED", "PROGRAMS", "Program", "benchmarked", "traced"]

#: By the name of the kernel that they are the plain form of.
PROGRAMS: Mapping[str, Program] = {**LAYERS, **LOSSES}
#: Kernels that are not traced, and why.
UNTRACED: Mapping[str, str] = {
    "fused_moe": "which tokens an expert has is up to the data",
    "kto_loss": "which rows of logits are chosen is up to the data",
    "group_norm": "its benchmark ignores the mode that is stated",
}  # fmt: skip


class _Given(torch.autograd.Function):
    """A loss whose gradients by some tensors are given: neither pass costs anything."""

    @staticmethod
    def forward(ctx: Any, *both: torch.Tensor) -> torch.Tensor:
        """Keep the gradients, which are the second half."""
        ctx.save_for_backward(*both[len(both) // 2 :])
        return both[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return what was given."""
        given = ctx.saved_tensors
        return (*given, *(None for _ in given))


def _results(program: Program, found: Any) -> tuple[torch.Tensor, ...]:
    """Return what a backward pass starts from."""
    if program.summed:
        return (found.sum(),)
    return found if isinstance(found, tuple) else (found,)


class _Called(nn.Module):
    """A program as a module that returns a loss."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Call, and start the backward pass from gradients that are given."""
        tensors = tuple(map(joined, [*self.program.tensors.values(), *self.program.made], tensors))
        many = len(self.program.tensors)
        results = _results(self.program, self.program.call(*tensors[:many]))
        if not self.program.made:
            return results[0]
        return _Given.apply(*results, *tensors[many:])  # type: ignore[no-any-return, no-untyped-call]  # torch has no types


class _Benchmarked(nn.Module):
    """A program as a benchmark of its memory runs it again, when gradients are there from the run before."""

    def __init__(self, program: Program, mode: str) -> None:
        super().__init__()
        self.program, self.mode = program, mode
        learnt = [text for text in program.tensors.values() if not {"ids", "fixed"} & set(text.split())]
        self.had = [] if mode == "forward" or program.fresh or program.returned else learnt
        self.made = program.made if mode == "backward" or (mode == "full" and not program.drawn) else ()
        # a module is made before it has an input, gradients are there from the run before
        kept, had, made = ([f"{text} fixed" for text in texts] for texts in (program.kept, self.had, self.made))
        self.texts = [*kept, *program.tensors.values(), *made, *had]

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Call, and run the backward pass where it is part of the mode."""
        left = list(tensors[len(self.program.kept) :])
        own = [_leaf(text, left.pop(0)) for text in self.program.tensors.values()]
        given = [joined(text, left.pop(0)) for text in self.made]
        had = [joined(text, left.pop(0)) for text in self.had]
        if self.program.before is not None:
            self.program.before(*own)
        with torch.enable_grad():
            if self.mode == "forward":
                return self.program.call(*own)
            return self._both(own, given, had)

    def _both(self, own: Any, given: list[torch.Tensor], had: list[torch.Tensor]) -> Any:
        learnt = [t for t in own if t.requires_grad]
        for tensor, grad in zip(learnt, had, strict=False):
            tensor.grad = grad
        del had
        found = self.program.call(*own)
        results = _results(self.program, found)
        if not self.program.made:
            grads = None
        elif self.program.drawn and self.mode == "full":
            grads = [y.detach().new_empty(y.shape) for y in results]
        else:
            grads = given
        if self.program.returned:
            torch.autograd.grad(results, learnt, grads, allow_unused=True, retain_graph=True)
        else:
            torch.autograd.backward(results, grads, retain_graph=not self.program.freed)
            for t in learnt:
                t.grad = None
        return found


def _leaf(text: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the axes that a text states, as one that gradients of a backward pass are kept at."""
    own = joined(text, tensor)
    return tensor if own is tensor else own.detach().requires_grad_(tensor.requires_grad)


def _format(program: Program, format: str) -> torch.dtype:
    if (chosen := format or program.format) not in FORMATS:
        raise UnsupportedError(f"inputs: dtype {chosen!r}, expected one of {', '.join(FORMATS)}")
    return FORMATS[chosen]


def _graph(module: nn.Module, texts: list[str], format: torch.dtype, **how: Any) -> Graph:
    axes = dict.fromkeys(axis for text in texts for axis in axes_of(text))
    # even, as half of an axis may be asked for, and no two alike
    hints = {axis: 2 * (11 + i) for i, axis in enumerate(axes)}
    tensors = [made_of(text, hints, format) for text in texts]
    return trace(module, *tensors, dims=[names_of(text) for text in texts], device="cuda", **how)


@cache
def traced(program: Program, format: str) -> Graph:
    """Return forward and backward pass of a program, as it was run on a date, its sizes symbols.

    The format is one that torch names, such as bfloat16, or that of the program where it is empty. UnsupportedError if
    there is no such format, or the call is not what is timed.
    """
    if program.untimed:
        raise UnsupportedError(f"time: {program.untimed}")
    texts = [*program.tensors.values(), *(f"{text} fixed" for text in program.made)]
    return _graph(_Called(program), texts, _format(program, format), train=True)


@cache
def benchmarked(program: Program, format: str, mode: str, arch: str) -> Graph:
    """Return what a benchmark of the memory of a program runs and keeps, its sizes symbols.

    `mode` is forward, backward (before which the forward pass was run) or full; `arch` the compute capability of the
    GPU, such as sm_90. UnsupportedError if there is no such format, or no peak is one of this program.
    """
    if program.refused:
        raise UnsupportedError(f"peak memory: {program.refused}")
    module = _Benchmarked(program, mode)
    return _graph(module, module.texts, _format(program, format), arch=arch)
