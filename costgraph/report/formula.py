"""Write formulas as text, LaTeX and Python source, with the common part of a maximum factored out."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

import sympy
from sympy.printing.latex import LatexPrinter
from sympy.printing.str import StrPrinter

from ..algebra.extremum import Max, Min
from ..algebra.extremum import shared as split
from ..algebra.polynomial import Poly, generator, poly
from ..algebra.symbols import is_name, shorten
from ..bind.evaluate import Formula
from ..errors import FormatError, UnsupportedError
from ..hardware.tables import legend_rows

__all__ = [
    "FORMATS",
    "common_part",
    "factored",
    "formula_latex",
    "formula_python",
    "formula_text",
    "shared",
    "with_legend",
    "write_formula",
    "written_symbols",
]

# symbols of the formulas written in the innermost block of `written_symbols`
_WRITTEN: ContextVar[set[str] | None] = ContextVar("written", default=None)


@contextmanager
def written_symbols() -> Iterator[set[str]]:
    """Collect the symbols of all formulas that are written as text in a block, for their legend."""
    names: set[str] = set()
    token = _WRITTEN.set(names)
    try:
        yield names
    finally:
        _WRITTEN.reset(token)


def with_legend(lines: Iterable[str], descriptions: Mapping[str, str]) -> list[str]:
    """Return lines, followed by the legend of the symbols in the formulas that these write.

    The lines have to be written lazily, by a generator.
    """
    with written_symbols() as names:
        text = [*lines]
    legend = ["  ".join(row) for row in legend_rows(names, descriptions)]
    return [*text, *([""] if legend else []), *legend]


def common_part(formula: Formula) -> tuple[sympy.Expr, sympy.Expr]:
    """Split a Max or Min into the part common to all cases and the rest.

    Parameters
    ----------
    formula : sympy.Expr or number
        Other formulas have no common part.

    Returns
    -------
    tuple of sympy.Expr
        (common, rest), which sum to the formula. Each monomial of `common` has its smallest coefficient over all cases.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, K = cg.dims("B D F K")
    >>> common_part(cg.Max(4*D*F + 8*B*F, 4*D*F + 4*B*F + 4*B*K))
    (4*B*F + 4*D*F, Max(4*B*F, 4*B*K))
    """
    expr = sympy.sympify(formula, strict=True)
    if not isinstance(expr, Max | Min):
        return sympy.Integer(0), expr
    common, remainders = shared(expr.args)
    return common, type(expr)(*remainders, owners=expr.owners)


def shared(cases: Sequence[Formula]) -> tuple[sympy.Expr, list[sympy.Expr]]:
    """Split formulas into their common part and the rest of each; a single formula has no common part."""
    if len(cases) == 1:
        return sympy.Integer(0), [sympy.sympify(cases[0], strict=True)]
    common, remainders = split([poly(sympy.sympify(c, strict=True)) for c in cases])
    return common.expr, [p.expr for p in remainders]


def _content(expr: sympy.Expr) -> tuple[Poly, Poly]:
    """Split a sum into the largest common factor of its terms and the remaining sum."""
    p = poly(expr)
    if len(p.terms) < 2:
        return Poly({(): 1}), p
    numbers = [Fraction(c) for c in p.terms.values()]
    number = Fraction(math.gcd(*(c.numerator for c in numbers)), math.lcm(*(c.denominator for c in numbers)))
    powers = [dict(m) for m in p.terms]
    shared = {k: min(m.get(k, 0) for m in powers) for k in powers[0]}
    factor = Poly({tuple(sorted((k, e) for k, e in shared.items() if e > 0)): number})
    return factor, p / factor


def _product(expr: sympy.Expr, show: Callable[[sympy.Expr], str], marks: Sequence[str]) -> str:
    """Write a sum as factor * (...), which sympy would expand."""
    factor, remainder = _content(expr)
    text = show(remainder.expr)
    times, opening, closing = marks
    return text if factor == 1 else f"{show(factor.expr)}{times}{opening}{text}{closing}"


def _assemble(formula: Formula, show: Callable[[sympy.Expr], str], marks: Sequence[str]) -> str:
    """Write common * (...) + Max(...), or the plain formula without a common part."""
    common, remainder = common_part(formula)
    if common == 0 or not isinstance(remainder, Max | Min):
        return show(sympy.sympify(formula, strict=True))
    return f"{_product(common, show, marks)} + {show(remainder)}"


# -- text --------------------------------------------------------------------------------------------------------


class _Text(StrPrinter):  # type: ignore[misc]  # sympy has no types
    """sympy's text printer, optionally with grouped digits as in Python source."""

    # keep sympy from printing Max itself, ungrouped
    printmethod = "_costgraph_text"

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.grouped = grouped

    def _print_Integer(self, expr: sympy.Integer) -> str:  # noqa: N802  # sympy's naming
        return f"{int(expr):_}" if self.grouped else str(int(expr))

    def _print_Rational(self, expr: sympy.Rational) -> str:  # noqa: N802  # sympy's naming
        return f"{int(expr.p):_}/{int(expr.q):_}" if self.grouped else f"{expr.p}/{expr.q}"

    def _extremum(self, expr: sympy.Expr) -> str:
        return f"{type(expr).__name__}({', '.join(self._print(a) for a in expr.args)})"

    _print_Max = _extremum  # noqa: N815  # sympy's naming
    _print_Min = _extremum  # noqa: N815  # as above


