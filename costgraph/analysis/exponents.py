"""Exponents of the Hölder-Brascamp-Lieb inequality: how many index points some elements of each array can make.

A set of index points E whose images under the index maps phi_j have F_j elements, in a box of L_i positions along index
i, has at most prod F_j^s_j * prod L_i^t_i points wherever s and t are not negative and

    rank(H) <= sum s_j rank(phi_j H) + sum t_i rank(pi_i H)    for every subspace H,

pi_i the projection onto index i (Christ, Demmel, Knight, Scanlon and Yelick 2013, theorem 3.2; a bounded index is one
more projection: Dinh and Demmel 2020). The subspaces that matter are those that the kernels of the maps make under sum
and intersection (Valdimarsson 2010). Maps that are products over groups of indices are looked at group by group, since
the inequality of a product of spaces is the product of theirs: where no index is a sum, that leaves a constraint an
index.

Every pair (s, t) that keeps the constraints gives a bound that holds; which of them are listed is a matter of how good
it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product

from ..algebra.subspaces import Matrix, closure, image_rank, kernel, reduced, solved

__all__ = ["Access", "Exponents", "Row", "exponents", "feasible"]

#: One axis of an array: index names with their coefficients.
Row = tuple[tuple[str, int], ...]
#: The axes of an array.
Access = tuple[Row, ...]

# Four planes in general position already make a lattice without end. Beyond this a sum of indices is left out of the
# map of its array, which is then taken to have fewer elements for as many points: what is proved still holds.
_MOST_SUBSPACES = 64
# Arrays whose exponents are looked for; with more, nothing is said beyond that each is read once.
_MOST_ARRAYS = 6
_MOST_CHOICES = 64


@dataclass(frozen=True)
class Exponents:
    """One pair (s, t)."""

    arrays: tuple[Fraction, ...]
    """s, one for each array."""
    indices: tuple[tuple[str, Fraction], ...]
    """t of the indices where it is not zero, by name."""

    @property
    def total(self) -> Fraction:
        """Sum of s: a cache of M bytes makes traffic fall as M**(1 - total)."""
        return sum(self.arrays, start=Fraction(0))


@dataclass(frozen=True)
class _Constraint:
    """`rank <= sum arrays*s + sum indices*t`."""

    arrays: tuple[int, ...]
    indices: tuple[tuple[str, int], ...]
    rank: int

    def lack(self, s: Sequence[Fraction]) -> Fraction:
        """Return what s leaves to t."""
        return self.rank - sum((a * x for a, x in zip(self.arrays, s, strict=True)), start=Fraction(0))


def _groups(names: Sequence[str], accesses: Iterable[Access]) -> list[tuple[str, ...]]:
    """Return the indices, those together that stand in one sum."""
    group = {name: {name} for name in names}
    for row in (row for access in accesses for row in access):
        joined = set().union(*(group[name] for name, _ in row))
        group |= dict.fromkeys(joined, joined)
    return list(dict.fromkeys(tuple(n for n in names if n in group[name]) for name in names))


def _constraints_of(group: tuple[str, ...], accesses: Sequence[Access]) -> set[_Constraint]:
    size = len(group)
    unit = {name: tuple(Fraction(int(other == name)) for other in group) for name in group}
    maps = [
        reduced([[dict(row).get(name, 0) for name in group] for row in access if any(n in group for n, _ in row)])
        for access in accesses
    ]
    kernels = [kernel(m, size) for m in maps] + [kernel((unit[name],), size) for name in group]
    spaces = closure(kernels, size, _MOST_SUBSPACES)
    if spaces is None:
        plain = [tuple(row for row in access if len(row) == 1) for access in accesses]
        return {c for name in group for c in _constraints_of((name,), plain)}
    return {
        _Constraint(
            tuple(image_rank(m, space) for m in maps),
            tuple((name, 1) for name in group if image_rank((unit[name],), space)),
            len(space),
        )
        for space in (*spaces, _whole(size))
        if space
    }


def _whole(size: int) -> Matrix:
    return reduced([[int(i == j) for j in range(size)] for i in range(size)])


def _least(constraints: Sequence[_Constraint], s: Sequence[Fraction]) -> list[dict[str, Fraction]]:
    """Return the vertices of what t may be, given s: as little as keeps the constraints of one group."""
    names = sorted({n for c in constraints for n, _ in c.indices})
    rows = [([dict(c.indices).get(n, 0) for n in names], c.lack(s)) for c in constraints]
    rows += [([int(m == n) for m in names], Fraction(0)) for n in names]
    out = []
    for chosen in combinations(rows, len(names)):
        t = solved([r for r, _ in chosen], [lack for _, lack in chosen])
        if t is None or min(t) < 0 or any(sum(a * x for a, x in zip(r, t, strict=True)) < lack for r, lack in rows):
            continue
        found = dict(zip(names, t, strict=True))
        if found not in out:
            out.append(found)
    return out


def _starts(constraints: Iterable[_Constraint], count: int) -> Iterator[tuple[Fraction, ...]]:
    """Yield the vertices of the arrangement that constraints make in s where t is zero."""
    planes = {(c.arrays, c.rank) for c in constraints if any(c.arrays)}
    planes |= {(tuple(int(i == j) for j in range(count)), 0) for i in range(count)}
    for chosen in combinations(sorted(planes), count):
        s = solved([a for a, _ in chosen], [rank for _, rank in chosen])
        if s is not None and all(0 <= x <= 1 for x in s):
            yield s


def _better(a: Exponents, b: Exponents) -> bool:
    """Whether a bounds at least as well as b for every cache and all sizes, constants left out."""
    small, large = dict(a.indices), dict(b.indices)
    return a.total <= b.total and all(t <= large.get(n, 0) for n, t in small.items())


def _mean(found: Sequence[Exponents]) -> Exponents:
    """Return the mean of exponents with one sum and one t: it keeps the constraints, as they are convex."""
    columns = zip(*(e.arrays for e in found), strict=True)
    return Exponents(tuple(sum(c, start=Fraction(0)) / len(found) for c in columns), found[0].indices)


def feasible(names: Sequence[str], accesses: Sequence[Access], found: Exponents) -> bool:
    """Whether exponents keep all constraints of some index maps."""
    t = dict(found.indices)
    return all(
        c.lack(found.arrays) <= sum(t.get(n, 0) * a for n, a in c.indices)
        for group in _groups(names, accesses)
        for c in _constraints_of(group, accesses)
    )


@lru_cache(maxsize=1 << 10)
def exponents(names: tuple[str, ...], accesses: tuple[Access, ...]) -> tuple[tuple[Exponents, ...], ...]:
    """Return the exponents that bound traffic, those of equal sum and equal t together.

    They are vertices with a sum of s above 1 that no other pair betters, each set with its mean at the end. Sums up to
    1 say no more than that every array is moved once.
    """
    if not 0 < len(accesses) <= _MOST_ARRAYS:
        return ()
    by_group = [list(_constraints_of(group, accesses)) for group in _groups(names, accesses)]
    found: dict[tuple[Fraction, tuple[tuple[str, Fraction], ...]], list[Exponents]] = {}
    for s in dict.fromkeys(_starts([c for group in by_group for c in group], len(accesses))):
        choices = [_least(group, s) for group in by_group]
        for picked, _ in zip(product(*choices), range(_MOST_CHOICES), strict=False):
            t = _joined(picked)
            found.setdefault((sum(s, start=Fraction(0)), t), []).append(Exponents(s, t))
    firsts = [sets[0] for sets in found.values()]
    kept = [e for e in firsts if e.total > 1 and not any(_better(o, e) for o in firsts if o is not e)]
    sets = [found[e.total, e.indices] for e in kept]
    return tuple((*each, _mean(each)) if len(each) > 1 else tuple(each) for each in sets)


def _joined(picked: Iterable[Mapping[str, Fraction]]) -> tuple[tuple[str, Fraction], ...]:
    return tuple(sorted((n, x) for each in picked for n, x in each.items() if x))
