"""What a family of models is made of: a declaration, the sizes of published models, and how a config.json is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costgraph import Graph

    from .config import Config

__all__ = ["Family", "Preset"]


@dataclass(frozen=True)
class Preset:
    """One model of a family."""

    sizes: Mapping[str, int]
    """What its dimensions are bound to by default."""
    structure: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the declaration: what no size tells, such as a tied head."""


@dataclass(frozen=True)
class Family:
    """Models that one function declares."""

    declare: Callable[..., Graph]
    """`declare(name, attention, dropout, dtype, **structure)`; keyword arguments with defaults are what `load` takes
    as well. Behind the format stands `composed` where that is stated."""
    presets: Mapping[str, Preset]
    """Published models, by the names that users write."""
    composed: bool = False
    """Whether it is stated how eager code runs these models."""
    architectures: Mapping[str, str] = field(default_factory=dict)
    """What `architectures` of a config.json of transformers says of such models, and `model_type` with it."""
    read: Callable[[Config], Preset] | None = None
    """Sizes and structure that a configuration states; None where transformers has no such model."""
