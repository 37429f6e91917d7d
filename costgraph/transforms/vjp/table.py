"""Registry of vector-Jacobian rules, and helpers they share: summing over broadcast axes, dtypes, masked domains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from ...algebra.polynomial import ONE
from ...errors import UnsupportedError
from ...ir.graph import Op, OpKind, Tensor, apply, current_graph
from ...ir.strides import Sizes
from ...notation.validation import guarded
from ...ops.elementwise import FUNCTIONS, Pointwise, cast
from ...ops.fourier import real_part
from ...ops.layout import Expand, Rearrange, permute, rearrange
from ...ops.opaque import CustomCall, refusal
from ...ops.reduce import reduce
from ...ops.registry import adding

__all__ = [
    "RULES",
    "VJPContext",
    "Rule",
    "rule_of",
    "vjp",
    "also_saved",
    "expanded",
    "is_alone",
    "order_of_parameter",
    "restricted",
    "sum_to",
    "summed",
    "zero_filled",
]


# -- registry ----------------------------------------------------------------------------------------------------------

K = TypeVar("K", bound=OpKind)


@guarded()
@dataclass(frozen=True)
class VJPContext(Generic[K]):
    """Input to a vector-Jacobian rule: a forward op and the gradients of its results."""

    op: Op
    """forward op"""
    grads: tuple[Tensor | None, ...]
    """gradient per result, with its shape; None for no gradient, but at least one is a tensor"""
    needs: tuple[bool, ...]
    """whether each operand needs a gradient"""
    saved: Callable[[Tensor], Tensor]
    """maps an operand or result of the op to the backward pass; calling it saves the tensor"""

    @property
    def kind(self) -> K:
        """The op's record."""
        return self.op.kind  # type: ignore[return-value]  # a rule gets ops of its own kind


#: Adds ops to the open graph; returns the gradient per operand, None if it is not needed or zero.
Rule = Callable[[VJPContext[K]], Sequence[Tensor | None]]

_rules: dict[type[OpKind], Rule[Any]] = {}
#: Rules by op kind.
RULES: Mapping[type[OpKind], Rule[Any]] = MappingProxyType(_rules)


def vjp(*kinds: type[K]) -> Callable[[Rule[K]], Rule[K]]:
    """Register the vector-Jacobian rule for an op kind: `@costgraph.vjp(MyKind)`.

    Parameters
    ----------
    *kinds : subclass of OpKind
        Op kinds that the rule applies to.

    Returns
    -------
    callable
        Decorator for a function `rule(pull)` that adds ops and returns a gradient or None for each operand. The record
        of the op is `pull.kind`.

    Raises
    ------
    GraphError
        If the kind has a rule already.
    """
    return adding(_rules, "a vector-Jacobian rule", *kinds)


def rule_of(op: Op) -> Rule[Any]:
    """Return the rule for an op; raise UnsupportedError if its kind has none."""
    if isinstance(op.kind, CustomCall):
        raise refusal("backward", op, "trace with train=True")
    if type(op.kind) not in _rules:
        raise UnsupportedError(
            f"backward of {op.name!r}: op kind {op.kind.name!r} has no vector-Jacobian rule, expected one from "
            f"costgraph.vjp"
        )
    return _rules[type(op.kind)]


# -- helpers -----------------------------------------------------------------------------------------------------------


def also_saved(pull: VJPContext[Any], *tensors: Tensor) -> None:
    """Save tensors that torch saves although the formula does not read them, unless the op is one of several fused."""
    if not current_graph().fused or is_alone(pull.op):
        for t in tensors:
            pull.saved(t)


def is_alone(op: Op) -> bool:
    """Whether all other ops of the graph are views, as in a kernel for a single op."""
    return all(other is op or isinstance(other.kind, Rearrange) for other in op.graph.ops)


def restricted(g: Tensor, like: Tensor) -> Tensor:
    """Restrict a gradient to the domain of its tensor, as a view."""
    if like.domain in (None, g.domain):
        return g
    if g.domain is not None:  # over another axis of size 1 than the one that was dropped or merged
        axis_of, remaining = (
            dict(zip(like.domain[1:], g.domain[1:], strict=True)),
            iter({*range(g.ndim)} - {*g.domain[1:]}),
        )
        return permute(g, [axis_of[i] if i in axis_of else next(remaining) for i in range(g.ndim)])
    return apply(Expand(sizes=g.sizes, kept=tuple(range(g.ndim)), domain=like.domain), [g], "restrict")[0]


def order_of_parameter(x: Tensor) -> tuple[int, ...] | None:
    """Return the memory order of axes if a tensor is a permuted view of a parameter, else None.

    The gradient is computed in that order, like torch's gradient of a weight used transposed.
    """
    outer = x
    while outer.graph.fused and outer.graph.owner is not None and outer.storage.role == "formal":
        indices = [i for i, f in enumerate(outer.graph.formals) if f.storage is outer.storage]
        outer = outer.graph.owner.operands[indices[0]]
    if outer.storage.role != "param" or x.is_contiguous:
        return None
    order, step = list[int](), ONE
    while len(order) < x.ndim:
        axes = [i for i, n in enumerate(x.strides) if n == step and i not in order]
        if not axes:
            return None
        order.insert(0, axes[0])
        step = step * x.sizes[axes[0]]
    return tuple(order)


def expanded(t: Tensor, sizes: Sizes, kept_axes: Sequence[int | None], like: Tensor | None = None) -> Tensor:
    """Return a view repeated along axes for which `kept_axes` has None, restricted like another tensor."""
    domain = like.domain if like is not None and t.domain is None else None
    return apply(Expand(sizes=sizes, kept=tuple(kept_axes), domain=domain), [t], "expand")[0]


def summed(g: Tensor, names: Sequence[str], kept_names: Sequence[str]) -> Tensor:
    """Sum a gradient over the axes not in `kept_names`; '1' keeps an axis with size 1."""
    pattern = f"{' '.join(names)} -> {' '.join(kept_names)}"
    if set(names) - set(kept_names):
        return reduce(g, pattern, "sum")
    if tuple(names) == tuple(kept_names):
        return g
    return rearrange(g, pattern)


def zero_filled(g: Tensor) -> Tensor:
    """Return a restricted gradient with zeros outside its domain."""
    if g.domain is None:
        return g
    domain, query, key = g.domain
    names = [f"n{i}" for i in range(g.ndim)]
    order = [n for i, n in enumerate(names) if i not in (query, key)] + [names[query], names[key]]
    reordered = g if order == names else rearrange(g, f"{' '.join(names)} -> {' '.join(order)}")
    zeros = Pointwise(function=FUNCTIONS["causal_mask_backward"], masked=domain)
    (masked,) = apply(zeros, [reordered], "zeros_elsewhere")
    return masked if order == names else rearrange(masked, f"{' '.join(order)} -> {' '.join(names)}")


def sum_to(g: Tensor, x: Tensor) -> Tensor:
    """Reduce a gradient to the shape and dtype of a broadcast operand: torch's `sum_to`, then a cast.

    A real operand combined with complex ones gets the real part.
    """
    if g.dtype.kind == "complex" and x.dtype.kind != "complex":
        g = real_part(g)
    names = [f"n{i}" for i in range(g.ndim)]
    last = names[g.ndim - x.ndim :]
    first = g.sizes[g.ndim - x.ndim :]
    result_names = ["1" if n == ONE and m != ONE else name for name, n, m in zip(last, x.sizes, first, strict=True)]
    reduced = summed(g, names, result_names)
    return cast(reduced if x.domain is not None else zero_filled(reduced), x.dtype)
