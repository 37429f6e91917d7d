"""Which axes of an op a mesh splits: one choice for all kinds, made from their rule of placement."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ...algebra.polynomial import ONE, Poly
from ...graph.placement import Factors, Mesh, Placement, Split, agree, distributed, size_of, tidy

__all__ = ["Choice", "Given", "choose"]


#: An operand that is moved: its place, the axis of the mesh, and why.
Moved = tuple[int, str, str]


@dataclass
class Given:
    """An operand as it lies before the op."""

    at: Placement | None
    """Its placement; None of one that lies wherever it is wanted, as it is made for this reader."""
    gathered: Collection[str] = ()
    """Axes of the mesh along which it is put together for its readers: those of a parameter under ZeRO-3."""
    stays: bool = False
    """Whether it stays where it is, and what is computed with it comes to it: a parameter."""
    name: str = ""
    """What it is called."""
    stated: bool = False
    """Whether it lies where somebody has said: what meets it is moved."""
    repeated: Collection[int] = ()
    """Its axes along which it is the same again and again, without a copy."""
    zero: bool = False
    """Whether it is nothing but zeros, so that all ranks together hold it if each of them does."""


@dataclass
class Choice:
    """What an op wants of its operands, and where its results lie."""

    operands: list[Placement | None]
    """Of each; None of one that is taken as it lies."""
    results: list[Placement]
    extents: dict[str, Poly]
    """Size of each name of the rule on one rank."""
    ranks: dict[str, str]
    """The axis of the mesh that splits a name that the results leave out."""
    spread: dict[str, Factors]
    """Parts of each name of the rule."""
    moved: list[Moved] = field(default_factory=list)
    """Operands that are put together although the op has no use for it: place, axis of the mesh, and why."""


class _Op:
    """The rule of one op with what it is given, and what is chosen of it so far."""

    def __init__(self, rule: Split, given: Sequence[Given], mesh: Mesh) -> None:
        self.rule, self.given, self.mesh = rule, given, mesh
        self.parts: list[dict[str, Factors] | None] = [self._parts(i) for i in range(len(given))]
        self.moved: list[Moved] = []
        self.stated: set[str] = set()
        """Axes of the mesh along which a parameter stays, or a placement is asked for: what else there is moves."""
        self.lying: set[str] = set()
        """Those along which a tensor lies where somebody has said: what is only made moves."""
        kept = {n for result in rule.results for dim in result for n in dim}
        self.free = {n for n in rule.extents if n not in rule.whole and (n in kept or n in rule.reduced)}
        self.kept = kept

    def _parts(self, i: int) -> dict[str, Factors] | None:
        """Return of each name the parts that an operand has of it."""
        labels, at = self.rule.operands[i], self.given[i].at
        if labels is None or at is None:
            return None
        out: dict[str, Factors] = {}
        for names, dim in zip(labels, at.dims, strict=True):
            found = distributed(dim, [self.rule.extents[n] for n in names], self.mesh) if names else ((),)
            if found is not None and names:
                out |= dict(zip(names, found, strict=True))
        return out

    def names(self, axis: str, wanted: Mapping[str, str], taken: Mapping[str, str]) -> dict[str, list[int]]:
        """Return the names that an axis of the mesh splits, with the operands in which it does."""
        out: dict[str, list[int]] = {}
        if self.same_on(axis, wanted):
            self.stated.add(axis)
            return out
        for i, (parts, given) in enumerate(zip(self.parts, self.given, strict=True)):
            if parts is None or given.at is None or axis in given.gathered or axis not in given.at.axes:
                continue
            name = next((n for n, dim in parts.items() if axis in dim and n in self.free), None)
            if any(axis in parts.get(n, ()) for n in self.rule.fixed):
                continue
            if name is None:
                why = (
                    "its part lies across several axes" if not any(axis in d for d in parts.values()) else "it is whole"
                )
                self.moved.append((i, axis, why))
            elif self.fits(name, axis) and self.even(name, axis, taken):
                out.setdefault(name, []).append(i)
        name = wanted.get(axis, "")
        if name in self.free and (self.unmade(name) or self.reduced(name, axis)) and self.even(name, axis, taken):
            out.setdefault(name, [])
        return {n: at for n, at in out.items() if n not in self.rule.once or self.alone(n, axis, taken)}

    def same_on(self, axis: str, wanted: Mapping[str, str]) -> bool:
        """Whether ranks along an axis have the same part of a parameter that others of the axes together split."""
        stay = [g.at.axes for g in self.given if g.stays and g.at is not None]
        return any(axis not in axes and self.mesh.beside(axis) & {*axes} for axes in (*stay, wanted))

    def alone(self, name: str, axis: str, taken: Mapping[str, str]) -> bool:
        """Whether nothing else splits a name but axes that are one together with this one."""
        before = [a for a, n in taken.items() if n == name]
        return not before or self.mesh.begins([*before, axis])

    def reduced(self, name: str, axis: str) -> bool:
        """Whether a part of a sum has an axis, so that it may be reduced into parts of that."""
        both = zip(self.rule.operands, self.given, strict=True)
        return any(labels and (name,) in labels and g.at is not None and axis in g.at.pending for labels, g in both)

    def paired(self, axis: str, names: Mapping[str, list[int]]) -> Mapping[str, list[int]]:
        """Return the names that may be split: along an axis of rows in the order of each rank, what goes with them."""
        rows = [n for n, dim in self.rule.fixed.items() if axis in dim]
        if not rows:  # along others, updates of a row would lie on several ranks
            return {n: at for n, at in names.items() if self.rule.reduced.get(n) != "own"}
        if self.rule.paired:
            return {n: at for n, at in names.items() if n in self.rule.paired}
        name = next((n for n in rows if n in self.kept), rows[0])
        lost = (i for n, at in names.items() if n != name for i in at if self.given[i].stays)
        self.moved += [(i, axis, "rows are split along it") for i in lost]
        return {name: []}

    def unmade(self, name: str) -> bool:
        """Whether only operands have an axis that are made for this reader, so that it may be split for nothing."""
        having = [g for labels, g in zip(self.rule.operands, self.given, strict=True) if labels and (name,) in labels]
        return bool(having) and all(g.at is None for g in having)

    def even(self, name: str, axis: str, taken: Mapping[str, str]) -> bool:
        """Whether the parts of a name may be equal; of numbers that is known."""
        parts = prod((self.mesh[a] for a, n in taken.items() if n == name), start=self.mesh[axis])
        size = (self.rule.extents[name] / parts).constant
        return size is None or (isinstance(size, int) and size >= 1)

    def fits(self, name: str, axis: str) -> bool:
        """Whether what is left out can be reduced into what it is added to."""
        into = self.rule.into
        if into is None or name in self.kept:
            return True
        base = self.given[into]
        return base.zero or (base.at is not None and base.at.pending.get(axis) == self.rule.reduced[name])

    def pick(self, axis: str, names: Mapping[str, list[int]], wanted: Mapping[str, str]) -> str | None:
        """Choose one of several names: that of a parameter that stays, that which is asked for, one of a result."""
        if not names:
            return None
        stay = [n for n, at in names.items() if any(self.given[i].stays for i in at)]
        own = [n for n in names if wanted.get(axis) == n]
        kept = [n for n in names if n in self.kept]
        name = (stay or own or kept or list(names))[0]
        if stay or own:
            self.stated.add(axis)
        elif any(self.given[i].stated for i in names[name]):
            self.lying.add(axis)
        return name

    def conflicts(self, operands: Sequence[Placement | None], chosen: Mapping[str, str]) -> Iterator[Moved]:
        """Yield the operands that are moved although nothing that is stated asks for it: where, along what, and why.

        What lacks the axis that the op is split along has to be whole for it, as keys have for queries. Rows that
        ranks have ordered are where their experts want them, and what goes with them comes to them.
        """
        if self.rule.fixed:
            return
        known = {(i, axis) for i, axis, _ in self.moved}
        for i, (given, want) in enumerate(zip(self.given, operands, strict=True)):
            labels = self.rule.operands[i]
            if given.at is None or want is None or labels is None:
                continue
            stated = self.stated | (set() if given.stated else self.lying)
            for axis in sorted(given.at.axes - {*given.gathered} - stated):
                here, name = given.at.dim(axis), chosen.get(axis)
                assert here is not None
                stays = want.dim(axis) == here and agree(given.at.dims[here], want.dims[here], self.mesh)
                own = (names for d, names in enumerate(labels) if d not in given.repeated)
                other = name is not None and not any(name in names for names in own)
                if not (stays or other or (i, axis) in known):
                    yield i, axis, self.against(i, axis)

    def against(self, i: int, axis: str) -> str:
        """Return what else an axis of the mesh splits than an operand wants, in words."""
        others = (g for j, g in enumerate(self.given) if j != i and g.at is not None and axis in g.at.axes)
        other = next(others, None)
        return "its parts cannot stay" if other is None else f"{other.name!r} is split along it otherwise"

    def pending(self, axis: str) -> str | None:
        """Return how operands that are all parts of a sum are to be reduced, None where they are not.

        In a product it is one of them, of which ranks with the same part of it have a part of the sum each: what heads
        of queries add to the gradient of the one that they share is reduced where that of a parameter is.
        """
        if self.rule.into is not None:
            return self.added(axis, self.rule.into)
        if not self.rule.linear:
            having = [g.at for g in self.given if g.at is not None and axis in g.at.pending]
            joint = self.rule.product and len(having) == 1 and bool(self.mesh.beside(axis) & having[0].axes)
            alone = joint or (self.rule.scaled and len(having) == 1)
            return having[0].pending[axis] if alone and having[0].pending[axis] == "sum" else None
        found = set()
        read = {n for labels in self.rule.operands if labels for names in labels for n in names}
        axes = [names for result in self.rule.results for names in result if names and not read & {*names}]
        if any(self.rule.extents[n] != ONE for names in axes for n in names):
            return None  # it is repeated along an axis: less is reduced before
        for i, given in enumerate(self.given):
            if self.rule.operands[i] is None or given.zero:
                continue
            found.add(given.at.pending.get(axis) if given.at is not None else None)
        how = found.pop() if len(found) == 1 else None
        return how if how in ("sum", "mean") else None  # the largest of a difference is none of the largest

    def added(self, axis: str, into: int) -> str | None:
        """Return how terms are to be reduced that are added to nothing, or to a part of the same sum."""
        base, term = self.given[into], self.given[-1].at
        how = None if term is None else term.pending.get(axis)
        fits = base.zero or (base.at is not None and base.at.pending.get(axis) == how)
        return how if how == "sum" and fits and "sum" in self.rule.reduced.values() else None


def choose(rule: Split, given: Sequence[Given], mesh: Mesh, wanted: Mapping[str, str]) -> Choice:
    """Decide for each axis of a mesh which name of an op's rule, by which its axes belong together, it splits.

    `wanted` are names that are preferred, by axis of the mesh: where the result is asked to lie.
    """
    op = _Op(rule, given, mesh)
    chosen: dict[str, str] = {}
    pending: dict[str, str] = {}
    for axis in mesh:
        how = op.pending(axis)
        if how is not None:
            pending[axis] = how
            op.stated.add(axis)
            continue
        name = op.pick(axis, op.paired(axis, op.names(axis, wanted, chosen)), wanted)
        if name is not None:
            chosen[axis] = name
    spread = {n: _spread(n, [a for a, name in chosen.items() if name == n], op) for n in rule.extents}
    spread |= rule.fixed
    operands: list[Placement | None] = []
    for labels, each in zip(rule.operands, given, strict=True):
        if labels is None:
            operands.append(None)
            continue
        own = pending if rule.linear else {} if each.at is None else each.at.pending
        passing = tuple((a, how) for a, how in pending.items() if a in own)
        operands.append(Placement(tuple(_dim(names, spread, rule.extents) for names in labels), passing))
    left = [(a, rule.reduced[n]) for a, n in chosen.items() if n not in op.kept and rule.reduced[n] != "own"]
    if rule.into is not None and (left or pending):
        base = operands[rule.into]
        assert base is not None
        operands[rule.into] = Placement(base.dims, tuple({**dict(base.partial), **pending, **dict(left)}.items()))
    order = list(mesh)
    after = tuple(sorted({**pending, **dict(left)}.items(), key=lambda p: order.index(p[0])))
    results = [Placement(tuple(_dim(names, spread, rule.extents) for names in r), after) for r in rule.results]
    op.moved += op.conflicts(operands, chosen)
    extents = {n: size_of(spread[n], size) for n, size in rule.extents.items()}
    along = {n: [a for a, name in chosen.items() if name == n] for n in chosen.values()}
    ranks = {n: mesh.together(axes) or axes[-1] for n, axes in along.items() if n in rule.extents}
    return Choice(operands, results, extents, ranks, spread, op.moved)


def _spread(name: str, axes: Sequence[str], op: _Op) -> Factors:
    """Return the parts of a name: as the operand has them that has most of the chosen axes, the others within them."""
    if not axes:
        return ()
    if name in op.rule.once:  # rows that a rank looks up stand beside each other
        return tidy((*axes, op.rule.extents[name] / prod((op.mesh[a] for a in axes), start=ONE)))
    found = [p[name] for p in op.parts if p is not None and p.get(name)]
    best = max(found, key=lambda dim: sum(a in dim for a in axes), default=())
    parts = tidy(op.mesh[f] if isinstance(f, str) and f not in axes else f for f in best)
    missing = [a for a in axes if a not in parts]
    if name in op.rule.consecutive:
        order = [*(f for f in parts if isinstance(f, str)), *missing]
        return tidy((*order, op.rule.extents[name] / prod((op.mesh[a] for a in order), start=ONE)))
    if not missing:
        return parts
    *before, last = parts or (op.rule.extents[name],)
    for axis in missing:
        before.append(axis)
        last = last / op.mesh[axis] if isinstance(last, Poly) else last
    return tidy((*before, last))


def _dim(names: Sequence[str], spread: Mapping[str, Factors], extents: Mapping[str, Poly]) -> Factors:
    """Return the parts of an axis that several names make up."""
    return tidy(f for n in names for f in (spread[n] or (extents[n],)))
