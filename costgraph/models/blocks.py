"""Layers of transformers: parts whose results are added to what they read, with norms around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import costgraph as cg

from .composed import KERNELS, Kernels

__all__ = ["Norm", "Part", "System", "Tables", "added", "attending", "block", "dropped", "encoding", "gated", "mixed"]

#: What a layer is made of, from (b, s, d) to the same.
Part = Callable[[cg.Tensor], cg.Tensor]

#: Cosines and sines.
Tables = tuple[cg.Tensor, cg.Tensor]

#: Whose code runs a layer, where that makes a difference: a module's, or that of Megatron-LM (core_r0.14.0, 23e00ed).
System = Literal["torch", "megatron"]


class Norm(Protocol):
    """A norm with parameters, such as `rms_norm`."""

    def __call__(self, x: cg.Tensor, /, *, name: str) -> cg.Tensor:
        """Normalise, with parameters in a scope of that name."""


def added(
    x: cg.Tensor,
    part: Part,
    name: str,
    *,
    norm: Norm = cg.rms_norm,
    norms: Literal["before", "after", "both", "behind"] = "before",
    run: Kernels = KERNELS,
) -> cg.Tensor:
    """Add what a part (attention, a feed-forward layer and the like) makes of a tensor to it.

    `norms` says where a norm stands: before, of what the part reads; after, of what it makes; both; behind, of the sum.
    """
    y = norm(x, name=f"{name}/norm") if norms in ("before", "both") else x
    made = part(y)
    made = norm(made, name=f"{name}/norm_after") if norms in ("after", "both") else made
    made = run.add(x, made, y)
    return norm(made, name=f"{name}/norm") if norms == "behind" else made


def block(
    *,
    norm: Norm = cg.rms_norm,
    norms: Literal["before", "after", "both", "behind"] = "before",
    run: Kernels = KERNELS,
    **parts: Part,
) -> Part:
    """Return a layer of parts one after the other, each `added` under its name."""

    def layer(x: cg.Tensor) -> cg.Tensor:
        y = x
        for name, part in parts.items():
            y = added(y, part, name, norm=norm, norms=norms, run=run)
        return run.left(y, x)

    return layer


def dropped(part: Part, p: float) -> Part:
    """Return a part with dropout behind it."""
    return lambda x: cg.dropout(part(x), p)


def attending(kernel: str, p: float, rope: Tables, **facts: Any) -> Part:
    """Return attention of H heads of K elements, G of them with keys and values, with rotary positions."""
    H, G, K = cg.dims("H G K")
    return partial(cg.nn.self_attention, heads=H, size=K, groups=G, rope=rope, kernel=kernel, p=p, **facts)


def encoding(kernel: str, p: float, heads: object, size: object, **facts: Any) -> Part:
    """Return attention in which all positions see each other, with biases unless told otherwise."""
    facts = {"causal": False, "bias": True, "out_bias": True, "cached": False, **facts}
    return partial(cg.nn.self_attention, heads=heads, size=size, kernel=kernel, p=p, **facts)


def gated(activation: str, *, f: object = None, system: System = "torch", **facts: Any) -> Part:
    """Return a feed-forward layer of F elements with a gate.

    Megatron-LM has one parameter for gate and up, and one kernel behind it.
    """
    facts |= {"packed": True, "fused": True} if system == "megatron" else {}
    width = cg.dims("F") if f is None else f
    return partial(cg.nn.gated_mlp, f=width, activation=partial(cg.ops.pointwise, activation), **facts)


def mixed(routing: str, capacity: float | None, *, system: System = "torch", **facts: Any) -> Part:
    """Return E experts of Fe elements, of which a token meets k.

    Megatron-LM multiplies by weights inside the experts, and routes by a product in the format of the layer.
    """
    E, k, Fe = cg.dims("E k Fe")
    facts |= {"weigh": "inside", "fp32": False} if system == "megatron" else {}
    return partial(cg.nn.moe, experts=E, chosen=k, f=Fe, routing=routing, capacity=capacity, **facts)
