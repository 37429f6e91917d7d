"""Transformer blocks: residual branches with norms around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import costgraph as cg

from .eager_ops import KERNELS, Kernels

__all__ = [
    "Norm",
    "Branch",
    "System",
    "Tables",
    "residual",
    "causal_attention",
    "block",
    "with_dropout",
    "bidirectional_attention",
    "gated_mlp",
    "mixture_of_experts",
]

#: A residual branch, from (b, s, d) to the same shape.
Branch = Callable[[cg.Tensor], cg.Tensor]

#: Rotary cosines and sines.
Tables = tuple[cg.Tensor, cg.Tensor]

#: Implementation of a layer, if it matters: the module's, or Megatron-LM's (core_r0.14.0, 23e00ed).
System = Literal["torch", "megatron"]


class Norm(Protocol):
    """A norm with parameters, such as `rms_norm`."""

    def __call__(self, x: cg.Tensor, /, *, name: str) -> cg.Tensor:
        """Normalize, with parameters in the scope `name`."""


def residual(
    x: cg.Tensor,
    branch: Branch,
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
    output = branch(y)
    output = norm(output, name=f"{name}/norm_after") if norms in ("after", "both") else output
    output = run.add(x, output, y)
    return norm(output, name=f"{name}/norm") if norms == "behind" else output


def block(
    *,
    norm: Norm = cg.rms_norm,
    norms: Literal["before", "after", "both", "behind"] = "before",
    run: Kernels = KERNELS,
    **branches: Branch,
) -> Branch:
    """Return a layer with several residual branches, each added under its name."""

    def layer(x: cg.Tensor) -> cg.Tensor:
        y = x
        for name, branch in branches.items():
            y = residual(y, branch, name, norm=norm, norms=norms, run=run)
        return run.end_layer(y, x)

    return layer


def with_dropout(branch: Branch, p: float) -> Branch:
    """Return a branch followed by dropout."""
    return lambda x: cg.dropout(branch(x), p)


def causal_attention(kernel: str, p: float, rope: Tables, **options: Any) -> Branch:
    """Return causal attention with H query heads and G KV heads of K elements, and rotary positions."""
    H, G, K = cg.dims("H G K")
    return partial(cg.nn.self_attention, heads=H, size=K, groups=G, rope=rope, kernel=kernel, p=p, **options)


def bidirectional_attention(kernel: str, p: float, heads: object, size: object, **options: Any) -> Branch:
    """Return bidirectional attention, with biases by default."""
    options = {"causal": False, "bias": True, "out_bias": True, "cached": False, **options}
    return partial(cg.nn.self_attention, heads=heads, size=size, kernel=kernel, p=p, **options)


def gated_mlp(activation: str, *, f: object = None, system: System = "torch", **options: Any) -> Branch:
    """Return a gated feed-forward layer of width F.

    Megatron-LM has one parameter for gate and up projection, and fuses the activation.
    """
    options |= {"packed": True, "fused": True} if system == "megatron" else {}
    width = cg.dims("F") if f is None else f
    return partial(cg.nn.gated_mlp, f=width, activation=partial(cg.ops.pointwise, activation), **options)


def mixture_of_experts(routing: str, capacity: float | None, *, system: System = "torch", **options: Any) -> Branch:
    """Return a mixture of E experts with width Fe, k experts per token.

    Megatron-LM applies the routing weights inside the experts, and computes the router in the format of the layer.
    """
    E, k, Fe = cg.dims("E k Fe")
    options |= {"weigh": "inside", "fp32": False} if system == "megatron" else {}
    return partial(cg.nn.moe, experts=E, chosen=k, f=Fe, routing=routing, capacity=capacity, **options)
