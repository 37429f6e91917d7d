"""Leaves of autograd: which tensors have a gradient of their own, and whether a program replaces them in a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from ...errors import UnsupportedError
from .events import Handle
from .marks import BARRIER, NONE, Barrier

__all__ = ["Leaves"]


class Leaves:
    """Tensors that are there before the first op, each with its data as declared.

    A parameter is one Python object for the whole run. `.to`, `.data =` and `swap_tensors` can give the object other
    data, and a program can make further parameters: gradients of these belong to no parameter of the graph.
    """

    def __init__(self) -> None:
        self._declared: dict[int, tuple[torch.Tensor, str, Handle, bool]] = {}

    def declare(self, t: torch.Tensor, name: str, handle: Handle) -> None:
        """Note a tensor that is there from the start, and whether it has a gradient of its own."""
        self._declared.setdefault(id(t), (t, name, replace(handle, barrier=None), t.requires_grad))

    def barrier(self, t: torch.Tensor, handle: Handle) -> Barrier | None:
        """Return why the gradient of a leaf of autograd does not go to a declared tensor; None where it does."""
        if id(t) not in self._declared:
            if t.requires_grad and t._base is None:  # of a view the flag says what that of its base does
                cut = isinstance(t, nn.Parameter) or t.__dict__.get(BARRIER) == NONE
                return Barrier(
                    "a leaf of autograd (a parameter, its copy, `requires_grad_`) is made while the program runs",
                    leaf=True,
                    alone=not cut,
                )
            return t.__dict__.get(BARRIER)
        _, name, before, trained = self._declared[id(t)]
        if t.requires_grad and handle != before:
            return Barrier(f"parameter {name!r} gets other data while the program runs", leaf=True)
        if t.requires_grad and not trained:
            return Barrier(f"{name!r} begins to require a gradient while the program runs", leaf=True)
        if trained and not t.requires_grad:
            return NONE  # frozen from here on
        return None if t.requires_grad else t.__dict__.get(BARRIER)

    def need_same(self, parameters: Iterable[tuple[torch.Tensor, Handle]]) -> None:
        """Refuse parameters that have other data after the run than before it."""
        for t, handle in parameters:
            _, name, before, _ = self._declared[id(t)]
            if replace(handle, barrier=None) != before:
                raise UnsupportedError(
                    f"trace: parameter {name!r} gets other data while the program runs, expected one that keeps its "
                    f"own; convert, assign or swap parameters before the trace"
                )
