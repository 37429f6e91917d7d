"""Reductions and scans: 1 for each element that joins a sum, a product or an extremum, and what is done before."""

from __future__ import annotations

from ....algebra.extremum import smaller
from ....algebra.polynomial import Poly
from ....ops.functions import Function
from ..call import Call, Counts, Spec
from .amounts import REDUCE, each, is_number, together
from .table import Rule, rule

__all__: list[str] = []  # its rules are found in RULES

#: What is done with each element of the operand.
_EACH: dict[str, tuple[str | Function, ...]] = {
    **dict.fromkeys(
        ("all", "amax", "amin", "any", "argmax", "argmin", "cummax", "cummin", "cumprod", "cumsum", "max", "mean",
         "min", "prod", "sum", "_cummax_helper", "_cummin_helper", "_is_all_true", "_is_any_true"),
        (REDUCE,),
    ),
    "aminmax": (REDUCE, REDUCE),
    "nansum": ("eq", "where", REDUCE),
    "count_nonzero": ("eq", REDUCE),
    "nonzero": ("eq", REDUCE),  # how many they are is known before their positions are written
    **dict.fromkeys(
        ("_unique", "_unique2", "bincount", "masked_select", "unique_consecutive", "unique_dim"), (REDUCE,)
    ),
    "histc": ("sub", "mul", "floor", REDUCE),  # which bin, and one more in it
    "logcumsumexp": ("maximum", "sub", "abs", "neg", "exp", "log1p", "add"),  # logaddexp with what came before
    # a pass over the data: how many more a sort makes is up to the algorithm and the data
    **dict.fromkeys(("kthvalue", "median", "mode", "nanmedian", "sort", "topk"), (REDUCE,)),
}  # fmt: skip


def _of(*steps: str | Function) -> Rule:
    return lambda call: each(call["self"].numel, *steps)


for _name, _steps in _EACH.items():
    rule(_name)(_of(*_steps))


@rule("var", "var_mean", "std", "std_mean")
def variance(call: Call) -> Counts:
    """Count mean, subtraction, square and mean for each element, and the root of each result of a deviation."""
    spread = each(call["self"].numel, REDUCE, "sub", "square", REDUCE)
    return together(spread, each(call.out.numel, "sqrt")) if call.name.startswith("std") else spread


@rule("logsumexp")
def logsumexp(call: Call) -> Counts:
    """Count maximum, subtraction, exp and sum for each element; logarithm and addition for each result."""
    return together(each(call["self"].numel, REDUCE, "sub", "exp", REDUCE), each(call.out.numel, "log", "add"))


def norm_of(operand: Spec, order: object, results: Poly) -> Counts:
    """Return the cost of the norm of this order: of 2 where it is None."""
    steps: tuple[tuple[str | Function, ...], tuple[str, ...]]
    if order is None or is_number(order, 2):
        steps = ("square", REDUCE), ("sqrt",)
    elif is_number(order, 0):
        steps = ("eq", REDUCE), ()
    elif any(is_number(order, n) for n in (1, float("inf"), float("-inf"))):
        steps = ("abs", REDUCE), ()
    else:
        steps = ("abs", "pow", REDUCE), ("pow",)
    return together(each(operand.numel, *steps[0]), each(results, *steps[1]))


@rule("linalg_vector_norm", "norm")
def norm(call: Call) -> Counts:
    """Count square and sum for each element and a root for each result, or what another order takes."""
    return norm_of(call["self"], call.get("ord") if "ord" in call.arguments else call.get("p"), call.out.numel)


@rule("dist")
def distance(call: Call) -> Counts:
    """Count a subtraction for each pair of elements, and the norm."""
    return together(each(call["self"].numel, "sub"), norm_of(call["self"], call.get("p"), call.out.numel))


@rule("trace")
def trace(call: Call) -> Counts:
    """Count one addition for each element of the diagonal, all of which is read."""
    operand: Spec = call["self"]
    shorter = smaller(*operand.sizes)
    return Counts(pointwise=shorter, reads=(shorter * operand.dtype.bytes,))
