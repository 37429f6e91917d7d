"""Formulas as data: sums are rows over one table of monomials, nothing in them is code."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

import sympy

from ...algebra.extremum import Max, Min
from ...algebra.polynomial import Monomial, Poly, Rational, generator, poly
from ...algebra.symbols import shorten
from ...errors import UnsupportedError

__all__ = ["Tables"]

T = TypeVar("T", bound=Hashable)
# Above it a number of JavaScript is not exact: such a coefficient is text.
_LARGEST = 2**53
_KINDS = {
    Max: "max", Min: "min", sympy.Max: "max", sympy.Min: "min",
    sympy.floor: "floor", sympy.ceiling: "ceil", sympy.Pow: "pow", sympy.log: "log",
}  # fmt: skip


class Tables:
    """Polynomials by number, each once, over tables of what they are made of.

    Examples
    --------
    >>> from costgraph import dims
    >>> B, D = dims("B D")
    >>> tables = Tables()
    >>> tables.row(poly(3 * B * D**2))
    0
    >>> tables.data()
    {'rows': [[0, 3]], 'monomials': [[0, 1, 1, 2]], 'generators': ['B', 'D']}
    """

    def __init__(self) -> None:
        self._rows: dict[Poly, int] = {}
        self._monomials: dict[Monomial, int] = {}
        self._generators: dict[str, int] = {}
        self._found: dict[str, list[Any]] = {"rows": [], "monomials": [], "generators": []}

    def row(self, p: Poly) -> int:
        """Return the number of a polynomial; UnsupportedError where the engine has no rule for a function in it."""
        if p not in self._rows:
            row = [x for m, c in p.terms.items() for x in (self._monomial(m), _coefficient(c))]
            self._add("rows", self._rows, p, row)
        return self._rows[p]

    def data(self) -> dict[str, list[Any]]:
        """Return the tables as JSON has them."""
        return self._found

    def _add(self, table: str, places: dict[T, int], key: T, entry: object) -> None:
        places[key] = len(self._found[table])
        self._found[table].append(entry)

    def _monomial(self, m: Monomial) -> int:
        if m not in self._monomials:
            self._add("monomials", self._monomials, m, [x for key, power in m for x in (self._generator(key), power)])
        return self._monomials[m]

    def _generator(self, key: str) -> int:
        if key not in self._generators:
            self._add("generators", self._generators, key, key if key[0] != "~" else self._atom(generator(key)))
        return self._generators[key]

    def _atom(self, expr: sympy.Expr) -> list[Any]:
        for kind, name in _KINDS.items():
            if isinstance(expr, kind):
                return [name, *(self.row(poly(a)) for a in expr.args)]
        known = ", ".join(dict.fromkeys(_KINDS.values()))
        raise UnsupportedError(
            f"explore: {shorten(str(expr))}: no rule for {type(expr).__name__}, expected one of {known}"
        )


def _coefficient(value: Rational) -> int | str:
    return value if isinstance(value, int) and abs(value) < _LARGEST else str(value)
