"""Which classes of transformers the suite runs, and what their configurations need besides small numbers."""

from typing import Any

#: Fields of a class's configuration, None for its default.
MORE: dict[str, dict[str, Any]] = {}

NAMES: list[str] = []
