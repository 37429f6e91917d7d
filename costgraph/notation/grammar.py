"""Parse formulas and assumptions from text, with a safe grammar: sympy's parser evaluates Python.

formula  = term {("+" | "-") term}
term     = factor {("*" | "/") factor}
factor   = "-" factor | power
power    = atom ["**" factor]
atom     = integer | decimal | name | function "(" formula {"," formula} ")" | "(" formula ")"
function = "Max" | "Min" | "floor" | "ceiling" | "sqrt" | "log"
relation = formula ("==" | ">=" | "<=" | ">" | "<") formula
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from math import ceil, comb

import sympy

from ..algebra.dominance import Relation
from ..algebra.extremum import Max, Min
from ..algebra.polynomial import Poly, poly, power, total
from ..algebra.symbols import is_name, shorten, shown, symbol
from ..errors import CostGraphError, PatternError

__all__ = ["parse_formula", "parse_relation"]

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([A-Za-z_]\w*)|(\*\*|==|>=|<=|[-+*/(),<>])|(\S))", re.ASCII)
# Limits on input: model formulas are never deeper, longer or larger.
_LONGEST = 20_000
_DEEPEST = 60
_MOST_DIGITS = 40
_MOST_ARGUMENTS = 200
_MOST_TERMS = 2000  # in a sum; later steps may take quadratic time
_MOST_WORK = 20_000  # terms over all intermediate sums
_MOST_ROUNDED = 200  # terms in a floor or ceiling
_MOST_BITS = 1 << 13


def _sqrt(base: sympy.Expr) -> sympy.Expr:
    return power(poly(base), poly(Fraction(1, 2))).expr  # raises for values without a root


_FUNCTIONS: dict[str, Callable[..., sympy.Expr]] = {
    "Max": Max,
    "Min": Min,
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "sqrt": _sqrt,
    "log": sympy.log,
}
_OF_SEVERAL = (Max, Min)


class _Reader:
    """Recursive-descent parser for one text."""

    def __init__(self, text: str, place: str) -> None:
        if not isinstance(text, str):
            raise PatternError(f"{place}: got {shown(text)}, expected text")
        if len(text) > _LONGEST:
            raise PatternError(f"{place}: {len(text)} characters, expected at most {_LONGEST}")
        self.text, self.place = text, place
        self.tokens: list[tuple[str, int]] = []
        for match in _TOKEN.finditer(text):
            if match.group(4):
                raise self.error(f"character {match.group(4)!r} at position {match.start(4)}")
            token = match.group(1) or match.group(2) or match.group(3)
            self.tokens.append((token, match.start(match.lastindex or 0)))
        self.at = 0
        self.depth = 0
        self.terms = 0  # over all intermediate results

    def error(self, problem: str) -> PatternError:
        return PatternError(
            f"{self.place}: {problem} in {shorten(self.text)}; expected a formula such as '2*B*S + D/H' or a relation "
            f"such as 'F >= D'"
        )

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.peek()
        if token in expected and token:
            self.at += 1
            return token
        return ""

    def need(self, expected: str) -> None:
        if not self.take(expected):
            raise self.error(f"{self.place_of_next()}, expected {expected!r}")

    def place_of_next(self) -> str:
        if self.at < len(self.tokens):
            token, position = self.tokens[self.at]
            return f"{shorten(token)} at position {position}"
        return "the end of the text"

    def formula(self) -> Poly:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self.error(f"more than {_DEEPEST} levels of brackets")
        terms = [self.term()]
        while sign := self.take("+", "-"):
            terms.append(self.term() if sign == "+" else -self.term())
        self.depth -= 1
        return self.checked(total(terms))

    def term(self) -> Poly:
        out = self.factor()
        while sign := self.take("*", "/"):
            right = self.factor()
            if len(out.terms) * len(right.terms) > _MOST_WORK:
                raise self.error(f"{len(out.terms)} by {len(right.terms)} terms, too large to be written out,")
            out = self.checked(out * right if sign == "*" else out / right)
        return out

    def factor(self) -> Poly:
        negative = False
        while self.take("-"):
            negative = not negative
        out = self.power()
        return -out if negative else out

    def power(self) -> Poly:
        base = self.atom()
        if not self.take("**"):
            return base
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self.error(f"more than {_DEEPEST} levels of powers")
        exponent = self.factor()
        self.depth -= 1
        if base.constant is not None and base.constant <= 0 and exponent.constant is None:
            raise self.error(f"a power of {base}, expected a positive number")
        if exponent.constant is None:
            return self.checked(power(base, exponent))
        if isinstance(exponent.constant, Fraction):
            self.need_room(base, ceil(abs(exponent.constant)))
            return self.checked(power(base, exponent))
        self.need_room(base, abs(exponent.constant))
        return self.checked(base**exponent.constant)

    def need_room(self, base: Poly, exponent: int) -> None:
        """Raise if a power of a sum would become too long, before expanding it."""
        n = len(base.terms)
        if n > 1 and (exponent > _MOST_TERMS or comb(n + exponent - 1, exponent) > _MOST_TERMS):
            raise self.error("sums or numbers too large to be written out")

    def checked(self, value: Poly) -> Poly:
        """Enforce the limits on terms and digits."""
        self.terms += len(value.terms)
        digits = max((max(abs(c.numerator), c.denominator) for c in value.terms.values()), default=0)
        if len(value.terms) > _MOST_TERMS or self.terms > _MOST_WORK or digits.bit_length() > _MOST_BITS:
            raise self.error("sums or numbers too large to be written out")
        return value

    def atom(self) -> Poly:
        token = self.peek()
        if not token:
            raise self.error(self.place_of_next())
        if token[0].isdigit():
            if len(token) > _MOST_DIGITS:
                raise self.error(f"a number of {len(token)} digits")
            self.at += 1
            return poly(Fraction(token))
        if self.take("("):
            inner = self.formula()
            self.need(")")
            return inner
        if not is_name(token):
            raise self.error(self.place_of_next())
        self.at += 1
        if not self.take("("):
            return poly(symbol(token))
        function = _FUNCTIONS.get(token)
        if function is None:
            raise self.error(f"function {token!r}, expected one of {', '.join(_FUNCTIONS)},")
        arguments = [self.formula()]
        while self.take(","):
            arguments.append(self.formula())
        self.need(")")
        limit = _MOST_ARGUMENTS if function in _OF_SEVERAL else 1
        if len(arguments) > limit:
            raise self.error(f"{len(arguments)} arguments of {token}, expected at most {limit},")
        if limit == 1 and len(arguments[0].terms) > _MOST_ROUNDED:
            raise self.error(f"{len(arguments[0].terms)} terms in {token}, expected at most {_MOST_ROUNDED},")
        return self.checked(poly(function(*(a.expr for a in arguments))))

    def end(self) -> None:
        if self.at < len(self.tokens):
            raise self.error(self.place_of_next())


def parse_formula(text: str, place: str = "formula") -> Poly:
    """Parse a formula of numbers, names, `+ - * / **`, brackets, `Max`, `Min`, `floor`, `ceiling`, `sqrt` and `log`.

    Raises PatternError, naming `place`, for any other text.

    Examples
    --------
    >>> parse_formula("2*B*(D + 1)")
    2*B*D + 2*B
    """
    reader = _Reader(text, place)
    try:
        out = reader.formula()
        reader.end()
    except PatternError:
        raise
    except CostGraphError as error:  # add the text and place to the algebra's message
        raise reader.error(str(error)) from None
    return out


def parse_relation(text: str, place: str = "assumption") -> Relation:
    """Parse an assumption such as `F >= D`, `D == H*K` or `S <= 1024`: two formulas with `==`, `>=`, `<=`, `>` or `<`.

    Sizes are integers, so `a > b` is stored as `a - b - 1 >= 0`. Raises PatternError, naming `place`, for any other
    text.
    """
    reader = _Reader(text, place)
    try:
        left = reader.formula()
        sign = reader.take("==", ">=", "<=", ">", "<")
        if not sign:
            raise reader.error(f"{reader.place_of_next()}, expected one of == >= <= > <")
        right = reader.formula()
        reader.end()
    except PatternError:
        raise
    except CostGraphError as error:
        raise reader.error(str(error)) from None
    difference = right - left if sign in ("<=", "<") else left - right
    return Relation(
        text.strip(), difference, equal=sign == "==", strict=sign in ("<", ">"), subject=sorted(left.names())
    )
