"""Model families: a declaration, presets for published models, and a configuration reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costgraph import Graph

    from .config import Config

__all__ = ["SYMBOLS", "Family", "Preset"]

#: Descriptions of the symbols that most models use, see docs/reference/glossary.md.
SYMBOLS = {
    "B": "batch size", "S": "sequence length", "D": "model width", "F": "MLP width", "H": "attention heads",
    "G": "KV heads", "K": "head size", "L": "layers", "V": "vocabulary size", "P": "maximum positions",
    "W": "attention window", "E": "experts", "Fe": "expert width", "k": "experts per token", "IC": "input channels",
    "C": "classes", "R": "image side", "Q": "chunk length", "D#": "channels in stage #", "L#": "blocks in stage #",
}  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """One model in a family."""

    sizes: Mapping[str, int]
    """Default sizes."""
    structure: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the declaration that are not sizes, such as a tied head."""


@dataclass(frozen=True)
class Family:
    """Models with a common declaration."""

    declare: Callable[..., Graph]
    """`declare(name, attention, dropout, dtype, **structure)`, with `eager_ops` after `dtype` if it is supported;
    `load` accepts the keyword arguments as well."""
    presets: Mapping[str, Preset]
    """Published models, by name."""
    eager_ops: bool = False
    """Whether `eager_ops` is supported."""
    architectures: Mapping[str, str] = field(default_factory=dict)
    """Architectures in a transformers config.json, each with its `model_type`."""
    read: Callable[[Config], Preset] | None = None
    """Reader of a configuration's sizes and structure; None if transformers has no such model."""
    legend: Mapping[str, str] = field(default_factory=dict)
    """Descriptions of symbols that `SYMBOLS` lacks or describes differently; `D#` stands for D1, D2 and so on."""

    def describe(self, names: Iterable[str]) -> dict[str, str]:
        """Return the description of each symbol of a model, in alphabetical order."""
        descriptions, legend = {**SYMBOLS, **self.legend}, {}
        for name in sorted(names):
            stem = name.rstrip("0123456789")
            text = descriptions.get(name) or descriptions.get(f"{stem}#")
            if text is not None:
                legend[name] = text.replace("#", name.removeprefix(stem))
        return legend
