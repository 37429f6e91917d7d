"""Layers, written with the public ops."""
