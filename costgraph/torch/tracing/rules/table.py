"""Registry of cost rules, and helpers to write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from numbers import Real
from typing import Any

from ....algebra.polynomial import ONE, ZERO, Poly, poly, total
from ....errors import UnsupportedError
from ....ir.strides import contiguous
from ....ops.functions import FUNCTIONS, Function
from ....ops.registry import adding
from ....ops.rules import Flops, applied
from ..call import Call, Counts, Spec

__all__ = [
    "RULES",
    "Rule",
    "rule",
    "REDUCE",
    "contiguous_copy",
    "per_element",
    "is_number",
    "operand_bytes",
    "product",
    "size",
    "combined",
    "unsupported",
]


# -- registry ----------------------------------------------------------------------------------------------------------

#: Returns the costs of a call.
Rule = Callable[[Call], Counts]

#: Rules by op name, or by name and overload where overloads differ, such as `max.other`.
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a cost rule for ops by name.

    Parameters
    ----------
    *names : str
        Names of aten ops, as in `Call.name`, or with an overload, such as `max.other`.

    Returns
    -------
    callable
        A decorator that returns the rule unchanged.

    Raises
    ------
    GraphError
        If a name is already registered.

    Examples
    --------
    >>> from costgraph.torch.tracing.call import Counts
    >>> from costgraph.torch.tracing.rules import RULES, rule
    >>> @rule("my_activation")
    ... def my_activation(call):
    ...     return Counts(pointwise=3 * call.out.numel)
    >>> RULES.pop("my_activation") is my_activation
    True
    """
    return adding(RULES, "a rule", *names, what="op of torch")


# -- helpers -----------------------------------------------------------------------------------------------------------

#: One step of a reduction, outside the function table: 1 FLOP per reduced element.
REDUCE = Function("reduce", 1, 1, formula="an element joins a sum, a product or an extremum")


def per_element(count: Poly, *steps: str | Function) -> Counts:
    """Return the cost to apply functions in turn to `count` elements; operands and results count whole."""
    return combined(applied(count, *(FUNCTIONS[s] if isinstance(s, str) else s for s in steps)))


def combined(*parts: Flops, reads: Sequence[Poly] | None = None, writes: Sequence[Poly] | None = None) -> Counts:
    """Return the total cost of a kernel's parts, with its bytes where they differ from whole tensors."""
    workspace = total(p.workspace for p in parts if isinstance(p, Counts))
    flops = sum(parts, start=Flops())
    return Counts(**flops.by_kind(), full=flops.full, reads=reads, writes=writes, workspace=workspace)


def size(value: Any) -> Poly:
    """Return a size or number from the schema as a polynomial."""
    return value if isinstance(value, Poly) else poly(value)


def product(sizes: Iterable[Any]) -> Poly:
    """Return the product of sizes."""
    return prod(map(size, sizes), start=ONE)


def contiguous_copy(t: Spec) -> Poly:
    """Return the bytes to make a tensor contiguous; 0 if it already is."""
    dense = zip(t.sizes, t.strides, contiguous(t.sizes), strict=True)
    return (
        ZERO
        if all(n == ONE or stride == dense_stride for n, stride, dense_stride in dense)
        else t.numel * t.dtype.bytes
    )


def is_number(value: Any, number: float) -> bool:
    """Whether a scalar argument equals a number; False for sizes and unknown numbers."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) == number


def operand_bytes(call: Call, **amounts: Poly) -> tuple[Poly, ...]:
    """Return the bytes read per operand: whole tensors, or the given amounts by argument name."""
    bytes_read: list[Poly] = []
    for name, value in call.arguments.items():
        tensors = [value] if isinstance(value, Spec) else value if isinstance(value, tuple | list) else []
        bytes_read += [amounts.get(name, t.bytes) for t in tensors if isinstance(t, Spec)]
    return tuple(bytes_read)


def unsupported(call: Call, problem: str, expected: str) -> UnsupportedError:
    """Return the error for arguments that a rule does not cover."""
    return UnsupportedError(f"aten::{call.name}.{call.overload}: {problem}; expected {expected}")
