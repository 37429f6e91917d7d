"""Evaluation: bind sizes in formulas, for single points or arrays.

Start with these names:

- `evaluate`: `Formula`, `evaluate`, `compile`, `answer`
- `grid`: `sweep`
"""
