"""Saved graphs and checkpoint headers."""
