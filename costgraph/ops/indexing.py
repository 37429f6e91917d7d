"""Agreement of a pattern with the shapes of its operands, windows included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ..algebra.polynomial import ONE, Poly, as_poly
from ..algebra.symbols import shown
from ..graph.facts import need
from ..graph.strides import Sizes
from ..graph.tensor import Tensor
from ..notation.pattern import Axes, Pattern

__all__ = ["need_indexed", "need_plain"]


def need_indexed(
    operands: Sequence[Tensor],
    pattern: Pattern,
    extents: Mapping[str, Poly],
    sizes: Sizes | None = None,
    rooms: Sequence[Poly] = (),
) -> None:
    """Hold the pattern of a contraction or a pooling against the shapes, and the extents against both.

    `sizes` are those of the result where they are stated, `rooms` what stated outputs leave over of an axis. ShapeError
    if something does not agree.
    """
    need(
        [len(o) for o in pattern.operands] == [t.ndim for t in operands], f"pattern {shown(str(pattern))}: its operands"
    )
    names = {n for o in pattern.operands for a in o for n in a.names}
    need(set(extents) == names | set(pattern.result_names), f"extents of {shown(', '.join(extents))}")
    same = operands[0].graph.same
    places = [
        (dim, size, f"operand {i + 1} {t!r}")
        for i, t in enumerate(operands)
        for dim, size in zip(pattern.operands[i], t.sizes, strict=True)
    ]
    if sizes is not None:
        need(len(sizes) == len(pattern.result), f"sizes of the result of pattern {shown(str(pattern))}")
        places += [(dim, n, "the result") for dim, n in zip(pattern.result, sizes, strict=True)]
    found = set()
    for dim, size, where in places:
        if isinstance(dim, Axes):
            need(same(prod((extents[n] for n in dim.names), start=ONE), size), f"axis {dim} of {where}")
            continue
        last = sum((step * (extents[n] - 1) for n, step in dim.terms), start=as_poly(0))
        room = size - 1 - last - (2 if dim.offset < 0 else 1) * dim.offset
        found.add(room)
        beyond = room.constant is not None and room.constant < 0
        need(not beyond, f"index {dim} of {where} reaches beyond its axis")
    need(found.issuperset(rooms), "what stated outputs leave over of an axis")


def need_plain(pattern: Pattern) -> None:
    """Refuse indices and diagonals on the right side, which only a contraction with stated sizes may have."""
    plain = all(isinstance(a, Axes) for a in pattern.result) and len(set(pattern.result_names)) == len(
        pattern.result_names
    )
    need(plain, f"the result of pattern {shown(str(pattern))}")
