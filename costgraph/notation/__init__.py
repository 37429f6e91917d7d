"""Input parsing and validation: patterns, formulas as text, and function arguments."""
