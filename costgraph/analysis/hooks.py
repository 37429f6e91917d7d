"""Where answers find what draws them: analyses come before reports, so reports register themselves here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["PLOTTERS"]

#: Function that draws each kind of answer, `plot(answer, path) -> figure`; filled by `costgraph.report.plots`.
PLOTTERS: dict[str, Callable[[Any, Any], Any]] = {}
