"""Texts beside points of a picture, none of them on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from .drawing import FAINT

__all__ = ["FREE", "Label", "place_labels"]

#: A text and the point that it names, as the data has it.
Label = tuple[str, tuple[float, float]]

#: Lines that texts may lie on have this as their `gid`.
FREE = "free"
_SIZE = 8.5
_SIDES = tuple((x, y) for x, y in product((-1, 1, 0), (1, -1, 0)) if x or y)
_STEPS = (5, 9, 16, 26, 40, 58, 80, 106, 136)  # points of print between a text and what it names
_LEADER = 16  # points from which on a line leads to a text
_HALO = 2.5  # points of paper around letters, where they lie on a line
_GAP = 3  # pixels between two texts
# A text on a line or a point, and a line to it through another text, are worse than one so many steps further away.
_ON_LINE, _ON_POINT, _THROUGH = 150, 25, 90


def place_labels(ax: Any, labels: Sequence[Label], *, size: float = _SIZE, lead: bool = True) -> list[str]:
    """Write texts where there is room, the first ones nearest to their points; to be called when all else is drawn.

    `lead` asks for a thin line to each text that is not beside its point. Returns the texts that have no place: one on
    another cannot be read, so they are left out.
    """
    from matplotlib.patheffects import withStroke

    figure = ax.figure
    figure.draw_without_rendering()  # the layout, which says where points lie
    renderer = figure.canvas.get_renderer()
    scale = figure.dpi / 72
    things = _Drawn(ax, scale, [_box_of(t, renderer) for t in ax.texts if t.get_text()])
    left = []
    for text, place in labels:
        written = ax.annotate(
            text, place, (0, 0), textcoords="offset points", ha="center", va="center", fontsize=size, zorder=5,
            annotation_clip=False, in_layout=False, path_effects=[withStroke(linewidth=_HALO, foreground="white")],
        )  # fmt: skip
        x0, y0, x1, y1 = _box_of(written, renderer)
        half, at = np.array([x1 - x0, y1 - y0]) / 2, ax.transData.transform(place)
        found = [
            (step + things.under(box) + (things.through(at, middle) if lead else 0), step, middle, box)
            for step, middle, box in _candidates(at, half, scale)
            if things.free(box)
        ]
        if not found:
            left.append(text)
            written.remove()
            continue
        _, step, middle, box = min(found, key=lambda f: f[0])
        things.boxes.append(box)
        written.set_position(tuple((middle - at) / scale))
        if lead and step >= _LEADER:
            _lead(ax, place, (middle - at) / scale, half / scale)
    return left


def _box_of(text: Any, renderer: Any) -> tuple[float, ...]:
    from matplotlib.text import Text

    # of an annotation, the text alone
    return tuple(Text.get_window_extent(text, renderer).extents)


def _candidates(at: Any, half: Any, scale: float) -> Iterator[tuple[float, Any, tuple[float, ...]]]:
    """Yield how far away, the middle and the box of a text around a point, all in pixels but the first."""
    for step, side in product(_STEPS, _SIDES):
        way = np.array(side)
        middle = at + way * half + step * scale * way / np.hypot(*way)
        yield step, middle, (*(middle - half), *(middle + half))


def _meet(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] + _GAP and b[0] < a[2] + _GAP and a[1] < b[3] + _GAP and b[1] < a[3] + _GAP


def _lead(ax: Any, place: tuple[float, float], middle: Any, half: Any) -> None:
    """Draw a thin line from a point to the nearest place of its text."""
    end = np.clip(0, middle - half, middle + half)
    ax.annotate(
        "", place, tuple(end), textcoords="offset points", zorder=2, in_layout=False,
        arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2},
    )  # fmt: skip


class _Drawn:
    """What texts should rather not lie on: points with their areas, and lines."""

    def __init__(self, ax: Any, scale: float, boxes: list[tuple[float, ...]]) -> None:
        self.frame, self.boxes = ax.bbox.extents, boxes
        self.lines = [
            line.get_transform().transform_path(line.get_path()) for line in ax.lines if line.get_gid() != FREE
        ]
        spots = [(c, c.get_offset_transform().transform(c.get_offsets())) for c in ax.collections if len(c.get_sizes())]
        self.points = np.concatenate([np.empty((0, 2)), *(p for _, p in spots)])
        radii = [np.broadcast_to(np.sqrt(c.get_sizes()) / 2 * scale, len(p)) for c, p in spots]
        self.radii = np.concatenate([np.empty(0), *radii])

    def free(self, box: Sequence[float]) -> bool:
        """Tell whether a text can be read there: within the axes, on no other."""
        x0, y0, x1, y1 = self.frame
        inside = box[0] >= x0 and box[1] >= y0 and box[2] <= x1 and box[3] <= y1
        return bool(inside) and not any(_meet(box, other) for other in self.boxes)

    def through(self, at: Any, middle: Any) -> float:
        """Return how bad it is that a line to a text goes there."""
        from matplotlib.path import Path
        from matplotlib.transforms import Bbox

        line = Path([at, middle])
        return float(_THROUGH * sum(line.intersects_bbox(Bbox.from_extents(*box), filled=False) for box in self.boxes))

    def under(self, box: Sequence[float]) -> float:
        """Return how bad it is that a text lies there."""
        from matplotlib.transforms import Bbox

        nearest = np.clip(self.points, box[:2], box[2:])
        points = int((np.hypot(*(self.points - nearest).T) < self.radii).sum())
        lines = sum(path.intersects_bbox(Bbox.from_extents(*box), filled=False) for path in self.lines)
        return float(_ON_POINT * points + _ON_LINE * lines)
