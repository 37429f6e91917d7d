"""Translations of aten ops into declared op kinds, by family."""

from . import (  # noqa: F401  # they fill the table
    contraction,
    elementwise,
    gradients,
    kernels,
    moves,
    reductions,
)
from .table import TRANSLATIONS, Translation, translation, translation_of

__all__ = ["TRANSLATIONS", "Translation", "translation", "translation_of"]
