"""What op kinds do that gradients are made of, and how to draw ops of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from ..algebra.symbols import dims
from ..graph.graph import apply
from ..graph.tensor import Tensor
from ..nn.conv import pool
from ..ops.fill import Assign, Fill, Pad, assign, fill, pad
from ..ops.pooling import Pool, Unpool
from .meanings import meaning
from .samples import sample
from .sketch import Sketch
from .values import At

__all__: list[str] = []  # its functions are found in MEANINGS and SAMPLES


@meaning(Fill)
def _fill(at: At[Fill]) -> None:
    (value,) = at.of((at.kind.value,))
    for index in at.result().index():
        at.write(value, *index)


@sample(Fill)
def _drawn_fill(s: Sketch) -> Sequence[Tensor]:
    return [fill(s.shape(), s.one_of([0, 1, -1.5]), s.one_of(["fp32", "bf16"]))]


@meaning(Assign)
def _assign(at: At[Assign]) -> None:
    at.made[0] = at.operands[0]
    for index in at.operands[1].points():
        at.write(at.read(1, *index), *index)


@sample(Assign)
def _drawn_assign(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor()
    target = x if s.may_change(x) and x.touched == x.numel else fill(x.shape, dtype=s.one_of(["fp32", "bf16"]))
    value = s.one_of(s.others(lambda t: t.sizes == x.sizes and t.storage is not x.storage) or [s.like(x)])
    return [assign(target, value)]


@meaning(Pad)
def _pad(at: At[Pad]) -> None:
    axis, start, step = at.kind.axis, at.of(at.kind.start), at.kind.step
    x = at.operands[0].array
    for index in product(*map(range, at.result().array.shape)):
        place = (index[axis] - start) / step
        if not at.operands[0].holds((*index[:axis], 0, *index[axis + 1 :])):
            continue  # zeros stand beside what there is
        if place in range(x.shape[axis]):
            at.write(at.read(0, *index[:axis], int(place), *index[axis + 1 :]), *index)
        else:
            at.write(0.0, *index)


@sample(Pad)
def _drawn_pad(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1 and s.elements(t) <= 24, s.shape(s.number(1, 3), 24))
    axis, step, start = s.axis(x), s.number(1, 2), s.one_of([0, 1, dims("A")])
    full = start + (x.sizes[axis].expr - 1) * step + s.number(1, 2)
    return [pad(x, axis, start, full, step)]


@sample(Unpool)
def _drawn_unpool(s: Sketch) -> Sequence[Tensor]:
    x = s.fresh((*s.shape(1, 6), s.number(3, 5)))
    width = s.number(1, 3)
    operation = s.one_of(["max", "mean"])
    made = pool(x, operation, window=(width,), stride=s.number(1, 3), padding=s.number(0, width // 2))
    assert made.producer is not None
    kind = made.producer.kind
    assert isinstance(kind, Pool)
    back = Unpool(pattern=kind.pattern, extents=kind.extents, operation=kind.operation, inside=kind.inside)
    places = [s.fresh(made.shape, "int64", "input")] if operation == "max" else []
    return apply(back, [s.fresh(made.shape, x.dtype.name), x, *places], "unpool")
