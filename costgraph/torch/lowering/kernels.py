"""Fused kernels: torch's function where the body is what one computes, else the ops of the body one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ops.blocks import Kernel
from .attention import flash, flash_backward
from .bodies import Bound, Rule, given_node, match, named_results, narrow, reduced_axis, whole
from .contraction import linear
from .losses import NLL, NLL_BACKWARD, nll, nll_backward
from .norms import LAYER_BACKWARD, ROOT_BACKWARD, norm, norm_backward
from .site import Site
from .table import lowering
from .windows import convolution

__all__: list[str] = []  # its lowerings are found in LOWERINGS


@lowering(Kernel)
def _kernel(site: Site[Kernel]) -> None:
    body = site.kind.body
    for text, rule in _RULES.items():
        found = match(body, text)
        if found is not None and rule(site, found):
            return
    nodes = site.shared.inside(body, site.operands)
    used = {_storage(site, v) for v in site.operands}
    changed = {site.op.operands[i].storage for i in site.kind.changed}
    for i, v in enumerate(nodes):
        if site.op.results[i].storage in changed:  # it was written where it is
            site.alias(v, i)
            continue
        shadow, storage = site.shadow(v), _storage(site, v)
        own = storage not in used and shadow.untyped_storage().nbytes() == shadow.numel() * shadow.itemsize
        used.add(storage)
        site.settle(v, i, fresh=own)


def _storage(site: Site[Kernel], node: Any) -> int:
    found: int = site.shadow(node).untyped_storage()._cdata
    return found


def _softmax(function: Callable[..., Any]) -> Rule:
    def rule(site: Site[Kernel], found: Bound) -> bool:
        axis, x = reduced_axis(found, "m"), given_node(site, found["x"])
        if axis is None or x is None or not whole(found) or named_results(site, found, "y") is None or narrow(site, x):
            return False
        site.own(function, x, axis, False)
        return True

    return rule


def _softmax_backward(function: Callable[..., Any]) -> Rule:
    def rule(site: Site[Kernel], found: Bound) -> bool:
        axis, g, y = reduced_axis(found, "a"), given_node(site, found["g"]), given_node(site, found["y"])
        if axis is None or g is None or y is None or not whole(found) or named_results(site, found, "z") is None:
            return False
        shadows = [site.shadow(g), site.shadow(y)]
        if shadows[0].dtype != shadows[1].dtype or shadows[0].shape != shadows[1].shape or narrow(site, g):
            return False
        site.own(function, g, y, axis, shadows[0].dtype)
        return True

    return rule


def _biased(lowered: Callable[..., bool]) -> Rule:
    """Return the rule of a contraction with a bias."""

    def rule(site: Site[Kernel], found: Bound) -> bool:
        einsum, nodes = found["p"].producer, [given_node(site, found[n]) for n in "xwb"]
        if any(v is None for v in nodes) or not whole(found) or named_results(site, found, "y") is None:
            return False
        return lowered(site, einsum, nodes[:2], nodes[2])

    return rule


_LAYER = "m = mean x; c = sub x m; q = square c; v = mean q; a = add v; r = rsqrt a; "
_ROOT = "q = square x; v = mean q; a = add v; r = rsqrt a; "
#: What each body that torch has a function for computes, and what lowers it if sizes and results allow that.
_RULES: dict[str, Rule] = {
    "m = max x; s = sub x m; e = exp s; z = sum e; y = div e z": _softmax(torch.ops.aten._softmax),
    "m = max x; s = sub x m; e = exp s; z = sum e; l = log z; y = sub s l": _softmax(torch.ops.aten._log_softmax),
    "q = mul g y; a = sum q; d = sub g a; z = mul y d": _softmax_backward(torch.ops.aten._softmax_backward_data),
    "e = exp y; a = sum g; q = mul e a; z = sub g q": _softmax_backward(torch.ops.aten._log_softmax_backward_data),
    _LAYER + "y = mul c r": norm("mr"),
    _LAYER + "n = mul c r; y = mul n w": norm("mr"),
    _LAYER + "n = mul c r; o = mul n w; y = add o b": norm("mr"),
    _ROOT + "y = mul x r": norm("r"),
    _ROOT + "n = mul x r; y = mul n w": norm("r"),
    "p = einsum x w; y = add p b": _biased(linear),
    "p = einsum x w; o = rearrange b; y = add p o": _biased(convolution),
    **dict.fromkeys((*LAYER_BACKWARD, ROOT_BACKWARD), norm_backward),
    **dict.fromkeys(NLL, nll) | dict.fromkeys(NLL_BACKWARD, nll_backward),
    "s = einsum q k; c = mul s; p = softmax c; y = einsum p v": flash,
    "s = einsum q k; c = mul s; p = softmax c; y = einsum p v; n = rearrange p'": flash,
    "s = einsum q k; c = mul s; p = softmax c; d = dropout p; y = einsum d v": flash,
    "a = einsum g v; s = einsum q k; c = mul s; o = sub c l; p = exp o; dv = einsum g p; i = mul g y; t = sum i; "
    "u = rearrange t; e = sub a u; f = mul p e; h = mul f; dq = einsum h k; dk = einsum h q": flash_backward,
}
