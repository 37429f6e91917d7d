"""Which of two polynomials is the larger for every admissible size, decided without a numeric guess.

A polynomial is nonnegative if, after each generator is written as its lower bound plus something that is not negative,
no coefficient is negative. What is known about sizes (`Relations`) is substituted first, so that F >= D becomes
F = D + f with f >= 0. The test is sufficient, not necessary: what it cannot decide stays a regime of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, lcm, prod
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import sympy

from ..errors import BindingError, PatternError, ShapeError
from .polynomial import SLACK, Monomial, Poly, Rational, as_poly, cached, denominator, generator, poly, total
from .roots import enclosed, is_root
from .solving import alone, solve, symbols_in
from .whole_parts import exact, opened, put, solve_rounded

__all__ = [
    "signs_met",
    "Table",
    "corners",
    "reached",
    "skyline",
    "BOUNDS",
    "NOTHING_KNOWN",
    "Relation",
    "Relations",
    "integral",
    "lower",
    "prune",
    "reached_by",
]


# -- points ------------------------------------------------------------------------------------------------------------
# Signs that a polynomial is seen to have at a few sizes: what has both is not worth a proof of either.

_POINTS = 16
#: Sizes up to 2**14, as many small ones as large ones: latencies count at some, bandwidths at others.
_LARGEST_POWER = 14


@cached(1 << 14)
def signs_met(p: Poly) -> frozenset[int]:
    """Return which of 1 and -1 are signs of a polynomial at some positive whole sizes, as far as it was tried.

    Values are exact, so that each sign is one that it has, and the sizes are the same each time. A power that is an
    atom is left alone: its number may be as long as it likes.

    Examples
    --------
    >>> from costgraph.notation.grammar import parse_formula
    >>> sorted(signs_met(parse_formula("B*S - 40*B"))), sorted(signs_met(parse_formula("B*S + 3")))
    ([-1, 1], [1])
    """
    found, draw, names = set[int](), random.Random(0), sorted(p.names())
    if any(k[0] == "~" and generator(k).is_Pow for k in p.generators()):
        return frozenset()
    for _ in range(_POINTS):
        sizes = {name: as_poly(draw.randint(1, 2 ** draw.randint(0, _LARGEST_POWER))) for name in names}
        try:
            value = p.bind(sizes).constant
        except ShapeError:  # a division by zero: no admissible sizes
            continue
        if value:
            found.add(1 if value > 0 else -1)
        if len(found) == 2:
            break
    return frozenset(found)


# -- convex ------------------------------------------------------------------------------------------------------------
# Which rows of a table of integers no mean of other rows reaches: a linear program, its answer checked exactly.
#
# A row that lies at or below a mean of other rows in every column never stands out alone, whatever weights that are not
# negative the columns are given. Floating point looks for the shares of such a mean; whether it is one is decided by
# integers, so that a wrong answer of the search leaves a row too many, never one too few.

#: Integers, a row for each candidate: int64, or Python's own where they might not fit.
Table: TypeAlias = "np.ndarray[Any, Any]"
_Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

# What the search takes for equal, relative to the largest number of a column.
_CLOSE = 1e-9
_MOST_PIVOTS = 2_000
# Shares are first taken in steps of this part of 1.
_FINE = 1 << 30
# Larger systems of shares are not solved exactly: what they would leave out is kept.
_MOST_SHARES = 40


def skyline(table: Table, order: Sequence[int]) -> list[int]:
    """Return the rows that no other row reaches in every column, of equal ones the first in the given order."""
    # a row that reaches another one has the larger sum
    sums = [int(n) for n in table.sum(axis=1)]
    kept: list[int] = []
    found = np.empty_like(table)
    for i in sorted(order, key=lambda i: -sums[i]):
        if not (found[: len(kept)] >= table[i]).all(axis=1).any():
            found[len(kept)] = table[i]
            kept.append(i)
    return kept


def corners(table: Table) -> list[int]:
    """Return the rows that no mean of other rows reaches in every column; the rows have to be a skyline.

    Examples
    --------
    >>> corners(np.array([[4, 0], [0, 4], [2, 2], [1, 1], [3, 3]]))
    [0, 1, 4]
    """
    kept = list(range(len(table)))
    most, least = table.max(axis=0), table.min(axis=0)
    first = table == most
    alone = first[:, first.sum(axis=0) == 1].any(axis=1)  # the largest of a column: no mean reaches that
    for i in np.flatnonzero(~alone):
        others = [j for j in kept if j != i]
        above = table[:, table[i] > least]
        if len(others) > 1 and reached(above[others] - above[i]):
            kept = others
    return kept


def reached(gains: Table) -> bool:
    """Whether some mean of rows, integers all, is negative in no column."""
    while len(gains):
        top = gains.max(axis=0, initial=-1)
        if (top < 0).any():
            return False
        # where the best is 0, a row below it has no share in any such mean
        possible = (gains[:, top == 0] == 0).all(axis=1)
        if possible.all():
            break
        gains = gains[possible]
    if not len(gains):
        return False
    open_ = gains[:, (gains < 0).any(axis=0)]
    return not open_.shape[1] or _mean(open_)


def _mean(gains: Table) -> bool:
    """Whether a mean is found whose exact value is negative in no column."""
    scales = np.abs(gains).max(axis=0)
    found = _game((gains / scales).astype(float) + 2.0)
    if found is None:
        return False
    rows, columns, near = found
    weights = np.array([int(share) for share in np.rint(near * _FINE)], dtype=object)
    if (weights >= 0).all() and weights.any() and (weights @ gains.astype(object) >= 0).all():
        return True
    if len(rows) > _MOST_SHARES:
        return False
    # of the game in which every column has the same value, written without a fraction
    system = [[int(gains[j, k]) + 2 * int(scales[k]) for j in rows] + [int(scales[k])] for k in columns]
    shares = _solved(system)
    if shares is None or min(shares) < 0:
        return False
    whole = lcm(*(share.denominator for share in shares))
    weights = np.array([int(share * whole) for share in shares], dtype=object)
    return bool((weights @ gains[rows].astype(object) >= 0).all())


def _game(payoff: _Floats) -> tuple[list[int], list[int], _Floats] | None:
    """Solve max sum(y), payoff @ y <= 1, y >= 0 by the simplex method, all payoffs from 1 to 3.

    Answers with the rows that the shares of the best mean are solved from, as many columns, in which it is the least,
    and the shares of all rows; None where the sum passes 1/2: each mean of rows is then below 2 in some column.
    """
    n, m = payoff.shape
    table = np.hstack([payoff, np.eye(n), np.ones((n, 1))])
    worth = np.concatenate([np.ones(m), np.zeros(n + 1)])
    basis = list(range(m, m + n))
    for turn in range(_MOST_PIVOTS):
        if -worth[-1] > 0.5 + _CLOSE:
            return None
        better = np.flatnonzero(worth[:-1] > _CLOSE)
        if not len(better):
            slack = {k - m for k in basis if k >= m}
            shares = np.maximum(-worth[m:-1], 0.0)
            return [j for j in range(n) if j not in slack], [k for k in basis if k < m], shares / shares.sum()
        # the steepest column; the first one, which cannot go round in circles, if that takes long
        enter = better[0] if turn > _MOST_PIVOTS // 2 else better[worth[better].argmax()]
        column = table[:, enter]
        rows = np.flatnonzero(column > _CLOSE)
        ratios = table[rows, -1] / column[rows]
        close = rows[ratios <= ratios.min() + _CLOSE**2]
        leave = min(close, key=basis.__getitem__)
        table[leave] /= table[leave, enter]
        change = table[:, enter].copy()
        change[leave] = 0.0
        table -= np.outer(change, table[leave])
        worth = worth - worth[enter] * table[leave]
        basis[leave] = int(enter)
    return None


def _solved(system: list[list[int]]) -> list[Fraction] | None:
    """Solve as many equations as unknowns, exactly: coefficients and the right side; None where they are dependent."""
    rows = [[Fraction(n) for n in row] for row in system]
    for i in range(len(rows)):
        at = next((j for j in range(i, len(rows)) if rows[j][i]), None)
        if at is None:
            return None
        rows[i], rows[at] = rows[at], rows[i]
        rows[i] = [n / rows[i][i] for n in rows[i]]
        for j, row in enumerate(rows):
            if j != i and row[i]:
                rows[j] = [a - row[i] * b for a, b in zip(row, rows[i], strict=True)]
    return [row[-1] for row in rows]


# -- dominance ---------------------------------------------------------------------------------------------------------

# Terms that bounds from above may make of what is compared.
_MOST_TERMS = 1 << 17

#: Lower bound of an atom by the type of its expression; filled by the modules that define such types.
BOUNDS: dict[type, Callable[[sympy.Expr, Relations], Rational | None]] = {}


def _pow_bound(expr: sympy.Expr, known: Relations) -> Rational | None:
    # (1 - k/E)**T where k <= E is known, and 1/(S + T)
    return 0 if known.nonnegative(poly(expr.base)) else None


def _rounded_bound(expr: sympy.Expr, known: Relations) -> Rational | None:
    least = lower(poly(expr.args[0]), known)
    if least is None:
        return None
    return floor(least) if isinstance(expr, sympy.floor) else ceil(least)


BOUNDS |= {sympy.Pow: _pow_bound, sympy.floor: _rounded_bound, sympy.ceiling: _rounded_bound}


def lower(p: Poly, known: Relations | None = None) -> Rational | None:
    """Return a number that the polynomial is never below, or None where none is found.

    Examples
    --------
    >>> from costgraph.notation.grammar import parse_formula
    >>> lower(parse_formula("B*S - B + 3")), lower(parse_formula("B - S"))
    (3, None)
    """
    return _lower_without_assumptions(p) if known is None or known is NOTHING_KNOWN else _lower(p, known)


def _lower(p: Poly, known: Relations) -> Rational | None:
    found = _at_least(p, known)
    if found is None:
        found = max((n for q in opened(p, known.has_sign) if (n := _at_least(q, known)) is not None), default=None)
        found = found if found is None or integral(p) != p else ceil(found)
    return found


@cached(1 << 12)
def _lower_without_assumptions(p: Poly) -> Rational | None:
    # an op and its backward pass often state the same amount, with whole parts that take long
    return _lower(p, NOTHING_KNOWN)


def _at_least(p: Poly, known: Relations) -> Rational | None:
    least = {k: known.least(k) for k in p.generators()}
    if None in least.values():
        return None
    positive = all(b is not None and b >= 0 for b in least.values())
    if positive and all(c >= 0 for m, c in p.terms.items() if m):
        if all(e > 0 for m in p.terms for _, e in m):
            return sum((c * prod((least[k] or 0) ** e for k, e in m) for m, c in p.terms.items()), start=0)
        return p.terms.get((), 0)  # a reciprocal comes as near to 0 as it likes
    if any(e < 0 for m in p.terms for _, e in m):
        return 0 if known.nonnegative(p) else None
    shifted = known.shifted([p])
    if shifted is None or any(c < 0 for m, c in shifted[0].terms.items() if m):
        return None
    return shifted[0].terms.get((), 0)


def integral(p: Poly) -> Poly | None:
    """Return a positive multiple that is an integer for all sizes, or None where an atom need not be one."""
    found = NOTHING_KNOWN.cleared([p])
    if found is None or any(k[0] == "~" and not generator(k).is_integer for k in found[0].generators()):
        return None
    return found[0] * lcm(*(c.denominator for c in found[0].terms.values()))


class Relation:
    """One assumption on sizes, with its text as it was stated.

    `difference` is at least 0, exactly 0 if `equal`, more than 0 if `strict`; symbols of `subject`, on the left, are
    preferred when it is solved.
    """

    def __init__(
        self, text: str, difference: Poly, *, equal: bool, strict: bool = False, subject: Sequence[str] = ()
    ) -> None:
        whole = integral(difference) if strict else None
        self.text = text
        # an integer above 0 is at least 1
        self.difference = difference if whole is None else whole - 1
        self.equal = equal
        self.strict = strict and whole is None
        self.subject = subject

    def at(self, values: Mapping[str, Poly]) -> Relation:
        """Return what is left of it once symbols are replaced."""
        difference = self.difference.bind(values)
        return Relation(self.text, difference, equal=self.equal, strict=self.strict, subject=self.subject)

    @property
    def bound(self) -> Rational | None:
        """The least that a symbol is, where it says nothing else: of several such ones, the largest says most."""
        names = self.difference.generators()
        own = alone(self.difference, *names) if len(names) == 1 else None
        if own is None or own[0] <= 0 or own[1].constant is None:
            return None
        return Fraction(-own[1].constant) / own[0]

    def check(self, values: Mapping[str, Poly]) -> None:
        """Raise BindingError if bound sizes break the assumption."""
        try:
            left = self.difference.bind(values).number
            broken = left is not None and bool(left < 0 or (self.equal and left != 0) or (self.strict and left == 0))
        except ShapeError:  # a division by zero, the root of a negative number
            broken = True
        if broken:
            used = {k: v.constant for k, v in sorted(values.items()) if k in self.difference.names()}
            bound = ", ".join(f"{k}={v}" for k, v in used.items())
            raise BindingError(f"{bound}: against the assumption {self.text!r}")


class Relations:
    """What is assumed of sizes, as substitutions that a comparison applies first.

    PatternError if assumptions contradict each other, or a positive integer.
    """

    def __init__(self, relations: Iterable[Relation] = ()) -> None:
        self.relations: tuple[Relation, ...] = tuple(relations)
        self._whole: list[tuple[str, Poly]] = []  # atoms, and what they are
        self._equal: list[tuple[str, Poly]] = []
        self._steps: list[tuple[str, Poly]] = []
        self._most: dict[str, Rational] = {}
        self._stated: dict[str, Rational] = {}  # lower bounds of atoms
        self._least: WeakKeyDictionary[str, Rational | None] = WeakKeyDictionary()  # of atoms, which may go
        # what eliminates symbols comes first, so that bounds are about those that are left
        for relation in sorted(self.relations, key=lambda r: (not r.equal, -(r.bound or 0))):
            self._admit(relation)
        for step in (self._limit, self._refute):
            for relation in self.relations:
                step(relation)

    def __reduce__(self) -> tuple[object, ...]:
        return Relations, (self.relations,)

    # -- reading assumptions -------------------------------------------------------------------------------------

    def _admit(self, relation: Relation) -> None:
        """Keep D == H*K and F >= D as substitutions."""
        self._least.clear()  # bounds of atoms may be better now
        found = self._expressed([relation.difference])
        if found is None:
            return
        (difference,) = found
        self._state(difference)
        subject = [s for s in relation.subject if s in difference.generators()]
        if relation.equal:
            solved = solve(difference, subject)
            part = exact(difference) or (None if solved else solve_rounded(difference))
            self._whole += [part] if part else []
            if solved is not None and not solved[1].names() and not solved[1].is_size:
                raise self._contradiction(relation)
            self._equal += [solved] if solved else []
            return
        for key in [*subject, *sorted(symbols_in(difference) - set(subject))]:
            own = alone(difference, key)
            if own is None or own[0] < 0:
                continue
            bound = own[1] / -own[0]
            if bound.constant is not None:
                bound = as_poly(ceil(bound.constant))
            # a bound below 1 says nothing new
            if bound.constant is None or bound.constant > 1:
                self._steps.append((key, bound + Poly({((SLACK + key + relation.text, 1),): 1})))
                return

    def _state(self, difference: Poly) -> None:
        """Keep ceiling(S/4 - 2) >= 1 as the lower bound of an atom."""
        for key in difference.generators() if len(difference.generators()) == 1 else ():
            slope, rest = difference.terms.get(((key, 1),), 0), difference.terms.get((), 0)
            if key[0] == "~" and slope > 0 and difference == Poly({((key, 1),): slope}) + rest:
                bound = Fraction(-rest) / slope
                self._stated[key] = max(bound, self._stated.get(key, bound))
                self._least.clear()

    def _limit(self, relation: Relation) -> None:
        """Keep S <= 1024 as bounds from above, of slacks too."""
        found = None if relation.equal else self._expressed([relation.difference])
        if found is None:
            return
        for key in sorted(k for k in found[0].generators() if k[0] != "~"):
            own = alone(found[0], key)
            room = None if own is None or own[0] > 0 else lower(own[1] / own[0], self)
            if room is None:  # the generator is at most -room
                continue
            most = -room if key[0] == SLACK else floor(-room)
            if most < (self.least(key) or 0):
                raise self._contradiction(relation)
            self._most[key] = min(most, self._most.get(key, most))

    def _refute(self, relation: Relation) -> None:
        difference = relation.difference
        wrong = self.nonnegative(-difference) if relation.strict else self.positive(-difference)
        if wrong or (relation.equal and self.positive(difference)):
            raise self._contradiction(relation)

    def _contradiction(self, relation: Relation) -> PatternError:
        """Name one other assumption where one is enough."""
        others = [r for r in self.relations if r is not relation]
        fewer = [c for c in ([], *([r] for r in others)) if len(c) < len(others)]
        against = next((c for c in fewer if _contradicts([relation, *c])), others)
        texts = " and ".join(repr(r.text) for r in against)
        return PatternError(f"assumption {relation.text!r}: contradicts {texts or 'every positive integer'}")

    @property
    def settled(self) -> tuple[tuple[str, Poly], ...]:
        """Symbols that follow from others by equalities; a formula may hold symbols that come later, never earlier."""
        return tuple(self._equal)

    # -- forms that are easy to compare --------------------------------------------------------------------------

    def least(self, key: str) -> Rational | None:
        """Lower bound of a generator, None where nothing is known."""
        if key[0] != "~":
            return 0 if key[0] == SLACK else 1
        if key not in self._least:
            expr = generator(key)
            bound = BOUNDS.get(type(expr))
            own = enclosed(key)[0] if is_root(key) else None if bound is None else bound(expr, self)
            self._least[key] = max((b for b in (self._stated.get(key), own) if b is not None), default=None)
        return self._least[key]

    def _divides(self, key: str) -> bool:
        """Whether a generator is known not to be negative, so that multiplying by it keeps a sign."""
        least = self.least(key)
        return least is not None and least >= 0

    def cleared(self, ps: Sequence[Poly]) -> list[Poly] | None:
        """Multiply all by what makes no exponent negative: signs stay, or None where that of a factor is not known."""
        negative = {factor for p in ps for m in p.terms for factor in m if factor[1] < 0}
        if not negative:
            return list(ps)
        lowest = dict(sorted(negative, reverse=True))  # of several exponents of a generator the least comes last
        if not all(map(self._divides, lowest)):
            return None
        factor = Poly({tuple(sorted((k, -e) for k, e in lowest.items())): 1})
        return [p * factor for p in ps]

    def shifted(self, ps: Sequence[Poly]) -> list[Poly] | None:
        """Write each generator as its lower bound, where one is known, plus a generator that is at least 0."""
        least = {key: self.least(key) for key in set[str]().union(*(p.generators() for p in ps))}
        new = {key: as_poly(low) + Poly({((SLACK + key, 1),): 1}) for key, low in least.items() if low}
        try:
            return [p.substitute(new) for p in ps]
        except ShapeError:  # too long to be written out: nothing is known of it
            return None

    def reduce(self, p: Poly) -> Poly:
        """Eliminate what an equality gives, so that equal sizes become the same polynomial."""
        for atom, value in self._whole:
            p = put(p, atom, value)
        for key, value in self._equal:
            p = p.bind({key: value})
        return p

    def _expressed(self, ps: Sequence[Poly]) -> list[Poly] | None:
        """Return something of the same signs with everything known substituted into it, without reciprocals."""
        out = self.cleared([self.reduce(p) for p in ps])
        for key, value in self._steps:
            if out is not None and any(key in p.generators() for p in out):
                out = self.cleared([p.substitute({key: value}) for p in out])
        return out

    def _bare(self, ps: Sequence[Poly]) -> list[Poly] | None:
        return None if (plain := self.cleared(ps)) is None else self.shifted(plain)

    def _expanded(self, ps: Sequence[Poly]) -> list[Poly] | None:
        out = self._expressed(ps)
        if out is None:
            return None
        roots = {k: enclosed(k)[1] for p in out for k in p.generators() if is_root(k)}
        for key, most in {**self._most, **roots}.items():
            degree = max((e for p in out for m in p.terms for k, e in m if k == key), default=0)
            # without the bounds that are left, less is known
            if degree and sum(len(p.terms) for p in out) * (degree + 1) <= _MOST_TERMS:
                # L <= S <= U is S = (U + L*t)/(1 + t) with t >= 0; the denominator is multiplied away
                t = Poly({((SLACK + key + "<", 1),): 1})
                low = t * (self.least(key) or 0) + most
                try:
                    powers = [low**power * (t + 1) ** (degree - power) for power in range(degree + 1)]
                    out = [_collected(p, key, powers) for p in out]
                except ShapeError:  # too long to be written out
                    return None
        return self.shifted(out)

    def spread(self, monomials: Sequence[Monomial], *, known: bool = True) -> dict[Monomial, Poly] | None:
        """Write monomials, all of them times one positive factor, in generators that are at least 0.

        A sum of the monomials is then at least 0 if no coefficient of what it becomes is negative, nor any other than 0
        where a monomial `has_sign` says no; None where it would be too long. One with a divisor whose sign is not known
        stays as it is. `known` says whether what is assumed of sizes is put in.
        """
        plain = [m for m in monomials if all(e > 0 or self._divides(k) for k, e in m)]
        ps = [Poly({m: 1}) for m in plain]
        found = self._expanded(ps) if known else self._bare(ps)
        if found is None:
            return None
        return {m: Poly({m: 1}) for m in monomials} | dict(zip(plain, found, strict=True))

    def has_sign(self, m: Monomial) -> bool:
        """Whether a monomial is known to be at least 0."""
        return all(self._divides(k) for k, _ in m)

    # -- answers -------------------------------------------------------------------------------------------------

    def nonnegative(self, p: Poly) -> bool:
        """Whether the polynomial is known to be at least 0 for all admissible sizes."""
        if self._no_negative([p]):
            return True
        if -1 in self._met(p):
            return False
        if any(map(self._no_negative, self._forms(p))):
            return True
        whole = integral(p)  # not below 0 where it is above -1
        for plain in self.cleared([p]) or () if whole is None else [whole]:
            for q in opened(plain, self.has_sign):
                room = 0 if whole is None else 1 - Fraction(1, denominator(q.terms))
                if any(map(self._no_negative, self._forms(q + room))):
                    return True
        return False

    def sign(self, p: Poly) -> int:
        """Return 1 for a polynomial known to be at least 0, -1 for one known to be at most 0, else 0."""
        if len(self._met(p)) == 2:
            return 0
        found = next((sign for ps in self._forms(p) for sign in (1, -1) if self._no_negative(ps, sign)), 0)
        return found or next((sign for sign in (1, -1) if self.nonnegative(p * sign)), 0)

    def _met(self, p: Poly) -> frozenset[int]:
        """Return signs that it is seen to have at admissible sizes: of a proof, most of the time goes in vain."""
        return frozenset() if self.relations else signs_met(p)

    def _forms(self, p: Poly) -> Iterator[Sequence[Poly] | None]:
        """Write a polynomial in ways that keep its sign, what is fast first."""
        yield [p]
        yield self._bare([p])
        if self.relations or any(map(is_root, p.generators())):
            yield self._expanded([p])

    def positive(self, p: Poly) -> bool:
        """Whether the polynomial is known to be above 0 for all admissible sizes."""
        whole = integral(p)
        if whole is not None:
            return self.nonnegative(whole - 1)
        # bounds from above are left out: (U + t)/(1 + t) reaches its lower end only in the limit
        out = self._expressed([p])
        found = None if out is None else self.shifted(out)
        return found is not None and found[0].terms.get((), 0) > 0 and self._no_negative(found)

    def _no_negative(self, ps: Sequence[Poly] | None, sign: int = 1) -> bool:
        return ps is not None and all(c * sign >= 0 and self.has_sign(m) for p in ps for m, c in p.terms.items())


def _collected(p: Poly, key: str, powers: Sequence[Poly]) -> Poly:
    """Put a polynomial for each power of a generator."""
    rest = {m: (dict(m).get(key, 0), tuple(f for f in m if f[0] != key)) for m in p.terms}
    return total(Poly({rest[m][1]: c}) * powers[rest[m][0]] for m, c in p.terms.items())


def _contradicts(relations: list[Relation]) -> bool:
    try:
        Relations(relations)
    except PatternError:
        return True
    return False


NOTHING_KNOWN = Relations()


# -- pruning -----------------------------------------------------------------------------------------------------------
# Leaving out of a maximum or minimum what its other arguments reach for every admissible size.

Label = TypeVar("Label")

# Sums of products of integers below this are far from where int64 ends.
_MOST = 1 << 62


def prune(
    candidates: Iterable[tuple[Poly, Label]], relations: Relations = NOTHING_KNOWN, *, largest: bool = True
) -> list[tuple[Poly, Label]]:
    """Drop every candidate that another one, or a mean of several others, reaches for all sizes.

    `largest` keeps what a maximum needs, otherwise what a minimum does; of equal polynomials the first label is kept.

    Generators are written as their lower bounds plus something that is not negative: a candidate goes if the
    coefficients of a convex combination of others are nowhere below its own then. That is sufficient, not necessary.
    """
    first: dict[Poly, Label] = {}
    for p, label in candidates:
        first.setdefault(p, label)
    kept = list(first)
    if len(kept) == 2:  # most often, and fast without a table
        a, b = sorted(kept, key=Poly.sort_key)
        sign = relations.sign(a - b if largest else b - a)
        kept = {1: [a], -1: [b], 0: kept}[sign]
    elif len(kept) > 1:
        # of generators that are at least 0 whatever is known of them, which is fast where candidates are many
        kept = _best(kept, relations, None, largest=largest)
        more = relations.relations or any(is_root(k) for p in kept for k in p.generators())
        for known in (False, True) if more else (False,):
            images = relations.spread(sorted({m for p in kept for m in p.terms}), known=known)
            if len(kept) > 1 and images is not None:
                kept = _best(kept, relations, images, largest=largest)
    final = set(kept)
    return [(p, label) for p, label in first.items() if p in final]


def reached_by(ps: Iterable[Poly], others: Iterable[Poly], relations: Relations = NOTHING_KNOWN) -> bool:
    """Whether each of some polynomials is one of others, or nowhere above the largest of them."""
    return all(is_other for _, is_other in prune([*((q, True) for q in others), *((p, False) for p in ps)], relations))


def _best(
    ps: Sequence[Poly], relations: Relations, images: Mapping[Monomial, Poly] | None, *, largest: bool
) -> list[Poly]:
    """Keep what others do not reach by coefficients: of the sums as they are, or of what their monomials become."""
    table = _coefficients(ps)
    monomials = list({m: None for p in ps for m in p.terms})
    columns = {m: Poly({m: 1}) for m in monomials} if images is None else {m: images[m] for m in monomials}
    if images is not None:
        table = _product(table, _coefficients(list(columns.values())))
        monomials = list({m: None for p in columns.values() for m in p.terms})
    free = np.array([not relations.has_sign(m) for m in monomials], dtype=bool)
    changing = (table != table[0]).any(axis=0)
    table = np.hstack([table[:, changing], -table[:, changing & free]])
    table = table if largest else -table
    order = range(len(ps)) if images is None else sorted(range(len(ps)), key=lambda i: ps[i].sort_key())
    found = skyline(table, order)
    if images is not None:
        found = [found[i] for i in corners(table[found])]
    return [ps[i] for i in found]


def _coefficients(ps: Sequence[Poly]) -> Table:
    """Return the coefficients of sums, a row each and a column for each monomial in the order of their first use.

    All are multiplied by one number that makes them whole.
    """
    monomials = {m: i for i, m in enumerate({m: None for p in ps for m in p.terms})}
    whole = lcm(*{c.denominator for p in ps for c in p.terms.values()})
    rows: list[list[int]] = [[0] * len(monomials) for _ in ps]
    for row, p in zip(rows, ps, strict=True):
        for m, c in p.terms.items():
            row[monomials[m]] = c if type(c) is int and whole == 1 else int(c * whole)
    most = max((abs(c) for row in rows for c in row), default=0)
    shape = (len(ps), len(monomials))
    return np.array(rows, dtype=np.int64 if most * max(len(monomials), 2) < _MOST else object).reshape(shape)


def _product(a: Table, b: Table) -> Table:
    """Return a product of tables, exact."""
    most = int(np.abs(a).max(initial=0)) * int(np.abs(b).max(initial=0)) * max(a.shape[1], 2)
    return a @ b if most < _MOST else a.astype(object) @ b.astype(object)
