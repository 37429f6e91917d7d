"""What op kinds do that look elements up, and those whose costs are stated."""

from __future__ import annotations

from itertools import product

from numpy.lib.stride_tricks import as_strided

from ..ops.foreign import Foreign
from ..ops.index import Gather, Scatter
from ..ops.stated import Opaque, Stated
from .arithmetic import tally
from .meanings import meaning
from .values import At, Point, Value

__all__: list[str] = []  # its functions are found in MEANINGS


def _rows(at: At[Gather | Scatter]) -> dict[Point, Point]:
    """Read every index once, for the row that it means; those beyond the table wrap around.

    The same row twice is noted.
    """
    (table, *ids), batch = at.operands[: len(at.operands) - at.kind.after], at.kind.batch
    found = {}
    for index in product(*map(range, ids[0].array.shape)):
        own = (int(at.read(k + 1, *index)) % table.array.shape[batch + k] for k in range(len(ids)))
        found[index] = (*index[:batch], *own)
    looks: dict[int, set[tuple[int, ...]]] = {}
    for index, row in found.items():
        first = table.address(row + (0,) * (table.array.ndim - len(row)))
        looks.setdefault(first, set()).add(tuple(t.address(index) for t in ids))
    at.repeats = at.repeats or any(len(cells) > 1 for cells in looks.values())
    return found


def _rests(at: At[Gather | Scatter]) -> list[Point]:
    return list(product(*map(range, at.operands[0].array.shape[at.kind.row(at.op.operands)])))


@meaning(Gather)
def _gather(at: At[Gather]) -> None:
    for index, row in _rows(at).items():
        for rest in _rests(at):
            at.write(at.read(0, *row, *rest), *index, *rest)


@meaning(Scatter)
def _scatter(at: At[Scatter]) -> None:
    target, *_, updates = at.operands
    if at.kind.overwrites():
        at.made[0] = target
    else:
        for index in product(*map(range, target.array.shape)):
            at.write(at.read(0, *index), *index)
    result = at.result().array
    for index, row in _rows(at).items():
        for rest in _rests(at):
            x, to = at.number(len(at.operands) - 1, *index, *rest), (*row, *rest)
            if at.kind.mode == "set":
                at.write(x, *to)
                continue
            if at.kind.overwrites():
                at.read(0, *to)
            if at.kind.mode == "add":
                made = x + result[to]
                at.write(result[to] if row[at.kind.batch] == at.kind.passed else made, *to)
            else:
                at.tally.pointwise += 1
                at.write(max(x.value, result[to]), *to)
    assert updates.array.size or at.kind.mode == "set"


# -- stated ------------------------------------------------------------------------------------------------------


@meaning(Foreign, Opaque)
def _stated(at: At[Stated]) -> None:
    """Take what is stated for true: nothing says what the op does."""
    kind = at.kind
    full = kind.full if isinstance(kind, Foreign) else kind.matmul
    at.tally = tally(*map(at.of, (kind.matmul, full, kind.pointwise, kind.transcendental)))
    for i, t in enumerate(at.op.results):
        if any(t.storage is x.storage for x in at.op.operands):
            _view(at, i)
            continue
        for index in product(*map(range, at.result(i).array.shape)):
            at.write(0.0, *index, to=i)
    for i, v in enumerate(at.operands):
        for index in v.points():
            at.read(i, *index)
    for direction, amounts in (("reads", kind.bytes_read), ("writes", kind.bytes_written)):
        if amounts is not None:
            at.stated[direction] = sum(at.of(amounts))


def _view(at: At[Stated], i: int) -> None:
    """Make a result of the storage of an operand, which it may reach into beyond what the operand is of it."""
    t = at.op.results[i]
    of = next(n for n, x in enumerate(at.op.operands) if x.storage is t.storage)
    x, source = at.op.operands[of], at.operands[of]
    if not isinstance(source, Value) or x.dtype.bits != t.dtype.bits:
        return  # lists, and numbers that are seen as parts of them
    shape, strides = at.of(t.sizes), at.of(t.strides)
    whole = source.buffer.array
    first = source.address((0,) * source.array.ndim) // whole.itemsize + at.of(t.offset - x.offset)
    last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert 0 <= first <= last < whole.size, f"{at.op.name!r} reads beyond the storage of operand {of + 1}"
    flat = as_strided(whole, (whole.size,), (whole.itemsize,))  # as it lies in memory
    at.made[i] = Value(as_strided(flat[first:], shape, [s * whole.itemsize for s in strides]), source.buffer)
