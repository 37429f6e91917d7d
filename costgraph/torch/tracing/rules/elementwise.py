"""Costs of elementwise ops, by the library's functions per result element, also for complex dtypes.

Other ops that torch tags as pointwise count 1 FLOP per element.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ....algebra.polynomial import ONE, total
from ....ops.functions import ATEN, COMPLEX, FUNCTIONS, POWERS, Function, of_complex
from ....ops.rules import applied
from ....ops.updates import NON_FINITE
from ..call import Call, Counts
from .table import Rule, combined, is_number, per_element, rule, unsupported

__all__ = [
    "gelu_steps",
    "power_steps",
    "function_of",
    "complex_counts",
]


# -- elementwise -------------------------------------------------------------------------------------------------------

#: Ops whose function depends on their arguments; they have other rules, or translations.
_BY_ARGUMENT = frozenset({"add", "clamp", "copy", "div", "gelu", "gelu_backward", "pow", "sub"})
#: Steps per element of an argument, for ops whose result has another shape or is missing.
_OF_ARGUMENT: dict[str, tuple[str, tuple[str, ...]]] = {
    "_unsafe_masked_index_put_accumulate": ("values", ("where", "add")),
    "embedding_dense_backward": ("grad_output", ("add",)),  # per looked-up row; all rows are written
    "equal": ("self", ("eq",)),
    "glu_backward": ("grad_output", ("sigmoid", "mul", "sub", "mul", "mul")),  # s, g * s and g * s * (1 - s) * a
    "multi_margin_loss_backward": ("self", ("sub", "add", "less", "where", "add")),  # margin, its sign, the target's
}


def _of(*steps: str | Function) -> Rule:
    return lambda call: per_element(call.out.numel, *steps)


def _of_argument(name: str, steps: tuple[str, ...]) -> Rule:
    return lambda call: per_element(call[name].numel, *steps)


for _name, _argument in _OF_ARGUMENT.items():
    rule(_name)(_of_argument(*_argument))
for _name, _function in (FUNCTIONS | ATEN).items():
    if _name not in _BY_ARGUMENT and hasattr(torch.ops.aten, _name):
        rule(_name)(_of(_function))
rule("bucketize", "searchsorted")(_of("less"))  # per lookup: the number of search steps depends on the data
rule("linalg_cross")(_of("mul", "mul", "sub"))


def function_of(name: str) -> Function:
    """Return the function that an elementwise op applies; an unknown one counts 1 FLOP."""
    return ATEN.get(name) or FUNCTIONS.get(name) or Function(name.strip("_"), 1, 1)


def gelu_steps(approximate: object) -> tuple[str]:
    """Return the function for this approximation of GELU."""
    return ("gelu_tanh",) if approximate == "tanh" else ("gelu",)


def power_steps(exponent: object) -> tuple[str, ...]:
    """Return the functions for a power with this exponent."""
    return next((steps for number, steps in POWERS.items() if is_number(exponent, number)), ("pow",))


@rule("native_dropout", "_fused_dropout")
def dropout(call: Call) -> Counts:
    """Count mask and scale; random numbers are free, and without training it is a copy."""
    if call.get("train") is False:
        return Counts()
    return per_element(call.out.numel, "mul", "mul")


# -- scaled gradients --------------------------------------------------------------------------------------------


@rule("_amp_foreach_non_finite_check_and_unscale")
def unscale(call: Call) -> Counts:
    """Count a check for non-finite values, and the product with the reciprocal scale."""
    return per_element(total(t.numel for t in call["self"]), NON_FINITE, "mul")


@rule("_amp_update_scale")
def update_scale(call: Call) -> Counts:
    """Count a comparison, an addition and a product for the single scale."""
    return per_element(ONE, "eq", "add", "mul")


# -- complex numbers ---------------------------------------------------------------------------------------------------
# FLOPs of complex operands count arithmetic on real and imaginary parts: 2 for an addition, 6 for a product (four
# products, two sums), 11 for a quotient; `costgraph.ops.functions.COMPLEX` has the rest. Operands count in their common
# dtype, as torch casts a real one first.

#: Ops that apply two of the library's functions, or one under another name.
_COMPLEX_STEPS = {"addcmul": ("fma",), "addcdiv": ("div", "add")}
#: Ops whose FLOPs are additions.
_SUMS = frozenset({
    "cumsum", "embedding_dense_backward", "index_add", "index_put", "mean", "put", "scatter_add", "sum", "trace",
})  # fmt: skip
_PRODUCTS = frozenset({"addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot"})
#: Ops whose rules handle complex numbers themselves.
_COMPLEX_AWARE = frozenset({"_fft_c2c", "_fft_c2r", "_fft_r2c", "polar"})
_SCALES = ("alpha", "beta", "value")


def complex_counts(call: Call, counts: Counts) -> Counts:
    """Return the cost of a call with complex operands or results, from its cost for real numbers.

    Bytes are unchanged; FLOPs are those of the parts. UnsupportedError for arithmetic without a complex cost.
    """
    flops = {k: v for k, v in counts.by_kind().items() if v}
    bytes_ = {"reads": counts.reads, "writes": counts.writes}
    if call.name in ("abs", "angle"):  # the kernel computes a complex result first
        function = FUNCTIONS["exp"] if call.name == "angle" else of_complex(FUNCTIONS["abs"])
        return replace(combined(applied(call.out.numel, function), **bytes_), workspace=2 * call.out.bytes)
    if not flops or call.name in _COMPLEX_AWARE:
        return counts
    if call.name in ("conj_physical", "_conj_physical"):  # negates the imaginary part
        return Counts(pointwise=call.out.numel, reads=counts.reads, writes=counts.writes)
    scaled = [n for n in _SCALES if call.get(n) is not None and not is_number(call[n], 1)]
    # the kernel of a power of 2 multiplies
    name = "square" if call.name == "pow" and is_number(call.get("exponent"), 2) else function_of(call.name).name
    if name in COMPLEX or call.name in _COMPLEX_STEPS:
        steps = (*_COMPLEX_STEPS.get(call.name, (name,)), *("mul" for _ in scaled))
        return combined(applied(call.out.numel, *(of_complex(FUNCTIONS[s]) for s in steps)), **bytes_)
    if call.name in _SUMS or (call.name in _PRODUCTS and not scaled):
        return Counts(
            matmul=counts.matmul * 4, pointwise=counts.pointwise * 2, reads=counts.reads, writes=counts.writes
        )
    raise unsupported(call, "no rule for complex operands", "real ones")
