"""What ops of torch are in declared kinds, by family."""

from . import elementwise, kernels, lookups, moves, products, reductions, windows  # noqa: F401  # they fill the table
from .table import TRANSLATIONS, Translation, translation, translation_of

__all__ = ["TRANSLATIONS", "Translation", "translation", "translation_of"]
