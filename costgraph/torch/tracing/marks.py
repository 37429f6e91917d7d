"""Marks of tensors: of which the gradient stops, or is stated by the program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["BARRIER", "is_unseen"]

#: Attribute with the function that states a gradient, "" where none passes: a weak reference would be in the way of
#: `swap_tensors`.
BARRIER = "_costgraph_barrier"


def is_unseen(made: Iterable[Any], stopped: bool | None) -> bool:
    """Whether the gradient of what an op has written to passes the op by.

    That is so wherever gradients are switched off; elsewhere of a tensor that has none itself, as `x.data`, which may
    be another name for one that has. `stopped` is None of a run that has gradients itself.
    """
    marks = (t.__dict__.get(BARRIER) for t in made if isinstance(t, torch.Tensor))
    return bool(stopped) or (stopped is False and "" in marks)
