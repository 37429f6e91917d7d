"""Lazy modules: their parameters get shapes from a run of a copy on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...algebra.symbols import shown
from ...errors import UnsupportedError

__all__ = ["initialized"]


def initialized(module: nn.Module, inputs: Sequence[object], keywords: Mapping[str, object]) -> nn.Module:
    """Return a module without lazy parameters: the same one, or a copy without data that has run once.

    UnsupportedError if the copy does not run.
    """
    lazy = {n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if is_lazy(t)}
    if not lazy:
        return module
    try:
        kinds: dict[int, Any] = {id(t): type(t) for t in lazy.values()}
        copies = {
            id(t): kinds[id(t)](t.requires_grad, "meta", t.dtype) for t in lazy.values()
        }  # buffers refuse `deepcopy`
        made = copy.deepcopy(module, copies).to("meta")
        with torch.no_grad():
            made(*map(_on_meta, inputs), **{k: _on_meta(v) for k, v in keywords.items()})
    except Exception as error:
        raise UnsupportedError(
            f"trace: parameter {min(lazy)!r} of {type(module).__name__} is lazy, and a run on the meta device, to "
            f"give it a shape, fails ({type(error).__name__}: {shown(str(error), 120)}); call the module once on a "
            f"batch before the trace"
        ) from error
    return made


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value
