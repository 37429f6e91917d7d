"""What is published of each model, as a record: a list of all of them declares none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from .registry import FAMILIES

__all__ = ["PARAMETERS", "published"]

PARAMETERS = Path(__file__).with_name("parameters.json")
"""Parameters of the public module of each model, or, where none is public, of the declaration.
`tests/with_torch/zoo_page.py` counts them, and tests hold every declaration to them."""


def published() -> Iterator[tuple[str, int, Mapping[str, int]]]:
    """Yield the name, the parameters, and the sizes of every model."""
    parameters = json.loads(PARAMETERS.read_text(encoding="utf-8"))
    presets = {name: preset for family in FAMILIES for name, preset in family.presets.items()}
    for name, preset in sorted(presets.items()):
        yield name, parameters[name], preset.sizes
