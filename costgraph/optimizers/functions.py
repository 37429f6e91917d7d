"""Elementwise functions that torch's kernels do in one pass over their operands."""

from __future__ import annotations

from ..ops.pointwise import Function

__all__ = ["ADD_PRODUCT", "ADD_QUOTIENT", "ADD_SCALED", "ADD_SCALED_PRODUCT", "ADD_SCALED_QUOTIENT", "NON_FINITE"]

ADD_SCALED = Function("add_scaled", 3, 2, formula="a + t * b")
ADD_PRODUCT = Function("add_product", 3, 2, formula="a + b * c")
ADD_QUOTIENT = Function("add_quotient", 3, 2, formula="a + b / c")
ADD_SCALED_PRODUCT = Function("add_scaled_product", 4, 3, formula="a + t * b * c")
ADD_SCALED_QUOTIENT = Function("add_scaled_quotient", 4, 3, formula="a + t * b / c")
NON_FINITE = Function("non_finite", 1, 1, formula="1 where x is infinite or no number, else 0")
