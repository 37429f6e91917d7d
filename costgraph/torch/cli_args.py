"""Parse torch-related command-line arguments: threads, inputs, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..algebra.symbols import shorten, shown
from ..errors import FormatError

__all__ = [
    "on_meta",
    "optimizer",
    "threads",
]


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set the number of threads temporarily; None keeps the current number."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count or previous)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def on_meta(sizes: Sequence[int], dtype: str) -> torch.Tensor:
    """Return a meta tensor; `dtype` is named as in torch.

    Raises FormatError if torch has no such dtype.
    """
    format_ = getattr(torch, dtype, None)
    if not isinstance(format_, torch.dtype):
        raise FormatError(f"dtype {shown(dtype)} of an input: expected one that torch has, such as int64 or bfloat16")
    return torch.empty(tuple(sizes), dtype=format_, device="meta")


def optimizer(text: str) -> Callable[[Any], Any]:
    """Return a factory for a torch optimizer, such as `AdamW:foreach`.

    Raises FormatError if torch has no such optimizer or implementation.
    """
    name, _, implementation = text.partition(":")
    optimizer_class = getattr(torch.optim, name, None)
    if (
        not isinstance(optimizer_class, type)
        or not issubclass(optimizer_class, torch.optim.Optimizer)
        or optimizer_class is torch.optim.Optimizer
    ):
        raise FormatError(f"--optimizer {shorten(name)}: expected one of torch.optim, such as AdamW or SGD")
    flags = {"": {}, "for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    if implementation not in flags:
        raise FormatError(f"--optimizer {shorten(text)}: expected for-loop, foreach or fused after the colon")
    options: dict[str, Any] = {"lr": 1e-3, **flags[implementation]}
    return lambda params: optimizer_class(params, **options)
