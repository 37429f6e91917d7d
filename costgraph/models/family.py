"""Model families: a declaration, presets for published models, and a configuration reader."""

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
