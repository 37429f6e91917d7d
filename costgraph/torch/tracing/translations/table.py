"""The table of translations: what ops of torch are in declared kinds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ....ir.graph import Tensor
from ....ops.registry import adding
from ..call import Call

__all__ = ["TRANSLATIONS", "Translation", "translation", "translation_of"]

#: From a call, its operands tensors of a graph, to what it returns: ops are added to the graph that is open. None
#: where these arguments are not what declared kinds say.
Translation = Callable[[Call], "Tensor | Sequence[Tensor | None] | None"]

#: Translations by the name of the op, or by name and overload such as `pow.Tensor_Scalar`.
TRANSLATIONS: dict[str, Translation] = {}


def translation(*names: str) -> Callable[[Translation], Translation]:
    """Register the translation of ops by name, each also with an overload behind a dot.

    Parameters
    ----------
    *names : str
        Names of aten ops as `Call.name` has them.

    Returns
    -------
    callable
        A decorator that leaves the translation as it is.

    Raises
    ------
    GraphError
        If a name has one already.

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
    """Return the translation of an op, None where it has none: one that torch calls pointwise is taken at its word."""
    found = TRANSLATIONS.get(f"{name}.{overload}") or TRANSLATIONS.get(name)
    return TRANSLATIONS.get("pointwise") if found is None and torch.Tag.pointwise in tags else found
