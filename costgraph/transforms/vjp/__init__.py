"""Vector-Jacobian rules: what each op kind adds to a graph when its gradient is taken."""

from collections.abc import Mapping
from types import MappingProxyType

from . import contraction, elementwise, grouped, lookups, reductions, shapes, stated, windows

__all__ = [
    "NOT_DIFFERENTIABLE", "contraction", "elementwise", "grouped", "lookups", "reductions", "shapes", "stated",
    "windows",
]  # fmt: skip

#: Op kinds without a body that have no rule, and why.
NOT_DIFFERENTIABLE: Mapping[str, str] = MappingProxyType(
    {
        "unpool": "a gradient already: of gradients of gradients of windows nothing is stated",
        "aten": "a call that was recorded: torch runs its backward pass, which a trace can record as well",
        "fused_update": "part of an optimizer step",
        "dispatch": "makes integers alone",
        "append": "part of a step of inference",
        "zero_grad": "part of an optimizer step",
        "unscale": "part of an optimizer step",
    }
)
