"""Ops whose costs are stated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ...ops.stated import Opaque
from .functions import item
from .site import Site
from .table import lowering

__all__: list[str] = []  # its lowerings are found in LOWERINGS


def _function(site: Site[Opaque]) -> Callable[..., Any]:
    """Return what the caller has for an opaque op, by its name with or without scope and number."""
    last = site.op.name.rpartition("/")[2]
    names = (site.op.name, last, re.sub(r"_\d+\Z", "", last))
    for name in names:
        if name in site.shared.functions:
            return site.shared.functions[name]
    raise UnsupportedError(
        f"lower {site.op.name!r}: nothing says what an opaque op computes, expected a function of torch in "
        f"functions={{{names[-1]!r}: ...}}"
    )


def _checked(function: Callable[..., Any], name: str, outputs: Sequence[tuple[Any, Any]]) -> Callable[..., Any]:
    """Return a function of the caller whose results are looked at and made dense."""

    def opaque(*operands: torch.Tensor) -> list[torch.Tensor]:
        made = function(*operands)
        found = made if isinstance(made, tuple | list) else (made,)
        shapes = [(tuple(y.shape), y.dtype) if isinstance(y, torch.Tensor) else type(y).__name__ for y in found]
        if shapes != list(outputs):
            raise UnsupportedError(f"function of opaque op {name!r} returned {shapes}, expected {list(outputs)}")
        return [y.contiguous() for y in found]

    return opaque


@lowering(Opaque)
def _opaque(site: Site[Opaque]) -> None:
    outputs = tuple((site.sizes(t), site.dtype(t)) for t in site.op.results)
    like = [torch.empty(sizes, dtype=dtype, device="meta") for sizes, dtype in outputs]
    made = site.call(_checked(_function(site), site.op.name, outputs), *site.operands, like=like)
    for i in range(len(outputs)):
        site.settle(site.call(item, made, i), i)
