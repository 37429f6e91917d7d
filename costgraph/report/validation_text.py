"""A validation as text for a terminal or a pipe; needs rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .text import clean, draw, listing, texts

if TYPE_CHECKING:
    from ..torch.validating import Validation

__all__ = ["render_validation"]


def render_validation(validation: Validation, width: int | None = None, *, color: bool = False) -> str:
    """Return the table of a validation and what it comes to, as text: `width` and `color` as `draw`."""
    of, found = validation.environment, validation.tables()
    place = f"{clean(str(of['name']))}, torch {clean(str(of['torch']))}, {clean(str(of['date']))}"
    parts = [
        listing(title, texts(*head, amounts=head[1:]), rows)
        for title, (head, rows) in zip((place, "times"), found, strict=True)
    ]
    return draw([*parts, *(clean(text, 400) for text in validation.summary())], width, color=color)
