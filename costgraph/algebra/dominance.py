"""Which of two polynomials is the larger for every admissible size, decided without a numeric guess.

A polynomial is nonnegative if, after each generator is written as its lower bound plus something that is not negative,
no coefficient is negative. What is known about sizes (`Relations`) is substituted first, so that F >= D becomes
F = D + f with f >= 0. The test is sufficient, not necessary: what it cannot decide stays a regime of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, floor, lcm, prod
from weakref import WeakKeyDictionary

import sympy

from ..errors import BindingError, PatternError, ShapeError
from .generators import SLACK
from .polynomial import ONE, Poly, Rational, as_poly, generator, poly, total

__all__ = ["BOUNDS", "NOTHING_KNOWN", "Relation", "Relations", "integral", "lower", "solve"]

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
    known = known or NOTHING_KNOWN
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
    shifted = known.shifted(p)
    if shifted is None or any(c < 0 for m, c in shifted.terms.items() if m):
        return None
    return shifted.terms.get((), 0)


def _alone(p: Poly, key: str) -> tuple[Rational, Poly] | None:
    """Return the coefficient of a generator and the rest, if it occurs on its own and nowhere else."""
    coefficient = p.terms.get(((key, 1),))
    rest = p - Poly({((key, 1),): coefficient or 0})
    return None if coefficient is None or key in rest.names() else (coefficient, rest)


def solve(p: Poly, prefer: Sequence[str] = ()) -> tuple[str, Poly] | None:
    """Solve `p == 0` for a symbol: one that stands alone with a number, or one factor of two monomials."""
    names = [*prefer, *sorted(_symbols(p) - set(prefer))]
    for key in names:
        found = _alone(p, key)
        if found is not None:
            return key, found[1] / -found[0]
    if len(p.terms) == 2:
        (m, c), (n, d) = sorted(p.terms.items())
        ratio = Poly({m: -c}) / Poly({n: d})  # == 1
        for key in names:
            power = next((e for m in ratio.terms for k, e in m if k == key), 0)
            if abs(power) == 1:
                rest = ratio / Poly({((key, power),): 1})
                if key not in rest.names():
                    return key, rest if power == -1 else ONE / rest
    return None


def integral(p: Poly) -> Poly | None:
    """Return a positive multiple that is an integer for all sizes, or None where an atom need not be one."""
    cleared = NOTHING_KNOWN.cleared(p)
    if cleared is None or any(k[0] == "~" and not generator(k).is_integer for k in cleared.generators()):
        return None
    return cleared * lcm(*(c.denominator for c in cleared.terms.values()))


class Relation:
    """One assumption on sizes, with its text.

    Parameters
    ----------
    text : str
        As it was stated.
    difference : Poly
        What is at least 0; exactly 0 if `equal`, more than 0 if `strict`.
    subject : sequence of str
        Symbols on the left, preferred when it is solved.
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
        self.relations: tuple[Relation, ...] = tuple(relations)
        self._equal: list[tuple[str, Poly]] = []
        self._steps: list[tuple[str, Poly]] = []
        self._most: dict[str, Rational] = {}
        self._least: WeakKeyDictionary[str, Rational | None] = WeakKeyDictionary()  # of atoms, which may go
        # what eliminates symbols comes first, so that bounds are about those that are left
        for relation in sorted(self.relations, key=lambda r: not r.equal):
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
        difference = self._expressed(relation.difference)
        if difference is None:
            return
        subject = [s for s in relation.subject if s in difference.generators()]
        if relation.equal:
            found = solve(difference, subject)
            if found is not None and not found[1].names() and not found[1].is_size:
                raise self._contradiction(relation)
            self._equal += [] if found is None else [found]
            return
        for key in [*subject, *sorted(_symbols(difference) - set(subject))]:
            found_alone = _alone(difference, key)
            if found_alone is None or found_alone[0] < 0:
                continue
            bound = found_alone[1] / -found_alone[0]
            if bound.constant is not None:
                bound = as_poly(ceil(bound.constant))
            # a bound below 1 says nothing new
            if bound.constant is None or bound.constant > 1:
                self._steps.append((key, bound + Poly({((SLACK + key + relation.text, 1),): 1})))
                return

    def _limit(self, relation: Relation) -> None:
        """Keep S <= 1024 as bounds from above, of slacks too."""
        difference = None if relation.equal else self._expressed(relation.difference)
        if difference is None:
            return
        for key in sorted(k for k in difference.generators() if k[0] != "~"):
            found = _alone(difference, key)
            room = None if found is None or found[0] > 0 else lower(found[1] / found[0], self)
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

    # -- forms that are easy to compare --------------------------------------------------------------------------

    def least(self, key: str) -> Rational | None:
        """Lower bound of a generator, None where nothing is known."""
        if key[0] != "~":
            return 0 if key[0] == SLACK else 1
        if key not in self._least:
            expr = generator(key)
            bound = BOUNDS.get(type(expr))
            self._least[key] = None if bound is None else bound(expr, self)
        return self._least[key]

    def cleared(self, p: Poly) -> Poly | None:
        """Multiply by what makes all exponents nonnegative: the sign stays, or None where a sign is not known."""
        negative = [factor for m in p.terms for factor in m if factor[1] < 0]
        if not negative:
            return p
        lowest = dict(sorted(negative, reverse=True))  # of several exponents of a generator the least comes last
        if any((least := self.least(k)) is None or least < 0 for k in lowest):
            return None
        return p * Poly({tuple(sorted((k, -e) for k, e in lowest.items())): 1})

    def shifted(self, p: Poly) -> Poly | None:
        """Write each generator as its lower bound plus a generator that is at least 0; None where that cannot be."""
        new = {}
        for key in p.generators():
            least = self.least(key)
            if least is None:
                return None
            if least:
                new[key] = as_poly(least) + Poly({((SLACK + key, 1),): 1})
        try:
            return p.substitute(new)
        except ShapeError:  # too long to be written out: nothing is known of it
            return None

    def reduce(self, p: Poly) -> Poly:
        """Eliminate what an equality gives, so that equal sizes become the same polynomial."""
        for key, value in self._equal:
            p = p.bind({key: value})
        return p

    def _expressed(self, p: Poly) -> Poly | None:
        """Return something of the same sign with everything known substituted into it, without reciprocals."""
        out = self.cleared(self.reduce(p))
        for key, value in self._steps:
            if out is not None and key in out.generators():
                out = self.cleared(out.substitute({key: value}))
        return out

    def _expanded(self, p: Poly) -> Poly | None:
        out = self._expressed(p)
        if out is None:
            return None
        for key, most in self._most.items():
            degree = max((e for m in out.terms for k, e in m if k == key), default=0)
            if degree:
                # L <= S <= U is S = (U + L*t)/(1 + t) with t >= 0; the denominator is multiplied away
                t = Poly({((SLACK + key + "<", 1),): 1})
                parts = []
                for m, c in out.terms.items():
                    power = dict(m).get(key, 0)
                    rest = Poly({tuple(f for f in m if f[0] != key): c})
                    parts.append(rest * (t * (self.least(key) or 0) + most) ** power * (t + 1) ** (degree - power))
                out = total(parts)
        return self.shifted(out)

    # -- answers -------------------------------------------------------------------------------------------------

    def nonnegative(self, p: Poly) -> bool:
        """Whether the polynomial is known to be at least 0 for all admissible sizes."""
        plain = self.cleared(p)
        if _no_negative(None if plain is None else self.shifted(plain)):
            return True
        return bool(self.relations) and _no_negative(self._expanded(p))

    def positive(self, p: Poly) -> bool:
        """Whether the polynomial is known to be above 0 for all admissible sizes."""
        whole = integral(p)
        if whole is not None:
            return self.nonnegative(whole - 1)
        # bounds from above are left out: (U + t)/(1 + t) reaches its lower end only in the limit
        out = self._expressed(p)
        found = None if out is None else self.shifted(out)
        return found is not None and found.terms.get((), 0) > 0 and _no_negative(found)

    def free(self, keys: set[str]) -> list[str]:
        """Return the generators that decide the values of others."""
        known = self._equal + self._steps
        return sorted(keys.union(*(value.generators() for _, value in known)) - {key for key, _ in known})

    def sample(self, at: Mapping[str, int]) -> dict[str, Rational] | None:
        """Return a value for every generator, or None where these values of the free ones are not admissible."""
        # an atom is a number of its own here, so that what is not provable may be refuted wrongly:
        # a regime too many, never one too few
        raised = {k: max(v, ceil(self.least(k) or 0)) for k, v in at.items()}
        values: dict[str, Rational] = {k: min(v, floor(self._most.get(k, v))) for k, v in raised.items()}
        for key, value in reversed(self._equal + self._steps):
            values[key] = value.evaluate(values.__getitem__)
            if values[key] < 1:
                return None
        return values


def _symbols(p: Poly) -> set[str]:
    return {k for k in p.generators() if k[0] not in "~" + SLACK}


def _no_negative(p: Poly | None) -> bool:
    return p is not None and all(c >= 0 for c in p.terms.values())


def _contradicts(relations: list[Relation]) -> bool:
    try:
        Relations(relations)
    except PatternError:
        return True
    return False


NOTHING_KNOWN = Relations()
