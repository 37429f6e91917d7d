"""Evaluation: bind sizes in formulas, for single points or arrays."""
