"""How long a graph takes on a device, as a formula: a sum over its ops, and a bound that no run is below."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import sympy

from ..algebra.division import content
from ..algebra.dominance import Relations
from ..algebra.extremum import Max, Owner, extremum
from ..algebra.polynomial import Poly, poly, total
from ..algebra.pruning import prune
from ..bind.evaluate import Formula, answer, real
from ..errors import StandInWarning
from ..graph.loop import loops
from ..graph.op import Op, OpKind
from ..graph.sizes import Bindings
from ..hardware.rates import NAMED, StandIn
from ..hardware.specs import Hardware
from ..ops.collectives import Collective
from ..ops.stated import Transfer
from .bounds import unavoidable
from .exchange import exchange, group_of, least_busy, whole
from .streams import finished
from .traffic import compulsory
from .work import Asked, Work, exact

__all__ = [
    "OVERLAPS", "Bound", "Spent", "as_seconds", "estimate", "in_place", "in_seconds", "largest", "lower_bound",
    "memory_time", "spent", "together", "unit_times", "warn_of", "which",
]  # fmt: skip

Spent = tuple[Poly, str]
#: What communication does beside the rest: follow it, fill the same time, or start once its operands are there.
OVERLAPS = ("none", "ideal", "streams")


@dataclass(frozen=True)
class Bound:
    """What bounds an op, as a condition on sizes.

    Where each level of memory is taken into account, several conditions in a row.

    Examples
    --------
    >>> import costgraph as cg
    >>> N = cg.dims("N")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    >>> device = cg.load_hardware("h100-sxm")
    >>> print(cg.roofline(g, device.symbolic()).rows[0].bound)
    compute where N*bandwidth >= 3*peak_bf16, else memory
    >>> cg.roofline(g, device).rows[0].bound.compute.subs(N, 1024)
    True
    """

    compute: sympy.Basic
    """where compute, or what `first` names, takes as long as all else or longer: a sympy relation, or And and Or of
    several"""
    otherwise: str | Bound
    """memory, link or a cache: what bounds it elsewhere"""
    first: str = "compute"
    """what bounds it where the relation holds"""

    def __str__(self) -> str:
        return f"{self.first} where {_text(self.compute)}, else {self.otherwise}"


def _text(condition: sympy.Basic) -> str:
    if isinstance(condition, sympy.And | sympy.Or):
        parts = sorted(map(_text, condition.args), key=lambda text: (len(text), text))
        return " and ".join(parts) if isinstance(condition, sympy.And) else f"({' or '.join(parts)})"
    sides = (side if _is_whole(side) else side.n(4) for side in (condition.lhs, condition.rhs))
    return " >= ".join(map(str, sides))


def _is_whole(side: sympy.Expr) -> bool:
    return all(number.is_Integer for number in side.atoms(sympy.Rational))


def which(times: Sequence[Spent], known: Relations) -> str | Bound:
    """Say which of several times is the largest: by name where that is one for all sizes, else where it is which.

    Times are as `spent` returns them; of several that are equal the first counts.
    """
    if len(times) > 2 or all(not p.names() for p, _ in times):
        times = _kept(times, known)
    name = times[0][1]
    rest = [p for p, other in times if other != name]
    if not rest:
        return name
    own = [p for p, other in times if other == name]
    open_ = [p for p in rest if not known.nonnegative(_most(own) - p)]
    if not open_:
        return name
    left = which([t for t in times if t[1] != name], known)
    if known.nonnegative(_most(rest) - _most(own)):
        return left
    relations = ([_relation(p - other, known) for p in own] for other in open_)
    return Bound(_all(sympy.And, [_all(sympy.Or, some) for some in relations]), left, name)


def _all(join: type[sympy.And | sympy.Or], parts: Sequence[sympy.Basic]) -> sympy.Basic:
    return parts[0] if len(parts) == 1 else join(*parts, evaluate=False)


def _most(parts: Sequence[Poly]) -> Poly:
    return parts[0] if len(parts) == 1 else poly(extremum([(p, Owner()) for p in parts]))


def _relation(excess: Poly, known: Relations) -> sympy.Ge:
    """Return where a difference of times is not negative, positive terms on the left."""
    found = known.cleared([excess])
    plain = found[0] if found else excess
    plain = plain * lcm(*(c.denominator for c in plain.terms.values()))
    more, less = (Poly({m: c for m, c in p.terms.items() if c > 0}) for p in (plain, -plain))
    shared, scale = content(plain.terms)
    if len(more.terms) == 1:  # B*S >= 295.3, where it is one product
        (scale,) = more.terms.values()
    factor = Poly({shared: scale if scale > 0 else -scale})
    return sympy.Ge((more / factor).expr, (less / factor).expr, evaluate=False)


def _kept(times: Sequence[Spent], known: Relations) -> list[Spent]:
    """Return times of which one is the largest; of numbers, roots among them, the first that is."""
    times = [t for t in times if t[0]] or [times[0]]
    if all(not p.names() for p, _ in times):
        exactly = all(p.constant is not None for p, _ in times)
        values = [exact(p) if exactly else sympy.N(p.expr, 30) for p, _ in times]
        return [times[values.index(max(values))]]
    return prune(times, known)


def largest(times: Sequence[Spent], known: Relations) -> Poly:
    """Return the largest of some times, what all have in common as a factor in front: multiples are one atom."""
    kept = _kept(times, known)
    if len(kept) == 1:
        return kept[0][0]
    factor = _common([p for p, _ in kept])
    return factor * poly(extremum([(p / factor, Owner()) for p, _ in kept]))


def _common(parts: Sequence[Poly]) -> Poly:
    """Return the factor that all terms of all parts have: numbers, and symbols, which are positive."""
    terms = [term for p in parts for term in p.terms.items()]
    number = Fraction(gcd(*(c.numerator for _, c in terms)), lcm(*(c.denominator for _, c in terms)))
    powers = [dict(m) for m, _ in terms]
    shared = []
    for key in sorted(k for k in powers[0] if k[0] != "~"):
        found = [p.get(key, 0) for p in powers]
        if min(found) > 0 or max(found) < 0:
            shared.append((key, min(found, key=abs)))
    return Poly({tuple(shared): number})


def spent(work: Work, asked: Asked) -> list[Spent]:
    """Return the times of an op, the largest of which is its own: in compute, in memory or over a link, in caches.

    Each has its name: compute, link, memory or that of a cache; of a collective interconnect or network as well. With
    levels, what moves out of each of them is the least through all that is nearer, several formulas of which the
    largest holds.
    """
    out = in_place(work, asked)
    if work.collective is not None:
        once, link = exchange(work.op, asked.graph, asked.values, asked.hardware)
        out.append((once * work.times, link))
    sends = [exchange(op, asked.graph, asked.values, asked.hardware) for op in work.rings]
    if sends:  # one after another, over the same link
        out.append((total(once for once, _ in sends) * work.times, sends[0][1]))
    return list(dict.fromkeys(out))


def in_place(work: Work, asked: Asked) -> list[Spent]:
    """Return the times of an op that are none of a link between ranks; parameters as `spent`."""
    compute, memory = work.seconds(asked.rates)
    out = [(compute, "compute"), (memory, work.unit)]
    if work.unit == "memory":
        out += [(p / poly(level.bandwidth.value), level.name) for p, level in work.through]
    return out


def estimate(times: Iterable[Sequence[Spent]], known: Relations) -> Poly:
    """Return the sum over ops of the largest time that `spent` returns, equal ops together."""
    alike: dict[tuple[Spent, ...], int] = {}
    for found in times:
        alike[tuple(found)] = alike.get(tuple(found), 0) + 1
    return total(largest(found, known) * count for found, count in alike.items())


def together(times: Sequence[Sequence[Spent]], asked: Asked, overlap: str) -> Poly:
    """Return the estimate of a graph with communication: a sum, the larger of its part and of the rest, or a schedule.

    Times of each op are as `spent` returns them; `overlap` is one of `OVERLAPS`.
    """
    known = asked.graph.root.relations
    if overlap == "none":
        return estimate(times, known)
    if overlap == "streams":
        asked.need_numbers("overlap 'streams'")
        taken: dict[Op, float] = {}
        for work, found in zip(asked.works, times, strict=True):
            taken[work.op] = taken.get(work.op, 0.0) + float(in_seconds(largest(found, known), asked))
        busy = (float(in_seconds(time, asked)) for time in unit_times(asked).values())
        iterations = {o.op: int(o.count.bind(asked.values).constant or 0) for o in loops(asked.graph)}
        done = finished(asked.graph, taken, iterations)
        return poly(Fraction(max(float(done), *busy)))
    elsewhere = [bool(w.collective) or w.unit != "memory" for w in asked.works]
    sent, alone = ([t for t, away in zip(times, elsewhere, strict=True) if away == how] for how in (True, False))
    # both read and write the one memory of a device
    parts = {"alone": estimate(alone, known), "sent": estimate(sent, known), "memory": memory_time(asked)}
    return largest([(p, name) for name, p in parts.items()], known)


def lower_bound(asked: Asked) -> Poly:
    """Return the seconds that no run is below: the busiest unit, or the bytes that no fusion avoids.

    Rates that are missing are taken as the highest of the device here, which is no smaller.
    """
    found = [(p, unit) for unit, p in unit_times(asked).items()]
    if asked.levels and asked.levels[0].whole:  # what caches hand out may be read and written at once: no bound
        moved = unavoidable(asked.graph, asked.levels[0].nearer)
        found += [((p.bind(asked.values) - asked.resident) / asked.rates.bandwidth, "memory") for p in moved]
    kept = _kept(found, asked.graph.root.relations)
    return kept[0][0] if len(kept) == 1 else poly(extremum([(p, Owner(unit)) for p, unit in kept]))


def unit_times(asked: Asked) -> dict[str, Poly]:
    """Return the least seconds that each unit is busy: of `vector`, `matmul` and links that are used, and `memory`."""
    units: dict[str, list[Poly]] = {}
    for work in asked.works:
        if work.unit != "memory":  # a link carries both directions at once
            way = f" to the {work.op.kind.to}" if isinstance(work.op.kind, Transfer) else ""
            units.setdefault(f"{work.unit}{way}", []).append(work.seconds(asked.rates)[1])
            continue
        sent = [work.op] if work.collective else work.rings
        on_links = [(u, p * work.times) for op in sent for u, p in _of_collective(op, op.kind, asked)]
        for unit, spent in [*on_links, *(() if work.collective else _by_unit(work, asked))]:
            units.setdefault(unit, []).append(spent)
    found = {unit: total(parts) for unit, parts in units.items()}
    found["memory"] = memory_time(asked)
    return found


def memory_time(asked: Asked) -> Poly:
    """Return the least seconds that the memory is busy."""
    moved = compulsory(asked.graph).bind(asked.values)
    if asked.resident:
        moved = poly(Max(0, (moved - asked.resident).expr))
    return moved / asked.rates.bandwidth


def _by_unit(work: Work, asked: Asked) -> Iterator[tuple[str, Poly]]:
    for (kind, dtype), amount in work.least.items():
        unit = "vector" if asked.rates.shares_unit(kind, dtype) else "matmul"
        yield unit, amount / (asked.rates.of(kind, dtype, highest=True) * asked.rates.headroom)


def _of_collective(op: Op, kind: OpKind, asked: Asked) -> Iterator[tuple[str, Poly]]:
    """Yield the least times on links, of one time: a switch may do the sums."""
    assert isinstance(kind, Collective)
    group = group_of(op, asked.graph, asked.values, asked.hardware)
    yield from least_busy(kind.collective, whole(op).bind(asked.values), group).items()


def warn_of(hardware: Hardware, stand_ins: Iterable[StandIn]) -> None:
    """Warn of rates that stand in for missing ones, but for those that were named by whoever asks."""
    texts = [str(instead) for instead in stand_ins if instead.why != NAMED]
    if texts:
        warnings.warn(f"hardware {hardware.id}: {'; '.join(texts)}", StandInWarning, stacklevel=5)


def in_seconds(value: Poly, asked: Asked) -> Formula:
    """Return a time as it is handed out: a float, or a formula while something is open."""
    return as_seconds(value, asked.values)


def as_seconds(value: Poly, values: Bindings) -> Formula:
    """Return a time, in which sizes are put in, as it is handed out."""
    return answer(value, values.held) if value.constant is None else real(Fraction(value.constant))
