"""What ops cost whose operands are complex: arithmetic of the two parts of each number.

An addition is 2, a product 6 (four products, two sums), a quotient 11; `costgraph.ops.functions.COMPLEX` has the rest.
Operands of a common format are counted, as torch casts a real one first.
"""

from __future__ import annotations

from dataclasses import replace

from ....ops.functions import FUNCTIONS, Function, of_complex
from ....ops.rules import applied
from ..call import Call, Counts
from .amounts import is_number, together, unsupported

__all__ = ["complex_counts"]

_SAME = ("add", "div", "eq", "exp", "lerp", "log", "masked_fill", "mul", "neg", "pow", "reciprocal",
         "sqrt", "sub", "where")  # fmt: skip
#: Functions of the library that an op is made of, applied to each element of its result.
_STEPS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in _SAME},
    "sgn": ("sign",),
    "addcmul": ("fma",),
    "addcdiv": ("div", "add"),
    "native_dropout_backward": ("masked_scale",),
}
#: Each FLOP of theirs is an addition of two numbers.
_SUMS = frozenset({
    "cumsum", "embedding_dense_backward", "index_add", "index_put", "mean", "put", "scatter_add", "sum", "trace",
})  # fmt: skip
_PRODUCTS = frozenset({"addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot"})
#: Their own rules speak of complex numbers already.
_OWN = frozenset({"_fft_c2c", "_fft_c2r", "_fft_r2c", "polar"})
_SCALES = ("alpha", "beta", "value")


def complex_counts(call: Call, counts: Counts) -> Counts:
    """Return the cost of a call that has complex operands or results, from what its rule says of real numbers.

    The bytes are the same, the FLOPs those of the parts; UnsupportedError if it calculates and nothing says what that
    costs.
    """
    flops = {k: v for k, v in counts.by_kind().items() if v}
    bytes_ = {"reads": counts.reads, "writes": counts.writes}
    if call.name in ("abs", "angle"):  # of a kernel that makes complex numbers first
        first = FUNCTIONS["exp"] if call.name == "angle" else of_complex(FUNCTIONS["abs"])
        return replace(together(applied(call.out.numel, first), **bytes_), workspace=2 * call.out.bytes)
    if not flops or call.name in _OWN:
        return counts
    if call.name in ("conj_physical", "_conj_physical"):  # the sign of one part
        return Counts(pointwise=call.out.numel, reads=counts.reads, writes=counts.writes)
    scaled = [n for n in _SCALES if call.get(n) is not None and not is_number(call[n], 1)]
    if call.name in _STEPS:
        steps = (*_STEPS[call.name], *("mul" for _ in scaled))
        return together(applied(call.out.numel, *(of_complex(_function(call, s)) for s in steps)), **bytes_)
    if call.name in _SUMS or (call.name in _PRODUCTS and not scaled):
        return Counts(
            matmul=counts.matmul * 4, pointwise=counts.pointwise * 2, reads=counts.reads, writes=counts.writes
        )
    raise unsupported(call, "complex numbers, of which no rule says what they cost", "real ones")


def _function(call: Call, name: str) -> Function:
    """Return a function; a square is no power, as a kernel has it."""
    squared = name == "pow" and is_number(call.get("exponent"), 2)
    return FUNCTIONS["square" if squared else name]
