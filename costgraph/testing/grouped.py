"""What choosing the largest, ordering rows by expert and products by expert do, and how to draw ops of them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from math import ceil, comb

from ..algebra.polynomial import poly
from ..algebra.symbols import dims
from ..graph.graph import apply
from ..graph.op import OpKind
from ..graph.tensor import Tensor
from ..ops.collectives import Collective
from ..ops.grouped import (
    ROUTINGS,
    Dispatch,
    Grouped,
    GroupedOuter,
    TopK,
    dispatch,
    grouped,
    grouped_outer,
    top_k,
)  # fmt: skip
from ..ops.index import arange, gather, take_along
from ..ops.layout import contiguous_copy, expand
from ..ops.merge import Merge
from ..ops.ordering import Sort, sort
from .meanings import meaning
from .samples import sample
from .sketch import Sketch
from .values import At

__all__ = ["merged"]  # others are found in MEANINGS and SAMPLES


@meaning(TopK)
def _top_k(at: At[TopK]) -> None:
    *lead, last = at.operands[0].array.shape
    for index in product(*map(range, lead)):
        values = [at.read(0, *index, i) for i in range(last)]
        # of equal ones the first comes first
        found = sorted(range(last), key=values.__getitem__, reverse=not at.kind.smallest)
        at.tally.pointwise += last
        for j in range(at.of(at.kind.k)):
            at.write(values[found[j]], *index, j)
            at.write(found[j], *index, j, to=1)


@meaning(Sort)
def _sort(at: At[Sort]) -> None:
    *lead, last = at.operands[0].array.shape
    for index in product(*map(range, lead)):
        values = [at.read(0, *index, i) for i in range(last)]
        found = sorted(range(last), key=values.__getitem__, reverse=at.kind.descending)
        at.tally.pointwise += last
        for j in range(last):
            at.write(values[found[j]], *index, j)
            at.write(found[j], *index, j, to=1)


@meaning(Dispatch)
def _dispatch(at: At[Dispatch]) -> None:
    """Order choices by expert, each as it comes; a row that fills up the room of an expert is the first token."""
    shape, experts, capacity = at.operands[0].array.shape, at.of(at.kind.experts), at.kind.capacity
    places = list(product(*map(range, shape)))
    chosen = {index: int(at.read(0, *index)) % experts for index in places}
    room = None if capacity is None else ceil(at.of(capacity) * Fraction(len(places), experts))
    rows: list[tuple[int, int]] = []
    dropped = {}
    for expert in range(experts):
        mine = [i for i, index in enumerate(places) if chosen[index] == expert]
        kept = mine if room is None else mine[:room]
        for row, i in enumerate(kept, len(rows)):
            at.write(row, *places[i], to=2)
        for i in mine:
            dropped[places[i]] = i not in kept
            if i not in kept:
                at.write(0, *places[i], to=2)
        rows += [(i // shape[-1], expert) for i in kept]
        rows += [(0, expert)] * (0 if room is None else room - len(kept))
        at.write(len(rows), expert, to=1)
    for row, (token, expert) in enumerate(rows):
        at.write(token, row)
        if at.kind.owners:
            at.write(expert, row, to=3)
    if room is not None:
        for index, gone in dropped.items():
            at.write(float(gone), *index, to=len(at.op.results) - 1)
    at.tally.pointwise += 2 * len(places) + experts


def merged(at: At[Merge], rank: int = 0) -> None:
    """Put the rows for the experts of a rank in order, by expert and then by where they come from."""
    ranks, count = at.of(at.kind.ranks), at.operands[0].array.shape[0] // at.of(at.kind.ranks)
    each = at.of(at.kind.rows) // ranks
    ends = [[int(at.read(0, sender * count + e)) - rank * each for e in range(count)] for sender in range(ranks)]
    for sender, found in enumerate(ends):
        balanced = found[0] >= 0 and found[-1] == each
        assert balanced, (
            f"{at.op.name!r}: rank {sender} has rows up to {found[-1] + rank * each} for rank {rank} of {ranks} and "
            f"those before, expected {(rank + 1) * each}: the routing is not balanced"
        )
    row = 0
    for e in range(count):
        for sender, found in enumerate(ends):
            for i in range(found[e - 1] if e else 0, found[e]):
                at.write(sender * each + i, row, to=1)
                at.write(row, sender * each + i, to=2)
                if at.kind.owners:
                    at.write(e, row, to=3)
                row += 1
        at.write(row, e)
    at.tally.pointwise += ranks * (each + count)


meaning(Merge)(merged)


def _owners(at: At[OpKind], rows: int) -> list[int | None]:
    """Return the expert of each row, None of a row beyond the last one's end."""
    ends = [int(at.read(2, e)) for e in range(at.operands[2].array.shape[0])]
    return [next((e for e, end in enumerate(ends) if row < end), None) for row in range(rows)]


