"""Marks of tensors: of which the gradient stops, or is stated by the program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

__all__ = ["BARRIER", "NONE", "Barrier", "is_unseen"]

#: Attribute of a tensor with its `Barrier`: weak references to tensors would break `swap_tensors`.
BARRIER = "_costgraph_barrier"


class Barrier(NamedTuple):
    """Why a gradient does not pass to the producer of a tensor."""

    by: str = ""
    """function of the program that states the gradient, or why the tensor is a leaf; "" where none passes"""
    leaf: bool = False
    """whether the tensor is a leaf of autograd that is no parameter of the module as declared"""
    alone: bool = False
    """whether it is a leaf only if no parameter is behind it: elsewhere `requires_grad_` changes nothing"""


#: No gradient passes, as behind `detach`.
NONE = Barrier()


def is_unseen(made: Iterable[Any], stopped: bool | None) -> bool:
    """Whether the gradient of what an op has written to passes the op by.

    That is so wherever gradients are switched off; elsewhere of a tensor that has none itself, as `x.data`, which may
    be another name for one that has. `stopped` is None of a run that has gradients itself.
    """
    marks = (t.__dict__.get(BARRIER) for t in made if isinstance(t, torch.Tensor))
    return bool(stopped) or (stopped is False and NONE in marks)
