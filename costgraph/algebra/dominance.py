"""Compare polynomials for all admissible sizes, prune dominated arguments, and bound floors and ceilings."""

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
from .polynomial import SLACK, Monomial, Poly, Rational, as_poly, cached, denominator, generator, is_whole, poly, total
from .solving import alone, enclosed, is_root, solve, symbols_in

__all__ = [
    "exact",
    "opened",
    "put",
    "solve_rounded",
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


# -- floors and ceilings -----------------------------------------------------------------------------------------------


def _is_rounded(key: str) -> bool:
    return key[0] == "~" and isinstance(generator(key), sympy.floor | sympy.ceiling)


def opened(p: Poly, has_sign: Callable[[Monomial], bool]) -> Iterator[Poly]:
    """Replace floors and ceilings by their arguments, in lower bounds of `p`.

    Parameters
    ----------
    p : Poly
        A sum; roundings in denominators are kept.
    has_sign : callable
        Whether a monomial is known to be nonnegative.

    Yields
    ------
    Poly
        Lower bounds in sizes, and for each rounding one in which it replaces a size: S is `8*ceiling(S/8) - r` with r
        from 0 to 7, and all values between are taken.

    Notes
    -----
    `x <= ceiling(x) < x + 1` and `x - 1 < floor(x) <= x`, tighter by 1/q if x is an integer divided by q.
    """
    values, upper = dict[str, Poly](), dict[str, Rational]()
    if mine := _open(p, values, upper):
        yield _beneath(p.substitute(mine), upper, has_sign)
    for key, value in mine.items():
        remaining = p.substitute({k: v for k, v in mine.items() if k != key})
        for name in sorted(remaining.generators() & value.generators() - _divisors(remaining)):
            if name[0] not in "~" + SLACK and (isolated := alone(value, name)) is not None:
                size = (Poly({((key, 1),): 1}) - isolated[1]) / isolated[0]
                yield _beneath(remaining.substitute({name: size}), upper, has_sign)


def _open(p: Poly, values: dict[str, Poly], upper: dict[str, Rational]) -> dict[str, Poly]:
    """Write the roundings in a sum, including nested ones, as their arguments plus nonnegative slacks."""
    keys = sorted(set(filter(_is_rounded, p.generators())) - _divisors(p))
    for key in keys:
        if key not in values:
            inner = poly(generator(key).args[0])
            is_integral = all(map(is_whole, inner.terms))
            upper[beyond := SLACK + key + "%"] = 1 - Fraction(1, denominator(inner.terms)) if is_integral else 1
            low = 0 if isinstance(generator(key), sympy.ceiling) else -upper[beyond]
            values[key] = inner.substitute(_open(inner, values, upper)) + low + Poly({((beyond, 1),): 1})
    return {key: values[key] for key in keys}


def _divisors(p: Poly) -> set[str]:
    return {k for m in p.terms for k, e in m if e < 0}


def _beneath(p: Poly, upper: Mapping[str, Rational], has_sign: Callable[[Monomial], bool]) -> Poly:
    """Replace slacks by their upper bounds where their coefficient is not known to be positive."""

    def bounded(m: Monomial, c: Rational) -> Poly:
        kept_factors = tuple(f for f in m if f[0] not in upper)
        if c > 0 or not has_sign(kept_factors):
            return Poly({m: c})
        return Poly({kept_factors: c * prod(upper[k] ** e for k, e in m if k in upper)})

    return total(bounded(m, c) for m, c in p.terms.items())


def exact(p: Poly) -> tuple[str, Poly] | None:
    """Return a rounding that `p == 0` makes exact: floor(S/4) where S == 4*floor(S/4)."""
    for key in sorted(p.generators()):
        if _is_rounded(key):
            factor = Poly({tuple(f for f in m if f[0] != key): c for m, c in p.terms.items() if (key, 1) in m})
            inner = poly(generator(key).args[0])
            if factor.terms and p == factor * (Poly({((key, 1),): 1}) - inner):
                return key, inner
    return None


def solve_rounded(p: Poly) -> tuple[str, Poly] | None:
    """Solve `p == 0` for a linear rounding: ceiling(S/2) where ceiling(S/2) == 2*ceiling(S/4)."""
    isolated = {
        key: isolated_atom
        for key in filter(_is_rounded, p.generators())
        if (isolated_atom := alone(p, key)) is not None
    }
    for key in sorted(
        isolated, key=lambda k: (abs(isolated[k][0]), k)
    ):  # the smallest factor usually divides the others
        factor, remainder = isolated[key]
        if not any(k[0] == "~" and generator(k).has(generator(key)) for k in remainder.generators()):
            return key, remainder / -factor
    return None


def put(p: Poly, atom: str, value: Poly) -> Poly:
    """Replace an atom, including inside other atoms."""
    old = generator(atom)
    atoms = {k: generator(k) for k in p.generators() if k[0] == "~" and k != atom}
    new = {k: poly(expr.xreplace({old: value.expr})) for k, expr in atoms.items() if expr.has(old)}
    return p.substitute({**new, atom: value})


# -- dominance ---------------------------------------------------------------------------------------------------------


# -- sample signs ------------------------------------------------------------------------------------------------------
# A polynomial with both signs at sample sizes needs no proof attempt.

_POINTS = 16
#: Sizes up to 2**14, log-uniform: latencies dominate at small sizes, bandwidths at large ones.
_LARGEST_POWER = 14


@cached(1 << 14)
def signs_met(p: Poly) -> frozenset[int]:
    """Return the signs, 1 and -1, that a polynomial takes at sample sizes.

    Values are exact and the samples fixed, so each reported sign occurs. Polynomials with power atoms are skipped,
    since their values may have any number of digits.

    Examples
    --------
    >>> from costgraph.notation.grammar import parse_formula
    >>> sorted(signs_met(parse_formula("B*S - 40*B"))), sorted(signs_met(parse_formula("B*S + 3")))
    ([-1, 1], [1])
    """
    signs, draw, names = set[int](), random.Random(0), sorted(p.names())
    if any(k[0] == "~" and generator(k).is_Pow for k in p.generators()):
        return frozenset()
    for _ in range(_POINTS):
        sizes = {name: as_poly(draw.randint(1, 2 ** draw.randint(0, _LARGEST_POWER))) for name in names}
        try:
            value = p.bind(sizes).constant
        except ShapeError:  # division by zero: not admissible
            continue
        if value:
            signs.add(1 if value > 0 else -1)
        if len(signs) == 2:
            break
    return frozenset(signs)


# -- convex hull -------------------------------------------------------------------------------------------------------
# Find the rows of an integer table that no convex combination of other rows dominates, by linear programming. Dominated
# rows are never the unique maximum for nonnegative column weights. The weights of the combination are found in floating
# point and verified in integers, so a numerical error can only keep a redundant row.

#: Integer matrix, one row per candidate: int64, or Python integers if they might overflow.
Table: TypeAlias = "np.ndarray[Any, Any]"
_Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

# Tolerance of the floating-point search, relative to the largest number in a column.
_CLOSE = 1e-9
_MOST_PIVOTS = 2_000
# Weights are first rounded to multiples of 1/_FINE.
_FINE = 1 << 30
# Larger systems are not solved exactly; their rows are kept.
_MOST_SHARES = 40


def skyline(table: Table, order: Sequence[int]) -> list[int]:
    """Return the rows that no other row dominates, keeping the first of equal rows in the given order."""
    # a dominating row has the larger sum
    sums = [int(n) for n in table.sum(axis=1)]
    selected: list[int] = []
    front = np.empty_like(table)
    for i in sorted(order, key=lambda i: -sums[i]):
        if not (front[: len(selected)] >= table[i]).all(axis=1).any():
            front[len(selected)] = table[i]
            selected.append(i)
    return selected


def corners(table: Table) -> list[int]:
    """Return the rows that no convex combination of others dominates; the input has to be a skyline.

    Examples
    --------
    >>> corners(np.array([[4, 0], [0, 4], [2, 2], [1, 1], [3, 3]]))
    [0, 1, 4]
    """
    remaining = list(range(len(table)))
    maximum, minimum = table.max(axis=0), table.min(axis=0)
    first = table == maximum
    is_unique_max = first[:, first.sum(axis=0) == 1].any(axis=1)  # a unique column maximum cannot be dominated
    for i in np.flatnonzero(~is_unique_max):
        others = [j for j in remaining if j != i]
        above = table[:, table[i] > minimum]
        if len(others) > 1 and reached(above[others] - above[i]):
            remaining = others
    return remaining


def reached(gains: Table) -> bool:
    """Whether some convex combination of integer rows is nonnegative in every column."""
    while len(gains):
        top = gains.max(axis=0, initial=-1)
        if (top < 0).any():
            return False
        # if the best is 0, rows below it have weight 0
        possible = (gains[:, top == 0] == 0).all(axis=1)
        if possible.all():
            break
        gains = gains[possible]
    if not len(gains):
        return False
    open_ = gains[:, (gains < 0).any(axis=0)]
    return not open_.shape[1] or _mean(open_)


def _mean(gains: Table) -> bool:
    """Whether the search finds a convex combination that is exactly nonnegative in every column."""
    scales = np.abs(gains).max(axis=0)
    solution = _game((gains / scales).astype(float) + 2.0)
    if solution is None:
        return False
    rows, columns, near = solution
    weights = np.array([int(share) for share in np.rint(near * _FINE)], dtype=object)
    if (weights >= 0).all() and weights.any() and (weights @ gains.astype(object) >= 0).all():
        return True
    if len(rows) > _MOST_SHARES:
        return False
    # equalize the columns of the game, in integers
    system = [[int(gains[j, k]) + 2 * int(scales[k]) for j in rows] + [int(scales[k])] for k in columns]
    shares = _solved(system)
    if shares is None or min(shares) < 0:
        return False
    scale = lcm(*(share.denominator for share in shares))
    weights = np.array([int(share * scale) for share in shares], dtype=object)
    return bool((weights @ gains[rows].astype(object) >= 0).all())


def _game(payoff: _Floats) -> tuple[list[int], list[int], _Floats] | None:
    """Solve max sum(y), payoff @ y <= 1, y >= 0 by the simplex method, with payoffs from 1 to 3.

    Returns the basic rows and columns of the optimal combination and the weights of all rows, or None if the sum
    exceeds 1/2: then every convex combination of rows is below 2 in some column.
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
        # steepest column first; later Bland's rule, which cannot cycle
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
    """Solve a square linear system given as augmented rows exactly; None if it is singular."""
    rows = [[Fraction(n) for n in row] for row in system]
    for i in range(len(rows)):
        pivot = next((j for j in range(i, len(rows)) if rows[j][i]), None)
        if pivot is None:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [n / rows[i][i] for n in rows[i]]
        for j, row in enumerate(rows):
            if j != i and row[i]:
                rows[j] = [a - row[i] * b for a, b in zip(row, rows[i], strict=True)]
    return [row[-1] for row in rows]


# -- relations ---------------------------------------------------------------------------------------------------------

# Maximum number of terms after upper bounds are substituted.
_MOST_TERMS = 1 << 17

#: Lower bound of an atom by expression type; modules that define such types register themselves.
BOUNDS: dict[type, Callable[[sympy.Expr, Relations], Rational | None]] = {}


def _pow_bound(expr: sympy.Expr, relations: Relations) -> Rational | None:
    # such as (1 - k/E)**T with k <= E, and 1/(S + T)
    return 0 if relations.nonnegative(poly(expr.base)) else None


def _rounded_bound(expr: sympy.Expr, relations: Relations) -> Rational | None:
    bound = lower(poly(expr.args[0]), relations)
    if bound is None:
        return None
    return floor(bound) if isinstance(expr, sympy.floor) else ceil(bound)


BOUNDS |= {sympy.Pow: _pow_bound, sympy.floor: _rounded_bound, sympy.ceiling: _rounded_bound}


def lower(p: Poly, relations: Relations | None = None) -> Rational | None:
    """Return a lower bound of a polynomial, or None if none is found.

    Examples
    --------
    >>> from costgraph.notation.grammar import parse_formula
    >>> lower(parse_formula("B*S - B + 3")), lower(parse_formula("B - S"))
    (3, None)
    """
    return _lower_without_assumptions(p) if relations is None or relations is NOTHING_KNOWN else _lower(p, relations)


def _lower(p: Poly, relations: Relations) -> Rational | None:
    bound = _at_least(p, relations)
    if bound is None:
        bound = max(
            (n for q in opened(p, relations.has_sign) if (n := _at_least(q, relations)) is not None), default=None
        )
        bound = bound if bound is None or integral(p) != p else ceil(bound)
    return bound


@cached(1 << 12)
def _lower_without_assumptions(p: Poly) -> Rational | None:
    # cached: an op and its backward pass often have equal amounts, and roundings are slow
    return _lower(p, NOTHING_KNOWN)


def _at_least(p: Poly, relations: Relations) -> Rational | None:
    bounds = {k: relations.least(k) for k in p.generators()}
    if None in bounds.values():
        return None
    positive = all(b is not None and b >= 0 for b in bounds.values())
    if positive and all(c >= 0 for m, c in p.terms.items() if m):
        if all(e > 0 for m in p.terms for _, e in m):
            return sum((c * prod((bounds[k] or 0) ** e for k, e in m) for m, c in p.terms.items()), start=0)
        return p.terms.get((), 0)  # a reciprocal may be arbitrarily close to 0
    if any(e < 0 for m in p.terms for _, e in m):
        return 0 if relations.nonnegative(p) else None
    shifted = relations.shifted([p])
    if shifted is None or any(c < 0 for m, c in shifted[0].terms.items() if m):
        return None
    return shifted[0].terms.get((), 0)


def integral(p: Poly) -> Poly | None:
    """Return a positive multiple that is an integer for all sizes, or None if an atom may not be an integer."""
    cleared = NOTHING_KNOWN.cleared([p])
    if cleared is None or any(k[0] == "~" and not generator(k).is_integer for k in cleared[0].generators()):
        return None
    return cleared[0] * lcm(*(c.denominator for c in cleared[0].terms.values()))


class Relation:
    """An assumption on sizes, with its original text.

    `difference` is at least 0, exactly 0 if `equal`, above 0 if `strict`. When solving, symbols of `subject`, the
    left-hand side, are preferred.
    """

    def __init__(
        self, text: str, difference: Poly, *, equal: bool, strict: bool = False, subject: Sequence[str] = ()
    ) -> None:
        integral_difference = integral(difference) if strict else None
        self.text = text
        # a positive integer is at least 1
        self.difference = difference if integral_difference is None else integral_difference - 1
        self.equal = equal
        self.strict = strict and integral_difference is None
        self.subject = subject

    def at(self, values: Mapping[str, Poly]) -> Relation:
        """Return the relation after replacing symbols."""
        difference = self.difference.bind(values)
        return Relation(self.text, difference, equal=self.equal, strict=self.strict, subject=self.subject)

    @property
    def bound(self) -> Rational | None:
        """Lower bound of a symbol if the relation states nothing else, for sorting."""
        names = self.difference.generators()
        isolated = alone(self.difference, *names) if len(names) == 1 else None
        if isolated is None or isolated[0] <= 0 or isolated[1].constant is None:
            return None
        return Fraction(-isolated[1].constant) / isolated[0]

    def check(self, values: Mapping[str, Poly]) -> None:
        """Raise BindingError if bound sizes violate the assumption."""
        try:
            value = self.difference.bind(values).number
            broken = value is not None and bool(
                value < 0 or (self.equal and value != 0) or (self.strict and value == 0)
            )
        except ShapeError:  # division by zero, or the root of a negative number
            broken = True
        if broken:
            used = {k: v.constant for k, v in sorted(values.items()) if k in self.difference.names()}
            bound = ", ".join(f"{k}={v}" for k, v in used.items())
            raise BindingError(f"{bound}: against the assumption {self.text!r}")


class Relations:
    """Assumptions on sizes, as substitutions applied before a comparison.

    Raises PatternError if assumptions contradict each other, or exclude all positive integers.
    """

    def __init__(self, relations: Iterable[Relation] = ()) -> None:
        self.relations: tuple[Relation, ...] = tuple(relations)
        self._whole: list[tuple[str, Poly]] = []  # atoms with their exact values
        self._equal: list[tuple[str, Poly]] = []
        self._steps: list[tuple[str, Poly]] = []
        self._most: dict[str, Rational] = {}
        self._stated: dict[str, Rational] = {}  # lower bounds of atoms
        self._least: WeakKeyDictionary[str, Rational | None] = WeakKeyDictionary()  # for atoms, which may be collected
        # eliminate symbols first, so that bounds refer to the remaining ones
        for relation in sorted(self.relations, key=lambda r: (not r.equal, -(r.bound or 0))):
            self._admit(relation)
        for step in (self._limit, self._refute):
            for relation in self.relations:
                step(relation)

    def __reduce__(self) -> tuple[object, ...]:
        return Relations, (self.relations,)

    # -- reading assumptions -----------------------------------------------------------------------------------

    def _admit(self, relation: Relation) -> None:
        """Record D == H*K and F >= D as substitutions."""
        self._least.clear()  # bounds of atoms may improve
        expressed = self._expressed([relation.difference])
        if expressed is None:
            return
        (difference,) = expressed
        self._state(difference)
        subject = [s for s in relation.subject if s in difference.generators()]
        if relation.equal:
            solved = solve(difference, subject)
            rounded = exact(difference) or (None if solved else solve_rounded(difference))
            self._whole += [rounded] if rounded else []
            if solved is not None and not solved[1].names() and not solved[1].is_size:
                raise self._contradiction(relation)
            self._equal += [solved] if solved else []
            return
        for key in [*subject, *sorted(symbols_in(difference) - set(subject))]:
            isolated = alone(difference, key)
            if isolated is None or isolated[0] < 0:
                continue
            bound = isolated[1] / -isolated[0]
            if bound.constant is not None:
                bound = as_poly(ceil(bound.constant))
            # sizes are at least 1 anyway
            if bound.constant is None or bound.constant > 1:
                self._steps.append((key, bound + Poly({((SLACK + key + relation.text, 1),): 1})))
                return

    def _state(self, difference: Poly) -> None:
        """Record ceiling(S/4 - 2) >= 1 as a lower bound of an atom."""
        for key in difference.generators() if len(difference.generators()) == 1 else ():
            slope, constant = difference.terms.get(((key, 1),), 0), difference.terms.get((), 0)
            if key[0] == "~" and slope > 0 and difference == Poly({((key, 1),): slope}) + constant:
                bound = Fraction(-constant) / slope
                self._stated[key] = max(bound, self._stated.get(key, bound))
                self._least.clear()

    def _limit(self, relation: Relation) -> None:
        """Record S <= 1024 as an upper bound, for slacks too."""
        expressed = None if relation.equal else self._expressed([relation.difference])
        if expressed is None:
            return
        for key in sorted(k for k in expressed[0].generators() if k[0] != "~"):
            isolated = alone(expressed[0], key)
            room = None if isolated is None or isolated[0] > 0 else lower(isolated[1] / isolated[0], self)
            if room is None:  # the generator is at most -room
                continue
            upper = -room if key[0] == SLACK else floor(-room)
            if upper < (self.least(key) or 0):
                raise self._contradiction(relation)
            self._most[key] = min(upper, self._most.get(key, upper))

    def _refute(self, relation: Relation) -> None:
        difference = relation.difference
        wrong = self.nonnegative(-difference) if relation.strict else self.positive(-difference)
        if wrong or (relation.equal and self.positive(difference)):
            raise self._contradiction(relation)

    def _contradiction(self, relation: Relation) -> PatternError:
        """Return an error that names one conflicting assumption if one suffices."""
        others = [r for r in self.relations if r is not relation]
        fewer = [c for c in ([], *([r] for r in others)) if len(c) < len(others)]
        against = next((c for c in fewer if _contradicts([relation, *c])), others)
        texts = " and ".join(repr(r.text) for r in against)
        return PatternError(f"assumption {relation.text!r}: contradicts {texts or 'every positive integer'}")

    @property
    def settled(self) -> tuple[tuple[str, Poly], ...]:
        """Symbols determined by equalities; a formula may contain symbols that come later, never earlier ones."""
        return tuple(self._equal)

    # -- normal forms ------------------------------------------------------------------------------------------

    def least(self, key: str) -> Rational | None:
        """Return a lower bound of a generator, None if unknown."""
        if key[0] != "~":
            return 0 if key[0] == SLACK else 1
        if key not in self._least:
            expr = generator(key)
            bound = BOUNDS.get(type(expr))
            bound_of_atom = enclosed(key)[0] if is_root(key) else None if bound is None else bound(expr, self)
            self._least[key] = max((b for b in (self._stated.get(key), bound_of_atom) if b is not None), default=None)
        return self._least[key]

    def _divides(self, key: str) -> bool:
        """Whether a generator is known to be nonnegative, so that multiplying by it keeps signs."""
        bound = self.least(key)
        return bound is not None and bound >= 0

    def cleared(self, ps: Sequence[Poly]) -> list[Poly] | None:
        """Multiply by common denominators of known sign; None if the sign of a factor is unknown."""
        negative = {factor for p in ps for m in p.terms for factor in m if factor[1] < 0}
        if not negative:
            return list(ps)
        lowest = dict(sorted(negative, reverse=True))  # the lowest exponent of each generator comes last
        if not all(map(self._divides, lowest)):
            return None
        factor = Poly({tuple(sorted((k, -e) for k, e in lowest.items())): 1})
        return [p * factor for p in ps]

    def shifted(self, ps: Sequence[Poly]) -> list[Poly] | None:
        """Write each generator as its lower bound, if known, plus a nonnegative slack."""
        bounds = {key: self.least(key) for key in set[str]().union(*(p.generators() for p in ps))}
        new = {key: as_poly(low) + Poly({((SLACK + key, 1),): 1}) for key, low in bounds.items() if low}
        try:
            return [p.substitute(new) for p in ps]
        except ShapeError:  # too long to expand
            return None

    def reduce(self, p: Poly) -> Poly:
        """Eliminate symbols by equalities, so that equal sizes become equal polynomials."""
        for atom, value in self._whole:
            p = put(p, atom, value)
        for key, value in self._equal:
            p = p.bind({key: value})
        return p

    def _expressed(self, ps: Sequence[Poly]) -> list[Poly] | None:
        """Substitute all known relations and clear denominators, keeping signs."""
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
        for key, upper in {**self._most, **roots}.items():
            degree = max((e for p in out for m in p.terms for k, e in m if k == key), default=0)
            # skip bounds that would exceed the limit
            if degree and sum(len(p.terms) for p in out) * (degree + 1) <= _MOST_TERMS:
                # L <= S <= U becomes S = (U + L*t)/(1 + t) with t >= 0, with the denominator cleared
                t = Poly({((SLACK + key + "<", 1),): 1})
                low = t * (self.least(key) or 0) + upper
                try:
                    powers = [low**power * (t + 1) ** (degree - power) for power in range(degree + 1)]
                    out = [_collected(p, key, powers) for p in out]
                except ShapeError:  # too long to expand
                    return None
        return self.shifted(out)

    def spread(self, monomials: Sequence[Monomial], *, known: bool = True) -> dict[Monomial, Poly] | None:
        """Write monomials, times a common positive factor, in nonnegative generators.

        A sum of the monomials is nonnegative if its image has no negative coefficient, and only zero coefficients at
        monomials without known sign (`has_sign`). Returns None if the result would be too long. A monomial with a
        divisor of unknown sign is unchanged. `known` selects whether assumptions are substituted.
        """
        plain = [m for m in monomials if all(e > 0 or self._divides(k) for k, e in m)]
        ps = [Poly({m: 1}) for m in plain]
        images = self._expanded(ps) if known else self._bare(ps)
        if images is None:
            return None
        return {m: Poly({m: 1}) for m in monomials} | dict(zip(plain, images, strict=True))

    def has_sign(self, m: Monomial) -> bool:
        """Whether a monomial is known to be nonnegative."""
        return all(self._divides(k) for k, _ in m)

    # -- comparisons -------------------------------------------------------------------------------------------

    def nonnegative(self, p: Poly) -> bool:
        """Whether a polynomial is known to be nonnegative for all admissible sizes."""
        if self._no_negative([p]):
            return True
        if -1 in self._met(p):
            return False
        if any(map(self._no_negative, self._forms(p))):
            return True
        multiple = integral(p)  # an integer above -1 is nonnegative
        for plain in self.cleared([p]) or () if multiple is None else [multiple]:
            for q in opened(plain, self.has_sign):
                room = 0 if multiple is None else 1 - Fraction(1, denominator(q.terms))
                if any(map(self._no_negative, self._forms(q + room))):
                    return True
        return False

    def sign(self, p: Poly) -> int:
        """Return 1 if a polynomial is known to be nonnegative, -1 if nonpositive, else 0."""
        if len(self._met(p)) == 2:
            return 0
        sign_of_forms = next((sign for ps in self._forms(p) for sign in (1, -1) if self._no_negative(ps, sign)), 0)
        return sign_of_forms or next((sign for sign in (1, -1) if self.nonnegative(p * sign)), 0)

    def _met(self, p: Poly) -> frozenset[int]:
        """Return signs at sample sizes, which avoid most failing proofs."""
        return frozenset() if self.relations else signs_met(p)

    def _forms(self, p: Poly) -> Iterator[Sequence[Poly] | None]:
        """Yield sign-preserving forms of a polynomial, cheapest first."""
        yield [p]
        yield self._bare([p])
        if self.relations or any(map(is_root, p.generators())):
            yield self._expanded([p])

    def positive(self, p: Poly) -> bool:
        """Whether a polynomial is known to be positive for all admissible sizes."""
        multiple = integral(p)
        if multiple is not None:
            return self.nonnegative(multiple - 1)
        # without upper bounds: (U + t)/(1 + t) reaches its lower end only in the limit
        out = self._expressed([p])
        shifted = None if out is None else self.shifted(out)
        return shifted is not None and shifted[0].terms.get((), 0) > 0 and self._no_negative(shifted)

    def _no_negative(self, ps: Sequence[Poly] | None, sign: int = 1) -> bool:
        return ps is not None and all(c * sign >= 0 and self.has_sign(m) for p in ps for m, c in p.terms.items())


def _collected(p: Poly, key: str, powers: Sequence[Poly]) -> Poly:
    """Substitute a polynomial for each power of a generator."""
    split_powers = {m: (dict(m).get(key, 0), tuple(f for f in m if f[0] != key)) for m in p.terms}
    return total(Poly({split_powers[m][1]: c}) * powers[split_powers[m][0]] for m, c in p.terms.items())


def _contradicts(relations: list[Relation]) -> bool:
    try:
        Relations(relations)
    except PatternError:
        return True
    return False


NOTHING_KNOWN = Relations()


# -- pruning -----------------------------------------------------------------------------------------------------------

Label = TypeVar("Label")

# Sums of products below this limit do not overflow int64.
_MOST = 1 << 62


def prune(
    candidates: Iterable[tuple[Poly, Label]], relations: Relations = NOTHING_KNOWN, *, largest: bool = True
) -> list[tuple[Poly, Label]]:
    """Drop candidates that another one, or a convex combination of others, dominates for all sizes.

    `largest` selects a maximum or a minimum. Among equal polynomials, the first label is kept.

    Generators are written as lower bounds plus nonnegative slacks. A candidate is dropped if a convex combination of
    others has coefficients at least as large. This is sufficient, not necessary.
    """
    first: dict[Poly, Label] = {}
    for p, label in candidates:
        first.setdefault(p, label)
    remaining = list(first)
    if len(remaining) == 2:  # the most common case
        a, b = sorted(remaining, key=Poly.sort_key)
        sign = relations.sign(a - b if largest else b - a)
        remaining = {1: [a], -1: [b], 0: remaining}[sign]
    elif len(remaining) > 1:
        # first without assumptions, which is fast for many candidates
        remaining = _best(remaining, relations, None, largest=largest)
        more = relations.relations or any(is_root(k) for p in remaining for k in p.generators())
        for known in (False, True) if more else (False,):
            images = relations.spread(sorted({m for p in remaining for m in p.terms}), known=known)
            if len(remaining) > 1 and images is not None:
                remaining = _best(remaining, relations, images, largest=largest)
    final = set(remaining)
    return [(p, label) for p, label in first.items() if p in final]


def reached_by(ps: Iterable[Poly], others: Iterable[Poly], relations: Relations = NOTHING_KNOWN) -> bool:
    """Whether each polynomial equals one of `others`, or never exceeds their maximum."""
    return all(is_other for _, is_other in prune([*((q, True) for q in others), *((p, False) for p in ps)], relations))


def _best(
    ps: Sequence[Poly], relations: Relations, images: Mapping[Monomial, Poly] | None, *, largest: bool
) -> list[Poly]:
    """Drop polynomials dominated by coefficients, or by the images of their monomials."""
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
    selected = skyline(table, order)
    if images is not None:
        selected = [selected[i] for i in corners(table[selected])]
    return [ps[i] for i in selected]


def _coefficients(ps: Sequence[Poly]) -> Table:
    """Return the coefficient matrix, one row per polynomial and one column per monomial, in order of first use.

    All coefficients are scaled by one number to integers.
    """
    monomials = {m: i for i, m in enumerate({m: None for p in ps for m in p.terms})}
    scale = lcm(*{c.denominator for p in ps for c in p.terms.values()})
    rows: list[list[int]] = [[0] * len(monomials) for _ in ps]
    for row, p in zip(rows, ps, strict=True):
        for m, c in p.terms.items():
            row[monomials[m]] = c if type(c) is int and scale == 1 else int(c * scale)
    magnitude = max((abs(c) for row in rows for c in row), default=0)
    shape = (len(ps), len(monomials))
    return np.array(rows, dtype=np.int64 if magnitude * max(len(monomials), 2) < _MOST else object).reshape(shape)


def _product(a: Table, b: Table) -> Table:
    """Return the exact product of two matrices."""
    magnitude = int(np.abs(a).max(initial=0)) * int(np.abs(b).max(initial=0)) * max(a.shape[1], 2)
    return a @ b if magnitude < _MOST else a.astype(object) @ b.astype(object)
