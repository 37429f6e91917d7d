"""What ops of torch are in declared kinds, by family."""

from . import (  # noqa: F401  # they fill the table
    elementwise,
    gradients,
    kernels,
    lookups,
    losses,
    moves,
    products,
    reductions,
    spectra,
    stated,
    turned,
    updates,
    windows,
)
from .table import TRANSLATIONS, Translation, translation, translation_of

__all__ = ["TRANSLATIONS", "Translation", "translation", "translation_of"]