@meaning(Grouped)
def _grouped(at: At[Grouped]) -> None:
    """Multiply rows by matrices; where the rows that came are not those of the assumption, say so."""
    (rows, inner), (experts, _, outer) = at.operands[0].array.shape, at.operands[1].array.shape
    owners = _owners(at, rows)
    for row, owner in enumerate(owners):
        for f in range(outer):
            total = 0.0
            for d in range(inner):
                x = at.read(0, row, d)
                total += 0.0 if owner is None else x * at.read(1, owner, d, f)
                at.tally.matmul += 2
                at.tally.full += 2
            at.write(total, row, f)
    routing, seen = at.kind.routing, len(set(owners) - {None})
    read: Fraction | int = experts if routing == "capacity" else seen
    if routing == "capacity":
        for index in product(range(experts), range(inner), range(outer)):
            at.read(1, *index)
    elif routing == "balanced":
        at.repeats = at.repeats or seen != min(experts, rows)
    else:
        chosen = at.of(at.kind.chosen)
        read = _mean_touched(experts, chosen, Fraction(rows, chosen))
        sizes = [b.element * b.array.size for b in (at.operands[0].buffer, at.operands[2].buffer)]
        at.stated["reads"] = sum(sizes) + read * inner * outer * at.operands[1].buffer.element
        at.repeats = True  # how many experts are read is a mean, whatever came
    at.tally.pointwise += at.kind.unpacked * inner * outer * read


def _mean_touched(experts: int, chosen: int, tokens: Fraction) -> Fraction:
    """Count, among all sets that a token may choose, those without an expert: tokens choose independently."""
    without = Fraction(comb(experts - 1, chosen), comb(experts, chosen))
    assert tokens.denominator == 1
    return experts * (1 - without ** int(tokens))


@meaning(GroupedOuter)
def _grouped_outer(at: At[GroupedOuter]) -> None:
    (rows, left), right = at.operands[0].array.shape, at.operands[1].array.shape[1]
    made = at.result().array
    for index in product(*map(range, made.shape)):
        at.write(0.0, *index)
    for row, owner in enumerate(_owners(at, rows)):
        for i, j in product(range(left), range(right)):
            term = at.read(0, row, i) * at.read(1, row, j)
            at.tally.matmul += 2
            at.tally.full += 2
            if owner is not None:
                at.write(made[owner, i, j] + term, owner, i, j)


# -- drawing -----------------------------------------------------------------------------------------------------


@sample(TopK)
def _drawn_top_k(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1 and t.sizes[-1].constant is not None, (*s.shape(s.number(0, 2), 6), 3))
    values, ids = top_k(x, s.number(1, s.value(x.sizes[-1])))
    return [values, take_along(x, ids)]  # of equal elements nothing says which comes first


@sample(Sort)
def _drawn_sort(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1, (*s.shape(s.number(0, 2), 6), 3))
    values, ids = sort(x, descending=s.chance(1))
    return [values, take_along(x, ids)]  # of equal elements nothing says which comes first


def _sent(s: Sketch, capacity: object = None) -> tuple[int, int, Tensor, Tensor]:
    """Draw experts that tokens have chosen: 0, 1, 2, ... when the graph runs, so that they are balanced."""
    experts, chosen = s.number(1, 4), s.number(1, 2)
    tokens = s.one_of([1, 2, 3, *dims("A B")])
    ids = s.fresh((tokens, min(chosen, experts)), s.one_of(["int64", "int32"]), "input")
    sent = dispatch(ids, experts, capacity=capacity)
    return experts, min(chosen, experts), sent.ends, sent.tokens


@sample(Dispatch)
def _drawn_dispatch(s: Sketch) -> Sequence[Tensor]:
    experts, tokens = s.number(1, 4), s.one_of([1, 2, 3, *dims("A B")])
    ids = s.fresh((tokens, s.number(1, 2)), "int64", "input")
    sent = dispatch(ids, experts, capacity=s.one_of([None, None, 0.5, 1, 1.25]), owners=s.chance(1))
    table = s.fresh((tokens, s.number(1, 2)), "fp32")
    rows = gather(table, sent.tokens)
    return [rows, gather(rows, sent.places)]


@sample(Merge)
def _drawn_merge(s: Sketch) -> Sequence[Tensor]:
    """Let two ranks that choose alike send each other rows, each expert as many."""
    ranks, experts, chosen = 2, 2 * s.number(1, 2), s.number(1, 2)
    ids = expand(arange(experts), "token -> token choice", choice=chosen)
    sent = dispatch(contiguous_copy(ids), experts)
    exchange = Collective(collective="all_to_all", ranks=poly(ranks), axis="x", source=0)
    (ends,) = apply(exchange, [sent.ends], "all_to_all")
    rows = poly(experts * chosen)
    made = Merge(ranks=poly(ranks), axis="x", rows=rows, chosen=poly(chosen) / ranks, owners=s.chance(1))
    return apply(made, [ends], "merge")


@sample(Grouped)
def _drawn_grouped(s: Sketch) -> Sequence[Tensor]:
    routing = s.one_of(ROUTINGS)
    experts, chosen, ends, tokens = _sent(s, 1.25 if routing == "capacity" else None)
    inner, outer = s.number(1, 3), s.one_of([1, 2, *dims("A B")])
    rows = s.fresh((*tokens.shape, inner), s.one_of(["fp32", "bf16"]))
    weights = s.fresh((experts, inner, outer), "fp32")
    return [grouped(rows, weights, ends, chosen, routing=routing)]


@sample(GroupedOuter)
def _drawn_grouped_outer(s: Sketch) -> Sequence[Tensor]:
    _, _, ends, tokens = _sent(s)
    a, b = (s.fresh((*tokens.shape, s.number(1, 3)), s.one_of(["fp32", "bf16"])) for _ in range(2))
    return [grouped_outer(a, b, ends)]
