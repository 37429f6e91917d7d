"""Which of two polynomials is the larger for every admissible size, decided without a numeric guess.

A polynomial is nonnegative if, after each generator is written as its lower bound plus something that is not negative,
no coefficient is negative. What is known about sizes (`Relations`) is substituted first, so that F >= D becomes
F = D + f with f >= 0. The test is sufficient, not necessary: what it cannot decide stays a regime of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import prod
from operator import ge
from typing import TypeVar

import sympy

from .errors import BindingError, PatternError
from .polynomial import ONE, Poly, Rational, as_poly, generator, poly, total

__all__ = ["BOUNDS", "NOTHING_KNOWN", "Relation", "Relations", "lower", "prune", "solve"]

Label = TypeVar("Label")

_SLACK = "+"  # first letter of a generator that is at least 0
#: Lower bound of an atom by the type of its expression; filled by the modules that define such types.
BOUNDS: dict[type, Callable[[sympy.Expr], Rational | None]] = {}


def _pow_bound(expr: sympy.Expr) -> Rational | None:
    # (1 - k/E)**T with k <= E, and 1/(S + T): positive bases, so at least 0
    return 0


def _rounded_bound(expr: sympy.Expr) -> Rational | None:
    least = lower(poly(expr.args[0]))
    if least is None:
        return None
    return least.__floor__() if isinstance(expr, sympy.floor) else least.__ceil__()


BOUNDS |= {sympy.Pow: _pow_bound, sympy.floor: _rounded_bound, sympy.ceiling: _rounded_bound}


def _least(key: str) -> Rational | None:
    """Lower bound of a generator, None where nothing is known."""
    if key[0] == _SLACK:
        return 0
    if key[0] != "~":
        return 1
    expr = generator(key)
    bound = BOUNDS.get(type(expr))
    return None if bound is None else bound(expr)


def _shifted(p: Poly) -> Poly | None:
    """Write each generator as its lower bound plus a generator that is at least 0; None where one has no bound."""
    p = _cleared(p)
    new = {}
    for key in p.keys():
        least = _least(key)
        if least is None:
            return None
        if least:
            new[key] = as_poly(least) + Poly({((_SLACK + key, 1),): 1})
    return p.substitute(new)


def _cleared(p: Poly) -> Poly:
    """Multiply by what makes all exponents nonnegative: the sign stays, as generators are positive."""
    lowest: dict[str, int] = {}
    for m in p.terms:
        for k, e in m:
            if e < 0:
                lowest[k] = min(e, lowest.get(k, 0))
    return p * Poly({tuple(sorted((k, -e) for k, e in lowest.items())): 1}) if lowest else p


def lower(p: Poly) -> Rational | None:
    """Return a number that the polynomial is never below, or None where none is found."""
    if any(e < 0 for m in p.terms for _, e in m):
        return 0 if all(c >= 0 for c in p.terms.values()) else None
    if all(c >= 0 for m, c in p.terms.items() if m):
        least = {k: _least(k) for k in p.keys()}
        return None if None in least.values() else _exact(p, least)
    shifted = _shifted(p)
    if shifted is None or any(c < 0 for m, c in shifted.terms.items() if m):
        return None
    return shifted.terms.get((), 0)


def _exact(p: Poly, at: Mapping[str, Rational | None]) -> Rational:
    return sum((c * prod((at[k] or 0) ** e for k, e in m) for m, c in p.terms.items()), start=0)


def solve(p: Poly, prefer: Sequence[str] = ()) -> tuple[str, Poly] | None:
    """Solve `p == 0` for a symbol: one that stands alone with a number, or one factor of two monomials."""
    names = [*prefer, *sorted(k for k in p.keys() if k[0] not in "~" + _SLACK and k not in prefer)]
    for key in names:
        alone = p.terms.get(((key, 1),))
        rest = p - Poly({((key, 1),): alone}) if alone else p
        if alone and key not in rest.names():
            return key, rest * _tidy_inverse(-alone)
    if len(p.terms) == 2:
        (m, c), (n, d) = sorted(p.terms.items())
        ratio = Poly({m: -c}) / Poly({n: d})  # == 1
        for key in names:
            power = next((e for m in ratio.terms for k, e in m if k == key), 0)
            if abs(power) == 1:
                rest = ratio / Poly({((key, power),): 1})
                return key, rest if power == -1 else ONE / rest
    return None


def _tidy_inverse(c: Rational) -> Fraction:
    return Fraction(1) / c


class Relation:
    """One assumption: `difference == 0` or `difference >= 0`, with its text."""

    def __init__(self, text: str, difference: Poly, *, equal: bool, subject: Sequence[str] = ()) -> None:
        self.text = text
        self.difference = difference
        self.equal = equal
        self.subject = subject  # the symbols on the left, preferred when it is solved

    def check(self, values: Mapping[str, Poly]) -> None:
        """Raise BindingError if bound sizes break the assumption."""
        left = self.difference.bind(values).constant
        if left is not None and (left < 0 or (self.equal and left != 0)):
            used = {k: v.constant for k, v in sorted(values.items()) if k in self.difference.names()}
            bound = ", ".join(f"{k}={v}" for k, v in used.items())
            raise BindingError(f"{bound}: against the assumption {self.text!r}")


class Relations:
    """What is assumed of sizes, as substitutions that a comparison applies first.

    Parameters
    ----------
    relations : iterable of Relation
        In the order in which they were stated.

    Raises
    ------
    PatternError
        If they contradict each other, or a positive integer.
    """

    def __init__(self, relations: Iterable[Relation] = ()) -> None:
        self.relations: tuple[Relation, ...] = ()
        self._steps: list[tuple[str, Poly]] = []
        self._most: dict[str, Rational] = {}
        for relation in relations:
            self._admit(relation)
            self.relations += (relation,)
            for known in self.relations:
                self._refute(known)

    def _admit(self, relation: Relation) -> None:
        difference = self.substituted(relation.difference)
        self._refute(relation)
        subject = [s for s in relation.subject if s in difference.keys()]
        if relation.equal:
            found = solve(_cleared(difference), subject)
            if found is not None:
                self._steps.append(found)
            return
        difference = _cleared(difference)
        for key in sorted(k for k in difference.keys() if k[0] not in "~" + _SLACK):
            alone = difference.terms.get(((key, 1),), 0)
            rest = difference - Poly({((key, 1),): alone}) if alone else difference
            if key in rest.names() or not alone:
                continue
            bound = rest * _tidy_inverse(-alone)
            if alone > 0:
                # F >= D: F = D + f, where a bound below 1 says nothing new
                if bound.constant is None or bound.constant > 1:
                    self._steps.append((key, bound + Poly({((_SLACK + key + relation.text, 1),): 1})))
                return
            if bound.constant is not None:
                self._most[key] = min(bound.constant, self._most.get(key, bound.constant))
                return

    def _refute(self, relation: Relation) -> None:
        difference = relation.difference
        if self.positive(-difference) or (relation.equal and self.positive(difference)):
            others = [r.text for r in self.relations if r is not relation]
            against = " and ".join(repr(t) for t in others) if others else "every positive integer"
            raise PatternError(f"assumption {relation.text!r}: contradicts {against}")

    def substituted(self, p: Poly) -> Poly:
        """Return the polynomial with everything known substituted into it."""
        for key, value in self._steps:
            if key in p.keys():
                p = p.substitute({key: value})
        return p

    def reduce(self, p: Poly) -> Poly:
        """Eliminate what an equality gives, so that equal sizes become the same polynomial."""
        for relation in self.relations:
            if relation.equal:
                found = solve(relation.difference, relation.subject)
                if found is not None:
                    p = p.bind(dict([found]))
        return p

    def _expanded(self, p: Poly) -> Poly | None:
        p = self.substituted(p)
        for key, most in self._most.items():
            degree = max((e for m in p.terms for k, e in m if k == key), default=0)
            if degree:
                # 1 <= S <= U is S = (U + t)/(1 + t) with t >= 0; the denominator is multiplied away
                t = Poly({((_SLACK + key + "<", 1),): 1})
                parts = []
                for m, c in p.terms.items():
                    power = dict(m).get(key, 0)
                    rest = Poly({tuple(f for f in m if f[0] != key): c})
                    parts.append(rest * (t + most) ** power * (t + 1) ** (degree - power))
                p = total(parts)
        return _shifted(p)

    def clip(self, key: str, value: int) -> int:
        """Return a value for a generator that is not above what it is assumed to be at most."""
        return min(value, self._most.get(key, value).__floor__())

    def nonnegative(self, p: Poly) -> bool:
        """Whether the polynomial is known to be at least 0 for all admissible sizes."""
        if all(c >= 0 for c in p.terms.values()) and all((_least(k) or -1) >= 0 for k in p.keys()):
            return True
        shifted = self._expanded(_cleared(p))
        return shifted is not None and all(c >= 0 for c in shifted.terms.values())

    def positive(self, p: Poly) -> bool:
        """Whether the polynomial is known to be above 0 for all admissible sizes."""
        shifted = self._expanded(_cleared(p))
        return (
            shifted is not None
            and shifted.terms.get((), 0) > 0
            and all(c >= 0 for c in shifted.terms.values())
        )


NOTHING_KNOWN = Relations()

# Points at which candidates are compared before anything is proved: small, large and mixed sizes.
_POINTS: tuple[Callable[[int], int], ...] = (
    lambda i: 1,
    lambda i: 3 + 2 * i,
    lambda i: 10 ** (5 - i % 5),
    lambda i: 10 ** (1 + i % 5),
    lambda i: 10**3 + 77 * i,
)


def prune(
    candidates: Iterable[tuple[Poly, Label]], relations: Relations = NOTHING_KNOWN, *, largest: bool = True
) -> list[tuple[Poly, Label]]:
    """Drop every candidate that another one dominates.

    Parameters
    ----------
    candidates : iterable of (Poly, label)
        Of equal polynomials the first label is kept.
    relations : Relations
        What is known of the sizes.
    largest : bool
        Keep what a maximum needs, or, if False, what a minimum needs.

    Returns
    -------
    list of (Poly, label)
        In the order of the candidates.
    """
    first: dict[Poly, Label] = {}
    for p, label in candidates:
        first.setdefault(p, label)
    if len(first) == 1:
        return list(first.items())
    sign = 1 if largest else -1
    values = _samples(first, relations, sign)

    def dominates(q: Poly, p: Poly) -> bool:
        # a point where q is smaller settles it; only the others need a proof
        return all(map(ge, values[q], values[p])) and relations.nonnegative((q - p) if largest else (p - q))

    kept: list[Poly] = []
    for p in sorted(first, key=lambda p: (values[p][::-1], p.sort_key()), reverse=True):
        if not any(dominates(q, p) for q in kept):
            kept.append(p)
    # ties at the samples may have put a dominated one first
    final = {p for p in kept if not any(q is not p and dominates(q, p) for q in kept)}
    return [(p, label) for p, label in first.items() if p in final]


def _samples(candidates: Iterable[Poly], relations: Relations, sign: int) -> dict[Poly, list[float]]:
    """Values of each candidate at a few admissible points: exact, since all sizes there are integers."""
    reduced = {p: relations.substituted(p) for p in candidates}
    keys = sorted({k for q in reduced.values() for k in q.keys()})
    points = [{k: at(i) for i, k in enumerate(keys)} for at in _POINTS]
    # one generator large among small ones, and small among large ones
    points += [
        {k: big if k == one else small for k in keys}
        for one in keys[:16]
        for big, small in ((10**6, 1), (1, 999))
    ]
    points = [{k: relations.clip(k, v) for k, v in point.items()} for point in points]
    return {p: [sign * q.evaluate(point.__getitem__) for point in points] for p, q in reduced.items()}