def _record(formula: Formula) -> None:
    written = _WRITTEN.get()
    if written is not None and isinstance(formula, sympy.Expr):
        written.update(s.name for s in formula.free_symbols)


def formula_text(formula: Formula, *, grouped: bool = False) -> str:
    """Write a formula as text.

    Parameters
    ----------
    formula : sympy.Expr or number
        The formula.
    grouped : bool
        Group digits with `_`, as in Python source.

    Returns
    -------
    str
        One line.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, K = cg.dims("B D F K")
    >>> formula_text(4*D*F + 4*F*K + cg.Max(8*B*F, 4*B*F + 4*B*K))
    '4*D*F + 4*F*K + Max(8*B*F, 4*B*F + 4*B*K)'
    >>> formula_text(cg.Max(4*D*F + 4*F*K + 8*B*F, 4*D*F + 4*F*K + 4*B*K))
    '4*F*(D + K) + Max(8*B*F, 4*B*K)'
    """
    printer = _Text(grouped)
    _record(formula)
    return _assemble(formula, printer.doprint, ("*", "(", ")"))


def factored(formula: Formula, *, grouped: bool = False) -> str:
    """Write a sum as text with its largest common factor in front."""
    _record(formula)
    return _product(sympy.sympify(formula, strict=True), _Text(grouped).doprint, ("*", "(", ")"))


# -- LaTeX -------------------------------------------------------------------------------------------------------


class _Latex(LatexPrinter):  # type: ignore[misc]  # sympy has no types
    """sympy's LaTeX printer, with multi-letter names as words instead of products or subscripts."""

    def _print_Symbol(self, expr: sympy.Symbol, style: str = "plain") -> str:  # noqa: N802  # sympy's naming
        name = str(expr.name)
        return name if re.fullmatch(r"[A-Za-z]", name) else rf"\mathit{{{name.replace('_', chr(92) + '_')}}}"


def formula_latex(formula: Formula) -> str:
    r"""Write a formula as LaTeX, for math mode.

    Parameters
    ----------
    formula : sympy.Expr or number
        The formula.

    Returns
    -------
    str
        One line, without dollar signs.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, n_heads = cg.dims("B n_heads")
    >>> print(formula_latex(2*B*n_heads**2))
    2 B \mathit{n\_heads}^{2}
    """
    return _assemble(formula, _Latex().doprint, (" ", r"\left(", r"\right)"))


# -- Python ------------------------------------------------------------------------------------------------------

_IMPORTS = ((r"\bmath\.", "import math"), (r"\bFraction\(", "from fractions import Fraction"))
_RESERVED = {"math", "Fraction", "max", "min", *keyword.kwlist}


