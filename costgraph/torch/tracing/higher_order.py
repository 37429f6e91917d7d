"""Ops whose operands are functions: an eager run calls them, and so does a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import HigherOrderOperator

from ...errors import UnsupportedError

__all__ = ["run_eagerly", "uncompiled"]


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let `torch.compile` return what it is given: torch's own functions compile such ops before they run them."""
    with patch.object(torch, "compile", lambda model=None, **_: (lambda f: f) if model is None else model):
        yield


def _cond(pred: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return (yes if pred else no)(*operands)


def _while(
    goes_on: Callable[..., Any], step: Callable[..., Any], carried: Sequence[Any], beside: Sequence[Any] = ()
) -> Any:
    while goes_on(*carried, *beside):
        carried = step(*carried, *beside)
    return tuple(carried)


def _scan(step: Callable[..., Any], init: Sequence[Any], xs: Sequence[Any], beside: Sequence[Any] = ()) -> Any:
    """Carry values from row to row, and stack what each row makes."""
    carried, count, made = list(init), len(init), list[Sequence[Any]]()
    for rows in zip(*(x.unbind(0) for x in xs), strict=True):
        out = step(*carried, *rows, *beside)
        carried = list(out[:count])
        made.append(out[count:])
    return (*carried, *(torch.stack(tensors) for tensors in zip(*made, strict=True)))


#: Those whose own kernels refuse to be looked at.
_KERNELS: dict[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while, "scan": _scan}


def run_eagerly(func: HigherOrderOperator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run what torch runs where nothing is compiled: the branch that is taken, each step of a loop.

    A branch or a loop that the values of a tensor decide is refused where they are asked for.

    UnsupportedError if torch has no such kernel.
    """
    kernel = _KERNELS.get(str(func)) or func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    if kernel is None:
        raise UnsupportedError(f"{func!s}: torch runs it compiled alone, expected an op that has an eager kernel")
    return kernel(*args, **kwargs)
