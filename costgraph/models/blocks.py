"""Transformer blocks: residual branches with norms around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import costgraph as cg

from .composed import KERNELS, Kernels

__all__ = ["Norm", "Part", "System", "Tables", "added", "attending", "block", "dropped", "encoding", "gated", "mixed"]

#: A residual branch, from (b, s, d) to the same shape.
Part = Callable[[cg.Tensor], cg.Tensor]

#: Rotary cosines and sines.
Tables = tuple[cg.Tensor, cg.Tensor]

#: Implementation of a layer, if it matters: the module's, or Megatron-LM's (core_r0.14.0, 23e00ed).
System = Literal["torch", "megatron"]


class Norm(Protocol):
    """A norm with parameters, such as `rms_norm`."""

    def __call__(self, x: cg.Tensor, /, *, name: str) -> cg.Tensor:
        """Normalize, with parameters in the scope `name`."""


def added(
    x: cg.Tensor,
    part: Part,
    name: str,
    *,
    norm: Norm = cg.rms_norm,
    norms: Literal["before", "after", "both", "behind"] = "before",
    run: Kernels = KERNELS,
) -> cg.Tensor:
    """Add the output of a residual branch, such as attention or a feed-forward layer, to its input.

    `norms` sets the position of norms: before the branch, after it, both, or behind the sum.
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
    """Return a layer with several residual branches, each `added` under its name."""

    def layer(x: cg.Tensor) -> cg.Tensor:
        y = x
        for name, part in parts.items():
            y = added(y, part, name, norm=norm, norms=norms, run=run)
        return run.left(y, x)

    return layer


def dropped(part: Part, p: float) -> Part:
    """Return a branch followed by dropout."""
    return lambda x: cg.dropout(part(x), p)


def attending(kernel: str, p: float, rope: Tables, **facts: Any) -> Part:
    """Return causal attention with H query heads and G KV heads of K elements, and rotary positions."""
    H, G, K = cg.dims("H G K")
    return partial(cg.nn.self_attention, heads=H, size=K, groups=G, rope=rope, kernel=kernel, p=p, **facts)


def encoding(kernel: str, p: float, heads: object, size: object, **facts: Any) -> Part:
    """Return bidirectional attention, with biases by default."""
    facts = {"causal": False, "bias": True, "out_bias": True, "cached": False, **facts}
    return partial(cg.nn.self_attention, heads=heads, size=size, kernel=kernel, p=p, **facts)


def gated(activation: str, *, f: object = None, system: System = "torch", **facts: Any) -> Part:
    """Return a gated feed-forward layer of width F.

    Megatron-LM has one parameter for gate and up projection, and fuses the activation.
    """
    facts |= {"packed": True, "fused": True} if system == "megatron" else {}
    width = cg.dims("F") if f is None else f
    return partial(cg.nn.gated_mlp, f=width, activation=partial(cg.ops.pointwise, activation), **facts)


def mixed(routing: str, capacity: float | None, *, system: System = "torch", **facts: Any) -> Part:
    """Return a mixture of E experts with width Fe, k experts per token.

    Megatron-LM applies the routing weights inside the experts, and computes the router in the format of the layer.
    """
    E, k, Fe = cg.dims("E k Fe")
    facts |= {"weigh": "inside", "fp32": False} if system == "megatron" else {}
    return partial(cg.nn.moe, experts=E, chosen=k, f=Fe, routing=routing, capacity=capacity, **facts)
