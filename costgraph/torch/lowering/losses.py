"""The loss of classes and its gradient, where some targets are none: what is below zero, as in torch's `nll_loss`."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.blocks import Kernel
from .bodies import Bound, given_node, named_results, narrow, number_of, whole
from .functions import item
from .site import Site

__all__ = ["NLL", "NLL_BACKWARD", "nll", "nll_backward"]

#: Bodies of the losses as they are, of their mean and of their sum, in the order of torch's numbers for them.
NLL = tuple(
    f"r = rearrange t; p = gather x r; q = rearrange p; {end}; w = fill"
    for end in ("y = neg q", "m = mean q; y = neg m", "u = sum q; y = neg u")
)
#: Those of their gradients.
NLL_BACKWARD = tuple(
    f"n = neg g; {middle}; z = fill; i = rearrange t; s = scatter z i r"
    for middle in ("r = rearrange n", "e = expand n; d = div e; r = rearrange d", "e = expand n; r = rearrange e")
)


def _reduction(found: Bound) -> int:
    return 1 if "m" in found or "d" in found else 2 if "u" in found or "e" in found else 0


def _classes(site: Site[Kernel], node: Any) -> Any:
    """Return targets, one number for all that are none."""
    return site.call(torch.clamp, node, min=-1)


def _counted(targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how many targets are classes."""
    return (targets >= 0).sum().to(dtype)


def nll(site: Site[Kernel], found: Bound) -> bool:
    """Lower the loss: a mean is that of targets that are classes."""
    x, targets, made = given_node(site, found["x"]), given_node(site, found["t"]), named_results(site, found, *"yw")
    if x is None or targets is None or made is None or not whole(found) or narrow(site, x) or found["x"].ndim != 2:
        return False
    both = site.call(torch.ops.aten.nll_loss_forward, x, _classes(site, targets), None, _reduction(found), -1)
    for i, name in made.items():
        site.settle(site.call(item, both, "yw".index(name)), i)
    return True


def nll_backward(site: Site[Kernel], found: Bound) -> bool:
    """Lower its gradient, which what is no class has none of."""
    grad, targets, shape = given_node(site, found["g"]), given_node(site, found["t"]), site.sizes(found["s"])
    if grad is None or targets is None or not whole(found) or named_results(site, found, "s") is None:
        return False
    how = _reduction(found)
    if narrow(site, grad) or len(shape) != 2 or (how == 1 and number_of(site, found, "d") != shape[0]):
        return False
    like = site.call(torch.Tensor.expand, grad if how else site.viewed(grad, (shape[0], 1)), shape)
    count = site.call(_counted, targets, site.shadow(grad).dtype)
    ids = _classes(site, targets)
    site.own(torch.ops.aten.nll_loss_backward, grad, like, ids, None, how, -1, count)
    return True
