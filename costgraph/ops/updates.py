"""Op kinds for optimizer updates: fused elementwise steps, gradient unscaling and zeroing, all in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from ..algebra.polynomial import Poly
from ..algebra.symbols import shown
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Count,
    Flops,
    Op,
    OpKind,
    Result,
    Tensor,
    all_of,
    is_count,
    itself,
)
from ..notation.validation import Rule
from . import (
    rules,
    sharding_rule,
)
from .functions import FUNCTIONS, Function, define
from .registry import register

__all__ = [
    "ADD_PRODUCT", "ADD_QUOTIENT", "ADD_SCALED", "ADD_SCALED_PRODUCT", "ADD_SCALED_QUOTIENT", "NON_FINITE",
    "FusedUpdate", "RegisterStep", "Unscale", "ZeroGrad",
]  # fmt: skip


# torch's `addcmul` and `addcdiv` formulas also multiply by 1
def _product(a: str, b: str, number: object = 1) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Return the gradients for both factors in a scaled product."""
    return ("mul", "g", ("mul", b, number)), ("mul", "g", ("mul", a, number))


def _quotient(a: str, b: str, number: object = 1) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Return the gradients for numerator and denominator in a scaled quotient."""
    return ("mul", "g", ("div", number, b)), ("mul", ("neg", "g"), ("div", ("mul", a, number), ("mul", b, b)))


ADD_SCALED = define("add_scaled(a, t, b) = a + t * b", "g", None, ("mul", "g", "b"))
ADD_PRODUCT = define("add_product(a, b, c) = a + b * c", "g", *_product("b", "c"), order=(0, 1, 2))
ADD_QUOTIENT = define("add_quotient(a, b, c) = a + b / c", "g", *_quotient("b", "c"), result="same", order=(0, 1, 2))
ADD_SCALED_PRODUCT = define(
    "add_scaled_product(a, t, b, c) = a + t * b * c", "g", None, *_product("c", "d", "b"), order=(0, 1, 2, 3)
)
ADD_SCALED_QUOTIENT = define(
    "add_scaled_quotient(a, t, b, c) = a + t * b / c",
    "g", None, *_quotient("c", "d", "b"), result="same", order=(0, 1, 2, 3),
)  # fmt: skip
NON_FINITE = Function("non_finite", 1, 1, formula="1 where x is infinite or no number, else 0")


class RegisterStep(NamedTuple):
    """Elementwise function on registers and scalars."""

    function: Function
    scalars: tuple[complex | Poly | None, ...]
    """arguments, None in place of each register"""
    places: tuple[int, ...]
    """registers that it reads"""
    target: int
    """register that it writes"""


@dataclass(frozen=True, kw_only=True)
class InPlace(OpKind):
    """In-place op on a single tensor, with optional scalar operands."""

    writes = rules.all_results
    placed = sharding_rule.same_shape

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the mutated tensor."""
        if len(operands) not in (1, 3) or any(t.ndim for t in operands[1:]):
            raise GraphError(f"in place into {list(operands)!r}, expected a tensor and scalars")
        return [itself(operands[0])]

    def overwrites(self) -> tuple[int, ...]:
        """Return the tensor."""
        return (0,)


@register
@dataclass(frozen=True, kw_only=True)
class ZeroGrad(InPlace):
    """In-place fill with zeros, without reading."""

    name = "zero_grad"
    flops, reads = rules.free, rules.nothing


@register
@dataclass(frozen=True, kw_only=True)
class Unscale(InPlace):
    """In-place gradient unscaling by a scalar; only non-finite gradients set the overflow flag."""

    name = "unscale"
    reads = rules.whole

    def flops(self, op: Op) -> Flops:
        """Count a multiply and a check per gradient element."""
        return rules.applied(rules.points(op.operands[0]), FUNCTIONS["mul"], NON_FINITE)


@register
@dataclass(frozen=True, kw_only=True)
class FusedUpdate(OpKind):
    """Fused elementwise steps over several tensors; registers are the operands, then the intermediates."""

    name = "fused_update"
    steps: Annotated[tuple[RegisterStep, ...], Rule("a tuple of steps", lambda v: isinstance(v, tuple))]
    changed: Annotated[tuple[int, ...], Rule("a tuple of operand numbers", all_of(is_count))]
    """Operands that are mutated."""
    updated: Count
    """Number of equally shaped tensor operands; the others are scalars."""
    reads, writes = rules.whole, rules.all_results
    placed = sharding_rule.same_shape

    def __post_init__(self) -> None:
        """Normalize steps, which files and rewriters pass as tuples; `infer` rejects invalid ones."""
        steps = (
            RegisterStep(*s) if isinstance(s, tuple) and len(s) == len(RegisterStep._fields) else s for s in self.steps
        )
        object.__setattr__(self, "steps", tuple(steps))

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the mutated tensors."""
        self._check_fields(operands)
        first = operands[0]
        for t in operands[1 : self.updated]:
            if t.ndim != first.ndim or not all(map(first.graph.same, t.sizes, first.sizes)):
                raise ShapeError(f"fused update of {first!r} with {t!r}: expected equal shapes")
        return [itself(operands[i], i) for i in self.changed]

    def flops(self, op: Op) -> Flops:
        """Sum the FLOPs in all steps, per element."""
        return rules.applied(rules.points(op.operands[0]), *(step.function for step in self.steps))

    def overwrites(self) -> tuple[int, ...]:
        """Return the mutated operands."""
        return self.changed

    def _check_fields(self, operands: Sequence[Tensor]) -> None:
        """Raise GraphError if the fields do not describe an update on the operands."""
        if not self.updated <= len(operands) or not 0 < len(set(self.changed)) == len(self.changed):
            raise GraphError(
                f"fused update: {shown(self.updated)} tensors, of which {shown(self.changed)} change in place, "
                f"expected indices of the {len(operands)} operands"
            )
        registers = self.updated
        for step in self.steps:
            if not _is_step(step, registers):
                raise GraphError(f"fused update: step {shown(step)}, expected a function of registers and numbers")
            registers += step.target == registers
        targets = {step.target for step in self.steps if step.target < self.updated}
        if list(self.changed) != sorted(targets):
            raise GraphError(f"fused update: {shown(self.changed)} change in place, expected {sorted(targets)}")


def _is_step(step: object, registers: int) -> bool:
    if not isinstance(step, RegisterStep) or not isinstance(step.function, Function):
        return False
    record, scalars, places, target = step
    if not isinstance(scalars, tuple) or not isinstance(places, tuple):
        return False
    return (
        len(scalars) == record.arity
        and all(n is None or (isinstance(n, int | float) and not isinstance(n, bool)) for n in scalars)
        and len(places) == scalars.count(None)
        and all(type(i) is int and 0 <= i < registers for i in places)
        and type(target) is int
        and 0 <= target <= registers
    )
