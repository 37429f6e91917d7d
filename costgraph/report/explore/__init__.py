"""The page with sliders: what a graph costs as data, and the small engine that reads it in a browser."""

from .page import Page, explore

__all__ = ["Page", "explore"]
