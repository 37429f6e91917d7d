"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any

import torch

from ...ops.reduce import Reduce
from .elementwise import held
from .functions import hidden
from .site import Site
from .table import lowering

__all__: list[str] = []  # its lowerings are found in LOWERINGS

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin, "any": torch.any, "all": torch.all,
}  # fmt: skip
#: Functions that take one axis.
_LAST: dict[str, Callable[..., Any]] = {"prod": torch.prod, "argmax": torch.argmax, "argmin": torch.argmin}
#: What an element that is not there counts as.
_NOTHING = {"sum": 0.0, "mean": 0.0, "max": -inf, "min": inf, "prod": 1.0, "any": 0.0, "all": 1.0}


@lowering(Reduce)
def _reduce(site: Site[Reduce]) -> None:
    pattern, operation = site.kind.pattern, site.kind.operation
    names = [a.names[0] if a.names else None for a in pattern.operands[0]]
    kept = [a.names[0] for a in pattern.result if a.names]
    gone = [i for i, n in enumerate(names) if n is None or n not in kept]
    sizes = site.sizes(site.op.operands[0])
    x = held(site, 0, _NOTHING.get(operation, 0.0))
    if site.shadow(x).dtype.itemsize == 1 and site.shadow(x).dtype.is_floating_point:
        x = site.cast(x, torch.float32)
    # the axes that stay first, in the order of the result: what torch makes of the others is dense then
    order = [names.index(n) for n in kept] + gone
    if order != sorted(order) or operation in _LAST:
        x = site.permuted(x, order)
        gone = list(range(len(kept), len(names)))
    shape = tuple(sizes[i] for i in order[: len(kept)])
    if operation in _LAST:
        flat = site.shaped(x, (*shape, prod(sizes[i] for i in order[len(kept) :])))
        site.own(_LAST[operation], flat, -1, shape=shape)
    elif operation == "mean" and site.op.operands[0].domain is not None:
        domain, *axes = site.op.operands[0].domain
        site.own(
            mean_of_held,
            x,
            gone,
            *(order.index(i) if order != sorted(order) else i for i in axes),
            *site.seen(domain, *(sizes[i] for i in axes)),
            shape=shape,
        )
    elif gone:
        site.own(_FUNCTIONS[operation], x, gone, shape=shape)
    else:
        site.own(torch.clone, x, shape=shape)


def mean_of_held(
    x: torch.Tensor, axes: list[int], query: int, key: int, causal: bool, window: int | None, first: int
) -> torch.Tensor:
    """Return the mean of what a domain holds of a tensor that is 0 elsewhere."""
    count = hidden(torch.ones_like(x), query, key, causal, window, first, 0.0).sum(axes)
    return torch.sum(x, axes).div_(count.clamp_(min=1))