class _Source:
    """Writes expressions that are exact for Python integers; Python keywords get an underscore."""

    def __init__(self, names: list[str]) -> None:
        self.names: dict[str, str] = {}
        used = {*names, *_RESERVED}
        for n in names:
            free = n
            while n in _RESERVED and free in used:
                free += "_"
            used.add(free)
            self.names[n] = free

    def ratio(self, expr: sympy.Expr) -> str:
        """Write any analysis result."""
        if expr.is_Mul:  # an intensity: divide once, not per term
            numerator, denominator = expr.as_numer_denom()
            return self.poly(poly(numerator)) if denominator == 1 else self.divided(poly(numerator), poly(denominator))
        common, remainder = common_part(expr)
        return (
            self.poly(poly(remainder)) if common == 0 else f"{self.poly(poly(common))} + {self.poly(poly(remainder))}"
        )

    def divided(self, numerator: Poly, denominator: Poly) -> str:
        return f"Fraction({self.poly(numerator)}, {self.poly(denominator)})"

    def poly(self, p: Poly) -> str:
        lowest: dict[str, int] = {}
        for m in p.terms:
            for k, e in m:
                lowest[k] = min(e, lowest.get(k, 0))
        scale = math.lcm(*(Fraction(c).denominator for c in p.terms.values()))
        denominator = Poly({tuple(sorted((k, -e) for k, e in lowest.items() if e < 0)): scale})
        return self.sum(p) if denominator == 1 else self.divided(p * denominator, denominator)

    def sum(self, p: Poly) -> str:
        terms = []
        for m, c in sorted(p.terms.items(), key=lambda t: (-sum(e for _, e in t[0]), t[0])):
            factors = [f"{self.generator(k)}**{e}" if e != 1 else self.generator(k) for k, e in m]
            if abs(c) != 1 or not factors:
                factors.insert(0, str(abs(c)))
            terms.append(("- " if c < 0 else "+ ") + "*".join(factors))
        text = " ".join(terms) or "0"
        return text.replace("- ", "-", 1) if text.startswith("-") else text.removeprefix("+ ")

    def generator(self, key: str) -> str:
        if key[0] != "~":
            return self.names[key]
        expr = generator(key)
        arguments = [self.poly(poly(a)) for a in expr.args]
        if isinstance(expr, Max | Min):
            return f"{'max' if isinstance(expr, Max) else 'min'}({', '.join(arguments)})"
        if isinstance(expr, sympy.floor | sympy.ceiling):
            return f"math.{'floor' if isinstance(expr, sympy.floor) else 'ceil'}({arguments[0]})"
        if isinstance(expr, sympy.Pow):
            # without Fraction, 1/(a + b) would lose digits
            return f"(Fraction({arguments[0]})**({arguments[1]}))"
        raise UnsupportedError(
            f"Python source of {expr}: no rule for {type(expr).__name__}, expected format text or latex"
        )


def formula_python(formula: Formula, name: str = "formula", summary: str = "") -> str:
    """Write a formula as source code of a Python function, exact for integers.

    Parameters
    ----------
    formula : sympy.Expr or number
        The formula.
    name : str
        Function name.
    summary : str
        Docstring of the function.

    Returns
    -------
    str
        Source that needs only the standard library. Arguments are the symbols in alphabetical order; those that are
        Python keywords get an underscore.

    Raises
    ------
    FormatError
        If the name is not an identifier.
    UnsupportedError
        If the formula contains an unsupported function.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, F, K = cg.dims("B F K")
    >>> print(formula_python(cg.Max(8*B*F, 4*B*F + 4*B*K), "peak"))
    def peak(B, F, K):
        return 4*B*F + max(4*B*F, 4*B*K)
    """
    if not is_name(name) or keyword.iskeyword(name):
        raise FormatError(f"Python source: name {shorten(name)}, expected an identifier")
    expr = sympy.sympify(formula, strict=True)
    source = _Source(sorted(s.name for s in expr.free_symbols))
    body = source.ratio(expr) if expr.free_symbols else repr(formula)
    lines = [f"def {name}({', '.join(source.names[n] for n in sorted(source.names))}):"]
    if summary:
        lines.append('    """' + re.sub(r'[^ -~]|[\\"]', "", summary) + '"""')
    imports = [f"{import_line}\n" for mark, import_line in _IMPORTS if re.search(mark, body)]
    return "".join(imports) + ("\n\n" if imports else "") + "\n".join([*lines, f"    return {body}"])


#: Formula writers by command-line name.
FORMATS: dict[str, Callable[..., Any]] = {
    "text": formula_text,
    "latex": formula_latex,
    "python": formula_python,
}


def write_formula(formula: Formula, format_: str, name: str, summary: str) -> str:
    """Write a formula in one of `FORMATS`, else raise FormatError; name and summary are for Python source."""
    if format_ not in FORMATS:
        raise FormatError(f"format {shorten(format_)}: expected one of {', '.join(FORMATS)}")
    return str(formula_python(formula, name, summary) if format_ == "python" else FORMATS[format_](formula))
