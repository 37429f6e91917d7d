"""What marks of caches and appending to one do, and how to draw ops of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph.tensor import Tensor
from ..ops.cached import Append, Cache, InitialState, append, cache, initial_state
from ..ops.fill import fill
from .meanings import meaning
from .samples import sample
from .sketch import Sketch
from .values import At

__all__ = ["appended"]


@meaning(Cache)
def _cache(at: At[Cache]) -> None:
    at.view(np.asarray)


@sample(Cache)
def _drawn_cache(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor()
    names = [f"a{i}" for i in range(x.ndim)]
    along = s.one_of([None, *names])
    return [cache(x, " ".join(names), along=along, window=s.one_of([None, 2]) if along else None)]


@meaning(InitialState)
def _initial_state(at: At[InitialState]) -> None:
    for index in at.result().index():
        at.write(0.0, *index)


@sample(InitialState)
def _drawn_state(s: Sketch) -> Sequence[Tensor]:
    return [initial_state(s.shape(), s.one_of(["fp32", "bf16"]))]


def appended(at: At[Append], behind: int = 0) -> None:
    """Write the last positions of what is new into the last ones of the cache, behind which other ranks have some."""
    at.made[0] = at.operands[0]
    axis = at.kind.axis
    held, new = at.operands[0].array.shape[axis], max(at.operands[1].array.shape[axis] - behind, 0)
    taken = min(held, new)
    for index in at.operands[1].points():
        place = index[axis] - (new - taken)
        if 0 <= place < taken:
            target = (*index[:axis], held - taken + place, *index[axis + 1 :])
            at.write(at.read(1, *index), *target)


meaning(Append)(appended)


@sample(Append)
def _drawn_append(s: Sketch) -> Sequence[Tensor]:
    new = s.tensor(lambda t: t.ndim >= 1 and s.elements(t) <= 24, s.shape(s.number(1, 3), 24))
    axis = s.number(0, new.ndim - 1)
    room = s.one_of([new.shape[axis], new.shape[axis] + 2, 1])
    held = fill((*new.shape[:axis], room, *new.shape[axis + 1 :]), 1.5, s.one_of(["fp32", "bf16"]))
    return [append(held, new, axis)]
