"""What op kinds do that look elements up, and those whose costs are stated."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

from .arithmetic import Number, tally
from .meanings import meaning
from .values import At, Point

__all__: list[str] = []  # its functions are found in MEANINGS


def _rows(at: At, rows: int) -> dict[Point, int]:
    """Read every index once; those beyond the table wrap around. The same row twice is noted."""
    table, ids = at.operands[:2]
    found = {index: int(at.read(1, *index)) % rows for index in product(*map(range, ids.array.shape))}
    along = at.op.attrs["mode"] == "along" or at.op.attrs.get("along")
    looks: dict[int, set[int]] = {}
    for index, row in found.items():
        where = (*index[:-1], row) if along else (row,) + (0,) * (table.array.ndim - 1)
        looks.setdefault(table.address(where), set()).add(ids.address(index))
    at.repeats = at.repeats or any(len(cells) > 1 for cells in looks.values())
    return found


@meaning("gather")
def _gather(at: At) -> None:
    table = at.operands[0].array
    if at.op.attrs["mode"] == "along":
        for index, row in _rows(at, table.shape[-1]).items():
            at.write(at.read(0, *index[:-1], row), *index)
        return
    for index, row in _rows(at, table.shape[0]).items():
        for rest in product(*map(range, table.shape[1:])):
            at.write(at.read(0, row, *rest), *index, *rest)


@meaning("scatter")
def _scatter(at: At) -> None:
    target, _, updates = at.operands
    add = at.op.attrs["mode"] == "add"
    if at.op.attrs.get("inplace"):
        at.made[0] = target
    else:
        for index in product(*map(range, target.array.shape)):
            at.write(at.read(0, *index), *index)
    result = at.result().array
    along = at.op.attrs.get("along")
    rests = [()] if along else list(product(*map(range, target.array.shape[1:])))
    for index, row in _rows(at, target.array.shape[-1 if along else 0]).items():
        for rest in rests:
            x = at.number(2, *index, *rest)
            to = (*index[:-1], row) if along else (row, *rest)
            if not add:
                at.write(x, *to)
                continue
            if at.op.attrs.get("inplace"):
                at.read(0, *to)
            at.write(x + result[to], *to)
    assert updates.array.size or not add


# -- stated ------------------------------------------------------------------------------------------------------


@meaning("aten")
@meaning("opaque")
def _opaque(at: At) -> None:
    """Take what is stated for true: nothing says what the op does."""
    matmul, pointwise, transcendental = (at.attr(k) for k in ("matmul", "pointwise", "transcendental"))
    at.tally = tally(matmul, at.attr("full", matmul), pointwise, transcendental)
    shared = {t.storage for t in at.op.operands}
    for i in (i for i, t in enumerate(at.op.results) if t.storage not in shared):
        for index in product(*map(range, at.result(i).array.shape)):
            at.write(0.0, *index, to=i)
    for i, v in enumerate(at.operands):
        for index in v.points():
            at.read(i, *index)
    for direction in ("reads", "writes"):
        if at.op.attrs[direction] is not None:
            at.stated[direction] = sum(at.attr(direction))


@meaning("collective")
def _collective(at: At) -> None:
    """Play the ranks, all of which bring the same: additions are spread evenly over them."""
    name, ranks = at.op.attrs["collective"], at.attr("ranks")
    x = at.operands[0]
    additions = 0
    first = at.result().array.shape[0] if at.result().array.ndim else 1
    for index in product(*map(range, x.array.shape)):
        total = Number(at.read(0, *index), tally())
        if name in ("all_reduce", "reduce_scatter"):
            for _ in range(ranks - 1):
                total = total + x.array[index]
                additions += 1
        for copy in range(ranks if name == "all_gather" else 1):
            to = (index[0] + copy * x.array.shape[0], *index[1:]) if index else index
            if not to or to[0] < first:  # the other rows are another rank's
                at.write(total, *to)
    at.tally.pointwise += Fraction(additions, ranks)
