"""Layer norm and root-mean-square norm, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.blocks import Kernel
from .bodies import Bound, Rule, given_node, named_results, narrow, number_of, reduced_axis, whole
from .functions import item
from .site import Site

__all__ = ["LAYER_BACKWARD", "ROOT_BACKWARD", "norm", "norm_backward"]


def norm(statistics: str) -> Rule:
    """Return the rule of a norm that can hand out these: r of its deviation, of a layer norm m of its mean as well."""

    def rule(site: Site[Kernel], found: Bound) -> bool:
        made, x = named_results(site, found, "y", *statistics), given_node(site, found["x"])
        last = reduced_axis(found, "v") == found["x"].ndim - 1
        if made is None or x is None or not last or not whole(found) or narrow(site, x):
            return False
        given = [None if n not in found else given_node(site, found[n]) for n in ("w", "b")]
        if any(v is None and n in found for v, n in zip(given, "wb", strict=True)):
            return False
        shadow = site.shadow(x)
        size = [shadow.shape[-1]]
        if any(v is not None and list(site.shadow(v).shape) != size for v in given):
            return False
        weight, shift = (None if v is None else site.cast(v, shadow.dtype) for v in given)
        eps = number_of(site, found, "a")
        if "m" in statistics:
            every = site.call(torch.native_layer_norm, x, size, weight, shift, eps)
        else:
            every = site.call(torch.ops.aten._fused_rms_norm, x, size, weight, eps)
        for i, name in made.items():
            site.settle(site.call(item, every, ("y", *statistics).index(name)), i)
        return True

    return rule


def layer_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, shift: bool
) -> list[Any]:
    """Return the gradients of what is normalised, of the weight and, if there is one, of the shift."""
    size, mask = [x.shape[-1]], [True, True, shift]
    weight, mean, scale = weight.to(x.dtype), mean.to(_statistics(x)), scale.to(_statistics(x))
    return list(
        torch.ops.aten.native_layer_norm_backward(grad, x, size, mean, scale, weight, weight if shift else None, mask)
    )


def _statistics(x: torch.Tensor) -> torch.dtype:
    """Return the format in which torch keeps mean and deviation: on a GPU a wider one than that of short floats."""
    return torch.float32 if x.is_cuda and x.dtype.itemsize == 2 else x.dtype


def root_backward(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> list[Any]:
    """Return the gradients of what is normalised and of the weight."""
    if x.is_cuda:
        size, aten = [x.shape[-1]], torch.ops.aten
        return list(aten._fused_rms_norm_backward(grad, x, size, scale, weight.to(x.dtype), [True, True]))
    # torch has no kernel of it on a CPU
    wide, g = x.to(scale.dtype), grad.to(scale.dtype)
    normal = wide * scale
    of_weight = (g * normal).flatten(0, -2).sum(0)
    g = g * weight
    along = (g * normal).mean(-1, keepdim=True)
    return [normal.mul_(along).neg_().add_(g).mul_(scale).to(x.dtype), of_weight.to(weight.dtype)]


_REST = (
    "t = sum j; u = mul t; v = cubed r; z = mul u v; e = expand z; d = div e; o = copy {c}; i = mul o; q = mul d i; "
)
_LAYER_BACKWARD = (
    "gw = mul g w; c = sub x m; n = mul c r; gn = mul g n; sw = sum gn; k = mul gw r; j = mul gw c; "
    + _REST.format(c="c")
    + "a = add k q; b = neg a; f = sum b; h = expand f; l = div h; y = add a l"
)
#: Bodies of gradients, as the rules of the ops of a norm make them.
LAYER_BACKWARD = (f"sb = sum g; {_LAYER_BACKWARD}", _LAYER_BACKWARD)
ROOT_BACKWARD = (
    "gw = mul g w; n = mul x r; gn = mul g n; sw = sum gn; k = mul gw r; j = mul gw x; "
    + _REST.format(c="x")
    + "y = add k q"
)


def norm_backward(site: Site[Kernel], found: Bound) -> bool:
    """Lower the gradient of a norm with a weight along the last axis."""
    names: list[str] = [n for n in ("y", "sw", "sb") if n in found]
    made = named_results(site, found, *names)
    given = {n: given_node(site, found[n]) for n in ("g", "x", "r", "w", "m") if n in found}
    if made is None or any(v is None for v in given.values()) or not whole(found):
        return False
    shadows = {n: site.shadow(v) for n, v in given.items()}
    x, kept = shadows["x"], (*shadows["x"].shape[:-1], 1)
    same = shadows["g"].shape == x.shape and shadows["g"].dtype == x.dtype and not narrow(site, given["x"])
    if not same or x.ndim < 2 or tuple(shadows["w"].shape) != tuple(x.shape[-1:]) or tuple(shadows["r"].shape) != kept:
        return False
    vector, like = torch.empty(x.shape[-1:], dtype=x.dtype, device="meta"), torch.empty_like(x)

    if "m" in found:
        arguments = [given[n] for n in ("g", "x", "m", "r", "w")]
        both = site.call(layer_backward, *arguments, "sb" in found, like=[like, vector, vector])
    else:
        arguments = [given[n] for n in ("g", "x", "r", "w")]
        both = site.call(root_backward, *arguments, like=[like, vector.to(shadows["w"].dtype)])
    for i, name in made.items():
        site.settle(site.call(item, both, names.index(name)), i)
    return True
