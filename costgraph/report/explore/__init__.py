"""Interactive HTML page with sliders for the sizes of a graph."""

from .page import Page, explore

__all__ = ["Page", "explore"]
