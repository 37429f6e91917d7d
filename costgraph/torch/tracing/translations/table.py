"""Registry of translations from aten ops to declared op kinds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ....ir.graph import Tensor
from ....ops.registry import adding
from ..call import Call

__all__ = ["TRANSLATIONS", "Translation", "translation", "translation_of"]

#: Maps a call, with graph tensors as operands, to its results, adding ops to the open graph; None if no declared kind
#: covers these arguments.
Translation = Callable[[Call], "Tensor | Sequence[Tensor | None] | None"]

#: Translations by op name, or by name and overload, such as `pow.Tensor_Scalar`.
TRANSLATIONS: dict[str, Translation] = {}


def translation(*names: str) -> Callable[[Translation], Translation]:
    """Register a translation for ops, by name or by name and overload such as `pow.Tensor_Scalar`.

    Parameters
    ----------
    *names : str
        Names of aten ops, as in `Call.name`.

    Returns
    -------
    callable
        A decorator that returns the translation unchanged.

    Raises
    ------
    GraphError
        If a name is already registered.

    Examples
    --------
    >>> from costgraph.ops.elementwise import pointwise
    >>> from costgraph.torch.tracing.translations import TRANSLATIONS, translation
    >>> @translation("my_activation")
    ... def my_activation(call):
    ...     return pointwise("relu", call["self"]) * 2.0
    >>> TRANSLATIONS.pop("my_activation") is my_activation
    True
    """
    return adding(TRANSLATIONS, "a translation", *names, what="op of torch")


def translation_of(name: str, overload: str, tags: Collection[Any]) -> Translation | None:
    """Return the translation of an op, None if it has none; ops that torch tags as pointwise have a generic one."""
    specific = TRANSLATIONS.get(f"{name}.{overload}") or TRANSLATIONS.get(name)
    return TRANSLATIONS.get("pointwise") if specific is None and torch.Tag.pointwise in tags else specific
