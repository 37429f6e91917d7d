"""Formulas: polynomials in sizes, their maxima and minima, and the conditions under which they hold."""
