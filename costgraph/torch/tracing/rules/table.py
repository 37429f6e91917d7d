"""What rules are written with: costs of functions for each index point, and of kernels that the library declares."""

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
    "each",
    "is_number",
    "operand_bytes",
    "product",
    "size",
    "together",
    "unsupported",
]


# -- table -------------------------------------------------------------------------------------------------------------
# The table of aten ops: a rule for each name, found by the call.

#: What a call costs.
Rule = Callable[[Call], Counts]

#: Rules by the name of the op, or by name and overload such as `max.other` where overloads are different functions.
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ops by name.

    Parameters
    ----------
    *names : str
        Names of aten ops as `Call.name` has them, each also with an overload behind a dot.

    Returns
    -------
    callable
        A decorator that leaves the rule as it is.

    Raises
    ------
    GraphError
        If a name has a rule already.

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


# -- amounts -----------------------------------------------------------------------------------------------------------

#: One step of a reduction, an entry of no table: 1 for each element that is reduced.
REDUCE = Function("reduce", 1, 1, formula="an element joins a sum, a product or an extremum")


def each(count: Poly, *steps: str | Function) -> Counts:
    """Return the cost of functions, or names of them, that are applied one after another at each of some index points.

    Bytes are as they are: operands and results whole.
    """
    return together(applied(count, *(FUNCTIONS[s] if isinstance(s, str) else s for s in steps)))


def together(*parts: Flops, reads: Sequence[Poly] | None = None, writes: Sequence[Poly] | None = None) -> Counts:
    """Return the FLOPs of several parts of one kernel, and its bytes where they are not whole tensors."""
    workspace = total(p.workspace for p in parts if isinstance(p, Counts))
    flops = sum(parts, start=Flops())
    return Counts(**flops.by_kind(), full=flops.full, reads=reads, writes=writes, workspace=workspace)


def size(value: Any) -> Poly:
    """Return a size or number of the schema as a polynomial."""
    return value if isinstance(value, Poly) else poly(value)


def product(sizes: Iterable[Any]) -> Poly:
    """Return the product of sizes."""
    return prod(map(size, sizes), start=ONE)


def contiguous_copy(t: Spec) -> Poly:
    """Return the bytes of the dense copy that a kernel makes of a tensor that lies otherwise; 0 of a dense one."""
    dense = zip(t.sizes, t.strides, contiguous(t.sizes), strict=True)
    return ZERO if all(n == ONE or stride == wanted for n, stride, wanted in dense) else t.numel * t.dtype.bytes


def is_number(value: Any, number: float) -> bool:
    """Whether a scalar argument is that very number; a size, or a number that is not known yet, is none."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) == number


def operand_bytes(call: Call, **instead: Poly) -> tuple[Poly, ...]:
    """Return the bytes read of each operand: whole, or what is given under the name of its argument."""
    out: list[Poly] = []
    for name, value in call.arguments.items():
        tensors = [value] if isinstance(value, Spec) else value if isinstance(value, tuple | list) else []
        out += [instead.get(name, t.bytes) for t in tensors if isinstance(t, Spec)]
    return tuple(out)


def unsupported(call: Call, found: str, expected: str) -> UnsupportedError:
    """Return the error of a rule that does not cover these arguments."""
    return UnsupportedError(f"aten::{call.name}.{call.overload}: {found}, expected {expected}")
