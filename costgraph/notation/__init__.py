"""What users write: patterns of axes, formulas as text, and the arguments of public functions."""
